"""What a worker counts, and its tracing spans.

Strategy: every worker has `Counts`: one lock and plain numbers. A `Meter`, if given, gets the same events, one call
each; its errors are logged and stop nothing. The Prometheus meter needs prometheus-client. The user creates it, so that
several workers can share it.

Spans: one CONSUMER span for each call of the handler (see `veilmq.client.tracing`). W3C trace context in the message's
attributes becomes a link, and of a single message its parent. The span is current while the handler runs in a thread
or coroutine.
"""

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from veilmq.client.messages import Received
from veilmq.client.shared.lifetimes import InOneProcess, in_one_process
from veilmq.client.shared.outages import Kinds
from veilmq.client.tracing import COUNT, ID, Tracing
from veilmq.client.worker.job.results import Result, Verdict
from veilmq.model.errors import CapabilityMissing

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from prometheus_client import CollectorRegistry

SECONDS: Final = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1_800.0, 7_200.0)
"""Upper bounds of the processing time buckets."""

log = logging.getLogger("veilmq.worker")


class Meter(Protocol):
    """Receives the worker's events. Any thread; must not block."""

    def ended(self, queue: str, outcome: str, seconds: float) -> None:
        """A message is finished. outcome: one of Counts' names. seconds: its handler's time, 0 if it had none."""

    def failed(self, queue: str, call: str, error: str) -> None:
        """A call to the queue failed. call: `receive`, `delete`, `release` ...; error: the exception's class,
        or a ServiceError's code (a worker reports at most 50 different ones)."""

    def in_hand(self, queue: str, messages: int) -> None:
        """How many messages are received and not finished in the calling worker; 0 when its run has ended."""


@runtime_checkable
class Summing(Protocol):
    """An optional method of a meter, called instead of `in_hand`, so that several workers on one queue add up."""

    def in_hand_changed(self, queue: str, messages: int) -> None:
        """By how many the messages in hand have changed; negative: fewer."""


class Counts:
    """Messages and failed calls since the worker was made.

    Outcomes: `done` (deleted), `repeated` (done before, deleted), `failed`, `retry`, `busy` (another delivery is being
    worked), `stopped`, `dead_lettered`, `lost` (the lease was lost, or a delete came too late: document 003's sign of a
    timeout that is too short), `unsettled` (the queue could not be reached: the message comes back when its lease
    ends), `expired` (its time was over before it could start).
    """

    def __init__(self, queue: str, meter: Meter | None) -> None:
        self._queue = queue
        self._meter = meter
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._kinds = Kinds()
        self._received = 0
        hearing: object = meter
        self._summing = hearing if isinstance(hearing, Summing) else None
        self._reporting = threading.Lock()
        self._in_hand = 0
        self._over = False

    def __repr__(self) -> str:
        return f"Counts(received={self.received}, outcomes={self.outcomes}, failures={self.failures})"

    @property
    def received(self) -> int:
        """Messages received."""
        return self._received

    @property
    def outcomes(self) -> dict[str, int]:
        """Messages by outcome."""
        with self._lock:
            return dict(self._outcomes)

    @property
    def failures(self) -> dict[str, int]:
        """Failed calls to the queue, by call."""
        with self._lock:
            return dict(self._failed)

    def came(self, messages: int) -> None:
        """This many messages were received."""
        with self._lock:
            self._received += messages

    def ended(self, outcome: str, seconds: float = 0.0) -> None:
        """A message is finished."""
        with self._lock:
            self._outcomes[outcome] += 1
        if self._meter is not None:
            self._report(self._meter.ended, outcome, seconds)

    def failed(self, call: str, error: BaseException) -> None:
        """A call to the queue failed."""
        with self._lock:
            self._failed[call] += 1
        if self._meter is not None:
            self._report(self._meter.failed, call, self._kinds.of(error))

    def in_hand(self, count: Callable[[], int]) -> None:
        """Report the messages in hand. Counted and reported in one step, so that the last report is the newest."""
        if self._meter is not None:
            with self._reporting:
                self._report_in_hand(self._meter, 0 if self._over else count())

    def over(self) -> None:
        """The run has ended: report nothing in hand, even if a handler that cannot be stopped still runs."""
        self._over = True
        self.in_hand(lambda: 0)

    def _report_in_hand(self, meter: Meter, messages: int) -> None:
        before, self._in_hand = self._in_hand, messages
        if self._summing is None:
            self._report(meter.in_hand, messages)
        else:
            self._report(self._summing.in_hand_changed, messages - before)

    def _report(self, hear: Callable[..., None], *values: Any) -> None:
        try:
            in_one_process(hear, self._queue, *values)
        except BaseException:
            log.exception("queue %s: the meter failed", self._queue)


class PrometheusMeter:
    """A `Meter` in prometheus-client's registry; None: its default one. Create one and give it to all workers.

    Raises CapabilityMissing if prometheus-client is not installed.
    """

    def __init__(self, registry: "CollectorRegistry | None" = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError as error:
            raise CapabilityMissing(capability="metrics (pip install 'veilmq[telemetry]')") from error
        given: Any = {"registry": registry or REGISTRY}
        self._messages = Counter(
            "veilmq_worker_messages", "Messages that are through, by outcome.", ["queue", "outcome"], **given
        )
        self._seconds = Histogram(
            "veilmq_worker_processing_seconds", "Time in the handler.", ["queue"], buckets=SECONDS, **given
        )
        self._failures = Counter(
            "veilmq_worker_failed_calls", "Failed calls to the queue.", ["queue", "call", "error"], **given
        )
        self._in_hand = Gauge("veilmq_worker_in_hand", "Messages received and not through.", ["queue"], **given)

    def ended(self, queue: str, outcome: str, seconds: float) -> None:
        self._messages.labels(queue, outcome).inc()
        if seconds > 0:
            self._seconds.labels(queue).observe(seconds)

    def failed(self, queue: str, call: str, error: str) -> None:
        self._failures.labels(queue, call, error).inc()

    def in_hand(self, queue: str, messages: int) -> None:
        """See `Meter`. For the only worker on a queue."""
        self._in_hand.labels(queue).set(messages)

    def in_hand_changed(self, queue: str, messages: int) -> None:
        self._in_hand.labels(queue).inc(messages)


_FAILED: Final = (Verdict.FAILED, Verdict.REJECTED)


class Spans:
    """Makes the spans of one worker. tracer: an OpenTelemetry tracer, True for the global one, None for no spans.

    Raises CapabilityMissing if opentelemetry-api is not installed.
    """

    def __init__(self, queue: str, protocol: str, tracer: "Tracer | bool | None") -> None:
        self._tracing = Tracing(queue, protocol, tracer) if tracer else None

    @contextlib.contextmanager
    def around(self, messages: Sequence[Received]) -> Iterator["Span | None"]:
        """The span around the handler's call."""
        tracing = self._tracing
        if tracing is None:
            yield None
            return
        more: dict[str, Any] = {COUNT: len(messages)}
        if is_single := len(messages) == 1:
            more = {ID: messages[0].id, "veilmq.receive_count": messages[0].receive_count}
        with InOneProcess(os.getpid()):
            contexts = tracing.contexts(messages)
            kind, parent = tracing.trace.SpanKind.CONSUMER, contexts[0] if is_single else None
            span = tracing.begin("process", kind, more, parent=parent, links=tracing.links(contexts))
            with tracing.trace.use_span(span, end_on_exit=True):
                yield span

    def record(self, span: "Span | None", results: Sequence[Result]) -> None:
        """Record the messages' results in the span."""
        if span is None or self._tracing is None:
            return
        failed = [result for result in results if result.verdict in _FAILED]
        if failed:
            self._tracing.failed(span, failed[0].error_type or str(failed[0].verdict), failed[0].error)
        span.set_attribute("veilmq.outcome", ",".join(sorted({str(result.verdict) for result in results})))
