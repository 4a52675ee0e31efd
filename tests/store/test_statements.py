"""Statements stay compiled, however many rows a batch has, and they are few.

At each one apsw lets the interpreter go: with eight threads that burn the CPU it has it back after 40 ms.
"""

from pathlib import Path

from apsw import SQLITE_TRACE_STMT

from veilmq.model.commands import Delete
from veilmq.model.instant import HOUR_US
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


def test_many_young_messages_are_promoted_in_few_statements(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    queue = stage.create()
    for _ in range(4):
        stage.batch([sending(queue, "hello") for _ in range(300)])
        stage.receive(queue, 200, lease_us=HOUR_US)
    done: list[str] = []
    stage.store._writer.connection.trace_v2(SQLITE_TRACE_STMT, lambda trace: done.append(trace["sql"]))  # type: ignore[attr-defined]
    stage.sweep()
    stage.store._writer.connection.trace_v2(0, None)  # type: ignore[attr-defined]
    inserts = [sql for sql in done if sql.startswith("INSERT INTO")]
    assert stage.counts(queue) == (400, 0, 800)
    assert len(inserts) <= 20
    stage.store.close()
