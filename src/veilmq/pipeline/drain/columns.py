"""The columns of a drained message, for Arrow and for Spark, and the conversion of received messages into them.

Strategy: a manifest holds these columns and the handle, in exactly the types that Spark's Arrow reader expects, so that
a plain drain passes record batches on without touching a row.
"""

import base64
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from veilmq.client.messages import AttributeValue, Received

SPARK_SCHEMA: Final = (
    "`id` string, `body` string, `attributes` map<string, string>, `type` string, `group` string, "
    "`sequence` decimal(38, 0), `sent` timestamp_ltz, `receive_count` int, `batch` bigint, `position` int"
)
"""`sequence` is the FIFO sequence number (up to 128 bits); `batch` and `position` say where in which manifest a row
is."""

ARROW_SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("body", pa.string()),
        ("attributes", pa.map_(pa.string(), pa.field("value", pa.string(), True))),
        ("type", pa.string()),
        ("group", pa.string()),
        ("sequence", pa.decimal128(38, 0)),
        ("sent", pa.timestamp("us", "UTC")),
        ("receive_count", pa.int32()),
        ("batch", pa.int64()),
        ("position", pa.int32()),
    ]
)
MANIFEST_SCHEMA: Final = ARROW_SCHEMA.append(pa.field("handle", pa.string()))


def table_of(messages: Sequence[Received], batch: int) -> Any:
    """The rows of a manifest."""
    columns = [
        pa.array([each.id for each in messages], pa.string()),
        pa.array([each.body for each in messages], pa.string()),
        pa.array([_texts(each.attributes) for each in messages], ARROW_SCHEMA.field("attributes").type),
        pa.array([each.type for each in messages], pa.string()),
        pa.array([each.group for each in messages], pa.string()),
        pa.array([each.sequence_number for each in messages], pa.decimal128(38, 0)),
        pa.array([None if each.sent is None else round(each.sent * 1e6) for each in messages], pa.int64()).cast(
            pa.timestamp("us", "UTC")
        ),
        pa.array([each.receive_count for each in messages], pa.int32()),
        pa.repeat(pa.scalar(batch, pa.int64()), len(messages)),
        pa.array(range(len(messages)), pa.int32()),
        pa.array([each.handle for each in messages], pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=MANIFEST_SCHEMA)


def _texts(attributes: Any) -> list[tuple[str, str]]:
    return [(name, _text(value)) for name, value in attributes.items()] if attributes else []


def _text(value: AttributeValue) -> str:
    """Bytes as base64, numbers in Python's notation."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
