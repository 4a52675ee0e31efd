"""Reads the XML of requests and writes the XML of responses.

Strategy: the tree is `veilmq.protocols.xml`'s, within this protocol's bounds. An element at a place where none may be
is refused; what is not well-formed is refused with line and column. A response is joined strings, without a tree. Texts
are escaped so that a client reads back exactly what was sent: a carriage return is written as a character reference,
because a parser turns a bare one into a line feed (XML 1.0, 2.11).
"""

from collections.abc import Sequence
from typing import Final

from veilmq.protocols import xml
from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.errors import Refusal, bad_xml, too_large
from veilmq.protocols.xml import DocumentInvalid, Element, clean, escape


def read_document(body: bytes, root: str, limit_bytes: int, text: str = "") -> Element:
    """The tree of a document whose outermost element has that name.

    text: the name of elements that have no children: markup in them is removed, but its text is kept.

    Raises Refusal: RequestBodyTooLarge, InvalidXmlDocument.
    """
    if len(body) > limit_bytes:
        raise too_large(limit_bytes)
    try:
        element = xml.read_document(body, limits.XML_DEPTH_MAX, limits.XML_NODES_MAX, text)
    except DocumentInvalid as error:
        raise bad_xml(f"{error.reason[0].upper()}{error.reason[1:]}.", error.line, error.column) from None
    if element.name != root:
        raise bad_xml(f"The document must be a {root}.")
    return element


def only(element: Element, name: str) -> list[Element]:
    """The children, all of which must have that name. Raises Refusal."""
    for child in element.children:
        if child.name != name:
            raise Refusal(errors.UNSUPPORTED_XML_NODE, {"XmlNodeName": child.name})
    return element.children


def members_of(element: Element, names: Sequence[str]) -> dict[str, Element]:
    """The children by name, each at most once and of those names alone. Raises Refusal."""
    found: dict[str, Element] = {}
    for child in element.children:
        if child.name not in names:
            raise Refusal(errors.UNSUPPORTED_XML_NODE, {"XmlNodeName": child.name})
        if child.name in found:
            raise bad_xml(f"{child.name} is given more than once.")
        found[child.name] = child
    return found


DECLARATION: Final = '<?xml version="1.0" encoding="utf-8"?>'
CONTENT_TYPE: Final = b"application/xml"


def escape_attribute(text: str) -> str:
    """The text as the value of an attribute in double quotes."""
    return escape(text).replace('"', "&quot;").replace("\n", "&#10;").replace("\t", "&#9;")


def write_error(code: str, message: str, extra: dict[str, str]) -> bytes:
    """A whole error answer; what XML cannot carry is replaced."""
    more = "".join(f"<{name}>{clean(text)}</{name}>" for name, text in extra.items())
    return f"{DECLARATION}<Error><Code>{code}</Code><Message>{clean(message)}</Message>{more}</Error>".encode()
