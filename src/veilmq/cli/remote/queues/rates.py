"""`veilmq queues rates`, `timeout`, `at`, `worst`: what happened to a queue, whether its timeout is right, how it was,
and which queues need somebody.

Strategy: as in the package. A table has a line for each minute or hour: dashes where the server did not run.
"""

import sys
from collections.abc import Mapping
from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.failures import Exit, Failure, Missing
from veilmq.cli.options import Everything, Queue, duration_us
from veilmq.cli.output import duration, in_json, instant, lease_change, lease_named, print_json, table
from veilmq.model.instant import from_text
from veilmq.model.wording import counted

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

_DAY_US: Final = 86_400_000_000
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
    """See `veilmq.store.reader.MEASURES`, which costs an import; and queues whose timeout is clearly wrong."""

    OLDEST = "oldest"
    BLOCKED = "blocked"
    DEPTH = "depth"
    IN_FLIGHT = "in_flight"
    DEAD_LETTERED = "dead_lettered"
    LEASE_EXPIRED = "lease_expired"
    FAILED = "failed"
    TIMEOUT = "timeout"


def rates(
    asked: "Asked",
    queue: Queue,
    last: Annotated[str, typer.Option("--last", metavar="TIME", help="How far back.")] = "1h",
    step: Annotated[
        Step | None, typer.Option("--step", help="The time of a line [minute; beyond a day, hour].")
    ] = None,
) -> None:
    """Show what happened to a queue by minute or hour: rates, times, depth."""
    from veilmq.admin.api.inputs import STEPS

    last_us = duration_us("--last", last)
    unit = step or (Step.MINUTE if last_us <= _DAY_US else Step.HOUR)
    step_us, _, most = STEPS[unit]
    limit = max(1, ceil(last_us / step_us))
    if limit > most:
        raise Failure(Exit.USAGE, f"--last: at most {most} {unit}s are shown at once")
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


class State(StrEnum):
    """Of a message."""

    VISIBLE = "visible"
    DELAYED = "delayed"
    IN_FLIGHT = "in_flight"
    QUARANTINED = "quarantined"


def at(
    asked: "Asked",
    queue: Queue,
    when: Annotated[
        str, typer.Argument(metavar="WHEN", help="An instant (2026-11-26T10:02:31Z), or how long ago (10m).")
    ],
    until: Annotated[
        str | None, typer.Option("--until", metavar="WHEN", help="Show what changed until then; `now` is allowed.")
    ] = None,
    state: Annotated[State | None, typer.Option("--state", help="Only messages in this state.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Show N messages, at most 1000.")] = 100,
    scan: Annotated[int, typer.Option("--scan", metavar="N", help="Read at most N events.")] = 1_000_000,
) -> None:
    """Show a queue as it was at an instant, from the history; with --until what changed from then on."""
    wanted: dict[str, Any] = {"at": _when("WHEN", when), "limit": limit, "scan": scan}
    wanted |= {} if until is None else {"until": _when("--until", until)}
    wanted |= {} if state is None else {"state": state.value}
    try:
        found = asked.access.past(asked.queue(queue), wanted)
    except Missing as missing:
        advice = f"When it was created, if the history has it: veilmq events --queue {queue} --kind queue_created"
        raise Failure(Exit.WRONG, f"{missing} at that time", advice) from None
    if asked.as_json:
        print_json(found)
        return
    for name, at_us in (("then", found["at"]), ("later", found["until"])):
        if found[name] is not None:
            print(f"{instant(at_us)} UTC: {_counts(found[name])}")
    for name in ("changes", "became"):
        counts = (f"{count} {kind.replace('_', ' ')}" for kind, count in (found[name] or {}).items())
        if found[name] is not None:
            print(f"{name}: {', '.join(counts) or 'nothing'}")
    two = found["changes"] is not None
    heads = [
        "message",
        *(["before", "later", "what happened"] if two else ["state", "holder"]),
        "sent (UTC)",
        "receives",
    ]
    table(heads, [_was(each, two) for each in found["messages"]])
    if found["after"] is not None:
        print("there are more messages: --limit", file=sys.stderr)
    if not found["complete"]:
        print(
            f"this is not what you asked for: it stopped after {counted(found['read'], 'event')} (--scan)",
            file=sys.stderr,
        )


def _when(option: str, text: str) -> int:
    """An instant, or, negative, how long ago. Raises Failure."""
    if text == "now":
        return 0
    try:
        return max(1, from_text(text))
    except ValueError:
        pass
    try:
        return -duration_us(option, text.removesuffix(" ago"))
    except Failure:
        expected = "an instant such as 2026-11-26T10:02:31Z, or how long ago, such as 10m"
        raise Failure(Exit.USAGE, f"{option}: expected {expected}, not {text!r}") from None


def _counts(counts: Mapping[str, Any]) -> str:
    states = ", ".join(f"{counts[state]} {state.replace('_', ' ')}" for state in State)
    oldest = counts["oldest_sent"]
    return states + ("" if oldest is None else f"; the oldest was sent at {instant(oldest)}")


def _was(message: Mapping[str, Any], two: bool) -> list[object]:
    if two:
        events = ", ".join(kind.replace("_", " ") for kind in message["events"])
        middle = [message["before"] or "-", message["state"], events]
    else:
        holder = message.get("holder") or {}
        middle = [message["state"], holder.get("name") or holder.get("client") or ""]
    return [message["id"], *middle, instant(message["sent"]), message["receive_count"]]


def worst(
    asked: "Asked",
    by: Annotated[Measure, typer.Option("--by", help="What makes a queue bad.")] = Measure.OLDEST,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="How many, at most 1000.")] = 20,
    everything: Everything = False,
) -> None:
    """Show the worst queues: the oldest messages, groups that stand still, the deepest queues, dead letters, ended
    leases, failures, wrong timeouts."""
    wanted: dict[str, Any] = {"limit": limit}
    wanted |= {"account": "*"} if everything else {"account": asked.account, "region": asked.region}
    if by is Measure.TIMEOUT:
        _wrong_timeouts(asked, asked.access.wrong_timeouts(wanted), everything)
        return
    shown = asked.access.worst(wanted | {"by": by.value})
    if asked.as_json:
        print(in_json(shown))
        return
    rows = []
    for each in shown["queues"]:
        counts, age_us = each["counts"], each["oldest_age_us"]
        name = _name_of(each, everything)
        value = duration(each["value"]) if by in (Measure.OLDEST, Measure.BLOCKED) else each["value"]
        held = [counts[state] for state in ("visible", "in_flight", "delayed")]
        rows.append([name, value, *held, "" if age_us is None else duration(age_us)])
        if by is Measure.DEAD_LETTERED:
            rows[-1].append((each["dead_letters_to"] or {}).get("name", ""))
    heads = ["queue", by.value.replace("_", " "), "visible", "in flight", "delayed", "oldest message"]
    table([*heads, "dead letters to"] if by is Measure.DEAD_LETTERED else heads, rows)
    if shown["since"] is not None:
        print(f"counted since {instant(shown['since'])} UTC")
    if not shown["complete"]:
        print("not all queues were looked at since the start; ask again in a minute")


def _name_of(queue: Mapping[str, Any], everything: bool) -> str:
    return "/".join(queue[part] for part in ("account", "region", "name")) if everything else queue["name"]


def _wrong_timeouts(asked: "Asked", shown: Mapping[str, Any], everything: bool) -> None:
    if asked.as_json:
        print(in_json(shown))
        return
    rows = []
    for each in shown["queues"]:
        best_us, least_us = each["recommended_us"], each["at_least_us"]
        best = "extended leases" if least_us is None else f"{duration(least_us)} or more"
        best = best if best_us is None else duration(best_us)
        wrong = each["wrong"].replace("_", " ")
        rows.append([_name_of(each, everything), duration(each["lease_us"]), each["by"], wrong, best, each["why"]])
    table(["queue", "lease", "by", "is", "best", "why"], rows)


def timeout(
    asked: "Asked",
    queue: Queue,
    tried: Annotated[str, typer.Option("--timeout", metavar="TIME", help="What would this timeout do?")] = "",
) -> None:
    """Show whether a queue's visibility timeout is right: how long messages take, and what other timeouts would do."""
    shown = asked.access.timeout(asked.queue(queue), duration_us("--timeout", tried) if tried else None)
    if asked.as_json:
        print_json(shown)
        return
    by = shown["in_force"]["by"]
    print(f"{lease_named(by, shown['in_force']['timeout_us'])}. {shown['why']}")
    if change := lease_change(queue, by, shown["change_us"]):
        print(f"to change it: {change}")
    if shown["messages"]:
        work = ", ".join(f"{name} {_between(each)}" for name, each in shown["work_us"].items())
        print(f"work of {counted(shown['messages'], 'message')} since {instant(shown['since'])} UTC: {work}")
    leases = shown["leases"]
    print(f"leases: {leases['ended']} ended, {leases['ran_out']} ran out, {leases['extended']} were extended")
    if shown["length_belongs_to_message"]:
        print("messages that were received again take longer: the length belongs to the message")
    if shown["extend"] is not None:
        extend = shown["extend"]
        print(f"with extensions: leases of {duration(extend['lease_us'])}, every {duration(extend['every_us'])}")
    if shown["types"]:
        rows = [[each["type"] or "", each["messages"], *_work(each)] for each in shown["types"]]
        table(["type", "messages", "p50", "p95", "p99", "timeout"], rows)
    effects = shown["curve"] if shown["asked"] is None else [shown["in_force"], shown["asked"]]
    if effects:
        table(["timeout", "started again", "95 % interval", "waits after a crash"], [_effect(each) for each in effects])


def _work(of_type: Mapping[str, Any]) -> list[str]:
    return [*map(_between, of_type["work_us"].values()), _or_not(of_type["recommended_us"])]


def _between(work: Mapping[str, Any]) -> str:
    """12 s (11 s to 13 s), or what is known of it."""
    if work["value"] is None:
        return f"at least {duration(work['low'])}"
    return f"{duration(work['value'])} ({duration(work['low'])} to {_or_not(work['high'])})"


def _or_not(time_us: int | None) -> str:
    return "unknown" if time_us is None else duration(time_us)


def _effect(effect: Mapping[str, Any]) -> list[object]:
    share = effect["duplicates"]
    interval = f"{share['low']:.2%} to {share['high']:.2%}"
    value = f"{share['value']:.2%}" if effect["seen"] else "unknown"
    return [duration(effect["timeout_us"]), value, interval, duration(effect["recovery_us"])]
