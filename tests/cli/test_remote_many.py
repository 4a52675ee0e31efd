"""`veilmq queues list` where there are more queues than one page of the admin port holds."""

import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest

from veilmq.cli import main
from veilmq.engine import open_directory
from veilmq.model.commands import CreateQueue, Origin
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.queue import QueueKey

_spec = importlib.util.spec_from_file_location("admin_of_many", Path(__file__).parents[1] / "admin" / "server.py")
assert _spec is not None
assert _spec.loader is not None
admin = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(admin)

ACCOUNTS, QUEUES = ("000000000000", "111111111111"), 1_050
ORIGIN = Origin("sqs", "tester")


def listed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["veilmq", "queues", "list", "--json", *arguments])
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in {0, None}
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    return [f"{each['account']}/{each['name']}" for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["admin port", "directory"])
def test_every_queue_is_listed_once(door: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    _, store = open_directory(directory, None, admin.OPTIONS)
    names = [f"queue-{number:05}" for number in range(QUEUES)]
    for account in ACCOUNTS:
        keys = [QueueKey(account, "us-east-1", name) for name in names]
        assert store.apply([CreateQueue(queue=key, origin=ORIGIN) for key in keys], Instant(SECOND_US)).wrote
        store.commit()
    store.close()
    own = [f"{ACCOUNTS[0]}/{name}" for name in names]
    everything = [f"{account}/{name}" for account in ACCOUNTS for name in names]
    if door == "directory":
        where = ("--data", str(directory))
        assert listed(monkeypatch, *where) == own
        assert listed(monkeypatch, "--all", *where) == everything
        return
    token = tmp_path / "token"
    token.write_text(admin.TOKEN + "\n")
    with admin.running(directory) as server:
        where = ("--admin", f"127.0.0.1:{server.port}", "--token-file", str(token))
        assert listed(monkeypatch, *where) == own
        assert listed(monkeypatch, "--all", *where) == everything
        assert listed(monkeypatch, "--all", "--prefix", "queue-0104", *where) == [
            name for name in everything if "queue-0104" in name
        ]
