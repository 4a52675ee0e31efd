"""A real server under a few threads: what they record breaks no rule, and a queue that lies is found out."""

import io
import threading
from collections.abc import Iterator

import pytest

import veilmq
from veilmq.checking import check
from veilmq.checking.log import Kind, Outcome, decoded
from veilmq.checking.report import Promises, Rule
from veilmq.client.messages import Extension, Message, Received, Template
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.driver.recorded import Recorded, Recording
from veilmq.model.errors import LeaseExpired, ParameterInvalid, VeilError
from veilmq.testing import LocalServer, chance

THREADS, STEPS = 4, 60


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer.temporary() as server:
        yield server


def work(queue: Recorded, seed: int) -> None:
    """Send, receive, extend, release and delete, also with handles that are void; at the end, hold nothing."""
    random = chance(seed)
    fifo = queue.capabilities.native_fifo
    held: list[str] = []
    for step in range(STEPS):
        names = [f"{seed}-{step}-{number}" for number in range(random.randint(1, 3))]
        messages = [Message(name, group=random.choice("ab"), deduplication_id=name) for name in names]
        queue.send_batch(messages if fifo else names)
        held += [message.handle for message in queue.receive(3, lease=random.choice((0, 0.02, 20)))]
        for handle in held[-5:]:
            try:
                match random.randrange(4):
                    case 0:
                        queue.delete(handle)
                    case 1:
                        queue.release(handle)
                    case 2:
                        held.append(queue.extend(handle, 20))
                    case _:
                        queue.extend_batch([Extension(handle, 0.01)])
            except VeilError:
                pass
    for handle in held:
        try:
            queue.release(handle)
        except VeilError:
            pass


@pytest.mark.parametrize("name", ["jobs", "jobs.fifo"])
def test_threads_on_a_server(name: str, server: LocalServer) -> None:
    server.account().create(name, Template(fifo=name.endswith(".fifo")))
    file = io.BytesIO()
    recording = Recording(file)
    queues = [Recorded(server.connect(name), recording) for _ in range(THREADS)]
    threads = [
        threading.Thread(target=work, args=(queue, seed), name=f"worker-{seed}") for seed, queue in enumerate(queues)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    drained = queues[0].drain()
    report = check(recording.operations)
    assert report.clean, str(report)
    assert report.not_yet_seen == 0
    assert drained > 10
    outcomes = {each.outcome for each in recording.operations}
    assert outcomes == {Outcome.OK, Outcome.FAIL}
    assert {each.kind for each in recording.operations} == set(Kind) - {Kind.PURGE}
    assert decoded(file.getvalue().splitlines(keepends=True)) == recording.operations


class Deaf(Wrapping):
    """Answers each delete, and does nothing."""

    def delete(self, handle: str) -> None:
        pass


@pytest.fixture
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    with veilmq.connect(f"veil://{tmp_path_factory.mktemp('data')}?queue=jobs&create=1") as queue:
        yield queue


def test_a_delete_that_was_not_done_is_found(queue: Queue) -> None:
    recorded = Recorded(Deaf(queue), Recording())
    recorded.send("hello")
    (message,) = recorded.receive(lease=0)
    recorded.delete(message.handle)
    assert len(recorded.receive()) == 1
    report = check(recorded.recording.operations, Promises())
    assert list(report.counts) == [Rule.RESURRECTED]


def test_a_call_that_was_ended_is_unknown_and_a_refused_one_has_failed(queue: Queue) -> None:
    class Ended(Wrapping):
        def send(self, message: str | Message) -> veilmq.client.messages.Sent:
            raise KeyboardInterrupt

    recording = Recording()
    with pytest.raises(KeyboardInterrupt):
        Recorded(Ended(queue), recording).send("hello")
    with pytest.raises(ParameterInvalid):
        Recorded(queue, recording).send(Message("hello", priority=99))
    assert [each.outcome for each in recording.operations] == [Outcome.INFO, Outcome.FAIL]


class Shy(Wrapping):
    """Every other receive returns nothing, as Amazon's may."""

    asked = 0

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        self.asked += 1
        return [] if self.asked % 2 else self.inner.receive(count_max, lease=lease, wait=wait)


def test_a_drain_asks_again_where_it_is_told_to(queue: Queue) -> None:
    shy = Shy(queue)
    recorded = Recorded(shy, Recording())
    recorded.send_batch(["a", "b"])
    assert recorded.drain() == 0
    assert list(check(recorded.recording.operations).counts) == [Rule.LOST]
    shy.asked = 0
    assert recorded.drain(times=2) == 2
    assert check(recorded.recording.operations).clean


class Late(Wrapping):
    """The first lease ends before its message is deleted."""

    late = True

    def delete(self, handle: str) -> None:
        if self.late:
            self.late = False
            self.inner.extend(handle, 0)
            raise LeaseExpired(sequence=0, attempt=0)
        self.inner.delete(handle)


def test_a_drain_goes_on_where_a_lease_has_ended(queue: Queue) -> None:
    recorded = Recorded(Late(queue), Recording())
    recorded.send("a")
    assert recorded.drain() == 2
    assert recorded.recording.operations[-1].outcome is Outcome.OK


def test_what_was_taken_keeps_its_numbers(queue: Queue) -> None:
    file = io.BytesIO()
    recorded = Recorded(queue, Recording(file))
    recorded.send("a")
    taken = recorded.recording.take()
    recorded.send("b")
    assert recorded.recording.operations[0].outcome is Outcome.OK
    assert decoded(file.getvalue().splitlines(keepends=True)) == [*taken, *recorded.recording.operations]


def test_a_handle_from_elsewhere_is_refused(queue: Queue) -> None:
    queue.send("hello")
    (message,) = queue.receive()
    with pytest.raises(ParameterInvalid, match="did not come through this recording"):
        Recorded(queue, Recording()).delete(message.handle)
