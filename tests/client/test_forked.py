"""What a forked child may go on with: its parent's queue, over connections and threads of its own; and never with its
parent's locks and leases.

A child does its part and ends by `os._exit`; one that hangs is ended by its alarm, and its status tells.
"""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from tests.support.embedded import EmbeddedClient

import veilmq
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.errors import ForkRefused, StorageHeld
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Message, Received, Template
from veilmq.client.ordered import LocalFile
from veilmq.client.queue import Queue
from veilmq.client.receiver import Receiver
from veilmq.client.records import locked
from veilmq.client.tracing import TracedQueue
from veilmq.client.worker import Backoff, DirectoryGuard, FileCheckpoints, Job, Kind, Options, Worker
from veilmq.model.errors import ParameterInvalid
from veilmq.testing.local import LocalServer

ALARM_SECONDS = 20


def in_child(work: Callable[[], bool]) -> int:
    """The pid of a child whose exit code is 0 if `work` returned True, 1 if False, 2 if it raised."""
    pid = os.fork()
    if pid:
        return pid
    code = 2
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ALARM_SECONDS)
        code = 0 if work() else 1
    finally:
        os._exit(code)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def while_a_child_lives() -> Iterator[None]:
    """A child that does nothing."""
    reader, writer = os.pipe()
    ready, tell = os.pipe()

    def idle() -> bool:
        os.close(writer)
        os.write(tell, b".")
        return os.read(reader, 1) == b""

    pid = in_child(idle)
    os.close(reader)
    os.close(tell)
    with open(ready, "rb") as told:
        told.read(1)
    try:
        yield
    finally:
        os.close(writer)
        assert code_of(pid) == 0


def sockets() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


URLS: dict[str, Callable[[LocalServer], str]] = {
    "veil": lambda server: f"veil://{server.sqs_url.partition('//')[2]}/forked?create=1",
    "sqs": lambda server: f"sqs://any:any@{server.sqs_url.partition('//')[2]}/forked?tls=0&region=us-east-1&create=1",
    "azure": lambda server: f"azure://{server.azure_url.partition('//')[2]}/devstoreaccount1/forked?tls=0&create=1",
    "mns": lambda server: f"mns://any:any@{server.mns_url.partition('//')[2]}/forked?tls=0&create=1",
}


@pytest.fixture(params=list(URLS))
def url(request: pytest.FixtureRequest, veilmq_server: LocalServer) -> str:
    return URLS[request.param](veilmq_server)


@pytest.mark.slow
def test_a_child_uses_its_parents_queue(url: str) -> None:
    with veilmq.connect(url) as queue:
        # Threads for waits and for batches have been started, and idle here.
        assert queue.receive(wait=1) == []
        queue.send_batch(["a", "b"])
        for message in queue.receive(2, lease=30):
            queue.delete(message.handle)

        def work() -> bool:
            if queue.receive(wait=1) != []:
                return False
            queue.send_batch(["c", "d"])
            came = [message for _ in range(2) for message in queue.receive(1, lease=30, wait=5)]
            return [message.body for message in came] == ["c", "d"] and queue.delete_batch(
                [message.handle for message in came]
            ) == [None, None]

        assert code_of(in_child(work)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["veil", "sqs", "mns"])
def test_neither_reads_the_answers_of_the_other(kind: str, veilmq_server: LocalServer) -> None:
    before = sockets()
    with veilmq.connect(URLS[kind](veilmq_server)) as queue:
        queue.send("a")
        shared = sockets() - before
        assert shared

        def work() -> bool:
            queue.send("b")
            return not shared & sockets()

        assert code_of(in_child(work)) == 0
        queue.send("c")
        assert shared <= sockets()  # the parent's connection is as open as before


@pytest.mark.slow
def test_a_keeper_is_its_own_process_s(veilmq_server: LocalServer) -> None:
    with veilmq.connect(URLS["veil"](veilmq_server)) as queue:
        queue.send("a")
        with LeaseKeeper(queue) as keeper:
            (message,) = queue.receive(lease=30)
            lease = keeper.register(message)

            def work() -> bool:
                for call in (lambda: keeper.register(message), lease.delete, lambda: lease.extend(10)):
                    try:
                        call()
                    except ParameterInvalid as error:
                        if "forked" not in error.reason:
                            return False
                    else:
                        return False
                keeper.close()
                return True

            assert code_of(in_child(work)) == 0
            assert _held(queue)
            lease.delete()


@pytest.mark.slow
def test_a_receiver_of_the_parents_hears_in_the_child(veilmq_server: LocalServer) -> None:
    """Its threads are not there, so that it would wait for ever beside a full queue."""
    with veilmq.connect(URLS["veil"](veilmq_server)) as queue, Receiver(queue, lease=30) as receiver:
        queue.send("before")
        first = receiver.receive(10)
        assert first is not None
        queue.delete(first.handle)
        assert receiver.receive(0.1) is None

        def work() -> bool:
            queue.send("in the child")
            message = receiver.receive(10)
            if message is None:
                return False
            queue.delete(message.handle)
            receiver.close()
            return receiver.receive(0) is None

        assert code_of(in_child(work)) == 0
        queue.send("after")
        assert receiver.receive(10) is not None


@pytest.mark.slow
def test_a_worker_that_runs_in_the_parent_can_run_in_the_child(veilmq_server: LocalServer) -> None:
    """Also if the parent was just starting it, or has told it to stop."""
    worker = Worker(URLS["veil"](veilmq_server), lambda job: None, wait=0)
    worker.start()

    def start() -> bool:
        worker.start()
        worker.stop()
        return worker.join(ALARM_SECONDS / 2)

    def work() -> bool:
        return worker.run(messages_max=1).outcomes == {"done": 1} and start()

    assert code_of(in_child(start)) == 0
    worker.stop()
    assert worker.join(ALARM_SECONDS)
    with veilmq.connect(URLS["veil"](veilmq_server)) as queue:
        queue.send("for the child")
    worker.stop()
    with worker._lock:
        child = in_child(work)
    assert code_of(child) == 0


def code_of_one_that_leaves() -> int:
    """Fork, and let the child leave the caller."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ALARM_SECONDS)
        raise RuntimeError("in the child")
    return code_of(pid)


def apart(call: Callable[[], object]) -> None:
    """In a thread of its own, so that a child that goes on is not the tests a second time."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def forking(job: object) -> None:
    if (code := code_of_one_that_leaves()) != 1:
        raise RuntimeError(f"the child ended with {code}")


async def forking_coroutine(job: object) -> None:
    forking(job)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "async", "processes"])
def test_a_child_that_leaves_its_parents_handler_settles_nothing(
    kind: Kind, veilmq_server: LocalServer, tmp_path: Path
) -> None:
    handler = forking_coroutine if kind == "async" else forking
    with veilmq.connect(URLS["veil"](veilmq_server)) as queue, veilmq_server.connect("dead") as dead:
        queue.send("one")
        guard = DirectoryGuard(tmp_path)
        options = Options(kind=kind, poison_after=1, dead_letter_queue="dead", guard=guard)
        assert Worker(queue, handler, wait=0, **options).run(messages_max=1).outcomes == {"done": 1}
        assert (dead.stats().visible, queue.stats().in_flight) == (0, 0)


@pytest.mark.slow
def test_a_child_that_leaves_a_callback_of_its_parents_settles_nothing(
    veilmq_server: LocalServer, tmp_path: Path
) -> None:
    ended: list[tuple[str, int]] = []

    def fork_in(name: str, value: Any = None) -> Any:
        ended.append((name, code_of_one_that_leaves()))
        return value

    with veilmq.connect(URLS["veil"](veilmq_server)) as queue:
        queue.send_batch(["one", "two"])
        worker = Worker(
            queue,
            lambda job: 1 / (job.body == "one"),
            lease=lambda message: fork_in("lease", 30),
            guard=DirectoryGuard(tmp_path),
            guard_key=lambda message: fork_in("guard_key", message.body),
            on_result=lambda message, value: fork_in("on_result"),
            error_report=lambda line: fork_in("error_report", line),
            wait=0,
        )
        assert worker.run(messages_max=2).outcomes == {"done": 1, "failed": 1}
    called = ["error_report", "guard_key", "guard_key", "lease", "lease", "on_result"]
    assert sorted(ended) == [(name, 1) for name in called]


@pytest.mark.slow
def test_a_child_that_leaves_an_object_of_its_parents_settles_nothing(
    veilmq_server: LocalServer, tmp_path: Path
) -> None:
    ended: dict[str, set[int]] = {}

    class Forks:
        """Passes each call on, after a fork whose child raises."""

        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._inner, name)
            return partial(self._call, name, found) if callable(found) else found

        def prolong(self, *values: Any) -> None:
            self._inner.prolong(*values)  # within the handler's call, which ends the child anyway

        def save(self, *values: Any) -> None:
            self._inner.save(*values)

        def _call(self, name: str, call: Callable[..., Any], *values: Any) -> Any:
            ended.setdefault(name, set()).add(code_of_one_that_leaves())
            return call(*values)

    class Meter:
        def failed(self, *values: Any) -> None: ...

        def ended(self, queue: str, outcome: str, seconds: float) -> None: ...

        def in_hand(self, queue: str, messages: int) -> None: ...

    class Plan:
        margin = 1.0

        def first_lease(self, message: Received) -> float:
            return 30.0

        def next_lease(self, message: Received, held: float) -> float:
            return 30.0

    def handle(job: Job) -> None:
        job.checkpoint("begun", lease=60)
        1 / (job.body == "one")

    with veilmq.connect(URLS["veil"](veilmq_server)) as queue, LeaseKeeper(queue, plan=Forks(Plan())) as keeper:
        queue.send_batch(["one", "two"])
        keeper.register(*queue.receive(lease=30)).release()
        guard, files = Forks(DirectoryGuard(tmp_path / "done")), Forks(FileCheckpoints(tmp_path / "states"))
        given = Options(keeper=False, guard=guard, checkpoints=files, retry=Forks(Backoff()), metrics=Forks(Meter()))
        worker = Worker(queue, handle, wait=0, **given)
        assert worker.run(messages_max=2).outcomes == {"done": 1, "failed": 1}
    of_guard, of_files = {"begin", "finish", "abandon"}, {"load", "drop"}
    called = of_guard | of_files | {"delay", "ended", "in_hand", "first_lease"}
    assert ended == {name: {1} for name in called}


@pytest.mark.slow
def test_a_child_that_leaves_its_parents_tracer_sends_and_settles_nothing(embedded: EmbeddedClient) -> None:
    ended: dict[str, set[int]] = {}

    class Forking(SpanProcessor):
        def on_start(self, span: Span, parent_context: Context | None = None) -> None:
            ended.setdefault(f"begin {span.name}", set()).add(code_of_one_that_leaves())

        def on_end(self, span: ReadableSpan) -> None:
            ended.setdefault(f"end {span.name}", set()).add(code_of_one_that_leaves())

    provider = TracerProvider()
    provider.add_span_processor(Forking())
    tracer = provider.get_tracer("test")
    embedded.account.create("q")
    queue = TracedQueue(embedded.account.queue("q"), tracer)
    apart(lambda: queue.send("one"))
    worker = Worker(queue, str, wait=0, tracer=tracer)
    assert worker.run(messages_max=1).outcomes == {"done": 1}
    assert ended == {f"{when} {what} q": {1} for when in ("begin", "end") for what in ("send", "receive", "process")}


@pytest.mark.slow
def test_a_child_that_leaves_what_its_parents_keeper_calls_extends_nothing(embedded: EmbeddedClient) -> None:
    ended: dict[str, int] = {}
    heard = threading.Event()

    class Plan:
        margin = 5.0

        def first_lease(self, message: Received) -> float:
            return 15.0

        def next_lease(self, message: Received, held: float) -> float:
            ended["next_lease"] = code_of_one_that_leaves()
            return 15.0

        def finished(self, message: Received, held: float) -> None:
            ended["finished"] = code_of_one_that_leaves()

        def redelivered(self, message: Received) -> None:
            ended["redelivered"] = code_of_one_that_leaves()

        def given_back(self, message: Received) -> None:
            ended["given_back"] = code_of_one_that_leaves()

        def lost(self, message: Received, held: float) -> None:
            ended["lost"] = code_of_one_that_leaves()
            heard.set()  # the last call

        def late(self, seconds: float) -> None:
            ended["late"] = code_of_one_that_leaves()

    def hear(name: str, _: object) -> None:
        ended[name] = code_of_one_that_leaves()

    embedded.account.create("jobs.fifo", Template(fifo=True))
    queue = embedded.account.queue("jobs.fifo")
    queue.send(Message("one", group="g", deduplication_id="1"))
    with LeaseKeeper(queue, plan=Plan(), clock=embedded.clock, on_lost=partial(hear, "on_lost")) as keeper:
        lease = keeper.register(queue.receive(lease=15)[0])
        lease.on_lost(partial(hear, "watch"))
        embedded.pass_time(12)
        apart(keeper.extend_due)
        assert lease.remaining() > 10, "extended"
        embedded.pass_time(20)
        apart(keeper.extend_due)
        assert lease.lost.is_set()
        assert heard.wait(ALARM_SECONDS)
        apart(lambda: keeper.register(queue.receive(lease=15)[0]).release())
        apart(lambda: keeper.register(queue.receive(lease=15)[0]).delete())
    of_plan = {"next_lease", "late", "lost", "redelivered", "given_back", "finished"}
    assert ended == dict.fromkeys(of_plan | {"on_lost", "watch"}, 1)


def terminating(job: object) -> list[int]:
    """How a fork and a program end that the handler terminates; the fork gets a Ctrl-C before."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGTERM)  # as a service manager does it: the worker's own child goes on
    ready, tell = os.pipe()

    def idle() -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        os.write(tell, b".")
        while True:
            signal.pause()

    pid = in_child(idle)
    os.close(tell)
    with open(ready, "rb") as told:
        told.read(1)
    os.kill(pid, signal.SIGTERM)
    with subprocess.Popen(["sleep", str(ALARM_SECONDS)]) as program:
        program.terminate()
    return [code_of(pid), program.returncode]


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_child_of_a_handler_ends_by_sigterm_but_not_by_ctrl_c(kind: Kind, tmp_path: Path) -> None:
    """`Process.terminate()` is SIGTERM; Ctrl-C goes to all processes of a terminal, and the drain waits for them."""
    codes: list[Any] = []
    with EmbeddedAccount(tmp_path) as account:
        account.create("jobs")
        queue = account.queue("jobs")
        queue.send("one")
        worker = Worker(queue, terminating, kind=kind, on_result=lambda message, value: codes.append(value), wait=0)
        assert worker.run(signals=True, messages_max=1).outcomes == {"done": 1}
    assert codes == [[-signal.SIGTERM, -signal.SIGTERM]]


def test_a_receiver_on_a_parents_directory_tells_every_caller_of_the_child_at_once(tmp_path: Path) -> None:
    """`ALARM_SECONDS` ends a child that waits."""
    with EmbeddedAccount(tmp_path) as account:
        account.create("jobs")
        with account.queue("jobs") as queue, Receiver(queue, lease=30) as receiver:
            assert receiver.receive(0) is None

            def work() -> bool:
                for timeout in (None, 0, 60, None):
                    try:
                        receiver.receive(timeout)
                    except ForkRefused:
                        continue
                    return False
                return True

            assert code_of(in_child(work)) == 0
            queue.send("for the parent")
            assert receiver.receive(10) is not None


def _held(queue: Queue) -> bool:
    stats = queue.stats()
    return (stats.visible, stats.in_flight) == (0, 1)


@pytest.mark.parametrize("end", ["released", "killed"])
def test_a_child_that_lives_on_holds_no_file_of_its_parents(end: str, tmp_path: Path) -> None:
    first, second = LocalFile(tmp_path / "state"), LocalFile(tmp_path / "state")
    first.acquire()
    with while_a_child_lives():
        with pytest.raises(StorageHeld):
            second.acquire()
        if end == "killed":
            assert first._lock is not None
            os.close(first._lock)  # as the kernel does it
            first._lock = None
        first.release()
        second.acquire()
        second.release()


def test_a_child_cannot_save_what_its_parent_holds(tmp_path: Path) -> None:
    file = LocalFile(tmp_path / "state")
    file.acquire()
    file.save(b"parent's")

    def work() -> bool:
        try:
            file.save(b"child's")
        except StorageHeld as error:
            return error.holder == f"pid {os.getppid()}"
        return False

    assert code_of(in_child(work)) == 0
    assert file.load() == b"parent's"
    file.release()


def test_a_child_that_is_forked_amid_a_lock_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = locked(path)
    held.__enter__()
    with while_a_child_lives():
        held.__exit__(None, None, None)
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_queue_that_nobody_closed_lets_its_threads_go() -> None:
    from veilmq.client.adapters.cloud import CancellableWaits

    parking = CancellableWaits("left")
    assert parking.wait(lambda: 1, lambda late: None) == 1
    threads = [thread for thread in threading.enumerate() if thread.name == "veilmq-poll-left 1"]
    assert len(threads) == 1
    del parking
    threads[0].join(ALARM_SECONDS)
    assert not threads[0].is_alive()
