"""TLS of the listeners: one server context from a certificate file and its key, and what renews it.

Strategy: a context in use is given the new pair, and presents it from the next connection on; a pair that does not fit
is found out on a context that nobody uses. A listener learns of a connection when its handshake is over, so whoever
never ends one is counted here.
"""

import logging
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from veilmq.model.instant import DAY_US, SECOND_US, Instant

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


def server_context(certificate: Path, key: Path, sessions_max: int | None = None) -> ssl.SSLContext:
    """A context for TLS 1.2 and later that offers HTTP/1.1 alone.

    certificate: PEM, the server's own first, then its issuers. key: PEM, without a passphrase. sessions_max: of
    connections at a time (None: no bound); beyond, a new one is dropped at once.
    Raises OSError if a file cannot be read, ssl.SSLError if it holds something else or the two do not belong together.
    """
    context = _BoundedContext(ssl.PROTOCOL_TLS_SERVER)
    context.sessions, context.sessions_max = WeakSet(), sessions_max
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load(context, certificate, key)
    return context


def load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Present that certificate from the next connection on. Raises as `server_context` does, with the files' names."""
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except ssl.SSLError as error:
        raise ssl.SSLError(error.errno, f"{certificate} with {key}: {error.strerror or error.args[-1]}") from error


def renew(contexts: Iterable[ssl.SSLContext], certificate: Path, key: Path) -> bool:
    """Present what the files hold now, on all contexts. A bad pair changes nothing and is logged: False."""
    try:
        server_context(certificate, key)
        for context in contexts:
            load(context, certificate, key)
    except OSError as error:  # ssl.SSLError is one
        logger.error("the certificate stays as it was: %s", error)
        return False
    logger.info("read %s: new connections get that certificate", certificate)
    return True


def tell_end(certificate: Path, now: Instant) -> Instant | None:
    """Log until when that certificate is valid: a warning if it is not, or will not be in two weeks.

    Returns that instant, or None if the file does not tell it.
    """
    from cryptography import x509  # late: only a server with TLS needs it

    try:
        found = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
    except (OSError, ValueError, IndexError):  # OpenSSL took it, so this is no reason to refuse it
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
