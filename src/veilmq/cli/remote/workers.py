"""`veilmq queues holders`: who holds the messages of a queue, and who waits for some.

Strategy: functions of the context (`Asked`), to which the package adds the common options. Nothing is leased.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.output import duration, instant, print_json, printable, table
from veilmq.cli.remote.options import Queue

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

_SCAN_MAX: Final = 100_000
"""So many delayed and leased messages are looked at."""


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
        print(f"there may be more: this looked at {looked_at} messages", file=sys.stderr)
    waiters = found["waiters"]
    print(f"receives that wait: {waiters['count']}")
    for each in waiters["clients"]:
        print(f"  {each['count']} of {client_text(each)}")


def _held(each: Mapping[str, Any], now: int) -> list[object]:
    since, due = each["granted"], each["due"]
    ended = "" if due > now else " (ended)"
    held = duration(max(0, now - since))
    return [each["id"], client_text(each["holder"]), instant(since), held, instant(due) + ended, each["receive_count"]]


def client_text(client: Mapping[str, Any]) -> str:
    """A client in one line: where it runs or how it calls itself, and its access key."""
    if client["host"] is not None:
        text = f"{client['host']} pid {client['process']}"
    else:
        text = client["name"] or client["client"] or "a client without a name"
    return printable(f"{text} ({client['protocol']}, {client['principal']})")
