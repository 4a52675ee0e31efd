"""What each timeout would do to a queue, as two curves for the template to draw, a table, and a slider over both.

Strategy: from the API's answer and nothing else. Both curves have the timeout below, on a logarithmic scale, and one
quantity upwards: the share of messages started again (logarithmic from 0.1 %), the wait after a crash. The slider's
steps are the rows of the table, so that moving it needs no question to the server. What no lease was long enough to
show is a band without a line.
"""

from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Any, Final, NamedTuple

from veilmq.admin.timeouts import percent
from veilmq.console.showing import duration
from veilmq.model.instant import SECOND_US

WIDTH: Final = 360
_TOP: Final = 6
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

    today_us, best_us = shown["today"]["timeout_us"], shown["recommended_us"] or shown["at_least_us"]
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
    return Picture("Started again", words, _path(seen), f"{_path(highs + lows)}Z", "100 %", "0.1 % or less")


def _waiting(curve: Sequence[Mapping[str, Any]], x_of: Callable[[int], float]) -> Picture:
    top_us = max(2 * _WAIT_MIN_US, *(each["recovery_us"] for each in curve))

    def y_of(wait_us: int) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * log(max(wait_us / _WAIT_MIN_US, 1)) / log(top_us / _WAIT_MIN_US), 1)

    line = _path([(x_of(each["timeout_us"]), y_of(each["recovery_us"])) for each in curve])
    words = "How long the message of a crashed worker waits on the average until it is visible again, by timeout"
    return Picture("Wait after a crash", words, line, "", duration(top_us), "1 s or less")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if place else 'M'}{x} {y}" for place, (x, y) in enumerate(points))
