"""A certificate is renewed by SIGHUP: every port of a running server presents it, and a bad pair changes nothing."""

import datetime
import os
import signal
import socket
import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from veilmq.testing.server import ServerProcess

WAIT_SECONDS = 20


def make_pair(name: str) -> tuple[bytes, bytes]:
    """A certificate of that name that signs itself, and its key; both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = (
        builder.serial_number(x509.random_serial_number()).not_valid_before(now - hour).not_valid_after(now + hour)
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
    first, second = make_pair("first"), make_pair("second")
    for path, text in zip(files, first, strict=True):
        path.write_bytes(text)
    server = ServerProcess(tmp_path, "--tls-cert", str(certificate), "--tls-key", str(key)).start()
    ports = (server.sqs, server.azure, server.mns, server.admin)
    try:
        assert [presented(port) for port in ports] == ["first"] * 4
        certificate.write_bytes(second[0])
        reloaded(server, "the certificate stays as it was")
        assert [presented(port) for port in ports] == ["first"] * 4, "a certificate without its key"
        key.write_text("nonsense")
        reloaded(server, "the certificate stays as it was")
        key.unlink()
        reloaded(server, "the certificate stays as it was")
        assert [presented(port) for port in ports] == ["first"] * 4
        key.write_bytes(second[1])
        reloaded(server, "new connections get that certificate")
        assert [presented(port) for port in ports] == ["second"] * 4
    finally:
        assert server.stop() == 0
