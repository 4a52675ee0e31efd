"""ReceiveMessage and PeekMessage, of one message or up to 16.

Strategy: `numOfMessages` in the query makes the root Messages, even for one message. Without a wait the queue's own
applies; a wait of 0 means none. If there is no message, or the receive may not wait, the response is the error
MessageNotExist.
"""

from collections.abc import Sequence
from hashlib import md5

from veilmq.model.commands import Peek, Receive
from veilmq.model.instant import SECOND_US, milliseconds
from veilmq.model.message import NO_EXTRAS, Delivery
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.queue import XmlBody
from veilmq.model.xml_bodies import encode_xml_body
from veilmq.protocols.http import Response
from veilmq.protocols.mns import limits
from veilmq.protocols.mns.call import Asked, Call, Plan, sole
from veilmq.protocols.mns.errors import MESSAGE_NOT_EXIST, Refusal
from veilmq.protocols.mns.operations.properties import write_properties
from veilmq.protocols.mns.parameters import whole_number
from veilmq.protocols.mns.writing import document
from veilmq.protocols.xml import escape


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
        digest = md5(body.encode(), usedforsecurity=False).digest()
    handle = next_visible = ""
    if message.due is not None:
        handle = f"<ReceiptHandle>{message.handle}</ReceiptHandle>"
        next_visible = f"<NextVisibleTime>{milliseconds(message.due)}</NextVisibleTime>"
    enqueued = milliseconds(message.sent)
    first = enqueued if message.first_received is None else milliseconds(message.first_received)
    text = (
        f"<MessageId>{message.id.hex().upper()}</MessageId>{handle}"
        f"<MessageBodyMD5>{digest.hex().upper()}</MessageBodyMD5><MessageBody>{escape(body)}</MessageBody>"
        f"<EnqueueTime>{enqueued}</EnqueueTime>{next_visible}<FirstDequeueTime>{first}</FirstDequeueTime>"
        f"<DequeueCount>{message.receive_count}</DequeueCount><Priority>{message.priority}</Priority>"
    )
    extras = message.extras
    if extras == NO_EXTRAS:
        return text
    if extras.group is not None:
        text += f"<MessageGroupId>{escape(extras.group)}</MessageGroupId>"
    return text + write_properties(message)
