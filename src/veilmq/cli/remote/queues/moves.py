"""`veilmq moves`: list, start and cancel message move tasks.

Strategy: functions of the context (`Asked`), to which the package adds the common options.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.output import print_json
from veilmq.cli.remote.options import Everything, Prefix, queue_names
from veilmq.cli.remote.tables import show_list

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked


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
        typer.Option("--to", metavar="QUEUE", help="Not where each came from, but there.", autocompletion=queue_names),
    ] = None,
    rate: Annotated[int | None, typer.Option("--rate", metavar="N", help="Messages a second, up to 500.")] = None,
) -> None:
    """Begin to move the messages of a dead-letter queue back to where they came from, or elsewhere."""
    task = asked.run("move", queue, destination=to, rate_max=rate)
    if not asked.as_json:
        print(f"moving {task['to_move']} messages of {queue} to {_goal(task)}: task {task['id']}")
    else:
        print_json(task)


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
            task["status"] + (f": {task['failure']}" if task["failure"] else ""),
            instant(task["started"]),
            f"{task['moved']} of {task['to_move']}",
        ]
        for task in tasks
    ]
    table(["task", "from", "to", "status", "begun (UTC)", "moved"], rows)
