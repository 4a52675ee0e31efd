"""What code says of the pages: each page that it names is here, and has the section that it names."""

import itertools
import re
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
ROOMS = ("src", "examples", "bench")
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if ".peers" not in path.parts)
NAMED = re.compile(r'([\w./-]+\.md)\b(?:, "([^"]+)")?')


def cited(text: str) -> set[tuple[str, str]]:
    """Pages from the root, each with a section or ""; a sentence may be broken over lines and comments."""
    return {(page, section) for page, section in NAMED.findall(re.sub(r"\s+(?:# )?", " ", text))}


def missing(text: str) -> list[tuple[str, str]]:
    found = []
    for page, section in sorted(cited(text)):
        path = ROOT / page
        if not path.is_file() or (section and section not in sections(path)):
            found.append((page, section))
    return found


def sections(page: Path) -> set[str]:
    tokens = MarkdownIt().parse(page.read_text())
    pairs = itertools.pairwise(tokens)
    return {inline.content for heading, inline in pairs if heading.type == "heading_open"}


def test_pages_named_in_code_are_there() -> None:
    found = {module.relative_to(ROOT).as_posix(): missing(module.read_text()) for module in MODULES}
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


def test_what_is_missing_is_found() -> None:
    text = 'Source: docs/mns.md, "Pushes"; docs/mns.md,\n    "Fables"; sqs.md, section 3.'
    assert missing(text) == [("docs/mns.md", "Fables"), ("sqs.md", "")]
