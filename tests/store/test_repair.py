"""Damage to the files of a data directory: a start or `check` tells it, a repair brings back what a source holds."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from hashlib import md5
from pathlib import Path
from typing import Final

import apsw
import pytest
from tests.support.acknowledged import everything_in
from tests.support.contract.stage import TESTER, Stage
from tests.support.damaged import FILES, Lived, judge, live
from tests.support.sqlite import SMALL, SqliteFactory, store_of

from veilmq.model.commands import Delete
from veilmq.model.errors import ReceiptInvalid
from veilmq.model.instant import DAY_US, SECOND_US, Instant
from veilmq.model.messages import id_text
from veilmq.store.directory import DatabaseFailed, DestinationTaken, DirectoryHeld, NotOurs
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.raw import assemble
from veilmq.store.sqlite.raw.logs import read_wal
from veilmq.store.sqlite.repair import Repair
from veilmq.store.sqlite.repair.repair import EXPORT, repair
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check
from veilmq.store.sqlite.tools.backup import backup_directory
from veilmq.testing import chance
from veilmq.testing.for_each import for_each

PAGE_BYTES: Final = 4096
FRAME_BYTES: Final = 24 + PAGE_BYTES
"""Of a WAL, behind its header of 32 bytes (SQLite, "WAL File Format")."""
TABLE: Final = {"veilmq.db": 14, "veilmq.db-wal": 14, "redo": 10, "committed": 4}
"""Flips in each file; the slow test has many more."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    """Files of a killed store."""
    return live(tmp_path_factory.mktemp("killed") / "data")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    """Files of a closed store: all is in the database."""
    return live(tmp_path_factory.mktemp("closed") / "data", closed=True, rounds=4)


def repaired(source: Path, destination: Path, backup: Path | None = None) -> Repair:
    """Repair without a progress bar. A kill amid it leaves nothing that a server would serve."""
    steps = list[str]()

    def look(stage: str, done: int, total: int) -> None:
        steps.append(stage)
        assert not (destination / "veilmq.db").exists()
        assert (destination / "veilmq.db.part").exists()

    report = repair(source, destination, backup, look)
    assert steps
    assert [path.name for path in destination.iterdir() if path.name != "not-placed.jsonl"] == ["veilmq.db"]
    return report


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def flips(lived: Lived, name: str, count: int, seed: int) -> list[tuple[int, int]]:
    """Places (byte, bit) in a file, most of them where something is written."""
    draw = chance(seed)
    content = (lived.directory / name).read_bytes()
    used = [at for at in range(len(content)) if any(content[max(0, at - 2) : at + 3])]
    places = [draw.choice(used) if used and draw.random() < 0.8 else draw.randrange(len(content)) for _ in range(count)]
    return [(place, draw.randrange(8)) for place in places]


def flipped(lived: Lived, tmp_path: Path, counts: dict[str, int], seed: int) -> Counter[tuple[str, str]]:
    """Flip bits, one a copy; returns how many ended how, by file."""
    table: Counter[tuple[str, str]] = Counter()
    for name, count in counts.items():
        file = lived.directory / name
        if not file.exists() or not file.stat().st_size:
            continue  # the WAL of a closed store is empty or gone
        for place, bit in flips(lived, name, count, seed):
            directory = lived.copy(tmp_path / "damaged")
            flip(directory / name, place, bit)
            verdict = judge(lived, directory, tmp_path / "repaired")
            shutil.rmtree(directory)
            table[name, verdict.name] += 1
            assert "silent" not in verdict.name, f"bit {bit} of byte {place} of {name}: {verdict.differences}"
    return table


@pytest.mark.parametrize("stopped", ["killed", "closed"])
def test_a_flipped_bit_is_told_or_harmless_and_repaired(
    stopped: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    table = flipped(request.getfixturevalue(stopped), tmp_path, TABLE, seed=33)
    assert not [each for each in table if each[1] == "partly"], table


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["killed", "closed"])
def test_hundreds_of_flipped_bits(
    stopped: str, tmp_path: Path, request: pytest.FixtureRequest, flips_count: int
) -> None:
    table = flipped(request.getfixturevalue(stopped), tmp_path, dict.fromkeys(FILES, flips_count), seed=10)
    print(table)
    assert sum(table[name, "partly"] for name in FILES) <= sum(table.values()) // 100, table
    assert sum(found for (_, verdict), found in table.items() if verdict.startswith("full")) > flips_count // 2, table


CUTS: Final[dict[str, tuple[str, Callable[[bytes], bytes]]]] = {
    "the WAL is lost": ("veilmq.db-wal", lambda content: b""),
    "the WAL ends behind a frame": ("veilmq.db-wal", lambda content: content[: 32 + 100 * FRAME_BYTES]),
    "the WAL ends within a frame": ("veilmq.db-wal", lambda content: content[: 32 + 60 * FRAME_BYTES + 99]),
    "the redo log is zeros": ("redo", lambda content: bytes(len(content))),
    "the redo log is cut": ("redo", lambda content: content[:1500]),
}


@pytest.mark.parametrize("damage", CUTS)
def test_of_cut_files_the_rest_is_kept_and_the_loss_is_told(killed: Lived, tmp_path: Path, damage: str) -> None:
    directory = killed.copy(tmp_path / "damaged")
    name, cut = CUTS[damage]
    (directory / name).write_bytes(cut((directory / name).read_bytes()))
    verdict = judge(killed, directory, tmp_path / "repaired")
    assert verdict.told
    assert verdict.repair is not None
    assert verdict.repair.events_missing
    assert verdict.repair.may_miss
    lost = sum(" is lost" in difference for difference in verdict.differences)
    assert 0 < lost <= verdict.repair.events_missing


def test_a_lost_database_leaves_what_the_wal_has(killed: Lived, tmp_path: Path) -> None:
    directory = killed.copy(tmp_path / "damaged")
    (directory / "veilmq.db").unlink()
    report = repaired(directory, tmp_path / "new")
    assert report.may_miss
    assert deliverable(report) > 20
    assert not any("is back" in line for line in killed.differences(tmp_path / "new"))


def test_a_destroyed_frame_costs_only_what_no_other_frame_has(killed: Lived, tmp_path: Path) -> None:
    def leases(directory: Path) -> dict[int, tuple[int, int]]:
        with closing(connect(directory / "veilmq.db")) as connection:
            return {row[0]: row[1:] for row in connection.execute("SELECT sequence, attempt, due FROM lease")}

    repaired(killed.copy(tmp_path / "whole"), tmp_path / "known")
    with closing(connect(tmp_path / "known" / "veilmq.db")) as connection:
        root = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'lease'").get
    frames = (killed.directory / "veilmq.db-wal").read_bytes()[32:]
    pages = [int.from_bytes(frames[at : at + 4]) for at in range(0, len(frames), FRAME_BYTES)]
    newest = [number for number, page in enumerate(pages) if page == root][-4:]
    size = (killed.directory / "veilmq.db-wal").stat().st_size // FRAME_BYTES
    table: Counter[str] = Counter()
    for numbers in (newest, *([number] for number in range(3, size, 20))):
        directory = killed.copy(tmp_path / "damaged")
        wal = directory / "veilmq.db-wal"
        content = bytearray(wal.read_bytes())
        for number in numbers:
            at = 32 + number * FRAME_BYTES
            content[at : at + FRAME_BYTES] = bytes(FRAME_BYTES)
        wal.write_bytes(content)
        verdict = judge(killed, directory, tmp_path / "repaired")
        table[verdict.name] += 1
        if numbers is newest:  # all leases are of an older page, but for what the history knows
            repaired(directory, tmp_path / "new")
            assert leases(tmp_path / "new") == leases(tmp_path / "known")
        shutil.rmtree(directory)
    assert "silent" not in str(table)
    assert table["full"] >= 7, table


@pytest.mark.parametrize("with_backup", [False, True])
def test_a_destroyed_page_is_filled_from_the_backup(closed: Lived, tmp_path: Path, with_backup: bool) -> None:
    backup = tmp_path / "backup"
    backup_directory(closed.directory / "veilmq.db", backup)
    counts: Counter[str] = Counter()
    for page in leaves(closed.directory / "veilmq.db"):
        directory = closed.copy(tmp_path / "damaged")
        zero(directory / "veilmq.db", page)
        with pytest.raises(DatabaseFailed, match="the database is damaged: "):  # zeros match their checksum
            backup_directory(directory / "veilmq.db", tmp_path / "copy")
        verdict = judge(closed, directory, tmp_path / "repaired", backup if with_backup else None)
        assert verdict.told
        assert verdict.repair is not None
        counts[verdict.name] += 1
        lost = {line.removesuffix(" is lost") for line in verdict.differences if line.endswith(" is lost")}
        assert len(verdict.repair.missing) == verdict.repair.missing_count == len(lost)
        assert {each.queue.rpartition("/")[2] for each in verdict.repair.missing} == {
            closed.there[body][0] for body in lost
        }
        shutil.rmtree(directory)
    assert counts["full"] == sum(counts.values()) if with_backup else counts["partly"] >= 2
    directory = closed.copy(tmp_path / "damaged")  # an empty page in the place of the table's first: no gap shows it
    write(directory / "veilmq.db", root(directory / "veilmq.db", "message"), page_of(directory / "veilmq.db", "topic"))
    verdict = judge(closed, directory, tmp_path / "repaired", backup if with_backup else None)
    assert (verdict.name, bool(verdict.told)) == ("full", True)
    shutil.rmtree(directory)
    pages = leaves(closed.directory / "veilmq.db", "history")
    assert len(pages) > 2
    empty, among = page_of(closed.directory / "veilmq.db", "topic"), leaves(closed.directory / "veilmq.db")[1]
    counted = Counter[str]()
    for page in pages:  # what had left is then not missing, although nobody knows any more that it left
        directory = closed.copy(tmp_path / "damaged")
        zero(directory / "veilmq.db", page)
        verdict = judge(closed, directory, tmp_path / "repaired", backup if with_backup else None)
        assert verdict.repair is not None
        assert (verdict.differences, verdict.repair.missing_count, verdict.repair.may_miss) == ([], 0, False)
        first = root(directory / "veilmq.db", "message")
        # Of the first page the pages below are still there, of the other the rows are nowhere.
        for place, content in ((first, empty), (among, empty), (among, bytes(PAGE_BYTES))):
            whole = page_at(directory / "veilmq.db", place)
            write(directory / "veilmq.db", place, content)
            verdict = judge(closed, directory, tmp_path / "repaired", backup if with_backup else None)
            assert verdict.repair is not None
            assert not verdict.repair.is_whole
            left = [line for line in verdict.repair.found if "of which only an index or a lease is left" in line]
            nameless = sum(int(line.partition(": ")[2].split()[0]) for line in left)
            assert all(line.endswith(" is lost") for line in verdict.differences)
            certain, unsure = verdict.repair.missing_count, verdict.repair.unsure_count
            assert certain <= len(verdict.differences) <= certain + unsure + nameless
            assert bool(verdict.differences) == (place == among and not with_backup)
            counted.update(named=certain, nameless=nameless, unsure=unsure)
            write(directory / "veilmq.db", place, whole)
        shutil.rmtree(directory)
    assert with_backup or min(counted[each] for each in ("named", "nameless", "unsure")) > 0, counted


def zero(database: Path, page: int) -> None:
    write(database, page, bytes(PAGE_BYTES))


def write(database: Path, page: int, content: bytes) -> None:
    with database.open("r+b") as file:
        file.seek((page - 1) * PAGE_BYTES)
        file.write(content)


def page_of(database: Path, table: str) -> bytes:
    """The first page of a table."""
    return page_at(database, root(database, table))


def page_at(database: Path, page: int) -> bytes:
    return database.read_bytes()[(page - 1) * PAGE_BYTES : page * PAGE_BYTES]


def root(database: Path, table: str) -> int:
    """The number of a table's first page."""
    with closing(apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
        return int(str(connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)).get))


def leaves(database: Path, table: str = "message") -> list[int]:
    """The pages with the rows of a table."""
    connection = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
    rows = connection.execute("SELECT pageno FROM dbstat WHERE name = ? AND pagetype = 'leaf'", (table,)).fetchall()
    connection.close()
    return [int(str(page)) for (page,) in rows]


def test_what_was_deleted_since_the_backup_does_not_come_back(stage: Stage, tmp_path: Path) -> None:
    queue = stage.create()
    for number in range(6):
        stage.send(queue, f"before {number}")
    stage.sweep()
    backup_directory(store_of(stage).directory.database, tmp_path / "backup")
    for message in stage.receive(queue, 2):
        stage.delete(queue, message.handle)
    stage.send(queue, "since")
    stage.store.close()
    database = store_of(stage).directory.database
    (page,) = leaves(database)
    whole = page_of(database, "message")
    zero(database, page)
    report = repaired(database.parent, tmp_path / "new", tmp_path / "backup")
    assert report.is_whole, report
    (content,) = report.queues
    assert content.visible + content.in_flight == 5  # what came since is still in the redo log
    write(database, page, whole)
    stage.open()
    stage.reopen()
    before = page_of(database, "message")
    for message in stage.receive(queue, 2):
        stage.delete(queue, message.handle)
    stage.store.close()
    after = page_of(database, "message")
    write(database, page, before)  # the disk lost the page's last write
    report = repaired(database.parent, tmp_path / "again")
    (content,) = report.queues
    assert (content.visible + content.in_flight, report.is_whole) == (3, True)
    write(database, page, after)
    stage.open()
    backup_directory(database, tmp_path / "before the update")
    (message,) = stage.receive(queue, 1)
    stage.extend(queue, message.handle, 1, body="new", md5=md5(b"new").digest(), size_bytes=3)
    stage.store.close()
    backup_directory(database, tmp_path / "after the update")
    whole = page_of(database, "message")
    zero(database, page)
    for backup, earlier in (("before the update", 1), ("after the update", 0)):
        report = repaired(database.parent, tmp_path / f"from {backup}", tmp_path / backup)
        assert (report.earlier_count, report.is_whole) == (earlier, not earlier)
        assert earlier == sum(id_text(message.id) in line and "earlier" in line for line in report.found)
    write(database, page, whole)
    with closing(connect(database)) as connection:
        connection.execute("DELETE FROM history WHERE offset < (SELECT max(offset) FROM history)")
    zero(database, page)
    report = repaired(database.parent, tmp_path / "trimmed", tmp_path / "before the update")
    assert (report.earlier_count, report.is_whole) == (3, False)
    assert "the backup is older than the history: bodies from it may have been updated since" in report.found
    write(database, page, whole)
    stage.open()


@pytest.mark.parametrize("told", [True, False])
def test_a_backup_of_another_history_replaces_no_message(tmp_path: Path, told: bool) -> None:
    """An earlier copy was restored and served after the backup was made: both gave the same numbers. The backup's
    history tells it, or else the ids do."""
    first = Stage(SqliteFactory(tmp_path / "first", SMALL))
    queue = first.create()
    for number in range(12):
        first.send(queue, f"before {number}".ljust(300))
    backup_directory(store_of(first).directory.database, tmp_path / "earlier")
    for number in range(24):
        first.send(queue, f"left behind {number}".ljust(300))
    backup_directory(store_of(first).directory.database, tmp_path / "backup")
    first.store.close()
    if not told:
        connection = connect(tmp_path / "backup" / "veilmq.db")
        connection.execute("DELETE FROM history")
        connection.close()
    served = Stage(SqliteFactory(tmp_path / "earlier", SMALL))
    for number in range(24):
        served.send(queue, f"after {number}".ljust(300))
    served.store.close()
    for page in leaves(tmp_path / "earlier" / "veilmq.db"):
        directory = shutil.copytree(tmp_path / "earlier", tmp_path / f"page {page}")
        zero(directory / "veilmq.db", page)
        report = repaired(directory, tmp_path / f"new {page}", tmp_path / "backup")
        store = SqliteStore(tmp_path / f"new {page}", SMALL)
        bodies = [message.body for message in everything_in(store, queue, first.now)]
        store.close()
        assert not [body for body in bodies if body.startswith("left behind")]
        assert deliverable(report) + report.missing_count == 36
        assert report.is_whole == (not report.missing_count)
        assert any("has another history" in each for each in report.found) == told


def test_a_backup_newer_than_the_database_is_taken_in_its_place(stage: Stage, tmp_path: Path) -> None:
    """A kill long after the last checkpoint, and the WAL is lost."""
    queue = stage.create()
    stage.reopen()
    store_of(stage)._writer.redo.close()
    stage.send(queue, "x" * 20_000)
    backup_directory(store_of(stage).directory.database, tmp_path / "backup")
    stage.factory.kill(stage.store)
    database = store_of(stage).directory.database
    database.with_name("veilmq.db-wal").unlink()
    assert repaired(database.parent, tmp_path / "without").events_missing == 1
    report = repaired(database.parent, tmp_path / "with", tmp_path / "backup")
    assert report.is_whole, report
    database.with_name("committed").write_text("lost\n")
    stage.open()


def test_a_wal_is_left_out_if_it_is_older_than_the_database(stage: Stage, tmp_path: Path) -> None:
    queue = stage.create()
    database = store_of(stage).directory.database
    wal = Path(f"{database}-wal")
    for number in range(40):
        stage.send(queue, "x" * 2_000)
        if number == 20:
            shutil.copyfile(wal, tmp_path / "wal")
    stage.store.close()
    shutil.copyfile(tmp_path / "wal", wal)
    with pytest.raises(NotOurs, match=r"which has all before offset .* without it"):
        SqliteStore(database.parent, SMALL)
    Path(f"{database}-shm").unlink()
    before = sorted(path.name for path in database.parent.iterdir())
    report = repaired(database.parent, tmp_path / "later")
    assert report.is_whole, report
    assert report.found[1:] == ["veilmq.db-wal: left out, because veilmq.db is of a later moment"]
    assert sorted(path.name for path in database.parent.iterdir()) == before
    wal.unlink()
    stage.open()


def test_a_wal_is_not_left_out_because_a_checkpoint_was_under_way(stage: Stage, tmp_path: Path) -> None:
    """A checkpoint copies pages in their order: the end of the history may be in the database before all else."""
    queue = stage.create()
    for number in range(700):
        stage.send(queue, f"first {number} ".ljust(3_000, "x"))
    for _ in range(66):
        for delivery in stage.receive(queue, 10):
            stage.delete(queue, delivery.handle)
    stage.later(SECOND_US)
    stage.sweep()
    stage.reopen()
    for number in range(240):
        stage.send(queue, f"later {number} ".ljust(300, "x"))
        if number % 6 == 5:
            stage.later(SECOND_US)
            stage.sweep()
    database = store_of(stage).directory.database
    stage.factory.kill(stage.store)
    wal = read_wal(Path(f"{database}-wal"), PAGE_BYTES)
    assemble(database, wal, tmp_path / "whole.db").close()
    whole = (tmp_path / "whole.db").read_bytes()
    pages = sorted(page for page in wal.newest() if page <= wal.pages)
    os.truncate(f"{database}-wal", 32 + len(wal.frames) * 95 // 100 * FRAME_BYTES)
    for part, done in enumerate([pages[at : at + 10] for at in range(0, len(pages) - 10, 10)]):
        with database.open("r+b") as file:
            for page in done:
                file.seek((page - 1) * PAGE_BYTES)
                file.write(whole[(page - 1) * PAGE_BYTES : page * PAGE_BYTES])
        new = tmp_path / f"new {part}"
        report = repaired(database.parent, new)
        assert not [line for line in report.found if "left out" in line], (part, report)
        with closing(SqliteStore(new, SMALL)) as there:
            bodies = {message.body.rstrip("x") for message in everything_in(there, queue, Instant(stage.now + DAY_US))}
        assert {f"later {number} " for number in range(200)} <= bodies, part
    shutil.rmtree(database.parent)
    stage.open()


def test_a_damaged_message_is_quarantined_or_comes_from_the_backup(closed: Lived, tmp_path: Path) -> None:
    directory = closed.copy(tmp_path / "damaged")
    backup_directory(directory / "veilmq.db", tmp_path / "backup")
    connection = connect(directory / "veilmq.db")
    connection.execute("UPDATE message SET body = x'00ff' WHERE sequence = (SELECT min(sequence) FROM message)")
    connection.close()
    report = repaired(directory, tmp_path / "new")
    assert sum(each.quarantined for each in report.queues) == 1
    assert not report.is_whole
    assert [problem.kind for problem in check(tmp_path / "new" / "veilmq.db").problems] == ["quarantine"]
    assert repaired(directory, tmp_path / "better", tmp_path / "backup").is_whole
    assert closed.differences(tmp_path / "better") == []


def test_a_queue_that_cannot_be_read_is_made_again(closed: Lived, tmp_path: Path) -> None:
    """By the history; and if that is gone too, under a name that says so, with a long retention."""
    directory = closed.copy(tmp_path / "damaged")
    connection = connect(directory / "veilmq.db")
    connection.execute("DELETE FROM queue WHERE name = 'plain'")
    connection.close()
    repaired(directory, tmp_path / "new")
    assert closed.differences(tmp_path / "new") == []
    connection = connect(directory / "veilmq.db")
    connection.execute("DELETE FROM history")
    connection.close()
    report = repaired(directory, tmp_path / "without")
    (made,) = [each for each in report.queues if "recovered-" in each.queue]
    assert made.visible == sum(queue == "plain" for queue, _ in closed.there.values())
    for page in leaves(directory / "veilmq.db"):
        zero(directory / "veilmq.db", page)
    (directory / "redo").unlink()
    told = [line for line in repaired(directory, tmp_path / "empty").found if line.startswith("queue unknown: ")]
    count = f"{made.visible} messages perhaps missing, of which only an index or a lease is left"
    assert told == [f"queue unknown: {count}"]


def test_old_handles_are_void_and_the_source_is_as_it_was(stage: Stage, tmp_path: Path) -> None:
    queue = stage.create()
    stage.send(queue, "held")
    handle = stage.take(queue).handle
    stage.factory.kill(stage.store)
    source = store_of(stage).directory.path
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}
    report = repaired(source, tmp_path / "new")
    assert report.is_whole
    assert before == {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["veilmq.db"]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    new = SqliteStore(tmp_path / "new", SMALL)
    command = Delete(queue=queue, origin=TESTER, handle=handle, arrived=stage.now)
    assert isinstance(new.apply([command], stage.now).outcomes[0], ReceiptInvalid)
    epochs = []
    for store in (new, SqliteStore(source, SMALL)):
        with store.reader.look() as view:
            epochs.append(view.head()[2])
        store.close()
    assert epochs[0] != epochs[1]
    stage.open()


def test_a_held_source_and_a_taken_destination_are_refused(stage: Stage, tmp_path: Path) -> None:
    source = store_of(stage).directory.path
    with pytest.raises(DirectoryHeld):
        repaired(source, tmp_path / "new")
    stage.store.close()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(DestinationTaken):
        repaired(source, tmp_path / "taken")
    with pytest.raises(NotOurs):
        repaired(source, tmp_path / "new", tmp_path / "taken")  # no backup
    assert not (tmp_path / "new").exists()
    stage.open()


def test_what_was_never_committed_is_not_taken_for_committed(stage: Stage, tmp_path: Path) -> None:
    """Frames of a torn transaction may stay behind those of later ones, with the same salts, whole among themselves."""
    queue = stage.create()
    store_of(stage)._writer.redo.close()
    stage.send(queue, "x" * 20_000)
    stage.factory.kill(stage.store)
    source = store_of(stage).directory.path
    wal = source / "veilmq.db-wal"
    content = wal.read_bytes()
    ends = 32 + 7 * FRAME_BYTES  # of the first transaction, with its commit frame
    wal.write_bytes(content + content[ends - 2 * FRAME_BYTES : ends])  # the second continues the first
    report = repaired(source, tmp_path / "new")
    assert report.is_whole
    assert len(report.found) == 1, report.found  # a line about the WAL
    wal.write_bytes(content)
    stage.open()


@for_each("fixture", sorted((Path(__file__).parent / "fixtures").glob("schema-*.db")))
def test_the_data_of_every_release_can_be_repaired(tmp_path: Path, fixture: Path) -> None:
    """Whole, and row by row: one message is damaged beyond a bit, and there are no others."""
    source = tmp_path / fixture.stem
    source.mkdir(mode=0o700)
    shutil.copyfile(fixture, source / "veilmq.db")
    shutil.copyfile(fixture.with_suffix(".redo"), source / "redo")
    whole = repaired(source, tmp_path / f"{fixture.stem}-whole")
    connection = connect(source / "veilmq.db")
    connection.execute("UPDATE message SET md5 = zeroblob(16) WHERE sequence = (SELECT min(sequence) FROM message)")
    connection.close()
    report = repaired(source, tmp_path / f"{fixture.stem}-rows")
    assert (whole.problems, report.problems, report.exported) == ([], [], 0)
    assert [each.queue for each in report.queues] == [each.queue for each in whole.queues]
    assert deliverable(report) == deliverable(whole) - 1 > 0


def deliverable(report: Repair) -> int:
    """Messages that can be delivered."""
    return sum(each.visible + each.delayed + each.in_flight for each in report.queues)


def test_rows_without_a_place_are_exported(closed: Lived, tmp_path: Path) -> None:
    directory = closed.copy(tmp_path / "damaged")
    connection = connect(directory / "veilmq.db")
    connection.execute("UPDATE history SET events = x'c1' WHERE offset = 5")
    connection.close()
    report = repaired(directory, tmp_path / "new")
    assert report.exported == 1
    assert report.export == str(tmp_path / "new" / EXPORT)
    assert '"table": "history"' in Path(report.export).read_text()
    assert os.stat(report.export).st_mode & 0o077 == 0
    assert closed.differences(tmp_path / "new") == []
