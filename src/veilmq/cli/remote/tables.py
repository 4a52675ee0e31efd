"""Prints queues, messages and events for people, or as JSON.

Strategy: in a trace, repeated events of one message become one line with a count and a time span (`runs`). Events are
equal if everything but their times and lease lengths is. A run is one event or a sequence of up to three (an extension
that stores a checkpoint is two events) that repeats at least three times without a gap. Any kind of event is folded.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from veilmq.cli.output import duration, instant, print_json, printable, table
from veilmq.model.wording import counted, short_client

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

_LENGTH_MAX: Final = 3
"""Longest sequence that is recognized as repeating."""
_RATED: Final = ("sent", "received", "deleted")
_TIMES_MIN: Final = 3
_ALIKE: Final = ("kind", "account", "region", "queue", "attempt", "protocol", "principal", "client", "detail")
_BODY_SHOWN: Final = 400
_MESSAGE_OPTIONAL: Final = {"group", "type", "waits for"}
_EVENT_HEADS: Final = ["offset", "at (UTC)", "event", "queue", "attempt", "lease", "held", "by", "why"]
_HELD: Final = _EVENT_HEADS.index("held")
_QUEUE_SPARE: Final = ["retention", "dead letters to", "timeout", "delayed", "oldest", "in flight", "region", "account"]
"""Columns that a narrow terminal does without, the least needed first; so the next."""
_EVENT_SPARE: Final = ["by", "held", "lease", "attempt", "why", "offset", "at (UTC)", "queue"]


class Run(NamedTuple):
    """Events shown in one line: a repeated sequence of `length` events, or one event."""

    events: Sequence[Mapping[str, Any]]
    length: int = 1

    @property
    def times(self) -> int:
        """How often the sequence occurs."""
        return len(self.events) // self.length

    @property
    def span_us(self) -> int:
        """From the first event to the last."""
        return int(self.events[-1]["at"]) - int(self.events[0]["at"])


def runs(events: Sequence[Mapping[str, Any]]) -> list[Run]:
    """All events, in their order."""
    keys = [tuple(repr(event.get(name)) for name in _ALIKE) for event in events]
    found, at = [], 0
    while at < len(events):
        length, count = _longest(keys, at)
        found.append(Run(events[at : at + length * count], length))
        at += length * count
    return found


def _longest(keys: list[tuple[str, ...]], at: int) -> tuple[int, int]:
    """The longest run from `at` on: (length of the sequence, repetitions); (1, 1) if nothing repeats."""
    best = (1, 1)
    for length in range(1, _LENGTH_MAX + 1):
        pattern, count = keys[at : at + length], 1
        while keys[at + count * length : at + (count + 1) * length] == pattern:
            count += 1
        if count >= _TIMES_MIN and length * count > best[0] * best[1]:
            best = (length, count)
    return best


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
        if "rates" in queue:
            row[4:4] = [f"{queue['rates']['per_second'][name]:g}" for name in _RATED]
        rows.append([queue["account"], queue["region"], *row] if whose else row)
    if rows and len(rows[0]) > len(heads) + 2 * whose:
        heads[4:4] = [f"{name}/s" for name in _RATED]
    table(["account", "region", *heads] if whose else heads, rows, _QUEUE_SPARE)


def message_blocks(messages: Iterable[Mapping[str, Any]], *, whole: bool = False) -> None:
    """Each message, with its handle, to paste into the next command, or with its queue, its state and its holder.
    whole: the bodies are not cut."""
    for message in messages:
        times = f"received {counted(message['receive_count'], 'time')}"
        print(f"message {message['id']}  sent {instant(message['sent'])} UTC  {times}")
        if "handle" in message:
            print(f"  handle  {message['handle']}")
            print(f"  until   {instant(message['due'])} UTC")
        elif "state" in message:
            until = f" until {instant(message['due'])} UTC" if message["state"] in {"in flight", "delayed"} else ""
            print(f"  queue   {message['account']}/{message['region']}/{message['name']}")
            retries = ", waits for its retry" if message.get("retries") else ""
            print(f"  state   {message['state']}{until}{retries}, expires {instant(message['expires'])} UTC")
        if "blocked_by" in message:
            print(f"  blocked by  {message['blocked_by']['id']} of its group, {message['blocked_by']['state']}")
        if "holder" in message:
            holder = message["holder"]
            print(f"  last received by  {printable(' '.join(filter(None, (holder['principal'], holder['client']))))}")
        for name in ("group", "type", "deduplication_id"):
            if name in message:
                print(f"  {name}  {printable(message[name])}")
        for attribute in message.get("attributes", ()):
            name, value = printable(attribute["name"]), printable(attribute["value"])
            print(f"  attribute  {name} = {value} ({printable(attribute['type'])})")
        if "dead_letter_receives" in message:
            receives = message["dead_letter_receives"]  # 0: nobody received it; the server pushed it
            after = f" after {counted(receives, 'receive')}" if receives else ""
            print(f"  dead letter of {message['dead_letter_source']['name']}{after}")
        if "last_error" in message:
            error = message["last_error"]
            print(f"  last error  {printable(': '.join(part for part in (error['type'], error['text']) if part))}")
        body = message.get("body", message.get("body_base64"))
        if body is not None:
            is_cut = len(body) > _BODY_SHOWN and not whole
            print(f"  body    {printable(body[:_BODY_SHOWN] + ' ...' if is_cut else body)}")


def message_table(messages: Iterable[Mapping[str, Any]]) -> None:
    """Messages of a queue, one a line; if any of them are blocked, with the messages that they wait for."""
    rows = [
        [
            each["id"],
            "blocked" if "blocked_by" in each else each["state"],
            instant(each["sent"]),
            each["receive_count"],
            "" if each["state"] == "visible" else instant(each["due"]),
            each["body_bytes"],
            each.get("group", ""),
            each.get("type", ""),
            each.get("blocked_by", {}).get("id", ""),
        ]
        for each in messages
    ]
    heads = ["message", "state", "sent (UTC)", "receives", "until (UTC)", "bytes", "group", "type", "waits for"]
    kept = [at for at, head in enumerate(heads) if head not in _MESSAGE_OPTIONAL or any(row[at] for row in rows)]
    heads, rows = [heads[at] for at in kept], [[row[at] for at in kept] for row in rows]
    table(heads, rows, ["bytes", "until (UTC)", "receives", "type", "group", "sent (UTC)"])


def event_table(events: Iterable[Mapping[str, Any]]) -> None:
    """Events, one a line, with the ids of their messages."""
    rows = [[*_event_row(event, event["kind"]), event["message"] or ""] for event in events]
    table([*_EVENT_HEADS, "message"], rows, _EVENT_SPARE)


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
    table(_EVENT_HEADS, rows, ["offset", "queue", "lease", "attempt", "held"])


def _event_row(event: Mapping[str, Any], kind: str) -> list[object]:
    return [
        event["offset"],
        instant(event["at"]),
        kind.replace("_", " "),
        event["queue"] or "",
        "" if event["attempt"] is None else event["attempt"],
        duration(event["lease_us"]) if event["lease_us"] is not None else "",
        duration(event["held_us"]) if event["held_us"] is not None else "",
        " ".join(filter(None, (event["protocol"], event["principal"], short_client(event["client"] or "")))),
        _why(event["kind"], event["detail"] or {}),
    ]


def _why(kind: str, detail: Mapping[str, Any]) -> str:
    """The important part of an event's detail."""
    if kind in {"purged", "queue_deleted"}:
        return f"with {counted(detail['count'], 'message')}"
    error = ": ".join(detail[name] for name in ("error_type", "error") if detail.get(name))
    if kind == "dead_lettered":
        times = detail.get("receives")
        return ", ".join(part for part in (f"after {counted(times, 'receive')}" if times else "", error) if part)
    return error or str(detail.get("reason") or detail.get("part", ""))


def failure_text(task: Mapping[str, Any]) -> str:
    """Why a job or a move task failed; if a queue is missing, which one."""
    if task["failure"] != "queue missing":
        return str(task["failure"] or "damaged")
    missing = task["destination"]
    return f"queue missing: {'one that messages came from' if missing is None else missing['name']}"


def failure_advice(job: Mapping[str, Any]) -> str:
    """How to find the queue that a job lacks, if it does not say so itself."""
    is_unnamed = (job["failure"], job["destination"]) == ("queue missing", None)
    name = job["queue"]["name"]
    advice = f"`veilmq peek {name}` shows where messages came from, `veilmq queues list` which queues there are."
    return advice if is_unnamed else ""


def show_list(
    asked: "Asked",
    ask: Callable[[str, str | None], Iterable[Mapping[str, Any]]],
    table: Callable[[list[Mapping[str, Any]]], None],
    noun: str,
    everything: bool,
) -> None:
    """Print the list; if it is empty, say so, and whether the account or region is the reason. Raises Failure.

    ask: lists an account and region; `*` and None mean all.
    """
    found = ask("*", None) if everything else ask(asked.account, asked.region)
    is_empty = True
    if asked.as_json:
        for each in found:
            is_empty = False
            print_json(each)
    elif rows := list(found):
        is_empty = False
        table(rows)
    if is_empty:
        why = "" if everything else asked.why_nothing(ask)
        if why or not asked.as_json:
            print(f"no {noun}" + (f": {why}" if why else ""), file=sys.stderr)
