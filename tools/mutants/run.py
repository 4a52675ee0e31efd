"""Checks that the tests catch bugs: each patch beside this file puts one into the code, and the tests that it names
must fail.

    make mutants ARGS="store/ --thorough"
    python tools/mutants/run.py [NAME ...] [--thorough] [--check] [--jobs 2]

Strategy: everything happens in copies of the tree, one per job; the work tree is only read. First all named tests run
without any patch; a patch with a test that fails then is not judged, nor one whose tests are all skipped. Then each
other patch is applied alone, its tests run until one fails, and the file is restored. A patch that no longer applies or
is not judged, a named test that does not exist, and a patch that no test kills are failures: the exit code is 1.

A patch is a unified diff of one file. Its head says in one line what the bug does to a user, and then names the tests,
the cheapest first, without the ids of parameters:

    A handle whose lease ended deletes the message of the worker that holds it now.

    Killed by: tests/store/test_contract.py::TestHandles::test_an_old_handle_is_refused
    --- a/src/veilmq/...
"""

import argparse
import importlib.util
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KILLED_BY = "Killed by: "
TEST_SECONDS_MAX = 60
"""Limit per named test: a bug that makes it hang counts as caught."""
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".tools", ".data", ".peers", "__pycache__", ".*_cache", ".hypothesis", "dist", "veilmq-data"
)
LINKED = (".venv", ".tools")
_WORKERS = ("--dist", "loadgroup", "--max-worker-restart", "0", "-n")

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
_CLASS_OR_TEST = re.compile(r"^(?:class (\w+)|( {4})?(?:async )?def (test_\w+))", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?::.+?)(?: - .*)?$", re.MULTILINE)
_PASSED = re.compile(r"^=+ .*\d+ passed", re.MULTILINE)
_LAST = re.compile(r"^(tests/\S+::\S+)", re.MULTILINE)


class Broken(Exception):
    """A patch that cannot be tested, and why."""


class Hunk(NamedTuple):
    """One place of a patch."""

    line: int
    before: str
    after: str


class Mutant(NamedTuple):
    """One patch."""

    name: str
    says: str
    """What the bug does to a user."""
    tests: list[str]
    path: str
    hunks: list[Hunk]


class Verdict(NamedTuple):
    """The result of a mutant."""

    mutant: Mutant
    killer: str | None
    seconds: float


def parsed(name: str, text: str) -> Mutant:
    """Raises Broken."""
    head, minus, diff = text.partition("\n--- a/")
    path, _, body = diff.partition("\n")
    lines = [line for line in head.splitlines() if line]
    tests = [line.removeprefix(KILLED_BY) for line in lines if line.startswith(KILLED_BY)]
    says = [line for line in lines if not line.startswith(KILLED_BY)]
    if len(says) != 1 or not tests or not minus or not body.startswith(f"+++ b/{path}\n"):
        raise Broken(f"{name}: a patch is one line that says what the bug does, the tests, and a diff of one file")
    hunks = list(_hunks(body.splitlines(keepends=True)[1:]))
    if not hunks or body.count("\n--- a/"):
        raise Broken(f"{name}: a patch is of one file")
    return Mutant(name, says[0], tests, path, hunks)


def _hunks(lines: Sequence[str]) -> Iterator[Hunk]:
    starts = [number for number, line in enumerate(lines) if _HUNK.match(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        found = _HUNK.match(lines[start])
        assert found is not None
        body = [line if line != "\n" else " \n" for line in lines[start + 1 : end]]
        before = "".join(line[1:] for line in body if line[0] in " -")
        after = "".join(line[1:] for line in body if line[0] in " +")
        yield Hunk(int(found[1]), before, after)


def patched(mutant: Mutant, source: str) -> str:
    """The file with the bug. Raises Broken if the patch fits nowhere, or at several places of which none is its own."""
    moved = 0
    for hunk in mutant.hunks:
        own = _offset(source, hunk.line - 1 + moved)
        places = [at.start() for at in re.finditer(f"^{re.escape(hunk.before)}", source, re.MULTILINE)]
        if len(places) != 1 and own not in places:
            found = "no place" if not places else f"{len(places)} places"
            raise Broken(f"{mutant.name}: does not apply: {mutant.path} has {found} for the lines at {hunk.line}")
        at = own if own in places else places[0]
        source = source[:at] + hunk.after + source[at + len(hunk.before) :]
        moved += hunk.after.count("\n") - hunk.before.count("\n")
    return source


def _offset(source: str, line: int) -> int:
    return sum(len(each) for each in source.splitlines(keepends=True)[:line])


def mutants(names: Sequence[str] = ()) -> tuple[list[Mutant], list[str]]:
    """All patches with one of these texts in their name, and the problems of patches and named tests."""
    good, wrong = [], []
    for path in sorted(HERE.rglob("*.patch")):
        name = path.relative_to(HERE).with_suffix("").as_posix()
        if names and not any(each in name for each in names):
            continue
        try:
            mutant = parsed(name, path.read_text())
            if not (ROOT / mutant.path).is_file():
                raise Broken(f"{name}: does not apply: there is no {mutant.path}")
            patched(mutant, (ROOT / mutant.path).read_text())
        except Broken as error:
            wrong.append(str(error))
            continue
        missing = [test for test in mutant.tests if not exists(test)]
        wrong += [f"{name}: there is no {test}" for test in missing]
        if not missing:
            good.append(mutant)
    return good, wrong


def exists(test: str) -> bool:
    """Whether there is such a test, by the texts of the files: a suite's classes may be imported from elsewhere."""
    file, *names = test.split("::")
    path = ROOT / file
    if not path.is_file() or not names:
        return False
    if len(names) == 1:
        return ("", names[0]) in _tests_of(path)
    return tuple(names) in _tests_of(path) or tuple(names) in _suites()


@cache
def _tests_of(path: Path) -> frozenset[tuple[str, ...]]:
    """(class or "", function) of each test in a file."""
    found, inside = set(), ""
    for name, indent, function in _CLASS_OR_TEST.findall(path.read_text()):
        if name:
            inside = name
        else:
            found.add((inside if indent else "", function))
    return frozenset(found)


@cache
def _suites() -> frozenset[tuple[str, ...]]:
    """Those of all classes in the tests and in `veilmq.testing`."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "src" / "veilmq" / "testing").rglob("*.py")]
    return frozenset().union(*map(_tests_of, files))


class Tree:
    """A copy of the tree, for one mutant at a time."""

    def __init__(self, home: Path) -> None:
        self.home = home
        shutil.copytree(ROOT, home, ignore=NOT_COPIED, symlinks=True)
        for name in LINKED:
            if (ROOT / name).exists():
                (home / name).symlink_to(ROOT / name)
        self._environment = {**os.environ, "PYTHONPATH": str(home / "src")}

    def pytest(self, *arguments: str, accelerator: str = "auto") -> subprocess.CompletedProcess[str]:
        """Run tests here."""
        environment = self._environment | {"VEILMQ_ACCELERATOR": accelerator}
        command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=self.home, env=environment, capture_output=True, text=True, check=False)

    def judge(self, mutant: Mutant, thorough: bool) -> Verdict:
        """Raises Broken if its code cannot even be imported, or its tests are skipped."""
        began = time.perf_counter()
        self._write(mutant, patched(mutant, (ROOT / mutant.path).read_text()))
        try:
            named = ("-v", "-x", "-n", "0", "--timeout", str(TEST_SECONDS_MAX), *mutant.tests)
            done = self.pytest(*named)
            if done.returncode == 0 and not _PASSED.search(done.stdout):
                raise Broken(f"{mutant.name}: not judged, as its tests are skipped here")
            if done.returncode == 0:
                done = self.pytest(*named, accelerator="off")  # the bug may be in what the accelerator does in C
            if done.returncode == 0 and thorough:
                done = self.pytest(
                    "-x", "-n", "2", "--dist", "loadgroup", "--max-worker-restart", "0", "-m", "not slow"
                )
        finally:
            self._write(mutant, (ROOT / mutant.path).read_text())
        # Workers that stop at the first failure end with 2, as a run does whose tests cannot be imported.
        if done.returncode > 1 and not _FAILED.search(done.stdout):
            raise Broken(f"{mutant.name}: the tests cannot run with it:\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}")
        return Verdict(mutant, _killer(done) if done.returncode else None, time.perf_counter() - began)

    def _write(self, mutant: Mutant, source: str) -> None:
        path = self.home / mutant.path
        path.write_text(source)
        # Python cannot tell apart two versions with the same size and the same second.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _killer(done: subprocess.CompletedProcess[str]) -> str:
    failed = _FAILED.search(done.stdout)
    if failed is not None:
        return failed[1]
    running = _LAST.findall(done.stdout)  # it ended the process: pytest had no time for a summary
    return f"{running[-1]}, which did not end" if running else "a test that did not end"


def failing(tree: Tree, tests: Sequence[str], jobs: int) -> list[str]:
    """Which of these tests fail without any patch, or cannot run."""
    done = tree.pytest("-q", *tests, *_WORKERS, str(jobs))
    if done.returncode == 0:
        return []
    return _FAILED.findall(done.stdout) or [done.stdout[-4_000:] + done.stderr[-4_000:]]


def _is_of(mutant: Mutant, test: str) -> bool:
    """Whether it names that test; what pytest says of one has the parameters too."""
    return any(test == named or test.startswith(f"{named}[") for named in mutant.tests)


def judged(trees: Sequence[Tree], chosen: Sequence[Mutant], thorough: bool) -> Iterator[Verdict | Broken]:
    """One after the other in each tree, as they end."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Verdict | Broken] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> None:
        tree = free.get()
        try:
            ended.put(tree.judge(mutant, thorough))
        except Broken as error:
            ended.put(error)
        except BaseException as error:
            ended.put(Broken(f"{mutant.name}: {error!r}"))
            raise
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for mutant in chosen:
            pool.submit(one, mutant)
        for _ in chosen:
            yield ended.get()


def run(chosen: Sequence[Mutant], thorough: bool, jobs: int) -> list[str]:
    """Judge them, and print each verdict; what is wrong."""
    with tempfile.TemporaryDirectory(prefix="veilmq-mutants-") as directory:
        trees = [Tree(Path(directory, str(number))) for number in range(min(jobs, len(chosen)))]
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        print(f"{len(tests)} named tests without any patch ...", flush=True)
        failed = failing(trees[0], tests, jobs)
        wrong = [f"fails without any patch: {test}" for test in failed]
        if not all(test.startswith("tests/") for test in failed):
            return wrong
        sound = [mutant for mutant in chosen if not any(_is_of(mutant, test) for test in failed)]
        wrong += [f"{mutant.name}: not judged, as one of its tests fails" for mutant in chosen if mutant not in sound]
        for verdict in judged(trees, sound, thorough):
            if isinstance(verdict, Broken):
                wrong.append(str(verdict))
                continue
            mutant = verdict.mutant
            fate = f"killed by {verdict.killer}" if verdict.killer else "SURVIVED"
            print(f"{mutant.name}: {fate} ({verdict.seconds:.0f} s)", flush=True)
            if verdict.killer is None:
                wrong.append(f"no test kills {mutant.name}: {mutant.says}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only patches with one of these texts in their name")
    parser.add_argument("--thorough", action="store_true", help="if the named tests let it live, run all fast tests")
    parser.add_argument("--check", action="store_true", help="only whether patches apply and named tests exist")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree to work in at once")
    options = parser.parse_args()
    began = time.perf_counter()
    chosen, wrong = mutants(options.names)
    if not chosen and not wrong:
        sys.exit("there is no such patch")
    if chosen and not options.check:
        wrong += run(chosen, options.thorough, options.jobs)
    for each in wrong:
        print(each, file=sys.stderr)
    what = "checked" if options.check else f"judged in {time.perf_counter() - began:.0f} s"
    print(f"{len(chosen)} patches {what}, {len(wrong)} failures")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
