"""Writes the XML responses of the Query form.

Strategy: one function per result shape, each a joined string without a tree. Texts are escaped so that a client reads
back exactly what was sent: a carriage return is written as a character reference, because a parser turns a bare one
into a line feed and the body's MD5 fails (XML 1.0, 2.11). Source: the service model of the Query form, with its
flattened lists and maps.
"""

import re
from base64 import b64encode
from collections.abc import Callable
from typing import Any, Final

import msgspec

from veilmq.protocols.sqs import limits, results

NAMESPACE: Final = f"http://queue.amazonaws.com/doc/{limits.API_VERSION}/"

_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """The text as character data. AWS writes a carriage return as `&#xD;`, the only reference that the older JavaScript
    SDK (3.200 to 3.300, Query form) reads (aws/aws-sdk-js-v3 #2362)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#xD;")


def answer(operation: str, result: results.Result, request_id: str) -> bytes:
    """A complete response."""
    write = _WRITERS.get(type(result))
    inside = ""
    if write is not None:
        inside = write(operation, result)
        inside = f"<{operation}Result>{inside}</{operation}Result>" if inside else f"<{operation}Result/>"
    return (
        f'<?xml version="1.0"?><{operation}Response xmlns="{NAMESPACE}">{inside}'
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata></{operation}Response>"
    ).encode()


def error(blame: str, code: str, message: str, request_id: str) -> bytes:
    """A complete error response; characters of the message that XML cannot carry are replaced."""
    text = escape(_NOT_XML.sub("\ufffd", message))
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{blame}</Type><Code>{code}</Code>'
        f"<Message>{text}</Message><Detail/></Error><RequestId>{escape(request_id)}</RequestId></ErrorResponse>"
    ).encode()


def _optional(name: str, text: str | None) -> str:
    return "" if text is None else f"<{name}>{text}</{name}>"


def _pairs(name: str, texts: dict[str, str] | None) -> str:
    if not texts:
        return ""
    return "".join(f"<{name}><Name>{key}</Name><Value>{escape(text)}</Value></{name}>" for key, text in texts.items())


def _sent(operation: str, result: results.SendMessageResult | results.SendMessageBatchResultEntry) -> str:
    return (
        f"<MessageId>{result.message_id}</MessageId><MD5OfMessageBody>{result.md5_of_message_body}</MD5OfMessageBody>"
        + _optional("MD5OfMessageAttributes", result.md5_of_message_attributes)
        + _optional("MD5OfMessageSystemAttributes", result.md5_of_message_system_attributes)
        + _optional("SequenceNumber", result.sequence_number)
    )


def _batch(operation: str, result: results.BatchResult) -> str:
    name = f"{operation}ResultEntry"
    parts = []
    for line in result.successful:
        more = _sent(operation, line) if isinstance(line, results.SendMessageBatchResultEntry) else ""
        parts.append(f"<{name}><Id>{line.id}</Id>{more}</{name}>")
    for failure in result.failed:
        parts.append(
            f"<BatchResultErrorEntry><Id>{failure.id}</Id><Code>{failure.code}</Code>"
            f"<Message>{escape(_NOT_XML.sub(_REPLACEMENT, failure.message))}</Message>"
            f"<SenderFault>{'true' if failure.sender_fault else 'false'}</SenderFault></BatchResultErrorEntry>"
        )
    return "".join(parts)


_REPLACEMENT: Final = "\ufffd"


def _messages(operation: str, result: results.ReceiveMessageResult) -> str:
    return "".join(_message(message) for message in result.messages or ())


def _message(message: results.Message) -> str:
    start = (
        f"<Message><MessageId>{message.message_id}</MessageId><ReceiptHandle>{message.receipt_handle}</ReceiptHandle>"
        f"<MD5OfBody>{message.md5_of_body}</MD5OfBody><Body>{escape(message.body)}</Body>"
    )
    if message.attributes is None and message.message_attributes is None:
        return start + "</Message>"
    attributes = "".join(
        f"<MessageAttribute><Name>{escape(name)}</Name><Value>{_value(value)}</Value></MessageAttribute>"
        for name, value in (message.message_attributes or {}).items()
    )
    digest = _optional("MD5OfMessageAttributes", message.md5_of_message_attributes)
    return f"{start}{_pairs('Attribute', message.attributes)}{digest}{attributes}</Message>"


def _value(value: results.AttributeValueOut) -> str:
    if value.string_value is not None:
        content = f"<StringValue>{escape(value.string_value)}</StringValue>"
    else:
        content = f"<BinaryValue>{b64encode(value.binary_value or b'').decode()}</BinaryValue>"
    return f"{content}<DataType>{escape(value.data_type)}</DataType>"


def _tags(operation: str, result: results.ListQueueTagsResult) -> str:
    return "".join(
        f"<Tag><Key>{escape(key)}</Key><Value>{escape(value)}</Value></Tag>"
        for key, value in (result.tags or {}).items()
    )


def _tasks(operation: str, result: results.ListMessageMoveTasksResult) -> str:
    return "".join(_task(entry) for entry in result.results)


def _task(entry: results.MoveTaskEntry) -> str:
    members = msgspec.to_builtins(entry)
    inside = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in members.items())
    return f"<ListMessageMoveTasksResultEntry>{inside}</ListMessageMoveTasksResultEntry>"


def _urls(operation: str, result: results.ListQueuesResult | results.ListDeadLetterSourceQueuesResult) -> str:
    urls = "".join(f"<QueueUrl>{escape(url)}</QueueUrl>" for url in result.queue_urls or ())
    return urls + _optional("NextToken", result.next_token)


_WRITERS: Final[dict[type, Callable[[str, Any], str]]] = {
    results.SendMessageResult: _sent,
    results.BatchResult: _batch,
    results.ReceiveMessageResult: _messages,
    results.QueueUrlResult: lambda operation, result: f"<QueueUrl>{escape(result.queue_url)}</QueueUrl>",
    results.ListQueuesResult: _urls,
    results.ListDeadLetterSourceQueuesResult: _urls,
    results.ListQueueTagsResult: _tags,
    results.StartMessageMoveTaskResult: lambda operation, result: _optional("TaskHandle", result.task_handle),
    results.CancelMessageMoveTaskResult: lambda operation, result: _optional(
        "ApproximateNumberOfMessagesMoved", str(result.approximate_number_of_messages_moved)
    ),
    results.ListMessageMoveTasksResult: _tasks,
    results.GetQueueAttributesResult: lambda operation, result: _pairs("Attribute", result.attributes),
}
"""Empty is not included: its response contains only metadata."""
