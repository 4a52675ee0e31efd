"""Pictures that the server draws: charts of what happened to a queue, what each timeout would do to it, and a message's
life.

Strategy: from the API's answers and nothing else. Here is where each line, bar and mark is; the templates make SVG of
them.

In charts a minute in which the server did not run is a gap; a zero is a zero. Many minutes become few points: counts
add up, of everything else the greatest is kept, so that no peak is lost. Lines differ by their dashes and are named
beside the chart with their last value.

Of timeouts there are two curves, a table, and a slider over both. Both curves have the timeout below, on a logarithmic
scale, and one quantity upwards: the share of messages started again (logarithmic from 0.1 %), the wait after a crash.
The slider's steps are the rows of the table, so that moving it needs no question to the server. What no lease was long
enough to show is a band without a line.

A message's life has a row for the message and one for each lease. Time runs to the right and is true to scale but for
long pauses: a stretch between two instants that would leave no room for the others is cut, and marked. Marks differ by
form and by their text, never by colour alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Any, Final, NamedTuple

from veilmq.admin.story.life import Lease, Life
from veilmq.admin.timeouts import percent
from veilmq.console.showing import clock_time, count, duration, iso
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, SECOND_US

WIDTH: Final = 360
HEIGHT: Final = 92
_TOP: Final = 6
_POINTS_MAX: Final = 240
SPANS: Final = {
    "hour": ("1 h", "minute", HOUR_US, MINUTE_US),
    "day": ("1 d", "minute", DAY_US, MINUTE_US),
    "quarter": ("90 d", "hour", 90 * DAY_US, HOUR_US),
}
"""Label, step, length, length of a step."""
LIFE_WIDTH: Final = 1_200
LEFT: Final = 190
_RIGHT: Final = 18
_LIFE_TOP: Final = 34
_ROW: Final = 30
_BAR: Final = 14
_PAUSE_SHARE_MAX: Final = 0.7
"""A stretch that would take more is cut ..."""
_PAUSE_SHARE: Final = 0.4
"""... to this share of the width."""
_CHARACTER: Final = 6.4
"""Of a tick's label: its width at most."""
LEASES_MAX: Final = 40
_MARKS_MAX: Final = 200


class Line(NamedTuple):
    """A line: its name, its path, and its last value."""

    name: str
    path: str
    last: str


class Chart(NamedTuple):
    """One chart; `top` is the value of its upper edge."""

    title: str
    help: str
    lines: list[Line]
    top: str
    begin: str
    end: str
    each: str
    """The length of a step, where a value is of one step alone."""


class _Wanted(NamedTuple):
    title: str
    help: str
    members: Sequence[tuple[str, str]]
    """Name, and the member of a rollup; a dot leads into one."""
    shown: Callable[[int | None], str]
    adds_up: bool


_CHARTS: Final = (
    _Wanted(
        "Messages",
        "How many were sent, received and deleted in each step",
        (("sent", "sent"), ("received", "received"), ("deleted", "deleted")),
        count,
        adds_up=True,
    ),
    _Wanted(
        "Trouble",
        "Leases that ran out, failures that workers reported, dead letters, and deletes that came too late",
        (
            ("leases expired", "lease_expired"),
            ("failed", "failed"),
            ("dead letters", "dead_lettered"),
            ("refused deletes", "delete_refused"),
        ),
        count,
        adds_up=True,
    ),
    _Wanted(
        "In the queue",
        "Messages at the end of each step: all of them, and those that a worker holds",
        (("in all", "depth"), ("in flight", "in_flight")),
        count,
        adds_up=False,
    ),
    _Wanted(
        "Time",
        "How long messages waited until they were received, and were held until they were deleted",
        (("wait p95", "wait_us.p95"), ("hold p50", "hold_us.p50"), ("hold p95", "hold_us.p95")),
        duration,
        adds_up=False,
    ),
)


def charts(rollups: Sequence[dict[str, Any]], step_us: int, now: int) -> list[Chart]:
    """All charts of these rollups, which follow each other without a gap; none without rollups."""
    if not rollups:
        return []
    groups = _groups(rollups)
    day, minute = iso(rollups[0]["at"])[:10], iso(rollups[0]["at"])[11:16]
    begin = day if step_us != MINUTE_US else minute if iso(now)[:10] == day else f"{day} {minute}"
    each = duration(step_us * len(groups[0]))
    return [_chart(wanted, groups, begin, each if wanted.adds_up else "") for wanted in _CHARTS]


class Sparkline(NamedTuple):
    """What was sent and deleted in each minute, as two lines without axes, and the same in words."""

    sent: str
    deleted: str
    words: str


def sparkline(rates: dict[str, Any]) -> Sparkline | None:
    """Of a listed queue's rates; None if nothing happened."""
    sent, deleted = rates["sent"], rates["deleted"]
    greatest = max((value or 0 for value in (*sent, *deleted)), default=0)
    if not greatest:
        return None
    words = f"Sent and deleted in each of the last {len(sent)} minutes: at most {count(greatest)}"
    return Sparkline(_path(sent, greatest), _path(deleted, greatest), words)


def _groups(rollups: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    size = -(-len(rollups) // _POINTS_MAX)
    return [rollups[at : at + size] for at in range(0, len(rollups), size)]


def _chart(wanted: _Wanted, groups: list[Sequence[dict[str, Any]]], begin: str, each: str) -> Chart:
    values = {name: [_value(group, member, wanted.adds_up) for group in groups] for name, member in wanted.members}
    greatest = max((value for line in values.values() for value in line if value is not None), default=0)
    top = _round_up(greatest)
    lines = [Line(name, _path(line, top), wanted.shown(_last(line))) for name, line in values.items()]
    return Chart(wanted.title, wanted.help, lines, wanted.shown(top), begin, "now", each)


def _value(group: Sequence[dict[str, Any]], member: str, adds_up: bool) -> int | None:
    name, _, inner = member.partition(".")
    found = []
    for each in group:
        value = each[name]
        if inner and value is not None:
            value = value[inner]
        if value is not None:
            found.append(int(value))
    if not found:
        return None
    return sum(found) if adds_up else max(found)


def _last(line: list[int | None]) -> int | None:
    return next((value for value in reversed(line) if value is not None), None)


def _round_up(value: int) -> int:
    """To 1, 2 or 5 and zeros: the upper edge of a chart."""
    if value <= 1:
        return 1
    power = int("1" + "0" * (len(str(value)) - 1))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= value)


def _path(line: list[int | None], top: int) -> str:
    """A path of SVG; a value alone between two gaps is a stroke as wide as a step, or a minute of an hour if that is
    less, so that it is seen and so are the gaps."""
    parts, is_open = [], False
    step = WIDTH / max(len(line) - 1, 1)
    width = round(min(6, max(1.5, step)), 1)
    for place, value in enumerate(line):
        if value is None:
            is_open = False
            continue
        x, y = round(place * step, 1), round(_TOP + (HEIGHT - _TOP - 1) * (1 - value / top), 1)
        is_alone = line[place + 1 : place + 2] in ([], [None])
        start = f"M{round(min(max(x - width / 2, 0), WIDTH - width), 1)} {y}h{width}" if is_alone else f"M{x} {y}"
        parts.append(f"L{x} {y}" if is_open else start)
        is_open = True
    return "".join(parts)


_BOTTOM: Final = 91
_SHARE_MIN: Final = 0.001
"""Smaller shares are drawn as this."""
_WAIT_MIN_US: Final = SECOND_US


class Row(NamedTuple):
    """One timeout, in words."""

    step: int
    timeout: str
    typed: str
    """As the form of the settings takes it."""
    again: str
    interval: str
    waits: str
    x: float
    """Where it is in the pictures."""


class Mark(NamedTuple):
    """A timeout in the pictures."""

    name: str
    x: float


class Picture(NamedTuple):
    """One curve: paths of SVG, and the words at its edges."""

    title: str
    help: str
    line: str
    band: str
    top: str
    bottom: str


class Effects(NamedTuple):
    """All of it."""

    rows: list[Row]
    tried: Row
    """Where the slider is."""
    marks: list[Mark]
    pictures: list[Picture]
    begin: str
    end: str


def effects(shown: Mapping[str, Any], step: str, typed: Callable[[int], str]) -> Effects | None:
    """Of an answer of `GET .../timeout`; None if it has no curve. step: where the slider is, as the address says; from
    outside the curve it goes to the recommended timeout, or to the one after today's."""
    curve: Sequence[Mapping[str, Any]] = shown["curve"]
    if len(curve) < 2:
        return None
    first, last = curve[0]["timeout_us"], curve[-1]["timeout_us"]

    def x_of(timeout_us: int) -> float:
        inside = min(max(timeout_us, first), last)
        return round(WIDTH * log(inside / first) / log(last / first), 1)

    today_us, best_us = shown["in_force"]["timeout_us"], shown["recommended_us"] or shown["at_least_us"]
    rows = [_row(place, each, typed, x_of(each["timeout_us"])) for place, each in enumerate(curve)]
    marks = [Mark("today", x_of(today_us))]
    if best_us is not None:
        marks.append(Mark("recommended" if shown["recommended_us"] else "at least", x_of(best_us)))
    return Effects(
        rows,
        rows[_place(step, [each["timeout_us"] for each in curve], best_us or today_us)],
        marks,
        [_again(curve, x_of), _waiting(curve, x_of)],
        duration(first),
        duration(last),
    )


def _place(step: str, timeouts: Sequence[int], wanted_us: int) -> int:
    if step.isascii() and step.isdigit() and len(step) < 4 and int(step) < len(timeouts):
        return int(step)
    return next((place for place, each in enumerate(timeouts) if each >= wanted_us), len(timeouts) - 1)


def _row(place: int, effect: Mapping[str, Any], typed: Callable[[int], str], x: float) -> Row:
    share = effect["duplicates"]
    again = percent(share["value"]) if effect["seen"] else f"at most {percent(share['high'])}"
    interval = f"{percent(share['low'])} to {percent(share['high'])}"
    timeout_us = effect["timeout_us"]
    return Row(place, duration(timeout_us), typed(timeout_us), again, interval, duration(effect["recovery_us"]), x)


def _again(curve: Sequence[Mapping[str, Any]], x_of: Callable[[int], float]) -> Picture:
    def y_of(share: float) -> float:
        return round(_TOP + (_BOTTOM - _TOP) * log(max(share, _SHARE_MIN)) / log(_SHARE_MIN), 1)

    seen = [(x_of(each["timeout_us"]), y_of(each["duplicates"]["value"])) for each in curve if each["seen"]]
    highs = [(x_of(each["timeout_us"]), y_of(each["duplicates"]["high"])) for each in curve]
    lows = [(x_of(each["timeout_us"]), y_of(each["duplicates"]["low"])) for each in reversed(curve)]
    words = (
        "Share of messages that are started again while their worker still works, by timeout, with its 95 % interval"
    )
    return Picture("Started again", words, _curve_path(seen), f"{_curve_path(highs + lows)}Z", "100 %", "0.1 % or less")


def _waiting(curve: Sequence[Mapping[str, Any]], x_of: Callable[[int], float]) -> Picture:
    top_us = max(2 * _WAIT_MIN_US, *(each["recovery_us"] for each in curve))

    def y_of(wait_us: int) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * log(max(wait_us / _WAIT_MIN_US, 1)) / log(top_us / _WAIT_MIN_US), 1)

    line = _curve_path([(x_of(each["timeout_us"]), y_of(each["recovery_us"])) for each in curve])
    words = "How long the message of a crashed worker waits on the average until it is visible again, by timeout"
    return Picture("Wait after a crash", words, line, "", duration(top_us), "1 s or less")


def _curve_path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if place else 'M'}{x} {y}" for place, (x, y) in enumerate(points))


class LifeRow(NamedTuple):
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


class LifeMark(NamedTuple):
    """An instant. kind: `sent`, `extended`, `expired`, `refused`, `deleted`, `released`, `moved`, `gone`."""

    x: float
    y: float
    kind: str
    title: str


class Drawing(NamedTuple):
    """All of it, in units of the picture."""

    width: int
    height: int
    rows: list[LifeRow]
    bars: list[Bar]
    marks: list[LifeMark]
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
        room = LIFE_WIDTH - LEFT - _RIGHT
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

    def ticks(self, day: int) -> list[tuple[float, str]]:
        """Instants with room for their labels, each with the date if that is not `day`'s; the last one always."""
        labels = [clock_time(at, day) for at in self._at]
        # The first label is right of its tick and the last one left: between these and the next, a label and a half.
        apart = 1.5 * _CHARACTER * max(map(len, labels))
        found: list[tuple[float, str]] = []
        last = self._x[-1]
        for x, label in zip(self._x, labels, strict=True):
            if not found or (x - found[-1][0] >= apart and (last - x >= apart or x == last)):
                found.append((round(x, 1), label))
        return found


def timeline(life: Life) -> Drawing:
    """The picture."""
    leases, left_out = life.leases, 0
    if len(leases) > LEASES_MAX:
        left_out = len(leases) - LEASES_MAX
        leases = [*leases[:3], *leases[3 + left_out :]]
    scale = _Scale(_instants(life, leases))
    drawing = Drawing(LIFE_WIDTH, 0, [], [], [], [], scale.pauses, left_out)
    _draw_message(life, scale, drawing)
    for number, lease in enumerate(leases, 1):
        _draw_lease(life, lease, scale, drawing, _LIFE_TOP + number * _ROW)
    return drawing._replace(height=_LIFE_TOP + (len(leases) + 1) * _ROW + 10, ticks=scale.ticks(life.first))


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
    y = _LIFE_TOP
    end = life.ended if life.ended is not None else life.now
    start = life.sent if life.sent is not None else life.first
    drawing.rows.append(LifeRow(y, life.queue or "message", "the message"))
    if life.visible is not None and life.visible > start:
        until = min(life.visible, end)
        title = f"delayed for {duration(life.visible - start)}, until {clock_time(life.visible, life.first)}"
        drawing.bars.append(_bar(scale, y, start, until, "delayed", title))
        start = until
    if not life.published:  # its copies have ids of their own
        drawing.bars.append(_bar(scale, y, start, end, "waits", f"there for {duration(end - start)}"))
    if life.sent is not None:
        by = f" by {life.sender}" if life.sender else ""
        drawing.marks.append(LifeMark(scale(life.sent), y, "sent", f"sent{by} at {clock_time(life.sent, life.first)}"))
    for move in life.moves[:_MARKS_MAX]:
        how = "dead letter" if move.how == "dead_lettered" else "moved"
        title = f"{how}: from {move.source} to {move.target} at {clock_time(move.at, life.first)}"
        drawing.marks.append(LifeMark(scale(move.at), y, "moved", title))
    if life.ended is not None and life.end != "deleted":
        title = f"{life.end.replace('_', ' ')} at {clock_time(life.ended, life.first)}"
        drawing.marks.append(LifeMark(scale(life.ended), y, "gone", title))


def _bar(scale: _Scale, y: float, start: int, stop: int, kind: str, title: str) -> Bar:
    x = scale(start)
    return Bar(x, y - _BAR / 2, max(2.0, round(scale(stop) - x, 1)), kind, title)


def _draw_lease(life: Life, lease: Lease, scale: _Scale, drawing: Drawing, y: float) -> None:
    ended = lease.ended if lease.ended is not None else max(lease.due, lease.began)
    held = lease.expired if lease.expired is not None and lease.resumed is None else ended
    name = lease.name
    drawing.rows.append(LifeRow(y, name, f"receive {lease.attempt} of {lease.queue}"))
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
        drawing.marks.append(LifeMark(scale(at), y, "extended", f"extended at {clock_time(at, life.first)}"))
    if lease.expired is not None:
        title = f"the lease ended at {clock_time(lease.expired, life.first)}"
        drawing.marks.append(LifeMark(scale(lease.expired), y, "expired", title))
    for each in lease.refused[:_MARKS_MAX]:
        title = f"its {each.act} at {clock_time(each.at, life.first)} was refused: {each.reason}"
        drawing.marks.append(LifeMark(scale(each.at), y, "refused", title))
    if lease.ending in {"deleted", "released", "failed", "undelivered"}:
        kind = "deleted" if lease.ending == "deleted" else "released"
        why = f": {lease.error}" if lease.error else ""
        words = {"deleted": "deleted it", "released": "gave it back", "failed": "gave it back for a retry"}
        what = words.get(lease.ending, "never got the answer")
        title = f"{name} {what} at {clock_time(ended, life.first)}{why}"
        drawing.marks.append(LifeMark(scale(ended), y, kind, title))
