"""Local exhaustion: this server has run out of open files, memory or threads, which says nothing about an endpoint.

Strategy: trust an error that names the missing resource. A resolver often names nothing, or something else (EAI_SYSTEM
with EBUSY): then try to open a file and a socket; if that fails, the resource was missing. An error that may be this
machine's fault or the endpoint's (`doubtful`) is first blamed on this machine, and on the endpoint if it stays
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


class LocalExhaustion(Exception):
    """No call could be made. doubtful: it may also be the endpoint's fault."""

    def __init__(self, reason: str, *, doubtful: bool = False) -> None:
        super().__init__(reason)
        self.doubtful = doubtful


def local_exhaustion_of(error: Exception) -> LocalExhaustion | None:
    """The resource that this server lacked, if that caused the error of a call; else None."""
    if isinstance(error, MemoryError):
        return LocalExhaustion("out of memory")
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return LocalExhaustion(_NO_THREAD)
    if not isinstance(error, OSError):
        return _probed()  # for example a module that could not be read
    if error.errno in _OURS:
        return LocalExhaustion(_text(error))
    if error.errno == errno.EADDRNOTAVAIL:  # no local port is left, or the machine has no address to call from
        return LocalExhaustion(_text(error), doubtful=True)
    return None


def local_exhaustion_of_lookup(error: Exception) -> LocalExhaustion | None:
    """The resource that this server lacked, if that caused the error of a name look-up; else None."""
    if isinstance(error, socket.gaierror):
        if error.errno == socket.EAI_MEMORY:
            return LocalExhaustion("the resolver is out of memory")
        if error.errno == socket.EAI_AGAIN:  # no name server answered: either ours or the name's are down
            return _probed() or LocalExhaustion(_text(error), doubtful=True)
        return _probed()
    if isinstance(error, OSError):  # EAI_SYSTEM: no name server says that
        return LocalExhaustion(_text(error), doubtful=error.errno not in _OURS_IN_LOOKUPS and _probed() is None)
    return local_exhaustion_of(error)


def _probed() -> LocalExhaustion | None:
    """The resource that is missing right now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    except OSError as lacking:
        return LocalExhaustion(_text(lacking))
    return None


def _text(error: OSError) -> str:
    return error.strerror or str(error)


class LocalExhaustions:
    """Counts the calls that local exhaustion put off, and reports the latest cause while it is fresh."""

    def __init__(self, fresh_s: float) -> None:
        """fresh_s: how long a cause counts as present after it put off a call."""
        self.count = 0
        self._fresh_s = fresh_s
        self._latest = ""
        self._fresh_until = 0.0
        self._logged_until = 0.0
        self._end_awaited = False

    def at(self, now: float) -> str | None:
        """The missing resource, if one is missing now."""
        return self._latest if now < self._fresh_until else None

    def met(self, endpoint: str, shortage: LocalExhaustion, now: float) -> None:
        """A call to the endpoint was put off."""
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
            log.info("pushes resume")
