"""TLS of the listeners: one certificate with its key for all ports, and its renewal.

Strategy: each port has an empty context with a callback that switches, at each ClientHello, to the one context that
holds the certificate and key. A new pair is loaded aside and, if it is valid, replaces the old one for all ports by one
assignment, so ports never differ.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

from veilmq.model.instant import DAY_US, SECOND_US, Instant
from veilmq.server.config.thread_reads import DEADLINE_S, read_in_thread

_END_NEAR_US: Final = 14 * DAY_US

_PLAIN_WORDS: Final = {
    "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
    "NO_CERTIFICATE_ASSIGNED": "the key is not that of the certificate",  # of another algorithm
    "EE_KEY_TOO_SMALL": "the certificate's key is too short: RSA needs 2048 bits",
    "CA_MD_TOO_WEAK": "the certificate is signed with a hash that is too weak: use SHA-256",
}
"""OpenSSL's reasons why it takes no pair, in plain words."""

logger = logging.getLogger("veilmq.tls")


class Certificate:
    """The certificate chain and key of new connections at every port."""

    ends: Instant | None
    """Until when it is valid; None if that cannot be read."""

    def __init__(self, certificate: Path, key: Path, now: Instant) -> None:
        """certificate: PEM, the server's own first, then its issuers. key: PEM, without a passphrase.

        Raises OSError with a file's name if it cannot be read, ssl.SSLError if it is malformed or the key does not
        match.
        """
        self._certificate, self._key = certificate, key
        self._reading = asyncio.Lock()
        self._take(self._load(), now)

    def context(self) -> ssl.SSLContext:
        """The context of one port."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = self._hand_over
        return _for_http(context)

    async def renew(self, now: Instant, deadline_s: float = DEADLINE_S) -> None:
        """Load the files again for all ports. A bad pair, or a read that hangs, changes nothing and is logged. No
        connection waits for it: a thread reads the files."""
        async with self._reading:  # a concurrent call waits for this one
            try:
                found = await read_in_thread(self._load, self._certificate, deadline_s)
            except OSError as error:  # ssl.SSLError is one
                logger.error("the certificate stays as it was: %s", error)
                return
        self._take(found, now)
        logger.info("read %s: new connections get that certificate", self._certificate)

    def _hand_over(self, session: ssl.SSLObject, name: str | None, port: ssl.SSLContext) -> None:
        """Called at each ClientHello, with a server name or without."""
        session.context = self._pair

    def _load(self) -> tuple[ssl.SSLContext, bytes]:
        """A context with the pair, and the text of the certificate. Logs a warning if others may read the key."""
        files = self._certificate, self._key
        texts = [_read(path) for path in files]  # load_cert_chain does not say which of the two is missing
        pair = _for_http(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        load_pair(pair, *files)
        if [_read(path) for path in files] != texts:
            raise ssl.SSLError(0, f"{self._certificate} with {self._key}: they were written meanwhile")
        # Not refused, unlike credentials: a mount or a system group may allow no other mode.
        if self._key.stat().st_mode & 0o077:
            logger.warning("%s is open to other users, and holds the key of TLS: chmod 600 %s", self._key, self._key)
        return pair, texts[0]

    def _take(self, found: tuple[ssl.SSLContext, bytes], now: Instant) -> None:
        self._pair, text = found
        self.ends = log_end(self._certificate, text, now)


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Give the context this pair. Raises OSError; an ssl.SSLError says in words what is wrong with the pair."""
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except ssl.SSLError as error:
        why, reason = error.strerror or error.args[-1], getattr(error, "reason", None)
        if "PEM lib" in why or getattr(error, "library", None) == "PEM":
            why = _not_whole(certificate, key)
        elif reason:
            why = _PLAIN_WORDS.get(reason, reason.replace("_", " ").lower())
        raise ssl.SSLError(error.errno, f"{certificate} with {key}: {why}") from error


def _not_whole(certificate: Path, key: Path) -> str:
    """Which of the two files OpenSSL could not read."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    except ssl.SSLError:
        return f"{certificate} is no whole PEM file with a certificate"
    return f"{key} is no whole PEM file with a key"


def _for_http(context: ssl.SSLContext) -> ssl.SSLContext:
    """TLS 1.2 and later, with HTTP/1.1 alone on offer."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def log_end(certificate: Path, text: bytes, now: Instant) -> Instant | None:
    """Log until when the file's certificate is valid; warn if it is invalid now or within two weeks.

    text: the file's contents. Returns that instant, or None if it cannot be read.
    """
    from cryptography import x509  # imported late: only a server with TLS needs it

    try:
        found = x509.load_pem_x509_certificates(text)[0]
    except (ValueError, IndexError):  # OpenSSL accepted it, so do not refuse it
        return None
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    if not begin.timestamp() <= now / SECOND_US <= end.timestamp():
        logger.warning(
            "the certificate in %s is not valid: only from %s to %s; clients refuse it", certificate, begin, end
        )
    elif end.timestamp() < (now + _END_NEAR_US) / SECOND_US:
        logger.warning("the certificate in %s ends soon: %s", certificate, end)
    else:
        logger.info("the certificate in %s is valid until %s", certificate, end)
    return Instant(int(end.timestamp()) * SECOND_US)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        error.filename = str(path)  # a read that fails does not name the file, as an open that fails does
        raise


def _no_passphrase() -> str:
    # Without this OpenSSL asks on the terminal, and the start hangs.
    raise ssl.SSLError("the key is protected by a passphrase: give one without")
