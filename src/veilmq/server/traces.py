"""OpenTelemetry spans of what clients ask of queues: sends, receives that bring messages, deletes, extensions.

Strategy: a data port makes its conversations by `Traces.conversation` instead of the plain class, so a server without
traces neither loads this module nor asks anything for each request. A span is made when its request is answered, with
the time at which it came: a long poll that stays empty, or whose client hangs up, makes none.

Its parent is the `traceparent` header of the request, and each message is a link to the context in which it was made:
the attribute `traceparent`, or else SQS's AWSTraceHeader. Nothing of a body, a receipt handle or a key is in a span.

Source: OpenTelemetry semantic conventions, "Messaging spans"; W3C, "Trace Context"; AWS X-Ray, "Tracing header".
"""

import logging
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from veilmq.model.commands import AnyCommand, Delete, Extend, Publish, Receive, Send
from veilmq.model.errors import VeilError
from veilmq.model.messages import Extras, id_text
from veilmq.model.outcomes import Outcome, Published, Received, Sent
from veilmq.protocols import Request
from veilmq.server.clock import wall
from veilmq.server.http.exchange import Exchange
from veilmq.server.port import Call, Conversation, Port

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS: Final[dict[type, str]] = {
    Send: "send",
    Publish: "publish",
    Receive: "receive",
    Delete: "delete",
    Extend: "extend",
}
_TYPES: Final = {"send": "send", "publish": "send", "receive": "receive", "delete": "settle", "release": "settle"}
"""The convention's type of an operation; an extension is of none."""
_SYSTEMS: Final = {"sqs": "aws_sqs", "azure": "azure_queue", "mns": "aliyun_mns"}
_XRAY_ROOT: Final = re.compile(r"(?:^|;) *Root=1-([0-9a-f]{8})-([0-9a-f]{24})(?:;|$)")
_XRAY_PARENT: Final = re.compile(r"(?:^|;) *Parent=([0-9a-f]{16})(?:;|$)")
_OTLP: Final = {"http/protobuf": ("otlp_proto_http",), "grpc": ("otlp_proto_grpc",)}
_GROUP: Final = "opentelemetry_traces_exporter"

logger = logging.getLogger("veilmq.traces")


class ExporterMissing(Exception):
    """No installed package has the exporter that was asked for."""


class ExporterBroken(Exception):
    """The package of the exporter is installed and cannot be used."""


def exporters(names: str, protocol: str) -> "list[SpanExporter]":
    """What the variables OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_PROTOCOL ask for; "": OTLP, by whichever is
    installed. Each reads further variables itself. Raises ExporterMissing, ExporterBroken, and ValueError for what one
    refuses."""
    made: list[Any] = []
    for name in (each.strip() for each in (names or "otlp").split(",")):
        if name == "none":
            continue
        wanted = (name,) if name != "otlp" else _OTLP.get(protocol, ("otlp_proto_http", "otlp_proto_grpc"))
        found = [each for one in wanted for each in entry_points(group=_GROUP, name=one)]
        if not found:
            raise ExporterMissing(f"no installed package has the trace exporter {wanted[0]}")
        try:
            exporter = found[0].load()
        except (ImportError, AttributeError, TypeError) as error:  # also of a package that it needs
            raise ExporterBroken(f"the trace exporter {found[0].name} is installed, but it fails: {error}") from error
        made.append(exporter())
    return made


def provider_of(made: "Sequence[SpanExporter]", release: str) -> TracerProvider:
    """A provider that exports in batches. Sampling, and the name of the service if it is not `veilmq`, come from the
    OTEL_* variables; raises ValueError for one that the SDK refuses."""
    ours = Resource({"service.name": "veilmq", "service.version": release})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    for each in made:
        provider.add_span_processor(BatchSpanProcessor(each))
    return provider


class Traces:
    """Makes the spans of a server's data ports."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("veilmq.server")
        self._w3c = TraceContextTextMapPropagator()

    def conversation(
        self, port: Port, exchange: Exchange, call: Call, commands: tuple[AnyCommand, ...]
    ) -> Conversation:
        """A conversation that ends with a span, if the convention knows what it asks for."""
        if type(commands[0]) in _OPERATIONS:
            return TracedConversation(self, port, exchange, call, commands)
        return Conversation(port, exchange, call, commands)

    def close(self) -> None:
        """Export what is left. Blocks as long as the exporters do."""
        self._provider.shutdown()

    def record(
        self, request: Request, commands: Sequence[AnyCommand], outcomes: Sequence[Outcome], began_us: int
    ) -> None:
        """Make the span of a request that was answered."""
        first: Any = commands[0]
        failed = next((each for each in outcomes if isinstance(each, VeilError)), None)
        messages = list(_messages(commands, outcomes))
        if type(first) is Receive and not messages and failed is None:
            return
        operation = "release" if type(first) is Extend and first.lease_us == 0 else _OPERATIONS[type(first)]
        name = (first.topic if type(first) is Publish else first.queue).name
        attributes: dict[str, Any] = {
            "messaging.system": _SYSTEMS.get(first.origin.protocol, "veilmq"),
            "messaging.destination.name": name,
            "messaging.operation.name": operation,
            "client.address": request.peer,
        }
        if operation in _TYPES:
            attributes["messaging.operation.type"] = _TYPES[operation]
        count = len(messages) if type(first) is Receive else len(commands)
        if count > 1:
            attributes["messaging.batch.message_count"] = count
        elif messages and messages[0][1] is not None:
            attributes["messaging.message.id"] = id_text(messages[0][1])
        if failed is not None:
            attributes["error.type"] = type(failed).__name__
        span = self._tracer.start_span(
            f"{operation} {name}",
            context=self._parent(request.headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            links=[link for each in messages if (link := self._link(*each)) is not None],
            start_time=began_us * 1_000,
        )
        if failed is not None:
            span.set_status(StatusCode.ERROR)
        span.end(wall() * 1_000)

    def _parent(self, headers: dict[bytes, bytes]) -> Context:
        fields = {name: headers.get(name.encode(), b"").decode("latin-1") for name in ("traceparent", "tracestate")}
        return self._w3c.extract({name: text for name, text in fields.items() if text}, context=Context())

    def _link(self, extras: Extras, message: bytes | None) -> Link | None:
        """To the context in which the message was made, if it has one."""
        fields = {each.name: each.value for each in extras.attributes if isinstance(each.value, str)}
        context = get_current_span(self._w3c.extract(fields, context=Context())).get_span_context()
        if not context.is_valid and extras.trace is not None:
            context = _xray(extras.trace) or context
        if not context.is_valid:
            return None
        return Link(context, None if message is None else {"messaging.message.id": id_text(message)})


class TracedConversation(Conversation):
    """A conversation that makes a span when it is answered."""

    __slots__ = ("_began_us", "_traces")

    def __init__(
        self, traces: Traces, port: Port, exchange: Exchange, call: Call, commands: tuple[AnyCommand, ...]
    ) -> None:
        super().__init__(port, exchange, call, commands)
        self._traces = traces
        self._began_us = wall()

    def answer(self, outcomes: list[Outcome]) -> None:
        """See `Conversation.answer`."""
        super().answer(outcomes)
        try:
            self._traces.record(self._exchange.request, self.commands, outcomes, self._began_us)
        except Exception:  # the request's edge: a sampler or a processor may raise anything
            logger.exception("no span of a request could be made")


def _messages(commands: Sequence[AnyCommand], outcomes: Sequence[Outcome]) -> "Iterator[tuple[Extras, bytes | None]]":
    """What each message that was sent or received carries, and its id."""
    for command, outcome in zip(commands, outcomes, strict=False):
        if type(command) is Receive and type(outcome) is Received:
            for message in outcome.messages:
                yield message.extras, message.id
        elif type(command) in (Send, Publish):
            sent: Any = command
            yield sent.extras, outcome.id if isinstance(outcome, Sent | Published) else None


def _xray(header: str) -> SpanContext | None:
    """The context that AWSTraceHeader names: `Root=1-5759e988-bd862e3fe1be46a994272793;Parent=53995c3f42cd8ad8`."""
    root, parent = _XRAY_ROOT.search(header), _XRAY_PARENT.search(header)
    if root is None or parent is None:
        return None
    flags = TraceFlags(TraceFlags.SAMPLED if "Sampled=1" in header else TraceFlags.DEFAULT)
    return SpanContext(int(root[1] + root[2], 16), int(parent[1], 16), is_remote=True, trace_flags=flags)
