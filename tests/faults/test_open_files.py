"""A process that may open no more files, because its clients have so many connections: the store goes on."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from veilmq.model.commands import CreateQueue
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.queue import QueueKey
from veilmq.store.sqlite.options import MIB
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing.clock import EPOCH
from veilmq.testing.contract.stage import TESTER, sending
from veilmq.testing.sqlite import SMALL

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


def test_the_wal_is_copied_though_no_file_can_be_opened(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "data", msgspec.structs.replace(SMALL, checkpoint_bytes=512 * 1024))
    store.apply([CreateQueue(queue=QUEUE, origin=TESTER)], EPOCH)
    store.commit()
    with no_file_to_open():
        for number in range(200):
            store.apply([sending(QUEUE, "x" * 4_000)], Instant(EPOCH + number))
            store.commit()
    assert (tmp_path / "data" / "veilmq.db").stat().st_size > 400_000
    store.close()
    reopened = SqliteStore(tmp_path / "data", SMALL)
    assert reopened.queues.by_key[QUEUE].visible == 200
    reopened.close()


def test_a_reserve_that_was_given_up_waits_for_a_file_to_open(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "data", msgspec.structs.replace(SMALL, reserve_bytes=MIB))
    store.apply([CreateQueue(queue=QUEUE, origin=TESTER)], EPOCH)
    store.commit()
    store.directory.give_up_reserve()
    with no_file_to_open():
        store.apply([sending(QUEUE)], Instant(EPOCH + 2 * SECOND_US))
        store.commit()
    assert not (tmp_path / "data" / "reserve").exists()
    store.apply([sending(QUEUE)], Instant(EPOCH + 4 * SECOND_US))
    store.commit()
    assert (tmp_path / "data" / "reserve").exists()
    store.close()
