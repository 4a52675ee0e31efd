"""What guards, checkpoints and ordered storages store, byte by byte: what one version wrote, the next one reads.

Each test writes with the code and compares, then puts the golden bytes down by hand and reads them with the code.
"""

import hashlib
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from veilmq.client.errors import StorageHeld
from veilmq.client.ordered import LocalFile, ObjectStorage, StateLock, TableStorage
from veilmq.client.worker import Checkpoints, DirectoryGuard, FileCheckpoints, ObjectCheckpoints, TableGuard
from veilmq.client.worker.guard import Begun, Busy, Claim, Done
from veilmq.client.worker.job.checkpoints import Saved

KEY = "orders 1"
CLAIM = Claim("orders 1", 2, now=1_000.0, until=1_030.5)
BEGUN = b'{"fence":1,"owner":"orders 1","attempt":2,"until":1030.5,"done":false,"result":null}'
DONE = b'{"fence":1,"owner":"orders 1","attempt":2,"until":1030.5,"done":true,"result":{"total":3}}'
ABANDONED = b'{"fence":1,"owner":"","attempt":2,"until":0.0,"done":false,"result":null}'
NAME = hashlib.sha256(KEY.encode()).hexdigest()
SAVED = b'{"fence":3,"state":{"line":7}}'
STATE = b'{"type":"ordered sender","next":2}'
OWNER = rb'\{"token":"[0-9a-f]{16}","pid":\d+,"place":"[^"]+","until":[0-9.]+,"seconds":30\.0\}'
OTHER = '{"token":"0123456789abcdef","pid":1,"place":"elsewhere boot pid:[1]","until":%s,"seconds":30.0}'


def files(directory: Path) -> dict[str, bytes]:
    """Path below the directory: content."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def put(directory: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


class TestGuard:
    def test_in_a_directory(self, tmp_path: Path) -> None:
        place, lock = f"{NAME[:2]}/{NAME}", f"{NAME[:2]}/.lock"
        guard = DirectoryGuard(tmp_path)
        guard.begin(KEY, CLAIM)
        assert files(tmp_path) == {lock: b"", place: BEGUN}
        guard.abandon(KEY, 1)
        assert files(tmp_path) == {lock: b"", place: ABANDONED}
        put(tmp_path, {place: BEGUN})
        guard.finish(KEY, 1, {"total": 3})
        assert files(tmp_path) == {lock: b"", place: DONE}
        assert (tmp_path / place).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / place).parent.stat().st_mode & 0o777 == 0o700

    def test_of_before_in_a_directory_is_read(self, tmp_path: Path) -> None:
        place = f"{NAME[:2]}/{NAME}"
        put(tmp_path, {place: DONE})
        assert DirectoryGuard(tmp_path).begin(KEY, CLAIM) == Done({"total": 3})
        put(tmp_path, {place: BEGUN})
        assert DirectoryGuard(tmp_path).begin(KEY, CLAIM) == Busy(1030.5)
        put(tmp_path, {place: ABANDONED})
        assert DirectoryGuard(tmp_path).begin(KEY, CLAIM) == Begun(2)

    def test_in_a_table(self, tmp_path: Path) -> None:
        def connect() -> sqlite3.Connection:
            return sqlite3.connect(tmp_path / "guard.db")

        # `until` is by the database's clock.
        begun = rb'\{"fence":1,"owner":"orders 1","attempt":2,"until":[0-9.]+,"done":false,"result":null\}'
        with TableGuard(connect) as guard:
            guard.begin(KEY, CLAIM)
            guard.begin("ends with a space ", CLAIM)
            guard.finish("ends with a space ", 1, {"total": 3})
        there = connect()
        (ddl,) = there.execute("SELECT sql FROM sqlite_master WHERE type = 'table'").fetchone()
        assert ddl == (  # SQLite keeps no more of it
            "CREATE TABLE veilmq_guard (name VARCHAR(255) PRIMARY KEY, fence BIGINT NOT NULL,"
            " record TEXT /*! (4294967295) */ NOT NULL)"
        )
        rows = there.execute("SELECT name, fence, record FROM veilmq_guard ORDER BY name").fetchall()
        there.close()
        assert [row[:2] for row in rows] == [
            ("orders 1", 1),
            ("sha256:" + hashlib.sha256(b"ends with a space ").hexdigest(), 1),
        ]
        assert re.fullmatch(begun, rows[0][2].encode())
        assert re.fullmatch(begun.replace(b"false", b"true").replace(b"null", rb'\{"total":3\}'), rows[1][2].encode())

    def test_of_before_in_a_table_is_read(self, tmp_path: Path) -> None:
        there = sqlite3.connect(tmp_path / "guard.db")
        there.execute("CREATE TABLE veilmq_guard (name VARCHAR(255) PRIMARY KEY, fence BIGINT NOT NULL, record TEXT)")
        rows = [("a", 1, DONE.decode()), ("b", 1, ABANDONED.decode())]
        there.executemany("INSERT INTO veilmq_guard VALUES (?, ?, ?)", rows)
        there.commit()
        there.close()
        with TableGuard(lambda: sqlite3.connect(tmp_path / "guard.db")) as guard:
            assert guard.begin("a", CLAIM) == Done({"total": 3})
            assert guard.begin("b", CLAIM) == Begun(2)


def in_directory(directory: Path) -> Checkpoints:
    return FileCheckpoints(directory)


def in_objects(directory: Path) -> Checkpoints:
    return ObjectCheckpoints(f"file://{directory}")


@pytest.mark.parametrize("make", [in_directory, in_objects])
class TestCheckpoints:
    def test_are_one_file_for_each_fence(self, make: Callable[[Path], Checkpoints], tmp_path: Path) -> None:
        checkpoints = make(tmp_path)
        checkpoints.save(KEY, Saved(3, {"line": 7}))
        assert files(tmp_path) == {f"{NAME}/000000000003": SAVED}
        checkpoints.save(KEY, Saved(12, None))
        assert files(tmp_path) == {f"{NAME}/000000000012": b'{"fence":12,"state":null}'}
        checkpoints.drop(KEY)
        assert list(tmp_path.iterdir()) == []

    def test_of_before_are_read(self, make: Callable[[Path], Checkpoints], tmp_path: Path) -> None:
        put(tmp_path, {f"{NAME}/000000000003": SAVED, f"{NAME}/000000000002": b'{"fence":2,"state":1}'})
        assert make(tmp_path).load(KEY) == Saved(3, {"line": 7})


class TestOrdered:
    def test_in_a_file(self, tmp_path: Path) -> None:
        storage = LocalFile(tmp_path / "numbers")
        storage.acquire()
        storage.save(STATE)
        assert list(files(tmp_path)) == ["numbers", "numbers.lock"]
        assert files(tmp_path)["numbers"] == STATE
        assert re.fullmatch(rb"pid \d+\n", files(tmp_path)["numbers.lock"])
        storage.release()
        assert LocalFile(tmp_path / "numbers").load() == STATE

    def test_in_objects(self, tmp_path: Path) -> None:
        storage = ObjectStorage(f"file://{tmp_path}/numbers")
        storage.acquire()
        assert list(files(tmp_path)) == ["numbers.000000000001"]
        assert re.fullmatch(rb'\{"owner":' + OWNER + rb',"state":null\}', files(tmp_path)["numbers.000000000001"])
        storage.save(STATE)
        wanted = rb'\{"owner":' + OWNER + rb',"state":' + re.escape(STATE) + rb"\}"
        assert re.fullmatch(wanted, files(tmp_path)["numbers.000000000001"])
        storage.release()
        assert files(tmp_path) == {"numbers.000000000001": b'{"owner":null,"state":' + STATE + b"}"}

    def test_of_before_in_objects_is_read(self, tmp_path: Path) -> None:
        put(tmp_path, {"numbers.000000000007": b'{"owner":null,"state":' + STATE + b"}"})
        storage = ObjectStorage(f"file://{tmp_path}/numbers")
        storage.acquire()
        assert storage.load() == STATE
        assert list(files(tmp_path)) == ["numbers.000000000008"]
        storage.release()
        held = OTHER % "9e9"
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pipe_file(
            "/there/numbers.000000000001", b'{"owner":' + held.encode() + b',"state":[1]}'
        )
        with pytest.raises(StorageHeld, match="pid 1 on elsewhere"):
            ObjectStorage("memory://there/numbers").acquire()
        fsspec.filesystem("memory").store.clear()

    def test_in_a_table(self, tmp_path: Path) -> None:
        def connect() -> sqlite3.Connection:
            return sqlite3.connect(tmp_path / "numbers.db", check_same_thread=False)

        storage = TableStorage(connect, "sender")
        assert storage.ddl == (
            "CREATE TABLE IF NOT EXISTS veilmq_numbers (name VARCHAR(120) NOT NULL PRIMARY KEY,"
            " version BIGINT NOT NULL, holder TEXT, state TEXT /*! (4294967295) */)"
            " /*! CHARACTER SET utf8mb4 COLLATE utf8mb4_bin */"
        )
        there = connect()
        select = "SELECT name, version, holder, state FROM veilmq_numbers"
        storage.acquire()
        name, version, holder, state = there.execute(select).fetchone()
        assert (name, version, state) == ("sender", 1, None)
        assert re.fullmatch(OWNER, holder.encode())
        storage.save(STATE)
        name, version, holder, state = there.execute(select).fetchone()
        assert (name, version, state) == ("sender", 2, STATE.decode())
        assert re.fullmatch(OWNER, holder.encode())
        storage.release()
        assert there.execute(select).fetchall() == [("sender", 3, None, STATE.decode())]
        there.close()

    def test_of_before_in_a_table_is_read(self, tmp_path: Path) -> None:
        there = sqlite3.connect(tmp_path / "numbers.db")
        there.execute("CREATE TABLE veilmq_numbers (name TEXT PRIMARY KEY, version BIGINT, holder TEXT, state TEXT)")
        rows = [("free", 7, None, "[1]"), ("ended", 7, OTHER % "1.0", "[2]"), ("held", 7, OTHER % "9e9", "[3]")]
        there.executemany("INSERT INTO veilmq_numbers VALUES (?, ?, ?, ?)", rows)
        there.commit()

        def storage(name: str) -> TableStorage:
            return TableStorage(lambda: sqlite3.connect(tmp_path / "numbers.db", check_same_thread=False), name)

        for name, state in (("free", b"[1]"), ("ended", b"[2]")):
            taken = storage(name)
            taken.acquire()
            assert taken.load() == state
            taken.release()
        with pytest.raises(StorageHeld, match="pid 1 on elsewhere"):
            storage("held").acquire()
        versions = dict(there.execute("SELECT name, version FROM veilmq_numbers").fetchall())
        assert versions == {"free": 9, "ended": 9, "held": 7}
        there.close()

    def test_in_any_object_with_load_and_save(self) -> None:
        class Memory:
            content: bytes | None = None

            def load(self) -> bytes | None:
                return self.content

            def save(self, state: bytes) -> None:
                self.content = state

        memory = Memory()
        storage = StateLock(memory)
        storage.acquire()
        storage.save(STATE)
        wanted = rb'\{"owner":' + OWNER + rb',"state":' + re.escape(STATE) + rb"\}"
        assert re.fullmatch(wanted, memory.content or b"")
        storage.release()
        assert memory.content == b'{"owner":null,"state":' + STATE + b"}"
