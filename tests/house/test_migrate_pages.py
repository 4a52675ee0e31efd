"""docs/migrate: each page says what stays, changes and is to be watched, how to move and how to go back; its `bash`
blocks run in order against a real server in development mode. Indented blocks need another service, and are only held
against the commands (test_commands_on_pages.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.house.test_readme import Block, Reader, blocks

from veilmq.testing.for_each import for_each

PAGES = sorted((Path(__file__).parents[2] / "docs" / "migrate").glob("*.md"))
ABOUT = [page for page in PAGES if page.name != "README.md"]
SERVICES = [page for page in ABOUT if page.name != "frameworks.md"]
PARTS = ("**What stays.**", "**What changes.**", "**What to watch.**", "\n## Move\n", "\n## Back\n")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    someone = Reader(tmp_path_factory.mktemp("migrate"))
    someone.run(Block("bash", 0, "make run\n"))
    yield someone
    someone.leave()


@for_each("page", SERVICES, ids=lambda page: page.stem)
def test_a_page_has_all_its_parts(page: Path) -> None:
    text = page.read_text()
    assert [part for part in PARTS if part not in text] == []


def test_all_pages_are_in_the_table() -> None:
    assert [page.name for page in ABOUT if f"({page.name})" not in (PAGES[0].parent / "README.md").read_text()] == []


@pytest.mark.slow  # a server, and packages of others
@pytest.mark.parametrize("page", ABOUT, ids=lambda page: page.stem)
def test_its_commands_run(reader: Reader, page: Path) -> None:
    for block in blocks(page.read_text()):
        reader.run(block)
