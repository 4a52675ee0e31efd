"""docs/cli.md names every command, and every option of those that run a handler or clients."""

from pathlib import Path
from typing import Any

import typer.core
import typer.main

from veilmq.cli import application
from veilmq.cli.help import by_heading
from veilmq.testing.for_each import for_each

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
SHOWN = [line.strip() for line in PAGE.splitlines() if line.startswith("    veilmq ")]


def leaves(command: Any, *path: str) -> dict[tuple[str, ...], Any]:
    """Every command that does something, by its words."""
    if not isinstance(command, typer.core.TyperGroup):
        return {path: command}
    return {words: leaf for name, each in command.commands.items() for words, leaf in leaves(each, *path, name).items()}


COMMANDS = leaves(typer.main.get_command(application()))


def row(option: Any) -> str:
    flags = ", ".join([*option.opts, *option.secondary_opts])
    shown = flags if option.is_flag else f"{flags} {option.metavar}"
    default = option.default if option.show_default and not option.is_flag else None
    text = option.help if default in (None, "") else f"{option.help.removesuffix('.')} [{default}]."
    return f"| `{shown}` | {text} |".replace("DIR|URL", "DIR\\|URL")


def is_shown(words: tuple[str, ...]) -> bool:
    """As a line of its own, or as one of the names in `veilmq GROUP NAME | NAME ...`."""
    whole, group = " ".join(("veilmq", *words)), " ".join(("veilmq", *words[:-1], ""))
    for line in SHOWN:
        if f"{line} ".startswith(f"{whole} "):
            return True
        if line.startswith(group) and words[-1] in line.removeprefix(group).split(" | "):
            return True
    return False


def test_every_command_is_there() -> None:
    assert len(COMMANDS) > 20
    assert [words for words in COMMANDS if not is_shown(words)] == []


def test_what_is_not_there_is_not_found() -> None:
    assert not is_shown(("queues", "rename"))
    assert not is_shown(("sen",))


@for_each(
    ("name", "room"),
    [("work", "work"), ("calibrate", "work"), ("verify", "work"), ("bridge", "migrate"), ("import", "migrate")],
)
def test_every_option_is_there(name: str, room: str) -> None:
    _, begin, rest = PAGE.partition(f"<!-- options of veilmq {name}: printed from veilmq.cli.{room} -->")
    assert begin
    rows = rest.partition("<!-- end of options -->")[0].strip().splitlines()[2:]
    found = by_heading(COMMANDS[(name,)], COMMANDS[(name,)].params)
    found.pop("Arguments", None)
    texts = {heading: [row(option) for option in options] for heading, options in found.items()}
    expected = [line for heading, lines in texts.items() for line in (f"| **{heading}** | |", *lines)]
    assert rows == (expected if len(found) > 1 else expected[1:])
