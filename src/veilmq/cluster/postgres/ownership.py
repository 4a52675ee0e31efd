"""Who owns the shard: the epoch that fences appends, and the lease that bounds answers without one.

Strategy: the owner is the server that raised the epoch last, in a transaction that locked the shard's row FOR UPDATE.
That lock waits for an append under way, and each later append of the previous owner finds another epoch. A lease
compares no two machines' clocks: the owner's runs from before it sent a renewal; a candidate takes over when it has
seen the same epoch and beat for longer than a lease, from after it first read them, each by its own boot clock. How
long ago the last renewal was, also for a process that was restarted, is bounded in lease_clock.py.

A take-over, a renewal and a hand-over count only when PostgreSQL has committed and replicated them without a remark.
Locking the shard's row is itself written to PostgreSQL's log: what a later commit of the same transaction confirms,
whatever was visible then survives a failover.

Before changing it: what reads the log after a take-over is a later statement, or it misses the append that the
take-over waited for.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final, NamedTuple
from uuid import UUID

import psycopg

from veilmq.cluster.lease_clock import Memory, SeenClock
from veilmq.cluster.postgres import Connected, Postgres, Session, Uncertain, Unfit, Unreachable, text_of
from veilmq.cluster.postgres.schema import SHARD, Formats, Shard, admit, look, refuse_moved
from veilmq.model.instant import Instant
from veilmq.store.log import NotOwner

log = logging.getLogger("veilmq.cluster")

MARGIN_US: Final = 250_000
"""How much longer than a lease a candidate waits: for clocks that run at different speeds."""
UNSEEN_US: Final = 60_000_000
"""If PostgreSQL's clock says that the owner has been silent for this much longer than a candidate has watched, the
candidate waits for one more lease, even if the shard is free or its own: a server that saw the owner renew knows
better, and takes over first."""

_SIGHT: Final = """
    select shard.epoch, lease.beat, shard.holder, shard.owner, shard.address, lease.clock, shard.lease_us,
           greatest(0, extract(epoch from clock_timestamp() - lease.renewed) * 1000000)::bigint
    from veilmq.shard join veilmq.lease using (id) where id = %s
"""
_RENEW: Final = """
    update veilmq.lease set beat = beat + 1, clock = %s, renewed = clock_timestamp() where id = %s and epoch = %s
    returning wanted
"""
_RAISE: Final = """
    update veilmq.shard set epoch = %s, holder = %s, owner = %s, address = %s where id = %s
"""
DOUBTED: Final = "?"
"""Behind the name of the server that is wanted as the owner: see `Ownership.doubted`."""
_BEGIN: Final = "update veilmq.lease set epoch = %s, beat = 0, wanted = case when %s then wanted end where id = %s"


class StillOwned(Exception):
    """The shard is owned, or somebody else was faster: look again."""


class Sight(NamedTuple):
    """What a candidate has seen of the owner."""

    epoch: int
    beat: int
    holder: UUID | None
    owner: str
    address: str
    clock: Instant
    """The owner's lease clock at its last renewal."""
    lease_us: int
    away_us: int
    """How long ago that was by PostgreSQL's clock, which may have been set since."""
    since_ns: int
    """The candidate's boot clock just after it first read this epoch and beat."""
    watched_ns: int
    """Likewise after it first read this renewal, which a take-over leaves as it is."""
    seen: SeenClock
    """What its boot clock says of this lease clock."""

    def gone_us(self, now_ns: int) -> int:
        """How long ago the last renewal was written, by PostgreSQL's clock and at most what the boot clock allows."""
        return self._at_most_since(self.seen.after_ns, now_ns)

    def shown_us(self, now_ns: int) -> int:
        """For how long it has been committed, likewise: less, if its commit waited for a standby."""
        return self._at_most_since(self.seen.before_ns, now_ns)

    def _at_most_since(self, bound_ns: int | None, now_ns: int) -> int:
        return self.away_us if bound_ns is None else min(self.away_us, (now_ns - bound_ns) // 1_000)

    def free_for(self, server: "Server") -> bool:
        """Whether the shard was handed to this server, or to anybody, or is its own."""
        if self.holder is None:
            return self.owner in {"", server.name}
        return self.holder == server.holder


class Server(NamedTuple):
    """Who wants to own."""

    name: str
    """Unique in the cluster."""
    address: str
    """Where others reach it."""
    holder: UUID
    """Identifies one process, or the process that holds the lock of a data directory. It need not wait for the end of a
    lease of its own."""
    formats: Formats
    """State formats that its release works with."""


class Candidate(Connected):
    """A server that watches the owner and may take over. Belongs to one thread."""

    def __init__(
        self,
        postgres: Postgres,
        server: Server,
        incarnation: UUID,
        read_boot_ns: Callable[[], int],
        margin_us: int = MARGIN_US,
        memory: Memory | None = None,
    ) -> None:
        """read_boot_ns: a clock that runs on while the machine sleeps or the process is stopped."""
        self.server = server
        self._memory = memory or Memory(incarnation)
        self._postgres = postgres
        self._incarnation = incarnation
        self._boot_ns = read_boot_ns
        self._margin_us = margin_us
        self._sight: Sight | None = None

    def look(self) -> Sight:
        """Read the owner's last sign of life. Raises Unreachable, Unfit."""
        began_ns = self._boot_ns()
        with self._asking():
            row = self._connected().execute(_SIGHT, (SHARD,)).fetchone()
        assert row is not None
        before, read_ns = self._sight, self._boot_ns()
        sight = Sight._make((*row, read_ns, read_ns, self._memory.looked(Instant(row[5]), began_ns)))
        if before is not None and (before.epoch, before.beat) == (sight.epoch, sight.beat):
            sight = sight._replace(since_ns=before.since_ns)
        if before is not None and sight.clock == before.clock and sight.beat in {0, before.beat}:
            sight = sight._replace(watched_ns=before.watched_ns)
        self._sight = sight
        return sight

    def silent_us(self) -> int:
        """For how long another server that owns the shard has given no sign of life; 0: it has lately, or there is
        none."""
        sight = self._sight
        if sight is None or sight.free_for(self.server):
            return 0
        stood_us = (self._boot_ns() - sight.since_ns) // 1_000
        return stood_us if stood_us >= sight.lease_us * 2 // 3 else 0

    def is_due(self) -> bool:
        """Whether the shard may be taken over by what was seen last."""
        return self._sight is not None and self.due_in_us() <= 0

    def due_in_us(self) -> int:
        """In how long the shard may be taken over, if its owner gives no sign of life. Call after `look`."""
        sight = self._sight
        assert sight is not None
        now_ns = self._boot_ns()
        stood_us = (now_ns - sight.since_ns) // 1_000
        leases = 0 if sight.free_for(self.server) else 1
        if sight.clock and sight.shown_us(now_ns) - (now_ns - sight.watched_ns) // 1_000 > UNSEEN_US:
            leases += 1
        return sight.lease_us * leases + self._margin_us - stood_us if leases else 0

    def take_over(self, *, moves_to: str = "") -> "Ownership":
        """Become the owner, if nothing has happened since the last look.

        moves_to: where this owner takes the data; no server owns the shard any more after it.
        Raises StillOwned, Unreachable (Uncertain: look again, it may be ours), Unfit.
        """
        sight = self._sight
        if sight is None or not self.is_due():
            raise StillOwned(f"the lease of {sight.owner if sight else 'nobody seen'} runs")
        began_ns = self._boot_ns()
        try:
            session = self._connected()
            with session.certain(), session.transaction():
                shard = look(session, incarnation=self._incarnation, lock="for update")
                self.server.formats.admit(shard)
                lease = session.execute(
                    "select epoch, beat, clock, "
                    "greatest(0, extract(epoch from clock_timestamp() - renewed) * 1000000)::bigint "
                    "from veilmq.lease where id = %s for update", (SHARD,)
                ).fetchone()  # fmt: skip
                assert lease is not None
                if (shard.epoch, *lease[:2]) != (sight.epoch, sight.epoch, sight.beat):
                    raise StillOwned(f"{shard.owner or 'another server'} was faster")
                if moves_to:
                    session.execute("update veilmq.shard set moved = %s where id = %s", (moves_to, SHARD))
                else:
                    refuse_moved(shard)
                epoch = raise_epoch(session, shard, self.server)
        except psycopg.errors.LockNotAvailable as error:
            raise StillOwned(f"an append of the owner is under way: {text_of(error)}") from error
        except psycopg.Error as error:
            self.close()
            raise Unreachable(f"PostgreSQL did not take the take-over: {text_of(error)}") from error
        except Uncertain:
            self.close()
            raise
        away_us = sight._replace(away_us=lease[3]).gone_us(began_ns)
        is_wanted = sight.free_for(self.server)
        log.log(logging.INFO if is_wanted else logging.WARNING, "took over in epoch %d: %s", epoch, self._why(sight))
        return Ownership(
            self._postgres, self.server, shard._replace(epoch=epoch), self._boot_ns, began_ns,
            Before(shard.owner, Instant(lease[2]), (began_ns - sight.watched_ns) // 1_000, away_us),
            self._memory,
        )  # fmt: skip

    def _why(self, sight: Sight) -> str:
        """Why the shard could be taken over."""
        if sight.holder == self.server.holder:
            return "it was this server's before"
        if sight.holder is None:
            return "it was handed over" if sight.epoch else "nobody owned it yet"
        stood_s = (self._boot_ns() - sight.since_ns) / 1e9
        return f"the lease of {sight.owner} has ended, which gave no sign of life for {stood_s:.1f} s"

    def _connected(self) -> Session:
        if self._session is None or self._session.closed:
            self._session = self._postgres.connect()
            try:
                admit(self._session, self._incarnation)
            except BaseException:
                self.close()
                raise
            return self._session
        return self._check(self._postgres, self._session)


def raise_epoch(
    session: Session, shard: Shard, server: Server | None, owner: str = "", *, goes_on: bool = False
) -> int:
    """In a transaction that has locked the shard's row: make `server` the owner, or nobody, for `owner` to take.

    goes_on: it is the owner already; a hand-over that it was asked for is still to come.
    """
    epoch = shard.epoch + 1
    name, address, holder = (owner, "", None) if server is None else server[:3]
    session.execute(_RAISE, (epoch, holder, name, address, SHARD))
    session.execute(_BEGIN, (epoch, goes_on, SHARD))
    return epoch


def owned_by(shard: Shard) -> NotOwner:
    """The error of this server when another one owns the shard."""
    return NotOwner(f"{shard.owner or 'another server'} owns the shard, in epoch {shard.epoch}")


class Before(NamedTuple):
    """What a new owner knows of the time before it. No instant of one machine is compared with another's."""

    owner: str
    clock: Instant
    """The owner's lease clock at its last renewal."""
    seen_us: int
    """For how long the new owner saw no renewal since, by its own boot clock."""
    away_us: int
    """How long ago that renewal was by PostgreSQL's clock, which may have been set in between; at most what the new
    owner's boot clock allows, if that saw the renewal before."""


def begins_at(before: Before, mark: Instant, wall: Instant, since_us: int) -> Instant:
    """Where a new owner's lease clock begins.

    mark: of its store. wall: its own wall time, at which a cluster without an owner before begins. since_us: what it
    measured since it took over.
    """
    if not before.clock:
        return Instant(max(mark, wall))
    away_us = min(before.away_us, max(0, wall - since_us - before.clock))
    return Instant(max(mark, before.clock + max(before.seen_us, away_us) + since_us))


class Ownership(Connected):
    """What an owner knows: its epoch, and until when its lease runs. Renewed by one thread, used by any."""

    def __init__(
        self,
        postgres: Postgres,
        server: Server,
        shard: Shard,
        read_boot_ns: Callable[[], int],
        began_ns: int,
        before: Before,
        memory: Memory,
    ) -> None:
        """began_ns: before the take-over was sent."""
        self._memory = memory
        self.postgres = postgres
        self.server = server
        self.shard = shard
        self.before = before
        self.epoch = shard.epoch
        """Raised by `fence`."""
        self.unfit: Unfit | None = None
        """What the last renewal found wrong with PostgreSQL: nothing may be appended until one finds nothing."""
        self._boot_ns = read_boot_ns
        self._lease_ns = shard.lease_us * 1_000
        self._until_ns = began_ns + self._lease_ns
        self._lock = threading.Lock()  # of `lost` and `_until_ns`, which two threads end or move
        self._lost: NotOwner | None = None
        self._closed = False
        self.doubted = False
        """Whether other servers found this one's copy to be other than the log: see `ask_to_hand_over`."""

    def close(self) -> None:
        """Let the connection go, also that of a renewal under way in another thread, once that ends."""
        self._closed = True
        super().close()

    @property
    def lost(self) -> NotOwner | None:
        """Why this server is no owner any more; None: it may be one."""
        return self._lost

    def holds(self) -> bool:
        """Whether the lease runs at this moment. What is answered without an append is evaluated first, and delivered
        only if the lease runs after that."""
        return self._boot_ns() < self._until_ns

    def renew(self, clock: Instant) -> str | None:
        """Extend the lease. Call about once a second, from one thread.

        clock: this server's lease clock, for the next owner. Returns to whom an operator wants the shard handed over,
        "" for anybody; None: nobody asks for that.
        Raises NotOwner: stop. Unreachable, Unfit: the lease runs on until its end, try again.
        """
        try:
            return self._renew(clock)
        finally:
            if self._closed:
                super().close()

    def _renew(self, clock: Instant) -> str | None:
        if self._lost is not None:
            raise self._lost
        sent_ns = self._boot_ns()
        self._memory.sending(clock, sent_ns)
        with self._asking("PostgreSQL did not take the renewal"):
            session = self._connected()
            with session.certain():
                renewed = session.execute(_RENEW, (clock, SHARD, self.epoch), prepare=True).fetchone()
            if renewed is None:
                self._stay(look(session, incarnation=self.shard.incarnation))
                return None  # the epoch was raised by `fence` meanwhile
        with self._lock:
            if self._lost is None:
                self._until_ns = max(self._until_ns, sent_ns + self._lease_ns)
        self._memory.looked(clock, sent_ns)
        wanted: str | None = renewed[0]
        if wanted is not None and wanted.endswith(DOUBTED):
            self.doubted = True
            wanted = wanted.removesuffix(DOUBTED)
        return wanted

    def fence(self, session: Session) -> None:
        """Take over from myself: no append that was sent before can come after this.

        Raises NotOwner if another server owns the shard; then, too, none can. Raises Uncertain if it is not known to be
        replicated, psycopg's errors if PostgreSQL refused.
        """
        lost: NotOwner | None = None
        epoch = 0
        with session.certain(), session.transaction():
            shard = look(session, incarnation=self.shard.incarnation, lock="for update")
            if shard.holder == self.server.holder:
                epoch = raise_epoch(session, shard, self.server, goes_on=True)
            else:
                lost = owned_by(shard)
        if lost is not None:
            self.lose(lost)
            raise lost
        self.epoch = epoch

    def hand_over(self, to: str, clock: Instant | None) -> None:
        """Give the shard to a server, or with an empty name to any. Call when nothing is being appended.

        clock: this server's lease clock, for the next owner. None: it was never set, so the next owner goes by the last
        renewal, as this one did.

        From here on this server owns nothing, whatever is raised. Raises NotOwner, Unreachable (the lease has to run
        out), Unfit.
        """
        self.lose(NotOwner(f"handed over to {to or 'any server'}"), wanted=True)
        failed = "PostgreSQL did not store the hand-over"
        if clock is not None:
            self._memory.sending(clock, self._boot_ns())
        with self.postgres.session(failed) as session, session.certain(), session.transaction():
            shard = look(session, incarnation=self.shard.incarnation, lock="for update")
            if shard.holder != self.server.holder:
                raise owned_by(shard)
            epoch = raise_epoch(session, shard, None, to)
            if clock is not None:
                session.execute(_RENEW, (clock, SHARD, epoch))
        log.info("handed over to %s, which begins epoch %d", to or "any server", epoch + 1)

    def lose(self, why: NotOwner, *, wanted: bool = False) -> None:
        """End it here: nothing is answered or appended any more. wanted: this server wanted it."""
        with self._lock:
            self._until_ns = 0
            if self._lost is None:
                self._lost = why
                if not wanted:
                    log.warning("no longer the owner: %s", why)

    def _stay(self, shard: Shard) -> None:
        if shard.holder != self.server.holder:
            self.lose(owned_by(shard))
            raise owned_by(shard)

    def _connected(self) -> Session:
        try:
            if self._session is None or self._session.closed:
                session = self._session = self.postgres.connect()
            else:
                session = self._check(self.postgres, self._session)
        except Unfit as unfit:
            self.unfit = unfit
            raise
        self.unfit = None
        return session
