"""Routes of messages: where one is and what it holds, its trace, and the damaged ones in quarantine; and of
jobs, which act on many: start, list, show, cancel; and the list of SQS's move tasks.

Strategy: a job is a row of the store, so starting and cancelling are commands that act once (api/operator.py), and the
rest reads. There are few, so a page is a walk over all. `POST .../quarantine/drop` is in the table of operations.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.answers import answer, body_of, caller_of, carry_out, listing_of, members_of
from veilmq.admin.api import Refused, inputs, operator
from veilmq.admin.api.views import shown_move
from veilmq.admin.history import Scope, all_moves, covers
from veilmq.admin.history.messages import Caller, find_message, find_sends, quarantine_page
from veilmq.admin.history.trace import shown_trace
from veilmq.admin.timeouts.cache import Timeouts
from veilmq.model.errors import VeilError
from veilmq.model.messages import id_text
from veilmq.model.moves import Act, JobInfo, MoveInfo
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueKey
from veilmq.server.auth import home_region
from veilmq.server.port import may_send_to_targets
from veilmq.server.service import Service
from veilmq.store import Reader


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


J = TypeVar("J", JobInfo | MoveInfo, MoveInfo)


class Jobs:
    """The routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/jobs", self.listed, methods=["GET"]),
            Route("/api/v1/jobs", self.start, methods=["POST"]),
            Route("/api/v1/jobs/{job}", self.shown, methods=["GET"]),
            Route("/api/v1/jobs/{job}/cancel", self.cancel, methods=["POST"]),
            Route("/api/v1/moves", self.moves, methods=["GET"]),
        ]

    async def listed(self, request: Request) -> Response:
        """A page of the jobs of all queues that the caller may see, newest first; move tasks are among them."""
        return await self._page(request, "jobs", operator.all_jobs, operator.shown_job)

    async def moves(self, request: Request) -> Response:
        """The same of the latest move tasks alone."""
        return await self._page(request, "moves", all_moves, shown_move)

    async def _page(
        self, request: Request, name: str, read: Callable[[Reader], Sequence[J]], show: Callable[[J], dict[str, Any]]
    ) -> Response:
        keys, reader, caller = self._service.keyring, self._service.reader, caller_of(request)
        wanted, account, region = listing_of(request, keys, Action.DESCRIBE_QUEUE, inputs.MovesInput)
        found = [
            each
            for each in await run_in_threadpool(read, reader)
            if covers(each.source, account, region, wanted.prefix)
            and operator.is_behind(each, wanted.after)
            and caller.may(Action.DESCRIBE_QUEUE, each.source.account, each.source.name)
        ]
        page, more = found[: wanted.limit], len(found) > wanted.limit
        after = operator.place_of(page[-1]) if more else None
        return answer({name: [show(each) for each in page], "more": more, "after": after})

    async def start(self, request: Request) -> Response:
        """Start a job: 201 with its first state."""
        wanted = inputs.decode(await body_of(request), inputs.JobInput)
        caller = caller_of(request)
        queue = self._queue(request, wanted.queue)
        caller.check(operator.ACTIONS[wanted.act], queue.account, queue.name)
        if wanted.filter.text is not None:
            caller.check(Action.PEEK, queue.account, queue.name)
            caller.check_bodies()
        command = operator.starting(caller.origin, queue, wanted)
        if caller.key is not None and not may_send_to_targets(caller.key, operator.ACTIONS[wanted.act], command):
            raise Refused(403, "not_granted", f"the key was not granted {Action.SEND} where messages would go")
        asked = operator.Asked("start_job", str(queue), wanted)
        outcomes, headers = await carry_out(request, self._service.shell, asked, [command])
        return answer(operator.shown_outcome(outcomes), 201, headers)

    async def shown(self, request: Request) -> Response:
        """One job."""
        return answer(operator.shown_job(await self._job(request)))

    async def cancel(self, request: Request) -> Response:
        """End a job: what it did stays done."""
        inputs.decode(await body_of(request), inputs.Nothing)
        caller = caller_of(request)
        job = await self._job(request)
        act = job.act if isinstance(job, JobInfo) else Act.REDRIVE
        caller.check(operator.ACTIONS[act], job.source.account, job.source.name)
        asked = operator.Asked("cancel_job", id_text(job.id), inputs.Nothing())
        commands = [operator.cancelling(caller.origin, job)]
        outcomes, headers = await carry_out(request, self._service.shell, asked, commands)
        return answer(operator.shown_outcome(outcomes, id_text(job.id)), headers=headers)

    async def _job(self, request: Request) -> operator.AnyJob:
        """The job that the path names, if the caller may see it."""
        wanted = inputs.message_id(request.path_params["job"], "job")
        caller = caller_of(request)
        caller.check(Action.DESCRIBE_QUEUE)
        job = await run_in_threadpool(operator.find_job, self._service.reader, wanted)
        if job is None or not caller.may(Action.DESCRIBE_QUEUE, job.source.account, job.source.name):
            raise operator.missing(request.path_params["job"])
        return job

    def _queue(self, request: Request, given: str | inputs.KeyInput) -> QueueKey:
        if not isinstance(given, str):
            return QueueKey(given.account, given.region, given.name)
        account = caller_of(request).whose(None)
        return QueueKey(account, home_region(self._service.keyring, account), given)
