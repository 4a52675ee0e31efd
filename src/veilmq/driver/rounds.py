"""A run in rounds: clients use one queue for a while, then everything is drained and checked.

Strategy: rounds keep the log in memory short, and tell of a loss soon. The queue stays the same, so that a message of
an earlier round that comes back is seen; sends without an answer are carried over, for they may still happen. A server
may be gone at any time, with its queue: calls that must succeed are repeated until `PATIENCE_SECONDS` have passed.
"""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Final, TypeVar

import msgspec

from veilmq.checking import check
from veilmq.checking.log import Kind, Operation, Outcome
from veilmq.checking.report import Promises, Report
from veilmq.client.adapters.connect import connect_account, parse_url
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Template
from veilmq.client.queue import Account
from veilmq.driver.load import LONGEST, Load
from veilmq.driver.recorded import Recorded, Recording
from veilmq.model.errors import QueueMissing, StoreError, VeilError

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
    expiring: bool = True
    """With times to live, where the protocol has them."""

    def queues(self) -> list[str]:
        """The queue, and the dead-letter queue."""
        end = ".fifo" if self.fifo else ""
        return [self.name + end, *([f"{self.name}-dead{end}"] if self.dead_letters else [])]

    def promises(self) -> Promises:
        """What queues of this protocol promise."""
        name, *dead = self.queues()
        refused = self.fifo or parse_url(self.url).kind != "sqs"
        return Promises(stale_deletes_refused=refused, dead_letters=dict.fromkeys([name], *dead) if dead else {})


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
    kind, _, said = why.partition(": ")
    return f"{kind} {said.partition(':')[0]}" if kind == ServiceError.__name__ else kind


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

    def round(self, seconds: float, during: Callable[[threading.Event], None] = lambda stop: None) -> None:
        """Let the clients run for so long, drain and check. `during` runs beside them, until its event is set."""
        stop = threading.Event()
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
        self._drain()
        operations = self._recording.take()
        report = check([*self._carried, *operations], self.promises)
        report.operations = len(operations)
        self.figures.add(operations, report)
        self._carried += [each for each in operations if each.kind is Kind.SEND and each.outcome is Outcome.INFO]
        if interrupted:
            raise KeyboardInterrupt

    def _client(self, number: int, stop: threading.Event) -> None:
        plan = self.plan
        name = f"{plan.seed}-{self.figures.rounds}-{number}"
        try:
            with connect_account(plan.url) as account:
                names = plan.queues()
                queues = self._patiently(lambda: [account.queue(each) for each in names], account, stop)
                recorded = [Recorded(queue, self._recording) for queue in queues]
                Load(recorded, name, Random(name), stop, plan.interval, expiring=plan.expiring).run()
        except _AWAY:
            pass  # the drain will tell

    def _create(self, account: Account) -> None:
        template = Template(visibility_timeout=VISIBILITY_SECONDS, fifo=self.plan.fifo)
        name, *dead = self.plan.queues()
        for each in dead:
            account.create(each, template)
            template = msgspec.structs.replace(template, dead_letter_queue=each, receive_count_max=RECEIVES_MAX)
        account.create(name, template)

    def _drain(self) -> None:
        """The queue first: what has had its receives goes to the dead letters when somebody asks for it."""
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
            return  # the next attempt tells
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
