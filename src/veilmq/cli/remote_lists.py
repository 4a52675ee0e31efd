"""`veilmq topics` and `veilmq moves`: list topics with subscriptions; list, start and cancel message move tasks.

Strategy: like remote.py: functions of the context, to which it adds the common options.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilmq.cli.completion import queue_names
from veilmq.cli.exits import Exit, Failure
from veilmq.cli.output import in_json
from veilmq.cli.remote_options import Everything, Prefix

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked

Source = Annotated[
    str,
    typer.Argument(metavar="QUEUE", help="The dead-letter queue.", show_default=False, autocompletion=queue_names),
]


def list_topics(asked: "Asked", prefix: Prefix = "", everything: Everything = False) -> None:
    """List topics with their subscriptions, and how the endpoints of pushes do."""
    show_list(
        asked, lambda account, region: asked.access.topics(account, region, prefix), _topic_table, "topics", everything
    )


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
        typer.Option("--to", metavar="QUEUE", help="Not where each came from, but there.", autocompletion=queue_names),
    ] = None,
    rate: Annotated[int | None, typer.Option("--rate", metavar="N", help="Messages a second, up to 500.")] = None,
) -> None:
    """Begin to move the messages of a dead-letter queue back to where they came from, or elsewhere."""
    task = asked.run("move", queue, destination=to, rate_max=rate)
    if not asked.as_json:
        print(f"moving {task['to_move']} messages of {queue} to {_goal(task)}: task {task['id']}")
    else:
        _print_json(task)


def cancel_move(asked: "Asked", queue: Source) -> None:
    """End the move task that is under way from a queue; what was moved stays moved."""
    found = asked.access.moves(asked.account, asked.region, queue)
    running = [task for task in found if task["source"]["name"] == queue and task["status"] == "running"]
    if not running:
        raise Failure(Exit.WRONG, f"no move task is under way from {queue}", "See them with: veilmq moves list")
    task = asked.run("cancel_move", queue, task=running[0]["id"])
    if not asked.as_json:
        print(f"cancelled: {task['moved']} of {task['to_move']} messages were moved")
    else:
        _print_json(task)


def _print_json(value: Mapping[str, Any]) -> None:
    print(in_json(value))


def _goal(task: Mapping[str, Any]) -> str:
    return "where they came from" if task["destination"] is None else str(task["destination"]["name"])


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
            _print_json(each)
    elif rows := list(found):
        is_empty = False
        table(rows)
    if is_empty:
        why = "" if everything else asked.why_nothing(ask)
        if why or not asked.as_json:
            print(f"no {noun}" + (f": {why}" if why else ""), file=sys.stderr)


def _topic_table(topics: list[Mapping[str, Any]]) -> None:
    from veilmq.cli.remote_tables import duration, table

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


def _move_table(tasks: list[Mapping[str, Any]]) -> None:
    from veilmq.cli.remote_tables import instant, table

    rows = [
        [
            task["id"],
            task["source"]["name"],
            _goal(task),
            task["status"] + (f": {task['failure']}" if task["failure"] else ""),
            instant(task["started"]),
            f"{task['moved']} of {task['to_move']}",
        ]
        for task in tasks
    ]
    table(["task", "from", "to", "status", "begun (UTC)", "moved"], rows)
