"""docs/checking.md: its log is checked by its program, and the result is the one that it shows."""

import re
from pathlib import Path

import pytest

from veilmq.checking.report import Promises, Rule

PAGE = (Path(__file__).parents[2] / "docs" / "checking.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("history.jsonl").write_text(block("json"))
    exec(compile(block("python"), "docs/checking.md", "exec"), {})
    assert capsys.readouterr().out == block("text")


def test_every_rule_and_every_promise_is_on_the_page() -> None:
    assert [rule.value for rule in Rule if rule.value not in PAGE] == []
    assert [name for name in Promises.__struct_fields__ if f"`{name}" not in PAGE] == []
