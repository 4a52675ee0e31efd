"""Large files beside the database are synced, and freed, in pieces, so that no commit waits for a whole one."""

import os
import tempfile
from pathlib import Path

import pytest

from veilmq.store.files import PIECE_BYTES, SyncedInPieces, close_in_pieces


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size that the file had at each sync."""
    sizes: list[int] = []
    really = os.fdatasync

    def sync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        really(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    return sizes


def test_what_is_written_is_whole_and_synced_piece_by_piece(tmp_path: Path, synced: list[int]) -> None:
    part = os.urandom(PIECE_BYTES // 3)
    with (tmp_path / "file").open("wb") as file:
        written = SyncedInPieces(file)
        for _ in range(8):
            assert written.write(part) == len(part)
    assert (tmp_path / "file").read_bytes() == part * 8
    assert synced == [4 * len(part), 8 * len(part)]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 1])
def test_a_file_is_let_go_from_its_end(tmp_path: Path, synced: list[int], size: int) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.truncate(size)
        close_in_pieces(file)
        assert file.closed
    assert synced == list(range(size - PIECE_BYTES, 0, -PIECE_BYTES))
