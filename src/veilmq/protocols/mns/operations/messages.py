"""SendMessage, ReceiveMessage, PeekMessage, DeleteMessage, ChangeMessageVisibility, and their batches.

Send: one URL for one message and for a batch; the document's root says which. Each message of a batch is checked by
itself; a refusal is returned in its place and the others are sent. The handle of a delayed message is returned and
stays valid while the message is delayed. A partial response has the shape that the Python SDK reads.

Receive: `numOfMessages` in the query makes the root Messages, even for one message. Without a wait the queue's own
applies; a wait of 0 means none. If there is no message, or the receive may not wait, the response is the error
MessageNotExist.

Delete and extend: a handle is valid for one state of its message. An extension returns a new one, and a handle whose
lease has ended is refused. A batch deletes what it can and returns the failures.

Properties: a user property is an attribute that every SQS client can read: STRING and NUMBER under SQS's own types,
BOOLEAN as `String.Boolean`, BINARY decoded. The system properties for tracing (traceparent ...) are attributes of the
same names, where SQS's tracing libraries look; those of a dead letter come from the store.

Source: the pages of these operations.
"""

import binascii
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import md5 as md5_of
from typing import Any, Final

from veilmq.model.commands import AfterExpiry, AnyCommand, Delete, Extend, Peek, Receive, Send
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.instant import SECOND_US, milliseconds
from veilmq.model.messages import (
    NO_EXTRAS,
    REPORT_HEADER,
    Attribute,
    Delivery,
    Extras,
    encode_xml_body,
    first_forbidden_character,
    read_header,
)
from veilmq.model.outcomes import Extended, Outcome, Received, Sent
from veilmq.model.settings.queue import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, QueueKey, XmlBody
from veilmq.protocols import Element, Response, clean, escape, show
from veilmq.protocols.mns import errors, limits
from veilmq.protocols.mns.addresses import arn
from veilmq.protocols.mns.call import Asked, Call, Plan, sole
from veilmq.protocols.mns.errors import MESSAGE_NOT_EXIST, Refusal, bad, fault_of, malformed
from veilmq.protocols.mns.fields import boolean, document, members, number, read_root, whole_number, word

_TYPES: Final = {"STRING": "String", "NUMBER": "Number", "BOOLEAN": "String.Boolean", "BINARY": "Binary"}
_BOOLEAN: Final = _TYPES["BOOLEAN"]
_WIDE_NUMBER: Final = "String.Number"
"""A NUMBER that SQS would refuse: inf, nan, more than 38 digits."""
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]{1,38}(?:\.[0-9]{0,38})?|\.[0-9]{1,38})(?:[eE][+-]?[0-9]{1,3})?\Z")
_EMPTY: Final = "<!---->"
"""In the place of an empty body, which another protocol may send. Python's SDK takes an empty element for a damaged
answer, and drops all messages of the batch, which it has leased then."""
_SOURCE: Final = "DLQSourceArn"
_ORIGIN: Final = "DLQOriginMessageId"
SYSTEM_NAMES: Final = frozenset({"traceparent", "tracestate", "baggage", "DLQMessageType", _SOURCE, _ORIGIN})


def read_properties(user: Element | None, system: Element | None) -> tuple[tuple[Attribute, ...], int]:
    """The attributes of `UserProperties` and `SystemProperties`, and their size in bytes. Raises Refusal."""
    attributes: list[Attribute] = []
    for group, name in ((user, "PropertyValue"), (system, "SystemPropertyValue")):
        for child in group.children if group is not None else ():
            if child.name == name:
                attributes.append(_read(child, group is system))
    if sum(attribute.name not in SYSTEM_NAMES for attribute in attributes) > limits.PROPERTIES_MAX:
        raise bad("UserProperties", f"a message has at most {limits.PROPERTIES_MAX} properties.")
    if len({attribute.name for attribute in attributes}) < len(attributes):
        raise bad("UserProperties", "two properties have one name.")
    return tuple(attributes), sum(attribute.size_bytes for attribute in attributes)


def _read(element: Element, system: bool) -> Attribute:
    fields = members(element)
    for field in ("Name", "Value", "Type"):
        if field not in fields or fields[field].children:
            raise malformed(f"a {element.name} has a Name, a Value and a Type")
    name, kind, value = fields["Name"].text, fields["Type"].text.upper(), fields["Value"].raw
    if system:
        if name not in SYSTEM_NAMES or kind != "STRING":
            raise bad("SystemProperties", f"{show(name)} is not a system property of type STRING.")
    else:
        _check_name(name)
        if len(value) > limits.PROPERTY_VALUE_CHARACTERS_MAX:
            raise bad(name, f"a value has at most {limits.PROPERTY_VALUE_CHARACTERS_MAX} characters.")
    if not value or first_forbidden_character(value) is not None:
        raise bad(name, "the value of a property must not be empty.")
    checked = _value(name, kind, value)
    wide = kind == "NUMBER" and not _NUMBER.match(value)
    return Attribute(name, _WIDE_NUMBER if wide else _TYPES.get(kind, ""), checked)


def _check_name(name: str) -> None:
    if not limits.PROPERTY_NAME.match(name) or name.lower().startswith(limits.PROPERTY_NAME_RESERVED):
        rule = (
            "has up to 256 of A-Z, a-z, 0-9, hyphen, _ and ., does not begin with AWS. or Amazon., and no dot is "
            "first, last or next to another"
        )
        raise bad("UserProperties", f"{show(name)} is not a name, which {rule}.")
    if name in SYSTEM_NAMES:
        raise bad("UserProperties", f"{name} is a system property.")


def _value(name: str, kind: str, value: str) -> Any:
    if kind == "BINARY":
        try:
            raw = binascii.a2b_base64(value.strip().encode("ascii"), strict_mode=True)
        except ValueError:
            raw = b""
        if not raw:
            raise bad(name, "a BINARY value is base64 of at least one byte.")
        return raw
    if kind not in _TYPES:
        raise bad(name, f"{show(kind)} is not a type: STRING, NUMBER, BOOLEAN or BINARY.")
    if kind == "NUMBER" and not _is_number(value):
        raise bad(name, f"{show(value)} is not a number.")
    if kind == "BOOLEAN" and boolean(value) is None:
        raise bad(name, f"{show(value)} is neither true nor false.")
    return value


def _is_number(value: str) -> bool:
    """Check a NUMBER. The service does not, but the Python SDK cannot read a message whose NUMBER is not a `float`."""
    try:
        float(value)
    except ValueError:
        return False
    return True


def write_properties(message: Delivery) -> str:
    """The elements of a message's properties; empty if it has none."""
    user: list[str] = []
    system: dict[str, str] = {}
    for attribute in message.extras.attributes:
        if attribute.name in SYSTEM_NAMES and isinstance(attribute.value, str):
            system[attribute.name] = attribute.value
        else:
            user.append(_user_property(attribute.name, *_typed(attribute)))
    source = message.extras.dead_letter_source
    if source is not None:
        origin = message.extras.published_id or message.id
        system |= {_SOURCE: arn(source), _ORIGIN: origin.hex().upper()}
    # The PHP SDK reads user properties to the end of the document and misses whatever follows them.
    text = ""
    if system:
        values = "".join(_system_property(name, value) for name, value in system.items())
        text = f"<SystemProperties>{values}</SystemProperties>"
    return f"{text}<UserProperties>{''.join(user)}</UserProperties>" if user else text


def _typed(attribute: Attribute) -> tuple[str, str]:
    value = attribute.value
    if not isinstance(value, str):
        return b64encode(value).decode(), "BINARY"
    if attribute.type == _BOOLEAN:
        return value, "STRING" if boolean(value) is None else "BOOLEAN"  # SDKs refuse an answer with another text
    if attribute.type == _WIDE_NUMBER:
        return value, "NUMBER" if _is_number(value) else "STRING"
    return value, "NUMBER" if attribute.type.startswith("Number") and _NUMBER.match(value) else "STRING"


def _system_property(name: str, value: str) -> str:
    """A system property with white space after it: the PHP SDK skips the node after each of the three."""
    inside = f"<Name>{escape(name)}</Name>\n<Value>{escape(value)}</Value>\n<Type>STRING</Type>\n"
    return f"<SystemPropertyValue>{inside}</SystemPropertyValue>"


def _user_property(name: str, value: str, kind: str) -> str:
    inside = f"<Name>{escape(name)}</Name><Value>{escape(value)}</Value><Type>{kind}</Type>"
    return f"<PropertyValue>{inside}</PropertyValue>"


PARTIAL_STATUS = 500
"""Status of a batch of which some were sent, or whose failures have different statuses. The documents do not give it;
SDKs need 400 or more."""


def plan_send(asked: Asked) -> Plan:
    """SendMessage, or BatchSendMessage. The memo of a batch: its refusals, by place."""
    queue = asked.queue()
    root = read_root(asked.request.body)
    if root.name == "Message":
        return (read_message(asked, queue, root),), None
    if root.name != "Messages":
        raise malformed("the document must be a Message or Messages")
    return _plan_batch(asked, queue, root)


def read_body(element: Element | None) -> tuple[str, bytes]:
    """The text of a MessageBody, and its UTF-8. Raises Refusal: InvalidArgument, MalformedXML."""
    if element is None or not (element.raw or element.children):
        raise bad("MessageBody", "it is required.")
    if element.children:
        raise malformed("MessageBody holds text alone: escape or encode it")
    raw = element.raw.encode()
    if len(raw) > limits.MESSAGE_BYTES_MAX:
        raise bad("MessageBody", f"the length of message should not be larger than {limits.MESSAGE_BYTES_MAX} bytes.")
    if first_forbidden_character(element.raw) is not None:
        raise bad("MessageBody", "the text has a character that XML 1.0 cannot carry.")
    return element.raw, raw


def read_extras(fields: dict[str, Element], tag: str | None = None) -> tuple[Extras, int]:
    """Group and properties, and their size in bytes. Raises Refusal."""
    group = fields.get("MessageGroupId")
    user, system = fields.get("UserProperties"), fields.get("SystemProperties")
    if group is None and user is None and system is None and tag is None:
        return NO_EXTRAS, 0
    attributes, size_bytes = read_properties(user, system)
    name = None if group is None else word(group, limits.GROUP_CHARACTERS_MAX)
    return Extras(attributes=attributes, group=name, tag=tag), size_bytes


def read_message(asked: Asked, queue: QueueKey, element: Element) -> Send:
    """The send of one Message element. Raises Refusal."""
    fields = members(element)
    body, raw = read_body(fields.get("MessageBody"))
    delay_us, priority = None, PRIORITY_DEFAULT
    extras, more_bytes = NO_EXTRAS, 0
    if len(fields) > 1:
        if "DelaySeconds" in fields:
            delay_us = number(fields["DelaySeconds"], 0, limits.DELAY_SECONDS_MAX, "seconds") * SECOND_US
        if "Priority" in fields:
            priority = number(fields["Priority"], PRIORITY_MIN, PRIORITY_MAX)
        extras, more_bytes = read_extras(fields)
    return Send(
        queue=queue,
        origin=asked.caller.origin,
        body=body,
        md5=md5_of(raw, usedforsecurity=False).digest(),
        size_bytes=len(raw) + more_bytes,
        priority=priority,
        delay_us=delay_us,
        extras=extras,
        wants_handle=delay_us != 0,
        from_xml=True,
    )


def _plan_batch(asked: Asked, queue: QueueKey, root: Element) -> Plan:
    elements = [child for child in root.children if child.name == "Message"]
    if not 1 <= len(elements) <= limits.BATCH_MAX:
        raise bad("Messages", f"a batch has 1 to {limits.BATCH_MAX} messages.")
    commands: list[Send] = []
    refused: dict[int, Refusal] = {}
    for place, element in enumerate(elements):
        try:
            commands.append(read_message(asked, queue, element))
        except Refusal as refusal:
            refused[place] = refusal
    if sum(len(command.body.encode()) for command in commands) > limits.MESSAGE_BYTES_MAX:
        raise bad("Messages", f"the bodies of a batch have at most {limits.MESSAGE_BYTES_MAX} bytes together.")
    return tuple(commands), refused


def answer_send(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """201 with ids; of a batch with failures, 500, or the failure or its status if all of them have it in common."""
    if call.memo is not None:
        return _answer_batch(call, outcomes)
    sent: Sent = sole(call, outcomes)
    (command,) = call.commands
    assert isinstance(command, Send)
    return document("Message", _sent(command, sent, bare=False), 201)


def _sent(command: Send, sent: Sent, *, bare: bool) -> str:
    """bare: only the two fields that the Python SDK reads next to a failure."""
    text = f"<MessageId>{sent.id.hex().upper()}</MessageId><MessageBodyMD5>{command.md5.hex().upper()}</MessageBodyMD5>"
    if bare:
        return text
    if sent.handle and sent.visible > sent.sent:
        text += f"<ReceiptHandle>{sent.handle}</ReceiptHandle>"
    group = command.extras.group
    return text if group is None else f"{text}<MessageGroupId>{escape(group)}</MessageGroupId>"


def _answer_batch(call: Call, outcomes: Sequence[Outcome]) -> Response:
    refused: dict[int, Refusal] = call.memo
    results = iter(zip(call.commands, outcomes, strict=True))
    answers: list[tuple[Send, Sent] | Refusal] = []
    for place in range(len(call.commands) + len(refused)):
        answers.append(refused[place] if place in refused else _result(*next(results)))
    failures = [each for each in answers if isinstance(each, Refusal)]
    none_sent = len(failures) == len(answers)
    missing = [each for each in failures if each.fault is errors.QUEUE_NOT_EXIST]
    if none_sent and (missing or len({(each.fault.code, each.message) for each in failures}) == 1):
        raise (missing or failures)[0]
    texts = [_failed(each) if isinstance(each, Refusal) else _sent(*each, bare=bool(failures)) for each in answers]
    inside = "".join([f"<Message>{text}</Message>" for text in texts])
    if not failures:
        return document("Messages", inside, 201)
    statuses = {each.fault.status for each in failures}
    return document("Messages", inside, statuses.pop() if none_sent and len(statuses) == 1 else PARTIAL_STATUS)


def _result(command: AnyCommand, outcome: Outcome) -> tuple[Send, Sent] | Refusal:
    if isinstance(outcome, VeilError):
        return fault_of(outcome, command)
    assert isinstance(command, Send)
    assert isinstance(outcome, Sent)
    return command, outcome


def _failed(refusal: Refusal) -> str:
    return f"<ErrorCode>{refusal.fault.code}</ErrorCode><ErrorMessage>{clean(refusal.message)}</ErrorMessage>"


def plan_receive(asked: Asked) -> Plan:
    """ReceiveMessage and BatchReceiveMessage. The memo: whether it is a batch."""
    parameters = asked.parameters
    count = whole_number(parameters, "numOfMessages", 1, limits.BATCH_MAX)
    wait_s = whole_number(parameters, "waitseconds", 0, limits.WAIT_SECONDS_MAX, "seconds")
    command = Receive(
        queue=asked.queue(),
        origin=asked.caller.origin,
        count_max=1 if count is None else count,
        wait_us=None if wait_s is None else wait_s * SECOND_US,
    )
    return (command,), count is not None


def plan_peek(asked: Asked) -> Plan:
    """PeekMessage and BatchPeekMessage: never waits. The memo: whether it is a batch."""
    count = whole_number(asked.parameters, "numOfMessages", 1, limits.BATCH_MAX)
    whole_number(asked.parameters, "waitseconds", 0, limits.WAIT_SECONDS_MAX, "seconds")
    command = Peek(queue=asked.queue(), origin=asked.caller.origin, count_max=1 if count is None else count)
    return (command,), count is not None


def answer_messages(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with one or more messages; peeked messages have no handle and no next visible time."""
    received: Received = sole(call, outcomes)
    if not received.messages:
        raise Refusal(MESSAGE_NOT_EXIST)
    encoded = received.xml_body is XmlBody.BASE64
    if not call.memo:
        return document("Message", _message(received.messages[0], encoded))
    inside = "".join([f"<Message>{_message(message, encoded)}</Message>" for message in received.messages])
    return document("Messages", inside)


def _message(message: Delivery, encoded: bool) -> str:
    digest, body = message.md5, message.body
    if encoded:
        body = encode_xml_body(body)
        digest = md5_of(body.encode(), usedforsecurity=False).digest()
    handle = next_visible = ""
    if message.due is not None:
        handle = f"<ReceiptHandle>{message.handle}</ReceiptHandle>"
        next_visible = f"<NextVisibleTime>{milliseconds(message.due)}</NextVisibleTime>"
    enqueued = milliseconds(message.sent)
    first = enqueued if message.first_received is None else milliseconds(message.first_received)
    shown = escape(body) or _EMPTY
    text = (
        f"<MessageId>{message.id.hex().upper()}</MessageId>{handle}"
        f"<MessageBodyMD5>{digest.hex().upper()}</MessageBodyMD5><MessageBody>{shown}</MessageBody>"
        f"<EnqueueTime>{enqueued}</EnqueueTime>{next_visible}<FirstDequeueTime>{first}</FirstDequeueTime>"
        f"<DequeueCount>{message.receive_count}</DequeueCount><Priority>{message.priority}</Priority>"
    )
    extras = message.extras
    if extras == NO_EXTRAS:
        return text
    if extras.group is not None:
        text += f"<MessageGroupId>{escape(extras.group)}</MessageGroupId>"
    return text + write_properties(message)


BATCH_FAILED_STATUS = 404
"""Status of a batch with failures."""


def _handle(asked: Asked) -> str:
    handle = asked.parameters.get("receipthandle")
    if not handle:
        raise Refusal(errors.MISSING_RECEIPT_HANDLE)
    return _checked(handle)


def _checked(handle: str) -> str:
    if len(handle) > limits.HANDLE_CHARACTERS_MAX:
        raise Refusal(errors.RECEIPT_HANDLE_ERROR)
    return handle


def plan_delete(asked: Asked) -> Plan:
    """DeleteMessage."""
    return (_delete(asked, _handle(asked)),), None


def _delete(asked: Asked, handle: str) -> Delete:
    return Delete(
        queue=asked.queue(),
        origin=asked.caller.origin,
        handle=handle,
        arrived=asked.arrived,
        after_expiry=AfterExpiry.REFUSE,
    )


def plan_batch_delete(asked: Asked) -> Plan:
    """BatchDeleteMessage."""
    asked.queue()
    root = read_root(asked.request.body)
    if root.name != "ReceiptHandles":
        raise malformed("the document must be ReceiptHandles")
    # npm's aliyun-mns writes receiptHandle.
    elements = [child for child in root.children if child.name.lower() == "receipthandle"]
    if not 1 <= len(elements) <= limits.BATCH_MAX:
        raise bad("ReceiptHandles", f"a batch has 1 to {limits.BATCH_MAX} handles.")
    for element in elements:
        if element.children:
            raise malformed("a ReceiptHandle holds text alone")
        if not element.text:
            raise Refusal(errors.MISSING_RECEIPT_HANDLE)
    return tuple(_delete(asked, _checked(element.text)) for element in elements), None


def answer_batch_delete(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """204, or 404 with an entry for each failure; 500 if the server failed at all of them."""
    failed: list[str] = []
    for command, outcome in zip(call.commands, outcomes, strict=True):
        if not isinstance(outcome, VeilError):
            continue
        refusal = fault_of(outcome, command)
        if isinstance(outcome, QueueMissing):
            raise refusal
        assert isinstance(command, Delete)
        failed.append(
            f"<Error><ErrorCode>{refusal.fault.code}</ErrorCode><ErrorMessage>{clean(refusal.message)}</ErrorMessage>"
            f"<ReceiptHandle>{escape(command.handle)}</ReceiptHandle></Error>"
        )
        if len(failed) == len(outcomes) and refusal.fault.status >= 500:
            raise refusal
    if not failed:
        return Response(204, None, b"")
    return document("Errors", "".join(failed), BATCH_FAILED_STATUS)


def plan_change_visibility(asked: Asked) -> Plan:
    """ChangeMessageVisibility."""
    queue, handle = asked.queue(), _handle(asked)
    lease_s = whole_number(asked.parameters, "VisibilityTimeout", 1, limits.VISIBILITY_SECONDS_MAX, "seconds")
    if lease_s is None:
        raise Refusal(errors.MISSING_VISIBILITY_TIMEOUT)
    command = Extend(
        queue=queue,
        origin=asked.caller.origin,
        handle=handle,
        lease_us=lease_s * SECOND_US,
        arrived=asked.arrived,
        after_expiry=AfterExpiry.REFUSE,
        rotate=True,
        report=read_header(asked.request.headers.get(REPORT_HEADER)),
    )
    return (command,), None


def answer_change_visibility(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with the new handle."""
    extended: Extended = sole(call, outcomes)
    return document(
        "ChangeVisibility",
        f"<ReceiptHandle>{extended.handle}</ReceiptHandle>"
        f"<NextVisibleTime>{milliseconds(extended.due)}</NextVisibleTime>",
    )
