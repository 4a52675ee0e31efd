"""The JSON 1.0 form: reads `X-Amz-Target` and a JSON body, writes a JSON body.

Strategy: msgspec decodes a body directly into the operation's input, and encodes the result. Source: AWS JSON 1.0
protocol, with `x-amzn-query-error` for clients that match on the codes of the Query form.
"""

import re
from typing import Any, Final

import msgspec

from veilmq.protocols.http import Response
from veilmq.protocols.sqs import half_pairs
from veilmq.protocols.sqs.call import Operation
from veilmq.protocols.sqs.errors import INVALID_ACTION, MALFORMED_INPUT, Refusal
from veilmq.protocols.sqs.operations.table import OPERATIONS
from veilmq.protocols.sqs.operations.veil import VEIL_OPERATIONS
from veilmq.protocols.sqs.results import EMPTY, Result

CONTENT_TYPE: Final = b"application/x-amz-json-1.0"
TARGET_PREFIX: Final = "AmazonSQS."
VEIL_TARGET_PREFIX: Final = "VeilMQ."
TARGETS: Final = (TARGET_PREFIX.encode(), VEIL_TARGET_PREFIX.encode())

Headers = tuple[tuple[bytes, bytes], ...]

_TARGETS: Final[dict[bytes, tuple[Operation, "msgspec.json.Decoder[Any]"]]] = {
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
}
_STARTS: Final = {
    "array": "Start of list found where not expected",
    "object": "Start of structure or map found where not expected",
}
"""AWS's words (async-aws/aws #1667, and its other services that speak JSON)."""


def read(target: bytes, body: bytes) -> tuple[Operation, Any]:
    """The operation and its input. Raises Refusal naming the member that does not fit."""
    found = _TARGETS.get(target)
    if found is None:
        name = target.decode("latin-1")[:256]
        raise Refusal(INVALID_ACTION, f"The action {name} is not valid for this endpoint.")
    row, decoder = found
    try:
        return row, _decoded(row, decoder, body or b"{}")
    except msgspec.ValidationError as wrong:
        words = _misfit(str(wrong)) if target.startswith(TARGETS[0]) else None
        raise Refusal(MALFORMED_INPUT, words or f"The request does not fit {row.name}: {wrong}") from None


def _misfit(wrong: str) -> str | None:
    """The message in AWS's words, with the place; None if AWS has none."""
    found = _MISFIT.fullmatch(wrong)
    if found is None:
        return None
    words = _MISFITS.get((found["wanted"], found["got"])) or _STARTS.get(found["got"])
    return words and words + found["place"]


def _decoded(row: Operation, decoder: "msgspec.json.Decoder[Any]", body: bytes) -> Any:
    """Raises ValidationError; Refusal for invalid JSON."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except UnicodeDecodeError:
        raise Refusal(MALFORMED_INPUT, "The body is not UTF-8.") from None
    except (ValueError, RecursionError) as wrong:
        tree = half_pairs.read(row.name, body)
        if tree is None:
            raise Refusal(MALFORMED_INPUT, f"The body is not valid JSON: {wrong}") from None
    return msgspec.convert(tree, row.input_type)


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
