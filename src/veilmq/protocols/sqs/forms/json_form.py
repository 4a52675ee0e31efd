"""The JSON 1.0 form: reads `X-Amz-Target` and a JSON body, writes a JSON body.

Strategy: msgspec decodes a body directly into the operation's input, and encodes the result. Source: AWS JSON 1.0
protocol, with `x-amzn-query-error` for clients that match on the codes of the Query form.

msgspec refuses a whole body for half of a surrogate pair: an escape such as `\\ud800` without its other half. Where the
ordinary checks look, it is replaced by U+FFFE, which XML cannot carry either, so those checks refuse only the batch
entry that contains it, by name. Anywhere else the request is refused with the position.
"""

import json
import re
from itertools import islice
from typing import Any, Final, NoReturn

import msgspec

from veilmq.protocols import Response
from veilmq.protocols.sqs import errors
from veilmq.protocols.sqs.call import Operation, Result
from veilmq.protocols.sqs.errors import Refusal
from veilmq.protocols.sqs.forms import EMPTY
from veilmq.protocols.sqs.operations import OPERATIONS
from veilmq.protocols.sqs.veil.operations import VEIL_OPERATIONS

CONTENT_TYPE: Final = b"application/x-amz-json-1.0"
TARGET_PREFIX: Final = "AmazonSQS."
VEIL_TARGET_PREFIX: Final = "VeilMQ."
TARGETS: Final = (TARGET_PREFIX.encode(), VEIL_TARGET_PREFIX.encode())

Headers = tuple[tuple[bytes, bytes], ...]

KNOWN: Final[dict[bytes, tuple[Operation, "msgspec.json.Decoder[Any]"]]] = {
    (prefix + row.name).encode(): (row, msgspec.json.Decoder(row.input_type))
    for prefix, rows in ((TARGET_PREFIX, OPERATIONS), (VEIL_TARGET_PREFIX, VEIL_OPERATIONS))
    for row in rows.values()
}
_ENCODE: Final = msgspec.json.Encoder().encode
_MISFIT: Final = re.compile(r"Expected `(?P<wanted>\w+)[^`]*`, got `(?P<got>\w+)`(?P<place>.*)")
"""msgspec's message about a value of the wrong type."""
_MISFITS: Final = {
    ("int", "str"): "STRING_VALUE can not be converted to an Integer",
    ("str", "int"): "NUMBER_VALUE can not be converted to a String",
    ("str", "float"): "NUMBER_VALUE can not be converted to a String",
    ("array", "str"): "Expected list or null",
}
_STARTS: Final = {
    "array": "Start of list found where not expected",
    "object": "Start of structure or map found where not expected.",
}
"""AWS's words (async-aws/aws #1667; of other services that speak JSON: aoyagikouhei/athena-local)."""


def read(target: bytes, body: bytes) -> tuple[Operation, Any]:
    """The operation and its input. Raises Refusal naming the member that does not fit."""
    found = KNOWN.get(target)
    if found is None:
        if not target:
            raise Refusal(errors.INVALID_ACTION, "The request must name its action in the header X-Amz-Target.")
        name = target.decode("latin-1")[:256]
        raise Refusal(errors.INVALID_ACTION, f"The action {name} is not valid for this endpoint.")
    row, decoder = found
    try:
        return row, decoder.decode(body or b"{}")
    except (ValueError, RecursionError) as wrong:
        if isinstance(wrong, msgspec.ValidationError):
            raise _misfit(row, target, wrong) from None
        tree = _repaired(row, body, wrong)
    try:
        return row, msgspec.convert(tree, row.input_type)
    except msgspec.ValidationError as wrong:
        raise _misfit(row, target, wrong) from None


def _misfit(row: Operation, target: bytes, wrong: msgspec.ValidationError) -> Refusal:
    words = _words_of(str(wrong)) if target.startswith(TARGETS[0]) else None
    return Refusal(errors.MALFORMED_INPUT, words or f"The request does not fit {row.name}: {wrong}")


def _words_of(wrong: str) -> str | None:
    """The message in AWS's words, with the place; None if AWS has none."""
    found = _MISFIT.fullmatch(wrong)
    if found is None:
        return None
    words = _MISFITS.get((found["wanted"], found["got"])) or _STARTS.get(found["got"])
    return words and words + found["place"]


def _repaired(row: Operation, body: bytes, wrong: Exception) -> Any:
    """The body as a tree without half pairs. Raises Refusal if anything else is wrong with it."""
    try:
        body.decode()
    except UnicodeDecodeError:  # for msgspec itself this is a DecodeError since 0.23
        raise Refusal(errors.MALFORMED_INPUT, "The body is not UTF-8.") from None
    tree = replaced_half_pairs(row.name, body)
    if tree is None:
        raise Refusal(errors.MALFORMED_INPUT, f"The body is not valid JSON: {wrong}") from None
    return tree


def write(result: Result, headers: Headers) -> Response:
    """The response of a successful operation; without a body if it has no output (API reference, DeleteMessage)."""
    return Response(200, CONTENT_TYPE, b"" if result is EMPTY else _ENCODE(result), headers)


def write_refusal(refusal: Refusal, headers: Headers) -> Response:
    """An error response, with the code of the Query form and the shape's name."""
    fault = refusal.fault
    blame = b"Sender" if fault.sender else b"Receiver"
    body = _ENCODE({"__type": fault.shape, "message": refusal.message})
    headers = (*headers, (b"x-amzn-query-error", fault.code.encode() + b";" + blame))
    return Response(fault.status, CONTENT_TYPE, body, headers)


_ESCAPED: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[,\[{]', re.DOTALL)
"""A text, or where another value begins."""
_HALF: Final = re.compile("[\ud800-\udfff]")
_FORBIDDEN: Final = "\ufffe"
_REPLACEMENT: Final = "\ufffd"

Way = tuple[str | int, ...]
"""The path from the input's root: names of members and keys, indices of lists."""

_EACH: Final = "*"


def _attributes(member: str) -> tuple[Way, ...]:
    return (member, _EACH), (member, _EACH, "DataType"), (member, _EACH, "StringValue")


_MESSAGE: Final[tuple[Way, ...]] = (
    ("MessageBody",),
    ("MessageGroupId",),
    ("MessageDeduplicationId",),
    *_attributes("MessageAttributes"),
    *_attributes("MessageSystemAttributes"),
)
_HANDLE: Final[tuple[Way, ...]] = (("ReceiptHandle",),)
_VEIL_MESSAGE: Final[tuple[Way, ...]] = (
    ("Body",),
    ("Group",),
    ("DeduplicationId",),
    ("Type",),
    ("Tag",),
    *_attributes("Attributes"),
)


def _in_each(member: str, ways: tuple[Way, ...]) -> tuple[Way, ...]:
    return tuple((member, _EACH, *way) for way in ways)


_CHECKED: Final[dict[str, tuple[Way, ...]]] = {
    "SendMessage": _MESSAGE,
    "SendMessageBatch": _in_each("Entries", _MESSAGE),
    "DeleteMessage": _HANDLE,
    "DeleteMessageBatch": _in_each("Entries", _HANDLE),
    "ChangeMessageVisibility": _HANDLE,
    "ChangeMessageVisibilityBatch": _in_each("Entries", _HANDLE),
    "CreateQueue": (("tags", _EACH),),
    "TagQueue": (("Tags", _EACH),),
    "Send": _in_each("Messages", _VEIL_MESSAGE),
    "Extend": _in_each("Entries", (("Body",), ("Handle",))),
    "Delete": (("Handles", _EACH),),
}
"""Operation -> places where a text, or the name of an element, is refused if XML cannot carry it."""


_TOKENS_MAX: Final = 50_000
"""`Send` of 256 messages with ten attributes each has 27,143. A body of 6 MB can be a tree of 2,000,000 lists, which
takes seconds."""


def replaced_half_pairs(operation: str, body: bytes) -> Any:
    """The body as a tree with each half pair replaced; None if the body is invalid for another reason, or has too many
    values to look.

    Raises Refusal for a half pair that no check would find.
    """
    if not _ESCAPED.search(body) or next(islice(_TOKEN.finditer(body), _TOKENS_MAX, None), None) is not None:
        return None
    try:
        tree = json.loads(body.decode(), parse_constant=_no_constant)
        return _Replacing(_CHECKED.get(operation, ())).node(tree)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which JSON does not have."""
    raise ValueError(name)


class _Replacing:
    def __init__(self, checked: tuple[Way, ...]) -> None:
        self._checked = checked
        self._way: list[str | int] = []
        """To the value that is being looked at."""

    def node(self, node: Any) -> Any:
        """The value with half pairs replaced. Raises Refusal."""
        if isinstance(node, str):
            return self._text(node)
        if isinstance(node, list):
            return [self._below(index, each)[1] for index, each in enumerate(node)]
        if isinstance(node, dict):
            return dict(self._below(key, each) for key, each in node.items())
        return node

    def _below(self, step: str | int, node: Any) -> tuple[str | int, Any]:
        """The element and its name, with half pairs replaced."""
        self._way.append(step)
        found = step if isinstance(step, int) else self._text(step), self.node(node)
        self._way.pop()
        return found

    def _text(self, text: str) -> str:
        if _HALF.search(text) is None:
            return text
        way = tuple(self._way)
        if not any(_leads(pattern, way) for pattern in self._checked):
            place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in way)[:256]
            reason = f"Half of a surrogate pair is no character - at `${_HALF.sub(_REPLACEMENT, place)}`"
            raise Refusal(errors.INVALID_PARAMETER_VALUE, reason)
        return _HALF.sub(_FORBIDDEN, text)


def _leads(pattern: Way, way: Way) -> bool:
    return len(pattern) == len(way) and all(step in (_EACH, taken) for step, taken in zip(pattern, way, strict=True))
