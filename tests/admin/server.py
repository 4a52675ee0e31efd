"""The admin application on a real port, over a real engine and store, in a thread of its own.

Strategy: what the application reads of a server and nothing else: shell, store, clock, keyring, one data listener. A
test is an ordinary HTTP client; `on_loop` runs what must be done where the shell lives.
"""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn
import uvloop

from veilmq.cli.serve import admin_connection, admin_port
from veilmq.console import application
from veilmq.engine.directory import open_directory
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT, AccessKey
from veilmq.protocols import Request, Response
from veilmq.server.auth import Account, DevelopmentKeyring
from veilmq.server.clock import LeaseClock
from veilmq.server.config.settings import Settings
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.listener import Listener, listen
from veilmq.server.logs import RefusedWaits
from veilmq.server.service import Service
from veilmq.server.shell import Shell
from veilmq.store import Options

TOKEN = "a-token-of-the-tests-0123456789"
WAIT_S = 30
OPTIONS = Options(reserve_bytes=4096, floor_bytes=0, history_bytes_max=1 << 40)


class Keys:
    """A keyring of a few keys, all checked."""

    checks = True
    home_region = "us-east-1"

    def __init__(self, *keys: AccessKey) -> None:
        self._keys = {key.id: key for key in keys}

    def find(self, key_id: str) -> AccessKey | None:
        return self._keys.get(key_id)

    @property
    def sole_account(self) -> Account | None:
        accounts = {key.account for key in self._keys.values()}
        return None if len(accounts) > 1 else Account(min(accounts, default=DEVELOPMENT_ACCOUNT))

    @property
    def accounts(self) -> tuple[Account, ...]:
        keys = list(self._keys.values())
        homes = {key.account: key.home_region for key in keys}
        return tuple(
            Account(account, home, keys=tuple(key for key in keys if key.account == account))
            for account, home in homes.items()
        )


class Running:
    """The server as the application sees it, and as a test reaches it."""

    listeners: dict[str, Listener]
    shell: Shell

    def __init__(
        self,
        directory: Path,
        keyring: Any,
        settings: Settings,
        options: Options,
        port: int = 0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._context = context
        self.keyring = keyring or DevelopmentKeyring()
        self.settings = settings
        self.ports: dict[str, Any] = {}
        self.on_reload: set[Callable[[], None]] = set()
        self.pushes: dict[str, int] = {}
        self.push_room: Any = None
        self.push_fault: str | None = None
        self.certificate_ends: Any = None
        self.clock = LeaseClock()
        engine, self.store = open_directory(directory, None, options)
        self.reader = self.store.reader
        self.clock.start(self.store.mark)
        self._engine = engine
        self.archive = None
        self.cluster = None
        self.leads = True
        self.refused_waits = RefusedWaits(engine.waiting, engine.limits, engine.unread)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", port))
        self.socket.listen(100)
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="admin-under-test")

    def _run(self) -> None:
        """On the loop of a server: for a write to a lost connection it raises an error; asyncio's own does not."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.shell = Shell(self._engine, self.store, self.clock)
        self.shell.start()
        listener = await listen("127.0.0.1", 0, _hello, name="sqs")
        self.listeners = {"sqs": listener}
        config = uvicorn.Config(
            application(cast(Service, self), self.settings, TOKEN),
            http=admin_connection.Connection,
            ws="none",
            log_config=None,
            lifespan="off",
            proxy_headers=False,
            access_log=False,
            timeout_keep_alive=60,
        )
        config.load()
        config.ssl = self._context
        self._server = _Server(config)
        self._server.ready = self._ready
        await self._server.serve([self.socket])
        await listener.close_gracefully(1)
        await self.shell.stop(5)

    def on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    def stop(self) -> None:
        self._server.should_exit = True
        self.loop.call_soon_threadsafe(self.shell.stats.dismiss_followers)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.socket.close()
        self.store.close()


class _Server(admin_port._Server):
    ready: threading.Event

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def _hello(request: Request, exchange: Exchange) -> None:
    exchange.respond(Response(200, b"text/plain", b"hello"))


@contextlib.contextmanager
def running(
    directory: Path,
    keyring: Any = None,
    settings: Settings | None = None,
    options: Options = OPTIONS,
    prepare: Callable[[Running], None] = lambda server: None,
    port: int = 0,
    context: ssl.SSLContext | None = None,
) -> Iterator[Running]:
    """A server on that directory; without a keyring in development mode. `prepare` acts before the port is open.
    port: of a server before, whose clients shall go on. context: for TLS."""
    server = Running(directory, keyring, settings or Settings(), options, port, context)
    prepare(server)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def got(http: httpx.Client, path: str, **members: Any) -> dict[str, Any]:
    """What a GET with these members answers: 200 and an object."""
    answer = http.get(path, params=members)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
