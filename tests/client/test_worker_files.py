"""What workers keep in directories is there after a power cut: each new directory is synced into the one above it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from veilmq.client.worker import DirectoryGuard, FileCheckpoints
from veilmq.client.worker.guard import Claim
from veilmq.client.worker.job.checkpoints import Saved


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is synced from now on, in order; it really is."""
    found: list[Path] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return found


def save(directory: Path) -> None:
    FileCheckpoints(directory).save("key", Saved(1, "half"))


def begin(directory: Path) -> None:
    DirectoryGuard(directory).begin("key", Claim("queue id", 1, now=1, until=2))


@pytest.mark.parametrize("keep", [save, begin])
def test_a_record_s_whole_way_is_synced(tmp_path: Path, synced: list[Path], keep: Callable[[Path], None]) -> None:
    directory = tmp_path / "some"
    with pytest.raises(FileNotFoundError, match=f"make it first: '{directory}'"):
        keep(directory / "where")
    assert not directory.exists(), "a mistyped path makes no tree"
    keep(directory)
    assert {tmp_path, directory} <= set(synced)
    (folder,) = directory.iterdir()
    record, *_, last = [path for path in synced if folder in (path, path.parent)]
    assert record.parent == last == folder
    synced.clear()
    keep(directory)
    assert not {tmp_path, directory} & set(synced), "once"
