"""What a history gives a replay: when messages came, how long each run of a worker took, and how it ended.

Strategy: a message's runs are its leases, in their order. A run whose length is known is replayed as it was: so today's
settings give about today's figures, and other settings the same work. The rest is drawn: a crash between its last sign
of life and the end of its lease, work that was cut off from the curve beyond that, and a run that the history did not
need from the message's own length, or from the curve if each run takes anew (`length_of`). Each replay (`number`)
draws anew, and from another of the curves that other messages might have shown.

Before changing it: lengths and curves are by message type, workers and waits by queue. Seconds, from the first arrival.
"""

from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from veilmq.pipeline.estimates import Curve, areas_of, length_of, sample_of
from veilmq.pipeline.estimates.buckets import (
    AGAIN,
    AGAIN_DONE,
    BOUNDS,
    CELL,
    CRASHED,
    DONE,
    STOPPED,
    SUMS,
    WATCHED,
    bucket_of,
)

FINISHES, RETURNS, CRASHES = 0, 1, 2
"""How a run ends: the worker deletes the message, gives it back, or is gone."""
RUNS_MAX: Final = 100
"""So often a message is handed out at most, where the queue has no dead-letter queue."""
_SEEN_MIN: Final = 5
_SEEN_SHARE: Final = 0.01
_RENEWED_SHARE: Final = 0.5
_GIVEN_BACK: Final = ("failed", "released", "changed")
_EXACT: Final = ("deleted", "redone", "failed")


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
    def seen_twice(self) -> float:
        """Messages that were received again under a living worker, as far as the history shows it."""
        return float((self.leases.outcome == "redone").sum())

    @property
    def beyond(self) -> float:
        """The share of messages whose work may be longer than anything that was seen."""
        share = np.array([kind.beyond for kind in self._kinds])
        return float(share[self.type_of].mean())

    def _under_way(self, lasting_us: Any) -> tuple[int, Any]:
        """If runs last so long: the most that are under way at once, and how many when each lease's message became
        visible."""
        start = self.leases.granted_us.to_numpy("int64")
        at = np.concatenate([start, start + np.asarray(lasting_us).astype("int64")])
        change = np.repeat([1, -1], len(start))
        order = np.lexsort((change, at))
        level = np.concatenate([[0], np.cumsum(change[order])])
        place = np.searchsorted(at[order], self.leases.visible_us.to_numpy("int64"), "left")
        return int(level.max()), level[place]

    def drawn(self, number: int) -> "Runs":
        """The runs of one replay; the same number gives the same."""
        return Runs(self, self._kinds, number)


class _Kind:
    """What is known of one type."""

    def __init__(self, leases: Any, rate_of: Any) -> None:
        self.leases = leases
        cells = _cells(leases)
        self.curve = Curve(sample_of(cells, "crashes"))
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

    def alive(self, number: int) -> Any:
        """The curve of that replay: the first is the estimate itself."""
        return self.curve.extended() if number == 0 else self.curve.resampled[0][number % len(self.curve.resampled[0])]


class Runs:
    """The runs of one replay, drawn when they are asked for."""

    def __init__(self, facts: Facts, kinds: list[_Kind], number: int) -> None:
        self._facts = facts
        self._kinds = kinds
        self._random = np.random.default_rng([number, 36])
        self._alive = [kind.alive(number) for kind in kinds]
        self._rounds: list[Round] = []
        self._leases = facts.leases.assign(**self._told())
        self._own = self._lengths()

    def round(self, number: int) -> Round:
        """The runs after each message's receive of that number, from 0."""
        while len(self._rounds) <= number:
            self._rounds.append(self._next(len(self._rounds)))
        return self._rounds[number]

    def _next(self, number: int) -> Round:
        count = self._facts.messages
        found = Round(np.zeros(count), np.zeros(count, np.int8), np.zeros(count), self._waits(count))
        for at, kind in enumerate(self._kinds):
            mine = np.flatnonzero(self._facts.type_of == at)
            busy = self._own[mine] if kind.is_own else self._fresh(at, len(mine))
            crash = self._random.exponential(1 / max(kind.rate, 1e-12), len(mine))
            fate = np.where(crash < busy, CRASHES, FINISHES)
            found.busy[mine], found.fate[mine] = np.minimum(busy, crash), fate
            back = mine[(self._random.random(len(mine)) < kind.returns_share) & (fate == FINISHES)]
            if len(back):
                chosen = kind.returned[self._random.integers(0, len(kind.returned), len(back))]
                found.busy[back], found.delay[back], found.fate[back] = chosen[:, 0], chosen[:, 1], RETURNS
        known = self._leases[self._leases.run == number]
        found.busy[known.message], found.fate[known.message] = known.busy, known.fate
        found.delay[known.message] = known.delay
        return found

    def _waits(self, count: int) -> Any:
        waits = self._facts.waits
        return waits[self._random.integers(0, len(waits), count)]

    def _told(self) -> dict[str, Any]:
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
            if kind.is_own:
                # Within the length that another run of the message shows.
                own = np.minimum(known[leases.message.to_numpy()[dead]], latest)
                told = own > lived[dead]
                busy[dead[told]] = self._within(kind.rate, lived[dead[told]], own[told])
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
        return leases[leases.outcome.isin(("deleted", "redone"))].drop_duplicates("message")

    def _fresh(self, kind: int, count: int) -> Any:
        return self._longer(kind, np.zeros(count))

    def _longer(self, kind: int, than: Any) -> Any:
        """Lengths of work that takes longer than that many seconds; beyond what was seen, as if it ended there."""
        alive = self._alive[kind]
        left = np.interp(np.log(np.maximum(than, 1e-9)), np.log(BOUNDS), alive, left=1.0)
        wanted = left * self._random.random(len(than))
        found = np.exp(np.interp(-wanted, -alive, np.log(BOUNDS)))
        reach = max(self._kinds[kind].curve.reach_s, float(BOUNDS[0]))
        found = np.where(wanted <= alive[-1], reach, found)
        return np.maximum(found, than)

    def _died(self, kind: int, low: Any, high: Any) -> Any:
        """When workers died, between two ages: in proportion to those that were at work."""
        areas, _ = areas_of(self._alive[kind], self._kinds[kind].rate)
        bounds, areas = np.concatenate([[0.0], BOUNDS]), np.concatenate([[0.0], areas])
        first, last = np.interp(low, bounds, areas), np.interp(high, bounds, areas)
        found = np.interp(first + self._random.random(len(low)) * (last - first), areas, bounds)
        return np.clip(found, low, high)

    def _within(self, rate: float, low: Any, high: Any) -> Any:
        """The same for work that is known to last until `high`."""
        rate = max(rate, 1e-12)
        return low - np.log1p(self._random.random(len(low)) * np.expm1(-rate * (high - low))) / rate


def _cells(leases: Any) -> Any:
    """The histogram of these leases, as `buckets.histogram` makes it in Spark."""
    import pandas as pd

    again = (leases.attempt > 1).to_numpy()
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
