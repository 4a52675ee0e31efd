"""Reads the body of a request: its checksum and its XML document.

Strategy: Content-MD5 is optional and has three forms in real clients; the one that is sent must match. Namespaces are
ignored (ali-mns sends none).
"""

from base64 import b64encode
from hashlib import md5

from veilmq.protocols.http import Request
from veilmq.protocols.mns import limits
from veilmq.protocols.mns.errors import INVALID_ARGUMENT, INVALID_DIGEST, Refusal, bad, malformed, out_of_range
from veilmq.protocols.mns.parameters import boolean, integer
from veilmq.protocols.xml import DocumentInvalid, Element, read_document


def check_md5(request: Request) -> None:
    """Raises Refusal: InvalidDegist."""
    given = request.headers.get(b"content-md5")
    if not given:
        return
    digest = md5(request.body, usedforsecurity=False)
    # Python, Go and @alicloud/mns encode the hex digits; ali-mns the bytes, as RFC 1864 says.
    if given == b64encode(digest.hexdigest().encode()) or given == b64encode(digest.digest()):
        return
    if given.lower() != digest.hexdigest().encode():
        raise Refusal(INVALID_DIGEST)


def read_root(body: bytes) -> Element:
    """The outermost element of the document. Raises Refusal: MalformedXML, InvalidArgument."""
    if len(body) > limits.DOCUMENT_BYTES_MAX:
        raise Refusal(INVALID_ARGUMENT, f"The request exceeds {limits.DOCUMENT_BYTES_MAX} bytes.")
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
