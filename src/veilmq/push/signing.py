"""The key that signs pushes, and the certificate that receivers fetch.

Strategy: an RSA key is made in the data directory (0600) at the first start. Its self-signed certificate is served by
the MNS port. Each file is written atomically; a certificate that does not match the key is made again. A damaged key
stops the start: a person must decide, because receivers may have kept its certificate. A push is signed over the layout
of a request's signature (docs/mns.md) with RSA-SHA1, PKCS#1 v1.5, which every receiver's published sample verifies.
"""

import base64
import datetime
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from veilmq.store.files import durable_write

KEY_FILE: Final = "push-key.pem"
CERTIFICATE_FILE: Final = "push-certificate.pem"
CERTIFICATE_PATH: Final = "/veilmq-push.pem"
"""Where the MNS port serves the certificate."""
_KEY_BITS: Final = 2_048
_YEARS: Final = 20

log = logging.getLogger("veilmq.push")


class Signer:
    """Signs pushes. Thread-safe."""

    def __init__(self, key: rsa.RSAPrivateKey, certificate: bytes) -> None:
        self._key = key
        self.certificate = certificate
        """PEM."""

    @classmethod
    def of_directory(cls, directory: Path, now: datetime.datetime) -> "Signer":
        """Load the directory's key, or make one. Raises OSError; ValueError for a damaged key."""
        path, certificate = directory / KEY_FILE, directory / CERTIFICATE_FILE
        key = _read_key(path) if path.exists() else _make_key(path)
        text = certificate.read_bytes() if certificate.exists() else None
        if text is None or not _is_of(key, text):
            if text is not None:
                log.warning("%s is damaged or belongs to another key: it is made again", certificate)
            text = _certificate_of(key, now)
            durable_write(certificate, text, mode=0o644)
        return cls(key, text)

    def sign(self, text: str) -> str:
        """The signature in base64."""
        signature = self._key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA1())
        return base64.b64encode(signature).decode()


def string_to_sign(method: str, target: str, headers: Mapping[str, str]) -> str:
    """The string to sign: method, Content-md5, Content-Type, Date, the x-mns headers sorted by name, the path."""
    lower = {name.lower(): value for name, value in headers.items()}
    extra = "".join(f"{name}:{lower[name]}\n" for name in sorted(lower) if name.startswith("x-mns-"))
    parts = (method, lower.get("content-md5", ""), lower.get("content-type", ""), lower.get("date", ""))
    return "\n".join(parts) + f"\n{extra}{target}"


def _read_key(path: Path) -> rsa.RSAPrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, rsa.RSAPrivateKey):
        raise ValueError(f"{path} holds no RSA key: restore it, or remove it so that the next start makes a new one")
    return key


def _make_key(path: Path) -> rsa.RSAPrivateKey:
    key = rsa.generate_private_key(public_exponent=65_537, key_size=_KEY_BITS)
    form = serialization.PrivateFormat.PKCS8
    durable_write(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return key


def _is_of(key: rsa.RSAPrivateKey, text: bytes) -> bool:
    """Whether the text is a certificate of the key."""
    try:
        return x509.load_pem_x509_certificate(text).public_key() == key.public_key()
    except (ValueError, UnsupportedAlgorithm):
        return False


def _certificate_of(key: rsa.RSAPrivateKey, now: datetime.datetime) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "VeilMQ push")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)
