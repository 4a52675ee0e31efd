"""A running server: one engine on one data directory, and the data ports in front of it.

Strategy: start goes from the inside out (directory, shell, declared queues, ports), and stop from the outside in (stop
accepting, answer waiting receives, finish the batch, close the files), so that no client sees a half-started server. A
failure during the start undoes all earlier steps.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from veilmq.cluster import Calls
from veilmq.engine.directory import archive_at, open_directory
from veilmq.engine.engine import Engine
from veilmq.engine.long_polls import Unread
from veilmq.model.errors import VeilError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Shared
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT, Share
from veilmq.model.settings.queue import QueueInfo
from veilmq.protocols import azure as azure_codec
from veilmq.protocols import mns as mns_codec
from veilmq.protocols.sqs import codec as sqs_codec
from veilmq.protocols.sqs.auth.authorize import note
from veilmq.server.auth import DevelopmentKeyring, Hosts, Keys
from veilmq.server.auth.tokens import IssuerTokens, tokens_of
from veilmq.server.clock import ClockWatch, LeaseClock, wall
from veilmq.server.cluster import Cluster, ClusterRefused, Following
from veilmq.server.config import FileInvalid, queues_file
from veilmq.server.config.settings import Address, Settings
from veilmq.server.http.intake import HeaderCaseIntake, Intake
from veilmq.server.http.listener import Listener, listen
from veilmq.server.http.tls import Certificate
from veilmq.server.logs import RefusedWaits
from veilmq.server.port import NO_ALIASES, Aliases, Port
from veilmq.server.shell import Shell
from veilmq.store import Reader, Store
from veilmq.store.archive.shipping import Archive
from veilmq.store.directory import DataDirectory

if TYPE_CHECKING:
    from veilmq.server.traces import Traces

log = logging.getLogger("veilmq.serve")

_SQS_DOMAINS: Final = ("amazonaws.com", "amazonaws.com.cn")
"""The names that SDKs use for SQS itself, for example through a proxy."""
_AZURE_DOMAINS: Final = ("queue.core.windows.net",)
_MNS_DOMAINS: Final = ("aliyuncs.com",)

AnyCodec = sqs_codec.Codec | azure_codec.Codec | mns_codec.Codec


class PushRoom(Protocol):
    """What the server reports about pushes."""

    def state(self, url: str) -> Mapping[str, object]:
        """The health of a subscription's endpoint."""

    def unavailable(self) -> Mapping[str, str]:
        """Endpoints that are called seldom because they fail, and why."""

    @property
    def calls_put_off(self) -> int:
        """Calls that local exhaustion put off; each is made later."""

    def local_exhaustion(self) -> str | None:
        """The resource that this server lacks now, so that pushes wait."""


class _Carrier(NamedTuple):
    """What the data ports hand their calls to."""

    calls: Calls
    unread: Unread
    aliases: Aliases


class Stopped(Exception):
    """The server was stopped before it served."""


class Service:
    """Serves from `start` to `stop`."""

    shell: Shell
    store: Store
    refused_waits: RefusedWaits

    def __init__(
        self,
        settings: Settings,
        keys: Keys,
        clock: LeaseClock,
        at_point: Callable[[str], None] = lambda point: None,
        cluster: Cluster | None = None,
        traces: "Traces | None" = None,
    ) -> None:
        """at_point: called at each of the store's CRASH_POINTS (tests/support). cluster: None for a server alone.
        traces: makes spans of the data ports' requests.

        Raises OSError (also ssl.SSLError) if certificate and key cannot be loaded.
        """
        self.settings = settings
        self.keyring = keys
        self.clock = clock
        self.listeners: dict[str, Listener] = {}
        self.sockets: dict[str, socket.socket] = {}
        """Of ports that the service manager has opened."""
        self.ports: dict[str, Port] = {}
        self.pushes: Mapping[str, int] = {}
        """Attempts to push, by result."""
        self.push_room: PushRoom | None = None
        """Opened by the first push subscription."""
        self.push_fault: str | None = None
        """Since or until when nothing is pushed, and why; None while pushes work."""
        self.certificate: Certificate | None = None
        """The certificate of all ports, including the admin port; None without TLS."""
        if settings.tls_cert is not None and settings.tls_key is not None:
            self.certificate = Certificate(settings.tls_cert, settings.tls_key, wall())
        self.issuer: IssuerTokens | None = None
        """The issuer of the bearer tokens that the Azure port accepts; None without one, and before the start."""
        self._at_point = at_point
        self.cluster = cluster
        self._traces = traces
        self.archive: Archive | None = None
        """Where the data is shipped to; None without one."""
        self._directory: DataDirectory | None = None
        self.refused = False
        """Whether it failed because its cluster refused it."""
        self.leads = False
        """Whether it serves with its own store: `shell`, `store` and `reader` are there."""
        self.beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Run beside a served store: started once the ports are open, cancelled before the store closes."""
        self.first: list[Callable[[], Awaitable[None]]] = []
        """In a cluster, run as soon as this server owns the data, before any client is served."""
        self.shared: dict[str, bytes] = {}
        """Values that all servers of the cluster have, by name, secrets among them. Empty for a server alone."""
        self.on_shared: Callable[[Mapping[str, bytes]], None] = lambda values: None
        """Called with what this server learns of `shared`, and with all of it when the ports are open."""
        self.on_reload: set[Callable[[], None]] = set()
        """Called when the credentials have been read again: the waits at the admin port."""
        self._serving = asyncio.Event()
        self._urls: dict[str, str] = {}
        self._closing: list[asyncio.Future[None]] = []
        self._undo = AsyncExitStack()

    failed: "asyncio.Future[None]"
    """Done when the store's state is unknown, or the cluster refuses this server: stop and exit non-zero."""

    @property
    def reader(self) -> Reader:
        """Reads the store."""
        return self.store.reader

    @property
    def certificate_ends(self) -> Instant | None:
        """Until when the current certificate is valid; None without TLS."""
        return None if self.certificate is None else self.certificate.ends

    async def start(self, before_ports: Callable[[], None] = lambda: None) -> None:
        """Open everything and serve. before_ports: called before the ports open; if it raises, they do not.

        Raises what `open_directory` does, FileInvalid (queues), OSError (a port, a file), what `before_ports` does, and
        in a cluster ClusterRefused and Stopped; nothing stays open then.
        """
        async with AsyncExitStack() as undo:
            await self._start(undo, before_ports)
            self._undo = undo.pop_all()

    async def _start(self, undo: AsyncExitStack, before_ports: Callable[[], None]) -> None:
        settings = self.settings
        if self._traces is not None:
            undo.push_async_callback(asyncio.to_thread, self._traces.close)
        declared = None
        if settings.queues is not None:
            declared = queues_file.read(settings.queues, self.keyring.accounts, checks=self.keyring.checks)
            if declared.region is not None and isinstance(self.keyring, DevelopmentKeyring):
                self.keyring.live_in(declared.region, declared.account or DEVELOPMENT_ACCOUNT)
        self._declared = declared
        endpoint = self._sqs_endpoint(declared)
        served = {"sqs": self._sqs(endpoint), "azure": self._azure(), "mns": self._mns()}
        noted = partial(note, endpoint)
        if self.cluster is None:
            carrier = await self._alone(undo, noted)
        else:
            carrier = await self._join(undo, self.cluster, noted)
        before_ports()
        for name, (codec, hosts) in served.items():
            await self._listen(undo, name, getattr(settings, name), codec, hosts, carrier)
        self._serving.set()
        self.announce({})
        self.on_shared(self.shared)

    async def _alone(self, undo: AsyncExitStack, noted: Callable[[QueueInfo], None]) -> "_Carrier":
        """Open the data directory, and serve from it."""
        settings = self.settings
        archive = self.archive = self._archive()
        engine, store = open_directory(
            settings.data, settings.engine_limits(), settings.store_options(), self._at_point, archive=archive
        )
        if archive is not None:
            undo.push_async_callback(asyncio.to_thread, archive.close)
            archive.start()
        undo.callback(store.close)
        self.clock.start(store.mark)
        shell = await self._lead(undo, engine, store)
        self.failed, self._directory = shell.failed, store.directory
        for queue in store.reader.queues.values():
            if queue.settings.labels:
                noted(queue.info())
        engine.unread.reading = self._reading_bytes
        return _Carrier(shell, engine.unread, store.reader.aliases)

    def _archive(self) -> Archive | None:
        """Raises PlaceUnusable, OSError."""
        settings = self.settings
        if settings.archive is None:
            return None
        return archive_at(
            settings.archive, settings.data,
            keep_us=settings.archive_keep_s * SECOND_US, every_s=settings.archive_every_s, wall=wall(),
        )  # fmt: skip

    async def _join(self, undo: AsyncExitStack, cluster: Cluster, noted: Callable[[QueueInfo], None]) -> "_Carrier":
        """Follow the cluster, and serve whenever this server owns the data."""
        self.failed = asyncio.get_running_loop().create_future()
        cluster.noted, cluster.opened, cluster.shared = noted, self._opened, self._learn
        cluster.unread.reading = self._reading_bytes
        if not await cluster.join(undo, self.certificate):
            raise Stopped
        running = asyncio.create_task(cluster.run(self._lead))
        running.add_done_callback(self._ended)
        undo.push_async_callback(asyncio.wait, [running])
        undo.callback(cluster.stop)
        return _Carrier(cluster.front, cluster.unread, cluster.aliases)

    def _opened(self, directory: DataDirectory) -> None:
        self._directory = directory
        directory.announce(self._urls)

    def _learn(self, values: dict[str, bytes]) -> None:
        self.shared |= values
        self.on_shared(values)

    async def share(self, name: str, value: bytes, *, replaces: bool = False) -> bytes:
        """Give all servers of the cluster a value, unless they have one; returns the one that they have. Only while
        this server owns the data. Raises VeilError."""
        (outcome,) = await self.shell.call(Share(name=name, value=value, replaces=replaces))
        if isinstance(outcome, VeilError):
            raise outcome
        assert isinstance(outcome, Shared)
        self._learn({name: outcome.value})
        return outcome.value

    def _ended(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self.refused = isinstance(error, ClusterRefused)
            cause = None if self.refused else error
            log.critical("no server of the cluster any more: %s", error, exc_info=cause)
            self.failed.set_result(None)

    async def _lead(self, undo: AsyncExitStack, engine: Engine, store: Store) -> Shell:
        """Serve from this store until the stack is closed."""
        settings, cluster = self.settings, self.cluster
        shell = Shell(engine, store, self.clock, holds=None if cluster is None else cluster.holds)
        shell.start()
        undo.push_async_callback(shell.stop, settings.shutdown_deadline_s)
        refused_waits = RefusedWaits(engine.waiting, engine.limits, engine.unread)
        refused_waits.start()
        undo.callback(refused_waits.stop)
        watch = ClockWatch(shell.call, store.reader, self.clock, trusted=not self.keyring.checks)
        undo.push_async_callback(watch.stop)
        await watch.start()
        self.shell, self.store, self.refused_waits = shell, store, refused_waits
        if self._declared is not None:
            try:
                await queues_file.declare(self._declared, shell.call)
            except FileInvalid as error:
                if cluster is None:
                    raise
                log.error("what %s declares: %s", self._declared.path, error)
        if cluster is not None:
            for begin in self.first:
                await begin()
        self.leads = True
        undo.callback(setattr, self, "leads", False)
        for each in self.beside:
            undo.push_async_callback(_cancel, asyncio.create_task(self._once_serving(each)))
        return shell

    async def _once_serving(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._serving.wait()
        await begin()

    def following(self) -> Following:
        """How it stands while another server owns the data. Only in a cluster."""
        assert self.cluster is not None
        return self.cluster.following

    def _sqs_endpoint(self, declared: queues_file.Declared | None) -> sqs_codec.Endpoint:
        settings = self.settings
        strategy = settings.sqs_endpoint_strategy
        return sqs_codec.Endpoint(
            account_alias=None if declared is None else declared.account_alias,
            sole_region=None if declared is None or self.keyring.checks else declared.region,
            external_url=settings.external_url,
            base_domain=settings.sqs_domain,
            strategy=None if strategy == "dynamic" else strategy,
            trusted_proxy=settings.trusted_proxy,
            cooldowns=settings.cooldowns,
            cors_origins=settings.cors_origins,
            requests_per_second_max=settings.requests_per_second_max,
            kms_faults=settings.simulated.kms_faults,
        )

    def _sqs(self, endpoint: sqs_codec.Endpoint) -> tuple[AnyCodec, Hosts]:
        hosts = self._hosts(_SQS_DOMAINS, self.settings.cors_origins)
        return sqs_codec.Codec(self.keyring, endpoint), hosts

    def _azure(self) -> tuple[AnyCodec, Hosts]:
        settings = self.settings
        endpoint = azure_codec.Endpoint(
            external_url=settings.external_url,
            base_domain=settings.base_domain,
            trusted_proxy=settings.trusted_proxy,
            cooldowns=settings.cooldowns,
        )
        # The account's own CORS rules decide which pages may call.
        hosts = self._hosts(_AZURE_DOMAINS, None)
        tokens = tokens_of(settings)
        if isinstance(tokens, IssuerTokens):
            self.issuer = tokens
        return azure_codec.Codec(self.keyring, endpoint, tokens), hosts

    def _mns(self) -> tuple[AnyCodec, Hosts]:
        settings = self.settings
        endpoint = mns_codec.Endpoint(external_url=settings.external_url, trusted_proxy=settings.trusted_proxy)
        return mns_codec.Codec(self.keyring, endpoint), self._hosts(_MNS_DOMAINS)

    def _hosts(self, domains: tuple[str, ...], origins: tuple[str, ...] | None = ()) -> Hosts:
        ours = self.settings.base_domain
        return Hosts([*domains, *([ours] if ours else [])], origins, self.settings.dev_host)

    async def _listen(
        self,
        undo: AsyncExitStack,
        name: str,
        address: Address,
        codec: AnyCodec,
        hosts: Hosts,
        carrier: "_Carrier",
    ) -> None:
        settings = self.settings
        # SQS allows every queue's own name.
        aliases = NO_ALIASES if name == "sqs" else carrier.aliases
        port = Port(name, codec, carrier.calls, carrier.unread, self.keyring, hosts, aliases)
        if self._traces is not None:
            port.conversation = self._traces.conversation
        listener = await listen(
            address.host,
            address.port,
            port.handle,
            settings.listener_limits(name),
            ssl=self.certificate.context() if self.certificate else None,
            name=name,
            refuse=codec.refuse,
            failure=codec.failure,
            intake=HeaderCaseIntake if name == "azure" else Intake,
            unread=carrier.unread,
            opened=self.sockets.get(name),
            server=b"VeilMQ" if name == "azure" else b"",  # Azure's Rust crates to 0.21 fail without it
        )
        undo.push_async_callback(listener.close_gracefully, settings.shutdown_deadline_s)
        self.ports[name], self.listeners[name] = port, listener
        self._urls[name] = listener.urls[0]

    def _reading_bytes(self) -> int:
        """Bytes of unfinished requests at all data ports."""
        return sum(listener.held_bytes for listener in self.listeners.values())

    def show_document(self, path: str, text: bytes) -> None:
        """Let the MNS port serve a public document: the certificate of pushes."""
        codec = self.ports["mns"].codec
        assert isinstance(codec, mns_codec.Codec)
        codec.documents[path.encode()] = text

    def announce(self, urls: dict[str, str]) -> None:
        """Write the URLs into the lock file, for processes that find the directory held."""
        self._urls |= urls
        if self._directory is not None:
            self._directory.announce(self._urls)

    def end_waits(self) -> None:
        """The credentials were read again: answer the receives that they no longer allow."""
        for port in self.ports.values():
            port.end_waits()
        for end in list(self.on_reload):
            end()

    def interrupt(self) -> None:
        """End a start that waits for the cluster."""
        if self.cluster is not None and not self._serving.is_set():
            self.cluster.stop()

    async def turn_away(self) -> None:
        """Stop accepting at the data ports, and answer the parked receives of all ports."""
        if self._closing:
            return
        deadline_s = self.settings.shutdown_deadline_s
        self._closing = [asyncio.ensure_future(each.close_gracefully(deadline_s)) for each in self.listeners.values()]
        await asyncio.sleep(0)  # now they accept no more
        if self.cluster is not None:
            self.cluster.answer_parked()
        if self.leads:
            self.shell.answer_parked()

    async def stop(self) -> None:
        """Stop accepting, answer the parked receives, finish the batch, close the files."""
        await self.turn_away()
        await asyncio.gather(*self._closing)
        await self._undo.aclose()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
