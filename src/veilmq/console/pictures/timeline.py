"""The picture of a message's life: where each bar and mark is; the template draws it as SVG.

Strategy: a row for the message and one for each lease. Time runs to the right and is true to scale but for long pauses:
a stretch between two instants that would leave no room for the others is cut, and marked. Marks differ by form and by
their text, never by colour alone.
"""

from bisect import bisect_right
from typing import Final, NamedTuple

from veilmq.admin.story.life import Lease, Life
from veilmq.console.showing import clock_time, duration

WIDTH: Final = 1_200
LEFT: Final = 190
_RIGHT: Final = 18
_TOP: Final = 34
_ROW: Final = 30
_BAR: Final = 14
_PAUSE_SHARE_MAX: Final = 0.7
"""A stretch that would take more is cut ..."""
_PAUSE_SHARE: Final = 0.4
"""... to this share of the width."""
_TICK_APART: Final = 92
LEASES_MAX: Final = 40
_MARKS_MAX: Final = 200


class Row(NamedTuple):
    """A label at the left, what is said below it, and its height."""

    y: float
    label: str
    below: str


class Bar(NamedTuple):
    """A stretch of time. kind: `waits`, `delayed`, `lease`, `late` or `open`."""

    x: float
    y: float
    width: float
    kind: str
    title: str


class Mark(NamedTuple):
    """An instant. kind: `sent`, `extended`, `expired`, `refused`, `deleted`, `released`, `moved`, `gone`."""

    x: float
    y: float
    kind: str
    title: str


class Drawing(NamedTuple):
    """All of it, in units of the picture."""

    width: int
    height: int
    rows: list[Row]
    bars: list[Bar]
    marks: list[Mark]
    ticks: list[tuple[float, str]]
    pauses: list[float]
    left_out: int
    """Leases that are not drawn."""


class _Scale:
    """From instants to the picture."""

    def __init__(self, instants: set[int]) -> None:
        self._at = sorted(instants)
        spans = [float(b - a) for a, b in zip(self._at, self._at[1:], strict=False)]
        self._cut: set[int] = set()
        if len(spans) > 2:
            for _ in range(len(spans)):
                total = sum(spans)
                longest = max(range(len(spans)), key=spans.__getitem__)
                rest = total - spans[longest]
                if not rest or spans[longest] <= _PAUSE_SHARE_MAX * total:
                    break
                spans[longest] = rest * _PAUSE_SHARE / (1 - _PAUSE_SHARE)
                self._cut.add(longest)
        total = sum(spans) or 1.0
        room = WIDTH - LEFT - _RIGHT
        self._x = [float(LEFT)]
        for each in spans:
            self._x.append(self._x[-1] + room * each / total)

    def __call__(self, instant: int) -> float:
        place = min(max(bisect_right(self._at, instant) - 1, 0), max(len(self._at) - 2, 0))
        if len(self._at) < 2:
            return self._x[0]
        start, stop = self._at[place], self._at[place + 1]
        share = min(max((instant - start) / (stop - start), 0.0), 1.0)
        return round(self._x[place] + share * (self._x[place + 1] - self._x[place]), 1)

    @property
    def pauses(self) -> list[float]:
        """The middle of each stretch that is cut."""
        return [round((self._x[each] + self._x[each + 1]) / 2, 1) for each in sorted(self._cut)]

    @property
    def ticks(self) -> list[tuple[float, int]]:
        """Instants with enough room for their labels; the last one always."""
        found: list[tuple[float, int]] = []
        last = self._x[-1]
        for x, at in zip(self._x, self._at, strict=True):
            if not found or (x - found[-1][0] >= _TICK_APART and (last - x >= _TICK_APART or x == last)):
                found.append((round(x, 1), at))
        return found


def timeline(life: Life) -> Drawing:
    """The picture."""
    leases, left_out = life.leases, 0
    if len(leases) > LEASES_MAX:
        left_out = len(leases) - LEASES_MAX
        leases = [*leases[:3], *leases[3 + left_out :]]
    scale = _Scale(_instants(life, leases))
    drawing = Drawing(WIDTH, 0, [], [], [], [], scale.pauses, left_out)
    _draw_message(life, scale, drawing)
    for number, lease in enumerate(leases, 1):
        _draw_lease(life, lease, scale, drawing, _TOP + number * _ROW)
    ticks = [(x, clock_time(at, life.first)) for x, at in scale.ticks]
    return drawing._replace(height=_TOP + (len(leases) + 1) * _ROW + 10, ticks=ticks)


def _instants(life: Life, leases: list[Lease]) -> set[int]:
    end = life.ended if life.ended is not None else life.now
    found: set[int] = {life.first, *(move.at for move in life.moves), end}
    if life.visible is not None:
        found.add(min(life.visible, max(end, life.now)))
    for lease in leases:
        found |= {lease.began, lease.ended if lease.ended is not None else min(lease.due, max(life.now, lease.due))}
        found |= {each.at for each in lease.refused}
    return found


def _draw_message(life: Life, scale: _Scale, drawing: Drawing) -> None:
    y = _TOP
    end = life.ended if life.ended is not None else life.now
    start = life.sent if life.sent is not None else life.first
    drawing.rows.append(Row(y, life.queue or "message", "the message"))
    if life.visible is not None and life.visible > start:
        until = min(life.visible, end)
        title = f"delayed for {duration(life.visible - start)}, until {clock_time(life.visible, life.first)}"
        drawing.bars.append(_bar(scale, y, start, until, "delayed", title))
        start = until
    drawing.bars.append(_bar(scale, y, start, end, "waits", f"there for {duration(end - start)}"))
    if life.sent is not None:
        by = f" by {life.sender}" if life.sender else ""
        drawing.marks.append(Mark(scale(life.sent), y, "sent", f"sent{by} at {clock_time(life.sent, life.first)}"))
    for move in life.moves[:_MARKS_MAX]:
        how = "dead letter" if move.how == "dead_lettered" else "moved"
        title = f"{how}: from {move.source} to {move.target} at {clock_time(move.at, life.first)}"
        drawing.marks.append(Mark(scale(move.at), y, "moved", title))
    if life.ended is not None and life.end != "deleted":
        title = f"{life.end.replace('_', ' ')} at {clock_time(life.ended, life.first)}"
        drawing.marks.append(Mark(scale(life.ended), y, "gone", title))


def _bar(scale: _Scale, y: float, start: int, stop: int, kind: str, title: str) -> Bar:
    x = scale(start)
    return Bar(x, y - _BAR / 2, max(2.0, round(scale(stop) - x, 1)), kind, title)


def _draw_lease(life: Life, lease: Lease, scale: _Scale, drawing: Drawing, y: float) -> None:
    ended = lease.ended if lease.ended is not None else max(lease.due, lease.began)
    held = lease.expired if lease.expired is not None and lease.resumed is None else ended
    name = life.name(lease)
    drawing.rows.append(Row(y, name, f"receive {lease.attempt} of {lease.queue}"))
    title = (
        f"{name} received it at {clock_time(lease.began, life.first)} for {duration(lease.lease_us)}"
        f"{f', extended {len(lease.extended)} times' if lease.extended else ''}"
    )
    drawing.bars.append(_bar(scale, y, lease.began, held, "lease" if lease.ending else "open", title))
    last = max([ended, *(each.at for each in lease.refused)])
    if last > held:
        worked = f"worked on for {duration(last - held)} after its lease"
        drawing.bars.append(_bar(scale, y, held, last, "late", worked))
    for at in lease.extended[:_MARKS_MAX]:
        drawing.marks.append(Mark(scale(at), y, "extended", f"extended at {clock_time(at, life.first)}"))
    if lease.expired is not None:
        title = f"the lease ended at {clock_time(lease.expired, life.first)}"
        drawing.marks.append(Mark(scale(lease.expired), y, "expired", title))
    for each in lease.refused[:_MARKS_MAX]:
        title = f"its {each.act} at {clock_time(each.at, life.first)} was refused: {each.reason}"
        drawing.marks.append(Mark(scale(each.at), y, "refused", title))
    if lease.ending in {"deleted", "released", "failed", "undelivered"}:
        kind = "deleted" if lease.ending == "deleted" else "released"
        why = f": {lease.error}" if lease.error else ""
        words = {"deleted": "deleted it", "released": "gave it back", "failed": "gave it back for a retry"}
        what = words.get(lease.ending, "never got the answer")
        title = f"{name} {what} at {clock_time(ended, life.first)}{why}"
        drawing.marks.append(Mark(scale(ended), y, kind, title))
