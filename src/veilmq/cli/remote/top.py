"""`veilmq top`: queues and workers in a terminal, again and again.

Strategy: a look is two questions to the admin port; `screen` makes of it what is drawn, and knows no terminal. On a
terminal rich draws it in place until q or Ctrl-C; otherwise, or with `--once`, it is printed once. A server that does
not answer is said in the first line, and asked again. Only the first `_QUEUES_MAX` queues by name are looked at.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from veilmq.cli.failures import Failure
from veilmq.cli.options import Everything, seconds
from veilmq.cli.output import columns, duration, instant, print_json, printable
from veilmq.cli.remote.workers import client_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from veilmq.cli.remote import Asked

_QUEUES_MAX: Final = 1_000
_ROWS_MAX: Final = 20
"""Queues shown where there is no screen to fill."""
_FRAME_ROWS: Final = 9
"""Lines of a screen that are no rows: the first line, two heads with their rules, and blanks."""
_MINUTES: Final = 1
"""Rates are of the last minute."""
_RATED: Final = ("sent", "received", "deleted")
_QUEUE_HEADS: Final = ["queue", "visible", "in flight", "delayed", "oldest", "sent/s", "received/s", "deleted/s"]
_WORKER_HEADS: Final = ["worker", "holds", "oldest lease", "waits", "deleted/min", "failed", "ended leases"]


class Look(NamedTuple):
    """What one look found."""

    queues: list[dict[str, Any]]
    """The deepest first."""
    is_all: bool
    workers: Mapping[str, Any]


def look(asked: "Asked", everything: bool) -> Look:
    """Ask once. Raises Failure."""
    account, region = ("*", None) if everything else (asked.account, asked.region)
    found = list(islice(asked.access.queues(account, region, "", _MINUTES), _QUEUES_MAX + 1))
    workers = asked.access.workers({"client": "", "queue": "", "sort": "holds", "messages": 0})
    deepest = sorted(found[:_QUEUES_MAX], key=_depth, reverse=True)
    return Look(deepest, len(found) <= _QUEUES_MAX, workers)


def _depth(queue: Mapping[str, Any]) -> tuple[int, int]:
    counts = queue["counts"]
    return counts["visible"] + counts["in_flight"] + counts["delayed"], queue.get("oldest_age_us") or 0


def screen(found: Look, rows_max: int, error: str = "") -> "RenderableType":
    """What is drawn of a look, with at most so many rows of both tables together."""
    from rich.console import Group
    from rich.text import Text

    workers = found.workers["workers"]
    of_workers = min(len(workers), max(1, rows_max // 2))
    of_queues = max(1, rows_max - of_workers)
    counts = [sum(queue["counts"][name] for queue in found.queues) for name in ("visible", "in_flight", "delayed")]
    head = (
        f"{instant(found.workers['at'])} UTC  {len(found.queues)}{'' if found.is_all else '+'} queues  "
        f"{counts[0]} visible  {counts[1]} in flight  {counts[2]} delayed  {len(workers)} workers"
    )
    shown: list[RenderableType] = [Text(f"{head}  {printable(error)}".rstrip(), style="bold")]
    shown.append(columns(_QUEUE_HEADS, [_queue_row(queue) for queue in found.queues[:of_queues]]))
    if workers:
        at = found.workers["at"]
        shown.append(columns(_WORKER_HEADS, [_worker_row(worker, at) for worker in workers[:of_workers]]))
    left = len(found.queues) - of_queues, len(workers) - of_workers
    if max(left) > 0:
        shown.append(Text(f"and {max(0, left[0])} queues, {max(0, left[1])} workers more"))
    return Group(*shown)


def _queue_row(queue: Mapping[str, Any]) -> list[object]:
    counts, rates = queue["counts"], queue.get("rates")
    age = queue.get("oldest_age_us")
    return [
        queue["name"],
        counts["visible"],
        counts["in_flight"],
        counts["delayed"],
        "" if age is None else duration(age),
        *("" if rates is None else f"{rates['per_second'][name]:g}" for name in _RATED),
    ]


def _worker_row(worker: Mapping[str, Any], at: int) -> list[object]:
    granted = worker["oldest_granted"]
    return [
        client_text(worker),
        worker["holds"],
        "" if granted is None else duration(max(0, at - granted)),
        worker["waits"],
        f"{worker['per_minute']['deleted']:g}",
        worker["failed"],
        worker["lease_expired"],
    ]


def top(
    asked: "Asked",
    everything: Everything = False,
    once: Annotated[bool, typer.Option("--once", help="Print it once, also on a terminal.")] = False,
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="How often to look.")] = "2s",
) -> None:
    """Show queues and workers in the terminal, again and again: depths, ages, rates, leases. q ends it."""
    pause_s = max(0.1, seconds("--every", every))
    found = look(asked, everything)
    if asked.as_json:
        print_json({"queues": found.queues, "workers": found.workers})
        return
    from rich.console import Console

    console = Console(highlight=False)
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        print_once = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        print_once.print(screen(found, 2 * _ROWS_MAX))
        return
    from rich.live import Live

    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        error = ""
        while True:
            live.update(screen(found, max(2, console.height - _FRAME_ROWS), error), refresh=True)
            if pressed(pause_s):
                return
            try:
                found, error = look(asked, everything), ""
            except Failure as failure:
                error = f"no answer: {failure}"


@contextmanager
def _keys() -> "Iterator[Any]":
    """A function that waits so many seconds, and says whether q or Ctrl-C was pressed meanwhile."""
    import select
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def pressed(wait_s: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
        return bool(ready) and sys.stdin.read(1) in {"q", "Q", ""}

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
