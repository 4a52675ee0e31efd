"""A WAL of another database, or of a copy that went on by itself, is not taken for the database's own."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.redo_stages import BATCHES, FRAME_BYTES, WAL_HEADER_BYTES, execute, in_the_wal, killed, refused
from tests.support.contract.stage import TESTER, Stage, bodies, expect, sending
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import StartMove
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import MoveStarted
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.directory import NotOurs
from veilmq.store.files import RealDisk
from veilmq.store.sqlite.repair.repair import repair
from veilmq.store.sqlite.store import SqliteStore

FOLDED = 5
DESTROYED = 8
"""The first one of the destroyed frames."""


def of_another(path: Path, later_us: int, copies: int) -> Path:
    """The WAL of another database of the same age, which has more events."""
    other = Stage(SqliteFactory(path, SMALL))
    other.later(later_us)
    queue = other.create()
    store_of(other)._writer.redo.close()
    for number in range(2 * BATCHES):
        other.batch([sending(queue, f"theirs {number}")] * copies)
    return killed(other).with_name("veilmq.db-wal")


def test_it_is_refused(stage: Stage, tmp_path: Path) -> None:
    """Those events of its own first life fit into a file of the same age."""
    database = in_the_wal(stage)
    wal = database.with_name("veilmq.db-wal")
    whole = wal.read_bytes()
    for later_us, copies in ((1, 1), (0, 2)):  # at other instants; in other batches
        shutil.copyfile(of_another(tmp_path / f"other {copies}", later_us, copies), wal)
        refused(database, tmp_path)
        with pytest.raises(NotOurs, match=r"veilmq\.db-wal is of another database or copy; move .* away") as why:
            SqliteStore(database.parent, SMALL)
        assert "lost" not in str(why.value)  # with that WAL it would lose this database's messages
    wal.write_bytes(whole)
    stage.open()


@pytest.mark.parametrize(("folded", "damaged"), [(0, 0), (FOLDED, 0), (FOLDED, 4)])
def test_a_repair_leaves_it_out_and_says_what_is_missing(tmp_path: Path, folded: int, damaged: int) -> None:
    """damaged: frames of that WAL that are destroyed, amid what is committed there."""
    stage = Stage(SqliteFactory(tmp_path / "data", SMALL))
    queue = stage.create()
    for number in range(folded):
        stage.send(queue, f"folded {number}")
    store_of(stage).apply_log()
    store_of(stage).checkpointer.finish()
    store_of(stage)._writer.redo.close()
    for number in range(BATCHES):
        stage.send(queue, f"acknowledged {number}")
    database = killed(stage)
    theirs = of_another(tmp_path / "other", 1, 1).read_bytes()
    at = WAL_HEADER_BYTES + DESTROYED * FRAME_BYTES
    theirs = theirs[:at] + bytes(damaged * FRAME_BYTES) + theirs[at + damaged * FRAME_BYTES :]
    database.with_name("veilmq.db-wal").write_bytes(theirs)
    report = repair(database.parent, tmp_path / "repaired", None, lambda *_: None)
    assert report.may_miss
    assert report.events_missing == BATCHES
    assert "veilmq.db-wal: left out, because it is of another database or copy" in report.found
    repaired = Stage(SqliteFactory(tmp_path / "repaired", SMALL))
    assert bodies(repaired.peek(queue, 100)) == [f"folded {number}" for number in range(folded)]
    repaired.store.close()


def note_that_failed(stage: Stage, queue: QueueKey) -> None:
    """The batch between the two that were noted last was not noted."""
    last = store_of(stage)._writer.last_commit
    stage.send(queue, "noted")
    file, last._file = last._file, RealDisk().open(Path("/dev/full"))
    stage.send(queue, "not noted")
    last._file.close()
    last._file = file
    stage.send(queue, "noted again")
    killed(stage)


def older_note_without_event(stage: Stage, queue: QueueKey) -> None:
    """The file `committed` is of before the last batches, and what it noted last had no event."""
    dead = stage.create("dead")
    source = stage.create("source", redrive=RedrivePolicy(dead, 1))
    stage.send(source, "fails")
    stage.take(source, lease_us=0)
    assert not stage.receive(source)
    stage.later(SECOND_US)
    events = stage.following()
    expect(stage.do(StartMove(queue=dead, origin=TESTER)), MoveStarted)
    assert stage.following() == events
    committed = store_of(stage).directory.committed
    older = committed.read_bytes()
    stage.send(queue, "later")
    killed(stage)
    committed.write_bytes(older)


def trimmed_history(stage: Stage, queue: QueueKey) -> None:
    stage.send(queue, "trimmed")
    execute(killed(stage), "DELETE FROM history")


@pytest.mark.parametrize("happens", [note_that_failed, older_note_without_event, trimmed_history])
def test_another_batch_than_was_noted_last_is_no_sign_of_it(
    stage: Stage, happens: Callable[[Stage, QueueKey], None]
) -> None:
    queue = stage.create()
    store_of(stage)._writer.redo.close()  # each batch is a transaction
    stage.send(queue, "first")
    happens(stage, queue)
    stage.open()
    assert bodies(stage.receive(queue, 1)) == ["first"]
