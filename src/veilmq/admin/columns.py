"""The history as Arrow: converts packed rows to columns without an object per event.

Strategy: a commit's events are unpacked as plain tuples, collected in batches of some thousand rows and transposed.
Numbers of queues and origins become dictionaries in C++, so only their few distinct values are looked up. The columns
have the names and values of the JSON form; `detail` is JSON text. pyarrow is the optional extra `arrow`.
"""

import io
import re
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

import msgspec

from veilmq.admin.reading import Errors, Scope, check_offset, visible
from veilmq.model.commands import LeaseSource
from veilmq.model.events import Event, Kind, shown_detail
from veilmq.model.message import id_text
from veilmq.store import View

MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"
_LINES: Final = "application/x-ndjson"
_WEIGHT: Final = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")
_TUPLES: Final = msgspec.msgpack.Decoder(list[tuple[Any, ...]])
_FIELDS: Final = len(Event.__struct_fields__)
_PLACE: Final = {name: place for place, name in enumerate(Event.__struct_fields__)}
_KINDS: Final = {int(kind): kind.name.lower() for kind in Kind}
_SOURCES: Final = {int(source): source.name.lower() for source in LeaseSource}
_JSON: Final = msgspec.json.Encoder()

_LookUp = Callable[[int], tuple[Any, ...] | None]


def available() -> bool:
    """Whether pyarrow is installed."""
    from importlib.util import find_spec

    return find_spec("pyarrow") is not None


def is_wanted(accept: str) -> bool:
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
