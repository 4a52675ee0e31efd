"""Routes of jobs: start, list, show, cancel; and the list of SQS's move tasks.

Strategy: a job is a row of the store, so starting and cancelling are commands that act once (api/operator.py), and the
rest reads. There are few, so a page is a walk over all.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.answers import answer, body_of, caller_of, carry_out, listing_of
from veilmq.admin.api import Refused, inputs, jobs, operator
from veilmq.admin.api.views import shown_move
from veilmq.admin.history import all_moves, covers
from veilmq.admin.service import Service, home_region
from veilmq.model.messages import id_text
from veilmq.model.moves import Act, JobInfo, MoveInfo
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueKey
from veilmq.server.port import may_lead
from veilmq.store import Reader

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
        return await self._page(request, "jobs", jobs.all_jobs, jobs.shown_job)

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
            and jobs.is_behind(each, wanted.after)
            and caller.may(Action.DESCRIBE_QUEUE, each.source.account, each.source.name)
        ]
        page, more = found[: wanted.limit], len(found) > wanted.limit
        after = jobs.place_of(page[-1]) if more else None
        return answer({name: [show(each) for each in page], "more": more, "after": after})

    async def start(self, request: Request) -> Response:
        """Start a job: 201 with its first state."""
        caller = caller_of(request)
        wanted = inputs.decode(await body_of(request), inputs.JobInput)
        queue = self._queue(request, wanted.queue)
        caller.check(jobs.ACTIONS[wanted.act], queue.account, queue.name)
        if wanted.filter.text is not None:
            caller.check(Action.PEEK, queue.account, queue.name)
            caller.check_bodies()
        command = jobs.starting(caller.origin, queue, wanted)
        if caller.key is not None and not may_lead(caller.key, jobs.ACTIONS[wanted.act], command):
            raise Refused(403, "not_granted", f"the key was not granted {Action.SEND} where messages would go")
        asked = operator.Asked("start_job", str(queue), wanted)
        outcomes, headers = await carry_out(request, self._service.shell, asked, [command])
        return answer(jobs.shown_outcome(outcomes), 201, headers)

    async def shown(self, request: Request) -> Response:
        """One job."""
        return answer(jobs.shown_job(await self._job(request)))

    async def cancel(self, request: Request) -> Response:
        """End a job: what it did stays done."""
        caller = caller_of(request)
        inputs.decode(await body_of(request), inputs.Nothing)
        job = await self._job(request)
        act = job.act if isinstance(job, JobInfo) else Act.REDRIVE
        caller.check(jobs.ACTIONS[act], job.source.account, job.source.name)
        asked = operator.Asked("cancel_job", id_text(job.id), inputs.Nothing())
        commands = [jobs.cancelling(caller.origin, job)]
        outcomes, headers = await carry_out(request, self._service.shell, asked, commands)
        return answer(jobs.shown_outcome(outcomes, id_text(job.id)), headers=headers)

    async def _job(self, request: Request) -> jobs.AnyJob:
        """The job that the path names, if the caller may see it."""
        wanted = inputs.message_id(request.path_params["job"], "job")
        caller = caller_of(request)
        caller.check(Action.DESCRIBE_QUEUE)
        job = await run_in_threadpool(jobs.find_job, self._service.reader, wanted)
        if job is None or not caller.may(Action.DESCRIBE_QUEUE, job.source.account, job.source.name):
            raise jobs.missing(request.path_params["job"])
        return job

    def _queue(self, request: Request, given: str | inputs.KeyInput) -> QueueKey:
        if not isinstance(given, str):
            return QueueKey(given.account, given.region, given.name)
        account = caller_of(request).whose(None)
        return QueueKey(account, home_region(self._service.keyring, account), given)
