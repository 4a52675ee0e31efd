"""A data port with TLS."""

import asyncio
import gc
import socket
import ssl
from pathlib import Path

import pytest
from tests.support.certificate import CERTIFICATE, PRIVATE_KEY

from veilmq.protocols import Request, Response
from veilmq.server.clock import wall
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.tls import Certificate

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
    exchange.respond(Response(200, b"text/plain", b"secure" if request.secure else b"plain"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    return certificate, key


def server_context(certificate: Path, key: Path, sessions_max: int | None = None) -> ssl.SSLContext:
    return Certificate(certificate, key, wall()).context(sessions_max)


async def secure_streams(port, version: ssl.TLSVersion):
    context = ssl.create_default_context(cadata=CERTIFICATE)
    context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    host, number = port.listener.address
    return await asyncio.open_connection(host, number, ssl=context)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
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


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
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


async def none_left(context):
    """Return when no session is counted; asyncio's own loop leaves some of them to the collector."""
    async with asyncio.timeout(20):
        while context.sessions:
            await asyncio.sleep(0.005)
            if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
                gc.collect()


# asyncio's own loop closes what it drops so early by letting go of it.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
async def test_connections_in_their_handshake_are_counted(serve, files):
    context = server_context(*files, sessions_max=3)
    port = await serve(tell, ssl=context)
    silent = [await port.client() for _ in range(3)]
    assert await (await port.client()).rest() == b""
    assert port.listener.connections == set()
    for client in silent:
        await client.send(GET)  # no handshake, so its session ends
        assert b"HTTP" not in await client.rest()
    await none_left(context)
    _, writer = await secure_streams(port, ssl.TLSVersion.TLSv1_3)
    writer.close()
    await port.left()


async def test_no_connection_stays_counted(serve, files):
    context = server_context(*files, sessions_max=1_000)
    port = await serve(tell, ssl=context, limits={"header_deadline_s": 1, "linger_s": 0.05})  # of a handshake too
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
        await none_left(context)
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
