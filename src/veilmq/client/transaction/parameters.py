"""The times of a transaction, and why some cannot work.

Strategy: everything that would lose a message silently is refused when the queue is wrapped: a half message that may
appear, or end before it is decided, and a log that forgets before the last question was asked. Defaults as in the
documents' SDK. Source: document 002, "preparations" and "failure analysis".
"""

import logging
from typing import Final

import msgspec

from veilmq.client import checked
from veilmq.client.capabilities import Capabilities, HandleOnSend
from veilmq.client.transaction.entry import Form
from veilmq.model.errors import CapabilityMissing, ParameterInvalid

HALF_LIFE: Final = 47 * 3_600.0
HALF_DELAY: Final = 48 * 3_600.0
TIMEOUT: Final = 600.0
FIFO_TIMEOUT: Final = 180.0
DEDUPLICATION: Final = 300.0
"""How long a FIFO queue drops a second message with the same id (SQS Developer Guide, "exactly-once processing")."""
CHECK_EVERY: Final = 5.0
CLOCKS_APART: Final = 60.0
"""How far the clocks of queue and producer may differ where a half message's end is judged."""
log = logging.getLogger("veilmq.transaction")


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    timeout: float | None = None
    """From the log entry to the first question; None: 600, and 180 for a FIFO queue: it drops a second copy for only
    five minutes, which must also hold a checker that dies."""
    check_every: float = CHECK_EVERY
    """Between looks into the log."""
    check_lease: float = 60.0
    """Lease of a log entry while it is asked about: longer than a check takes."""
    ask_every: float = 60.0
    """After UNKNOWN, until the next question."""
    ask_for: float = 3_600.0
    """After the timeout, until an undecided transaction is parked."""
    half_life: float = HALF_LIFE
    """Time to live of a half message, and of the message that it becomes; where the protocol has no time to live of a
    message, the queue's retention counts."""
    half_delay: float = HALF_DELAY
    """Delay of a half message."""
    life_min: float = 24 * 3_600.0
    """With less of its life left, a half message is not made visible but sent anew."""
    claim_for: float = 20.0
    """Longest search for one's own entry in a log whose sends return no handle."""

    @property
    def asked_after(self) -> float:
        """From the preparation to the first question."""
        return TIMEOUT if self.timeout is None else self.timeout

    @property
    def decided_within(self) -> float:
        """From the preparation; later it is parked."""
        return self.asked_after + self.ask_for


def form_for(given: Form | str | None, capabilities: Capabilities) -> Form:
    """The form to use; None: hidden where it is safe. Raises CapabilityMissing, ParameterInvalid."""
    # On a FIFO queue a message has no delay of its own: a half message would block its group, too.
    safe = (
        capabilities.retention_below_delay
        and capabilities.delay_max > 0
        and capabilities.handle_on_send is not HandleOnSend.NEVER
    )
    if given is None:
        return Form.HIDDEN if safe else Form.LOGGED
    try:
        form = Form(given)
    except ValueError:
        reason = f"must be one of {', '.join(Form)}, not {given!r}"
        raise ParameterInvalid(parameter="form", reason=reason) from None
    if form is Form.HIDDEN and not safe:
        missing = f"a message on {capabilities.protocol} that ends before its delay, with a handle from its send"
        raise CapabilityMissing(capability=missing)
    return form


def times_for(given: Times | None, capabilities: Capabilities) -> Times:
    """What is meant for this queue. Raises ParameterInvalid for what is no duration."""
    times = given or Times()
    if times.timeout is None:
        timeout = FIFO_TIMEOUT if capabilities.native_fifo else TIMEOUT
        times = msgspec.structs.replace(times, timeout=timeout)
    for name in times.__struct_fields__:
        checked.positive(getattr(times, name), name)
    again = times.asked_after + times.check_every + times.check_lease
    if capabilities.native_fifo and again >= DEDUPLICATION:
        log.warning(
            "a commit may be repeated %.0f s after the first, when the queue no longer drops the copy (%.0f s): "
            "consumers need an idempotency guard, or the transactions a shorter timeout", again, DEDUPLICATION,
        )  # fmt: skip
    return times


def check_log(times: Times, form: Form, capabilities: Capabilities, retention: float | None) -> None:
    """Raises ParameterInvalid if the log, with its retention, cannot keep an entry as long as it is needed."""
    hidden_by = capabilities.lease_max if claims(capabilities) else capabilities.delay_max
    _at_most("timeout", times.asked_after, hidden_by, f"{capabilities.protocol} can hide a log entry")
    for name in ("check_lease", "ask_every"):
        _at_most(name, getattr(times, name), capabilities.lease_max, f"{capabilities.protocol} can lease")
    if times.check_lease < capabilities.lease_min:
        reason = f"{times.check_lease:g} s is below the {capabilities.lease_min:g} s of {capabilities.protocol}"
        raise ParameterInvalid(parameter="check_lease", reason=reason)
    needed = times.decided_within + times.check_lease
    if form is Form.HIDDEN:
        needed = max(needed, times.half_delay)
    if retention is not None and retention <= needed:
        reason = f"its retention of {retention:g} s must exceed {needed:g} s, or undecided transactions are lost"
        raise ParameterInvalid(parameter="log", reason=reason)


def check_half(times: Times, capabilities: Capabilities, retention: float | None) -> float:
    """The life of a half message in a queue with this retention.

    Raises ParameterInvalid if it could appear, or end before it is decided.
    """
    _at_most("half_delay", times.half_delay, capabilities.delay_max, f"{capabilities.protocol} can delay")
    life, parameter = times.half_life, "half_life"
    if not capabilities.ttl:
        if retention is None:
            raise CapabilityMissing(capability=f"asking {capabilities.protocol} for a queue's retention")
        life, parameter = retention, "queue"
    if life >= times.half_delay:
        reason = f"a life of {life:g} s must be below the delay of {times.half_delay:g} s, or half messages appear"
        raise ParameterInvalid(parameter=parameter, reason=reason)
    needed = times.decided_within + times.life_min
    if life < needed:
        reason = f"a life of {life:g} s is below timeout + ask_for + life_min = {needed:g} s"
        raise ParameterInvalid(parameter=parameter, reason=reason)
    return life


def claims(log: Capabilities) -> bool:
    """Whether a log entry's handle comes with a receive only."""
    return log.handle_on_send is HandleOnSend.NEVER


def _at_most(name: str, seconds: float, most: float, what: str) -> None:
    if seconds > most:
        raise ParameterInvalid(parameter=name, reason=f"{seconds:g} s is more than the {most:g} s that {what}")
