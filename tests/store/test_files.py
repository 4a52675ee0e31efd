"""What a file is after a power cut: each sync that `durable_write`, `take_name` and `make_directory` owe is done."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tests.support.sqlite import SMALL

from veilmq.store.directory import DataDirectory, DestinationBusy, DestinationTaken, NotOurs, take_directory
from veilmq.store.files import durable_write, make_directory, take_name
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools.backup import made, made_beside


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes | list[str]]]:
    """What is synced from now on, in order: a file's name and content, or a directory's name and what is in it."""
    found: list[tuple[str, bytes | list[str]]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        found.append((path.name, path.read_bytes() if path.is_file() else sorted(os.listdir(path))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return found


def fail(number: int, *_: object) -> None:
    raise OSError(number, os.strerror(number))


def take(path: Path, content: bytes) -> None:
    part = path.with_name("part")
    part.write_bytes(content)
    take_name(part, path)


def test_a_directory_is_made_in_the_place_of_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is called by a dot, or by a link; by one process at a time; a stranger's link is not followed."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty")
    left = tmp_path / ".empty.part" / "veilmq.db"
    for place in (Path(), tmp_path / "link"):
        for first in (made, made_beside):
            left.parent.mkdir(mode=0o700)
            left.touch()  # where 0.1.0 wrote
            with first(place) as beside:
                assert left.exists() == (first is made)
                for make in (made, made_beside):
                    with pytest.raises(DestinationBusy, match="another process is writing"), make(place):
                        pass
                if first is made:
                    killed = shutil.copytree(tmp_path / "empty", tmp_path / f"killed-{place.name}")
                    with pytest.raises(NotOurs, match="is a copy or a repair that did not end"):
                        SqliteStore(killed, SMALL)
                    with (
                        pytest.raises(DestinationTaken, match="a backup or a repair into it did not end"),
                        made(killed),
                    ):
                        pass
                (beside if first is made else beside / "file").touch()
            (file,) = (tmp_path / "empty").iterdir()
            for make in (made, made_beside):
                with pytest.raises(DestinationTaken, match="exists already"), make(tmp_path / "empty"):
                    pass
            file.unlink()
            shutil.rmtree(left.parent, ignore_errors=True)
    with pytest.raises(DestinationTaken, match="exists already"), made_beside(tmp_path / "empty"):
        (tmp_path / "empty" / "lock").touch()  # a server started there
    (tmp_path / "begun").mkdir()
    own = take_directory(tmp_path / "begun")  # as `made` does first
    with pytest.raises(DestinationBusy), made_beside(tmp_path / "begun"):
        pass
    assert own is not None
    os.close(own)
    flock = fcntl.flock
    with monkeypatch.context() as patched:
        for refusal in (errno.ENOSYS, errno.ENOLCK):  # a file system without locks
            patched.setattr(fcntl, "flock", partial(fail, refusal))
            with made_beside(tmp_path / "begun"):
                pass

        def end_first(descriptor: int, operation: int) -> None:
            (tmp_path / "begun" / "file").touch()  # another process ends here
            flock(descriptor, operation)

        patched.setattr(fcntl, "flock", end_first)
        with pytest.raises(DestinationTaken), made_beside(tmp_path / "begun"):
            pytest.fail("the body may take hours")
    assert not (tmp_path / ".begun.part").exists()
    kept = tmp_path / "victim" / "new" / "file"
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / ".new.part").symlink_to("victim")
    with pytest.raises(FileExistsError), made_beside(tmp_path / "new"):
        pass
    assert kept.exists()


@pytest.mark.parametrize(
    "write",
    [
        durable_write,
        lambda path, content: durable_write(path, content, alone=True),
        lambda path, content: durable_write(path, content, keeps_owner=True),
        take,
    ],
    ids=["shared", "alone", "keeps its owner", "taken"],
)
def test_the_content_is_synced_before_the_name_and_the_name_after(
    tmp_path: Path, synced: list[tuple[str, bytes | list[str]]], write: Callable[[Path, bytes], None]
) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    write(path, b"new")
    (part, content), directory = synced
    assert part != "state"
    assert content == b"new"
    assert directory == (tmp_path.name, ["state"]), "the part has taken the name"
    assert path.read_bytes() == b"new"


def test_an_exclusive_write_is_synced_and_replaces_nothing(
    tmp_path: Path, synced: list[tuple[str, bytes | list[str]]]
) -> None:
    path = tmp_path / "state"
    durable_write(path, b"first", exclusive=True)
    assert [content for _, content in synced] == [b"first", ["state"]]
    with pytest.raises(FileExistsError):
        durable_write(path, b"second", exclusive=True)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"state": b"first"}


def test_a_copy_that_a_kill_left_is_removed(tmp_path: Path) -> None:
    for name in (".copy-abc", "backup-of-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "veilmq.db.part").write_bytes(b"x")
    tmp_path.chmod(0o700)
    with closing(DataDirectory(tmp_path, 0, 0)):
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"backup-of-mine"}


@pytest.mark.parametrize("alone", [False, True])
def test_a_disk_that_fails_leaves_the_old_content_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    path = tmp_path / "state"
    durable_write(path, b"old")

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        durable_write(path, b"new", alone=alone)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"state": b"old"}


def test_who_writes_alone_clears_what_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / ".state.part").write_bytes(b"half of something long")
    durable_write(tmp_path / "state", b"new", alone=True)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"state": b"new"}


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_modes(tmp_path: Path, mode: int) -> None:
    durable_write(tmp_path / "state", b"", mode=mode)
    assert (tmp_path / "state").stat().st_mode & 0o777 == mode


def test_each_new_directory_is_synced_into_the_one_above_it(
    tmp_path: Path, synced: list[tuple[str, bytes | list[str]]]
) -> None:
    make_directory(tmp_path / "a" / "b", 0o700, 0o700)
    assert synced == [(tmp_path.name, ["a"]), ("a", ["b"])]
    assert [each.stat().st_mode & 0o777 for each in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]
    make_directory(tmp_path / "a" / "b")
    assert len(synced) == 2, "it was there"
