"""Commands that look: at messages in any state, at what happened to one, and at the history.

Strategy: functions of the context (`Asked`), to which `veilmq.cli.remote` adds the common options. Nothing is leased.

`veilmq events` prints the history and follows it across restarts of the server. An offset is all that a reader must
remember, so a follower asks a new access for the same offset until one answers. An incomplete piece is not printed, and
a printed one is not requested again. The first answer must come at once. Afterwards the command waits for the server,
unless waiting cannot help.
"""

import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.failures import Exit, Failure, Unreachable
from veilmq.cli.options import OfGroup, OfType, Older, Queue, Receives, Text, filter_of, queue_names
from veilmq.cli.output import instant, print_json, printable, tamed
from veilmq.cli.pipeline import export_events
from veilmq.cli.remote import command_of
from veilmq.model.wording import counted

if TYPE_CHECKING:
    from veilmq.cli.access import Piece
    from veilmq.cli.access.http import HttpAccess
    from veilmq.cli.remote import Asked

_SCAN_MAX: Final = 100_000
_FOLLOW_S: Final = 20.0
_PAUSE_S: Final = 0.5
_PIECE: Final = 10_000
_PIECE_MAX: Final = 320_000
"""Offsets searched at once when few events match."""


def list_messages(
    asked: "Asked",
    queue: Queue,
    hidden: Annotated[bool, typer.Option("--hidden", help="Only delayed messages and those in flight.")] = False,
    message_type: OfType = None,
    group: OfGroup = None,
    older: Older = None,
    receives: Receives = 0,
    text: Text = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="List at most N.")] = 100,
    scan: Annotated[int, typer.Option("--scan", metavar="N", min=1, help="Search at most N messages.")] = _SCAN_MAX,
) -> None:
    """List messages of a queue without their bodies."""
    from veilmq.admin.api.inputs import PAGE_MAX

    given = {"state": "hidden" if hidden else "visible", "limit": min(limit, PAGE_MAX)}
    given |= filter_of(message_type, group, older, receives, text)
    found: list[dict[str, Any]] = []
    looked_at, is_stopped, is_cut = 0, False, False
    for page in asked.access.messages(asked.queue(queue), given):
        left = limit - len(found)
        found += page["messages"][:left]
        looked_at += page["looked_at"]
        is_stopped = looked_at >= scan and page["after"] is not None
        is_cut = page["after"] is not None or len(page["messages"]) > left
        if is_stopped or len(found) == limit:
            break
    if asked.as_json:
        for message in found:
            print_json(message)
    elif found:
        from veilmq.cli.remote.tables import message_table

        message_table(found)
    if is_stopped and len(found) < limit:
        print(f"stopped after {counted(looked_at, 'message')}: --scan N looks at more", file=sys.stderr)
    elif is_cut and len(found) == limit:
        print(f"there may be more than these {limit}: --limit N lists more", file=sys.stderr)
    elif not found and not asked.as_json:
        print("no such message", file=sys.stderr)


_ID: Final = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_AnyId = Annotated[
    str, typer.Argument(metavar="MESSAGE_ID", help="Its id, or its deduplication id.", show_default=False)
]
_SentTo = Annotated[
    str | None,
    typer.Option(
        "--queue",
        metavar="QUEUE",
        help="It is or was in this queue; by a deduplication id: sent to it.",
        autocompletion=queue_names,
    ),
]


def _looked_up(
    asked: "Asked",
    given: str,
    queue: str | None,
    ask: Callable[[str], dict[str, Any]],
    is_known: Callable[[dict[str, Any]], Any],
) -> dict[str, Any]:
    """What `ask` says of a message, given its id or, if none is known by that, its deduplication id. Raises Failure.

    queue: one that is known by its id comes first only if it is or was there: a bridge makes ids deduplication ids."""
    if not given:
        raise Failure(Exit.USAGE, "MESSAGE_ID: expected an id, not an empty text")
    key = None if queue is None else str(asked.queue(queue))
    found = ask(given) if _ID.fullmatch(given) else None
    queues = set[str]() if key is None or found is None else _queues_of(asked, found, key)
    if found is not None and is_known(found) and (key is None or key in queues):
        return found
    sends = asked.access.sends(given, key)
    sent = sends["messages"]
    if len(sent) == 1:
        return ask(sent[0]["message"])
    if sent:
        from veilmq.cli.output import table

        if asked.as_json:
            for each in sent:
                print_json(each)
        else:
            rows = [
                [each["message"], each["name"], instant(each["sent"]), each["state"] or "not there"] for each in sent
            ]
            table(["message", "queue", "sent (UTC)", "state"], rows)
        raise Failure(Exit.WRONG, f"{len(sent)} messages have this deduplication id", "Name one of them by its id.")
    if found is not None and (key is None or not is_known(found)):
        return found
    if found is not None:
        where = ", ".join(sorted(queues))
        raise Failure(Exit.WRONG, f"message {given} is not in {queue}, and was not there", f"It is or was in {where}.")
    among = "" if sends["complete"] else f" among the last {counted(sends['scanned'], 'event')}"
    raise Failure(Exit.WRONG, f"no message has the deduplication id {given}{among}")


def _queues_of(asked: "Asked", found: Mapping[str, Any], sought: str) -> set[str]:
    """The queues where a message is or was. The history is asked only if it is not in the one that is sought."""
    named = [(each, each["name"]) for each in found.get("places", ())]
    queues = {f"{each['account']}/{each['region']}/{name}" for each, name in named}
    if sought in queues:
        return queues
    events = found["events"] if "events" in found else asked.access.trace(found["message"])["events"]
    return queues | {f"{each['account']}/{each['region']}/{each['queue']}" for each in events}


def find(
    asked: "Asked",
    message: _AnyId,
    queue: _SentTo = None,
    body: Annotated[bool, typer.Option("--body", help="Show the body; the history records who read it.")] = False,
) -> None:
    """Find a message by its id or deduplication id, in whatever state it is, and show all of it without a lease."""
    ask = partial(asked.access.message, bodies=body)
    found = _looked_up(asked, message, queue, ask, lambda shown: shown["places"] or shown["last"])
    if asked.as_json:
        print_json(found)
    elif found["places"]:
        from veilmq.cli.remote.tables import message_blocks

        message_blocks(found["places"])
    if not found["places"]:
        last = found["last"]
        if last is None:
            raise Failure(Exit.WRONG, f"no event of {message} among the last {found['scanned']}")
        raise Failure(Exit.WRONG, f"{message} is in no queue: {last['kind']} at {instant(last['at'])} UTC")


def trace(
    asked: "Asked",
    message: _AnyId,
    queue: _SentTo = None,
    everything: Annotated[bool, typer.Option("--all", help="A line for each event, also for repeated ones.")] = False,
) -> None:
    """Say what happened to one message, and show each event of it."""
    found = _looked_up(asked, message, queue, asked.access.trace, lambda shown: shown["events"])
    if asked.as_json:
        print_json(found)
    elif found["events"]:
        from veilmq.cli.remote.tables import Run, run_table, runs

        if found.get("story"):  # earlier releases have none
            print(printable(found["story"]["sentence"]))
        run_table([Run([event]) for event in found["events"]] if everything else runs(found["events"]))
    if not found["events"]:
        raise Failure(Exit.WRONG, f"no event of {message} among the last {found['scanned']}")
    if not found["complete"]:
        print("its send is no longer in the history, or too far back", file=sys.stderr)


def _kinds(incomplete: str) -> list[str]:
    """For the shell's completion."""
    from veilmq.model.events import Kind

    return [name for kind in Kind if (name := kind.name.lower()).startswith(incomplete)]


def print_events(
    asked: "Asked",
    start: Annotated[
        str, typer.Option("--from", metavar="OFFSET", help="An offset, `first`, `snapshot` or `next` (what comes).")
    ] = "first",
    last: Annotated[int | None, typer.Option("--last", metavar="N", min=1, help="Show the last N.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Show at most N.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C.")] = False,
    queue: Annotated[
        str | None,
        typer.Option("--queue", metavar="QUEUE", help="Only those of this queue.", autocompletion=queue_names),
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only these, say sent; may be repeated.", autocompletion=_kinds),
    ] = None,
    message: Annotated[str | None, typer.Option("--message", metavar="MESSAGE_ID", help="Only this message's.")] = None,
) -> None:
    """Print the history, oldest first."""
    if not re.fullmatch(r"\d{1,18}|first|next|snapshot", start):
        raise Failure(Exit.USAGE, f"--from: expected an offset, first, next or snapshot, not {start!r}")
    if last is not None and start != "first":
        raise Failure(Exit.USAGE, "--from and --last: give one of them")
    given = {"queue": _queue(asked, queue), "kind": ",".join(kinds or []), "message": message}
    wanted = {name: text for name, text in given.items() if text}
    # Without --follow, stop at the current end: a busy server's history grows for ever.
    end = asked.access.events("next", 1, 0.0, wanted).start
    left = sys.maxsize if limit is None else limit
    shown = 0
    if last is not None and wanted:
        found = _last(asked, last, end, wanted)[:left]
        _print(asked, found)
        shown = len(found)
        start, left = str(end), left - shown
    elif last is not None:
        start = str(max(asked.access.events("first", 1, 0.0).start, end - last))
    if follow:
        _follow(asked, start, left, wanted)
    elif not _show_until(asked, start, left, end, wanted) + shown and wanted:
        if not asked.as_json:
            print("no such events", file=sys.stderr)
        _report_unknown(asked, wanted)


def _show_until(asked: "Asked", start: str, left: int, end: int, wanted: Mapping[str, str]) -> int:
    """Print the events before offset `end`, at most `left`; return the number of lines."""
    at, shown = start, 0
    while left > 0 and at != str(end):
        piece = asked.access.events(at, _PIECE if wanted else min(left, _PIECE), 0.0, wanted)
        lines = piece.lines.splitlines(keepends=True)[:left]
        _print(asked, lines)
        shown += len(lines)
        if piece.following == piece.start or piece.following >= end:
            break
        left -= len(lines) if wanted else piece.following - piece.start
        at = str(piece.following)
    return shown


def _report_unknown(asked: "Asked", wanted: Mapping[str, str]) -> None:
    """Report a name that neither a queue nor an event has: it may be mistyped."""
    if "queue" not in wanted:
        return
    *place, name = wanted["queue"].split("/")
    account, region = place or ("*", None)
    if any(each["name"] == name for each in asked.access.queues(account, region, name)):
        return
    at, end = "first", asked.access.events("next", 1, 0.0).start
    while True:
        piece = asked.access.events(at, _PIECE_MAX, 0.0, {"queue": wanted["queue"]})
        if piece.lines:
            return
        if piece.following >= end or piece.following == piece.start:
            break
        at = str(piece.following)
    where = f" in account {account}, region {region}" if place else ""
    every = asked.advised("`veilmq queues list --all` shows all.")
    _notice(f"there is no queue {name}{where}, and no event of one in the history. {every}")


def _queue(asked: "Asked", name: str | None) -> str | None:
    """The queue filter: of all accounts and regions, unless one is named."""
    if name is None or asked.named == (None, None):
        return name
    return f"{asked.account}/{asked.region}/{name}"


def _last(asked: "Asked", count: int, end: int, wanted: Mapping[str, str]) -> list[bytes]:
    """The last `count` lines before offset `end`, searched backwards in growing pieces."""
    first = asked.access.events("first", 1, 0.0).start
    found: list[bytes] = []
    size = _PIECE
    while end > first and len(found) < count:
        begin = max(first, end - size)
        found = (_between(asked, begin, end, wanted) + found)[-count:]
        end, size = begin, min(size * 2, _PIECE_MAX)
    return found


def _between(asked: "Asked", begin: int, end: int, wanted: Mapping[str, str]) -> list[bytes]:
    lines: list[bytes] = []
    while begin < end:
        piece = asked.access.events(str(begin), min(end - begin, _PIECE), 0.0, wanted)
        lines += piece.lines.splitlines(keepends=True)
        begin = piece.following
    return lines


def _follow(asked: "Asked", start: str, left: int, wanted: Mapping[str, str]) -> None:
    follower = _Follower(asked, start, wanted)
    try:
        _report_unknown(asked, wanted)  # the follower has its offset already
        while left > 0:
            piece = follower.next(_PIECE if wanted else min(left, _PIECE))
            lines = piece.lines.splitlines(keepends=True)[:left]
            _print(asked, lines)
            left -= len(lines) if wanted else piece.following - piece.start
    except KeyboardInterrupt:  # the regular end of following
        return
    finally:
        follower.close()


class _Follower:
    """A follower's offset in the history, and its access."""

    def __init__(self, asked: "Asked", start: str, wanted: Mapping[str, str]) -> None:
        """Raises Failure, also if no server answers now."""
        self._asked, self._wanted = asked, wanted
        self._access: HttpAccess | None = None
        # `next` would mean another offset after a restart.
        piece = self._ask(start, 1, 0.0)
        self._offset, self._epoch = piece.start, piece.epoch

    def next(self, limit: int) -> "Piece":
        """The next events, up to `limit` offsets; may be empty. Raises Failure if waiting cannot help."""
        try:
            piece = self._ask(str(self._offset), limit, _FOLLOW_S)
        except Unreachable:
            piece = self._await(limit)
        if piece.epoch != self._epoch:
            raise Failure(
                Exit.WRONG,
                f"the server has another history now, of a restored backup; the old one was read up to {self._offset}",
                "Begin again with --from first, or with --from next.",
            )
        self._offset = piece.following
        return piece

    def _await(self, limit: int) -> "Piece":
        """Ask until a server answers. The first failure is not reported: perhaps only the connection had ended."""
        reported = False
        while True:
            self.close()
            try:
                piece = self._ask(str(self._offset), limit, 0.0)
            except Unreachable as failure:
                if not reported:
                    _notice(f"{failure}: waiting for it, to go on from offset {self._offset}")
                reported = True
                time.sleep(_PAUSE_S)
                continue
            if reported:
                _notice(f"the server is back: continuing from offset {self._offset}")
            return piece

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._access is not None:
            self._access.close()
        self._access = None

    def _ask(self, start: str, limit: int, follow_s: float) -> "Piece":
        if self._access is None:
            self._access = self._asked.again()
        return self._access.events(start, limit, follow_s, self._wanted)


def _notice(message: str) -> None:
    print(f"veilmq: {message}", file=sys.stderr, flush=True)


def _print(asked: "Asked", lines: list[bytes]) -> None:
    if not lines:
        return
    if asked.as_json:
        sys.stdout.write(tamed(b"".join(lines).decode()))
    else:
        from veilmq.cli.remote.tables import event_table

        event_table([json.loads(line) for line in lines])
    sys.stdout.flush()


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("messages")(command_of(list_messages))
    app.command("find")(command_of(find))
    app.command("trace")(command_of(trace))
    events = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
    events.callback()(_alone(command_of(print_events)))
    events.command("export")(export_events)
    app.add_typer(events, name="events")


def _alone(command: Callable[..., None]) -> Callable[..., None]:
    """The group's default command."""

    def callback(context: typer.Context, **given: Any) -> None:
        if context.invoked_subcommand is None:
            command(**given)

    own = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    signature = inspect.signature(command)
    callback.__doc__ = command.__doc__
    callback.__signature__ = inspect.Signature([own, *signature.parameters.values()])  # type: ignore[attr-defined]
    callback.__annotations__ = {"context": typer.Context} | command.__annotations__
    return callback
