"""What MNS says in its codes -> the house's errors.

Strategy: one total table from code to error; a code that is not in it is a ServiceError as it stands. InvalidArgument
is many things; its wording tells which. Sequence and attempt of a LeaseError are 0: the service does not tell them.
Source: the table of error codes of the MNS API.
"""

import re
from collections.abc import Callable
from typing import Final

from veilmq.client.service_errors import Said, error_in
from veilmq.model.errors import (
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueDeletedRecently,
    QueueExists,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)

_MINUTE_US: Final = 60_000_000
_LENGTH: Final = re.compile(r"length of message should not be larger than (\d+) bytes")
_NAMED: Final = re.compile(r"\s*(?:The value of )?(\w+)(?: should|: )")
_PORT_NAMES: Final = {
    "MessageBody": "body",
    "DelaySeconds": "delay",
    "Priority": "priority",
    "VisibilityTimeout": "lease",
    "UserProperties": "attributes",
    "SystemProperties": "attributes",
    "waitseconds": "wait",
    "numOfMessages": "count_max",
    "MessageRetentionPeriod": "retention",
    "MaximumMessageSize": "message_bytes_max",
    "PollingWaitSeconds": "wait",
}
"""What MNS calls a parameter -> what the port calls it."""


def error_of(said: Said) -> VeilError:
    """The error that the code stands for. Never raises."""
    return error_in(_TABLE, said)


def _argument(said: Said) -> VeilError:
    length = _LENGTH.search(said.message)
    if length is not None:
        return MessageTooLarge(size_bytes=said.size_bytes, limit_bytes=int(length[1]))
    named = _NAMED.match(said.message)
    name = "request" if named is None else _PORT_NAMES.get(named[1], named[1])
    return ParameterInvalid(parameter=name, reason=said.message)


def _invalid(parameter: str) -> Callable[[Said], VeilError]:
    return lambda said: ParameterInvalid(parameter=parameter, reason=said.message)


_TABLE: Final[dict[str, Callable[[Said], VeilError]]] = {
    "QueueNotExist": lambda said: QueueMissing(queue=said.queue),
    "QueueAlreadyExist": lambda said: QueueExists(queue=said.queue, setting="attributes"),
    "QueueDeletedRecently": lambda said: QueueDeletedRecently(queue=said.queue, wait_us=_MINUTE_US),
    # Of a handle: deleted, expired, or one that a later receive or change made stale. The service does not tell which.
    "MessageNotExist": lambda said: MessageGone(sequence=0, attempt=0),
    "ReceiptHandleError": lambda said: ReceiptInvalid(reason=said.message),
    "MissingReceiptHandle": lambda said: ReceiptInvalid(reason=said.message),
    "MissingVisibilityTimeout": _invalid("lease"),
    "InvalidArgument": _argument,
    "MalformedXML": _invalid("request"),
    "InvalidRequestURL": _invalid("request"),
    "InvalidQueryString": _invalid("request"),
    "InvalidQueueName": _invalid("name"),
    "QueueNameLengthError": _invalid("name"),
}
