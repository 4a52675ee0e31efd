"""Restores to an instant: what is restored is what the tables held then."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import apsw
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.store.test_machine import StoreMachine, play
from tests.support.contract.stage import Stage
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.instant import SECOND_US, Instant
from veilmq.store import Options, Store
from veilmq.store.log import Entry, Held, Point, Position, RecordsEnd, SnapshotBad, SourceUnusable, checksum, restore
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.effects import digest
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools.backup import copy_checked


class Kept:
    """A log in memory that forgets nothing, with snapshots: a source."""

    epoch = 1

    def __init__(self, place: Path) -> None:
        self.entries: list[Entry] = []
        self.was: list[tuple[int, bytes]] = []
        """Lease clock and digest after each commit."""
        self._place = place
        self._held: list[Held] = []
        self.first = 1
        """Records before it are dropped."""

    def append(self, lsn: int, record: bytes) -> None:
        """See `Log.append`."""
        assert lsn == len(self.entries) + 1
        self.entries.append(Entry(lsn, self.epoch, record))

    def note(self, connection: apsw.Connection) -> None:
        """The owner has committed."""
        clock = connection.execute("SELECT clock FROM mark").get
        assert isinstance(clock, int)
        self.was.append((clock, digest(connection)))

    def snapshot(self, database: Path) -> None:
        """Keep one."""
        self._place.mkdir(exist_ok=True)
        kept = self._place / str(len(self._held))
        point = copy_checked(database, kept, is_owner=True)

        def fetch(file: Path) -> Point:
            file.write_bytes(kept.read_bytes())
            return point

        self._held.insert(0, Held(point, fetch))

    def spoil(self) -> None:
        """The newest snapshot is damaged."""

        def fetch(file: Path) -> Point:
            file.write_bytes(b"half")
            raise SnapshotBad("it is damaged")

        self._held[0] = self._held[0]._replace(fetch=fetch)

    def snapshots(self) -> list[Held]:
        """See `Source.snapshots`."""
        return self._held

    def records(self, after: Position) -> Iterator[Entry]:
        """See `Source.records`."""
        if after.lsn + 1 < self.first:
            raise RecordsEnd(f"they begin with record {self.first}")
        return iter(self.entries[after.lsn :])


class KeptStore(SqliteStore):
    """Says what its tables hold after each commit."""

    def __init__(self, path: Path, options: Options | None, kept: Kept) -> None:
        self.kept = kept
        super().__init__(path, options, log=kept)
        self.kept.note(self._writer.connection)

    def _commit_batch(self) -> None:
        super()._commit_batch()
        self.apply_log()
        self.kept.note(self._writer.connection)


class KeptFactory(SqliteFactory):
    """Opens stores whose log is kept."""

    def __init__(self, path: Path, options: Options = SMALL) -> None:
        super().__init__(path, options)
        self.kept = Kept(path.with_name("snapshots"))
        self.kind = lambda path, options: KeptStore(path, options, self.kept)  # type: ignore[assignment]

    def kill(self, store: Store) -> None:
        """See `SqliteFactory.kill`. There is no redo log."""
        (self.path / "redo").touch()
        super().kill(store)
        (self.path / "redo").unlink()


open_follower = partial(SqliteFollower, options=SMALL)


def restored(kept: Kept, to: int | None, directory: Path) -> bytes:
    """The digest of what was restored."""
    directory.mkdir(mode=0o700)
    restore(kept, None if to is None else Instant(to), directory, open_follower)
    with closing(connect(directory / "veilmq.db")) as connection:
        return digest(connection)


def state_at(kept: Kept, to: int) -> bytes:
    """The digest of what the owner had then."""
    return next(found for clock, found in reversed(kept.was) if clock <= to)


class RestoredMachine(StoreMachine):
    """Random commands, snapshots now and then, and restores to random instants."""

    factory = KeptFactory
    restores = 0

    @property
    def kept(self) -> Kept:
        factory = self.stage.factory
        assert isinstance(factory, KeptFactory)
        return factory.kept

    @rule()
    def snapshot(self) -> None:
        store = self.stage.store
        assert isinstance(store, SqliteStore)
        self.kept.snapshot(store.directory.database)

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        began = self.kept.was[0][0]
        clocks = [clock for clock, _ in self.kept.was if clock > began]
        to = data.draw(st.sampled_from(clocks), "clock") + data.draw(st.sampled_from([0, 1, SECOND_US]), "after")
        RestoredMachine.restores += 1
        place = Path(self.directory.name) / f"restored {RestoredMachine.restores}"
        assert restored(self.kept, to, place) == state_at(self.kept, to)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_at_random_instants_the_tables_are_as_they_were() -> None:
    RestoredMachine.restores = 0
    while RestoredMachine.restores <= 2:  # Hypothesis leaves a rule out of many of its examples
        play(RestoredMachine, examples=12, steps=40)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Ten messages, a second apart, and a snapshot after the third and the sixth."""
    playing = Stage(KeptFactory(tmp_path / "data"))
    jobs = playing.create()
    for number in range(10):
        playing.later(SECOND_US)
        playing.send(jobs, str(number))
        if number in {3, 6}:
            kept_by(playing).snapshot(store_of(playing).directory.database)
    yield playing
    playing.store.close()


def kept_by(stage: Stage) -> Kept:
    assert isinstance(stage.factory, KeptFactory)
    return stage.factory.kept


def test_it_ends_before_the_first_record_of_a_later_instant(stage: Stage, tmp_path: Path) -> None:
    kept, sent = kept_by(stage), stage.now - 2 * SECOND_US
    (tmp_path / "new").mkdir(mode=0o700)
    found = restore(kept, Instant(sent), tmp_path / "new", open_follower)
    assert (found.clock, found.goes_on) == (sent, sent + SECOND_US)
    assert found.records == found.lsn - found.snapshot == 1
    assert restored(kept, sent - 1, tmp_path / "earlier") == state_at(kept, sent - SECOND_US)
    before_the_newest_snapshot = sent - 2 * SECOND_US
    assert restored(kept, before_the_newest_snapshot, tmp_path / "first") == state_at(kept, before_the_newest_snapshot)


def test_a_damaged_snapshot_is_passed_over(stage: Stage, tmp_path: Path) -> None:
    kept = kept_by(stage)
    kept.spoil()
    (tmp_path / "new").mkdir(mode=0o700)
    found = restore(kept, None, tmp_path / "new", open_follower)
    assert (found.lsn, found.damaged) == (len(kept.entries), ["it is damaged"])


def test_a_snapshot_that_lacks_records_which_it_names_is_completed_from_the_log(stage: Stage, tmp_path: Path) -> None:
    """So a cluster of 0.1.0 wrote those that it took amid load."""
    kept = kept_by(stage)

    def lacking(held: Held) -> Held:
        lsn, epoch, record = kept.entries[held.point.position.lsn]
        names = Point(Position(lsn, epoch, checksum(record)), Instant(held.point.clock + SECOND_US))

        def fetch(file: Path) -> Point:
            held.fetch(file)
            return names

        return Held(names, fetch)

    newest, older = kept._held
    kept._held[:] = lacking(newest), lacking(older)
    assert restored(kept, None, tmp_path / "new") == state_at(kept, stage.now)
    for number, (held, damage) in enumerate(((newest, []), (older, ["it is damaged"]))):
        has = held.point.position.lsn
        del kept.entries[has:]
        (place := tmp_path / str(number)).mkdir(mode=0o700)
        found = restore(kept, None, place, open_follower)
        assert (found.lsn, found.clock) == (has, held.point.clock)
        assert found.damaged == [*damage, f"the snapshot of record {has + 1} has no record after {has}"]
        kept.spoil()


def test_a_damaged_record_ends_it_with_a_word(stage: Stage, tmp_path: Path) -> None:
    kept = kept_by(stage)
    lsn, epoch, record = kept.entries[-2]
    flipped = record[:-1] + bytes([record[-1] ^ 1])
    for number, damaged in enumerate([flipped, record[: len(record) // 2]]):
        kept.entries[-2] = Entry(lsn, epoch, damaged)
        place = tmp_path / str(number)
        place.mkdir(mode=0o700)
        found = restore(kept, None, place, open_follower)
        assert found.lsn == lsn - 1
        assert found.damaged[0].startswith(f"the records end after {lsn - 1}: record {lsn} is damaged")


def test_what_an_owner_wrote_whose_copy_was_damaged_is_restored_too(stage: Stage, tmp_path: Path) -> None:
    kept, (jobs,) = kept_by(stage), store_of(stage).reader.queues
    store_of(stage)._writer.connection.execute("UPDATE queue SET modified = modified + 1")
    stage.change(jobs, retention_us=60 * SECOND_US)
    stage.send(jobs, "later")
    (tmp_path / "new").mkdir(mode=0o700)
    found = restore(kept, None, tmp_path / "new", open_follower)
    assert found.lsn == len(kept.entries)
    (said,) = found.damaged
    assert said.startswith(
        f"record {found.lsn - 1} was applied, though its owner had other rows: SQLITE_CHANGESET_DATA"
    )
    with closing(connect(tmp_path / "new" / "veilmq.db")) as connection:
        assert digest(connection) == state_at(kept, stage.now)


def test_nothing_is_made_of_nothing(stage: Stage, tmp_path: Path) -> None:
    kept = kept_by(stage)
    for to, first, why in ((0, 1, "nothing from before that instant"), (stage.now - 9 * SECOND_US, 3, "begin with")):
        kept.first = first
        place = tmp_path / str(first)
        place.mkdir(mode=0o700)
        with pytest.raises(SourceUnusable, match=why):
            restore(kept, Instant(to), place, open_follower)


def test_equal_files_have_equal_digests_and_others_have_not(stage: Stage, tmp_path: Path) -> None:
    database = store_of(stage).directory.database
    copy_checked(database, tmp_path / "copy", is_owner=True)
    with closing(connect(tmp_path / "copy")) as copy:
        assert digest(copy) == kept_by(stage).was[-1][1]
        copy.execute("UPDATE log_position SET lsn = 7")
        assert digest(copy) == kept_by(stage).was[-1][1]
        copy.execute("UPDATE mark SET sequence = sequence + 1")
        assert digest(copy) != kept_by(stage).was[-1][1]
