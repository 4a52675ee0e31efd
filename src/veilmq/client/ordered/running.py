"""A loop that runs a handler on the messages of an ordered queue.

Strategy: one message after the other, each acknowledged after its handler. In an ordered queue a failed handler affects
all later messages, so the user chooses: block (nothing later is handed out before it succeeds), dead-letter (the order
continues without it), or raise to the caller of the loop.
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
"""How often the loop checks whether to stop."""

log = logging.getLogger("veilmq.ordered")


class OnFailure(StrEnum):
    """What happens after a handler fails."""

    BLOCK = "block"
    """Hand the message out again after the retry delay, and nothing later before it."""
    DEAD_LETTER = "dead-letter"
    """Send it to the dead letters, acknowledge it, and continue."""
    RAISE = "raise"
    """Release it; the handler's exception ends the loop."""


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
    seconds (None: for ever). Returns how many it handled. Raises ParameterInvalid, the errors of `receive`, `delete`
    and `dead_letters.send`, and with OnFailure.RAISE the handler's.

    If the receiver is closed while a handler works, its message is not acknowledged: the next receiver gets it again.
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
    """Messages that come within `wait` seconds; None after the receiver is closed."""
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
    """Returns whether the message is acknowledged. If anything raises, it is handed out again, at the latest by the
    next run."""
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
                return False  # the next receiver gets it
            _send_on(dead_letters, message)
        done = _acknowledged(receiver, message)
    finally:
        if not done:
            with suppress(VeilError):  # it was acknowledged nevertheless, or the receiver is closed
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
