"""The embedded adapter: an account on a data directory, in this process and without a server, and its queues.

Strategy: one thread owns the directory's engine and store, shared by all who open the directory in this process
(shell.py); translation.py has the limits, and converts messages between both sides. Here each call checks its
arguments, makes the commands and runs them on the shell; a batch is one call, a long one several. An entry that gives
no valid command is not submitted; its error takes its place in the answer.

The account: it holds the directory's shell until it is closed, which also ends its queues. By default it has the
account and region that a server in development mode shows to every client, so that the directory can be served later.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakSet

from veilmq.client.adapters.cloud import client_name
from veilmq.client.adapters.embedded import translation
from veilmq.client.adapters.embedded.shell import Call, Shell, give_shell_back, take_shell
from veilmq.client.adapters.embedded.topics import EmbeddedTopics
from veilmq.client.adapters.embedded.translation import checked_name, settings_change
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import TransportError
from veilmq.client.messages import Extension, Message, Peeked, Received, Recommended, Sent, Stats, Template
from veilmq.client.queue import ById, Capabilities
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Closing
from veilmq.model import outcomes
from veilmq.model.commands import (
    AfterExpiry,
    AnyCommand,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    ListQueues,
    Origin,
    Peek,
    Receive,
    Send,
)
from veilmq.model.errors import ParameterInvalid, QueueExists, QueueMissing, VeilError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.messages import WORKING, Failure, report_of
from veilmq.model.outcomes import QueueCreated, QueueDescribed, QueuesListed
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT, HOME_REGION_DEFAULT
from veilmq.model.settings.queue import FIFO_SUFFIX, QueueInfo, QueueKey, QueueSettings
from veilmq.store import Options

__all__ = ["EmbeddedAccount", "EmbeddedQueue"]

T = TypeVar("T")


class EmbeddedQueue(Closing):
    """A queue of a data directory; see `veilmq.client.queue.Queue`. Any thread. `EmbeddedAccount.queue` makes it."""

    def __init__(self, account: "EmbeddedAccount", shell: Shell, origin: Origin, info: QueueInfo) -> None:
        self._account = account
        self._shell = shell
        self._origin = origin
        self._key = info.key
        self._fifo = info.settings.fifo
        self._late = AfterExpiry.REFUSE if self._fifo else AfterExpiry.ALLOW
        self._capabilities = translation.capabilities_of(info.settings)
        self._lock = threading.Lock()
        self._parked: set[Call] = set()
        self._closed = False

    @property
    def name(self) -> str:
        return self._key.name

    @property
    def capabilities(self) -> Capabilities:
        """See `Queue.capabilities`; the largest body is the queue's setting when it was opened."""
        return self._capabilities

    @property
    def account(self) -> "EmbeddedAccount":
        return self._account

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`."""
        return "embedded", ById(self._shell), self._key

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def send(self, message: str | Message) -> Sent:
        command = translation.send_command(self._key, self._origin, message, self._fifo)
        return translation.sent(self._one(command), self._fifo)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """See `Queue.send_batch`. Up to 1,000 messages and 16 MiB of bodies in a request."""
        key, origin, fifo = self._key, self._origin, self._fifo

        def make(message: str | Message) -> Send:
            return translation.send_command(key, origin, message, fifo)

        return self._batch(checks.batch(messages), make, lambda outcome: translation.sent(outcome, fifo))

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """See `Queue.receive`. `lease_end` counts from the grant, not from the call."""
        command = Receive(
            queue=self._key,
            origin=self._origin,
            count_max=checks.whole(count_max, "count_max", 1, translation.MESSAGES_MAX),
            lease_us=None if lease is None else _lease_us(lease),
            wait_us=translation.microseconds(wait, "wait", 0, translation.WAIT_MAX),
        )
        self._check_open()
        call = Call((command,))
        try:
            with self._interruptible(call) if command.wait_us else nullcontext():
                return self._received(self._outcome(call))
        except VeilError:
            raise
        except BaseException:  # the caller was interrupted: give back all messages of this call
            self._shell.cancel(call, abandoned=True)
            raise

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        """See `Queue.extend`. The handle does not change. After the lease's end it still works if nobody else received
        the message, except on a FIFO queue: LeaseExpired."""
        command = self._extend(handle, _lease_us(lease), self._shell.now())
        if body is not None:
            raw = translation.checked_body(body)
            command.body, command.md5, command.size_bytes = body, translation.digest(raw), len(raw)
        extended: outcomes.Extended = self._one(command)
        return extended.handle

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """See `Queue.extend_batch`. Up to 1,000 in a request."""
        arrived = self._shell.now()
        last: tuple[float | None, int] = (None, 0)

        def make(given: Extension) -> Extend:
            nonlocal last
            extension = checks.extension(given)
            if extension.lease is not last[0] or last[0] is None:
                last = extension.lease, _lease_us(extension.lease)
            return self._extend(extension.handle, last[1], arrived)

        return self._batch(checks.batch(extensions, "extensions"), make, _handle)

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        delay_us = translation.microseconds(delay, "delay", 0, translation.DELAY_MAX)
        command = self._extend(handle, delay_us, self._shell.now())
        command.report = report_of(delay, failure)
        self._one(command)

    def delete(self, handle: str) -> None:
        """See `Queue.delete`. After the lease's end it still works if nobody else received the message, except on a
        FIFO queue: LeaseExpired."""
        self._one(self._delete(handle, self._shell.now()))

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """See `Queue.delete_batch`. Up to 1,000 in a request."""
        arrived = self._shell.now()
        return self._batch(checks.batch(handles, "handles"), lambda handle: self._delete(handle, arrived), _nothing)

    def peek(self, count_max: int = 1) -> list[Peeked]:
        self._check_open()
        count = checks.whole(count_max, "count_max", 1, translation.MESSAGES_MAX)
        outcome = self._shell.query(Peek(queue=self._key, origin=self._origin, count_max=count))
        if isinstance(outcome, VeilError):
            raise failed(outcome, self.name)
        assert isinstance(outcome, outcomes.Received)
        return [translation.peeked(each, self._fifo) for each in outcome.messages]

    def stats(self) -> Stats:
        info = self._info()
        return Stats(
            visible=info.counts.visible,
            delayed=info.counts.delayed,
            in_flight=info.counts.in_flight,
            visibility_timeout=info.settings.visibility_timeout_us / SECOND_US,
            retention=info.settings.retention_us / SECOND_US,
            delay=info.settings.delay_us / SECOND_US,
            incarnation=str(info.incarnation),
        )

    def recommended(self) -> Recommended | None:
        return translation.recommended(self._info().plan)

    def interrupt(self) -> None:
        with self._lock:
            parked = list(self._parked)
        for call in parked:
            self._shell.cancel(call)

    def close(self) -> None:
        """See `Queue.close`. A receive that waits in another thread returns an empty list."""
        with self._lock:
            self._closed = True
        self.interrupt()

    def __repr__(self) -> str:
        return f"EmbeddedQueue({self.name!r} in {str(self._account.directory)!r})"

    def _info(self) -> QueueInfo:
        described: outcomes.QueueDescribed = self._one(DescribeQueue(queue=self._key, origin=self._origin))
        return described.info

    def _extend(self, handle: Any, lease_us: int, arrived: Instant) -> Extend:
        receipt = checks.handle(handle)
        return Extend(
            queue=self._key,
            origin=self._origin,
            handle=receipt,
            lease_us=lease_us,
            arrived=arrived,
            after_expiry=self._late,
            report=WORKING,
        )

    def _delete(self, handle: Any, arrived: Instant) -> Delete:
        receipt = checks.handle(handle)
        return Delete(queue=self._key, origin=self._origin, handle=receipt, arrived=arrived, after_expiry=self._late)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(reason="the queue was closed", may_have_happened=False)

    def _one(self, command: AnyCommand) -> Any:
        """The outcome of one command; raises its error."""
        self._check_open()
        return self._outcome(Call((command,)))

    def _outcome(self, call: Call) -> Any:
        (outcome,) = self._shell.run(call)
        if isinstance(outcome, VeilError):
            raise failed(outcome, self.name)
        return outcome

    @contextmanager
    def _interruptible(self, call: Call) -> Iterator[None]:
        with self._lock:
            self._check_open()
            self._parked.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._parked.discard(call)

    def _received(self, outcome: outcomes.Received) -> list[Received]:
        if not outcome.messages:
            return []
        now = self._shell.now()
        monotonic = self._shell.monotonic(now)
        return [
            translation.received(each, self._fifo, monotonic + ((each.due or now) - now) / SECOND_US)
            for each in outcome.messages
        ]

    def _batch(
        self, entries: Sequence[Any], make: Callable[[Any], Send | Extend | Delete], show: Callable[[Any], T]
    ) -> list[T | VeilError]:
        """The result of each entry, in order."""
        self._check_open()
        answers: list[Any] = []
        request = _Request()
        for entry in entries:
            try:
                command = make(entry)
            except VeilError as error:
                answers.append(error)
                continue
            if request.full(command):
                self._run(request, show, answers)
                request = _Request()
            request.add(command, len(answers))
            answers.append(None)
        self._run(request, show, answers)
        return answers

    def _run(self, request: "_Request", show: Callable[[Any], Any], answers: list[Any]) -> None:
        """Run the request, and put each outcome in its entry's place. Raises only if nothing was run before."""
        if not request.commands:
            return
        first = request.places[0] == 0 or all(isinstance(each, VeilError) for each in answers[: request.places[0]])
        try:
            found = self._shell.run(Call(request.commands))
            if first and all(type(outcome) is QueueMissing for outcome in found):
                raise QueueMissing(queue=self.name)
        except VeilError as error:
            if first:
                raise
            found = [error] * len(request.places)
        name = self.name
        for place, outcome in zip(request.places, found, strict=True):
            answers[place] = failed(outcome, name) if isinstance(outcome, VeilError) else show(outcome)


class _Request:
    """Entries of a batch that are submitted together."""

    __slots__ = ("body_bytes", "commands", "places")

    def __init__(self) -> None:
        self.commands: list[Send | Extend | Delete] = []
        self.places: list[int] = []
        self.body_bytes = 0

    def full(self, command: Send | Extend | Delete) -> bool:
        """Whether the command must go into the next request."""
        if len(self.commands) >= translation.MESSAGES_MAX:
            return True
        return (
            type(command) is Send
            and bool(self.commands)
            and self.body_bytes + command.size_bytes > translation.REQUEST_BYTES_MAX
        )

    def add(self, command: Send | Extend | Delete, place: int) -> None:
        """Add the command of the entry at that place."""
        self.commands.append(command)
        self.places.append(place)
        if type(command) is Send:
            self.body_bytes += command.size_bytes


def failed(error: VeilError, name: str) -> VeilError:
    """The error in the client's terms: it has the queue's name only."""
    if type(error) is QueueMissing:
        return QueueMissing(queue=name)
    if type(error) is QueueExists:
        return QueueExists(queue=name, setting=error.setting.removesuffix("_us"))
    if type(error) is ParameterInvalid:
        return ParameterInvalid(parameter=error.parameter.removesuffix("_us"), reason=error.reason)
    return error


def _lease_us(lease: Any) -> int:
    return translation.microseconds(lease, "lease", 0, translation.LEASE_MAX)


def _handle(outcome: outcomes.Extended) -> str:
    return outcome.handle


def _nothing(outcome: outcomes.Deleted) -> None:
    return None


_PAGE: Final = 1_000


class EmbeddedAccount(Closing):
    """A data directory in this process; see `veilmq.client.queue.Account`. Any thread."""

    def __init__(
        self,
        directory: Path | str,
        *,
        account: str = DEVELOPMENT_ACCOUNT,
        region: str = HOME_REGION_DEFAULT,
        create: bool = True,
        clock: Clock = SYSTEM,
        options: Options | None = None,
    ) -> None:
        """create: make the directory (0700) if it is missing. clock, options: the same for all users of a directory in
        one process.

        Raises TransportError (held by another process: the reason names it and the URL to use; unsafe or unusable),
        ParameterInvalid.
        """
        if type(account) is not str or not (len(account) == 12 and account.isdecimal() and account.isascii()):
            raise ParameterInvalid(parameter="account", reason=f"must be 12 digits, not {account!r}")
        if type(region) is not str or not 1 <= len(region) <= 64:
            raise ParameterInvalid(parameter="region", reason=f"must be a name of 1 to 64 characters, not {region!r}")
        self.directory = checks.path(directory, "directory")
        self._account, self._region = account, region
        self._origin = Origin("embedded", account, client_name())
        self._queues: WeakSet[EmbeddedQueue] = WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        self._shell = take_shell(self.directory, clock, options, create)

    def queue(self, name: str) -> EmbeddedQueue:
        key = self._key(name)
        described = self._do(DescribeQueue(queue=key, origin=self._origin), name)
        assert isinstance(described, QueueDescribed)
        queue = EmbeddedQueue(self, self._shell, self._origin, described.info)
        with self._lock:
            if self._closed:
                queue.close()
            self._queues.add(queue)
        return queue

    @staticmethod
    def capabilities(name: str) -> Capabilities:
        """See `Account.capabilities`; with the default largest body."""
        return translation.capabilities_of(QueueSettings(fifo=checks.text(name, "name").endswith(FIFO_SUFFIX)))

    def create(self, name: str, template: Template | None = None) -> bool:
        """See `Account.create`. Also raises ParameterInvalid and RedriveRefused."""
        key = self._key(name)
        change = settings_change(checks.template(template), key)
        created = self._do(CreateQueue(queue=key, origin=self._origin, change=change), name)
        assert isinstance(created, QueueCreated)
        return created.created

    def delete(self, name: str) -> None:
        self._do(DeleteQueue(queue=self._key(name), origin=self._origin), name)

    def names(self, prefix: str = "") -> list[str]:
        prefix = checks.text(prefix, "prefix")
        found: list[str] = []
        while True:
            after = found[-1] if found else ""
            listed = self._do(
                ListQueues(
                    origin=self._origin, account=self._account, region=self._region, prefix=prefix, after=after,
                    count_max=_PAGE,
                ),
                prefix,
            )  # fmt: skip
            assert isinstance(listed, QueuesListed)
            found += [info.key.name for info in listed.queues]
            if not listed.more:
                return found

    def topics(self) -> EmbeddedTopics:
        """The directory's own topics, for pull topics."""

        def run(commands: Sequence[AnyCommand]) -> list[Any]:
            self._check_open()
            return self._shell.run(Call(commands))

        return EmbeddedTopics(self._account, self._region, self._origin, run)

    def apply_due(self) -> None:
        """Apply everything that is due, at once; needed only for clocks that tests move."""
        self._check_open()
        self._shell.apply_due()

    def close(self) -> None:
        """See `Account.close`. The last user of a directory in this process closes it. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            queues = list(self._queues)
        for queue in queues:
            queue.close()
        give_shell_back(self._shell)

    def __repr__(self) -> str:
        return f"EmbeddedAccount({str(self.directory)!r})"

    def _key(self, name: str) -> QueueKey:
        return QueueKey(self._account, self._region, checked_name(name))

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(reason="the account was closed", may_have_happened=False)

    def _do(self, command: AnyCommand, name: str) -> Any:
        """The outcome of a command; raises its error."""
        self._check_open()
        (outcome,) = self._shell.run(Call((command,)))
        if isinstance(outcome, VeilError):
            raise failed(outcome, name)
        return outcome
