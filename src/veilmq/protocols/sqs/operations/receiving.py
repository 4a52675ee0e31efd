"""ReceiveMessage.

Strategy: which system and message attributes to return is decided once, from the request. Most requests want none, and
then a message is five fields. Source: ReceiveMessage in the SQS API Reference.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from veilmq.model.commands import Receive
from veilmq.model.instant import SECOND_US, milliseconds
from veilmq.model.message import Delivery, id_text
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.queue import QueueKey
from veilmq.protocols.sqs import limits, results
from veilmq.protocols.sqs.addresses import is_fifo
from veilmq.protocols.sqs.arns import arn
from veilmq.protocols.sqs.attributes import NAMES, unknown_name
from veilmq.protocols.sqs.call import Asked, Call, Plan, sole
from veilmq.protocols.sqs.checksums import attributes_md5
from veilmq.protocols.sqs.errors import invalid_value
from veilmq.protocols.sqs.inputs import ReceiveMessageInput
from veilmq.protocols.sqs.message_attributes import TRACE_HEADER, Filter, attribute_filter, attributes_out


class _Wanted(NamedTuple):
    """What to return of each message besides its body."""

    system: tuple[str, ...]
    attributes: Filter | None


def plan_receive(asked: Asked, given: ReceiveMessageInput) -> Plan:
    """ReceiveMessage."""
    queue = asked.queue(given.queue_url)
    count, lease_s, wait_s = given.max_number_of_messages, given.visibility_timeout, given.wait_time_seconds
    if count is None:
        count = 1
    elif not 1 <= count <= limits.RECEIVE_COUNT_MAX:
        reason = f"Must be between 1 and {limits.RECEIVE_COUNT_MAX}, if provided."
        raise invalid_value("MaxNumberOfMessages", count, reason)
    if lease_s is not None and not 0 <= lease_s <= limits.VISIBILITY_SECONDS_MAX:
        reason = f"Must be between 0 and {limits.VISIBILITY_SECONDS_MAX}, if provided."
        raise invalid_value("VisibilityTimeout", lease_s, reason)
    if wait_s is not None and not 0 <= wait_s <= limits.WAIT_SECONDS_MAX:
        raise invalid_value("WaitTimeSeconds", wait_s, f"Must be >= 0 and <= {limits.WAIT_SECONDS_MAX}, if provided.")
    command = Receive(
        queue=queue,
        origin=asked.caller.origin,
        count_max=count,
        lease_us=None if lease_s is None else lease_s * SECOND_US,
        wait_us=None if wait_s is None else wait_s * SECOND_US,
        in_flight_max=limits.IN_FLIGHT_MAX,
        attempt_id=_attempt_id(given.receive_request_attempt_id, queue),
    )
    if given.attribute_names or given.message_system_attribute_names or given.message_attribute_names:
        return (command,), _wanted(given, is_fifo(queue.name))
    return (command,), None


def _attempt_id(attempt_id: str | None, queue: QueueKey) -> str | None:
    """The id for retries. AWS ignores it on a standard queue (awspring/spring-cloud-aws #529)."""
    if attempt_id is None or not is_fifo(queue.name):
        return None
    if not limits.TOKEN.match(attempt_id):
        reason = "ReceiveRequestAttemptId can only include alphanumeric and punctuation characters. 1 to 128 in length."
        raise invalid_value("ReceiveRequestAttemptId", attempt_id, reason)
    return attempt_id


def _wanted(given: ReceiveMessageInput, fifo: bool) -> _Wanted:
    named = [*(given.attribute_names or ()), *(given.message_system_attribute_names or ())]
    for name in named:
        # The old AttributeNames also accepts names of queue attributes and returns nothing for them.
        if name not in _SYSTEM and name not in NAMES:
            raise unknown_name(name)
    system = tuple(name for name in _SYSTEM if ("All" in named or name in named) and (fifo or name != "SequenceNumber"))
    return _Wanted(system, attribute_filter(given.message_attribute_names or ()))


def answer_receive(call: Call, outcomes: Sequence[Outcome]) -> results.ReceiveMessageResult:
    """ReceiveMessageResult."""
    received: Received = sole(call, outcomes)
    if not received.messages:
        return results.ReceiveMessageResult()
    wanted: _Wanted | None = call.memo
    messages = [
        results.Message(id_text(delivery.id), delivery.handle, delivery.md5.hex(), delivery.body)
        for delivery in received.messages
    ]
    if wanted is not None:
        for message, delivery in zip(messages, received.messages, strict=True):
            _show_more(message, delivery, wanted)
    return results.ReceiveMessageResult(messages)


def _show_more(message: results.Message, delivery: Delivery, wanted: _Wanted) -> None:
    if wanted.system:
        shown = {name: text for name in wanted.system if (text := _SYSTEM[name](delivery)) is not None}
        message.attributes = shown or None
    if wanted.attributes is not None and delivery.extras.attributes:
        kept = [attribute for attribute in delivery.extras.attributes if wanted.attributes(attribute.name)]
        if kept:
            message.md5_of_message_attributes = attributes_md5(kept)
            message.message_attributes = attributes_out(kept)


def _first_received(delivery: Delivery) -> str | None:
    # A dead letter keeps the value of its source queue, as on AWS (softwaremill/elasticmq #386).
    first = delivery.extras.dead_first_received or delivery.first_received
    return None if first is None else str(milliseconds(first))


def _source(delivery: Delivery) -> str | None:
    source = delivery.extras.dead_letter_source
    return None if source is None else arn(source)


_SYSTEM: Final[dict[str, Callable[[Delivery], str | None]]] = {
    "SenderId": lambda delivery: delivery.sender,
    "SentTimestamp": lambda delivery: str(milliseconds(delivery.sent)),
    # "The number of times a message has been received across all queues": a dead letter's count continues.
    "ApproximateReceiveCount": lambda delivery: str(delivery.receive_count + delivery.extras.dead_receives),
    "ApproximateFirstReceiveTimestamp": _first_received,
    "SequenceNumber": lambda delivery: f"{delivery.sequence:020d}",
    "MessageDeduplicationId": lambda delivery: delivery.extras.deduplication_id,
    "MessageGroupId": lambda delivery: delivery.extras.group,
    TRACE_HEADER: lambda delivery: delivery.extras.trace,
    "DeadLetterQueueSourceArn": _source,
}
