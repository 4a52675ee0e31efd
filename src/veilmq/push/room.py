"""The push room: one task per subscription leases waiting messages; other tasks send them and record the result.

Strategy: the only durable state is a lease in the subscription's hidden queue. A task leases only as many messages as
its endpoint may take at once, so that a slow endpoint holds none that another could have. After a delivery the message
is deleted. After a failure its lease is extended until the next attempt is due. After the last attempt the store moves
it to the dead-letter queue as it records the attempt; without a dead-letter queue it is deleted.

Before changing it: a message whose server dies during a push comes back when its lease ends, with as many attempts left
as before. Attempts are counted by failures, each of which rotates the handle, and not by receives.

An error of a task is a bug: it is logged, and the task restarts, or its subscription would silently get no pushes.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Final, Protocol

import aiohttp

from veilmq.model.commands import (
    AfterExpiry,
    AnyCommand,
    Delete,
    DescribeQueue,
    DescribeSubscription,
    Extend,
    Origin,
    Receive,
    RecordPush,
)
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.messages import Delivery, Report, rotation_of
from veilmq.model.outcomes import Outcome, Received, SubscriptionDescribed
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import PushResult, SubscriptionSettings, TopicKey, hidden_queue
from veilmq.push.endpoints import EndpointState, EndpointStates, Health, delay_us, endpoint_of
from veilmq.push.network import (
    EndpointRefused,
    LocalExhaustion,
    LocalExhaustions,
    Lookups,
    Network,
    Resolve,
    local_exhaustion_of,
    resolve,
)
from veilmq.push.requests import NOT_TRIED, Attempt, PushRequests, Signer

IN_FLIGHT_MAX: Final = 256
TIMEOUT_S: Final = 5.0
LEASE_US: Final = 30 * SECOND_US
"""The lease of one attempt: several times its longest duration. It is extended while the message waits for its turn."""
KEEP_S: Final = 10.0
EXHAUSTION_S: Final = 5.0
"""How long pushes to an endpoint wait after local exhaustion put one off. That one does not count as an attempt."""
WAIT_US: Final = 20 * SECOND_US
ERROR_CHARACTERS_MAX: Final = 300
"""How much of a failure's text history and log keep: it may quote a whole response."""
_ENDED_US: Final = SECOND_US
LOOK_S: Final = 0.5
_CHANCES: Final = 1 << 20
_LOG_EVERY_S: Final = 60.0
PAUSE_S: Final = 10.0
"""From the error of a supervised task until its restart."""
_ORIGIN: Final = Origin("push", "push")

log = logging.getLogger("veilmq.push")

Subscription = tuple[TopicKey, str]
Leased = tuple[QueueKey, Delivery]


class Engine(Protocol):
    """Runs the room's commands; the server's shell."""

    async def call(self, *commands: AnyCommand) -> list[Outcome]:
        """Their outcomes."""

    def arrived(self) -> Instant:
        """The lease clock's current instant."""


class SupervisedTask:
    """One task, on the running loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, pause_s: float = PAUSE_S) -> None:
        """work: runs for ever. name: for the log. pause_s: from an error until the restart."""
        self._work = work
        self._name = name
        self._pause_s = pause_s
        self._over = False
        self._again: asyncio.TimerHandle | None = None
        self._begin()

    def cancel(self) -> None:
        """End the task."""
        self._over = True
        if self._again is not None:
            self._again.cancel()
        self._task.cancel()

    async def ended(self) -> None:
        """Wait until the task has ended after `cancel`."""
        await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s failed with an error and restarts in %g s", self._name, self._pause_s, exc_info=error)
        if not self._over:
            self._again = asyncio.get_running_loop().call_later(self._pause_s, self._begin)


class PushRoom:
    """Pushes from `start` to `stop`, on the running loop."""

    def __init__(
        self,
        engine: Engine,
        subscriptions: Callable[[], Mapping[Subscription, SubscriptionSettings]],
        signer: Signer,
        certificate_url: str,
        *,
        allowed: Sequence[Network] = (),
        documented_case: bool = False,
        wall: Callable[[], Instant],
        verify: bool = True,
        timeout_s: float = TIMEOUT_S,
        resolve: Resolve = resolve,
        look_s: float = LOOK_S,
        pause_s: float = PAUSE_S,
        exhaustion_s: float = EXHAUSTION_S,
    ) -> None:
        """subscriptions: the current push subscriptions; should return the same object while none has changed.

        allowed: networks beyond public ones that may be called. documented_case: send header names as the Java sample
        looks them up, not in lower case. verify: check TLS certificates. resolve: addresses of a name; it blocks, on a
        thread. look_s: how often the subscriptions are looked at. pause_s: how long a task that failed rests before it
        is restarted. exhaustion_s: see `EXHAUSTION_S`.
        """
        self._engine = engine
        self._subscriptions = subscriptions
        self._requests = PushRequests(
            signer, certificate_url, allowed, documented_case, wall, timeout_s, Lookups(resolve)
        )
        self._verify = verify
        self._timeout_s = timeout_s
        self._look_s = look_s
        self._wanted: Mapping[Subscription, SubscriptionSettings] = {}
        self._slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._pause_s = pause_s
        self._tasks: dict[Subscription, SupervisedTask] = {}
        self._held_up: dict[Subscription, str] = {}
        """URLs of tasks that wait because their endpoint may not be called yet."""
        self._sending: dict[asyncio.Task[None], Leased] = {}
        self._unsent: list[Leased] = []
        """Leased messages for which no task was started before the stop."""
        self._calling: set[asyncio.Task[None]] = set()
        """The tasks of `_sending` that have their turn."""
        self._bug_logged_until = 0.0
        self._exhaustion_s = exhaustion_s
        self._exhaustions = LocalExhaustions(2 * exhaustion_s)
        self.results: Counter[str] = Counter()
        """Attempts by `PushResult`."""

    async def start(self) -> None:
        """Start pushing."""
        self.endpoints = EndpointStates(self._verify)
        self._watching = SupervisedTask(self._watch, "the search for push subscriptions", self._pause_s)

    async def stop(self, grace_s: float = 0) -> None:
        """End the tasks. Messages that wait for their turn are released. A call in progress has `grace_s` to be
        answered. Then it is cut off and its lease expires, so that its message is pushed again."""
        waiting = {task: leased for task, leased in self._sending.items() if task not in self._calling}
        supervised = [self._watching, *self._tasks.values()]
        for each in supervised:
            each.cancel()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*(each.ended() for each in supervised), *waiting, return_exceptions=True)
        await self._release([*waiting.values(), *self._unsent])
        calling = list(self._calling)
        if calling:
            await asyncio.wait(calling, timeout=grace_s)
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)
        await self.endpoints.keep(frozenset())
        self._requests.close()

    async def _release(self, leased: Sequence[Leased]) -> None:
        """Release the messages, so that the next server can push them at once. If the store hangs or has failed, their
        leases expire instead."""
        if not leased:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._engine.call(*(self._extend(queue, message, 0) for queue, message in leased))

    def _extend(self, queue: QueueKey, message: Delivery, lease_us: int, report: Report | None = None) -> Extend:
        arrived = self._engine.arrived()
        return Extend(
            queue=queue, origin=_ORIGIN, handle=message.handle, lease_us=lease_us, arrived=arrived, report=report
        )

    def unavailable(self) -> dict[str, str]:
        """Endpoints that are called seldom because they fail, and their last error."""
        lines = self.endpoints.items()
        return {endpoint: each.health.last_error for endpoint, each in lines if not each.health.available}

    @property
    def calls_put_off(self) -> int:
        """Calls that local exhaustion put off; each is made later and does not count as an attempt."""
        return self._exhaustions.count

    def local_exhaustion(self) -> str | None:
        """The resource that this server lacks now, so that pushes wait; None: it lacks nothing."""
        return self._exhaustions.at(asyncio.get_running_loop().time())

    def state(self, url: str) -> dict[str, object]:
        """The health of a subscription's endpoint, as its owner sees it."""
        endpoint = endpoint_of(url)
        health = self.endpoints[endpoint].health if endpoint in self.endpoints else Health()
        return {
            "endpoint": endpoint,
            "available": health.available,
            "failures": health.failures,
            "pause_us": int(health.pause * SECOND_US),
            "last_error": health.last_error or None,
        }

    async def _watch(self) -> None:
        """Keep one task running for each push subscription."""
        seen: Mapping[Subscription, SubscriptionSettings] | None = None
        endpoints: frozenset[str] = frozenset()
        while True:
            wanted = self._subscriptions()
            if wanted is not seen:
                self._wanted = seen = wanted
                self._serve_all()
                endpoints = frozenset(endpoint_of(each.url) for each in wanted.values() if each.url is not None)
            await self.endpoints.keep(endpoints)
            await asyncio.sleep(self._look_s)

    def _serve_all(self) -> None:
        """End the tasks of deleted subscriptions, and start those of new ones.

        A subscription that was recreated with another URL starts afresh: the old endpoint's pause does not apply to it.
        """
        wanted, tasks = self._wanted, self._tasks
        moved = {each for each, url in self._held_up.items() if each in wanted and wanted[each].url != url}
        for gone in (tasks.keys() - wanted.keys()) | (moved & tasks.keys()):
            tasks.pop(gone).cancel()
        for each in wanted.keys() - tasks.keys():
            topic, name = each
            tasks[each] = SupervisedTask(partial(self._serve, each), f"pushing {topic}/{name}", self._pause_s)

    async def _serve(self, subscription: Subscription) -> None:
        """Lease and send the messages of one subscription, for ever."""
        topic, name = subscription
        queue = hidden_queue(topic, name)
        while True:
            settings = self._wanted.get(subscription)
            if settings is None or settings.url is None:
                await asyncio.sleep(self._look_s)
                continue
            free = await self._room(subscription, settings.url)
            receive = Receive(queue=queue, origin=_ORIGIN, count_max=free, lease_us=LEASE_US, wait_us=WAIT_US)
            (outcome,) = await self._engine.call(receive)
            if not isinstance(outcome, Received):
                await asyncio.sleep(self._look_s)  # the queue was just deleted, or the disk is full
            elif outcome.messages:
                await self._begin(subscription, queue, outcome.messages)

    async def _room(self, subscription: Subscription, url: str) -> int:
        """Wait until messages may be leased for the endpoint; return how many."""
        self._held_up[subscription] = url
        try:
            return await self.endpoints[endpoint_of(url)].room()
        finally:
            self._held_up.pop(subscription, None)

    async def _begin(self, subscription: Subscription, queue: QueueKey, messages: Sequence[Delivery]) -> None:
        """Start pushing leased messages to the subscription's current URL: it may have changed during the receive."""
        try:
            settings = await self._current(subscription)
        except asyncio.CancelledError:
            self._unsent += [(queue, message) for message in messages]
            raise
        if settings is None or settings.url is None:
            return  # the queue and its messages are gone
        endpoint = endpoint_of(settings.url)
        state = self.endpoints[endpoint]
        for message in messages:
            state.leased += 1
            task = asyncio.create_task(self._push(subscription, settings, queue, endpoint, state, message))
            self._sending[task] = queue, message
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        """Forget a push that has ended."""
        del self._sending[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a push failed with an error and is repeated when its lease ends", exc_info=error)

    async def _current(self, subscription: Subscription) -> SubscriptionSettings | None:
        """The subscription's settings at this moment; None if there is none."""
        topic, name = subscription
        (outcome,) = await self._engine.call(DescribeSubscription(topic=topic, origin=_ORIGIN, name=name))
        return outcome.info.settings if isinstance(outcome, SubscriptionDescribed) else None

    async def _push(
        self, subscription: Subscription, settings: SubscriptionSettings, queue: QueueKey, endpoint: str,
        state: EndpointState, message: Delivery,
    ) -> None:  # fmt: skip
        """Make one attempt, and act on its result."""
        try:
            waited = await self._turn(state, queue, message)
            task = asyncio.current_task()
            assert task is not None
            self._calling.add(task)
            task.add_done_callback(self._calling.discard)
            try:
                current = await self._current(subscription) if waited else settings
                if current is None or current.url != settings.url:
                    return  # the queue and its message are gone
                begun = perf_counter()
                try:
                    attempt = await self._attempt(state, subscription, current, message)
                except LocalExhaustion as lacking:
                    if not self._excuses(endpoint, state, lacking):
                        attempt = Attempt(None, str(lacking))
                    else:
                        await self._postpone(queue, message)
                        return
                else:
                    state.health.doubted_at = None
                took_us = int((perf_counter() - begun) * 1e6)
                if not attempt.ours:
                    self._record_health(endpoint, state, attempt.error)
            finally:
                state.sending -= 1
                self._slots.release()
                state.hand_out()
            await self._settle(current, queue, message, attempt, took_us)
        finally:
            state.leased -= 1
            state.hand_out()

    async def _turn(self, state: EndpointState, queue: QueueKey, message: Delivery) -> bool:
        """Wait until the endpoint may be called and the room has a free slot, and extend the lease meanwhile. Returns
        whether it had to wait."""
        if not state.must_wait(asyncio.get_running_loop().time()) and not self._slots.locked():
            state.sending += 1
            await self._slots.acquire()
            return False
        keeping = asyncio.create_task(self._keep(queue, message))
        try:
            await state.turn()
            try:
                await self._slots.acquire()
            except asyncio.CancelledError:
                state.sending -= 1
                state.hand_out()
                raise
        finally:
            keeping.cancel()
        return True

    async def _keep(self, queue: QueueKey, message: Delivery) -> None:
        """Extend the lease of a waiting message: two subscriptions together may lease more than their endpoint takes at
        once."""
        while True:
            await asyncio.sleep(KEEP_S)
            await self._engine.call(self._extend(queue, message, LEASE_US))

    async def _attempt(
        self, state: EndpointState, subscription: Subscription, settings: SubscriptionSettings, message: Delivery
    ) -> Attempt:
        """Make one call. Raises LocalExhaustion."""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                answered = partial(limit.reschedule, None)  # a status that came in time counts
                status = await self._requests.post(state, *subscription, settings, message, answered)
        except EndpointRefused as refused:
            return Attempt(None, str(refused))
        except TimeoutError:
            return Attempt(None, f"no answer within {self._timeout_s:g} s")
        except aiohttp.ClientResponseError as failure:
            reason = f"the endpoint did not answer in HTTP: {' '.join(failure.message.split())}"
            return Attempt(None, reason[:ERROR_CHARACTERS_MAX])
        except LocalExhaustion:
            raise
        except Exception as failure:  # the request's edge: even after a bug the next attempt waits
            lacking = local_exhaustion_of(failure)
            if lacking is not None:
                raise lacking from failure
            ours = not isinstance(failure, aiohttp.ClientError | OSError)
            if ours:
                self._log_bug(failure)
            return Attempt(None, f"{type(failure).__name__}: {failure}"[:ERROR_CHARACTERS_MAX], ours)
        return Attempt(status, None if 200 <= status < 400 else f"status {status}")

    def _log_bug(self, error: Exception) -> None:
        """Log a bug at most once a minute: what fails for one push may fail for all."""
        now = asyncio.get_running_loop().time()
        if now >= self._bug_logged_until:
            self._bug_logged_until = now + _LOG_EVERY_S
            log.error("a push could not be made because of an error in this server", exc_info=error)

    def _excuses(self, endpoint: str, state: EndpointState, lacking: LocalExhaustion) -> bool:
        """Whether a call that could not be made is excused; if so, the endpoint is called later."""
        now = asyncio.get_running_loop().time()
        if lacking.doubtful and not state.health.doubts(now):
            return False
        state.health.hold(self._exhaustion_s, now)
        self._exhaustions.met(endpoint, lacking, now)
        return True

    async def _postpone(self, queue: QueueKey, message: Delivery) -> None:
        """Try again soon; does not count as an attempt."""
        lease_us = int(self._exhaustion_s * SECOND_US)
        await self._engine.call(self._extend(queue, message, lease_us, NOT_TRIED))

    def _record_health(self, endpoint: str, state: EndpointState, error: str | None) -> None:
        now = asyncio.get_running_loop().time()
        if error is None:
            self._exhaustions.over()
            if state.health.succeeded(now):
                log.info("%s answers again", endpoint)
        elif state.health.failed(error, now):
            log.warning("%s is unavailable and will be called seldom: %s", endpoint, error)

    async def _settle(
        self, settings: SubscriptionSettings, queue: QueueKey, message: Delivery, attempt: Attempt, took_us: int
    ) -> None:
        """Record the attempt, and delete, postpone or give up the message, in one batch."""
        arrived, error = self._engine.arrived(), attempt.error
        record = RecordPush(
            queue=queue, origin=_ORIGIN, message=message.id, sequence=message.sequence,
            attempt=message.receive_count, status=attempt.status, error=error, took_us=took_us,
        )  # fmt: skip
        pause_us = None if error is None else self._pause_us(settings, message)
        step: Delete | Extend
        if error is not None and (pause_us is not None or await self._keeps_dead_letters(settings)):
            # After the last attempt the record finds that the message has no attempts left, and moves it.
            lease_us = _ENDED_US if pause_us is None else pause_us
            # Allowed even after a stall longer than the lease: if the failure were not counted, retries would never
            # end.
            step = Extend(
                queue=queue, origin=_ORIGIN, handle=message.handle, lease_us=lease_us, arrived=arrived,
                after_expiry=AfterExpiry.ALLOW, rotate=True, report=attempt.report(),
            )  # fmt: skip
        else:
            step = Delete(queue=queue, origin=_ORIGIN, handle=message.handle, arrived=arrived)
        if error is None:
            self.results[PushResult.DELIVERED] += 1
        else:
            self.results[PushResult.EXHAUSTED if pause_us is None else PushResult.FAILED] += 1
        settled, _ = await self._engine.call(step, record)
        if isinstance(settled, VeilError):
            log.info("message %s: the result of the push came too late: %s", message.id.hex(), settled)

    async def _keeps_dead_letters(self, settings: SubscriptionSettings) -> bool:
        """Whether the subscription has a dead-letter queue that still exists."""
        target = settings.dead_letter_queue
        if target is None:
            return False
        (outcome,) = await self._engine.call(DescribeQueue(queue=target, origin=_ORIGIN))
        return not isinstance(outcome, QueueMissing)

    def _pause_us(self, settings: SubscriptionSettings, message: Delivery) -> int | None:
        failures = rotation_of(message.handle) + 1
        return delay_us(settings.strategy, failures, secrets.randbelow(_CHANCES) / _CHANCES)
