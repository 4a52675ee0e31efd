"""Reads the rows of a part of a manifest, on executors.

Strategy: a plain drain passes Arrow record batches on unchanged. With `unwrap` or `format=json` a task first processes
all its rows and quarantines what cannot be decoded, and only then yields the others. So a query that does not read to
the end cannot lose a quarantined message.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_schema

from veilmq.client.errors import Unreadable
from veilmq.client.messages import Peeked
from veilmq.pipeline.drain import quarantine
from veilmq.pipeline.drain.columns import ARROW_SCHEMA
from veilmq.pipeline.drain.decoding import METADATA, Decoding
from veilmq.pipeline.drain.driver import Span
from veilmq.pipeline.drain.manifests import open_manifest
from veilmq.pipeline.drain.options import DrainOptions
from veilmq.pipeline.drain.quarantine import Quarantined
from veilmq.pipeline.drain.unwrapping import Unwrapping
from veilmq.pipeline.errors import OptionInvalid


def check_schema(schema: types.StructType, options: DrainOptions) -> None:
    """Raises OptionInvalid for a schema that the source cannot provide."""
    names = {name: name for name in ARROW_SCHEMA.names}
    if options.format == "json":
        Decoding(schema, options.column_name_of_corrupt_record)
        schema = types.StructType([field for field in schema.fields if field.name in METADATA])
        names = METADATA
    for field in arrow_schema(schema):
        if field.name not in names or ARROW_SCHEMA.field(names[field.name]).type != field.type:
            raise OptionInvalid(
                f"veilmq has no column {field.name} of the type {field.type}.", f"It has {', '.join(names)}."
            )


def arrow_schema(schema: types.StructType) -> Any:
    """The Arrow schema in which Spark wants record batches."""
    return to_arrow_schema(schema, timezone="UTC")


def rows(span: Span, schema: types.StructType, options: DrainOptions) -> Iterator[Any]:
    """Record batches. Raises ManifestDamaged, ObjectStoreFailed (Spark retries the task), OptionInvalid."""
    path, first, stop = span
    wanted = arrow_schema(schema)
    if options.format == "raw" and not options.unwrap:
        with open_manifest(Path(path)) as reader:
            for at in range(first, stop):
                batch = reader.get_batch(at)
                yield pa.RecordBatch.from_arrays([batch.column(name) for name in wanted.names], schema=wanted)
        return
    yield from _decoded(Path(path), first, stop, schema, options).to_batches()


def _decoded(path: Path, first: int, stop: int, schema: types.StructType, options: DrainOptions) -> Any:
    unwrapping = Unwrapping(options)
    decoding = Decoding(schema, options.column_name_of_corrupt_record) if options.format == "json" else None
    good: list[dict[str, Any]] = []
    bad: list[Quarantined] = []
    with open_manifest(path) as reader:
        for at in range(first, stop):
            for row in reader.get_batch(at).to_pylist():
                try:
                    body = unwrapping.body(Peeked(row["id"], row["body"], dict(row["attributes"])))
                    good.append({**row, "body": body} if decoding is None else decoding.row(body, row))
                except (Unreadable, ValueError) as error:
                    bad.append(_quarantined(row, str(error)))
    quarantine.write(path, first, bad)
    wanted = arrow_schema(schema)
    columns = [pa.array([row.get(field.name) for row in good], field.type) for field in wanted]
    return pa.Table.from_arrays(columns, schema=wanted)


def _quarantined(row: dict[str, Any], reason: str) -> Quarantined:
    return Quarantined(
        id=row["id"],
        body=row["body"],
        reason=reason,
        attributes=dict(row["attributes"]),
        type=row["type"],
        group=row["group"],
        sent=None if row["sent"] is None else row["sent"].timestamp(),
        receive_count=row["receive_count"],
        batch=row["batch"],
    )
