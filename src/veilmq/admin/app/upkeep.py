"""Routes for operators: a check of everything, and the clock: its steps are accepted, and tests may move it.

Strategy: a check is long and runs on a thread. Its response is JSON lines: each line is a step ({stage, done, total}),
and the last one the result or the error, because the status was sent long before. The clock moves only in development
mode.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin import answers
from veilmq.admin.api import Refused, inputs, operator, views
from veilmq.admin.history.copies import Copies
from veilmq.admin.service import Service
from veilmq.model.instant import DAY_US
from veilmq.model.settings.access import Action
from veilmq.store.directory import DatabaseFailed, Progress

_STEPS_KEPT_MAX: Final = 64
"""Steps kept for a slow reader; further ones are left out."""

_PAUSE_S: Final = 0.001

Step = Callable[[str, int, int], None]


class ClockInput(msgspec.Struct, forbid_unknown_fields=True):
    """How far to move the clock."""

    advance_us: Annotated[int, Meta(ge=1, le=400 * DAY_US)]


class Upkeep:
    """The routes."""

    def __init__(self, service: Service, copies: Copies) -> None:
        self._service = service
        self._copies = copies

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/check", self.check, methods=["POST"]),
            Route("/api/v1/clock", self.clock, methods=["GET"]),
            Route("/api/v1/clock", self.move_clock, methods=["POST"]),
            Route("/api/v1/clock/accept", self.accept_clock, methods=["POST"]),
        ]

    async def check(self, request: Request) -> Response:
        """Check everything, as `veilmq check` does."""
        answers.caller_of(request).check(Action.BACKUP)
        inputs.decode(await answers.body_of(request) or b"{}", inputs.Nothing)
        reader = self._service.reader

        def look(step: Progress) -> dict[str, Any]:
            report: dict[str, Any] = msgspec.to_builtins(reader.check(step))
            return report

        return answers.stream(_steps(look, self._copies), answers.JSON_LINES)

    async def clock(self, request: Request) -> Response:
        """The current instant of the lease clock, and the step that nobody has accepted yet."""
        answers.caller_of(request).check(Action.SETTINGS)
        return answers.answer({"now": self._service.clock.now(), "unaccepted_us": self._unaccepted_us()})

    async def accept_clock(self, request: Request) -> Response:
        """The machine's clock is right: let expire what only its step kept."""
        answers.caller_of(request).check(Action.SETTINGS)
        inputs.decode(await answers.body_of(request) or b"{}", inputs.Nothing)
        asked = operator.Asked("accept_clock", "clock", inputs.Nothing())
        commands = [self._service.clock.accepting()]
        (outcome,), headers = await answers.carry_out(request, self._service.shell, asked, commands)
        return answers.answer(views.shown_clock(outcome), headers=headers)

    def _unaccepted_us(self) -> int:
        return self._service.clock.unaccepted_us(self._service.reader.held_us)

    async def move_clock(self, request: Request) -> Response:
        """Move the clock: everything that becomes due has happened when this answers."""
        answers.caller_of(request).check(Action.SETTINGS)
        wanted = inputs.decode(await answers.body_of(request), ClockInput)
        answers.no_command_id(request)
        if self._service.keyring.checks:
            raise Refused(403, "clock_fixed", "the clock moves in development mode alone: start without --credentials")
        await self._service.shell.advance(self._service.clock, wanted.advance_us)
        return answers.answer({"now": self._service.clock.now()})


async def _steps(work: Callable[[Step], dict[str, Any]], copies: Copies) -> AsyncIterator[bytes]:
    """The steps of `work` while it runs on a thread, then its result. It waits for its turn to read."""
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def step(stage: str, done: int, total: int) -> None:
        if steps.qsize() < _STEPS_KEPT_MAX:
            loop.call_soon_threadsafe(steps.put_nowait, {"stage": stage, "done": done, "total": total})
        # Reading row by row takes the interpreter back before the loop gets it, so yield to the loop.
        time.sleep(_PAUSE_S)

    def run() -> dict[str, Any]:
        try:
            return {"result": work(step)}
        except (OSError, DatabaseFailed) as error:
            return {"error": "failed", "message": str(error)}

    async def in_turn() -> dict[str, Any]:
        async with copies.reading():
            return await run_in_threadpool(run)

    working = asyncio.ensure_future(in_turn())
    working.add_done_callback(lambda _: steps.put_nowait(None))
    while (shown := await steps.get()) is not None:
        yield msgspec.json.encode(shown) + b"\n"
    yield msgspec.json.encode(await working) + b"\n"
