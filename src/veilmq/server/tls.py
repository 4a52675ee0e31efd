"""TLS of the listeners: one server context from a certificate file and its key."""

import ssl
from pathlib import Path


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A context for TLS 1.2 and later that offers HTTP/1.1 alone.

    certificate: PEM, the server's own first, then its issuers. key: PEM, without a passphrase.
    Raises OSError if a file cannot be read, ssl.SSLError if it holds something else or the two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key, password=_no_passphrase)
    return context


def _no_passphrase() -> str:
    # Without this OpenSSL asks the terminal, and a server that starts hangs.
    raise ssl.SSLError("the key is protected by a passphrase: give one without")
