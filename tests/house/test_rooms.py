"""Rules of the house that neither ruff nor import-linter can state: sizes, names, and what each room may use.

ruff's list of banned calls (pyproject.toml) is lifted for some files as a whole; the tables here say which of them each
of those may use, and which packages of others a room may import at all.
"""

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from veilmq.testing.for_each import for_each

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MODULES = sorted(SOURCE.rglob("*.py"))

LINES_MAX = 500
FUNCTION_LINES_MAX = 75
ROOM_LINES_MAX = 1_500
"""The modules of one directory together."""
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager", "managers"}

# What a room may import from others than the standard library and VeilMQ itself. A room that is not named may import
# any dependency of pyproject.toml but SQLite's.
IMPORTS_ALLOWED = {
    "checking": {"msgspec"},
    "estimate": {"msgspec"},
    "model": {"msgspec"},
    "protocols": {"msgspec"},
    "engine": {"msgspec"},
    "store": {"msgspec", "apsw", "fsspec"},
}
SQLITE = {"apsw", "sqlite3"}
SQLITE_ROOMS = {"store"}
# The rooms without I/O: neither a socket nor an event loop nor a thread.
IO_MODULES = {"asyncio", "multiprocessing", "select", "selectors", "socket", "ssl", "subprocess", "threading"}
IO_FREE_ROOMS = {"checking", "estimate", "model", "protocols", "engine"}

CLOCKS = {
    "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.clock_gettime", "time.clock_gettime_ns",
    "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today",
}  # fmt: skip
ENVIRONMENT = {"os.environ", "os.getenv"}
SYNCS = {"os.fsync", "os.fdatasync"}
RANDOM = {"random"}
MOCKS = {"unittest.mock"}
BANNED_ANYWHERE = CLOCKS | ENVIRONMENT | SYNCS | RANDOM | MOCKS

# Path below src/veilmq, and which of the banned it may use.
EXEMPT = {
    "accelerator": ENVIRONMENT,
    "cli": ENVIRONMENT,
    "server/clock.py": CLOCKS,
    "client/clock.py": CLOCKS,
    "driver": RANDOM,
    "pipeline/session.py": ENVIRONMENT,
    "store": SYNCS,
    "testing": RANDOM | ENVIRONMENT,
}


def used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of each import and of each dotted use of an imported name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if dotted is not None and dotted[0] in names:
            yield node.lineno, ".".join([names[dotted[0]], *dotted[1:]])  # type: ignore[attr-defined]


def _dotted(node: ast.AST) -> list[str] | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) and parts else None


def uses(source: str, banned: set[str]) -> list[str]:
    """`line: name` for each use in `source` of a banned name or of anything below one."""
    found = {
        f"{line}: {ban}"
        for line, name in used_names(ast.parse(source))
        for ban in banned
        if name == ban or name.startswith(ban + ".")
    }
    return sorted(found)


def imported_packages(source: str) -> set[str]:
    return {name.partition(".")[0] for _, name in _imports(ast.parse(source))}


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


def room_of(path: Path) -> str:
    parts = path.relative_to(SOURCE / "veilmq").parts
    return parts[0] if len(parts) > 1 else ""


def allowed(path: Path) -> set[str]:
    place = path.relative_to(SOURCE / "veilmq").as_posix()
    return set().union(*(names for at, names in EXEMPT.items() if place == at or place.startswith(at + "/")))


def test_there_is_something_to_check() -> None:
    assert MODULES


@for_each(
    ("source", "banned", "found"),
    [
        ("import time\nnow = time.time()", CLOCKS, ["2: time.time"]),
        ("import time as t\nnow = t.time_ns()", CLOCKS, ["2: time.time_ns"]),
        ("from time import time", CLOCKS, ["1: time.time"]),
        ("from datetime import datetime as d\nd.now()", CLOCKS, ["2: datetime.datetime.now"]),
        ("import os\nhome = os.environ['HOME']", ENVIRONMENT, ["2: os.environ"]),
        ("from os import fsync\nfsync(1)", SYNCS, ["1: os.fsync"]),
        ("import random", RANDOM, ["1: random"]),
        ("from random import Random", RANDOM, ["1: random"]),
        ("from unittest import mock", MOCKS, ["1: unittest.mock"]),
        ("import time\ntook = time.perf_counter()", CLOCKS, []),
        ("import randomness\ntimer.time()", CLOCKS | RANDOM, []),
    ],
)
def test_uses_finds_what_is_banned(source: str, banned: set[str], found: list[str]) -> None:
    assert uses(source, banned) == found


def offenders(check: Callable[[Path], str]) -> list[str]:
    """`path: what is wrong` for each module that the check finds fault with."""
    found = ((path, check(path)) for path in MODULES)
    return [f"{path.relative_to(SOURCE).as_posix()}: {wrong}" for path, wrong in found if wrong]


def too_long(path: Path) -> str:
    lines = len(path.read_text().splitlines())
    return f"{lines} lines: split it by noun" if lines > LINES_MAX else ""


def long_functions(path: Path) -> str:
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions]
    return ", ".join(f"{name} has {lines} lines" for name, lines in lengths if lines > FUNCTION_LINES_MAX)


def large_rooms() -> list[str]:
    """`room: lines` of each directory whose modules are too many lines together."""
    lines = Counter[str]()
    for path in MODULES:
        lines[path.parent.relative_to(SOURCE / "veilmq").as_posix()] += len(path.read_text().splitlines())
    return [f"{room}: {count}" for room, count in lines.items() if count > ROOM_LINES_MAX]


def badly_named(path: Path) -> str:
    parts = {part.removesuffix(".py").strip("_") for part in path.relative_to(SOURCE).parts}
    return ", ".join(sorted(parts & BANNED_NAMES))


def without_docstring(path: Path) -> str:
    source = path.read_text()
    return "" if not source.strip() or ast.get_docstring(ast.parse(source)) else "the module has no docstring"


def banned_uses(path: Path) -> str:
    return ", ".join(uses(path.read_text(), BANNED_ANYWHERE - allowed(path)))


def forbidden_imports(path: Path) -> str:
    room, packages = room_of(path), imported_packages(path.read_text())
    others = packages - sys.stdlib_module_names - {"veilmq", ""}
    forbidden: set[str] = set()
    if room in IMPORTS_ALLOWED:
        forbidden |= others - IMPORTS_ALLOWED[room]
    if room not in SQLITE_ROOMS:
        forbidden |= packages & SQLITE
    if room in IO_FREE_ROOMS:
        forbidden |= packages & IO_MODULES
    return ", ".join(sorted(forbidden))


def private_imports(path: Path) -> str:
    """A name that another module may use has no underscore."""
    trees = ast.walk(ast.parse(path.read_text()))
    names = (alias.name for node in trees if isinstance(node, ast.ImportFrom) for alias in node.names)
    return ", ".join(sorted(name for name in names if name.startswith("_") and not name.endswith("__")))


class TestModules:
    """One test for each rule; it names every module that breaks the rule."""

    def test_are_short(self) -> None:
        assert offenders(too_long) == []

    def test_have_functions_that_fit_on_a_screen(self) -> None:
        assert offenders(long_functions) == []

    def test_are_not_too_many_in_a_room(self) -> None:
        assert large_rooms() == []

    def test_are_named_after_what_they_hold(self) -> None:
        assert offenders(badly_named) == []

    def test_have_nothing_else_beside_them(self) -> None:
        files = (path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"})
        others = {SOURCE / "veilmq" / "console" / name for name in ("static", "templates")}
        others |= {SOURCE / "veilmq" / "accelerator"}
        assert [path.name for path in files if path.parent not in others] == ["py.typed"]

    def test_have_a_docstring(self) -> None:
        assert offenders(without_docstring) == []

    def test_use_no_clock_environment_or_randomness_of_their_own(self) -> None:
        assert offenders(banned_uses) == []

    def test_take_no_private_name_of_another(self) -> None:
        assert offenders(private_imports) == []

    def test_import_only_what_their_room_may(self) -> None:
        assert offenders(forbidden_imports) == []


@for_each(
    ("check", "place", "source", "wrong"),
    [
        (too_long, "admin/answers.py", "\n" * 501, "501 lines: split it by noun"),
        (long_functions, "admin/answers.py", "def answer():\n" + "    pass\n" * 75, "answer has 76 lines"),
        (badly_named, "admin/utils.py", "", "utils"),
        (badly_named, "helpers/answers.py", "", "helpers"),
        (without_docstring, "admin/answers.py", "import os", "the module has no docstring"),
        (banned_uses, "admin/answers.py", "import time\ntime.time()", "2: time.time"),
        (private_imports, "admin/answers.py", "def f():\n    from veilmq.admin.metrics import _one, two", "_one"),
        (forbidden_imports, "model/answers.py", "import httpx", "httpx"),
        (forbidden_imports, "admin/answers.py", "import apsw", "apsw"),
        (forbidden_imports, "engine/answers.py", "import socket", "socket"),
    ],
)
def test_each_rule_finds_its_offender(
    check: Callable[[Path], str], place: str, source: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    path = tmp_path / "veilmq" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert check(path) == wrong


def test_a_room_of_too_many_lines_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [tmp_path / "veilmq" / name for name in ("store/log/one.py", "store/log/two.py", "cli/one.py")]
    for path in modules:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n" * 800)
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "MODULES", modules)
    assert large_rooms() == ["store/log: 1600"]


def test_every_file_that_ruff_lets_off_is_in_our_table() -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    prefix = "src/veilmq/"
    let_off = {
        pattern.removeprefix(prefix).removesuffix("/**")
        for pattern, codes in ruff["per-file-ignores"].items()
        if pattern.startswith(prefix) and "TID251" in codes
    }
    assert let_off == set(EXEMPT)
    assert set(ruff["flake8-tidy-imports"]["banned-api"]) == BANNED_ANYWHERE
