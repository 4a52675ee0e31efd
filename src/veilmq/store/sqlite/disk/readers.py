"""The connections that read beside the batches."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import apsw

from veilmq.model.errors import StoreFailed
from veilmq.store import Options
from veilmq.store.sqlite.disk import MISMATCH, SERVED, is_mismatch, open_reader, trust_pages

_READERS_MAX: Final = 4

logger = logging.getLogger("veilmq.store")

T = TypeVar("T")


class Readers:
    """A few read-only connections that threads borrow."""

    def __init__(
        self,
        path: Path,
        options: Options,
        before: Callable[[], None],
        *,
        trusting: bool = False,
        opening: Callable[[], None] = lambda: None,
    ) -> None:
        """before: called in the reading thread, so that the database has everything that was committed. opening: called
        before a connection is opened, which it may refuse."""
        self._path = path
        self._options = options
        self._before, self._opening = before, opening
        self._idle: list[apsw.Connection] = []
        self._free = threading.BoundedSemaphore(_READERS_MAX)
        self._closed = False
        self.trusting = trusting
        """A page did not match its checksum; all are read now, whatever their checksums say."""

    @contextmanager
    def lend(self) -> Iterator[apsw.Connection]:
        """Borrow a connection in a read transaction: one consistent, committed state. Waits while all are lent.

        Raises StoreFailed for the first page that does not match its checksum.
        """
        with self._free:
            self._before()
            connection, failed = self._idle.pop() if self._idle else self._open(), False
            try:
                if self.trusting:
                    trust_pages(connection)
                connection.execute("BEGIN")
                yield connection
            except apsw.IOError as error:
                failed = not is_mismatch(error)
                if failed:
                    raise
                self.note_mismatch()
                raise StoreFailed(reason=MISMATCH) from error
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if self._closed or failed:
                    connection.close()
                else:
                    self._idle.append(connection)

    def _open(self) -> apsw.Connection:
        self._opening()
        return open_reader(self._path, self._options)

    def read(self, step: Callable[[apsw.Connection], T]) -> T:
        """What `step` reads; again, if it met the first page that does not match its checksum."""
        if not self.trusting:
            try:
                with self.lend() as connection:
                    return step(connection)
            except StoreFailed:
                if not self.trusting:
                    raise
        with self.lend() as connection:
            return step(connection)

    def note_mismatch(self) -> None:
        """Say in the log that a page did not match its checksum, and read on whatever the pages hold."""
        self.trusting = True
        logger.error(SERVED, self._path)

    def close(self) -> None:
        """Close idle connections; a lent one is closed when it is returned."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
