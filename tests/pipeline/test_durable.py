"""What a power cut leaves of what the pipeline keeps: whatever was told to be there is there.

Strategy: each `os.fsync` is done and noted. After a cut a file has the content, and a directory the names, of its last
fsync; what was removed since may be gone, or not.
"""

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from tests.pipeline.test_jobs_loop import Stage as LoopStage
from tests.support.histories import MadeUp, Workload, history, lognormal

from veilmq.pipeline import tables
from veilmq.pipeline.drain import bad_records
from veilmq.pipeline.drain.manifests import Directory
from veilmq.pipeline.errors import HistoryGap
from veilmq.pipeline.events.export import export
from veilmq.pipeline.events.reading import ParquetHistory
from veilmq.pipeline.loop import Loop
from veilmq.pipeline.sinks import delta
from veilmq.pipeline.sinks.delta import Written, add_files
from veilmq.store.files import replace_directory, restore, sync_directory

DAY = 86_400.0
Key = tuple[int, int]
"""Inode, and of a file its last change, for inodes are used again."""


def key_of(found: os.stat_result, *, is_directory: bool) -> Key:
    return found.st_ino, 0 if is_directory else found.st_mtime_ns


class Disk:
    def __init__(self) -> None:
        self.contents: dict[Key, bytes] = {}
        self.names: dict[Key, dict[str, Key]] = {}
        self.directories: set[Key] = set()
        self._fsync = os.fsync

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_dir():
            self.contents[key_of(os.fstat(descriptor), is_directory=False)] = path.read_bytes()
            return
        key = key_of(os.fstat(descriptor), is_directory=True)
        self.names[key] = {}
        for each in os.scandir(path):
            self.names[key][each.name] = key_of(each.stat(), is_directory=each.is_dir())
            if each.is_dir():
                self.directories.add(self.names[key][each.name])

    def after_cut(self, root: Path, target: Path, *, removals_last: bool) -> Path:
        """What is left of `root`. removals_last: what was removed is gone, though no fsync said so."""
        alive = {key_of(each.stat(), is_directory=each.is_dir()) for each in [root, *root.rglob("*")] if each.exists()}
        parent = self.names.get(key_of(root.parent.stat(), is_directory=True), {})
        assert root.name in parent, f"{root} has no name"
        self._restore(parent[root.name], target, alive if removals_last else None)
        return target

    def _restore(self, key: Key, target: Path, alive: set[Key] | None) -> None:
        target.mkdir()
        for name, each in self.names.get(key, {}).items():
            if alive is not None and each not in alive:
                continue
            if each in self.directories:
                self._restore(each, target / name, alive)
            else:
                (target / name).write_bytes(self.contents.get(each, b""))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(os, "fsync", made.fsync)
    return made


@pytest.fixture(scope="module")
def events() -> pa.Table:
    return history([Workload("q", lognormal(20, 1), "t", 300)], seed=1, span=3 * DAY)


def read(place: Path) -> pa.Table:
    found = ParquetHistory(str(place))
    return pa.Table.from_batches(found.read(*found.bounds()))


@pytest.mark.parametrize("removals_last", [False, True])
@pytest.mark.parametrize("is_tidied", [False, True], ids=["exported", "tidied"])
def test_exported_events_outlive_it(
    disk: Disk, events: pa.Table, tmp_path: Path, is_tidied: bool, removals_last: bool
) -> None:
    """The server may have trimmed its own since."""
    place = tmp_path / "deep" / "events"
    export(MadeUp(events), place, file_rows=200)
    if is_tidied:
        assert tables.compact(place) > 0
    left = disk.after_cut(tmp_path / "deep", tmp_path / "left", removals_last=removals_last) / "events"
    assert read(left).equals(events)


def test_a_day_that_a_tidy_took_away_is_back_before_an_export_goes_on(events: pa.Table, tmp_path: Path) -> None:
    """Killed between two renames. Else its offsets were asked for again, and the server may have trimmed them."""
    half = events.num_rows // 2
    export(MadeUp(events), tmp_path, until=half, file_rows=200)
    last = max(tmp_path.glob("day=*"))
    last.rename(tmp_path / f".{last.name}.old")
    assert export(MadeUp(events), tmp_path, file_rows=200) == (half, events.num_rows)
    assert read(tmp_path).equals(events)


def test_the_old_table_is_kept_until_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run was killed between the two renames, and so is the one after it, before its first."""
    beside, place, old = tmp_path / ".t.new", tmp_path / "t", tmp_path / ".t.old"
    beside.mkdir()
    old.mkdir()

    def dies(*_: Any) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            replace_directory(beside, place)
    assert old.is_dir()
    restore(tmp_path)
    replace_directory(beside, place)
    assert [each.name for each in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("removals_last", [False, True])
def test_a_manifest_and_its_bad_records_outlive_it(disk: Disk, tmp_path: Path, removals_last: bool) -> None:
    from veilmq.pipeline.drain.manifests import MANIFEST_SCHEMA

    directory = Directory(tmp_path / "deep" / "manifests", "orders")
    try:
        offset = directory.write(1, MANIFEST_SCHEMA.empty_table())
        row = bad_records.BadRecord(id="1", body="{", reason="no JSON")
        bad_records.write(directory.path / offset.file, 0, [row])
    finally:
        directory.close()
    left = disk.after_cut(tmp_path / "deep", tmp_path / "left", removals_last=removals_last) / "manifests"
    again = Directory(left, "orders")
    try:
        assert again.checked(offset).exists()
    finally:
        again.close()
    assert bad_records.read_bad_records(left) == [row]


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies before it syncs"])
def test_a_commit_to_a_delta_table_outlives_it(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Its messages are deleted next, also by a process that finds the batch committed by one that died."""
    table, rows = tmp_path / "deep" / "table", pa.table({"n": [1, 2]})
    table.mkdir(parents=True)
    for batch in (0, 1):
        name = f"{batch}.parquet"
        pq.write_table(rows, table / name)
        with (table / name).open("rb") as file:
            os.fsync(file.fileno())
        written = [Written(name, (table / name).stat().st_size, 2, "q")]
        with monkeypatch.context() as patch:
            if dies:
                patch.setattr(delta, "_sync_log", lambda path: None)
            assert add_files(str(table), rows.schema, written, "q", batch)
        assert not add_files(str(table), rows.schema, written, "q", batch)
    sync_directory(tmp_path)
    left = disk.after_cut(tmp_path / "deep", tmp_path / "left", removals_last=False) / "table"
    assert DeltaTable(left).to_pyarrow_table()["n"].to_pylist() == [1, 2, 1, 2]


def test_a_table_that_is_made_anew_outlives_it_too(disk: Disk, tmp_path: Path) -> None:
    """Its log has the names of the one before, and the directory may be the same."""
    table, rows = tmp_path / "deep" / "table", pa.table({"n": [1, 2]})
    for app in ("one", "two", "three"):
        for each in table.glob("**/*.*"):
            each.unlink()
        table.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, table / "0.parquet")
        with (table / "0.parquet").open("rb") as file:
            os.fsync(file.fileno())
        assert add_files(str(table), rows.schema, [Written("0.parquet", 2, 2, "q")], app, 0)
        sync_directory(tmp_path)
        left = disk.after_cut(tmp_path / "deep", tmp_path / app, removals_last=False) / "table"
        assert DeltaTable(left).version() == 1


@pytest.mark.slow
def test_a_delta_table_that_a_job_replaces_outlives_it(disk: Disk, spark: Any, tmp_path: Path) -> None:
    """A loop keeps its plans there, and its state says that they are planned."""
    for number in (2, 3):
        tables.write(spark.range(number), tmp_path / "deep" / "table", "delta")
    sync_directory(tmp_path)
    left = disk.after_cut(tmp_path / "deep", tmp_path / "left", removals_last=True) / "table"
    assert sorted(DeltaTable(left).to_pyarrow_table()["id"].to_pylist()) == [0, 1, 2]


def test_a_loop_whose_pending_leases_are_gone_says_so(events: pa.Table, tmp_path: Path) -> None:
    """To go on without them would be to forget leases."""
    export(MadeUp(events), tmp_path / "events")
    loop = tmp_path / "loop"
    loop.mkdir()
    state = {"next": 100, "pending": "pending-100", "source": str(tmp_path / "events")}
    (loop / "state.json").write_text(json.dumps(state))
    given = ParquetHistory(str(tmp_path / "events")), {"path": str(tmp_path / "events")}
    with pytest.raises(HistoryGap, match=r"pending-100 is missing.* or remove .*/loop to begin anew"):
        Loop(loop).run(None, *given, now=0, timer=lambda: 0.0)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("removals_last", [False, True])
def test_a_loops_state_outlives_it_with_what_it_names(
    disk: Disk, spark: Any, tmp_path: Path, removals_last: bool
) -> None:
    stage = LoopStage(spark, tmp_path / "deep")
    for share in (0.5, 1.0):
        stage.grow(share)
        stage.run()
    cells, pending = stage.loop.cells(), json.loads((stage.directory / "state.json").read_text())["pending"]
    rows = tables.load(stage.directory / pending)
    left = disk.after_cut(tmp_path / "deep", tmp_path / "left", removals_last=removals_last) / "loop"
    state = json.loads((left / "state.json").read_text())
    assert (state["runs"], state["pending"]) == (2, pending)
    assert tables.load(left / pending).equals(rows)
    assert Loop(left).cells().equals(cells)
    assert tables.load(left / "timeouts").num_rows == 2
    assert tables.retain(left / "cells", date(2000, 1, 1)) == 0
