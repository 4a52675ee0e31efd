"""A server alone that ships what it writes: what was uploaded gives the tables back, whatever happened in between."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis.stateful import rule
from tests.store.test_machine import StoreMachine, play
from tests.support.contract.stage import Stage
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.engine.directory import renew
from veilmq.model.commands import Sweep
from veilmq.model.instant import DAY_US, SECOND_US, Instant
from veilmq.store import Options, Store
from veilmq.store.archive import EPOCH_MIN, ArchiveSource, PlaceFailed, place_at, segments, shipping, snapshots
from veilmq.store.archive.shipping import Archive
from veilmq.store.log import Diverged, SourceUnusable, restore
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.effects import digest
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools.backup import copy_exactly

open_follower = partial(SqliteFollower, options=SMALL)


class ArchivedFactory(SqliteFactory):
    """Opens stores that ship to a folder, when they are told to."""

    wall = Instant(0)
    snapshot_bytes = 1 << 30
    keep_us = DAY_US

    def __init__(self, path: Path, options: Options = SMALL) -> None:
        super().__init__(path, options)
        self.place = place_at(str(path.with_name("place")))
        self.kind = self._open  # type: ignore[assignment]

    def _open(self, path: Path, options: Options) -> SqliteStore:
        path.mkdir(mode=0o700, exist_ok=True)
        self.archive = Archive(
            self.place, "place", path, copy_exactly,
            keep_us=self.keep_us, every_s=1, wall=self.wall, snapshot_bytes=self.snapshot_bytes,
        )  # fmt: skip
        return SqliteStore(path, options, archive=self.archive)

    def kill(self, store: Store) -> None:
        """See `SqliteFactory.kill`. The spool has what a close writes, and the tables have not."""
        super().kill(store)
        if self.archive._file is not None:
            os.close(self.archive._file)
            self.archive._file = None

    def ship(self, store: Store) -> bytes:
        """Upload all; returns the digest of the tables then."""
        assert isinstance(store, SqliteStore)
        store.apply_log()
        self.archive.step()
        assert self.archive.lag_s == 0
        return digest(store._writer.connection)

    def restored(self, place: Path, to: int | None = None) -> bytes:
        """The digest of the tables that the archive gives."""
        place.mkdir(mode=0o700)
        source = ArchiveSource(self.place, "place")
        found = restore(source, None if to is None else Instant(to), place, open_follower)
        assert found.damaged == []
        self.goes_on = found.goes_on
        with closing(connect(place / "veilmq.db")) as connection:
            return digest(connection)


class ArchivedMachine(StoreMachine):
    """Random commands, kills and restarts; what was shipped is restored now and then."""

    factory = ArchivedFactory
    restores = 0

    @rule()
    def ship_and_restore(self) -> None:
        factory = self.stage.factory
        assert isinstance(factory, ArchivedFactory)
        expected = factory.ship(self.stage.store)
        ArchivedMachine.restores += 1
        with tempfile.TemporaryDirectory() as place:
            assert factory.restored(Path(place) / "restored") == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_shipped_gives_the_tables_back() -> None:
    ArchivedMachine.restores = 0
    while ArchivedMachine.restores <= 2:  # Hypothesis leaves a rule out of many of its examples
        play(ArchivedMachine, examples=12, steps=40)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    playing = Stage(ArchivedFactory(tmp_path / "data"))
    yield playing
    playing.store.close()
    factory_of(playing).archive.close()


def factory_of(stage: Stage) -> ArchivedFactory:
    assert isinstance(stage.factory, ArchivedFactory)
    return stage.factory


def closed(stage: Stage) -> None:
    stage.store.close()
    factory_of(stage).archive.close()


def copied_apart(stage: Stage, tmp_path: Path) -> None:
    """Close it, and copy its directory."""
    closed(stage)
    shutil.copytree(tmp_path / "data", tmp_path / "earlier")


def put_back(stage: Stage, tmp_path: Path) -> None:
    """Close it, and put the copy in the place of its directory."""
    closed(stage)
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "earlier").rename(tmp_path / "data")


def epochs(factory: ArchivedFactory) -> list[int]:
    (lineage,) = factory.place.list("")
    return sorted({manifest.epoch for _, manifest in snapshots(factory.place, lineage)})


def test_a_kill_costs_no_snapshot_and_a_lost_spool_one(stage: Stage, tmp_path: Path) -> None:
    """What was committed and not yet uploaded is in the spool; without it the archive begins anew."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    for number in range(3):
        stage.send(jobs, f"before a kill {number}")
        store_of(stage).apply_log()
        stage.reopen(kill=True)
        expected = factory.ship(stage.store)
        assert factory.restored(tmp_path / f"killed {number}") == expected
    assert len(epochs(factory)) == 1
    stage.send(jobs, "before a power cut")
    store_of(stage).apply_log()
    factory.kill(stage.store)
    for left in (tmp_path / "data" / "archive").glob("spool-*"):
        left.unlink()
    stage.open()
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "anew") == expected
    assert len(epochs(factory)) == 2


def test_a_time_without_the_archive_begins_a_new_epoch(stage: Stage, tmp_path: Path) -> None:
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    stage.store.close()
    folder = tmp_path / "data" / "archive"
    (folder / "copy-of-a-kill").mkdir()
    (folder / "spool-1-1").touch()
    stage.store = SqliteStore(tmp_path / "data", SMALL)
    assert [each.name for each in folder.iterdir()] == ["state.json"]
    stage.send(jobs, "unseen")
    stage.store.close()
    stage.open()
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected
    assert len(epochs(factory)) == 2
    newest = max((tmp_path / "place").glob("*/snapshots/*/manifest.json"))
    newest.write_bytes(newest.read_bytes()[:30])
    for place, to in (("older", None), ("at once", stage.now)):
        (tmp_path / place).mkdir(mode=0o700)
        (told,) = restore(ArchiveSource(factory.place, "place"), to, tmp_path / place, open_follower).damaged
        assert "has a damaged manifest" in told


def test_a_directory_of_an_earlier_moment_begins_a_new_epoch(stage: Stage, tmp_path: Path) -> None:
    """Put back by hand, or by a power cut that took what had been uploaded before it was synced: else records with the
    same numbers stood beside each other, and nothing after them could be restored."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    copied_apart(stage, tmp_path)
    stage.open()
    for number in range(3):
        stage.send(jobs, f"lost {number}")
        factory.ship(stage.store)
    put_back(stage, tmp_path)
    stage.open()
    stage.send(jobs, "kept")
    store_of(stage).apply_log()
    factory.archive.step()
    assert factory.archive.lag_s > 0, "the new epoch has no snapshot yet"
    stage.send(jobs, "kept, too")
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected
    assert len(epochs(factory)) == 2


def test_what_was_left_behind_with_a_clock_ahead_is_not_the_newest(stage: Stage, tmp_path: Path) -> None:
    """The clock was ahead for a while, and the directory was put back to a copy from before."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    copied_apart(stage, tmp_path)
    now = stage.now
    stage.open()
    stage.later(20 * DAY_US)
    stage.send(jobs, "left behind")
    factory.archive._snapshot_at = -1e9
    factory.ship(stage.store)
    put_back(stage, tmp_path)
    stage.clock.now = now
    stage.open()
    for number in range(3):
        stage.send(jobs, f"kept {number}")
        store_of(stage).apply_log()
        factory.archive.step()
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected


def test_a_snapshot_without_records_that_was_left_behind_is_not_the_newest(stage: Stage, tmp_path: Path) -> None:
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    copied_apart(stage, tmp_path)
    stage.store = SqliteStore(tmp_path / "data", SMALL)  # a while without the archive
    stage.send(jobs, "left behind")
    stage.store.close()
    stage.open()
    factory.ship(stage.store)
    put_back(stage, tmp_path)
    stage.open()
    for number in range(3):
        stage.send(jobs, f"kept {number}")
        store_of(stage).apply_log()
        factory.archive.step()
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected


def test_an_instant_from_before_a_restore_can_be_restored(stage: Stage, tmp_path: Path) -> None:
    """What was restored archives at the same place, as another lineage. Its first snapshot is of the state that was
    restored, and so later than the newest one of the lineage before."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    was = []
    for body in ("first", "second"):
        stage.later(3_600 * SECOND_US)
        stage.send(jobs, body)
        was.append((stage.now, factory.ship(stage.store)))
    stage.store.close()
    factory.archive.close()
    shutil.rmtree(tmp_path / "data")
    factory.restored(tmp_path / "data", was[0][0])
    renew(tmp_path / "data" / "veilmq.db")
    stage.later(3_600 * SECOND_US)
    factory.wall = stage.now
    stage.open()
    factory.ship(stage.store)
    stage.send(jobs, "third")
    factory.archive._snapshot_at = -1e9
    factory.ship(stage.store)
    assert len(factory.place.list("")) == 2
    assert factory.restored(tmp_path / "new", was[1][0]) == was[1][1]
    assert factory.goes_on == factory.wall


def test_a_place_that_lost_its_snapshots_gets_another(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk is not mounted, or somebody emptied it."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    (tmp_path / "place").rename(tmp_path / "mounted")
    stage.reopen()
    stage.send(jobs, "after")
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected
    assert "place lacks the last snapshot (is it mounted?)" in caplog.text
    shutil.rmtree(tmp_path / "place")
    (tmp_path / "mounted").rename(tmp_path / "place")
    stage.reopen()
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "again") == expected, "the old snapshot is there, and not what follows"


def test_what_a_kill_left_in_the_redo_log_has_its_instant(stage: Stage, tmp_path: Path) -> None:
    """A restore to an instant before it leaves it out."""
    factory, jobs = factory_of(stage), stage.create()
    stage.send(jobs, "before")
    expected = factory.ship(stage.store)
    then = stage.now + SECOND_US
    stage.later(10 * SECOND_US)
    stage.send(jobs, "after")
    assert store_of(stage)._writer.redo.unapplied
    stage.reopen(kill=True)
    factory.ship(stage.store)
    assert factory.restored(tmp_path / "then", then) == expected
    factory.archive._snapshot_at = -1e9
    factory.ship(stage.store)
    with pytest.raises(SourceUnusable, match="nothing from before that instant") as refused:
        factory.restored(tmp_path / "never", 1)
    assert factory.restored(tmp_path / "earliest", refused.value.since) == expected


def test_damaged_snapshots_are_told_if_none_is_whole(stage: Stage, tmp_path: Path) -> None:
    factory = factory_of(stage)
    stage.create()
    factory.ship(stage.store)
    for part in (tmp_path / "place").glob("*/snapshots/*/00000"):
        part.unlink()
    with pytest.raises(SourceUnusable, match=r"no snapshot from then is whole: the snapshot .* lacks part 0"):
        factory.restored(tmp_path / "new")
    (manifest,) = (tmp_path / "place").glob("*/snapshots/*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:30])
    with pytest.raises(SourceUnusable, match=r"no snapshot from then is whole: the snapshot .* has a damaged manifest"):
        factory.restored(tmp_path / "newer")
    manifest.unlink()
    with pytest.raises(SourceUnusable, match="it has no complete snapshot: none was finished yet"):
        factory.restored(tmp_path / "newest")


def test_a_snapshot_lacks_what_only_the_redo_log_has(stage: Stage, tmp_path: Path) -> None:
    """It comes with a later record, and once."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    stage.later(SECOND_US)
    stage.send(jobs, "in the redo log alone")
    assert store_of(stage)._writer.redo.unapplied
    factory.archive._snapshot()
    assert store_of(stage)._writer.redo.unapplied
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected


def test_changes_are_shipped_while_a_snapshot_is_uploaded(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory, jobs = factory_of(stage), stage.create()
    monkeypatch.setattr(factory.archive, "_every_s", 0)
    write = factory.place.write

    def slow(key: str, content: bytes) -> None:
        write(key, content)
        if key.endswith("/00000"):
            stage.send(jobs, "meanwhile")
            store_of(stage).apply_log()

    monkeypatch.setattr(factory.place, "write", slow)
    factory.archive.step()
    assert factory.archive.lag_s == 0
    assert factory.restored(tmp_path / "new") == digest(store_of(stage)._writer.connection)


def test_a_message_in_quarantine_is_in_the_snapshot(stage: Stage, tmp_path: Path) -> None:
    """One that is damaged and not quarantined yet stops it."""
    factory, jobs = factory_of(stage), stage.create()
    sent = stage.send(jobs, "damaged")
    store_of(stage).apply_log()
    stage.store.close()
    factory.damage(sent.sequence)
    stage.open()
    with pytest.raises(Diverged, match=f"message {sent.sequence}"):
        factory.ship(stage.store)
    assert stage.receive(jobs) == []
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected


def test_what_is_not_committed_is_not_shipped(stage: Stage, tmp_path: Path) -> None:
    """A batch that is rolled back leaves nothing in the spool."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    assert factory.archive.epoch >= EPOCH_MIN
    stage.send(jobs, "committed")
    store_of(stage).apply_log()
    writer = store_of(stage)._writer
    expected = digest(writer.connection)
    writer.begin(stage.now)
    writer.write("UPDATE origin SET client = 'other'", ())
    writer.finish()
    assert writer.shipping is not None
    writer.shipping.append(7)
    factory.archive.step()
    writer.rollback()
    factory.archive.step()
    assert factory.restored(tmp_path / "new") == expected
    stage.send(jobs, "after")
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "later") == expected


def test_what_is_old_is_dropped_and_any_instant_of_late_can_be_restored(stage: Stage, tmp_path: Path) -> None:
    factory = factory_of(stage)
    jobs = stage.create()
    was = {}
    for number in range(12):
        stage.later(SECOND_US)
        stage.send(jobs, str(number))
        factory.archive._snapshot_bytes, factory.archive._keep_us = 0, 3 * SECOND_US
        factory.archive._state.bytes = 1 << 30  # a snapshot is due
        was[stage.now] = factory.ship(stage.store)
    (lineage,) = factory.place.list("")
    kept = [manifest.clock for _, manifest in snapshots(factory.place, lineage)]
    assert stage.now - 4 * SECOND_US <= kept[-1] <= stage.now - 3 * SECOND_US
    assert segments(factory.place, lineage)[0].last > 5
    for number, then in enumerate(list(was)[-3:]):
        assert factory.restored(tmp_path / str(number), then) == was[then]


def test_a_place_that_fails_costs_nothing_but_lag(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    blocked = tmp_path / "place" / factory.place.list("")[0] / "records"
    for each in blocked.iterdir():
        each.unlink()
    blocked.rmdir()
    blocked.touch()
    stage.send(jobs, "meanwhile")
    store_of(stage).apply_log()
    with pytest.raises(PlaceFailed):
        factory.archive.step()
    factory.archive._try_step()
    assert factory.archive.lag_s > 0
    assert "the archive lags" in caplog.text
    blocked.unlink()
    factory.archive._snapshot_at = -1e9  # the folder is empty now: a snapshot is due
    factory.archive._try_step()
    assert (factory.archive.lag_s, factory.archive.trouble) == (0, "")


@pytest.mark.parametrize("file_bytes", [8_000, 1 << 20], ids=["many files", "one file"])
def test_a_spool_is_bounded_while_its_place_fails(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    """Beyond the bound it begins anew, with a snapshot when the place answers; also where it answers too slowly."""
    monkeypatch.setattr(shipping, "SPOOL_BYTES_MAX", 32_768)
    monkeypatch.setattr(shipping, "_FILE_BYTES", file_bytes)
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    place = tmp_path / "place"
    place.rename(tmp_path / "away")
    place.touch()
    bytes_max = 0
    for _ in range(40):
        stage.send(jobs, "x" * 2_000)
        factory.archive._try_step()
        bytes_max = max(bytes_max, sum(path.stat().st_size for path in (tmp_path / "data" / "archive").glob("spool-*")))
    assert 32_768 < bytes_max < 40_960
    place.unlink()
    (tmp_path / "away").rename(place)
    factory.archive._try_step()
    factory.ship(stage.store)
    write, spools = factory.place.write, tmp_path / "data" / "archive"

    def slow(key: str, content: bytes) -> None:
        """Messages come all the time while a place is slow."""
        for _ in range(40):
            stage.send(jobs, "x" * 2_000)
            store_of(stage).apply_log()
        write(key, content)

    with monkeypatch.context() as patch:
        patch.setattr(factory.place, "write", slow)
        stage.send(jobs, "during an upload")
        factory.archive.step()
    assert 32_768 < sum(path.stat().st_size for path in spools.glob("spool-*")) < 40_960
    factory.archive.step()
    stage.send(jobs, "of the newest epoch")
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected
    assert len(epochs(factory)) == 3


def test_while_a_place_fails_one_file_grows_up_to_a_size(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each try would become an object each; a large one is uploaded from memory."""
    monkeypatch.setattr(shipping, "_FILE_BYTES", 10_000)
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    place, spools = tmp_path / "place", tmp_path / "data" / "archive"
    place.rename(tmp_path / "away")
    place.touch()
    for _ in range(20):
        stage.send(jobs, "x" * 2_000)
        factory.archive._try_step()
    sizes = sorted(path.stat().st_size for path in spools.glob("spool-*"))
    assert 4 <= len(sizes) <= 7
    assert sizes[-1] < 14_000
    place.unlink()
    (tmp_path / "away").rename(place)
    factory.archive._try_step()
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected


def test_a_file_that_is_just_being_opened_is_not_removed(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and empty, before the store's thread has it."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    archive, really = factory.archive, os.open
    looks, opened, shipped = threading.Event(), threading.Event(), threading.Event()

    class Folder(type(tmp_path)):  # type: ignore[misc]
        def glob(self, pattern: str) -> list[Path]:
            looks.set()
            opened.wait(0.3)
            return list(Path(self).glob(pattern))

    def slowly(*arguments: Any) -> int:
        found = really(*arguments)
        if "spool-" in str(arguments[0]):
            opened.set()
            shipped.wait(0.3)
        return found

    def ship() -> None:
        archive._ship()
        shipped.set()

    folder, archive._folder = archive._folder, Folder(archive._folder)
    thread = threading.Thread(target=ship)
    thread.start()
    looks.wait(10)
    monkeypatch.setattr(shipping.os, "open", slowly)
    stage.send(jobs, "while the archive looks for files")
    store_of(stage).apply_log()
    thread.join()
    monkeypatch.undo()
    archive._folder = folder
    stage.send(jobs, "later")
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected
    assert len(epochs(factory)) == 1


def test_a_spool_that_lost_a_file_begins_a_new_epoch(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nothing after the gap could be restored, and nobody would know."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    stage.send(jobs, "lost")
    store_of(stage).apply_log()
    factory.archive._rotate()
    for left in (tmp_path / "data" / "archive").glob("spool-*"):
        left.unlink()
    for body in ("the gap is seen", "of the new epoch"):
        stage.send(jobs, body)
        store_of(stage).apply_log()
        factory.archive.step()
    assert "the spool lost the changes" in caplog.text
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected
    assert len(epochs(factory)) == 2


def test_a_spool_that_cannot_be_written_begins_a_new_epoch(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store goes on."""
    factory, jobs = factory_of(stage), stage.create()
    factory.ship(stage.store)
    (tmp_path / "data" / "archive").rename(tmp_path / "elsewhere")
    stage.send(jobs, "not spooled")
    store_of(stage).apply_log()
    (tmp_path / "elsewhere").rename(tmp_path / "data" / "archive")
    assert "the spool cannot be written" in factory.archive.trouble
    factory.archive.step()
    with monkeypatch.context() as patch:
        patch.delattr(factory.archive, "_copying")  # without a record there is nothing to copy
        factory.archive.step()
    factory.archive._try_step()
    assert factory.archive.lag_s > 0, "only the snapshot brings what was not spooled"
    assert "in a moment, for the spool cannot be written" in factory.archive.trouble
    stage.send(jobs, "of the new epoch")
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "new") == expected
    assert len(epochs(factory)) == 2
    stage.do(Sweep())
    factory.archive.step()
    factory.archive._failed = True
    factory.archive._try_step()
    factory.archive._try_step()
    assert factory.archive.trouble == "it begins anew with a snapshot in a moment"
    stage.later(1)
    stage.do(Sweep())  # an idle server, too, gets its snapshot
    factory.archive._try_step()
    assert (factory.archive.trouble, factory.archive.lag_s) == ("", 0.0)
    factory.archive._failed = True
    factory.archive._try_step()
    stage.send(jobs, "while no snapshot can be written")
    store_of(stage).apply_log()
    with monkeypatch.context() as patch:
        patch.delattr(factory.archive, "_copying")
        factory.archive._try_step()
    stage.store.close()
    factory.archive.close()
    assert "the last changes are not in the archive yet" in caplog.text
    stage.open()
    assert factory.archive.lag_s > 0, "there is still no snapshot"
    expected = factory.ship(stage.store)
    assert factory.restored(tmp_path / "newer") == expected
