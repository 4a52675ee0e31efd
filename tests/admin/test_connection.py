"""What a stranger may send to the admin port before anybody has looked at it."""

import asyncio
import json
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.admin.server import TOKEN
from tests.support.certificate import CERTIFICATE, PRIVATE_KEY

from veilmq.admin.history.feed import Feed
from veilmq.cli.serve import admin_connection, admin_port
from veilmq.cli.serve.admin_connection import HEAD_BYTES_MAX
from veilmq.model.events import HistoryTrimmed
from veilmq.server.clock import wall
from veilmq.server.http.tls import Certificate
from veilmq.testing.for_each import for_each

READ_BYTES_MAX = 256 * 1024
"""What uvloop or asyncio hands over at once."""
ALL_BYTES = 64 * 1024 * 1024
OPEN = f"GET /api/v1/queues HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()


@pytest.fixture
def port(running: Any, tmp_path: Any) -> Iterator[int]:
    with running(tmp_path / "data") as server:
        yield server.port


def connected(port: int) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=60)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
    return found


def taken(port: int, beginning: bytes, piece: bytes) -> int:
    """How many bytes a connection takes before it is closed."""
    sent = 0
    with connected(port) as client:
        try:
            client.sendall(beginning)
            while sent < ALL_BYTES:
                sent += client.send(piece)
        except (ConnectionResetError, BrokenPipeError):
            pass
    return sent


@for_each(
    ("beginning", "piece"),
    [
        (b"GET /", b"a" * 65_536),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"a" * 65_536),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", b"X: " + b"a" * 60_000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", b"X:\r\n" * 10_000),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a" * 65_536),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X:\r\n" * 10_000),
    ],
    ids=["target", "value", "headers", "small headers", "trailer", "small trailers"],
)
def test_a_head_without_end_is_cut_off(port: int, beginning: bytes, piece: bytes) -> None:
    # The kernel's buffers at both ends take some too.
    assert taken(port, beginning, piece) < ALL_BYTES


def test_a_trailer_is_no_header(port: int) -> None:
    with connected(port) as client:
        head, secret = OPEN.rsplit(b"Authorization", 1)
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n0\r\nAuthorization" + secret + b"\r\n")
        assert client.recv(READ_BYTES_MAX).startswith(b"HTTP/1.1 401 ")


def test_a_head_may_be_long_and_come_in_pieces(port: int) -> None:
    line = b"X: " + b"a" * (HEAD_BYTES_MAX - 1_000 - len(OPEN)) + b"\r\n"
    with connected(port) as client:
        for _ in range(2):
            for part in (OPEN, line[:30_000], line[30_000:], b"\r\n"):
                client.sendall(part)
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            while not client.recv(READ_BYTES_MAX).endswith(b"}"):
                pass


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n",
        OPEN + b"\r\n" + b"GET /",
    ],
    ids=["nothing", "a line", "half a head", "a second one"],
)
def test_who_owes_a_head_has_a_deadline(port: int, monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(admin_connection, "HEAD_S", 0.5)
    with connected(port) as client:
        client.sendall(beginning)
        while client.recv(READ_BYTES_MAX):
            pass


def test_the_body_of_a_refused_request_keeps_no_connection_open(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_connection, "HEAD_S", 0.5)
    with connected(port) as client:
        client.sendall(b"POST /api/v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n{")
        assert client.recv(READ_BYTES_MAX).startswith(b"HTTP/1.1 401 ")
        client.sendall(b"{")  # uvicorn's own deadline ends with that
        while client.recv(READ_BYTES_MAX):
            pass


def test_who_hangs_up_within_a_body_is_no_failure(port: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with connected(port) as client:
        head = OPEN.replace(b"GET /api/v1/queues", b"PUT /api/v1/queues/000000000000/us-east-1/q")
        client.sendall(head + b"Content-Length: 9\r\n\r\n{")
        client.shutdown(socket.SHUT_WR)
        while client.recv(READ_BYTES_MAX):
            pass
    with connected(port) as client:
        client.sendall(OPEN + b"Connection: close\r\n\r\n")
        while client.recv(READ_BYTES_MAX):
            pass
    assert "body_incomplete" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_who_is_being_answered_has_none(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_connection, "HEAD_S", 0.5)
    target = b"GET /api/v1/events?from=next&follow=1.2 HTTP/1.1"
    with connected(port) as client:
        client.sendall(OPEN.replace(b"GET /api/v1/queues HTTP/1.1", target) + b"\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"


@for_each(
    ("head", "status"),
    [
        (b"GET /health/live HTTP/1.0\r\n", 200),
        (b"GET /health/live HTTP/1.0\r\nConnection: keep-alive\r\n", 200),
        (b"GET /health/live HTTP/1.0\r\nHost: evil.example\r\n", 403),
        (b"GET /health/live HTTP/1.1\r\nConnection: close\r\n", 400),
        (b"GET /api/v1/queues HTTP/1.0\r\n", 403),
        (b"GET /api/v1/queues HTTP/1.0\r\nHost: 127.0.0.1\r\n", 200),
        (b"GET /api/v1/queues HTTP/1.0\r\nHost: evil.example\r\nHost: 127.0.0.1\r\n", 400),
        (b"GET http://127.0.0.1/api/v1/queues HTTP/1.0\r\nHost: evil.example\r\n", 200),
        (b"GET http://evil.example/api/v1/queues HTTP/1.0\r\nHost: 127.0.0.1\r\n", 403),
        (b"GET /health/live HTTP/1.0\r\nHost: a b\r\n", 400),
        (b"GET http://u@127.0.0.1/api/v1/queues HTTP/1.0\r\nHost: 127.0.0.1\r\n", 400),
        (b"GET /api/v1/queues HTTP/1.0\r\nHost: 127.0.0.1\r\nAuthorization: Basic eDp5\r\n", 400),
    ],
)
def test_http_1_0_and_the_headers_that_decide(port: int, head: bytes, status: int) -> None:
    with connected(port) as client:
        client.sendall(2 * (head + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()))
        answer = b"".join(iter(lambda: client.recv(READ_BYTES_MAX), b""))  # until the server closes, without a reset
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close\r\n" in answer


@for_each("pause", [False, True])
@for_each(
    ("framing", "frame"),
    [
        (b"Content-Length: %d", b"%b"),
        (b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n"),
    ],
)
def test_a_request_for_another_protocol_is_answered_and_its_body_is_no_request(
    port: int, pause: bool, framing: bytes, frame: bytes
) -> None:
    """Java's HttpClient sends such requests. So may who wants a proxy in front to mistake an answer for another."""
    queue = b"PUT /api/v1/queues/000000000000/us-east-1/"
    smuggled = OPEN.replace(b"GET /api/v1/queues", queue + b"smuggled") + b"Content-Length: 2\r\n\r\n{}"
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    name, timeout = b"%d-%d" % (len(framing), pause), b'"visibility_timeout_us":7000000'
    with connected(port) as client:
        for body, status in ((b"{%b}" % timeout, 201), (smuggled, 400)):
            length = framing % len(body) if b"%d" in framing else framing
            expect = b"\r\nExpect: 100-continue" if pause else b""
            head = OPEN.replace(b"GET /api/v1/queues", queue + name) + upgrade + length + expect + b"\r\n\r\n"
            framed = frame % (len(body), body) if b"%x" in frame else body
            asked = OPEN + upgrade + b"\r\n" + OPEN + b"\r\n"
            if pause:
                client.sendall(head)
                assert client.recv(READ_BYTES_MAX) == b"HTTP/1.1 100 Continue\r\n\r\n"
                client.sendall(framed + asked)
            else:
                client.sendall(head + framed + asked)
            answers = b""
            while answers.count(b"HTTP/1.1 ") < 3 or not answers.endswith(b"}"):
                received = client.recv(READ_BYTES_MAX)
                assert received, answers
                answers += received
            assert [int(each[:3]) for each in answers.split(b"HTTP/1.1 ")[1:]] == [status, 200, 200], answers
            assert (b"smuggled" in answers, timeout in answers) == (False, True)


def exchanged(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    return b"".join(iter(lambda: client.recv(READ_BYTES_MAX), b""))


def test_a_stream_to_an_http_1_0_client_has_no_chunks_and_ends_with_the_connection(port: int) -> None:
    made = OPEN.replace(b"GET /api/v1/queues", b"PUT /api/v1/queues/000000000000/us-east-1/made")
    with connected(port) as client:
        client.sendall(made + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
        assert exchanged(client).startswith(b"HTTP/1.1 201 ")
    asked = OPEN.replace(b"/api/v1/queues", b"/api/v1/events?from=0")
    with connected(port) as client:
        client.sendall(asked.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Connection: keep-alive\r\n\r\n")
        head, _, body = exchanged(client).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length" not in head.lower()
    assert [json.loads(line)["kind"] for line in body.splitlines()] == ["queue_created", "operator_command"]


@pytest.mark.parametrize("error", [HistoryTrimmed(7), asyncio.CancelledError()])
def test_a_stream_to_an_http_1_0_client_that_fails_is_no_whole_answer(
    port: int, monkeypatch: Any, error: BaseException
) -> None:
    """It is cancelled where another server of the cluster gives the answer, and breaks off."""

    def fails(*_: object) -> Iterator[bytes]:
        yield b"{}\n"
        raise error

    monkeypatch.setattr(Feed, "_lines", fails)
    with connected(port) as client:
        client.sendall(OPEN.replace(b"/api/v1/queues HTTP/1.1", b"/api/v1/events?from=0 HTTP/1.0") + b"\r\n")
        with pytest.raises(ConnectionResetError):
            exchanged(client)


def test_who_ends_its_input_gets_its_late_answer(port: int) -> None:
    with connected(port) as client:
        client.sendall(OPEN.replace(b"/api/v1/queues", b"/api/v1/events?from=next&follow=0.5") + b"\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = exchanged(client)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in answer or answer.endswith(b"0\r\n\r\n")
    with connected(port) as client:
        client.sendall(2 * (OPEN + b"\r\n"))
        client.shutdown(socket.SHUT_WR)
        assert exchanged(client).count(b"HTTP/1.1 200 ") == 2


def test_a_receive_of_one_who_ends_its_input_waits_no_longer(port: int) -> None:
    queue = b"/api/v1/queues/000000000000/us-east-1/waiting"
    put = OPEN.replace(b"GET /api/v1/queues", b"PUT " + queue)
    with connected(port) as client:
        client.sendall(put + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
        assert exchanged(client).startswith(b"HTTP/1.1 201 ")
    wanted = b'{"wait_us": 20000000}'
    with connected(port) as client:
        asked = OPEN.replace(b"GET /api/v1/queues", b"POST " + queue + b"/receive")
        client.sendall(asked + b"Content-Length: %d\r\n\r\n" % len(wanted) + wanted)
        time.sleep(0.1)  # until it waits
        began = time.monotonic()
        client.shutdown(socket.SHUT_WR)
        head, _, body = exchanged(client).partition(b"\r\n\r\n")
    assert time.monotonic() - began < 5
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["messages"] == []


def test_connections_are_bounded(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_connection, "CONNECTIONS_MAX", 3)
    with ExitStack() as opened:
        for _ in range(3):
            client = opened.enter_context(connected(port))
            client.sendall(OPEN + b"\r\n")
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        assert exchanged(opened.enter_context(connected(port))).startswith(b"HTTP/1.1 503 ")
    for _ in range(100):  # the server notices when they end
        with connected(port) as client:
            client.sendall(OPEN + b"Connection: close\r\n\r\n")
            if exchanged(client).startswith(b"HTTP/1.1 200 "):
                break
    else:
        raise AssertionError("none is let in again")


def asks(client: HTTPConnection, path: str, headers: dict[str, str]) -> bool:
    """Whether its connection, which is opened at the first request, is still open."""
    try:
        client.request("GET", path, headers=headers)
        client.getresponse().read()
    except OSError:
        return False
    client.auto_open = 0
    return True


def test_a_full_port_drops_the_oldest_connection_of_a_stranger(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    origin = {"Origin": f"http://127.0.0.1:{port}"}
    entered = httpx.post(f"{origin['Origin']}/console/sign-in", data={"secret": TOKEN}, headers=origin)
    session = {"Cookie": entered.headers["set-cookie"].partition(";")[0]}
    monkeypatch.setattr(admin_connection, "CONNECTIONS_MAX", 6)
    monkeypatch.setattr(admin_connection, "HEAD_S", 1_000.0)  # it is the newcomer for which the silent one goes
    clients = [HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(8)]
    with ExitStack() as opened:
        for each in clients:
            opened.callback(each.close)
        with_session, following, with_token, silent, refused, healthy, newcomer, another = clients
        assert asks(with_session, "/console/", session)
        # Its answer begins with the first event.
        following.request("GET", "/api/v1/events?from=next&follow=20", headers=bearer)
        assert asks(with_token, "/api/v1/queues", bearer)
        silent.connect()
        assert asks(refused, "/api/v1/queues", {})
        assert asks(healthy, "/health/live", {})
        assert asks(newcomer, "/api/v1/queues", bearer)
        assert silent.sock.recv(1) == b""
        assert asks(another, "/api/v1/queues", bearer)
        assert not asks(refused, "/api/v1/queues", {})
        assert asks(healthy, "/health/live", {})
        assert asks(with_session, "/console/", session)
        assert asks(with_token, "/api/v1/queues", bearer)
        made = httpx.put(f"{origin['Origin']}/api/v1/queues/000000000000/us-east-1/made", headers=bearer, json={})
        assert made.status_code == 201
        assert json.loads(following.getresponse().readline())["kind"] == "queue_created"


PAGE = b"GET /console/sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\n"
AHEAD = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def shown_metrics(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text


def no_failure(port: int, caplog: pytest.LogCaptureFixture) -> bool:
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    return not errors and 'veilmq_failures_total{listener="admin"} 0.0' in shown_metrics(port)


def test_requests_that_are_sent_before_their_answers_are_bounded(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each takes kilobytes until it is answered. A stranger would take gigabytes with one connection."""
    caplog.set_level("INFO")
    with connected(port) as client:
        client.sendall((PAGE + b"\r\n") * 32 + PAGE + b"Connection: close\r\n\r\n")
        assert exchanged(client).count(b"HTTP/1.1 200 ") == 33
    with connected(port) as client:
        client.sendall((PAGE + b"\r\n") * 40)
        assert exchanged(client) == b""
    assert "it sent more than 32 requests behind" in caplog.text
    assert no_failure(port, caplog)


def test_garbage_behind_requests_is_no_failure(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with connected(port) as client:
        client.sendall((PAGE + b"\r\n") * 2 + b"no HTTP\r\n\r\n")
        exchanged(client)
    assert no_failure(port, caplog)


def waits(port: int, count: int) -> None:
    """Until so many receives wait."""
    end = time.monotonic() + 15  # a receive here would wait for 30 s
    shown = ""
    while f"\nveilmq_waiters {count}.0\n" not in shown:
        assert time.monotonic() < end, shown
        shown = shown_metrics(port)


@pytest.mark.parametrize("ahead", [0, 1, 34])
def test_a_receive_of_one_who_has_gone_takes_no_message(port: int, ahead: int) -> None:
    """With requests behind it, sent when it waits."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    queue = f"http://127.0.0.1:{port}/api/v1/queues/000000000000/us-east-1/parked"
    with httpx.Client(headers=headers) as http:
        assert http.put(queue, json={}).status_code == 201
        wanted = b'{"wait_us": 30000000}'
        with connected(port) as client:
            asked = OPEN.replace(b"GET /api/v1/queues", b"POST /api/v1/queues/000000000000/us-east-1/parked/receive")
            client.sendall(asked + b"Content-Length: %d\r\n\r\n" % len(wanted) + wanted)
            waits(port, 1)
            client.sendall(AHEAD * ahead)
            if ahead <= 32:
                waits(port, 1)  # the server has read what is ahead
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()  # by a reset
            else:
                assert exchanged(client) == b""
            waits(port, 0)
        assert http.post(queue + "/messages", json={"messages": [{"body": "kept"}]}).status_code == 200
        assert len(http.post(queue + "/receive", json={}).json()["messages"]) == 1


def test_who_reads_nothing_of_its_answer_is_dropped(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(admin_connection, "UNREAD_S", 0.2)
    with socket.socket() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1_000)  # so the kernels buffer little
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.settimeout(60)
        client.connect(("127.0.0.1", port))
        sheet = b"GET /console/static/console.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        client.sendall(sheet * 33)
        end = time.monotonic() + 60
        while "dropped the connection" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert exchanged(client).count(b"HTTP/1.1 200 ") < 33
    assert no_failure(port, caplog)


def test_connections_and_handshakes_have_one_bound(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection over TLS leaves room for one handshake less: the oldest one goes."""
    monkeypatch.setattr(admin_connection, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(admin_port, "_TOLD_FULL_MAX", 1)
    monkeypatch.setattr(admin_connection, "HEAD_S", 1_000.0)
    for name, text in (("certificate", CERTIFICATE), ("key", PRIVATE_KEY)):
        (tmp_path / name).write_text(text)
    context = Certificate(tmp_path / "certificate", tmp_path / "key", wall()).context()
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    with ExitStack() as opened:
        port = opened.enter_context(running(tmp_path / "data", context=context)).port

        def secure() -> ssl.SSLSocket:
            return opened.enter_context(trusting.wrap_socket(connected(port), server_hostname="localhost"))

        silent = [opened.enter_context(connected(port)) for _ in range(5)]
        assert silent[0].recv(1) == b""
        for each in silent[1:4]:
            client = secure()
            client.sendall(OPEN + b"\r\n")
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            assert each.recv(1) == b""
        assert exchanged(secure()).startswith(b"HTTP/1.1 503 ")
        assert silent[4].recv(1) == b""


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (b"no HTTP\r\n\r\n", "400 no HTTP request"),
        (b"\x16\x03\x01\x02\x00", "400 the client speaks TLS and this port plain HTTP: its URL needs http://"),
        (b"GET /api/v1/queues HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", "401 not_authenticated"),
        (OPEN.replace(b"queues", b"nothing") + b"Connection: close\r\n\r\n", "404 not_found"),
    ],
    ids=["garbage", "TLS", "a stranger", "a path"],
)
def test_refusals_do_not_fill_the_log(port: int, caplog: pytest.LogCaptureFixture, asked: bytes, reason: str) -> None:
    caplog.set_level("INFO")

    def told() -> tuple[int, int]:
        """How many requests have a line of their own, and how many are counted in others."""
        lines = [each.getMessage() for each in caplog.records if each.name in ("veilmq.admin", "uvicorn.error")]
        counts = [int(text.split()[2]) for text in lines if text.endswith(f"more requests like these: {reason}")]
        return len(lines) - len(counts), sum(counts)

    sent, end = 0, time.monotonic() + 60
    # On a busy machine they take several of the log's seconds, each with lines and a count of its own.
    while sent < 40 or not told()[1]:
        assert time.monotonic() < end, caplog.text
        with connected(port) as client:
            client.sendall(asked)
            exchanged(client)
        sent += 1
    while sum(told()) < sent:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.05)
    assert sum(told()) == sent
