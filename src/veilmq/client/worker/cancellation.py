"""The token that tells a handler to stop, and why.

Strategy: set once, from any thread, by whoever learns it first: the lease keeper, the timer before the lease's end, the
worker that shuts down. A handler looks (`if job.cancelled`), waits, or lets itself be thrown out
(`job.cancelled.check()`).
"""

import logging
import threading
from collections.abc import Callable
from enum import StrEnum

log = logging.getLogger("veilmq.worker")


class Cause(StrEnum):
    """Why a handler should stop."""

    LOST = "the lease was lost"
    EXPIRING = "the lease ends soon"
    SHUTDOWN = "the worker stops"


class Cancelled(Exception):
    """Raised by `Cancellation.check` in a handler that was told to stop; the worker takes it for an orderly stop."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else str(self.cause)


class Cancellation:
    """Cancellation token. True once it is set."""

    __slots__ = ("_callbacks", "_event", "_lock", "cause", "detail")

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.detail = ""
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def set(self, cause: Cause, detail: str = "") -> bool:
        """Tell the handler; True for the first who does. Later causes change nothing."""
        with self._lock:
            if self.cause is not None:
                return False
            self.detail = detail
            self.cause = cause
            callbacks, self._callbacks = self._callbacks, []
        self._event.set()
        for callback in callbacks:
            _call(callback)
        return True

    def is_set(self) -> bool:
        """True: stop."""
        return self.cause is not None

    __bool__ = is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: for ever); whether it is set. A sleep that ends when work must end."""
        return self._event.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def check(self) -> None:
        """Raise Cancelled if it is set."""
        if self.cause is not None:
            raise Cancelled(self.cause, self.detail)

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when it is set, in the thread that sets it; at once if it is."""
        with self._lock:
            if self.cause is None:
                self._callbacks.append(callback)
                return
        _call(callback)


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException:
        # Who sets the token (the keeper, a shutdown) must go on, whatever a handler's own callback does.
        log.exception("a cancellation callback failed")
