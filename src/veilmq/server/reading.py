"""Files that a running server reads again, though the disk may never answer (a network mount that hangs).

Strategy: a thread of its own for each reading, which nobody waits for at the end: the default executor's threads are
joined when the loop closes, so that one of them that hangs would keep the process from ending.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

T = TypeVar("T")

DEADLINE_S: Final = 10.0
"""After so long whoever asked is told that it hangs; what comes later is thrown away."""


async def read_aside(read: Callable[[], T], what: object, deadline_s: float = DEADLINE_S) -> T:
    """What `read` returns, called in a thread; what: names it in errors.

    Raises what `read` does, TimeoutError after the deadline, OSError if there is no thread to be had.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            tell = partial(answer.set_result, read())
        except BaseException as error:  # noqa: BLE001 whoever asked gets it
            tell = partial(answer.set_exception, error)
        try:
            loop.call_soon_threadsafe(settle, tell)
        except RuntimeError:
            pass  # the loop ended meanwhile, and with it whoever asked

    def settle(tell: Callable[[], None]) -> None:
        if not answer.done():
            tell()

    try:
        threading.Thread(target=work, name="veilmq-read", daemon=True).start()
    except RuntimeError as error:
        raise OSError(f"{what} cannot be read: {error}") from None
    try:
        return await asyncio.wait_for(answer, deadline_s)
    except TimeoutError:
        raise TimeoutError(f"{what} hangs: not read after {deadline_s:g} s") from None
