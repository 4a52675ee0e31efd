"""Small stores on a disk that can fail."""

import msgspec
import pytest

from veilmq.store.sqlite.options import MIB, Options
from veilmq.testing.faults import FaultDisk
from veilmq.testing.sqlite import SMALL


@pytest.fixture
def options(disk: FaultDisk) -> Options:
    """Small checkpoints, so that they happen; a reserve, so that it can be given up."""
    return msgspec.structs.replace(SMALL, vfs=disk.name, checkpoint_bytes=64 * 1024, reserve_bytes=MIB)
