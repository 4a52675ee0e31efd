"""`veilmq queues rates` and `queues worst`: what happened to a queue, and which queues need somebody.

Strategy: as in the package. A table has a line for each minute or hour: dashes where the server did not run.
"""

from collections.abc import Mapping
from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.output import duration, in_json, instant, print_json, table
from veilmq.cli.remote.options import Everything, Queue, duration_us

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

_DAY_US: Final = 86_400_000_000
_STEPS_US: Final = {"minute": 60_000_000, "hour": 3_600_000_000}
_COUNTS: Final = {
    "sent": "sent",
    "received": "received",
    "deleted": "deleted",
    "released": "released",
    "failed": "failed",
    "lease_expired": "expired",
    "dead_lettered": "dead",
    "delete_refused": "refused",
    "depth": "depth",
    "in_flight": "in flight",
}
"""Members of a rollup, and their columns."""


class Step(StrEnum):
    """What a line is of."""

    MINUTE = "minute"
    HOUR = "hour"


class Measure(StrEnum):
    """See `veilmq.store.reader.MEASURES`, which costs an import."""

    OLDEST = "oldest"
    DEPTH = "depth"
    IN_FLIGHT = "in_flight"
    DEAD_LETTERED = "dead_lettered"
    LEASE_EXPIRED = "lease_expired"
    FAILED = "failed"


def rates(
    asked: "Asked",
    queue: Queue,
    last: Annotated[str, typer.Option("--last", metavar="TIME", help="How far back.")] = "1h",
    step: Annotated[
        Step | None, typer.Option("--step", help="What a line is of [a minute, beyond a day an hour].")
    ] = None,
) -> None:
    """Show what happened to a queue by minute or hour: rates, times, depth."""
    last_us = duration_us("--last", last)
    unit = step or (Step.MINUTE if last_us <= _DAY_US else Step.HOUR)
    limit = max(1, ceil(last_us / _STEPS_US[unit]))
    shown = asked.access.rollups(asked.queue(queue), {"step": unit.value, "limit": limit})
    if asked.as_json:
        for each in shown["rollups"]:
            print_json(each)
        return
    heads = ["at (UTC)", *_COUNTS.values(), "oldest", "wait p50", "p95", "p99", "hold p50", "p95", "p99"]
    table(heads, [_line(each) for each in shown["rollups"]])


def _line(rollup: Mapping[str, Any]) -> list[object]:
    if not rollup["ran"]:
        return [instant(rollup["at"]), *["-"] * (len(_COUNTS) + 7)]
    line: list[object] = [instant(rollup["at"])]
    line += ["" if rollup[name] is None else rollup[name] for name in _COUNTS]
    line.append("" if rollup["oldest_age_us"] is None else duration(rollup["oldest_age_us"]))
    for name in ("wait_us", "hold_us"):
        times = rollup[name] or {}
        line += [duration(times[each]) if each in times else "" for each in ("p50", "p95", "p99")]
    return line


def worst(
    asked: "Asked",
    by: Annotated[Measure, typer.Option("--by", help="What makes a queue bad.")] = Measure.OLDEST,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="How many, at most 1000.")] = 20,
    everything: Everything = False,
) -> None:
    """Show the worst queues: the oldest messages, the deepest queues, dead letters, ended leases, failures."""
    wanted: dict[str, Any] = {"by": by.value, "limit": limit}
    wanted |= {"account": "*"} if everything else {"account": asked.account, "region": asked.region}
    shown = asked.access.worst(wanted)
    if asked.as_json:
        print(in_json(shown))
        return
    rows = []
    for each in shown["queues"]:
        counts, age_us = each["counts"], each["oldest_age_us"]
        name = "/".join(each[part] for part in ("account", "region", "name")) if everything else each["name"]
        value = duration(each["value"]) if by is Measure.OLDEST else each["value"]
        held = [counts[state] for state in ("visible", "in_flight", "delayed")]
        rows.append([name, value, *held, "" if age_us is None else duration(age_us)])
    table(["queue", by.value.replace("_", " "), "visible", "in flight", "delayed", "oldest message"], rows)
    if shown["since"] is not None:
        print(f"counted since {instant(shown['since'])} UTC")
    if not shown["complete"]:
        print("not all queues were looked at since the start; ask again in a minute")
