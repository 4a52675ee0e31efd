"""What a drain still has before it, for Spark's progress reports and for metrics.

    {"seq": 12, "waiting": 40210, "delayed": 0, "inFlight": 100000, "oldestSeconds": 3.1,
     "secondsLeft": 4.4, "estimatedEnd": "2026-01-31T12:00:04Z"}

Strategy: Spark has one hook for a source written in Python, `reportLatestOffset`: a dict that Spark passes on as JSON,
as `latestOffset` of the source in StreamingQueryProgress. (The map `metrics` beside it is empty for such sources.)
Spark calls it after each `latestOffset`, in the thread that plans batches. So the queue is asked at most once in
`LOOK_SECONDS`, and a queue that does not answer makes no query fail: the last figures are reported again.

The estimate divides what waits by how fast it became less over the last minute; while it grows there is no estimate.
"""

import datetime
import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec

from veilmq.client.clock import Clock
from veilmq.client.messages import Received, Stats
from veilmq.model.errors import VeilError

LOOK_SECONDS: Final = 1.0
_WINDOW_SECONDS: Final = 60.0
_TELLING_SECONDS: Final = 0.2
"""A rate over less is mostly noise."""


class Backlog:
    """For one thread. `ask`: the queue's state; `looks_apart`: seconds between two calls of it."""

    def __init__(self, ask: Callable[[], Stats], clock: Clock, looks_apart: float = LOOK_SECONDS) -> None:
        self._ask, self._clock, self._apart = ask, clock, looks_apart
        self._asked_at = float("-inf")
        self._stats: Stats | None = None
        self._seen: deque[tuple[float, int]] = deque()

    def report(self, seq: int, oldest: float | None) -> dict[str, Any] | None:
        """The dict for Spark, after batch `seq`; None if nothing is known. `oldest`: Unix seconds when the oldest
        message was sent that was received and is not in the sink yet."""
        now = self._clock.monotonic()
        if now - self._asked_at >= self._apart:
            self._asked_at = now
            with suppress(VeilError):
                self.note(self._ask())
        if self._stats is None:
            return None
        left, wall = self._seconds_left(), self._clock.wall()
        end = None if left is None else datetime.datetime.fromtimestamp(wall + left, datetime.UTC)
        return {
            "seq": seq,
            "waiting": self._stats.visible,
            "delayed": self._stats.delayed,
            "inFlight": self._stats.in_flight,
            "oldestSeconds": None if oldest is None else round(max(0.0, wall - oldest), 3),
            "secondsLeft": None if left is None else round(left, 1),
            "estimatedEnd": None if end is None else end.isoformat(timespec="seconds").replace("+00:00", "Z"),
        }

    def note(self, stats: Stats) -> None:
        """The queue's state now."""
        now = self._clock.monotonic()
        self._stats = stats
        self._seen.append((now, stats.visible))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_SECONDS:
            self._seen.popleft()

    def received(self, count: int) -> None:
        """So many were received since the queue was asked."""
        if self._stats is not None:
            self._stats = msgspec.structs.replace(
                self._stats,
                visible=max(0, self._stats.visible - count),
                in_flight=None if self._stats.in_flight is None else self._stats.in_flight + count,
            )

    def _seconds_left(self) -> float | None:
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        if self._stats is not None and not self._stats.visible:
            return 0.0
        if self._stats is None or last - first < _TELLING_SECONDS or after >= before:
            return None
        return self._stats.visible * (last - first) / (before - after)


def oldest_of(messages: Iterable[Received]) -> float | None:
    """When the oldest of them was sent, in Unix seconds; None if none says."""
    return min((each.sent for each in messages if each.sent is not None), default=None)


def read_backlog(latest_offsets: Iterable[str]) -> dict[str, float]:
    """`waiting`, `inFlight`, `oldestSeconds` and `secondsLeft` of a query, from `latestOffset` of its sources.

    Sums, and of seconds the largest; NaN if one is unknown, but for sources without a message under way. Empty if no
    source is a drain.
    """
    found = [each for each in map(_decoded, latest_offsets) if each is not None]
    if not found:
        return {}
    ages = [_number(each.get("oldestSeconds")) for each in found]
    left = [_number(each.get("secondsLeft")) for each in found]
    return {
        "waiting": sum(_number(each.get("waiting")) for each in found),
        "inFlight": sum(_number(each.get("inFlight")) for each in found),
        "oldestSeconds": max((age for age in ages if not math.isnan(age)), default=math.nan),
        "secondsLeft": math.nan if any(map(math.isnan, left)) else max(left),
    }


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "waiting" in found else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
