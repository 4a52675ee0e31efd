"""A development server that dies at a named point: `python -m tests.support.crashing POINT NTH DATA`.

Strategy: the store calls its points (`CRASH_POINTS`) as it passes them; at the NTH passing of POINT the process kills
itself as a SIGKILL from outside would: no handler runs and no buffer is written. It listens on a free port, which it
announces in the directory's lock file like any server.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from veilmq.server.auth import DevelopmentKeyring
from veilmq.server.clock import LeaseClock
from veilmq.server.config.settings import Address, Settings
from veilmq.server.service import Service
from veilmq.store.sqlite.store import CRASH_POINTS


def die_at(point: str, nth: int) -> Callable[[str], None]:
    """For a store's `at_point`: kill the process at the nth passing of the point."""
    assert point in CRASH_POINTS, f"{point!r} is none of {CRASH_POINTS}"
    left = nth

    def passing(passed: str) -> None:
        nonlocal left
        if passed == point:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return passing


async def serve(point: str, nth: int, data: Path) -> None:
    """Serve, and die."""
    free = Address("127.0.0.1", 0)
    settings = Settings(data=data, sqs=free, azure=free, mns=free)
    service = Service(settings, DevelopmentKeyring(), LeaseClock(), die_at(point, nth))
    await service.start()
    await service.failed


def main() -> None:
    """The command line."""
    _, point, nth, data = sys.argv
    asyncio.run(serve(point, int(nth), Path(data)))


if __name__ == "__main__":
    main()
