"""The code on the pages about ordered queues, transactions and outboxes runs."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "patterns"
SAYS = {
    "ordered-queue.md": "1 order 1\n2 order 2\n3 order 3\n",
    "transaction-queue.md": "committed\norder 7 is paid\n",
    "outbox.md": "1\norder 7 is paid\n",
}


@pytest.mark.parametrize("page", SAYS)
def test_the_code_runs(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (PAGES / page).read_text().replace("mkdtemp()", f"mkdtemp(dir={str(tmp_path)!r})")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out == SAYS[page]
    for name in ("queue", "log", "relay", "shop"):
        if name in names:
            names[name].close()
