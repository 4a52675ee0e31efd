"""Processes that kill themselves (SIGKILL) after every step of a transaction: done if and only if consumed, once."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.client.transaction_sides import Steps, opened

ROOT = Path(__file__).parents[2]
NEVER = 10_000


def killed(role: str, directory: Path, last: int) -> bool:
    """Run one program; whether it died after its step."""
    command = [sys.executable, "-m", "tests.client.transaction_sides", role, str(directory), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr
    return done.returncode != 0


def settled(directory: Path) -> None:
    client, queue, application = opened(directory, Steps(NEVER))
    orders = client.account.queue("orders")
    came = []
    for _ in range(3):
        client.pass_time(601)
        queue.checker.run_once()
        while messages := orders.receive():
            orders.delete(messages[0].handle)
            came += messages
    client.pass_time(49 * 3_600)
    assert orders.receive() == []
    done = [identity for (identity,) in application.connection.execute("SELECT id FROM done")]
    assert [message.attributes["veilmq.transaction"] for message in came] == done
    stats = client.account.queue("log").stats()
    assert (stats.visible, stats.delayed, stats.in_flight) == (0, 0, 0)
    application.connection.close()
    client.account.close()


@pytest.mark.slow
@pytest.mark.parametrize("last", [1, 2, 3, 4, 5])
def test_a_producer_that_is_killed(tmp_path: Path, last: int) -> None:
    assert killed("produce", tmp_path, last)
    settled(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("last", [1, 2, 3])
@pytest.mark.parametrize("producer", [3, 4])
def test_a_checker_that_is_killed(tmp_path: Path, last: int, producer: int) -> None:
    assert killed("produce", tmp_path, producer)
    assert killed("check", tmp_path, last)
    settled(tmp_path)


def test_a_producer_that_lives(tmp_path: Path) -> None:
    assert not killed("produce", tmp_path, NEVER)
    settled(tmp_path)
