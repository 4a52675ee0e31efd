"""Reads XML requests with expat into a small tree, without document types.

Strategy: a document type declaration is refused at once, so that no entity is ever defined; depth, nodes and bytes are
bounded. Markup inside a text is ignored: it is no node and may be as deep as its bytes allow. Malformed XML is refused
with line and column. Source: XML 1.0.
"""

from collections.abc import Sequence
from typing import Any
from xml.parsers import expat

import msgspec

from veilmq.protocols.azure import limits
from veilmq.protocols.azure.errors import UNSUPPORTED_XML_NODE, Refusal, bad_xml, too_large


class Node(msgspec.Struct, gc=False):
    """An element: its name without prefix, its text without surrounding blanks (but see `raw`), its children."""

    name: str
    raw: str = ""
    """All character data, unchanged; for a text element, what is left after removing markup."""
    children: list["Node"] = []

    @property
    def text(self) -> str:
        """The text without surrounding blanks."""
        return self.raw.strip()

    def only(self, name: str) -> list["Node"]:
        """The children, which must all have that name. Raises Refusal."""
        for child in self.children:
            if child.name != name:
                raise Refusal(UNSUPPORTED_XML_NODE, {"XmlNodeName": child.name})
        return self.children

    def members(self, names: Sequence[str]) -> dict[str, "Node"]:
        """The children by name, each at most once and only of those names. Raises Refusal."""
        found: dict[str, Node] = {}
        for child in self.children:
            if child.name not in names:
                raise Refusal(UNSUPPORTED_XML_NODE, {"XmlNodeName": child.name})
            if child.name in found:
                raise bad_xml(f"{child.name} is given more than once.")
            found[child.name] = child
        return found


def read_document(body: bytes, root: str, limit_bytes: int, text: str = "") -> Node:
    """The tree of a document whose outermost element has that name.

    text: the name of elements that have no children: markup in them is removed, but its text is kept.

    Raises Refusal: RequestBodyTooLarge, InvalidXmlDocument.
    """
    if len(body) > limit_bytes:
        raise too_large(limit_bytes)
    top = Node("", children=[])
    open_nodes = [top]
    pieces: list[list[str]] = [[]]
    nodes = inside = 0
    parser: Any = expat.ParserCreate()
    parser.buffer_text = True

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal nodes, inside
        if inside or (text and open_nodes[-1].name == text):
            inside += 1
            return
        nodes += 1
        if len(open_nodes) > limits.XML_DEPTH_MAX or nodes > limits.XML_NODES_MAX:
            raise bad_xml("The document is too deep or has too many elements.", *_at(parser))
        node = Node(name.rpartition(":")[2], children=[])
        open_nodes[-1].children.append(node)
        open_nodes.append(node)
        pieces.append([])

    def end(name: str) -> None:
        nonlocal inside
        if inside:
            inside -= 1
            return
        open_nodes.pop().raw = "".join(pieces.pop())

    def data(piece: str) -> None:
        pieces[-1].append(piece)

    def doctype(*ignored: object) -> None:
        raise bad_xml("A document type is not allowed.", *_at(parser))

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = data
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(body, True)
    except expat.ExpatError as error:
        raise bad_xml(expat.ErrorString(error.code), error.lineno, error.offset) from None
    except (LookupError, ValueError):
        raise bad_xml("The document's encoding is not supported.") from None
    (node,) = top.children
    if node.name != root:
        raise bad_xml(f"The document must be a {root}.")
    return node


def _at(parser: Any) -> tuple[int, int]:
    return parser.CurrentLineNumber, parser.CurrentColumnNumber
