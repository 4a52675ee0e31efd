"""docs/checking.md: its programs print what it shows."""

import re
from pathlib import Path

import pytest

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
