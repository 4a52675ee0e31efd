"""Events by hand, and made-up histories as DataFrames."""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from veilmq.pipeline.events import ARROW_SCHEMA, SPARK_SCHEMA

S = 1_000_000
Event = dict[str, Any]


def table_of(events: Sequence[Event]) -> pa.Table:
    """Events as given, numbered, with what all of them have."""
    shared = {"account": "000000000000", "region": "us-east-1", "queue": "q", "incarnation": 1, "sequence": 1}
    shared |= {"rotation": 0}
    rows = [dict.fromkeys(ARROW_SCHEMA.names) | shared | {"offset": at} | each for at, each in enumerate(events)]
    for row in rows:
        if isinstance(row["detail"], dict):
            row["detail"] = json.dumps(row["detail"], separators=(",", ":"))
    return pa.Table.from_pylist(rows, ARROW_SCHEMA)


def frame(spark: Any, table: pa.Table) -> Any:
    """The table in Spark."""
    return spark.createDataFrame(table, SPARK_SCHEMA)


def sent(at: int, **more: Any) -> Event:
    return {"kind": "sent", "at": at * S, "attempt": 0, "sent": at * S, "visible_since": at * S, **more}


def received(at: int, attempt: int = 1, lease: int = 30, **more: Any) -> Event:
    return {"kind": "received", "at": at * S, "attempt": attempt, "lease_us": lease * S, "type": "t", **more}


def extended(at: int, attempt: int = 1, lease: int = 30, **more: Any) -> Event:
    return {"kind": "extended", "at": at * S, "attempt": attempt, "lease_us": lease * S, "type": "t", **more}


def event(kind: str, at: int, attempt: int = 1, **more: Any) -> Event:
    return {"kind": kind, "at": at * S, "attempt": attempt, **more}


def resumed(at: int, attempt: int = 1, lease: int = 30, **more: Any) -> Event:
    return extended(at, attempt, lease) | {"kind": "lease_resumed", **more}


def retried(at: int, delay: int, reason: str | None, attempt: int = 1, **more: Any) -> Event:
    detail = None if reason is None else {"reason": reason}
    return event("released_for_retry", at, attempt, lease_us=delay * S, detail=detail, **more)
