"""OpenTelemetry spans around handlers, where opentelemetry-api is installed and the user asks for them.

Strategy: one CONSUMER span a message, named and described by the semantic conventions for messaging; what the sender
put into the message's attributes as W3C trace context becomes its parent, and for a batch a link. The span is current
while the handler runs in a thread or coroutine. Nothing is imported until a tracer is wanted.

Source: OpenTelemetry semantic conventions, "Messaging spans".
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from veilmq.client.messages import Received
from veilmq.client.worker.results import Result, Verdict
from veilmq.model.errors import CapabilityMissing

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_FAILED: Final = (Verdict.FAILED, Verdict.REJECTED)


class Spans:
    """Makes the spans of one worker. `tracer`: an OpenTelemetry tracer, True for the global one, None for no spans.

    Raises CapabilityMissing for True where opentelemetry-api is not installed.
    """

    def __init__(self, queue: str, protocol: str, tracer: "Tracer | bool | None") -> None:
        self._queue = queue
        self._system = {"sqs": "aws_sqs", "azure": "azure_queue", "mns": "aliyun_mns"}.get(protocol, "veilmq")
        self._tracer: Tracer | None = None
        if tracer is True:
            try:
                from opentelemetry import trace
            except ImportError as error:
                raise CapabilityMissing(capability="tracer (pip install 'veilmq[telemetry]')") from error
            self._tracer = trace.get_tracer("veilmq.worker")
        elif tracer:
            self._tracer = tracer

    @contextlib.contextmanager
    def around(self, messages: Sequence[Received]) -> Iterator["Span | None"]:
        """The handler's span."""
        if self._tracer is None:
            yield None
            return
        from opentelemetry import propagate, trace

        attributes: dict[str, Any] = {
            "messaging.system": self._system,
            "messaging.destination.name": self._queue,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
        }
        contexts = [
            propagate.extract({name: value for name, value in each.attributes.items() if isinstance(value, str)})
            for each in messages
        ]
        parent, links = None, []
        if len(messages) == 1:
            parent = contexts[0]
            attributes["messaging.message.id"] = messages[0].id
            attributes["veilmq.receive_count"] = messages[0].receive_count
        else:
            attributes["messaging.batch.message_count"] = len(messages)
            found = [trace.get_current_span(context).get_span_context() for context in contexts]
            links = [trace.Link(context) for context in found if context.is_valid]
        with self._tracer.start_as_current_span(
            f"process {self._queue}", context=parent, kind=trace.SpanKind.CONSUMER, attributes=attributes, links=links
        ) as span:
            yield span

    def tell(self, span: "Span | None", results: Sequence[Result]) -> None:
        """What became of the messages."""
        if span is None:
            return
        from opentelemetry import trace

        failed = [result for result in results if result.verdict in _FAILED]
        if failed:
            span.set_status(trace.Status(trace.StatusCode.ERROR, failed[0].error))
            span.set_attribute("error.type", failed[0].error.partition(":")[0])
        span.set_attribute("veilmq.outcome", ",".join(sorted({str(result.verdict) for result in results})))
