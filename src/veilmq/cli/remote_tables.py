"""Prints queues, messages and events for people.

Strategy: rich is imported only when a table is printed. Control characters in all foreign text are escaped: a body must
not drive a terminal.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from veilmq.cli.runs import Run

_WIDTH_PIPED: Final = 200
_BODY_SHOWN: Final = 400
_UNITS: Final = ((86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s"), (1_000, "ms"))


def queue_table(queues: Iterable[Mapping[str, Any]], *, whose: bool) -> None:
    """Queues with counts and main settings; `whose` shows account and region too."""
    heads = ["queue", "visible", "in flight", "delayed", "oldest", "timeout", "retention", "dead letters to"]
    rows = []
    for queue in queues:
        counts, settings = queue["counts"], queue["settings"]
        redrive = settings["redrive"]
        row = [
            queue["name"],
            counts["visible"],
            counts["in_flight"],
            counts["delayed"],
            "" if queue.get("oldest_age_us") is None else duration(queue["oldest_age_us"]),
            duration(settings["visibility_timeout_us"]),
            duration(settings["retention_us"]),
            f"{redrive['target']['name']} after {redrive['receive_count_max']}" if redrive else "",
        ]
        rows.append([queue["account"], queue["region"], *row] if whose else row)
    table(["account", "region", *heads] if whose else heads, rows)


def message_blocks(messages: Iterable[Mapping[str, Any]]) -> None:
    """Each message with its handle, to paste into the next command."""
    for message in messages:
        count = message["receive_count"]
        times = f"received {count} time{'s' * (count != 1)}"
        print(f"message {message['id']}  sent {instant(message['sent'])} UTC  {times}")
        if "handle" in message:
            print(f"  handle  {message['handle']}")
            print(f"  until   {instant(message['due'])} UTC")
        for name in ("group", "type", "deduplication_id"):
            if name in message:
                print(f"  {name}  {printable(message[name])}")
        for attribute in message.get("attributes", ()):
            name, value = printable(attribute["name"]), printable(attribute["value"])
            print(f"  attribute  {name} = {value} ({printable(attribute['type'])})")
        if "dead_letter_receives" in message:
            source = message["dead_letter_source"]["name"]
            print(f"  dead letter of {source} after {message['dead_letter_receives']} receives")
        if "last_error" in message:
            error = message["last_error"]
            print(f"  last error  {printable(': '.join(part for part in (error['type'], error['text']) if part))}")
        body = message["body"]
        print(f"  body    {printable(body[:_BODY_SHOWN])}{' ...' if len(body) > _BODY_SHOWN else ''}")


def event_table(events: Iterable[Mapping[str, Any]]) -> None:
    """Events, one a line, with the ids of their messages."""
    rows = [[*_event_row(event, event["kind"]), event["message"] or ""] for event in events]
    table([*_EVENT_HEADS, "message"], rows)


def run_table(found: Iterable[Run]) -> None:
    """Events of one message, with a run of repeated events in one line."""
    rows = []
    for run in found:
        kinds = " + ".join(event["kind"] for event in run.events[: run.length])
        if run.times > 1:
            kinds += f", {run.times} times in {duration(run.span_us)}"
        row = _event_row(run.events[0], kinds)
        held_us = run.events[-1]["held_us"]
        row[_HELD] = "" if held_us is None else duration(held_us)
        rows.append(row)
    table(_EVENT_HEADS, rows)


_EVENT_HEADS: Final = ["offset", "at (UTC)", "event", "queue", "attempt", "lease", "held", "by", "why"]
_HELD: Final = _EVENT_HEADS.index("held")


def _event_row(event: Mapping[str, Any], kind: str) -> list[object]:
    return [
        event["offset"],
        instant(event["at"]),
        kind.replace("_", " "),
        event["queue"] or "",
        "" if event["attempt"] is None else event["attempt"],
        duration(event["lease_us"]) if event["lease_us"] is not None else "",
        duration(event["held_us"]) if event["held_us"] is not None else "",
        " ".join(event[name] for name in ("protocol", "principal", "client") if event[name]),
        _why(event["kind"], event["detail"] or {}),
    ]


def _why(kind: str, detail: Mapping[str, Any]) -> str:
    """The important part of an event's detail."""
    if kind in {"purged", "queue_deleted"}:
        return f"with {detail['count']} messages"
    error = ": ".join(detail[name] for name in ("error_type", "error") if detail.get(name))
    if kind == "dead_lettered":
        times = detail.get("receives")
        return ", ".join(part for part in (f"after {times} receives" if times else "", error) if part)
    return error or str(detail.get("reason") or detail.get("part", ""))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns for a person."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(*heads, box=SIMPLE_HEAD, pad_edge=False)
    for column in shown.columns:
        column.no_wrap = column.header == "message"  # to be copied
    for row in rows:
        cells = [Text(printable(str(cell)), justify="right" if isinstance(cell, int) else "left") for cell in row]
        shown.add_row(*cells)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_PIPED)
    console.print(shown)


def printable(text: str) -> str:
    """The text with all invisible characters but blanks escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def instant(instant_us: int | None) -> str:
    """UTC to the millisecond; `never` for None."""
    if instant_us is None:
        return "never"
    try:
        return datetime.fromtimestamp(instant_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):
        return "never"


def duration(duration_us: int) -> str:
    """In the largest unit that keeps it readable: 30 s, 4 d, 1.5 h."""
    for unit_us, name in _UNITS:
        if abs(duration_us) >= unit_us:
            return f"{duration_us / unit_us:.3g} {name}"
    return f"{duration_us} us" if duration_us else "0 s"
