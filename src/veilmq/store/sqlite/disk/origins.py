"""The origins of commands, each with the number by which leases and events name it.

Strategy: a number is assigned at an origin's first use, and never twice. A client name is whatever a client says, so
with many of them new ones are recorded with less of it. Which go again, is trimming's affair (upkeep/trimming).
"""

import re
from typing import Final

import apsw

from veilmq.model.commands import Origin
from veilmq.store.sqlite.disk.rows import ORIGINS, rows_of

ORIGINS_MAX: Final = 100_000
"""Beyond this many distinct clients, new clients are recorded without their user agent."""
PROCESSES_MAX: Final = 50_000
"""Beyond this many, new clients are recorded without their process id, which changes at each restart of a worker."""
_PROCESS: Final = re.compile(r"; pid \d+")
"""The process id in a client name (veilmq.client.adapters.cloud)."""


class OriginNumbers(dict[Origin, int]):
    """The number of each origin."""

    def __init__(self, connection: apsw.Connection) -> None:
        super().__init__(
            (Origin(protocol, principal, client), row)
            for row, protocol, principal, client in rows_of(connection, ORIGINS)
        )
        self.greatest = max(self.values(), default=0)
        """The last number assigned. Its row is never dropped, so none is assigned twice."""

    def as_recorded(self, origin: Origin) -> Origin:
        """A new origin, less specific where there are many already."""
        if len(self) < PROCESSES_MAX:
            return origin
        client = "" if len(self) >= ORIGINS_MAX else _PROCESS.sub("", origin.client)
        return Origin(origin.protocol, origin.principal, client)

    def forget_last(self, origin: Origin) -> None:
        """The batch that assigned a number is rolled back."""
        self.greatest = self.pop(origin) - 1
