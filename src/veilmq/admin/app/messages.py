"""Routes of messages: where one is and what it holds, its trace, and the damaged ones that the store set apart.

`POST .../quarantine/drop` is in the table of operations.
"""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.answers import answer, caller_of, listing_of, members_of
from veilmq.admin.api import inputs
from veilmq.admin.history import Scope, covers
from veilmq.admin.history.messages import Caller, find_message, find_sends, quarantine_page
from veilmq.admin.history.trace import shown_trace
from veilmq.admin.service import Service
from veilmq.admin.timeouts.kept import Timeouts
from veilmq.model.errors import VeilError
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueKey


class Messages:
    """The routes of one message."""

    def __init__(self, service: Service, timeouts: Timeouts) -> None:
        self._service = service
        self._timeouts = timeouts

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/messages", self.sent, methods=["GET"]),
            Route("/api/v1/messages/{message}", self.message, methods=["GET"]),
            Route("/api/v1/trace/{message}", self.trace, methods=["GET"]),
        ]

    async def message(self, request: Request) -> Response:
        """The message in every queue that holds it. Bodies are shown once the history has recorded who reads them."""
        caller = caller_of(request)
        caller.check(Action.PEEK)
        message = inputs.message_id(request.path_params["message"])
        wanted = inputs.convert(members_of(request), inputs.FindInput)
        scope = Scope(caller.key, Action.PEEK, bodies=caller.bodies)
        if wanted.bodies:
            caller.check_bodies()
        looking = Caller(caller.origin, self._service.shell.now())
        found = await run_in_threadpool(find_message, self._service.reader, message, wanted, scope, looking)
        if found.peeks:
            for outcome in await self._service.shell.call(*found.peeks):
                if isinstance(outcome, VeilError):  # the queue was deleted meanwhile
                    raise outcome
        return answer(found.shown)

    async def sent(self, request: Request) -> Response:
        """The messages that were sent with a deduplication id."""
        caller = caller_of(request)
        caller.check(Action.PEEK)
        wanted = inputs.convert(members_of(request), inputs.SendsInput)
        scope = Scope(caller.key, Action.PEEK)
        return answer(await run_in_threadpool(find_sends, self._service.reader, wanted, scope))

    async def trace(self, request: Request) -> Response:
        """All events of one message."""
        caller = caller_of(request)
        caller.check(Action.EVENTS)
        message = inputs.message_id(request.path_params["message"])
        wanted = inputs.convert(members_of(request), inputs.TraceInput)
        return answer(
            await run_in_threadpool(self._trace, message, wanted.scan, Scope(caller.key, bodies=caller.bodies))
        )

    def _trace(self, message: bytes, scan_max: int, scope: Scope) -> dict[str, Any]:
        with self._service.reader.look() as view:
            now = self._service.shell.now()
            return shown_trace(view, message, scan_max, scope, now, lambda queue: self._timeouts.of(view, queue, now))


class Quarantine:
    """The routes of the quarantine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/quarantine", self.listed, methods=["GET"]),
            Route("/api/v1/quarantine/export", self.exported, methods=["GET"]),
        ]

    async def listed(self, request: Request) -> Response:
        """A page of messages in quarantine, without their bodies."""
        return await self._page(request, bodies=False)

    async def exported(self, request: Request) -> Response:
        """The same with bodies and attributes."""
        caller_of(request).check_bodies()
        return await self._page(request, bodies=True)

    async def _page(self, request: Request, *, bodies: bool) -> Response:
        keys, caller = self._service.keyring, caller_of(request)
        asked, account, region = listing_of(request, keys, Action.PEEK, inputs.QuarantineInput)

        def wanted(queue: QueueKey) -> bool:
            is_covered = covers(queue, account, region, asked.prefix)
            return is_covered and caller.may(Action.PEEK, queue.account, queue.name)

        reader = self._service.reader
        return answer(await run_in_threadpool(quarantine_page, reader, wanted, asked.after, asked.limit, bodies=bodies))
