"""Who holds a storage, until when, and the renewal of the hold: locks for storages without a kernel lock.

Strategy: the holder writes its name and an expiry into what it stores, and a separate thread renews it. Another process
is refused until the expiry, or let in at once if the holder ran on this machine and is dead. The expiry is judged by
the storage's own clock if it has one, because all processes share it. Source: document 002 (one sender process, one
receiver process).
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.errors import StateInvalid, StorageHeld, StorageLost
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import OfProcess

HOLD_SECONDS: Final = 30.0
"""How long a storage stays held after its holder's last renewal."""
_RENEWALS: Final = 3
"""Renewals during that time."""
_NOTHING: Final = b"null"

log = logging.getLogger("veilmq.ordered")


class Owner(msgspec.Struct, frozen=True):
    """The holder of a storage, and until when it holds it."""

    token: str
    pid: int
    place: str
    """The machine, its boot and its process namespace: the scope in which the pid is valid."""
    until: float
    """Unix seconds."""
    seconds: float = 0.0
    """From the time of writing to `until`; 0: written by an older version without this field."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.place.partition(' ')[0]}"

    def shuts_out(self, other: "Owner", now: float) -> bool:
        """Whether `other` is refused at `now` (Unix seconds)."""
        if self.token == other.token or self.until <= now:
            return False
        return not (self.place == other.place and " " in self.place and not _alive(self.pid))


class Envelope(msgspec.Struct, frozen=True):
    """A state with its lock, as JSON."""

    owner: Owner | None = None
    state: msgspec.Raw = msgspec.Raw(_NOTHING)

    @property
    def content(self) -> bytes | None:
        """The state without the lock."""
        state = bytes(self.state)
        return None if state == _NOTHING else state


def opened(data: bytes | None, storage: str) -> Envelope:
    """The envelope in stored data. Raises StateInvalid."""
    try:
        return Envelope() if data is None else msgspec.json.decode(data, type=Envelope)
    except (ValueError, RecursionError) as error:
        raise StateInvalid(storage=storage, reason=f"holds something else: {error}") from None


def closed(owner: Owner | None, state: bytes | None) -> bytes:
    """The data to store."""
    return msgspec.json.encode(Envelope(owner, msgspec.Raw(_NOTHING if state is None else state)))


class Watch(OfProcess):
    """One holder's name, and the thread that renews its hold. Belongs to this process from `start` to `stop`."""

    def __init__(self, storage: str, clock: Clock, seconds: float) -> None:
        checks.positive(seconds, "hold_seconds")
        self._storage = storage
        self._clock = clock
        self._seconds = seconds
        self._token = secrets.token_hex(8)
        self._ahead: float | None = None
        """Seconds that the storage's clock is ahead of our monotonic one; None: unknown."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        """Call it before anything else, including locks. Raises StorageHeld in a forked child of the holder."""
        if self.inherited:
            raise StorageHeld(storage=self._storage, holder=f"pid {self._pid}")

    def enter_free(self) -> None:
        """Call it before acquiring, with the storage's own lock held. Raises StorageHeld if this object holds it
        already: one token is one holder."""
        if self._thread is not None:
            raise StorageHeld(storage=self._storage, holder=f"pid {os.getpid()}")

    def check_held(self) -> None:
        """Call it before a save, with the storage's own lock held. Raises StorageLost unless it was acquired."""
        if self._thread is None:
            raise StorageLost(storage=self._storage, holder="nobody")

    def owner(self) -> Owner:
        """This process as the holder, for `seconds` from now."""
        return Owner(self._token, os.getpid(), _place(), self._now() + self._seconds, self._seconds)

    def clock_reads(self, now: float) -> None:
        """Record that the storage's clock reads `now` (Unix seconds)."""
        self._ahead = now - self._clock.monotonic()

    def admit(self, holder: Owner | None, age: float | None = None) -> None:
        """Raises StorageHeld if this process is refused. age: seconds since the holder wrote its record, by the
        storage's clock, for storages that have only that."""
        if holder is None:
            return
        now = self._now() if age is None or not holder.seconds else holder.until - holder.seconds + age
        if holder.shuts_out(self.owner(), now):
            raise StorageHeld(storage=self._storage, holder=str(holder))

    def _now(self) -> float:
        return self._clock.wall() if self._ahead is None else self._clock.monotonic() + self._ahead

    def check(self, holder: Owner | None) -> None:
        """Raises StorageLost unless this process is the holder."""
        if holder is None or holder.token != self._token:
            raise StorageLost(storage=self._storage, holder=str(holder or "nobody"))

    def start(self, renew: Callable[[], None]) -> None:
        """Renew until `stop`."""
        self._stop.clear()
        self._pid = self._this()
        self._thread = threading.Thread(
            target=self._run, args=(renew,), name=f"veilmq hold {self._storage}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        self._pid = 0

    def _run(self, renew: Callable[[], None]) -> None:
        while not self._stop.wait(min(self._seconds / _RENEWALS, threading.TIMEOUT_MAX)):
            try:
                renew()
            except StorageLost as error:
                log.error("%s", error)
                return
            except Exception:  # a storage may raise anything, and the next renewal may succeed
                log.exception("%s: the hold was not renewed", self._storage)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _place() -> str:
    """The host's name, plus what makes a pid unique, if the system has it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{socket.gethostname()} {boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
