"""Writes XML responsnd.

Strategy: joined strings, no tree. Texts are escaped so that a client reads back exactly what was sent: a carriage
return is written as a character reference, because a parser turns a bare one into a line feed (XML 1.0, 2.11).
"""

import re
from typing import Final

DECLARATION: Final = '<?xml version="1.0" encoding="utf-8"?>'
CONTENT_TYPE: Final = b"application/xml"

_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """The text as character data."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#13;")


def escape_attribute(text: str) -> str:
    """The text as the value of an attribute in double quotes."""
    return escape(text).replace('"', "&quot;").replace("\n", "&#10;").replace("\t", "&#9;")


def write_error(code: str, message: str, extra: dict[str, str]) -> bytes:
    """A complete error response; characters that XML cannot carry are replaced."""
    more = "".join(f"<{name}>{_clean(text)}</{name}>" for name, text in extra.items())
    return f"{DECLARATION}<Error><Code>{code}</Code><Message>{_clean(message)}</Message>{more}</Error>".encode()


def _clean(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text))
