"""MNS errors: the codes with their statuses, refusals, and the total table from VeilMQ's errors to them.

Strategy: a `Fault` is an error on the wire; `Refusal` carries one to the codec's edge. The table names each leaf of
`veilmq.model.errors`, which a test checks. The messages are those of the source, uncorrected, because programs
search for them; what we add follows in a sentence of its own.

Source: MNS's page "Error codes" (help.aliyun.com/document_detail/27501.html).
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from veilmq.model import errors
from veilmq.model.commands import AnyCommand, ChangeSubscription, Subscribe
from veilmq.model.errors import VeilError


class Fault(NamedTuple):
    """One code of the table."""

    code: str
    status: int
    message: str


ACCESS_DENIED: Final = Fault(
    "AccessDenied", 403, "The OwnerId that your Access Key Id associated to is forbidden for this operation."
)
INVALID_ACCESS_KEY_ID: Final = Fault("InvalidAccessKeyId", 403, "The AccessKey Id you provided is not exist.")
SIGNATURE_DOES_NOT_MATCH: Final = Fault(
    "SignatureDoesNotMatch",
    403,
    "The request signature we calculated does not match the signature you provided. Check your key and signing method.",
)
INVALID_AUTHORIZATION_HEADER: Final = Fault(
    "InvalidAuthorizationHeader",
    400,
    "The Authorization header format is invalid. It is neither `MNS id:signature` nor of signature V4.",
)
MISSING_AUTHORIZATION_HEADER: Final = Fault("MissingAuthorizationHeader", 400, "Authorization header is required.")
INVALID_DATE_HEADER: Final = Fault(
    "InvalidDateHeader", 400, "The Date header format is invalid. It is not in the form of RFC 1123."
)
MISSING_DATE_HEADER: Final = Fault("MissingDateHeader", 400, "Date header is required.")
MISSING_VERSION_HEADER: Final = Fault("MissingVersionHeader", 400, "x-mns-version header is required.")
INVALID_VERSION_HEADER: Final = Fault("InvalidVersionHeader", 400, "The value of x-mns-version must be 2015-06-06.")
TIME_EXPIRED: Final = Fault(
    "TimeExpired", 408, "The http request you sent is expired. Its date is more than 15 minutes off."
)
INVALID_DIGEST: Final = Fault(
    "InvalidDegist", 400, "The Content-MD5 you specified is invalid. It does not fit the body."
)
INVALID_ARGUMENT: Final = Fault("InvalidArgument", 400, "A value in the request is not allowed.")
MALFORMED_XML: Final = Fault("MalformedXML", 400, "The XML you provided was not well-formed.")
INVALID_REQUEST_URL: Final = Fault(
    "InvalidRequestURL", 400, "Http request URL format invalid. The URL or its method is not one of this API."
)
INVALID_QUERY_STRING: Final = Fault("InvalidQueryString", 400, "Http request URL contains invalid querystring item.")
MISSING_RECEIPT_HANDLE: Final = Fault("MissingReceiptHandle", 400, "ReceiptHandle is required.")
MISSING_VISIBILITY_TIMEOUT: Final = Fault("MissingVisibilityTimeout", 400, "VisibilityTimeout is required.")
RECEIPT_HANDLE_ERROR: Final = Fault("ReceiptHandleError", 400, "The receipt handle you provide is not valid.")
INVALID_QUEUE_NAME: Final = Fault(
    "InvalidQueueName",
    400,
    "The queue name you provided is invalid. QueueName should start with alpha or digit and contain only alpha, digit "
    "or -.",
)
QUEUE_NAME_LENGTH_ERROR: Final = Fault("QueueNameLengthError", 400, "Queue name length should between 1 and 120.")
TOPIC_NAME_INVALID: Final = Fault(
    "TopicNameInvalid",
    400,
    "The topic name you provided is invalid. TopicName should start with alpha or digit and contain only alpha, digit "
    "or -.",
)
TOPIC_NAME_LENGTH_ERROR: Final = Fault("TopicNameLengthError", 400, "A topic's name has at most 120 characters.")
SUBSCRIPTION_NAME_INVALID: Final = Fault(
    "SubscriptionNameInvalid",
    400,
    "A subscription's name has letters, digits and hyphens, and begins with a letter or digit.",
)
SUBSCRIPTION_NAME_LENGTH_ERROR: Final = Fault(
    "SubscriptionNameLengthError", 400, "A subscription's name has at most 255 characters."
)
ENDPOINT_INVALID: Final = Fault("EndpointInvalid", 400, "The endpoint is neither a queue's nor an HTTP URL.")
QUEUE_NOT_EXIST: Final = Fault("QueueNotExist", 404, "The queue name you provided is not exist.")
TOPIC_NOT_EXIST: Final = Fault("TopicNotExist", 404, "The topic name you provided is not exist.")
SUBSCRIPTION_NOT_EXIST: Final = Fault("SubscriptionNotExist", 404, "The subscription name you provided is not exist.")
MESSAGE_NOT_EXIST: Final = Fault("MessageNotExist", 404, "Message not exist.")
QUEUE_ALREADY_EXIST: Final = Fault("QueueAlreadyExist", 409, "The queue you want to create is already exist.")
TOPIC_ALREADY_EXIST: Final = Fault(
    "TopicAlreadyExist", 409, "The topic you want to create is already exist with other attributes."
)
SUBSCRIPTION_ALREADY_EXIST: Final = Fault(
    "SubscriptionAlreadyExist", 409, "The subscription you want to create is already exist with other attributes."
)
QUEUE_NUM_EXCEEDED_LIMIT: Final = Fault("QueueNumExceededLimit", 400, "The number of queues exceeds the limit.")
QUEUE_DELETED_RECENTLY: Final = Fault("QueueDeletedRecently", 400, "The queue you want to create is deleted recently.")
TOO_MANY_REQUESTS: Final = Fault("TooManyRequests", 429, "More is waiting than the server takes. Please retry.")
INTERNAL_ERROR: Final = Fault("InternalError", 500, "The server failed; the outcome of the request is unknown.")
INTERNAL_SERVER_ERROR: Final = Fault("InternalServerError", 500, "The request was not carried out. Please retry.")

FAULTS: Final = {fault.code: fault for fault in list(globals().values()) if isinstance(fault, Fault)}
"""All faults by code."""

HTTP_CODES: Final = {
    400: INVALID_REQUEST_URL,
    403: ACCESS_DENIED,
    408: TIME_EXPIRED,
    413: INVALID_ARGUMENT,
    429: TOO_MANY_REQUESTS,
    431: INVALID_ARGUMENT,
}
"""Faults of requests that the listener refuses, by status; the listener's status is kept."""


class Refusal(Exception):
    """A refused request. Never leaves the codec."""

    def __init__(self, fault: Fault, message: str | None = None) -> None:
        super().__init__(fault.code)
        self.fault = fault
        self.message = message or fault.message


def bad(name: str, reason: str) -> Refusal:
    """InvalidArgument."""
    return Refusal(INVALID_ARGUMENT, f"{name}: {reason}")


def out_of_range(name: str, minimum: int, maximum: int, noun: str = "") -> Refusal:
    """InvalidArgument, with the service's text."""
    unit = f" {noun}" if noun else ""
    return Refusal(INVALID_ARGUMENT, f"The value of {name} should between {minimum} and {maximum}{unit}.")


def malformed(reason: str, line: int | None = None, column: int | None = None) -> Refusal:
    """MalformedXML."""
    place = "" if line is None else f" (line {line}, column {column})"
    return Refusal(MALFORMED_XML, f"{MALFORMED_XML.message} {reason[0].upper()}{reason[1:]}{place}.")


def _with_text(fault: Fault) -> Callable[[VeilError, AnyCommand], Refusal]:
    return lambda error, command: Refusal(fault, f"{error}.")


def _just(fault: Fault) -> Callable[[VeilError, AnyCommand], Refusal]:
    return lambda error, command: Refusal(fault)


_NAMES: Final = {
    "body": "MessageBody",
    "delay_us": "DelaySeconds",
    "group": "MessageGroupId",
    "queue": "Endpoint",
    "dead_letter_queue": "DlqPolicy",
    "pushes_per_second_max": "TenantRateLimitPolicy",
}


def _parameter_invalid(error: errors.ParameterInvalid, command: AnyCommand) -> Refusal:
    return bad(_NAMES.get(error.parameter, error.parameter), f"{error.reason}.")


def _too_large(error: errors.MessageTooLarge, command: AnyCommand) -> Refusal:
    return Refusal(INVALID_ARGUMENT, f"The length of message should not be larger than {error.limit_bytes} bytes.")


def _queue_missing(error: errors.QueueMissing, command: AnyCommand) -> Refusal:
    """A subscription names up to two queues: its error says which one is missing."""
    if isinstance(command, Subscribe | ChangeSubscription):
        return Refusal(QUEUE_NOT_EXIST, f"{QUEUE_NOT_EXIST.message.removesuffix('.')}: {error.queue}.")
    return Refusal(QUEUE_NOT_EXIST)


_TABLE: Final[dict[type[VeilError], Callable[[Any, AnyCommand], Refusal]]] = {
    errors.CapabilityMissing: _with_text(INVALID_ARGUMENT),
    errors.ParameterInvalid: _parameter_invalid,
    errors.QueueMissing: _queue_missing,
    errors.QueueExists: _just(QUEUE_ALREADY_EXIST),
    errors.QueueDeletedRecently: _just(QUEUE_DELETED_RECENTLY),
    errors.PurgeInProgress: _just(TOO_MANY_REQUESTS),
    errors.MessageTooLarge: _too_large,
    errors.ReceiptInvalid: _just(RECEIPT_HANDLE_ERROR),
    errors.RedriveRefused: _with_text(INVALID_ARGUMENT),
    errors.TopicMissing: _just(TOPIC_NOT_EXIST),
    errors.TopicExists: _just(TOPIC_ALREADY_EXIST),
    errors.SubscriptionMissing: _just(SUBSCRIPTION_NOT_EXIST),
    errors.SubscriptionExists: _just(SUBSCRIPTION_ALREADY_EXIST),
    errors.SubscriptionsFull: _with_text(INVALID_ARGUMENT),
    errors.AttemptNotRetryable: _with_text(INVALID_ARGUMENT),  # SQS's alone
    errors.LeaseExpired: _just(MESSAGE_NOT_EXIST),
    errors.LeaseTaken: _just(MESSAGE_NOT_EXIST),
    errors.MessageGone: _just(MESSAGE_NOT_EXIST),
    errors.InFlightFull: _just(TOO_MANY_REQUESTS),
    errors.MovesFull: _just(TOO_MANY_REQUESTS),
    errors.QueuesFull: lambda error, command: Refusal(
        QUEUE_NUM_EXCEEDED_LIMIT, f"The number of queues exceeds the limit: {error.limit}."
    ),
    errors.TopicsFull: _with_text(INVALID_ARGUMENT),  # the documents name no code of its own
    errors.AccountSubscriptionsFull: _with_text(INVALID_ARGUMENT),  # nor here
    errors.RateExceeded: lambda error, command: Refusal(
        TOO_MANY_REQUESTS, f"The queue hands out at most {error.limit} messages a second. Please retry."
    ),
    errors.DiskLow: lambda error, command: Refusal(
        INTERNAL_SERVER_ERROR, "The disk is nearly full. Please retry later."
    ),
    errors.Overloaded: _just(TOO_MANY_REQUESTS),
    errors.StoreFailed: _just(INTERNAL_SERVER_ERROR),
    errors.StoreUnknown: _just(INTERNAL_ERROR),
}


def fault_of(error: VeilError, command: AnyCommand) -> Refusal:
    """The refusal for a command's error. Total over `veilmq.model.errors.leaves()`."""
    return _TABLE[type(error)](error, command)
