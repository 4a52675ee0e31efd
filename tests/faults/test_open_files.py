"""A process that may open no more files, because its clients have so many connections: the store goes on.

Each case is a process of its own, so that nothing else in this one lacks files.
"""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.support.clock import EPOCH
from tests.support.contract.stage import TESTER, sending
from tests.support.sqlite import SMALL

from veilmq.model.commands import CreateQueue
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.store import MIB
from veilmq.store.sqlite.store import SqliteStore

QUEUE = QueueKey("000000000000", "us-east-1", "jobs")


@contextmanager
def no_file_to_open() -> Iterator[None]:
    """Files that are open stay so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def the_wal_is_copied(data: Path) -> None:
    store = SqliteStore(data, msgspec.structs.replace(SMALL, checkpoint_bytes=512 * 1024))
    store.apply([CreateQueue(queue=QUEUE, origin=TESTER)], EPOCH)
    store.commit()
    with no_file_to_open():
        for number in range(200):
            store.apply([sending(QUEUE, "x" * 4_000)], Instant(EPOCH + number))
            store.commit()
    assert (data / "veilmq.db").stat().st_size > 400_000
    store.close()
    reopened = SqliteStore(data, SMALL)
    assert reopened.reader.queues[QUEUE].visible == 200
    reopened.close()


def a_reserve_that_was_given_up_waits_for_a_file_to_open(data: Path) -> None:
    store = SqliteStore(data, msgspec.structs.replace(SMALL, reserve_bytes=MIB))
    store.apply([CreateQueue(queue=QUEUE, origin=TESTER)], EPOCH)
    store.commit()
    store.directory.give_up_reserve()
    with no_file_to_open():
        store.apply([sending(QUEUE)], Instant(EPOCH + 2 * SECOND_US))
        store.commit()
    assert not (data / "reserve").exists()
    store.apply([sending(QUEUE)], Instant(EPOCH + 4 * SECOND_US))
    store.commit()
    assert (data / "reserve").exists()
    store.close()


CASES = {case.__name__: case for case in (the_wal_is_copied, a_reserve_that_was_given_up_waits_for_a_file_to_open)}


@pytest.mark.parametrize("case", CASES)
def test_the_store_goes_on(case: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.test_open_files", case, str(tmp_path / "data")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
