"""Answers that a client does not read are counted until it has read them or is gone, with TLS and without."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
from tests.server.conftest import Serve
from tests.server.test_listener_tls import GET, files

from veilmq.protocols import Request, Response
from veilmq.server.clock import wall
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.tls import Certificate
from veilmq.testing.for_each import for_each

__all__ = ["files"]

SIZE = 12 * 1024 * 1024
"""More than the kernel's buffers take."""


def answer(request: Request, exchange: Exchange) -> None:
    exchange.account = "a"
    exchange.respond(Response(200, b"text/plain", b"x" * SIZE if request.path == b"/q" else b"small"))


async def connected(
    port: tuple[str, int], certificate: Path | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, port)
    if certificate is None:
        return await asyncio.open_connection(sock=raw, limit=4096)
    context = ssl.create_default_context(cafile=str(certificate))
    return await asyncio.open_connection(sock=raw, ssl=context, server_hostname="localhost", limit=4096)


@for_each("secure", [False, True])
async def test_an_unread_answer_counts_until_it_is_read(serve: Serve, files: tuple[Path, Path], secure: bool) -> None:
    context = Certificate(*files, wall()).context() if secure else None
    port = await serve(answer, ssl=context)
    unread = port.listener.unread
    reader, writer = await connected(port.listener.address, files[0] if secure else None)
    writer.write(GET)
    await port.until(lambda: unread.bytes)
    assert SIZE < unread.bytes < SIZE + 1_000
    writer.write(GET.replace(b"/q", b"/small"))  # it waits until the first one is read
    bodies: list[bytes] = []
    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(size)
        bodies.append(body)
    assert bodies == [b"x" * SIZE, b"small"]
    assert unread.bytes == 0
    writer.transport.abort()


@for_each("secure", [False, True])
@for_each("closing", [b"", b"Connection: close\r\n"])
async def test_an_unread_answer_counts_until_its_client_is_gone(
    serve: Serve, files: tuple[Path, Path], secure: bool, closing: bytes
) -> None:
    context = Certificate(*files, wall()).context() if secure else None
    port = await serve(answer, ssl=context)
    _, writer = await connected(port.listener.address, files[0] if secure else None)
    writer.write(GET.replace(b"\r\n\r\n", b"\r\n" + closing + b"\r\n"))
    await port.until(lambda: port.listener.unread.bytes)
    writer.transport.abort()
    await port.left()
    assert port.listener.unread.bytes == 0
    assert not port.listener.unread.near


async def test_the_end_of_a_last_answer_comes_with_tls(serve: Serve, files: tuple[Path, Path]) -> None:
    """However long a client takes that keeps the pace."""
    brief = {"linger_s": 0.001, "tick_s": 0.001}
    port = await serve(answer, ssl=Certificate(*files, wall()).context(), limits=brief)
    reader, writer = await connected(port.listener.address, files[0])
    writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    received = await reader.read(-1)
    assert received.endswith(b"\r\n\r\n" + b"x" * SIZE)
    writer.transport.abort()


async def test_a_deadline_may_pass_while_a_connection_is_being_lost(serve: Serve, files: tuple[Path, Path]) -> None:
    """With TLS the socket is gone one turn of the loop before `connection_lost` is called."""
    every_turn = {"linger_s": 1e-9, "tick_s": 1e-9}
    port = await serve(answer, ssl=Certificate(*files, wall()).context(), limits=every_turn)
    for _ in range(5):
        _, writer = await connected(port.listener.address, files[0])
        writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        await port.until(lambda: port.listener.unread.bytes)
        writer.transport.abort()
        await port.left()


async def test_a_client_may_close_its_side_while_the_server_closes(serve: Serve, files: tuple[Path, Path]) -> None:
    brief = {"linger_s": 0.02, "answer_deadline_s": 0.2, "tick_s": 0.01, "rate_bytes_per_s_min": SIZE}
    port = await serve(answer, ssl=Certificate(*files, wall()).context(), limits=brief)
    context = ssl.create_default_context(cafile=str(files[0]))

    def ask_and_close() -> ssl.SSLSocket:
        client = context.wrap_socket(socket.create_connection(port.listener.address), server_hostname="localhost")
        client.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        client.setblocking(False)
        with pytest.raises(ssl.SSLError):  # it has said that it ends, and is not told the same yet
            client.unwrap()
        return client

    client = await asyncio.to_thread(ask_and_close)
    await port.left()
    assert port.listener.unread.bytes == 0
    client.close()


async def test_a_client_that_does_not_close_its_side_is_dropped(serve: Serve, files: tuple[Path, Path]) -> None:
    limits = {"linger_s": 0.05, "tick_s": 0.01}
    port = await serve(answer, ssl=Certificate(*files, wall()).context(), limits=limits)
    context = ssl.create_default_context(cafile=str(files[0]))

    def read_all() -> tuple[ssl.SSLSocket, int]:
        client = context.wrap_socket(socket.create_connection(port.listener.address), server_hostname="localhost")
        client.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        return client, sum(map(len, iter(lambda: client.recv(65_536), b"")))

    client, size = await asyncio.to_thread(read_all)
    assert size > SIZE
    await port.left()
    client.close()
