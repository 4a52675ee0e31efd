"""The manual page and the completions that `make man` writes are true: every command and option, and real shells take
them."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.house.test_cli_page import COMMANDS

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "shell_files.py"
SHELL_SECONDS = 60


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("shell_files", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make man` writes."""
    directory = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, TOOL, directory], check=True)
    return directory


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A PATH with the command `veilmq` of this checkout."""
    program = tmp_path / "veilmq"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m veilmq "$@"\n')
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def test_the_page_has_every_command_and_option(tool: Any, files: Path) -> None:
    page = (files / tool.PAGE).read_text().replace("\\-", "-")
    sections = {each.partition("\n")[0]: each for each in page.split(".SS veilmq ")[1:]}
    assert set(sections) == {" ".join(words) for words in COMMANDS}
    missing = [
        (words, flag)
        for words, command in COMMANDS.items()
        if words != ("doctor",)  # which takes those of `serve`
        for option in command.params
        if option.param_type_name == "option"
        for flag in (*option.opts, *option.secondary_opts)
        if flag not in sections[" ".join(words)]
    ]
    assert missing == []


def test_groff_takes_the_page(tool: Any, files: Path) -> None:
    page = files / tool.PAGE
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", page], capture_output=True, text=True, timeout=SHELL_SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the data directory is held" in " ".join(done.stdout.split())


def test_bash_completes(tool: Any, files: Path, path: str) -> None:
    words = 'COMP_WORDS=(veilmq br); COMP_CWORD=1; _veilmq_completion veilmq; echo "${COMPREPLY[@]}"'
    assert in_shell("bash", f". {files / tool.COMPLETIONS['bash']}; {words}", path) == "bridge"


@pytest.mark.slow  # `make setup-clients` installs these shells
@pytest.mark.parametrize(
    ("shell", "script"),
    [
        # compinit needs a terminal for nothing but its menus: the function is called as zsh calls it.
        ("zsh", "words=(veilmq br); CURRENT=2; _arguments() {{ print -l -- $@ }}; . {file}"),
        ("fish", 'source {file}; complete --do-complete "veilmq br"'),
    ],
)
def test_other_shells_complete(tool: Any, files: Path, path: str, shell: str, script: str) -> None:
    assert "bridge" in in_shell(shell, script.format(file=files / tool.COMPLETIONS[shell]), path)


def in_shell(shell: str, script: str, path: str) -> str:
    done = subprocess.run(
        [shell, "-c", script], capture_output=True, text=True, timeout=SHELL_SECONDS,
        env={"PATH": path, "HOME": "/nonexistent", "TERM": "dumb"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
