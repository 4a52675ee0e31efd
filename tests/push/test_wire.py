"""A push on the wire: its target, its headers, the connections it goes over, and whose certificates are trusted."""

import asyncio
import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from stage import Endpoint, Stage, read_request, until

from veilmq.model.settings.topic import ContentFormat
from veilmq.push.network import networks
from veilmq.testing.for_each import for_each


@for_each(
    ("given", "target"),
    [
        ("", "/notifications"),
        ("?x=1", "/notifications?x=1"),
        ("/a/../b/./c", "/b/c"),
        ("/../a/b/..", "/a/"),
        ("/a%41%2f?x=%2C%41&y=a+b", "/a%41%2f?x=%2C%41&y=a+b"),
        ("/a%2Fb//c;d", "/a%2Fb//c;d"),
        ("/{id}?to=<me>", "/%7Bid%7D?to=%3Cme%3E"),
        ('/a`b?q="x"', "/a%60b?q=%22x%22"),
    ],
)
def test_what_is_signed_is_the_target_on_the_wire(play: Any, given: str, target: str) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", f"http://127.0.0.1:{endpoint.port}{given}")
            await stage.publish()
            await until(lambda: len(endpoint.got) == 1)
            assert endpoint.got[0].target == target
            endpoint.got[0].verify(stage.signer.certificate)

    play(test)


def test_a_tag_beyond_ascii_is_a_header_in_utf8(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url, content_format=ContentFormat.SIMPLIFIED)
            await stage.publish(tag="紧急")
            await until(lambda: len(endpoint.got) == 1)
            assert endpoint.got[0].headers["x-mns-message-tag"] == "紧急"
            endpoint.got[0].verify(stage.signer.certificate)

    play(test)


class Closing(Endpoint):
    """Takes `requests_max` requests over a connection; at the next it closes, and has promised to keep it open."""

    requests_max = 1
    connections = 0
    pieces: tuple[bytes, ...] = ()
    """Of an answer; none: it is sent whole."""
    writer: asyncio.StreamWriter
    """Of the latest connection."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writer = writer
        taken = 0
        try:
            while request := await read_request(reader):
                taken += 1
                if taken > self.requests_max:
                    return
                self.got.append(request)
                for piece in self.pieces or (self.answer,):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)  # the sender reads it
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Closing() as endpoint:
            await stage.subscribe("s", endpoint.url)
            for number in range(5):
                await stage.publish(str(number))
                await until(lambda n=number: len(endpoint.got) > n)  # type: ignore[misc]
            await stage.drained("s")
            assert endpoint.connections == 5
            # What comes without a request is no answer to the next one, neither as a failure nor as a success.
            endpoint.requests_max = 2
            for number, unasked in enumerate((b"HTTP/1.1 408 X\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"), 5):
                endpoint.writer.write(unasked)
                await stage.publish(str(number))
                await until(lambda n=number: len(stage.pushes()) > n)  # type: ignore[misc]
                assert len(endpoint.got) == number + 1
            # An answer in pieces, after an interim one, is one answer, and its connection is kept.
            endpoint.requests_max, before = 9, endpoint.connections
            interim, head = b"HTTP/1.1 102 X\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
            endpoint.pieces = (interim, head, b"ok")
            for number in range(7, 10):
                await stage.publish(str(number))
                await until(lambda n=number: len(stage.pushes()) > n)  # type: ignore[misc]
            assert (len(endpoint.got), endpoint.connections) == (10, before)
            assert [each.detail.get("error") for each in stage.pushes()] == [None] * 10

    play(test)


def test_a_new_connection_that_is_closed_without_an_answer_is_one_failure(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Closing() as endpoint:
            endpoint.requests_max = 0
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            assert "disconnected" in stage.pushes()[0].detail["error"]
            assert endpoint.connections == 1

    play(test)


@for_each("addresses", [["127.0.0.2", "127.0.0.1"], ["::1", "127.0.0.1"]])
def test_the_next_address_of_a_name_is_tried_where_nobody_listens(play: Any, addresses: list[str]) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url.replace("127.0.0.1", "receiver.example"))
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            assert stage.pushes()[0].detail.get("error") is None
            assert endpoint.got[0].headers["host"] == f"receiver.example:{endpoint.port}"

    play(test, resolve=lambda host: addresses, allowed=networks(["127.0.0.0/8", "::1/128"]))


@for_each(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 16_000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 250 + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.0 200\nContent-Length: 2\n\nok",
    ],
    ids=["after a 100", "in chunks", "no gzip", "a long header", "many headers", "an old server"],
)
def test_of_an_answer_only_its_status_counts(play: Any, answer: bytes) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(answer) as endpoint:
            await stage.subscribe("s", endpoint.url)
            for count in (1, 2):
                await stage.publish()
                await until(lambda n=count: len(stage.pushes()) == n)  # type: ignore[misc]
            assert [(each.detail["status"], each.detail.get("error")) for each in stage.pushes()] == [(200, None)] * 2

    play(test)


@for_each("count", [16, 17])
def test_interim_answers_are_few(play: Any, count: int) -> None:
    """An endpoint that sent them without end took the loop and memory."""

    async def test(stage: Stage) -> None:
        async with Endpoint(
            b"HTTP/1.1 102 Processing\r\n\r\n" * count + b"HTTP/1.1 204 No Content\r\n\r\n"
        ) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            assert (stage.pushes()[0].detail.get("error") is None) == (count == 16)

    play(test)


@for_each("tag", ["one\nx-injected: two", "a\x7f", " a"])
def test_a_tag_that_no_header_can_bear_is_left_out(play: Any, tag: str) -> None:
    """Of an earlier release, or of another protocol."""

    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url, content_format=ContentFormat.SIMPLIFIED)
            await stage.publish(tag=tag)
            await until(lambda: len(stage.pushes()) == 1)
            assert stage.pushes()[0].detail.get("error") is None
            assert not {"x-mns-message-tag", "x-injected"} & endpoint.got[0].headers.keys()
            endpoint.got[0].verify(stage.signer.certificate)

    play(test)


@pytest.mark.parametrize(("name", "fits"), [("receiver.example", True), ("other.example", False)])
def test_a_certificate_must_be_for_the_name_and_not_for_the_address(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fits: bool
) -> None:
    certificate, key = _certificate(tmp_path, x509.DNSName("receiver.example"), x509.IPAddress(ip_address("127.0.0.1")))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    async def test(stage: Stage) -> None:
        async with Endpoint(tls=(certificate, key)) as endpoint:
            await stage.subscribe("s", endpoint.url.replace("127.0.0.1", name))
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            assert ("CertificateError" in str(stage.pushes()[0].detail.get("error"))) is not fits
            assert len(endpoint.got) == fits

    play(test, resolve=lambda host: ["127.0.0.1"])


def test_what_the_machine_trusts_is_trusted(play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = _certificate(tmp_path, x509.IPAddress(ip_address("127.0.0.1")))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # where OpenSSL finds the machine's store

    async def test(stage: Stage) -> None:
        async with Endpoint(tls=(certificate, key)) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            assert stage.pushes()[0].detail.get("error") is None

    play(test)


def _certificate(directory: Path, *names: x509.GeneralName) -> tuple[Path, Path]:
    """Files: a certificate for the names that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "An authority")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = directory / "certificate.pem", directory / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return files
