"""`veilmq queues rates` and `queues worst`, straight on a directory and through a server that was killed before.

The server is killed in the middle of a minute: what it had acknowledged is counted once.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Run

from veilmq.testing.local import ServerProcess

SENT = 25


def asked(run: Run, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """The output for a person, and the lines of JSON."""
    code, shown, errors = run(*words)
    assert (code, errors) == (0, "")
    return shown, [json.loads(line) for line in run(*words, "--json")[1].splitlines()]


def test_on_a_directory(run: Run, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path).start()
    server.stop()
    where = ("--data", str(server.data))
    for name, messages in (("calm", 1), ("busy", 3)):
        assert run("queues", "create", name, *where)[0] == 0
        for number in range(messages):
            assert run("send", name, str(number), *where)[0] == 0
    shown, (page,) = asked(run, "queues", "worst", "--by", "depth", *where)
    assert [(each["name"], each["value"]) for each in page["queues"]] == [("busy", 3), ("calm", 1)]
    assert shown.index("busy") < shown.index("calm")
    _, (old,) = asked(run, "queues", "worst", "--all", *where)
    assert [each["name"] for each in old["queues"]] == ["calm", "busy"]
    shown, rollups = asked(run, "queues", "rates", "busy", "--last", "10m", *where)
    assert sum(each["sent"] or 0 for each in rollups) == 3
    assert rollups[-1]["depth"] == 3
    assert "wait p50" in shown
    _, hours = asked(run, "queues", "rates", "busy", "--last", "3d", *where)
    assert hours[-1]["sent"] + (hours[-2]["sent"] or 0 if len(hours) > 1 else 0) == 3
    assert run("queues", "rates", "busy", "--last", "3d", "--step", "minute", *where)[0] == 2
    assert run("queues", "rates", "nobody", *where)[0] != 0


def test_a_queue_as_it_was(run: Run, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path).start()
    server.stop()
    where = ("--data", str(server.data))
    for words in (("queues", "create", "jobs"), ("send", "jobs", "a"), ("send", "jobs", "b"), ("receive", "jobs")):
        assert run(*words, *where)[0] == 0
    _, events = asked(run, "events", "--kind", "sent", *where)
    first, second = (each["at"] for each in events)
    begin = datetime.fromtimestamp(first / 1e6, UTC).isoformat()
    shown, (page,) = asked(run, "queues", "at", "jobs", begin, *where)
    assert (page["at"], page["then"]["visible"], page["complete"]) == (first, 1, True)
    assert "1 visible, 0 delayed, 0 in flight" in shown
    shown, (page,) = asked(run, "queues", "at", "jobs", begin, "--until", "now", *where)
    assert page["changes"] == {"received": 1, "sent": 1}
    assert page["until"] > second
    assert "changes: 1 received, 1 sent\nbecame: 1 in flight\n" in shown
    _, (page,) = asked(run, "queues", "at", "jobs", "0s", "--state", "in_flight", *where)
    assert [each["sequence"] for each in page["messages"]] == [events[0]["sequence"]]
    assert run("queues", "at", "jobs", "soon", *where)[0] == 2
    _, _, errors = run("queues", "rates", "jobs", "--last", "100d", *where)
    assert errors == "veilmq: --last: at most 2160 hours are shown at once\n"
    code, _, errors = run("queues", "at", "jobs", "5d", *where)
    assert code == 1
    assert errors.splitlines()[0] == "veilmq: no queue 000000000000/us-east-1/jobs at that time"
    assert "veilmq events --queue jobs --kind queue_created --data " in errors


@pytest.mark.slow
def test_after_a_kill_everything_acknowledged_is_counted_once(run: Run, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path).start()
    where = ("--admin", server.admin.removeprefix("http://"), "--token-file", str(server.data / "admin-token"))
    assert run("queues", "create", "jobs", *where)[0] == 0
    for number in range(SENT):
        assert run("send", "jobs", str(number), *where)[0] == 0
    for _ in range(2):
        server.kill()
        server.start()
        where = ("--admin", server.admin.removeprefix("http://"), "--token-file", str(server.data / "admin-token"))
        _, rollups = asked(run, "queues", "rates", "jobs", *where)
        assert sum(each["sent"] or 0 for each in rollups) == SENT
        _, (page,) = asked(run, "queues", "worst", "--by", "depth", *where)
        assert [(each["name"], each["value"]) for each in page["queues"]] == [("jobs", SENT)]
    server.stop()
