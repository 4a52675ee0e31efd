"""The JSON 1.0 form: `X-Amz-Target` and a JSON body in, a JSON body out.

Strategy: msgspec reads a body straight into the operation's input and writes the result; nothing in between. Source:
AWS JSON 1.0 protocol, with `x-amzn-query-error` for clients that match on the codes of the Query form.
"""

import json
import re
from typing import Any, Final

import msgspec

from veilmq.protocols.http import Response
from veilmq.protocols.sqs.call import Operation
from veilmq.protocols.sqs.errors import (
    FORBIDDEN_CHARACTERS,
    INVALID_ACTION,
    INVALID_MESSAGE_CONTENTS,
    MALFORMED_INPUT,
    Refusal,
)
from veilmq.protocols.sqs.operations.table import OPERATIONS
from veilmq.protocols.sqs.operations.veil import VEIL_OPERATIONS
from veilmq.protocols.sqs.results import Result

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
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_ENCODE: Final = msgspec.json.Encoder().encode


def read(target: bytes, body: bytes) -> tuple[Operation, Any]:
    """The operation and its input. Raises Refusal naming the member that does not fit."""
    found = _TARGETS.get(target)
    if found is None:
        name = target.decode("latin-1")[:256]
        raise Refusal(INVALID_ACTION, f"The action {name} is not valid for this endpoint.")
    row, decoder = found
    try:
        return row, decoder.decode(body or b"{}")
    except msgspec.ValidationError as wrong:
        raise Refusal(MALFORMED_INPUT, f"The request does not fit {row.name}: {wrong}") from None
    except (ValueError, RecursionError) as wrong:
        if _has_half_a_pair(body):
            raise Refusal(INVALID_MESSAGE_CONTENTS, FORBIDDEN_CHARACTERS) from None
        raise Refusal(MALFORMED_INPUT, f"The body is not valid JSON: {wrong}") from None


def _has_half_a_pair(body: bytes) -> bool:
    """Whether all that is wrong with the JSON is an escaped surrogate without its other half."""
    if not _SURROGATE.search(body):
        return False
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def write(result: Result, headers: Headers) -> Response:
    """The answer of an operation that succeeded."""
    return Response(200, CONTENT_TYPE, _ENCODE(result), headers)


def write_refusal(refusal: Refusal, headers: Headers) -> Response:
    """An error, with the code of the Query form beside the shape's name."""
    fault = refusal.fault
    blame = b"Sender" if fault.sender else b"Receiver"
    body = _ENCODE({"__type": fault.shape, "message": refusal.message})
    headers = (*headers, (b"x-amzn-query-error", fault.code.encode() + b";" + blame))
    return Response(fault.json_status, CONTENT_TYPE, body, headers)
