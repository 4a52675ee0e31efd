"""The pages about keeper and receiver say what the code does."""

import re
from pathlib import Path
from typing import Any

import pytest

from veilmq.client.keeper.lease import STEPS, Reason

PAGES = Path(__file__).parents[2] / "docs" / "patterns"


@pytest.mark.parametrize("page", ["lease-keeper.md", "receiver.md"])
def test_the_code_runs(page: str, tmp_path: Path) -> None:
    text = (PAGES / page).read_text().replace("veil:///tmp/veilmq-demo", f"veil://{tmp_path}/data")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page, "exec"), names)


def test_the_page_prints_the_table_of_states() -> None:
    text = (PAGES / "lease-keeper.md").read_text()
    printed = text.partition("lease.STEPS -->\n")[2].partition("<!-- end of states -->")[0]
    assert printed.splitlines()[2:] == [
        f"| {source} | {event} | {target} |" for (source, event), target in STEPS.items()
    ]


def test_the_page_names_every_reason() -> None:
    text = (PAGES / "lease-keeper.md").read_text()
    assert re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE) == [reason.name for reason in Reason]
