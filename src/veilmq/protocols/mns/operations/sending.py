"""SendMessage and BatchSendMessage: one URL, distinguished by the document's root.

Strategy: each message of a batch is checked by itself; a refusal is returned in its place and the others are sent. The
handle of a delayed message is returned and stays valid while the message is delayed. Source: the pages of SendMessage
and BatchSendMessage; a partial response has the shape that the Python SDK reads.
"""

from collections.abc import Sequence
from hashlib import md5 as md5_of

from veilmq.model.commands import AnyCommand, Send
from veilmq.model.errors import VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.message import NO_EXTRAS, Extras, first_forbidden_character
from veilmq.model.outcomes import Outcome, Sent
from veilmq.model.queue import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, QueueKey
from veilmq.protocols.http import Response
from veilmq.protocols.mns import limits
from veilmq.protocols.mns.call import Asked, Call, Plan, sole
from veilmq.protocols.mns.content import members, number, read_root, word
from veilmq.protocols.mns.errors import Refusal, bad, fault_of, malformed
from veilmq.protocols.mns.operations.properties import read_properties
from veilmq.protocols.mns.writing import document
from veilmq.protocols.xml import Element, clean, escape

PARTIAL_STATUS = 500
"""Status of a batch of which some were sent. The documents do not give it; SDKs need 400 or more."""


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
    """201 with ids; of a batch with failures, 500, or the first failure if nothing was sent."""
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
    if sent.visible > sent.sent:
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
    if len(failures) == len(answers):
        raise failures[0]
    texts = [_failed(each) if isinstance(each, Refusal) else _sent(*each, bare=bool(failures)) for each in answers]
    inside = "".join([f"<Message>{text}</Message>" for text in texts])
    return document("Messages", inside, PARTIAL_STATUS if failures else 201)


def _result(command: AnyCommand, outcome: Outcome) -> tuple[Send, Sent] | Refusal:
    if isinstance(outcome, VeilError):
        return fault_of(outcome, command)
    assert isinstance(command, Send)
    assert isinstance(outcome, Sent)
    return command, outcome


def _failed(refusal: Refusal) -> str:
    return f"<ErrorCode>{refusal.fault.code}</ErrorCode><ErrorMessage>{clean(refusal.message)}</ErrorMessage>"
