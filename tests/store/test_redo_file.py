"""The redo log's file: past the page cache or through it, the same bytes, each write durable."""

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sqlite import SMALL

from veilmq.store.files import REAL, RealDisk, kind_of
from veilmq.store.sqlite.disk.redo import HEAD, Entry, Redo, read
from veilmq.store.sqlite.disk.redo import file as redo_file
from veilmq.store.sqlite.disk.redo.file import BLOCK_BYTES, RedoFile, open_file
from veilmq.testing.for_each import for_each

ROOM_BYTES = 1 << 30
SIZE = SMALL.redo_bytes
PAST, THROUGH = "pwritev", "pwrite"
RECORD_BYTES = 140


def opened(path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> RedoFile:
    """The file, written past the page cache or through it."""
    with monkeypatch.context() as patched:
        patched.setattr(RealDisk, "file_system", lambda disk, path: "ext4")  # whatever holds the tests' directory
        if by == THROUGH:
            patched.setattr(os, PAST, refusing(errno.EINVAL))
        file = open_file(path, SMALL, ROOM_BYTES)
    assert isinstance(file, redo_file._PastCache if by == PAST else redo_file._InCache)
    return file


def refusing(number: int) -> Any:
    def refuse(*given: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


def written_by(file: RedoFile, path: Path, pieces: Sequence[bytes]) -> bytes:
    """What the file holds after pieces one behind the other; from its start again where one has no room."""
    wanted, at = bytearray(path.read_bytes()), 0
    for piece in pieces:
        if at + len(piece) > SIZE:
            at = 0
        file.write(piece, at)
        wanted[at : at + len(piece)] = piece
        at += len(piece)
        got = path.read_bytes()
        assert got[:at] == wanted[:at]
        assert len(got) == SIZE
    return got[:at]


@pytest.mark.parametrize("by", [PAST, THROUGH])
@given(pieces=st.lists(st.binary(min_size=1, max_size=3 * BLOCK_BYTES), min_size=1, max_size=12))
def test_it_holds_what_was_written(tmp_path_factory: pytest.TempPathFactory, by: str, pieces: Sequence[bytes]) -> None:
    path = tmp_path_factory.mktemp("log") / "redo"
    with pytest.MonkeyPatch.context() as monkeypatch:
        file = opened(path, by, monkeypatch)
        written_by(file, path, pieces)
        file.close()
        again = opened(path, by, monkeypatch)
        written_by(again, path, pieces[::-1])
        again.close()


def test_a_write_past_the_cache_is_of_whole_blocks_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    really = os.pwritev

    def watch(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        calls.append((offset, sum(map(len, buffers)), flags))
        return really(descriptor, buffers, offset, flags)

    file = opened(tmp_path / "redo", PAST, monkeypatch)
    monkeypatch.setattr(os, "pwritev", watch)
    file.write(b"a" * 5_000, 0)
    file.write(b"b" * 10, 5_000)
    file.write(b"c" * (SIZE - 5_010), 5_010)
    file.close()
    assert calls == [
        (0, 8_192, os.RWF_DSYNC),
        (4_096, 4_096, os.RWF_DSYNC),
        (4_096, SIZE - 4_096, os.RWF_DSYNC),
    ]


def test_what_is_written_in_parts_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.pwritev

    def block_by_block(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        return really(descriptor, [buffers[0][:BLOCK_BYTES]], offset, flags)

    path = tmp_path / "redo"
    file = opened(path, PAST, monkeypatch)
    monkeypatch.setattr(os, "pwritev", block_by_block)
    data = os.urandom(20_000)
    file.write(data, 100)
    file.close()
    assert path.read_bytes()[100:20_100] == data


def opened_below(directory: Path) -> list[str]:
    """The files there that this process has open, a name for each descriptor."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread's, closed meanwhile, or of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [each.rpartition("/")[2] for each in found if each.startswith(f"{directory}/")]


def test_a_disk_that_refuses_is_served_by_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path / "tried", PAST, monkeypatch).close()
    synced: list[int] = []
    really = os.fdatasync

    def watch(descriptor: int) -> None:
        synced.append(descriptor)
        really(descriptor)

    monkeypatch.setattr(os, "fdatasync", watch)
    file = opened(tmp_path / "redo", THROUGH, monkeypatch)
    assert "the redo log goes through the page cache" in caplog.text
    assert opened_below(tmp_path) == ["redo"]
    synced.clear()
    file.write(b"a", 0)
    file.close()
    assert len(synced) == 1


@for_each("kind", ["", "fuse", "tmpfs", "btrfs", "nfs4"])
def test_no_other_file_system_is_trusted_to_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(RealDisk, "file_system", lambda disk, path: kind)
    file = open_file(tmp_path / "redo", SMALL, ROOM_BYTES)
    assert isinstance(file, redo_file._InCache)
    file.close()


def test_a_file_system_is_known_by_its_mount() -> None:
    assert REAL.file_system(Path("/proc")) == "proc"
    odd = (
        "30 1 7:1 / /mnt/a\x0cb\u2028c rw - btrfs /dev/loop1 rw\n31 1 7:2 / /mnt/d\\040-\\040e rw shared:1 - xfs x rw\n"
    )
    assert [kind_of(odd, number) for number in ("7:1", "7:2", "7:3")] == ["btrfs", "xfs", ""]


@pytest.mark.parametrize("old", ["sparse", "short", "of another run", "half made"])
def test_it_is_made_anew_and_whole(tmp_path: Path, old: str) -> None:
    """A copy may have holes, or share its blocks: its first writes would need space that a full disk has not."""
    path = tmp_path / "redo"
    if old == "sparse":
        path.touch()
        os.truncate(path, SIZE)
    elif old == "half made":
        path.with_suffix(".part").write_bytes(b"x" * 2 * SIZE)
    else:
        path.write_bytes(b"x" * (SIZE if old == "of another run" else SIZE // 2))
    with path.open("rb") if path.exists() else contextlib.nullcontext():
        open_file(path, SMALL, ROOM_BYTES).close()
    assert path.read_bytes() == bytes(SIZE)
    assert path.stat().st_blocks * 512 >= SIZE
    assert os.listdir(tmp_path) == ["redo"]


def test_its_name_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[list[str]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        if place == tmp_path:
            synced.append(os.listdir(place))

    monkeypatch.setattr(os, "fsync", noted)
    open_file(tmp_path / "redo", SMALL, ROOM_BYTES).close()
    assert synced[-1:] == [["redo"]]


def test_without_room_nothing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "redo"
    path.write_bytes(b"settled")
    with pytest.raises(OSError, match="no room"):
        open_file(path, SMALL, SIZE - 1)
    assert path.read_bytes() == b"settled"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_the_try_gets_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    opened(tmp_path / "tried", PAST, monkeypatch).close()
    monkeypatch.setattr(RealDisk, "file_system", lambda disk, path: "ext4")
    monkeypatch.setattr(os, PAST, refusing(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        open_file(tmp_path / "redo", SMALL, ROOM_BYTES)
    assert opened_below(tmp_path) == []


@pytest.mark.parametrize(
    ("by", "call", "number", "error"),
    [
        (PAST, "pwritev", errno.EIO, apsw.IOError),
        (PAST, "pwritev", errno.ENOSPC, apsw.IOError),
        (THROUGH, "pwrite", errno.EIO, apsw.IOError),
        (THROUGH, "pwrite", errno.ENOSPC, apsw.FullError),
        (THROUGH, "fdatasync", errno.ENOSPC, apsw.IOError),
    ],
)
def test_only_what_is_surely_not_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, call: str, number: int, error: type[apsw.Error]
) -> None:
    file = opened(tmp_path / "redo", by, monkeypatch)
    monkeypatch.setattr(os, call, refusing(number))
    with pytest.raises(error):
        file.write(b"a", 0)
    file.close()


@for_each(
    ("by", "call", "taken"),
    [
        (PAST, "pwritev", -1),
        (THROUGH, "pwrite", 30),
        (THROUGH, "pwrite", RECORD_BYTES),  # whole, without the zeros behind it
        (THROUGH, "fdatasync", -1),
    ],
)
def test_what_a_full_disk_refused_is_not_there_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, call: str, taken: int
) -> None:
    """taken: bytes of the write before the disk is full; -1: one call fails whole, and the next one does not."""
    redo = Redo(tmp_path / "redo", SMALL, b"key")
    file = opened(tmp_path / "redo", by, monkeypatch)
    entry = Entry(7, 0, 1, 5, 0, 1, 0, 0, b"events" * 20, [])
    record = redo.record(entry)
    assert record is not None
    assert len(record) == RECORD_BYTES
    system, calls = getattr(os, call), []

    def full_once(*given: Any) -> Any:
        calls.append(given)
        if taken >= 0 and len(calls) == 1:
            return system(given[0], given[1][:taken], given[2])
        if len(calls) == (2 if taken >= 0 else 1):
            raise OSError(errno.ENOSPC, "full")
        return system(*given)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full_once)
        with pytest.raises(apsw.FullError):
            file.write(record + bytes(HEAD.size), 0)
    assert read(tmp_path / "redo", b"key").entries == []
    file.write(record + bytes(HEAD.size), 0)
    file.close()
    assert read(tmp_path / "redo", b"key").entries == [entry]


def test_a_disk_that_takes_nothing_is_no_endless_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path / "redo", PAST, monkeypatch)
    monkeypatch.setattr(os, "pwritev", lambda *given: 0)
    with pytest.raises(apsw.IOError, match="0 bytes written"):
        file.write(b"a", 0)
    file.close()


def test_a_log_of_no_whole_blocks_goes_through_the_cache(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(SMALL, redo_bytes=10_001)
    file = open_file(tmp_path / "redo", odd, ROOM_BYTES)
    assert isinstance(file, redo_file._InCache)
    file.write(b"a" * 10_001, 0)
    file.close()
    assert (tmp_path / "redo").read_bytes() == b"a" * 10_001
