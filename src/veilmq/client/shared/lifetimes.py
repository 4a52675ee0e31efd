"""What has a lifetime: objects that a `with` block closes, or that belong to one process.

Forks: a child has its parent's memory and files, but none of its threads: a lock may never become free, and open
connections still belong to the parent. So each object records its process. In a child, it either refuses to work or
starts again at its first use. What a child must not even keep open is dropped right after the fork.
"""

import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NoReturn, ParamSpec, Protocol, Self, TypeVar

log = logging.getLogger("veilmq.worker")
P = ParamSpec("P")
R = TypeVar("R")


class Unpicklable:
    """An object with threads, locks or connections, which exist in one process."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Called by pickle and copy. Raises TypeError."""
        name = type(self).__name__.lstrip("_")
        raise TypeError(
            f"{name} cannot be pickled or copied: make another one in the other process (a queue from its URL)"
        )


class Closing(Unpicklable, ABC):
    """A context manager whose exit is `close()`."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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


class InOneProcess:
    """Around code of the user's, which may fork. A child that leaves it ends here, with code 1: it is a copy of what
    process `pid` runs, and would do all that follows a second time.

    No generator: a child that discards its parent's threads would close it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid and kind is not GeneratorExit:  # a coroutine of the parent's is discarded
            try:
                text = "your code (handler, callback, guard, plan ...) forked a process that left it: use os._exit()"
                log.error(text, exc_info=error)
            finally:
                os._exit(1)


class Forgetting(Protocol):
    """Something that a child must not keep open."""

    def forget(self) -> None:
        """Drop it, in a child that was just forked: takes no lock; no other thread runs."""


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


def in_one_process(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Make a call of the user's code: see `InOneProcess`."""
    with InOneProcess(os.getpid()):
        return call(*args, **kwargs)
