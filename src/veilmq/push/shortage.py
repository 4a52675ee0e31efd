"""What this server itself has run out of (open files, memory, threads), which says nothing about an endpoint.

Strategy: an error that names the shortage is one. A resolver often names nothing, or something else (EAI_SYSTEM with
EBUSY): then a file and a socket are tried, and if they cannot be had, that was the cause. What may be this machine's
fault or the endpoint's (`doubtful`) is taken for this machine's at first, and for the endpoint's if it stays
(`Health.doubts`).
"""

import errno
import logging
import os
import socket
from typing import Final

_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_OURS_IN_LOOKUPS: Final = _OURS | {errno.EBUSY, errno.EAGAIN}
"""EBUSY is what glibc may leave behind when it could not open its files."""
_NO_THREAD: Final = "can't start new thread"
"""CPython's only sign that pthread_create failed (EAGAIN)."""
_LOG_EVERY_S: Final = 60.0

log = logging.getLogger("veilmq.push")


class Shortage(Exception):
    """No call could be made. doubtful: it may also be the endpoint's fault."""

    def __init__(self, reason: str, *, doubtful: bool = False) -> None:
        super().__init__(reason)
        self.doubtful = doubtful


def shortage_of(error: Exception) -> Shortage | None:
    """What this server lacked, if that is behind an error of a call."""
    if isinstance(error, MemoryError):
        return Shortage("out of memory")
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return Shortage(_NO_THREAD)
    if not isinstance(error, OSError):
        return _probed()  # a module that could not be read, say
    if error.errno in _OURS:
        return Shortage(_text(error))
    if error.errno == errno.EADDRNOTAVAIL:  # no local port is left, or the machine has no address to call from
        return Shortage(_text(error), doubtful=True)
    return None


def shortage_of_lookup(error: Exception) -> Shortage | None:
    """What this server lacked, if that is behind an error of looking up a name."""
    if isinstance(error, socket.gaierror):
        if error.errno == socket.EAI_MEMORY:
            return Shortage("the resolver is out of memory")
        if error.errno == socket.EAI_AGAIN:  # no name server answered: ours are away, or those of the name
            return _probed() or Shortage(_text(error), doubtful=True)
        return _probed()
    if isinstance(error, OSError):  # EAI_SYSTEM: no name server says that
        return Shortage(_text(error), doubtful=error.errno not in _OURS_IN_LOOKUPS and _probed() is None)
    return shortage_of(error)


def _probed() -> Shortage | None:
    """What is lacking at this moment."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    except OSError as lacking:
        return Shortage(_text(lacking))
    return None


def _text(error: OSError) -> str:
    return error.strerror or str(error)


class Shortages:
    """What is reported of a room's shortages: how many calls they put off, and the latest while it is fresh."""

    def __init__(self, fresh_s: float) -> None:
        """fresh_s: how long one counts as lasting after a call that it put off."""
        self.count = 0
        self._fresh_s = fresh_s
        self._latest = ""
        self._fresh_until = 0.0
        self._logged_until = 0.0
        self._end_awaited = False

    def at(self, now: float) -> str | None:
        """What is lacking."""
        return self._latest if now < self._fresh_until else None

    def met(self, endpoint: str, shortage: Shortage, now: float) -> None:
        """A call of the endpoint is put off."""
        self.count += 1
        self._latest = f"{endpoint}: {shortage}" if shortage.doubtful else str(shortage)
        self._fresh_until = now + self._fresh_s
        if now >= self._logged_until:
            self._logged_until = now + _LOG_EVERY_S
            self._end_awaited = True
            log.error("pushes wait, because this server cannot call: %s", self._latest)

    def over(self) -> None:
        """A call was answered."""
        if self._end_awaited:
            self._end_awaited = False
            self._fresh_until = 0.0
            log.info("pushes are made again")
