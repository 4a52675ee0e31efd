"""Replays of one queue's messages under given leases and workers, by the server's rules.

Strategy: a lease that ends makes its message visible at once. A delete counts until the message was received again, and
changes nothing afterwards. Visible messages are received in the order in which they became visible. With a free worker
for each, none waits for another, and all go one receive further together, as arrays (`_together`). If that needs more
workers than there are, it is done again event by event (`_in_turn`). Where workers are enough, both agree exactly.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np

from veilmq.pipeline.whatif.runs import CRASHES, FINISHES, RETURNS, RUNS_MAX, Runs

_READY, _OVER = 0, 1


class Setting(NamedTuple):
    """Seconds; arrays have an entry for each message."""

    timeout_s: Any
    extend_s: Any
    """At this interval a living worker extends its lease; infinite: never."""
    workers: int | None
    """None: as many as there are messages."""
    receives_max: int | None = None
    """After that many the message goes to the dead-letter queue."""

    @property
    def runs_max(self) -> int:
        """How many receives of a message are replayed."""
        return min(self.receives_max or RUNS_MAX, RUNS_MAX)


class Replayed(NamedTuple):
    """What became of each message. Arrays of one shape."""

    duplicates: Any
    """Times that it was started while an earlier worker was at it."""
    crashes: Any
    """Of its workers, after which it was started again."""
    recovery_s: Any
    """From those crashes to the next starts, added up."""
    wait_s: Any
    """From visible to its first start; NaN: never started."""
    extensions: Any
    busy_s: Any
    """Of all its workers."""
    over: Any
    """When the last of its workers ended; minus infinity: never started."""
    dead: Any
    """Whether it was received as often as it may be, and not deleted."""


def replay(arrival: Any, runs: Runs, setting: Setting) -> Replayed:
    """arrival: when each message is visible first, ascending."""
    found, starts, ends = _together(arrival, runs, setting)
    if setting.workers is None or _most(starts, ends) <= setting.workers:
        return found
    return _in_turn(arrival, runs, setting)


def _most(starts: Any, ends: Any) -> int:
    at, change = np.concatenate([starts, ends]), np.repeat([1, -1], len(starts))
    return int(np.cumsum(change[np.lexsort((change, at))]).max(initial=0))


def _lease_ends(busy: Any, setting: Setting) -> tuple[Any, Any]:
    """Seconds from the grant to the end of the lease if nobody deletes it, and the extensions until then."""
    extensions = np.floor(busy / setting.extend_s)
    step = np.where(np.isfinite(setting.extend_s), setting.extend_s, 0.0)
    # The last one would come with the end of the work.
    extensions -= (extensions > 0) & (extensions * step >= busy)
    return extensions * step + setting.timeout_s, extensions


def _empty(count: int) -> Replayed:
    zeros = [np.zeros(count) for _ in Replayed._fields]
    return Replayed(*zeros)._replace(wait_s=np.full(count, np.nan))


def _together(arrival: Any, runs: Runs, setting: Setting) -> tuple[Replayed, Any, Any]:
    """With a worker for everybody; and when the runs start and end."""
    count = len(arrival)
    found = _empty(count)
    visible, alive_until, died = arrival.copy(), np.full(count, -np.inf), np.full(count, np.nan)
    starts, ends = [], []
    left = np.arange(count)
    for number in range(setting.runs_max):
        if not len(left):
            break
        this, following = runs.round(number), runs.round(number + 1)
        start = visible[left] + this.wait[left]
        if number == 0:
            found.wait_s[left] = this.wait[left]
        found.duplicates[left] += alive_until[left] > start
        again = died[left] < start
        found.crashes[left] += again
        found.recovery_s[left] += np.where(again, start - died[left], 0.0)
        busy, fate = this.busy[left], this.fate[left]
        lease_end, extensions = _lease_ends(this.busy, setting)
        lease_end = lease_end[left]
        found.extensions[left] += extensions[left]
        found.busy_s[left] += busy
        starts.append(start)
        ends.append(start + busy)
        in_time = busy <= lease_end
        next_start = lease_end + following.wait[left]
        done = (fate == FINISHES) & (in_time | (busy <= next_start))
        visible[left] = start + np.where(in_time & (fate == RETURNS), busy + this.delay[left], lease_end)
        alive_until[left] = np.maximum(alive_until[left], start + busy)
        died[left] = np.where(fate == CRASHES, start + busy, np.nan)
        left = left[~done]
    found.dead[left] = 1.0
    return found._replace(over=alive_until), np.concatenate(starts), np.concatenate(ends)


def _in_turn(arrival: Any, runs: Runs, setting: Setting) -> Replayed:
    """With `workers`, one event after the other."""
    count, free = len(arrival), int(setting.workers or 1)
    most = setting.runs_max
    rounds: list[tuple[Any, ...]] = []

    def run(number: int) -> tuple[Any, ...]:
        # Arrays: of a late round few messages are asked for, and a list would take five times the memory.
        while len(rounds) <= number:
            this = runs.round(len(rounds))
            rounds.append((*this, *_lease_ends(this.busy, setting)))
        return rounds[number]

    taken, is_over, is_dead = [0] * count, [False] * count, [False] * count
    alive_until, died = [-np.inf] * count, [np.nan] * count
    duplicates, crashes, extended = [0] * count, [0] * count, [0.0] * count
    recovery, waited, worked = [0.0] * count, [np.nan] * count, [0.0] * count
    waits, came = run(0)[3].tolist(), arrival.tolist()
    events = [(came[each] + waits[each], _READY, each, 0) for each in range(count)]
    heapq.heapify(events)
    visible: list[tuple[float, int]] = []
    while events:
        now, what, message, number = heapq.heappop(events)
        if what == _READY:
            if not is_over[message]:
                heapq.heappush(visible, (now, message))
        else:
            free += 1
            # Without a receive since, the delete counts.
            if number == taken[message] and run(number - 1)[1].item(message) == FINISHES:
                is_over[message] = True
        if events and events[0][0] <= now:
            continue
        while free and visible:
            _, each = heapq.heappop(visible)
            if is_over[each]:
                continue
            if taken[each] == most:
                is_over[each] = is_dead[each] = True
                continue
            busy, fate, delay, _, lease_end, extensions = (column.item(each) for column in run(taken[each]))
            taken[each] += 1
            free -= 1
            if taken[each] == 1:
                waited[each] = now - came[each]
            duplicates[each] += alive_until[each] > now
            if died[each] < now:
                crashes[each] += 1
                recovery[each] += now - died[each]
            died[each] = now + busy if fate == CRASHES else np.nan
            alive_until[each] = max(alive_until[each], now + busy)
            extended[each] += extensions
            worked[each] += busy
            heapq.heappush(events, (now + busy, _OVER, each, taken[each]))
            in_time = busy <= lease_end
            if not (in_time and fate == FINISHES):
                after = busy + delay if in_time and fate == RETURNS else lease_end
                heapq.heappush(events, (now + after + run(taken[each])[3].item(each), _READY, each, 0))
    numbers = (duplicates, crashes, recovery, waited, extended, worked, alive_until)
    return Replayed(*(np.array(each, float) for each in (*numbers, is_dead)))
