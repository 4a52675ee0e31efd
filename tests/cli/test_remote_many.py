"""`veilmq queues list` where there are more queues than one page of the admin port holds."""

from pathlib import Path

import pytest
from tests.admin import server as admin
from tests.support.commands import WAYS, Run, reaching

from veilmq.engine.directory import open_directory
from veilmq.model.commands import CreateQueue, Origin
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.queue import QueueKey

ACCOUNTS, QUEUES = ("000000000000", "111111111111"), 1_050
ORIGIN = Origin("sqs", "tester")


def listed(run: Run, *arguments: str) -> list[str]:
    ended = run("queues", "list", "--json", *arguments)
    assert ended.code == 0
    return [f"{each['account']}/{each['name']}" for each in ended.json]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_queue_is_listed_once(way: str, run: Run, tmp_path: Path) -> None:
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
    with reaching(way, run, directory) as reached:
        assert listed(reached) == own
        assert listed(reached, "--all") == everything
        assert listed(reached, "--all", "--prefix", "queue-0104") == [
            name for name in everything if "queue-0104" in name
        ]
