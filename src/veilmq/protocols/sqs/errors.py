"""All SQS errors, and the mapping of our errors to them.

Strategy: a `Fault` is a row of data: the code of the Query form (which botocore and old SDKs match, and which
`x-amzn-query-error` carries), the shape of the JSON form, and the status. `Refusal` carries a fault and its message to
the edge of the codec; nothing else is raised here. `fault_of` is the one total table from `VeilError` to faults.
Source: the error shapes of AWS's Smithy model, whose `awsQueryError` and `httpError` have one status; the "Common
Errors" page of the SQS API Reference.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from veilmq.model import errors
from veilmq.model.commands import AnyCommand, ChangeQueue, CreateQueue, Delete, Extend, PurgeQueue
from veilmq.model.errors import NAME_TAKEN, OTHER_QUEUE, TARGET_MISSING, VeilError
from veilmq.model.messages import first_forbidden_character
from veilmq.model.settings.queue import RedrivePolicy
from veilmq.protocols import show
from veilmq.protocols.sqs import limits
from veilmq.protocols.sqs.addresses import arn

_SQS: Final = "com.amazonaws.sqs#"
_COMMON: Final = "com.amazon.coral.service#"
LABEL_PREFIX: Final = "sqs."
"""Prefix of SQS's labels (attributes of SQS alone), to keep them apart from those of other protocols."""
_PREFIX: Final = "AWS.SimpleQueueService."


class Fault(msgspec.Struct, frozen=True):
    """One kind of wire error."""

    code: str
    """In the Query form, in batch entries, and in `x-amzn-query-error`."""
    shape: str
    """`__type` of the JSON form."""
    status: int = 400
    """The same in both forms."""
    sender: bool = True
    """False: the fault is ours, and an SDK may retry."""


def _model(shape: str, code: str | None = None, status: int = 400) -> Fault:
    """An error shape of the service model."""
    return Fault(code or shape, _SQS + shape, status)


def _common(shape: str, code: str, status: int, sender: bool = True) -> Fault:
    return Fault(code, _COMMON + shape, status, sender)


def _kms(name: str, code: str, status: int = 400) -> Fault:
    return _model(f"Kms{name}", f"KMS.{code}", status)


KMS_FAULTS: Final = {
    "access-denied": _kms("AccessDenied", "AccessDeniedException"),
    "disabled": _kms("Disabled", "DisabledException"),
    "invalid-key-usage": _kms("InvalidKeyUsage", "InvalidKeyUsageException"),
    "invalid-state": _kms("InvalidState", "InvalidStateException"),
    "not-found": _kms("NotFound", "NotFoundException"),
    "opt-in-required": _kms("OptInRequired", "OptInRequired", 403),
    "throttled": _kms("Throttled", "ThrottlingException"),
}
"""Reasons why a queue's KMS key fails, by their words in the setting."""

BATCH_ENTRY_IDS_NOT_DISTINCT: Final = _model("BatchEntryIdsNotDistinct", _PREFIX + "BatchEntryIdsNotDistinct")
BATCH_REQUEST_TOO_LONG: Final = _model("BatchRequestTooLong", _PREFIX + "BatchRequestTooLong")
EMPTY_BATCH_REQUEST: Final = _model("EmptyBatchRequest", _PREFIX + "EmptyBatchRequest")
INVALID_ADDRESS: Final = _model("InvalidAddress", status=404)
INVALID_ATTRIBUTE_NAME: Final = _model("InvalidAttributeName")
INVALID_ATTRIBUTE_VALUE: Final = _model("InvalidAttributeValue")
INVALID_BATCH_ENTRY_ID: Final = _model("InvalidBatchEntryId", _PREFIX + "InvalidBatchEntryId")
INVALID_MESSAGE_CONTENTS: Final = _model("InvalidMessageContents")
INVALID_SECURITY: Final = _model("InvalidSecurity", status=403)
OVER_LIMIT: Final = _model("OverLimit", status=403)
PURGE_QUEUE_IN_PROGRESS: Final = _model("PurgeQueueInProgress", _PREFIX + "PurgeQueueInProgress", 403)
QUEUE_DELETED_RECENTLY: Final = _model("QueueDeletedRecently", _PREFIX + "QueueDeletedRecently")
QUEUE_DOES_NOT_EXIST: Final = _model("QueueDoesNotExist", _PREFIX + "NonExistentQueue")
QUEUE_NAME_EXISTS: Final = _model("QueueNameExists", "QueueAlreadyExists")
RECEIPT_HANDLE_IS_INVALID: Final = _model("ReceiptHandleIsInvalid", status=404)
REQUEST_THROTTLED: Final = _model("RequestThrottled", status=403)
"""botocore's ordinary retries know it by this code with this status (_retry.json)."""
RESOURCE_NOT_FOUND: Final = _model("ResourceNotFoundException", status=404)
TOO_MANY_ENTRIES: Final = _model("TooManyEntriesInBatchRequest", _PREFIX + "TooManyEntriesInBatchRequest")
UNSUPPORTED_OPERATION: Final = _model("UnsupportedOperation", _PREFIX + "UnsupportedOperation")

# The namespaces of both as in replies of AWS (http4k/http4k #1336, brefphp/laravel-bridge #154): the model lacks them.
INVALID_PARAMETER_VALUE: Final = _common("InvalidParameterValueException", "InvalidParameterValue", 400)
MISSING_PARAMETER: Final = _common("MissingRequiredParameterException", "MissingParameter", 400)

ACCESS_DENIED: Final = _common("AccessDeniedException", "AccessDenied", 403)
INCOMPLETE_SIGNATURE: Final = _common("IncompleteSignatureException", "IncompleteSignature", 400)
INVALID_ACTION: Final = _common("UnknownOperationException", "InvalidAction", 400)
INVALID_CLIENT_TOKEN_ID: Final = _common("UnrecognizedClientException", "InvalidClientTokenId", 403)
MALFORMED_INPUT: Final = _common("SerializationException", "MalformedInput", 400)
MALFORMED_QUERY_STRING: Final = _common("SerializationException", "MalformedQueryString", 400)
METHOD_NOT_SUPPORTED: Final = _common("UnknownOperationException", "UnsupportedHttpVerb", 405)
MISSING_ACTION: Final = _common("UnknownOperationException", "MissingAction", 400)
NO_SUCH_VERSION: Final = _common("UnknownOperationException", "NoSuchVersion", 400)
REQUEST_EXPIRED: Final = _common("RequestExpired", "RequestExpired", 400)
"""For a signed URL past its X-Amz-Expires."""
UNKNOWN_OPERATION: Final = _common("UnknownOperationException", "UnknownOperationException", 404)
"""For a request without an action: the only error that the Query form writes without the usual frame."""
SIGNATURE_DOES_NOT_MATCH: Final = _common("InvalidSignatureException", "SignatureDoesNotMatch", 403)
"""Also for a wrong clock: by either name the JavaScript SDKs suspect their clock, and correct it."""

INTERNAL_FAILURE: Final = _common("InternalFailure", "InternalFailure", 500, sender=False)
SERVICE_UNAVAILABLE: Final = _common("ServiceUnavailableException", "ServiceUnavailable", 503, sender=False)

HTTP_FAULTS: Final = {
    400: _common("MalformedHttpRequestException", "MalformedHttpRequest", 400),
    403: ACCESS_DENIED,
    404: _common("UnknownOperationException", "InvalidAction", 404),
    405: METHOD_NOT_SUPPORTED,
    408: _common("RequestTimeoutException", "RequestTimeout", 408),
    413: _common("RequestEntityTooLargeException", "RequestEntityTooLarge", 413),
    414: _common("MalformedHttpRequestException", "MalformedHttpRequest", 414),
    417: _common("MalformedHttpRequestException", "MalformedHttpRequest", 417),
    429: _common("ThrottlingException", "RequestThrottled", 429),
    431: _common("MalformedHttpRequestException", "MalformedHttpRequest", 431),
    500: INTERNAL_FAILURE,
    501: _common("NotImplementedException", "NotImplemented", 501, sender=False),
    503: SERVICE_UNAVAILABLE,
}
"""Faults of requests that the listener refuses, by status."""

_NOT_READ: Final = "The request is longer than this server reads:"
TOO_LARGE: Final = {
    b"AmazonSQS.SendMessage": (
        _common("InvalidParameterValueException", "InvalidParameterValue", 413),
        f"One or more parameters are invalid. Reason: {_NOT_READ}",
    ),
    b"AmazonSQS.SendMessageBatch": (
        Fault(_PREFIX + "BatchRequestTooLong", _SQS + "BatchRequestTooLong", 413),
        _NOT_READ,
    ),
}
"""The message for a body that the listener does not read, by the request's target, followed by the listener's limit.
That limit is the operator's; SQS's own does not count JSON escapes."""

NO_QUEUE: Final = "The specified queue does not exist."
NO_QUEUE_TO_SEE: Final = "The specified queue does not exist or you do not have access to it."
"""For a GetQueueUrl of another account: does not reveal whether the queue exists."""
QUERY_WORDS: Final = {NO_QUEUE: "The specified queue does not exist for this wsdl version."}
"""Texts of the Query form that differ from those of the JSON form."""
NO_ATTRIBUTE_NAME: Final = "The request must contain non-empty message attribute name."
_BAD_HANDLE: Final = "The input receipt handle is invalid."


def binary_character(character: str, place: str) -> str:
    """AWS's words for a character that XML could not carry (asim/nitro-plugins #437, NServiceBus.AmazonSQS #2630).

    The reference says that it is replaced by U+FFFD in a body that has valid ones: not so in psd401/aistudio #1525.
    """
    return (
        f"Invalid binary character '#x{ord(character):X}' was found in the {place}, the set of allowed characters is "
        "#x9 | #xA | #xD | [#x20-#xD7FF] | [#xE000-#xFFFD] | [#x10000-#x10FFFF]."
    )


class Refusal(Exception):
    """A refused request or batch entry. Never leaves the codec."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message


def check_text(text: str, place: str, fault: Fault = INVALID_PARAMETER_VALUE) -> None:
    """Raises the fault if XML could not carry the text. AWS has a separate fault for bodies."""
    index = first_forbidden_character(text)
    if index is not None:
        raise Refusal(fault, binary_character(text[index], place))


def invalid_value(parameter: str, value: object, reason: str) -> Refusal:
    """InvalidParameterValue in AWS's wording, the value shortened."""
    return Refusal(
        INVALID_PARAMETER_VALUE, f"Value {show(str(value))} for parameter {parameter} is invalid. Reason: {reason}"
    )


def missing(parameter: str) -> Refusal:
    """MissingParameter in AWS's wording."""
    return Refusal(MISSING_PARAMETER, f"The request must contain the parameter {parameter}.")


def no_queue_name() -> Refusal:
    """GetQueueUrl without a name: of this code, though DeleteMessage without its handle is MissingParameter (AWS, as
    recorded in yavosh/pail, test/diff: sqs-errors, sqs-edge-cases). CreateQueue is by analogy."""
    return Refusal(
        INVALID_PARAMETER_VALUE, "Value for parameter QueueName is invalid. Reason: Must specify a queue name."
    )


def too_long(limit_bytes: int, of_batch: bool = False) -> Refusal:
    """A message over the queue's limit, or over the protocol's. AWS uses another text for an entry of a batch."""
    judged = "cannot be validated" if of_batch else "are invalid"
    reason = f"One or more parameters {judged}. Reason: Message must be shorter than {limit_bytes} bytes."
    return Refusal(INVALID_PARAMETER_VALUE, reason)


def policy_too_long() -> Refusal:
    """A queue's policy of too many bytes, in AWS's wording (aws/aws-sdk-net #378)."""
    return Refusal(OVER_LIMIT, "Submitted policy is over max allowed size.")


_PARAMETERS: Final = {
    "body": "MessageBody",
    "delay_us": "DelaySeconds",
    "lease_us": "VisibilityTimeout",
    "wait_us": "WaitTimeSeconds",
    "count_max": "MaxNumberOfMessages",
    "handle": "ReceiptHandle",
    "group": "MessageGroupId",
    "deduplication_id": "MessageDeduplicationId",
    "attempt_id": "ReceiveRequestAttemptId",
    "redrive": "RedrivePolicy",
    "redrive_allow": "RedriveAllowPolicy",
    "name": "QueueName",
    "source": "SourceArn",
    "destination": "DestinationArn",
    "rate_max": "MaxNumberOfMessagesPerSecond",
}
"""Our name of a parameter -> SQS's name."""

NO_ACTION: Final = "Please refer to the appropriate WSDL for a list of valid actions."
"""The reason for an unknown action name."""
NOT_AVAILABLE: Final = "Message does not exist or is not available for visibility timeout change"
HANDLE_EXPIRED: Final = "The receipt handle has expired"
"""AWS's words for a handle in a batch; alone they end with a full stop."""
_NOT_RETRYABLE: Final = "The receiveRequestAttemptId is not valid anymore since the receive call is not retryable."
_TOO_MANY_RECEIVED: Final = (
    "Too many messages have been received without being deleted. Please delete your received messages or let them "
    "timeout before receiving more."
)
"""AWS's words (Cbsoftware/pressureNET-server #74)."""
_NO_TARGET: Final = "Dead letter target does not exist."
_TOTAL: Final = (
    f"Total VisibilityTimeout for the message is beyond the limit [{limits.LEASE_TOTAL_SECONDS_MAX} seconds]"
)


NO_IDENTITY: Final = (
    "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided explicitly"
)
THROUGHPUT: Final = (
    "Invalid value for the parameter FifoThroughputLimit. Reason: To set FifoThroughputLimit to perMessageGroupId, the "
    "DeduplicationScope must be messageGroup."
)


def _parameter_invalid(error: errors.ParameterInvalid, command: AnyCommand) -> Refusal:
    if error.parameter == "lease_us" and isinstance(command, Extend):
        return invalid_value("VisibilityTimeout", command.lease_us // 1_000_000, _TOTAL)
    if error.parameter == "deduplication_id":
        return Refusal(INVALID_PARAMETER_VALUE, NO_IDENTITY)
    if error.parameter == "throughput_per_group":
        return Refusal(INVALID_ATTRIBUTE_VALUE, THROUGHPUT)
    if error.parameter == "source":  # for a move task the reason is AWS's own text
        return Refusal(INVALID_PARAMETER_VALUE, error.reason)
    name = _PARAMETERS.get(error.parameter, error.parameter)
    return Refusal(INVALID_PARAMETER_VALUE, f"The value of the parameter {name} is invalid. Reason: {error.reason}")


def _handle_of(command: AnyCommand) -> str:
    return command.handle if isinstance(command, Delete | Extend) else ""


def _receipt_invalid(error: errors.ReceiptInvalid, command: AnyCommand) -> Refusal:
    """DeleteMessage shows the handle, ChangeMessageVisibility does not."""
    if not isinstance(command, Delete):
        return Refusal(RECEIPT_HANDLE_IS_INVALID, _BAD_HANDLE)
    shown = show(command.handle)
    if error.reason == OTHER_QUEUE:
        return Refusal(RECEIPT_HANDLE_IS_INVALID, f'The receipt handle "{shown}" is not valid for this queue.')
    return Refusal(RECEIPT_HANDLE_IS_INVALID, f'The input receipt handle "{shown}" is not a valid receipt handle.')


def redrive_text(policy: RedrivePolicy) -> str:
    """RedrivePolicy as SQS writes it."""
    value = {"deadLetterTargetArn": arn(policy.target), "maxReceiveCount": policy.receive_count_max}
    return msgspec.json.encode(value).decode()


def _redrive_refused(error: errors.RedriveRefused, command: AnyCommand) -> Refusal:
    policy = command.change.get("redrive") if isinstance(command, CreateQueue | ChangeQueue) else None
    return redrive_refused(error, error.target if policy is None else redrive_text(policy))


def redrive_refused(error: errors.RedriveRefused, text: str) -> Refusal:
    """A dead-letter queue that cannot be one; `text` is the RedrivePolicy as it was sent."""
    reason = _NO_TARGET if error.reason == TARGET_MISSING else f"Dead letter target: {error.reason}."
    return invalid_value("RedrivePolicy", text, reason)


def _lease_expired(error: errors.LeaseExpired, command: AnyCommand) -> Refusal:
    """No report of MessageNotInflight from AWS is known (aws/aws-sdk-java #1628, getmoto/moto #4655)."""
    return invalid_value("ReceiptHandle", _handle_of(command), f"{HANDLE_EXPIRED}.")


def _message_gone(error: VeilError, command: AnyCommand) -> Refusal:
    reason = NOT_AVAILABLE if isinstance(command, Extend) else HANDLE_EXPIRED
    return invalid_value("ReceiptHandle", _handle_of(command), f"{reason}.")


def _purge_in_progress(error: errors.PurgeInProgress, command: AnyCommand) -> Refusal:
    name = command.queue.name if isinstance(command, PurgeQueue) else error.queue
    text = f"Only one PurgeQueue operation on {name} is allowed every {limits.COOLDOWN_SECONDS} seconds."
    return Refusal(PURGE_QUEUE_IN_PROGRESS, text)


_SETTING_NAMES: Final = {
    "visibility_timeout_us": "VisibilityTimeout",
    "delay_us": "DelaySeconds",
    "retention_us": "MessageRetentionPeriod",
    "wait_us": "ReceiveMessageWaitTimeSeconds",
    "message_bytes_max": "MaximumMessageSize",
    "redrive": "RedrivePolicy",
    "redrive_allow": "RedriveAllowPolicy",
    "fifo": "FifoQueue",
    "content_deduplication": "ContentBasedDeduplication",
    "deduplication_scope": "DeduplicationScope",
    "throughput_per_group": "FifoThroughputLimit",
}


def _queue_exists(error: errors.QueueExists, command: AnyCommand) -> Refusal:
    if error.setting == "tags":
        return Refusal(QUEUE_NAME_EXISTS, "A queue already exists with the same name and different tags")
    if error.setting == NAME_TAKEN:
        return Refusal(QUEUE_NAME_EXISTS, "Another queue has this name as its alias.")
    name = _SETTING_NAMES.get(error.setting, error.setting).removeprefix(LABEL_PREFIX)
    text = f"A queue already exists with the same name and a different value for attribute {name}"
    return Refusal(QUEUE_NAME_EXISTS, text)


_WAIT_A_MINUTE: Final = (
    f"You must wait {limits.COOLDOWN_SECONDS} seconds after deleting a queue before you can create another with the "
    "same name."
)

_TABLE: Final[dict[type[VeilError], Callable[[Any, AnyCommand], Refusal]]] = {
    errors.CapabilityMissing: lambda error, command: Refusal(UNSUPPORTED_OPERATION, f"{error}."),
    errors.ParameterInvalid: _parameter_invalid,
    errors.QueueMissing: lambda error, command: Refusal(QUEUE_DOES_NOT_EXIST, NO_QUEUE),
    errors.QueueExists: _queue_exists,
    errors.QueueDeletedRecently: lambda error, command: Refusal(QUEUE_DELETED_RECENTLY, _WAIT_A_MINUTE),
    errors.PurgeInProgress: _purge_in_progress,
    errors.MessageTooLarge: lambda error, command: too_long(error.limit_bytes),
    errors.ReceiptInvalid: _receipt_invalid,
    errors.RedriveRefused: _redrive_refused,
    # SQS has no topics: what a topic's command answers never gets here, but the table stays total.
    **dict.fromkeys(
        (
            errors.TopicMissing,
            errors.TopicExists,
            errors.SubscriptionMissing,
            errors.SubscriptionExists,
            errors.SubscriptionsFull,
            errors.TopicsFull,
            errors.AccountSubscriptionsFull,
        ),
        lambda error, command: Refusal(UNSUPPORTED_OPERATION, f"{error}."),
    ),
    errors.AttemptNotRetryable: lambda error, command: invalid_value(
        "ReceiveRequestAttemptId", error.attempt_id, _NOT_RETRYABLE
    ),
    errors.LeaseExpired: _lease_expired,
    errors.LeaseTaken: _message_gone,
    errors.MessageGone: _message_gone,
    errors.InFlightFull: lambda error, command: Refusal(OVER_LIMIT, _TOO_MANY_RECEIVED),
    errors.MovesFull: lambda error, command: Refusal(
        OVER_LIMIT, f"The maximum number of active message movement tasks of an account is reached: {error.limit}."
    ),
    errors.QueuesFull: lambda error, command: Refusal(
        OVER_LIMIT, f"The maximum number of queues of an account is reached: {error.limit}."
    ),
    errors.RateExceeded: lambda error, command: Refusal(REQUEST_THROTTLED, f"{error}."),
    errors.DiskLow: lambda error, command: Refusal(SERVICE_UNAVAILABLE, "The disk is nearly full. Try again later."),
    errors.Overloaded: lambda error, command: Refusal(
        SERVICE_UNAVAILABLE, "The server is overloaded. Try again later."
    ),
    errors.StoreFailed: lambda error, command: Refusal(INTERNAL_FAILURE, "The request was not carried out. Try again."),
    errors.StoreUnknown: lambda error, command: Refusal(INTERNAL_FAILURE, "The outcome of the request is unknown."),
}


def fault_of(error: VeilError, command: AnyCommand) -> Refusal:
    """The refusal for a command's error. Total over `veilmq.model.errors.leaves()`."""
    return _TABLE[type(error)](error, command)
