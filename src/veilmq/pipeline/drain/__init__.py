"""Drains a live queue into a table, each message once: the stream source `veilmq` and the helper `drain`.

Strategy: `driver` does the work, without Spark: it receives, writes manifests (`manifests`), holds leases, and deletes
what Spark has committed (`batches`). Executors only read manifests (`source`, with `decoding`; `bad_records` keeps what
cannot be decoded). `source` is the adapter to Spark; `checkpoint` refuses a table that would lose rows.

Before changing it: docs/pipeline-drain.md explains the order of the steps.
"""

from veilmq.pipeline.drain.bad_records import BadRecord, read_bad_records
from veilmq.pipeline.drain.run import Drained, drain
from veilmq.pipeline.errors import (
    DirectoryForeign,
    DirectoryTaken,
    DirectoryUnwritable,
    DrainUnfinished,
    ManifestDamaged,
    TableForeign,
)

__all__ = [
    "BadRecord",
    "DirectoryForeign",
    "DirectoryTaken",
    "DirectoryUnwritable",
    "DrainUnfinished",
    "Drained",
    "ManifestDamaged",
    "TableForeign",
    "drain",
    "read_bad_records",
]
