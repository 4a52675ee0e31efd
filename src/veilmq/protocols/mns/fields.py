"""How values look on MNS's wire: the query string, whole numbers, booleans, the headers that ask for a page of a list,
and the XML of requests and responses.

Strategy: names of parameters are case-insensitive (SDKs write ReceiptHandle and receiptHandle). Values are
percent-decoded and `+` stays `+`, because three SDKs paste a handle unescaped. The marker of a page is its last name in
base64, so no state is kept between pages.

A document becomes the small tree of `veilmq.protocols`. Namespaces are ignored, because ali-mns sends none. A
response is joined strings, without a tree. The namespace of a response has a final slash, except in `Error`: the Java
SDK reads errors only without it, and everything else only with it. Other clients read both.
"""

import re
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

from veilmq.protocols import DocumentInvalid, Element, Response, clean, escape, read_document, show
from veilmq.protocols.mns import errors, limits
from veilmq.protocols.mns.call import Asked, Call
from veilmq.protocols.mns.errors import Refusal, bad, malformed, out_of_range

T = TypeVar("T")

_INTEGER: Final = re.compile(r"[+-]?[0-9]+\Z")
_INTEGER_CHARACTERS_MAX: Final = 20
"""A longer number is out of every range, and is not converted, which would take long."""
_BOOLEANS: Final = {"true": True, "false": False}


def read_query(query: bytes) -> dict[str, str]:
    """The parameters by lower-case name. Raises Refusal: InvalidQueryString."""
    if not query:
        return {}
    parameters: dict[str, str] = {}
    parts = query.split(b"&")
    if len(parts) > limits.QUERY_PAIRS_MAX:
        raise Refusal(errors.INVALID_QUERY_STRING, f"A request has at most {limits.QUERY_PAIRS_MAX} parameters.")
    for part in parts:
        if not part:
            continue
        if b"%" in part:
            name, _, value = part.partition(b"=")
            part = unquote_to_bytes(name) + b"=" + unquote_to_bytes(value)
        try:
            given, _, text = part.decode().partition("=")
        except UnicodeDecodeError:
            raise Refusal(errors.INVALID_QUERY_STRING, "The query string is not UTF-8.") from None
        name_lower = given.lower()
        if name_lower in parameters:
            raise Refusal(errors.INVALID_QUERY_STRING, f"{_item(show(given))} It is given more than once.")
        parameters[name_lower] = text
    return parameters


def _item(name: str) -> str:
    return f'{errors.INVALID_QUERY_STRING.message[:-1]} "{name}".'


def whole_number(parameters: dict[str, str], name: str, minimum: int, maximum: int, noun: str = "") -> int | None:
    """The parameter's value; None if it is not given. Raises Refusal: not a number, or out of range."""
    text = parameters.get(name.lower())
    if text is None:
        return None
    if not _INTEGER.match(text):
        raise Refusal(errors.INVALID_QUERY_STRING, f"{_item(name)} Its value is not a whole number.")
    value = integer(text)
    if value is None or not minimum <= value <= maximum:
        raise out_of_range(name, minimum, maximum, noun)
    return value


def flag(parameters: dict[str, str], name: str) -> bool:
    """Whether the parameter is present and true. Raises Refusal: neither true nor false."""
    text = parameters.get(name)
    if text is None:
        return False
    value = boolean(text)
    if value is None:
        raise Refusal(errors.INVALID_QUERY_STRING, f"{_item(name)} Its value is neither true nor false.")
    return value


def boolean(text: str) -> bool | None:
    """`True` (Python) and `true` (Go, Java); None for anything else."""
    return _BOOLEANS.get(text.lower())


def integer(text: str) -> int | None:
    """A whole number; None for any other text, and for one that is out of every range."""
    return int(text) if len(text) <= _INTEGER_CHARACTERS_MAX and _INTEGER.match(text) else None


class Page(NamedTuple):
    """The requested part of a list."""

    prefix: str
    after: str
    count_max: int
    with_meta: bool


def read_page(asked: Asked) -> Page:
    """x-mns-prefix, x-mns-marker, x-mns-ret-number and x-mns-with-meta. Raises Refusal: InvalidArgument."""
    count = limits.RET_NUMBER_DEFAULT
    given = asked.header(b"x-mns-ret-number")
    if given:
        value = integer(given)
        if value is None or not 1 <= value <= limits.RET_NUMBER_MAX:
            raise out_of_range("x-mns-ret-number", 1, limits.RET_NUMBER_MAX)
        count = value
    with_meta = boolean(asked.header(b"x-mns-with-meta") or "false")
    if with_meta is None:
        raise bad("x-mns-with-meta", "it is true or false.")
    return Page(asked.header(b"x-mns-prefix"), _read_marker(asked.header(b"x-mns-marker")), count, with_meta)


def _read_marker(text: str) -> str:
    if not text:
        return ""
    try:
        name = b64decode(text.encode("ascii"), b"-_", validate=True).decode()
    except ValueError:
        name = ""
    if not name:
        raise bad("x-mns-marker", "it is not one that a list gave.")
    return name


def marker_of(names: list[str], more: bool) -> str:
    """The element with the next page's marker; empty on the last page."""
    if not more:
        return ""
    return f"<NextMarker>{urlsafe_b64encode(names[-1].encode()).decode()}</NextMarker>"


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


def listing(
    call: Call,
    kind: str,
    place: str,
    found: Iterable[tuple[str, T]],
    attributes: Callable[[T], dict[str, str]],
    *,
    more: bool,
) -> Response:
    """200 with the URL and name of each that a page found, and its attributes if they were asked for. The memo of the
    call: the page.

    kind: Queue, Topic or Subscription. place: the path of their URLs before the name. found: by name.
    """
    page: Page = call.memo
    start = call.asked.url(place)
    names, entries = list[str](), list[str]()
    for name, info in found:
        names.append(name)
        fields = {f"{kind}URL": start + name, f"{kind}Name": name}
        entries.append(f"<{kind}>{elements(fields | attributes(info) if page.with_meta else fields)}</{kind}>")
    return document(f"{kind}s", "".join(entries) + marker_of(names, more))


def elements(fields: dict[str, str]) -> str:
    """An element for each field. An empty element in a list crashes the Python SDK, so omit it."""
    return "".join([f"<{name}>{escape(text)}</{name}>" for name, text in fields.items()])


def error_body(code: str, message: str, request_id: str, host: str) -> bytes:
    """An error document. The Python SDK treats one without all four children as a broken connection."""
    fields = f"<Code>{code}</Code><Message>{clean(message)}</Message><RequestId>{request_id}</RequestId>"
    return f"{DECLARATION}<Error {_ERROR_XMLNS}>{fields}<HostId>{clean(host)}</HostId></Error>".encode()
