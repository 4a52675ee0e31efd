"""One server of a cluster: follows the log in its own data directory, until it owns the shard.

Strategy: the directory is a copy that may be lost. The follower reads the log a few times a second, looks at the
owner's sign of life beside it, and takes over once that has stood still for longer than a lease. After the take-over it
reads the rest of the log, in a later statement, and only then is the directory opened as a store. A copy that has
diverged is thrown away, and filled again from the log.

A server that was killed and lost its directory finds its own name taken for some seconds: it fills its copy meanwhile.

The lease clock goes on where the owner's was: from its last renewal on, by the time that this server has measured
since, or else by what PostgreSQL's clock and its own wall time agree on. So a take-over ends no lease early, even where
the clocks of two machines are an hour apart.
"""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar
from uuid import UUID, uuid4

import msgspec

from veilmq.cluster.lease_clock import Memory
from veilmq.cluster.member.copy import Copy, Watch
from veilmq.cluster.postgres import Postgres, Seen, Unfit, Unreachable
from veilmq.cluster.postgres.log.reading import LogReader
from veilmq.cluster.postgres.ownership import Candidate, Ownership, Server, Sight, StillOwned
from veilmq.cluster.postgres.schema import Formats, Outdated, Shard, WrongCluster, admit, refuse_moved
from veilmq.cluster.postgres.snapshots import Snapshots
from veilmq.cluster.registry import FILLING, STARTING, NameTaken, Registry, ServerState, ask_to_hand_over, within
from veilmq.cluster.snapshotting import SNAPSHOT_BYTES, Snapshotting
from veilmq.engine.directory import is_full
from veilmq.model.errors import StoreUnknown
from veilmq.store.directory import DATABASE, DatabaseUnusable
from veilmq.store.files import durable_write
from veilmq.store.log import Follower

POLL_SECONDS: Final = 0.03
"""How often a follower looks for new records and for the owner's sign of life."""
TROUBLE_SECONDS: Final = 0.3
"""Additional pause while PostgreSQL does not answer, or may not be trusted."""
REPORT_SECONDS: Final = 1.5
"""How often a follower reports to the cluster that it is alive, while it fills its copy."""
SILENT_SECONDS: Final = 2.0
"""A running server reports more often. One of this server's name that was silent for so long is most likely gone."""
FULL_SECONDS: Final = 1.0
"""Pause between two looks whether a full disk has space again."""
LOOKS_BETWEEN_REPORTS: Final = 30
"""After this many looks at the log, a follower reports to the cluster that it is alive."""
MEMBER_FILE: Final = "cluster.json"
SEEN_FILE: Final = "lease-clock.json"

FOR_GOOD: Final = (Outdated, WrongCluster, NameTaken)
"""Errors that stop a server that ran already. Any other fault of PostgreSQL an operator may mend meanwhile."""

log = logging.getLogger("veilmq.cluster")


class _Stopped(Exception):
    """`stopping` was set while the copy was filled."""


T = TypeVar("T")


class Membership(msgspec.Struct):
    """What a server keeps beside its copy, to notice another cluster and another PostgreSQL."""

    incarnation: UUID
    holder: UUID
    """Names the directory, which one process has at a time."""
    system: int
    timeline: int
    name: str = ""
    """The server's; empty: release 0.1.0 wrote it."""


def membership(directory: Path) -> Membership | None:
    """What the directory says; None: it is no copy of a cluster's. Raises Unfit, OSError."""
    path = directory / MEMBER_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Membership)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Unfit(f"{path} is damaged: remove the directory, it is filled again from the log ({error})") from error


class Member:
    """Follows, takes over, and remembers. One thread at a time."""

    def __init__(
        self,
        dsn: str,
        directory: Path,
        open_follower: Callable[[Path], Follower],
        read_boot_ns: Callable[[], int],
        *,
        formats: Formats,
        name: str,
        release: str = "",
        address: str = "",
        single_copy: bool = False,
        snapshot_bytes: int = SNAPSHOT_BYTES,
    ) -> None:
        """formats: state formats that this release works with. name: unique in the cluster. address: where other
        servers reach this one. Raises Unfit."""
        self._directory = directory
        self._open_follower = open_follower
        self._boot_ns = read_boot_ns
        self._formats = formats
        self._release = release
        self._snapshot_bytes = snapshot_bytes
        self._name = name
        self.address = address
        kept = self._kept = membership(directory)
        if kept is not None and kept.name not in {"", name}:  # copied from another server, which may be running
            kept.holder = uuid4()
        seen = Seen() if kept is None else Seen(kept.system, kept.timeline)
        self.postgres = Postgres(dsn, single_copy=single_copy, seen=seen)
        self._trouble = self._no_room = self._not_taken = ""
        self._copy: Copy | None = None
        self._candidate: Candidate | None = None
        """Which has looked at the owner before `follow`."""
        self._level_ns = self._reported_ns = read_boot_ns()
        self.registry: Registry | None = None
        """This server's row, from the first `join` on."""

    @property
    def lsn(self) -> int:
        """The last record that the copy has; any thread."""
        return 0 if self._copy is None else self._copy.lsn

    @property
    def behind_s(self) -> float:
        """How long ago the copy had every record of the log; any thread."""
        return (self._boot_ns() - self._level_ns) / 1e9

    @property
    def trouble(self) -> str:
        """Why it does not follow, in a sentence; any thread."""
        return self._no_room or self._trouble

    @property
    def is_filling(self) -> bool:
        """Whether its copy was thrown away, and is being filled again; any thread."""
        return self.registry is not None and self.registry.reported.role == FILLING

    @property
    def unowned(self) -> str:
        """Why calls are not carried out while no owner is known, in a sentence."""
        why = f", and this server cannot take over: {self._not_taken}" if self._not_taken else ""
        return self.trouble or f"nobody owns the queues at present{why}"

    @property
    def drained(self) -> bool:
        """Whether an operator wants this server to own nothing."""
        return self.registry is not None and self.registry.drained

    def follow(
        self, stopping: threading.Event, watch: "Watch | None" = None, *, patience_s: float = 0.0
    ) -> Ownership | None:
        """Follow the log until this server owns the shard and its copy has every record. None: `stopping` was set.

        patience_s: leave the shard to others for so long, unless it is handed to this server. This waits while
        PostgreSQL has a fault that may be mended, or the disk is full.
        Raises Outdated, WrongCluster, NameTaken, and as the opening of a follower.
        """
        patient_until_ns = self._boot_ns() + int(patience_s * 1e9)
        return self._with_room(stopping, lambda: self._follow(stopping, watch or Watch(), patient_until_ns))

    def _with_room(self, stopping: threading.Event, work: Callable[[], T | None]) -> T | None:
        """Do the work, again and again while the disk is too full. None: `stopping` was set, or the work says so."""
        while not stopping.is_set():
            try:
                return work()
            except _Stopped:
                return None
            except (OSError, DatabaseUnusable, StoreUnknown) as error:
                if not is_full(error, self._directory):
                    raise
                if not self._no_room:
                    self._no_room = f"the disk of {self._directory} is full, and this server waits: free space"
                    log.error("%s (%s)", self._no_room, error)
                stopping.wait(FULL_SECONDS)
        return None

    def _follow(self, stopping: threading.Event, watch: Watch, patient_until_ns: int) -> Ownership | None:
        if self._join(stopping) is None:
            return None
        kept, registry = self._kept, self.registry
        assert kept is not None
        assert registry is not None
        server = registry.server = self._server(kept)
        with ExitStack() as stack:
            reader = stack.enter_context(closing(LogReader(self.postgres, kept.incarnation)))
            candidate = stack.enter_context(closing(self._watching(kept)))
            candidate.server = server
            candidate.look()  # a dead owner's lease runs out while the copy is filled
            self._candidate = None
            snapshots = Snapshots(self.postgres, kept.incarnation)
            between = partial(self._go_on, stopping)
            if not (self._directory / DATABASE).exists():
                self._copy = None
            copy = stack.enter_context(closing(Copy(self._directory, self._open_follower, snapshots, watch, between)))
            self._copy = copy
            following = _Following(stack, watch, registry, candidate, reader, copy, patient_until_ns)
            while not stopping.is_set():
                try:
                    self._catch_up(following)
                    sight = self._look(following)
                    ownership = self._take_over(following, sight)
                    self._not_taken = ""
                    if ownership is not None:
                        self._note_well()
                        return ownership
                    following.looked += 1
                except StillOwned as error:
                    self._note_well()
                    if self._not_taken != str(error):  # it may last as long as PostgreSQL waits for a standby
                        log.info("not taken over: %s", error)
                    self._not_taken = str(error)
                except FOR_GOOD:
                    raise
                except (Unreachable, Unfit) as error:
                    self._note_trouble(str(error))
                    stopping.wait(TROUBLE_SECONDS)
                else:
                    self._note_well()
                stopping.wait(POLL_SECONDS)
        return None

    def _catch_up(self, following: "_Following") -> None:
        """Read the log to its end."""
        if following.snapshotting is not None and following.snapshotting.damage_found:
            following.copy.throw_away(following.snapshotting.damage_found)
            following.snapshotting.damage_found = ""
        following.copy.catch_up(following.reader)
        self._level_ns = self._boot_ns()
        if following.snapshotting is None:  # not beside the first reading of the log, which a take-over may wait for
            following.snapshotting = following.stack.enter_context(closing(self.snapshotting(owns=False)))
            following.snapshotting.start()

    def _look(self, following: "_Following") -> Sight:
        """Look at the owner, and report to this server and the cluster."""
        candidate, copy, registry = following.candidate, following.copy, following.registry
        sight = candidate.look()
        self.keep_seen()
        if (named := (sight.epoch, sight.holder, sight.address)) != following.reported:
            following.watch.saw(sight)
            following.reported = named
        if following.looked % LOOKS_BETWEEN_REPORTS == 0 or self.is_filling:
            registry.report(ServerState("follower", copy.follower.format, copy.follower.position.lsn))
            self._reported_ns = self._boot_ns()
            copy.follower.look_again()
        following.silent = _note_silence(following.silent, sight, candidate)
        if sight.holder is not None and sight.epoch == copy.doubted_epoch and not registry.drained:
            self._replace(sight.owner)
            copy.doubted_epoch = 0
        return sight

    def _take_over(self, following: "_Following", sight: Sight) -> Ownership | None:
        """Take the shard over if that is due, and read the rest of the log. Raises StillOwned."""
        candidate = following.candidate
        is_named = sight.holder is None and sight.owner == self._name
        may = is_named or self._boot_ns() >= following.patient_until_ns
        if not may or following.registry.drained or not candidate.is_due():
            return None
        ownership = candidate.take_over()
        following.copy.catch_up(following.reader, ownership)
        self.keep_seen()
        return ownership

    def _watching(self, kept: Membership) -> Candidate:
        if self._candidate is not None:
            return self._candidate
        memory = Memory(kept.incarnation, self._directory / SEEN_FILE)
        return Candidate(self.postgres, self._server(kept), kept.incarnation, self._boot_ns, memory=memory)

    def _replace(self, owner: str) -> None:
        """Ask an owner whose copy is damaged to hand over to this server. Raises Unreachable."""
        try:
            within(self.postgres, partial(ask_to_hand_over, to=self._name, doubted=True))
        except Unfit as error:
            log.warning("%s, whose copy is damaged, was not asked to hand over: %s", owner, error)
        else:
            log.warning("asked %s, whose copy is damaged, to hand over to this server", owner)

    def snapshotting(self, *, owns: bool) -> Snapshotting:
        """Snapshots of this server's directory. Call after `join`."""
        assert self._kept is not None
        return Snapshotting(
            self.postgres, self._kept.incarnation, self._name, self._directory,
            owns=owns, bytes_min=self._snapshot_bytes,
        )  # fmt: skip

    def join(self, stopping: threading.Event) -> Shard | None:
        """Find the cluster, and register there. Waits while PostgreSQL is away, or the disk is full. None: `stopping`
        was set.

        Raises Unfit; when it has joined already, only Outdated, WrongCluster and NameTaken.
        """
        return self._with_room(stopping, lambda: self._join(stopping))

    def _join(self, stopping: threading.Event) -> Shard | None:
        taken: NameTaken | None = None
        with closing(self._filling(stopping)) as filling:
            while not stopping.is_set():
                try:
                    shard = self._joined()
                except (Unreachable, Unfit) as error:
                    if isinstance(error, NameTaken) and (taken is None or taken.seen == error.seen):
                        taken = error  # perhaps by this server itself, before it lost its directory
                    elif isinstance(error, Unfit) and (self.registry is None or isinstance(error, FOR_GOOD)):
                        raise
                    self._note_trouble(str(error))
                    again_ns = self._boot_ns() + int(TROUBLE_SECONDS * 1e9)
                    if taken is not None and taken.silent_s >= SILENT_SECONDS:
                        # `follow` meets the same fault again, and reports it.
                        with suppress(Unreachable, Unfit, OSError, DatabaseUnusable, StoreUnknown):
                            while self._boot_ns() < again_ns and next(filling, False):
                                pass
                    stopping.wait(max(0.0, (again_ns - self._boot_ns()) / 1e9))
                else:
                    if taken is None:
                        self._note_trouble("")
                    else:
                        self._note_trouble("", over=f"the name {self._name} is free")
                    return shard
        return None

    def _joined(self) -> Shard:
        """Raises Unreachable, Unfit."""
        with self.postgres.session() as session:
            shard = admit(session, None if self._kept is None else self._kept.incarnation)
        refuse_moved(shard)
        self._formats.admit(shard)
        if self._kept is None:
            if (self._directory / DATABASE).exists():
                raise WrongCluster(
                    f"{self._directory} holds the data of a server alone: give this server an empty directory, "
                    "and bring the data into an empty cluster with `veilmq cluster import`, unless that was done; or "
                    "leave --cluster and VEILMQ_CLUSTER out, to serve it alone"
                )
            self._kept = Membership(shard.incarnation, uuid4(), 0, 0)
        self.keep_seen()
        self._register(self._kept)
        return shard

    def _filling(self, stopping: threading.Event) -> Generator[bool]:
        """Fill the copy of an empty directory: a snapshot, then a page of the log at a time. Raises as `follow`,
        Unreachable, Unfit."""
        kept = self._kept
        if kept is None or (self._directory / DATABASE).exists():
            return
        candidate = self._candidate = self._watching(kept)
        snapshots, between = Snapshots(self.postgres, kept.incarnation), partial(self._go_on, stopping)
        with closing(candidate), closing(LogReader(self.postgres, kept.incarnation)) as reader:
            candidate.look()  # a dead owner's lease runs out meanwhile
            with closing(Copy(self._directory, self._open_follower, snapshots, between=between)) as copy:
                while copy.read_on(reader):
                    yield True

    def _go_on(self, stopping: threading.Event) -> None:
        """Called while a copy is filled: report that this server is there. Raises _Stopped, NameTaken."""
        if stopping.is_set():
            raise _Stopped
        registry, copy, now_ns = self.registry, self._copy, self._boot_ns()
        if registry is None:
            return
        before = registry.reported
        is_filling = before.role != STARTING and (copy is None or copy.is_filling)
        state = before._replace(record=self.lsn, role=FILLING if is_filling else before.role)
        if state.role != before.role or now_ns - self._reported_ns >= REPORT_SECONDS * 1e9:
            with suppress(Unreachable):
                registry.report(state)
            self._reported_ns = now_ns

    def _server(self, kept: Membership) -> Server:
        return Server(self._name, self.address, kept.holder, self._formats)

    def _register(self, kept: Membership) -> None:
        """Raises as `Registry.register`."""
        if self.registry is None:
            registry = Registry(self.postgres, kept.incarnation, self._server(kept), self._release, self._formats)
            try:
                registry.register()
            except BaseException:
                registry.close()
                raise
            self.registry = registry

    def keep_seen(self) -> None:
        """Write down which PostgreSQL it has worked with, if that is another one or was promoted: after a restart it
        must not take a former primary for the primary. Raises OSError."""
        kept = self._kept
        assert kept is not None
        written = Membership(kept.incarnation, kept.holder, *self.postgres.seen, self._name)
        if kept != written:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            durable_write(self._directory / MEMBER_FILE, msgspec.json.encode(written))
            self._kept = written  # not before: on a full disk it is tried again

    def _note_well(self) -> None:
        """PostgreSQL answered, and the copy was written."""
        self._note_trouble("")
        if self._no_room:
            log.info("the disk has space again")
            self._no_room = ""

    def _note_trouble(self, trouble: str, over: str = "PostgreSQL answers again") -> None:
        """Log a trouble when it begins and when it is over."""
        if trouble and not self._trouble:
            log.warning("%s; trying again", trouble)
        elif self._trouble and not trouble:
            log.info("%s", over)
        self._trouble = trouble


@dataclass
class _Following:
    """What a follower works with, and what it has reported."""

    stack: ExitStack
    watch: Watch
    registry: Registry
    candidate: Candidate
    reader: LogReader
    copy: Copy
    patient_until_ns: int
    snapshotting: Snapshotting | None = None
    looked: int = 0
    reported: tuple[int, UUID | None, str] | None = None
    """Epoch, holder and address of the owner."""
    silent: str = ""
    """The owner, while it is; see `_note_silence`."""


def _note_silence(silent: str, sight: Sight, candidate: Candidate) -> str:
    """Log when an owner becomes silent, and when it is not any more. Returns who is silent; "": nobody."""
    silent_us = candidate.silent_us()
    if silent_us and not silent:
        left_s = max(0, candidate.due_in_us()) / 1e6
        log.warning("the owner, %s, is silent: this server may take over in %.1f s", sight.owner, left_s)
        return sight.owner
    if silent and not silent_us:
        if sight.owner == silent:  # else another server has taken over
            log.info("the owner, %s, gives signs of life again", silent)
        return ""
    return silent
