"""`veilmq bridge` as a command: a dry run, what must be accepted, signals, and kills amid a move."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.cli.conftest import INTERRUPTIBLE, Serve
from tests.cli.test_own_account import ONE, OTHER, credentials
from tests.support.azurite import azurite
from tests.support.broken_server import HANG_UP, BrokenServer, answer
from tests.support.commands import Run, bare

from veilmq.cli.migrate.bridge import once
from veilmq.client.adapters.cloud import encode_base64
from veilmq.client.adapters.connect import connect
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.bridge import REFUSED_MAX
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Message, Sent, Template
from veilmq.client.queue import Queue
from veilmq.testing.local import LocalServer

ENDED_S = 60.0
HOME = 'home_region = "eu-west-1"'


@pytest.fixture
def data(tmp_path: Path) -> str:
    """URL of a queue with three messages, up to the queue's name."""
    with EmbeddedAccount(tmp_path / "data") as account:
        for name in ("from", "to"):
            account.create(name)
        with account.queue("from") as queue:
            queue.send_batch([Message(str(number), {"n": number}, priority=3) for number in range(3)])
    return f"veil://{tmp_path / 'data'}?queue="


def held(url: str) -> tuple[int, int | None, int | None]:
    with connect(url) as queue:
        stats = queue.stats()
    return stats.visible, stats.in_flight, stats.delayed


class TestDryRun:
    def test_changes_nothing(self, run: Run, data: str) -> None:
        ended = run("bridge", data + "from", data + "new&create=1", "--dry-run")
        assert (ended.code, ended.err) == (0, "")
        assert "from  from (embedded): 3 visible, 0 in flight, 0 delayed\n" in ended.out
        assert "to    new (embedded): would be created\n" in ended.out
        assert held(data + "from") == (3, 0, 0)
        with connect(data + "from") as queue:
            assert queue.account.names() == ["from", "to"]
            assert [message.receive_count for message in queue.receive(3)] == [1, 1, 1]

    def test_does_not_make_a_data_directory(self, run: Run, data: str, tmp_path: Path) -> None:
        ended = run("bridge", data + "from", f"veil://{tmp_path / 'new'}?queue=z.fifo&create=1", "--dry-run")
        assert (ended.code, ended.err) == (0, "")
        assert "to    z.fifo (embedded): would be created\n" in ended.out
        assert "a group of its own" in ended.out
        assert not (tmp_path / "new").exists()
        ended = run("bridge", data + "from", f"veil://{tmp_path / 'no' / 'new'}?queue=z&create=1", "--dry-run")
        assert (ended.code, "mkdir -p" in ended.err) == (2, True)

    def test_tells_in_json(self, run: Run, data: str) -> None:
        (shown,) = run("bridge", data + "from", data + "to", "--dry-run", "--json").json
        assert shown["from"] == {
            "queue": "from", "protocol": "embedded", "holds": {"visible": 3, "in_flight": 0, "delayed": 0},
        }  # fmt: skip
        assert shown["lost"] == []


def test_what_is_lost_must_be_accepted(run: Run, data: str, veilmq_server: LocalServer) -> None:
    veilmq_server.connect("goal")
    target = veilmq_server.azure_url.replace("http", "azure", 1) + "/devstoreaccount1/goal?tls=0"
    refused = run("bridge", data + "from", target, "--until-empty")
    assert refused.code == 2
    assert "LOST: message attributes" in refused.err
    assert "LOST: priorities" in refused.err
    assert held(data + "from") == (3, 0, 0)
    ended = run("bridge", data + "from", target, "--until-empty", "--yes", "--json")
    assert (ended.code, ended.json[0]["sent"], ended.json[0]["left"]["visible"]) == (0, 3, 0)
    assert veilmq_server.connect("goal").stats().visible == 3


def test_through_the_admin_port_a_message_is_sent_once_however_often_it_is_repeated(
    run: Run, data: str, veilmq_server: LocalServer
) -> None:
    target, trial = veilmq_server.connect("to"), veilmq_server.connect("trial")
    token = veilmq_server.process.data / "admin-token"
    admin = ("--admin", urlsplit(veilmq_server.admin_url).netloc, "--token-file", str(token))

    def bridge(to: str, *options: str) -> tuple[int, int, int]:
        where = (data + "from", veilmq_server.queue_url(to), "--until-empty", "--json", *admin)
        (counts,) = run("bridge", *where, *options).json
        return counts["sent"], counts["duplicates"], counts["deleted"]

    assert bridge("trial", "--copy") == (3, 0, 0)
    found = {message.body: message for message in trial.receive(10, lease=0.001)}
    assert {name: (each.attributes, each.priority) for name, each in found.items()} == {
        str(number): ({"n": number}, 3) for number in range(3)
    }
    assert bridge("trial", "--copy") == (3, 3, 0)
    assert trial.stats().visible == 3
    # What was sent to another queue, or before a purge or a new creation of this one, is not there.
    for forget in ((), ("purge to --yes",), ("queues delete to --yes", "queues create to")):
        for command in forget:
            assert run(*command.split(), *admin).code == 0
        assert bridge("to", "--copy") == (3, 0, 0)
        assert target.stats().visible == 3
    assert bridge("to") == (3, 3, 3)
    assert (target.stats().visible, held(data + "from")) == (3, (0, 0, 0))
    assert run("bridge", data + "from", data + "to", *admin).code == 2
    assert run("bridge", data + "from", veilmq_server.queue_url("to"), "--admin", "127.0.0.1:1").code == 4


def test_through_the_admin_port_only_a_kept_command_is_a_duplicate(tmp_path: Path, veilmq_server: LocalServer) -> None:
    target, token_file = veilmq_server.connect("to"), tmp_path / "token"
    right = (veilmq_server.process.data / "admin-token").read_text()
    token_file.write_text(right)

    def sent(source: str, name: str, body: str, ttl: float | None = None) -> bool:
        message = Message(body, deduplication_id=name, ttl=ttl)
        with once(veilmq_server.connect("to"), veilmq_server.admin_url, token_file, source) as queue:
            return queue.send(message).duplicate

    assert not sent("a", "x" * 128, "first", ttl=60)
    assert sent("a", "x" * 128, "first", ttl=50)  # it comes again, and has less time to live
    assert not sent("b", "x" * 128, "first"), "ids are unique within one queue"
    assert not sent("a", "x" * 128, "changed")
    assert target.stats().visible == 3
    with ThreadPoolExecutor(1) as other, once(target, veilmq_server.admin_url, token_file, "a") as queue:
        token_file.write_text("another-token-of-16")
        with pytest.raises(TransportError, match="token"):
            other.submit(queue.send, Message("last", deduplication_id="1")).result()
        token_file.write_text(right)
        assert not other.submit(queue.send, Message("last", deduplication_id="1")).result().duplicate
        with pytest.raises(ServiceError, match=r"MessageTooLarge.*413") as refused:
            queue.send(Message("x" * 2_000_000, deduplication_id="2"))
        assert not refused.value.retryable


def test_through_the_admin_port_it_is_the_queue_that_the_url_names(
    run: Run, data: str, serve: Serve, tmp_path: Path
) -> None:
    server = serve("--credentials", credentials(tmp_path, ONE, OTHER, more=HOME), data=tmp_path / "server").ready()
    admin = ("--admin", server.admin, "--token-file", str(server.data / "admin-token"))
    for region in ("us-east-1", "eu-west-1"):
        assert run("queues", "create", "to", *admin, "--account", ONE, "--region", region).code == 0
    target = f"veil://AKID{ONE}:secret-of-{ONE}@{urlsplit(server.url).netloc}/to"
    ended = run("bridge", data + "from", target, "--until-empty", "--yes", *admin)
    assert (ended.code, ended.out) == (0, "moved 3\n"), ended.err
    assert (held(target), held(f"{target}?region=eu-west-1")) == ((3, 0, 0), (0, 0, 0))


def test_through_the_admin_port_what_passes_is_tried_again(tmp_path: Path, veilmq_server: LocalServer) -> None:
    def said(status: int, **members: Any) -> bytes:
        return answer(status, json.dumps(members).encode())

    begin = said(200, incarnation=1, purged=None)
    failed = [
        said(status, error=error, message="not now", field=None, data={})
        for status, error in ((503, "StoreFailed"), (503, "NotOwner"), (507, "DiskLow"), (429, "RateExceeded"))
    ]
    server = BrokenServer([begin, *failed, HANG_UP, answer(502), said(200, messages=[{"id": "1"}])])
    with once(veilmq_server.connect("to"), server.url, None, "a") as queue:
        *errors, sent = queue.send_batch([Message("a", deduplication_id="1")] * 7)
    server.close()
    assert [isinstance(error, TransportError) and not error.may_have_happened for error in errors] == [True] * 6
    assert isinstance(sent, Sent)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["from", "gone"], "TO: no queue gone"),
        (["gone", "to"], "FROM: no queue gone"),
        (["gone&create=1", "to"], "FROM: no queue gone"),
        (["from", "from"], "TO: is the same queue as the source"),
        (["from", "to", "--workers", "0"], "--workers: must be"),
        (["from", "to", "--lease", "soon"], "--lease: expected a time"),
    ],
)
def test_wrong_input_moves_nothing(run: Run, data: str, arguments: list[str], said: str) -> None:
    source, target, *options = arguments
    ended = run("bridge", data + source, data + target, *options)
    assert ended.code == 2
    assert said in ended.err
    assert held(data + "from") == (3, 0, 0)


@pytest.mark.parametrize(
    ("source", "target", "is_one"),
    [
        ("veil://localhost:{port}/q", "veil://127.0.0.1:{port}/q", True),
        ("veil://127.0.0.1:{port}/q", "veil://[::1]:1,LOCALHOST:{port}/q", True),
        ("veil://localhost:{port}/q", "sqs://any:any@127.0.0.1:{port}/q?tls=0", True),
        ("mns://any:any@localhost:{mns}/q", "mns://any:any@127.0.0.1:{mns}/q", True),
        ("veil://localhost:{port}/q?region=eu-west-1", "veil://127.0.0.1:{port}/q", False),
    ],
)
def test_one_queue_under_two_urls_is_told(
    run: Run, veilmq_server: LocalServer, source: str, target: str, is_one: bool
) -> None:
    ports = {"port": urlsplit(veilmq_server.sqs_url).port, "mns": urlsplit(veilmq_server.mns_url).port}
    veilmq_server.connect("q")
    with connect(f"{veilmq_server.queue_url('q')}?region=eu-west-1&create=1"):
        ended = run("bridge", source.format(**ports), target.format(**ports), "--dry-run", "--yes")
    assert (ended.code, "TO: is the same queue as the source" in ended.err) == (2 * is_one, is_one), ended.err


class TestVariables:
    """They keep a secret out of the list of processes."""

    @pytest.mark.parametrize(
        ("variables", "arguments"),
        [({"FROM": "from"}, ["to"]), ({"TO": "to"}, ["from"]), ({"FROM": "from", "TO": "to"}, [])],
    )
    def test_stand_for_the_url_that_is_not_given(
        self,
        run: Run,
        data: str,
        monkeypatch: pytest.MonkeyPatch,
        variables: dict[str, str],
        arguments: list[str],
    ) -> None:
        for name, queue in variables.items():
            monkeypatch.setenv(f"VEILMQ_{name}", data + queue)
        ended = run("bridge", *(data + queue for queue in arguments), "--dry-run")
        assert [line.split()[:2] for line in ended.out.splitlines()[:2]] == [["from", "from"], ["to", "to"]], ended.err

    @pytest.mark.parametrize(
        ("variables", "count", "said"),
        [({}, 1, "TO is missing"), ({"TO": "to"}, 0, "FROM is missing"), ({"FROM": "a", "TO": "b"}, 1, "both set")],
    )
    def test_leave_no_doubt(
        self, run: Run, data: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int, said: str
    ) -> None:
        for name, queue in variables.items():
            monkeypatch.setenv(f"VEILMQ_{name}", data + queue)
        ended = run("bridge", *[data + "from"] * count, "--until-empty")
        assert (ended.code, said in ended.err) == (2, True), ended.err
        assert held(data + "from") == (3, 0, 0)


def test_a_body_that_cannot_be_decoded_is_refused_and_told(run: Run, veilmq_server: LocalServer) -> None:
    source = veilmq_server.connect("from")
    source.send_batch(["no base64", *map(encode_base64, (b"one", b"\xff", b"two"))])
    where = veilmq_server.mns_url.replace("http://", "mns://any:any@", 1).rstrip("/") + "/from"
    goal = veilmq_server.queue_url("goal") + "?create=1"
    ended = run("bridge", where, goal, "--until-empty", "--yes", "--json")
    (counts,) = ended.json
    assert (ended.code, counts["sent"], counts["refused"], counts["received"]) == (1, 2, 2, 4)
    ((reason, number),) = counts["reasons"].items()
    assert (number, "base64=0" in reason) == (2, True)
    wait_until(lambda: source.stats().visible == 2)  # MNS gives back with a delay of a second
    left = source.receive(10)
    assert [message.receive_count for message in left] == [2, 2], "received once by the bridge, and given back"


@pytest.mark.parametrize("as_json", [True, False])
def test_a_run_that_an_error_ends_says_what_was_done(run: Run, tmp_path: Path, as_json: bool) -> None:
    with EmbeddedAccount(tmp_path / "data") as account:
        for name, bytes_max in (("from", 2_000), ("to", 1_024)):
            account.create(name, Template(message_bytes_max=bytes_max))
        with account.queue("from") as queue:
            queue.send_batch(["small", *["x" * 1_025] * REFUSED_MAX])
    data = f"veil://{tmp_path / 'data'}?queue="
    ended = run("bridge", data + "from", data + "to", "--workers", "1", "--yes", *["--json"] * as_json)
    assert (ended.code, "veilmq: " in ended.err) == (1, True), ended.err
    if as_json:
        (counts,) = ended.json
        assert (counts["sent"], counts["refused"], list(counts["reasons"].values())) == (1, REFUSED_MAX, [REFUSED_MAX])
    else:
        assert ended.out == f"moved 1, refused {REFUSED_MAX}\n"
        assert f"refused {REFUSED_MAX}: MessageTooLarge" in ended.err


def test_a_url_is_never_shown(run: Run, data: str) -> None:
    ended = run("bridge", data + "from", "sqs://key:s3cret@127.0.0.1:1/to?tls=0&retries=0")
    assert ended.code == 4
    assert ended.err.startswith("veilmq: TO: ")
    connection_string = run("bridge", data + "from", "AccountName=name;AccountKey=s3cret")
    assert connection_string.err == "veilmq: TO: must begin with veil://, sqs://, azure://, mns://, amqp://, amqps://\n"
    assert "s3cret" not in ended.err


Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def started() -> Any:
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        command = [*INTERRUPTIBLE, "bridge", *arguments, "--yes", "--json"]
        environment = bare(AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + ENDED_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ctrl_c_ends_in_order(started: Started, veilmq_server: LocalServer) -> None:
    source, target = veilmq_server.connect("from"), veilmq_server.connect("to")
    source.send_batch([str(number) for number in range(500)])
    process = started(*map(veilmq_server.queue_url, ("from", "to")), "--rate", "100")
    wait_until(lambda: target.stats().visible > 0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=ENDED_S)
    moved = json.loads(out)["sent"]
    assert (process.returncode, "the messages received so far are still moved" in err) == (0, True)
    assert source.stats().in_flight == 0
    assert source.stats().visible + moved == 500 == source.stats().visible + target.stats().visible


def killed_again_and_again(started: Started, source: Queue, target: Queue, *urls: str) -> list[dict[str, Any]]:
    """Two bridges that are killed while they move, and one that ends; what the last one did."""
    total = source.stats().visible
    for share in (1, 2):
        process = started(*urls, "--lease", "2", "--rate", "400")
        wait_until(lambda share=share: target.stats().visible >= total * share // 4)  # type: ignore[misc]
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    out, err = started(*urls, "--lease", "2", "--until-empty").communicate(timeout=ENDED_S)
    assert out, err
    return [json.loads(out)]


@pytest.mark.slow
def test_kills_lose_nothing_on_the_way_to_a_fifo_queue_and_double_nothing(
    started: Started, veilmq_server: LocalServer
) -> None:
    source, target = veilmq_server.connect("from"), veilmq_server.connect("to.fifo")
    source.send_batch([str(number) for number in range(600)])
    endpoint = f"sqs://{urlsplit(veilmq_server.sqs_url).netloc}"
    (ended,) = killed_again_and_again(
        started, source, target, f"{endpoint}/from?tls=0", veilmq_server.queue_url("to.fifo")
    )
    assert ended["left"] == {"visible": 0, "in_flight": 0, "delayed": 0}
    found: list[str] = []
    while messages := target.receive(10, lease=600):
        found += [message.body for message in messages]
    assert sorted(map(int, found)) == list(range(600))


@pytest.mark.slow
def test_kills_lose_nothing_between_azurite_and_a_server(started: Started, veilmq_server: LocalServer) -> None:
    target = veilmq_server.connect("to")
    with azurite("queue") as url:
        where = f"{url.replace('http', 'azure', 1)}/devstoreaccount1/from?tls=0"
        with connect(where + "&create=1") as source:
            source.send_batch([str(number) for number in range(300)])
            (ended,) = killed_again_and_again(started, source, target, where, veilmq_server.queue_url("to"))
            assert ended["left"]["visible"] == 0
    found: list[str] = []
    while messages := target.receive(10, lease=600):
        found += [message.body for message in messages]
    assert {int(body) for body in found} == set(range(300))
    assert len(found) <= 300 + 2 * 40  # what two killed bridges had in hand
