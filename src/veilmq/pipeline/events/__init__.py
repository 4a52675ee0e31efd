"""The history as a Spark data source, from a server or from exported Parquet.

Strategy: `reading` fetches events as Arrow record batches by offset; `source` splits them for Spark; `export` writes
them to files. The columns, for Arrow and for Spark, are one list, in the order of /api/v1/events.
"""

from collections.abc import Collection, Iterable
from typing import Any, Final

import pyarrow as pa

from veilmq.model.events import Kind
from veilmq.pipeline.errors import HistoryNewer

_NUMBER: Final = "bigint"
_TEXT: Final = "string"

COLUMNS: Final = {
    "offset": _NUMBER,
    "kind": _TEXT,
    "at": _NUMBER,
    "account": _TEXT,
    "region": _TEXT,
    "queue": _TEXT,
    "incarnation": _NUMBER,
    "protocol": _TEXT,
    "principal": _TEXT,
    "client": _TEXT,
    "message": _TEXT,
    "sequence": _NUMBER,
    "attempt": _NUMBER,
    "rotation": _NUMBER,
    "lease_us": _NUMBER,
    "source": _TEXT,
    "sent": _NUMBER,
    "visible_since": _NUMBER,
    "held_us": _NUMBER,
    "body_bytes": _NUMBER,
    "group": _TEXT,
    "type": _TEXT,
    "detail": _TEXT,
}
"""Name and Spark type. Instants are microseconds UTC, durations microseconds; `detail` is JSON."""

SPARK_SCHEMA: Final = ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items())
ARROW_SCHEMA: Final = pa.schema(
    [(name, pa.int64() if kind == _NUMBER else pa.string()) for name, kind in COLUMNS.items()]
)
KINDS: Final = frozenset(kind.name.lower() for kind in Kind)


def plain(batch: Any) -> Any:
    """The batch with exactly our columns, dictionaries unpacked. Raises HistoryNewer for an unknown column."""
    check_columns(batch.schema.names)
    kinds = batch.column("kind")
    values = kinds.dictionary if pa.types.is_dictionary(kinds.type) else kinds.unique()
    check_kinds(values.to_pylist())
    return pa.RecordBatch.from_arrays(
        [_unpacked(batch.column(field.name), field.type) for field in ARROW_SCHEMA], schema=ARROW_SCHEMA
    )


def check_columns(names: Collection[str]) -> None:
    """Raises HistoryNewer unless these are our columns."""
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise HistoryNewer(f"The history has no column {missing[0]}.", "Was it written by VeilMQ?")
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise HistoryNewer(f"The history has a column {unknown[0]} of a later release.", "Upgrade veilmq here.")


def check_kinds(kinds: Iterable[str]) -> None:
    """Raises HistoryNewer for a kind of event that this release does not know."""
    strange = [kind for kind in kinds if kind not in KINDS]
    if strange:
        raise HistoryNewer(f"The history has events of the kind {strange[0]!r}.", "Upgrade veilmq here.")


def _unpacked(column: Any, kind: Any) -> Any:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column if column.type == kind else column.cast(kind)
