"""The room that pushes: one task a subscription leases what waits for it, others send and settle.

Strategy: everything durable is a lease in the subscription's hidden queue. A task leases only what its endpoint may
take at once, so that a slow endpoint holds nothing that another could have. Delivered: delete. Failed: extend until the
next attempt is due; after the last one the store moves it to the dead-letter queue as it records the attempt, and where
there is none it is deleted. A message whose server died in mid-push comes back when its lease ends; it has as many
tries as before, for what counts is not receives but failures, each of which rotates the handle. Limits: per endpoint 4
in flight, 256 in all; 5 s for everything; no redirects; of an answer only its status counts.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple, Protocol

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
from veilmq.model.message import Delivery
from veilmq.model.outcomes import Outcome, Received, SubscriptionDescribed
from veilmq.model.queue import QueueKey
from veilmq.model.receipt import rotation_of
from veilmq.model.reports import Failure, Report, Reported, failure_of
from veilmq.model.topic import PushResult, SubscriptionSettings, TopicKey, hidden_queue
from veilmq.push.addresses import EndpointRefused, Network
from veilmq.push.courier import Courier
from veilmq.push.health import Health
from veilmq.push.lasting import PAUSE_S, Lasting
from veilmq.push.lines import Line, Lines, endpoint_of
from veilmq.push.lookups import Lookups, Resolve, resolve
from veilmq.push.schedules import delay_us
from veilmq.push.shortage import Shortage, Shortages, shortage_of
from veilmq.push.signing import Signer

IN_FLIGHT_MAX: Final = 256
TIMEOUT_S: Final = 5.0
LEASE_US: Final = 30 * SECOND_US
"""Of one attempt: several times the longest that it can take. Kept up for one that waits for its turn."""
KEEP_S: Final = 10.0
SHORTAGE_S: Final = 5.0
"""How long pushes to an endpoint wait after one that this server lacked the means for; it counts as no attempt."""
WAIT_US: Final = 20 * SECOND_US
ERROR_CHARACTERS_MAX: Final = 300
"""Of what history and log keep of a failure, whose text may quote all that an endpoint said."""
_ENDED_US: Final = SECOND_US
LOOK_S: Final = 0.5
_CHANCES: Final = 1 << 20
_TELL_EVERY_S: Final = 60.0
_ORIGIN: Final = Origin("push", "push")

log = logging.getLogger("veilmq.push")

Subscription = tuple[TopicKey, str]
Leased = tuple[QueueKey, Delivery]


class Engine(Protocol):
    """What runs the room's commands: the server's shell."""

    async def call(self, *commands: AnyCommand) -> list[Outcome]:
        """Their outcomes."""
        ...

    def arrived(self) -> Instant:
        """This instant of the lease clock."""
        ...


class _Attempt(NamedTuple):
    """What came of one call."""

    status: int | None
    """Of the answer, if there was one."""
    error: str | None
    """What was wrong, if anything was."""
    ours: bool = False
    """It is this server's own error, and says nothing about the endpoint."""

    def report(self) -> Report:
        """Why the message waits for its next attempt."""
        return Report(Reported.RETRY, failure_of("push", "" if self.status is None else "HTTP", self.error or ""))


_SHORT: Final = Report(Reported.RETRY, Failure("shortage"))
"""This server had no means to call."""


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
        shortage_s: float = SHORTAGE_S,
    ) -> None:
        """subscriptions: the push subscriptions as they stand; while none has changed, best the same object.

        allowed: networks beyond public ones that may be called.
        documented_case: header names as the Java sample looks them up, not in lower case. verify: check TLS.
        resolve: addresses of a name; blocks, in a thread. look_s: how often the subscriptions are looked at.
        pause_s: how long a task rests that ended by an error. shortage_s: see `SHORTAGE_S`.
        """
        self._engine = engine
        self._subscriptions = subscriptions
        self._courier = Courier(signer, certificate_url, allowed, documented_case, wall, timeout_s, Lookups(resolve))
        self._verify = verify
        self._timeout_s = timeout_s
        self._look_s = look_s
        self._wanted: Mapping[Subscription, SubscriptionSettings] = {}
        self._slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._pause_s = pause_s
        self._tasks: dict[Subscription, Lasting] = {}
        self._held_up: dict[Subscription, str] = {}
        """URLs that tasks wait for, because their endpoints may not be called yet."""
        self._sending: dict[asyncio.Task[None], Leased] = {}
        self._unsent: list[Leased] = []
        """Those that were leased, and for which no task was begun any more."""
        self._calling: set[asyncio.Task[None]] = set()
        """Those of `_sending` that have their turn."""
        self._bug_told_until = 0.0
        self._shortage_s = shortage_s
        self._shortages = Shortages(2 * shortage_s)
        self.results: Counter[str] = Counter()
        """Attempts by their `PushResult`."""

    async def start(self) -> None:
        """Begin to push."""
        self._lines = Lines(self._verify)
        self._watching = Lasting(self._watch, "the look for subscriptions to push", self._pause_s)

    async def stop(self, grace_s: float = 0) -> None:
        """End the tasks. What waits for its turn is released. A call under way has `grace_s` to be answered; then it is
        cut off, and its lease ends by itself: its message is pushed again."""
        waiting = {task: leased for task, leased in self._sending.items() if task not in self._calling}
        lasting = [self._watching, *self._tasks.values()]
        for each in lasting:
            each.cancel()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*(each.ended() for each in lasting), *waiting, return_exceptions=True)
        await self._release([*waiting.values(), *self._unsent])
        calling = list(self._calling)
        if calling:
            await asyncio.wait(calling, timeout=grace_s)
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)
        await self._lines.keep(frozenset())
        self._courier.close()

    async def _release(self, leased: Sequence[Leased]) -> None:
        """Whoever comes next may push them at once. A store that hangs or has failed lets their leases end instead."""
        if not leased:
            return
        arrived = self._engine.arrived()
        steps = [
            Extend(queue=queue, origin=_ORIGIN, handle=message.handle, lease_us=0, arrived=arrived)
            for queue, message in leased
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._engine.call(*steps)

    def unavailable(self) -> dict[str, str]:
        """Endpoints that are called seldom because they fail, and their last error."""
        lines = self._lines.items()
        return {endpoint: each.health.last_error for endpoint, each in lines if not each.health.available}

    @property
    def calls_put_off(self) -> int:
        """Calls that this server lacked the means for; each is made later, and counts as no attempt."""
        return self._shortages.count

    def shortage(self) -> str | None:
        """What this server lacks at present, so that pushes wait."""
        return self._shortages.at(asyncio.get_running_loop().time())

    def state(self, url: str) -> dict[str, object]:
        """How the endpoint of a subscription does: for its owner to see."""
        endpoint = endpoint_of(url)
        health = self._lines[endpoint].health if endpoint in self._lines else Health()
        return {
            "endpoint": endpoint,
            "available": health.available,
            "failures": health.failures,
            "pause_us": int(health.pause * SECOND_US),
            "last_error": health.last_error or None,
        }

    async def _watch(self) -> None:
        """A task for every push subscription there is."""
        seen: Mapping[Subscription, SubscriptionSettings] | None = None
        endpoints: frozenset[str] = frozenset()
        while True:
            wanted = self._subscriptions()
            if wanted is not seen:
                self._wanted = seen = wanted
                self._serve_all()
                endpoints = frozenset(endpoint_of(each.url) for each in wanted.values() if each.url is not None)
            await self._lines.keep(endpoints)
            await asyncio.sleep(self._look_s)

    def _serve_all(self) -> None:
        """End the tasks of subscriptions that are gone, and begin those of new ones.

        One that was made again with another URL begins anew: the pause of the endpoint before is none of its own.
        """
        wanted, tasks = self._wanted, self._tasks
        moved = {each for each, url in self._held_up.items() if each in wanted and wanted[each].url != url}
        for gone in (tasks.keys() - wanted.keys()) | (moved & tasks.keys()):
            tasks.pop(gone).cancel()
        for each in wanted.keys() - tasks.keys():
            topic, name = each
            tasks[each] = Lasting(partial(self._serve, each), f"pushing {topic}/{name}", self._pause_s)

    async def _serve(self, subscription: Subscription) -> None:
        """Lease and send what waits for one subscription, for ever."""
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
                await asyncio.sleep(self._look_s)  # deleted a moment ago, or the disk is low
            elif outcome.messages:
                await self._begin(subscription, queue, outcome.messages)

    async def _room(self, subscription: Subscription, url: str) -> int:
        """Wait until a message may be leased for the endpoint; how many."""
        self._held_up[subscription] = url
        try:
            return await self._lines[endpoint_of(url)].room()
        finally:
            self._held_up.pop(subscription, None)

    async def _begin(self, subscription: Subscription, queue: QueueKey, messages: Sequence[Delivery]) -> None:
        """Begin to push what was leased, to where the subscription leads now: the receive may have waited long."""
        try:
            settings = await self._current(subscription)
        except asyncio.CancelledError:
            self._unsent += [(queue, message) for message in messages]
            raise
        if settings is None or settings.url is None:
            return  # and its queue with the messages is gone
        endpoint = endpoint_of(settings.url)
        line = self._lines[endpoint]
        for message in messages:
            line.leased += 1
            task = asyncio.create_task(self._push(subscription, settings, queue, endpoint, line, message))
            self._sending[task] = queue, message
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        """A push has ended."""
        del self._sending[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a push ended by an error, and is made again when its lease ends", exc_info=error)

    async def _current(self, subscription: Subscription) -> SubscriptionSettings | None:
        """The subscription's settings at this moment; None if there is none."""
        topic, name = subscription
        (outcome,) = await self._engine.call(DescribeSubscription(topic=topic, origin=_ORIGIN, name=name))
        return outcome.info.settings if isinstance(outcome, SubscriptionDescribed) else None

    async def _push(
        self, subscription: Subscription, settings: SubscriptionSettings, queue: QueueKey, endpoint: str, line: Line,
        message: Delivery,
    ) -> None:  # fmt: skip
        """One attempt, and what follows from it."""
        try:
            waited = await self._turn(line, queue, message)
            task = asyncio.current_task()
            assert task is not None
            self._calling.add(task)
            task.add_done_callback(self._calling.discard)
            try:
                current = await self._current(subscription) if waited else settings
                if current is None or current.url != settings.url:
                    return  # and its queue with the message is gone
                begun = perf_counter()
                try:
                    attempt = await self._attempt(line, subscription, current, message)
                except Shortage as shortage:
                    if not self._excuses(endpoint, line, shortage):
                        attempt = _Attempt(None, str(shortage))
                    else:
                        await self._postpone(queue, message)
                        return
                else:
                    line.health.doubted_at = None
                took_us = int((perf_counter() - begun) * 1e6)
                if not attempt.ours:
                    self._judge(endpoint, line, attempt.error)
            finally:
                line.sending -= 1
                self._slots.release()
                line.tell()
            await self._settle(current, queue, message, attempt, took_us)
        finally:
            line.leased -= 1
            line.tell()

    async def _turn(self, line: Line, queue: QueueKey, message: Delivery) -> bool:
        """Wait until the endpoint may be called, and the room has a free slot; the lease is kept meanwhile. Returns
        whether that took time."""
        if not line.must_wait(asyncio.get_running_loop().time()) and not self._slots.locked():
            line.sending += 1
            await self._slots.acquire()
            return False
        keeping = asyncio.create_task(self._keep(queue, message))
        try:
            await line.turn()
            try:
                await self._slots.acquire()
            except asyncio.CancelledError:
                line.sending -= 1
                line.tell()
                raise
        finally:
            keeping.cancel()
        return True

    async def _keep(self, queue: QueueKey, message: Delivery) -> None:
        """Two subscriptions may have leased for one endpoint more than it takes at once."""
        while True:
            await asyncio.sleep(KEEP_S)
            arrived = self._engine.arrived()
            await self._engine.call(
                Extend(queue=queue, origin=_ORIGIN, handle=message.handle, lease_us=LEASE_US, arrived=arrived)
            )

    async def _attempt(
        self, line: Line, subscription: Subscription, settings: SubscriptionSettings, message: Delivery
    ) -> _Attempt:
        """What came of a call. Raises Shortage."""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                answered = partial(limit.reschedule, None)  # a status that came in time counts
                status = await self._courier.post(line, *subscription, settings, message, answered)
        except EndpointRefused as refused:
            return _Attempt(None, str(refused))
        except TimeoutError:
            return _Attempt(None, f"no answer within {self._timeout_s:g} s")
        except aiohttp.ClientResponseError as failure:
            said = f"what came is no HTTP answer: {' '.join(failure.message.split())}"
            return _Attempt(None, said[:ERROR_CHARACTERS_MAX])
        except Shortage:
            raise
        except Exception as failure:  # the request's edge: also after a bug the next attempt waits
            shortage = shortage_of(failure)
            if shortage is not None:
                raise shortage from failure
            ours = not isinstance(failure, aiohttp.ClientError | OSError)
            if ours:
                self._tell_bug(failure)
            return _Attempt(None, f"{type(failure).__name__}: {failure}"[:ERROR_CHARACTERS_MAX], ours)
        return _Attempt(status, None if 200 <= status < 400 else f"status {status}")

    def _tell_bug(self, error: Exception) -> None:
        """Not for every push: what fails for one may fail for all."""
        now = asyncio.get_running_loop().time()
        if now >= self._bug_told_until:
            self._bug_told_until = now + _TELL_EVERY_S
            log.error("a push could not be made, by an error of this server's", exc_info=error)

    def _excuses(self, endpoint: str, line: Line, shortage: Shortage) -> bool:
        """Whether a call that was not made does not count; then the endpoint is called later."""
        now = asyncio.get_running_loop().time()
        if shortage.doubtful and not line.health.doubts(now):
            return False
        line.health.hold(self._shortage_s, now)
        self._shortages.met(endpoint, shortage, now)
        return True

    async def _postpone(self, queue: QueueKey, message: Delivery) -> None:
        """Try again soon; it counts as no attempt."""
        arrived = self._engine.arrived()
        lease_us = int(self._shortage_s * SECOND_US)
        await self._engine.call(
            Extend(
                queue=queue,
                origin=_ORIGIN,
                handle=message.handle,
                lease_us=lease_us,
                arrived=arrived,
                report=_SHORT,
            )
        )

    def _judge(self, endpoint: str, line: Line, error: str | None) -> None:
        now = asyncio.get_running_loop().time()
        if error is None:
            self._shortages.over()
            if line.health.succeeded(now):
                log.info("%s answers again", endpoint)
        elif line.health.failed(error, now):
            log.warning("%s is unavailable and will be called seldom: %s", endpoint, error)

    async def _settle(
        self, settings: SubscriptionSettings, queue: QueueKey, message: Delivery, attempt: _Attempt, took_us: int
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
            # After the last attempt the record finds a message that was tried to the end, and moves it.
            lease_us = _ENDED_US if pause_us is None else pause_us
            # Also after a stall that was longer than the lease: a failure that is not counted would have no end.
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
            log.info("message %s: the push was settled too late: %s", message.id.hex(), settled)

    async def _keeps_dead_letters(self, settings: SubscriptionSettings) -> bool:
        """Whether what is given up has a queue to go to; one that was deleted takes nothing."""
        target = settings.dead_letter_queue
        if target is None:
            return False
        (outcome,) = await self._engine.call(DescribeQueue(queue=target, origin=_ORIGIN))
        return not isinstance(outcome, QueueMissing)

    def _pause_us(self, settings: SubscriptionSettings, message: Delivery) -> int | None:
        failures = rotation_of(message.handle) + 1
        return delay_us(settings.strategy, failures, secrets.randbelow(_CHANCES) / _CHANCES)
