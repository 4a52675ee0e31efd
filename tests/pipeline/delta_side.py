"""One process that commits a batch to a Delta table as Spark's Python does, and may be killed meanwhile.

    python delta_side.py TABLE STORAGE NAME SIZE_BYTES ROWS

It says `ready`, and waits for a line on its standard input.
"""

import sys

from pyspark.sql.types import StructType

from veilmq.pipeline.options import DeltaOptions
from veilmq.pipeline.sinks.delta import DeltaWriter, Written

SCHEMA = StructType().add("n", "long")
QUERY = "a query"


def writer(table: str, storage: str = "{}") -> DeltaWriter:
    return DeltaWriter(SCHEMA, DeltaOptions(path=table, storage=storage))


def main(table: str, storage: str, name: str, size_bytes: str, rows: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    writer(table, storage).commit([Written(name, int(size_bytes), int(rows), QUERY)], 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
