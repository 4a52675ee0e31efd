"""Durations on a logarithmic scale, and histograms of leases on it, from which all estimates start.

Strategy: a bucket is a quarter of the planner's (veilmq.estimate.survival), so that quantiles are fine and every fourth
bound is one of the planner's. A histogram row counts leases of one queue and type that ended alike; histograms of two
stretches of history are added by summing. Only the first lease of a message shows how long work takes: a message whose
lease runs out is received again, and would count again each time (docs/decisions/0026-estimate.md). Later leases are
counted for what leases are like today, and to see whether those messages take longer than others.
"""

from collections.abc import Callable, Sequence
from math import log
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from veilmq.estimate.survival import BUCKETS, GROWTH, SHORTEST

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

FINE: Final = 4
"""Our buckets per bucket of the planner."""
LAST: Final = BUCKETS * FINE
STEP: Final = log(GROWTH) / FINE
BOUNDS: Final = SHORTEST * np.exp(STEP * np.arange(LAST + 1))
"""Upper bounds, in seconds."""
MIDDLES: Final = np.concatenate([[SHORTEST / 2], np.sqrt(BOUNDS[1:] * BOUNDS[:-1])])

GROUP: Final = ("account", "region", "queue", "type")
DONE, STOPPED, CRASHED, WATCHED, AGAIN, AGAIN_DONE = "done", "stopped", "crashed", "watched", "again", "again_done"
"""Took exactly that long; was alive at that time; was alive at that time and crashed before the next sign of life was
due; was alive at that time, and is still working or crashed since. Not the message's first, so it says nothing about
how long messages take (`veilmq.estimate`): alive at that time, or took exactly that long ..."""
AGAIN_CRASHED: Final = "again_crashed"
"""... or ran out without a sign of its worker. (Earlier releases counted those as `AGAIN`.)"""
LATER: Final = (AGAIN, AGAIN_DONE, AGAIN_CRASHED)
CELL: Final = ("ended", "bucket", "until", "lease")
SUMS: Final = ("leases", "held_s", "lease_s", "renewals", "renewed_share", "redeliveries", "redone", "squares")
SCHEMA: Final = (
    "account string, region string, queue string, type string, ended string, bucket int, until int, lease int,"
    " leases double, held_s double, lease_s double, renewals double, renewed_share double, redeliveries double,"
    " redone double, squares double"
)


def struct(schema: str) -> "StructType":
    """A flat SQL schema as a type; Spark Connect would ask its server to parse the text."""
    from pyspark.sql import types as T

    kinds: dict[str, T.DataType] = {
        "string": T.StringType(),
        "double": T.DoubleType(),
        "int": T.IntegerType(),
        "bigint": T.LongType(),
        "boolean": T.BooleanType(),
        "timestamp": T.TimestampType(),
        "array<string>": T.ArrayType(T.StringType()),
    }
    return T.StructType([T.StructField(name, kinds[kind]) for name, kind in _fields(schema)])


def arrow_of(rows: Any, schema: str) -> Any:
    """A pandas frame of such columns as a pyarrow Table: Spark checks Python's values one by one."""
    import pyarrow as pa

    rows = rows.copy(deep=False)
    rows.attrs = {}  # metrics of Spark Connect, which pyarrow would write, and warns that it cannot
    return pa.Table.from_pandas(rows, pa.schema(list(_arrow(schema))), preserve_index=False)


def by_group(cells: "DataFrame", keys: Sequence[str], function: Callable[[Any], Any], schema: str) -> "DataFrame":
    """Apply `function` to each group of a histogram: from a pandas frame of its rows to one of `schema`.

    Like `applyInPandas`, which asks Spark Connect for its input's columns; a declarative pipeline does not allow that.
    """
    import pyarrow as pa
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.functions import arrow_udf
    from pyspark.sql.types import ArrayType

    wanted = [name for name, _ in _fields(schema)]
    others = [name for name in (*GROUP, *CELL, *SUMS) if name not in keys]

    def work(*columns: pa.Array) -> pa.Array:
        import pandas as pd

        *names, groups = columns
        answers = []
        for place in range(len(groups)):
            rows = pa.Table.from_struct_array(groups[place].values).to_pandas()
            for name, column in zip(keys, names, strict=True):
                rows[name] = pd.Series([column[place].as_py()] * len(rows), dtype=object)
            found = function(rows)[wanted].itertuples(index=False, name=None)
            answers.append([dict(zip(wanted, map(_plain, row), strict=True)) for row in found])
        return pa.array(answers, pa.list_(_arrow(schema)))

    # The stubs have no function with any number of columns.
    untyped: Any = arrow_udf
    function_of_rows = untyped(work, ArrayType(struct(schema)))
    packed = cells.groupBy(*keys).agg(F.collect_list(F.struct(*others)).alias("cells"))
    return packed.select(F.inline(function_of_rows(*keys, "cells")))


def names_of(rows: Any) -> dict[str, Any]:
    """The group's own columns, repeated in each of its result rows."""
    first = rows.iloc[0]
    return {name: first[name] for name in GROUP}


def _fields(schema: str) -> list[tuple[str, str]]:
    return [(name, kind) for name, _, kind in (part.partition(" ") for part in schema.split(", "))]


def _arrow(schema: str) -> Any:
    import pyarrow as pa

    kinds = {
        "string": pa.string(),
        "double": pa.float64(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", "UTC"),
        "array<string>": pa.list_(pa.string()),
    }
    return pa.struct([(name, kinds[kind]) for name, kind in _fields(schema)])


def _plain(value: Any) -> Any:
    """The pandas value as Python's own number, text or None."""
    if isinstance(value, list | str) or value is None:
        return value
    value = value.item() if hasattr(value, "item") else value
    return None if value != value else value


def bucket_of(seconds: Any) -> Any:
    """The bucket numbers of these times."""
    with np.errstate(divide="ignore"):
        found = np.floor(np.log(np.asarray(seconds, float) / SHORTEST) / STEP) + 1
    return np.clip(np.where(np.asarray(seconds) <= SHORTEST, 0, found), 0, LAST).astype(int)


def on_scale(finished: Any, censored: Any) -> tuple[Any, Any]:
    """Attempts by bucket. The last bucket has no end: who finished there was alive at its start, and more is not
    known."""
    finished, censored = finished.copy(), censored.copy()
    censored[LAST] += finished[LAST]
    finished[LAST] = 0.0
    return finished, censored


def bucket_column(seconds: "Column") -> "Column":
    """The same in Spark."""
    from pyspark.sql import functions as F

    found = F.floor(F.log(seconds / SHORTEST) / STEP) + 1
    return F.when(seconds <= SHORTEST, 0).otherwise(F.least(found, F.lit(LAST))).cast("int")


def histogram(leases: "DataFrame") -> "DataFrame":
    """Leases (of `attempts`) counted by queue, type and how they ended; columns as in `SCHEMA`.

    Leases that never reached a worker (undelivered) are left out; a message whose first was one has no first lease.
    `until` is the bucket of the lease's end for a crash, and of the history's end for a watched lease; `squares` sums
    the squared logarithms of exact times, `redeliveries` counts leases that were not their message's first.
    """
    from pyspark.sql import functions as F

    held = F.col("held_us") / 1e6
    crashed, watched = F.col("outcome") == "crashed", F.col("watched_us").isNotNull()
    again = F.col("attempt") > 1
    ended = (
        F.when(again, F.when(F.col("exact"), AGAIN_DONE).when(crashed, AGAIN_CRASHED).otherwise(AGAIN))
        .when(F.col("exact"), DONE)
        .when(crashed, CRASHED)
        .when(watched, WATCHED)
        .otherwise(STOPPED)
    )
    until = F.when(crashed, F.col("lease_end_us")).otherwise(F.col("watched_us"))
    exact = F.when(F.col("exact"), F.pow(F.log(F.greatest(held, F.lit(1e-3))), 2)).otherwise(0.0)
    return (
        leases.where(F.col("outcome") != "undelivered")
        .groupBy(
            *GROUP,
            ended.alias("ended"),
            bucket_column(held).alias("bucket"),
            F.when(~again & (crashed | watched), bucket_column(until / 1e6)).otherwise(0).alias("until"),
            bucket_column(F.col("lease_us") / 1e6).alias("lease"),
        )
        .agg(
            F.count("*").cast("double").alias("leases"),
            F.sum(held).alias("held_s"),
            F.sum(F.col("lease_us") / 1e6).alias("lease_s"),
            F.count("renewed_share").cast("double").alias("renewals"),
            F.coalesce(F.sum("renewed_share"), F.lit(0.0)).alias("renewed_share"),
            F.sum(again.cast("double")).alias("redeliveries"),
            F.sum((F.col("outcome") == "redone").cast("double")).alias("redone"),
            F.sum(exact).alias("squares"),
        )
    )
