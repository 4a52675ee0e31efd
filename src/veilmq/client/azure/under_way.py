"""Calls under way over an SDK's client that is closed with the last of them.

Strategy: a close at once would take the transport from under a receive, which must still give back what it brought. So
calls are counted: the close lets those under way end, and whatever they still ask for; who comes when none is under way
any more is refused.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from veilmq.client.errors import TransportError

CLOSED: Final = "the account is closed"


class UnderWay:
    """The calls of one account. Any thread."""

    def __init__(self, end: Callable[[], None]) -> None:
        """end: called once, when the account is closed and no call is under way."""
        self._end = end
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call, or around several of which the last must not be refused. Raises TransportError."""
        with self._lock:
            if self._closed and not self._calls:
                raise TransportError(reason=CLOSED, may_have_happened=False)
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                last = self._closed and not self._calls
            if last:
                self._end()

    def close(self) -> None:
        """End it now, or with the last call under way. Twice is once."""
        with self._lock:
            first, self._closed = not self._closed, True
            idle = first and not self._calls
        if idle:
            self._end()
