"""Modules that a test writes, for handlers that child processes must find too."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest


@contextmanager
def importable(text: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of that text; child processes get this process's path."""
    name = f"handlers_{place.name.replace('-', '_')}"
    (place / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(place)
    yield __import__(name)
    del sys.modules[name]
