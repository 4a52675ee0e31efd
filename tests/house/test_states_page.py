"""The table of states in the docs is the one in the code, and so is their picture."""

import importlib
from pathlib import Path

import pytest

from veilmq.model.states import STEPS, Step

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-it-works.md"


def row(step: Step) -> str:
    raised = [
        name for name, is_raised in (("attempt", step.raises_attempt), ("rotation", step.raises_rotation)) if is_raised
    ]
    return f"| {step.source} | {step.event} | {step.target} | {', '.join(raised)} |".replace("|  |", "| |")


def test_the_page_prints_the_table() -> None:
    text = PAGE.read_text()
    printed = text.partition("veilmq.model.states.STEPS -->\n")[2].partition("<!-- end of states -->")[0]
    assert printed.splitlines()[2:] == [row(step) for step in STEPS]


def test_the_picture_is_drawn_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    drawn: str = importlib.import_module("pictures").states()
    assert (ROOT / "docs" / "images" / "states.svg").read_text() == drawn
