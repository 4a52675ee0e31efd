"""Copies of the whole state, a snapshot or a backup, and their bounds: how many are being sent, and for how long.

Strategy: a snapshot, a backup and a check each read the store in one transaction, and while it lasts the WAL cannot be
checkpointed. The copy then stays on disk as an unnamed file until its reader has it. So one is made at a time, few
files exist together, and a reader that stalls loses its file. If the WAL is long, the next one waits a while for the
checkpoint, because the WAL file keeps the size that one reading gave it.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import islice
from typing import IO, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.access import Caller
from veilmq.admin.answers import JSON_LINES, body_of, caller_now, gone_of, scope_of, stream
from veilmq.admin.api import Refused
from veilmq.admin.history import Scope, snapshot_lines
from veilmq.model.errors import DiskLow, StoreFailed
from veilmq.model.settings.access import Action
from veilmq.server.cluster.admin import INPUT_ENDED
from veilmq.server.service import Service
from veilmq.store.directory import DatabaseFailed, NotOurs
from veilmq.store.files import SyncedInPieces, close_in_pieces

COPIES_MAX: Final = 4
"""Copies that are being made, wait to be made, or wait for their readers."""
STALL_S: Final = 60.0
"""A reader that takes nothing for this long loses its copy."""
REST_S: Final = 5.0
"""The longest pause before a read if the WAL is long."""
PIECE_BYTES: Final = 256 * 1024
_LINES_A_LOOK: Final = 10_000
"""Lines of a snapshot between two checks of the disk."""

logger = logging.getLogger("veilmq.admin")


class Copies:
    """All copies of one server, and the routes that send them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()
        self.count = 0
        """The number of copies."""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """The turn of one long read; waits for earlier ones and for the WAL."""
        async with self._turn:
            await self._rest()
            yield

    async def _rest(self) -> None:
        """Wait until the WAL has begun anew, if it is long; each commit may be the one."""
        reader, followers = self._service.reader, self._service.shell.stats.followers
        committed = asyncio.Event()
        followers.add(committed)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(REST_S):
                    while reader.log_is_long:
                        await committed.wait()
                        committed.clear()
        finally:
            followers.discard(committed)

    async def make(self, write: Callable[[], IO[bytes]]) -> "Copy":
        """The open file that `write` makes on a thread, when its turn has come.

        Raises Refused (503) beyond `COPIES_MAX`.
        """
        if self.count >= COPIES_MAX:
            message = f"{COPIES_MAX} snapshots and backups are being made or read: try again when one has ended"
            raise Refused(503, "busy", message, limit=COPIES_MAX)
        self.count += 1
        try:
            async with self.reading():
                file = await run_in_threadpool(write)
        except BaseException:
            self._ended()
            raise
        return Copy(file, self._ended)

    def _ended(self) -> None:
        self.count -= 1

    def routes(self) -> list[Route]:
        """A snapshot and a backup."""
        return [
            Route("/api/v1/snapshot", self.snapshot, methods=["GET"]),
            Route("/api/v1/backup", self.backup, methods=["POST"]),
        ]

    async def snapshot(self, request: Request) -> Response:
        """Queues and messages as they are at one offset, as JSON lines."""
        scope = scope_of(request)
        reader = self._service.reader
        if isinstance(refusal := reader.refusal, DiskLow):
            raise refusal

        def check(caller: Caller) -> None:
            if caller.key is not None and scope.key is not None and caller.key.grants != scope.key.grants:
                words = "the grants of the access key were changed while the snapshot was made: ask again"
                raise Refused(403, "not_granted", words)

        copy = await self._made(request, partial(self._snapshot_file, scope), check)
        return stream(copy.parts(), JSON_LINES)

    async def _made(
        self, request: Request, write: Callable[[], IO[bytes]], check: Callable[[Caller], object]
    ) -> "Copy":
        """See `make`. check: whether the caller may have the copy, with its grants of now: making it may take minutes.
        Raises what it raises, and Refused (401) if the caller's key was taken away."""
        copy = await self.make(write)
        try:
            check(caller_now(request))
        except Refused:
            copy.close()
            raise
        return copy

    def _snapshot_file(self, scope: Scope) -> IO[bytes]:
        reader = self._service.reader
        with ExitStack() as opened:
            file = opened.enter_context(tempfile.TemporaryFile(dir=reader.directory.path, buffering=PIECE_BYTES))
            with reader.look() as view:
                lines, synced = snapshot_lines(view, scope), SyncedInPieces(file)
                while some := list(islice(lines, _LINES_A_LOOK)):
                    if isinstance(refusal := reader.refusal, DiskLow):
                        raise refusal
                    synced.write(b"".join(some))
            file.seek(0)
            opened.pop_all()
        return file

    async def backup(self, request: Request) -> Response:
        """The whole database as a file, with a fresh receipt key and epoch (`Reader.backup`)."""
        check = partial(Caller.check, action=Action.BACKUP)
        await body_of(request, check)
        reader = self._service.reader
        if isinstance(refusal := reader.refusal, StoreFailed):
            raise refusal
        size_bytes = reader.database_bytes()
        if reader.directory.free_bytes() < size_bytes + reader.directory.floor_bytes():
            raise DiskLow(free_bytes=reader.directory.free_bytes())
        gone = asyncio.ensure_future(gone_of(request))

        def step() -> None:
            if gone.done() or request.scope[INPUT_ENDED].is_set():  # which a client that is killed does, too
                raise ConnectionAbortedError("the client hung up before its backup was made")

        try:
            copy = await self._made(request, partial(reader.backup, step), check)
        except (DatabaseFailed, NotOurs) as error:
            raise StoreFailed(reason=f"no backup could be made: {error}") from error
        except ConnectionAbortedError as error:
            raise Refused(400, "client_gone", str(error)) from None  # for the log alone
        finally:
            gone.cancel()
        headers = {"content-length": str(os.fstat(copy.file.fileno()).st_size)}
        return stream(copy.parts(), "application/vnd.sqlite3", headers)


class Copy:
    """One file for one reader."""

    def __init__(self, file: IO[bytes], ended: Callable[[], None]) -> None:
        self.file = file
        self._ended = ended
        self._given_up = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(STALL_S, self._stalled)

    async def parts(self) -> AsyncIterator[bytes]:
        """The bytes; the file is closed at the end, or when the client leaves. Raises TimeoutError after a stall."""
        try:
            while True:
                if self._given_up:
                    raise TimeoutError(f"nothing was taken for {STALL_S:g} s")
                part = await run_in_threadpool(self.file.read, PIECE_BYTES)
                if not part:
                    return
                self._timer.cancel()
                self._timer = self._loop.call_later(STALL_S, self._stalled)
                yield part
        finally:
            self.close()

    def close(self) -> None:
        """Close the file, on a thread: freeing the blocks of a large one takes a while."""
        self._timer.cancel()
        if not self._given_up:
            self._given_up = True
            closing = self._loop.run_in_executor(None, close_in_pieces, self.file)
            closing.add_done_callback(lambda _: self._ended())

    def _stalled(self) -> None:
        logger.warning("a snapshot or backup is dropped: its reader took nothing for %g s", STALL_S)
        self.close()
