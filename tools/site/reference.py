"""The site's reference pages that are made from the code: commands, settings, metrics, errors, Python.

Strategy: what a page lists is what the code has: the commands of the application, the fields of the settings, the
families that admin/metrics.py makes, the errors of the model and of each protocol. tests/house/test_site.py compares
the pages with a running server and with what is documented elsewhere.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer.core
import typer.main

from veilmq.cli import application
from veilmq.cli.failures import Exit
from veilmq.cli.sources import flag, variable
from veilmq.client import errors as client_errors
from veilmq.model import errors
from veilmq.model.commands import SERVER, Delete
from veilmq.model.instant import Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.server.config.settings import FIELDS

SOURCE = Path(__file__).resolve().parents[2] / "src" / "veilmq"
PROTOCOLS = ("sqs", "azure", "mns")
MODULES = {
    "Connecting": ["veilmq.client.adapters.connect"],
    "Queues and messages": ["veilmq.client.queue", "veilmq.client.messages", "veilmq.client.unreadable"],
    "Worker": ["veilmq.client.worker"],
    "Leases and traces": ["veilmq.client.keeper", "veilmq.client.tracing"],
    "Patterns": [
        "veilmq.client.receiver", "veilmq.client.encrypted", "veilmq.client.large", "veilmq.client.ordered",
        "veilmq.client.outbox", "veilmq.client.routed", "veilmq.client.timeouts", "veilmq.client.topics",
        "veilmq.client.transaction",
    ],
    "Errors": ["veilmq.model.errors", "veilmq.client.errors"],
    "Tests": ["veilmq.testing.local", "veilmq.testing.disordered"],
    "Checking": ["veilmq.checking", "veilmq.checking.log", "veilmq.checking.report", "veilmq.driver.recorded"],
}  # fmt: skip
"""What a program imports, by section of the page."""


class Family(NamedTuple):
    """A metric: name as scraped, type, help and labels; whether only the servers of a cluster have it."""

    name: str
    type: str
    text: str
    labels: tuple[str, ...]
    of_cluster: bool


def pages() -> dict[str, str]:
    """Text of each page by name, without `.md`."""
    return {
        "commands": commands(),
        "settings": settings(),
        "metrics": metrics(),
        "errors": error_page(),
        "python": python(),
    }


def cell(text: object) -> str:
    """What a table's cell can hold."""
    parts = re.sub(r"\s+", " ", "" if text is None else str(text)).replace("|", "\\|").strip().split("`")
    parts[::2] = [part.replace("<", "\\<") for part in parts[::2]]
    return "`".join(parts)


def table(header: str, rows: Iterator[tuple[object, ...]]) -> str:
    names = header.split(" | ")
    lines = [f"| {header} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(cell(value) for value in row) + " |" for row in rows)])


def code(text: object) -> str:
    return f"`{text}`" if text not in (None, "") else ""


# Commands


def leaves(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command that does something, with its words."""
    if not isinstance(command, typer.core.TyperGroup):
        yield path, command
        return
    for name, each in command.commands.items():
        yield from leaves(each, *path, name)


def commands() -> str:
    text = [
        "# Commands\n\nEvery command of `veilmq`, from the commands themselves. [The command line](../cli.md) has "
        "examples; `veilmq COMMAND --help` says the same in a terminal. Exit codes are [below the errors](errors.md)."
    ]
    for words, command in sorted(leaves(typer.main.get_command(application()))):
        if command.hidden:
            continue
        name = " ".join(("veilmq", *words))
        arguments = [each for each in command.params if not each.opts[0].startswith("-")]
        usage = " ".join([name, "[OPTIONS]", *(each.make_metavar(typer.Context(command)) for each in arguments)])
        text.append(f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n\n```text\n{usage}\n```")
        rows = [option_row(each) for each in command.params if not getattr(each, "hidden", False)]
        if rows:
            text.append(table("option | meaning | default", iter(rows)))
    return "\n\n".join(text) + "\n"


def option_row(option: Any) -> tuple[str, str, str]:
    names = ", ".join([*option.opts, *option.secondary_opts])
    metavar = (
        ""
        if getattr(option, "is_flag", False) or not option.opts[0].startswith("-")
        else f" {option.metavar or 'TEXT'}"
    )
    default = option.default if isinstance(option.default, int | float | str) and option.default is not False else ""
    return code(f"{names}{metavar}"), option.help or "", code(default)


# Settings


def settings() -> str:
    rows = (
        (
            code(f"{flag(field.name)}{'' if field.type is bool else ' ' + field.metavar}"),
            code(variable(field.name)),
            code(field.name),
            code(field.default if field.default not in (None, (), False) else ""),
            field.help,
        )
        for field in FIELDS.values()
    )
    return (
        "# Settings\n\nEvery setting of `veilmq serve` can be given in three ways: a flag, a variable, a key of the "
        "TOML file that `--config` names. A flag goes before a variable, and a variable before the file. "
        "[Deploy](../deploy.md#settings) says how to choose them.\n\n"
        + table("flag | variable | key in TOML | default | meaning", rows)
        + "\n"
    )


# Metrics


def families() -> list[Family]:
    """The families that admin/metrics.py makes, read from its source: a cluster's need no cluster."""
    tree = ast.parse((SOURCE / "admin" / "metrics.py").read_text())
    module = importlib.import_module("veilmq.admin.metrics")
    found: dict[str, Family] = {}
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                add_family(found, node, texts_before(function, node), module, function.name.startswith("_cluster"))
    for name, text in module._LISTENER_COUNTERS.items():
        found[f"veilmq_{name}_total"] = Family(f"veilmq_{name}_total", "counter", text, ("listener",), False)
    return sorted(found.values())


def texts_before(function: ast.FunctionDef, call: ast.Call) -> dict[str, str]:
    """Strings that were assigned to names of a function before a call in it, the latest of each."""
    assigned = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and node.lineno <= call.lineno
    ]
    return {node.targets[0].id: node.value.value for node in sorted(assigned, key=lambda each: each.lineno)}  # type: ignore[attr-defined]


def add_family(found: dict[str, Family], call: ast.Call, texts: dict[str, str], module: Any, of_cluster: bool) -> None:
    kinds = {
        "_counters": "counter",
        "CounterMetricFamily": "counter",
        "GaugeMetricFamily": "gauge",
        "_histogram": "histogram",
    }
    kind = kinds.get(call.func.id)  # type: ignore[attr-defined]
    name = call.args[0]
    if kind is None or not isinstance(name, ast.Constant) or not str(name.value).startswith("veilmq_"):
        return
    text = call.args[1]
    label = next((each.value for each in call.keywords if each.arg == "labels"), None)
    if call.func.id == "_counters":  # type: ignore[attr-defined]
        label = call.args[2]
    labels = () if label is None else tuple(eval(compile(ast.Expression(label), "metrics", "eval"), vars(module)))
    shown = f"{name.value}_total" if kind == "counter" else str(name.value)
    said = text.value if isinstance(text, ast.Constant) else texts[text.id]  # type: ignore[attr-defined]
    found[shown] = Family(shown, kind, str(said), labels, of_cluster)


def metrics() -> str:
    every = families()

    def rows(of_cluster: bool) -> Iterator[tuple[object, ...]]:
        for each in every:
            if each.of_cluster == of_cluster:
                yield code(each.name), each.type, ", ".join(code(label) for label in each.labels), each.text

    header = "metric | type | labels | meaning"
    return (
        "# Metrics\n\nWhat `/metrics` of the admin port shows, in Prometheus' text format; names end as they are "
        "scraped. A histogram has `_bucket`, `_count` and `_sum`. [Alarms](../operations.md#health-and-alarms) use "
        "them; [the admin port](../admin-api.md#health-and-metrics) says who may scrape.\n\n"
        f"{table(header, rows(False))}\n\n"
        f"## In a cluster\n\nEach server of a [cluster](../cluster.md) has these too.\n\n{table(header, rows(True))}\n"
    )


# Errors


def wire(protocol: str, kind: type[errors.VeilError]) -> str:
    """Code and status that an error has in a protocol."""
    module = importlib.import_module(f"veilmq.protocols.{protocol}.errors")
    key = QueueKey("000000000000", "us-east-1", "q")
    command = Delete(queue=key, origin=SERVER, handle="", arrived=Instant(0), message_id=b"\0")
    values = {name: "x" if kind.__annotations__[name] is str else 1 for name in kind.fields}
    fault = module.fault_of(kind(**values), command).fault
    return f"{fault.code} ({fault.status})"


def said(kind: type[errors.VeilError]) -> str:
    return (kind.__doc__ or "").split("\n\n")[0]


def faults(protocol: str) -> Iterator[tuple[object, ...]]:
    """Code, status and text of every error that a protocol's port can answer."""
    module = importlib.import_module(f"veilmq.protocols.{protocol}.errors")
    every = {each for each in vars(module).values() if type(each).__name__ == "Fault"}
    for each in sorted(every, key=lambda fault: (fault.status, fault.code)):
        yield code(each.code), each.status, getattr(each, "message", "")


def error_page() -> str:
    model = sorted(errors.leaves(), key=lambda kind: (kind.__bases__[0].__name__, kind.__name__))
    rows = (
        (code(kind.__name__), kind.__bases__[0].__name__, said(kind), *(wire(protocol, kind) for protocol in PROTOCOLS))
        for kind in model
    )
    own = [
        kind
        for _, kind in inspect.getmembers(client_errors, inspect.isclass)
        if issubclass(kind, errors.VeilError) and kind.__module__ == client_errors.__name__
    ]
    tree = textwrap.dedent(inspect.getdoc(errors) or "").partition("\n\n")[2].partition("\n\nStrategy")[0]
    parts = [
        "# Errors",
        "The client library raises these, from `veilmq.model.errors` and `veilmq.client.errors`; data is in their "
        "fields. A server answers each with the code of the protocol that was spoken.",
        "```text\n" + textwrap.dedent(tree) + "\n```",
        "## Of the queue\n\n" + table("error | kind | when | SQS | Azure | MNS", rows),
        "## Of the client\n\n"
        + table("error | kind | when", ((code(kind.__name__), kind.__bases__[0].__name__, said(kind)) for kind in own)),
    ]
    names = {"sqs": "SQS", "azure": "Azure Queue Storage", "mns": "MNS"}
    parts += [f"## On the wire: {names[each]}\n\n" + table("code | status | text", faults(each)) for each in PROTOCOLS]
    parts.append("## Exit codes of veilmq\n\n" + table("code | name", ((int(each), code(each.name)) for each in Exit)))
    parts.append("[Operations](../operations.md#exit-codes) says what to do about each.")
    return "\n\n".join(parts) + "\n"


# Python


def python() -> str:
    text = [
        "# Python API\n\nFrom the code's own docstrings. Durations are seconds and sizes bytes, where a name does not "
        "say otherwise."
    ]
    for section, modules in MODULES.items():
        text.append(f"## {section}")
        text += [f"::: {module}\n    options: {{ heading_level: 3 }}" for module in modules]
    return "\n\n".join(text) + "\n"
