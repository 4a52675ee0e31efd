"""Generated histories with known laws, to check the pipeline's estimates.

Strategy: a workload is a queue and a message type with a law of processing times, a leasing policy and a crash rate.
Attempts are drawn in rounds, all messages of a workload at once; each becomes the events that a server would have
written, in the columns of /api/v1/events. Everything depends only on the seed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from veilmq.pipeline.events import ARROW_SCHEMA
from veilmq.pipeline.events.export import export
from veilmq.pipeline.events.reading import Bounds, same_history

START: Final = 1_767_225_600_000_000
"""2026-01-01, in microseconds."""
_SECOND: Final = 1_000_000
_FOREVER: Final = 1e12
_CLIENT, _SERVER = 0, 1
_KINDS: Final = (
    "queue_created",
    "sent",
    "received",
    "extended",
    "released",
    "lease_expired",
    "deleted",
    "delete_refused",
    "extend_refused",
    "dead_lettered",
)
_CODE: Final = {kind: code for code, kind in enumerate(_KINDS)}
_NONE: Final = -1
_STALE, _GONE = 1, 2
_SOURCES: Final = (None, "receive", "extend")


@dataclass(frozen=True)
class Law:
    """Processing times. `draw` takes a generator and, for each attempt, the share of the history that is over."""

    name: str
    draw: Callable[[np.random.Generator, Any], Any]
    survival: Callable[[Any], Any]
    """The share of attempts that take longer than that many seconds; for a drifting law, over the whole history."""

    def quantile(self, share: float) -> float:
        """Seconds within which that share of attempts finishes."""
        low, high = 1e-3, 1e7
        for _ in range(100):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if float(self.survival(middle)) > 1 - share else (low, middle)
        return high


def lognormal(median: float, sigma: float) -> Law:
    """Seconds; sigma of the logarithm."""
    from statistics import NormalDist

    cumulative = np.vectorize(NormalDist().cdf, otypes=[float])
    return Law(
        f"lognormal, median {median:g} s, sigma {sigma:g}",
        lambda random, done: random.lognormal(np.log(median), sigma, len(done)),
        lambda t: 1 - cumulative((np.log(t) - np.log(median)) / sigma),
    )


def bimodal(short: float, long: float, share_long: float, sigma: float = 0.15) -> Law:
    """Two narrow lognormals."""
    first, second = lognormal(short, sigma), lognormal(long, sigma)

    def draw(random: np.random.Generator, done: Any) -> Any:
        return np.where(random.random(len(done)) < share_long, second.draw(random, done), first.draw(random, done))

    return Law(
        f"bimodal, {short:g} and {long:g} s",
        draw,
        lambda t: (1 - share_long) * first.survival(t) + share_long * second.survival(t),
    )


def pareto(shortest: float, shape: float) -> Law:
    """A heavy tail."""
    return Law(
        f"Pareto, from {shortest:g} s, shape {shape:g}",
        lambda random, done: shortest * (1 + random.pareto(shape, len(done))),
        lambda t: np.minimum(1.0, (np.maximum(t, shortest) / shortest) ** -shape),
    )


def drifting(first: float, last: float, sigma: float) -> Law:
    """A lognormal whose median moves from `first` to `last` seconds, evenly in its logarithm."""
    at = (np.arange(200) + 0.5) / 200
    parts = [lognormal(first * (last / first) ** each, sigma) for each in at]
    return Law(
        f"drifting, {first:g} to {last:g} s",
        lambda random, done: first * (last / first) ** done * random.lognormal(0, sigma, len(done)),
        lambda t: sum(part.survival(t) for part in parts) / len(parts),
    )


@dataclass(frozen=True)
class Workload:
    """Messages of one type in one queue, and how their workers behave. Seconds."""

    queue: str
    law: Law
    type: str | None = None
    messages: int = 1_000
    lease: float = 30.0
    extend: float | None = None
    """At this interval the lease is set to `lease` again; None: never."""
    crashes_per_second: float = 0.0
    gives_up: float | None = None
    """Workers release what is not done after this time."""
    deletes_late: bool = True
    """Workers also delete what they finish after their lease."""
    receives_max: int = 50
    """After this many the message goes to the queue's dead-letter queue."""
    wait: float = 0.5
    """Average time until a visible message is received."""
    keeps: bool = False
    """A message takes equally long each time."""


class _Events:
    """Columns of events as they are drawn; strings are numbers yet."""

    FIELDS: Final = (
        "kind", "at", "workload", "message", "attempt", "lease_us", "source", "visible_since", "held_us", "reason",
    )  # fmt: skip

    def __init__(self, workload: int) -> None:
        self.workload = workload
        self.parts: list[dict[str, Any]] = []

    def add(self, kind: str, at: Any, message: Any, attempt: Any, **more: Any) -> None:
        if len(at):
            own = {"kind": _CODE[kind], "workload": self.workload, "message": message, "attempt": attempt, **more}
            part = {field: np.full(len(at), _NONE, np.int64) for field in self.FIELDS} | {"at": at}
            for field, value in own.items():
                part[field] = np.broadcast_to(np.asarray(value, np.int64), len(at))
            self.parts.append(part)


def history(
    workloads: Sequence[Workload], *, seed: int, span: float = 86_400.0, until: float | None = None, start: int = START
) -> Any:
    """A pyarrow Table of events in the order of their offsets, with exactly our columns.

    Messages are sent evenly over `span` seconds; nothing after `until` seconds is told (None: the history ends when
    all is done).
    """
    random = np.random.default_rng(seed)
    drawn = [_draw(number, workload, random, span, start) for number, workload in enumerate(workloads)]
    sent = np.concatenate([each[1] for each in drawn])
    first = np.cumsum([0] + [len(each[1]) for each in drawn])
    parts = [part for each in drawn for part in each[0].parts]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in _Events.FIELDS}
    columns["message"] = columns["message"] + first[columns["workload"]]
    if until is not None:
        kept = columns["at"] <= start + round(until * _SECOND)
        columns = {name: column[kept] for name, column in columns.items()}
    order = np.argsort(columns["at"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    sequence = np.empty(len(sent), np.int64)
    sequence[np.argsort(sent, kind="stable")] = np.arange(1, len(sent) + 1)
    created = _created(workloads, start)
    rows = 250_000
    tables = [
        _table(workloads, {k: v[at : at + rows] for k, v in columns.items()}, sent, sequence, at + created.num_rows)
        for at in range(0, len(columns["at"]), rows)
    ]
    return pa.concat_tables([created, *tables])


def _draw(number: int, workload: Workload, random: np.random.Generator, span: float, start: int) -> tuple[_Events, Any]:
    """The events of one workload, in any order, and the instants of its sends."""
    events = _Events(number)
    count = workload.messages
    sent = start + np.sort(random.integers(1, round(span * _SECOND), count))
    ended = np.full(count, 2**62)
    refused: list[tuple[Any, Any, int]] = []
    events.add("sent", sent, np.arange(count), 0, visible_since=sent)

    def wait(number: int) -> Any:
        return np.maximum(1, random.exponential(workload.wait * _SECOND, number)).astype(np.int64)

    message, visible, granted, attempt = np.arange(count), sent, sent + wait(count), 0
    own = workload.law.draw(random, np.clip((granted - start) / (span * _SECOND), 0, 1)) if workload.keeps else None
    lease = round(workload.lease * _SECOND)
    step = round((workload.extend or _FOREVER) * _SECOND)
    stop = round((workload.gives_up or _FOREVER) * _SECOND)
    while len(message):
        attempt += 1
        if attempt > workload.receives_max:
            events.add("dead_lettered", granted, message, attempt - 1)
            ended[message] = granted
            break
        share = np.clip((granted - start) / (span * _SECOND), 0, 1)
        drawn = workload.law.draw(random, share) if own is None else own[message]
        takes = (np.minimum(drawn, _FOREVER) * _SECOND).astype(np.int64) + 1
        crash: Any = random.exponential(1, len(message)) / max(workload.crashes_per_second, 1e-12)
        crash = (np.minimum(crash, _FOREVER) * _SECOND).astype(np.int64) + 1
        extensions = (np.minimum(np.minimum(takes, crash), stop) - 1) // step
        due = extensions * step + lease
        events.add("received", granted, message, attempt, lease_us=lease, source=1, visible_since=visible)
        _extend(events, granted, message, attempt, extensions, step, lease)
        lives = crash > np.minimum(takes, stop)
        done = lives & (takes <= stop) & (takes <= due)
        events.add("deleted", (granted + takes)[done], message[done], attempt, held_us=takes[done])
        ended[message[done]] = (granted + takes)[done]
        gave = lives & (stop < takes) & (stop <= due)
        events.add("released", (granted + stop)[gave], message[gave], attempt, held_us=stop, lease_us=0, source=2)
        expired = ~done & ~gave
        over = (granted + due)[expired]
        events.add("lease_expired", over, message[expired], attempt, held_us=due[expired], visible_since=over)
        next_visible = np.where(gave, granted + stop, granted + due)
        next_granted = next_visible + wait(len(message))
        late = expired & lives & (takes <= stop) & workload.deletes_late
        accepted = late & (granted + takes < next_granted)
        events.add("deleted", (granted + takes)[accepted], message[accepted], attempt)
        ended[message[accepted]] = (granted + takes)[accepted]
        refused.append((message[late & ~accepted], (granted + takes)[late & ~accepted], attempt))
        more = ~done & ~accepted
        message, visible, granted = message[more], next_visible[more], next_granted[more]
    for messages, at, which in refused:
        gone = at >= ended[messages]
        events.add("delete_refused", at, messages, which, reason=np.where(gone, _GONE, _STALE))
    return events, sent


def _extend(events: _Events, granted: Any, message: Any, attempt: int, extensions: Any, step: int, lease: int) -> None:
    total = int(extensions.sum())
    if not total:
        return
    lease_of = np.repeat(np.arange(len(message)), extensions)
    place = np.arange(total) - np.repeat(np.cumsum(extensions) - extensions, extensions) + 1
    held = place * step
    events.add("extended", granted[lease_of] + held, message[lease_of], attempt, held_us=held, lease_us=lease, source=2)


def _created(workloads: Sequence[Workload], start: int) -> Any:
    queues = list(dict.fromkeys(each.queue for each in workloads))
    names = [name for queue in queues for name in (queue, f"{queue}-dead")]
    columns = {field.name: pa.nulls(len(names), field.type) for field in ARROW_SCHEMA} | {
        "offset": pa.array(range(len(names)), pa.int64()),
        "kind": pa.array(["queue_created"] * len(names)),
        "at": pa.array([start] * len(names), pa.int64()),
        "account": pa.array(["000000000000"] * len(names)),
        "region": pa.array(["us-east-1"] * len(names)),
        "queue": pa.array(names),
        "incarnation": pa.array(range(1, len(names) + 1), pa.int64()),
        "protocol": pa.array(["admin"] * len(names)),
        "principal": pa.array(["admin"] * len(names)),
        "client": pa.array([""] * len(names)),
    }
    return pa.table(columns, ARROW_SCHEMA)


def _table(workloads: Sequence[Workload], drawn: dict[str, Any], sent: Any, sequence: Any, offset: int) -> Any:
    """Columns as they are printed."""
    queues = list(dict.fromkeys(each.queue for each in workloads))
    incarnations = np.array([1 + 2 * queues.index(each.queue) for each in workloads])
    kind, message = drawn["kind"], drawn["message"]
    rows = len(kind)
    gone = drawn["reason"] == _GONE
    leases = (kind == _CODE["received"]) | (kind == _CODE["extended"]) | (kind == _CODE["released"])
    served = (kind == _CODE["dead_lettered"]) | (kind == _CODE["queue_created"])
    incarnation = incarnations[drawn["workload"]]
    detail: Any = np.full(rows, None, object)
    detail[drawn["reason"] == _STALE] = '{"reason":"stale"}'
    detail[gone] = '{"reason":"gone"}'
    for place in np.flatnonzero(kind == _CODE["dead_lettered"]):
        # Dead letters' sequences follow those of all sends.
        target = int(len(sent) + sequence[message[place]])
        detail[place] = f'{{"target":{incarnation[place] + 1},"target_sequence":{target}}}'
    refused = drawn["reason"] != _NONE

    def number(values: Any, missing: Any = None) -> Any:
        return pa.array(values, pa.int64(), mask=values == _NONE if missing is None else missing)

    def text(values: Sequence[str | None], places: Any, missing: Any = None) -> Any:
        indices = pa.array(places, pa.int32(), mask=missing)
        return pa.DictionaryArray.from_arrays(indices, pa.array(values, pa.string())).cast(pa.string())

    columns = {
        "offset": pa.array(np.arange(offset, offset + rows)),
        "kind": text(_KINDS, kind),
        "at": pa.array(drawn["at"]),
        "account": text(["000000000000"], np.zeros(rows)),
        "region": text(["us-east-1"], np.zeros(rows)),
        "queue": text([each.queue for each in workloads], drawn["workload"]),
        "incarnation": pa.array(incarnation),
        "protocol": text(["sqs", "server"], served),
        "principal": text(["000000000000", "server"], served),
        "client": text(["made-up", ""], served),
        "message": _ids(sequence[message], gone),
        "sequence": pa.array(sequence[message]),
        "attempt": number(drawn["attempt"]),
        "rotation": pa.array(np.zeros(rows, np.int64)),
        "lease_us": number(drawn["lease_us"], ~leases),
        "source": text(_SOURCES, np.maximum(drawn["source"], 0), ~leases),
        "sent": number(sent[message], gone),
        "visible_since": number(drawn["visible_since"]),
        "held_us": number(drawn["held_us"]),
        "body_bytes": number(np.full(rows, 200), refused),
        "group": pa.nulls(rows, pa.string()),
        "type": text([each.type for each in workloads], drawn["workload"], gone),
        "detail": pa.array(detail, pa.string()),
    }
    return pa.table(columns, ARROW_SCHEMA)


def _ids(sequence: Any, missing: Any) -> Any:
    """32 hexadecimal digits from each number, distinct."""
    digits = np.array([b"%02x" % byte for byte in range(256)])
    halves: Any = np.stack([sequence * 2_654_435_761 % 2**48, sequence], axis=1).astype(">u8")
    text = digits[halves.view(np.uint8).reshape(len(sequence), 16)].view("S32").reshape(-1)
    return pa.array(text.astype("U32"), pa.string(), mask=missing)


class MadeUp:
    """A table of events as a `veilmq.pipeline.events.reading.History`."""

    def __init__(self, table: Any, epoch: str = "") -> None:
        self.epoch = ""
        self._own = epoch
        self._table = table
        self._first = table.column("offset")[0].as_py() if table.num_rows else 0

    def bounds(self) -> Bounds:
        """See `History.bounds`."""
        self.epoch = same_history(self.epoch, self._own, "the table")
        return Bounds(self._first, self._first + self._table.num_rows)

    def hold(self, start: int | None) -> int:
        """See `History.hold`."""
        return self._first if start is None else start

    def splits(self, start: int, stop: int, rows: int) -> list[tuple[int, int]]:
        """See `History.splits`."""
        return [(at, min(at + rows, stop)) for at in range(start, stop, rows)]

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """See `History.read`."""
        yield from self._table.slice(start - self._first, stop - start).to_batches()


def write(table: Any, directory: Path, file_rows: int = 1_000_000) -> Path:
    """The events as `veilmq events export` writes them; what is there already stays. Returns the directory."""
    export(MadeUp(table), directory, file_rows=file_rows)
    return directory
