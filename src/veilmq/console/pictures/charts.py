"""Charts of what happened to a queue, as lines for the template to draw.

Strategy: from the API's rollups and nothing else. A minute in which the server did not run is a gap; a zero is a zero.
Many minutes become few points: counts add up, of everything else the greatest is kept, so that no peak is lost. Lines
differ by their dashes and are named beside the chart with their last value.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from veilmq.console.showing import clock_time, count, duration
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US

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
    begin = clock_time(rollups[0]["at"], now)[:-4] if step_us == MINUTE_US else clock_time(rollups[0]["at"])[:10]
    return [_chart(wanted, groups, begin) for wanted in _CHARTS]


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


def _chart(wanted: _Wanted, groups: list[Sequence[dict[str, Any]]], begin: str) -> Chart:
    values = {name: [_value(group, member, wanted.adds_up) for group in groups] for name, member in wanted.members}
    greatest = max((value for line in values.values() for value in line if value is not None), default=0)
    top = _round_up(greatest)
    lines = [Line(name, _path(line, top), wanted.shown(_last(line))) for name, line in values.items()]
    return Chart(wanted.title, wanted.help, lines, wanted.shown(top), begin, "now")


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
    """A path of SVG; a value alone between two gaps is a short stroke."""
    parts, is_open = [], False
    step = WIDTH / max(len(line) - 1, 1)
    for place, value in enumerate(line):
        if value is None:
            is_open = False
            continue
        x, y = round(place * step, 1), round(_TOP + (HEIGHT - _TOP - 1) * (1 - value / top), 1)
        parts.append(f"L{x} {y}" if is_open else f"M{x} {y}h.5")
        is_open = True
    return "".join(parts)
