"""Writes XML responsnd.

Strategy: joined strings, no tree. Texts are escaped so that a client reads back exactly what was sent: a carriage
return is written as a character reference, because a parser turns a bare one into a line feed (XML 1.0, 2.11).
"""

from typing import Final

from veilmq.protocols.xml import clean, escape

DECLARATION: Final = '<?xml version="1.0" encoding="utf-8"?>'
CONTENT_TYPE: Final = b"application/xml"


def escape_attribute(text: str) -> str:
    """The text as the value of an attribute in double quotes."""
    return escape(text).replace('"', "&quot;").replace("\n", "&#10;").replace("\t", "&#9;")


def write_error(code: str, message: str, extra: dict[str, str]) -> bytes:
    """A whole error answer; what XML cannot carry is replaced."""
    more = "".join(f"<{name}>{clean(text)}</{name}>" for name, text in extra.items())
    return f"{DECLARATION}<Error><Code>{code}</Code><Message>{clean(message)}</Message>{more}</Error>".encode()
