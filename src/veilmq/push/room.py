"""The room that pushes: one task a subscription leases what waits for it, others send and settle.

Strategy: everything durable is a lease in the subscription's hidden queue. A task leases only what its endpoint may
take at once, so that a slow endpoint holds nothing that another could have. Delivered: delete. Failed: extend until the
next attempt is due, or release after the last one (the store then moves it to the dead-letter queue, if there is one)
and delete where there is none. A message whose server died in mid-push comes back when its lease ends. Limits: per
endpoint 4 in flight, 256 in all; 5 s for everything; no redirects; of an answer only its status counts.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter
from typing import Final, Protocol

import httpx

from veilmq.model.commands import AnyCommand, Delete, Extend, Origin, Receive, RecordPush
from veilmq.model.errors import VeilError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.message import Delivery
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.queue import QueueKey
from veilmq.model.topic import SubscriptionSettings, TopicKey, hidden_queue
from veilmq.push.addresses import EndpointRefused, Network, find, parse
from veilmq.push.health import Health
from veilmq.push.notifications import cased, push_of
from veilmq.push.schedules import delay_us
from veilmq.push.signing import Signer, string_to_sign

IN_FLIGHT_MAX: Final = 256
TIMEOUT_S: Final = 5.0
LEASE_US: Final = 30 * SECOND_US
"""Of one attempt: several times the longest that it can take."""
WAIT_US: Final = 20 * SECOND_US
ANSWER_BYTES_MAX: Final = 4 * 1024
_BODY_S: Final = 1.0
_ENDED_US: Final = SECOND_US
_LOOK_S: Final = 0.5
_SIGNERS: Final = 2
_CHANCES: Final = 1 << 20
_ORIGIN: Final = Origin("push", "push")

log = logging.getLogger("veilmq.push")

Subscription = tuple[TopicKey, str]


class Engine(Protocol):
    """What runs the room's commands: the server's shell."""

    async def call(self, *commands: AnyCommand) -> list[Outcome]:
        """Their outcomes."""
        ...

    def arrived(self) -> Instant:
        """This instant of the lease clock."""
        ...


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
    ) -> None:
        """subscriptions: the push subscriptions as they stand. allowed: networks beyond public ones that may be called.

        documented_case: header names as the Java sample looks them up, not in lower case. verify: check TLS.
        """
        self._engine = engine
        self._subscriptions = subscriptions
        self._signer = signer
        self._certificate_url = certificate_url
        self._allowed = allowed
        self._documented_case = documented_case
        self._wall = wall
        self._verify = verify
        self._timeout_s = timeout_s
        self._wanted: Mapping[Subscription, SubscriptionSettings] = {}
        self._slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._health: dict[str, Health] = {}
        self._in_flight: Counter[str] = Counter()
        self._freed = asyncio.Condition()
        self._tasks: dict[Subscription, asyncio.Task[None]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(_SIGNERS, thread_name_prefix="veilmq-push-sign")
        self.results: Counter[str] = Counter()
        """Attempts by what became of them: `delivered`, `failed`, `refused`, `exhausted`."""

    async def start(self) -> None:
        """Begin to push."""
        limits = httpx.Limits(max_connections=IN_FLIGHT_MAX, max_keepalive_connections=IN_FLIGHT_MAX)
        self._client = httpx.AsyncClient(
            limits=limits, timeout=self._timeout_s, follow_redirects=False, trust_env=False, verify=self._verify
        )
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """End the tasks; what is under way is cut off, and its lease ends by itself."""
        tasks = [self._watching, *self._tasks.values(), *self._sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        self._pool.shutdown(wait=False)

    def unavailable(self) -> dict[str, str]:
        """Endpoints that are called seldom because they fail, and their last error."""
        return {endpoint: each.last_error for endpoint, each in self._health.items() if not each.available}

    async def _watch(self) -> None:
        """A task for every push subscription there is."""
        while True:
            wanted = self._wanted = self._subscriptions()
            for gone in self._tasks.keys() - wanted.keys():
                self._tasks.pop(gone).cancel()
            for each in wanted.keys() - self._tasks.keys():
                self._tasks[each] = asyncio.create_task(self._serve(each))
            await asyncio.sleep(_LOOK_S)

    async def _serve(self, subscription: Subscription) -> None:
        """Lease and send what waits for one subscription, for ever."""
        topic, name = subscription
        queue = hidden_queue(topic, name)
        while True:
            settings = self._wanted.get(subscription)
            if settings is None or settings.url is None:
                await asyncio.sleep(_LOOK_S)
                continue
            endpoint = endpoint_of(settings.url)
            free = await self._free(endpoint)
            receive = Receive(queue=queue, origin=_ORIGIN, count_max=free, lease_us=LEASE_US, wait_us=WAIT_US)
            (outcome,) = await self._engine.call(receive)
            if not isinstance(outcome, Received):
                await asyncio.sleep(_LOOK_S)  # deleted a moment ago, or the disk is low
                continue
            for message in outcome.messages:
                self._in_flight[endpoint] += 1
                task = asyncio.create_task(self._push(subscription, settings, queue, endpoint, message))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _free(self, endpoint: str) -> int:
        """Wait until the endpoint may be called; how many calls it may take now."""
        loop = asyncio.get_running_loop()
        health = self._health.setdefault(endpoint, Health())
        while True:
            pause = health.ready_at - loop.time()
            if pause > 0:
                await asyncio.sleep(pause)
                continue
            free = health.in_flight_max - self._in_flight[endpoint]
            if free > 0:
                return free
            async with self._freed:
                await self._freed.wait()

    async def _push(
        self, subscription: Subscription, settings: SubscriptionSettings, queue: QueueKey, endpoint: str,
        message: Delivery,
    ) -> None:  # fmt: skip
        """One attempt, and what follows from it."""
        begun = perf_counter()
        status: int | None = None
        error: str | None = None
        try:
            async with self._slots, asyncio.timeout(self._timeout_s):
                status = await self._post(subscription, settings, message)
        except EndpointRefused as refused:
            error = str(refused)
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except (httpx.HTTPError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self._in_flight[endpoint] -= 1
            if not self._in_flight[endpoint]:
                del self._in_flight[endpoint]
        if status is not None and not 200 <= status < 400:
            error = f"status {status}"
        self._judge(endpoint, error)
        took_us = int((perf_counter() - begun) * 1e6)
        await self._settle(settings, queue, message, status, error, took_us)
        async with self._freed:
            self._freed.notify_all()

    async def _post(self, subscription: Subscription, settings: SubscriptionSettings, message: Delivery) -> int:
        """Send it; the status of the answer."""
        assert settings.url is not None
        topic, name = subscription
        endpoint = await find(settings.url, self._allowed)
        request_id = secrets.token_hex(12).upper()
        push = push_of(topic, name, settings, message, request_id, self._certificate_url, self._wall())
        text = string_to_sign("POST", endpoint.target, push.headers)
        signature = await asyncio.get_running_loop().run_in_executor(self._pool, self._signer.sign, text)
        headers = cased(push.headers, self._documented_case)
        headers["Authorization" if self._documented_case else "authorization"] = signature
        address = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
        url = f"{'https' if endpoint.secure else 'http'}://{address}:{endpoint.port}{endpoint.target}"
        request = self._client.build_request(
            "POST",
            url,
            content=push.body,
            headers={"host": endpoint.authority, "user-agent": "VeilMQ-Push", **headers},
            extensions={"sni_hostname": endpoint.host},
        )
        answer = await self._client.send(request, stream=True)
        try:
            # Its body is nobody's business; a short one is read, so that the connection can be used again.
            length = answer.headers.get("content-length", "")
            if answer.status_code == 204 or (length.isdigit() and int(length) <= ANSWER_BYTES_MAX):
                with suppress(TimeoutError, httpx.HTTPError):
                    async with asyncio.timeout(_BODY_S):
                        await answer.aread()
        finally:
            await answer.aclose()
        return answer.status_code

    def _judge(self, endpoint: str, error: str | None) -> None:
        health = self._health.setdefault(endpoint, Health())
        now = asyncio.get_running_loop().time()
        if error is None:
            if health.succeeded(now):
                log.info("%s answers again", endpoint)
        elif health.failed(error, now):
            log.warning("%s is unavailable and will be called seldom: %s", endpoint, error)

    async def _settle(
        self, settings: SubscriptionSettings, queue: QueueKey, message: Delivery, status: int | None,
        error: str | None, took_us: int,
    ) -> None:  # fmt: skip
        """Record the attempt, and delete, postpone or give up the message, in one batch."""
        arrived = self._engine.arrived()
        record = RecordPush(
            queue=queue, origin=_ORIGIN, message=message.id, sequence=message.sequence,
            attempt=message.receive_count, status=status, error=error, took_us=took_us,
        )  # fmt: skip
        pause_us = None if error is None else self._pause_us(settings, message)
        step: Delete | Extend
        if error is not None and (pause_us is not None or settings.dead_letter_queue is not None):
            # After the last attempt the message becomes visible, and the next receive moves it to the dead letters.
            lease_us = _ENDED_US if pause_us is None else pause_us
            step = Extend(queue=queue, origin=_ORIGIN, handle=message.handle, lease_us=lease_us, arrived=arrived)
        else:
            step = Delete(queue=queue, origin=_ORIGIN, handle=message.handle, arrived=arrived)
        if error is None:
            self.results["delivered"] += 1
        else:
            self.results["failed" if pause_us is not None else "exhausted"] += 1
        outcomes = await self._engine.call(record, step)
        if isinstance(outcomes[1], VeilError):
            log.info("message %s: the push was settled too late: %s", message.id.hex(), outcomes[1])

    def _pause_us(self, settings: SubscriptionSettings, message: Delivery) -> int | None:
        return delay_us(settings.strategy, message.receive_count, secrets.randbelow(_CHANCES) / _CHANCES)


def endpoint_of(url: str) -> str:
    """What is one endpoint, whatever path: scheme, host and port."""
    try:
        host, port, secure, _, _ = parse(url)
    except EndpointRefused:
        return url
    return f"{'https' if secure else 'http'}://{host}:{port}"
