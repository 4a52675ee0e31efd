"""The stage for the cases of the client contract: an account, its clock, and shortcuts to create and empty queues.

Strategy: durations are whole seconds, because some protocols know no others. `SECOND` is the shortest, for cases that
do not care when it ends. Where something must not have ended yet, it lasts `Stage.brief`: the clock runs on between
moves, and a machine may stall for a second between two calls.

For those who write a `ClientAccount`: `MovableClock` runs in real time and can be moved forward; `WrappedClient` wraps
each queue of an account in a pattern, because a pattern is a `Queue` and must pass the cases that an adapter passes.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import pytest

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Message, Received, Sent, Template
from veilmq.client.queue import Account, Queue
from veilmq.model.errors import ParameterInvalid, VeilError

SECOND: Final = 1
LONG: Final = 600
"""A lease or delay that ends in no case."""
WAIT: Final = 20
"""A wait that no case sits out; the smaller of it and the adapter's maximum is used."""
PATIENCE_SECONDS: Final = 15
"""Enough for a thread that does not wait for the queue to return, on the slowest machine."""


class Text(str):
    """A subclass, as NumPy's str_ and the members of some enumerations are."""

    def __str__(self) -> str:
        return "another text"


class Number(float):
    """A subclass, as NumPy's float64 is."""


class ClientAccount(Protocol):
    """What an adapter's tests provide (fixture `client_account`)."""

    account: Account
    """Of this case alone, which may close it."""
    clock: Clock
    """The clock on which `lease_end` is measured."""
    brief: int
    """Seconds that no case takes by itself, even on the slowest machine: a minute where the clock is moved, less where
    tests sleep."""

    def pass_time(self, seconds: float) -> None:
        """Let time pass for the queues and for `clock`; everything due by then has happened when this returns."""
        ...

    def name(self, prefix: str) -> str:
        """An unused queue name that begins with `prefix`."""
        ...


class Stage:
    """An account with fresh queues."""

    def __init__(self, brought: ClientAccount) -> None:
        self.account = brought.account
        self.clock = brought.clock
        self.brief = brought.brief
        self.pass_time = brought.pass_time
        self.name = brought.name

    def create(self, template: Template | None = None) -> Queue:
        """A new queue, with a visibility timeout of ten minutes unless the template sets one."""
        name = self.name("q")
        assert self.account.create(name, template or Template(visibility_timeout=LONG))
        return self.account.queue(name)

    def wait(self, queue: Queue) -> float:
        """A wait that no case sits out."""
        return min(WAIT, queue.capabilities.wait_max)

    def take(self, queue: Queue, lease: float = LONG) -> Received:
        """Receive the one message that must be there."""
        (received,) = queue.receive(lease=lease)
        return received

    def held(self, queue: Queue, body: str = "held", lease: float = LONG) -> Received:
        """Send a message and receive it."""
        queue.send(body)
        return self.take(queue, lease)

    def back(self, queue: Queue) -> None:
        """Let time pass until what was just released is visible."""
        if queue.capabilities.release_min:
            self.pass_time(queue.capabilities.release_min)

    def empty(self, queue: Queue) -> list[Received]:
        """Receive everything that is visible, with a long lease."""
        found: list[Received] = []
        while received := queue.receive(min(10, queue.capabilities.receive_messages_max), lease=LONG):
            found += received
        return found

    def aside(self, call: Callable[[], Any]) -> Callable[..., Any]:
        """Run the call on its own thread. Returns a function that waits for its result, for the given seconds or
        `PATIENCE_SECONDS`."""
        pool = ThreadPoolExecutor(1)
        began = threading.Event()

        def run() -> Any:
            began.set()
            return call()

        future = pool.submit(run)
        assert began.wait(PATIENCE_SECONDS)
        pool.shutdown(wait=False)
        return lambda patience=PATIENCE_SECONDS: future.result(patience)


def sent(result: Sent | VeilError) -> Sent:
    """The result; fails for an error."""
    assert isinstance(result, Sent), result
    return result


def unrefused(
    call: Callable[[Any], Any],
    values: Iterable[Any],
    error: type[VeilError] | tuple[type[VeilError], ...] = ParameterInvalid,
    parameter: Callable[[Any], str] | None = None,
) -> list[str]:
    """A line for each of the values for which the call does not raise `error`, or does not name its `parameter`."""
    wrong: list[str] = []
    for value in values:
        try:
            wrong.append(f"{value!r:.80}: returned {call(value)!r:.80}")
        except error as refused:
            named = getattr(refused, "parameter", "").partition("[")[0]
            if parameter is not None and named != parameter(value):
                wrong.append(f"{value!r:.80}: names {named!r}, {refused}")
        except Exception as other:  # noqa: BLE001 - reported with the others
            wrong.append(f"{value!r:.80}: raised {other!r:.200}")
    return wrong


def message_with(queue: Queue, **fields: Any) -> Message:
    """A message with these fields and, on a FIFO queue, a group."""
    if queue.capabilities.native_fifo:
        fields = {"group": "g", **fields}
    return Message("with fields", **fields)


@pytest.fixture
def stage(client_account: ClientAccount) -> Iterator[Stage]:
    """A stage on the adapter's account."""
    yield Stage(client_account)


class MovableClock:
    """`veilmq.client.clock.Clock`: the system's clock plus the time added."""

    def __init__(self) -> None:
        self._added = 0.0
        self._sleepers: weakref.WeakSet[threading.Condition] = weakref.WeakSet()
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return SYSTEM.monotonic() + self._added

    def wall(self) -> float:
        return SYSTEM.wall() + self._added

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass (not negative)."""
        assert seconds >= 0, "no clock of ours runs backwards"
        self._added += seconds
        with self._lock:
            sleepers = list(self._sleepers)
        for sleeper in sleepers:
            with sleeper:
                sleeper.notify_all()

    def wakes(self, sleeper: threading.Condition) -> None:
        """See `veilmq.client.clock.Moved`."""
        with self._lock:
            self._sleepers.add(sleeper)


class WrappedClient:
    """See `veilmq.testing.client_contract.ClientAccount`. `wrap` builds the pattern over a queue of the adapter."""

    def __init__(self, brought: ClientAccount, wrap: Callable[[Queue], Queue]) -> None:
        self.account = WrappedAccount(brought.account, wrap)
        self.clock = brought.clock
        self.brief = brought.brief
        self.pass_time = brought.pass_time
        self.name = brought.name


class WrappedAccount:
    """An account that returns wrapped queues, and is otherwise unchanged."""

    def __init__(self, account: Any, wrap: Callable[[Queue], Queue]) -> None:
        self._account, self._wrap = account, wrap

    def queue(self, name: str) -> Queue:
        return self._wrap(self._account.queue(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._account, name)
