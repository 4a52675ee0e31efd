"""A user's own test project: only the installed plugin, the code of docs/testing.md, and a reset between its tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
EMPTY = """
import pytest


@pytest.mark.parametrize("turn", [1, 2])
def test_nothing_is_left_of_the_test_before(veilmq_server, turn):
    account = veilmq_server.account()
    assert account.names() == []
    queue = veilmq_server.connect("left-behind")
    queue.send("left")
    queue.receive(lease=3600)
    assert account.names() == ["left-behind"]


def test_the_ports_are_there(veilmq_server):
    for url in (veilmq_server.sqs_url, veilmq_server.azure_url, veilmq_server.mns_url, veilmq_server.admin_url):
        assert url.startswith("http://127.0.0.1:")
"""


@pytest.mark.slow
def test_the_page_is_a_project_of_tests_that_pass(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "test_page.py").write_text("\n".join(blocks))
    (tmp_path / "test_reset.py").write_text(EMPTY)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    count = sum(block.count("def test_") for block in blocks) + 3
    assert f"{count} passed" in done.stdout
