"""`veilmq queues` and `veilmq purge`: list, create, change, delete and purge queues.

Strategy: like remote.py: functions of the context, to which it adds the common options. A setting of two parts of which
only one is given keeps the other, so the queue's present setting is read first.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from veilmq.cli.completion import queue_names
from veilmq.cli.exits import Exit, Failure
from veilmq.cli.output import in_json
from veilmq.cli.remote_lists import show_list
from veilmq.cli.remote_options import Delay, Everything, Prefix, Queue, Wait, Yes, confirm, duration_us, pairs

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

_RECEIVES_MAX: Final = 5
"""Default number of receives before a message is dead-lettered."""

Timeout = Annotated[
    str | None, typer.Option("--visibility-timeout", metavar="TIME", help="Length of a lease, say 30s.")
]
Retention = Annotated[str | None, typer.Option("--retention", metavar="TIME", help="How long a message lives, say 4d.")]
BytesMax = Annotated[int | None, typer.Option("--message-bytes-max", metavar="N", help="Size of a message.")]
DeadLetters = Annotated[
    str | None,
    typer.Option(
        "--dead-letters",
        metavar="QUEUE",
        help="Where messages go that fail; '' for nowhere.",
        autocompletion=queue_names,
    ),
]
Receives = Annotated[int | None, typer.Option("--max-receives", metavar="N", help="Receives before that [5].")]
Tags = Annotated[list[str] | None, typer.Option("--tag", metavar="NAME=VALUE", help="A tag; may be repeated.")]


class _Redrive(NamedTuple):
    """The given options about dead letters."""

    dead_letters: str | None
    max_receives: int | None

    def merged(self, present: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The policy; parts not given are those of the present policy, or the default. Raises Failure."""
        if self.dead_letters == "":
            if self.max_receives is not None:
                raise Failure(Exit.USAGE, "--max-receives: there are no receives before going nowhere")
            return None
        target = self.dead_letters or (present["target"]["name"] if present else None)
        if target is None:
            raise Failure(Exit.USAGE, "--max-receives needs --dead-letters QUEUE: the queue has none")
        count = self.max_receives
        if count is None:
            count = present["receive_count_max"] if present else _RECEIVES_MAX
        return {"target": target, "receive_count_max": count}

    @property
    def is_partial(self) -> bool:
        """Whether the present policy is needed."""
        return self.dead_letters != "" and (self.dead_letters is None) != (self.max_receives is None)


def list_queues(asked: "Asked", prefix: Prefix = "", everything: Everything = False) -> None:
    """List queues."""
    noun = "queues" if everything else f"queues in account {asked.account}, region {asked.region}"
    show_list(
        asked,
        lambda account, region: asked.access.queues(account, region, prefix),
        _table_of(everything),
        noun,
        everything,
    )


def _table_of(everything: bool) -> Callable[[list[Mapping[str, Any]]], None]:
    def table(found: list[Mapping[str, Any]]) -> None:
        from veilmq.cli.remote_tables import queue_table

        queue_table(found, whose=everything)

    return table


def create(
    asked: "Asked",
    queue: Queue,
    visibility_timeout: Timeout = None,
    delay: Delay = None,
    retention: Retention = None,
    wait: Wait = None,
    message_bytes_max: BytesMax = None,
    dead_letters: DeadLetters = None,
    max_receives: Receives = None,
    tags: Tags = None,
    fifo: Annotated[bool, typer.Option("--fifo", help="First in, first out; the name ends in .fifo.")] = False,
) -> None:
    """Create a queue, or find that it exists with these settings."""
    change = _plain(visibility_timeout, delay, retention, wait, message_bytes_max)
    redrive = _Redrive(dead_letters, max_receives)
    if redrive != (None, None):
        change["redrive"] = redrive.merged(None)
    if tags:
        change["tags"] = dict(pairs("--tag", tags))
    shown = asked.run("create", queue, **change, fifo=True if fifo else None)
    _show(asked, shown, f"created {queue}" if shown["new"] else f"{queue} exists with these settings")


def change_queue(
    asked: "Asked",
    queue: Queue,
    visibility_timeout: Timeout = None,
    delay: Delay = None,
    retention: Retention = None,
    wait: Wait = None,
    message_bytes_max: BytesMax = None,
    dead_letters: DeadLetters = None,
    max_receives: Annotated[
        int | None, typer.Option("--max-receives", metavar="N", help="Receives before that [as now, or 5].")
    ] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="NAME=VALUE", help="Add or replace a tag; may be repeated.")
    ] = None,
    untag: Annotated[
        list[str] | None, typer.Option("--untag", metavar="NAME", help="Take a tag away; may be repeated.")
    ] = None,
) -> None:
    """Change settings of a queue; what is not named stays."""
    change = _plain(visibility_timeout, delay, retention, wait, message_bytes_max)
    redrive, new_tags, gone = _Redrive(dead_letters, max_receives), dict(pairs("--tag", tags or [])), set(untag or [])
    for name in gone & new_tags.keys():
        raise Failure(Exit.USAGE, f"--untag {name}: --tag sets it")
    present: Mapping[str, Any] = {}
    if redrive.is_partial or new_tags or gone:
        present = asked.run("describe", queue)["settings"]
    if redrive != (None, None):
        change["redrive"] = redrive.merged(present.get("redrive"))
    if new_tags or gone:
        kept = {name: value for name, value in present["tags"].items() if name not in gone}
        change["tags"] = kept | new_tags
    if not change:
        raise Failure(Exit.USAGE, "nothing to change", "Name a setting, such as --visibility-timeout 60s.")
    # Unlike other calls, a null removes a setting.
    _show(asked, asked.access.run("change", asked.queue(queue), change), f"changed {queue}")


def _plain(
    visibility_timeout: str | None,
    delay: str | None,
    retention: str | None,
    wait: str | None,
    message_bytes_max: int | None,
) -> dict[str, Any]:
    """The given settings of one value, by their names at the admin port. Raises Failure."""
    change: dict[str, Any] = {
        name: duration_us(option, text)
        for name, option, text in (
            ("visibility_timeout_us", "--visibility-timeout", visibility_timeout),
            ("delay_us", "--delay", delay),
            ("retention_us", "--retention", retention),
            ("wait_us", "--wait", wait),
        )
        if text is not None
    }
    return change if message_bytes_max is None else change | {"message_bytes_max": message_bytes_max}


def remove(asked: "Asked", queue: Queue, yes: Yes = False) -> None:
    """Delete a queue with all its messages."""
    confirm(f"Delete {queue} with all its messages?", yes)
    shown = asked.run("remove", queue)
    _show(asked, shown, f"deleted {queue}: {shown['count']} messages")


def purge(asked: "Asked", queue: Queue, yes: Yes = False) -> None:
    """Delete all messages of a queue, those in flight too."""
    confirm(f"Delete all messages of {queue}?", yes)
    shown = asked.run("purge", queue)
    _show(asked, shown, f"purged {queue}: {shown['count']} messages")


def _show(asked: "Asked", shown: Mapping[str, Any], said: str) -> None:
    print(in_json(shown) if asked.as_json else said)
