"""A server of a cluster: follows, serves while it owns the shard, and passes its clients' calls on while it does not.

Strategy: one task alternates between the two. Following, and everything that PostgreSQL may delay, runs on threads.
Renewals are timed by the loop, several within one lease. This server stops being the owner when the lease is lost, when
the store fails, or when it hands over; the ports stay open, and their calls wait in the front.
"""

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing, suppress
from functools import partial
from typing import Final

import msgspec

from veilmq.cluster.member import FOR_GOOD, Member
from veilmq.cluster.member.copy import Watch, remove_copy
from veilmq.cluster.peer import Identity
from veilmq.cluster.peer.caller import Caller, OnReturned
from veilmq.cluster.peer.connection import Connection
from veilmq.cluster.peer.frames import LENGTH_BYTES
from veilmq.cluster.peer.handshake import HELLO_BYTES_MAX, Handshake, Refusal, Role
from veilmq.cluster.peer.port import PeerPort
from veilmq.cluster.postgres import ClusterError, Unfit, Unreachable
from veilmq.cluster.postgres.log import PostgresLog
from veilmq.cluster.postgres.ownership import Ownership, Sight, begins_at
from veilmq.cluster.postgres.schema import Formats
from veilmq.cluster.registry import NameTaken, ServerState, ask_to_hand_over, within
from veilmq.cluster.snapshotting import Snapshotting
from veilmq.cluster.tls import in_words
from veilmq.engine.directory import STATE_FORMAT, STATE_FORMAT_OLDEST, is_full, open_directory, open_follower
from veilmq.engine.engine import Engine
from veilmq.engine.lease_clock import AHEAD_US_MAX
from veilmq.engine.long_polls import Unread
from veilmq.model.errors import ParameterInvalid, StoreFailed
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Outcome, QueueChanged, QueueCreated
from veilmq.model.settings.queue import QueueInfo, QueueKey, alias_key
from veilmq.server.clock import LeaseClock, boot_ns, wall
from veilmq.server.cluster import ClusterRefused, ClusterReport, Following, KnownAliases, Lead
from veilmq.server.cluster.admin import Owner, Unreached, connect
from veilmq.server.cluster.front import Front
from veilmq.server.cluster.latest_status import LatestStatus
from veilmq.server.config.settings import Address, Settings
from veilmq.server.http.handshakes import Handshakes
from veilmq.server.http.tls import Certificate
from veilmq.server.shell import Latencies, Shell
from veilmq.store import Store
from veilmq.store.directory import DatabaseDamaged, DatabaseUnusable, DataDirectory, NotOurs
from veilmq.store.log import AppendUnknown, Follower, NotAppended, NotOwner

_RENEWALS: Final = 3
"""Renewals in the time of one lease."""
_PATIENCE_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 5.0
"""How long this server's own peer port may take to answer at the address that it gives to others."""
_PAUSE_SECONDS: Final = 0.5
"""Pause after this server failed as the owner."""
_FILLED_AGAIN_SECONDS: Final = 3_600.0
"""A copy is thrown away for a damaged message at most once in this time: if it is damaged again, the log may be."""
_SKIPPED: Final = (
    "the lease clock goes on %d s after the last owner's: for so long nobody has owned the queues, by the clocks of "
    "PostgreSQL and of this machine; if both are wrong, leases and delays end early"
)

log = logging.getLogger("veilmq.cluster")


class ClusterServer:
    """See `Cluster`. Belongs to the loop."""

    def __init__(self, settings: Settings, clock: LeaseClock, release: str) -> None:
        """Raises ClusterRefused, OSError."""
        assert settings.cluster is not None
        self._settings = settings
        self._clock = clock
        self._stopping, self._ended = threading.Event(), asyncio.Event()
        self.unread = Unread(settings.held_bytes_max)
        self.aliases = KnownAliases()
        self.front = Front(clock, self._caller)
        self.ownership: Ownership | None = None
        self._shell: Shell | None = None  # of the time as the owner, once it serves
        self._unrenewed = ""
        """Why the lease is not renewed."""
        self._wanted: str | None = None
        """To whom an operator wants the shard handed over: see `Ownership.renew`."""
        self._damaged, self._damaged_ns = "", -int(_FILLED_AGAIN_SECONDS * 1e9)
        """Why the copy is to be thrown away, and when it was last."""
        self._snapshotting: Snapshotting | None = None
        self._queues: dict[int, QueueInfo] = {}
        self._own_names: dict[QueueKey, QueueKey] = {}
        self.owner = ""
        """Name of the server that owns the shard, if that is another one."""
        self.copy: Follower | None = None
        """See `Cluster.copy`."""
        self._epoch = 0
        self._appends = Latencies()
        self._takeovers = self._handovers = 0
        self._status = LatestStatus()
        self.noted: Callable[[QueueInfo], None] = lambda info: None
        self.opened: Callable[[DataDirectory], None] = lambda directory: None
        self.admin: Callable[[], asyncio.Protocol] | None = None
        self.shared: Callable[[dict[str, bytes]], None] = lambda values: None
        try:
            self.member = Member(
                settings.cluster,
                settings.data,
                partial(open_follower, options=settings.store_options()),
                boot_ns,
                formats=Formats(STATE_FORMAT_OLDEST, STATE_FORMAT),
                name=settings.server_name,
                release=release,
                single_copy=settings.single_copy,
            )
        except Unfit as error:
            raise ClusterRefused(str(error)) from error

    @property
    def following(self) -> Following:
        caller = self.front.caller
        if self.member.drained:
            why = f"an operator drained this server: `veilmq cluster undrain {self._settings.server_name}` ends that"
            return Following(self.owner, False, why, self.front.held)
        trouble, copy = self.member.unowned, self.member.trouble
        if self.member.is_filling:
            copy = "; ".join(("its copy was thrown away, and is being filled again", *filter(None, (copy,))))
        if self.ownership is not None and self.ownership.lost is None:  # it may still be the owner
            trouble = f"this server's lease has ended: {self._unrenewed or 'PostgreSQL has not confirmed the renewal'}"
        if caller is not None:
            trouble = caller.trouble or "connecting to the owner"
        return Following(self.owner, caller is not None and caller.connected, trouble, self.front.held, copy)

    async def report(self) -> ClusterReport:
        found, own, following = await self._status.ask(self.member.postgres), self.ownership, self.following
        leads = own is not None and own.holds()
        missing = None if found is None else max(0, found.records - self.member.lsn)
        return ClusterReport(
            server=self._settings.server_name,
            owner=self._settings.server_name if leads else self.owner,
            leads=leads,
            epoch=self._epoch,
            ready=leads or following.ready,
            held=following.held,
            lag_s=0.0 if leads else self.member.behind_s,
            lag_records=0 if leads else missing,
            appends=self._appends,
            takeovers=self._takeovers,
            handovers=self._handovers,
            peers=self._port.peers,
            single_copy=self._settings.single_copy,
            status=found,
        )

    async def hand_over(self, to: str) -> None:
        try:
            await asyncio.to_thread(within, self.member.postgres, partial(ask_to_hand_over, to=to))
        except Unfit as error:
            raise ParameterInvalid(parameter="to", reason=str(error)) from error
        except Unreachable as error:
            raise StoreFailed(reason=str(error)) from error

    def stop(self) -> None:
        """Hand over, and begin nothing more."""
        self._stopping.set()
        self._ended.set()

    def holds(self) -> bool:
        """Whether this server's lease runs."""
        return self.ownership is not None and self.ownership.holds()

    async def join(self, undo: AsyncExitStack, certificate: Certificate | None) -> bool:
        settings = self._settings
        advertised = settings.advertise or settings.peer
        if settings.advertise is None and settings.peer.unspecified:
            raise ClusterRefused(
                f"other servers cannot reach this one at {advertised}: say where they can with --advertise HOST:PORT"
            )
        if advertised.port:
            self.member.address = str(advertised)
        try:
            shard = await asyncio.to_thread(self.member.join, self._stopping)
        except ClusterError as error:
            raise ClusterRefused(str(error)) from error
        if shard is None:
            return False
        assert self.member.registry is not None
        undo.push_async_callback(asyncio.to_thread, self.member.registry.leave)
        self._identity, self._secret = Identity(str(shard.incarnation), settings.server_name), shard.secret
        self._port = PeerPort(self._identity, self._secret, answered=self._note_queues)
        self._port.take = self._take
        host, port, limits = settings.peer.host, settings.peer.port, self._port.limits
        undo.push_async_callback(self._port.close)
        if certificate is None:
            await self._port.open(host, port)
        else:
            context, deadline_s = certificate.context(), limits.handshake_s
            handshakes = Handshakes(context, "peer port", deadline_s, lambda: limits.strangers_max)
            await self._port.open(host, port, handshakes.before)
            undo.callback(handshakes.drop_all)  # or the close of the port waits for them from Python 3.12 on
        undo.push_async_callback(self.front.close)
        if settings.advertise is None:
            advertised = Address(settings.peer.host, self._port.address[1])
        self.member.address = str(advertised)
        log.info("peers reach this server, %s, at %s", settings.server_name, advertised)
        if settings.single_copy:
            log.warning("--single-copy: with no standby that confirms commits, losing PostgreSQL's disk loses messages")
        looking = asyncio.create_task(self._look_at_oneself(advertised))
        undo.callback(looking.cancel)
        return True

    async def _look_at_oneself(self, advertised: Address) -> None:
        """Warn if the address at which others are to reach this server leads elsewhere."""
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                reader, writer = await asyncio.open_connection(*advertised, ssl=self._context())
                with closing(writer):
                    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                    hello = await reader.readexactly(min(size, HELLO_BYTES_MAX))
            Handshake(Role.CALLER, self._identity, self._secret).receive(hello)
            why = "another server of the cluster answers there"
        except Refusal as refusal:
            if refusal.reason == "itself":
                return
            why = str(refusal)
        except TimeoutError:
            why = "nobody answers there"
        except (OSError, asyncio.IncompleteReadError) as error:
            why = in_words(error) + ("; or correct --tls-cert" if isinstance(error, ssl.SSLError) else "")
        log.warning("others cannot reach this server at %s, correct --advertise: %s", advertised, why)

    async def run(self, lead: Lead) -> None:
        loop = asyncio.get_running_loop()
        watch = Watch(
            opened=lambda follower: loop.call_soon_threadsafe(self._opened, follower),
            saw=lambda sight: loop.call_soon_threadsafe(self._saw, sight),
            learnt=lambda queues: loop.call_soon_threadsafe(self._learn, queues),
            shared=lambda values: loop.call_soon_threadsafe(self.shared, values),
        )
        while not self._stopping.is_set():
            log.info("following as %s", self._settings.server_name)
            # Who was asked to hand over does not take over again at once.
            patience_s, self._wanted = 0.0 if self._wanted is None else _PATIENCE_SECONDS, None
            try:
                follow = partial(self.member.follow, self._stopping, watch, patience_s=patience_s)
                ownership = await asyncio.to_thread(follow)
                if ownership is None:
                    return
                try:
                    async with AsyncExitStack() as term:
                        await self._own(term, ownership, lead)
                finally:
                    self._throw_away(ownership)
                    self.front.forget_left()
                    self._shell = self._snapshotting = None
            except FOR_GOOD as error:
                raise ClusterRefused(str(error)) from error
            except (Unreachable, Unfit, NotAppended, AppendUnknown) as error:
                log.warning("not the owner: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _own(self, term: AsyncExitStack, ownership: Ownership, lead: Lead) -> None:
        """Serve until this server hands over or loses the shard."""
        self.ownership = ownership
        term.callback(ownership.close)
        taken_ns = boot_ns()
        shared_log = await asyncio.to_thread(partial(PostgresLog, took=self._appends.add), ownership)
        term.push_async_callback(asyncio.to_thread, shared_log.close)  # an append that hangs must not stop the loop

        def begins(mark: Instant | None = None) -> Instant:
            return begins_at(ownership.before, mark or Instant(0), wall(), (boot_ns() - taken_ns) // 1_000)

        self._shell = self._snapshotting = None
        # From here on: to open a large store takes longer than a lease.
        keeping = asyncio.create_task(self._keep(ownership, shared_log, begins))
        term.callback(keeping.cancel)
        engine, store = await self._open(ownership, shared_log, begins)
        term.callback(store.close)
        was = self._clock.now()
        self._clock.take_over(begins(store.mark))
        term.push_async_callback(asyncio.to_thread, self._hand_over, ownership)
        self.opened(store.directory)
        skipped_us = self._clock.now() - ownership.before.clock - (boot_ns() - taken_ns) // 1_000
        if ownership.before.clock and skipped_us > max(ownership.before.seen_us, 0) + AHEAD_US_MAX:
            log.warning(_SKIPPED, skipped_us // SECOND_US)
        self.front.clock_moved(self._clock.now() - was)
        engine.unread = self.unread
        self._shell = shell = await lead(term, engine, store)
        self._snapshotting = snapshotting = self.member.snapshotting(owns=True)
        term.push_async_callback(asyncio.to_thread, snapshotting.close)
        snapshotting.start()
        term.callback(keeping.cancel)
        if ownership.lost is not None:
            raise ownership.lost
        self.owner, self._epoch = "", ownership.epoch
        self._takeovers += 1
        self.aliases.known = store.reader.aliases
        self.front.lead(shell)
        self._port.lead(shell, self.unread)
        since_s = ownership.before.seen_us / 1e6 + (boot_ns() - taken_ns) / 1e9
        log.info("serving in epoch %d: %.2f s after the owner's last sign of life", ownership.epoch, since_s)
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((ended, shell.failed, keeping), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        self._port.follow(None)
        self.front.follow(None)

    async def _open(
        self, ownership: Ownership, shared_log: PostgresLog, begins: Callable[[], Instant]
    ) -> tuple[Engine, Store]:
        """Open this server's copy. Raises Unfit once the shard is handed over, because the copy is damaged or the disk
        is full. begins: as in `_keep`."""
        data, limits = self._settings.data, self._settings.engine_limits()
        options, gives_up = self._settings.store_options(), partial(self._gives_up, ownership)
        options = msgspec.structs.replace(options, schema=shared_log.format, gives_up=gives_up)
        try:
            return await asyncio.to_thread(open_directory, data, limits, options, log=shared_log)
        except (DatabaseDamaged, NotOurs) as error:
            remove_copy(data, str(error))
            await asyncio.to_thread(self._hand_over, ownership, begins())
            raise Unfit("its copy was damaged") from error
        except (DatabaseUnusable, OSError) as error:
            if not is_full(error, data):
                raise
            self._wanted = ""  # others shall have it
            await asyncio.to_thread(self._hand_over, ownership, begins())
            raise Unfit(f"the disk of {data} is full: free space") from error

    def _gives_up(self, ownership: Ownership, why: str) -> bool:
        """The store found its copy damaged: returns whether to give it up, because another server's may be whole."""
        if not self._fills_again(why):
            return False
        ownership.lose(NotOwner(f"{self._damaged} in the copy of this server"))
        return True

    def _fills_again(self, why: str) -> bool:
        now_ns = boot_ns()
        if not why or now_ns - self._damaged_ns < _FILLED_AGAIN_SECONDS * 1e9:
            return False
        self._damaged, self._damaged_ns = why, now_ns
        return True

    def _throw_away(self, ownership: Ownership) -> None:
        """After a time as the owner: a copy that was given up."""
        if ownership.doubted:
            self._fills_again("other servers' copies are not what its records say")
        if self._damaged:
            remove_copy(self._settings.data, self._damaged)
            self._damaged, self._wanted = "", self._wanted or ""

    def _hand_over(self, ownership: Ownership, clock: Instant | None = None) -> None:
        """Let another server take over at once. clock: where its lease clock begins, if this server's was not set."""
        with suppress(NotOwner):
            try:
                ownership.hand_over(self._wanted or "", self._clock.now() if clock is None else clock)
                self._handovers += 1
            except (Unreachable, Unfit) as error:
                log.warning("not handed over, so others wait until the lease has ended: %s", error)

    async def _keep(self, ownership: Ownership, shared_log: PostgresLog, begins: Callable[[], Instant]) -> None:
        """Renew the lease until cancelled, until it is to be handed over, or until the shard is lost, which ends the
        shell. begins: what the lease clock says as long as there is no shell."""
        pause_s = ownership.shard.lease_us / 1e6 / _RENEWALS
        self._unrenewed = ""
        registry = self.member.registry
        assert registry is not None

        def renew(now: Instant) -> str | None:
            wanted = ownership.renew(now)
            try:
                registry.report(ServerState("owner", shared_log.format, shared_log.last))
            except NameTaken as error:  # this server was asleep meanwhile; it ends once it follows
                log.error("%s", error)
                return ""
            except (Unreachable, Unfit) as error:
                log.debug("others do not hear of this server: %s", error)
            with suppress(OSError):  # a full disk: it is tried again
                self.member.keep_seen()
            with suppress(Unreachable, Unfit):  # an append meets the same
                shared_log.prepare()
            return "" if wanted is None and registry.drained else wanted

        while self._wanted is None:
            try:
                self._wanted = await asyncio.to_thread(renew, begins() if self._shell is None else self._clock.now())
                if self._unrenewed:
                    log.info("the lease is renewed again")
                self._unrenewed = ""
                snapshotting = self._snapshotting
                if self._wanted is None and snapshotting is not None and self._fills_again(snapshotting.damage_found):
                    self._wanted = ""  # a check of the copy has found damage, and others shall have the queues
            except NotOwner as error:
                if self._shell is not None:
                    self._shell.abort(str(error))
                return
            except (Unreachable, Unfit) as error:
                if not self._unrenewed:
                    log.warning("the lease is not renewed: %s", error)
                self._unrenewed = str(error)
            await asyncio.sleep(0.0 if self._wanted is not None else pause_s)
        log.info("asked to hand over to %s", self._wanted or "any server")

    def _note_queues(self, outcomes: Sequence[Outcome]) -> None:
        """Report queues that another server's clients created or changed here: authorization needs them."""
        for outcome in outcomes:
            if isinstance(outcome, QueueCreated | QueueChanged):
                self.noted(outcome.info)

    def _take(self, peer: Connection) -> None:
        """Another server passes a request for the admin port on."""

        def hand_on() -> None:
            if peer.why is not None:
                return
            peer.connection_lost(None)  # its frames have ended
            if self.admin is None:
                peer.transport.close()
            else:
                served = self.admin()
                peer.transport.set_protocol(served)
                served.connection_made(peer.transport)

        asyncio.get_running_loop().call_soon(hand_on)  # not amid the bytes of the handshake

    async def reach_admin(self) -> Owner:
        caller, owner = self.front.caller, self.owner
        if caller is None:
            raise Unreached(self.following.trouble)
        wants = Handshake(Role.CALLER, self._identity, self._secret, owner or None, "admin")
        return await connect(caller.address, wants, self._context())

    def answer_parked(self) -> None:
        """Answer receives of this server's clients that wait elsewhere."""
        self.front.answer_parked()

    # While another server owns the shard.

    def _opened(self, copy: Follower) -> None:
        self.copy = copy
        self.opened(copy.directory)
        self._queues, self._own_names = {}, {}
        self.aliases.known = self._own_names

    def _saw(self, sight: Sight) -> None:
        """The follower has looked at the owner."""
        self._epoch = max(self._epoch, sight.epoch)
        if self.holds():
            return
        self.owner = sight.owner if sight.holder is not None else ""
        host, _, port = sight.address.rpartition(":")
        is_other = sight.holder is not None and self.owner != self._settings.server_name
        self._port.follow(self.owner or None)
        self.front.follow((host.strip("[]"), int(port)) if is_other and host else None)

    def _learn(self, queues: dict[int, QueueInfo | None]) -> None:
        """Report settings of queues that changed in the copy: authorization needs them."""
        for incarnation, info in queues.items():
            before = self._queues.pop(incarnation, None)
            if before is not None and before.settings.alias is not None:
                self._own_names.pop(alias_key(before.key, before.settings.alias), None)
            if info is not None:
                self._queues[incarnation] = info
                if info.settings.alias is not None:
                    self._own_names[alias_key(info.key, info.settings.alias)] = info.key
                self.noted(info)

    def _caller(self, address: tuple[str, int], returned: OnReturned) -> Caller:
        return Caller(
            address, self._identity, self._secret, self._clock, returned,
            expects=self.owner or None, context=self._context, unread=self.unread,
        )  # fmt: skip

    def _context(self) -> ssl.SSLContext | None:
        """Trusts the system's authorities, and the chain that this server shows itself."""
        if self._settings.tls_cert is None:
            return None
        context = ssl.create_default_context()
        context.load_verify_locations(self._settings.tls_cert)
        return context
