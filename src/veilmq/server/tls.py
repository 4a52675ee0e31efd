"""TLS of the listeners: one certificate with its key, loaded once, that all ports present, and what renews it.

Strategy: each port has a context of its own, which is empty but for a callback: at each ClientHello it hands over to
the one context that holds the pair. Another pair is loaded aside, and takes its place for all ports by one assignment
if it fits; so the ports never differ. A listener learns of a connection when its handshake is over, so whoever never
ends one is counted by the port's context.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from veilmq.model.instant import DAY_US, SECOND_US, Instant
from veilmq.server.reading import DEADLINE_S, read_aside

_END_NEAR_US: Final = 14 * DAY_US

logger = logging.getLogger("veilmq.tls")


class _BoundedContext(ssl.SSLContext):
    """A context of at most `sessions_max` sessions at a time, those in their handshake included."""

    sessions: WeakSet[ssl.SSLObject]
    sessions_max: int | None

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """As of any context. Raises ssl.SSLError for one too many, whose connection the loop then drops."""
        if self.sessions_max is not None and len(self.sessions) >= self.sessions_max:
            raise ssl.SSLError("too many connections")
        session = super().wrap_bio(*arguments, **named)
        self.sessions.add(session)
        return session


class Certificate:
    """What new connections get at every port: a certificate chain and its key."""

    ends: Instant | None
    """Until when it is valid; None if it does not tell."""

    def __init__(self, certificate: Path, key: Path, now: Instant) -> None:
        """certificate: PEM, the server's own first, then its issuers. key: PEM, without a passphrase.

        Raises OSError if a file cannot be read, ssl.SSLError if it holds something else or they do not belong together.
        """
        self._certificate, self._key = certificate, key
        self._reading = asyncio.Lock()
        self._take(self._load(), now)

    def context(self, sessions_max: int | None = None) -> ssl.SSLContext:
        """Of one port. sessions_max: connections at a time (None: no bound); beyond, a new one is dropped at once."""
        context = _BoundedContext(ssl.PROTOCOL_TLS_SERVER)
        context.sessions, context.sessions_max = WeakSet(), sessions_max
        context.sni_callback = self._hand_over
        return _for_http(context)

    async def renew_aside(self, now: Instant, deadline_s: float = DEADLINE_S) -> None:
        """Present what the files hold now, at all ports. A bad pair, or one whose reading hangs, changes nothing and is
        logged. No connection waits for it: the files are read in a thread."""
        async with self._reading:  # who asks meanwhile gets what is there afterwards
            try:
                found = await read_aside(self._load, self._certificate, deadline_s)
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
        texts = [path.read_bytes() for path in files]  # what loads them does not say which of the two is missing
        pair = _for_http(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        try:
            pair.load_cert_chain(*files, password=_no_passphrase)
        except ssl.SSLError as error:
            why = error.strerror or error.args[-1]
            if "PEM lib" in why:
                why = "one of them is no whole PEM file"
            raise ssl.SSLError(error.errno, f"{self._certificate} with {self._key}: {why}") from error
        if [path.read_bytes() for path in files] != texts:
            raise ssl.SSLError(0, f"{self._certificate} with {self._key}: they were written meanwhile")
        # Not refused, as credentials are: a mount or a group of the system's may leave no other mode.
        if self._key.stat().st_mode & 0o077:
            logger.warning("%s is open to other users, and holds the key of TLS: chmod 600 %s", self._key, self._key)
        return pair, texts[0]

    def _take(self, found: tuple[ssl.SSLContext, bytes], now: Instant) -> None:
        self._pair, text = found
        self.ends = tell_end(self._certificate, text, now)


def _for_http(context: ssl.SSLContext) -> ssl.SSLContext:
    """TLS 1.2 and later, with HTTP/1.1 alone on offer."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def tell_end(certificate: Path, text: bytes, now: Instant) -> Instant | None:
    """Log until when that file's certificate is valid: a warning if it is not, or will not be in two weeks.

    text: what the file held. Returns that instant, or None if the text does not tell it.
    """
    from cryptography import x509  # late: only a server with TLS needs it

    try:
        found = x509.load_pem_x509_certificates(text)[0]
    except (ValueError, IndexError):  # OpenSSL took it, so this is no reason to refuse it
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


def _no_passphrase() -> str:
    # Without this OpenSSL asks the terminal, and a server that starts hangs.
    raise ssl.SSLError("the key is protected by a passphrase: give one without")
