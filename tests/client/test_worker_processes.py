"""What goes between a worker and its child processes: values that cannot be read, questions that come too late, and
children that cannot be told anything, or cannot be made."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.client.importable import importable
from tests.client.worker_stage import WAIT_S, Stage

from veilmq.client.worker import Saved, Worker

pytestmark = pytest.mark.slow
MORE_THAN_A_PIPE = "x" * 500_000

HANDLERS = '''
import os, threading, time
from pathlib import Path
from veilmq.model.errors import ParameterInvalid

class Unreadable(Exception):
    """Can be pickled, but not unpickled, as many exceptions with a constructor of their own."""
    def __init__(self, first, second):
        super().__init__(first)

class Unsayable:
    def __reduce__(self):
        raise OSError("not to be pickled")

def unusual(job):
    if job.body == "unreadable":
        return Unreadable(1, 2)
    if job.body == "unsayable":
        return Unsayable()
    return os.getpid()

def asks(job):
    for state, lease in ((Unreadable(1, 2), None), (1, Unreadable(1, 2)), (1, Unsayable())):
        try:
            job.checkpoint(state, lease)
        except Exception as error:
            refused.append(type(error).__name__)
    job.checkpoint("this one")
    return refused

refused = []

def state(job):
    return job.state

def outlived(job):
    place = Path(job.body)
    if not place.exists():
        place.mkdir()
        threading.Thread(target=late, args=(job, place), daemon=True).start()
        return
    (place / "busy").touch()
    while not (place / "busy asked").exists():
        time.sleep(0.01)
    if job.receive_count == 1:
        raise RuntimeError("once")
    return job.state

def late(job, place):
    for when in ("idle", "busy"):
        while not (place / when).exists():
            time.sleep(0.01)
        try:
            job.checkpoint("of the first")
            told = "accepted"
        except Exception as error:
            told = type(error).__name__
        (place / "told").write_text(told)
        (place / "told").rename(place / f"{when} asked")
'''


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with importable(HANDLERS, tmp_path, monkeypatch) as module:
        yield module


class TestConversation:
    @pytest.mark.parametrize("body", ["unreadable", "unsayable"])
    def test_a_result_that_cannot_be_read_is_a_failure_of_its_message(
        self, stage: Stage, handlers: ModuleType, body: str
    ) -> None:
        dead = stage.make("dead")
        pids: list[int] = []
        stage.send("before", body, "after")
        counts = stage.work(
            handlers.unusual,
            kind="processes",
            poison_after=2,
            dead_letter_queue="dead",
            on_result=lambda _, pid: pids.append(pid),
        )
        assert counts.outcomes == {"done": 2, "failed": 1, "dead_lettered": 1}
        assert len(set(pids)) == 1, "the child was made anew"
        [letter] = dead.receive(10)
        assert "what the handler returned cannot" in str(letter.attributes["veilmq.dead_letter.reason"])

    def test_what_cannot_be_read_is_refused_where_the_handler_asks(self, stage: Stage, handlers: ModuleType) -> None:
        stage.send("work", "more")
        told: list[Any] = []
        worker = stage.worker(handlers.asks, kind="processes", on_result=lambda _, value: told.append(value))
        worker.start()
        assert outcomes_of(worker, 2) == {"done": 2}
        assert told == [["ParameterInvalid", "RuntimeError", "OSError"], told[1]]

    @pytest.mark.parametrize("state", ["unreadable", "unsayable"])
    def test_a_record_that_cannot_be_read_there_leaves_no_child_waiting(
        self, stage: Stage, handlers: ModuleType, state: str
    ) -> None:
        stage.send("work", "more")
        records = Records(handlers.Unreadable(1, 2) if state == "unreadable" else handlers.Unsayable())
        told: list[Any] = []
        worker = stage.worker(
            handlers.state, kind="processes", checkpoints=records, on_result=lambda _, value: told.append(value)
        )
        worker.start()
        assert outcomes_of(worker, 3) == {"failed": 1, "done": 2}
        assert told == [None, None]

    def test_a_thread_that_outlives_its_handler_asks_in_vain(
        self, stage: Stage, handlers: ModuleType, tmp_path: Path
    ) -> None:
        place = tmp_path / "place"
        states: list[Any] = []
        worker = stage.worker(handlers.outlived, kind="processes", on_result=lambda _, state: states.append(state))
        worker.start()
        stage.send(str(place))
        wait_until(lambda: states == [None])
        (place / "idle").touch()
        wait_until((place / "idle asked").exists)
        stage.send(str(place))
        wait_until(lambda: len(states) == 2)
        worker.stop()
        assert worker.join(WAIT_S)
        assert states == [None, None], "the next message has the first one's state"
        assert [(place / name).read_text() for name in ("idle asked", "busy asked")] == ["LeaseExpired"] * 2


class TestChildren:
    def test_one_that_reads_nothing_holds_up_no_stop(self, stage: Stage, handlers: ModuleType) -> None:
        worker = stage.worker(handlers.unusual, kind="processes", drain=0.1, kill_after=3_000)
        freeze(ready(stage, worker))
        stage.send(MORE_THAN_A_PIPE)
        wait_until(lambda: worker.counts is not None and worker.counts.received == 2)
        worker.stop()
        assert worker.join(WAIT_S)
        assert worker.counts is not None
        assert worker.counts.outcomes == {"done": 1, "stopped": 1}
        assert stage.visible() == [MORE_THAN_A_PIPE]

    def test_one_that_reads_nothing_is_killed_once_its_lease_is_lost(self, stage: Stage, handlers: ModuleType) -> None:
        worker = stage.worker(
            handlers.unusual, kind="processes", lease=2.0, wait=20, kill_after=0.2, keeper={"max_hold": 1.0}
        )
        freeze(ready(stage, worker))
        stage.send(MORE_THAN_A_PIPE)
        wait_until(lambda: worker.counts is not None and worker.counts.outcomes.get("done") == 2)
        outcomes = outcomes_of(worker, 3)
        # On a busy machine the next one may take too long to start as well.
        assert outcomes.pop("lost") >= 1
        assert outcomes == {"done": 2}

    @pytest.mark.parametrize("end", ["repaired", "stopped"])
    def test_while_none_can_be_made_messages_wait(
        self, stage: Stage, handlers: ModuleType, tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        module, tries = Path(str(handlers.__file__)), tmp_path / "tries"
        dead = stage.make("dead")
        worker = stage.worker(
            handlers.unusual, kind="processes", concurrency=2, poison_after=1, dead_letter_queue="dead", drain=3_000
        )
        ready(stage, worker)
        module.write_text(f"open({str(tries)!r}, 'a').write('x')\nraise RuntimeError('half a deploy')")
        for pid in worker.pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not worker.pids)
        stage.send("a", "b", "c")
        wait_until(lambda: caplog.text.count("no message is given") >= 2 and tries.stat().st_size >= 6)
        assert caplog.text.count("no message is given") == 2, "once for each of the two"
        if end == "repaired":
            module.write_text(HANDLERS)
            assert outcomes_of(worker, 4) == {"done": 4}
            assert worker.counts is not None
            assert worker.counts.received == 4
            assert stage.nothing_left()
        else:
            worker.stop()
            assert worker.join(WAIT_S)
            assert stage.visible() == ["a", "b", "c"]
        assert dead.receive(10) == []


class Records:
    """Side records that give what a child cannot have, once."""

    def __init__(self, state: Any) -> None:
        self._states = [state]

    def load(self, key: str) -> Saved | None:
        return Saved(1, self._states.pop()) if self._states else None

    def save(self, key: str, saved: Saved) -> None:
        raise AssertionError("nobody saves")

    def drop(self, key: str) -> None: ...


def outcomes_of(worker: Worker, messages: int) -> dict[str, int]:
    """Once so many are through; a worker that does not come so far is stopped without a drain."""
    try:
        wait_until(lambda: worker.counts is not None and sum(worker.counts.outcomes.values()) >= messages)
    finally:
        worker.stop()
        worker.stop()
        assert worker.join(WAIT_S)
    assert worker.counts is not None
    return worker.counts.outcomes


def ready(stage: Stage, worker: Worker) -> Worker:
    """Started, and all of its children wait for work: one message is through."""
    stage.send("first")
    worker.start()
    wait_until(lambda: worker.counts is not None and worker.counts.outcomes == {"done": 1})
    return worker


def freeze(worker: Worker) -> None:
    """Stop its only child in whatever it does, as a debugger would, or a machine that swaps."""
    os.kill(worker.pids[0], signal.SIGSTOP)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
