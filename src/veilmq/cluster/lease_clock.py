"""The last lease clock that this machine has seen, and when by its boot clock.

Strategy: a new owner must know how long ago the last renewal was, whatever the clocks say that can be set. What was
read and sent here bounds that. A renewal waits for the lock of the one before, so it was written after that one was
committed. When it was committed itself says little: its commit may have waited for a standby for hours, and nobody
sees it before that.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

from veilmq.model.instant import Instant

log = logging.getLogger("veilmq.cluster")

_SEEN_BYTES: Final = 512
"""Size of the file, always overwritten as a whole: a process that is killed leaves the old content or the new."""


class SeenClock(msgspec.Struct, frozen=True):
    """A lease clock that this machine has read or written, with readings of its boot clock."""

    boot: str
    """Which start of the machine that was."""
    incarnation: UUID
    clock: Instant
    looked_ns: int
    """The boot clock before the lease clock was read: any later lease clock was committed after this."""
    after_ns: int | None
    """A reading of the boot clock after which this lease clock was written; None: unknown."""
    sent: tuple[Instant, int] | None = None
    """A lease clock that was sent, and the boot clock's reading before: nobody knows whether it was written."""
    before_ns: int | None = None
    """`looked_ns` of the lease clock before: this one was committed, and the next one is written, after it. None:
    unknown."""


def _open_to_replace(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o600)


class Memory:
    """The last lease clock that this machine has seen. Any thread may use it."""

    def __init__(self, incarnation: UUID, path: Path | None = None) -> None:
        """incarnation: of the cluster. path: of the file that keeps it from one process to the next."""
        self._incarnation = incarnation
        self._path = path
        self._boot = ""
        try:
            self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError as error:
            if path is not None:
                log.warning("no %s, so clocks set ahead may end leases early after a restart: %s", path.name, error)
        self.last: SeenClock | None = None
        if path is not None and self._boot:
            with suppress(OSError, msgspec.MsgspecError):
                found = msgspec.json.decode(path.read_bytes(), type=SeenClock)
                if (found.boot, found.incarnation) == (self._boot, incarnation):
                    self.last = found

    def looked(self, clock: Instant, looked_ns: int) -> SeenClock:
        """This lease clock was read. looked_ns: the boot clock before. Returns what is known of it."""
        last, after_ns, before_ns = self.last, None, None
        if last is not None:
            if clock == last.clock:
                after_ns, before_ns = last.after_ns, last.before_ns
            elif clock > last.clock:
                after_ns, before_ns = last.before_ns, last.looked_ns
            # else a standby without the last renewal was promoted: this clock is older than what was read before
            if last.sent is not None and last.sent[0] == clock:
                after_ns = last.sent[1]
        seen = SeenClock(self._boot, self._incarnation, clock, looked_ns, after_ns, before_ns=before_ns)
        self._keep(seen)
        return seen

    def sending(self, clock: Instant, sent_ns: int) -> None:
        """A server that owns the shard is about to write its lease clock. sent_ns: the boot clock before."""
        if self.last is not None:
            self._keep(msgspec.structs.replace(self.last, sent=(clock, sent_ns)))

    def _keep(self, seen: SeenClock) -> None:
        """Not synced: when the machine restarts, it is of no use any more."""
        self.last = seen
        if self._path is not None and self._boot:
            with suppress(OSError), open(self._path, "wb", opener=_open_to_replace) as file:
                file.write(msgspec.json.encode(seen).ljust(_SEEN_BYTES))
