"""All errors of Queue Storage, and the mapping of our errors to them.

Strategy: a `Fault` is a row of data: code, status, message. `Refusal` carries a fault with extra elements to the edge
of the codec; nothing else is raised here. `fault_of` is the one total table from `VeilError` to faults. Source: "Common
REST API error codes" and "Queue Storage error codes" on learn.microsoft.com; three texts as the service sends
them (Azure/azure-sdk-for-java #15008, Azure/azure-sdk-for-python #28984, squigg/azure-queue-laravel #6).
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from veilmq.model import errors
from veilmq.model.commands import AnyCommand, Delete, Extend, Send
from veilmq.model.errors import VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import HANDLE_CHARACTERS
from veilmq.protocols import show

NO_ID: Final = b""
"""An id of no message, for an invalid id in a path."""


class Fault(msgspec.Struct, frozen=True):
    """One kind of wire error."""

    code: str
    status: int
    message: str


AUTHENTICATION_FAILED: Final = Fault(
    "AuthenticationFailed",
    403,
    "Server failed to authenticate the request. Make sure the value of Authorization header is formed correctly "
    "including the signature.",
)
AUTHORIZATION_FAILURE: Final = Fault(
    "AuthorizationFailure", 403, "This request is not authorized to perform this operation."
)
AUTHORIZATION_PERMISSION_MISMATCH: Final = Fault(
    "AuthorizationPermissionMismatch",
    403,
    "This request is not authorized to perform this operation using this permission.",
)
AUTHORIZATION_PROTOCOL_MISMATCH: Final = Fault(
    "AuthorizationProtocolMismatch",
    403,
    "This request is not authorized to perform this operation using this protocol.",
)
AUTHORIZATION_RESOURCE_TYPE_MISMATCH: Final = Fault(
    "AuthorizationResourceTypeMismatch",
    403,
    "This request is not authorized to perform this operation using this resource type.",
)
AUTHORIZATION_SERVICE_MISMATCH: Final = Fault(
    "AuthorizationServiceMismatch",
    403,
    "This request is not authorized to perform this operation using this service.",
)
AUTHORIZATION_SOURCE_IP_MISMATCH: Final = Fault(
    "AuthorizationSourceIPMismatch",
    403,
    "This request is not authorized to perform this operation using this source IP.",
)
CORS_PREFLIGHT_FAILURE: Final = Fault(
    "CorsPreflightFailure", 403, "CORS not enabled or no matching rule found for this request."
)
EMPTY_METADATA_KEY: Final = Fault("EmptyMetadataKey", 400, "The key for one of the metadata key-value pairs is empty.")
FEATURE_VERSION_MISMATCH: Final = Fault(
    "FeatureVersionMismatch",
    409,
    "The operation is not allowed in this version of the service; use a newer x-ms-version.",
)
INSUFFICIENT_ACCOUNT_PERMISSIONS: Final = Fault(
    "InsufficientAccountPermissions", 403, "Write operations are not allowed on the secondary endpoint."
)
INTERNAL_ERROR: Final = Fault(
    "InternalError", 500, "The server encountered an internal error. Please retry the request."
)
INVALID_AUTHENTICATION_INFO: Final = Fault(
    "InvalidAuthenticationInfo",
    400,
    "Authentication information is not given in the correct format. Check the value of Authorization header.",
)
INVALID_HEADER_VALUE: Final = Fault(
    "InvalidHeaderValue", 400, "The value for one of the HTTP headers is not in the correct format."
)
INVALID_INPUT: Final = Fault("InvalidInput", 400, "One of the request inputs is not valid.")
INVALID_MARKER: Final = Fault("InvalidMarker", 400, "The specified marker is invalid.")
INVALID_METADATA: Final = Fault(
    "InvalidMetadata", 400, "The metadata specified is invalid. It has characters that are not permitted."
)
INVALID_QUERY_PARAMETER_VALUE: Final = Fault(
    "InvalidQueryParameterValue", 400, "Value for one of the query parameters specified in the request URI is invalid."
)
INVALID_RESOURCE_NAME: Final = Fault(
    "InvalidResourceName", 400, "The specifed resource name contains invalid characters."
)
INVALID_TOKEN: Final = Fault(
    "InvalidAuthenticationInfo",
    401,
    "Server failed to authenticate the request. Please refer to the information in the www-authenticate header.",
)
INVALID_URI: Final = Fault("InvalidUri", 400, "The requested URI does not represent any resource on the server.")
INVALID_XML_DOCUMENT: Final = Fault("InvalidXmlDocument", 400, "XML specified is not syntactically valid.")
INVALID_XML_NODE_VALUE: Final = Fault(
    "InvalidXmlNodeValue", 400, "The value for one of the XML nodes is not in the correct format."
)
MESSAGE_NOT_FOUND: Final = Fault("MessageNotFound", 404, "The specified message does not exist.")
MESSAGE_TOO_LARGE: Final = Fault("MessageTooLarge", 400, "The message exceeds the maximum allowed size.")
METADATA_TOO_LARGE: Final = Fault(
    "MetadataTooLarge", 400, "The size of the specified metadata exceeds the maximum size permitted."
)
MISSING_REQUIRED_HEADER: Final = Fault(
    "MissingRequiredHeader", 400, "An HTTP header that's mandatory for this request is not specified."
)
MISSING_REQUIRED_QUERY_PARAMETER: Final = Fault(
    "MissingRequiredQueryParameter", 400, "A query parameter that's mandatory for this request is not specified."
)
MISSING_REQUIRED_XML_NODE: Final = Fault(
    "MissingRequiredXmlNode", 400, "A required XML node was not specified in the request body."
)
NO_AUTHENTICATION_INFORMATION: Final = Fault(
    "NoAuthenticationInformation",
    401,
    "Server failed to authenticate the request. Please refer to the information in the www-authenticate header.",
)
OPERATION_TIMED_OUT: Final = Fault(
    "OperationTimedOut", 500, "Operation could not be completed within the specified time."
)
OUT_OF_RANGE_INPUT: Final = Fault(
    "OutOfRangeInput", 400, "The specified resource name length is not within the permissible limits."
)
OUT_OF_RANGE_QUERY_PARAMETER_VALUE: Final = Fault(
    "OutOfRangeQueryParameterValue",
    400,
    "One of the query parameters specified in the request URI is outside the permissible range.",
)
QUEUE_ALREADY_EXISTS: Final = Fault("QueueAlreadyExists", 409, "The specified queue already exists.")
QUEUE_BEING_DELETED: Final = Fault("QueueBeingDeleted", 409, "The specified queue is being deleted.")
QUEUE_NOT_FOUND: Final = Fault("QueueNotFound", 404, "The specified queue does not exist.")
REQUEST_BODY_TOO_LARGE: Final = Fault(
    "RequestBodyTooLarge", 413, "The request body is too large and exceeds the maximum permissible limit."
)
REQUEST_URL_FAILED_TO_PARSE: Final = Fault(
    "RequestUrlFailedToParse", 400, "The url in the request could not be parsed."
)
SERVER_BUSY: Final = Fault("ServerBusy", 503, "The server is currently unable to receive requests. Please retry.")
UNSUPPORTED_HEADER: Final = Fault(
    "UnsupportedHeader", 400, "One of the HTTP headers specified in the request is not supported."
)
UNSUPPORTED_HTTP_VERB: Final = Fault("UnsupportedHttpVerb", 405, "The resource doesn't support specified Http Verb.")
UNSUPPORTED_QUERY_PARAMETER: Final = Fault(
    "UnsupportedQueryParameter",
    400,
    "One of the query parameters specified in the request URI is not supported.",
)
UNSUPPORTED_XML_NODE: Final = Fault(
    "UnsupportedXmlNode", 400, "One of the XML nodes specified in the request body is not supported."
)

HTTP_CODES: Final = {
    400: INVALID_INPUT,
    403: AUTHORIZATION_FAILURE,
    404: INVALID_URI,
    405: UNSUPPORTED_HTTP_VERB,
    408: OPERATION_TIMED_OUT,
    413: REQUEST_BODY_TOO_LARGE,
    414: REQUEST_URL_FAILED_TO_PARSE,
    417: UNSUPPORTED_HEADER,
    429: SERVER_BUSY,
    431: INVALID_INPUT,
    500: INTERNAL_ERROR,
    501: UNSUPPORTED_HTTP_VERB,
    503: SERVER_BUSY,
}
"""Faults of requests that the listener refuses, by status; the listener's status is kept."""


class Refusal(Exception):
    """A refused request. Never leaves the codec.

    extra: further elements of the response, by name in order. headers: further headers of the response.
    """

    def __init__(
        self,
        fault: Fault,
        extra: dict[str, str] | None = None,
        *,
        message: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(fault.code)
        self.fault = fault
        self.extra = extra or {}
        self.message = message or fault.message
        self.headers = headers


def unauthenticated(detail: str) -> Refusal:
    """AuthenticationFailed, with the reason."""
    return Refusal(AUTHENTICATION_FAILED, {"AuthenticationErrorDetail": detail})


def bad_parameter(name: str, value: str, reason: str) -> Refusal:
    """InvalidQueryParameterValue."""
    extra = {"QueryParameterName": name, "QueryParameterValue": show(value), "Reason": reason}
    return Refusal(INVALID_QUERY_PARAMETER_VALUE, extra)


def dead_before_visible(visibility: str) -> Refusal:
    """Put Message: "visibilitytimeout should be set to a value smaller than the time-to-live value". visibility: the
    parameter's text, empty if the queue's delay stands for it."""
    reason = "The message would be dead before it is visible: visibilitytimeout must be less than messagettl."
    return bad_parameter("visibilitytimeout", visibility, reason)


def out_of_range(name: str, value: str, minimum: int, maximum: int) -> Refusal:
    """OutOfRangeQueryParameterValue."""
    extra = {
        "QueryParameterName": name,
        "QueryParameterValue": show(value),
        "MinimumAllowed": str(minimum),
        "MaximumAllowed": str(maximum),
    }
    return Refusal(OUT_OF_RANGE_QUERY_PARAMETER_VALUE, extra)


def missing_parameter(name: str) -> Refusal:
    """MissingRequiredQueryParameter."""
    return Refusal(MISSING_REQUIRED_QUERY_PARAMETER, {"QueryParameterName": name})


def bad_header(name: str, value: str) -> Refusal:
    """InvalidHeaderValue."""
    return Refusal(INVALID_HEADER_VALUE, {"HeaderName": name, "HeaderValue": show(value)})


def missing_header(name: str) -> Refusal:
    """MissingRequiredHeader."""
    return Refusal(MISSING_REQUIRED_HEADER, {"HeaderName": name})


def bad_xml(reason: str, line: int | None = None, column: int | None = None) -> Refusal:
    """InvalidXmlDocument."""
    extra = {}
    if line is not None and column is not None:
        extra = {"LineNumber": str(line), "LinePosition": str(column)}
    return Refusal(INVALID_XML_DOCUMENT, extra | {"Reason": reason})


def bad_node(name: str, value: str, reason: str) -> Refusal:
    """InvalidXmlNodeValue."""
    return Refusal(INVALID_XML_NODE_VALUE, {"XmlNodeName": name, "XmlNodeValue": show(value), "Reason": reason})


def missing_node(name: str) -> Refusal:
    """MissingRequiredXmlNode."""
    return Refusal(MISSING_REQUIRED_XML_NODE, {"XmlNodeName": name})


def too_large(limit_bytes: int) -> Refusal:
    """RequestBodyTooLarge."""
    return Refusal(REQUEST_BODY_TOO_LARGE, {"MaxLimit": str(limit_bytes)})


def looks_like_receipt(text: str) -> bool:
    """Whether the text has the form of a pop receipt of ours, genuine or not."""
    return len(text) == HANDLE_CHARACTERS and not text.strip("0123456789abcdef")


def _receipt_invalid(error: errors.ReceiptInvalid, command: AnyCommand) -> Refusal:
    """A stale or foreign one names no message that is here; one that does not parse is the example of the page "Status
    and error codes"."""
    assert isinstance(command, Delete | Extend)
    handle = command.handle
    if looks_like_receipt(handle) or command.message_id == NO_ID:
        return Refusal(MESSAGE_NOT_FOUND)
    return bad_parameter("popreceipt", handle, "Invalid pop receipt format.")


def _parameter_invalid(error: errors.ParameterInvalid, command: AnyCommand) -> Refusal:
    if error.parameter == "body":
        return bad_node("MessageText", "", error.reason)
    if error.parameter == "ttl_us":
        given = "" if not isinstance(command, Send) or command.delay_us is None else str(command.delay_us // SECOND_US)
        return dead_before_visible(given)
    return Refusal(INVALID_INPUT, {"Reason": str(error)})


_TABLE: Final[dict[type[VeilError], Callable[[Any, AnyCommand], Refusal]]] = {
    errors.CapabilityMissing: lambda error, command: Refusal(INVALID_INPUT, {"Reason": str(error)}),
    errors.ParameterInvalid: _parameter_invalid,
    errors.QueueMissing: lambda error, command: Refusal(QUEUE_NOT_FOUND),
    errors.QueueExists: lambda error, command: Refusal(QUEUE_ALREADY_EXISTS),
    errors.QueueDeletedRecently: lambda error, command: Refusal(QUEUE_BEING_DELETED),
    errors.PurgeInProgress: lambda error, command: Refusal(OPERATION_TIMED_OUT),
    errors.MessageTooLarge: lambda error, command: Refusal(MESSAGE_TOO_LARGE, {"MaxLimit": str(error.limit_bytes)}),
    errors.ReceiptInvalid: _receipt_invalid,
    errors.RedriveRefused: lambda error, command: Refusal(INVALID_INPUT, {"Reason": str(error)}),
    # Azure has no topics: what a topic's command answers never gets here, but the table stays total.
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
        lambda error, command: Refusal(INVALID_INPUT, {"Reason": str(error)}),
    ),
    errors.AttemptNotRetryable: lambda error, command: Refusal(INVALID_INPUT, {"Reason": str(error)}),  # SQS's alone
    errors.LeaseExpired: lambda error, command: Refusal(MESSAGE_NOT_FOUND),
    errors.LeaseTaken: lambda error, command: Refusal(MESSAGE_NOT_FOUND),
    errors.MessageGone: lambda error, command: Refusal(MESSAGE_NOT_FOUND),
    errors.InFlightFull: lambda error, command: Refusal(SERVER_BUSY),
    errors.MovesFull: lambda error, command: Refusal(SERVER_BUSY, {"Reason": f"{error}."}),
    errors.QueuesFull: lambda error, command: Refusal(SERVER_BUSY, {"Reason": f"{error}."}),
    errors.RateExceeded: lambda error, command: Refusal(SERVER_BUSY, {"Reason": f"{error}."}),
    errors.DiskLow: lambda error, command: Refusal(SERVER_BUSY, {"Reason": "The disk is nearly full."}),
    errors.Overloaded: lambda error, command: Refusal(SERVER_BUSY),
    errors.StoreFailed: lambda error, command: Refusal(INTERNAL_ERROR, {"Reason": "The request was not carried out."}),
    errors.StoreUnknown: lambda error, command: Refusal(
        INTERNAL_ERROR, {"Reason": "The outcome of the request is unknown."}
    ),
}


def fault_of(error: VeilError, command: AnyCommand) -> Refusal:
    """The refusal for a command's error. Total over `veilmq.model.errors.leaves()`."""
    return _TABLE[type(error)](error, command)
