"""Every `veilmq ...` that a page shows is a command that there is, with options that it has.

Strategy: what begins with the command in a code block (fenced or indented) or in a code span, whatever path or
variables stand before it, is held against the commands themselves. Options are what begins with two dashes, in the
brackets of a synopsis too. Of four pages the indented commands for one server run, too, in order.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from tests.house.test_cli_page import COMMANDS
from tests.support.commands import in_process

from veilmq.testing.for_each import for_each
from veilmq.testing.local import LocalServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_OF_ALL = {"--help", "--version", "--install-completion"}
_COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:sudo .*? env \S+ )?(?:\S*/)?veilmq (.*)$", re.M)
RUN_IN_ORDER = ("cli.md", "observability.md", "operations.md", "pipeline.md")
NOT_RUN = {
    "pipeline": "Spark, on a history: tests/pipeline",
    "work": "a module with a handler: tests/cli/test_work.py",
    "calibrate": "a module with a handler: tests/cli/test_work.py",
    "bridge": "another service: tests/cli/test_bridge.py",
    "import": "another service, or its files: tests/cli/test_import.py",
    "verify": "some minutes: tests/cli/test_verify.py, tests/checking/test_page.py",
    "doctor": "of the machine: tests/cli/test_doctor.py",
    "check --repair": "a damaged directory: tests/cli/test_repair.py",
    "check --data": "a deleted file: tests/cli/test_serve.py",
    "restore": "an archive, or a cluster",
    "events export": "the admin port of its own options: tests/admin",
    "events --from next --follow": "it does not end: tests/cli/test_follow.py",
    "serve": "it does not end",
}
"""Commands of those pages that do not run in order, and why."""
REFUSED = {
    "quarantine drop": "this cannot be undone",
    "jobs cancel": "only a running job can be cancelled",
    # The second is said of a task that ended between the list and the request.
    "moves cancel": "no move task is under way|only a running task can be cancelled",
}
"""What is said, but for a reader who says yes, or whose job or move still runs."""


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


def commands(page: str) -> Iterator[str]:
    """The indented command lines of a page, but for the synopsis of all commands."""
    for token in MarkdownIt().parse((ROOT / "docs" / page).read_text()):
        if token.type == "code_block" and "veilmq queues list | show" not in token.content:
            yield from (found[1] for line in token.content.splitlines() if (found := re.match(r"veilmq (.*)", line)))


def begins(line: str, row: str) -> bool:
    return re.match(rf"{re.escape(row)}(?![a-z])", line) is not None


@pytest.mark.slow  # some fifty commands, some of which wait for the server's work
def test_commands_for_one_server_run_in_order(
    veilmq_server: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = in_process(monkeypatch, capsys, tmp_path)
    monkeypatch.setenv("VEILMQ_DATA", str(veilmq_server.process.data))
    (tmp_path / "backup").mkdir()
    assert run("queues", "create", "failed", "--retention", "14d").code == 0
    shown = {"MESSAGE_ID": run("send", "failed", "5 EUR").out.split()[-1]}
    ran, wrong, rows = 0, [], set()
    for page in RUN_IN_ORDER:
        (tmp_path / page).mkdir()
        monkeypatch.chdir(tmp_path / page)
        for line in commands(page):
            if elsewhere := {row for row in NOT_RUN if begins(line, row)}:
                rows |= elsewhere
                continue
            typed = re.split(r" \| | < ", line)[0].replace("/var/backups/veilmq/", f"{tmp_path}/backup/")
            stdin = "second order\nthird order\n" if " < " in line else ""
            ended = run(*(shown.get(word, word) for word in shlex.split(typed, comments=True)), stdin=stdin)
            if found := re.search(r"^ +handle +(\S+)$", ended.out, re.MULTILINE):
                shown["HANDLE"] = found[1]
            if found := re.match(r"job (\S+) is", ended.out):
                shown["JOB_ID"] = found[1]
            if ended.code and not any(
                begins(line, row) and re.search(said, ended.err) for row, said in REFUSED.items()
            ):
                wrong.append((page, line, ended))
            ran += 1
    assert wrong == []
    assert rows == NOT_RUN.keys()
    assert ran > 50
