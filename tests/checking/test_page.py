"""docs/checking.md: its programs print what it shows."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import bare
from tests.support.ports import kept_ports

from veilmq.checking.report import Promises, Rule

PAGE = (Path(__file__).parents[2] / "docs" / "checking.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_programs_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (history,) = blocks("json")
    Path("history.jsonl").write_text(history)
    for program, shown in zip(blocks("python"), blocks("text"), strict=True):
        exec(compile(program, "docs/checking.md", "exec"), {})
        assert capsys.readouterr().out == shown


def test_every_rule_and_every_promise_is_on_the_page() -> None:
    assert [rule.value for rule in Rule if rule.value not in PAGE] == []
    assert [name for name in Promises.__struct_fields__ if f"`{name}" not in PAGE] == []


@pytest.mark.slow
def test_the_server_of_the_page_is_killed_and_verified(tmp_path: Path) -> None:
    """As it stands, on a free port and for a few seconds."""
    (script,), (commands,) = blocks("sh"), blocks("bash")
    others = " ".join(f"--{name} 127.0.0.1:0" for name in ("azure", "mns", "admin"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with kept_ports(1) as (port,):
        (tmp_path / "restart.sh").write_text(
            script.replace("veilmq serve", f"veilmq serve --sqs 127.0.0.1:{port} {others}")
        )
        (tmp_path / "restart.sh").chmod(0o700)
        commands = commands.replace("9324", str(port)).replace("--minutes 1", "--minutes 0.1 --kill-every 3s")
        try:
            ended = subprocess.run(
                ["bash", "-eu", "-c", commands], cwd=tmp_path, env=bare(PATH=path), capture_output=True, text=True
            )
        finally:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, *_, driven, checked = ended.stdout.splitlines()
    assert re.fullmatch(r"seed \d+, 4 clients, \d+ s, 1 round, [1-9] kills?", first)
    assert driven == checked
    assert re.fullmatch(r"\d+ operations on \d+ messages: no violation", checked)
