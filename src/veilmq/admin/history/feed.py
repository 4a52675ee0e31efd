"""The route of the history: events by offset, as lines or as Arrow.

Strategy: offsets order the log, so a response's headers say where it begins and where to continue: it covers `from` up
to `VeilMQ-Next-Offset`, both fixed when the request arrives. `from=next` with `follow` waits for new events. An event
never changes, so a server of a cluster may read it from its copy (`reads_copy`).

Arrow: packed rows become columns without an object per event. A commit's events are unpacked as plain tuples, collected
in batches of some thousand rows and transposed. Numbers of queues and origins become dictionaries in C++, so only their
few distinct values are looked up. The columns have the names and values of the JSON form; `detail` is JSON text.
pyarrow is the optional extra `arrow`.
"""

import asyncio
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import chain
from typing import Any, Final, Protocol

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.answers import JSON_LINES, caller_now, in_thread, members_of, scope_of, stream
from veilmq.admin.api import Refused, inputs
from veilmq.admin.history import (
    Errors,
    Range,
    Scope,
    check_offset,
    event_lines,
    find_start,
    piece_end,
    visible,
)
from veilmq.model.commands import LeaseSource
from veilmq.model.events import Event, HistoryTrimmed, Kind, shown_detail
from veilmq.model.messages import id_text
from veilmq.model.settings.access import Action
from veilmq.server.shell import Shell
from veilmq.store import View
from veilmq.store.log import Follower

PATH: Final = "/api/v1/events"
MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"
_LINES: Final = "application/x-ndjson"
_OFFSET: Final = re.compile(r"[0-9]{1,18}")
_WEIGHT: Final = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")
_TUPLES: Final = msgspec.msgpack.Decoder(list[tuple[Any, ...]])
_FIELDS: Final = len(Event.__struct_fields__)
_PLACE: Final = {name: place for place, name in enumerate(Event.__struct_fields__)}
_KINDS: Final = {int(kind): kind.name.lower() for kind in Kind}
_SOURCES: Final = {int(source): source.name.lower() for source in LeaseSource}
_JSON: Final = msgspec.json.Encoder()

_LookUp = Callable[[int], tuple[Any, ...] | None]
ROWS_A_PIECE: Final = 8_192
_FOLLOW_LOOK_S: Final = 1.0
"""A commit wakes followers; this interval notices a store that fails meanwhile."""
_GATHER_S: Final = 0.05
"""A follower is answered no sooner than this, unless the response is full: else it would poll after each commit of a
busy server."""
_READ_S: Final = 60.0
"""How long trimming spares the events of a response in progress; a stalled reader is not waited for any longer."""
FIRST_HEADER: Final = "veilmq-first-offset"
START_HEADER: Final = "veilmq-start-offset"
NEXT_HEADER: Final = "veilmq-next-offset"
EPOCH_HEADER: Final = "veilmq-epoch"
_Written = Callable[[View, int, int, Scope], bytes]
"""The events of [start, stop) that a caller may see, in the answer's form."""


def is_arrow_available() -> bool:
    """Whether pyarrow is installed."""
    from importlib.util import find_spec

    return find_spec("pyarrow") is not None


def is_arrow_wanted(accept: str) -> bool:
    """Whether an Accept header names Arrow and does not prefer another form of ours (RFC 9110, 12.5.1)."""
    qualities = {}
    for each in accept.split(","):
        name, *parameters = (part.strip().lower() for part in each.split(";"))
        weight = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        qualities[name] = float(weight) if _WEIGHT.fullmatch(weight) else 0.0
    ranges = (_LINES, "application/*", "*/*")
    lines = next((qualities[each] for each in ranges if each in qualities), 0.0)
    arrow = qualities.get(MEDIA_TYPE, 0.0)
    return arrow > 0 and arrow >= lines


class ArrowStream:
    """One response: `start`, then `batch` for each range of offsets, then `end`; each returns bytes to send."""

    def __init__(self) -> None:
        import pyarrow as pa

        self._pa = pa
        name = pa.dictionary(pa.int32(), pa.string())
        number, text = pa.int64(), pa.string()
        self.schema = pa.schema(
            [
                pa.field("offset", number, nullable=False),
                pa.field("kind", name, nullable=False),
                pa.field("at", number, nullable=False),
                *((column, name) for column in ("account", "region", "queue")),
                ("incarnation", number),
                *((column, name) for column in ("protocol", "principal", "client")),
                ("message", text),
                *((column, number) for column in ("sequence", "attempt", "rotation", "lease_us")),
                ("source", name),
                *((column, number) for column in ("sent", "visible_since", "held_us", "body_bytes")),
                ("group", text),
                ("type", text),
                ("detail", text),
            ]
        )
        self._sink = _Sink()
        self._writer = pa.ipc.new_stream(self._sink, self.schema)

    def batch(self, view: View, start: int, stop: int, scope: Scope) -> bytes:
        """The events of these offsets. Raises HistoryTrimmed."""
        check_offset(view, start)
        offsets, rows = _rows(view, start, stop)
        permitted, chosen = scope.incarnations(view), scope.wanted.chosen(view)
        if permitted is not None or chosen is not None:
            kind, queue, message, detail = (_PLACE[name] for name in ("kind", "queue", "message", "detail"))
            kept = [
                place
                for place, row in enumerate(rows)
                if visible(permitted, row[kind], row[queue])
                and (chosen is None or chosen.takes(row[kind], row[queue], row[message], row[detail]))
            ]
            offsets, rows = [offsets[place] for place in kept], [rows[place] for place in kept]
        if rows:
            self._writer.write_batch(self._columns(view, offsets, rows, scope.errors(view)))
        return self._sink.take()

    def end(self) -> bytes:
        """The end-of-stream mark."""
        self._writer.close()
        return self._sink.take()

    def _columns(self, view: View, offsets: list[int], rows: list[tuple[Any, ...]], errors: Errors) -> Any:
        pa = self._pa
        column = dict(zip(Event.__struct_fields__, zip(*rows, strict=True), strict=True))
        queues = pa.array(column["queue"], pa.int64())
        names = _names_of(view.queue_names)
        origins = _names_of(view.origin_names)
        of_detail = column["kind"], column["queue"], column["detail"]
        arrays = {
            "offset": pa.array(offsets, pa.int64()),
            "kind": self._named(pa.array(column["kind"], pa.int64()), [lambda kind: _KINDS.get(kind, str(kind))])[0],
            "incarnation": queues,
            "message": pa.array([None if each is None else id_text(each) for each in column["message"]], pa.string()),
            "source": self._named(pa.array(column["source"], pa.int64()), [_SOURCES.get])[0],
            "detail": pa.array(
                [
                    None if each is None else _JSON.encode(shown_detail(kind, each)).decode()
                    for kind, each in zip(column["kind"], map(errors.detail, *of_detail), strict=True)
                ],
                pa.string(),
            ),
        }
        arrays |= zip(("account", "region", "queue"), self._named(queues, names), strict=True)
        numbers = pa.array(column["origin"], pa.int64())
        arrays |= zip(("protocol", "principal", "client"), self._named(numbers, origins), strict=True)
        for field in self.schema:
            if field.name not in arrays:
                arrays[field.name] = pa.array(column[field.name], field.type)
        return pa.RecordBatch.from_arrays([arrays[field.name] for field in self.schema], schema=self.schema)

    def _named(self, numbers: Any, names: list[Callable[[int], str | None]]) -> list[Any]:
        """For each naming function, a dictionary column whose dictionary holds every name once."""
        pa = self._pa
        encoded = numbers.dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        columns = []
        for name in names:
            places: dict[str, int] = {}
            mapped = [None if found is None else places.setdefault(found, len(places)) for found in map(name, distinct)]
            indices = pa.array(mapped, pa.int32()).take(encoded.indices)
            columns.append(pa.DictionaryArray.from_arrays(indices, pa.array(list(places), pa.string())))
        return columns


def _rows(view: View, start: int, stop: int) -> tuple[list[int], list[tuple[Any, ...]]]:
    """Offsets and fields of the events in [start, stop)."""
    offsets: list[range] = []
    parts: list[list[tuple[Any, ...]]] = []
    for first, packed in view.oldest_first(start, stop):
        events = _TUPLES.decode(packed)
        if events and len(events[0]) < _FIELDS:  # of an earlier schema
            events = [event + (None,) * (_FIELDS - len(event)) for event in events]
        last = first + len(events)
        if first < start or last > stop:
            events = events[max(0, start - first) : stop - first]
            first, last = max(first, start), min(last, stop)
        offsets.append(range(first, last))
        parts.append(events)
    return list(chain.from_iterable(offsets)), list(chain.from_iterable(parts))


def _names_of(look_up: _LookUp) -> list[Callable[[int], str | None]]:
    """Three functions from a number to the three names in its row; None for a number that is not there."""
    known: dict[int, tuple[Any, ...]] = {}

    def row(number: int) -> tuple[Any, ...]:
        found = known.get(number)
        if found is None:
            found = known[number] = look_up(number) or (None, None, None)
        return found

    def place(number: int) -> Callable[[int], str | None]:
        return lambda key: row(key)[number]

    return [place(0), place(1), place(2)]


class _Sink(io.RawIOBase):
    """Collects what the stream's writer writes; its position only grows."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._written += len(part)
        return len(part)

    def tell(self) -> int:
        return self._written

    def take(self) -> bytes:
        """Everything since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


READ_HEADER: Final = b"veilmq-read"
"""In a cluster: `stale-ok` lets the server that was asked answer from its copy; then the answer has it, too: `copy`."""


def reads_copy(copy: Follower | None, members: Mapping[str, str]) -> bool:
    """Whether the copy has the first of the events that are asked for, and nothing is asked that only the owner can do:
    wait for new ones, or keep some from being trimmed. Blocks."""
    start = members.get("from", "")
    if copy is None or not copy.position.lsn or "hold" in members or not _OFFSET.fullmatch(start):
        return False
    with copy.look() as view:
        first, following = view.bounds()
    return first <= int(start) < following


class CopiedHistory:
    """The history in a server's copy. What the owner trims is trimmed here, too."""

    def __init__(self, copy: Follower) -> None:
        self.look = copy.look

    def hold(self, offset: int, seconds: float) -> int:
        """Cannot: the owner does."""
        return 0


class History(Protocol):
    """Where the events are: a store, or a copy."""

    def look(self) -> AbstractContextManager[View]:
        """See `Reader.look`."""

    def hold(self, offset: int, seconds: float) -> int:
        """See `Reader.hold`."""


class Feed:
    """Reads one history."""

    def __init__(self, history: History, shell: Shell | None) -> None:
        """shell: announces new events. None: nobody waits for one here."""
        self._history = history
        self._shell = shell
        self._epoch = ""

    def route(self) -> Route:
        """The only one."""
        return Route(PATH, self.events, methods=["GET"])

    async def events(self, request: Request) -> Response:
        """Events from an offset on, as JSON lines or as an Arrow stream."""
        asked = asyncio.get_running_loop().time()
        scope = scope_of(request)
        wanted = inputs.convert(members_of(request), inputs.EventsInput)
        scope = scope._replace(wanted=wanted.chosen())
        arrow = is_arrow_wanted(",".join(request.headers.getlist("accept")))
        if arrow and not is_arrow_available():
            raise Refused(406, "not_acceptable", "Arrow needs the extra `arrow`: pip install 'veilmq[arrow]'")
        start, first, following = await run_in_threadpool(self._find_held, wanted.start, max(wanted.hold, _READ_S))
        if start >= following and wanted.follow:
            first, following = await self._wait(start, wanted.follow)
            caller = caller_now(request)
            caller.check(Action.EVENTS)
            scope = scope._replace(key=caller.key)
        early_s = asked + min(_GATHER_S, wanted.follow) - asyncio.get_running_loop().time()
        if early_s > 0 and start < following < start + wanted.limit:
            await asyncio.sleep(early_s)
            _, first, following = await run_in_threadpool(self._find, "next")
        stop = min(start + wanted.limit, following)
        headers = {
            FIRST_HEADER: str(first),
            START_HEADER: str(start),
            NEXT_HEADER: str(stop),
            EPOCH_HEADER: self._epoch,
        } | ({} if self._shell else {READ_HEADER.decode(): "copy"})
        if arrow:
            return stream(in_thread(self._arrow(start, stop, scope)), MEDIA_TYPE, headers)
        return stream(in_thread(self._lines(start, stop, scope)), JSON_LINES, headers)

    def _find_held(self, wanted: str, seconds: float) -> Range:
        """Find the range and protect it from trimming for that long, within the bounds of `ReadPins`. Raises as
        `find_start`."""
        if wanted == "next":
            return self._find(wanted)
        # Hold it first, so that nothing trims it before it is found. A batch that is not committed yet may have trimmed
        # what the look still finds: `left` is the first event that stays.
        left = self._history.hold(int(wanted) if wanted.isdecimal() else 0, seconds)
        found = self._find(wanted)
        if found.start >= left:
            return found
        if wanted == "first":
            return found._replace(start=left, first=left)
        raise HistoryTrimmed(left)

    def _find(self, wanted: str) -> Range:
        with self._history.look() as view:
            if not self._epoch:  # it stays while the file is open
                _, _, self._epoch = view.head()
            return find_start(view, wanted)

    async def _wait(self, start: int, follow_s: float) -> tuple[int, int]:
        """Wait for an event at `start` or the timeout: (first offset, next offset)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + follow_s
        shell = self._shell
        assert shell is not None
        followers = shell.stats.followers
        committed = asyncio.Event()
        followers.add(committed)
        try:
            found = await run_in_threadpool(self._find, "next")
            while (
                found.following <= start
                and loop.time() < deadline
                and shell.broken is None
                and not shell.stats.dismissed
            ):
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(_FOLLOW_LOOK_S, deadline - loop.time())):
                        await committed.wait()
                committed.clear()
                found = await run_in_threadpool(self._find, "next")
        finally:
            followers.discard(committed)
        return found.first, found.following

    def _lines(self, start: int, stop: int, scope: Scope) -> Iterator[bytes]:
        return self._pieces(event_lines, start, stop, scope)

    def _arrow(self, start: int, stop: int, scope: Scope) -> Iterator[bytes]:
        written = ArrowStream()
        yield from self._pieces(written.batch, start, stop, scope)
        yield written.end()

    def _pieces(self, written: _Written, start: int, stop: int, scope: Scope) -> Iterator[bytes]:
        """[start, stop) a piece at a time; between two of them no view is held, and trimming spares the next.
        Raises HistoryTrimmed if it did not, as on a low disk."""
        while start < stop:
            with self._history.look() as view:
                end = piece_end(view, start, min(stop, start + ROWS_A_PIECE))
                piece = written(view, start, end, scope)
            start = end
            self._history.hold(start, _READ_S)
            yield piece
