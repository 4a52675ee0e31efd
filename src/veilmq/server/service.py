"""A running server: one engine on one data directory, and the data ports in front of it.

Strategy: start goes from the inside out (directory, shell, declared queues, ports), and stop from the outside in (stop
accepting, answer waiting receives, finish the batch, close the files), so that no client sees a half-started server. A
failure during the start undoes all earlier steps.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final, Protocol

from veilmq.engine.directory import open_directory
from veilmq.engine.engine import Engine
from veilmq.model.instant import Instant
from veilmq.protocols.azure import codec as azure_codec
from veilmq.protocols.mns import codec as mns_codec
from veilmq.protocols.sqs import codec as sqs_codec
from veilmq.protocols.sqs.auth.authorize import note
from veilmq.server.auth import DevelopmentKeyring, Hosts, Keys
from veilmq.server.auth.tokens import IssuerTokens, tokens_of
from veilmq.server.clock import LeaseClock, wall
from veilmq.server.clock_watch import ClockWatch
from veilmq.server.config import queues_file
from veilmq.server.config.settings import Address, Settings
from veilmq.server.http.connection import OVERFLOW_MAX
from veilmq.server.http.intake import HeaderCaseIntake, Intake
from veilmq.server.http.listener import Listener, listen
from veilmq.server.http.refusals import RefusedWaits
from veilmq.server.http.tls import Certificate
from veilmq.server.port import NO_ALIASES, Port
from veilmq.server.shell import Shell
from veilmq.store import Reader, Store

_SQS_DOMAINS: Final = ("amazonaws.com", "amazonaws.com.cn")
"""The names that SDKs use for SQS itself, for example through a proxy."""
_AZURE_DOMAINS: Final = ("queue.core.windows.net",)
_MNS_DOMAINS: Final = ("aliyuncs.com",)


AnyCodec = sqs_codec.Codec | azure_codec.Codec | mns_codec.Codec


class PushRoom(Protocol):
    """What the server reports about pushes."""

    def state(self, url: str) -> Mapping[str, object]:
        """The health of a subscription's endpoint."""
        ...

    def unavailable(self) -> Mapping[str, str]:
        """Endpoints that are called seldom because they fail, and why."""
        ...

    @property
    def calls_put_off(self) -> int:
        """Calls that local exhaustion put off; each is made later."""
        ...

    def local_exhaustion(self) -> str | None:
        """The resource that this server lacks now, so that pushes wait."""
        ...


class Cluster(Protocol):
    """What the server needs of its cluster."""

    async def open(self, undo: AsyncExitStack) -> tuple[Engine, Store] | None:
        """Wait until this server owns the data, and open them; None: it shall wait no longer."""
        ...

    def holds(self) -> bool:
        """Whether it owns them now."""
        ...

    async def keep(self, shell: Shell) -> None:
        """Keep them until cancelled; end the shell if they are lost."""
        ...


class Stopped(Exception):
    """The server was stopped before it served."""


class ClusterRefused(Exception):
    """The server cannot be part of its cluster: why, and what to do."""


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
    ) -> None:
        """at_point: called at each of the store's CRASH_POINTS (tests/support). cluster: None for a server alone.

        Raises OSError (also ssl.SSLError) if certificate and key cannot be loaded.
        """
        self.settings = settings
        self.keyring = keys
        self.clock = clock
        self.listeners: dict[str, Listener] = {}
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
        self._cluster = cluster
        self._urls: dict[str, str] = {}
        self._closing: list[asyncio.Future[None]] = []
        self._undo = AsyncExitStack()

    @property
    def failed(self) -> "asyncio.Future[None]":
        """Done when the store's state is unknown: stop and exit non-zero."""
        return self.shell.failed

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
        in a cluster what `Cluster.open` does, and Stopped; nothing stays open then.
        """
        async with AsyncExitStack() as undo:
            await self._start(undo, before_ports)
            self._undo = undo.pop_all()

    async def _start(self, undo: AsyncExitStack, before_ports: Callable[[], None]) -> None:
        settings = self.settings
        declared = None
        if settings.queues is not None:
            declared = queues_file.read(settings.queues, self.keyring.accounts, checks=self.keyring.checks)
            if declared.region is not None and isinstance(self.keyring, DevelopmentKeyring):
                self.keyring.live_in(declared.region)
        engine, self.store = await self._open(undo)
        self.shell = Shell(engine, self.store, self.clock, holds=None if self._cluster is None else self._cluster.holds)
        self.shell.start()
        undo.push_async_callback(self.shell.stop, settings.shutdown_deadline_s)
        if self._cluster is not None:
            undo.callback(asyncio.create_task(self._cluster.keep(self.shell)).cancel)
        self.refused_waits = RefusedWaits(engine.waiting, engine.limits, engine.unread)
        self.refused_waits.start()
        engine.unread.reading = self._reading_bytes
        undo.callback(self.refused_waits.stop)
        watch = ClockWatch(self.shell, self.reader, self.clock, trusted=not self.keyring.checks)
        undo.push_async_callback(watch.stop)
        await watch.start()
        if declared is not None:
            await queues_file.declare(declared, self.shell.call)
        before_ports()
        await self._listen(undo, "sqs", settings.sqs, self._sqs(None if declared is None else declared.account_alias))
        await self._listen(undo, "azure", settings.azure, self._azure())
        await self._listen(undo, "mns", settings.mns, self._mns())
        self.announce({})

    async def _open(self, undo: AsyncExitStack) -> tuple[Engine, Store]:
        """Open the data and start the clock."""
        settings = self.settings
        if self._cluster is not None:
            opened = await self._cluster.open(undo)
            if opened is None:
                raise Stopped
            return opened
        engine, store = open_directory(
            settings.data, settings.engine_limits(), settings.store_options(), self._at_point
        )
        undo.callback(store.close)
        self.clock.start(store.mark)
        return engine, store

    def _sqs(self, account_alias: str | None) -> tuple[AnyCodec, Hosts]:
        settings = self.settings
        strategy = settings.sqs_endpoint_strategy
        endpoint = sqs_codec.Endpoint(
            account_alias=account_alias,
            external_url=settings.external_url,
            base_domain=settings.sqs_domain,
            strategy=None if strategy == "dynamic" else strategy,
            trusted_proxy=settings.trusted_proxy,
            cooldowns=settings.cooldowns,
            cors_origins=settings.cors_origins,
            requests_per_second_max=settings.requests_per_second_max,
            kms_faults=settings.simulated.kms_faults,
        )
        for queue in self.reader.queues.values():
            if queue.settings.labels:
                note(endpoint, queue.info())
        return sqs_codec.Codec(self.keyring, endpoint), Hosts(self._domains(_SQS_DOMAINS), settings.cors_origins)

    def _azure(self) -> tuple[AnyCodec, Hosts]:
        settings = self.settings
        endpoint = azure_codec.Endpoint(
            external_url=settings.external_url,
            base_domain=settings.base_domain,
            trusted_proxy=settings.trusted_proxy,
            cooldowns=settings.cooldowns,
        )
        # The account's own CORS rules decide which pages may call.
        hosts = Hosts(self._domains(_AZURE_DOMAINS), ("*",))
        tokens = tokens_of(settings)
        if isinstance(tokens, IssuerTokens):
            self.issuer = tokens
        return azure_codec.Codec(self.keyring, endpoint, tokens), hosts

    def _mns(self) -> tuple[AnyCodec, Hosts]:
        settings = self.settings
        endpoint = mns_codec.Endpoint(external_url=settings.external_url, trusted_proxy=settings.trusted_proxy)
        return mns_codec.Codec(self.keyring, endpoint), Hosts(self._domains(_MNS_DOMAINS))

    def _domains(self, own: tuple[str, ...]) -> list[str]:
        return [*own, *([self.settings.base_domain] if self.settings.base_domain else [])]

    async def _listen(
        self,
        undo: AsyncExitStack,
        name: str,
        address: Address,
        served: tuple[AnyCodec, Hosts],
    ) -> None:
        settings = self.settings
        codec, hosts = served
        # SQS allows every queue's own name.
        aliases = NO_ALIASES if name == "sqs" else self.reader.aliases
        port = Port(name, codec, self.shell, self.keyring, hosts, aliases)
        listener = await listen(
            address.host,
            address.port,
            port.handle,
            settings.listener_limits(),
            ssl=self.certificate.context(settings.connections_max + OVERFLOW_MAX) if self.certificate else None,
            name=name,
            refuse=lambda status, reason, request_id, request: codec.refuse(status, reason, request, request_id),
            failure=codec.failure,
            intake=HeaderCaseIntake if name == "azure" else Intake,
            unread=self.shell.engine.unread,
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
        self.store.directory.announce(self._urls)

    async def turn_away(self) -> None:
        """Stop accepting at the data ports, and answer the parked receives of all ports."""
        if self._closing:
            return
        deadline_s = self.settings.shutdown_deadline_s
        self._closing = [asyncio.ensure_future(each.close_gracefully(deadline_s)) for each in self.listeners.values()]
        await asyncio.sleep(0)  # now they accept no more
        self.shell.answer_parked()

    async def stop(self) -> None:
        """Stop accepting, answer the parked receives, finish the batch, close the files."""
        await self.turn_away()
        await asyncio.gather(*self._closing)
        await self._undo.aclose()
