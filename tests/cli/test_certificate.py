"""A certificate is renewed by SIGHUP: every port of a running server presents it, and a bad pair changes nothing."""

import asyncio
import contextlib
import datetime
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from veilmq import connect
from veilmq.client.errors import TransportError
from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US, Instant
from veilmq.server.clock import wall
from veilmq.server.http.tls import Certificate, log_end
from veilmq.testing.local import ServerProcess

WAIT_SECONDS = 20

Command = Callable[..., subprocess.CompletedProcess[str]]


HOUR = datetime.timedelta(hours=1)


def make_pair(name: str, left: datetime.timedelta = HOUR) -> tuple[bytes, bytes]:
    """A certificate of that name that signs itself and ends when that is over, and its key; both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = (
        builder.serial_number(x509.random_serial_number()).not_valid_before(now - HOUR).not_valid_after(now + left)
    )
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.PKCS8
    return certificate, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def name_of(found: x509.Certificate) -> str:
    (name,) = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(name.value)


def presented(url: str) -> str:
    """The name in the certificate that the port presents now."""
    where = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection((where.hostname or "", where.port or 0), timeout=WAIT_SECONDS) as plain,
        context.wrap_socket(plain) as secure,
    ):
        return name_of(x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b""))


def metric(admin: str) -> float:
    """Until when the certificate is valid that new connections get, as /metrics says."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with urllib.request.urlopen(f"{admin}/metrics", timeout=WAIT_SECONDS, context=context) as answer:
        lines = answer.read().decode().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith("veilmq_tls_certificate_not_after_timestamp_"))
    return float(value)


def end_of(certificate: bytes) -> float:
    """The same, as the certificate says."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def reloaded(server: ServerProcess, line: str) -> None:
    """SIGHUP, and wait until the log has one more such line."""
    before = server.log.read_text().count(line)
    os.kill(server.process.pid, signal.SIGHUP)
    until = time.monotonic() + WAIT_SECONDS
    while server.log.read_text().count(line) == before:
        assert time.monotonic() < until, server.log.read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_renewed_certificate_needs_no_restart(tmp_path: Path) -> None:
    files = certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    first, second = make_pair("first"), make_pair("second", 2 * HOUR)
    for path, text in zip(files, first, strict=True):
        path.write_bytes(text)
    server = ServerProcess(tmp_path, "--tls-cert", str(certificate), "--tls-key", str(key)).start()
    ports = (server.sqs, server.azure, server.mns, server.admin)
    try:
        assert [presented(port) for port in ports] == ["first"] * 4
        assert metric(server.admin) == end_of(first[0])
        certificate.write_bytes(second[0])
        reloaded(server, "the certificate stays as it was")
        assert [presented(port) for port in ports] == ["first"] * 4, "a certificate without its key"
        key.write_text("nonsense")
        reloaded(server, "the certificate stays as it was")
        key.unlink()
        reloaded(server, "the certificate stays as it was")
        assert [presented(port) for port in ports] == ["first"] * 4
        assert metric(server.admin) == end_of(first[0])
        key.write_bytes(second[1])
        reloaded(server, "new connections get that certificate")
        assert "ends soon" in server.log.read_text()
        assert [presented(port) for port in ports] == ["second"] * 4
        assert metric(server.admin) == end_of(second[0])
    finally:
        assert server.stop() == 0


@pytest.mark.slow
def test_credentials_that_hang_keep_neither_the_certificate_nor_the_end(tmp_path: Path) -> None:
    certificate, key, credentials = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "credentials.toml"
    for path, text in zip((certificate, key), make_pair("mq"), strict=True):
        path.write_bytes(text)
    credentials.write_text('[[account]]\nid = "111111111111"\n')
    credentials.chmod(0o600)
    tls = "--tls-cert", str(certificate), "--tls-key", str(key)
    server = ServerProcess(tmp_path, *tls, "--credentials", str(credentials)).start()
    try:
        credentials.unlink()
        os.mkfifo(credentials, 0o600)  # whoever opens it waits until somebody writes: as on a mount that hangs
        reloaded(server, "new connections get that certificate")
    finally:
        assert server.stop() == 0


def test_a_certificate_that_hangs_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = certificate, _ = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path, text in zip(files, make_pair("first"), strict=True):
        path.write_bytes(text)
    presenting = Certificate(*files, wall())
    port = presenting.context()
    certificate.unlink()
    os.mkfifo(certificate)

    async def renew() -> None:
        await presenting.renew(wall(), deadline_s=0.01)
        assert f"{certificate} hangs" in caplog.text
        assert name_of(shaken(port)) == "first"
        hung = certificate.rename(tmp_path / "hung")
        for path, text in zip(files, make_pair("second"), strict=True):
            path.write_bytes(text)
        await presenting.renew(wall())
        os.close(os.open(hung, os.O_RDWR | os.O_NONBLOCK))  # lets the thread end

    asyncio.run(renew())
    assert name_of(shaken(port)) == "second"


def shaken(server: ssl.SSLContext) -> x509.Certificate:
    """The certificate that a port with that context presents now, without a port."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours, theirs = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for end in (ours, theirs, ours):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return x509.load_der_x509_certificate(ours.getpeercert(binary_form=True) or b"")


def test_all_ports_present_the_same_whenever_the_files_are_swapped(tmp_path: Path) -> None:
    pairs = [make_pair("odd"), make_pair("even", 2 * HOUR)]
    files = tmp_path / "cert.pem", tmp_path / "key.pem"

    def swap(pair: tuple[bytes, bytes]) -> None:
        for path, text in zip(files, pair, strict=True):
            path.with_suffix(".new").write_bytes(text)
            path.with_suffix(".new").rename(path)

    def swap_on() -> None:
        for pair in cycle(pairs):
            if ended.is_set():
                return
            swap(pair)

    swap(pairs[0])
    certificate = Certificate(*files, wall())
    ports = [certificate.context() for _ in range(4)]
    ended = threading.Event()
    swapping = threading.Thread(target=swap_on)
    swapping.start()
    try:
        for _ in range(100):
            asyncio.run(certificate.renew(wall()))
            assert len({name_of(shaken(port)) for port in ports}) == 1
    finally:
        ended.set()
        swapping.join()
    for pair, name in zip(pairs, ("odd", "even"), strict=True):
        swap(pair)
        asyncio.run(certificate.renew(wall()))
        assert {name_of(shaken(port)) for port in ports} == {name}
        assert certificate.ends == end_of(pair[0]) * SECOND_US


@pytest.fixture
def named(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose certificate has the name that other machines use, which nobody has vouched for."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path, text in zip((certificate, key), make_pair("mq.example.com"), strict=True):
        path.write_bytes(text)
    server = ServerProcess(tmp_path, "--tls-cert", str(certificate), "--tls-key", str(key)).start()
    try:
        yield server
    finally:
        assert server.stop() == 0


def test_the_commands_find_such_a_server_through_its_directory(
    named: ServerProcess, veilmq: Command, tmp_path: Path
) -> None:
    """On its machine nobody reaches it by the name in the certificate: its lock vouches for the address."""
    data = str(named.data)
    assert veilmq("queues", "list", "--data", data).returncode == 0
    assert veilmq("backup", str(tmp_path / "copy"), "--data", data).returncode == 0


def test_an_address_that_somebody_names_must_show_a_good_certificate(
    named: ServerProcess, veilmq: Command, tmp_path: Path
) -> None:
    token = str(named.data / "admin-token")
    done = veilmq("queues", "list", "--admin", named.admin, "--token-file", token)
    assert done.returncode == 4
    assert "SSL_CERT_FILE" in done.stderr
    done = veilmq(
        "queues", "list", "--admin", named.admin, "--token-file", token, SSL_CERT_FILE=str(tmp_path / "cert.pem")
    )
    assert done.returncode == 4
    assert "name the host as its certificate does" in done.stderr.lower()
    done = veilmq("queues", "list", "--admin", named.admin.removeprefix("https://"), "--token-file", token)
    assert done.returncode == 4
    assert "say https://HOST:PORT" in done.stderr
    where = urlsplit(named.sqs)
    for url, said in (("?tls=1", "export SSL_CERT_FILE=FILE with the certificate of its issuer"), ("", "tls=1")):
        with pytest.raises(TransportError, match=said):
            connect(f"veil://{where.netloc}/orders{url}")
    log = named.log.read_text()
    for port in ("admin", "sqs"):
        assert f"{port}: refused a client that speaks plain HTTP: its URL needs https:// or tls=1" in log


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (-2 * HOUR_US, "WARNING the certificate in {} is not valid: only from"),
        (0, "WARNING the certificate in {} ends soon: "),
        (2 * HOUR_US, "WARNING the certificate in {} is not valid: only from"),
        (-14 * DAY_US, "WARNING the certificate in {} is not valid: only from"),
    ],
)
def test_the_log_tells_when_a_certificate_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int, said: str
) -> None:
    """It is good for an hour before and after now."""
    path = tmp_path / "cert.pem"
    log_end(path, b"some words before it\n" + make_pair("mine")[0], Instant(wall() + at))
    (record,) = caplog.records
    assert f"{record.levelname} {record.getMessage()}".startswith(said.format(path))


def test_a_certificate_that_lasts_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cert.pem"
    with caplog.at_level("INFO"):
        log_end(path, make_pair("mine", datetime.timedelta(days=30))[0], wall())
    assert f"the certificate in {path} is valid until 20" in caplog.text
    caplog.clear()
    log_end(path, b"no certificate", wall())
    assert caplog.text == ""


def test_a_key_that_others_may_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, and at a reload."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path, text in zip((certificate, key), make_pair("mine", datetime.timedelta(days=30)), strict=True):
        path.write_bytes(text)
    key.chmod(0o600)
    pair = Certificate(certificate, key, wall())
    assert caplog.text == ""
    key.chmod(0o640)
    asyncio.run(pair.renew(wall()))
    Certificate(certificate, key, wall())
    told = f"{key} is open to other users, and holds the key of TLS: chmod 600 {key}"
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [("WARNING", told)] * 2
