"""The table of states in the docs is the one in the code; so are its picture, and the picture of the places."""

import importlib
from pathlib import Path

import pytest

from veilmq.model.messages.states import STEPS, State, Step
from veilmq.store.sqlite.messages import FLUSH, PLACES, WAYS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-it-works.md"


def row(step: Step) -> str:
    raised = [
        name for name, is_raised in (("attempt", step.raises_attempt), ("rotation", step.raises_rotation)) if is_raised
    ]
    return f"| {step.source} | {step.event} | {step.target} | {', '.join(raised)} |".replace("|  |", "| |")


def test_the_page_prints_the_table() -> None:
    text = PAGE.read_text()
    printed = text.partition("veilmq.model.messages.states.STEPS -->\n")[2].partition("<!-- end of states -->")[0]
    assert printed.splitlines()[2:] == [row(step) for step in STEPS]


def test_the_picture_is_drawn_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    drawn: str = importlib.import_module("pictures").states()
    assert (ROOT / "docs" / "images" / "states.svg").read_text() == drawn


def test_the_picture_of_the_places_is_drawn_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    drawn: str = importlib.import_module("pictures").places()
    assert (ROOT / "docs" / "images" / "places.svg").read_text() == drawn


def test_each_way_is_a_step_of_the_table_or_a_flush() -> None:
    steps = {(step.source, step.event, step.target) for step in STEPS}
    for way in WAYS:
        if way.event == FLUSH:
            assert way.source.state is way.target.state, way
        else:
            assert (way.source.state, way.event, way.target.state) in steps, way


def test_every_state_has_a_place_and_every_place_is_on_a_way() -> None:
    assert {where.state for where in PLACES} == set(State)
    assert {where for way in WAYS for where in (way.source, way.target)} == set(PLACES)
