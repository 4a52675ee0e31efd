"""Reads an operator's files on a running server, where a disk may never answer (a hanging network mount).

Strategy: each read gets a daemon thread that nobody joins. The default executor's threads are joined when the loop
closes, so one that hangs would keep the process from ending.

It is not in `__init__`, with which commands read their settings, so that no command waits for asyncio to be loaded.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

T = TypeVar("T")

DEADLINE_S: Final = 10.0
"""After this time the read is reported as hanging; a later result is discarded."""


async def read_in_thread(read: Callable[[], T], what: object, deadline_s: float) -> T:
    """The result of `read`, called on a thread; what: its name in errors.

    Raises what `read` does, TimeoutError after the deadline, OSError if no thread can be started.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            deliver = partial(answer.set_result, read())
        except BaseException as error:  # noqa: BLE001 raised in the caller
            deliver = partial(answer.set_exception, error)
        try:
            loop.call_soon_threadsafe(unless_done, deliver)
        except RuntimeError:
            pass  # the loop has ended, and with it the caller

    def unless_done(deliver: Callable[[], None]) -> None:
        if not answer.done():
            deliver()

    try:
        threading.Thread(target=work, name="veilmq-read", daemon=True).start()
    except RuntimeError as error:
        raise OSError(f"{what} cannot be read: {error}") from None
    try:
        return await asyncio.wait_for(answer, deadline_s)
    except TimeoutError:
        raise TimeoutError(f"{what} hangs: not read after {deadline_s:g} s") from None
