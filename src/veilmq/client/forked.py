"""Things of one process, and what a child that is forked from it makes of them.

Strategy: a child has its parent's memory and files, but none of its threads: a lock there may never be free, and what
is open is the parent's still. So a thing knows whose it is: a child is refused, or its first use begins it anew. What
a child must not even have open is let go as soon as it is forked.
"""

import os
import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any, Final, Protocol

KEPT: Final[list[Any]] = []
"""A parent's, whose mere end here could end the parent's session: neither used nor closed."""


class OfProcess:
    """Of the process `_pid`, or of none yet (0)."""

    _pid = 0
    _this = staticmethod(os.getpid)

    @property
    def inherited(self) -> bool:
        """Whether it is of a process that this one was forked from."""
        return self._pid not in (0, self._this())


class Anew(OfProcess, ABC):
    """What every process begins for itself."""

    @abstractmethod
    def _begin(self) -> None:
        """New locks, no threads, no connections: this process has none of it yet."""

    def _here(self) -> None:
        """Before any use, locks included."""
        if self._pid != self._this():
            with _child.beginning:
                if self._pid != self._this():
                    self._begin()
                    self._pid = self._this()


class Forgetting(Protocol):
    """What a child must not have open."""

    def forget(self) -> None:
        """Let go of it, in a child that was just forked: without a lock, and with no thread beside."""
        ...


class _Child:
    def __init__(self) -> None:
        self.forgets: weakref.WeakSet[Forgetting] = weakref.WeakSet()
        self.beginning = threading.RLock()

    def forked(self) -> None:
        self.beginning = threading.RLock()
        for thing in list(self.forgets):
            thing.forget()


_child = _Child()
forget_in_child: Final = _child.forgets.add
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_child.forked)
