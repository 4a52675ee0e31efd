"""The state of the cluster as PostgreSQL last reported it, for metrics, health and the console.

Strategy: PostgreSQL is asked when somebody wants to know, at most once in some seconds, and on a thread. All who ask
meanwhile wait for that one answer, and nobody longer than a second: then it is the answer before.
"""

import asyncio
from typing import Final

from veilmq.cluster.postgres import Postgres, Unfit, Unreachable
from veilmq.cluster.registry import Status, status

_ANSWER_SECONDS: Final = 1.0
"""How long a question waits for PostgreSQL; then the answer is what was known before."""
_KEPT_SECONDS: Final = 2.0


class LatestStatus:
    """Belongs to the loop."""

    def __init__(self) -> None:
        self._found: Status | None = None
        self._until_s = 0.0
        self._asking: asyncio.Future[None] | None = None

    async def ask(self, postgres: Postgres) -> Status | None:
        """The latest status; None: PostgreSQL did not answer."""
        if asyncio.get_running_loop().time() >= self._until_s and self._asking is None:
            self._asking = asyncio.ensure_future(self._ask(postgres))
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=_ANSWER_SECONDS)
        return self._found

    async def _ask(self, postgres: Postgres) -> None:
        try:
            self._found = await asyncio.to_thread(status, postgres)
        except (Unreachable, Unfit):
            self._found = None
        self._asking, self._until_s = None, asyncio.get_running_loop().time() + _KEPT_SECONDS
