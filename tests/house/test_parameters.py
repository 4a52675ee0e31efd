"""Each pattern's page has a table of all its parameters, with the defaults that the code has."""

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from veilmq.client.encrypted import EncryptedQueue
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.large import LargeMessageQueue, ObjectStore
from veilmq.client.messages import Message, Template
from veilmq.client.ordered import OrderedReceiver, OrderedSender
from veilmq.client.outbox import Outbox, Relay
from veilmq.client.receiver import Receiver
from veilmq.client.routed import RoutedQueue
from veilmq.client.timeouts import AdaptiveTimeout, Costs, PublishedPlan, ThresholdTimeout
from veilmq.client.topics import create_pull_topic
from veilmq.client.transaction import Times, TransactionQueue
from veilmq.client.worker import Backoff, Options
from veilmq.testing.for_each import for_each

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- parameters of {} -->\n", "<!-- end of parameters -->"
TABLES: dict[str, dict[str, Callable[..., Any]]] = {
    "client.md": {"Template": Template, "Message": Message},
    "patterns/adaptive-timeout.md": {
        "AdaptiveTimeout": AdaptiveTimeout,
        "Costs": Costs,
        "ThresholdTimeout": ThresholdTimeout,
        "PublishedPlan": PublishedPlan,
    },
    "patterns/encrypted-queue.md": {"EncryptedQueue": EncryptedQueue},
    "patterns/large-messages.md": {"LargeMessageQueue": LargeMessageQueue, "ObjectStore": ObjectStore},
    "patterns/ordered-queue.md": {"OrderedSender": OrderedSender, "OrderedReceiver": OrderedReceiver},
    "patterns/outbox.md": {"Outbox": Outbox, "Relay": Relay},
    "patterns/pull-topic.md": {"create_pull_topic": create_pull_topic},
    "patterns/receiver.md": {"Receiver": Receiver},
    "patterns/routed-queue.md": {"RoutedQueue": RoutedQueue},
    "patterns/transaction-queue.md": {"TransactionQueue": TransactionQueue, "Times": Times},
    "patterns/worker.md": {"Options": Options, "Backoff": Backoff},
}
OTHERS = {"patterns/lease-keeper.md": LeaseKeeper}
"""Pages whose table has a column more."""


def shown(default: Any) -> str:
    """A default as a table has it; empty if there is none, or it has no short form."""
    if default is inspect.Parameter.empty or default is None or callable(default) or default in ((), {}):
        return ""
    if isinstance(default, bool):
        return str(default)
    if isinstance(default, Enum):
        return f"`{default.value}`"
    if isinstance(default, int | float):
        return f"{default:,.15g}" if default >= 0.01 or default == 0 else f"1/{1 / default:,.15g}"
    if isinstance(default, str):
        return f"`{default}`"
    return ", ".join(shown(each) for each in default) if isinstance(default, tuple) else ""


def wanted(thing: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """(name, default as shown) of each parameter but the clock, which only tests set."""
    if thing is Options:
        for name, hint in inspect.get_annotations(Options).items():
            yield name, shown(hint.__metadata__[0])
        return
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.name != "clock":
            yield parameter.name, shown(parameter.default)


def rows(page: str, title: str) -> list[list[str]]:
    text = (DOCS / page).read_text()
    table = text.partition(BEGIN.format(title))[2].partition(END)[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


@for_each(("page", "title"), [(page, title) for page, titles in TABLES.items() for title in titles])
def test_a_table_has_every_parameter_with_its_default(page: str, title: str) -> None:
    found = rows(page, title)
    assert [(name.strip("`"), default) for name, default, _ in found] == list(wanted(TABLES[page][title]))
    assert all(meaning for _, _, meaning in found)


def test_the_keepers_table_has_every_parameter() -> None:
    text = (DOCS / "patterns" / "lease-keeper.md").read_text()
    assert {name for name, _ in wanted(LeaseKeeper)} - {"queue"} <= {
        line.split("`")[1] for line in text.splitlines() if line.startswith("| `")
    }


def test_every_pattern_has_a_table() -> None:
    """checkpoint.md is about parameters of the worker."""
    pages = {f"patterns/{page.name}" for page in (DOCS / "patterns").glob("*.md")} - {"patterns/checkpoint.md"}
    assert pages == {page for page in TABLES if page.startswith("patterns/")} | set(OTHERS)
