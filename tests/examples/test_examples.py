"""Every example runs and says what it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "first_queue.py": ["hidden from the others: True", "received again: 2 times now", "'width': 640", "left: 0"],
    "lease_keeper.py": ["after 8 s: others see 0 messages, lost: False", "done once, left: 0"],
    "manager.py": [
        "received again within 4 s: True",
        "worked 9 s with a timeout of 3 s, others saw it: 0 times",
        "left: nothing",
    ],
    "receiver.py": ["polls at the server: 1.0", "jobs done: 500 each once: True"],
    "worker.py": [
        "first  report.pdf: page 3 is safe\nkilled\nsecond report.pdf: page 4 is safe\n",
        "'done': 1",
        "'repeated': 1",
        "left: 0",
    ],
    "outbox.py": [
        "order 8 is rolled back",
        "sent: 2 and again: 0",
        "received: ['order 7', 'order 9']",
        "orders: [7, 9]",
    ],
    "adaptive_timeout.py": ["left: 0", "thumbnail: first lease", "film: first lease"],
    "encrypted_queue.py": ["read: order 17", "read: order 18", "set apart unread: 1"],
    "large_messages.py": ["objects: 1", "received: 6000000 characters", "objects after the delete: 0"],
    "routed_queue.py": ["thumbnail -> picture 17", "film -> film 4", "None -> anything else"],
    "pull_topic.py": ["consumer001 got: for both", "consumer002 got: for both", "was deleted: []"],
    "ordered_queue.py": ["Finish receive 20 messages", "exit codes: [0, 0]"],
    "transaction.py": ["pays 60: True", "again: False", "{'alice': 40, 'bob': 60}", "told of: alice bob 60"],
    "six_hours.py": ["after 5 h 59 min others see: 0", "after 6 h others see: 1"],
}

BY_OTHERS = {"send_message_in_order.py", "receive_message_in_order.py"}
"""Run by ordered_queue.py."""


def test_every_example_is_tested_and_listed() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == set(SAYS) | BY_OTHERS
    page = (EXAMPLES / "README.md").read_text()
    assert [name for name in sorted(files) if f"({name})" not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in SAYS[name] if line not in done.stdout] == [], done.stdout
