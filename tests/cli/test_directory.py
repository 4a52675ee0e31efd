"""Backups of a store in use, and what `check` finds in good and in damaged directories."""

import json
import os
import re
from hashlib import md5
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import apsw
import pytest

from veilmq.cli.directory import backup, check
from veilmq.cli.directory.restoring import restore
from veilmq.cli.failures import Exit, Failure
from veilmq.model.commands import (
    AnyCommand,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    Origin,
    PurgeQueue,
    Receive,
    Send,
    Sweep,
)
from veilmq.model.errors import ReceiptInvalid
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.messages import Delivery, Extras
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store import Options
from veilmq.store.directory import DATABASE, DestinationTaken
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.disk.schema import VERSION
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check as check_database
from veilmq.store.sqlite.tools.backup import backup as backup_file
from veilmq.store.sqlite.tools.backup import backup_directory, made
from veilmq.testing.for_each import for_each

OPTIONS = Options(reserve_bytes=0, floor_bytes=0)
ORIGIN = Origin("sqs", "111111111111")
START = Instant(1_700_000_000 * SECOND_US)


def queue(name: str) -> QueueKey:
    return QueueKey("111111111111", "us-east-1", name)


class Used:
    """A store that is being used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = START
        self.store = SqliteStore(path, OPTIONS)

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    def run(self, *commands: AnyCommand) -> list[Outcome]:
        applied = self.store.apply(commands, self.now)
        if applied.wrote:
            self.store.commit()
        return applied.outcomes

    def create(self, name: str, **change: object) -> None:
        self.run(CreateQueue(queue=queue(name), origin=ORIGIN, change=change))

    def send(self, name: str, *bodies: str, **fields: int) -> None:
        for body in bodies:
            digest = md5(body.encode()).digest()
            self.run(
                Send(queue=queue(name), origin=ORIGIN, body=body, md5=digest, size_bytes=len(body.encode()), **fields)
            )

    def receive(self, name: str, count: int = 1) -> list[Delivery]:
        (outcome,) = self.run(Receive(queue=queue(name), origin=ORIGIN, count_max=count, lease_us=30 * SECOND_US))
        assert isinstance(outcome, Received)
        return outcome.messages

    def delete(self, name: str, handle: str) -> Outcome:
        return self.run(Delete(queue=queue(name), origin=ORIGIN, handle=handle, arrived=self.now))[0]

    def later(self, seconds: float) -> None:
        self.now = Instant(self.now + int(seconds * SECOND_US))
        self.run(Sweep(steps_max=1_000))

    def live_a_little(self) -> None:
        """Something of every kind that the books must account for."""
        self.create("dead")
        self.create("work", redrive=RedrivePolicy(queue("dead"), 1))
        self.create("gone")
        self.create("purged")
        self.send("work", *(f"body {number}" for number in range(10)))
        self.send("work", "late", delay_us=3_600 * SECOND_US)
        self.send("work", "short", ttl_us=40 * SECOND_US)
        self.send("gone", "x", "y")
        self.send("purged", "x", "y", "z")
        first, second, third, *_ = self.receive("work", 5)
        self.delete("work", first.handle)
        self.run(Extend(queue=queue("work"), origin=ORIGIN, handle=second.handle, lease_us=0, arrived=self.now))
        self.run(Extend(queue=queue("work"), origin=ORIGIN, handle=third.handle, lease_us=10**9, arrived=self.now))
        self.run(DeleteQueue(queue=queue("gone"), origin=ORIGIN), PurgeQueue(queue=queue("purged"), origin=ORIGIN))
        self.send("purged", "after")
        self.later(41)
        self.receive("work", 10)
        for _ in range(5):
            self.later(1)


@pytest.fixture
def used(tmp_path: Path) -> Used:
    used = Used(tmp_path / "data")
    used.live_a_little()
    return used


@pytest.fixture
def closed(used: Used) -> Path:
    used.store.close()
    return used.path


def test_a_directory_in_use_is_in_order(used: Used, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(used.path, as_json=False) is Exit.DONE
    printed = capsys.readouterr().out
    assert "everything is in order" in printed
    assert "moved: balanced" in printed
    assert check(used.path, as_json=True) is Exit.DONE
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["queues"] == 3
    assert report["messages"] == sum(each.info().counts.total for each in used.store.reader.queues.values()) > 10
    with used.database.open("r+b") as file:
        file.write(bytes(4096))  # the WAL has the first page, too
    assert check(used.path, as_json=True) is Exit.DONE
    used.store.close()
    assert check(used.path, as_json=True) is Exit.DONE


DAMAGE = [
    ("body", "UPDATE message SET body = x'00' WHERE sequence = (SELECT max(sequence) FROM message)", "its body"),
    ("lease", "DELETE FROM message WHERE sequence = (SELECT min(sequence) FROM lease)", "there is no such message"),
    ("lease", "UPDATE lease SET line = 3", "its queue or line"),
    ("lease", "UPDATE lease SET in_line = 1 - in_line", "its queue or line"),
    ("lease", "UPDATE lease SET origin = 99", "origin"),
    ("lease", "UPDATE lease SET attempt = 0 WHERE first IS NOT NULL", "impossible"),
    ("message", "UPDATE message SET in_line = 0 WHERE sequence NOT IN (SELECT sequence FROM lease)", "in none of"),
    ("message", "INSERT INTO quarantine SELECT sequence, generation, 1 FROM lease LIMIT 1", "in none of"),
    (
        "message",
        "DELETE FROM lease WHERE sequence = (SELECT min(sequence) FROM lease WHERE in_line = 1)",
        "passed over",
    ),
    (
        "message",
        "UPDATE message SET generation = 77 WHERE sequence NOT IN (SELECT sequence FROM lease)",
        "belongs to no queue",
    ),
    ("message", "UPDATE mark SET sequence = 1", "impossible"),
    ("queue", "UPDATE mark SET generation = 1", "never given"),
    ("queue", "INSERT INTO garbage SELECT generation FROM queue WHERE deleted IS NULL", "marked as garbage"),
    ("quarantine", "INSERT INTO quarantine SELECT sequence, generation, 1 FROM message LIMIT 1", "in quarantine"),
    ("history", "DELETE FROM history WHERE offset = (SELECT offset FROM history LIMIT 1 OFFSET 5)", "does not follow"),
    ("history", "DELETE FROM history WHERE offset = (SELECT max(offset) FROM history)", "ends at"),
    ("history", "UPDATE history SET events = x'ff' WHERE offset = (SELECT max(offset) FROM history)", "cannot be read"),
    (
        "history",
        "UPDATE history SET events = unhex(replace(hex(events), hex('us-east-1'), hex('us-east-') || 'FF'))",
        "cannot be read",
    ),
    ("history", "UPDATE message SET sent = sent - 1", "its row does not say what was recorded"),
    ("history", "UPDATE queue SET name = 'other' WHERE name = 'work'", "another name"),
    ("queue", "UPDATE queue SET settings = x'c1' WHERE name = 'gone'", "cannot be read"),
    ("message", "UPDATE message SET sender = CAST(x'ff' AS TEXT)", "is not UTF-8"),
    ("queue", "UPDATE lease SET failure = x'c1'", "cannot be read"),
    ("lease", "UPDATE lease SET due = due + 1000000000000000 WHERE hidden = 1", "later than any"),
    ("file", "UPDATE mark SET clock = clock + 4000000000", "ahead of what was committed last"),
    ("file", "UPDATE expiry_hold SET held_us = -1", "expiry clock is ahead"),
    ("file", "CREATE INDEX another ON message (sent); UPDATE mark SET id = 1", "its statement in the schema"),
    ("books", "DELETE FROM message WHERE sequence = (SELECT max(sequence) FROM message)", "by its history"),
]


@for_each(("kind", "statement", "told"), DAMAGE)
def test_damage_is_found(closed: Path, kind: str, statement: str, told: str) -> None:
    with TemporaryDirectory(dir=closed.parent) as place:
        database = Path(copytree(closed, place, dirs_exist_ok=True), DATABASE)
        connection = connect(database)
        connection.execute(statement)
        assert connection.changes()
        connection.close()
        report = check_database(database)
        assert any(problem.kind == kind and told in problem.text for problem in report.problems)
        assert check(database.parent, as_json=True) is Exit.WRONG


def test_a_damaged_page_is_found(used: Used, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used.store.close()
    connection = connect(used.database)
    (name,) = connection.execute("SELECT name FROM queue LIMIT 1").fetchone()
    connection.execute("UPDATE queue SET name = CAST(x'ff' AS TEXT) WHERE name = ?", (name,))
    assert check(used.path, as_json=False) is Exit.WRONG
    told = capsys.readouterr().out
    assert re.match(r"[1-9]\d* queues, [1-9]\d* messages .*\n.*moved: not checked: the file is damaged\n", told), told
    connection.execute("UPDATE queue SET name = ? WHERE name = CAST(x'ff' AS TEXT)", (name,))
    root = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'message_line'").get
    page_bytes = connection.pragma("page_size")
    connection.pragma("journal_mode", "DELETE")
    connection.close()
    with open(used.database, "r+b") as file:
        file.seek((root - 1) * page_bytes)
        file.write(b"\xff" * page_bytes)
    report = check_database(used.database)
    assert [problem.kind for problem in report.problems][:1] == ["file"]
    assert check(used.path, as_json=False) is Exit.WRONG
    told = capsys.readouterr().out
    assert told.startswith("what is in it could not be counted\nsent = ")
    assert "moved: not checked: the file is damaged\n" in told
    with open(used.database, "r+b") as file:
        file.truncate(page_bytes)
    with pytest.raises(Failure, match="the copy failed and was removed") as failed:
        backup(used.path, tmp_path / "copy", as_json=False)
    assert f"veilmq check --data {used.path} --repair" in failed.value.advice


def test_a_trimmed_history_says_from_where(used: Used) -> None:
    used.store.close()
    connection = connect(used.database)
    connection.execute("DELETE FROM history WHERE offset < 4")
    connection.close()
    report = check_database(used.database)
    assert report.problems == []
    begins = f"the history begins at offset {report.history_first_offset}"
    assert report.books == f"not checked: {begins}, and holds no snapshot yet"
    assert report.history_first_offset >= 4


@pytest.mark.parametrize("damage", [False, True])
def test_the_books_of_a_trimmed_history_begin_with_its_snapshot(used: Used, damage: bool) -> None:
    used.store.close()
    used.store = SqliteStore(used.path, Options(reserve_bytes=0, floor_bytes=0, history_bytes_max=500))
    held = list[Delivery]()
    for step in range(40):
        used.send("purged", str(step))
        held += used.receive("purged")
        if step % 3:  # a late one: a snapshot has not met it, or it came after it
            used.delete("purged", held.pop(-3).handle if len(held) > 3 else "")
        for _ in range(4):
            used.run(Sweep(steps_max=1))
        if step == 20:
            used.run(PurgeQueue(queue=queue("purged"), origin=ORIGIN, cooldown_us=0))
    used.store.close()
    if damage:
        connection = connect(used.database)
        connection.execute("DELETE FROM message WHERE sequence = (SELECT max(sequence) FROM message)")
        connection.close()
    report = check_database(used.database)
    assert report.history_first_offset > 4
    assert report.books == ("not balanced" if damage else "balanced")


def test_a_backup_of_a_store_in_use_is_whole_and_honours_no_old_handle(used: Used, tmp_path: Path) -> None:
    (leased,) = used.receive("purged")
    used.send("dead", *(f"{number}" * 700_000 for number in range(8)))  # more than one step of the copy
    copy = tmp_path / "copy"
    seen: list[tuple[int, int]] = []

    def meanwhile(done: int, total: int) -> None:
        used.send("purged", "meanwhile")
        seen.append((done, total))

    size_bytes = backup_directory(used.database, copy, meanwhile)
    assert len(seen) > 1
    assert seen[-1][0] == seen[-1][1]
    assert sorted(path.name for path in copy.iterdir()) == [DATABASE]
    assert (copy.stat().st_mode & 0o777, (copy / DATABASE).stat().st_mode & 0o777) == (0o700, 0o600)
    assert size_bytes == (copy / DATABASE).stat().st_size
    report = check_database(copy / DATABASE)
    assert (report.problems, report.books) == ([], "balanced")
    bodies = [row[0] for row in connect(copy / DATABASE).execute("SELECT body FROM message")]
    assert b"after" in bodies
    assert b"meanwhile" not in bodies
    restored = Used(copy)
    restored.now = used.now
    assert isinstance(restored.delete("purged", leased.handle), ReceiptInvalid)
    restored.later(31)
    (again,) = restored.receive("purged")
    assert again.body == "after"
    assert not isinstance(restored.delete("purged", again.handle), Exception)
    assert not isinstance(used.delete("purged", leased.handle), Exception)
    used.store.close()
    restored.store.close()


def test_a_receive_attempt_of_before_is_a_new_one_in_the_copy(used: Used, tmp_path: Path) -> None:
    """Its handles are void, so it cannot be answered with them."""
    line = queue("line.fifo")
    used.create(line.name, fifo=True)
    used.run(
        Send(queue=line, origin=ORIGIN, body="a", md5=md5(b"a").digest(), size_bytes=1, extras=Extras((), "g", "d"))
    )
    receive = Receive(queue=line, origin=ORIGIN, count_max=1, lease_us=30 * SECOND_US, attempt_id="again")
    (first,) = used.run(receive)
    assert isinstance(first, Received)
    copy = tmp_path / "copy"
    backup_directory(used.database, copy)
    restored = Used(copy)
    restored.now = used.now
    (locked,) = restored.run(receive)
    assert isinstance(locked, Received), locked
    assert locked.messages == []
    restored.later(31)
    (anew,) = restored.run(receive)
    assert isinstance(anew, Received)
    (message,) = anew.messages
    assert (message.body, message.receive_count, message.handle != first.messages[0].handle) == ("a", 2, True)
    assert not isinstance(restored.delete(line.name, message.handle), Exception)
    used.store.close()
    restored.store.close()


def test_the_copy_has_a_fresh_secret(used: Used, tmp_path: Path) -> None:
    with made(tmp_path / "made") as part, part.open() as file:
        backup_file(used.database, tmp_path / "made" / DATABASE)
        is_same = os.path.samestat(os.fstat(file.fileno()), (tmp_path / "made" / DATABASE).stat())
        assert is_same, "its name was never free for a server that starts"
    backup_file(used.database, tmp_path / "copy.db")
    secrets = [
        connect(path).execute("SELECT receipts, epoch FROM secret").fetchall()[0]
        for path in (used.database, tmp_path / "copy.db")
    ]
    assert [len(part) for part in secrets[0]] == [len(part) for part in secrets[1]]
    assert not set(secrets[0]) & set(secrets[1])
    assert secrets[0][0] not in (tmp_path / "copy.db").read_bytes()


def test_a_backup_overwrites_nothing(used: Used, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backup(used.path, tmp_path / "copy", as_json=False)
    assert f"veilmq restore NEW_DIRECTORY --from {tmp_path}/copy" in capsys.readouterr().out
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "file").touch()
    for taken in ("full", "file"):
        with pytest.raises(DestinationTaken):
            backup_directory(used.database, tmp_path / taken)
        with pytest.raises(Failure, match="exists already") as failed:
            backup(used.path, tmp_path / taken, as_json=False)
        assert failed.value.code is Exit.USAGE
    with pytest.raises(DestinationTaken):
        backup_file(used.database, tmp_path / "file")


def test_a_backup_with_a_message_in_quarantine_is_restored(
    used: Used, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is where it was, and the report says so, as `check` of the backup does."""
    used.create("apart")
    used.send("apart", "whole")
    used.store.close()
    connection = connect(used.database)
    newest = "(SELECT max(sequence) FROM message)"
    [(sequence,)] = connection.execute(f"UPDATE message SET body = x'30' WHERE sequence = {newest} RETURNING sequence")
    connection.close()
    restarted = Used(used.path)
    restarted.now = used.now
    assert restarted.receive("apart") == []
    restarted.store.close()
    backup(used.path, tmp_path / "copy", as_json=False)
    assert restore(tmp_path / "new", str(tmp_path / "copy"), None, as_json=False) is Exit.WRONG
    assert f"not in order: quarantine: message {sequence} is in quarantine" in capsys.readouterr().out
    apart = connect(tmp_path / "new" / DATABASE).execute("SELECT sequence FROM quarantine").fetchall()
    assert apart == [(sequence,)]


def test_a_state_of_a_time_to_come_is_told(used: Used, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be what a server wrote whose clock was ahead, and not what it has written since."""
    used.now = Instant(4_000_000_000 * SECOND_US)
    used.send("work", "x")
    used.store.close()
    assert restore(tmp_path / "new", str(used.path), None, as_json=False) is Exit.WRONG
    assert "that is still to come: the server's clock was ahead" in capsys.readouterr().out
    assert restore(tmp_path / "other", str(used.path), "2100-01-01", as_json=True) is Exit.DONE
    said = capsys.readouterr().err
    assert said == "--to: 2100-01-01 00:00:00.000 UTC is still to come, so this is the newest state\n"


def test_what_an_earlier_release_archived_is_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.1.0 had state format 10. What is restored is of that format, and a start migrates it."""
    archive = Path(__file__).parent.parent / "store/fixtures/schema-10.archive"
    assert restore(tmp_path / "new", str(archive), None, as_json=False) is Exit.WRONG  # it has a message in quarantine
    told = capsys.readouterr().out
    assert "the source ends there\n22 messages and 10 leases in 10 queues" in told
    SqliteStore(tmp_path / "new", OPTIONS).close()
    copytree(archive, tmp_path / "archive")
    (record,) = (tmp_path / "archive").glob("*/records/*")
    record.write_bytes(record.read_bytes()[:-20])
    assert restore(tmp_path / "other", str(tmp_path / "archive"), None, as_json=False) is Exit.WRONG
    told = capsys.readouterr().out
    assert ("damaged: the records end after 3" in told, "the source ends there" in told) == (True, False)


def test_a_failed_backup_or_restore_leaves_nothing(used: Used, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(done: int, total: int) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        backup_directory(used.database, tmp_path / "copy", fail)
    assert not (tmp_path / "copy").exists()
    (tmp_path / "made").mkdir()
    with pytest.raises(OSError, match="no space"):
        backup_directory(used.database, tmp_path / "made", fail)
    assert list((tmp_path / "made").iterdir()) == []

    def limit(connection: apsw.Connection) -> None:
        if ".new.part" in connection.filename:
            connection.pragma("max_page_count", 5)

    monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, limit])
    with pytest.raises(Failure, match="nothing was restored: no space is left") as failed:
        restore(tmp_path / "new", str(used.path), None, as_json=False)
    assert failed.value.code is Exit.STORE
    assert not (tmp_path / "new").exists()


def test_what_is_no_data_directory_is_told(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    connection = connect(other / DATABASE)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / DATABASE).touch()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / DATABASE).write_text("text" * 1000)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / DATABASE).write_bytes(b"SQLite format 4\0" + (other / DATABASE).read_bytes()[16:])
    for data, code in (
        ("none", Exit.DIRECTORY),
        ("other", Exit.DIRECTORY),
        ("empty", Exit.DIRECTORY),
        ("text", Exit.DIRECTORY),
        ("damaged", Exit.DIRECTORY),
    ):
        for run in (check, lambda path, as_json: backup(path, tmp_path / "copy", as_json=as_json)):
            with pytest.raises(Failure) as failed:
                run(tmp_path / data, as_json=False)
            assert failed.value.code is code


def test_data_of_an_older_release_is_copied_but_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Taken between the upgrade of the programs and the first start: tables that it looks into are not there yet."""
    data = tmp_path / "data"
    SqliteStore(data, OPTIONS).close()
    request.getfixturevalue("next_schema")
    with pytest.raises(
        Failure, match=rf"written by an older VeilMQ \(schema {VERSION}; .* start the server on it once"
    ) as ended:
        check(data, as_json=False)
    assert ended.value.code is Exit.DIRECTORY
    backup(data, tmp_path / "copy", as_json=False)
    SqliteStore(tmp_path / "copy", OPTIONS).close()
    check(tmp_path / "copy", as_json=False)
    assert "moved: balanced" in capsys.readouterr().out
