"""Frameworks that work off queues, unmodified: Celery over kombu's transports for SQS and for Azure, dramatiq over
dramatiq-sqs, taskiq over taskiq-aio-sqs, Django's tasks over django-tasks-sqs, Symfony Messenger, npm's sqs-consumer.

Strategy: worker processes append a line to a named pipe for each job that they begin or end, so that a test waits for
what happens and for nothing else. Settings of a program: `endpoint`, `queue` or `url`, `visibility_seconds`, and the
pipe as `record`.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqs_clients import HERE, NODE, TOOLS, Boto3, needed, signing
from sqs_scenario import counts, heartbeat, killed_worker, twenty_jobs, until_done

from veilmq.testing.local import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sqs-workers")]
EVENT_SECONDS = 60
STOP_SECONDS = 30
AZURITE = (
    "devstoreaccount1",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
)


class Processes:
    """The worker processes of one test, and their pipe."""

    def __init__(self, key: tuple[str, str], directory: Path, endpoint: str, visibility_seconds: int) -> None:
        record = directory / "record"
        os.mkfifo(record)
        # Open for writing as well, so that it does not end while no worker runs.
        self._record = os.open(record, os.O_RDWR)
        self._lines: list[str] = []
        self._running: list[subprocess.Popen[bytes]] = []
        self.environment = signing(key)
        self.settings = {"endpoint": endpoint, "visibility_seconds": visibility_seconds, "record": str(record)}

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        self._running.append(subprocess.Popen(self.command(), env=self.environment))

    def event(self) -> tuple[str, str, int]:
        while not self._lines:
            ready, _, _ = select.select([self._record], [], [], EVENT_SECONDS)
            assert ready, f"nothing happened for {EVENT_SECONDS} s"
            # Writes of less than a page are whole.
            self._lines += os.read(self._record, 65_536).decode().splitlines()
        kind, job, process = self._lines.pop(0).split()
        return kind, job, int(process)

    def stop(self) -> None:
        for process in self._running:
            process.terminate()
        codes = [process.wait(STOP_SECONDS) for process in self._running]
        assert [code for code in codes if code not in (0, -signal.SIGKILL)] == []

    def close(self) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        os.close(self._record)


class QueueWorkers(Processes):
    """The framework sends, and it works."""

    def __init__(self, kind: str, queue: str, *given: Any) -> None:
        super().__init__(*given)
        self._program = [_interpreter(kind), str(HERE / f"{kind}_program.{'php' if kind == 'symfony' else 'py'}")]
        self.settings["queue"] = queue

    def command(self) -> list[str]:
        return [*self._program, json.dumps(self.settings), "worker"]

    def send(self, *jobs: dict[str, Any]) -> None:
        command = [*self.command()[:-1], "send", *map(json.dumps, jobs)]
        subprocess.run(command, env=self.environment, check=True, timeout=EVENT_SECONDS)


def _interpreter(kind: str) -> str:
    """Of a framework's program. Skips where `make setup-clients` could not get it, and said so."""
    own = {"django": ("bin/python", "Django 6 needs Python 3.12"), "symfony": ("php", "Symfony needs apt")}.get(kind)
    if own is None:
        return sys.executable
    found = needed(TOOLS / kind, ".installed") / own[0]
    if not found.exists():
        pytest.skip(own[1])
    return str(found)


class SqsConsumer(Processes):
    """boto3 sends, and sqs-consumer works."""

    def __init__(self, client: Boto3, url: str, *given: Any) -> None:
        super().__init__(*given)
        self.settings["url"] = url
        self._client = client

    def command(self) -> list[str]:
        clients = needed(TOOLS / "clients", "node_modules/sqs-consumer")
        return [str(needed(NODE)), str(HERE / "js/consumer_program.mjs"), str(clients), json.dumps(self.settings)]

    def send(self, *jobs: dict[str, Any]) -> None:
        for job in jobs:
            self._client.call("SendMessage", QueueUrl=self.settings["url"], MessageBody=json.dumps(job))


class Stage:
    """Makes workers of either kind over a queue of the test's own, and looks into it."""

    def __init__(self, server: ServerProcess, key: tuple[str, str], directory: Path) -> None:
        self._server, self._key, self._directory = server, key, directory
        self._made: list[Processes] = []
        self.client = Boto3(server.sqs, key)
        self.name = ""

    def workers(self, kind: str, visibility_seconds: int) -> Any:
        self.name = f"{kind}-{self._directory.name}"
        given = self._key, self._directory, self._server.sqs, visibility_seconds
        if kind in ("taskiq", "django", "sqs-consumer"):  # the others make their queues themselves
            url = self.client.call("CreateQueue", QueueName=self.name)["QueueUrl"]
        if kind == "sqs-consumer":
            self._made.append(SqsConsumer(self.client, url, *given))
        else:
            self._made.append(QueueWorkers(kind, self.name, *given))
        return self._made[-1]

    @property
    def counts(self) -> tuple[int, int]:
        return counts(self.client, self.client.call("GetQueueUrl", QueueName=self.name)["QueueUrl"])

    def close(self) -> None:
        for each in self._made:
            each.close()
        self.client.close()


@pytest.fixture
def stage(signed: ServerProcess, key: tuple[str, str], tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(signed, key, tmp_path)
    yield stage
    stage.close()


@pytest.fixture
def open_stage(shared: ServerProcess, key: tuple[str, str], tmp_path: Path) -> Iterator[Stage]:
    """On a server in development mode, which looks at what a client's headers say of it."""
    stage = Stage(shared, key, tmp_path)
    yield stage
    stage.close()


@pytest.mark.parametrize("kind", ["celery", "sqs-consumer"])
def test_twenty_jobs_are_done_once_each(kind: str, open_stage: Stage) -> None:
    twenty_jobs(open_stage.workers(kind, visibility_seconds=120))
    assert open_stage.counts == (0, 0)


@pytest.mark.parametrize("kind", ["celery", "dramatiq", "taskiq", "django", "symfony", "sqs-consumer"])
def test_the_job_of_a_killed_worker_is_done_by_another(kind: str, stage: Stage, tmp_path: Path) -> None:
    killed_worker(stage.workers(kind, visibility_seconds=3), str(tmp_path / "crashed"))
    assert stage.counts == (0, 0)


def test_a_heartbeat_keeps_a_job_that_outlasts_its_visibility_timeout(stage: Stage) -> None:
    heartbeat(stage.workers("sqs-consumer", visibility_seconds=8), seconds=11)
    assert stage.counts == (0, 0)


def test_the_pages_consumer_of_sqs_consumer_deletes_a_message_that_it_has_handled(
    shared: ServerProcess, key: tuple[str, str], tmp_path: Path
) -> None:
    page = (HERE.parents[1] / "docs/migrate/frameworks.md").read_text()
    (text,) = re.findall(r"```js\n(.*?)```", page, re.DOTALL)
    then = 'consumer.on("message_processed", () => process.exit(0)); // after the delete\n'
    program = tmp_path / "block.mjs"
    program.write_text(text.replace("http://127.0.0.1:9324", shared.sqs) + then)
    (tmp_path / "node_modules").symlink_to(needed(TOOLS / "clients" / "node_modules"))
    client = Boto3(shared.sqs, key)
    try:
        url = client.call("CreateQueue", QueueName="jobs")["QueueUrl"]
        client.call("SendMessage", QueueUrl=url, MessageBody="a job")
        done = subprocess.run([needed(NODE), program], capture_output=True, text=True, timeout=EVENT_SECONDS)
        assert (done.returncode, done.stdout) == (0, "a job\n"), done.stderr
        assert counts(client, url) == (0, 0)
    finally:
        client.close()


def test_celery_over_azure_loses_the_job_in_hand_of_a_killed_worker_and_no_other(
    shared: ServerProcess, key: tuple[str, str], tmp_path: Path
) -> None:
    """kombu's transport deletes a message before the worker begins it, whatever `task_acks_late` says."""
    workers = QueueWorkers("celery", "celery-azure", key, tmp_path, f"{shared.azure}/{AZURITE[0]}", 3)
    workers.settings["azure_key"] = AZURITE[1]
    client = Boto3(shared.sqs, key)
    try:
        workers.start()
        workers.send({"id": "deadly", "crash": str(tmp_path / "crashed")}, {"id": "a"}, {"id": "b"})
        url = client.call("GetQueueUrl", QueueName="celery-azure")["QueueUrl"]
        kind, job, killed = workers.event()
        assert (kind, job) == ("begin", "deadly")
        assert counts(client, url) == (2, 0), "docs/migrate/frameworks.md says which jobs a killed worker loses"
        workers.start()
        events = until_done(workers, 2)
        workers.stop()
        assert [event[:2] for event in events] == [("begin", "a"), ("done", "a"), ("begin", "b"), ("done", "b")]
        assert killed not in [process for *_, process in events]
        assert counts(client, url) == (0, 0)
    finally:
        workers.close()
        client.close()
