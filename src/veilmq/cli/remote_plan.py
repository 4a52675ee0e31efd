"""`veilmq queues plan`: shows a queue's recommended leases and those in force, and lets the owner decide.

Strategy: the plan that the server would apply is computed by the server's own rule (veilmq.model.plan). Like remote.py:
a function of the context, to which it adds the common options.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilmq.cli.durations import seconds
from veilmq.cli.exits import Exit, Failure
from veilmq.cli.output import in_json
from veilmq.cli.remote_options import Queue

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked


class Adaptive(StrEnum):
    """See `veilmq.model.plan.Adaptive`, which costs an import."""

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
        typer.Option("--first-lease-min", metavar="TIME", help="Plans may shorten to this; '' for never."),
    ] = None,
    revert: Annotated[bool, typer.Option("--revert", help="The plan before, in force again.")] = False,
) -> None:
    """Show which leases the pipeline recommends for a queue, which are in force, and why; or decide about them."""
    change: dict[str, Any] = {} if adaptive is None else {"adaptive": adaptive.value}
    if first_lease_min is not None:
        least_us = round(seconds("--first-lease-min", first_lease_min) * 1e6) if first_lease_min else None
        change["first_lease_min_us"] = least_us
    if revert and change:
        raise Failure(Exit.USAGE, "--revert stands alone", "Change settings by another command.")
    operation = "revert" if revert else "change" if change else "describe"
    shown = asked.access.run(operation, asked.queue(queue), change)
    if asked.as_json:
        print(in_json(shown["plan"] | {"would": _would(shown)}))
    else:
        _print(queue, shown)


def _would(shown: dict[str, Any]) -> dict[str, Any] | None:
    """The plan that adaptive = apply would use; None: there is no suggestion."""
    import msgspec

    from veilmq.model.plan import PlanState, effective

    state = msgspec.convert(shown["plan"], PlanState)
    if state.suggested is None:
        return None
    settings = shown["settings"]
    wanted = effective(
        state.suggested, state.applied, settings["visibility_timeout_us"], settings["first_lease_min_us"]
    )
    found: dict[str, Any] = msgspec.to_builtins(wanted)
    return found


def _print(queue: str, shown: dict[str, Any]) -> None:
    from veilmq.cli.remote_tables import duration, instant, printable, table

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
    if suggested["floor_us"]:
        print(f"not below {duration(suggested['floor_us'])}: twice the longest interval at which a client extended")
