"""A loop for a handler that works off an ordered queue.

Strategy: one message after the other, acknowledged after its handler. What happens when a handler fails is the point of
an ordered queue, so it is a choice: block (nothing after it is handed out before it succeeds), dead letters (the order
goes on without it), or raise to whoever runs the loop.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Final

from veilmq.client.messages import Message
from veilmq.client.ordered.receiver import OrderedReceiver
from veilmq.client.ordered.reorder import Ordered
from veilmq.client.queue import Queue
from veilmq.model.errors import ParameterInvalid, VeilError

LOOK_SECONDS: Final = 1.0
"""How often the loop looks whether it shall stop."""

log = logging.getLogger("veilmq.ordered")


class OnFailure(StrEnum):
    """What a failing handler does to the order."""

    BLOCK = "block"
    """Handed out again after the retry delay, and nothing else before."""
    DEAD_LETTER = "dead-letter"
    """Sent to the dead letters, acknowledged, and on."""
    RAISE = "raise"
    """Released; the handler's exception ends the loop."""


def run(
    receiver: OrderedReceiver,
    handler: Callable[[Ordered], object],
    *,
    on_failure: OnFailure | str = OnFailure.BLOCK,
    retry_delay: float = 1.0,
    dead_letters: Queue | None = None,
    stop: threading.Event | None = None,
    idle: float | None = None,
) -> int:
    """Call `handler` for each message in order until `stop` is set, the receiver is closed, or nothing came for `idle`
    seconds (None: for ever); how many it handled. Raises ParameterInvalid, what `receive` and `delete` raise, what
    the handler raises with OnFailure.RAISE, and what `dead_letters.send` raises.

    A message whose handler works on while the receiver is closed is not acknowledged: the next receiver gets it again.
    """
    policy = _policy(on_failure, dead_letters)
    stop = stop or threading.Event()
    handled = 0
    quiet = 0.0
    while not stop.is_set() and (idle is None or quiet < idle):
        look = LOOK_SECONDS if idle is None else min(LOOK_SECONDS, idle)
        messages = _next(receiver, look)
        if messages is None:
            break
        quiet = 0.0 if messages else quiet + look
        for message in messages:
            handled += _handled(receiver, message, handler, policy, retry_delay, dead_letters)
    return handled


def _next(receiver: OrderedReceiver, wait: float) -> list[Ordered] | None:
    """What comes within `wait` seconds; None once it is closed."""
    try:
        return receiver.receive(wait=wait)
    except VeilError:
        if not receiver.closed:
            raise
        return None


def _handled(
    receiver: OrderedReceiver, message: Ordered, handler: Callable[[Ordered], object], policy: OnFailure,
    retry_delay: float, dead_letters: Queue | None,
) -> bool:  # fmt: skip
    """Whether it is acknowledged. Whatever is raised, it is handed out again: by the next run, too."""
    done = False
    delay = 0.0
    try:
        try:
            handler(message)
        except Exception:
            if policy is OnFailure.RAISE:
                raise
            log.exception("number %d: its handler failed (%s)", message.number, policy)
            if dead_letters is None or policy is OnFailure.BLOCK:
                delay = retry_delay
                return False
            if receiver.closed:
                return False  # it is the next receiver's
            _send_on(dead_letters, message)
        done = _acknowledged(receiver, message)
    finally:
        if not done:
            with suppress(VeilError):  # acknowledged after all, or the receiver is closed
                receiver.release(message.handle, delay)
    return done


def _acknowledged(receiver: OrderedReceiver, message: Ordered) -> bool:
    try:
        receiver.delete(message.handle)
    except VeilError as error:
        if not receiver.closed:
            raise
        log.warning("number %d is handled and not acknowledged: it comes again (%s)", message.number, error)
        return False
    return True


def _send_on(dead_letters: Queue, message: Ordered) -> None:
    can = dead_letters.capabilities
    dead_letters.send(
        Message(
            message.body,
            attributes=message.attributes if can.attributes else {},
            type=message.type if can.attributes else None,
            group=(message.group or message.id) if can.native_fifo else None,
            deduplication_id=message.id if can.native_fifo else None,
        )
    )


def _policy(given: OnFailure | str, dead_letters: Queue | None) -> OnFailure:
    try:
        policy = OnFailure(given)
    except ValueError:
        reason = f"must be one of {', '.join(OnFailure)}, not {given!r}"
        raise ParameterInvalid(parameter="on_failure", reason=reason) from None
    if policy is OnFailure.DEAD_LETTER and dead_letters is None:
        raise ParameterInvalid(parameter="dead_letters", reason="is needed for on_failure=dead-letter")
    return policy
