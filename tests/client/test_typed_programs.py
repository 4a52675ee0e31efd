"""What a user's type checker says of the programs that we show: nothing."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import veilmq.client
from veilmq.client.queue import Account, Queue
from veilmq.testing.for_each import for_each

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "patterns").glob("*.md"))
_PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

_CHECKED = """
import veilmq
from veilmq.client.encrypted import EncryptedQueue, KeyFile
from veilmq.client.errors import Unreadable
from veilmq.client.messages import Received
from veilmq.client.queue import Queue

def aside(inner: Queue, came: Received, why: Unreadable) -> None: ...

EncryptedQueue(veilmq.connect("veil://host/jobs"), KeyFile("keys.json"), unreadable=aside)
veilmq.conect("veil://host/jobs")  # type: ignore[attr-defined]
"""
"""A policy whose parameters have other names than ours, and a name that is misspelt: only that is an error."""


def checked(directory: Path, *options: str) -> str:
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={directory / 'cache'}", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, check=False).stdout


@pytest.mark.slow
def test_the_examples_are_typed(tmp_path: Path) -> None:
    examples = [str(each) for each in sorted((ROOT / "examples").glob("*.py"))]
    assert checked(tmp_path, "--strict", *examples).startswith("Success")


@pytest.mark.slow
def test_the_programs_of_the_patterns_pages_fit_the_types(tmp_path: Path) -> None:
    """Those that are whole: the others go on from what stands above them."""
    names = []
    for page in PAGES:
        found = _PROGRAM.search(page.read_text())
        if found is not None and found[1].startswith(("import", "from")):
            names.append(f"{page.stem.replace('-', '_')}.py")
            (tmp_path / names[-1]).write_text(found[1])
    assert len(names) >= 9
    names.append("checked.py")
    (tmp_path / names[-1]).write_text(_CHECKED)
    unsaid = ["--disable-error-code=var-annotated", "--check-untyped-defs", "--warn-unused-ignores"]
    assert checked(tmp_path, *unsaid, *names).startswith("Success")


def classes_like(port: type) -> Iterator[type]:
    calls = [name for name, call in vars(port).items() if inspect.isfunction(call) and not name.startswith("_")]
    for module in pkgutil.walk_packages(veilmq.client.__path__, "veilmq.client."):
        for found in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(found) and found is not port and all(hasattr(found, call) for call in calls):
                yield found


@for_each("port", [Queue, Account])
def test_a_parameter_has_the_ports_name_on_every_queue(port: type) -> None:
    """Or a call with keywords works on one queue and fails on another, and pyright takes neither for a `Queue`."""
    found = set(classes_like(port))
    assert len(found) > 5
    other = [
        f"{each.__module__}.{each.__name__}.{name} has no parameter {parameter}"
        for each in found
        for name, call in vars(port).items()
        if inspect.isfunction(call) and not name.startswith("_")
        for parameter in inspect.signature(call).parameters
        if parameter not in ["self", *inspect.signature(getattr(each, name)).parameters]
    ]
    assert other == []
