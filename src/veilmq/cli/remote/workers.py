"""`veilmq workers`, `accounts`, `queues show`, `holders` and `failures`: who works, holds messages and waits, what that
holds back, who may do what, and why some failed; and `veilmq top`: queues and workers in a terminal, again and again.

Strategy: functions of the context (`Asked`), to which the package adds the common options. Nothing is leased.

A look of `top` is two questions to the admin port; `screen` makes of it what is drawn, and knows no terminal. On a
terminal rich draws it in place until q or Ctrl-C; otherwise, or with `--once`, it is printed once. A server that does
not answer is said in the first line, and asked again. Only the first `QUEUES_MAX` queues by name are looked at, which
the last line says then.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.options import Everything, Prefix, Queue, duration_us, queue_names, seconds
from veilmq.cli.output import LEFT_OUT, duration, fitted_columns, instant, print_json, printable, table
from veilmq.model.instant import MINUTE_US
from veilmq.model.wording import counted, short_client

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from veilmq.cli.remote import Asked

_QUEUES_NAMED: Final = 3
_FAILURE_MINUTES_MAX: Final = 1_440
_SCAN_MAX: Final = 100_000
"""So many delayed and leased messages are looked at."""
QUEUES_MAX: Final = 1_000
_ROWS_MAX: Final = 20
"""Queues shown where there is no screen to fill."""
_FRAME_ROWS: Final = 9
"""Lines of a screen that are no rows: the first line, two heads with their rules, and blanks."""
_MINUTES: Final = 1
"""Rates are of the last minute."""
_RATED: Final = ("sent", "received", "deleted")
_QUEUE_HEADS: Final = ["queue", "visible", "in flight", "delayed", "oldest", "sent/s", "received/s", "deleted/s"]
_TIME_OF_DAY: Final = slice(11, 19)
"""Of an instant: the time to the second. Workers are of the last hour."""
_SPARE: Final = ("a minute", "waits", "received")
"""Columns of `workers` that a narrow terminal can do without; the first one not if that is sorted by."""
_QUEUE_SPARE: Final = ("received/s", "delayed", "sent/s", "deleted/s")
_WORKER_SPARE: Final = ("deleted/min", "waits")
_WORKER_HEADS: Final = ["worker", "holds", "oldest lease", "waits", "deleted/min", "failed", "ended leases"]


def list_holders(
    asked: "Asked",
    queue: Queue,
    client: Annotated[str, typer.Option("--client", metavar="TEXT", help="Only with this in the client's name.")] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="At most so many.")] = 100,
) -> None:
    """List the messages of a queue that are in flight, with who holds each, and who waits to receive."""
    found: dict[str, Any] = {"holders": []}
    looked_at = 0
    for page in asked.access.holders(asked.queue(queue), client):
        looked_at += page["looked_at"]
        held = found["holders"] + page["holders"]
        found = page | {"holders": held[:limit], "looked_at": looked_at}
        if len(held) >= limit or looked_at >= _SCAN_MAX:
            found["after"] = found["after"] if len(held) <= limit else "more"
            break
    if asked.as_json:
        print_json(found)
        return
    if found["holders"]:
        rows = [_held(each, found["at"]) for each in found["holders"]]
        table(["message", "holder", "since (UTC)", "for", "until (UTC)", "receives"], rows)
    else:
        print("nothing is in flight" + (" there" if client else ""), file=sys.stderr)
    if found["after"] is not None:
        print(f"there may be more: this looked at {counted(looked_at, 'message')}", file=sys.stderr)
    waiters = found["waiters"]
    print(f"receives that wait: {waiters['count']}")
    for each in waiters["clients"]:
        print(f"  {each['count']} of {client_text(each)}")


def show_queue(
    asked: "Asked",
    queue: Queue,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="So many blocked groups, at most 1000.")] = 20,
) -> None:
    """Show what is in a queue and, of a FIFO queue, which groups wait behind held messages, and who holds those."""
    shown = asked.run("describe", queue)
    blocked = asked.access.blocked(asked.queue(queue), limit) if shown["settings"]["fifo"] else None
    if asked.as_json:
        print_json(shown | {"blocked": blocked})
        return
    counts, settings = shown["counts"], shown["settings"]
    behind = "" if blocked is None else f" ({blocked_text(blocked)})"
    print(f"{counts['visible']} visible{behind}, {counts['in_flight']} in flight, {counts['delayed']} delayed")
    redrive = settings["redrive"]
    dead = f", dead letters to {redrive['target']['name']}" if redrive else ""
    print(f"visibility timeout {duration(settings['visibility_timeout_us'])}{dead}")
    if blocked is not None and blocked["held"]:
        rows = [_blocked(each, blocked["at"]) for each in blocked["held"]]
        table(["group", "waiting", "for", "behind", "held by", "since (UTC)", "until (UTC)", "receives"], rows)


def blocked_text(blocked: Mapping[str, Any]) -> str:
    """How many messages are blocked, in how many groups."""
    if not blocked["messages"]:
        return "none blocked"
    least = "" if blocked["complete"] else "at least "
    groups = f"{blocked['groups']} group{'s' * (blocked['groups'] != 1)}"
    return f"{least}{blocked['messages']} blocked, in {groups}"


def _blocked(each: Mapping[str, Any], now: int) -> list[object]:
    head = each["message"]
    since = "" if head["holder"] is None else instant(head["granted"])
    waited = duration(max(0, now - each["since"]))
    place = [printable(each["group"]), each["messages"], waited, head["id"], holder_text(head)]
    return [*place, since, instant(head["due"]), head["receive_count"]]


def holder_text(message: Mapping[str, Any]) -> str:
    """Who holds a message that is delayed or in flight."""
    if message["holder"] is None:
        return "nobody: it is delayed"
    return "nobody: it waits for its retry" if message.get("retries") else client_text(message["holder"])


def list_failures(
    asked: "Asked",
    queue: Annotated[
        str | None, typer.Argument(metavar="[QUEUE]", help="A queue [all of the account].", autocompletion=queue_names)
    ] = None,
    last: Annotated[str, typer.Option("--last", metavar="TIME", help="How far back, at most 1d.")] = "1h",
    prefix: Prefix = "",
    everything: Everything = False,
) -> None:
    """List why messages of a queue, or of all, failed: by kind, type of error and alike first lines, with the newest
    message."""
    minutes = max(1, round(duration_us("--last", last) / MINUTE_US))
    if minutes > _FAILURE_MINUTES_MAX:
        raise Failure(Exit.USAGE, f"--last: expected at most 1d, not {last}")
    if queue is not None and (prefix or everything):
        raise Failure(Exit.USAGE, "--prefix and --all are for several queues: leave QUEUE out")
    if queue is not None:
        found = asked.access.failures(asked.queue(queue), minutes)
    else:
        account = "*" if everything else asked.account
        found = asked.access.all_failures({"minutes": minutes, "account": account, "prefix": prefix})
    if asked.as_json:
        print_json(found)
        return
    other = {kind: count for kind, count in found["other"].items() if count}
    if found["causes"]:
        heads = ["times", "what", "error (the newest)", "first (UTC)", "newest (UTC)", "message"]
        rows = [_failed(each) for each in found["causes"]]
        table(heads if queue is not None else [*heads, "queues"], rows)
    elif not other:
        print("nothing failed", file=sys.stderr)
    for kind, count in other.items():
        print(f"{count} more {kind.replace('_', ' ')}, of other causes")
    if found.get("stopped") is not None:
        print(f"there may be more before {instant(found['stopped'])} UTC: too much happened", file=sys.stderr)


def _failed(cause: Mapping[str, Any]) -> list[object]:
    row = [
        cause["count"],
        cause["kind"].replace("_", " "),
        ": ".join(part for part in (cause["error_type"], cause["error"]) if part),
        instant(cause["first"]),
        instant(cause["newest"]),
        cause["message"],
    ]
    if "queues" not in cause:
        return row
    named, more = cause["queues"][:_QUEUES_NAMED], cause["queues_count"] - _QUEUES_NAMED
    names = ", ".join(f"{each['name']} ({each['count']})" for each in named)
    return [*row, names + (f" and {more} more" if more > 0 else "")]


class Sort(StrEnum):
    """What comes first; see `veilmq.admin.app.accounts.ORDERS`, which costs an import."""

    SEEN = "seen"
    HOLDS = "holds"
    OLDEST = "oldest"
    RATE = "rate"
    FAILED = "failed"
    LEASE_EXPIRED = "lease_expired"


def list_workers(
    asked: "Asked",
    client: Annotated[str, typer.Option("--client", metavar="TEXT", help="Only with this in the client's name.")] = "",
    queue: Annotated[
        str | None, typer.Option("--queue", metavar="QUEUE", help="Only those that hold or wait for messages of it.")
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="Sort by the time last seen, or by a count.")] = Sort.SEEN,
    messages: Annotated[
        int, typer.Option("--messages", metavar="N", min=0, max=20, help="Name up to N messages that each holds.")
    ] = 0,
) -> None:
    """List the clients that received messages in the last hour: what each did, holds and waits for."""
    of = "" if queue is None else str(asked.queue(queue))
    found = asked.access.workers({"client": client, "queue": of, "sort": sort.value, "messages": messages})
    if asked.as_json:
        print_json(found)
        return
    heads = ["worker", "last seen (UTC)", "holds", "oldest lease", "waits", "received", "deleted", "a minute"]
    rows = [
        [
            client_text(each),
            "" if each["last_seen"] is None else instant(each["last_seen"])[_TIME_OF_DAY],
            each["holds"],
            "" if each["oldest_granted"] is None else duration(max(0, found["at"] - each["oldest_granted"])),
            each["waits"],
            each["received"],
            each["deleted"],
            f"{each['per_minute']['deleted']:g}",
            each["failed"],
            each["lease_expired"],
        ]
        for each in found["workers"]
    ]
    if rows:
        table([*heads, "failed", "ended leases"], rows, _SPARE[sort is Sort.RATE :])
        if messages:
            held = [
                [one["id"], one["queue"]["name"], client_text(each), instant(one["granted"]), instant(one["due"])]
                for each in found["workers"]
                for one in each["messages"]
            ]
            table(["message", "queue", "worker", "since (UTC)", "until (UTC)"], held)
    else:
        print("no worker was seen", file=sys.stderr)
    print(f"since {instant(found['since'])} UTC")
    if found["more"] or found["left_out"] or not found["holds_complete"]:
        print("not everything is shown: there are too many clients or leases", file=sys.stderr)


def list_accounts(asked: "Asked") -> None:
    """List the accounts with their keys, what these were granted, and how much each has of what it may have."""
    wanted = None if asked.named[0] is None else asked.account
    pages = list(asked.access.accounts())
    accounts = [each for page in pages for each in page["accounts"] if wanted in (None, each["id"])]
    if wanted is not None and not accounts:
        raise Failure(Exit.WRONG, f"--account: the server has no account {wanted}")
    found = pages[0] | {"accounts": accounts, "more": False, "after": None}
    if asked.as_json:
        print_json(found)
        return
    limits, names = found["limits"], ("queues", "topics", "subscriptions")
    rows = [
        [each["id"], each["home_region"], *(f"{each[name]} of {limits[name]}" for name in names)]
        for each in found["accounts"]
    ]
    table(["account", "home region", *names], rows)
    keys = [
        [each["id"], printable(key["id"]), what, "everything" if key["everything"] else _grants_text(key)]
        for each in found["accounts"]
        for what, member in (("key", "keys"), ("identity", "identities"))
        for key in each[member]
    ]
    if keys:
        table(["account", "key", "kind", "may"], keys)
    if not found["checks"]:
        print("development mode: any key is accepted, and may do everything", file=sys.stderr)


def _grants_text(key: Mapping[str, Any]) -> str:
    grants = (f"{', '.join(each['actions'])} on {', '.join(each['queues'])}" for each in key["grants"])
    return printable("; ".join(grants) or "nothing")


def _held(each: Mapping[str, Any], now: int) -> list[object]:
    since, due = each["granted"], each["due"]
    ended = "" if due > now else " (ended)"
    held = duration(max(0, now - since))
    return [each["id"], holder_text(each), instant(since), held, instant(due) + ended, each["receive_count"]]


def client_text(client: Mapping[str, Any]) -> str:
    """A client in one line: where it runs or how it calls itself, and its access key."""
    if client["protocol"] == "push":
        return "the server's pushes"
    if client["host"] is not None:
        text = f"{client['host']} pid {client['process']}"
    else:
        text = client["name"] or short_client(client["client"]) or "a client without a name"
    return printable(f"{text} ({client['protocol']}, {client['principal']})")


class Look(NamedTuple):
    """What one look found."""

    queues: list[dict[str, Any]]
    """The deepest first."""
    is_all: bool
    workers: Mapping[str, Any]


def look(asked: "Asked", everything: bool) -> Look:
    """Ask once. Raises Failure."""
    account, region = ("*", None) if everything else (asked.account, asked.region)
    found = list(islice(asked.access.queues(account, region, "", _MINUTES), QUEUES_MAX + 1))
    workers = asked.access.workers({"client": "", "queue": "", "sort": "holds", "messages": 0})
    deepest = sorted(found[:QUEUES_MAX], key=_depth, reverse=True)
    return Look(deepest, len(found) <= QUEUES_MAX, workers)


def _depth(queue: Mapping[str, Any]) -> tuple[int, int]:
    counts = queue["counts"]
    return counts["visible"] + counts["in_flight"] + counts["delayed"], queue.get("oldest_age_us") or 0


def screen(found: Look, rows_max: int, room: int, error: str = "", *, folds: bool = False) -> "RenderableType":
    """What is drawn of a look in `room` columns, with at most so many rows. folds: long names are folded, else cut."""
    from rich.console import Group
    from rich.text import Text

    workers = found.workers["workers"]
    of_workers = min(len(workers), max(1, rows_max // 2))
    of_queues = max(1, rows_max - of_workers)
    counts = [sum(queue["counts"][name] for queue in found.queues) for name in ("visible", "in_flight", "delayed")]
    head = (
        f"{instant(found.workers['at'])} UTC  {'' if found.is_all else 'first '}{counted(len(found.queues), 'queue')}  "
        f"{counts[0]} visible  {counts[1]} in flight  {counts[2]} delayed  {counted(len(workers), 'worker')}"
    )
    shown: list[RenderableType] = [Text(f"{head}  {printable(error)}".rstrip(), style="bold")]
    rows = [_queue_row(queue) for queue in found.queues[:of_queues]]
    queues, left_out = fitted_columns(_QUEUE_HEADS, rows, _QUEUE_SPARE, room, folds=folds)
    shown.append(queues)
    if workers:
        at = found.workers["at"]
        rows = [_worker_row(worker, at) for worker in workers[:of_workers]]
        drawn, more = fitted_columns(_WORKER_HEADS, rows, _WORKER_SPARE, room, folds=folds)
        shown.append(drawn)
        left_out += more
    if left_out:
        shown.append(Text(f"{LEFT_OUT}: {', '.join(left_out)}"))
    left = len(found.queues) - of_queues, len(workers) - of_workers
    if max(left) > 0:
        shown.append(Text(f"and {counted(max(0, left[0]), 'queue')}, {counted(max(0, left[1]), 'worker')} more"))
    if not found.is_all:
        shown.append(
            Text(f"of the first {QUEUES_MAX:,} queues by name; the deepest of all: veilmq queues worst --by depth")
        )
    return Group(*shown)


def _fitting(console: "Console", found: Look, error: str) -> "RenderableType":
    """The screen with as many rows as there is room for: folded heads and further lines take some."""
    drawn = screen(found, rows_max := max(2, console.height - _FRAME_ROWS), console.width, error)
    excess = len(console.render_lines(drawn, pad=False)) - console.height
    return drawn if excess <= 0 else screen(found, max(2, rows_max - excess), console.width, error)


def _queue_row(queue: Mapping[str, Any]) -> list[object]:
    counts, rates = queue["counts"], queue.get("rates")
    age = queue.get("oldest_age_us")
    return [
        queue["name"],
        counts["visible"],
        counts["in_flight"],
        counts["delayed"],
        "" if age is None else duration(age),
        *("" if rates is None else f"{rates['per_second'][name]:g}" for name in _RATED),
    ]


def _worker_row(worker: Mapping[str, Any], at: int) -> list[object]:
    granted = worker["oldest_granted"]
    return [
        client_text(worker),
        worker["holds"],
        "" if granted is None else duration(max(0, at - granted)),
        worker["waits"],
        f"{worker['per_minute']['deleted']:g}",
        worker["failed"],
        worker["lease_expired"],
    ]


def top(
    asked: "Asked",
    everything: Everything = False,
    once: Annotated[bool, typer.Option("--once", help="Print it once, also on a terminal.")] = False,
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="How often to look.")] = "2s",
) -> None:
    """Show queues and workers in the terminal, again and again: depths, ages, rates, leases. q ends it."""
    pause_s = max(0.1, seconds("--every", every))
    found = look(asked, everything)
    if asked.as_json:
        print_json({"queues": found.queues, "more": not found.is_all, "workers": found.workers})
        return
    from rich.console import Console

    console = Console(highlight=False)
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        print_once = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        print_once.print(screen(found, 2 * _ROWS_MAX, print_once.width, folds=True))
        return
    from rich.live import Live

    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        error = ""
        while True:
            live.update(_fitting(console, found, error), refresh=True)
            if pressed(pause_s):
                return
            try:
                found, error = look(asked, everything), ""
            except Failure as failure:
                error = f"no answer: {failure}"


@contextmanager
def _keys() -> "Iterator[Any]":
    """A function that waits so many seconds, and says whether q or Ctrl-C was pressed meanwhile."""
    import select
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def pressed(wait_s: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
        return bool(ready) and sys.stdin.read(1) in {"q", "Q", ""}

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
