"""TLS of the listeners: one server context from a certificate file and its key, and what renews it.

Strategy: a context in use is given the new pair, and presents it from the next connection on; a pair that does not fit
is found out on a context that nobody uses.
"""

import logging
import ssl
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger("veilmq.tls")


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A context for TLS 1.2 and later that offers HTTP/1.1 alone.

    certificate: PEM, the server's own first, then its issuers. key: PEM, without a passphrase.
    Raises OSError if a file cannot be read, ssl.SSLError if it holds something else or the two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
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


def _no_passphrase() -> str:
    # Without this OpenSSL asks the terminal, and a server that starts hangs.
    raise ssl.SSLError("the key is protected by a passphrase: give one without")
