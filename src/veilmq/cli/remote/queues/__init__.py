"""`veilmq queues`, `purge`, `topics` and `moves`: queues with their plans, topics, and message move tasks.

Strategy: functions of the context (`Asked`), to which the package adds the common options. A setting of two parts of
which only one is given keeps the other, so the queue's present setting is read first. The plan that the server would
apply is computed by the server's own rule (veilmq.model.settings.queue).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.options import (
    Delay,
    Everything,
    Prefix,
    Queue,
    Wait,
    Yes,
    confirm,
    duration_us,
    pairs,
    queue_names,
    seconds,
)
from veilmq.cli.output import in_json, print_json
from veilmq.cli.remote.tables import failure_text, show_list
from veilmq.model.settings.queue import FIFO_SUFFIX
from veilmq.model.wording import counted

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

_RATE_MINUTES: Final = 5
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
        help="Queue for messages that fail; '' for none.",
        autocompletion=queue_names,
    ),
]
Receives = Annotated[int | None, typer.Option("--max-receives", metavar="N", help="Receives before a dead letter [5].")]
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


def list_queues(
    asked: "Asked",
    prefix: Prefix = "",
    everything: Everything = False,
    rates: Annotated[
        bool, typer.Option("--rates", help="How many messages were sent, received and deleted a second.")
    ] = False,
) -> None:
    """List queues."""
    minutes = _RATE_MINUTES if rates else 0
    noun = "queues" if everything else f"queues in account {asked.account}, region {asked.region}"
    show_list(
        asked,
        lambda account, region: asked.access.queues(account, region, prefix, minutes),
        _table_of(everything),
        noun,
        everything,
    )


def _table_of(everything: bool) -> Callable[[list[Mapping[str, Any]]], None]:
    def table(found: list[Mapping[str, Any]]) -> None:
        from veilmq.cli.remote.tables import queue_table

        queue_table(found, whose=everything)

    return table


def list_topics(asked: "Asked", prefix: Prefix = "", everything: Everything = False) -> None:
    """List topics with their subscriptions, and how the endpoints of pushes do."""
    show_list(
        asked, lambda account, region: asked.access.topics(account, region, prefix), _topic_table, "topics", everything
    )


def _topic_table(topics: list[Mapping[str, Any]]) -> None:
    from veilmq.cli.output import duration, table

    rows = []
    for topic in topics:
        for each in topic["subscriptions"] or [None]:
            row = [topic["name"], "", "", "", "", ""]
            if each is not None:
                settings, push = each["settings"], each["push"]
                row[1:] = [each["name"], settings["endpoint"], settings["filter_tag"] or "", "", ""]
                if push is not None:
                    row[4] = push["waiting"]["total"] if push["waiting"] else ""
                    row[5] = push.get("last_error") or ""
                    if push.get("available") is False:
                        row[5] = f"slowed to one in {duration(push['pause_us'])}: {row[5]}"
            rows.append(row)
    table(["topic", "subscription", "endpoint", "tag", "to push", "endpoint's last error"], rows)


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
    if fifo is not queue.endswith(FIFO_SUFFIX):
        again = f"Type: veilmq queues create {queue.removesuffix(FIFO_SUFFIX)}{FIFO_SUFFIX} --fifo"
        raise Failure(Exit.USAGE, f"--fifo: FIFO queues alone have names that end in {FIFO_SUFFIX}", again)
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
        int | None, typer.Option("--max-receives", metavar="N", help="Receives before a dead letter [as now, or 5].")
    ] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="NAME=VALUE", help="Add or replace a tag; may be repeated.")
    ] = None,
    untag: Annotated[
        list[str] | None, typer.Option("--untag", metavar="NAME", help="Take a tag away; may be repeated.")
    ] = None,
    if_version: Annotated[
        str | None,
        typer.Option("--if-version", metavar="VERSION", help="Only if this is its version (`queues list --json`)."),
    ] = None,
) -> None:
    """Change settings of a queue; what is not named stays."""
    change = _plain(visibility_timeout, delay, retention, wait, message_bytes_max)
    redrive, new_tags, gone = _Redrive(dead_letters, max_receives), dict(pairs("--tag", tags or [])), set(untag or [])
    for name in gone & new_tags.keys():
        raise Failure(Exit.USAGE, f"--untag {name}: --tag sets it")
    present: Mapping[str, Any] = {}
    if redrive.is_partial or new_tags or gone:
        found = asked.run("describe", queue)
        present, seen = found["settings"], found["version"]
        if_version = if_version or seen
    if redrive != (None, None):
        change["redrive"] = redrive.merged(present.get("redrive"))
    if new_tags or gone:
        kept = {name: value for name, value in present["tags"].items() if name not in gone}
        change["tags"] = kept | new_tags
    if not change:
        raise Failure(Exit.USAGE, "nothing to change", "Name a setting, such as --visibility-timeout 60s.")
    if if_version is not None:
        change["if_version"] = if_version
    # Unlike other calls, a null removes a setting.
    _show(asked, asked.run_with("change", queue, change), f"changed {queue}")


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
    _show(asked, shown, f"deleted {queue}: {counted(shown['count'], 'message')}")


def purge(asked: "Asked", queue: Queue, yes: Yes = False) -> None:
    """Delete all messages of a queue, those in flight too."""
    confirm(f"Delete all messages of {queue}?", yes)
    shown = asked.run("purge", queue)
    _show(asked, shown, f"purged {queue}: {counted(shown['count'], 'message')}")


def _show(asked: "Asked", shown: Mapping[str, Any], line: str) -> None:
    print(in_json(shown) if asked.as_json else line)


class Adaptive(StrEnum):
    """See `veilmq.model.settings.queue.Adaptive`, which costs an import."""

    OFF = "off"
    SUGGEST = "suggest"
    APPLY = "apply"


def plan(
    asked: "Asked",
    queue: Queue,
    adaptive: Annotated[
        Adaptive | None, typer.Option("--adaptive", help="Keep no plans, show them, or put them in force.")
    ] = None,
    first_lease_min: Annotated[
        str | None,
        typer.Option("--first-lease-min", metavar="TIME", help="Plans may shorten leases to this; '': never."),
    ] = None,
    revert: Annotated[bool, typer.Option("--revert", help="Return to the plan before.")] = False,
) -> None:
    """Show which leases the pipeline recommends for a queue, which are in force, and why; or decide about them."""
    change: dict[str, Any] = {} if adaptive is None else {"adaptive": adaptive.value}
    if first_lease_min is not None:
        least_us = round(seconds("--first-lease-min", first_lease_min) * 1e6) if first_lease_min else None
        change["first_lease_min_us"] = least_us
    if revert and change:
        raise Failure(Exit.USAGE, "--revert stands alone", "Change settings by another command.")
    operation = "revert" if revert else "change" if change else "describe"
    shown = asked.run_with(operation, queue, change)
    if asked.as_json:
        print(in_json(shown["plan"] | {"would": _would(shown)}))
    else:
        _print(queue, shown)


def _would(shown: dict[str, Any]) -> dict[str, Any] | None:
    """The plan that adaptive = apply would use; None: there is no suggestion, or one like it was taken back."""
    import msgspec

    from veilmq.model.settings.queue import PlanState, effective, is_held_back

    state = msgspec.convert(shown["plan"], PlanState)
    if state.suggested is None:
        return None
    settings = shown["settings"]
    wanted = effective(
        state.suggested, state.applied, settings["visibility_timeout_us"], settings["first_lease_min_us"]
    )
    if is_held_back(wanted, state):
        return None
    found: dict[str, Any] = msgspec.to_builtins(wanted)
    return found


def _print(queue: str, shown: dict[str, Any]) -> None:
    from veilmq.cli.output import duration, instant, printable, table

    settings, plans = shown["settings"], shown["plan"]
    least_us, timeout_us = settings["first_lease_min_us"], settings["visibility_timeout_us"]
    shorter = "never shorter" if least_us is None else f"not below {duration(least_us)}"
    print(f"{queue}: adaptive = {settings['adaptive']}, visibility timeout {duration(timeout_us)}, plans {shorter}")
    suggested = plans["suggested"]
    if suggested is None:
        print("nothing was published for it: veilmq pipeline timeouts --publish")
        return
    columns = (suggested, _would(shown), plans["applied"], plans["previous"])

    def lease(of: dict[str, Any] | None, kind: str | None) -> str:
        if of is None:
            return "-"
        lease_us = of["lease_us"] if kind is None else of["by_type"].get(kind)
        return "-" if lease_us is None else duration(lease_us)

    kinds = [None, *sorted({kind for each in columns if each is not None for kind in each["by_type"]})]
    rows = [["all others" if kind is None else kind, *(lease(each, kind) for each in columns)] for kind in kinds]
    table(["type", "recommended", "apply would set", "in force", "before"], rows)
    print(f"why: {printable(suggested['why'])}; published {instant(suggested['made'])} UTC")
    if columns[1] is None:
        print("a plan like it was taken back: it comes back if you decide so, by --adaptive or --first-lease-min")
    if suggested["floor_us"]:
        print(f"not below {duration(suggested['floor_us'])}: twice the longest interval at which a client extended")


Source = Annotated[
    str,
    typer.Argument(metavar="QUEUE", help="The dead-letter queue.", show_default=False, autocompletion=queue_names),
]


def list_moves(asked: "Asked", prefix: Prefix = "", everything: Everything = False) -> None:
    """List message move tasks, newest first."""
    show_list(
        asked,
        lambda account, region: asked.access.moves(account, region, prefix),
        _move_table,
        "move tasks",
        everything,
    )


def start_move(
    asked: "Asked",
    queue: Source,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="QUEUE", help="To this one, not where each came from.", autocompletion=queue_names
        ),
    ] = None,
    rate: Annotated[int | None, typer.Option("--rate", metavar="N", help="Messages a second, up to 500.")] = None,
) -> None:
    """Begin to move the messages of a dead-letter queue back to where they came from, or elsewhere."""
    task = asked.run("move", queue, destination=to, rate_max=rate)
    if not asked.as_json:
        print(f"moving {counted(task['to_move'], 'message')} of {queue} to {_goal(task)}: task {task['id']}")
    else:
        print_json(task)


def cancel_move(asked: "Asked", queue: Source) -> None:
    """End the move task that is under way from a queue; what was moved stays moved."""
    found = [task for task in asked.access.moves(asked.account, asked.region, queue) if task["source"]["name"] == queue]
    running = [task for task in found if task["status"] == "running"]
    none = Failure(Exit.WRONG, f"no move task is under way from {queue}", "See them with: veilmq moves list")
    tasks = running or (found if asked.is_named else [])  # a repetition: the server answers as it did
    if not tasks:
        raise none
    try:
        task = asked.run("cancel_move", queue, task=tasks[0]["id"])
    except Failure as failure:
        if running or "only a running task" not in str(failure):
            raise
        raise none from None
    if not asked.as_json:
        print(f"cancelled: {task['moved']} of {task['to_move']} messages were moved")
    else:
        print_json(task)


def _goal(task: Mapping[str, Any]) -> str:
    return "where they came from" if task["destination"] is None else str(task["destination"]["name"])


def _move_table(tasks: list[Mapping[str, Any]]) -> None:
    from veilmq.cli.output import instant, table

    rows = [
        [
            task["id"],
            task["source"]["name"],
            _goal(task),
            task["status"] + (f": {failure_text(task)}" if task["failure"] else ""),
            instant(task["started"]),
            f"{task['moved']} of {task['to_move']}",
        ]
        for task in tasks
    ]
    table(["task", "from", "to", "status", "begun (UTC)", "moved"], rows)
