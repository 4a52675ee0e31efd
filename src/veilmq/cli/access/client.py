"""A client of a server's admin port: one connection, and how a command fails on it.

Strategy: the standard library's client on one connection, because it loads in a tenth of the time of others. If the
server refuses a request, the command ends with the server's own message.
"""

import http.client
import json
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from select import select
from shlex import quote
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import veilmq
from veilmq.cli.access import ADMIN_DEFAULT, failure_of
from veilmq.cli.failures import Exit, Failure, Unreachable
from veilmq.cli.options import refused_value
from veilmq.store.directory import reached_here

if TYPE_CHECKING:
    from veilmq.store.files import Writing


_CONNECT_S: Final = 10.0
"""Timeout of a connection."""
ANSWER_S: Final = 20.0
"""Timeout of an answer beyond the wait that the command asks for: longer than a server of a cluster waits for an owner
(`OWNER_SECONDS` and a handshake), so that it can say why there is none."""
WORK_S: Final = 100.0
"""Timeout of an answer that may need much work, and between the parts of a long one."""
_LOOK_S: Final = 100.0
"""The answer to a backup begins when it is made; until then the command looks so often whether the server is alive."""
_PIECE_BYTES: Final = 256 * 1024
_PASSING: Final = frozenset({502, 503, 504})
"""Statuses of a proxy whose server is away."""
_DIGITS: Final = re.compile("[0-9]{1,18}")
_PORT: Final = re.compile(r":(\d{1,9})/?$")
_PORT_MAX: Final = 65_535
_OTHER_NAME: Final = frozenset({62, 64})
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_ADVICE_NAME: Final = "Name the host as its certificate does, or on the server's own machine its directory: --data DIR."
_ADVICE_ISSUER: Final = "For a certificate of your own, export SSL_CERT_FILE=FILE with the certificate of its issuer."
_ADVICE_PLAIN: Final = "For a port without TLS, say http:// or HOST:PORT."
_ADVICE_TLS: Final = "If the port speaks TLS, say https://HOST:PORT, or name the directory with --data DIR."
_ADVICE_SILENT: Final = 'Its disk may hang: see `dmesg` there, and "no port answers" in docs/operations.md.'
_ADVICE_UNDECIDED: Final = f"{_ADVICE_SILENT} What was asked for may still be done."
_ADVICE_AWAY: Final = "Is the address right, and does every firewall on the way let it through?"
_ADVICE_ANNOUNCED: Final = (
    "The server that holds the directory is starting or ending, or in a container: "
    "repeat the command, there if need be, or name its port with --admin HOST:PORT."
)
_ADVICE_PROXY: Final = "What answers there is a proxy whose server is away: start that."
_LOOPBACK: Final = {"127.0.0.1", "::1", "localhost"}
_ADVICE_OTHER_PORT: Final = (
    "A server's admin port is another one than those of SQS, Azure and MNS: "
    "9325 unless `serve --admin` says otherwise. On the server's own machine its directory is enough: --data DIR."
)


class _Answer(dict[str, Any]):
    """A JSON object from the server; reading a missing member raises Failure."""

    def __init__(self, found: dict[str, Any], failure: Failure) -> None:
        super().__init__(found)
        self._failure = failure

    def __missing__(self, name: str) -> Any:
        raise self._failure


class AdminClient:
    """`admin` is HOST:PORT or a URL, and `source` the flag or variable that gave it; `announced`:
    whether the directory's owner wrote it into its lock.

    An announced address is on this machine and belongs to that process; its certificate names the host for other
    machines, so the name is not compared. Nobody else can have the port, and the token comes from the same directory.
    Development mode takes the Host `localhost` at each address.
    """

    def __init__(self, admin: str, token: str | None, *, announced: bool = False, source: str = "--admin") -> None:
        self._admin, self._announced = admin, announced
        self._is_connected = self._may_be_done = False
        self._command_id: str | None = None
        self._operation = ""
        self.replayed = False
        """Whether the last answer was kept: the command had been carried out before."""
        try:
            self._connection = _connection(admin, announced=announced)
        except (ValueError, http.client.InvalidURL):
            port = _PORT.search(admin)
            if port is not None and int(port[1]) > _PORT_MAX:
                message = f"{source}: a port is a number up to {_PORT_MAX}, not {port[1]}"
            else:
                message = f"{source}: expected HOST:PORT such as 127.0.0.1:9325, not {admin!r}"
            raise Failure(Exit.USAGE, message) from None
        self._headers = {"User-Agent": f"veilmq/{veilmq.__version__} (command line)"}
        if announced:
            self._headers["Host"] = f"localhost:{self._connection.port}"
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def download(self, path: str, file: "Writing", step: Callable[[int, int], None]) -> None:
        """Write the response into the file. Raises Failure, also if it is cut short; OSError of the file."""
        self._look_for_life()
        with self._failures(WORK_S):
            self._request("POST", path, b"{}", self._headers, WORK_S)
            connected = self._connection.sock
            self._wait()
            answer = self._answered()
            connected.settimeout(WORK_S)
        with answer:
            total, done = self._number(answer, "content-length"), 0
            while done < total:
                with self._failures(WORK_S):
                    part = answer.read(_PIECE_BYTES)
                    if not part:
                        raise http.client.IncompleteRead(b"", total - done)
                file.write(part)  # errors here are the destination's, not the server's
                done += len(part)
                step(done, total)

    def steps(self, path: str) -> Iterator[dict[str, Any]]:
        """The steps of a long job, and at last its result. Raises Failure."""
        headers = self._headers | {"Content-Type": "application/json"}
        self._look_for_life()
        with self._failures(WORK_S):
            self._request("POST", path, b"{}", headers, WORK_S)
            with self._answered() as answer:
                while line := answer.readline():
                    yield self._object(answer.status, line)

    def _wait(self) -> None:
        """Wait until the answer begins, as long as the server takes other requests. Raises Failure.

        Over TLS until the connection is lost: what comes first may be a session ticket, and only a read can tell.
        """
        asking = self._connection
        if isinstance(asking.sock, ssl.SSLSocket):
            from veilmq.server.cluster.admin import keep_alive

            asking.sock.settimeout(None)
            keep_alive(asking.sock)
            return
        while not select([asking.sock], [], [], _LOOK_S)[0]:
            self._connection = _connection(self._admin, announced=self._announced)
            try:
                self._look_for_life()
            finally:
                self._connection.close()
                self._connection = asking

    def _answered(self) -> http.client.HTTPResponse:
        """The response, not read yet; leaving it to its finalizer may lose an interrupt. Raises Failure."""
        answer = self._connection.getresponse()
        if answer.status >= 300:
            with answer:
                raise self._failure(answer.status, answer.read())
        return answer

    def _look_for_life(self) -> None:
        """Check with a quick request that the server is alive, before one that may take long. Raises Failure."""
        with self._failures(ANSWER_S):
            self._request("GET", "/health/live", None, self._headers, ANSWER_S)
            with self._connection.getresponse() as answer:
                answer.read()

    def _json(
        self,
        method: str,
        path: str,
        members: Mapping[str, Any],
        body: bytes | None = None,
        *,
        answer_s: float | None = None,
        command_id: str | None = None,
    ) -> dict[str, Any]:
        answer, content = self._ask(method, path, members, body, answer_s=answer_s, command_id=command_id)
        return self._object(answer.status, content)

    def _object(self, status: int, content: bytes) -> dict[str, Any]:
        """The JSON object of the response. Raises Failure."""
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._not_ours(status)
        return _Answer(found, self._not_ours(status))

    def _number(self, answer: http.client.HTTPResponse, header: str) -> int:
        """The number in a header. Raises Failure."""
        text = answer.headers.get(header, "")
        if not _DIGITS.fullmatch(text):
            raise self._not_ours(answer.status)
        return int(text)

    def _ask(
        self,
        method: str,
        path: str,
        members: Mapping[str, Any],
        body: bytes | None = None,
        *,
        answer_s: float | None = None,
        command_id: str | None = None,
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """The response with its whole body, within `answer_s`. Raises Failure."""
        answer_s = ANSWER_S if answer_s is None else answer_s
        headers = self._headers if command_id is None else self._headers | {"Idempotency-Key": _quoted(command_id)}
        self._command_id = command_id
        query = urlencode({name: value for name, value in members.items() if value not in (None, "")})
        with self._failures(answer_s):
            self._request(method, f"{path}?{query}" if query else path, body, headers, answer_s)
            with self._answered() as answer:
                self.replayed = answer.headers.get("idempotent-replayed") == "true"
                return answer, answer.read()

    def _request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], answer_s: float
    ) -> None:
        """Send on the open connection, or on a new one: a server closes idle ones, for example while a pager shows a
        page."""
        connection = self._connection
        self._may_be_done = False
        kept = connection.sock
        if kept is not None and select([kept], [], [], 0)[0]:
            connection.close()
        if connection.sock is None:
            self._is_connected, connection.timeout = False, _CONNECT_S
            try:
                connection.connect()
            finally:  # a TLS handshake that does not end leaves the socket of the connection
                self._is_connected = connection.sock is not None
        connection.sock.settimeout(answer_s)
        self._may_be_done = method != "GET"
        connection.request(method, target, body, headers)

    @contextmanager
    def _failures(self, answer_s: float) -> Iterator[None]:
        """Turn connection errors into the command's failures."""
        try:
            yield
        except TimeoutError:
            raise self._silence(answer_s) from None
        except ConnectionRefusedError:
            raise Unreachable(Exit.ADDRESS, f"no server answers on {self._admin}", self._start()) from None
        except ssl.SSLEOFError as error:  # it ended during the handshake
            raise Unreachable(Exit.ADDRESS, f"{self._admin}: TLS: {error}") from None
        except ssl.SSLCertVerificationError as error:
            is_other = error.verify_code in _OTHER_NAME
            raise Failure(
                Exit.ADDRESS, f"{self._admin}: TLS: {error}", _ADVICE_NAME if is_other else _ADVICE_ISSUER
            ) from None
        except ssl.SSLError as error:
            raise Failure(Exit.ADDRESS, f"{self._admin}: TLS: {error}", _ADVICE_PLAIN) from None
        except (OSError, http.client.HTTPException) as error:
            advice = _ADVICE_TLS if isinstance(error, http.client.RemoteDisconnected) else self._start()
            if self._may_be_done and self._command_id is not None:
                advice = self._undecided()
            why = getattr(error, "strerror", None) or f"{type(error).__name__} {error}"
            raise Unreachable(Exit.ADDRESS, f"{self._admin}: {why}", advice) from None

    def _start(self) -> str:
        """What to do if no server listens there."""
        if self._announced:
            return _ADVICE_ANNOUNCED
        host, port = self._connection.host, self._connection.port
        if host not in _LOOPBACK:
            return f"Start one there, with its admin port at {port}, or name another with --admin HOST:PORT."
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        option = "" if shown == ADMIN_DEFAULT else f" --admin {quote(shown)}"
        is_tls = isinstance(self._connection, http.client.HTTPSConnection)
        start = "Start it, with its certificate" if is_tls else f"Start one with `veilmq serve{option}`"
        return f"{start}, or name the directory of one that runs with --data DIR."

    def _silence(self, answer_s: float) -> Failure:
        if not self._is_connected:
            return Unreachable(Exit.ADDRESS, f"{self._admin}: no connection within {_CONNECT_S:g} s", _ADVICE_AWAY)
        message = f"{self._admin}: the server took the connection but does not answer within {answer_s:g} s"
        return Unreachable(Exit.ADDRESS, message, self._undecided() if self._may_be_done else _ADVICE_SILENT)

    def _undecided(self) -> str:
        """What to do about a command that may have been carried out."""
        if self._command_id is None:
            return _ADVICE_UNDECIDED
        return f"The command may have been carried out. Repeat it safely with --id {self._command_id}"

    def _failure(self, status: int, content: bytes) -> Failure:
        try:
            answer = json.loads(content)
            field, message = answer.get("field"), str(answer["message"])
            message = refused_value(field, message, operation=self._operation) if field else message
        except (ValueError, KeyError, TypeError, AttributeError):
            return self._not_ours(status)
        error = str(answer.get("error"))
        failure = failure_of(error, message, answer)
        failure.answered = status, error, str(answer.get("request_id"))
        return failure

    def _not_ours(self, status: int) -> Failure:
        message = f"{self._admin} answers {status}, and not as a VeilMQ admin port"
        if status in _PASSING:
            return Unreachable(Exit.ADDRESS, message, _ADVICE_PROXY)
        return Failure(Exit.ADDRESS, message, _ADVICE_OTHER_PORT)


def _connection(admin: str, *, announced: bool) -> http.client.HTTPConnection:
    """A connection to an address, not opened yet. Raises ValueError or InvalidURL."""
    parts = urlsplit(reached_here(admin if "://" in admin else f"http://{admin}"))
    host, port = parts.hostname, parts.port
    if parts.scheme not in {"http", "https"} or not host or not port or parts.path not in {"", "/"}:
        raise ValueError(admin)
    host.encode("idna")  # as the look-up will
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
    context = ssl.create_default_context()
    if announced:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=_CONNECT_S, context=context)


def _quoted(text: str) -> str:
    """The text as a header's string (RFC 9651, 3.3.3)."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
