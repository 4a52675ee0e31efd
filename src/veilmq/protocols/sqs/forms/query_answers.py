"""The answers of the Query form: XML, or JSON where `Accept` asks for it.

Strategy: one function for each result shape writes it as a joined string, without a tree. Texts are escaped so that a
client reads back exactly what was sent: a carriage return is written as a character reference, because a parser turns a
bare one into a line feed and the body's MD5 fails (XML 1.0, 2.11). Source: AWS Query protocol.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from veilmq.model.commands import AnyCommand, Send
from veilmq.model.messages import NO_EXTRAS, id_text
from veilmq.model.outcomes import Deleted, Outcome, Received, Sent
from veilmq.protocols import Response
from veilmq.protocols.sqs import errors, forms, limits
from veilmq.protocols.sqs.call import Call, Entry, Form, Result
from veilmq.protocols.sqs.errors import Refusal
from veilmq.protocols.sqs.forms import (
    AttributeValueOut,
    Empty,
    ListQueuesResult,
    ListQueueTagsResult,
    ReceiveMessageResult,
)
from veilmq.protocols.sqs.forms.json_form import Headers

_XML: Final = b"text/xml"
_JSON: Final = b"application/json"
_ENCODE: Final = msgspec.json.Encoder().encode
NAMESPACE: Final = f"http://queue.amazonaws.com/doc/{limits.API_VERSION}/"
_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_REPLACEMENT: Final = "\ufffd"


def write(operation: str, result: Result, form: Form, request_id: str, headers: Headers) -> Response:
    """The response of a successful operation."""
    if form is Form.QUERY:
        return _xml_response(operation, _inside(operation, result), request_id, headers)
    named: dict[str, Any] = {"ResponseMetadata": {"RequestId": request_id}}
    if not isinstance(result, Empty):
        named[f"{operation}Result"] = _json_result(result)
    return Response(200, _JSON, _ENCODE({f"{operation}Response": named}), headers)


def _xml_response(operation: str, inside: str | None, request_id: str, headers: Headers) -> Response:
    """The response around the result's elements; None: the operation has no result."""
    if inside:
        inside = f"<{operation}Result>{inside}</{operation}Result>"
    elif inside is not None:
        inside = f"<{operation}Result/>"
    body = (
        f'<?xml version="1.0"?><{operation}Response xmlns="{NAMESPACE}">{inside or ""}'
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata></{operation}Response>"
    )
    return Response(200, _XML, body.encode(), headers)


def _inside(operation: str, result: Result) -> str | None:
    write = _WRITERS.get(type(result))
    return None if write is None else write(operation, result)


def _json_result(result: Result) -> Any:
    """The result with AWS's names: two lists in this form begin in lower case."""
    if isinstance(result, ReceiveMessageResult):
        return {"messages": _with_nulls(result.messages)}
    if isinstance(result, ListQueuesResult):
        return {"queueUrls": result.queue_urls or [], "nextToken": result.next_token}
    if isinstance(result, ListQueueTagsResult):
        return {"Tags": [{"Key": key, "Value": value} for key, value in (result.tags or {}).items()]}
    return _with_nulls(result)


def _with_nulls(value: Any) -> Any:
    """All members of a shape, with null for missing values, and maps as lists of pairs, as in XML.

    The form is undocumented, but responses of AWS have it, and users of API Gateway in front of a queue depend on it.
    """
    if isinstance(value, msgspec.Struct):
        members = {
            field.encode_name: _with_nulls(getattr(value, field.name)) for field in msgspec.structs.fields(value)
        }
        if isinstance(value, AttributeValueOut):
            members |= {"StringListValues": None, "BinaryListValues": None}
        return members
    if isinstance(value, list):
        return [_with_nulls(element) for element in value]
    if isinstance(value, dict):
        return [{"Name": name, "Value": _with_nulls(inside)} for name, inside in value.items()]
    return value


def write_plain(call: Call, outcomes: Sequence[Outcome], headers: Headers) -> Response | None:
    """The response of a successful operation, without its result: for plain messages, whose answers are the commonest.
    None for anything else; then `write` does it, which decides what is right: a test holds the two together."""
    elements = _PLAIN.get(call.row.name)  # of a call that only reads, the operation is that of the next one
    inside = None if elements is None else elements(call, outcomes)
    return None if inside is None else _xml_response(call.operation, inside, call.request.request_id, headers)


def write_refusal(refusal: Refusal, form: Form, request_id: str, headers: Headers) -> Response:
    """An error."""
    fault = refusal.fault
    if fault is errors.UNKNOWN_OPERATION:
        return Response(fault.status, _XML, b"<UnknownOperationException/>\n", headers)
    blame = "Sender" if fault.sender else "Receiver"
    message = errors.QUERY_WORDS.get(refusal.message, refusal.message)
    if form is Form.QUERY_JSON:
        error = {"Code": fault.code, "Message": message, "Type": blame}
        return Response(fault.status, _JSON, _ENCODE({"Error": error, "RequestId": request_id}), headers)
    body = _xml_error(blame, fault.code, message, request_id)
    return Response(fault.status, _XML, body, headers)


def _escape(text: str) -> str:
    """The text as character data. AWS writes a carriage return as `&#xD;`, the only reference that the older JavaScript
    SDK (3.200 to 3.300, Query form) reads (aws/aws-sdk-js-v3 #2362)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#xD;")


def _xml_error(blame: str, code: str, message: str, request_id: str) -> bytes:
    """A complete error response; characters of the message that XML cannot carry are replaced."""
    text = _escape(_NOT_XML.sub(_REPLACEMENT, message))
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{blame}</Type><Code>{code}</Code>'
        f"<Message>{text}</Message><Detail/></Error><RequestId>{_escape(request_id)}</RequestId></ErrorResponse>"
    ).encode()


def _optional(name: str, text: str | None) -> str:
    return "" if text is None else f"<{name}>{text}</{name}>"


def _pairs(name: str, texts: dict[str, str] | None) -> str:
    if not texts:
        return ""
    return "".join(f"<{name}><Name>{key}</Name><Value>{_escape(text)}</Value></{name}>" for key, text in texts.items())


def _sent(operation: str, result: forms.SendMessageResult | forms.SendMessageBatchResultEntry) -> str:
    return (
        _sent_message(result.message_id, result.md5_of_message_body)
        + _optional("MD5OfMessageAttributes", result.md5_of_message_attributes)
        + _optional("MD5OfMessageSystemAttributes", result.md5_of_message_system_attributes)
        + _optional("SequenceNumber", result.sequence_number)
    )


def _sent_message(message_id: str, md5: str) -> str:
    return f"<MessageId>{message_id}</MessageId><MD5OfMessageBody>{md5}</MD5OfMessageBody>"


def _entry(operation: str, name: str, inside: str = "") -> str:
    return f"<{operation}ResultEntry><Id>{name}</Id>{inside}</{operation}ResultEntry>"


def _batch(operation: str, result: forms.BatchResult) -> str:
    parts = []
    for line in result.successful:
        more = _sent(operation, line) if isinstance(line, forms.SendMessageBatchResultEntry) else ""
        parts.append(_entry(operation, line.id, more))
    for failure in result.failed:
        parts.append(
            f"<BatchResultErrorEntry><Id>{failure.id}</Id><Code>{failure.code}</Code>"
            f"<Message>{_escape(_NOT_XML.sub(_REPLACEMENT, failure.message))}</Message>"
            f"<SenderFault>{'true' if failure.sender_fault else 'false'}</SenderFault></BatchResultErrorEntry>"
        )
    return "".join(parts)


def _messages(operation: str, result: forms.ReceiveMessageResult) -> str:
    return "".join(_message(message) for message in result.messages or ())


def _message(message: forms.Message) -> str:
    start = _message_start(message.message_id, message.receipt_handle, message.md5_of_body, message.body)
    if message.attributes is None and message.message_attributes is None:
        return start + "</Message>"
    attributes = "".join(
        f"<MessageAttribute><Name>{_escape(name)}</Name><Value>{_value(value)}</Value></MessageAttribute>"
        for name, value in (message.message_attributes or {}).items()
    )
    digest = _optional("MD5OfMessageAttributes", message.md5_of_message_attributes)
    return f"{start}{_pairs('Attribute', message.attributes)}{digest}{attributes}</Message>"


def _message_start(message_id: str, handle: str, md5: str, body: str) -> str:
    return (
        f"<Message><MessageId>{message_id}</MessageId><ReceiptHandle>{handle}</ReceiptHandle>"
        f"<MD5OfBody>{md5}</MD5OfBody><Body>{_escape(body)}</Body>"
    )


def _value(value: forms.AttributeValueOut) -> str:
    if value.string_value is not None:
        content = f"<StringValue>{_escape(value.string_value)}</StringValue>"
    else:
        content = f"<BinaryValue>{b64encode(value.binary_value or b'').decode()}</BinaryValue>"
    return f"{content}<DataType>{_escape(value.data_type)}</DataType>"


def _tags(operation: str, result: forms.ListQueueTagsResult) -> str:
    return "".join(
        f"<Tag><Key>{_escape(key)}</Key><Value>{_escape(value)}</Value></Tag>"
        for key, value in (result.tags or {}).items()
    )


def _tasks(operation: str, result: forms.ListMessageMoveTasksResult) -> str:
    return "".join(_task(entry) for entry in result.results)


def _task(entry: forms.MoveTaskEntry) -> str:
    members = msgspec.to_builtins(entry)
    inside = "".join(f"<{name}>{_escape(str(value))}</{name}>" for name, value in members.items())
    return f"<ListMessageMoveTasksResultEntry>{inside}</ListMessageMoveTasksResultEntry>"


def _url_elements(operation: str, result: forms.ListQueuesResult | forms.ListDeadLetterSourceQueuesResult) -> str:
    urls = "".join(f"<QueueUrl>{_escape(url)}</QueueUrl>" for url in result.queue_urls or ())
    return urls + _optional("NextToken", result.next_token)


_WRITERS: Final[dict[type, Callable[[str, Any], str]]] = {
    forms.SendMessageResult: _sent,
    forms.BatchResult: _batch,
    forms.ReceiveMessageResult: _messages,
    forms.QueueUrlResult: lambda operation, result: f"<QueueUrl>{_escape(result.queue_url)}</QueueUrl>",
    forms.ListQueuesResult: _url_elements,
    forms.ListDeadLetterSourceQueuesResult: _url_elements,
    forms.ListQueueTagsResult: _tags,
    forms.StartMessageMoveTaskResult: lambda operation, result: _optional("TaskHandle", result.task_handle),
    forms.CancelMessageMoveTaskResult: lambda operation, result: _optional(
        "ApproximateNumberOfMessagesMoved", str(result.approximate_number_of_messages_moved)
    ),
    forms.ListMessageMoveTasksResult: _tasks,
    forms.GetQueueAttributesResult: lambda operation, result: _pairs("Attribute", result.attributes),
}
"""Empty is not included: its response contains only metadata."""


def _plain_sent(call: Call, outcomes: Sequence[Outcome]) -> str | None:
    return _plain_message(call.commands[0], outcomes[0])


def _plain_sends(call: Call, outcomes: Sequence[Outcome]) -> str | None:
    """None unless all were sent."""
    entries: list[Entry] = call.memo.entries
    if len(entries) != len(outcomes):
        return None
    parts = []
    for entry, command, outcome in zip(entries, call.commands, outcomes, strict=True):
        sent = _plain_message(command, outcome)
        if sent is None:
            return None
        parts.append(_entry(call.operation, entry.id, sent))
    return "".join(parts)


def _plain_message(command: AnyCommand, outcome: Outcome) -> str | None:
    if type(outcome) is not Sent or type(command) is not Send or command.extras is not NO_EXTRAS:
        return None
    return _sent_message(id_text(outcome.id), command.md5.hex())


def _plain_deletes(call: Call, outcomes: Sequence[Outcome]) -> str | None:
    """None unless all were deleted."""
    entries: list[Entry] = call.memo
    if len(entries) != len(outcomes) or not all(type(outcome) is Deleted for outcome in outcomes):
        return None
    return "".join([_entry(call.operation, entry.id) for entry in entries])


def _plain_received(call: Call, outcomes: Sequence[Outcome]) -> str | None:
    """None if attributes are wanted."""
    received = outcomes[0]
    if call.memo is not None or type(received) is not Received:
        return None
    came = received.messages
    return "".join(
        [_message_start(id_text(each.id), each.handle, each.md5.hex(), each.body) + "</Message>" for each in came]
    )


_PLAIN: Final[dict[str, Callable[[Call, Sequence[Outcome]], str | None]]] = {
    "SendMessage": _plain_sent,
    "SendMessageBatch": _plain_sends,
    "ReceiveMessage": _plain_received,
    "DeleteMessageBatch": _plain_deletes,
}
"""What writes the elements inside the result."""
