"""Requests and answers of a data port: what HTTP/1.1 asks of a server, over real sockets."""

import asyncio
import logging
import re
import socket
import ssl
from email.utils import parsedate_to_datetime

import pytest

from veilmq.protocols import Request, Response
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.listener import listen
from veilmq.testing.for_each import for_each

GET = b"GET /q HTTP/1.1\r\nHost: h\r\n\r\n"
TEXT = b"text/plain"


def echo(request: Request, exchange: Exchange) -> None:
    exchange.respond(Response(200, TEXT, request.body or request.target))


class Recorder:
    """Answers at once with the body, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request, exchange: Exchange) -> None:
        self.requests.append(request)
        echo(request, exchange)


async def test_an_answer_has_date_length_and_type_and_leaves_the_connection_open(serve):
    port = await serve(echo)
    client = await port.client()
    answer = await client.ask(GET)
    assert answer.raw.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.body == b"/q"
    assert answer.headers.keys() == {"Date", "Content-Type", "Content-Length"}
    assert answer.headers["Content-Type"] == "text/plain"
    assert parsedate_to_datetime(answer.headers["Date"]).tzinfo is not None
    assert (await client.ask(GET)).body == b"/q"
    assert port.listener.requests == 2
    assert len(port.listener.connections) == 1
    assert port.listener.bytes_received == 2 * len(GET)
    assert port.listener.bytes_sent == 2 * len(answer.raw)


async def test_a_request_reaches_the_handler_as_it_was_sent(serve):
    recorder = Recorder()
    client = await (await serve(recorder)).client()
    await client.ask(
        b"POST /a%2fb//c?x=%20&y HTTP/1.1\r\nHOST: h:1\r\nX-One:  a b\t \r\nEmpty:\r\n"
        b"Content-Length: 3\r\nX-Bytes: \xc3\xa9\r\n\r\n\0\r\n"
    )
    (request,) = recorder.requests
    assert request.method == "POST"
    assert request.target == b"/a%2fb//c?x=%20&y"
    assert request.path == b"/a%2fb//c"
    assert request.query == b"x=%20&y"
    assert request.headers == {
        b"host": b"h:1",
        b"x-one": b"a b",
        b"empty": b"",
        b"content-length": b"3",
        b"x-bytes": b"\xc3\xa9",
    }
    assert request.body == b"\0\r\n"
    assert request.peer == "127.0.0.1"
    assert not request.secure
    assert request.authority is None
    assert request.duplicates == frozenset()


async def test_a_request_may_come_byte_by_byte(serve):
    recorder = Recorder()
    port = await serve(recorder)
    client = await port.client()
    client.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in b"POST /drip HTTP/1.1\r\nHost: h\r\nX-Long: value\r\nContent-Length: 5\r\n\r\n12345":
        await client.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await client.answer()).body == b"12345"
    assert recorder.requests[0].headers[b"x-long"] == b"value"
    assert port.listener.held_bytes == 0


async def test_request_ids_are_uuids_and_unique(serve):
    recorder = Recorder()
    client = await (await serve(recorder)).client()
    for _ in range(20):
        await client.ask(GET)
    ids = {request.request_id for request in recorder.requests}
    assert len(ids) == 20
    for request_id in ids:
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-8[0-9a-f]{3}-[0-9a-f]{12}", request_id)


async def test_repeated_headers_are_joined_and_named(serve):
    recorder = Recorder()
    client = await (await serve(recorder)).client()
    await client.ask(b"GET / HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nx-a:  2 \r\nX-B: 3\r\n\r\n")
    await client.ask(GET)
    assert recorder.requests[0].headers[b"x-a"] == b"1, 2"
    assert recorder.requests[0].duplicates == {b"x-a"}
    assert recorder.requests[1].duplicates == frozenset()


@for_each(
    ("line", "target", "authority"),
    [
        (b"GET http://h.example:80/p?q=1", b"/p?q=1", b"h.example:80"),
        (b"GET HTTPS://h.example", b"/", b"h.example"),
        (b"GET http://[::1]:9?x", b"/?x", b"[::1]:9"),
        (b"GET http://h/http://other/", b"/http://other/", b"h"),
        (b"OPTIONS *", b"*", None),
    ],
)
async def test_other_forms_of_targets(serve, line, target, authority):
    recorder = Recorder()
    client = await (await serve(recorder)).client()
    await client.ask(line + b" HTTP/1.1\r\nHost: h\r\n\r\n")
    await client.ask(GET)
    assert (recorder.requests[0].target, recorder.requests[0].authority) == (target, authority)
    assert recorder.requests[1].authority is None


@for_each(
    "host",
    [
        b"",
        b"h",
        b"h:",
        b"my_queue.svc:80",
        b"127.0.0.1:1",
        b"[::1]",
        b"[fe80::1%25eth0]:9",
        b"[fe80::1%eth0]",
        b"%41.b",
    ],
)
async def test_hosts_that_clients_send(serve, host):
    client = await (await serve(echo)).client()
    for _ in range(2):
        assert (await client.ask(b"GET /q HTTP/1.1\r\nHost: %b\r\n\r\n" % host)).status == 200


async def test_http_1_0_closes_unless_it_asks_not_to(serve):
    port = await serve(echo)
    client = await port.client()
    answer = await client.ask(b"GET /1 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert answer.headers["Connection"] == "keep-alive"
    answer = await client.ask(b"GET /2 HTTP/1.0\r\n\r\n")
    assert (answer.body, answer.headers["Connection"]) == (b"/2", "close")
    assert await client.rest() == b""


async def test_either_side_can_close(serve):
    def closing(request: Request, exchange: Exchange) -> None:
        exchange.respond(Response(200, TEXT, b"bye", close=True))

    asked = await (await serve(echo)).client()
    answer = await asked.ask(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: x, close\r\n\r\n" + GET)
    assert answer.headers["Connection"] == "close"
    assert await asked.rest() == b""
    told = await (await serve(closing)).client()
    assert (await told.ask(GET)).headers["Connection"] == "close"
    assert await told.rest() == b""


async def test_head_has_the_length_and_no_body(serve):
    client = await (await serve(echo)).client()
    answer = await client.ask(b"HEAD /four HTTP/1.1\r\nHost: h\r\n\r\n", to="HEAD")
    assert answer.headers["Content-Length"] == "5"
    assert (await client.ask(GET)).body == b"/q"


@for_each("status", [204, 304])
async def test_statuses_without_body(serve, status):
    port = await serve(lambda request, exchange: exchange.respond(Response(status, None, b"x", ((b"X-A", b"b"),))))
    client = await port.client()
    await client.send(GET + b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    received = await client.rest()
    assert received.count(b"HTTP/1.1 %d " % status) == 2
    assert received.count(b"X-A: b\r\n") == 2
    assert b"Content-Length" not in received
    assert received.endswith(b"\r\nConnection: close\r\n\r\n")


async def test_headers_of_an_answer(serve):
    extra = ((b"X-One", b"1"), (b"X-Two", b"2"))
    port = await serve(lambda request, exchange: exchange.respond(Response(418, None, b"tea", extra)))
    answer = await (await port.client()).ask(GET)
    assert answer.headers.keys() == {"Date", "Content-Length", "X-One", "X-Two"}
    assert (answer.status, answer.body, answer.headers["X-Two"]) == (418, b"tea", "2")


@for_each(
    "response",
    [
        Response(200, TEXT, b"", ((b"X-A", b"1\r\nSet-Cookie: evil"),)),
        Response(200, TEXT, b"", ((b"X-A", b"1\n"),)),
        Response(200, TEXT, b"", ((b"X-A", b"1\r"),)),
        Response(200, TEXT, b"", ((b"X-A", b"1\nSet-Cookie: evil"), (b"X-B", b"2"))),
        Response(200, TEXT, b"", ((b"X-A", b"1"), (b"X-B", b"2\r"))),
        Response(200, TEXT, b"", ((b"X-A\r", b"1"),)),
        Response(200, b"text/plain\r\nX: y", b""),
    ],
)
async def test_a_line_break_in_an_answers_header_becomes_a_500(serve, response, caplog):
    port = await serve(lambda request, exchange: exchange.respond(response))
    client = await port.client()
    answer = await client.ask(GET)
    assert answer.status == 500
    assert "Set-Cookie" not in answer.headers
    assert port.listener.failures == 1
    assert "no answer can be written" in caplog.text


async def test_chunked_bodies_and_their_trailers(serve):
    recorder = Recorder()
    client = await (await serve(recorder)).client()
    chunked = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: Chunked\r\n\r\n"
    answer = await client.ask(chunked + b"3;sig=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nX-Trail: t\r\nHost: evil\r\n\r\n")
    assert answer.body == b"abc0123456789"
    assert (await client.ask(chunked + b"0\r\nHost: evil\r\nHost: worse\r\n\r\n")).body == b"/"
    assert (await client.ask(GET[:-2] + b"X: a\r\nX: b\r\n\r\n")).body == b"/q"
    assert recorder.requests[0].headers == {b"host": b"h", b"transfer-encoding": b"Chunked"}
    assert recorder.requests[2].headers == {b"host": b"h", b"x": b"a, b"}


async def test_a_long_body_arrives_whole(serve):
    body = bytes(range(256)) * 4096
    client = await (await serve(echo)).client()
    assert (
        await client.ask(b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    ).body == body
    chunks = b"".join(b"%x\r\n%b\r\n" % (n, body[:n]) for n in range(1, 1000))
    answer = await client.ask(
        b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    )
    assert answer.body == b"".join(body[:n] for n in range(1, 1000))


EXPECT = b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-Continue\r\nContent-Length: 4\r\n\r\n"


async def test_100_continue_is_sent_before_the_body(serve):
    client = await (await serve(echo)).client()
    await client.send(EXPECT)
    assert (await client.answer()).raw == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (await client.ask(b"body")).body == b"body"


async def test_100_continue_waits_for_the_answers_before_it(serve):
    port = await serve()
    client = await port.client()
    await client.send(GET + EXPECT)
    first = await port.next()
    first.respond(Response(200, TEXT, b"first"))
    assert (await client.answer()).body == b"first"
    assert (await client.answer()).status == 100
    await client.send(b"body")
    second = await port.next()
    assert second.request.body == b"body"


async def test_no_100_for_a_body_that_is_there_or_for_http_1_0(serve):
    port = await serve(echo)
    client = await port.client()
    assert (await client.ask(EXPECT + b"body")).body == b"body"
    received = port.listener.bytes_received
    await client.send(EXPECT.replace(b"1.1", b"1.0"))
    await port.until(lambda: port.listener.bytes_received == received + len(EXPECT))
    assert (await client.ask(b"body")).body == b"body"


UPGRADE = b"HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"


@for_each(
    ("request_bytes", "body"),
    [
        (b"GET /g " + UPGRADE + b"\r\n", b"/g"),
        (b"POST /g " + UPGRADE + b"Content-Length: 0\r\n\r\n", b"/g"),
        (b"POST / " + UPGRADE + b"Content-Length: 30\r\n\r\nGET /evil HTTP/1.1\r\nHost: e\r\n\r", None),
        (b"POST / " + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
    ],
)
@for_each("cut", [None, 60, 120])
async def test_an_upgrade_is_ignored_but_its_body_is_read(serve, request_bytes, body, cut):
    recorder = Recorder()
    client = await (await serve(recorder)).client()
    await client.ask(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    if cut is not None:
        await client.send(request_bytes[:cut])
        await asyncio.sleep(0)
        request_bytes = request_bytes[cut:]
    await client.send(request_bytes + GET)
    assert (await client.answer()).body == (body or b"GET /evil HTTP/1.1\r\nHost: e\r\n\r")
    assert (await client.answer()).body == b"/q"
    assert len(recorder.requests) == 3
    assert recorder.requests[1].target in (b"/g", b"/")
    assert recorder.requests[1].headers[b"upgrade"] == b"h2c"


HOST = b" HTTP/1.1\r\nHost: h\r\n"
POST = b"POST /" + HOST

REFUSED = {
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no method": (b"/ HTTP/1.1\r\n\r\n", 400),
    "lower-case method": (b"get /" + HOST + b"\r\n", 400),
    "unknown method": (b"PROPFIND /" + HOST + b"\r\n", 501),
    "connect": (b"CONNECT h:80" + HOST + b"\r\n", 501),
    "no path": (b"GET foo" + HOST + b"\r\n", 400),
    "other scheme": (b"GET ftp://h/" + HOST + b"\r\n", 400),
    "asterisk": (b"POST *" + HOST + b"\r\n", 400),
    "no host in the target": (b"GET http:///p" + HOST + b"\r\n", 400),
    "user in the target": (b"GET http://u@h/p" + HOST + b"\r\n", 400),
    "control character in the target": (b"GET /\x01" + HOST + b"\r\n", 400),
    "http 0.9": (b"GET /\r\n\r\n", 505),
    "http 2": (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
    "http 2, kept alive": (b"GET / HTTP/2.0\r\nHost: h\r\nConnection: keep-alive\r\n\r\n", 505),
    "http 2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "http 1.2": (b"GET / HTTP/1.2\r\nHost: h\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "host with a path": (b"GET / HTTP/1.1\r\nHost: h/a\r\n\r\n", 400),
    "host with a user": (b"GET / HTTP/1.1\r\nHost: u@h\r\n\r\n", 400),
    "host with a blank": (b"GET / HTTP/1.1\r\nHost: h i\r\n\r\n", 400),
    "host with a stray bracket": (b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", 400),
    "host with a word for its port": (b"GET / HTTP/1.1\r\nHost: h:http\r\n\r\n", 400),
    "host with bytes": (b"GET / HTTP/1.1\r\nHost: h\xc3\xa4\r\n\r\n", 400),
    "no host in the header beside one in the target": (b"GET http://h/ HTTP/1.1\r\nHost: h/\r\n\r\n", 400),
    "host of http 1.0": (b"GET / HTTP/1.0\r\nHost: h/\r\n\r\n", 400),
    "half an address in the target": (b"GET http://[::1/p" + HOST + b"\r\n", 400),
    "two hosts": (b"GET /" + HOST + b"Host: h\r\n\r\n", 400),
    "two authorizations": (b"GET /" + HOST + b"Authorization: a\r\nauthorization: a\r\n\r\n", 400),
    "two dates": (b"GET /" + HOST + b"X-Amz-Date: a\r\nX-Amz-Date: a\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na", 400),
    "length and coding": (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "coding and length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n", 400),
    "two codings": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "length in a trailer": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 1\r\n\r\n", 400),
    "other coding": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "last coding not chunked": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "coding in http 1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "length with a sign": (POST + b"Content-Length: +1\r\n\r\na", 400),
    "list of lengths": (POST + b"Content-Length: 1, 1\r\n\r\na", 400),
    "endless length": (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
    "length of many zeros": (POST + b"Content-Length: " + b"0" * 5_000 + b"1\r\n\r\na", 400),
    "bad chunk size": (POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
    "signed chunk size": (POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
    "endless chunk size": (POST + b"Transfer-Encoding: chunked\r\n\r\n11111111111111111\r\n", 400),
    "chunk longer than told": (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n", 400),
    "folded header": (b"GET /" + HOST + b"X: a\r\n b\r\n\r\n", 400),
    "nul in a header": (b"GET /" + HOST + b"X: a\0b\r\n\r\n", 400),
    "nul in a name": (b"GET /" + HOST + b"X\0: a\r\n\r\n", 400),
    "blank before the colon": (b"GET /" + HOST + b"X : a\r\n\r\n", 400),
    "bare carriage return": (b"GET /" + HOST + b"X: a\rb\r\n\r\n", 400),
    "bare line feed": (b"GET / HTTP/1.1\nHost: h\n\n", 400),
    "no colon": (b"GET /" + HOST + b"X\r\n\r\n", 400),
    "other expectation": (POST + b"Expect: 200-ok\r\nContent-Length: 1\r\n\r\n", 417),
}


@for_each("case", REFUSED)
async def test_what_http_forbids_is_refused_and_ends_the_connection(serve, case):
    request_bytes, status = REFUSED[case]
    recorder = Recorder()
    port = await serve(recorder)
    client = await port.client()
    answer = await client.ask(request_bytes)
    assert (answer.status, answer.headers["Connection"]) == (status, "close")
    assert await client.rest() == b""
    assert recorder.requests == []
    assert port.listener.refusals == 1


async def test_a_refusal_has_the_form_of_the_protocol(serve, caplog):
    refused: list[tuple[int, str, str]] = []

    def refuse(status: int, reason: str, request: Request | None, request_id: str) -> Response:
        assert request is None
        refused.append((status, reason, request_id))
        return Response(status, b"text/xml", b"<no/>", ((b"x-request-id", request_id.encode()),))

    caplog.set_level(logging.INFO, "veilmq.listener")
    client = await (await serve(echo, refuse=refuse)).client()
    answer = await client.ask(b"GET / HTTP/2.0\r\nHost: h\r\n\r\n")
    assert refused == [(505, "HTTP/2.0 is not spoken here", answer.headers["x-request-id"])]
    assert answer.body == b"<no/>"
    assert refused[0][2] in [record.request for record in caplog.records]


@for_each("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
async def test_who_sends_too_long_a_body_is_answered_by_its_headers(serve, framing):
    refused: list[tuple[str, Request | None]] = []

    def refuse(status: int, reason: str, request: Request | None, request_id: str) -> Response:
        refused.append((request_id, request))
        return Response(status, b"text/plain", b"no")

    client = await (await serve(echo, refuse=refuse, limits={"body_bytes_max": 99})).client()
    sent = b"POST /q?a HTTP/1.1\r\nHost: h\r\nX-Form: json\r\n%b\r\n\r\n64\r\n%b" % (framing, b"x" * 100)
    assert (await client.ask(sent)).status == 413
    ((request_id, request),) = refused
    assert request is not None
    assert (request.method, request.target, request.headers[b"x-form"]) == ("POST", b"/q?a", b"json")
    assert (request.body, request.request_id) == (b"", request_id)


@for_each(
    ("headers", "status"),
    [
        (b"Host: h\r\nHost: g\r\nX-Form: json\r\n", 400),
        (b"Host: h\r\nAuthorization: a\r\nAuthorization: a\r\nHost: h\r\nX-Form: json\r\n", 400),
        (b"X-Form: json\r\n", 400),
        (b"Host: h/\r\nX-Form: json\r\n", 400),
        (b"Host: h\r\nExpect: 200-ok\r\nX-Form: json\r\n", 417),
        (b"Host: h\r\n" + b"X: a\r\n" * 100 + b"X-Form: json\r\n", 431),
    ],
)
async def test_whose_headers_are_refused_is_answered_by_the_others(serve, headers, status):
    refused: list[Request | None] = []

    def refuse(status: int, reason: str, request: Request | None, request_id: str) -> Response:
        refused.append(request)
        return Response(status, b"text/plain", b"no")

    recorder = Recorder()
    port = await serve(recorder, refuse=refuse)
    client = await port.client()
    answer = await client.ask(b"POST http://f/q?a HTTP/1.1\r\n%bContent-Length: 1\r\n\r\na" % headers)
    assert (answer.status, await client.rest()) == (status, b"")
    (request,) = refused
    assert request is not None
    assert (request.method, request.target, request.headers[b"x-form"]) == ("POST", b"/q?a", b"json")
    assert (request.body, recorder.requests, port.listener.refusals) == (b"", [], 1)


async def test_a_refusal_comes_after_the_answers_before_it(serve):
    port = await serve()
    client = await port.client()
    await client.send(GET + GET + b"nonsense\r\n\r\n")
    for text in (b"one", b"two"):
        exchange = await port.next()
        assert port.arrived.empty()
        exchange.respond(Response(200, TEXT, text))
    assert (await client.answer()).body == b"one"
    assert (await client.answer()).body == b"two"
    assert (await client.answer()).status == 400
    assert await client.rest() == b""


async def test_a_refusal_reaches_a_client_that_is_still_sending(serve):
    port = await serve(echo, limits={"linger_s": 10.0})
    client = await port.client()
    client.writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000000\r\n\r\n" + bytes(4_000_000))
    answer = await client.answer()
    assert answer.status == 413
    await client.send(bytes(1_000_000))
    client.writer.close()
    assert port.listener.held_bytes == 0


async def test_an_exception_of_the_handler_is_caught_logged_and_answered(serve, caplog):
    def broken(request: Request, exchange: Exchange) -> None:
        raise LookupError("broken on purpose")

    def failure(request: Request) -> Response:
        return Response(500, b"text/xml", request.request_id.encode())

    def broken_failure(request: Request) -> Response:
        raise LookupError("broken too")

    port = await serve(broken, failure=failure)
    client = await port.client()
    answer = await client.ask(GET)
    assert (answer.status, answer.headers["Content-Type"]) == (500, "text/xml")
    assert answer.body.decode() in [record.request for record in caplog.records]
    assert "broken on purpose" in caplog.text
    assert (await client.ask(GET)).status == 500
    assert port.listener.failures == 2
    answer = await (await (await serve(broken, failure=broken_failure)).client()).ask(GET)
    assert (answer.status, answer.headers["Content-Type"]) == (500, "text/plain; charset=utf-8")


async def test_an_exception_after_the_answer_changes_nothing(serve):
    def late(request: Request, exchange: Exchange) -> None:
        echo(request, exchange)
        raise LookupError("broken on purpose")

    port = await serve(late)
    client = await port.client()
    await client.send(GET + GET)
    assert (await client.answer()).body == b"/q"
    assert (await client.answer()).body == b"/q"
    assert port.listener.failures == 2


async def test_a_broken_refuse_hook_leaves_a_plain_refusal(serve):
    def refuse(status: int, reason: str, request: Request | None, request_id: str) -> Response:
        raise LookupError("broken on purpose")

    client = await (await serve(echo, refuse=refuse)).client()
    answer = await client.ask(b"nonsense\r\n\r\n")
    assert (answer.status, answer.headers["Content-Type"]) == (400, "text/plain; charset=utf-8")


async def test_a_second_answer_is_a_bug(serve):
    port = await serve()
    client = await port.client()
    await client.send(GET)
    exchange = await port.next()
    assert exchange.request.peer == "127.0.0.1"
    assert exchange.respond(Response(200, TEXT, b"once"))
    with pytest.raises(AssertionError, match="answered already"):
        exchange.respond(Response(200, TEXT, b"twice"))
    assert (await client.answer()).body == b"once"


async def test_an_answer_is_one_write_without_delay(serve):
    port = await serve()
    client = await port.client()
    await client.send(GET)
    exchange = await port.next()
    connection = exchange._connection
    transport = connection._transport
    written: list[bytes] = []

    class Writes:
        def __getattr__(self, name: str) -> object:
            return getattr(transport, name)

        def write(self, data: bytes) -> None:
            written.append(data)
            transport.write(data)

    connection._transport = Writes()
    exchange.respond(Response(200, TEXT, b"x" * 1000, ((b"X-A", b"1"),)))
    answer = await client.answer()
    assert written == [answer.raw]
    assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_port_in_use_is_an_oserror(serve):
    port = await serve(echo)
    with pytest.raises(OSError, match="in use"):
        await listen(*port.listener.address, echo)


async def test_urls_name_the_addresses(serve):
    port = await serve(echo)
    host, number = port.listener.address
    assert port.listener.urls == (f"http://127.0.0.1:{number}",)
    assert host == "127.0.0.1"
    six = await serve(echo, host="::1", ssl=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    assert six.listener.urls == (f"https://[::1]:{six.listener.address[1]}",)


async def test_ipv6(serve):
    recorder = Recorder()
    port = await serve(recorder, host="::1")
    await (await port.client()).ask(GET)
    assert recorder.requests[0].peer == "::1"
