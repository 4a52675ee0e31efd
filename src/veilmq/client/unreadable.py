"""What happens to a message that a pattern cannot read.

Strategy: such a message never reaches the application and never stops the queue. A policy is called with the queue, the
message as received and the error, and decides about the lease. `DeadLetters` sends a copy to another queue and then
deletes the message. `keep` does nothing: the lease ends, the message comes again, and the queue's own redrive finally
moves it. If a policy fails with a typed error, the message also stays leased and comes again, and the policy is called
again.
"""

import logging
import math
from collections.abc import Callable, Hashable
from typing import Final, Protocol

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.errors import Unreadable
from veilmq.client.messages import Message, Received
from veilmq.client.queue import Queue, identity_of
from veilmq.client.shared import body_of_copy, checks
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid, VeilError

REASON_ATTRIBUTE: Final = "veilmq.unreadable"
SOURCE_ATTRIBUTE: Final = "veilmq.source"
ROUNDS_MAX: Final = 1_000
"""Receives in one call that return nothing readable before the call returns empty."""
PAUSE_SECONDS: Final = 10.0
"""Delay in seconds before a message is visible again if what is needed to read it cannot be reached."""
_REASON_CHARACTERS_MAX: Final = 200

log = logging.getLogger("veilmq.client")


class Policy(Protocol):
    """Handles one unreadable message."""

    def __call__(self, queue: Queue, message: Received, error: Unreadable, /) -> None:
        """`message` is as `queue` returned it, body and handle. A VeilError raised here is only logged."""


class DeadLetters:
    """Sends the message unchanged to another queue, then deletes it: a crash in between duplicates it but never loses
    it.

    The copy has the message's attributes and, if they fit, `veilmq.unreadable` (the reason) and `veilmq.source` (the
    original queue).
    """

    def __init__(self, queue: Queue) -> None:
        """Raises ParameterInvalid if it is not a queue."""
        self.queue = checks.queue(queue)

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`."""
        return "dead letters", identity_of(self.queue)

    def __call__(self, queue: Queue, message: Received, error: Unreadable) -> None:
        """Raises what the send and the delete raise."""
        can = self.queue.capabilities
        copy = Message(
            body_of_copy(message.body, can),
            attributes=message.attributes if can.attributes else {},
            type=message.type if can.attributes else None,
            priority=message.priority if can.priorities else None,
            group=(message.group or queue.name) if can.native_fifo else message.group if can.groups else None,
            deduplication_id=message.id if can.native_fifo else None,
        )
        why = {REASON_ATTRIBUTE: str(error)[:_REASON_CHARACTERS_MAX], SOURCE_ATTRIBUTE: queue.name}
        try:
            self.queue.send(
                msgspec.structs.replace(copy, attributes={**copy.attributes, **why} if can.attributes else {})
            )
        except (MessageTooLarge, ParameterInvalid, CapabilityMissing):
            # It already has ten attributes, or ours would exceed the size limit: the message matters more than our
            # note.
            self.queue.send(copy)
        queue.delete(message.handle)


def keep(queue: Queue, message: Received, error: Unreadable) -> None:
    """Leaves the message until its lease ends."""


def set_aside(policy: Policy, queue: Queue, message: Received, error: Unreadable) -> None:
    """Call the policy; log its typed errors."""
    log.warning("queue %s: %s", queue.name, error)
    try:
        policy(queue, message, error)
    except VeilError as failure:
        log.error("queue %s: message %s could not be set aside: %s", queue.name, message.id, failure)


def checked_policy(policy: Policy, inner: Queue) -> Policy:
    """The policy. Raises ParameterInvalid if it is not callable, or sends back into the queue that it takes from."""
    if not callable(policy):
        raise ParameterInvalid(parameter="unreadable", reason="must be DeadLetters(queue), keep, or a function")
    if isinstance(policy, DeadLetters) and policy.queue.name == inner.name and policy.queue.account is inner.account:
        raise ParameterInvalid(parameter="unreadable", reason="DeadLetters need another queue; `keep` leaves them here")
    return policy


def receive_readable(
    receive: Callable[[float], list[Received]],
    read: Callable[[list[Received]], list[Received]],
    wait: float,
    clock: Clock,
) -> list[Received]:
    """Receive until something readable came, nothing came at all, or an unreadable message came a second time.

    `receive` takes the seconds that it may still wait; `read` returns the readable ones of its messages and sets the
    others aside. Raises ParameterInvalid if the wait is not a number.
    """
    deadline = clock.monotonic() + checks.seconds(wait, "wait", 0, math.inf)
    seen: set[str] = set()
    left = wait
    for _ in range(ROUNDS_MAX):
        came = receive(left)
        found = read(came)
        # A policy may have released it at once: to go on would be a busy loop.
        if found or not came or any(message.id in seen for message in came):
            return found
        seen.update(message.id for message in came)
        left = max(0.0, deadline - clock.monotonic()) if wait else 0
    return []


def read_each(
    messages: list[Received], read: Callable[[Received], Received], policy: Policy, queue: Queue
) -> list[Received]:
    """The result of `read` for each message, except those for which it raises Unreadable.

    If `read` raises anything else (a key service cannot be reached), all messages of this receive come back after
    PAUSE_SECONDS; if a policy raises anything but a VeilError, the other ones do at once. Both are raised here.
    """
    found = []
    for place, message in enumerate(messages):
        try:
            found.append(read(message))
        except Unreadable as error:
            try:
                set_aside(policy, queue, message, error)
            except BaseException:
                give_back(queue, [each.handle for each in found] + [each.handle for each in messages[place + 1 :]])
                raise
        except BaseException as error:
            pause = PAUSE_SECONDS if isinstance(error, Exception) else 0.0
            give_back(queue, [each.handle for each in found] + [each.handle for each in messages[place:]], pause)
            raise
    return found


def give_back(queue: Queue, handles: list[str], delay: float = 0) -> None:
    """Release every message that can be released."""
    for handle in handles:
        try:
            queue.release(handle, delay)
        except VeilError as error:
            log.warning("queue %s: a message could not be released: %s", queue.name, error)
