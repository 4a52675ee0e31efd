"""The metrics of a server at /metrics: queues and their events, the shell, the store, the data ports, the cluster.

Strategy: a scrape reads counters that the rest of the server keeps. Only the events of queues (rates, and how leases
end) are counted here, from the history. A queue gets a place at its first event, up to a bound; a deleted queue frees
its place. Events of queues without a place are counted in one sum, so that no counter decreases and no sum loses an
event.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest
from typing import Final, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from veilmq.admin.answers import caller_of
from veilmq.admin.history import oldest_ages_us
from veilmq.model.errors import DiskLow, StoreFailed
from veilmq.model.events import Kind
from veilmq.model.instant import SECOND_US
from veilmq.model.moves import MoveStatus
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import SETTINGS_QUEUES, PushResult, is_hidden
from veilmq.server.cluster import ClusterReport
from veilmq.server.service import Service
from veilmq.server.shell import LATENCY_BUCKETS_US, Latencies
from veilmq.store import Reader
from veilmq.store.reader import QueueState

QUEUES_MAX: Final = 200
LABELLED_QUEUES_MAX: Final = 200
EVENTS_A_SCRAPE_MAX: Final = 1_000_000
_LEASE_KINDS: Final = {
    int(kind): kind.name.lower()
    for kind in (
        Kind.RECEIVED,
        Kind.EXTENDED,
        Kind.LEASE_RESUMED,
        Kind.RELEASED,
        Kind.RELEASED_FOR_RETRY,
        Kind.RETRY_DUE,
        Kind.LEASE_EXPIRED,
        Kind.EXPIRED_AFTER_CHANGE,
        Kind.UNDELIVERED,
        Kind.DELETED,
        Kind.DELETE_REFUSED,
        Kind.EXTEND_REFUSED,
        Kind.DEAD_LETTERED,
    )
}
_MOVED: Final = "moved"
_QUARANTINE: Final = {int(kind): kind.name.lower() for kind in (Kind.QUARANTINED, Kind.QUARANTINE_DROPPED)}
_OF_QUEUE: Final = _LEASE_KINDS | {
    int(kind): kind.name.lower() for kind in (Kind.SENT, Kind.EXPIRED, Kind.MOVED, Kind.QUARANTINED)
}
_COUNTED: Final = _LEASE_KINDS | _QUARANTINE | {int(Kind.MOVED): _MOVED}
_TASKS_MAX: Final = 10_000
_QUEUE_LABELS: Final = ("account", "region", "queue")
_LISTENER_COUNTERS: Final = {
    "requests": "Complete requests.",
    "refusals": "Requests refused by HTTP's rules or by a limit.",
    "failures": "Requests that failed with an error in the server.",
    "bytes_received": "Bytes from clients.",
    "bytes_sent": "Bytes to clients.",
}


class QueueEvents:
    """Counts by queue and name of the event. One thread at a time."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._counts: dict[int, Counter[str]] = {}
        self._rest: Counter[str] = Counter()

    def count(self, incarnation: int, name: str) -> None:
        """One event of a queue."""
        found = self._counts.get(incarnation)
        if found is None:
            found = self._place(incarnation)
        found[name] += 1

    def _place(self, incarnation: int) -> Counter[str]:
        if len(self._counts) >= QUEUES_MAX:
            return self._rest
        return self._counts.setdefault(incarnation, Counter())

    def keep(self, alive: Mapping[int, QueueKey]) -> None:
        """Forget deleted queues; if there is a place for all existing queues, each gets its own from now on."""
        for incarnation in self._counts.keys() - alive.keys():
            del self._counts[incarnation]
        if len(alive) <= QUEUES_MAX:
            for incarnation in alive:
                self._place(incarnation)

    def shown(self, alive: Mapping[int, QueueKey]) -> Iterator[tuple[tuple[str, str, str, str], int]]:
        """((account, region, queue, event), count), zeros too; empty names: all other queues."""
        for incarnation, counts in self._counts.items():
            key = alive.get(incarnation)
            if key is not None:
                for name in self._names:
                    yield (key.account, key.region, key.name, name), counts[name]
        if self._rest or len(alive) > len(self._counts):
            for name in self._names:
                yield ("", "", "", name), self._rest[name]


class Rest(NamedTuple):
    """The queues without their own labels: their number, and their messages by state."""

    queues: int
    visible: int
    in_flight: int
    delayed: int


class Gathered(NamedTuple):
    """The data of one scrape."""

    labelled: list[QueueState]
    rest: Rest
    oldest_us: dict[int, int]
    """Age of the oldest message, by incarnation."""
    tasks: Counter[MoveStatus]
    """Move tasks that the store remembers, by status."""
    queues: int
    """Number of queues, without the hidden queues of pushes."""
    events: list[tuple[tuple[str, str, str, str], int]]
    """Counts by account, region, queue and event."""
    quarantined: int
    """Messages in quarantine."""
    cluster: ClusterReport | None
    """None: the server is alone."""


class _Kind(msgspec.Struct, array_like=True, gc=False):
    """The first fields of a packed event."""

    kind: int
    at: int
    queue: int | None


_KINDS: Final = msgspec.msgpack.Decoder(list[_Kind])


class Outcomes:
    """Counts events of leases and moves by kind, from the history since the store was opened.

    It reads on threads, `EVENTS_A_SCRAPE_MAX` events at a time; the next scrape reads the rest.
    """

    def __init__(self, reader: Reader) -> None:
        self.counts: dict[str, int] = dict.fromkeys(_COUNTED.values(), 0)
        self._by_queue = QueueEvents(tuple(_OF_QUEUE.values()))
        self._reader = reader
        self._lock = threading.Lock()
        self._at = reader.first_event

    def catch_up(self) -> None:
        """Count what is new. Blocks."""
        with self._lock, self._reader.look() as view:
            stop = min(view.bounds()[1], self._at + EVENTS_A_SCRAPE_MAX)
            for first, packed in view.oldest_first(self._at, stop):
                events = _KINDS.decode(packed)
                for event in events[max(0, self._at - first) :]:
                    name = _COUNTED.get(event.kind)
                    if name is not None:
                        self.counts[name] += 1
                    name = _OF_QUEUE.get(event.kind)
                    if name is not None and event.queue is not None:
                        self._by_queue.count(event.queue, name)
                self._at = max(self._at, first + len(events))

    def of_queues(self, alive: dict[int, QueueKey]) -> list[tuple[tuple[str, str, str, str], int]]:
        """Counts by queue and event, of existing queues. Blocks."""
        with self._lock:
            self._by_queue.keep(alive)
            return list(self._by_queue.shown(alive))


class _Families:
    """A registry's collector of one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Metrics:
    """Route /metrics. `admin_commands` are those that came through /api/v1, by type.

    admin_failures: requests to the admin port that failed with a bug, like a listener's `failures`.
    """

    def __init__(self, service: Service, admin_commands: Counter[type]) -> None:
        self._service = service
        self._admin_commands = admin_commands
        self._outcomes = Outcomes(service.reader)
        self.admin_failures = 0

    async def endpoint(self, request: Request) -> Response:
        """All metrics in Prometheus' text format. They name the queues of every account."""
        caller_of(request).check(Action.SETTINGS)
        every = self._service.reader.queues.values()
        queues = [queue for queue in every if queue.key.name not in SETTINGS_QUEUES]
        labelled, rest = await run_in_threadpool(_sorted_out, queues)
        lines = [(queue, list(queue.ready)) for queue in labelled]
        oldest_us = await run_in_threadpool(oldest_ages_us, self._service.reader, lines, self._service.shell.now())
        await run_in_threadpool(self._outcomes.catch_up)
        registry = CollectorRegistry(auto_describe=False)
        count = sum(not is_hidden(queue.key.name) for queue in queues)
        alive = {queue.incarnation: queue.key for queue in queues}
        events = await run_in_threadpool(self._outcomes.of_queues, alive)
        tasks, quarantined = await run_in_threadpool(self._tasks), await run_in_threadpool(self._quarantined)
        cluster = self._service.cluster
        report = None if cluster is None else await cluster.report()
        gathered = Gathered(labelled, rest, oldest_us, tasks, count, events, quarantined, report)
        registry.register(_Families(list(self._families(gathered))))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def _tasks(self) -> Counter[MoveStatus]:
        with self._service.reader.look() as view:
            return Counter(task.status for task in view.moves(_TASKS_MAX))

    def _quarantined(self) -> int:
        with self._service.reader.look() as view:
            return view.quarantined_count()

    def _families(self, gathered: Gathered) -> Iterator[Metric]:
        yield from _queue_families(gathered)
        text = "What happened to the messages of a queue; empty labels: all further queues."
        yield _counters("veilmq_queue_events", text, (*_QUEUE_LABELS, "event"), gathered.events)
        tasks = GaugeMetricFamily("veilmq_move_tasks", "Message move tasks remembered.", labels=("status",))
        for status in MoveStatus:
            tasks.add_metric((status.value,), gathered.tasks[status])
        yield tasks
        text = "Damaged messages that nobody receives, until they are dropped."
        yield GaugeMetricFamily("veilmq_quarantined_messages", text, gathered.quarantined)
        yield from self._shell_families()
        yield from self._store_families()
        yield from _port_families(self._service, self._admin_commands, self.admin_failures)
        if gathered.cluster is not None:
            yield from _cluster_families(gathered.cluster)
        # Present from the start: else the first exhausted push would not be an increase and would raise no alarm.
        pushes = dict.fromkeys((each.value for each in PushResult), 0) | dict(self._service.pushes)
        yield _counters("veilmq_pushes", "Attempts to push, by result.", ("result",), pushes.items())
        room = self._service.push_room
        slowed = 0 if room is None else len(room.unavailable())
        yield GaugeMetricFamily("veilmq_push_endpoints_slowed", "Endpoints called seldom, because they fail.", slowed)
        put_off = 0 if room is None else room.calls_put_off
        yield CounterMetricFamily("veilmq_push_calls_put_off", "Pushes put off: this server cannot call.", put_off)

    def _shell_families(self) -> Iterator[Metric]:
        shell = self._service.shell
        stats = shell.stats
        yield CounterMetricFamily("veilmq_batches", "Batches applied.", stats.batches)
        yield _rolled_back(stats.rolled_back)
        yield CounterMetricFamily("veilmq_batched_commands", "Commands applied, also the server's own.", stats.commands)
        yield _histogram("veilmq_commit_seconds", "Commit with its fsync.", stats.commit_latencies)
        yield GaugeMetricFamily("veilmq_waiters", "Receives of clients that are parked.", shell.engine.waiting.clients)
        refused = self._service.refused_waits.refused.items()
        yield _counters("veilmq_refused_waits", "Receives answered empty because too many wait.", ("limit",), refused)
        unread = shell.engine.unread
        yield GaugeMetricFamily("veilmq_unread_bytes", "Answers that clients have not read.", unread.bytes)
        yield CounterMetricFamily(
            "veilmq_unread_refusals", "Receives refused while too many answers are unread.", unread.refused
        )
        outcomes = dict(self._outcomes.counts)
        yield CounterMetricFamily("veilmq_moved_messages", "Messages that move tasks moved.", outcomes.pop(_MOVED))
        apart = {name: outcomes.pop(name) for name in _QUARANTINE.values()}
        yield _counters("veilmq_quarantine_events", "Messages set apart and dropped.", ("event",), apart.items())
        yield _counters("veilmq_lease_outcomes", "How leases began, went on and ended.", ("outcome",), outcomes.items())

    def _store_families(self) -> Iterator[Metric]:
        reader = self._service.reader
        yield GaugeMetricFamily("veilmq_wal_bytes", "Size of the write-ahead log.", reader.log_bytes)
        if (archive := self._service.archive) is not None:
            text = "How long the oldest change waits that is not in the archive."
            yield GaugeMetricFamily("veilmq_archive_lag_seconds", text, archive.lag_s)
            yield CounterMetricFamily("veilmq_archive_bytes", "Bytes archived.", archive.uploaded_bytes)
        yield GaugeMetricFamily("veilmq_disk_free_bytes", "Free space for the data.", reader.directory.free_bytes())
        refusal = reader.refusal
        low = float(isinstance(refusal, DiskLow))
        yield GaugeMetricFamily("veilmq_disk_low", "1 while sends and creates are refused for want of space.", low)
        gone = float(isinstance(refusal, StoreFailed))
        yield GaugeMetricFamily("veilmq_database_gone", "1 while a file of the database is not in its place.", gone)
        yield GaugeMetricFamily(
            "veilmq_pages_damaged",
            "1 since a page of the database did not match its checksum.",
            float(reader.pages_damaged),
        )
        yield GaugeMetricFamily(
            "veilmq_clock_ahead_seconds", "Lease clock ahead of wall time.", self._service.clock.ahead_us / SECOND_US
        )
        yield GaugeMetricFamily(
            "veilmq_clock_unaccepted_seconds",
            "Step of wall time by which nothing expires until it is accepted.",
            self._service.clock.unaccepted_us(reader.held_us) / SECOND_US,
        )


def _rolled_back(count: int) -> Metric:
    return CounterMetricFamily("veilmq_rolled_back_batches", "Batches rolled back, because a write failed.", count)


def _port_families(service: Service, admin_commands: Counter[type], admin_failures: int) -> Iterator[Metric]:
    by_kind = {
        (port, kind.__name__): count
        for port, commands in _commands(service, admin_commands).items()
        for kind, count in commands.items()
    }
    yield _counters("veilmq_commands", "Commands that clients asked for.", ("protocol", "command"), by_kind.items())
    listeners = service.listeners
    open_now = GaugeMetricFamily("veilmq_connections", "Open connections.", labels=("listener",))
    held = GaugeMetricFamily("veilmq_held_bytes", "Input of unfinished requests.", labels=("listener",))
    for name, listener in listeners.items():
        open_now.add_metric((name,), len(listener.connections))
        held.add_metric((name,), listener.held_bytes)
    yield open_now
    yield held
    for attribute, text in _LISTENER_COUNTERS.items():
        counts = {name: getattr(listener, attribute) for name, listener in listeners.items()}
        if attribute == "failures":
            counts["admin"] = admin_failures
        yield _counters(f"veilmq_{attribute}", text, ("listener",), counts.items())
    ends = service.certificate_ends
    if ends is not None:
        yield GaugeMetricFamily(
            "veilmq_tls_certificate_not_after_timestamp_seconds",
            "Until when the TLS certificate is valid that new connections get, in seconds since 1970.",
            ends / SECOND_US,
        )


def _commands(service: Service, admin_commands: Counter[type]) -> dict[str, Counter[type]]:
    found = {name: port.commands for name, port in service.ports.items()}
    for port in service.ports.values():
        found |= port.others
    return found | {"admin": admin_commands}


def _sorted_out(queues: list[QueueState]) -> tuple[list[QueueState], Rest]:
    """The queues with the most messages, and the sums of all others. Blocks: there may be very many."""
    labelled = nsmallest(LABELLED_QUEUES_MAX, queues, key=_by_depth)
    chosen = {queue.incarnation for queue in labelled}
    rest = [queue for queue in queues if queue.incarnation not in chosen]
    visible = sum(queue.visible for queue in rest)
    in_flight = sum(queue.in_flight for queue in rest)
    delayed = sum(queue.delayed for queue in rest)
    return labelled, Rest(len(rest), visible, in_flight, delayed)


def _by_depth(queue: QueueState) -> tuple[int, QueueKey]:
    return -(queue.visible + queue.delayed + queue.in_flight), queue.key


def _queue_families(gathered: Gathered) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "veilmq_queue_messages",
        "Messages of a queue; empty labels: all further queues.",
        labels=(*_QUEUE_LABELS, "state"),
    )
    for queue in gathered.labelled:
        labels = (queue.key.account, queue.key.region, queue.key.name)
        depth.add_metric((*labels, "visible"), queue.visible)
        depth.add_metric((*labels, "in_flight"), queue.in_flight)
        depth.add_metric((*labels, "delayed"), queue.delayed)
    if gathered.rest.queues:
        for state in ("visible", "in_flight", "delayed"):
            depth.add_metric(("", "", "", state), getattr(gathered.rest, state))
    yield depth
    age = GaugeMetricFamily(
        "veilmq_queue_oldest_age_seconds",
        "Age of the oldest message that is visible or in flight.",
        labels=_QUEUE_LABELS,
    )
    for queue in gathered.labelled:
        oldest_us = gathered.oldest_us.get(queue.incarnation, 0)
        age.add_metric((queue.key.account, queue.key.region, queue.key.name), oldest_us / SECOND_US)
    yield age
    yield GaugeMetricFamily("veilmq_queues", "Queues that exist.", gathered.queues)


def _counters(
    name: str, text: str, labels: tuple[str, ...], counts: Iterable[tuple[str | tuple[str, ...], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts:
        family.add_metric((values,) if isinstance(values, str) else values, count)
    return family


def _histogram(name: str, text: str, latencies: Latencies) -> HistogramMetricFamily:
    """A histogram in seconds."""
    buckets: list[tuple[str, float]] = []
    below = 0
    bounds = [repr(bound / SECOND_US) for bound in LATENCY_BUCKETS_US]
    for bound, count in zip([*bounds, "+Inf"], latencies.counts, strict=True):
        below += count
        buckets.append((bound, below))
    family = HistogramMetricFamily(name, text)
    family.add_metric((), buckets, latencies.total_us / SECOND_US)
    return family


def _cluster_families(report: ClusterReport) -> Iterator[Metric]:
    yield GaugeMetricFamily("veilmq_cluster_owner", "1 at the server that owns the queues.", int(report.leads))
    text = "1 while calls of this server's clients are carried out."
    yield GaugeMetricFamily("veilmq_cluster_ready", text, int(report.ready))
    yield GaugeMetricFamily("veilmq_cluster_held", "Calls that wait for an owner.", report.held)
    yield GaugeMetricFamily("veilmq_cluster_epoch", "Raised with each owner.", report.epoch)
    text = "How long ago this server last had every record of the log."
    yield GaugeMetricFamily("veilmq_cluster_lag_seconds", text, report.lag_s)
    if report.lag_records is not None:
        yield GaugeMetricFamily("veilmq_cluster_lag_records", "Records that it lacks.", report.lag_records)
    yield _histogram("veilmq_cluster_append_seconds", "Appends of this server to the log.", report.appends)
    text = "How often this server became the owner."
    yield CounterMetricFamily("veilmq_cluster_takeovers", text, report.takeovers)
    yield CounterMetricFamily("veilmq_cluster_handovers", "How often it handed over.", report.handovers)
    yield GaugeMetricFamily("veilmq_cluster_peers", "Servers that are connected to this one.", len(report.peers))
    found = report.status
    yield GaugeMetricFamily("veilmq_cluster_log_answers", "1 while PostgreSQL answers.", int(found is not None))
    if found is None:
        return
    yield GaugeMetricFamily("veilmq_cluster_owned", "1 while the lease of an owner runs.", int(found.owned))
    yield GaugeMetricFamily("veilmq_cluster_records", "Number of the log's last record.", found.records)
    yield GaugeMetricFamily("veilmq_cluster_log_bytes", "Size of the log in PostgreSQL.", found.log_bytes)
    yield GaugeMetricFamily("veilmq_cluster_standbys", "Standbys that confirm commits.", found.confirming)
    text = "1 while commits wait for a standby that is not connected."
    yield GaugeMetricFamily("veilmq_cluster_standby_missing", text, int(bool(found.missing)))
    text = "1 while what is acknowledged is on one machine alone."
    yield GaugeMetricFamily("veilmq_cluster_single_copy", text, int(found.single_copy))
    text = "Last record that is in the newest snapshot; 0: there is none."
    yield GaugeMetricFamily("veilmq_cluster_snapshot_lsn", text, found.snapshot)
    if found.snapshot_age_s is not None:
        text = "How long ago the newest snapshot was written."
        yield GaugeMetricFamily("veilmq_cluster_snapshot_age_seconds", text, found.snapshot_age_s)


async def of_a_follower(request: Request, service: Service) -> Response:
    """The metrics of a server that does not own the queues: of its ports, and of its part in the cluster. Its shell may
    still try to write: what PostgreSQL refuses may be the renewal of its lease, too."""
    caller_of(request).check(Action.SETTINGS)
    assert service.cluster is not None
    registry = CollectorRegistry(auto_describe=False)
    rolled_back = _rolled_back(service.shell.stats.rolled_back if service.leads else 0)
    of_cluster = _cluster_families(await service.cluster.report())
    families = [rolled_back, *_port_families(service, Counter(), 0), *of_cluster]
    registry.register(_Families(families))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
