"""`veilmq quarantine`: list, export and drop the damaged messages in it.

Strategy: `drop --all` deletes what it listed before it asked, so that a message that is quarantined meanwhile stays.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.options import Everything, Prefix, Queue, Yes, confirm, message_ids
from veilmq.cli.output import in_json, print_json, printable, write_new
from veilmq.cli.remote.messages import BATCH
from veilmq.cli.remote.tables import show_list
from veilmq.model.wording import counted

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked


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
    damaged = counted(len(ids), "damaged message")
    confirm(f"Delete {damaged} of {queue} for good? `veilmq quarantine export` keeps them.", yes)
    refused = 0
    for at in range(0, len(ids), BATCH):
        some = ids[at : at + BATCH]
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
