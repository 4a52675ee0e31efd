"""The commands on queues, messages and history: each through a real admin port and straight on a directory."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.admin import server as admin
from tests.cli.conftest import INTERRUPTIBLE
from tests.support.commands import WAYS, Run, reaching
from tests.support.ports import kept_ports

from veilmq.admin.api.views import shown_client
from veilmq.cli.options import duration_us as read_duration
from veilmq.cli.output import duration, instant, printable, time_text
from veilmq.cli.remote.tables import event_table, failure_text, message_blocks
from veilmq.cli.remote.workers import client_text
from veilmq.model.errors import DiskLow
from veilmq.store.directory import DATABASE
from veilmq.store.sqlite.disk.schema import VERSION
from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess


@pytest.fixture(params=WAYS)
def veilmq(request: pytest.FixtureRequest, run: Run, tmp_path: Path) -> Iterator[Run]:
    """`run` with the options that lead to one and the same empty store, either way."""
    directory = tmp_path / "data"
    if request.param == "directory":
        _, store = admin.open_directory(directory, None, admin.OPTIONS)
        store.close()
    with reaching(request.param, run, directory) as reached:
        yield reached


def test_a_message_lives_its_life(veilmq: Run) -> None:
    assert veilmq("queues", "create", "orders", "--visibility-timeout", "45s").out == "created orders\n"
    (sent,) = veilmq("send", "orders", "first", "--type", "order", "--attribute", "a=b=c", "--json").json
    (message,) = veilmq("receive", "orders", "--lease", "2m", "--json").json
    assert (message["id"], message["body"], message["type"]) == (sent["id"], "first", "order")
    assert message["attributes"] == [{"name": "a", "type": "String", "value": "b=c"}]
    assert message["due"] - message["first_received"] == 120_000_000
    assert veilmq("receive", "orders").err == "nothing visible\n"
    assert veilmq("extend", "orders", message["handle"], "--lease", "0").out == "extended\n"
    shown = veilmq("receive", "orders")
    assert "received 2 times" in shown.out
    stale = veilmq("delete", "orders", message["handle"])
    assert stale.code == 1
    assert "another receiver" in stale.err
    handle = shown.out.split("handle")[1].split()[0]
    assert veilmq("delete", "orders", handle).out == "deleted\n"
    traced = veilmq("trace", sent["id"], "--json").json[0]["events"]
    assert [event["kind"] for event in traced] == [
        "sent", "received", "released", "received", "delete_refused", "deleted",
    ]  # fmt: skip
    assert "delete refused" in veilmq("trace", sent["id"]).out
    assert veilmq("trace", "0" * 32).code == 1


def test_what_is_deleted_was_shown_whole(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    veilmq("send", "orders", "x" * 1_000 + "end")
    assert f"{'x' * 400} ...\n" in veilmq("peek", "orders").out
    assert f"{'x' * 1_000}end\n" in veilmq("receive", "orders", "--delete").out


def test_a_job_is_waited_for(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    veilmq("send", "orders", "--lines", stdin="a\n" * 300)
    (counted,) = veilmq("jobs", "start", "delete", "orders", "--dry-run", "--json").json
    assert (counted["status"], counted["matched"]) == ("completed", 300)
    (ended,) = veilmq("jobs", "start", "delete", "orders", "--yes", "--wait", "--json").json
    assert (ended["status"], ended["done"]) == ("completed", 300)
    assert veilmq("queues", "list", "--json").json[0]["counts"]["visible"] == 0
    veilmq("queues", "create", "small", "--message-bytes-max", "1024")
    veilmq("send", "orders", "x" * 2_000)
    failed = veilmq("jobs", "start", "move", "orders", "--to", "small", "--yes", "--wait")
    assert (failed.code, "veilmq: 1 message could not be moved: " in failed.err) == (1, True)
    veilmq("queues", "create", "dead")
    for name in ("work", "other"):
        veilmq("queues", "create", name, "--dead-letters", "dead", "--max-receives", "1")
    veilmq("send", "work", "x")
    for _ in range(2):
        veilmq("receive", "work", "--lease", "0")
    veilmq("queues", "delete", "work", "--yes")
    failed = veilmq("jobs", "start", "redrive", "dead", "--wait")
    said, advice = failed.err.splitlines()
    assert said == "veilmq: 1 message could not be moved: queue missing: one that messages came from"
    assert re.match(r"  `veilmq peek dead --[^`]+` shows where messages came from", advice)
    assert "dead letter of work" in veilmq("peek", "dead").out
    moving = {"failure": "queue missing", "destination": {"name": "there"}}
    assert failure_text(moving) == "queue missing: there"


def test_long_lines_go_in_smaller_batches(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    sent = veilmq("send", "orders", "--lines", stdin=("x" * 900_000 + "\n") * 10)
    assert (sent.code, sent.out) == (0, "sent 10 messages\n")


@for_each(
    ("arguments", "told"),
    [
        (("send", "orders", "x", "--id", "\u20ac"), "--id: expected 1 to 128 visible ASCII characters"),
        (("send", "orders", "x", "--id", "a\nb"), "--id: expected 1 to 128 visible ASCII characters"),
        (("queues", "failures", "orders", "--all"), "--prefix and --all are for several queues: leave QUEUE out"),
        (("queues", "failures", "orders", "--last", "9d"), "--last: expected at most 1d, not 9d"),
        (("quarantine", "drop", "orders", "x", "--yes"), "MESSAGE_ID: 32 hexadecimal digits, or a UUID, are needed"),
        (("jobs", "show", "xyz"), "JOB_ID: "),
        (("workers", "--messages", "x"), "Invalid value for '--messages': 'x' is not a valid whole number."),
        (("workers", "--messages", "21"), "--messages: expected 0 to 20, not 21"),
        (("events", "--last", "0"), "--last: expected at least 1, not 0"),
    ],
)
def test_a_wrong_option_is_named(veilmq: Run, arguments: tuple[str, ...], told: str) -> None:
    veilmq("queues", "create", "orders")
    refused = veilmq(*arguments)
    said = refused.err.replace("\nError: ", "\nveilmq: ")
    assert (refused.code, f"\nveilmq: {told}" in f"\n{said}") == (2, True), refused.err


def test_whether_a_timeout_is_right(veilmq: Run) -> None:
    assert veilmq("queues", "create", "jobs", "--visibility-timeout", "1h").code == 0
    nothing = veilmq("queues", "timeout", "jobs")
    assert nothing.out.startswith("visibility timeout of 1 h. 0 messages are known to have been worked on to the end")
    veilmq("send", "jobs", "--lines", stdin="a\n" * 40)
    veilmq("receive", "jobs", "--count", "40", "--delete")
    shown = veilmq("queues", "timeout", "jobs", "--timeout", "90s").out
    (told,) = veilmq("queues", "timeout", "jobs", "--timeout", "90s", "--json").json
    assert (told["advice"], told["messages"], told["asked"]["timeout_us"]) == ("lower", 40, 90_000_000)
    assert "work of 40 messages since" in shown
    assert "\nto change it: veilmq queues set jobs --visibility-timeout 5s\n" in shown
    assert "leases: 40 ended, 0 ran out, 0 were extended" in shown
    assert "waits after a crash" in shown
    assert "0.00% to 8.81%" in shown, "forty messages were all shorter"
    assert "under 5 s it waits" in told["why"]
    wrong = veilmq("queues", "timeout", "jobs", "--timeout", "8d")
    assert wrong.code == 2
    assert "--timeout: Expected at most 7d" in wrong.err


def test_queues_whose_timeout_is_clearly_wrong(veilmq: Run) -> None:
    for name in ("jobs", "calm"):
        veilmq("queues", "create", name, "--visibility-timeout", "1h")
        veilmq("send", name, "--lines", stdin="a\n" * 41)
        veilmq("receive", name, "--count", "40", "--delete")
    assert veilmq("receive", "jobs").code == 0
    asking = ("queues", "worst", "--by", "timeout")
    # Until it is held for longer than the others were.
    found = next(queues for _ in range(100) if (queues := veilmq(*asking, "--json").json[0]["queues"]))
    assert [(each["name"], each["wrong"], each["timeout_us"]) for each in found] == [
        ("jobs", "too_long", 3_600_000_000)
    ]
    shown = veilmq(*asking, "--all").out
    assert "000000000000/us-east-1/jobs" in shown
    assert "1 message is held for longer than any work took" in shown
    assert "calm" not in shown


def test_a_message_is_sent_from_a_template(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    options = ("--type", "order", "--delay", "1h", "--attribute", "a=b=c")
    assert veilmq("templates", "keep", "orders", "paid", "the body", *options).out == "kept paid\n"
    assert veilmq("templates", "keep", "orders", "paid", "-", *options, stdin="from stdin").out == "replaced paid\n"
    listed = veilmq("templates", "list", "orders").out
    assert [word for word in ("paid", "order", "from stdin") if word not in listed] == []
    (kept,) = veilmq("templates", "list", "orders", "--json").json
    assert (kept["name"], kept["message"]["delay_us"]) == ("paid", 3_600_000_000)
    assert veilmq("send", "orders", "--template", "paid", "--delay", "0s").code == 0
    assert veilmq("send", "orders", "another", "--template", "paid", "--type", "other", "--delay", "0s").code == 0
    shown = veilmq("peek", "orders", "--json").json
    assert [(each["body"], each["type"]) for each in shown] == [("from stdin", "order"), ("another", "other")]
    assert [each["attributes"][0]["value"] for each in shown] == ["b=c", "b=c"]
    assert veilmq("send", "orders", "--template", "none").code == 1
    assert veilmq("templates", "drop", "orders", "paid").out == "dropped paid\n"
    assert veilmq("templates", "drop", "orders", "paid").code == 2
    assert veilmq("templates", "list", "orders", "--json").out == ""


def test_a_command_that_is_repeated_with_its_id_acts_once(veilmq: Run) -> None:
    for _ in range(2):
        assert veilmq("queues", "create", "orders", "--id", "make").out == "created orders\n"
        assert veilmq("send", "orders", "one", "--id", '"\\"').code == 0
    lines = "\n".join(str(number) for number in range(150))
    for _ in range(2):
        assert veilmq("send", "orders", "--lines", "--id", "many", stdin=lines).code == 0
    assert veilmq("purge", "orders", "--yes", "--id", "p").out == "purged orders: 151 messages\n"
    assert veilmq("send", "orders", "later").code == 0
    assert veilmq("purge", "orders", "--yes", "--id", "p").out == "purged orders: 151 messages\n"
    assert veilmq("purge", "orders", "--yes").out == "purged orders: 1 message\n"
    other = veilmq("queues", "delete", "orders", "--yes", "--id", "p")
    assert (other.code, "--id: this id was used for another call" in other.err) == (1, True)
    assert veilmq("queues", "set", "orders", "--tag", "x=1", "--id", "t").code == 0
    assert veilmq("queues", "set", "orders", "--tag", "y=1").code == 0
    again = veilmq("queues", "set", "orders", "--tag", "x=1", "--id", "t")
    assert (again.code, "such as a queue's tags, has changed since" in again.err) == (1, True)
    assert veilmq("purge", "orders", "--yes", "--id", "a b").code == 2
    told = [each["detail"]["id"] for each in veilmq("events", "--json", "--kind", "operator_command").json]
    assert told[:5] == ["make", '"\\"', "many", "many.2", "p"]


def test_jobs_are_started_shown_listed_and_cancelled(veilmq: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("orders", "other"):
        veilmq("queues", "create", name)
    for body in ("one", "two", "three"):
        veilmq("send", "orders", body, "--type", "t" if body != "one" else "o")
    (job,) = veilmq("jobs", "start", "delete", "orders", "--type", "t", "--yes", "--id", "j", "--json").json
    assert (job["act"], job["filter"], job["total"], job["dry_run"]) == ("delete", {"type": "t"}, 3, False)
    done, end = job, time.monotonic() + 60
    while done["status"] != "completed" and time.monotonic() < end:
        veilmq("queues", "create", "other")  # on a directory, each command that writes carries a job on
        done = veilmq("jobs", "show", job["id"], "--json").json[0]
    assert (done["seen"], done["matched"], done["done"]) == (3, 2, 2)
    again = veilmq("jobs", "start", "delete", "orders", "--type", "t", "--yes", "--id", "j", "--json").json
    assert again == [job]
    assert veilmq("jobs", "start", "delete", "orders").code == 2
    assert veilmq("jobs", "start", "move", "orders", "--yes").code == 2
    assert veilmq("jobs", "show", "0" * 32).code == 1
    (purge,) = veilmq("jobs", "start", "purge", "orders", "--yes", "--json").json
    assert (purge["status"], purge["done"]) == ("completed", 1)
    listed = veilmq("jobs", "list").out
    assert listed.index(purge["id"]) < listed.index(job["id"])
    assert "3 of 3" in listed
    counted = veilmq("jobs", "start", "move", "orders", "--to", "other", "--json")
    assert counted.code == 0
    refused = veilmq("jobs", "cancel", job["id"])
    assert (refused.code, "only a running job" in refused.err) == (2, True)
    assert veilmq("jobs", "list", "--json", "--prefix", "none").out == ""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    veilmq("send", "other", "four")
    monkeypatch.setattr("veilmq.cli.remote.messages.jobs.time", SimpleNamespace(sleep=interrupt))
    left = veilmq("jobs", "start", "delete", "other", "--yes", "--wait")
    (job, *_) = veilmq("jobs", "list", "--json").json
    assert (left.code, f"job {job['id']} has not ended: " in left.err) == (130, True)
    assert re.search(f"`veilmq jobs show {job['id']} --wait --(data|admin) ", left.err)


def test_a_message_is_found_by_its_id(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    (sent,) = veilmq("send", "orders", "the body", "--type", "order", "--json").json
    shown = veilmq("find", sent["id"])
    assert "queue   000000000000/us-east-1/orders\n  state   visible, expires " in shown.out
    assert "the body" not in shown.out
    (message,) = veilmq("receive", "orders", "--json").json
    assert "state   in flight until " in veilmq("find", sent["id"]).out
    assert veilmq("find", sent["id"], "--body", "--json").json[0]["places"][0]["body"] == "the body"
    assert veilmq("delete", "orders", message["handle"]).code == 0
    gone = veilmq("find", sent["id"])
    assert gone.code == 1
    assert f"{sent['id']} is in no queue: deleted at " in gone.err
    assert veilmq("find", "0" * 32).code == 1
    assert [event["kind"] for event in veilmq("trace", sent["id"], "--json").json[0]["events"]] == [
        "sent", "received", "peeked", "deleted",
    ]  # fmt: skip


def test_messages_are_listed_by_what_they_are(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    sent = [
        veilmq("send", "orders", body, "--type", kind, "--json").json[0]["id"]
        for body, kind in (("one", "a"), ("two", "b"), ("three", "b"))
    ]

    def listed(*arguments: str) -> list[str]:
        return [each["id"] for each in veilmq("messages", "orders", "--json", *arguments).json]

    assert listed() == sent
    assert listed("--type", "b") == sent[1:]
    assert listed("--type", "b", "--text", "thr") == sent[2:]
    assert listed("--limit", "2") == sent[:2]
    assert veilmq("messages", "orders", "--limit", "2").err == "there may be more than these 2: --limit N lists more\n"
    assert veilmq("messages", "orders", "--limit", "4").err == ""
    assert listed("--older", "1h") == listed("--hidden") == listed("--receives", "1") == []
    veilmq("receive", "orders")
    assert listed("--hidden") == sent[:1]
    assert "in flight" in veilmq("messages", "orders", "--hidden").out
    nothing = veilmq("messages", "orders", "--type", "c")
    assert (nothing.out, nothing.err, nothing.code) == ("", "no such message\n", 0)
    assert veilmq("messages", "missing").code == 1


def test_settings_are_set_and_listed(veilmq: Run) -> None:
    veilmq("queues", "create", "failed")
    arguments = ("--delay", "1m", "--dead-letters", "failed", "--max-receives", "3", "--tag", "team=billing")
    assert veilmq("queues", "create", "orders", *arguments).code == 0
    assert "exists with these settings" in veilmq("queues", "create", "orders", *arguments).out
    other = veilmq("queues", "create", "orders", "--delay", "2m")
    assert other.code == 1
    assert "queues set" in other.err
    changed = veilmq("queues", "set", "orders", "--retention", "1d", "--wait", "500ms", "--json").json[0]["settings"]
    assert (changed["retention_us"], changed["wait_us"], changed["delay_us"]) == (86_400_000_000, 500_000, 60_000_000)
    assert changed["redrive"]["receive_count_max"] == 3
    listed = veilmq("queues", "list")
    assert "failed after 3" in listed.out
    assert [queue["name"] for queue in veilmq("queues", "list", "--json", "--prefix", "o").json] == ["orders"]
    assert veilmq("queues", "set", "orders", "--dead-letters", "", "--json").json[0]["settings"]["redrive"] is None
    assert "account" in veilmq("queues", "list", "--all").out
    elsewhere = veilmq("queues", "list", "--account", "111111111111")
    assert (elsewhere.out, elsewhere.code) == ("", 0)


def test_what_is_not_named_stays(veilmq: Run) -> None:
    for name in ("failed", "other"):
        veilmq("queues", "create", name)
    tags = ("--tag", "a=1", "--tag", "b=2")
    veilmq("queues", "create", "orders", "--dead-letters", "failed", "--max-receives", "3", *tags)

    def settings(*arguments: str) -> tuple[Any, Any]:
        found = veilmq("queues", "set", "orders", *arguments, "--json").json[0]["settings"]
        redrive = found["redrive"]
        return redrive and (redrive["target"]["name"], redrive["receive_count_max"]), found["tags"]

    assert settings("--dead-letters", "other") == (("other", 3), {"a": "1", "b": "2"})
    assert settings("--max-receives", "7") == (("other", 7), {"a": "1", "b": "2"})
    assert settings("--tag", "c=3", "--tag", "a=0") == (("other", 7), {"a": "0", "b": "2", "c": "3"})
    assert settings("--untag", "b", "--untag", "none", "--tag", "d=") == (("other", 7), {"a": "0", "c": "3", "d": ""})
    both = veilmq("queues", "set", "orders", "--tag", "a=1", "--untag", "a")
    assert (both.code, "--untag a" in both.err) == (2, True)
    (seen,) = veilmq("queues", "list", "--json", "--prefix", "orders").json
    for code in (0, 1):
        changed = veilmq("queues", "set", "orders", "--delay", "1s", "--if-version", seen["version"])
        assert (changed.code, "someone else changed queue orders" in changed.err) == (code, code == 1)
    assert settings("--dead-letters", "")[0] is None
    assert settings("--dead-letters", "failed")[0] == ("failed", 5)


def test_no_receives_are_no_number_of_receives(veilmq: Run) -> None:
    veilmq("queues", "create", "failed")
    for arguments in (("failed", "--max-receives", "0"), ("", "--max-receives", "3")):
        refused = veilmq("queues", "create", "orders", "--dead-letters", *arguments)
        assert (refused.code, refused.out) == (2, ""), refused
    assert [queue["name"] for queue in veilmq("queues", "list", "--json").json] == ["failed"]


def test_a_trace_shows_what_took_all_messages_away(veilmq: Run) -> None:
    veilmq("queues", "create", "dead")
    veilmq("queues", "create", "orders", "--dead-letters", "dead", "--max-receives", "1")
    ids = {body: veilmq("send", "orders", body, "--json").json[0]["id"] for body in ("moved", "done", "stays")}
    veilmq("receive", "orders", "--lease", "0")
    veilmq("receive", "orders", "--delete", "--lease", "1m")
    veilmq("receive", "orders", "--count", "2", "--lease", "1m")  # `moved` goes to the dead-letter queue on the way
    for _ in range(2):
        veilmq("purge", "orders", "--yes")
    late = veilmq("send", "orders", "late", "--json").json[0]["id"]
    veilmq("purge", "dead", "--yes")
    veilmq("queues", "delete", "orders", "--yes")

    def kinds(message: str) -> list[tuple[str, str]]:
        (found,) = veilmq("trace", message, "--json").json
        assert found["complete"]
        return [(event["kind"], event["queue"]) for event in found["events"]]

    assert kinds(ids["moved"])[-2:] == [("dead_lettered", "orders"), ("purged", "dead")]
    assert kinds(ids["done"])[-1] == ("deleted", "orders")
    assert kinds(ids["stays"]) == [("sent", "orders"), ("received", "orders"), ("purged", "orders")]
    assert kinds(late) == [("sent", "orders"), ("queue_deleted", "orders")]
    shown = veilmq("trace", ids["stays"]).out
    assert "purged" in shown
    assert re.search(r"with 1 message\b", shown)


def test_dead_letters_are_put_back(veilmq: Run, capsys: pytest.CaptureFixture[str]) -> None:
    veilmq("queues", "create", "dead")
    veilmq("queues", "create", "orders", "--dead-letters", "dead", "--max-receives", "1")
    veilmq("queues", "create", "elsewhere")
    for body in ("a", "b"):
        veilmq("send", "orders", body)
    for _ in range(4):
        veilmq("receive", "orders", "--lease", "0")
    assert "move task is under way" in veilmq("moves", "cancel", "dead").err
    assert veilmq("moves", "start", "orders").code == 2
    assert "nowhere" in veilmq("moves", "start", "dead", "--to", "nowhere").err
    assert "--rate: " in veilmq("moves", "start", "dead", "--rate", "501").err
    assert "dead letter of orders after 1 receive\n" in veilmq("peek", "dead").out
    pushed = veilmq("peek", "dead", "--json").json[0] | {"dead_letter_receives": 0}
    message_blocks([pushed])
    assert "dead letter of orders\n" in capsys.readouterr().out
    begun = veilmq("moves", "start", "dead")
    assert (begun.code, begun.out.partition(":")[0]) == (0, "moving 2 messages of dead to where they came from")
    bodies = [veilmq("receive", "orders", "--wait", "20s", "--delete", "--json").json[0]["body"] for _ in range(2)]
    assert bodies == ["a", "b"]
    while (task := veilmq("moves", "list", "--json").json[0])["status"] == "running":
        pass  # it has still to see that nothing is left
    assert task["moved"] == 2
    veilmq("send", "dead", "--lines", stdin="x\n" * 50)
    (begun_json,) = veilmq("moves", "start", "dead", "--to", "elsewhere", "--rate", "1", "--json").json
    assert (begun_json["to_move"], begun_json["destination"]["name"]) == (50, "elsewhere")
    cancelled = veilmq("moves", "cancel", "dead", "--id", "c")
    assert veilmq("moves", "cancel", "dead", "--id", "c") == cancelled
    assert cancelled.code == 0
    assert cancelled.out.endswith(" of 50 messages were moved\n")
    none = veilmq("moves", "cancel", "dead")
    assert none.code == 1
    assert veilmq("moves", "cancel", "dead", "--id", "another") == none


def test_lines_of_stdin_are_messages(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    bodies = [f"line {number}" for number in range(250)]
    assert veilmq("send", "orders", "--lines", stdin="\n".join(bodies) + "\n").out == "sent 250 messages\n"
    assert veilmq("send", "orders", stdin="two\nlines").code == 0
    assert veilmq("send", "orders", "--lines", stdin="crlf\r\n\r\r\n\r\nlast\r").out == "sent 4 messages\n"
    seen: list[str] = []
    while messages := veilmq("receive", "orders", "--count", "100", "--delete", "--json").json:
        seen += [message["body"] for message in messages]
    assert seen == [*bodies, "two\nlines", "crlf", "\r", "", "last\r"]
    assert veilmq("queues", "list", "--json").json[0]["counts"]["total"] == 0


def test_what_cannot_be_undone_needs_a_yes(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    veilmq("send", "orders", "a")
    for command in (("purge", "orders"), ("queues", "delete", "orders")):
        refused = veilmq(*command)
        assert refused.code == 2
        assert "--yes" in refused.err
    assert veilmq("peek", "orders", "--json").json[0]["body"] == "a"
    assert veilmq("purge", "orders", "--yes").out == "purged orders: 1 message\n"
    assert veilmq("queues", "delete", "orders", "--yes").code == 0
    assert veilmq("queues", "delete", "orders", "--yes").code == 1


def test_events_are_printed_from_an_offset_on(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    for number in range(5):
        veilmq("send", "orders", str(number))
    events = veilmq("events", "--json").json
    assert [event["kind"] for event in events] == ["queue_created", "operator_command", *["sent"] * 5]
    assert veilmq("events", "--json", "--from", "2", "--limit", "3").json == events[2:5]
    assert veilmq("events", "--from", "next").out == ""
    assert veilmq("events", "--json", "--last", "2").json == events[-2:]
    assert veilmq("events", "--json", "--last", "2", "--limit", "1").json == events[-2:-1]
    assert veilmq("events", "--json", "--last", "1000").json == events
    assert veilmq("events", "--last", "2", "--from", "2").code == 2
    assert veilmq("events", "--last", "0").code == 2
    assert "queue created" in veilmq("events", "--limit", "1").out
    beyond = veilmq("events", "--from", "8")
    assert beyond.code == 2
    assert "ends at offset 7" in beyond.err


def test_a_queue_that_never_was_is_told_from_one_without_events(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    veilmq("queues", "create", "gone")
    veilmq("queues", "delete", "gone", "--yes")
    unknown = "veilmq: there is no queue order{}, and no event of one in the history[.] "
    unknown += "`veilmq queues list --all --(data|admin) [^`]+` shows all[.]\n"
    asked = veilmq("events", "--queue", "order")
    assert (asked.code, asked.out) == (0, "")
    assert re.fullmatch("no such events\n" + unknown.format(""), asked.err)
    assert re.fullmatch(unknown.format(""), veilmq("events", "--queue", "order", "--last", "5", "--json").err)
    where = " in account 000000000000, region eu-west-1"
    elsewhere = veilmq("events", "--queue", "orders", "--region", "eu-west-1", "--json").err
    assert re.fullmatch(unknown.format("s" + where), elsewhere)
    for queue in ("orders", "gone"):
        found = veilmq("events", "--queue", queue, "--from", "next")
        assert (found.code, found.out, found.err) == (0, "", "no such events\n")
        assert veilmq("events", "--queue", queue).err == ""


def test_a_queue_that_stands_still_says_behind_what(veilmq: Run) -> None:
    veilmq("queues", "create", "orders.fifo", "--fifo")
    for number, group in enumerate("aab"):
        veilmq("send", "orders.fifo", str(number), "--group", group, "--deduplication-id", str(number))
    assert veilmq("queues", "show", "orders.fifo").out.startswith("3 visible (none blocked), 0 in flight, 0 delayed\n")
    (held,) = veilmq("receive", "orders.fifo", "--lease", "5m", "--json").json
    shown = veilmq("queues", "show", "orders.fifo")
    assert shown.out.startswith("2 visible (1 blocked, in 1 group), 1 in flight, 0 delayed\n")
    assert re.search(rf"^ a +1 +\d.* {held['id']} +\w.*\(admin, admin\)", shown.out, re.MULTILINE), shown.out
    (found,) = veilmq("queues", "show", "orders.fifo", "--json").json
    assert [each["message"]["id"] for each in found["blocked"]["held"]] == [held["id"]]
    worst = veilmq("queues", "worst", "--by", "blocked")
    assert re.search(r"orders\.fifo +\d+\S* m?s +2 +1 +0 ", worst.out), worst.out
    lines = veilmq("messages", "orders.fifo").out.splitlines()
    (blocked,) = [line for line in lines if "blocked" in line]
    assert blocked.rstrip().endswith(held["id"])
    assert f"blocked by  {held['id']} of its group, in flight" in veilmq("find", blocked.split()[0]).out
    veilmq("queues", "create", "plain")
    assert veilmq("queues", "show", "plain").out.startswith("0 visible, 0 in flight, 0 delayed\n")


def test_a_message_is_found_by_its_deduplication_id(veilmq: Run) -> None:
    for name in ("a.fifo", "b.fifo"):
        veilmq("queues", "create", name, "--fifo")
        veilmq("send", name, "x", "--group", "g", "--deduplication-id", "both")
    sent = veilmq("send", "a.fifo", "y", "--group", "g", "--deduplication-id", "one", "--json").json[0]["id"]
    assert veilmq("find", "one", "--json").json[0]["places"][0]["id"] == sent
    assert veilmq("trace", "one", "--json").json[0]["message"] == sent
    for command in ("find", "trace"):
        several = veilmq(command, "both")
        assert (several.code, several.err.splitlines()[0]) == (1, "veilmq: 2 messages have this deduplication id")
        assert "a.fifo" in several.out
        assert "b.fifo" in several.out
        assert [each["name"] for each in veilmq(command, "both", "--json").json] == ["b.fifo", "a.fifo"]
        assert veilmq(command, "both", "--queue", "b.fifo").code == 0
        none = veilmq(command, "none")
        assert (none.code, none.err) == (1, "veilmq: no message has the deduplication id none\n")
    for command in ("find", "trace"):
        assert sent in veilmq(command, sent, "--queue", "a.fifo", "--json").out
        assert veilmq(command, sent, "--queue", "b.fifo").code == 1
    for command in ("find", "trace"):
        elsewhere = veilmq(command, sent, "--queue", "c.fifo")
        assert (elsewhere.code, elsewhere.err.splitlines()[0]) == (
            1, f"veilmq: message {sent} is not in c.fifo, and was not there"
        )  # fmt: skip
    veilmq("queues", "create", "dead.fifo", "--fifo")
    veilmq("queues", "set", "a.fifo", "--dead-letters", "dead.fifo", "--max-receives", "1")
    moved = veilmq("send", "a.fifo", "m", "--group", "m", "--deduplication-id", "m", "--json").json[0]["id"]
    for _ in range(2):
        veilmq("receive", "a.fifo", "--count", "10", "--lease", "0s")
    for queue in ("a.fifo", "dead.fifo"):
        assert veilmq("find", moved, "--queue", queue, "--json").json[0]["places"][0]["name"] == "dead.fifo"
    bridged = veilmq("send", "b.fifo", "y", "--group", "h", "--deduplication-id", sent, "--json").json[0]["id"]
    assert veilmq("trace", sent, "--queue", "b.fifo", "--json").json[0]["message"] == bridged
    assert veilmq("trace", sent, "--queue", "a.fifo", "--json").json[0]["message"] == sent
    nothing = veilmq("trace", "")
    assert (nothing.code, nothing.err) == (2, "veilmq: MESSAGE_ID: expected an id, not an empty text\n")
    uuid = "7d444840-9dc0-11d1-b245-5ffdce74fad2"
    assert "no event of" in veilmq("find", uuid).err
    veilmq("send", "a.fifo", "z", "--group", "g", "--deduplication-id", uuid)
    assert veilmq("find", uuid).code == 0, "an id in this form may be either"


def test_dead_letters_are_listed_with_where_they_went(veilmq: Run) -> None:
    veilmq("queues", "create", "dead")
    veilmq("queues", "create", "orders", "--dead-letters", "dead", "--max-receives", "1")
    veilmq("send", "orders", "a")
    for _ in range(2):
        veilmq("receive", "orders", "--lease", "0")
    shown = veilmq("queues", "worst", "--by", "dead_lettered").out
    assert re.search(r"^ orders +1 .* dead *$", shown, re.MULTILINE), shown


def test_holders_of_a_queue(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    veilmq("send", "orders", "--lines", stdin="a\nb\nc\n")
    assert veilmq("queues", "holders", "orders").err == "nothing is in flight\n"
    veilmq("receive", "orders", "--count", "2")
    (found,) = veilmq("queues", "holders", "orders", "--json").json
    assert [each["receive_count"] for each in found["holders"]] == [1, 1]
    assert (found["after"], found["waiters"]["count"]) == (None, 0)
    shown = veilmq("queues", "holders", "orders", "--client", "command line", "--limit", "1")
    assert found["holders"][0]["id"] in shown.out
    assert found["holders"][1]["id"] not in shown.out
    assert "receives that wait: 0" in shown.out
    assert "there may be more" in shown.err
    assert veilmq("queues", "holders", "orders", "--client", "nobody").err == "nothing is in flight there\n"
    assert veilmq("queues", "holders", "none").code == 1


BOTO3 = (
    "Boto3/1.44.8 md/Botocore#1.44.8 ua/2.1 os/linux#6.1 md/arch#x86_64 lang/python#3.11.2 md/pyimpl#CPython "
    "exec-env/AWS_ECS_FARGATE m/E,e,Z,b,N cfg/retry-mode#standard app/mailer Botocore/1.44.8"
)


def test_workers(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    veilmq("send", "orders", "a")
    veilmq("receive", "orders")
    shown = veilmq("workers", "--json")
    if shown.code:
        assert re.fullmatch(r"veilmq: no server runs on (\S+)\n  .* a look: veilmq serve --data \1\n", shown.err)
        return
    (worker,) = shown.json[0]["workers"]
    assert (worker["received"], worker["holds"]) == (1, 1)
    assert "command line" in veilmq("workers").out
    pushing = shown_client("push", "push", "")
    assert client_text(pushing) == "the server's pushes"
    assert client_text(shown_client("sqs", "any", BOTO3)) == "Boto3/1.44.8 app/mailer Botocore/1.44.8 (sqs, any)"
    for whole in ("api/2.1", "cfg/sync orders-api/1.0", "ua/2.1 m/E"):
        assert client_text(shown_client("sqs", "any", whole)) == f"{whole} (sqs, any)"
    assert veilmq("workers", "--client", "nobody").err == "no worker was seen\n"
    (worker,) = veilmq("workers", "--queue", "orders", "--sort", "holds", "--messages", "5", "--json").json[0][
        "workers"
    ]
    assert worker["messages"][0]["id"] in veilmq("workers", "--messages", "1").out


def test_rates_of_listed_queues(veilmq: Run) -> None:
    for name in ("orders", "idle"):
        veilmq("queues", "create", name)
    veilmq("send", "orders", "--lines", stdin="a\n" * 40)
    idle, orders = veilmq("queues", "list", "--rates", "--json").json
    assert orders["rates"]["per_second"]["sent"] > idle["rates"]["per_second"]["sent"] == 0
    assert sum(each or 0 for each in orders["rates"]["sent"]) == 40
    assert "sent/s" in veilmq("queues", "list", "--rates").out
    assert "sent/s" not in veilmq("queues", "list").out


def test_accounts(veilmq: Run) -> None:
    veilmq("queues", "create", "orders")
    shown = veilmq("accounts", "--json")
    if shown.code:
        assert "veilmq serve --data " in shown.err
        return
    (account,) = shown.json[0]["accounts"]
    assert (account["id"], account["queues"], account["keys"]) == ("000000000000", 1, [])
    plain = veilmq("accounts")
    assert "1 of 100000" in plain.out
    assert "any key is accepted" in plain.err
    assert veilmq("accounts", "--account", account["id"], "--json").json == shown.json
    other = veilmq("accounts", "--account", "999999999999")
    assert (other.code, "no account 999999999999" in other.err) == (1, True)
    assert veilmq("accounts", "--account", "1").code == 2


def test_failures_of_a_queue(veilmq: Run) -> None:
    veilmq("queues", "create", "failed")
    veilmq("queues", "create", "orders", "--dead-letters", "failed", "--max-receives", "1")
    assert veilmq("queues", "failures", "orders").err == "nothing failed\n"
    veilmq("send", "orders", "a")
    (message,) = veilmq("receive", "orders", "--json").json
    veilmq("extend", "orders", message["handle"], "--lease", "0")
    veilmq("receive", "orders")
    (found,) = veilmq("queues", "failures", "orders", "--last", "10m", "--json").json
    assert [(each["kind"], each["count"]) for each in found["causes"]] == [("dead_lettered", 1)]
    assert message["id"] in veilmq("queues", "failures", "orders").out
    assert veilmq("queues", "failures", "orders", "--last", "2d").code == 2
    assert veilmq("queues", "failures", "none").code == 1
    shown = veilmq("queues", "failures").out
    assert message["id"] in shown
    assert "orders (1)" in shown
    (found,) = veilmq("queues", "failures", "--all", "--json").json
    assert [each["name"] for each in found["causes"][0]["queues"]] == ["orders"]
    assert veilmq("queues", "failures", "--prefix", "other").err == "nothing failed\n"


def test_events_are_chosen_and_runs_are_folded(veilmq: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for queue in ("orders", "others"):
        veilmq("queues", "create", queue)
        veilmq("send", queue, "--lines", stdin="a\n" * 20)
    (message,) = veilmq("receive", "orders", "--json").json
    for _ in range(4):
        veilmq("extend", "orders", message["handle"], "--lease", "1m")
    events = veilmq("events", "--json").json
    sent = [event for event in events if event["kind"] == "sent"]
    assert veilmq("events", "--json", "--kind", "sent").json == sent
    assert veilmq("events", "--json", "--kind", "sent", "--queue", "others", "--limit", "3").json == sent[20:23]
    assert veilmq("events", "--json", "--kind", "sent", "--last", "21").json == sent[-21:]
    assert veilmq("events", "--json", "--queue", "others", "--region", "eu-west-1").json == []
    own = [event for event in events if event["message"] == message["id"]]
    assert veilmq("events", "--json", "--message", message["id"].replace("-", "")).json == own
    assert message["id"] in veilmq("events", "--kind", "received").out
    assert "extended, 4 times in" in veilmq("trace", message["id"]).out
    sentence, _, table = veilmq("trace", message["id"], "--all").out.partition("\n")
    assert sentence.startswith("In flight: command line received it at ")
    assert table.count("extended") == 4
    assert len(veilmq("trace", message["id"], "--json").json[0]["events"]) == 6
    assert "is none of content_updated, " in veilmq("events", "--kind", "nope").err
    event_table([sent[0] | {"protocol": "sqs", "principal": "any", "client": BOTO3}])
    assert " sqs any Boto3/1.44.8 app/mailer Botocore/1.44.8 " in capsys.readouterr().out
    assert " UTC" in veilmq("peek", "orders").out
    listed = veilmq("queues", "list", "--json").json
    assert all(0 < queue["oldest_age_us"] < 10**9 for queue in listed)
    assert "oldest" in veilmq("queues", "list").out


@for_each(
    ("arguments", "code", "says"),
    [
        (("send", "none", "a"), 1, "queues create"),
        (("send", "none.fifo", "a", "--group", "g"), 1, "`veilmq queues create none.fifo --fifo --"),
        (("send", "not a name", "a"), 2, "QUEUE: Expected"),
        (("send", "orders", "a", "--priority", "17"), 2, "--priority: Expected at most 16\n"),
        (("send", "orders", "a", "--attribute", "x"), 2, "NAME=VALUE"),
        (("send", "orders", "a", "--lines"), 2, "leave BODY out"),
        (("receive", "orders", "--wait", "1 week"), 2, "--wait: expected a time"),
        (("queues", "at", "orders", "2026-13-01"), 2, "WHEN: expected an instant such as 2026-11-26T10:02:31Z, or how"),
        (("receive", "orders", "--wait", "31s"), 2, "--wait: Expected at most 30s\n"),
        (("send", "orders", "a", "--ttl", "0"), 2, "--ttl: Expected at least 1s\n"),
        (("send", "orders", "a", "--attribute", "x=\x01"), 2, "--attribute: "),
        (("queues", "create", "x", "--retention", "30d"), 2, "--retention: Expected at most 15d\n"),
        (("queues", "create", "x", "--dead-letters", "a b"), 2, "--dead-letters: "),
        (("queues", "set", "orders", "--tag", "=x"), 2, "--tag"),
        (("queues", "create", "orders", "--delay", "1s"), 1, "/orders exists with another --delay\n"),
        (("queues", "create", "orders", "--dead-letters", "x"), 1, "another --dead-letters or --max-receives\n"),
        (("templates", "drop", "orders", "x"), 2, "NAME: the queue has no template"),
        (("templates", "drop", "a b", "x"), 2, "QUEUE: Expected"),
        (("jobs", "start", "redrive", "orders"), 2, "QUEUE: it is nobody's dead-letter queue"),
        (("jobs", "start", "purge", "orders", "--type", "x", "--yes"), 2, "ACT: a purge deletes all messages"),
        (("delete", "orders", "x"), 1, "receipt handle is invalid"),
        (("queues", "set", "orders"), 2, "nothing to change"),
        (("queues", "set", "orders", "--max-receives", "3"), 2, "--dead-letters"),
        (("queues", "create", "x.fifo"), 2, "Type: veilmq queues create x.fifo --fifo"),
        (("queues", "create", "x", "--fifo"), 2, "Type: veilmq queues create x.fifo --fifo"),
        (("trace", "xyz"), 1, "no message has the deduplication id xyz"),
        (("trace", "x" * 129), 2, "128"),
        (("events", "--from", "-1"), 2, "--from"),
        (("queues", "list", "--account", "1"), 2, "account"),
    ],
)
def test_a_refusal_says_what_is_wrong(veilmq: Run, arguments: tuple[str, ...], code: int, says: str) -> None:
    veilmq("queues", "create", "orders")
    said = veilmq(*arguments)
    assert (said.code, said.out) == (code, ""), said
    assert says in said.err


def test_without_a_server_the_next_step_is_named(run: Run) -> None:
    with admin.socket.socket() as bound:  # nobody else can have the port, and nobody listens on it
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        said = run("queues", "list", "--admin", f"127.0.0.1:{port}")
    assert said.code == 4
    assert f"no server answers on 127.0.0.1:{port}" in said.err
    assert f"`veilmq serve --admin 127.0.0.1:{port}`" in said.err
    assert "--data" in said.err
    nowhere = run("queues", "list", "--admin", "nowhere.invalid:9325")
    assert nowhere.code == 4
    assert re.fullmatch(r"veilmq: nowhere\.invalid:9325: [^\[\]]+", nowhere.err.splitlines()[0])
    assert "gaierror" not in nowhere.err


def test_a_directory_that_is_none_is_told_and_not_made(run: Run, tmp_path: Path) -> None:
    said = run("queues", "list", "--data", "nowhere")
    assert said.code == 3
    assert "not a data directory" in said.err
    assert not (tmp_path / "nowhere").exists()


@for_each("admin_option", ["nonsense", "127.0.0.1", "ftp://127.0.0.1:1", "127.0.0.1:x"])
def test_an_address_that_is_none_is_told(run: Run, admin_option: str) -> None:
    assert run("queues", "list", "--admin", admin_option).code == 2


def test_a_wrong_token_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("another token, of another server")
    with admin.running(tmp_path / "data") as server:
        for options in (("--token-file", "token"), ()):
            said = run("queues", "list", "--admin", server.url, *options)
            assert said.code == 2
            assert "--token-file" in said.err


def test_a_held_directory_is_reached_through_its_owner(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "data"
    with admin.running(directory) as server:
        held = run("queues", "list", "--data", str(directory))
        assert held.code == 3
        assert "is held by pid" in held.err
        server.store.directory.announce({"admin": server.url})
        (directory / "admin-token").write_text(admin.TOKEN)
        assert run("queues", "create", "orders", "--data", str(directory)).code == 0
        assert list(map(str, server.store.reader.queues)) == ["000000000000/us-east-1/orders"]
        monkeypatch.setattr(server.store.directory, "free_bytes", lambda: 5)
        full = run("backup", "copy", "--data", str(directory))
        assert full.err.startswith("veilmq: the server has no room for the copy: disk is nearly full: 5 bytes left\n")
        assert "receives" not in full.err
        server.store._writer.refusal = DiskLow(free_bytes=5)
        assert "meanwhile, as long as any is left" in run("send", "orders", "a", "--data", str(directory)).err
        server.store._writer.refusal = None


def test_variables_stand_in_for_options(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "veilmq-data").mkdir()
    (tmp_path / "veilmq-data" / "admin-token").write_text(admin.TOKEN)
    with admin.running(tmp_path / "data") as server:
        monkeypatch.setenv("VEILMQ_ADMIN", f"127.0.0.1:{server.port}")
        assert run("queues", "create", "orders").code == 0
    monkeypatch.delenv("VEILMQ_ADMIN")
    monkeypatch.setenv("VEILMQ_DATA", str(tmp_path / "data"))
    assert run("queues", "list", "--json").json[0]["name"] == "orders"


def test_follow_prints_what_comes_until_it_is_interrupted(run: Run, tmp_path: Path) -> None:
    import subprocess

    token = tmp_path / "token"
    token.write_text(admin.TOKEN)
    with admin.running(tmp_path / "data") as server:
        where = ("--admin", f"127.0.0.1:{server.port}", "--token-file", str(token))
        assert run("queues", "create", "orders", *where).code == 0
        command = [*INTERRUPTIBLE, "events", "--follow", "--json", *where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            watchdog = threading.Timer(30, follower.kill)
            watchdog.start()
            assert json.loads(follower.stdout.readline())["kind"] == "queue_created"
            assert json.loads(follower.stdout.readline())["kind"] == "operator_command"
            assert run("send", "orders", "a", *where).code == 0
            assert json.loads(follower.stdout.readline())["kind"] == "sent"
            follower.send_signal(2)
            assert follower.wait() == 0
            watchdog.cancel()


def test_a_queue_that_is_not_there_yet_is_told_and_followed(run: Run, tmp_path: Path) -> None:
    import subprocess

    token = tmp_path / "token"
    token.write_text(admin.TOKEN)
    with admin.running(tmp_path / "data") as server:
        where = ("--admin", f"127.0.0.1:{server.port}", "--token-file", str(token))
        command = [sys.executable, "-c", "from veilmq.cli import main; main()", "events", "--follow", "--json", *where]
        with subprocess.Popen(
            [*command, "--queue", "later"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as follower:
            watchdog = threading.Timer(30, follower.kill)
            watchdog.start()
            assert follower.stdout is not None
            assert follower.stderr is not None
            assert "there is no queue later" in follower.stderr.readline()
            assert run("queues", "create", "later", *where).code == 0
            assert json.loads(follower.stdout.readline())["kind"] == "queue_created"
            follower.kill()
            watchdog.cancel()


def test_what_comes_next_is_fixed_when_following_begins(run: Run, tmp_path: Path) -> None:
    """`next` is an offset of the start, not of the moment when the server is there again."""
    import subprocess

    data, token = tmp_path / "data", tmp_path / "data" / "admin-token"
    with kept_ports(1) as (port,):
        where = ("--admin", f"127.0.0.1:{port}", "--token-file", str(token))
        with admin.running(data, port=port) as server:
            token.touch(mode=0o600)
            token.write_text(admin.TOKEN)
            command = [sys.executable, "-c", "from veilmq.cli import main; main()", "events", "--follow", "--json"]
            follower = subprocess.Popen([*command, *where, "--from", "next"], stdout=subprocess.PIPE, text=True)
            watchdog = threading.Timer(60, follower.kill)
            watchdog.start()
            while not server.shell.stats.followers and follower.poll() is None:
                pass
        assert run("queues", "create", "orders", "--data", str(data)).code == 0
        again = ServerProcess(tmp_path, *where[:2]).start()
    with follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["kind"] == "queue_created"
        follower.kill()
    watchdog.cancel()
    assert again.stop() == 0


def test_a_receive_on_a_directory_waits_for_what_comes_back(run: Run, tmp_path: Path) -> None:
    _, store = admin.open_directory(tmp_path / "data", None, admin.OPTIONS)
    store.close()
    where = ("--data", str(tmp_path / "data"))
    run("queues", "create", "orders", *where)
    run("send", "orders", "a", "--delay", "300ms", *where)
    (message,) = run("receive", "orders", "--wait", "20s", "--json", *where).json
    assert message["body"] == "a"


@pytest.mark.parametrize("command", [("queues", "list"), ("events", "--last", "5"), ("send", "orders", "a")])
def test_no_command_takes_the_way_back_to_an_older_release_away(
    run: Run, tmp_path: Path, command: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    data = tmp_path / "data"
    _, store = admin.open_directory(data, None, admin.OPTIONS)
    store.close()
    request.getfixturevalue("next_schema")
    before = (data / DATABASE).read_bytes()
    said = run(*command, "--data", str(data))
    assert said.code == 3
    assert f"written by an older VeilMQ (schema {VERSION}; this one looks at" in said.err
    assert (data / DATABASE).read_bytes() == before
    _, store = admin.open_directory(data, None, admin.OPTIONS)  # as a server does
    store.close()
    assert run("queues", "create", "orders", "--data", str(data)).code == 0
    assert run(*command, "--data", str(data)).code == 0


@for_each(
    ("text", "duration_us"),
    [
        ("0", 0),
        ("30", 30_000_000),
        ("1.5s", 1_500_000),
        ("500ms", 500_000),
        ("5m", 300_000_000),
        ("2 h", 7_200_000_000),
    ],
)
def test_times_are_read(text: str, duration_us: int) -> None:
    assert read_duration("--wait", text) == duration_us


def test_people_see_no_control_characters() -> None:
    assert printable("a\x1b[31m\x9b\nb \u00e9") == "a\\x1b[31m\\x9b\\nb \u00e9"
    shown = {
        0: "0 s", 5: "5 us", 1_500: "1.5 ms", 999_700: "1 s", 30_000_000: "30 s", 90_000_000: "1.5 min",
        86_400_000_000: "1 d", 1_234 * 86_400_000_000: "1234 d",
    }  # fmt: skip
    assert {each: duration(each) for each in shown} == shown
    assert [time_text(each) for each in (0.0015, 0.9997, 119, 3_600_000)] == ["1.5 ms", "1 s", "119 s", "1000 h"]
    assert instant(0) == "1970-01-01 00:00:00.000"
    assert instant(2**62) == instant(None) == "never"


def test_a_command_on_a_directory_loads_no_server() -> None:
    """The admin port's app and what it needs take longer to load than the command takes."""
    server = {"starlette", "uvicorn", "prometheus_client", "veilmq.server.service", "veilmq.protocols.sqs.codec"}
    script = f"import sys, veilmq.cli.access.direct; print(sorted({server!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"
