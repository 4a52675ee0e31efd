"""`veilmq serve`: assembles clock, keys, service and admin port, and stops them in order.

Strategy: flags and files are checked before the loop starts; each failure of the start has its exit code and its
advice. A signal only sets an event. A second SIGINT or SIGTERM ends the process at once, which loses nothing that was
acknowledged: by the system's default handler, or by that of `veilmq.__main__` for process 1.

The token and the socket of the admin port (`AdminEntry`) are opened before any data port, so that a start that fails
there has acknowledged nothing. The port itself (admin_port.py) takes 0.1 s to load, and comes later.
"""

import asyncio
import errno
import faulthandler
import gc
import json
import logging
import os
import re
import resource
import secrets
import signal
import socket
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Set
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import veilmq
from veilmq import accelerator
from veilmq.cli.access import TOKEN_FILE
from veilmq.cli.failures import Exit, Failure, closed_to_user, end_without, file_advice, foreign, unusable
from veilmq.cli.serve.push_room import serve_pushes
from veilmq.cli.serve.systemd import READY, READY_SECONDS, STOPPING, Manager
from veilmq.cli.signals import ends_process
from veilmq.cli.sources import Resolved
from veilmq.model.errors import VeilError
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT
from veilmq.model.wording import counted
from veilmq.protocols import external_path
from veilmq.push import CERTIFICATE_FILE, CERTIFICATE_PATH, KEY_FILE
from veilmq.server.auth import Credentials, DevelopmentKeyring, Keys
from veilmq.server.clock import LeaseClock, wall
from veilmq.server.cluster import ClusterRefused
from veilmq.server.config import FileInvalid
from veilmq.server.config.settings import Address, Settings
from veilmq.server.logs import set_up
from veilmq.server.service import Service, Stopped
from veilmq.store.archive import PlaceUnusable
from veilmq.store.directory import (
    DatabaseUnusable,
    DirectoryHeld,
    DirectoryUnsafe,
    NotOurs,
    SchemaRefused,
    SqliteTooOld,
    holder_of,
)
from veilmq.store.files import durable_write

if TYPE_CHECKING:
    from veilmq.server.cluster.member import ClusterServer
    from veilmq.server.traces import Traces

log = logging.getLogger("veilmq.serve")
_QUEUES_ADVICE: Final = 'What a file of --queues may hold is in docs/deploy.md, "Declared queues".'
_STRIPPED: Final = (
    "--external-url has the path %s: the proxy must take exactly %s off the path of each request, and hand on the Host "
    "header as it came; clients sign both"
)
_Socket: TypeAlias = socket.socket
_DATA_PORTS: Final = ("sqs", "azure", "mns")
"""In the order in which they open (server/service.py)."""
_UNOWNED_SHOWN: Final = 10
_SWITCH_S: Final = 0.001
_COMMAND_SECONDS: Final = 3.0
"""For how long a start lets a command that holds the directory end: a service manager would not start it again."""
_LOOK_SECONDS: Final = 0.05
"""How long a bulk-reading thread (a snapshot, a scrape, a reload) may keep the interpreter from the loop. A batch
releases the interpreter at many of its statements; with Python's default of 5 ms it waited 60 to 170 ms in all."""
BACKLOG: Final = 128
_TOKEN_BYTES: Final = 32
_TOKEN: Final = re.compile(rb"[!-~]{16,2048}")


def serve(resolved: Resolved, manager: Manager) -> Exit:
    """Serve until a signal or a failed store; report start and stop to the service manager.

    Raises Failure or AcceleratorMissing if it cannot start.
    """
    settings, sockets = manager.ports(resolved.settings)
    if manager.watchdog_s is not None:
        faulthandler.enable()  # its SIGABRT then shows where each thread hung
    set_up(settings.log_format, settings.log_level)
    accelerator.check()
    release = f"{veilmq.__version__} (accelerator {accelerator.status})"
    log.info("VeilMQ %s, pid %d, data in %s", release, os.getpid(), settings.data.absolute())
    log.info("settings that differ from the defaults: %s", json.dumps(settings.shown()))
    for name, meant in resolved.misspelt.items():
        log.warning("%s is no setting: did you mean %s?", name, meant)
    if path := external_path(settings.external_url).decode():
        log.warning(_STRIPPED, path, path)
    clock = LeaseClock()
    member = _member(settings, clock)
    service = _service(settings, _keys(settings), clock, member, _traces(settings))
    service.sockets |= sockets
    _raise_open_files(settings)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(service, manager))


def _keys(settings: Settings) -> Keys:
    if settings.credentials is None:
        log.warning("development mode: any credentials are accepted; give --credentials FILE to check them")
        if outside := [str(each) for each in settings.addresses().values() if not each.loopback]:
            log.warning("whoever reaches %s may do everything: keep it in a private network", ", ".join(outside))
        return DevelopmentKeyring()
    try:
        return Credentials(settings.credentials)
    except FileInvalid as error:
        made = f"Make it with: veilmq keys new --into {quote(str(settings.credentials))}"
        raise Failure(Exit.USAGE, f"--credentials: {error}", file_advice(error, missing=made)) from None


def _member(settings: Settings, clock: LeaseClock) -> "ClusterServer | None":
    """This server in its cluster; None for a server alone."""
    if settings.cluster is None:
        return None
    try:
        from veilmq.server.cluster.member import ClusterServer

        return ClusterServer(settings, clock, veilmq.__version__)
    except ModuleNotFoundError as error:
        end_without(error)
    except ClusterRefused as error:
        raise Failure(Exit.USAGE, f"--cluster: {error}") from None
    except OSError as error:
        raise _in_the_way(error, settings) from None


def _traces(settings: Settings) -> "Traces | None":
    if not settings.traces:
        return None
    try:
        from veilmq.server.traces import ExporterBroken, ExporterMissing, Traces, exporters, provider_of
    except ModuleNotFoundError as error:
        end_without(error)
    try:
        made = exporters(os.environ.get("OTEL_TRACES_EXPORTER", ""), os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", ""))
        return Traces(provider_of(made, veilmq.__version__))
    except ExporterMissing as error:
        advice = "For OTLP: pip install opentelemetry-exporter-otlp-proto-http; OTEL_TRACES_EXPORTER=console prints."
        raise Failure(Exit.USAGE, f"--traces: {error}", advice) from None
    except ExporterBroken as error:
        advice = "Install its package again, with all that it needs: pip check names what does not fit."
        raise Failure(Exit.USAGE, f"--traces: {error}", advice) from None
    except ValueError as error:
        raise Failure(Exit.USAGE, f"--traces: {error}", "Correct the OTEL_* variable that it reads.") from None


def _service(
    settings: Settings, keys: Keys, clock: LeaseClock, member: "ClusterServer | None", traces: "Traces | None"
) -> Service:
    try:
        return Service(settings, keys, clock, cluster=member, traces=traces)
    except ssl.SSLError as error:
        advice = "--tls-cert takes a PEM chain, the server's own certificate first; --tls-key its key, unencrypted."
        raise Failure(Exit.USAGE, f"TLS: {error}", advice) from None
    except OSError as error:
        option = "--tls-cert" if Path(error.filename) == settings.tls_cert else "--tls-key"
        advice = closed_to_user(Path(error.filename), of_server=True) or "Name a PEM file."
        raise Failure(Exit.USAGE, f"{option} {error.filename}: {error.strerror}", advice) from None


def _raise_open_files(settings: Settings) -> None:
    """Raise the limit of open files as far as the system allows; warn if full ports would reach it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # a system that allows less than it reports
            hard = soft
    if hard != resource.RLIM_INFINITY and hard < settings.files_needed:
        warning = "at most %d files may be open, and three ports with --connections-max %d need %d"
        log.warning(warning, hard, settings.connections_max, settings.files_needed)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not available on this platform: asyncio's own loop is slower
        return None
    return uvloop.Loop


async def _push(service: Service, serve: Callable[[Service, Settings], Awaitable[None]] = serve_pushes) -> None:
    """Push until cancelled. Report a bug in the push room at once; nobody awaits this before the end."""
    try:
        await serve(service, service.settings)
    except Exception as error:  # the server goes on without pushes
        service.push_fault = "until a restart: pushing failed with an error"
        log.error("no pushes any more, until a restart", exc_info=error)


async def _run(service: Service, manager: Manager) -> Exit:
    settings = service.settings
    ended, entry = asyncio.Event(), AdminEntry(settings.admin, settings.data, service.sockets.get("admin"))
    _on_signals(ended, service, entry)
    service.beside.append(partial(_push, service))
    sys.setswitchinterval(_SWITCH_S)
    gc.disable()
    with entry:
        service.first.append(partial(_share_token, service, entry))
        service.on_shared = partial(_learn, service, entry)
        try:
            await _start(service, settings, entry)
        except Stopped:
            log.info("stopped")
            return Exit.DONE
        finally:
            gc.enable()
        return await _serve(service, manager, ended, entry)


def token(directory: Path) -> str:
    """The bearer token of the admin port, made at the first start.

    Raises DirectoryUnsafe if others may read it, or if the token cannot be sent in a header or is easy to guess.
    """
    path = directory / TOKEN_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise DirectoryUnsafe(f"{path} is open to other users: chmod 600 {quote(str(path))}") from None
        found = path.read_bytes().strip()
        if _TOKEN.fullmatch(found):
            return found.decode()
        if found:
            raise DirectoryUnsafe(f"{path} holds no token of 16 ASCII characters or more: remove it") from None
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    made = secrets.token_urlsafe(_TOKEN_BYTES)
    with open(descriptor, "w") as file:
        file.write(made + "\n")
    return made


async def _share_token(service: Service, entry: "AdminEntry") -> None:
    """Make this server's token that of the cluster, unless it has one."""
    if TOKEN_FILE not in service.shared:
        try:
            await service.share(TOKEN_FILE, entry.bearer.encode())
        except VeilError as error:
            log.warning("the admin token is not shared with the other servers: %s", error)


async def _reload_token(service: Service, entry: "AdminEntry") -> None:
    """Give the cluster the token that stands in the owner's file now."""
    try:
        found = await asyncio.to_thread(token, service.settings.data)
        if service.leads:
            await service.share(TOKEN_FILE, found.encode(), replaces=True)
        elif found != entry.bearer:
            log.warning("the admin token stays as it was: change the file of the owner, and reload there")
            _learn(service, entry, service.shared)
    except (OSError, DirectoryUnsafe, VeilError) as error:
        log.warning("the admin token stays as it was: %s", error)


def _learn(service: Service, entry: "AdminEntry", values: Mapping[str, bytes]) -> None:
    """Take what the servers of the cluster share. A server alone has the same in files, and so has each of these."""
    if not entry.is_open:
        return
    for name in (TOKEN_FILE, KEY_FILE, CERTIFICATE_FILE):
        value, path = values.get(name), service.settings.data / name
        if value is not None and (not path.exists() or path.read_bytes().strip() != value.strip()):
            durable_write(path, value, mode=0o644 if name == CERTIFICATE_FILE else 0o600)
            log.info("%s is the cluster's now", path)
    if (found := values.get(TOKEN_FILE)) is not None:
        entry.bearer = found.decode()
    if (certificate := values.get(CERTIFICATE_FILE)) is not None and "mns" in service.ports:
        service.show_document(CERTIFICATE_PATH, certificate)


class AdminEntry:
    """Token and socket, from `open` to the end of the context."""

    bearer = ""
    """Empty: not opened yet."""
    socket: socket.socket

    def __init__(self, address: Address, directory: Path, opened: _Socket | None = None) -> None:
        """opened: the socket, if the service manager has opened it."""
        self._address, self._directory, self._opened = address, directory, opened
        self._open = ExitStack()
        self.is_open = False

    def open(self) -> None:
        """Raises OSError if the address or the file is not available; DirectoryUnsafe as `token` does."""
        self.bearer = token(self._directory)
        if self._opened is not None:
            self.socket = self._open.enter_context(self._opened)
            self.is_open = True
            return
        family, _, _, _, where = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.socket = self._open.enter_context(socket.create_server(where[:2], family=family, backlog=BACKLOG))
        self.is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()


async def _serve(service: Service, manager: Manager, ended: asyncio.Event, entry: AdminEntry) -> Exit:
    """Open the admin port and serve until the end."""
    try:
        async with _admin(service, entry):
            # Objects from the start live on: exempt up to 100,000 queues from garbage collection.
            gc.freeze()
            for name, listener in service.listeners.items():
                log.info("%s listens on %s", name, " and ".join(listener.urls))
            await asyncio.to_thread(manager.notify, READY, READY_SECONDS)
            waiting = asyncio.ensure_future(ended.wait())
            either: list[asyncio.Future[Any]] = [waiting, service.failed]
            with manager.watching():
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            manager.notify(STOPPING)
            waiting.cancel()
            log.info("shutting down")
    finally:
        failed = service.failed.done()
        await service.stop()
    if failed and service.refused:
        return Exit.USAGE
    if failed:
        log.critical("stopped because the store failed; start again, and run `veilmq check` if it happens twice")
        return Exit.STORE
    log.info("stopped")
    return Exit.DONE


def _on_signals(ended: asyncio.Event, service: Service, entry: "AdminEntry") -> None:
    loop, at_once = asyncio.get_running_loop(), ends_process()

    def end(number: signal.Signals) -> None:
        log.info("%s: ending", number.name)
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
            signal.signal(each, at_once)
        ended.set()
        service.interrupt()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)

    reloads: set[asyncio.Task[object]] = set()

    def begin_reload() -> None:
        # Reload each on its own: a hanging disk under one must not block the others.
        begin(_reload_keys(service))
        if service.certificate is not None:
            begin(service.certificate.renew(wall()))
        if service.issuer is not None:
            begin(service.issuer.reload())
        if service.cluster is not None:
            begin(_reload_token(service, entry))

    def begin(reload: Coroutine[Any, Any, object]) -> None:
        task = loop.create_task(reload)
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, begin_reload)


async def _let_a_command_end(directory: Path) -> None:
    """A command that works on the directory itself is soon over. A server, which writes its ports there, is not."""
    for _ in range(round(_COMMAND_SECONDS / _LOOK_SECONDS)):
        holder = holder_of(directory)
        if holder is None or holder.listeners:
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def _start(service: Service, settings: Settings, entry: AdminEntry) -> None:
    """Start the service. Raises Failure with advice."""
    await _let_a_command_end(settings.data)
    if not os.access(settings.data, os.F_OK):  # a start that is refused for a port shall make no directory
        _look_at_ports(service, settings)
    try:
        await service.start(entry.open)
    except DirectoryHeld as error:
        advice = "One process owns a data directory: use that server, or give this one its own with --data DIR."
        raise Failure(Exit.DIRECTORY, str(error), advice) from None
    except NotOurs as error:
        raise foreign(settings.data, error) from None
    except ClusterRefused as error:
        raise Failure(Exit.USAGE, f"--cluster: {error}") from None
    except PlaceUnusable as error:
        raise Failure(Exit.USAGE, f"--archive: {error}") from None
    except (DirectoryUnsafe, DatabaseUnusable, SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except FileInvalid as error:
        is_queues = error.path == settings.queues
        advice = file_advice(error, missing="Check the path.", wrong=_QUEUES_ADVICE if is_queues else "")
        option = "--queues" if is_queues else "--azure-issuer-keys"
        raise Failure(Exit.USAGE, f"{option}: {error}", advice) from None
    except OSError as error:
        raise _in_the_way(error, settings, _opening(service, entry)) from None
    if service.leads:
        _warn_of_unowned(service)


def _look_at_ports(service: Service, settings: Settings) -> None:
    """Raises Failure if a port is not to be had."""
    for name, address in settings.addresses().items():
        if name in service.sockets:
            continue
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(place)
        except OSError as error:
            raise _in_the_way(error, settings, name) from None


def _opening(service: Service, entry: AdminEntry) -> str:
    """The port that the start was opening; empty: none."""
    if not entry.bearer:
        return "peer" if service.cluster is not None else ""
    if not entry.is_open:
        return "admin"
    return next((name for name in _DATA_PORTS if name not in service.listeners), "")


async def _reload_keys(service: Service) -> None:
    """Read the credentials again, and warn about queues of the accounts that went."""
    before = {account.id for account in service.keyring.accounts}
    if await service.keyring.reload():
        service.end_waits()
        if service.leads:
            _warn_of_unowned(service, before)


def _warn_of_unowned(service: Service, among: Set[str] | None = None) -> None:
    """Warn about queues of accounts that are not in the credentials file, as after a switch from development mode.
    among: look only at these accounts."""
    if not service.keyring.checks:
        return
    known = {account.id for account in service.keyring.accounts}
    accounts = (key.account for key in service.reader.queues)
    unowned = Counter(each for each in accounts if each not in known and (among is None or each in among))
    for account, count in sorted(unowned.items())[:_UNOWNED_SHOWN]:
        mode = ", that of development mode" if account == DEVELOPMENT_ACCOUNT else ""
        log.warning(
            "no key reaches %s of account %s%s, which the credentials file does not have; "
            "`veilmq keys new --account %s --into %s` makes one that does",
            counted(count, "queue"), account, mode, account, service.settings.credentials,
        )  # fmt: skip
    if len(unowned) > _UNOWNED_SHOWN:
        further = counted(len(unowned) - _UNOWNED_SHOWN, "further account")
        log.warning("nor has the credentials file %s with queues", further)


def _in_the_way(error: OSError, settings: Settings, port: str = "") -> Failure:
    """Explain a system error about the port being opened, or else about the directory."""
    named = f"--{port} {getattr(settings, port)}" if port else "a port"
    if error.errno == errno.EADDRINUSE:
        advice = f"Choose another with --{port or 'sqs'} HOST:PORT (port 0: a free one), or see who has it: ss -ltnp"
        return Failure(Exit.ADDRESS, f"{named}: the port is in use", advice)
    if isinstance(error, socket.gaierror) or error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
        advice = "Use an address of this machine, such as 127.0.0.1."
        return Failure(Exit.ADDRESS, f"{named}: no such address here", advice)
    if error.filename is None and error.errno in {errno.EACCES, errno.EPERM}:
        return Failure(Exit.ADDRESS, f"{named}: the port is not allowed", "Ports below 1024 need privileges.")
    return unusable(settings.data, error)


@asynccontextmanager
async def _admin(service: Service, entry: AdminEntry) -> AsyncIterator[None]:
    """The admin port, while the body runs."""
    await asyncio.to_thread(import_module, "veilmq.cli.serve.admin_port")  # takes 0.1 s; the data ports already answer
    from veilmq.cli.serve.admin_port import AdminPort

    port = AdminPort(service, service.settings, entry)
    log.info("admin listens on %s", port.url)
    service.announce({"admin": port.url})
    async with port:
        yield
