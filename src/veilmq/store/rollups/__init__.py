"""What happened to a queue in a minute or an hour: counts, how long messages waited and were held, and why they failed.

Strategy: a rollup is one sparse table of small numbers: a key for each kind of event that is counted, and one for each
step of two histograms. So an idle minute is empty, two minutes are added key by key, and an hour is the sum of its
minutes. Why messages failed is kept beside it, in minutes only. A histogram has eight steps for each power of two; to
each time 1,024 us are added first. So an estimate is off by at most 6.25 % and 64 us. Thousands of events are added
without a Python loop: the kinds of a queue's events are bytes that are counted, and so are the steps, which are cut out
of the times as floats.

Failures of one kind, with the same type of error and alike first lines, are a cause. Lines are alike if they differ
only in words with a digit, such as ids. Words of fewer than four characters count, because `404` and `500` are not the
same. A cause keeps its count and the newest line and message as the example. The first causes of a minute are kept,
`CAUSES_MAX` of them; of the others only the number is known, from the counts.

Before changing it: keys are stored, so never reuse one. Both ways to find a time's step must agree.
"""

import re
from collections.abc import Sequence
from itertools import compress
from math import ceil
from struct import pack
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.model.events import Event, Kind

CAUSES_MAX: Final = 16
"""Of one queue and minute."""
LINE_CHARACTERS_MAX: Final = 160
"""Of an error's first line; at most 640 bytes."""
_VARYING: Final = re.compile(r"(?<![\w-])(?=[\w-]*\d)[\w-]{4,}")


class Cause(NamedTuple):
    """What failures have in common."""

    kind: int
    error_type: str
    alike: str


class Seen(msgspec.Struct, array_like=True, gc=False):
    """The failures of one cause, as stored."""

    kind: int
    """Key of the count (veilmq.store.rollups)."""
    error_type: str
    error: str
    """First line of the newest."""
    count: int
    first: int
    newest: int
    message: bytes
    """Of the newest."""

    def cause(self) -> Cause:
        """What they have in common."""
        return Cause(self.kind, self.error_type, _VARYING.sub("#", self.error))

    def add(self, later: "Seen") -> None:
        """Add what was seen later."""
        self.count += later.count
        self.first = min(self.first, later.first)
        if later.newest >= self.newest:
            self.newest, self.message, self.error = later.newest, later.message, later.error


class Causes:
    """Of one queue and minute."""

    __slots__ = ("found",)

    def __init__(self, seen: list[Seen] | None = None) -> None:
        self.found = {each.cause(): each for each in seen or ()}

    def add(self, seen: Seen) -> None:
        """Add failures of one cause."""
        cause = seen.cause()
        known = self.found.get(cause)
        if known is not None:
            known.add(seen)
        elif len(self.found) < CAUSES_MAX:
            self.found[cause] = seen

    def copy(self) -> "Causes":
        """A copy that does not change with this one."""
        return Causes([msgspec.structs.replace(each) for each in self.found.values()])


COUNTS: Final = (
    "sent",
    "received",
    "deleted",
    "released",
    "lease_expired",
    "failed",
    "dead_lettered",
    "delete_refused",
    "expired",
    "arrived",
)
"""What is counted; the place is the key. `released`: given back without a failure. `failed`: given back by a worker
that reported an error. `arrived`: from another queue, as a dead letter or by a move."""
SENT, RECEIVED, DELETED, RELEASED, LEASE_EXPIRED, FAILED, DEAD_LETTERED, DELETE_REFUSED, EXPIRED, ARRIVED = range(10)
STEPS: Final = 256
"""Steps of a histogram: eight for each power of two from 2^10 to 2^42 us."""
WAITS: Final = 16
"""First key of the histogram of waits: how long messages were visible until they were received."""
HOLDS: Final = WAITS + STEPS
"""First key of the histogram of holds: how long messages that were deleted had been leased."""
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_SHIFT_US: Final = 1 << 10
_TIME_US_MAX: Final = (1 << 42) - 1 - _SHIFT_US
"""51 days; a longer time counts as this."""
_FIRST_STEP: Final = 9 << 3
"""The eight bits that are cut out of 2^10."""
_FEW: Final = 12
"""Fewer events of a queue than this are added one by one."""
_RAISED: Final = "raised"
_PLAIN: Final[tuple[tuple[int, int], ...]] = (
    (Kind.SENT, SENT),
    (Kind.RECEIVED, RECEIVED),
    (Kind.DELETED, DELETED),
    (Kind.RELEASED, RELEASED),
    (Kind.LEASE_EXPIRED, LEASE_EXPIRED),
    (Kind.DEAD_LETTERED, DEAD_LETTERED),
    (Kind.DELETE_REFUSED, DELETE_REFUSED),
    (Kind.EXPIRED, EXPIRED),
)
_BY_KIND: Final = dict(_PLAIN)
_RECEIVED: Final = int(Kind.RECEIVED)
_DELETED: Final = int(Kind.DELETED)
_FOR_RETRY: Final = int(Kind.RELEASED_FOR_RETRY)
_FAILING: Final = {int(Kind.LEASE_EXPIRED): LEASE_EXPIRED, int(Kind.DEAD_LETTERED): DEAD_LETTERED}
_PACK: Final = msgspec.msgpack.Encoder().encode
_UNPACK: Final = msgspec.msgpack.Decoder(list[int | list[Seen] | None]).decode


def selecting(kind: int) -> bytes:
    """A table for `bytes.translate` that makes 1 of this kind, and 0 of all others."""
    return bytes(each == kind for each in range(256))


_ARE_RECEIVED: Final = selecting(_RECEIVED)
_ARE_DELETED: Final = selecting(_DELETED)
_ARE_FOR_RETRY: Final = selecting(_FOR_RETRY)


class State(NamedTuple):
    """What a queue holds: messages in all, those in flight, when the oldest was sent."""

    depth: int
    in_flight: int
    oldest: int | None


class Rollup:
    """Of one queue and one minute or hour."""

    __slots__ = ("causes", "numbers", "state")

    def __init__(
        self, numbers: dict[int, int] | None = None, state: State | None = None, causes: Causes | None = None
    ) -> None:
        self.numbers = {} if numbers is None else numbers
        self.causes = Causes() if causes is None else causes
        """Of the failures of a minute; an hour has none."""
        self.state = state
        """At its end; None as long as it is not over."""

    def add(self, events: Sequence[Event], kinds: bytes) -> None:
        """Count events of the queue. kinds: theirs, in their order."""
        numbers = self.numbers
        if len(events) < _FEW:
            for event in events:
                self._add_one(event)
            return
        for kind, key in _PLAIN:
            count = kinds.count(kind)
            if count:
                numbers[key] = numbers.get(key, 0) + count
        if _RECEIVED in kinds:
            received = compress(events, kinds.translate(_ARE_RECEIVED))
            self._add_times(WAITS, [each.at - (each.visible_since or each.at) + _SHIFT_US for each in received])
        if _DELETED in kinds:
            held = [each.held_us for each in compress(events, kinds.translate(_ARE_DELETED))]
            self._add_times(HOLDS, [each + _SHIFT_US for each in held if each is not None])
        if _FOR_RETRY in kinds:
            for event in compress(events, kinds.translate(_ARE_FOR_RETRY)):
                self._add_one(event)
        for kind, key in _FAILING.items():
            if kind in kinds:
                for event in events:
                    if event.kind == kind:
                        self._fail(key, event)

    def _add_one(self, event: Event) -> None:
        kind = event.kind
        key = _BY_KIND.get(kind)
        if key is not None:
            self.count(key)
        if kind == _RECEIVED:
            self.count(WAITS + step_of(event.at - (event.visible_since or event.at)))
        elif kind == _DELETED and event.held_us is not None:
            self.count(HOLDS + step_of(event.held_us))
        elif kind == _FOR_RETRY:
            if is_failure(event):
                self.count(FAILED)
                self._fail(FAILED, event)
            else:
                self.count(RELEASED)
        elif kind in _FAILING:
            self._fail(_FAILING[kind], event)

    def _fail(self, key: int, event: Event) -> None:
        detail = event.detail or {}
        error = detail.get("error", "")[:LINE_CHARACTERS_MAX]
        self.causes.add(Seen(key, detail.get("error_type", ""), error, 1, event.at, event.at, event.message or b""))

    def _add_times(self, first: int, shifted: list[int]) -> None:
        """Count times to which `_SHIFT_US` was added. A step is 8 bits of the float: 5 of exponent, 3 of fraction."""
        if not shifted:
            return
        if max(shifted) > _TIME_US_MAX + _SHIFT_US:
            shifted = [min(each, _TIME_US_MAX + _SHIFT_US) for each in shifted]
        packed = pack(f"<{len(shifted)}d", *shifted)
        cut = (int.from_bytes(packed, "little") >> 49).to_bytes(len(packed), "little")[::8]
        numbers = self.numbers
        for each in set(cut):
            key = first + (each - _FIRST_STEP & 0xFF)
            numbers[key] = numbers.get(key, 0) + cut.count(each)

    def count(self, key: int) -> None:
        """One more."""
        self.numbers[key] = self.numbers.get(key, 0) + 1

    def merge(self, later: "Rollup") -> None:
        """Add what happened later, but for the causes."""
        for key, count in later.numbers.items():
            self.numbers[key] = self.numbers.get(key, 0) + count
        self.state = later.state

    def times(self, what: str) -> dict[str, int] | None:
        """The estimated quantiles in microseconds; None if there is no time. what: `waits` or `holds`."""
        first = WAITS if what == "waits" else HOLDS
        steps = sorted((key - first, count) for key, count in self.numbers.items() if first <= key < first + STEPS)
        total = sum(count for _, count in steps)
        if not total:
            return None
        return {name: _quantile(steps, ceil(share * total)) for name, share in QUANTILES.items()}

    def packed(self) -> bytes:
        """As stored. The state must be known."""
        assert self.state is not None
        flat: list[Any] = [*self.state]
        for pair in sorted(self.numbers.items()):
            flat += pair
        if self.causes.found:
            flat.append(list(self.causes.found.values()))
        return _PACK(flat)


def unpacked(stored: bytes) -> Rollup:
    """A stored rollup; an empty one if it is damaged: no sweep or start fails on a chart."""
    try:
        flat: list[Any] = _UNPACK(stored)
        depth, in_flight, oldest, *rest = flat
        causes = Causes(rest.pop() if rest and type(rest[-1]) is list else None)
        return Rollup(dict(zip(rest[::2], rest[1::2], strict=True)), State(depth, in_flight, oldest), causes)
    except ValueError:  # msgspec's errors are among them
        return Rollup()


def is_failure(event: Event) -> bool:
    """Whether a message that was given back for a retry had failed."""
    detail = event.detail or {}
    return "error_type" in detail or detail.get("reason") == _RAISED


def step_of(time_us: int) -> int:
    """The step of the histogram in which a time is."""
    shifted = min(time_us, _TIME_US_MAX) + _SHIFT_US
    power = shifted.bit_length() - 1
    return (power - 10 << 3) + (shifted >> power - 3 & 7)


def middle_us(step: int) -> int:
    """The time in the middle of a step."""
    power, eighth = 10 + (step >> 3), step & 7
    return ((17 + 2 * eighth) << power) // 16 - _SHIFT_US


def _quantile(steps: list[tuple[int, int]], rank: int) -> int:
    """The middle of the step with the time of that rank."""
    for step, count in steps:
        rank -= count
        if rank <= 0:
            return middle_us(step)
    raise AssertionError(rank)


class StoredRollups(NamedTuple):
    """Rollups of a queue, by number of the minute or hour since 1970."""

    found: dict[int, Rollup]
    """Those in the range in which anything happened."""
    ran: set[int]
    """Minutes or hours of the range in which the server ran."""
    before: State | None
    """What the queue held before the range; None: it is not known."""


class MinutesOfMany(NamedTuple):
    """Rollups of some queues, by incarnation and number of the minute since 1970."""

    found: dict[int, dict[int, Rollup]]
    """Those in which anything happened."""
    ran: set[int]
    """Minutes in which the server ran."""


class FailingRollups(NamedTuple):
    """Rollups with causes of failures, by number of the minute since 1970 and incarnation."""

    found: dict[tuple[int, int], Rollup]
    stopped: int | None
    """The minute in which a bound was met: of it and earlier ones, queues are missing; None: no bound was met."""


CLIENT_COUNTS: Final = ("received", "deleted", "extended", "released", "failed", "lease_expired", "refused")
"""What is counted of a client."""


class SeenClients(NamedTuple):
    """What clients did in the last hour: everything from `since` on, but for `left_out` events of too many clients."""

    at: int
    since: int
    recent_since: int
    seen: dict[int, int]
    """By origin, when it did something last; 0 if only a lease of it ended."""
    windows: list[dict[int, list[int]]]
    """`CLIENT_COUNTS` by origin, of each five minutes. The last two are those since `recent_since`."""
    left_out: int
