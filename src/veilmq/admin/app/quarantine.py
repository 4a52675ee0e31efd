"""Routes of the damaged messages that the store set apart. `POST .../quarantine/drop` is in the table of operations."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.answers import answer, caller_of, members_of
from veilmq.admin.api import inputs
from veilmq.admin.history.quarantine import quarantine_page
from veilmq.admin.history.reading import covers
from veilmq.admin.service import Service, home_region
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueKey


class Quarantine:
    """The routes."""

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
        return await self._page(request, bodies=True)

    async def _page(self, request: Request, *, bodies: bool) -> Response:
        caller = caller_of(request)
        asked = inputs.convert(members_of(request), inputs.QuarantineInput)
        account = caller.whose(asked.account)
        caller.check(Action.PEEK, account)
        region = asked.region
        if region is None and account != "*":
            region = home_region(self._service.keyring, account)

        def wanted(queue: QueueKey) -> bool:
            is_covered = covers(queue, account, region, asked.prefix)
            return is_covered and caller.may(Action.PEEK, queue.account, queue.name)

        reader = self._service.reader
        return answer(await run_in_threadpool(quarantine_page, reader, wanted, asked.after, asked.limit, bodies=bodies))
