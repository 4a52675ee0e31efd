"""The order, without any I/O: what came, what may be handed out, what is done.

Strategy: places are (epoch, number) pairs and compare as such. `next` is the first place that is not acknowledged;
`done` holds acknowledged numbers beyond it; `held` what came and was not handed out; `out` what was handed out and is
neither acknowledged nor back. The place that must go out next is the first that is in none of them: without it nobody
gets anything, which is the whole point. Receivers own the clock and the queue.
"""

from collections.abc import Set
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

from veilmq.client.ordered.state import ReceiverState

Item = TypeVar("Item")

SKIPPED_MAX: Final = 1_000
"""Gaps remembered; what still comes of an older one counts as a duplicate."""


class Place(NamedTuple):
    """Where a message belongs."""

    epoch: int
    number: int


class Fate(Enum):
    """What became of an arrival."""

    KEPT = "kept"
    AGAIN = "again"
    """The place is taken by an earlier arrival, which is given back with it."""
    DUPLICATE = "duplicate"
    """Acknowledged before: delete it."""
    FULL = "full"
    """Too far ahead for the room there is."""


class Gap(NamedTuple):
    """Missing numbers of an epoch, both ends included; with last below first, the epoch seems to end at `first`."""

    epoch: int
    first: int
    last: int


class Reorder(Generic[Item]):
    """One receiver's buffer, for at most `room` items. Not thread-safe."""

    def __init__(self, state: ReceiverState, room: int) -> None:
        self.state = state
        self.room = room
        self.held: dict[Place, Item] = {}
        self.out: dict[Place, Item] = {}
        self._done = set(state.done)

    @property
    def full(self) -> bool:
        """No room for what is not among the first."""
        return len(self.held) + len(self.out) >= self.room

    def is_too_far(self, place: Place) -> bool:
        """Whether the buffer is full of what comes before it."""
        return self.full and place not in self.out and place > max(self.held, default=place)

    def late(self, place: Place) -> str | None:
        """Why what nobody has seen may not be seen any more; None: it may."""
        state = self.state
        if state.epoch is None or place.epoch > state.epoch:
            return None
        if place.epoch < state.epoch:
            return f"its epoch {place.epoch} ended"
        if any(first <= place.number <= last for first, last in state.skipped):
            return f"its number {place.number} was skipped"
        return None

    def arrive(self, place: Place, item: Item) -> tuple[Fate, Item | None]:
        """Take in an item that is not late; what comes back with FULL (the furthest one) or AGAIN (the earlier one) is
        the caller's.
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
        """Undo an AGAIN: the earlier one keeps the place."""
        (self.out if place in self.out else self.held)[place] = item

    def forget(self, place: Place, item: Item) -> None:
        """The item is not ours any more; the queue will bring it again."""
        if self.held.get(place) is item:
            del self.held[place]

    def let_go(self) -> list[Item]:
        """Forget all that waits; it is the caller's, and comes again."""
        items, self.held = list(self.held.values()), {}
        return items

    def restart(self, state: ReceiverState) -> list[Item]:
        """Begin anew with that state; what was here is the caller's."""
        items = [*self.held.values(), *self.out.values()]
        self.held, self.out = {}, {}
        self._adopt(state)
        return items

    def due(self) -> Place | None:
        """The place that must go out next, whether it is here or not; None before the first arrival."""
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
        """Handed out in vain: it goes out again."""
        self.held[place] = self.out.pop(place)

    def acknowledged(self, places: Set[Place]) -> ReceiverState:
        """The state to save if these are done. Nothing changes here until `acknowledge`."""
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
        """The state was saved: these are done."""
        self._adopt(state)
        for place in places:
            self.out.pop(place, None)
            self.held.pop(place, None)

    def gap(self) -> Gap | None:
        """What is missing before the first item here; None if nothing is, or if what is out must come back first."""
        due = self.due()
        if due is None or self.out or not self.held:
            return None
        first = min(self.held)
        if first <= due:
            return None
        return Gap(due.epoch, due.number, (first.number if first.epoch == due.epoch else due.number) - 1)

    def skipped(self, gap: Gap) -> ReceiverState:
        """The state to save if the gap is given up. Nothing changes here until `skip`."""
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
        """The state was saved: go on behind the gap."""
        self._adopt(state)

    def _adopt(self, state: ReceiverState) -> None:
        self.state = state
        self._done = set(state.done)
