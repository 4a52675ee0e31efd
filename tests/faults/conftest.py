"""Small stores on a disk that can fail."""

import msgspec
import pytest
from tests.support.faults import FaultDisk
from tests.support.sqlite import SMALL

from veilmq.store import MIB, Options


@pytest.fixture
def options(disk: FaultDisk) -> Options:
    """Small checkpoints, so that they happen; a reserve, so that it can be given up."""
    return msgspec.structs.replace(SMALL, disk=disk, checkpoint_bytes=64 * 1024, reserve_bytes=MIB)
