"""What the tests of the redo log share."""

from pathlib import Path

from tests.support.contract.stage import Stage
from tests.support.sqlite import store_of

from veilmq.model.settings.queue import QueueKey


def unapplied(stage: Stage) -> int:
    """Batches that the database does not have."""
    return len(store_of(stage)._writer.redo.unapplied)


def wal_pages(stage: Stage) -> int:
    """What was written by transactions."""
    return store_of(stage)._writer.wal_pages


def started(stage: Stage) -> QueueKey:
    """A queue, and all that the first use of a store writes into tables."""
    queue = stage.create()
    stage.send(queue, "first")
    stage.delete(queue, stage.take(queue).handle)
    stage.sweep()
    return queue


def killed(stage: Stage) -> Path:
    """The files after a kill; returns the database."""
    stage.factory.kill(stage.store)
    return store_of(stage).directory.database
