"""Whether the accelerator is used is one variable, and `veilmq --version` and the start say what came of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from veilmq import accelerator

NOT_BUILT = "import sys; sys.modules['veilmq.accelerator._native'] = None"
SAY = "from veilmq.accelerator import check, functions, status; print(status, len(functions()) > 0); check()"


def said(wanted: str | None, *lines: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != accelerator.VARIABLE}
    environment |= {} if wanted is None else {accelerator.VARIABLE: wanted}
    program = [sys.executable, "-c", "; ".join(lines)] if lines else [sys.executable, "-m", "veilmq", "--version"]
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)


def test_without_one_nothing_else_changes() -> None:
    for wanted, told in (("off", "off (VEILMQ_ACCELERATOR)"), ("auto", "off (not built)"), (None, "off (not built)")):
        done = said(wanted, NOT_BUILT, SAY)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{told} False\n", "")


def test_one_that_is_asked_for_must_be_there() -> None:
    done = said("on", NOT_BUILT, SAY)
    assert done.returncode == 1
    assert "VEILMQ_ACCELERATOR is on, but the accelerator is off (not built): `make accelerator`" in done.stderr


@pytest.mark.skipif(accelerator.status != "on", reason=f"the accelerator is {accelerator.status}")
def test_one_of_other_sources_is_not_used(tmp_path: Path) -> None:
    here = Path(accelerator.__file__).parent
    shutil.copytree(here, tmp_path / "veilmq" / "accelerator")
    shutil.copy(here.parent / "__init__.py", tmp_path / "veilmq")
    changed = tmp_path / "veilmq" / "accelerator" / "sqs.c"
    changed.write_text(changed.read_text() + "\n")
    done = said("auto", f"import sys; sys.path.insert(0, {str(tmp_path)!r})", SAY)
    assert (done.stdout, done.stderr) == ("off (built from other sources: make accelerator) False\n", "")


def test_serve_refuses_another_value() -> None:
    program = [sys.executable, "-m", "veilmq", "serve", "--data", "/nonexistent/data"]
    environment = {**os.environ, accelerator.VARIABLE: "yes"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "veilmq: VEILMQ_ACCELERATOR is 'yes': it may be auto, on or off\n"


def test_the_version_says_which_one_runs() -> None:
    assert said("off").stdout.endswith(", accelerator off (VEILMQ_ACCELERATOR)\n")


@pytest.mark.skipif(accelerator.status != "on", reason=f"the accelerator is {accelerator.status}")
def test_one_that_is_there_is_used() -> None:
    for wanted in ("auto", "on", None):
        done = said(wanted, SAY)
        assert (done.returncode, done.stdout, done.stderr) == (0, "on True\n", "")
    assert said(None).stdout.endswith(", accelerator on\n")
