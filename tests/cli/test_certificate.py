"""A certificate is renewed by SIGHUP: every port of a running server presents it, and a bad pair changes nothing."""

import datetime
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from veilmq.model.instant import DAY_US, HOUR_US, Instant
from veilmq.server.clock import wall
from veilmq.server.tls import tell_end
from veilmq.testing.server import ServerProcess

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
        found = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
    (name,) = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(name.value)


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
    path.write_bytes(b"some words before it\n" + make_pair("mine")[0])
    tell_end(path, Instant(wall() + at))
    (record,) = caplog.records
    assert f"{record.levelname} {record.getMessage()}".startswith(said.format(path))


def test_a_certificate_that_lasts_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cert.pem"
    path.write_bytes(make_pair("mine", datetime.timedelta(days=30))[0])
    with caplog.at_level("INFO"):
        tell_end(path, wall())
    assert f"the certificate in {path} is valid until 20" in caplog.text
    caplog.clear()
    path.write_text("no certificate")
    tell_end(path, wall())
    assert caplog.text == ""
