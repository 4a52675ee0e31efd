"""What the demo prints: a table and a drawing of the recommendations beside the truth, and before beside after."""

from collections.abc import Mapping, Sequence
from math import log
from typing import Any, Final

from truth import Found
from work import Measured

TENFOLD: Final = 10
_WIDTH: Final = 72
_SHORTEST_S: Final = 1.0
_LONGEST_S: Final = 600.0


def beside_the_truth(found: Sequence[Found]) -> str:
    """A table: each estimate, and the truth after the stroke."""
    head = ("type", "law", "length of", "median", "99 %", "deaths an hour", "timeout / best")
    rows = [
        (
            each.name,
            each.told,
            each.length_of or "?",
            _pair(each.p50_s, each.p50_true_s),
            _pair(each.p99_s, each.p99_true_s),
            f"{each.deaths_per_hour:.3g} / {each.deaths_per_hour_true:.3g}",
            f"{'at least ' if each.at_least else ''}{_pair(each.timeout_s, each.best_s)}",
        )
        for each in found
    ]
    return "\nFound / true, seconds:\n\n" + table([head, *rows])


def drawing(found: Sequence[Found], today_s: float) -> str:
    """One line a type on a logarithmic scale of seconds."""
    marks = "= the work, from its median to its 99 %   b best for the truth   R recommended   | today"
    lines = ["", marks, ""]
    for each in found:
        line = [" "] * _WIDTH
        for place in range(_place(each.p50_true_s), _place(each.p99_true_s) + 1):
            line[place] = "="
        line[_place(today_s)] = "|"
        line[_place(each.best_s)] = "b"
        line[_place(each.timeout_s)] = "R"
        lines.append(f"{each.name:>10} {''.join(line).rstrip()}")
    scale = [" "] * (_WIDTH + 4)
    for second in (1, 3, 10, 30, 100, 300):
        for offset, letter in enumerate(f"{second} s"):
            scale[_place(second) + offset] = letter
    return "\n".join([*lines, f"{'':>10} {''.join(scale).rstrip()}"])


def outcome(before: Mapping[str, Measured], after: Mapping[str, Measured]) -> tuple[str, dict[str, Any]]:
    """Before beside after, and the same as numbers, with whether the goal was reached.

    The goal: redeliveries of live work fall tenfold at no more than the old recovery delay, or there are no more of
    them at a tenth of it.
    """
    head = ("", "redelivered alive", "then", "recovery delay", "then")
    rows = [
        (name, f"{each.redelivered}", f"{after[name].redelivered}", _mean(each), _mean(after[name]))
        for name, each in before.items()
    ]
    old, new = _all(before), _all(after)
    rows.append(("all", f"{old.redelivered}", f"{new.redelivered}", _mean(old), _mean(new)))
    reached = (TENFOLD * new.redelivered <= old.redelivered and new.recovery_mean <= old.recovery_mean) or (
        new.redelivered <= old.redelivered and TENFOLD * new.recovery_mean <= old.recovery_mean
    )
    verdict = (
        f"Redeliveries of live work: {old.redelivered} before, {new.redelivered} after. A dead worker's message came "
        f"back\nafter {old.recovery_mean:.0f} s before, {new.recovery_mean:.0f} s after, on the average. "
        f"{'' if reached else 'That is short of the goal.'}"
    )
    numbers = {"reached": reached, "before": _numbers(before), "after": _numbers(after)}
    return f"\n{table([head, *rows])}\n\n{verdict.rstrip()}", numbers


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first on the left, the others on the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _numbers(measured: Mapping[str, Measured]) -> dict[str, Any]:
    return {
        name: {
            "attempts": each.attempts,
            "crashed": each.crashed,
            "redelivered_alive": each.redelivered,
            "recovery_s": round(each.recovery_mean, 3),
        }
        for name, each in {**measured, "all": _all(measured)}.items()
    }


def _all(measured: Mapping[str, Measured]) -> Measured:
    every = measured.values()
    return Measured(
        sum(each.attempts for each in every),
        sum(each.crashed for each in every),
        sum(each.redelivered for each in every),
        [delay for each in every for delay in each.recovery],
    )


def _mean(measured: Measured) -> str:
    return f"{measured.recovery_mean:.1f} s" if measured.recovery else "-"


def _pair(found: float | None, true: float) -> str:
    return f"{'?' if found is None else format(found, '.3g')} / {true:.3g}"


def _place(seconds: float) -> int:
    part = log(max(seconds, _SHORTEST_S) / _SHORTEST_S) / log(_LONGEST_S / _SHORTEST_S)
    return min(int(part * (_WIDTH - 1)), _WIDTH - 1)
