"""What a history gives a replay: when messages came, how long each run of a worker took, and how it ended.

Strategy: a message's runs are its leases, in their order. A run whose length is known is replayed as it was: so today's
settings give about today's figures, and other settings the same work. The rest is drawn: a crash between its last sign
of life and the end of its lease, work that was cut off from the curve beyond that, and a run that the history did not
need from the message's own length, or from the curve if each run takes anew (`length_of`). Each replay
(`number`) draws anew, and from another of the curves that other messages might have shown.

Before changing it: lengths and curves are by message type, workers and waits by queue. Seconds, from the first arrival.
"""

from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from veilmq.pipeline.estimates import Curve, length_of, sample_of
from veilmq.pipeline.estimates.buckets import (
    AGAIN,
    AGAIN_DONE,
    BOUNDS,
    CELL,
    CRASHED,
    DONE,
    LAST,
    MIDDLES,
    STOPPED,
    SUMS,
    WATCHED,
    bucket_of,
)
from veilmq.pipeline.estimates.prices import areas_of

FINISHES, RETURNS, CRASHES = 0, 1, 2
"""How a run ends: the worker deletes the message, gives it back, or is gone."""
RUNS_MAX: Final = 100
"""So often a message is handed out at most: a draw keeps some 30 bytes for each message and time."""
_SEEN_MIN: Final = 5
_SEEN_SHARE: Final = 0.01
_RENEWED_SHARE: Final = 0.5
_STRETCHES: Final = 50
_NEAR: Final = 5
"""A stretch comes again at most so many places (or a tenth of them) from its own."""
_GIVEN_BACK: Final = ("failed", "released", "changed")
_DONE: Final = ("deleted", "redone")
_EXACT: Final = (*_DONE, "failed")


class Round(NamedTuple):
    """The runs that follow a message's n-th receive, for every message. Arrays of one shape."""

    busy: Any
    """Seconds until the run ends."""
    fate: Any
    delay: Any
    """Seconds from giving it back until it is visible."""
    wait: Any
    """Seconds from visible to a free worker's receive."""


class Facts:
    """The leases of one queue (a pandas frame, see `whatif.COLUMNS`), and of its messages that were never received."""

    def __init__(self, rows: Any, rate_of: Any) -> None:
        """rate_of: gives the crashes per second from a sample."""
        begin = float(rows.visible_since.fillna(rows.sent).min())
        rows = rows.sort_values(["incarnation", "sequence", "attempt"], kind="stable").reset_index(drop=True)
        key = rows.incarnation.astype("int64").astype(str) + "/" + rows.sequence.astype("int64").astype(str)
        rows["message"] = np.unique(key, return_inverse=True)[1]
        first = rows.drop_duplicates("message").sort_values("message")
        seen = rows[rows.attempt > 0].sort_values("attempt", kind="stable").drop_duplicates("message")
        visible = first.set_index("message").visible_since
        # A message that was moved here bears the time at which it came.
        visible.update(seen.set_index("message").visible_since)
        arrival = (visible.fillna(first.set_index("message").sent).to_numpy(float) - begin) / 1e6
        order = np.argsort(arrival, kind="stable")
        place = np.empty(len(order), int)
        place[order] = np.arange(len(order))
        self.arrival = arrival[order]
        types = np.where(first["type"].isna(), "", first["type"].astype(object))[order]
        self.types, self.type_of = np.unique(types.astype(str), return_inverse=True)
        rows["unworked"] = (rows.outcome == "undelivered").groupby(rows.message).cumsum()
        leases = rows[(rows.attempt > 0) & (rows.outcome != "undelivered")].copy()
        leases["message"] = place[leases.message.to_numpy()]
        leases["granted_us"], leases["visible_us"] = leases.granted, leases.visible_since.fillna(leases.granted)
        for name in ("granted", "visible_since"):
            leases[name] = (leases[name] - begin) / 1e6
        for name in ("held", "lease", "lease_end", "watched"):
            leases[name] = leases[f"{name}_us"] / 1e6
        leases["run"] = leases.groupby("message").cumcount()
        ends = leases.granted + np.where(leases.outcome == "changed", leases.lease_end, leases.held)
        following = leases.groupby("message").visible_since.shift(-1).fillna(ends)
        leases["delay"] = np.maximum(following - leases.granted - leases.held, 0.0)
        self.leases = leases
        self._kinds = [_Kind(leases[self.type_of[leases.message] == at], rate_of) for at in range(len(self.types))]

    @property
    def messages(self) -> int:
        """How many messages came."""
        return len(self.arrival)

    @cached_property
    def workers(self) -> int | None:
        """As many runs as were under way at once, if messages waited while they were; None: no limit was seen."""
        most, at_once = self._under_way(self.leases.held_us)
        enough = max(_SEEN_MIN, _SEEN_SHARE * self.messages)
        return most if most and (at_once == most).sum() >= enough else None

    @cached_property
    def waits(self) -> Any:
        """Seconds from visible to received, of leases whose message surely found a free worker."""
        waits = np.maximum((self.leases.granted - self.leases.visible_since).to_numpy(), 0.0)
        if self.workers is not None:
            silent = ~self.leases.exact.to_numpy(bool)
            longest = np.where(silent, np.maximum(self.leases.held_us, self.leases.lease_end_us), self.leases.held_us)
            waits = waits[self._under_way(longest)[1] < self.workers]
        known = waits[np.isfinite(waits)]
        return known if len(known) else np.zeros(1)

    @cached_property
    def lease_s(self) -> Any:
        """The lease of each message today; of one that was never received, its type's usual one."""
        usual = [kind.lease_s for kind in self._kinds]
        lease = np.array(usual)[self.type_of]
        first = self.leases[self.leases.run == 0]
        lease[first.message] = first.lease
        return lease

    @property
    def renewed_share(self) -> Any:
        """For each message, the part of its lease that passes until it is extended; infinite: nobody extends."""
        return np.array([kind.renewed_share for kind in self._kinds])[self.type_of]

    @property
    def beyond(self) -> float:
        """The share of messages whose work may be longer than anything that was seen."""
        share = np.array([kind.beyond for kind in self._kinds])
        return float(share[self.type_of].mean())

    def _under_way(self, held_us: Any) -> tuple[int, Any]:
        """If runs last so long: the most that are under way at once, and how many when each lease's message became
        visible."""
        start = self.leases.granted_us.to_numpy("int64")
        at = np.concatenate([start, start + np.asarray(held_us).astype("int64")])
        change = np.repeat([1, -1], len(start))
        order = np.lexsort((change, at))
        level = np.concatenate([[0], np.cumsum(change[order])])
        place = np.searchsorted(at[order], self.leases.visible_us.to_numpy("int64"), "left")
        return int(level.max()), level[place]

    def drawn(self, number: int) -> "Runs":
        """The runs of one replay; the same number gives the same."""
        return Recorded(self, self._kinds, number)

    def another(self, number: int, of: int) -> "Others":
        """One of so many other periods like this one; the same number gives the same."""
        return Others(self, self._kinds, number, of)

    @cached_property
    def own(self) -> Any:
        """How long each message's work is."""
        return self.drawn(0).own

    @cached_property
    def stretches(self) -> tuple[Any, Any]:
        """The first message of each stretch of time (and, last, their number), and how long each stretch is.

        About a fiftieth of the history; they begin after a long gap, so a burst is not divided.
        """
        gaps, span = np.diff(self.arrival), float(self.arrival[-1] - self.arrival[0])
        step = max(span / _STRETCHES, 1e-9)
        begins = [0]
        for middle in self.arrival[0] + step * np.arange(1, _STRETCHES if span else 1):
            low = max(np.searchsorted(self.arrival, middle - step / 2, "left") - 1, 0)
            high = np.searchsorted(self.arrival, middle + step / 2, "right")
            begins.append(int(low + np.argmax(gaps[low:high])) + 1)
        firsts = np.unique(begins)
        after = float(np.mean(gaps[firsts[1:] - 1])) if len(firsts) > 1 else step
        return np.append(firsts, self.messages), np.diff(self.arrival[firsts], append=self.arrival[-1] + after)


class _Kind:
    """What is known of one type."""

    def __init__(self, leases: Any, rate_of: Any) -> None:
        self.leases = leases
        cells = _cells(leases)
        self.curve = Curve(sample_of(cells, "crashes"))
        self._rate_of = rate_of
        self.rate = float(rate_of(self.curve.sample))
        whose, _ = length_of(cells)
        self.is_own = whose != "attempt"
        self.lease_s = float(leases.lease.median()) if len(leases) else 30.0
        renewed = leases[leases.extensions > 0]
        share = float(renewed.renewed_share.median()) if len(renewed) else np.inf
        long = leases.held > share * leases.lease if len(renewed) else leases.held < 0
        extends = long.any() and float((leases.extensions > 0)[long].mean()) >= _RENEWED_SHARE
        self.renewed_share = share if extends and share < 1 else np.inf
        alive = self.curve.extended()
        self.beyond = float(alive[-1]) if self.curve.law is None else 0.0
        returned = leases[leases.outcome == "failed"]
        self.returned = returned[["held", "delay"]].to_numpy()
        self.returns_share = len(returned) / max(len(leases), 1)
        self.own_chance = self._own_chance()
        """How likely the length of work is the message's own, and not the attempt's."""

    def _own_chance(self) -> float:
        """By Bayes' rule, from the second runs of messages whose first was cut off by a crash or by its lease's end.

        If the length is the message's, those are long ones: each length counts by the chance to be cut off at it.
        """
        lost = self.leases[(self.leases.run == 0) & self.leases.outcome.isin(("crashed", "redone"))]
        second = self.leases[(self.leases.run == 1) & self.leases.outcome.isin(_DONE)]
        took = second.held[second.message.isin(lost.message)].to_numpy()
        ends = np.inf if np.isfinite(self.renewed_share) else self.lease_s

        def cut_off(seconds: Any) -> Any:
            return np.where(seconds > ends, 1.0, -np.expm1(-self.rate * np.maximum(seconds, 1e-6)))

        weight = -np.diff(self.curve.extended(), prepend=1.0) * np.exp(-self.rate * MIDDLES)
        expected = (weight * cut_off(MIDDLES)).sum() / max(weight.sum(), 1e-300)
        evidence = np.log(cut_off(took) / max(expected, 1e-300)).sum() if len(took) else 0.0
        return float(1 / (1 + np.exp(-np.clip(evidence, -30, 30))))

    def alive(self, number: int) -> Any:
        """The curve of that replay: the first is the estimate itself."""
        return self.curve.extended() if number == 0 else self.curve.resampled[0][number % len(self.curve.resampled[0])]

    def other(self, number: int, of: int, *, is_own: bool) -> tuple[Any, float]:
        """The curve and the crashes per second as other messages might have shown them, number `number` of `of`."""
        curves, crashes = (self._own_curve if is_own else self.curve).chosen
        at = number * len(curves) // of
        return curves[at], float(self._rate_of(self.curve.sample._replace(crashes=float(crashes[at]))))

    @cached_property
    def _own_curve(self) -> Curve:
        """The curve if the length of work is the message's own: then any of its leases may show it.

        First leases alone show too few long ones: a worker that dies silently after its lease seems to die within it.
        """
        done = self.leases[self.leases.outcome.isin(_DONE)].drop_duplicates("message")
        lived = self.leases[~self.leases.message.isin(done.message)].groupby("message").held.max()
        finished, cut = (np.bincount(bucket_of(each.to_numpy()), minlength=LAST + 1) for each in (done.held, lived))
        return Curve(self.curve.sample._replace(finished=finished.astype(float), censored=cut.astype(float)))


class Runs:
    """The runs of a period's messages, drawn when they are asked for."""

    def __init__(
        self, facts: Facts, kinds: list[_Kind], random: Any, curves: list[tuple[Any, float]], messages: Any
    ) -> None:
        """curves: of each kind, and its crashes per second. messages: those that come, by place in the history."""
        self._facts = facts
        self._kinds = kinds
        self._random = random
        self._curves = curves
        self._type_of = facts.type_of[messages]
        self._is_own = [kind.is_own for kind in kinds]
        self._rounds: list[Round] = []
        self.own = np.zeros(len(messages))
        """How long each message's work is, if its length is its own."""

    def round(self, number: int) -> Round:
        """The runs after each message's receive of that number, from 0."""
        while len(self._rounds) <= number:
            self._rounds.append(self._next(len(self._rounds)))
        return self._rounds[number]

    def _next(self, number: int) -> Round:
        count = len(self._type_of)
        found = Round(np.zeros(count), np.zeros(count, np.int8), np.zeros(count), self._waits(count))
        for at, kind in enumerate(self._kinds):
            mine = np.flatnonzero(self._type_of == at)
            busy = self.own[mine] if self._is_own[at] or self._is_known(number) else self._fresh(at, len(mine))
            crash = self._random.exponential(1 / max(self._curves[at][1], 1e-12), len(mine))
            fate = np.where(crash < busy, CRASHES, FINISHES)
            found.busy[mine], found.fate[mine] = np.minimum(busy, crash), fate
            back = mine[(self._random.random(len(mine)) < kind.returns_share) & (fate == FINISHES)]
            if len(back):
                chosen = kind.returned[self._random.integers(0, len(kind.returned), len(back))]
                found.busy[back], found.delay[back], found.fate[back] = chosen[:, 0], chosen[:, 1], RETURNS
        return found

    def _is_known(self, number: int) -> bool:
        """Whether `own` is how long those runs take, even if each run takes anew."""
        return False

    def _waits(self, count: int) -> Any:
        waits = self._facts.waits
        return waits[self._random.integers(0, len(waits), count)]

    def _fresh(self, kind: int, count: int) -> Any:
        return self._longer(kind, np.zeros(count))

    def _longer(self, kind: int, than: Any, share: Any = None) -> Any:
        """Lengths of work that takes longer than that many seconds. Beyond what was seen, or by a law beyond two days,
        as if it ended there.

        share: of those that take longer than it, how many take longer than each; None: drawn.
        """
        alive = self._curves[kind][0]
        left = np.interp(np.log(np.maximum(than, 1e-9)), np.log(BOUNDS), alive, left=1.0)
        wanted = left * (self._random.random(len(than)) if share is None else share)
        found = np.exp(np.interp(-wanted, -alive, np.log(BOUNDS)))
        curve = self._kinds[kind].curve
        reach = max(curve.reach_s, float(BOUNDS[0])) if curve.law is None else float(BOUNDS[-1])
        found = np.where(wanted <= alive[-1], reach, found)
        return np.maximum(found, than)


class Others(Runs):
    """The runs of other messages of the kind: what another period of this length might bring.

    Stretches of the history come again, each at about its time (drawn from those around it), so what depends on the
    time stays; drawn twice, for this history was one of many, too. The work of a message keeps its place among the
    lengths, and not its length: that is what one of the curves that other messages might have shown says there. So the
    longest of this history are not the longest that can be.
    """

    def __init__(self, facts: Facts, kinds: list[_Kind], number: int, of: int) -> None:
        random = np.random.default_rng([number, 37])
        firsts, durations = facts.stretches
        history, period = _near(len(durations), random), _near(len(durations), random)
        seen, begins = _joined(firsts, history)
        again, _ = _joined(begins, period)
        self.messages = seen[again]
        """The messages of the history that come again, by place."""
        stretch = history[period]
        since = np.cumsum(durations[stretch]) - durations[stretch] - facts.arrival[firsts[stretch]]
        self.arrival = np.repeat(since, np.diff(firsts)[stretch]) + facts.arrival[self.messages]
        is_own = [random.random() < kind.own_chance for kind in kinds]
        curves = [kind.other(number, of, is_own=own) for kind, own in zip(kinds, is_own, strict=True)]
        super().__init__(facts, kinds, random, curves, self.messages)
        self._is_own = is_own
        own = facts.own[seen]
        for at in range(len(kinds)):
            known = np.flatnonzero(facts.type_of[seen] == at)
            shorter = np.zeros(len(seen))
            shorter[known[np.argsort(own[known], kind="stable")]] = np.arange(len(known))
            mine = np.flatnonzero(self._type_of == at)
            share = (shorter[again[mine]] + random.random(len(mine))) / max(len(known), 1)
            self.own[mine] = self._longer(at, np.zeros(len(mine)), 1 - share)

    def _is_known(self, number: int) -> bool:
        return number == 0


def _near(count: int, random: Any) -> Any:
    """For each stretch the number of one around it."""
    near = max(_NEAR, count // 10)
    found = np.abs(np.arange(count) + random.integers(-near, near + 1, count))
    # Beyond an end: back from it.
    return np.clip(np.where(found >= count, 2 * (count - 1) - found, found), 0, count - 1)


def _joined(firsts: Any, stretches: Any) -> tuple[Any, Any]:
    """The places of these stretches' messages, one stretch after the other, and where each begins there."""
    sizes = np.diff(firsts)[stretches]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    return np.arange(begins[-1]) + np.repeat(firsts[:-1][stretches] - begins[:-1], sizes), begins


class Recorded(Runs):
    """The runs of the history's own messages, as far as it tells them."""

    def __init__(self, facts: Facts, kinds: list[_Kind], number: int) -> None:
        curves = [(kind.alive(number), kind.rate) for kind in kinds]
        super().__init__(facts, kinds, np.random.default_rng([number, 36]), curves, np.arange(facts.messages))
        self._leases = facts.leases.assign(**self._recorded())
        self.own[:] = self._lengths()

    def _next(self, number: int) -> Round:
        found = super()._next(number)
        known = self._leases[self._leases.run == number]
        found.busy[known.message], found.fate[known.message] = known.busy, known.fate
        found.delay[known.message] = known.delay
        return found

    def _recorded(self) -> dict[str, Any]:
        """The length and the end of each lease in the history, drawn where the history does not say."""
        leases, type_of = self._facts.leases, self._facts.type_of
        busy = leases.held.to_numpy(copy=True)
        fate = np.where(leases.outcome.isin(_GIVEN_BACK), RETURNS, FINISHES).astype(np.int8)
        crashed = (leases.outcome == "crashed").to_numpy()
        cut = (~crashed & ~leases.outcome.isin((*_EXACT, *_GIVEN_BACK))).to_numpy()
        fate[crashed] = CRASHES
        lived = np.maximum(leases.held, leases.watched.fillna(0.0)).to_numpy()
        known = np.full(self._facts.messages, np.nan)
        done = self._done(leases)
        known[done.message] = done.held
        until = leases.lease_end.to_numpy()
        for at, kind in enumerate(self._kinds):
            mine = type_of[leases.message] == at
            dead, over = np.flatnonzero(crashed & mine), np.flatnonzero(cut & mine)
            # A missing extension shows that the worker was gone; of one that never extends, nothing shows when.
            gap = kind.renewed_share * np.maximum(until[dead] - lived[dead], 1e-3)
            latest = np.minimum(lived[dead] + gap, BOUNDS[-1])
            busy[dead] = self._died(at, lived[dead], latest)
            if self._is_own[at]:
                # Within the length that another run of the message shows.
                own = np.minimum(known[leases.message.to_numpy()[dead]], latest)
                is_known = own > lived[dead]
                busy[dead[is_known]] = self._within(kind.rate, lived[dead[is_known]], own[is_known])
            busy[over] = self._longer(at, lived[over])
        return {"busy": busy, "fate": fate}

    def _lengths(self) -> Any:
        """How long each message's work is, if its length is its own."""
        own = np.zeros(self._facts.messages)
        for at in range(len(self._kinds)):
            mine = np.flatnonzero(self._facts.type_of == at)
            own[mine] = self._fresh(at, len(mine))
        leases = self._leases
        lived = leases.groupby("message").busy.max()
        for at in range(len(self._kinds)):
            mine = lived[self._facts.type_of[lived.index] == at]
            own[mine.index] = self._longer(at, mine.to_numpy())
        done = self._done(leases)
        own[done.message] = done.held
        return own

    @staticmethod
    def _done(leases: Any) -> Any:
        """Of each message, the first lease under which its work was done."""
        return leases[leases.outcome.isin(_DONE)].drop_duplicates("message")

    def _died(self, kind: int, low: Any, high: Any) -> Any:
        """When workers died, between two ages: in proportion to those that were at work."""
        areas, _ = areas_of(*self._curves[kind])
        bounds, areas = np.concatenate([[0.0], BOUNDS]), np.concatenate([[0.0], areas])
        first, last = np.interp(low, bounds, areas), np.interp(high, bounds, areas)
        found = np.interp(first + self._random.random(len(low)) * (last - first), areas, bounds)
        return np.clip(found, low, high)

    def _within(self, rate: float, low: Any, high: Any) -> Any:
        """The same for work that is known to last until `high`."""
        rate = max(rate, 1e-12)
        return low - np.log1p(self._random.random(len(low)) * np.expm1(-rate * (high - low))) / rate


def _cells(leases: Any) -> Any:
    """The histogram of these leases, as `buckets.histogram` makes it in Spark; but a message that somebody looked at
    before counts, too."""
    import pandas as pd

    again = (leases.attempt - leases.unworked > 1).to_numpy()
    exact, crashed = leases.exact.to_numpy(bool), (leases.outcome == "crashed").to_numpy()
    watched = leases.watched_us.notna().to_numpy()
    ended = np.select(
        [again & exact, again, exact, crashed, watched], [AGAIN_DONE, AGAIN, DONE, CRASHED, WATCHED], STOPPED
    )
    until = np.where(crashed, leases.lease_end, leases.watched.fillna(0.0))
    cells = pd.DataFrame({
        "ended": ended,
        "bucket": bucket_of(leases.held),
        "until": np.where(~again & (crashed | watched), bucket_of(until), 0),
        "lease": bucket_of(leases.lease),
        "leases": 1.0,
        "held_s": leases.held.to_numpy(),
        "lease_s": leases.lease.to_numpy(),
        "renewals": leases.renewed_share.notna().to_numpy(float),
        "renewed_share": leases.renewed_share.fillna(0.0).to_numpy(),
        "redeliveries": again.astype(float),
        "redone": (leases.outcome == "redone").to_numpy(float),
        "squares": 0.0,
    })  # fmt: skip
    return cells.groupby(list(CELL), as_index=False)[list(SUMS)].sum()
