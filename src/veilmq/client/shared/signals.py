"""The signals that stop a program, while it waits for its work to end.

Strategy: the first signal calls `stop`, and so does each further one. A forked child gets the program's own SIGTERM
handler back, so that `Process.terminate()` ends it. It keeps ours for SIGINT, which does nothing there: Ctrl-C goes to
all processes of a terminal, and the parent's drain waits for what they do.
"""

import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Final

from veilmq.client.shared.lifetimes import forget_in_child

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context manager for the main thread: the signals `numbers` call `stop` inside it."""

    def __init__(self, stop: Callable[[], object], numbers: Sequence[int] = SIGNALS) -> None:
        self._stop = stop
        self._numbers = numbers
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        forget_in_child(self)
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._came)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._numbers:
            self._restore(number)

    def forget(self) -> None:
        """In a child that was just forked: see the module."""
        self._restore(signal.SIGTERM)

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._stop()

    def _restore(self, number: int) -> None:
        if number in self._before:
            handler = self._before.pop(number)
            # None: a program that embeds Python had set a handler that Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
