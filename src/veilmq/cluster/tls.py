"""What is wrong with TLS between two servers of a cluster, in plain words.

Strategy: OpenSSL's own words name neither the server that must be changed nor what to change there. So a sentence of
ours stands before them. `verify_code` is OpenSSL's, of openssl/x509_vfy.h.
"""

import re
import ssl
from collections.abc import Mapping
from typing import Final

CHECK: Final = "check the address, and whether both use TLS"
_NO_TLS: Final = re.compile("wrong.version.number|record.layer.failure", re.IGNORECASE)
"""OpenSSL's words for an answer that is not TLS."""
_OTHER_NAME: Final = "its certificate is for another host: it must name the host of its --advertise (subjectAltName)"
_UNKNOWN: Final = "this server does not trust its certificate: add that of its issuer to the file of --tls-cert here"
_OF_CERTIFICATE: Final[Mapping[int, str]] = {
    9: "its certificate is not valid yet: check the clocks of both machines",
    10: "its certificate has expired: give it a new one",
    62: _OTHER_NAME,
    64: _OTHER_NAME,
} | dict.fromkeys((2, 18, 19, 20, 21), _UNKNOWN)


def in_words(error: BaseException) -> str:
    """Why the peer port of another server cannot be used, and what to do if that is about TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        words = _OF_CERTIFICATE.get(error.verify_code, "its certificate is refused")
    elif isinstance(error, ssl.SSLError):
        words = "TLS fails there"
        if _NO_TLS.search(str(error)) is not None:
            words = f"it speaks no TLS, and this server does: {CHECK}"
    elif isinstance(error, EOFError):
        return f"the connection was closed before it said who it is: {CHECK}"
    else:
        return str(error)
    return f"{words} ({error})"
