"""Push requests: find the endpoint, make the request, sign it, post it (docs/mns.md, "Pushes").

Strategy: a request is made by a pure function of the message, the clock's reading and a request id. It is signed
exactly as it goes over the wire, over the layout of a request's signature (docs/mns.md) with RSA-SHA1, PKCS#1 v1.5,
which every receiver's published sample verifies. Signing takes a third of a millisecond of CPU, so threads do it. A
setting chooses the case of header names: lower case, as the Python samples look them up, or as documented
(`Content-md5`, `Content-Type`, `Date`), as the Java sample does.

The RSA key is made in the data directory (0600) at the first start. The MNS port serves its self-signed certificate.
Each file is written atomically; a certificate that does not match the key is made again. A damaged key stops the start:
a person must decide, because receivers may have kept its certificate.
"""

import asyncio
import base64
import datetime
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from hashlib import md5
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID
from yarl import URL

from veilmq.model.instant import Instant
from veilmq.model.messages import Delivery, Failure, Report, Reported, failure_of
from veilmq.model.settings.topic import ContentFormat, Notification, SubscriptionSettings, TopicKey, render
from veilmq.push import CERTIFICATE_FILE, KEY_FILE
from veilmq.push.endpoints import EndpointState
from veilmq.push.network import Endpoint, Lookups, Network, choose, parse
from veilmq.store.files import durable_write

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


VERSION: Final = "2015-06-06"
_TYPES: Final = {
    ContentFormat.XML: "text/xml;charset=utf-8",
    ContentFormat.JSON: "application/json;charset=utf-8",
    ContentFormat.SIMPLIFIED: "text/plain;charset=utf-8",
}
_DOCUMENTED: Final = {"content-md5": "Content-md5", "content-type": "Content-Type", "date": "Date"}


class Push(NamedTuple):
    """One request without its signature and target."""

    body: bytes
    headers: dict[str, str]
    """Names in lower case."""


def push_of(
    topic: TopicKey, subscription: str, settings: SubscriptionSettings, message: Delivery, request_id: str,
    certificate_url: str, wall_us: int,
) -> Push:  # fmt: skip
    """The request that pushes a message. wall_us: wall time, for the Date header."""
    published = message.extras.published_id or message.id
    notification = Notification(
        topic, subscription, published.hex().upper(), message.body, message.md5.hex().upper(), message.extras.tag,
        message.sent,
    )  # fmt: skip
    body = render(notification, settings.content_format).encode()
    digest = md5(body, usedforsecurity=False).hexdigest()
    headers = {
        "content-md5": base64.b64encode(digest.encode()).decode(),
        "content-type": _TYPES[settings.content_format],
        "date": formatdate(wall_us / 1e6, usegmt=True),
        "x-mns-request-id": request_id,
        "x-mns-version": VERSION,
        "x-mns-signing-cert-url": base64.b64encode(certificate_url.encode()).decode(),
    }
    if settings.content_format is ContentFormat.SIMPLIFIED:
        headers["x-mns-message-id"] = notification.message_id
        if notification.tag is not None and _is_header(notification.tag):
            headers["x-mns-message-tag"] = notification.tag
    return Push(body, headers)


def _is_header(tag: str) -> bool:
    """Whether the tag fits into a header; another protocol may have accepted any text as a tag."""
    return tag == tag.strip() and not any(character < " " or character == "\x7f" for character in tag)


def cased(headers: dict[str, str], documented: bool) -> dict[str, str]:
    """The headers with names in the case that the setting asks for."""
    return {_DOCUMENTED.get(name, name): value for name, value in headers.items()} if documented else headers


_SIGNERS: Final = 2


class Attempt(NamedTuple):
    """The result of one call."""

    status: int | None
    """Of the response, if there was one."""
    error: str | None
    """Why the call failed; None: it succeeded."""
    ours: bool = False
    """The error is this server's own and says nothing about the endpoint."""

    def report(self) -> Report:
        """Why the message waits for its next attempt."""
        return Report(Reported.RETRY, failure_of("push", "" if self.status is None else "HTTP", self.error or ""))


NOT_TRIED: Final = Report(Reported.RETRY, Failure("shortage"))
"""This server lacked a resource that the call needs."""


class PushRequests:
    """Sends push requests."""

    def __init__(
        self,
        signer: Signer,
        certificate_url: str,
        allowed: Sequence[Network],
        documented_case: bool,
        wall: Callable[[], Instant],
        timeout_s: float,
        lookups: Lookups,
    ) -> None:
        self._signer = signer
        self._certificate_url = certificate_url
        self._allowed = allowed
        self._documented_case = documented_case
        self._wall = wall
        self._timeout_s = timeout_s
        self._lookups = lookups
        self._pool = ThreadPoolExecutor(_SIGNERS, thread_name_prefix="veilmq-push-sign")

    async def post(
        self, state: EndpointState, topic: TopicKey, name: str, settings: SubscriptionSettings, message: Delivery,
        answered: Callable[[], object],
    ) -> int:  # fmt: skip
        """The status of the answer; answered: see `Connections.post`.

        Raises EndpointRefused, LocalExhaustion and what `Connections.post` raises.
        """
        assert settings.url is not None
        addresses = await self._lookups.addresses(parse(settings.url)[0])
        endpoint = choose(settings.url, addresses, self._allowed)
        urls = [_url(endpoint, address) for address in endpoint.addresses]
        request_id = secrets.token_hex(12).upper()
        push = push_of(topic, name, settings, message, request_id, self._certificate_url, self._wall())
        text = string_to_sign("POST", urls[0].raw_path_qs, push.headers)
        signature = await asyncio.get_running_loop().run_in_executor(self._pool, self._signer.sign, text)
        headers = {
            "host": endpoint.authority,
            "user-agent": "VeilMQ-Push",
            **cased(push.headers, self._documented_case),
        }
        headers["Authorization" if self._documented_case else "authorization"] = signature
        return await state.connections.post(urls, endpoint.host, headers, push.body, self._timeout_s, answered)

    def close(self) -> None:
        """Stop the signing threads; nothing is sent afterwards."""
        self._pool.shutdown(wait=False)


def _url(endpoint: Endpoint, address: str) -> URL:
    host = f"[{address}]" if ":" in address else address
    return URL(f"{'https' if endpoint.secure else 'http'}://{host}:{endpoint.port}{endpoint.target}", encoded=True)
