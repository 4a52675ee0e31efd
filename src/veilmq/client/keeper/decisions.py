"""The keeper's decisions: which lease to extend, and which is lost. No thread, clock or queue.

Strategy: the caller holds the keeper's lock and passes the time. `due` checks the leases whose time has come and
returns those to extend. The senders report back through `begin` and `extended`; the user's own calls through `claim`,
`ended` and `extended`. Leases lost on the way are collected in `losses`, and the shell reports them. All instants are
seconds on the client's monotonic clock.

A lease is checked when its extension is due, when its retry is due, and when it ends, whichever its state asks for. So
a call that never returns cannot keep the handler from learning of the loss. An extension that the queue grants after
the lease has ended (`Capabilities.extends_late`) makes the message held again.

The schedule: instants are rounded down to slots, so leases that are due at about the same time are checked and extended
together, and the heap holds a few hundred keys for any number of leases. A slot is `width` wide, or a sixteenth of the
time left if that is more. A check that comes too early for its lease only moves the lease into a finer slot. A lease
leaves its slot as soon as it is done, so the schedule keeps no body alive.

Parameters: one frozen value, checked once against the queue's capabilities before any thread starts or request is sent.
The names in brackets are those of the documents (000 and 002, "processing time, self-adapting").
"""

import bisect
import heapq
import math
from collections import Counter
from typing import Final, Generic, TypeVar

import msgspec

from veilmq.client.errors import may_have_happened
from veilmq.client.keeper.lease import (
    LATENESS_BOUNDS,
    REFUSALS,
    STEPS,
    Hold,
    KeeperStats,
    Look,
    Plan,
    Reason,
    State,
    reason_of,
)
from veilmq.client.messages import Received
from veilmq.client.queue import Capabilities
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import in_one_process
from veilmq.model.errors import ParameterInvalid, VeilError

VISIBILITY_TIMEOUT: Final = 30.0
INTERVAL: Final = 10.0
MINIMAL_LIFE: Final = 5.0
MAX_HOLD: Final = 18_000.0
"""The documents' five hours."""
SENDERS_ALONE: Final = 32
"""Senders if each extension is a request of its own: 32 round trips of 50 ms are 640 extensions a second."""
SENDERS_BATCH: Final = 4
SENDERS_MAX: Final = 1_000
BATCH_MAX: Final = 1_000
"""The most extensions in one `extend_batch`: a delete waits while its message's extension is in progress."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """All in seconds, except `senders`."""

    minimal_life: float = MINIMAL_LIFE
    """(MessageMinimalLife) An extension is on time if at least this much of the lease is left."""
    interval: float = INTERVAL
    """(TimerInterval) An extension is due `interval` + `minimal_life` before the lease ends."""
    visibility_timeout: float = VISIBILITY_TIMEOUT
    """(QueueMessageVisibilityTimeout) The length of each extension."""
    max_hold: float = MAX_HOLD
    """(MessageTimeout) A message held for longer is not extended any more."""
    senders: int | None = None
    """The most extensions in progress at once; None: 4 if the protocol extends in batches, else 32."""

    def check(self, capabilities: Capabilities, plan: Plan | None) -> None:
        """Raises ParameterInvalid for values that would lose leases."""
        for name in ("minimal_life", "interval", "visibility_timeout", "max_hold"):
            checks.positive(getattr(self, name), name)
        if self.senders is not None:
            checks.whole(self.senders, "senders", 1, SENDERS_MAX)
        check_lease("visibility_timeout", self.visibility_timeout, capabilities)
        if plan is not None:
            for method in ("first_lease", "next_lease"):
                checks.object_with(plan, "plan", method)
            checks.not_negative(getattr(plan, "margin", None), "plan.margin")
        elif self.visibility_timeout <= self.interval + self.minimal_life:
            needed = self.interval + self.minimal_life
            raise ParameterInvalid(
                parameter="visibility_timeout",
                reason=f"{self.visibility_timeout:g} s must exceed interval + minimal_life = {needed:g} s, "
                "or leases end before their extension is due",
            )
        total = capabilities.lease_total_max
        if total is not None and total <= self.minimal_life:
            raise ParameterInvalid(
                parameter="minimal_life",
                reason=f"{self.minimal_life:g} s is not below the {total:g} s that {capabilities.protocol} allows",
            )

    def senders_max(self, capabilities: Capabilities) -> int:
        """The most extensions in progress at once."""
        if self.senders is not None:
            return self.senders
        return SENDERS_BATCH if capabilities.batch_extend else SENDERS_ALONE


def check_lease(name: str, seconds: float, capabilities: Capabilities) -> None:
    """Raises ParameterInvalid for a lease that the queue cannot give."""
    checks.positive(seconds, name)
    if not capabilities.lease_min <= seconds <= capabilities.lease_max:
        raise ParameterInvalid(
            parameter=name,
            reason=f"{seconds:g} s is not between the {capabilities.lease_min:g} and {capabilities.lease_max:g} s "
            f"of {capabilities.protocol}",
        )


def batch_size(capabilities: Capabilities) -> int:
    """How many extensions one request carries."""
    return min(capabilities.batch_messages_max, BATCH_MAX) if capabilities.batch_extend else 1


_FINENESS: Final = 16
H = TypeVar("H", bound=Hold)


class Schedule(Generic[H]):
    """When to check each lease. A lease is in at most one slot: `hold.slot`, None if in none."""

    def __init__(self, width: float) -> None:
        self.width = width
        """Seconds: a check comes at most this much early."""
        self._slots: dict[float, set[H]] = {}
        self._heap: list[float] = []

    def put(self, hold: H, at: float, now: float) -> None:
        """Check `hold` at `at`, or less than a slot earlier; replaces the previous plan."""
        width = self.width
        if at - now > width * _FINENESS:
            width = math.ldexp(width, math.frexp((at - now) / (width * _FINENESS))[1] - 1)
        slot = max(at // width * width, 0.0)
        if slot == hold.slot:
            return
        if hold.slot is not None:
            self._slots[hold.slot].discard(hold)
        hold.slot = slot
        holds = self._slots.get(slot)
        if holds is None:
            holds = self._slots[slot] = set()
            heapq.heappush(self._heap, slot)
        holds.add(hold)

    def drop(self, hold: H) -> None:
        """Do not check `hold` any more."""
        if hold.slot is not None:
            self._slots[hold.slot].discard(hold)
            hold.slot = None

    def take(self, now: float, count_max: int) -> list[H]:
        """Remove and return up to `count_max` leases whose instant has come, earliest slots first."""
        taken: list[H] = []
        while self._heap and self._heap[0] <= now and len(taken) < count_max:
            holds = self._slots[self._heap[0]]
            while holds and len(taken) < count_max:
                hold = holds.pop()
                hold.slot = None
                taken.append(hold)
            if not holds:
                del self._slots[heapq.heappop(self._heap)]
        return taken

    def next(self) -> float:
        """The instant of the next check; infinite if there is none."""
        while self._heap and not self._slots[self._heap[0]]:
            del self._slots[heapq.heappop(self._heap)]
        return self._heap[0] if self._heap else math.inf


SLOT_SECONDS_MAX: Final = 0.25
_SLOTS_PER_INTERVAL: Final = 16
RETRY_SECONDS: Final = 0.25
"""First pause after a failed extension. It doubles, but is short enough that three tries fit into the time left."""
_GOLDEN: Final = 0.6180339887498949


class LeaseDecisions(Generic[H]):
    """All leases of one keeper."""

    def __init__(self, parameters: Parameters, capabilities: Capabilities, plan: Plan | None, jitter: float) -> None:
        self.parameters = parameters
        self.renews = True
        """False: no lease is extended or watched by itself; only the user's own calls reach the queue."""
        self.capabilities = capabilities
        self.plan = plan
        self.holds: dict[str, H] = {}
        """By the receipt handle of the receive."""
        self.losses: list[H] = []
        """Leases lost since the shell last collected them."""
        self.schedule: Schedule[H] = Schedule(min(parameters.interval / _SLOTS_PER_INTERVAL, SLOT_SECONDS_MAX))
        self.registered = 0
        self.extensions = 0
        self.failures = 0
        self.lost: Counter[str] = Counter()
        self.late = [0] * (len(LATENESS_BOUNDS) + 1)
        self.late_seconds = 0.0
        self.late_seconds_max = 0.0
        self._jitter = jitter
        self._lead = parameters.interval + parameters.minimal_life

    def hold_end(self, max_hold: float, now: float, message: Received) -> float:
        """When to stop extending a message that is registered now. The protocol's cap counts from the receive."""
        total = self.capabilities.lease_total_max
        if total is None:
            return now + max_hold
        asked = now if message.asked is None else message.asked
        return min(now + max_hold, asked + total - self.parameters.minimal_life)

    def end_reason(self, hold: H) -> Reason:
        """Which of the two limits set `hold_end`."""
        capped = self.hold_end(math.inf, hold.registered, hold.message) <= hold.hold_end
        return Reason.TOTAL_CAP if capped else Reason.MAX_HOLD

    def lead_for(self, seconds: float) -> float:
        """How many seconds before its end a lease of `seconds` is extended."""
        lead = self._lead if self.plan is None else self.plan.margin
        return lead if seconds > lead else seconds / 2

    def admit(self, hold: H, now: float) -> None:
        """Start to hold a message. Raises ParameterInvalid if its handle is held already."""
        key = hold.message.handle
        if key in self.holds:
            raise ParameterInvalid(parameter="received", reason="this receive is registered already")
        self.holds[key] = hold
        self.registered += 1
        if hold.wanted is not None:
            if abs(hold.deadline - now - hold.wanted) > max(self.lead_for(hold.wanted), self.schedule.width):
                hold.renew_at = now
            else:
                hold.wanted = None
        self._plan_look(hold, now)

    def due(self, now: float, count_max: int) -> list[H]:
        """Check up to `count_max` leases whose time has come. Returns those to extend now, earliest end first."""
        chosen = [hold for hold in self.schedule.take(now, count_max) if self._look(hold, now)]
        chosen.sort(key=_deadline)
        return chosen

    def stats(self, senders: int) -> KeeperStats:
        """Counts since the keeper was made."""
        return KeeperStats(
            leases=len(self.holds),
            registered=self.registered,
            extensions=self.extensions,
            failures=self.failures,
            losses=dict(self.lost),
            late=tuple(self.late),
            late_seconds=self.late_seconds,
            late_seconds_max=self.late_seconds_max,
            senders=senders,
        )

    def next_look(self) -> float:
        """When `due` next has something to do."""
        return self.schedule.next()

    def length(self, hold: H, now: float) -> float:
        """Seconds that an extension made now should give. Calls the user's plan, so do not hold the lock."""
        if hold.wanted is not None:
            seconds = hold.wanted
        elif hold.fixed is not None:
            seconds = hold.fixed
        elif self.plan is not None:
            seconds = in_one_process(self.plan.next_lease, hold.message, now - hold.registered)
        else:
            seconds = self.parameters.visibility_timeout
        return self.clamped(seconds, hold.hold_end - now)

    def clamped(self, seconds: float, left: float) -> float:
        """`seconds` within the queue's bounds and the `left` seconds that the message may still be held."""
        seconds = max(min(seconds, self.capabilities.lease_max, left), self.capabilities.lease_min)
        # The protocol counts whole seconds. Round up: a longer lease is safe, a shorter one is not.
        return seconds if self.capabilities.lease_min < 1 else math.ceil(seconds)

    def begin(self, hold: H, now: float) -> bool:
        """A sender is about to extend this lease. False if it must not, or need not: the user has extended it since."""
        hold.queued = False
        if hold.status is not State.HELD or hold.busy:
            return False
        if hold.late_until is None and hold.renew_at > now + self.schedule.width:
            self._plan_look(hold, now)
            return False
        hold.status = STEPS[State.HELD, "extend"]
        hold.busy = True
        return True

    def extended(
        self, hold: H, answer: str | VeilError | None, seconds: float, before: float, now: float, *, own: bool = True
    ) -> None:
        """An extension for `seconds`, sent at `before`, has ended.

        answer: the new handle, an error, or None if the call broke. own: False for an extension that the user asked
        for.
        """
        hold.busy = False
        if isinstance(answer, str):
            hold.newest = answer
        if hold.status is not State.EXTENDING:
            return
        if isinstance(answer, str):
            hold.status = STEPS[hold.status, "kept"]
            if own:
                self._count(hold, now)
            self._kept(hold, seconds, before, now)
        elif isinstance(answer, REFUSALS):
            self._refused(hold, answer)
        else:
            hold.status = STEPS[hold.status, "failed"]
            hold.error = answer
            if answer is None or may_have_happened(answer):
                # The extension may have happened, and it may have made the lease shorter.
                hold.deadline = min(hold.deadline, before + seconds)
            hold.renew_at = self._retry_at(hold, now) if own else min(hold.renew_at, hold.deadline - hold.lead)
            if hold.late_until is not None:
                self.lose(hold, Reason.EXPIRED)  # it was the last try
            else:
                self._plan_look(hold, now)

    def claim(self, hold: H, event: str) -> None:
        """The user's own call (`extend` or `end`) is about to be sent. No other call for this lease may be in
        progress."""
        assert not hold.busy
        hold.busy = True
        if hold.status is State.HELD:
            hold.status = STEPS[State.HELD, event]

    def ended(self, hold: H, returned: bool, error: VeilError | None, now: float) -> None:
        """The user's delete or release has ended: it returned, raised `error`, or broke (no error)."""
        hold.busy = False
        if hold.status is not State.ENDING:
            return
        if returned:
            hold.status = STEPS[hold.status, "ended"]
            self._forget(hold)
        elif isinstance(error, REFUSALS):
            hold.error = error
            self.lose(hold, reason_of(error))
        else:
            hold.status = STEPS[hold.status, "failed"]
            hold.error = error
            self._plan_look(hold, now)

    def lose(self, hold: H, reason: Reason) -> None:
        """Mark the lease as lost and stop extending it."""
        hold.status = STEPS[hold.status, "lost"]
        hold.reason = reason
        self.lost[reason.name] += 1
        self._forget(hold)
        self.losses.append(hold)

    def decide(self, hold: H, now: float) -> Look:
        """What to do with this lease now: the first match of `LOOKS`, in that order."""
        # Everything within one slot counts as now: a handler learns of the end slightly before it, never after.
        soon = now + self.schedule.width
        if hold.status is State.ENDING:
            return Look.LEAVE
        if hold.hold_end <= soon:
            return Look.LET_GO
        if hold.deadline <= soon:
            return Look.OVER
        return Look.EXTEND if self._may_extend(hold) and hold.renew_at <= soon else Look.WAIT

    def _look(self, hold: H, now: float) -> bool:
        """Check one lease and plan its next check. Returns whether to extend it now."""
        decided = self.decide(hold, now)
        if decided is Look.LEAVE:
            return False
        if decided is Look.LET_GO:
            self.lose(hold, self.end_reason(hold))
            return False
        if decided is Look.OVER:
            return self._overdue(hold, now)
        if decided is Look.EXTEND:
            hold.queued = True
        self._plan_look(hold, now)
        return decided is Look.EXTEND

    def _overdue(self, hold: H, now: float) -> bool:
        """The lease ends now or has ended. It is lost unless a late extension may still save it. Returns whether to
        send one.

        Only on queues whose answer says whether the message is still held (`extends_late`): an extension in progress
        gets `minimal_life` to be answered, and if the check came late (the machine slept), one extension is sent late.
        """
        under_way = hold.busy or hold.queued
        if hold.late_until is None and self.capabilities.extends_late:
            slept = hold.deadline + self.schedule.width < now
            if under_way or slept:
                hold.late_until = now + self.parameters.minimal_life
                hold.queued = hold.queued or not under_way
                self._plan_look(hold, now)
                return not under_way
        elif hold.late_until is not None and under_way and now < hold.late_until:
            self._plan_look(hold, now)
            return False
        self.lose(hold, Reason.EXPIRED)
        return False

    def _plan_look(self, hold: H, now: float) -> None:
        if not self.renews:
            return
        at = min(hold.deadline if hold.late_until is None else hold.late_until, hold.hold_end)
        if self._may_extend(hold):
            at = min(at, hold.renew_at)
        self.schedule.put(hold, max(at, now), now)

    def _may_extend(self, hold: H) -> bool:
        # The last extension ends when the hold does, apart from rounding.
        return not (hold.queued or hold.busy) and hold.deadline < hold.hold_end - self.schedule.width

    def _kept(self, hold: H, seconds: float, before: float, now: float) -> None:
        hold.deadline = before + seconds
        hold.lead = self.lead_for(seconds)
        hold.renew_at = hold.deadline - hold.lead
        hold.wanted = None
        hold.tries = 0
        hold.error = None
        hold.late_until = None
        self._plan_look(hold, now)

    def _count(self, hold: H, now: float) -> None:
        self.extensions += 1
        if hold.wanted is None:
            late = max(now - max(hold.deadline - hold.lead, hold.registered), 0.0)
            self.late[bisect.bisect_left(LATENESS_BOUNDS, late)] += 1
            self.late_seconds += late
            self.late_seconds_max = max(self.late_seconds_max, late)

    def _refused(self, hold: H, error: VeilError) -> None:
        hold.error = error
        if hold.maybe_deleted and reason_of(error) is Reason.GONE:
            hold.status = STEPS[hold.status, "ended"]
            self._forget(hold)
        else:
            self.lose(hold, reason_of(error))

    def _retry_at(self, hold: H, now: float) -> float:
        """When to retry. A failed call is not a lost lease: retry until the lease ends, more often as the end comes
        near."""
        self.failures += 1
        self._jitter = (self._jitter + _GOLDEN) % 1.0
        pause = min(math.ldexp(RETRY_SECONDS, min(hold.tries, 16)), (hold.deadline - now) / 3)
        pause *= 0.5 + 0.5 * self._jitter
        hold.tries += 1
        # Everything within one slot is checked now, so a shorter pause would be no pause.
        return now + max(pause, 2 * self.schedule.width)

    def _forget(self, hold: H) -> None:
        self.schedule.drop(hold)
        self.holds.pop(hold.message.handle, None)


def _deadline(hold: Hold) -> float:
    return hold.deadline
