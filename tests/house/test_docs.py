"""Every link of the documentation leads somewhere.

The pages are read with a CommonMark parser. A link into the checkout must name a file that is there and, with a
fragment, a heading of that page; links to other sites are not followed, a test has no network.
"""

import importlib
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def tool(name: str) -> Any:
    """A module of tools/site."""
    sys.path.insert(0, str(ROOT / "tools" / "site"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools" / "site"))


def headings(page: Path) -> dict[str, str]:
    """The headings of a page of Markdown, by the fragments that it answers to, as code hosts make them."""
    tokens = MarkdownIt().parse(page.read_text())
    texts = [inline.content for token, inline in pairwise(tokens) if token.type == "heading_open"]
    return dict(zip(tool("build").slugs(tokens), texts, strict=True))


def anchors(page: Path) -> set[str]:
    """The fragments that it answers to."""
    return set(headings(page))


def links(page: Path) -> list[str]:
    def below(tokens: list[Token]) -> list[str]:
        here = [str(token.attrs[key]) for token in tokens for key in ("href", "src") if key in token.attrs]
        return here + [link for token in tokens for link in below(token.children or [])]

    return below(MarkdownIt().enable("table").parse(page.read_text()))


def broken(page: Path) -> list[str]:
    """The links of `page` that lead nowhere, in the order in which they stand."""
    found = []
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if not target.exists() or (parts.fragment and parts.fragment not in anchors(target)):
            found.append(link)
    return found


def test_links_resolve() -> None:
    assert [(page.relative_to(ROOT).as_posix(), link) for page in PAGES for link in broken(page)] == []


def test_broken_finds_what_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, and c!\n\n## Twice\n\n## Twice\n\n"
        "[a](#a-b-and-c) [b](#twice-1) [c](other.md#there) [d](https://example.org/x) `[e](code.md)`\n\n"
        "| t |\n|---|\n| [f](gone.md) |\n\n[g](#nowhere) [h](other.md#nowhere) ![i](gone.png)\n"
    )
    (tmp_path / "other.md").write_text("There\n=====\n")
    assert broken(page) == ["gone.md", "#nowhere", "other.md#nowhere", "gone.png"]


def test_the_pages_that_must_be_there_are_checked() -> None:
    assert {ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"} <= set(PAGES)


def test_every_page_is_reached_from_the_readme() -> None:
    start = ROOT / "README.md"
    seen, left = {start}, [start]
    while left:
        page = left.pop()
        for link in links(page):
            target = (page.parent / unquote(urlsplit(link).path)).resolve()
            if target.suffix == ".md" and target.is_file() and target not in seen:
                seen.add(target)
                left.append(target)
    assert set(PAGES) <= seen
