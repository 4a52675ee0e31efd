"""Passes requests for the admin port on to the owner, over a connection to its peer port.

Strategy: the owner answers for console and API, whichever server an operator asks: it has the newest state, and checks
who may do what. Such a connection begins with the handshake of the peer port, and its hello says what it is for; from
then on it carries one HTTP request and its answer, both streamed. Until a request has gone out it waits for an owner.
After that it is sent again only if it changes nothing, or has an Idempotency-Key, under which the owner does it once.

The owner sees the client's address and scheme in a header of ours, which is dropped from what clients send.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from veilmq.cluster.peer.frames import LENGTH_BYTES
from veilmq.cluster.peer.handshake import HELLO_BYTES_MAX, Handshake, Refusal
from veilmq.cluster.tls import in_words

CLIENT_HEADER: Final = b"x-veilmq-client"
"""Address and scheme of the client, from one server to another."""
KNOWN_HEADER: Final = b"x-veilmq-known"
"""Of an answer to another server: the client has shown a valid token, key or session."""
PASSED_ON: Final = "veilmq.passed_on"
"""In the scope of a request that another server has passed on."""
INPUT_ENDED: Final = "veilmq.input_ended"
"""In the scope: an event that is set when the client sends nothing more, though it may still read its answer."""
KEEP_PLACE: Final = "veilmq.keep_place"
"""In the scope: to be called if the request has a valid token, key or session. When the port is full, a connection that
has had none is dropped for a newcomer."""
HANDSHAKE_SECONDS: Final = 5.0
OWNER_SECONDS: Final = 10.0
"""How long a request waits for an owner."""
AGAIN_SECONDS: Final = 0.1
_READ_BYTES: Final = 64 * 1024
_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", CLIENT_HEADER}
)  # fmt: skip
"""Headers of one connection (RFC 9110, 7.6.1), and ours."""
_READS: Final = frozenset({"GET", "HEAD"})
OWN_PATHS: Final = frozenset({"/health/live", "/health/ready", "/metrics"})
"""Paths that each server answers itself, whichever server owns the queues."""
_KEY: Final = b"idempotency-key"
_LOST: Final = "the owner went away amid the request: look whether it was carried out, then try again"
_KEPT_BYTES: Final = 1 << 20
"""A longer body is not kept to be sent again."""


class Unreached(Exception):
    """The owner cannot be reached, and has been sent nothing: why, in a sentence."""


class Broken(Exception):
    """The connection to the owner ended before its answer did."""


class Owner(NamedTuple):
    """Streams to the owner's admin port."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


def keep_alive(connected: Any) -> None:
    """Notice within a minute that the peer's machine is gone, however long an answer takes. connected: a socket."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def connect(address: tuple[str, int], handshake: Handshake, context: ssl.SSLContext | None) -> Owner:
    """Connect to a peer port, for an admin request. Raises Unreached."""
    writer = None
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            keep_alive(writer.get_extra_info("socket"))  # an answer may take long, and the owner's machine be gone
            await _shake(Owner(reader, writer), handshake)
            return Owner(reader, writer)
    except (OSError, EOFError, TimeoutError, Refusal) as error:
        if writer is not None:
            writer.close()
        words = in_words(error) or f"nobody answered within {HANDSHAKE_SECONDS:g} s"
        raise Unreached(f"the owner cannot be reached: {words}") from error


async def _shake(owner: Owner, handshake: Handshake) -> None:
    reply: bytes | None = handshake.hello
    while not handshake.done:
        if reply is not None:
            owner.writer.write(len(reply).to_bytes(LENGTH_BYTES, "big") + reply)
        size = int.from_bytes(await owner.reader.readexactly(LENGTH_BYTES), "big")
        if size > HELLO_BYTES_MAX:
            raise Refusal("no peer", "it does not speak the peer protocol: check --advertise")
        reply = handshake.receive(await owner.reader.readexactly(size))


class _Answer:
    """What httptools calls."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.begun = self.complete = self.is_known = False
        self.parts: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == KNOWN_HEADER:
            self.is_known = True
        elif name.lower() not in _HOP:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)

    def on_message_complete(self) -> None:
        self.complete = True


def passing_on(connect: Callable[[], Awaitable[Owner]], here: Callable[[], ASGIApp | None]) -> ASGIApp:
    """An application that asks the owner. connect: raises Unreached. here: the own one, if this server owns."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_last = False
        """Whether it must not be sent again: the answer has begun, or the client is gone."""

        async def sending(message: Message) -> None:
            nonlocal is_last
            if is_unknown and message["type"] == "http.response.start" and message["status"] == 503:
                raise Broken  # the server that refuses now does not know what became of the first try
            is_last = True
            await send(message)

        async def receiving() -> Message:
            nonlocal is_last
            message = await receive()
            is_last = is_last or message["type"] == "http.disconnect"
            return message

        loop = asyncio.get_running_loop()
        end = loop.time() + OWNER_SECONDS
        read: list[Message] = []
        reads = scope["method"] in _READS
        has_key = any(name == _KEY for name, _ in scope["headers"])
        is_unknown = False
        """Whether an owner may have carried it out, whose answer was lost."""
        while (own := here()) is None:
            try:
                owner = await connect()
            except Unreached as error:
                if loop.time() >= end:
                    answer = ("StoreUnknown", _LOST) if is_unknown else ("NotOwner", str(error))
                    await _refuse(send, *answer)
                    return
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            try:
                await _exchange(owner, scope, _from_the_first(read, receiving) if has_key else receiving, sending)
                return
            except (Broken, OSError) as error:
                if is_last:
                    raise asyncio.CancelledError from error  # a client that is there sees an answer that is cut off
                repeats = reads or (has_key and sum(len(each.get("body", b"")) for each in read) <= _KEPT_BYTES)
                if not repeats or loop.time() >= end:
                    await _refuse(send, "StoreUnknown", _LOST)
                    return
                is_unknown = not reads
                await asyncio.sleep(AGAIN_SECONDS)
            finally:
                owner.writer.close()
        if is_unknown:  # nor does this server know of the time before, if it refuses
            send = _refused_instead(send, lambda status: status == 503, "StoreUnknown", _LOST)
        await own(scope, _from_the_first(read, receive), send)

    return app


def while_owner(holds: Callable[[], bool], app: ASGIApp) -> ASGIApp:
    """The same application at the owner: what a request has only read is answered if the lease still runs afterwards.
    What was committed needs no lease."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in _READS and scope["path"] not in OWN_PATHS:
            send = _refused_instead(send, lambda _: not holds(), "NotOwner", "this server's lease has ended: try again")
        await app(scope, receive, send)

    return answered


def _refused_instead(send: Send, replaces: Callable[[int], bool], error: str, words: str) -> Send:
    """Sends a refusal in place of an answer whose status `replaces` says so of."""
    is_replaced = False

    async def sending(message: Message) -> None:
        nonlocal is_replaced
        if message["type"] == "http.response.start" and replaces(message["status"]):
            is_replaced = True
            await _refuse(send, error, words)
        if not is_replaced:
            await send(message)

    return sending


def _from_the_first(read: list[Message], receive: Receive) -> Receive:
    """Returns the messages that were read before, then receives further ones and adds them to `read`."""
    before = iter(list(read))

    async def receiving() -> Message:
        message = next(before, None)
        if message is None:
            message = await receive()
            read.append(message)
        return message

    return receiving


async def _exchange(owner: Owner, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the request, and its answer back. Raises Broken, OSError."""
    owner.writer.write(_head(scope))
    asking = asyncio.ensure_future(_send_body(owner.writer, scope, receive))
    ending = asyncio.ensure_future(_end_input(owner.writer, scope))
    try:
        await _answer(owner.reader, scope, send)
    finally:
        asking.cancel()
        ending.cancel()
        await asyncio.gather(asking, ending, return_exceptions=True)


def _head(scope: Scope) -> bytes:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%s %s HTTP/1.1" % (scope["method"].encode("ascii"), target), b"connection: close"]
    lines += [b"%s: %s" % (name, value) for name, value in scope["headers"] if name not in _HOP]
    if _is_chunked(scope):
        lines.append(b"transfer-encoding: chunked")
    host = scope["client"][0] if scope.get("client") else "unknown"
    lines.append(b"%s: %s %s" % (CLIENT_HEADER, host.encode("ascii", "replace"), scope["scheme"].encode("ascii")))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _is_chunked(scope: Scope) -> bool:
    return any(name == b"transfer-encoding" for name, _ in scope["headers"])


async def _send_body(writer: asyncio.StreamWriter, scope: Scope, receive: Receive) -> None:
    """Send the body, then wait until the client is gone, and hang up, too."""
    chunked = _is_chunked(scope)
    with suppress(OSError):
        while (message := await receive())["type"] == "http.request":
            part = message.get("body", b"")
            if chunked:
                part = b"%x\r\n%s\r\n" % (len(part), part) if part else b""
                part += b"" if message.get("more_body") else b"0\r\n\r\n"
            writer.write(part)
            await writer.drain()
        writer.close()


async def _end_input(writer: asyncio.StreamWriter, scope: Scope) -> None:
    """The client has ended its input: a receive that waits shall be answered."""
    ended: asyncio.Event | None = scope.get(INPUT_ENDED)
    if ended is not None:
        await ended.wait()
        if writer.can_write_eof():
            writer.write_eof()


async def _answer(reader: asyncio.StreamReader, scope: Scope, send: Send) -> None:
    found = _Answer()
    parser = httptools.HttpResponseParser(found)
    started = False
    while not found.complete:
        data = await reader.read(_READ_BYTES)
        if not data:
            raise Broken
        parser.feed_data(data)
        if found.begun and not started:
            started = True
            if found.is_known:
                scope[KEEP_PLACE]()
            await send({"type": "http.response.start", "status": parser.get_status_code(), "headers": found.headers})
        if scope["method"] == "HEAD" and started:
            break  # it has no body, whatever its headers say
        for part in found.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        found.parts.clear()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _refuse(send: Send, error: str, message: str) -> None:
    """Answer 503: the request was not carried out. A StoreUnknown is a 500: it may have been."""
    body = json.dumps({"error": error, "field": None, "message": message, "data": {}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    status = 500 if error == "StoreUnknown" else 503
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
