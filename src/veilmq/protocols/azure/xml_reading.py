"""XML requests of Queue Storage: which elements may be where, and what is said of those that may not.

Strategy: the tree is `veilmq.protocols.xml`'s, within this protocol's bounds. What is not well-formed is refused with
line and column.
"""

from collections.abc import Sequence

from veilmq.protocols import xml
from veilmq.protocols.azure import limits
from veilmq.protocols.azure.errors import UNSUPPORTED_XML_NODE, Refusal, bad_xml, too_large
from veilmq.protocols.xml import DocumentInvalid, Element


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
            raise Refusal(UNSUPPORTED_XML_NODE, {"XmlNodeName": child.name})
    return element.children


def members_of(element: Element, names: Sequence[str]) -> dict[str, Element]:
    """The children by name, each at most once and of those names alone. Raises Refusal."""
    found: dict[str, Element] = {}
    for child in element.children:
        if child.name not in names:
            raise Refusal(UNSUPPORTED_XML_NODE, {"XmlNodeName": child.name})
        if child.name in found:
            raise bad_xml(f"{child.name} is given more than once.")
        found[child.name] = child
    return found
