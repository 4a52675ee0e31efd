"""A trace goes from the producer through the queue to the worker, as the semantic conventions for messaging have it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import veilmq
from veilmq.client.bridge import Bridge, Options
from veilmq.client.errors import TransportError
from veilmq.client.messages import Message, Sent
from veilmq.client.ordered import LocalFile, OrderedQueue
from veilmq.client.ordered.numbering import ATTRIBUTE
from veilmq.client.queue import Queue, identity_of
from veilmq.client.routed import RoutedQueue
from veilmq.client.tracing import TracedQueue
from veilmq.client.worker import Worker
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid
from veilmq.testing.local import LocalServer


class Traces:
    """An exporter in memory, and a tracer that writes to it."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


class Loud(Wrapping):
    """A pattern that changes bodies."""

    def send(self, message: str | Message) -> Sent:
        return self.inner.send(str(message).upper())


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with veilmq.connect(f"veil://{tmp_path}/data?queue=orders&create=1") as opened:
        yield opened


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_trace_goes_from_the_send_through_the_queue_to_the_handler(queue: Queue, traces: Traces) -> None:
    traced = TracedQueue(queue, traces.tracer)
    with traces.tracer.start_as_current_span("checkout") as checkout:
        sent = traced.send(Message("order 7", type="order"))
    Worker(traced, lambda job: None, tracer=traces.tracer, wait=0.1).run(until_empty=True)

    (send,), (receive,), (process,) = (traces.named(f"{name} orders") for name in ("send", "receive", "process"))
    trace_id = checkout.get_span_context().trace_id
    assert [(span.kind.name, span.get_span_context().trace_id == trace_id) for span in (send, receive, process)] == [
        ("PRODUCER", True),
        ("CLIENT", False),
        ("CONSUMER", True),
    ]
    assert send.parent is not None
    assert send.parent.span_id == checkout.get_span_context().span_id
    assert process.parent is not None
    assert process.parent.span_id == send.get_span_context().span_id
    for span in (receive, process):
        assert [link.context.span_id for link in span.links] == [send.get_span_context().span_id]
    assert attributes(send) == {
        "messaging.system": "veilmq",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.message.id": sent.id,
    }
    assert attributes(receive)["messaging.batch.message_count"] == 1
    assert attributes(process)["messaging.message.id"] == sent.id


def test_a_batch_is_one_span_that_each_message_continues(queue: Queue, traces: Traces) -> None:
    traced = TracedQueue(queue, traces.tracer)
    traced.send_batch(["a", Message("b"), "c"])
    (send,) = traces.named("send orders")
    assert attributes(send)["messaging.batch.message_count"] == 3
    worker = Worker(queue, lambda jobs: None, tracer=traces.tracer, wait=0.1, batch=3, prefetch=3)
    worker.run(until_empty=True)
    spans = traces.named("process orders")
    assert {link.context.span_id for span in spans for link in span.links} == {send.get_span_context().span_id}


def test_an_empty_receive_makes_no_span(queue: Queue, traces: Traces) -> None:
    assert TracedQueue(queue, traces.tracer).receive() == []
    assert traces.exporter.get_finished_spans() == ()


def test_a_context_that_a_message_has_is_kept_and_ten_attributes_stay_ten(queue: Queue, traces: Traces) -> None:
    traced = TracedQueue(queue, traces.tracer)
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    traced.send(Message("a", attributes={"traceparent": parent}))
    traced.send(Message("b", attributes={f"a{number}": number for number in range(10)}))
    first, second = queue.receive(2)
    assert first.attributes == {"traceparent": parent}
    assert len(second.attributes) == 10


def test_a_message_is_sent_without_the_context_where_a_layer_below_has_no_room_for_it(
    queue: Queue, traces: Traces, tmp_path: Path
) -> None:
    """The number of an `OrderedQueue` is an attribute, too; and attributes count in a message's size."""
    nine = Message("a", attributes={f"a{number}": number for number in range(9)})
    largest = "b" * queue.capabilities.body_bytes_max
    with OrderedQueue(queue, send_storage=LocalFile(tmp_path / "numbers")) as ordered:
        ordered_and_traced = TracedQueue(ordered, traces.tracer)
        ordered_and_traced.send(nine)
        ordered_and_traced.send("c")
        TracedQueue(queue, traces.tracer).send(largest)
        first, second, third = queue.receive(3)
    assert set(first.attributes) == {*nine.attributes, ATTRIBUTE}
    assert set(second.attributes) == {"traceparent", ATTRIBUTE}
    assert (third.body, third.attributes) == (largest, {})


def test_only_the_trace_travels_and_not_what_else_the_context_holds(queue: Queue, traces: Traces) -> None:
    """Whatever the process's propagators write and read: baggage is the user's, and a message is stored."""
    state = trace.TraceState([("vendor", "x")])
    span = trace.NonRecordingSpan(trace.SpanContext(1, 2, True, trace.TraceFlags(1), state))
    traced, usual = TracedQueue(queue, traces.tracer), propagate.get_global_textmap()
    token = context.attach(baggage.set_baggage("user", "x@y", trace.set_span_in_context(span)))
    try:
        traced.send("a")
        context.detach(token)
        propagate.set_global_textmap(CompositePropagator([]))
        traced.send("b")
        assert [set(each.attributes) for each in queue.peek(2)] == [{"traceparent", "tracestate"}, {"traceparent"}]
        Worker(queue, lambda job: None, tracer=traces.tracer, wait=1).run(until_empty=True)
    finally:
        propagate.set_global_textmap(usual)
    sends = {span.get_span_context().span_id for span in traces.named("send orders")}
    assert {link.context.span_id for span in traces.named("process orders") for link in span.links} == sends


def test_it_is_the_queue_that_it_wraps(queue: Queue, traces: Traces, tmp_path: Path) -> None:
    """To a worker that names a queue for dead letters, to receivers that share a poll, and to a bridge."""

    def fail(job: object) -> None:
        raise ValueError

    traced = TracedQueue(queue, traces.tracer)
    traced.send("order 7")
    worker = Worker(traced, fail, tracer=traces.tracer, wait=0.1, poison_after=1, dead_letter_queue="failed")
    with veilmq.connect(f"veil://{tmp_path}/data?queue=failed&create=1") as failed:
        worker.run(until_empty=True)
        assert [each.body for each in failed.receive()] == ["order 7"]
    assert identity_of(TracedQueue(traced)) == identity_of(queue)
    with pytest.raises(ParameterInvalid, match="the same queue as the source"):
        Bridge(traced, queue, Options())
    for changing in (TracedQueue(Loud(queue)), RoutedQueue({"loud": Loud(queue)}, failed)):
        with pytest.raises(ParameterInvalid, match="bodies go through Loud"):
            Worker(changing, fail, dead_letter_queue="failed")


def test_what_fails_is_an_error_on_the_span(queue: Queue, traces: Traces) -> None:
    traced = TracedQueue(queue, traces.tracer)
    with pytest.raises(MessageTooLarge):
        traced.send("x" * 2_000_000)
    results = traced.send_batch(["a", "", Message("b", type="\ud800")])
    assert [type(each) for each in results] == [Sent, ParameterInvalid, ParameterInvalid]
    with pytest.raises(ParameterInvalid, match="messages"):
        traced.send_batch("abc")
    traced.close()
    with pytest.raises(TransportError):
        traced.receive()
    failed = [(span.name, attributes(span).get("error.type")) for span in traces.exporter.get_finished_spans()]
    assert failed == [
        ("send orders", "MessageTooLarge"),
        ("send orders", "ParameterInvalid"),
        ("receive orders", "TransportError"),
    ]


@pytest.mark.slow
def test_it_goes_through_a_server_and_the_protocols_that_have_attributes(
    veilmq_server: LocalServer, traces: Traces
) -> None:
    veilmq_server.connect("orders")
    for url in (
        veilmq_server.queue_url("orders"),
        veilmq_server.sqs_url.replace("http://", "sqs://any:any@") + "/orders?tls=0&region=us-east-1",
        veilmq_server.mns_url.replace("http://", "mns://any:any@") + "/orders",
        veilmq_server.azure_url.replace("http://", "azure://") + "/devstoreaccount1/orders?tls=0",
    ):
        traces.exporter.clear()
        with veilmq.connect(url) as queue:
            traced = TracedQueue(queue, traces.tracer)
            traced.send("order 7")
            assert Worker(traced, lambda job: None, tracer=traces.tracer, wait=1).run(until_empty=True).received == 1
            system = {"sqs": "aws_sqs", "mns": "aliyun_mns", "azure": "azure_queue"}.get(
                url.partition(":")[0], "veilmq"
            )
            (send,), (process,) = traces.named("send orders"), traces.named("process orders")
            assert attributes(send)["messaging.system"] == system
            linked = [link.context.span_id for link in process.links]
            assert linked == ([send.get_span_context().span_id] if queue.capabilities.attributes else []), url


def test_without_opentelemetry_it_says_what_to_install(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(CapabilityMissing, match=re.escape("pip install 'veilmq[telemetry]'")):
        TracedQueue(queue)
