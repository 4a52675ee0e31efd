"""Maps SQS's error codes to our errors.

Strategy: one total table from code to error; a code that is not in it becomes a ServiceError with the service's text.
Codes come in two forms, and both are read: `AWS.SimpleQueueService.NonExistentQueue` of the Query protocol,
`QueueDoesNotExist` of the service model. InvalidParameterValue has many meanings; its text decides. Sequence and
attempt of a LeaseError are 0, because SQS does not report them.

Source: the error sections of the SQS API Reference and the service model's shapes.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from veilmq.client.adapters.foreign import foreign_answer
from veilmq.client.errors import ServiceError
from veilmq.model.errors import (
    NAME_TAKEN,
    CapabilityMissing,
    InFlightFull,
    LeaseExpired,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    PurgeInProgress,
    QueueDeletedRecently,
    QueueExists,
    QueueMissing,
    QueuesFull,
    ReceiptInvalid,
    VeilError,
)

_PREFIX: Final = "AWS.SimpleQueueService."
_MINUTE_US: Final = 60_000_000
_IN_FLIGHT_MAX: Final = 120_000
_FIFO_IN_FLIGHT_MAX: Final = 20_000
_MESSAGE_BYTES_MAX: Final = 1_048_576
_ENTITY_TOO_LARGE: Final = 413
_NO_REFUSAL: Final = range(200, 400)

_PARAMETER: Final = re.compile(r"for parameter (\w+) is invalid(?:\. Reason: (.*))?", re.DOTALL)
_NAME_RULE: Final = "hyphens, or underscores. 1 to 80 in length"
_MISSING: Final = re.compile(r"must contain the parameter ([\w.]*\w)")
_LIMIT: Final = re.compile(r": (\d{1,16})\.")
_SETTING: Final = re.compile(r"for attribute (\w+)")
_BYTES: Final = re.compile(r"(?:shorter than|longer than) (\d+) bytes")
_SENT_BYTES: Final = re.compile(r"You have sent (\d+) bytes")


class Refusal(msgspec.Struct, frozen=True):
    """What a service reports when it refuses, and the queue that it is about."""

    code: str
    status: int
    request_id: str
    message: str
    queue: str
    size_bytes: int = 0
    """Of the message that was sent, if one was."""


Refused = TypeVar("Refused", bound=Refusal)


_PORT_NAMES: Final = {
    "MessageBody": "body",
    "Body": "body",
    "MessageAttributes": "attributes",
    "Attributes": "attributes",
    "DelaySeconds": "delay",
    "Delay": "delay",
    "TimeToLive": "ttl",
    "Priority": "priority",
    "MessageGroupId": "group",
    "Group": "group",
    "MessageDeduplicationId": "deduplication_id",
    "DeduplicationId": "deduplication_id",
    "Type": "type",
    "LeaseHint": "lease_hint",
    "Tag": "tag",
    "VisibilityTimeout": "lease",
    "Lease": "lease",
    "WaitTimeSeconds": "wait",
    "Wait": "wait",
    "MaxNumberOfMessages": "count_max",
    "CountMax": "count_max",
    "ReceiptHandle": "handle",
    "Handle": "handle",
    "Handles": "handle",
    "QueueName": "name",
    "Queue": "name",
    "QueueUrl": "name",
}
"""The parameter's name in SQS or VeilMQ -> its name in the port."""


_TEMPLATE_NAMES: Final = {
    "VisibilityTimeout": "visibility_timeout",
    "DelaySeconds": "delay",
    "MessageRetentionPeriod": "retention",
    "ReceiveMessageWaitTimeSeconds": "wait",
    "MaximumMessageSize": "message_bytes_max",
    "RedrivePolicy": "redrive",
    "FifoQueue": "fifo",
    "ContentBasedDeduplication": "content_deduplication",
}
"""The attribute of a queue in SQS -> the setting's name in a Template, or in the store."""


def port_name(parameter: str) -> str:
    """The port's name of a parameter whose times are seconds; the service's own name if the port has none."""
    return _PORT_NAMES.get(parameter) or parameter.removesuffix("_us")


def error_of(refusal: Refusal) -> VeilError:
    """The error for a code. Never raises."""
    return error_in(_TABLE, refusal, refusal.code.removeprefix(_PREFIX))


def error_in(table: Mapping[str, Callable[[Refused], VeilError]], refusal: Refused, code: str = "") -> VeilError:
    """The error for a code in a protocol's table, or for the status: that of a proxy, without a code, is the same error
    on all adapters. Never raises.

    code: the key in the table, where that is not the code of `refusal`.
    """
    status = refusal.status
    make = table.get(code or refusal.code)
    if make is not None:
        error = make(refusal)
    elif status in _NO_REFUSAL:
        error = foreign_answer(status)
    elif status == _ENTITY_TOO_LARGE and refusal.size_bytes:
        error = _too_large(refusal)
    else:
        error = ServiceError(
            code=refusal.code or f"HTTP {status}", status=status, request_id=refusal.request_id, message=refusal.message
        )
    error.request_id = refusal.request_id
    return error


def _invalid_value(refusal: Refusal) -> VeilError:
    text = refusal.message
    if "must be shorter than" in text:
        return _too_large(refusal)
    stale = _stale(text)
    if stale is not None:
        return stale
    if _NAME_RULE in text:  # of CreateQueue; it names no parameter
        return ParameterInvalid(parameter="name", reason=f"{text}, not {refusal.queue!r}")
    found = _PARAMETER.search(text)
    if found is None:
        return ParameterInvalid(parameter="request", reason=text)
    return ParameterInvalid(parameter=port_name(found[1]), reason=found[2] or text)


def _stale(text: str) -> VeilError | None:
    """The error of a receipt handle that no longer counts, by SQS's text: a single call and a batch have it under
    different codes."""
    if "does not exist or is not available for visibility timeout change" in text:
        return MessageGone(sequence=0, attempt=0)
    return LeaseExpired(sequence=0, attempt=0) if "receipt handle has expired" in text else None


def _handle_invalid(refusal: Refusal) -> VeilError:
    return _stale(refusal.message) or ReceiptInvalid(reason=refusal.message)


def _too_large(refusal: Refusal) -> VeilError:
    limit, sent = _BYTES.search(refusal.message), _SENT_BYTES.search(refusal.message)
    return MessageTooLarge(
        size_bytes=int(sent[1]) if sent else refusal.size_bytes,
        limit_bytes=int(limit[1]) if limit else _MESSAGE_BYTES_MAX,
    )


def _exists(refusal: Refusal) -> VeilError:
    found = _SETTING.search(refusal.message)
    if found is not None:
        setting = _TEMPLATE_NAMES.get(found[1], found[1])
    elif "as its alias" in refusal.message:
        setting = NAME_TAKEN
    else:
        setting = "tags" if "tags" in refusal.message else "setting"
    return QueueExists(queue=refusal.queue, setting=setting)


def _missing_parameter(refusal: Refusal) -> VeilError:
    found = _MISSING.search(refusal.message)
    return ParameterInvalid(parameter=port_name(found[1]) if found else "request", reason=refusal.message)


def _queues_full(refusal: Refusal) -> VeilError:
    found = _LIMIT.search(refusal.message)
    return QueuesFull(account="of this key", limit=int(found[1]) if found else 0)


def _over_limit(refusal: Refusal) -> VeilError:
    if "number of queues" in refusal.message:
        return _queues_full(refusal)
    return InFlightFull(
        queue=refusal.queue, limit=_FIFO_IN_FLIGHT_MAX if refusal.queue.endswith(".fifo") else _IN_FLIGHT_MAX
    )


def invalid(parameter: str) -> Callable[[Refusal], VeilError]:
    """Makes a refusal of that parameter's value an error."""
    return lambda refusal: ParameterInvalid(parameter=parameter, reason=refusal.message)


def _no_queue(refusal: Refusal) -> VeilError:
    return QueueMissing(queue=refusal.queue)


_TABLE: Final[dict[str, Callable[[Refusal], VeilError]]] = {
    "NonExistentQueue": _no_queue,
    "QueueDoesNotExist": _no_queue,
    "QueueAlreadyExists": _exists,
    "QueueNameExists": _exists,
    "QueueDeletedRecently": lambda refusal: QueueDeletedRecently(queue=refusal.queue, wait_us=_MINUTE_US),
    "PurgeQueueInProgress": lambda refusal: PurgeInProgress(queue=refusal.queue, wait_us=_MINUTE_US),
    "ReceiptHandleIsInvalid": _handle_invalid,
    "MessageNotInflight": lambda refusal: LeaseExpired(sequence=0, attempt=0),
    "OverLimit": _over_limit,
    "QueueNumExceededLimit": _queues_full,
    "BatchRequestTooLong": _too_large,
    "InvalidParameterValue": _invalid_value,
    "InvalidParameterValueException": _invalid_value,
    "MissingParameter": _missing_parameter,
    "MissingRequiredParameterException": _missing_parameter,
    "InvalidMessageContents": invalid("body"),
    "InvalidAttributeName": invalid("attribute"),
    "InvalidAttributeValue": invalid("attribute"),
    "InvalidIdFormat": lambda refusal: ReceiptInvalid(reason=refusal.message),
    "UnsupportedOperation": lambda refusal: CapabilityMissing(capability=refusal.message),
}
