"""The key that pushes are signed with, and its certificate, which receivers fetch.

Strategy: an RSA key made at the first start, in the data directory (0600); the certificate is its public half, signed
by itself, and served by the MNS port. A push is signed over the layout of a request's signature (docs/mns.md) with
RSA-SHA1, PKCS#1 v1.5, because that is what every receiver's published sample verifies.
"""

import base64
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

KEY_FILE: Final = "push-key.pem"
CERTIFICATE_FILE: Final = "push-certificate.pem"
CERTIFICATE_PATH: Final = "/veilmq-push.pem"
"""Where the MNS port serves the certificate."""
_KEY_BITS: Final = 2_048
_YEARS: Final = 20


class Signer:
    """Signs pushes. Thread-safe."""

    def __init__(self, key: rsa.RSAPrivateKey, certificate: bytes) -> None:
        self._key = key
        self.certificate = certificate
        """PEM."""

    @classmethod
    def of_directory(cls, directory: Path, now: datetime.datetime) -> "Signer":
        """The directory's key, made if there is none. Raises OSError, ValueError for a damaged file."""
        path, certificate = directory / KEY_FILE, directory / CERTIFICATE_FILE
        if not path.exists() or not certificate.exists():
            _make(path, certificate, now)
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        if not isinstance(key, rsa.RSAPrivateKey):
            raise ValueError(f"{path} holds no RSA key")
        return cls(key, certificate.read_bytes())

    def sign(self, text: str) -> str:
        """The signature in base64."""
        signature = self._key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA1())
        return base64.b64encode(signature).decode()


def string_to_sign(method: str, target: str, headers: Mapping[str, str]) -> str:
    """What is signed: method, Content-md5, Content-Type, Date, the x-mns headers by name, the path."""
    lower = {name.lower(): value for name, value in headers.items()}
    extra = "".join(f"{name}:{lower[name]}\n" for name in sorted(lower) if name.startswith("x-mns-"))
    parts = (method, lower.get("content-md5", ""), lower.get("content-type", ""), lower.get("date", ""))
    return "\n".join(parts) + f"\n{extra}{target}"


def _make(path: Path, certificate: Path, now: datetime.datetime) -> None:
    key = rsa.generate_private_key(public_exponent=65_537, key_size=_KEY_BITS)
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
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secret)
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
