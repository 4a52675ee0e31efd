"""Signals that end a command at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def ends_process() -> Callable[[int, FrameType | None], object] | signal.Handlers:
    """The handler of a signal that ends the process at once, as SIGTERM does from the start: process 1 needs a function
    for that (`veilmq.__main__`)."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler if callable(handler) else signal.SIG_DFL


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """While the body runs, Ctrl-C ends the process at once, unless it is ignored: nothing needs an orderly end yet, and
    an exception might get lost."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds:
        signal.signal(signal.SIGINT, ends_process())
    try:
        yield
    finally:
        if heeds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
