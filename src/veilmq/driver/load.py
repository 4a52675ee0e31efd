"""One client of a run: it sends, receives, extends, releases and deletes at random, also with handles that are void.

Strategy: a table of steps with weights; the seed decides which comes next, and with what. The client sends less while
messages come, so that the queue stays small. What it received it settles in any way, or forgets, so that the lease
runs out. Errors are the queue's answers: the recording has them, the client goes on. Leases are short, because a drain
has to wait for all of them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, NamedTuple

from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Extension, Message
from veilmq.driver.recorded import Recorded
from veilmq.model.errors import CapacityError, QueueMissing, StoreError, VeilError

LEASES: Final = (1, 1, 2, 3)
"""Seconds."""
DELAYS: Final = (1, 2)
LONGEST: Final = 3
"""Seconds after which nothing that a client did keeps a message from being received."""
GROUPS: Final = 8
_TTLS: Final = (1, 2, 60)
_SIZES: Final = (0, 100, 1_000, 20_000)
"""Bytes of padding."""
_BATCH_MAX: Final = 8
_REMEMBERED: Final = 50
_TROUBLE: Final = (TransportError, ServiceError, StoreError, CapacityError, QueueMissing)
_PAUSE_SECONDS: Final = 0.2


class Held(NamedTuple):
    """A message in the client's hands."""

    queue: Recorded
    handle: str


class Load:
    """One client. `run` ends when `stop` is set."""

    def __init__(
        self, queues: Sequence[Recorded], name: str, chance: Random, stop: threading.Event, interval: float,
        *, expiring: bool = True,
    ) -> None:  # fmt: skip
        """The first queue is sent to, all are received from. `name`: unique, begins each body. `interval`: seconds
        between two calls, on average. `expiring`: some messages have a time to live, where that exists."""
        self._queues = queues
        self._able = queues[0].capabilities
        self._ttls = _TTLS if expiring and self._able.ttl else ()
        self._name = name
        self._chance = chance
        self._stop = stop
        self._interval = interval
        self._number = 0
        self._held: list[Held] = []
        self._void: deque[Held] = deque(maxlen=_REMEMBERED)
        """Used before: another step, or another client, may have made them void."""
        self._sent: deque[Message] = deque(maxlen=_REMEMBERED)
        self._idle = True
        self._steps: dict[Callable[[], None], float] = {
            self._send: 2, self._send_batch: 2, self._receive: 6, self._delete: 6, self._delete_batch: 2,
            self._extend: 2, self._extend_batch: 1, self._release: 1, self._forget: 1, self._use_void: 1,
        }  # fmt: skip

    def run(self) -> None:
        """Use the queues until the end. The recording has the answers."""
        while not self._stop.is_set():
            try:
                self._step()
            except _TROUBLE:
                self._stop.wait(self._chance.uniform(0, _PAUSE_SECONDS))
            except VeilError:
                pass  # a lease that ended: the normal end of a race
            if self._interval:
                self._stop.wait(self._chance.uniform(0, 2 * self._interval))

    def _step(self) -> None:
        (step,) = self._chance.choices(list(self._steps), list(self._steps.values()))
        sends = step in (self._send, self._send_batch)
        if sends and not self._idle and self._chance.random() < 0.6:
            step = self._receive
        if not self._held and not sends:
            step = self._send_batch if self._idle and self._chance.random() < 0.7 else self._receive
        step()

    def _message(self) -> Message:
        self._number += 1
        chance, able = self._chance, self._able
        body = f"{self._name}-{self._number}-".ljust(chance.choice(_SIZES), "x")
        if able.native_fifo:
            # A duplicate now and then: what was sent a while ago, whether it was answered or not.
            if self._sent and chance.random() < 0.1:
                return chance.choice(self._sent)
            group = f"group-{chance.randrange(GROUPS)}"
            message = Message(body, group=group, deduplication_id=f"{self._name}-{self._number}")
            self._sent.append(message)
            return message
        delay = chance.choice(DELAYS) if chance.random() < 0.1 else None
        ttl = chance.choice(self._ttls) if self._ttls and delay is None and chance.random() < 0.1 else None
        priority = chance.randint(1, 16) if able.priorities and chance.random() < 0.3 else None
        return Message(body, delay=delay, ttl=ttl, priority=priority)

    def _send(self) -> None:
        self._queues[0].send(self._message())

    def _send_batch(self) -> None:
        messages = [self._message() for _ in range(self._chance.randint(2, _BATCH_MAX))]
        # One id twice in a batch is refused by some services and dropped by others.
        self._queues[0].send_batch(list({id(each): each for each in messages}.values()))

    def _receive(self) -> None:
        queue = self._queues[0] if self._chance.random() < 0.8 else self._chance.choice(self._queues)
        able = queue.capabilities
        # MNS has no lease of a receive's own; the adapter would make a second call of it.
        lease = None if able.protocol == "mns" else self._chance.choice(LEASES)
        count_max = self._chance.randint(1, able.receive_messages_max)
        came = queue.receive(
            min(count_max, 16), lease=lease, wait=self._chance.choice((0, 0, 0, min(1, able.wait_max)))
        )
        self._held += [Held(queue, message.handle) for message in came]
        self._idle = not came

    def _take(self) -> Held:
        held = self._held.pop(self._chance.randrange(len(self._held)))
        self._void.append(held)
        return held

    def _take_some(self) -> tuple[Recorded, list[str]]:
        """Up to ten of one queue."""
        queue = self._chance.choice(self._held).queue
        some = [each for each in self._held if each.queue is queue][:10]
        self._held = [each for each in self._held if each not in some]
        self._void += some
        return queue, [each.handle for each in some]

    def _delete(self) -> None:
        held = self._take()
        held.queue.delete(held.handle)

    def _delete_batch(self) -> None:
        queue, handles = self._take_some()
        queue.delete_batch(handles)

    def _extend(self) -> None:
        held = self._take()
        replaced = held.queue.capabilities.body_replaceable and self._chance.random() < 0.2
        self._number += replaced
        body = f"{self._name}-{self._number}-replaced" if replaced else None
        self._held.append(Held(held.queue, held.queue.extend(held.handle, self._chance.choice(LEASES), body=body)))

    def _extend_batch(self) -> None:
        queue, handles = self._take_some()
        answers = queue.extend_batch([Extension(each, self._chance.choice(LEASES)) for each in handles])
        self._held += [Held(queue, each) for each in answers if isinstance(each, str)]

    def _release(self) -> None:
        held = self._take()
        held.queue.release(held.handle, self._chance.choice((0, 0, 1)))

    def _forget(self) -> None:
        self._take()

    def _use_void(self) -> None:
        if self._void:
            held = self._chance.choice(self._void)
            if self._chance.random() < 0.5:
                held.queue.delete(held.handle)
            else:
                held.queue.extend(held.handle, self._chance.choice(LEASES))
