"""The drawn pictures of docs/images are what their scripts draw, and every picture is shown on a page."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURES = script("pictures").PICTURES | script("concept_pictures").PICTURES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "recovery" else []) for name in PICTURES]
)
def test_a_picture_is_as_drawn(name: str) -> None:
    assert (IMAGES / f"{name}.svg").read_text() == PICTURES[name]()


def test_every_picture_is_shown() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert [image.name for image in IMAGES.glob("*.svg") if f"images/{image.name})" not in pages] == []
