"""Objects that belong to one process, and what happens to them in a forked child.

Strategy: a child has its parent's memory and files, but none of its threads: a lock may never become free, and open
connections still belong to the parent. So each object records its process. In a child, it either refuses to work or
starts again at its first use. What a child must not even keep open is dropped right after the fork.
"""

import os
import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any, Final, Protocol

KEPT: Final[list[Any]] = []
"""Objects of the parent that we neither use nor close here: to destroy them could end the parent's session."""


class OfProcess:
    """Belongs to the process `_pid`, or to none yet (0)."""

    _pid = 0
    _this = staticmethod(os.getpid)

    @property
    def inherited(self) -> bool:
        """Whether it belongs to another process, from which this one was forked."""
        return self._pid not in (0, self._this())


class Anew(OfProcess, ABC):
    """An object that starts again in each process."""

    @abstractmethod
    def _begin(self) -> None:
        """Make new locks; forget threads and connections of the parent."""

    def _here(self) -> None:
        """Call before any use, before taking a lock."""
        if self._pid != self._this():
            with _child.beginning:
                if self._pid != self._this():
                    self._begin()
                    self._pid = self._this()


class Forgetting(Protocol):
    """Something that a child must not keep open."""

    def forget(self) -> None:
        """Drop it, in a child that was just forked: takes no lock; no other thread runs."""
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
