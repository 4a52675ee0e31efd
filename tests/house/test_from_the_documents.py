"""docs/from-the-documents.md: every statement has its place, and a test that is there."""

import ast
import re
from functools import cache
from pathlib import Path

from veilmq.testing.for_each import for_each

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/from-the-documents.md").read_text()
STATEMENTS_MIN = 200
HEADER = "| the document says | where | here | held by |"


def rows() -> list[list[str]]:
    """The cells of each statement."""
    found: list[list[str]] = []
    inside = False
    for line in PAGE.splitlines():
        inside = line == HEADER or (inside and line.startswith("|"))
        if inside and line != HEADER and not line.startswith("|---"):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


@cache
def parsed(path: Path) -> list[ast.stmt]:
    """The statements of a file: 200 names are in a few dozen."""
    return ast.parse(path.read_text()).body


def is_test(name: str, root: Path = ROOT) -> bool:
    """Whether `file::test` or `file::Class::test` names a test function."""
    file, *parts = name.split("::")
    path = root / file
    if not parts or not parts[-1].startswith("test_") or not path.is_file():
        return False
    body = parsed(path)
    kinds: tuple[type[ast.stmt], ...] = (ast.ClassDef,)
    for place, part in enumerate(parts):
        if place == len(parts) - 1:
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        within = [node for node in body if isinstance(node, kinds) and getattr(node, "name", "") == part]
        if not within:
            return False
        body = getattr(within[0], "body", [])
    return True


def test_every_statement_has_a_place_and_a_test_that_exists() -> None:
    statements = rows()
    assert len(statements) >= STATEMENTS_MIN
    assert [row for row in statements if len(row) != 4 or not all(row)] == []
    named = [re.fullmatch(r"`(.+)`", row[3]) for row in statements]
    assert [row for row, found in zip(statements, named, strict=True) if found is None or not is_test(found[1])] == []


def test_no_statement_stands_twice_in_its_section() -> None:
    for section in PAGE.split("\n## ")[1:]:
        said = re.findall(r"^\| (.+?) \| .+? \| .+? \| .+? \|$", section, re.MULTILINE)
        assert sorted(set(said)) == sorted(said)


def test_where_we_differ_says_why() -> None:
    (section,) = (section for section in PAGE.split("\n## ") if section.startswith("Where we differ, and why"))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    assert len(cells) > 10
    assert [row for row in cells if len(row) != 3 or not all(row)] == []


@for_each(
    "name",
    [
        "tests/house/test_from_the_documents.py",
        "tests/house/test_from_the_documents.py::rows",
        "tests/house/test_from_the_documents.py::test_that_is_not_there",
        "tests/house/test_from_the_documents.py::TestNone::test_no_statement_stands_twice_in_its_section",
        "tests/house/test_no_file.py::test_x",
    ],
)
def test_what_is_no_test_is_found(name: str) -> None:
    assert not is_test(name)
