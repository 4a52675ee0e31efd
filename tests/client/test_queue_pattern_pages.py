"""The pages of the queue patterns run: their code, from top to bottom, in one directory a page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

PAGES = Path(__file__).parents[2] / "docs" / "patterns"
VEILMQ = f"{sys.executable} -c 'from veilmq.cli import main; main()'"
PRINTS = {
    "encrypted-queue": ["eyJ", '{"order": 17}'],
    "large-messages": ["6000000 characters", "0 removed"],
    "routed-queue": ["thumbnail picture 17", "film film 4", "None everything else"],
    "pull-topic": ["to both"],
    "adaptive-timeout": ["working on resize 1.png"],
}


def test_every_queue_of_a_page_is_closed() -> None:
    """A program that is copied from there, and connects to a server, gives no ResourceWarning under `python -X dev`."""
    left_open = re.compile(r"veilmq\.connect\((?!.*\) as \w)")
    assert [page.name for page in PAGES.glob("*.md") if left_open.search(page.read_text())] == []


@pytest.mark.parametrize("page", PRINTS)
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    printed = ""
    code = ""
    for token in MarkdownIt().parse((PAGES / f"{page}.md").read_text()):
        if token.type != "fence":
            continue
        text = token.content.replace("file:///tmp/", f"file://{tmp_path}/")
        text = text.replace("/tmp/veilmq-demo", f"{tmp_path}/data")
        if token.info == "bash":
            printed += run(["bash", "-ec", text.replace("veilmq ", f"{VEILMQ} ", 1)], tmp_path)
        elif token.info == "python":
            code += text
    printed += run([sys.executable, "-c", code], tmp_path)
    assert [line for line in PRINTS[page] if line not in printed] == []


def run(command: list[str], directory: Path) -> str:
    environment = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "TMPDIR": str(directory)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
