"""docs/from-the-documents.md: every file that it names as holding a statement is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/from-the-documents.md").read_text()


def test_what_holds_a_statement_exists() -> None:
    named = re.findall(r"`((?:tests|bench|examples|testing)/[a-z_/0-9.]+)`", PAGE)
    assert len(named) > 30
    places = {name: ROOT / ("src/veilmq" if name.startswith("testing/") else "") / name for name in named}
    assert [name for name, path in places.items() if not path.exists()] == []
