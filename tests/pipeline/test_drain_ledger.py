"""What a drain makes of the answers to its deletes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.pipeline.drain.batches import Batch, BatchLeases, Remembered

LEASE_S = 30.0


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedClient]:
    client = EmbeddedClient(tmp_path / "data")
    client.account.create("orders")
    yield client
    client.account.close()


@pytest.fixture
def queue(embedded: EmbeddedClient) -> Queue:
    return embedded.account.queue("orders")


def batch_of(embedded: EmbeddedClient, queue: Queue, message: Received) -> Batch:
    return Batch(1, Path("1.arrow"), [message], BatchLeases(queue, [message], LEASE_S, embedded.clock))


def test_a_delete_under_an_unbroken_lease_is_certain(embedded: EmbeddedClient, queue: Queue) -> None:
    queue.send("x")
    (message,) = queue.receive(lease=LEASE_S)
    batch = batch_of(embedded, queue, message)
    assert batch.deleted(message.id, message.handle, None)
    assert (batch.is_done, batch.doubtful) == (True, set())


def test_a_delete_after_the_lease_is_in_doubt(embedded: EmbeddedClient, queue: Queue) -> None:
    """SQS says "done" to a stale handle."""
    queue.send("x")
    (message,) = queue.receive(lease=LEASE_S)
    batch = batch_of(embedded, queue, message)
    embedded.pass_time(LEASE_S + 1)
    assert batch.deleted(message.id, message.handle, None)
    assert (batch.is_done, batch.doubtful) == (True, {message.id})


def test_the_answer_to_a_delete_by_an_old_handle_says_nothing(embedded: EmbeddedClient, queue: Queue) -> None:
    queue.send("x")
    (old,) = queue.receive(lease=LEASE_S)
    batch = batch_of(embedded, queue, old)
    queue.release(old.handle)
    (new,) = queue.receive(lease=LEASE_S)
    batch.renew(new)
    assert not batch.deleted(old.id, old.handle, None)
    assert batch.to_delete() == [old.id]
    assert batch.deleted(new.id, new.handle, None)
    assert batch.is_done


def test_ids_are_forgotten_when_their_time_is_over_also_amid_a_run(tmp_path: Path) -> None:
    old, new = tmp_path / "1.ids", tmp_path / "2.ids"
    remembered = Remembered()
    for path, ids, written in ((old, ["a", "b"], 100.0), (new, ["c", "d"], 200.0)):
        path.touch()
        remembered.add(path, ids, written)
    remembered.expire(before=100)
    assert all(each in remembered for each in "abcd")
    remembered.expire(before=150)
    assert [each in remembered for each in "abcd"] == [False, False, True, True]
    assert (old.exists(), new.exists()) == (False, True)
    for each in "cd":
        remembered.settle(each)
    assert not new.exists()
    remembered.expire(before=1_000)
