"""Commands on messages: send, receive, peek, extend and delete; and `veilmq templates`, messages that are kept to be
sent again.

Strategy: functions of the context (`Asked`), to which the package adds the common options. `send --lines` sends in
batches, and says how many were sent if it ends early.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.failures import Exit, Failure, Unreachable
from veilmq.cli.options import Delay, Queue, Wait, duration_us, pairs
from veilmq.cli.output import in_json, print_json, printable
from veilmq.model.wording import counted

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

BATCH: Final = 100
_BATCH_BYTES: Final = 4 * 1024 * 1024
"""Of JSON: half of what the admin port takes. A single body may be larger."""
Ttl = Annotated[str | None, typer.Option("--ttl", metavar="TIME", help="Its time to live, if not the queue's.")]
Priority = Annotated[int | None, typer.Option("--priority", metavar="N", help="1 (first) to 16.")]
Group = Annotated[str | None, typer.Option("--group", metavar="NAME", help="Its group.")]
Type = Annotated[str | None, typer.Option("--type", metavar="NAME", help="What kind of message.")]
Attributes = Annotated[
    list[str] | None, typer.Option("--attribute", metavar="NAME=VALUE", help="An attribute; may be repeated.")
]
TemplateName = Annotated[str, typer.Argument(metavar="NAME", help="The template's name.", show_default=False)]
Handles = Annotated[
    list[str], typer.Argument(metavar="HANDLE...", help="As `receive` printed them.", show_default=False)
]


def send(
    asked: "Asked",
    queue: Queue,
    body: Annotated[
        str | None, typer.Argument(metavar="BODY", help="Its text; left out or -: from stdin.", show_default=False)
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of stdin, up to LF or CRLF, is a message.")] = False,
    template: Annotated[
        str | None, typer.Option("--template", metavar="NAME", help="Start from this template; options override it.")
    ] = None,
    delay: Delay = None,
    ttl: Ttl = None,
    priority: Priority = None,
    group: Group = None,
    deduplication_id: Annotated[
        str | None,
        typer.Option("--deduplication-id", metavar="ID", help="A FIFO queue drops a second one within 5 minutes."),
    ] = None,
    message_type: Type = None,
    attributes: Attributes = None,
) -> None:
    """Send a message, or one for each line of stdin."""
    shared = _members(delay, ttl, priority, group, message_type, attributes) | {"deduplication_id": deduplication_id}
    if template is not None:
        kept = _kept(asked, queue, template)
        shared = kept | {name: value for name, value in shared.items() if value not in (None, [])}
        body = kept["body"] if body is None and not lines else body
    if lines:
        if body is not None:
            raise Failure(Exit.USAGE, "--lines reads stdin: leave BODY out")
        bodies: Iterable[str] = (line.removesuffix("\r\n").removesuffix("\n") for line in _from_stdin(lines=True))
    else:
        bodies = _from_stdin(lines=False) if body is None or body == "-" else [body]
    count = refused = under_way = 0
    try:
        for batch in _batches(_watched(bodies, lines)):
            under_way = len(batch)
            shown = asked.run("send", queue, messages=[shared | {"body": each} for each in batch])["messages"]
            count, under_way = count + len(batch), 0
            refused += _report(asked, shown, None if lines else "sent {id}")
    except (KeyboardInterrupt, Failure) as end:
        if lines:
            what = "failure" if isinstance(end, Failure) else "interrupt"
            is_unsure = under_way and isinstance(end, KeyboardInterrupt | Unreachable)
            unsure = f", and perhaps the next {under_way}" if is_unsure else ""
            print(f"sent {counted(count - refused, 'message')} before the {what}{unsure}", file=sys.stderr)
        raise
    if lines and not asked.as_json:
        print(f"sent {counted(count - refused, 'message')}")
    if refused:
        raise Failure(Exit.WRONG, f"{refused} of {count} messages were refused")


def _members(
    delay: str | None,
    ttl: str | None,
    priority: int | None,
    group: str | None,
    message_type: str | None,
    attributes: list[str] | None,
) -> dict[str, Any]:
    """What these options say of a message, by the names of the API. Raises Failure."""
    return {
        "delay_us": None if delay is None else duration_us("--delay", delay),
        "ttl_us": None if ttl is None else duration_us("--ttl", ttl),
        "priority": priority,
        "group": group,
        "type": message_type,
        "attributes": [{"name": name, "value": value} for name, value in pairs("--attribute", attributes or [])],
    }


def _kept(asked: "Asked", queue: str, name: str) -> dict[str, Any]:
    """The message of that template. Raises Failure."""
    for each in asked.run("templates", queue)["templates"]:
        if each["name"] == name:
            return dict(each["message"])
    raise Failure(Exit.WRONG, f"{queue} has no template {name!r}", f"See `veilmq templates list {queue}`.")


def list_templates(asked: "Asked", queue: Queue) -> None:
    """List the messages that are kept to be sent again."""
    found = asked.run("templates", queue)["templates"]
    if asked.as_json:
        for each in found:
            print_json(each)
        return
    from veilmq.cli.output import instant, table

    rows = []
    for each in found:
        message = each["message"]
        labels = [message[name] or "" for name in ("type", "group")]
        rows.append([each["name"], *labels, instant(each["kept"]), each["by"], message["body"]])
    table(["name", "type", "group", "kept (UTC)", "by", "body"], rows)


def keep_template(
    asked: "Asked",
    queue: Queue,
    name: TemplateName,
    body: Annotated[str, typer.Argument(metavar="BODY", help="Its text; -: from stdin.", show_default=False)],
    delay: Delay = None,
    ttl: Ttl = None,
    priority: Priority = None,
    group: Group = None,
    message_type: Type = None,
    attributes: Attributes = None,
) -> None:
    """Keep a message under a name, to be sent by `send --template`; it replaces the one of that name."""
    text = next(iter(_from_stdin(lines=False))) if body == "-" else body
    message = _members(delay, ttl, priority, group, message_type, attributes) | {"body": text}
    shown = asked.run("keep_template", queue, name=name, message=message)
    print(in_json(shown) if asked.as_json else f"{'kept' if shown['new'] else 'replaced'} {name}")


def drop_template(asked: "Asked", queue: Queue, name: TemplateName) -> None:
    """Delete a message that is kept."""
    shown = asked.run("drop_template", queue, name=name)
    print(in_json(shown) if asked.as_json else f"dropped {name}")


def receive(
    asked: "Asked",
    queue: Queue,
    count: Annotated[int, typer.Option("--count", metavar="N", help="At most so many messages.")] = 1,
    lease: Annotated[str | None, typer.Option("--lease", metavar="TIME", help="Length of the lease.")] = None,
    wait: Wait = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete them as soon as they are printed.")] = False,
) -> None:
    """Receive messages: lease them, and print them with their handles."""
    lease_us = None if lease is None else duration_us("--lease", lease)
    wait_us = None if wait is None else duration_us("--wait", wait)
    messages = asked.run("receive", queue, count=count, lease_us=lease_us, wait_us=wait_us)["messages"]
    _show_messages(asked, messages, whole=delete)
    if delete and messages:
        sys.stdout.flush()
        results = asked.run("delete", queue, handles=[message["handle"] for message in messages])["results"]
        if any("error" in each for each in results):
            raise Failure(Exit.WRONG, "some of them could not be deleted and will come back")


def peek(
    asked: "Asked",
    queue: Queue,
    count: Annotated[int, typer.Option("--count", metavar="N", help="At most so many messages.")] = 10,
) -> None:
    """Look at visible messages without a lease."""
    _show_messages(asked, asked.run("peek", queue, count=count)["messages"])


def delete(asked: "Asked", queue: Queue, handles: Handles) -> None:
    """Delete received messages by their handles."""
    results = asked.run("delete", queue, handles=handles)["results"]
    if _report(asked, results, "deleted"):
        raise Failure(Exit.WRONG, "not all of them were deleted")


def extend(
    asked: "Asked",
    queue: Queue,
    handles: Handles,
    lease: Annotated[str, typer.Option("--lease", metavar="TIME", help="New length; 0 releases.", show_default=False)],
) -> None:
    """Set the end of leases, or release them."""
    results = asked.run("extend", queue, handles=handles, lease_us=duration_us("--lease", lease))["results"]
    if _report(asked, results, "extended"):
        raise Failure(Exit.WRONG, "not all of them were extended")


def _show_messages(asked: "Asked", messages: list[dict[str, Any]], *, whole: bool = False) -> None:
    if asked.as_json:
        for message in messages:
            print_json(message)
    elif messages:
        from veilmq.cli.remote.tables import message_blocks

        message_blocks(messages, whole=whole)
    else:
        print("nothing visible", file=sys.stderr)


def _report(asked: "Asked", shown: list[dict[str, Any]], line: str | None) -> int:
    """Print the result of each; return how many were refused."""
    for each in shown:
        if asked.as_json:
            print_json(each)
        elif "error" in each:
            print(f"refused: {printable(each['message'])}", file=sys.stderr)
        elif line is not None:
            print(line.format(**each))
    return sum("error" in each for each in shown)


def _from_stdin(*, lines: bool) -> Iterator[str]:
    """All of stdin as one text, or line by line. Raises Failure."""
    try:
        texts: Iterable[str] = sys.stdin if lines else [sys.stdin.read()]
        for text in texts:
            text.encode()
            yield text
    except UnicodeError:
        advice = "What was read before it may have been sent." if lines else ""
        raise Failure(Exit.USAGE, "stdin: expected UTF-8", advice) from None


def _batches(bodies: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    batch_bytes = 0
    for body in bodies:
        size = len(json.dumps(body))
        if len(batch) == BATCH or (batch and batch_bytes + size > _BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(body)
        batch_bytes += size
    if batch:
        yield batch


def _watched(bodies: Iterable[str], lines: bool) -> Iterable[str]:
    """The same bodies, with a progress bar on a terminal."""
    if not lines or not sys.stderr.isatty():
        return bodies
    from rich.console import Console
    from rich.progress import track

    return track(bodies, "sending", console=Console(stderr=True))
