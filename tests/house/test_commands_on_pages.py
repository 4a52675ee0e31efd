"""Every `veilmq ...` that a page shows is a command that there is, with options that it has.

Strategy: what begins with the command in a code block (fenced or indented) or in a code span, whatever path or
variables stand before it, is held against the commands themselves; nothing runs. Options are what begins with two
dashes, in the brackets of a synopsis too.
"""

import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from tests.house.test_cli_page import COMMANDS

from veilmq.testing.for_each import for_each

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_OF_ALL = {"--help", "--version", "--install-completion"}
_COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:sudo .*? env \S+ )?(?:\S*/)?veilmq (.*)$", re.M)


def shown(page: Path) -> list[str]:
    """What stands after `veilmq` in the code of a page, without comments and the programs behind a pipe."""
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    tokens += [child for token in tokens for child in token.children or []]
    blocks = [token.content for token in tokens if token.type in {"fence", "code_block", "code_inline"}]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.split(r" #| \| ", found[1])[0].strip() for line in lines if (found := _COMMAND.match(line))]


def wrong(line: str) -> list[str]:
    """What of a command line no command has: its name, or its options."""
    words = [word for word in re.split(r"[\s\[\]]+", line) if word]
    for path, command in COMMANDS.items():
        if tuple(words[: len(path)]) == path:
            return sorted(options(words) - {name for each in command.params for name in known(each)} - {"--help"})
    # Placeholders, as in `veilmq COMMAND --help` and `veilmq pipeline NAME`, stand for any.
    named = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
    is_group = bool(named) and any(path[: len(named)] == tuple(named) for path in COMMANDS)
    return [] if is_group or (not named and options(words) <= _OF_ALL) else named or words


def known(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


def options(words: list[str]) -> set[str]:
    return {found[0] for word in words if (found := re.match(r"--[a-z][a-z-]*", word))}


def test_commands_exist_with_their_options() -> None:
    lines = ((page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in shown(page))
    assert [(page, line, found) for page, line in lines if (found := wrong(line))] == []


def test_the_pages_show_commands() -> None:
    assert sum(len(shown(page)) for page in PAGES) > 80
    assert "pipeline report --out report" in shown(ROOT / "docs" / "pipeline.md")


@for_each(
    ("line", "said"),
    [
        ("pipeline report --out report", []),
        ("queues", []),
        ("pipeline NAME", []),
        ("COMMAND --help", []),
        ("queues rename orders", ["queues", "rename"]),
        ("queues plan orders --adaptive apply --longest 5s", ["--longest"]),
        ("pipeline tidy DIR [--window 5m]", ["--window"]),
        ("sends orders", ["sends", "orders"]),
        ("--nothing", ["--nothing"]),
    ],
)
def test_what_is_not_there_is_found(line: str, said: list[str]) -> None:
    assert wrong(line) == said
