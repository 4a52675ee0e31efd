"""Spans of a server's requests, as the semantic conventions for messaging have them, read off a real one."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import veilmq
from veilmq.client.tracing import TracedQueue
from veilmq.server.auth import DevelopmentKeyring
from veilmq.server.clock import LeaseClock
from veilmq.server.config.settings import Address, Settings
from veilmq.server.service import Service
from veilmq.server.traces import Traces
from veilmq.testing.local import VEILMQ, ServerProcess

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MADE, MADE_BY = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
XRAY = "Root=1-5759e988-bd862e3fe1be46a994272793;Parent=53995c3f42cd8ad8;Sampled=1"
W3C = {"traceparent": {"DataType": "String", "StringValue": f"00-{MADE}-{MADE_BY}-01"}}
OF_XRAY = {"AWSTraceHeader": {"DataType": "String", "StringValue": XRAY}}


class Told:
    """What a server told of the requests that one call made."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.loop: asyncio.AbstractEventLoop | None = None
        """The server's: it makes a span when the answer is written, in the same turn."""

    def spans(self) -> Iterator[ReadableSpan]:
        """Those since the last look."""
        if self.loop is not None:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(20)
        found = self.exporter.get_finished_spans()
        self.exporter.clear()
        return iter(found)

    def span(self) -> ReadableSpan:
        """The only one since the last look."""
        (found,) = self.spans()
        return found


def linked(span: ReadableSpan) -> list[tuple[str, str]]:
    return [(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links]


def serving(data: Path, told: Told, act: Callable[[Service], None]) -> None:
    """Serve from `data`, on free ports, while `act` runs in a thread."""
    free = Address("127.0.0.1", 0)
    settings = Settings(data=data, sqs=free, azure=free, mns=free)

    async def run() -> None:
        told.loop = asyncio.get_running_loop()
        service = Service(settings, DevelopmentKeyring(), LeaseClock(), traces=Traces(told.provider))
        await service.start()
        try:
            await asyncio.to_thread(act, service)
        finally:
            await service.stop()

    asyncio.run(run())


def sqs(url: str) -> Any:
    """A client whose requests carry a trace context, as those of an instrumented program."""
    keys = {"aws_access_key_id": "A", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    client = boto3.client("sqs", endpoint_url=url, config=Config(retries={"total_max_attempts": 1}), **keys)
    header = f"00-{TRACE}-{SPAN}-01"
    client.meta.events.register("before-send.sqs", lambda request, **_: request.headers.update(traceparent=header))
    return client


def test_each_request_for_messages_is_a_span_of_the_caller_s_trace(tmp_path: Path) -> None:
    told = Told()

    def act(service: Service) -> None:
        client = sqs(service.listeners["sqs"].urls[0])
        queue = {"QueueUrl": client.create_queue(QueueName="orders")["QueueUrl"]}
        client.get_queue_attributes(**queue)
        client.receive_message(**queue, WaitTimeSeconds=0)
        assert list(told.spans()) == [], "neither settings nor a receive that is empty"

        sent = client.send_message(**queue, MessageBody="secret", MessageAttributes=W3C)
        span = told.span()
        assert (span.name, span.kind, span.status.status_code) == ("send orders", SpanKind.SERVER, StatusCode.UNSET)
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
        assert linked(span) == [(MADE, MADE_BY)]
        assert span.attributes == {
            "messaging.system": "aws_sqs",
            "messaging.destination.name": "orders",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.message.id": sent["MessageId"],
            "client.address": "127.0.0.1",
        }
        assert span.start_time is not None
        assert span.end_time is not None
        assert 0 <= span.end_time - span.start_time < 10**10
        assert "secret" not in span.to_json()

        entries = [{"Id": "1", "MessageBody": "x", "MessageSystemAttributes": OF_XRAY}, {"Id": "2", "MessageBody": "y"}]
        client.send_message_batch(**queue, Entries=entries)
        span = told.span()
        assert dict(span.attributes or {})["messaging.batch.message_count"] == 2
        xray = ("5759e988bd862e3fe1be46a994272793", "53995c3f42cd8ad8")
        assert linked(span) == [xray]

        messages = client.receive_message(**queue, MaxNumberOfMessages=10)["Messages"]
        span = told.span()
        assert (span.name, dict(span.attributes or {})["messaging.batch.message_count"]) == ("receive orders", 3)
        assert linked(span) == [(MADE, MADE_BY), xray]
        assert [dict(link.attributes or {})["messaging.message.id"] for link in span.links] == [
            each["MessageId"] for each in messages[:2]
        ]

        handles = [{"ReceiptHandle": each["ReceiptHandle"]} for each in messages]
        client.change_message_visibility(**queue, **handles[0], VisibilityTimeout=60)
        client.change_message_visibility(**queue, **handles[0], VisibilityTimeout=0)
        client.delete_message(**queue, **handles[1])
        found = list(told.spans())
        types = [dict(span.attributes or {}).get("messaging.operation.type") for span in found]
        assert [span.name for span in found] == ["extend orders", "release orders", "delete orders"]
        assert types == [None, "settle", "settle"]
        assert messages[0]["ReceiptHandle"] not in "".join(span.to_json() for span in found)

        with pytest.raises(ClientError):
            client.delete_message(**queue, ReceiptHandle="none")
        span = told.span()
        assert (span.status.status_code, dict(span.attributes or {})["error.type"]) == (
            StatusCode.ERROR,
            "ReceiptInvalid",
        )

    serving(tmp_path, told, act)


def test_a_producer_of_ours_is_linked_and_each_protocol_is_named(tmp_path: Path) -> None:
    told, produced = Told(), Told()

    def act(service: Service) -> None:
        urls = {name: listener.urls[0] for name, listener in service.listeners.items()}
        with veilmq.connect(f"{urls['sqs'].replace('http', 'veil')}/orders?create=1") as queue:
            traced = TracedQueue(queue, produced.provider.get_tracer("test"))
            traced.send("one")
            (producer,) = produced.spans()
            (span,) = (each for each in told.spans() if each.name == "send orders")
            assert linked(span) == [
                (f"{producer.context.trace_id:032x}", f"{producer.context.span_id:016x}")  # type: ignore[union-attr]
            ]
            assert span.parent is None
            assert dict(span.attributes or {})["messaging.system"] == "veilmq"
        with veilmq.connect(f"{urls['mns'].replace('http://', 'mns://a:s@')}/tasks?create=1") as queue:
            queue.send("one")
            queue.delete(queue.receive()[0].handle)
        found = list(told.spans())
        assert [span.name for span in found] == ["send tasks", "receive tasks", "delete tasks"]
        assert {dict(span.attributes or {})["messaging.system"] for span in found} == {"aliyun_mns"}

    serving(tmp_path, told, act)


def test_a_server_exports_as_the_variables_say_and_names_a_missing_exporter(tmp_path: Path) -> None:
    """The exporter that the SDK itself has writes to stdout; a stop exports what is left."""
    environment = {"OTEL_TRACES_EXPORTER": "console", "OTEL_RESOURCE_ATTRIBUTES": "deployment=test"}
    server = ServerProcess(tmp_path, "--traces")
    server.program = ("sh", "-c", f'exec "$@" >{tmp_path}/spans', "sh", *VEILMQ)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        server.start()
    with veilmq.connect(f"{server.sqs.replace('http', 'veil')}/orders?create=1") as queue:
        queue.send("one")
    assert server.stop() == 0
    span = json.loads((tmp_path / "spans").read_text())
    assert (span["name"], span["kind"]) == ("send orders", "SpanKind.SERVER")
    of = span["resource"]["attributes"]
    assert (of["service.name"], of["service.version"], of["deployment"]) == ("veilmq", veilmq.__version__, "test")
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (tmp_path / "broken-1.dist-info/entry_points.txt").write_text(
        "[opentelemetry_traces_exporter]\nbroken = broken:Exporter\n"
    )
    (tmp_path / "broken.py").write_text("import opentelemetry.missing\n")
    broken = {"OTEL_TRACES_EXPORTER": "broken", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    fails = "the trace exporter broken is installed, but it fails: No module named 'opentelemetry.missing'"
    for wrong, why in (
        ({"OTEL_TRACES_EXPORTER": "nowhere"}, "no installed package has the trace exporter nowhere"),
        (broken, fails),
        (environment | {"OTEL_BSP_SCHEDULE_DELAY": "-5"}, "schedule_delay_millis must be positive."),
    ):
        refused = subprocess.run(
            [*VEILMQ, "serve", "--traces", "--data", str(tmp_path / "other")],
            env=os.environ | wrong,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert refused.returncode == 2
        assert f"veilmq: --traces: {why}\n" in refused.stderr
        assert not (tmp_path / "other").exists()
