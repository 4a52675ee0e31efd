"""A real file system that fills up: a tmpfs of a few MiB (mounting one takes root; others have the VFS's full disk)."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.contract.stage import TESTER, Stage, sending
from tests.support.small_disk import fill_up, small_disk
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.cli.directory import backup
from veilmq.cli.failures import Failure
from veilmq.model.commands import AnyCommand, Delete, Receive
from veilmq.model.errors import DiskLow, StoreFailed
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Deleted, Outcome, Received, Sent
from veilmq.store import MIB
from veilmq.store.directory import DatabaseUnusable
from veilmq.store.sqlite.store import SqliteStore


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small") as mount:
        yield mount


def apply(stage: Stage, command: AnyCommand) -> Outcome:
    """As a shell does: a commit that failed is tried again, each command by itself."""
    applied = stage.store.apply([command], stage.now)
    try:
        if applied.wrote:
            stage.store.commit()
    except StoreFailed:
        applied = stage.store.apply_each([command], stage.now)
    (outcome,) = applied.outcomes
    return outcome


if os.geteuid() == 0:

    @pytest.mark.parametrize("suddenly", [False, True])
    def test_a_disk_that_fills_up_and_gets_space_again(small: Path, suddenly: bool) -> None:
        # The same proportions as by default: a reserve of four times the size at which the WAL is copied.
        options = msgspec.structs.replace(SMALL, reserve_bytes=4 * MIB, floor_bytes=256 * 1024, checkpoint_bytes=MIB)
        stage = Stage(SqliteFactory(small / "data", options))
        queue = stage.create()
        sent = [stage.send(queue, "x" * 10_000) for _ in range(50)]
        if suddenly:
            fill_up(small / "ballast")
        else:
            (small / "ballast").write_bytes(bytes(8 * MIB))
        full = suddenly
        while True:
            stage.later(SECOND_US)
            applied = stage.store.apply([sending(queue, "x" * 50_000)], stage.now)
            try:
                if applied.wrote:
                    stage.store.commit()
            except StoreFailed:
                full = True  # the WAL was faster than its copying: the reserve is free already, for what comes now
                break
            (outcome,) = applied.outcomes
            if isinstance(outcome, Sent):
                sent.append(outcome)
            else:
                assert type(outcome) in {DiskLow, StoreFailed}
                break
        if not full:
            fill_up(small / "more")
        stage.later(SECOND_US)
        assert type(apply(stage, sending(queue))) is DiskLow
        for one in sent[:30]:
            received = apply(stage, Receive(queue=queue, origin=TESTER))
            assert isinstance(received, Received)
            (message,) = received.messages
            assert message.id == one.id
            delete = Delete(queue=queue, origin=TESTER, handle=message.handle, arrived=stage.now)
            assert type(apply(stage, delete)) is Deleted
        assert type(apply(stage, sending(queue))) is DiskLow
        (small / "ballast").unlink()
        (small / "more").unlink(missing_ok=True)
        stage.later(2 * SECOND_US)
        sent.append(stage.send(queue, "space again"))
        stage.reopen()
        assert sum(stage.counts(queue)) == len(sent) - 30
        stage.store.close()

    def test_a_start_on_a_full_disk_lives_on_the_reserve(small: Path) -> None:
        options = msgspec.structs.replace(SMALL, reserve_bytes=4 * MIB, floor_bytes=256 * 1024, checkpoint_bytes=MIB)
        stage = Stage(SqliteFactory(small / "data", options))
        queue = stage.create()
        stage.send(queue, "x")
        stage.store.close()
        fill_up(small / "ballast")
        stage = Stage(SqliteFactory(small / "data", options))
        assert type(apply(stage, sending(queue))) is DiskLow
        received = apply(stage, Receive(queue=queue, origin=TESTER))
        assert isinstance(received, Received)
        delete = Delete(queue=queue, origin=TESTER, handle=received.messages[0].handle, arrived=stage.now)
        assert type(apply(stage, delete)) is Deleted
        stage.store.close()

    def test_a_disk_too_small_to_begin_on_is_told(small: Path, tmp_path: Path) -> None:
        """However much of what a new database needs there is room for; and a copy leaves nothing behind there."""
        used = Stage(SqliteFactory(tmp_path / "used", SMALL))
        used.send(used.create(), "x" * 100_000)
        refused = begun = failed = copied = 0
        said: dict[str, str] = {}
        left: list[bool] = []
        for free_bytes in range(0, 640 * 1024, 8 * 1024):
            fill_up(small / "ballast")
            os.truncate(small / "ballast", (small / "ballast").stat().st_size - free_bytes)
            try:
                SqliteStore(small / "data", SMALL).close()
                begun += 1
            except (DatabaseUnusable, OSError):
                refused += 1
            shutil.rmtree(small / "data", ignore_errors=True)
            try:
                backup(tmp_path / "used", small / "copy", as_json=False)
                copied += 1
            except Failure as error:
                failed += 1
                said[str(error)] = error.advice
            left.append((small / "copy").exists())
            shutil.rmtree(small / "copy", ignore_errors=True)
        used.store.close()
        assert min(refused, begun, failed, copied) > 3
        assert left.count(True) == copied
        assert not any("not an error" in each for each in said)
        advised = said["the copy failed and was removed: no space is left"]
        assert advised == "Is there space at the destination, and where the data is?"
