"""The order, without I/O: what came, what may be handed out, what is done.

Strategy: places are (epoch, number) pairs and are compared as such. `next` is the first place that is not acknowledged;
`done` has the acknowledged numbers beyond it; `held` what came and was not handed out; `out` what was handed out and is
neither acknowledged nor given back. The next place to hand out is the first that is in none of these: until its message
comes, nothing is handed out. That is what strict order means. The receiver owns the clock and the queue.

Entries: a handle is the place and the hand-out (`EPOCH.NUMBER.ATTEMPT`), so that a stale handle is recognised. The
queue's own handle stays in the keeper's lease.

Gaps: a gap is identified by its first number. Its time counts from when this process first saw it, so a restart counts
anew: the missing message may just have been leased by the previous process. Pure: the receiver passes the time and
carries out the decisions.
"""

import logging
from collections.abc import Callable, Set
from contextlib import suppress
from enum import Enum, StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

from veilmq.client.errors import GapFound
from veilmq.client.keeper import Lease
from veilmq.client.messages import Received
from veilmq.client.ordered.numbering import ReceiverState
from veilmq.client.shared import checks
from veilmq.model.errors import ParameterInvalid, ReceiptInvalid, VeilError

Item = TypeVar("Item")

SKIPPED_MAX: Final = 1_000
"""How many gaps are remembered. A message of an older gap counts as a duplicate."""


class Place(NamedTuple):
    """A message's position in the order."""

    epoch: int
    number: int


class Fate(Enum):
    """What became of a message that arrived."""

    KEPT = "kept"
    AGAIN = "again"
    """An earlier arrival had the place; it is returned with this."""
    DUPLICATE = "duplicate"
    """Acknowledged before: delete it."""
    FULL = "full"
    """Too far ahead for the room that is left."""


class Gap(NamedTuple):
    """Missing numbers of an epoch, first and last included; if last is below first, the epoch seems to end at
    `first`."""

    epoch: int
    first: int
    last: int


class Reorder(Generic[Item]):
    """The buffer of one receiver, for at most `room` items. Not thread-safe."""

    def __init__(self, state: ReceiverState, room: int) -> None:
        self.state = state
        self.room = room
        self.held: dict[Place, Item] = {}
        self.out: dict[Place, Item] = {}
        self._done = set(state.done)

    @property
    def full(self) -> bool:
        """Whether there is room only for items that come before the buffered ones."""
        return len(self.held) + len(self.out) >= self.room

    def is_too_far(self, place: Place) -> bool:
        """Whether the buffer is full of items that come before this place."""
        return self.full and place not in self.out and place > max(self.held, default=place)

    def late(self, place: Place) -> str | None:
        """Why a new message at this place must not be handed out any more; None: it may be."""
        state = self.state
        if state.epoch is None or place.epoch > state.epoch:
            return None
        if place.epoch < state.epoch:
            return f"its epoch {place.epoch} ended"
        if any(first <= place.number <= last for first, last in state.skipped):
            return f"its number {place.number} was skipped"
        return None

    def arrive(self, place: Place, item: Item) -> tuple[Fate, Item | None]:
        """Take in an item that is not late. The item returned with FULL (the furthest one) or AGAIN (the earlier one)
        is the caller's.
        """
        state = self.state
        if state.epoch is None:
            state.epoch = place.epoch
        if place.epoch == state.epoch and (place.number < state.next or place.number in self._done):
            return Fate.DUPLICATE, None
        for taken in (self.out, self.held):
            if place in taken:
                earlier, taken[place] = taken[place], item
                return Fate.AGAIN, earlier
        if not self.full:
            self.held[place] = item
            return Fate.KEPT, None
        furthest = max(self.held, default=place)
        if furthest <= place:
            return Fate.FULL, item
        self.held[place] = item
        return Fate.FULL, self.held.pop(furthest)

    def restore(self, place: Place, item: Item) -> None:
        """Undo an AGAIN: put the earlier item back."""
        (self.out if place in self.out else self.held)[place] = item

    def forget(self, place: Place, item: Item) -> None:
        """Drop an item that is not ours any more; the queue will deliver it again."""
        if self.held.get(place) is item:
            del self.held[place]

    def let_go(self) -> list[Item]:
        """Forget and return all waiting items; the queue will deliver them again."""
        items, self.held = list(self.held.values()), {}
        return items

    def restart(self, state: ReceiverState) -> list[Item]:
        """Start anew with this state; returns the buffered items, which are the caller's."""
        items = [*self.held.values(), *self.out.values()]
        self.held, self.out = {}, {}
        self._adopt(state)
        return items

    def due(self) -> Place | None:
        """The next place to hand out, whether its item is here or not; None before the first arrival."""
        if self.state.epoch is None:
            return None
        number = self.state.next
        while number in self._done or Place(self.state.epoch, number) in self.out:
            number += 1
        return Place(self.state.epoch, number)

    def take(self) -> tuple[Place, Item] | None:
        """Hand out the next item, if it is here."""
        place = self.due()
        if place is None or place not in self.held:
            return None
        item = self.out[place] = self.held.pop(place)
        return place, item

    def give_back(self, place: Place) -> None:
        """The hand-out ended without an acknowledgement: hand the item out again."""
        self.held[place] = self.out.pop(place)

    def acknowledged(self, places: Set[Place]) -> ReceiverState:
        """The state to save if these places are done. Changes nothing here until `acknowledge`."""
        done = self._done | {place.number for place in places}
        following = self.state.next
        while following in done:
            done.discard(following)
            following += 1
        return ReceiverState(
            queue=self.state.queue,
            incarnation=self.state.incarnation,
            epoch=self.state.epoch,
            next=following,
            done=sorted(done),
            skipped=self.state.skipped,
        )

    def acknowledge(self, places: Set[Place], state: ReceiverState) -> None:
        """The state was saved: these places are done."""
        self._adopt(state)
        for place in places:
            self.out.pop(place, None)
            self.held.pop(place, None)

    def gap(self) -> Gap | None:
        """The numbers missing before the first item here; None if there are none, or if a handed-out item must come
        first."""
        due = self.due()
        if due is None or self.out or not self.held:
            return None
        first = min(self.held)
        if first <= due:
            return None
        return Gap(due.epoch, due.number, (first.number if first.epoch == due.epoch else due.number) - 1)

    def skipped(self, gap: Gap) -> ReceiverState:
        """The state to save if the gap is given up. Changes nothing here until `skip`."""
        state = self.state
        if gap.last < gap.first:
            epoch = min(place.epoch for place in self.held)
            return ReceiverState(queue=state.queue, incarnation=state.incarnation, epoch=epoch)
        ranges = list(state.skipped)
        first = gap.first
        for number in [*sorted(number for number in self._done if number <= gap.last), gap.last + 1]:
            if first < number:
                ranges.append((first, number - 1))
            first = number + 1
        return ReceiverState(
            queue=state.queue,
            incarnation=state.incarnation,
            epoch=state.epoch,
            next=gap.last + 1,
            done=sorted(number for number in self._done if number > gap.last),
            skipped=ranges[-SKIPPED_MAX:],
        )

    def skip(self, state: ReceiverState) -> None:
        """The state was saved: continue behind the gap."""
        self._adopt(state)

    def _adopt(self, state: ReceiverState) -> None:
        self.state = state
        self._done = set(state.done)


FOREVER: Final = float("inf")

log = logging.getLogger("veilmq.ordered")


class Ordered(Received, frozen=True, kw_only=True):
    """A message in its turn. `receive_count` includes this receiver's hand-outs."""

    epoch: int
    number: int


class Entry:
    """A message in the buffer."""

    __slots__ = ("attempt", "hands", "lease", "message", "not_before", "until", "void")

    def __init__(self, message: Received, lease: Lease, void: bool) -> None:
        self.message = message
        self.lease = lease
        self.void = void
        self.hands = 0
        self.attempt = 0
        """Number of the current hand-out, counted over all messages."""
        self.until = FOREVER
        """End of the current hand-out, on the monotonic clock."""
        self.not_before = -FOREVER


def shown(place: Place, entry: Entry, hold_end: float) -> Ordered:
    """What the application gets. hold_end: the lease's end if the hand-out has no lease of its own."""
    values = {name: getattr(entry.message, name) for name in Received.__struct_fields__}
    values |= {
        "handle": f"{place.epoch}.{place.number}.{entry.attempt}",
        "lease_end": hold_end if entry.until == FOREVER else entry.until,
        "receive_count": entry.message.receive_count + entry.hands - 1,
    }
    return Ordered(**values, epoch=place.epoch, number=place.number)


HANDLE_CHARACTERS_MAX: Final = 100


def place_of(handle: str) -> tuple[Place, int]:
    """The place and the hand-out that a handle names. Raises ReceiptInvalid."""
    parts = checks.handle(handle).split(".")
    if (
        len(handle) > HANDLE_CHARACTERS_MAX
        or len(parts) != 3
        or not all(part.isascii() and part.isdecimal() for part in parts)
    ):
        raise ReceiptInvalid(reason="not a handle of an ordered receiver")
    epoch, number, attempt = map(int, parts)
    return Place(epoch, number), attempt


def give_back(lease: Lease, delay: float = 0) -> None:
    """Release the message. If that fails, stop extending it, so that it comes back when its lease ends."""
    try:
        lease.release(delay)
    except VeilError as error:
        log.info("message %s is not released: %s", lease.message.id, error)
        with suppress(VeilError):
            lease.forget()


class GapPolicy(StrEnum):
    """What to do after the gap timeout."""

    WAIT = "wait"
    """Report it once, and go on waiting."""
    SKIP = "skip"
    """Report it, and continue behind the gap; messages of the gap that still come are strays."""
    RAISE = "raise"
    """`receive` raises GapFound, again after each further timeout."""


class GapWatch:
    """Watches how long one receiver's gap lasts."""

    def __init__(self, policy: GapPolicy, timeout: float | None, tell: Callable[[GapFound], object] | None) -> None:
        if timeout is None and policy is not GapPolicy.WAIT:
            raise ParameterInvalid(parameter="gap_timeout", reason=f"is needed to {policy}")
        if timeout is not None:
            checks.not_negative(timeout, "gap_timeout")
        self.policy = policy
        self.timeout = timeout
        self._report = checks.function_or_none(tell, "tell_gap")
        self._first: tuple[int, int] | None = None
        self._since = 0.0
        self._reported = False

    def check(self, lease: float, retention: float | None) -> None:
        """Raises ParameterInvalid for a timeout that would treat a leased message, or one that has expired, as lost."""
        checks.positive(lease, "lease")
        if self.timeout is None:
            return
        if self.policy is not GapPolicy.WAIT and self.timeout <= lease:
            reason = f"{self.timeout:g} s must exceed the lease of {lease:g} s: a missing message may only be leased"
            raise ParameterInvalid(parameter="gap_timeout", reason=reason)
        if retention is not None and retention < self.timeout:
            reason = f"{self.timeout:g} s exceeds the queue's retention of {retention:g} s: what is waited for expires"
            raise ParameterInvalid(parameter="gap_timeout", reason=reason)

    def over(self, gap: Gap | None, now: float) -> float | None:
        """How long the gap has lasted, if that is at least the timeout and there is something to do about it."""
        first = None if gap is None else (gap.epoch, gap.first)
        if first != self._first:
            self._first, self._since, self._reported = first, now, False
        if gap is None or self.timeout is None or self._reported:
            return None
        waited = now - self._since
        return waited if waited >= self.timeout else None

    def wait_max(self, now: float) -> float:
        """The longest wait before the gap must be checked again."""
        if self._first is None or self.timeout is None or self._reported:
            return float("inf")
        return max(0.0, self._since + self.timeout - now)

    def report(self, queue: str, gap: Gap, waited: float, now: float) -> bool:
        """Report the gap. True: skip it. Raises GapFound."""
        found = GapFound(queue=queue, epoch=gap.epoch, first=gap.first, last=gap.last, waited=waited)
        log.warning("%s (on_gap: %s)", found, self.policy)
        if self._report is not None:
            self._report(found)
        if self.policy is GapPolicy.RAISE:
            self._since = now
            raise found
        self._reported = self.policy is GapPolicy.WAIT
        return self.policy is GapPolicy.SKIP
