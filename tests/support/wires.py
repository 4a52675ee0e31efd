"""What the clients of the codecs' tests share: a real SQLite store behind a codec, on a clock that tests move.

Strategy: what a codec asks goes to the store through the contract's stage. How a request is made and signed, and how an
answer is read, is each protocol's own (tests/protocols).
"""

import itertools
from email.utils import formatdate
from pathlib import Path
from typing import Any

from tests.support.contract.stage import Stage
from tests.support.sqlite import SqliteFactory

from veilmq.model.commands import Peek
from veilmq.model.instant import Instant
from veilmq.protocols import Request, Response
from veilmq.server.port import denied_action


class StoreWire:
    """A codec and its store."""

    codec: Any

    def __init__(self, directory: Path) -> None:
        self._directories = (directory / f"data-{number}" for number in itertools.count())
        self._begin()

    def renew(self) -> None:
        """Another store and codec, as at the beginning."""
        self.close()
        self._begin()

    def close(self) -> None:
        """Close the store, whatever stage a test has put in its place."""
        self._own.store.close()

    def _begin(self) -> None:
        self.stage = self._own = Stage(SqliteFactory(next(self._directories)))
        self.calls: list[Any] = []
        """What the codec asked of the store."""

    @property
    def wall(self) -> Instant:
        """The clock's instant."""
        return self.stage.now

    def date(self, shift_s: float = 0) -> str:
        """RFC 1123, so many seconds from now."""
        return formatdate(self.wall / 1e6 + shift_s, usegmt=True)

    def carried_out(self, request: Request) -> Response:
        """Hand a request over, and let the store answer what is asked of it."""
        found = self.codec.decode(request, self.wall, self.wall)
        while not isinstance(found, Response):
            self.calls.append(found)
            action = denied_action(found.key, found.commands)
            if action is not None:
                response: Response = self.codec.denied(found, action)
                return response
            if isinstance(found.commands[0], Peek):
                outcomes = [self.stage.store.query(found.commands[0], self.stage.now)]
            else:
                outcomes = self.stage.batch(found.commands).outcomes
            found = self.codec.encode(found, outcomes)
        return found
