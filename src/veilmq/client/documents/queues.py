"""What the documents' classes take for a queue, and the calls that all of them share.

Strategy: whatever takes a queue takes any: one of ours, a class of this room, or an SDK's own queue object. Each class
here stands on one queue of ours, `queue`, so that they can be stacked.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from veilmq.client.capabilities import Capabilities
from veilmq.client.closing import Closing
from veilmq.client.connect import connect
from veilmq.client.documents.exceptions import documented
from veilmq.client.documents.messages import Message, Sendable, outgoing
from veilmq.client.messages import Template
from veilmq.client.queue import Queue
from veilmq.client.unreadable import DeadLetters, Policy, keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import ParameterInvalid

SQS_WAIT_SECONDS_MAX: Final = 20
"""Longest wait that a queue of SQS, or of a server by its SQS port, can be created with."""

Made = TypeVar("Made")
_told: set[str] = set()
_lock = threading.Lock()
log = logging.getLogger("veilmq.documents")


class OverQueue(Closing):
    """A class of this room that stands on a queue of ours."""

    queue: Queue


AnyQueue = Queue | OverQueue | Any
"""Also an SDK's queue object: mns.queue.Queue, boto3's sqs.Queue, Azure's QueueClient."""


class _Lent(Wrapping):
    """The caller's queue: it stays open when what stands on it is closed."""

    def close(self) -> None:
        """The caller closes it."""


def queue_of(source: AnyQueue, *, owned: bool = False) -> Queue:
    """The queue of ours behind it. To close it closes only what is opened here: our queue over an SDK's object; with
    `owned`, the given queue too.

    Raises ParameterInvalid for what is no queue, and as `connect` does.
    """
    if isinstance(source, OverQueue):
        source = source.queue
    if callable(getattr(source, "extend_batch", None)):
        ours: Queue = source
        return ours if owned else _Lent(ours)
    if isinstance(source, str):
        raise ParameterInvalid(parameter="queue", reason="must be a queue, not text: veilmq.connect(url) gives one")
    return connect(source)


def wait_within(capabilities: Capabilities, seconds: float) -> float:
    """`seconds`, or the longest wait that the protocol has."""
    if seconds <= capabilities.wait_max:
        return seconds
    _tell_once(f"{capabilities.protocol} waits {capabilities.wait_max:g} s at most: a wait of {seconds:g} s is that")
    return capabilities.wait_max


def with_wait_within(template: Template, make: Callable[[Template], Made]) -> Made:
    """`make(template)`; where the protocol refuses its polling wait, with the longest that SQS has."""
    try:
        return make(template)
    except ParameterInvalid:
        if template.wait is None or template.wait <= SQS_WAIT_SECONDS_MAX:
            raise
        made = make(replace(template, wait=SQS_WAIT_SECONDS_MAX))
    _tell_once(f"a queue's polling wait is {SQS_WAIT_SECONDS_MAX} s at most here: {template.wait:g} s is that")
    return made


def _tell_once(line: str) -> None:
    with _lock:
        if line in _told:
            return
        _told.add(line)
    log.warning("%s (said once)", line)


@documented
class MessageQueue(OverQueue):
    """putMessage, popMessage, peekMessage and deleteMessage over `queue`."""

    _dead_letters: Queue | None = None

    def putMessage(self, message: Sendable) -> Message:
        """Send; the message with its id, and with its handle where the protocol gives one."""
        sent = self.queue.send(outgoing(message))
        put = message if isinstance(message, Message) else Message.like(message)
        put.message_id = sent.id
        put.receipt_handle = sent.handle or ""
        return put

    def popMessage(self, waitSeconds: float = 0) -> Message | None:
        """Receive one, waiting up to so long; None if nothing came (the SDK's MessageNotExist)."""
        found = self.queue.receive(wait=wait_within(self.queue.capabilities, waitSeconds))
        return Message.of(found[0]) if found else None

    def peekMessage(self) -> Message | None:
        """The next message without a lease; None if there is none. CapabilityMissing where the protocol has no peek."""
        found = self.queue.peek()
        return Message.peeked(found[0]) if found else None

    def deleteMessage(self, receiptHandle: str) -> None:
        """Done with it."""
        self.queue.delete(receiptHandle)

    def changeMessageVisibilityTimeout(self, receiptHandle: str, visibilityTimeout: float) -> str:
        """The lease ends so many seconds from now; 0 gives the message back. Returns the handle to use next."""
        if visibilityTimeout == 0:
            self.queue.release(receiptHandle)
            return receiptHandle
        return self.queue.extend(receiptHandle, visibilityTimeout)

    def close(self) -> None:
        """Close what this object opened; a queue that the caller handed over stays open."""
        self.queue.close()
        if self._dead_letters is not None:
            self._dead_letters.close()

    def _set_aside(self) -> Policy:
        """What becomes of a message that cannot be read."""
        return keep if self._dead_letters is None else DeadLetters(self._dead_letters)
