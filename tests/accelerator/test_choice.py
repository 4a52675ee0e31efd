"""Whether the accelerator is used is one variable, and `veilmq --version` and the start say what came of it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from veilmq import accelerator
from veilmq.testing.for_each import for_each

ROOT = Path(__file__).parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
BUILT = pytest.mark.skipif(accelerator.status != "on", reason=f"the accelerator is {accelerator.status}")
HEADERS = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="Python's headers are missing"
)
MAKES_NO_MODULE = 'while [ "$1" != -o ]; do shift; done; echo no module > "$2"'
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


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the accelerator's files: to be used with `of(copied)`."""
    here = Path(accelerator.__file__).parent
    shutil.copytree(here, tmp_path / "src" / "veilmq" / "accelerator", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(here.parent / "__init__.py", tmp_path / "src" / "veilmq")
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "accelerator.py", tmp_path / "tools")
    return tmp_path / "src" / "veilmq" / "accelerator"


def of(copied: Path) -> str:
    return f"import sys; sys.path.insert(0, {str(copied.parents[1])!r})"


@BUILT
def test_one_of_other_sources_is_not_used(copied: Path) -> None:
    (copied / ".#sqs.c").symlink_to("user@host.1234")  # an editor's lock
    assert said("auto", of(copied), SAY).stdout == "on True\n"
    (copied / "odd.c").symlink_to("nothing")
    done = said("auto", of(copied), SAY)
    assert re.fullmatch(r"off \(its sources cannot be read: .*/odd\.c'\) False\n", done.stdout)
    (copied / "odd.c").unlink()
    (copied / "sqs.c").write_text((copied / "sqs.c").read_text() + "\n")
    done = said("auto", of(copied), SAY)
    assert (done.stdout, done.stderr) == ("off (built from other sources: make accelerator) False\n", "")


def test_one_that_does_not_load_says_why(copied: Path) -> None:
    (copied / f"_native{SUFFIX}").unlink(missing_ok=True)
    (copied / f"_native{SUFFIX}").write_text("no module")
    done = said("auto", of(copied), SAY)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"off \(cannot be loaded: .+\) False\n", done.stdout)
    done = said("on", of(copied), SAY)
    assert done.returncode == 1
    assert "VEILMQ_ACCELERATOR is on, but the accelerator is off (cannot be loaded: " in done.stderr


def compiler(home: Path, script: str, mode: int = 0o755) -> str:
    (home / "compiler").write_bytes(f"#!/bin/sh\n{script}\n".encode("latin-1"))
    (home / "compiler").chmod(mode)
    return str(home / "compiler")


def built(copied: Path, cc: str, *arguments: str) -> tuple[int, str]:
    """Exit code and line of a build by that compiler, which must leave no file behind."""
    files = sorted(copied.iterdir())
    program = [sys.executable, str(copied.parents[2] / "tools" / "accelerator.py"), *arguments]
    done = subprocess.run(program, env={**os.environ, "CC": cc}, capture_output=True, text=True, timeout=60)
    assert (done.stdout, sorted(copied.iterdir())) == ("", files)
    return done.returncode, done.stderr.removeprefix("veilmq: without the accelerator, which only makes it faster: ")


@HEADERS
def test_a_build_that_fails_says_why_and_what_to_type(copied: Path, tmp_path: Path) -> None:
    there = f"{tmp_path}/compiler"
    for script, mode, cc, told in (
        ("", 0o755, "/nonexistent/cc", "there is no C compiler `/nonexistent/cc` (on Debian: apt-get install gcc "),
        ("", 0o644, there, f"{there}: Permission denied; "),
        ("echo f\xfcr >&2; exit 1", 0o755, there, "the compiler failed: f\ufffdr; "),
        ("exit 3", 0o755, there, "the compiler failed: exit code 3; "),
        (MAKES_NO_MODULE, 0o755, there, "what the compiler made cannot be loaded: ImportError: "),
        ("", 0o755, "cc '", 'CC is "cc \'", which is no command: No closing quotation; '),
    ):
        compiler(tmp_path, script, mode)
        for arguments, exit_code in ((["--must"], 1), ([], 0)):
            code, line = built(copied, cc, *arguments)
            assert (code, line.startswith(told)) == (exit_code, True), line
            assert line.endswith("; then `make accelerator`\n")
        assert built(copied, cc, "--later") == (0, "")


@HEADERS
def test_make_builds_when_a_compiler_came_later(copied: Path, tmp_path: Path) -> None:
    tree = copied.parents[2]
    shutil.copy(ROOT / "Makefile", tree)
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for stamp in (".installed-run", ".installed-dev"):
        (tree / ".venv" / stamp).touch()
    for module in copied.glob("*.so"):
        module.unlink()

    def make(cc: str) -> bool:
        """Whether the compiler ran."""
        (tmp_path / "ran").unlink(missing_ok=True)
        command = ["make", "--old-file=.venv/.installed-run", "setup"]
        done = subprocess.run(
            command, cwd=tree, env={**os.environ, "CC": cc}, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return (tmp_path / "ran").exists()

    cc = compiler(tmp_path, f"touch {tmp_path}/ran; exit 1")
    assert not make("/nonexistent/cc")
    assert make(f"{cc} -m64")
    (copied / f"_native{SUFFIX}").touch()
    assert not make(cc)


@for_each("command", [["serve", "--data", "/nonexistent/data"], ["--version"], ["version"]])
def test_a_command_refuses_another_value(command: list[str]) -> None:
    program = [sys.executable, "-m", "veilmq", *command]
    environment = {**os.environ, accelerator.VARIABLE: "Yes"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "veilmq: VEILMQ_ACCELERATOR is 'Yes': it may be auto, on or off\n"


def test_a_queue_in_a_directory_refuses_another_value(tmp_path: Path) -> None:
    done = said("0", f"import veilmq; veilmq.connect('veil://{tmp_path}/data?queue=jobs&create=1')")
    assert done.returncode == 1
    assert done.stderr.endswith("AcceleratorMissing: VEILMQ_ACCELERATOR is '0': it may be auto, on or off\n")
    assert list(tmp_path.iterdir()) == []


def test_the_version_says_which_one_runs() -> None:
    for wanted in ("off", "OFF"):
        assert said(wanted).stdout.endswith(", accelerator off (VEILMQ_ACCELERATOR)\n")


@BUILT
def test_one_that_is_there_is_used() -> None:
    (module,) = Path(accelerator.__file__).parent.glob(f"_native{SUFFIX}")
    guards = {each for each in (b"__stack_chk_fail", b"__asan_report") if each in module.read_bytes()}
    assert guards, "what it reads comes from outside"
    for wanted in ("auto", "on", "On", None):
        done = said(wanted, SAY)
        assert (done.returncode, done.stdout, done.stderr) == (0, "on True\n", "")
    assert said(None).stdout.endswith(", accelerator on\n")
