"""A data port with TLS."""

import asyncio
import gc
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.certificate import CERTIFICATE, PRIVATE_KEY

from veilmq.protocols import Request, Response
from veilmq.server.clock import wall
from veilmq.server.http.connection import OVERFLOW_MAX
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.handshakes import network_of
from veilmq.server.http.tls import Certificate
from veilmq.testing.for_each import for_each

KEY_WITH_PASSPHRASE = """\
-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-128-CBC,D772616CE77F92C71582654596D11F5A

hBT3xbF3MylQl/QzO4H4VD6AR1mgwgKuGgoIYfa0R1ErDiWy01VDwGP0D92kPuVR
7Posh3cxcUcF0qh5Lo6rRl1x/wZFdSzP0znlmWiOnwNTBBf3u6tllYTDYF3hGSyY
xR8oSC8Rxw01M/VGJPO4x7vmUOa/AUHZJEJfxYqgi5g=
-----END EC PRIVATE KEY-----
"""

GET = b"GET /q HTTP/1.1\r\nHost: h\r\n\r\n"


def tell(request: Request, exchange: Exchange) -> None:
    exchange.keep_place()
    exchange.respond(Response(200, b"text/plain", b"secure" if request.secure else b"plain"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    return certificate, key


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    return Certificate(certificate, key, wall()).context()


async def secure_streams(port, version: ssl.TLSVersion):
    context = ssl.create_default_context(cadata=CERTIFICATE)
    context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    host, number = port.listener.address
    return await asyncio.open_connection(host, number, ssl=context)


@for_each("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_requests_over_tls(serve, files, version):
    port = await serve(tell, ssl=server_context(*files))
    assert port.listener.urls[0].startswith("https://127.0.0.1:")
    reader, writer = await secure_streams(port, version)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    for _ in range(2):
        writer.write(GET)
        async with asyncio.timeout(20):
            assert (await reader.readuntil(b"\r\n\r\nsecure")).startswith(b"HTTP/1.1 200 OK")
    writer.write(b"nonsense\r\n\r\n")
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
    writer.close()
    await port.left()


@for_each("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_takes_its_session_up_again(serve, files, version):
    """Every port hands over to a context that it does not own: that must not cost a full handshake each time."""
    port = await serve(tell, ssl=server_context(*files))

    def ask(session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession]:
        context.maximum_version = version
        with socket.create_connection(port.listener.address) as plain:
            with context.wrap_socket(plain, server_hostname="localhost", session=session) as secure:
                secure.sendall(GET)
                while not secure.recv(4_096).endswith(b"secure"):
                    pass
                return bool(secure.session_reused), secure.session

    context = ssl.create_default_context(cadata=CERTIFICATE)
    reused, session = await asyncio.to_thread(ask, None)
    assert not reused
    assert (await asyncio.to_thread(ask, session))[0]


async def test_a_parked_tls_client_that_hangs_up_is_told(serve, files):
    port = await serve(ssl=server_context(*files))
    _, writer = await secure_streams(port, ssl.TLSVersion.TLSv1_3)
    writer.write(GET)
    exchange = await port.next()
    gone = asyncio.Event()
    exchange.on_gone = gone.set
    writer.close()
    async with asyncio.timeout(20):
        await gone.wait()
    assert not exchange.respond(Response(200, None, b""))
    await port.left()


async def test_tls_1_1_is_refused(serve, files):
    context = server_context(*files)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    port = await serve(tell, ssl=context)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    client.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        client.maximum_version = ssl.TLSVersion.TLSv1_1
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection(*port.listener.address, ssl=client)


async def test_plain_text_to_a_tls_port_is_not_answered(serve, files):
    port = await serve(tell, ssl=server_context(*files))
    client = await port.client()
    await client.send(GET)
    assert b"HTTP" not in await client.rest()
    assert port.listener.requests == 0


async def test_a_handshake_that_never_comes_is_dropped(serve, files):
    port = await serve(tell, ssl=server_context(*files), limits={"header_deadline_s": 0.05})
    client = await port.client()
    assert await client.rest() == b""


async def test_what_comes_with_the_handshake_is_read(serve, files):
    """The ClientHello with the connection, and with the end of the handshake a request and the end of the input."""
    port = await serve(tell, ssl=server_context(*files))
    theirs, ours = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=CERTIFICATE).wrap_bio(theirs, ours, server_hostname="localhost")
    loop = asyncio.get_running_loop()

    async def until_read(step: Callable[[], Any]) -> Any:
        async with asyncio.timeout(20):
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    await loop.sock_sendall(plain, ours.read())
                    theirs.write(await loop.sock_recv(plain, 65_536))

    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    with socket.create_connection(port.listener.address) as plain:
        plain.sendall(ours.read())  # the loop has not accepted it yet
        plain.setblocking(False)
        await until_read(client.do_handshake)
        client.write(GET)
        with pytest.raises(ssl.SSLWantReadError):
            client.unwrap()
        assert (await until_read(client.read)).endswith(b"secure")
    await port.left()


async def test_strangers_do_not_drop_the_handshake_of_another_client(serve, files, caplog):
    """One address has only its own oldest ones dropped; of many addresses the oldest goes."""
    caplog.set_level("INFO", "veilmq.tls")
    limits = {"connections_max": 1, "header_deadline_s": 1_000, "linger_s": 1_000}
    port = await serve(tell, ssl=server_context(*files), limits=limits)
    handshakes = port.listener.handshakes

    async def connect(host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*port.listener.address, local_addr=(host, 0))

    reader, writer = await connect("127.0.0.2")
    await port.until(lambda: len(handshakes) == 1)
    silent = [await connect("127.0.0.1") for _ in range(OVERFLOW_MAX + 20)]
    async with asyncio.timeout(20):
        for each, _ in silent[:20]:
            assert not await rest(each)
        await writer.start_tls(ssl.create_default_context(cadata=CERTIFICATE), server_hostname="localhost")
        writer.write(GET)
        assert (await reader.readuntil(b"\r\n\r\nsecure")).startswith(b"HTTP/1.1 200 OK")
    assert "its TLS handshake was the oldest of too many" in caplog.text
    await port.until(lambda: len(handshakes) == OVERFLOW_MAX)
    many = [await connect(f"127.0.1.{last}") for last in range(OVERFLOW_MAX)]
    async with asyncio.timeout(20):
        for each, _ in silent[20:]:
            assert not await rest(each)
    others = []
    while len(others) < OVERFLOW_MAX:
        others.append(await secure_streams(port, ssl.TLSVersion.TLSv1_3))
        await port.until(lambda: len(port.listener.connections) > len(others))
    others.append(await connect("127.0.0.1"))
    assert not await rest(others[-1][0])
    assert "dropped the connection of 127.0.0.1: too many connections" in caplog.text
    for _, each in [(reader, writer), *silent, *many, *others]:
        each.transport.abort()


def test_a_network_is_what_one_client_has():
    one = network_of("2001:db8::1")
    assert one == network_of("2001:db8::ffff:2%eth0")
    others = "2001:db8:0:1::1", "::ffff:10.0.0.1", "::ffff:10.0.0.2", "10.0.0.1", "10.0.0.2"
    assert len({one, *map(network_of, others)}) == 6


async def test_a_closed_port_drops_handshakes_at_once(serve, files):
    port = await serve(tell, ssl=server_context(*files), limits={"header_deadline_s": 60})
    reader, writer = await asyncio.open_connection(*port.listener.address)
    await port.until(lambda: len(port.listener.handshakes) == 1)
    await serve.close()
    assert not port.listener.handshakes
    serve.ports.clear()
    assert not await rest(reader)
    writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes or resets the connection."""
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionError:
        return b""


async def test_no_connection_stays_counted(serve, files):
    port = await serve(tell, ssl=server_context(*files), limits={"header_deadline_s": 1, "linger_s": 0.05})
    gc.disable()
    try:
        for beginning in (b"", GET, GET + GET[:9], b"nonsense\r\n\r\n", GET[:9]):
            for abrupt in (False, True):
                reader, writer = await secure_streams(port, ssl.TLSVersion.TLSv1_3)
                writer.write(beginning)
                if beginning.startswith(GET):
                    await reader.readuntil(b"secure")
                if abrupt:
                    writer.transport.abort()
                writer.close()
        for sent in (b"", GET, b"\x16\x03\x01\x02\x00\x01"):
            client = await port.client()
            await client.send(sent)
            client.writer.close()
        await port.until(lambda: not port.listener.handshakes and not port.listener.connections)
    finally:
        gc.enable()


def test_bad_files_are_clear_errors(files, tmp_path):
    certificate, key = files
    with pytest.raises(OSError, match=r"No such file.*missing"):
        server_context(certificate, tmp_path / "missing")
    with pytest.raises(ssl.SSLError):
        server_context(key, key)
    certificate.write_text(CERTIFICATE[:300])
    with pytest.raises(ssl.SSLError, match=f"{certificate} is no whole PEM file with a certificate"):
        server_context(certificate, key)
    certificate.write_text(CERTIFICATE)
    key.write_text(KEY_WITH_PASSPHRASE)
    with pytest.raises(ssl.SSLError, match="passphrase"):
        server_context(certificate, key)


async def test_the_log_says_what_a_client_speaks_instead_of_http_1_1(serve, caplog):
    """OpenSSL's ClientHello, and what curl sends with --http2-prior-knowledge. Both clients tell their users little."""
    caplog.set_level("INFO", "veilmq.listener")
    hello = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    settings = bytes.fromhex("00001204000000000000030000006400040001000000020000000000000408000000000000ff0001")
    port = await serve(tell)
    for sent, said in (
        (hello.read(), "400 the client speaks TLS and this port plain HTTP: its URL needs http://"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings, "400 the client speaks HTTP/2 and this port only HTTP/1.1"),
    ):
        client = await port.client()
        await client.send(sent)
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")
        assert said in caplog.messages[-1]
    client = await port.client()
    await client.send(GET.replace(b"GET", b"POST")[:-2] + b"Transfer-Encoding: chunked\r\n\r\n")
    await client.send(b"\x16\x03 is no size of a chunk\r\n")
    await client.rest()
    assert "400 malformed request: " in caplog.messages[-1]
