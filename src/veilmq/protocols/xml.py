"""Reads XML requests with expat into a small tree, and escapes character data for XML responses.

Strategy: a document type declaration is refused at once, so that no entity is ever defined. Depth and elements are
bounded here, bytes by the caller. Prefixes are dropped: no protocol here has two elements with one local name. Every
error is one exception with its position, which each protocol turns into its own refusal. Source: XML 1.0.
"""

import re
from typing import Any, Final
from xml.parsers import expat

import msgspec

_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Element(msgspec.Struct, gc=False):
    """An element: its name without prefix, its children, and all of its character data, untouched."""

    name: str
    raw: str
    children: list["Element"]

    @property
    def text(self) -> str:
        """The character data without surrounding blanks."""
        return self.raw.strip()


class DocumentInvalid(Exception):
    """The bytes are not a document, or one that is refused. line and column: 1 and 0 at the beginning."""

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.column = column


def read_document(body: bytes, depth_max: int, elements_max: int, plain: str = "") -> Element:
    """The outermost element.

    plain: the name of elements that have text alone: markup in them, which nobody reads, is left out but for its text,
    and is as deep as its bytes allow.

    Raises DocumentInvalid.
    """
    top = Element("", "", [])
    opened = [top]
    pieces: list[str] = []
    elements = inside = 0
    parser: Any = expat.ParserCreate()
    parser.buffer_text = True

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal elements, inside
        if inside or (plain and opened[-1].name == plain):
            inside += 1
            return
        elements += 1
        if len(opened) > depth_max or elements > elements_max:
            raise _at(parser, "the document is too deep or has too many elements")
        if pieces:
            opened[-1].raw += "".join(pieces)
            pieces.clear()
        element = Element(name.rpartition(":")[2] if ":" in name else name, "", [])
        opened[-1].children.append(element)
        opened.append(element)

    def end(name: str) -> None:
        nonlocal inside
        if inside:
            inside -= 1
            return
        ended = opened.pop()
        if pieces:
            ended.raw += "".join(pieces)
            pieces.clear()

    def doctype(*ignored: object) -> None:
        raise _at(parser, "a document type is not allowed")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = pieces.append
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(body, True)
    except expat.ExpatError as error:
        raise DocumentInvalid(expat.ErrorString(error.code), error.lineno, error.offset) from None
    except (LookupError, ValueError):
        raise DocumentInvalid("the document's encoding is not supported") from None
    return top.children[0]


def _at(parser: Any, reason: str) -> DocumentInvalid:
    return DocumentInvalid(reason, parser.CurrentLineNumber, parser.CurrentColumnNumber)


def escape(text: str) -> str:
    """The text as character data. A parser reads a bare carriage return as a line feed (XML 1.0, 2.11)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#13;")


def clean(text: str) -> str:
    """`escape`, with characters replaced that XML cannot carry."""
    return escape(_NOT_XML.sub("\ufffd", text))
