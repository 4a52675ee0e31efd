"""Commands on messages: send, receive, peek, extend and delete; `veilmq quarantine`: list, export and drop the damaged
ones in it; and `veilmq jobs`: bulk acts on what a filter matches, carried out by the server.

Strategy: functions of the context (`Asked`), to which the package adds the common options. `send --lines` sends in
batches, and says how many were sent if it ends early. `quarantine drop --all` deletes what it listed before it asked,
so that a message that is quarantined meanwhile stays. `jobs --wait` asks for the job until it has ended; the server
goes on if the command is interrupted.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.failures import Exit, Failure, Unreachable
from veilmq.cli.options import (
    Delay,
    Everything,
    OfGroup,
    OfType,
    Older,
    Prefix,
    Queue,
    Receives,
    Text,
    Wait,
    Yes,
    confirm,
    duration_us,
    filter_of,
    message_ids,
    pairs,
    queue_names,
)
from veilmq.cli.output import counted, in_json, print_json, printable, write_new
from veilmq.cli.remote.tables import failure_advice, failure_text, show_list

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

_BATCH: Final = 100
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
    list[str], typer.Argument(metavar="HANDLE", help="As `receive` printed it; several at once.", show_default=False)
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
        if len(batch) == _BATCH or (batch and batch_bytes + size > _BATCH_BYTES):
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


def list_quarantined(asked: "Asked", prefix: Prefix = "", everything: Everything = False) -> None:
    """List damaged messages that nobody receives, with the MD5 of their bodies: when sent, and now."""
    show_list(
        asked,
        lambda account, region: asked.access.quarantined(account, region, prefix, bodies=False),
        _quarantine_table,
        "messages in quarantine",
        everything,
    )


def export_quarantined(
    asked: "Asked",
    prefix: Prefix = "",
    everything: Everything = False,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="A new file, mode 0600 [stdout].", readable=False)
    ] = None,
) -> None:
    """Write damaged messages whole as JSON lines, bodies in base64. They stay in quarantine."""
    account, region = ("*", None) if everything else (asked.account, asked.region)
    found = asked.access.quarantined(account, region, prefix, bodies=True)
    if to is None:
        count = 0
        for count, each in enumerate(found, 1):  # noqa: B007 the last one is the number of all
            print_json(each)
    else:
        try:
            count = write_new(to, map(in_json, found))
        except OSError as error:
            raise Failure(Exit.USAGE, f"--to {to}: {error.strerror}") from None
    print(f"exported {counted(count, 'message')}" + ("" if to is None else f" to {to}"), file=sys.stderr)


def drop_quarantined(
    asked: "Asked",
    queue: Queue,
    messages: Annotated[
        list[str] | None, typer.Argument(metavar="MESSAGE_ID...", help="Their ids.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All messages of the queue.")] = False,
    yes: Yes = False,
) -> None:
    """Delete damaged messages from quarantine, for good."""
    if bool(messages) == everything:
        raise Failure(Exit.USAGE, "name messages by their ids, or say --all", "See them with: veilmq quarantine list")
    ids = message_ids(messages or ())
    if everything:
        found = asked.access.quarantined(asked.account, asked.region, queue, bodies=False)
        ids = [each["id"] for each in found if each["name"] == queue]
        if not ids:
            asked.run("describe", queue)
            print(f"no message of {queue} is in quarantine", file=sys.stderr)
            return
    confirm(f"Delete {len(ids)} damaged messages of {queue} for good? `veilmq quarantine export` keeps them.", yes)
    refused = 0
    for at in range(0, len(ids), _BATCH):
        some = ids[at : at + _BATCH]
        for message, each in zip(some, asked.run("drop", queue, messages=some)["results"], strict=True):
            refused += "error" in each
            if asked.as_json:
                print_json({"id": message} | each)
            elif "error" in each:
                print(f"refused: {printable(each['message'])}", file=sys.stderr)
    if not asked.as_json:
        print(f"dropped {counted(len(ids) - refused, 'message')} of {queue} from quarantine")
    if refused:
        raise Failure(Exit.WRONG, f"{refused} of {len(ids)} messages were not in quarantine")


def _quarantine_table(messages: list[Mapping[str, Any]]) -> None:
    from veilmq.cli.output import instant, table

    heads = ["account", "region", "queue", "message", "sent (UTC)", "bytes", "MD5 when sent", "MD5 now"]
    rows = []
    for each in messages:
        now = each["md5_now"] if each["attributes_readable"] else f"{each['md5_now']}, attributes unreadable"
        row = [each["name"], each["id"], instant(each["sent"]), each["body_bytes"], each["md5"], now]
        rows.append([each["account"], each["region"], *row])
    table(heads, rows)


class Act(StrEnum):
    """See `veilmq.model.moves.Act`, which costs an import."""

    REDRIVE = "redrive"
    MOVE = "move"
    DELETE = "delete"
    PURGE = "purge"
    RELEASE = "release"


_ASK_S: Final = 0.5
_UNDER_WAY: Final = ("running", "cancelling")
_DONE: Final = {
    Act.REDRIVE: "moved",
    Act.MOVE: "moved",
    Act.DELETE: "deleted",
    Act.PURGE: "deleted",
    Act.RELEASE: "released",
}
Job = Annotated[str, typer.Argument(metavar="JOB_ID", help="Its id.", show_default=False)]
UntilDone = Annotated[bool, typer.Option("--wait", help="Show its progress and wait for its end.")]


def start_job(
    asked: "Asked",
    act: Annotated[Act, typer.Argument(metavar="ACT", help="redrive, move, delete, purge or release.")],
    queue: Queue,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="QUEUE", help="Where messages are moved.", autocompletion=queue_names),
    ] = None,
    message_type: OfType = None,
    group: OfGroup = None,
    older: Older = None,
    receives: Receives = 0,
    text: Text = None,
    rate: Annotated[int | None, typer.Option("--rate", metavar="N", help="Messages a second, up to 10000.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, and count what would change.")] = False,
    wait: UntilDone = False,
    yes: Yes = False,
) -> None:
    """Begin to redrive, move, delete, purge or release all messages of a queue that match."""
    wanted = filter_of(message_type, group, older, receives, text)
    if act in (Act.DELETE, Act.PURGE) and not dry_run:
        which = "the messages of" if wanted else "ALL messages of"
        more = " that match: how many, says --dry-run" if wanted else ""
        confirm(f"Delete {which} {queue}{more}?", yes)
    given: dict[str, Any] = {"act": act.value, "destination": to, "rate": rate, "filter": wanted, "dry_run": dry_run}
    members = {name: value for name, value in given.items() if value is not None}
    job = asked.access.start_job(asked.queue(queue), members, asked.next_id())
    _end(asked, job, wait=wait or dry_run)


def list_jobs(asked: "Asked", prefix: Prefix = "", everything: Everything = False) -> None:
    """List jobs, newest first, with the move tasks of SQS."""
    show_list(asked, lambda account, region: asked.access.jobs(account, region, prefix), _table, "jobs", everything)


def show_job(asked: "Asked", job: Job, wait: UntilDone = False) -> None:
    """Show how far a job is."""
    _end(asked, asked.access.job(job), wait=wait)


def cancel_job(asked: "Asked", job: Job) -> None:
    """End a job; what it did stays done."""
    _report_job(asked, asked.access.cancel_job(job, asked.next_id()))


def _end(asked: "Asked", job: Mapping[str, Any], *, wait: bool) -> None:
    """Show the job, when it has ended if that is wanted. Raises Failure if it failed, wholly or in part."""
    shows = wait and sys.stderr.isatty()
    try:
        while wait and job["status"] in _UNDER_WAY:
            if shows:
                print(f"\r{_progress(job)}", end="", file=sys.stderr, flush=True)
            time.sleep(_ASK_S)
            job = asked.access.job(job["id"])
    except (KeyboardInterrupt, Unreachable):
        one = job["id"]
        notice = f"job {one} has not ended: a server goes on with it, or `veilmq jobs show {one} --wait` does"
        print(f"\r\x1b[K{notice}" if shows else notice, file=sys.stderr)
        raise
    if shows:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    _report_job(asked, job)
    if job["failed"] or job["status"] == "failed":
        which = f"{counted(job['failed'], 'message')} could not be {_done(job)}"
        raise Failure(Exit.WRONG, f"{which}: {failure_text(job)}", failure_advice(job))


def _progress(job: Mapping[str, Any]) -> str:
    """How far it is, in words."""
    if job["dry_run"]:
        return f"{job['act']}: looked at {job['seen']} of {job['total']}, {job['matched']} would be {_done(job)}"
    return f"{job['act']}: looked at {job['seen']} of {job['total']}, {job['done']} {_done(job)}"


def _done(job: Mapping[str, Any]) -> str:
    return _DONE[Act(job["act"])]


def _report_job(asked: "Asked", job: Mapping[str, Any]) -> None:
    if asked.as_json:
        print_json(job)
    else:
        print(f"job {job['id']} is {job['status']}: {_progress(job)}")


def _table(jobs: list[Mapping[str, Any]]) -> None:
    from veilmq.cli.output import instant, table

    rows = [
        [
            job["id"],
            job["act"] + (" (dry run)" if job["dry_run"] else ""),
            job["queue"]["name"],
            job["status"] + (f": {failure_text(job)}" if job["failure"] else ""),
            instant(job["started"]),
            f"{job['seen']} of {job['total']}",
            job["matched"],
            job["done"],
            job["failed"],
        ]
        for job in jobs
    ]
    table(["job", "act", "queue", "status", "begun (UTC)", "looked at", "matched", "done", "failed"], rows)
