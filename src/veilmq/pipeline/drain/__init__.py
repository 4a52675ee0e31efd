"""A live queue drained into a table, each message once: the stream source `veilmq` and the helper `drain`.

Strategy: `driver` is the whole of it, without Spark: it receives, writes manifests (`manifests`), holds leases
(`batch_leases`), and deletes what Spark has committed (`ledger`, `deleting`). Executors read manifests only (`rows`,
with `unwrapping` and `decoding`; `quarantine` takes what cannot be decoded). `source` tells Spark; `table` refuses a
table that would lose rows. docs/pipeline-drain.md says why each step is where it is.
"""

from veilmq.pipeline.drain.errors import (
    DirectoryForeign,
    DirectoryTaken,
    DirectoryUnwritable,
    DrainUnfinished,
    ManifestDamaged,
    TableForeign,
)
from veilmq.pipeline.drain.quarantine import Quarantined, quarantined
from veilmq.pipeline.drain.run import Drained, drain

__all__ = [
    "DirectoryForeign",
    "DirectoryTaken",
    "DirectoryUnwritable",
    "DrainUnfinished",
    "Drained",
    "ManifestDamaged",
    "Quarantined",
    "TableForeign",
    "drain",
    "quarantined",
]
