"""Traces that go through a queue: spans of sends and receives, and the trace context in each message's attributes.

Strategy: `TracedQueue` wraps any queue. A send is a PRODUCER span, and its W3C context (`traceparent`) goes with the
message, where the queue has attributes; a worker's span has it as its parent and as a link (`Worker(tracer=)`). A
receive that brings messages is a CLIENT span with a link to each message's send; one that comes back empty makes none.
Spans are named and described by the semantic conventions for messaging. OpenTelemetry is imported when a queue is made.

Source: OpenTelemetry semantic conventions, "Messaging spans".
"""

import contextlib
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from veilmq.client.messages import Message, Received, Sent
from veilmq.client.queue import Capabilities, Queue, identity_of
from veilmq.client.shared import attempt, checks, send_prepared
from veilmq.client.shared.checks import as_message, attributes_room, transmitted_bytes
from veilmq.client.shared.lifetimes import InOneProcess
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, VeilError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Tracer

_SYSTEMS: Final = {"sqs": "aws_sqs", "azure": "azure_queue", "mns": "aliyun_mns"}
_PARENT: Final = "traceparent"
ID: Final = "messaging.message.id"
COUNT: Final = "messaging.batch.message_count"


class Tracing:
    """Makes the spans of one queue. tracer: an OpenTelemetry tracer, or True for the global one.

    Raises CapabilityMissing if opentelemetry-api is not installed.
    """

    def __init__(self, queue: str, protocol: str, tracer: "Tracer | bool") -> None:
        self._queue = queue
        self._system = _SYSTEMS.get(protocol, "veilmq")
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise CapabilityMissing(capability="tracer (pip install 'veilmq[telemetry]')") from error
        self._propagate, self._w3c, self.trace = propagate, TraceContextTextMapPropagator(), trace
        self._tracer: Tracer = trace.get_tracer("veilmq") if isinstance(tracer, bool) else tracer

    def begin(
        self,
        operation: str,
        kind: "SpanKind",
        more: Mapping[str, Any] = MappingProxyType({}),
        *,
        parent: "Context | None" = None,
        links: "Sequence[Link]" = (),
    ) -> "Span":
        """A span of a `send`, `receive` or `process`, which the caller ends. more: attributes beside those of all."""
        attributes = {
            "messaging.system": self._system,
            "messaging.destination.name": self._queue,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            **more,
        }
        return self._tracer.start_span(
            f"{operation} {self._queue}", context=parent, kind=kind, attributes=attributes, links=list(links)
        )

    def contexts(self, messages: Sequence[Received]) -> "list[Context]":
        """The context in which each message was sent: by W3C, or else as the process's own propagators read it."""
        fields = [{name: text for name, text in each.attributes.items() if isinstance(text, str)} for each in messages]
        return [self._w3c.extract(each, self._propagate.extract(each)) for each in fields]

    def links(self, contexts: "Sequence[Context]") -> "list[Link]":
        """Links to the spans of the contexts that have one."""
        found = [self.trace.get_current_span(context).get_span_context() for context in contexts]
        return [self.trace.Link(context) for context in found if context.is_valid]

    def failed(self, span: "Span", error: str, text: str = "") -> None:
        """Mark a span as failed. error: the type of the error."""
        span.set_status(self.trace.Status(self.trace.StatusCode.ERROR, text))
        span.set_attribute("error.type", error)

    def carried(self, message: Message, span: "Span", able: Capabilities) -> Message:
        """The message with the span's context, if every layer below has room for it.

        Only W3C's trace context: the process's own propagators may add baggage, which is the user's and may be large.
        """
        room = attributes_room(message, able)
        if not room or _PARENT in message.attributes:
            return message
        fields: dict[str, str] = {}
        self._w3c.inject(fields, context=self.trace.set_span_in_context(span))
        more = {name: fields[name] for name in sorted(fields, key=lambda name: name != _PARENT)[:room] if fields[name]}
        grown = msgspec.structs.replace(message, attributes={**message.attributes, **more})
        return grown if transmitted_bytes(grown, able) <= able.body_bytes_max else message


class TracedQueue(Wrapping):
    """A `Queue` whose sends and receives are spans, and whose messages carry the sender's trace context.

    tracer: an OpenTelemetry tracer, or True for the global one. A message that has a `traceparent` keeps it; where the
    queue has no attributes (Azure), or no room for the context (`Capabilities.attributes_max`, `body_bytes_max`), it
    goes without. Raises CapabilityMissing if opentelemetry-api is not installed.
    """

    changes_bodies = False

    def __init__(self, inner: Queue, tracer: "Tracer | bool" = True) -> None:
        super().__init__(inner)
        self._tracing = Tracing(inner.name, inner.capabilities.protocol, tracer)

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`: a receive returns what one of `inner` does."""
        return identity_of(self.inner)

    @contextlib.contextmanager
    def _span(self, more: Mapping[str, Any] = MappingProxyType({})) -> "Iterator[Span]":
        tracing = self._tracing
        with InOneProcess(os.getpid()):  # around the user's tracer and its processors
            span = tracing.begin("send", tracing.trace.SpanKind.PRODUCER, more)
            try:
                yield span
            except VeilError as error:
                tracing.failed(span, type(error).__name__, str(error))
                raise
            finally:
                span.end()

    def send(self, message: str | Message) -> Sent:
        with self._span() as span:
            sent = self.inner.send(self._tracing.carried(as_message(message), span, self.capabilities))
            span.set_attribute(ID, sent.id)
        return sent

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """See `Queue.send_batch`. One span, whose context every message carries."""
        messages = checks.batch(messages)
        with self._span({COUNT: len(messages)}) as span:
            able = self.capabilities

            def carry(given: str | Message) -> Message:
                return self._tracing.carried(as_message(given), span, able)

            prepared = [attempt(carry, each) for each in messages]
            results = send_prepared(self.inner, prepared)
            if failed := next((each for each in results if isinstance(each, VeilError)), None):
                self._tracing.failed(span, type(failed).__name__, str(failed))
        return results

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        tracing = self._tracing
        with InOneProcess(os.getpid()):
            span = tracing.begin("receive", tracing.trace.SpanKind.CLIENT)
            try:
                found = self.inner.receive(count_max, lease=lease, wait=wait)
            except VeilError as error:
                tracing.failed(span, type(error).__name__, str(error))
                span.end()
                raise
            if found:  # a span that is never ended is never exported
                for link in tracing.links(tracing.contexts(found)):
                    span.add_link(link.context)
                span.set_attribute(COUNT, len(found))
                span.end()
        return found
