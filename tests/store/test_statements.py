"""Statements stay compiled, however many rows a batch has."""

from pathlib import Path

from veilmq.model.commands import Delete
from veilmq.testing.contract.stage import TESTER, Stage, sending
from veilmq.testing.sqlite import SqliteFactory

MESSAGES = 100


def test_a_large_batch_compiles_nothing_anew(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    queue = stage.create()

    def live() -> None:
        """The lives of many messages, in three batches."""
        stage.batch([sending(queue, "hello") for _ in range(MESSAGES)])
        messages = stage.receive(queue, MESSAGES)
        stage.batch([Delete(queue=queue, origin=TESTER, handle=each.handle, arrived=stage.now) for each in messages])

    live()
    before = stage.store._writer.connection.cache_stats()["misses"]  # type: ignore[attr-defined]
    live()
    assert stage.store._writer.connection.cache_stats()["misses"] == before  # type: ignore[attr-defined]
    stage.store.close()
