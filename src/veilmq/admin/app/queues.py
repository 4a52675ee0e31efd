"""Routes of one queue and of the list of queues; and of topics with their subscriptions: show them, and delete topics.

Strategy: topics are few and in memory, so a page is a walk over them. The waiting pushes of a subscription are counted
in its hidden queue, whose name no other route accepts, and the push room knows the health of its endpoint.
"""

import asyncio
from collections import Counter
from functools import partial
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin import holders
from veilmq.admin.access import Caller
from veilmq.admin.answers import (
    answer,
    body_of,
    caller_now,
    caller_of,
    carry_out,
    command_id_of,
    gone_of,
    listing_of,
    members_of,
    no_command_id,
)
from veilmq.admin.api import Refused, inputs, operator, views
from veilmq.admin.api.operations import OF_BODIES, OF_MESSAGES, OPERATIONS, Asked, Operation
from veilmq.admin.api.views import shown_topic
from veilmq.admin.history import oldest_ages_us, topics_of
from veilmq.admin.history.messages import message_page, without_error
from veilmq.admin.past import PastInput, past_page
from veilmq.admin.rollups import LiveRates, QueuesInput, Wanted, live_part, rates_of, rollup_page, worst_page
from veilmq.admin.timeouts import TimeoutInput
from veilmq.admin.timeouts.cache import Timeouts, WrongInput
from veilmq.model.commands import AnyCommand, CreateQueue, DeleteTopic, ListQueues, Peek, Receive
from veilmq.model.errors import ParameterInvalid, TopicMissing, VeilError
from veilmq.model.outcomes import Outcome, QueuesListed, Received
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import TopicKey
from veilmq.server.auth import knows
from veilmq.server.cluster.admin import INPUT_ENDED
from veilmq.server.port import may_send_to_targets
from veilmq.server.service import Service
from veilmq.store.reader import QueueState

_PATH = "/api/v1/queues/{account}/{region}/{name}"


class Queues:
    """Runs operations on the service's shell. `commands` counts them by type, for the metrics."""

    def __init__(self, service: Service, timeouts: Timeouts) -> None:
        self._service = service
        self._timeouts = timeouts
        self.commands: Counter[type] = Counter()
        self._looking_back = asyncio.Lock()
        self._estimating = asyncio.Lock()

    def routes(self) -> list[Route]:
        """All routes below /api/v1/queues."""
        operations = [
            Route(_PATH + operation.suffix, self._endpoint(operation), methods=[operation.method])
            for operation in OPERATIONS.values()
        ]
        return [
            Route("/api/v1/queues", self.listed, methods=["GET"]),
            Route("/api/v1/worst", self.worst, methods=["GET"]),
            Route("/api/v1/timeouts", self.wrong_timeouts, methods=["GET"]),
            Route("/api/v1/failures", self.all_failed, methods=["GET"]),
            Route(_PATH + "/messages", self.page, methods=["GET"]),
            Route(_PATH + "/holders", self.held, methods=["GET"]),
            Route(_PATH + "/blocked", self.blocked, methods=["GET"]),
            Route(_PATH + "/failures", self.failed, methods=["GET"]),
            Route(_PATH + "/rollups", self.rolled_up, methods=["GET"]),
            Route(_PATH + "/past", self.past, methods=["GET"]),
            Route(_PATH + "/timeout", self.timeout, methods=["GET"]),
            *operations,
        ]

    async def listed(self, request: Request) -> Response:
        """A page of queues by name: those of one account and region that the caller may see, or all."""
        keys, caller = self._service.keyring, caller_of(request)
        wanted, account, region = listing_of(request, keys, Action.LIST_QUEUES, QueuesInput)
        everything = account == "*"
        command = ListQueues(
            origin=caller.origin,
            account=None if everything else account,
            region=region,
            prefix=wanted.prefix,
            after=wanted.after,
            count_max=wanted.count_max,
            granted=None if caller.key is None else caller.key.patterns(Action.LIST_QUEUES),
        )
        (outcome,) = await self._run(request, [command])
        if isinstance(outcome, VeilError):
            raise outcome
        assert isinstance(outcome, QueuesListed)
        by_key = self._service.reader.queues
        lines = [(queue, list(queue.ready)) for info in outcome.queues if (queue := by_key.get(info.key)) is not None]
        reader, now = self._service.reader, self._service.shell.now()
        live = LiveRates.of(reader, outcome.queues, now) if wanted.minutes else None
        last = outcome.queues[-1].key if outcome.more else None
        after = None if last is None else str(last) if everything else last.name

        def shown() -> Response:
            ages = oldest_ages_us(reader, lines, now)
            queues = [views.shown_listed(info, ages.get(info.incarnation)) for info in outcome.queues]
            if live is not None:
                rates = rates_of(reader, live, wanted.minutes)
                queues = [each | {"rates": rates[each["incarnation"]]} for each in queues]
            return answer({"queues": queues, "more": outcome.more, "after": after})

        return await run_in_threadpool(shown)  # a thousand queues take some 10 ms

    async def page(self, request: Request) -> Response:
        """A page of one queue's messages, without their bodies."""
        key = self._key(request, Action.PEEK)
        wanted = inputs.convert(members_of(request), inputs.PageInput)
        caller = caller_of(request)
        if wanted.text is not None:
            caller.check_bodies()
        now = self._service.shell.now()
        page = await run_in_threadpool(message_page, self._service.reader, key, wanted, now)
        return answer(
            page if caller.bodies else page | {"messages": [without_error(each) for each in page["messages"]]}
        )

    async def held(self, request: Request) -> Response:
        """A page of one queue's messages in flight with their holders, and who waits to receive from it."""
        key = self._key(request, Action.PEEK)
        wanted = inputs.convert(members_of(request), holders.HoldersInput)
        shell = self._service.shell
        waits = shell.engine.waiting.who_waits_for(key)
        shown = await run_in_threadpool(holders.holder_page, self._service.reader, key, wanted, shell.now())
        return answer(shown | {"waiters": holders.shown_waiters(waits)})

    async def blocked(self, request: Request) -> Response:
        """What waits in one FIFO queue behind messages in flight or delayed, and who holds those."""
        key = self._key(request, Action.PEEK)
        wanted = inputs.convert(members_of(request), holders.BlockedInput)
        now = self._service.shell.now()
        return answer(await run_in_threadpool(holders.blocked_page, self._service.reader, key, wanted, now))

    async def worst(self, request: Request) -> Response:
        """The worst queues by some measure."""
        caller = caller_of(request)
        asked = inputs.convert(members_of(request), inputs.WorstInput)
        account = caller.whose(asked.account)
        caller.check(Action.LIST_QUEUES, account)
        wanted = Wanted(asked, lambda key: caller.may(Action.LIST_QUEUES, key.account, key.name))
        return answer(await worst_page(self._service.reader, account, wanted, self._service.shell.now()))

    async def failed(self, request: Request) -> Response:
        """Why messages of one queue failed. Who may not read bodies does not see what errors said."""
        key = self._key(request, Action.DESCRIBE_QUEUE)
        wanted = inputs.convert(members_of(request), holders.FailuresInput)
        live = live_part(self._service.reader, key, self._service.shell.now())
        caller = caller_of(request)
        lines = caller.bodies and caller.may(Action.PEEK, key.account, key.name)
        return answer(await run_in_threadpool(holders.failure_page, self._service.reader, live, wanted, lines=lines))

    async def all_failed(self, request: Request) -> Response:
        """Why messages failed, over all queues that the caller may see."""
        caller, reader = caller_of(request), self._service.reader
        wanted = inputs.convert(members_of(request), holders.AllFailuresInput)
        account = caller.whose(wanted.account)
        caller.check(Action.DESCRIBE_QUEUE, account)
        rights = holders.Rights(
            lambda key: caller.may(Action.DESCRIBE_QUEUE, key.account, key.name),
            lambda key: caller.bodies and caller.may(Action.PEEK, key.account, key.name),
        )
        unstored = holders.Unstored.of(reader, self._service.shell.now())
        return answer(await run_in_threadpool(holders.all_failures_page, reader, unstored, account, wanted, rights))

    async def rolled_up(self, request: Request) -> Response:
        """What happened to one queue, by minute or hour."""
        key = self._key(request, Action.DESCRIBE_QUEUE)
        wanted = inputs.convert(members_of(request), inputs.RollupsInput)
        live = live_part(self._service.reader, key, self._service.shell.now())
        return answer(await run_in_threadpool(rollup_page, self._service.reader, live, wanted))

    async def past(self, request: Request) -> Response:
        """The queue at an instant, and what changed from then on. One at a time, for it may take seconds of CPU."""
        key = self._key(request, Action.EVENTS)
        wanted = inputs.convert(members_of(request), PastInput)
        async with self._looking_back:
            now = self._service.shell.now()
            return answer(await run_in_threadpool(past_page, self._service.reader, key, wanted, now))

    async def timeout(self, request: Request) -> Response:
        """Whether one queue's visibility timeout is right. One at a time, for it may take some 200 ms of CPU."""
        key = self._key(request, Action.DESCRIBE_QUEUE)
        wanted = inputs.convert(members_of(request), TimeoutInput)
        async with self._estimating:
            queue = live_part(self._service.reader, key, self._service.shell.now()).queue
            return answer(await run_in_threadpool(self._estimated, queue, wanted))

    async def wrong_timeouts(self, request: Request) -> Response:
        """Queues whose visibility timeout is clearly wrong, as far as they were looked at."""
        caller = caller_of(request)
        wanted = inputs.convert(members_of(request), WrongInput)
        account = caller.whose(wanted.account)
        caller.check(Action.DESCRIBE_QUEUE, account)
        now = self._service.shell.now()
        return answer(
            await self._timeouts.wrong(
                account, wanted, lambda key: caller.may(Action.DESCRIBE_QUEUE, key.account, key.name), now
            )
        )

    def _estimated(self, queue: QueueState, wanted: TimeoutInput) -> dict[str, Any]:
        with self._service.reader.look() as view:
            return self._timeouts.page(view, queue, self._service.shell.now(), wanted)

    def _endpoint(self, operation: Operation) -> Any:
        async def endpoint(request: Request) -> Response:
            key = self._key(request, operation.action)
            if operation.method == "GET":
                wanted = inputs.convert(members_of(request), operation.shape)
            else:
                check = partial(Caller.check, action=operation.action, account=key.account, queue=key.name)
                wanted = inputs.decode(await body_of(request, check), operation.shape)
            caller = caller_of(request)
            asked = Asked(key, caller.origin, self._service.shell.arrived())
            commands = list(operation.plan(asked, wanted))
            if isinstance(commands[0], CreateQueue):
                self._check_known(key.account)
            if caller.key is not None and not may_send_to_targets(caller.key, operation.action, commands[0]):
                raise Refused(403, "not_granted", f"the key was not granted {Action.SEND} where messages would go")
            if operation.name == "receive":
                no_command_id(request)
            if operation.name in OF_BODIES:
                caller.check_bodies()
            unnamed = operation.name in OF_MESSAGES and command_id_of(request) is None
            if operation.method == "GET" or unnamed:
                shown = operation.show(await self._run(request, commands))
                if operation.name == "describe":
                    now = self._service.shell.now()
                    shown["blocked"] = await run_in_threadpool(holders.blocked_counts, self._service.reader, key, now)
                return answer(shown)
            self.commands[type(commands[0])] += len(commands)
            record = operator.Asked(operation.name, str(key), wanted)
            outcomes, headers = await carry_out(request, self._service.shell, record, commands)
            shown = operation.show(outcomes)
            return answer(shown, 201 if shown.get("new") else 200, headers)

        return endpoint

    def _key(self, request: Request, action: Action) -> QueueKey:
        """The queue that the path names, if the caller may do the action on it."""
        parts = request.path_params
        key = inputs.queue_key(parts["account"], parts["region"], parts["name"])
        caller_of(request).check(action, key.account, key.name)
        return key

    def _check_known(self, account: str) -> None:
        """Raises ParameterInvalid if no key could ever reach a queue of the account."""
        if not knows(self._service.keyring, account):
            reason = f"the credentials file has no account {account}, so no key could reach the queue"
            raise ParameterInvalid(parameter="account", reason=reason)

    async def _run(self, request: Request, commands: list[AnyCommand]) -> list[Outcome]:
        """The commands' outcomes. If the client hangs up, a receive ends and its messages are released; if it only ends
        its input, the receive waits no longer. Raises Refused if the caller may not receive by then."""
        shell = self._service.shell
        first = commands[0]
        self.commands[type(first)] += len(commands)
        if isinstance(first, Peek):
            return [await shell.query(first)]
        if not isinstance(first, Receive) or not first.wait_us:
            return await shell.call(*commands)
        call = asyncio.ensure_future(shell.receive(first, request.scope[INPUT_ENDED]))
        gone = asyncio.ensure_future(gone_of(request))

        def end_if_refused() -> None:
            try:
                _check_receive(request, first)
            except Refused:
                call.cancel()

        self._service.on_reload.add(end_if_refused)
        try:
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._service.on_reload.discard(end_if_refused)
            gone.cancel()
            if not call.done():
                call.cancel()
        outcome = call.result()[0] if call.done() and not call.cancelled() else Received([])
        if isinstance(outcome, Received):
            if gone.done() and not gone.cancelled():
                shell.undeliver(first, outcome)
            else:
                try:
                    _check_receive(request, first)
                except Refused:
                    shell.undeliver(first, outcome)
                    raise
        return [outcome]


def _check_receive(request: Request, command: Receive) -> None:
    caller_now(request).check(Action.RECEIVE, command.queue.account, command.queue.name)


_TOPIC: Final = "/api/v1/topics/{account}/{region}/{name}"


class Topics:
    """The routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/topics", self.listed, methods=["GET"]),
            Route(_TOPIC, self.described, methods=["GET"]),
            Route(_TOPIC, self.delete, methods=["DELETE"]),
        ]

    async def listed(self, request: Request) -> Response:
        """A page of topics by name, each with its subscriptions; account `*` means all."""
        wanted, account, region = listing_of(request, self._service.keyring, Action.DESCRIBE_TOPICS, inputs.ListInput)
        reader = self._service.reader
        after = _after_topic(wanted.after, account, region)
        caller = caller_of(request)
        found = [
            key
            for key in topics_of(reader, account, region, wanted.prefix)
            if str(key) > after and caller.may(Action.DESCRIBE_TOPICS, key.account, key.name)
        ]
        page, more = found[: wanted.limit], len(found) > wanted.limit
        shown = [shown_topic(reader, reader.topics[key], self._service.push_room) for key in page]
        last = None if not more else str(page[-1]) if account == "*" else page[-1].name
        return answer({"topics": shown, "more": more, "after": last})

    async def described(self, request: Request) -> Response:
        """One topic."""
        key = self._key(request, Action.DESCRIBE_TOPICS)
        topic = self._service.reader.topics.get(key)
        if topic is None:
            raise TopicMissing(topic=str(key))
        return answer(shown_topic(self._service.reader, topic, self._service.push_room))

    async def delete(self, request: Request) -> Response:
        """Delete one topic, its subscriptions and its waiting pushes."""
        key = self._key(request, Action.MANAGE_TOPICS)
        command = DeleteTopic(topic=key, origin=caller_of(request).origin)
        asked = operator.Asked("remove_topic", str(key), inputs.Nothing())
        (outcome,), headers = await carry_out(request, self._service.shell, asked, [command])
        if isinstance(outcome, VeilError):
            raise outcome
        return answer({}, headers=headers)

    def _key(self, request: Request, action: Action) -> TopicKey:
        """The topic that the path names, if the caller may do the action."""
        parts = request.path_params
        key = inputs.queue_key(parts["account"], parts["region"], parts["name"])
        caller_of(request).check(action, key.account, key.name)
        return TopicKey(key.account, key.region, key.name)


def _after_topic(after: str, account: str, region: str | None) -> str:
    return after if account == "*" or not after else f"{account}/{region}/{after}"
