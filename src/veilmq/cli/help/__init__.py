"""How the commands show themselves: options below headings, what a number is called, the line of a command in a list.

Strategy: typer makes the commands, and what it made is changed once, before any runs. It heeds headings only in the
layout of rich, so options are listed here.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Final

from veilmq.cli.failures import Exit, Failure

_HEADINGS: Final = {
    "work": {
        "Leases": "--lease --max-hold --keeper --stop-before-expiry",
        "Failures": "--retry-first --retry-longest --error-report --poison-after --dead-letter-queue",
        "State": "--checkpoints --guard",
        "End": "--drain --give-up-after --until-empty --count",
        "Reports": "--name --metrics --traces --json",
    },
    "verify": {
        "Load": "--minutes --clients --rate --fifo --dead-letters --seed",
        "Kills": "--kill --kill-every",
        "Checks": "--log --check --stale-deletes-accepted --deduplication --deduplication-by-group --tolerance",
    },
}
"""Options of a command by heading; others are below "Options"."""
_SHARED: Final = {
    "Server": "--account --region --admin --token-file --data --server --path --certificate",
    "Spark": "--master --remote --conf",
}
"""Those of every command that takes --admin or --server."""
_NUMBERS: Final = {"int": "whole number", "int range": "whole number", "float": "number", "float range": "number"}
"""What typer calls the types of numbers in its errors, and what people call them."""


def adapt(command: Any) -> None:
    """Change a command and all below it."""
    first = " ".join((command.help or "").partition("\n\n")[0].split()).partition(". ")[0]
    command.short_help = first.removesuffix(".") + "."  # the whole first sentence, where typer would cut it
    for each in command.params:
        if each.type.name.endswith(" range"):
            each.type.convert = partial(_in_range, each.type.convert, each.type.min, each.type.max)
        each.type.name = _NUMBERS.get(each.type.name, each.type.name)
    below = getattr(command, "commands", {})
    for each in below.values():
        adapt(each)
    if not below or command.invoke_without_command:
        command.format_options = partial(_list_options, command)


def by_heading(command: Any, params: list[Any]) -> dict[str, list[Any]]:
    """Arguments and options of a command, below their headings."""
    names = {name for each in params for name in each.opts}
    headings = _HEADINGS.get(command.name, {}) | (_SHARED if names & {"--admin", "--server"} else {})
    placed = {name: heading for heading, options in headings.items() for name in options.split()}
    found: dict[str, list[Any]] = {heading: [] for heading in ("Arguments", "Options", *headings)}
    for each in params:
        if each.param_type_name == "argument":
            found["Arguments"].append(each)
            continue
        own = [placed[name] for name in each.opts if name in placed]
        heading = getattr(each, "rich_help_panel", None) or (own[0] if own else "Options")
        found.setdefault(heading, []).append(each)
    return {heading: below for heading, below in found.items() if below}


def _list_options(command: Any, context: Any, formatter: Any) -> None:
    for heading, below in by_heading(command, command.get_params(context)).items():
        if records := [record for each in below if (record := each.get_help_record(context))]:
            with formatter.section(heading):
                formatter.write_dl(records)
    if hasattr(command, "commands"):
        command.format_commands(context, formatter)


def _in_range(convert: Callable[..., Any], least: int, most: int | None, text: Any, option: Any, context: Any) -> Any:
    """What typer makes of a number. Raises Failure, in the words of other options, for one that is out of range."""
    with suppress(ValueError):  # no number: typer says so
        if not least <= float(text) <= (inf if most is None else most):
            expected = f"at least {least}" if most is None else f"{least} to {most}"
            raise Failure(Exit.USAGE, f"{option.opts[-1]}: expected {expected}, not {text}")
    return convert(text, option, context)
