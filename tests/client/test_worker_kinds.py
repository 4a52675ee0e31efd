"""Handlers in child processes and as coroutines."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.client.importable import importable
from tests.client.worker_stage import WAIT_S, Stage

from veilmq.client.worker import Backoff, Cause, FileCheckpoints, Reject, Retry
from veilmq.client.worker.runners import processes
from veilmq.model.errors import CapabilityMissing, ParameterInvalid

LATE = Backoff(first=3_000, longest=3_000, jitter=0)
HANDLERS = """
import os, sys, time
from pathlib import Path
from veilmq.client.worker import Reject, Retry, worker
from veilmq.model.errors import ParameterInvalid

def pid(job):
    return os.getpid()

def unusual(job):
    if job.receive_count > 1:
        return
    if job.body == "die":
        os._exit(9)
    if job.body == "exit":
        sys.exit(3)
    if job.body == "raise":
        raise RuntimeError("in the child")
    if job.body == "lambda":
        return lambda: None
    if job.body == "retry":
        raise Retry(0.0)
    if job.body == "reject":
        raise Reject("not this one")

def steps(job):
    at = job.state or 0
    try:
        job.checkpoint(object)
    except ParameterInvalid as error:
        assert error.parameter == "state", error
    job.checkpoint(at + 1)
    job.extend(20)
    if at < 2:
        os._exit(9)

def longer(job):
    before = job.remaining()
    job.extend(100)
    if not before <= 30 < 90 < job.remaining():
        raise RuntimeError(f"{before}, then {job.remaining()}")

def deaf(job):
    Path(job.body).write_text(str(os.getpid()))
    while job.receive_count == 1:
        time.sleep(0.01)

def obedient(job):
    Path(job.body).touch()
    if not job.cancelled.wait(30):
        raise RuntimeError("nobody told")
    job.cancelled.check()

def some(jobs):
    return [job for job in jobs if job.body in "37" and job.receive_count == 1]

@worker("veil:///nowhere?queue=q", kind="processes")
def decorated(job):
    return os.getpid()
"""


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with importable(HANDLERS, tmp_path, monkeypatch) as module:
        yield module


@pytest.mark.slow
class TestProcesses:
    def test_handlers_run_in_other_processes(self, stage: Stage, handlers: ModuleType) -> None:
        stage.send(*map(str, range(20)))
        pids: list[int] = []
        counts = stage.work(
            handlers.pid, kind="processes", concurrency=2, prefetch=4, on_result=lambda _, pid: pids.append(pid)
        )
        assert counts.outcomes == {"done": 20}
        assert len(pids) == 20
        assert 1 <= len(set(pids)) <= 2
        assert os.getpid() not in pids
        for pid in set(pids):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    @pytest.mark.parametrize("kind", ["threads", "processes"])
    def test_the_deadline_follows_an_extension(self, stage: Stage, handlers: ModuleType, kind: str) -> None:
        """Without a keeper it is the lease's end."""
        stage.send("work")
        assert stage.work(handlers.longer, receives=1, kind=kind, keeper=False).outcomes == {"done": 1}

    def test_whatever_one_does_the_others_are_worked(self, stage: Stage, handlers: ModuleType) -> None:
        dead = stage.make("dead")
        bodies = ["die", "exit", "raise", "lambda", "retry", "reject", "a", "b", "c"]
        stage.send(*bodies)
        counts = stage.work(handlers.unusual, kind="processes", concurrency=2, dead_letter_queue="dead")
        assert counts.outcomes == {"done": 8, "failed": 4, "retry": 1, "dead_lettered": 1}
        assert [each.body for each in dead.receive(10)] == ["reject"]
        assert stage.nothing_left()

    @pytest.mark.parametrize("place", ["body", "record"])
    def test_a_killed_one_resumes_from_its_checkpoint(
        self, stage: Stage, handlers: ModuleType, tmp_path: Path, place: str
    ) -> None:
        stage.send("work")
        records = FileCheckpoints(tmp_path / "records") if place == "record" else None
        counts = stage.work(handlers.steps, kind="processes", checkpoints=records)
        assert counts.outcomes == {"failed": 2, "done": 1}

    def test_the_pool_is_restored_after_a_kill(self, stage: Stage, handlers: ModuleType, tmp_path: Path) -> None:
        told = tmp_path / "pid"
        stage.send(str(told))
        worker = stage.worker(handlers.deaf, kind="processes", concurrency=2)
        worker.start()
        pid = _number_in(told)
        assert pid in worker.pids
        os.kill(pid, signal.SIGKILL)
        _wait(lambda: worker.counts is not None and worker.counts.outcomes.get("done") == 1)
        assert worker.counts is not None
        assert worker.counts.outcomes == {"failed": 1, "done": 1}
        _wait(lambda: len(worker.pids) == 2)
        worker.stop()
        assert worker.join(WAIT_S)
        assert worker.pids == []

    def test_a_machine_without_processes_for_a_moment_costs_no_runner(
        self, stage: Stage, handlers: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kind = processes._CONTEXT.Process
        start, starts = kind.start, count(1)

        def sometimes(self: Any) -> None:
            if next(starts) in (2, 3):
                raise BlockingIOError(11, "Resource temporarily unavailable")
            start(self)

        monkeypatch.setattr(kind, "start", sometimes)
        stage.send("die", "a", "b")
        counts = stage.work(handlers.unusual, kind="processes")
        assert counts.outcomes["done"] == 3
        assert stage.nothing_left()

    def test_a_deaf_one_is_killed_once_its_lease_is_lost(
        self, stage: Stage, handlers: ModuleType, tmp_path: Path
    ) -> None:
        stage.send(str(tmp_path / "pid"))
        counts = stage.work(
            handlers.deaf, receives=2, kind="processes", lease=2.0, wait=20, kill_after=0.2, keeper={"max_hold": 1.0}
        )
        # That it ends at all is the proof. On a busy machine the second one may be held too long as well.
        assert counts.outcomes.get("lost", 0) >= 1
        assert sum(counts.outcomes.values()) == 2

    def test_a_stop_tells_and_then_kills(
        self, stage: Stage, handlers: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        stage.send(str(tmp_path / "one"))
        obedient = stage.worker(handlers.obedient, kind="processes", drain=0.1)
        obedient.start()
        _wait((tmp_path / "one").exists)
        obedient.stop()
        assert obedient.join(WAIT_S)
        assert obedient.counts is not None
        assert obedient.counts.outcomes == {"stopped": 1}
        assert len(stage.visible()) == 1
        stage.send(str(tmp_path / "two"))
        deaf = stage.worker(handlers.deaf, kind="processes", drain=0.1, kill_after=3_000, retry=LATE)
        deaf.start()
        pid = _number_in(tmp_path / "two")
        deaf.stop()
        assert deaf.join(WAIT_S)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert deaf.counts is not None
        assert deaf.counts.outcomes == {"stopped": 1}
        assert len(stage.visible()) == 1
        _wait(lambda: "is killed, because the worker stops" in caplog.text)
        assert "takes its place" not in caplog.text

    def test_a_program_that_ends_without_a_stop_ends(self, stage: Stage, handlers: ModuleType, tmp_path: Path) -> None:
        stage.send(str(tmp_path / "pid"))
        stage.account.close()
        program = tmp_path / "program.py"
        program.write_text(
            f"""
import sys, time
from pathlib import Path
import {handlers.__name__} as handlers
from veilmq.client.worker import Worker

if __name__ == "__main__":
    Worker("veil://{stage.directory}?queue=work", handlers.deaf, kind="processes").start()
    while not Path("{tmp_path / "pid"}").exists():
        time.sleep(0.01)
    sys.exit(7)
"""
        )
        done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, timeout=WAIT_S)
        assert done.returncode == 7
        with pytest.raises(ProcessLookupError):
            os.kill(_number_in(tmp_path / "pid"), 0)

    def test_batches_and_decorated_handlers(self, stage: Stage, handlers: ModuleType) -> None:
        stage.send(*map(str, range(10)))
        counts = stage.work(handlers.some, kind="processes", batch=4)
        assert counts.outcomes == {"done": 10, "failed": 2}
        stage.send("a")
        assert stage.work(handlers.decorated.handler, kind="processes").outcomes == {"done": 1}

    def test_one_that_cannot_be_imported_there_is_refused(self, stage: Stage, handlers: ModuleType) -> None:
        stage.send("a")
        Path(str(handlers.__file__)).write_text("raise RuntimeError('broken module')")
        with pytest.raises(ParameterInvalid, match="broken module"):
            stage.worker(handlers.pid, kind="processes").run()
        assert stage.visible() == ["a"]

    def test_a_method_is_refused_unless_its_class_is_all_it_needs(self, stage: Stage) -> None:
        with pytest.raises(ParameterInvalid, match="no name that a child process can import"):
            stage.worker(Methods().of_an_object, kind="processes")
        stage.worker(Methods.of_the_class, kind="processes")
        stage.worker(Methods.of_nobody, kind="processes")


class Unusual(BaseException):
    """As gevent's Timeout and pytest's Failed: no Exception."""


class Methods:
    def of_an_object(self, job: Any) -> None: ...

    @classmethod
    def of_the_class(cls, job: Any) -> None: ...

    @staticmethod
    def of_nobody(job: Any) -> None: ...


class TestCoroutines:
    def test_many_run_at_the_same_time(self, stage: Stage) -> None:
        stage.send(*map(str, range(100)))
        running, most = 0, 0

        async def handler(job: Any) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            stage.note(job)
            running -= 1

        counts = stage.work(handler, kind="async", concurrency=50)
        assert counts.outcomes == {"done": 100}
        assert Counter(stage.seen) == Counter(map(str, range(100)))
        assert 10 < most <= 50

    def test_whatever_one_does_the_others_are_worked(self, stage: Stage) -> None:
        stage.make("dead")
        errors: dict[str, BaseException] = {
            "raise": RuntimeError(), "exit": SystemExit(), "interrupt": KeyboardInterrupt(),
            "cancel": asyncio.CancelledError(), "retry": Retry(0.0), "reject": Reject(""),
            "generator": GeneratorExit(), "unusual": Unusual(),
        }  # fmt: skip

        async def handler(job: Any) -> None:
            await asyncio.sleep(0)
            if job.receive_count == 1 and job.body in errors:
                raise errors[job.body]

        stage.send(*errors, "a", "b")
        counts = stage.work(handler, kind="async", concurrency=3, dead_letter_queue="dead")
        assert counts.outcomes == {"done": 9, "failed": 6, "retry": 1, "dead_lettered": 1}

    def test_checkpoints_are_awaited(self, stage: Stage) -> None:
        stage.send("work")
        states: list[Any] = []

        async def handler(job: Any) -> None:
            states.append(job.state)
            await job.extend(200)
            assert job.remaining() > 100
            await job.checkpoint((job.state or 0) + 1)
            assert job.remaining() < 100
            if job.receive_count < 3:
                raise RuntimeError("again")

        assert stage.work(handler, kind="async", keeper=False).outcomes == {"failed": 2, "done": 1}
        assert states == [None, 1, 2]

    def test_a_lost_lease_cancels_its_task(self, stage: Stage) -> None:
        stage.send("a")
        causes: list[Any] = []

        async def handler(job: Any) -> None:
            if job.receive_count == 1:
                try:
                    await asyncio.sleep(WAIT_S)
                finally:
                    causes.append(job.cancelled.cause)

        counts = stage.work(handler, receives=2, kind="async", lease=3.0, wait=20, keeper=False)
        assert causes == [Cause.LOST]
        assert counts.outcomes == {"lost": 1, "done": 1}

    def test_a_stop_cancels_what_does_not_finish(self, stage: Stage) -> None:
        stage.send("a", "b")
        began = threading.Semaphore(0)

        async def handler(job: Any) -> None:
            began.release()
            await asyncio.sleep(3_000)

        worker = stage.worker(handler, kind="async", concurrency=2, drain=0.1)
        worker.start()
        assert began.acquire(timeout=WAIT_S)
        assert began.acquire(timeout=WAIT_S)
        worker.stop()
        assert worker.join(WAIT_S)
        assert worker.counts is not None
        assert worker.counts.outcomes == {"stopped": 2}
        assert stage.visible() == ["a", "b"]

    def test_batches(self, stage: Stage) -> None:
        stage.send(*map(str, range(10)))

        async def handler(jobs: list[Any]) -> list[str]:
            await asyncio.sleep(0)
            return [job.id for job in jobs if job.body in "37" and job.receive_count == 1]

        assert stage.work(handler, kind="async", batch=4).outcomes == {"done": 10, "failed": 2}

    @pytest.mark.slow
    def test_a_busy_loop_loses_no_lease(self, stage: Stage) -> None:
        stage.send("a", "b")

        async def handler(job: Any) -> None:
            stage.note(job)
            end = time.monotonic() + 4.5
            while time.monotonic() < end:
                pass

        counts = stage.work(handler, kind="async", concurrency=2, lease=3.0)
        assert counts.outcomes == {"done": 2}
        assert sorted(stage.seen) == ["a", "b"]


class TestTelling:
    """Metrics and spans, with the real libraries."""

    def test_prometheus_counts(self, stage: Stage) -> None:
        from prometheus_client import CollectorRegistry

        from veilmq.client.worker import PrometheusMeter

        registry = CollectorRegistry()
        stage.send("a", "b", "bad")

        def handler(job: Any) -> None:
            if job.body == "bad" and job.receive_count == 1:
                raise RuntimeError("once")

        stage.work(handler, metrics=PrometheusMeter(registry))

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"veilmq_worker_{name}", {"queue": "work", **labels})

        assert value("messages_total", outcome="done") == 3
        assert value("messages_total", outcome="failed") == 1
        assert value("processing_seconds_count") == 4
        assert value("in_hand") == 0

    def test_spans_continue_the_senders_trace(self, stage: Stage) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from opentelemetry.trace import StatusCode, get_current_span

        from veilmq.client.messages import Message

        exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        parent = "4bf92f3577b34da6a3ce929d0e0e4736"
        stage.send(Message("a", attributes={"traceparent": f"00-{parent}-00f067aa0ba902b7-01"}))
        current: list[int] = []

        def handler(job: Any) -> None:
            current.append(get_current_span().get_span_context().trace_id)
            if job.receive_count == 1:
                raise RuntimeError("once")

        stage.work(handler, tracer=provider.get_tracer("test"))
        failed, done = exporter.get_finished_spans()
        assert current == [int(parent, 16)] * 2
        assert (failed.name, failed.kind.name) == ("process work", "CONSUMER")
        assert failed.status.status_code is StatusCode.ERROR
        assert failed.attributes is not None
        assert failed.attributes["error.type"] == "RuntimeError"
        assert done.status.status_code is not StatusCode.ERROR
        assert done.attributes is not None
        assert done.attributes["messaging.destination.name"] == "work"
        assert done.attributes["veilmq.receive_count"] == 2
        assert [link.context.trace_id for link in done.links] == [int(parent, 16)]

    def test_a_rejection_s_text_is_no_type_of_error(self, stage: Stage) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))

        def handler(job: Any) -> None:
            raise Reject("customer 4711 is unknown")

        stage.send("a")
        stage.work(handler, receives=1, tracer=provider.get_tracer("test"))
        (span,) = exporter.get_finished_spans()
        assert span.attributes is not None
        assert span.attributes["error.type"] == "rejected"

    def test_batches_link(self, stage: Stage) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from veilmq.client.messages import Message

        exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        parents = [f"{number:032x}" for number in (1, 2)]
        stage.send(*(Message("a", attributes={"traceparent": f"00-{each}-00f067aa0ba902b7-01"}) for each in parents))
        stage.work(lambda jobs: None, batch=5, prefetch=5, tracer=provider.get_tracer("test"))
        links = [link.context.trace_id for span in exporter.get_finished_spans() for link in span.links]
        traces = [span.context.trace_id for span in exporter.get_finished_spans() if span.context is not None]
        assert set(links) | set(traces) >= {1, 2}

    def test_what_is_not_installed_is_said(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        from veilmq.client.worker import PrometheusMeter

        for package in ("prometheus_client", "opentelemetry"):
            monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(CapabilityMissing, match="metrics"):
            PrometheusMeter()
        with pytest.raises(CapabilityMissing, match="tracer"):
            stage.worker(stage.note, tracer=True).run()


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _number_in(path: Path) -> int:
    _wait(lambda: path.exists() and path.read_text())
    return int(path.read_text())
