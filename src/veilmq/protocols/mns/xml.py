"""Reads the XML of requests and writes the XML of responses.

Strategy: a request becomes the small tree of `veilmq.protocols.xml`. Namespaces are ignored, because ali-mns sends
none. A response is joined strings, without a tree.

The namespace of a response has a final slash, except in `Error`: the Java SDK reads errors only without it, and
everything else only with it. Other clients read both.
"""

from typing import Final

from veilmq.protocols import Response
from veilmq.protocols.mns import errors, limits
from veilmq.protocols.mns.errors import Refusal, bad, malformed, out_of_range
from veilmq.protocols.mns.parameters import boolean, integer
from veilmq.protocols.xml import DocumentInvalid, Element, clean, escape, read_document


def read_root(body: bytes) -> Element:
    """The outermost element of the document. Raises Refusal: MalformedXML, InvalidArgument."""
    if len(body) > limits.DOCUMENT_BYTES_MAX:
        raise Refusal(errors.INVALID_ARGUMENT, f"The request exceeds {limits.DOCUMENT_BYTES_MAX} bytes.")
    try:
        return read_document(body, limits.XML_DEPTH_MAX, limits.XML_ELEMENTS_MAX)
    except DocumentInvalid as error:
        raise malformed(error.reason, error.line, error.column) from None


def members_of(body: bytes, root: str) -> dict[str, Element]:
    """The children by name of a document with that root; none for an empty body. Raises Refusal."""
    if not body:
        return {}
    element = read_root(body)
    if element.name != root:
        raise malformed(f"the document must be a {root}")
    return members(element)


def members(element: Element) -> dict[str, Element]:
    """The children by name, each at most once. Raises Refusal: MalformedXML."""
    found = {child.name: child for child in element.children}
    if len(found) < len(element.children):
        raise malformed(f"{element.name} has two children of one name")
    return found


def number(element: Element, minimum: int, maximum: int, noun: str = "") -> int:
    """The whole number in an element. Raises Refusal: InvalidArgument."""
    value = None if element.children else integer(element.text)
    if value is None or not minimum <= value <= maximum:
        raise out_of_range(element.name, minimum, maximum, noun)
    return value


def truth(element: Element) -> bool:
    """The boolean in an element. Raises Refusal: InvalidArgument."""
    value = None if element.children else boolean(element.text)
    if value is None:
        raise bad(element.name, "it is True or False.")
    return value


def word(element: Element, characters_max: int) -> str:
    """The text in an element, which must not be empty. Raises Refusal: InvalidArgument, MalformedXML."""
    if element.children:
        raise malformed(f"{element.name} holds text alone")
    text = element.text
    if not 0 < len(text) <= characters_max:
        raise bad(element.name, f"it has 1 to {characters_max} characters.")
    return text


def tag(element: Element) -> str:
    """A MessageTag or FilterTag, which must fit into a header of a push. Raises Refusal: InvalidArgument,
    MalformedXML."""
    text = word(element, limits.TAG_CHARACTERS_MAX)
    if any(character < " " or character == "\x7f" for character in text):
        raise bad(element.name, "it has no line breaks, tabs or other control characters.")
    return text


CONTENT_TYPE: Final = b"text/xml;charset=utf-8"
"""Without `text/xml`, @alicloud/mns reads an error as a success."""
DECLARATION: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'
XMLNS: Final = 'xmlns="http://mns.aliyuncs.com/doc/v1/"'
_ERROR_XMLNS: Final = 'xmlns="http://mns.aliyuncs.com/doc/v1"'


def document(root: str, inside: str, status: int = 200) -> Response:
    """A response with one document."""
    return Response(status, CONTENT_TYPE, f"{DECLARATION}<{root} {XMLNS}>{inside}</{root}>".encode())


def elements(fields: dict[str, str]) -> str:
    """An element for each field. An empty element in a list crashes the Python SDK, so omit it."""
    return "".join([f"<{name}>{escape(text)}</{name}>" for name, text in fields.items()])


def error_body(code: str, message: str, request_id: str, host: str) -> bytes:
    """An error document. The Python SDK treats one without all four children as a broken connection."""
    fields = f"<Code>{code}</Code><Message>{clean(message)}</Message><RequestId>{request_id}</RequestId>"
    return f"{DECLARATION}<Error {_ERROR_XMLNS}>{fields}<HostId>{clean(host)}</HostId></Error>".encode()
