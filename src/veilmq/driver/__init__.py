"""The driver: clients use a queue in every way, in rounds: they use it for a while, then everything is drained and
checked.

Strategy: what the clients did is written down for the history checker (recorded.py, which wraps any queue of the client
library). Rounds keep the log in memory short, and report a loss soon. The queue stays the same, so that a message of
an earlier round that comes back is seen; sends without an answer are carried over, for they may still happen. A server
may be gone at any time, with its queue: calls that must succeed are repeated until `PATIENCE_SECONDS` have passed.

A client sends, receives, extends, releases and deletes at random, also with handles that are void. A table of steps has
their weights; the seed decides which comes next, and with what. The client sends less while messages come, so that the
queue stays small. What it received it settles in any way, or forgets, so that the lease runs out. Errors are the
queue's answers: the recording has them, the client goes on. Leases are short, because a drain has to wait for all of
them.
"""

import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Final, NamedTuple, TypeVar

import msgspec

from veilmq.checking import check
from veilmq.checking.log import Kind, Operation, Outcome
from veilmq.checking.report import Promises, Report
from veilmq.client.adapters.connect import connect_account, parse_url
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Extension, Message, Template
from veilmq.client.queue import Account, Queue
from veilmq.client.wrapping import Wrapping
from veilmq.driver.recorded import Recorded, Recording
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


ROUND_SECONDS: Final = 60.0
PATIENCE_SECONDS: Final = 60.0
VISIBILITY_SECONDS: Final = 2
RECEIVES_MAX: Final = 4
"""Before a message goes to the dead-letter queue."""
_AWAY: Final = (TransportError, ServiceError, StoreError, QueueMissing)
_AGAIN_SECONDS: Final = 0.2
_SLACK_SECONDS: Final = 1
"""Beyond the longest lease, before a drain."""
_NOTHING_TIMES: Final = 3
_KILL_SECONDS_MAX: Final = 120

T = TypeVar("T")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does."""

    url: str
    """Of the account."""
    name: str
    """Of the queue; the dead-letter queue has it, too."""
    clients: int
    seed: int
    interval: float
    """Seconds between two calls of a client, on average."""
    fifo: bool = False
    dead_letters: bool = False
    behind_s: float = 0.0
    """See `Promises.behind_us`."""
    expiring: bool = True
    """With times to live, where the protocol has them."""
    others: tuple[str, ...] = ()
    """URLs of other servers of the same cluster. The last client calls any server each time, the others one each."""

    def queues(self) -> list[str]:
        """The queue, and the dead-letter queue."""
        end = ".fifo" if self.fifo else ""
        return [self.name + end, *([f"{self.name}-dead{end}"] if self.dead_letters else [])]

    def promises(self) -> Promises:
        """What queues of this protocol promise."""
        name, *dead = self.queues()
        refused = self.fifo or parse_url(self.url).kind != "sqs"
        return Promises(
            stale_deletes_refused=refused,
            dead_letters=dict.fromkeys([name], *dead) if dead else {},
            behind_us=int(self.behind_s * 1e6),
        )


class Figures(msgspec.Struct):
    """What was done, and what the checker says of it."""

    outcomes: Counter[tuple[Kind, Outcome]] = msgspec.field(default_factory=Counter)
    reasons: Counter[tuple[Outcome, str]] = msgspec.field(default_factory=Counter)
    """By name of the error."""
    rounds: int = 0
    undrained: str = ""
    """Why the queue could not be drained at the end of a round. Nothing is then known about loss."""
    recreated: int = 0
    """How often the queue itself was gone."""
    report: Report = msgspec.field(default_factory=Report)

    @property
    def clean(self) -> bool:
        """Whether every promise was kept, as far as a drain could tell."""
        return self.report.clean and not self.undrained

    def add(self, operations: list[Operation], report: Report) -> None:
        """One round's."""
        self.rounds += 1
        self.outcomes.update((each.kind, each.outcome) for each in operations if each.kind is not Kind.DRAIN)
        self.reasons.update((each.outcome, _named(each.why)) for each in operations if each.why)
        self.report.add_report(report)


def _named(why: str) -> str:
    """The error's class; of an error of the service's own, also its code."""
    kind, _, message = why.partition(": ")
    return f"{kind} {message.partition(':')[0]}" if kind == ServiceError.__name__ else kind


class Anywhere(Wrapping):
    """One queue of several servers: each call goes to any of them."""

    def __init__(self, queues: Sequence[Queue], chance: Random) -> None:
        super().__init__(queues[0])
        self._queues = queues
        self._chance = chance

    @property
    def inner(self) -> Queue:
        return self._chance.choice(self._queues)

    @inner.setter
    def inner(self, queue: Queue) -> None:
        """As `Wrapping` does at the beginning: `_queues` has it, too."""


class Run:
    """A run against one account. `open` it, do `round`s, `close` it."""

    def __init__(self, plan: Plan, promises: Promises, recording: Recording) -> None:
        self.plan = plan
        self.promises = promises
        self.figures = Figures()
        self._recording = recording
        self._carried: list[Operation] = []
        self._account: Account | None = None

    def open(self) -> None:
        """Create the queues. Raises VeilError."""
        self._account = connect_account(self.plan.url)
        self._create(self._account)

    def close(self) -> None:
        """Delete the queues, if they can be reached."""
        if self._account is None:
            return
        for name in self.plan.queues():
            try:
                self._account.delete(name)
            except VeilError:
                pass  # a random name: it is in nobody's way
        self._account.close()

    def round(
        self,
        seconds: float | None,
        during: Callable[[threading.Event], None] = lambda stop: None,
        stop: threading.Event | None = None,
    ) -> None:
        """Let the clients run for so long, or until `stop` is set, drain and check. `during` runs beside them, until
        its event is set."""
        stop = stop or threading.Event()
        interrupted = False
        with ThreadPoolExecutor(self.plan.clients + 1, "client") as pool:
            done = [pool.submit(self._client, number, stop) for number in range(self.plan.clients)]
            done.append(pool.submit(during, stop))
            try:
                stop.wait(seconds)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                stop.set()
            for each in done:
                each.result()
        drained = self._drain()
        operations = self._recording.take()
        report = check([*self._carried, *operations], self.promises)
        report.operations = len(operations)
        self.figures.add(operations, report)
        self._carried += operations  # what is left in the queue comes in the next round
        if drained:
            self._carried = [each for each in self._carried if each.kind is Kind.SEND and each.outcome is Outcome.INFO]
        if interrupted:
            raise KeyboardInterrupt

    def _client(self, number: int, stop: threading.Event) -> None:
        plan = self.plan
        name = f"{plan.seed}-{self.figures.rounds}-{number}"
        urls = (plan.url, *plan.others)
        if plan.others and number < plan.clients - 1:
            urls = (urls[number % len(urls)],)
        try:
            with ExitStack() as stack:
                accounts = [stack.enter_context(connect_account(url)) for url in urls]
                queues = [self._reach(queue, accounts, Random(name), stop) for queue in plan.queues()]
                recorded = [Recorded(queue, self._recording) for queue in queues]
                Load(recorded, name, Random(name), stop, plan.interval, expiring=plan.expiring).run()
        except _AWAY:
            pass  # the drain will show it

    def _reach(self, name: str, accounts: list[Account], chance: Random, stop: threading.Event) -> Queue:
        found = [self._patiently(partial(account.queue, name), account, stop) for account in accounts]
        return found[0] if len(found) == 1 else Anywhere(found, chance)

    def _create(self, account: Account) -> None:
        template = Template(visibility_timeout=VISIBILITY_SECONDS, fifo=self.plan.fifo)
        name, *dead = self.plan.queues()
        for each in dead:
            account.create(each, template)
            template = msgspec.structs.replace(template, dead_letter_queue=each, receive_count_max=RECEIVES_MAX)
        account.create(name, template)

    def _drain(self) -> bool:
        """Whether that succeeded. The queue first: what has had its receives goes to the dead letters when somebody
        asks for it."""
        account = self._account
        assert account is not None

        def once() -> None:
            time.sleep(LONGEST + _SLACK_SECONDS)
            for name in self.plan.queues():
                queue = Recorded(account.queue(name), self._recording)
                queue.drain(min(1, queue.capabilities.wait_max), _NOTHING_TIMES)

        try:
            self._patiently(once, account, threading.Event())
        except VeilError as error:
            self.figures.undrained = f"{type(error).__name__}: {error}"
            return False
        return True

    def _patiently(self, call: Callable[[], T], account: Account, stop: threading.Event) -> T:
        """The result of a call that is repeated while the server is away. Raises VeilError after the last attempt."""
        end = SYSTEM.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return call()
            except _AWAY as error:
                if isinstance(error, QueueMissing):
                    self._recreate(account)
                if stop.wait(_AGAIN_SECONDS) or SYSTEM.monotonic() > end:
                    raise

    def _recreate(self, account: Account) -> None:
        try:
            self._create(account)
        except VeilError:
            return  # the next attempt shows it
        self.figures.recreated += 1


class Kills:
    """Runs a user's own shell command at random intervals: it kills a server and starts it again."""

    def __init__(self, command: str | None, every: float, seed: int) -> None:
        self._command = command
        self._every = every
        self._chance = Random(seed)
        self.done = 0
        self.failed = 0
        self.last = ""
        """How the last failure ended."""

    def during(self, stop: threading.Event) -> None:
        """For `Run.round`."""
        while self._command is not None and not stop.wait(self._chance.uniform(0.5, 1.5) * self._every):
            self.done += 1
            try:
                ended = subprocess.run(
                    self._command, check=False, shell=True, stdin=subprocess.DEVNULL, stdout=sys.stderr,
                    timeout=_KILL_SECONDS_MAX,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                self.failed, self.last = self.failed + 1, f"it took more than {_KILL_SECONDS_MAX} s"
                continue
            if ended.returncode:
                self.failed, self.last = self.failed + 1, f"exit code {ended.returncode}"
