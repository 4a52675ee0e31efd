"""Routes of the history: events by offset, the trace of one message, a snapshot, a backup.

Strategy: offsets order the log, so a response's headers say where it begins and where to continue: it covers `from` up
to `VeilMQ-Next-Offset`, both fixed when the request arrives. `from=next` with `follow` waits for new events. A snapshot
is first written to an unnamed file, so that its read transaction ends before a slow client's download (copies.py).
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from typing import IO, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin import columns, inputs
from veilmq.admin.answers import JSON_LINES, answer, caller_of, in_thread, members_of, stream
from veilmq.admin.copies import PIECE_BYTES, Copies
from veilmq.admin.errors import Refused
from veilmq.admin.reading import Range, Scope, event_lines, find_start, piece_end, snapshot_lines, trace
from veilmq.admin.service import Service
from veilmq.model.access import Action
from veilmq.model.errors import DiskLow
from veilmq.model.events import HistoryTrimmed
from veilmq.model.message import id_text
from veilmq.store import View
from veilmq.store.files import SyncedInPieces

ROWS_A_PIECE: Final = 8_192
_LINES_A_LOOK: Final = 10_000
"""Lines of a snapshot between two checks of the disk."""
_FOLLOW_LOOK_S: Final = 1.0
"""A commit wakes followers; this interval notices a store that fails meanwhile."""
_GATHER_S: Final = 0.05
"""A follower is answered no sooner than this, unless the response is full: else it would poll after each commit of a
busy server."""
_READ_S: Final = 60.0
"""How long trimming spares the events of a response in progress; a stalled reader is not waited for any longer."""
FIRST_HEADER: Final = "veilmq-first-offset"
START_HEADER: Final = "veilmq-start-offset"
NEXT_HEADER: Final = "veilmq-next-offset"
EPOCH_HEADER: Final = "veilmq-epoch"

_Written = Callable[[View, int, int, Scope], bytes]
"""The events of [start, stop) that a caller may see, in the answer's form."""


class Feed:
    """Reads the service's store."""

    def __init__(self, service: Service, copies: Copies) -> None:
        self._service = service
        self._copies = copies
        self._epoch = ""

    def routes(self) -> list[Route]:
        """All routes of this file."""
        return [
            Route("/api/v1/events", self.events, methods=["GET"]),
            Route("/api/v1/trace/{message}", self.trace, methods=["GET"]),
            Route("/api/v1/snapshot", self.snapshot, methods=["GET"]),
            Route("/api/v1/backup", self.backup, methods=["POST"]),
        ]

    def _scope(self, request: Request) -> Scope:
        caller = caller_of(request)
        caller.check(Action.EVENTS)
        return Scope(caller.key)

    async def events(self, request: Request) -> Response:
        """Events from an offset on, as JSON lines or as an Arrow stream."""
        asked = asyncio.get_running_loop().time()
        scope = self._scope(request)
        wanted = inputs.convert(members_of(request), inputs.EventsInput)
        scope = scope._replace(wanted=wanted.chosen())
        arrow = columns.is_wanted(",".join(request.headers.getlist("accept")))
        if arrow and not columns.available():
            raise Refused(406, "not_acceptable", "Arrow needs the extra `arrow`: pip install 'veilmq[arrow]'")
        start, first, following = await run_in_threadpool(self._find_held, wanted.start, max(wanted.hold, _READ_S))
        if start >= following and wanted.follow:
            first, following = await self._wait(start, wanted.follow)
            caller = caller_of(request).after_waiting(self._service.keyring)
            caller.check(Action.EVENTS)
            scope = scope._replace(key=caller.key)
        early_s = asked + min(_GATHER_S, wanted.follow) - asyncio.get_running_loop().time()
        if early_s > 0 and start < following < start + wanted.limit:
            await asyncio.sleep(early_s)
            _, first, following = await run_in_threadpool(self._find, "next")
        stop = min(start + wanted.limit, following)
        headers = {
            FIRST_HEADER: str(first),
            START_HEADER: str(start),
            NEXT_HEADER: str(stop),
            EPOCH_HEADER: self._epoch,
        }
        if arrow:
            return stream(in_thread(self._arrow(start, stop, scope)), columns.MEDIA_TYPE, headers)
        return stream(in_thread(self._lines(start, stop, scope)), JSON_LINES, headers)

    def _find_held(self, wanted: str, seconds: float) -> Range:
        """Find the range and protect it from trimming for that long, within the bounds of `ReadPins`. Raises as
        `find_start`."""
        if wanted == "next":
            return self._find(wanted)
        # Held before it is looked for; and what a batch trims that is not committed yet is still seen.
        left = self._service.reader.hold(int(wanted) if wanted.isdecimal() else 0, seconds)
        found = self._find(wanted)
        if found.start >= left:
            return found
        if wanted == "first":
            return found._replace(start=left, first=left)
        raise HistoryTrimmed(left)

    def _find(self, wanted: str) -> Range:
        with self._service.reader.look() as view:
            if not self._epoch:  # it stays while the file is open
                _, _, self._epoch = view.head()
            return find_start(view, wanted)

    async def _wait(self, start: int, follow_s: float) -> tuple[int, int]:
        """Wait for an event at `start` or the timeout: (first offset, next offset)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + follow_s
        shell = self._service.shell
        followers = shell.stats.followers
        committed = asyncio.Event()
        followers.add(committed)
        try:
            found = await run_in_threadpool(self._find, "next")
            while (
                found.following <= start
                and loop.time() < deadline
                and shell.broken is None
                and not shell.stats.dismissed
            ):
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(_FOLLOW_LOOK_S, deadline - loop.time())):
                        await committed.wait()
                committed.clear()
                found = await run_in_threadpool(self._find, "next")
        finally:
            followers.discard(committed)
        return found.first, found.following

    def _lines(self, start: int, stop: int, scope: Scope) -> Iterator[bytes]:
        return self._pieces(event_lines, start, stop, scope)

    def _arrow(self, start: int, stop: int, scope: Scope) -> Iterator[bytes]:
        written = columns.ArrowStream()
        yield from self._pieces(written.batch, start, stop, scope)
        yield written.end()

    def _pieces(self, written: _Written, start: int, stop: int, scope: Scope) -> Iterator[bytes]:
        """[start, stop) a piece at a time; between two of them no view is held, and trimming spares the next.
        Raises HistoryTrimmed if it did not, as on a low disk."""
        while start < stop:
            with self._service.reader.look() as view:
                end = piece_end(view, start, min(stop, start + ROWS_A_PIECE))
                piece = written(view, start, end, scope)
            start = end
            self._service.reader.hold(start, _READ_S)
            yield piece

    async def trace(self, request: Request) -> Response:
        """All events of one message."""
        scope = self._scope(request)
        message = inputs.message_id(request.path_params["message"])
        wanted = inputs.convert(members_of(request), inputs.TraceInput)
        found = await run_in_threadpool(self._trace, message, wanted.scan, scope)
        return answer(found)

    def _trace(self, message: bytes, scan_max: int, scope: Scope) -> dict[str, object]:
        with self._service.reader.look() as view:
            found = trace(view, message, scan_max, scope)
        shown = {"complete": found.complete, "scanned": found.scanned, "events": found.events}
        return {"message": id_text(message)} | shown

    async def snapshot(self, request: Request) -> Response:
        """Queues and messages as they are at one offset, as JSON lines."""
        scope = self._scope(request)
        reader = self._service.reader
        if reader.disk_low:
            raise DiskLow(free_bytes=reader.directory.free_bytes())
        copy = await self._copies.make(partial(self._snapshot_file, scope))
        return stream(copy.parts(), JSON_LINES)

    def _snapshot_file(self, scope: Scope) -> IO[bytes]:
        reader = self._service.reader
        with ExitStack() as opened:
            file = opened.enter_context(tempfile.TemporaryFile(dir=reader.directory.path, buffering=PIECE_BYTES))
            with reader.look() as view:
                lines, synced = snapshot_lines(view, scope), SyncedInPieces(file)
                while some := list(islice(lines, _LINES_A_LOOK)):
                    if reader.disk_low:
                        raise DiskLow(free_bytes=reader.directory.free_bytes())
                    synced.write(b"".join(some))
            file.seek(0)
            opened.pop_all()
        return file

    async def backup(self, request: Request) -> Response:
        """The whole database as a file, with a fresh receipt key and epoch (`Reader.backup`)."""
        caller_of(request).check(Action.BACKUP)
        reader = self._service.reader
        size_bytes = reader.database_bytes()
        if reader.directory.free_bytes() < size_bytes + reader.directory.floor_bytes():
            raise DiskLow(free_bytes=reader.directory.free_bytes())
        copy = await self._copies.make(reader.backup)
        headers = {"content-length": str(os.fstat(copy.file.fileno()).st_size)}
        return stream(copy.parts(), "application/vnd.sqlite3", headers)
