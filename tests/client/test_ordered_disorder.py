"""`serve --disorder K`: a server whose neighbouring messages change places, and nothing else about them does."""

import subprocess
import sys
from pathlib import Path

import pytest

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.messages import Message, Template
from veilmq.client.ordered import LocalFile, OrderedReceiver, OrderedSender
from veilmq.server.config.settings import SettingInvalid, Settings
from veilmq.store import Options
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import MovableClock


def account(directory: Path, clock: MovableClock, disorder: int) -> EmbeddedAccount:
    return EmbeddedAccount(directory, clock=clock, options=Options(disorder=disorder, reserve_bytes=0, floor_bytes=0))


@for_each("window", [1, 2, 5])
@for_each("count", [1, 3, 10])
def test_neighbours_change_places(tmp_path: Path, window: int, count: int) -> None:
    clock = MovableClock()
    with account(tmp_path / f"{window}-{count}", clock, window) as there:
        there.create("orders")
        queue = there.queue("orders")
        queue.send_batch([str(number) for number in range(1, 201)])
        came: list[int] = []
        while messages := queue.receive(count):
            assert [message.receive_count for message in messages] == [1] * len(messages)
            came += [int(message.body) for message in messages]
        assert sorted(came) == list(range(1, 201))
        moved = [abs(place - number) for place, number in enumerate(came, 1)]
        assert 0 < max(moved) <= window
        stats = queue.stats()
        assert (stats.visible, stats.in_flight, stats.delayed) == (0, 200, 0)


def test_a_receive_that_large_bodies_cut_short_passes_none_over(tmp_path: Path) -> None:
    clock = MovableClock()
    with account(tmp_path / "data", clock, 5) as there:
        there.create("orders")
        queue = there.queue("orders")
        for number in range(40):
            queue.send(str(number).ljust(2**20))
        came: list[int] = []
        while messages := queue.receive(40):
            assert len(messages) < 20, "what one answer may hold"
            came += [int(message.body) for message in messages]
        assert sorted(came) == list(range(40))


def test_counts_and_order_survive_a_restart(tmp_path: Path) -> None:
    clock = MovableClock()
    with account(tmp_path / "data", clock, 5) as there:
        there.create("orders", Template(visibility_timeout=30))
        queue = there.queue("orders")
        queue.send_batch([Message(str(number), priority=8 - number % 2) for number in range(40)])
        first = [message.body for _ in range(7) for message in queue.receive(2)]
        before = queue.stats()
        assert (before.visible, before.in_flight) == (26, 14)
    with account(tmp_path / "data", clock, 5) as there:
        queue = there.queue("orders")
        assert queue.stats() == before
        rest = [message.body for message in queue.receive(40)]
        assert sorted(first + rest, key=int) == [str(number) for number in range(40)]
        assert [int(body) % 2 for body in first + rest] == [1] * 20 + [0] * 20
        clock.advance(31)
        there.apply_due()
        assert queue.stats().visible == 40


def test_what_is_due_to_expire_or_to_the_dead_letters_still_goes_there(tmp_path: Path) -> None:
    clock = MovableClock()
    with account(tmp_path / "data", clock, 5) as there:
        there.create("dead")
        there.create("orders", Template(visibility_timeout=10, dead_letter_queue="dead", receive_count_max=1))
        queue = there.queue("orders")
        queue.send_batch([Message(str(number), ttl=None if number % 2 else 5) for number in range(30)])
        queue.receive(1)
        clock.advance(6)
        there.apply_due()
        came = [int(message.body) for message in queue.receive(40)]
        assert all(number % 2 for number in came)
        clock.advance(11)
        there.apply_due()
        assert queue.receive(40) == []
        dead = {int(message.body) for message in there.queue("dead").receive(40)}
        assert dead >= set(came)
        assert queue.stats().visible == queue.stats().in_flight == 0


def test_the_ordered_queue_restores_what_the_server_disorders(tmp_path: Path) -> None:
    clock = MovableClock()
    with account(tmp_path / "data", clock, 4) as there:
        there.create("orders")
        queue = there.queue("orders")
        bodies = [str(number) for number in range(100)]
        with OrderedSender(queue, LocalFile(tmp_path / "send"), clock=clock) as sender:
            sender.send_batch(bodies)
        came = []
        with OrderedReceiver(queue, LocalFile(tmp_path / "receive"), clock=clock) as receiver:
            while messages := receiver.receive():
                receiver.delete(messages[0].handle)
                came.append(messages[0].body)
        assert came == bodies


def test_it_is_for_development_alone(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match="disorder"):
        Settings(simulate=("disorder=1",), credentials=tmp_path / "credentials.toml")
    assert Settings(simulate=("disorder=3",)).store_options().disorder == 3
    assert Settings().store_options().disorder == 0


@for_each("given", ["-1", "1001", "some"])
def test_a_window_that_cannot_be_is_refused(tmp_path: Path, given: str) -> None:
    command = [sys.executable, "-c", "from veilmq.cli import main; main()", "serve", "--simulate", f"disorder={given}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "disorder" in done.stderr
