"""The reference model: computes what a store must answer; small, obviously right, slow and in memory.

Strategy: every message is one object in one list, and each command searches all of them. The order among groups is in
reference_groups.py, move tasks are in reference_moves.py, settings in reference_settings.py. States and steps are those
of model/messages/states.py: a step that is not in the table is an error here. The store chooses ids, sequences and
handles; the model learns them from each answer that it has found right, and identifies messages by sequence and handles
by text.
Expiry is applied when a message is met, as the store may do: the events of a sweep's expiries are passed to `buried`.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from hashlib import sha256
from typing import Final

import msgspec
from tests.support.reference_groups import (
    VISIBLE,
    Attempt,
    Patience,
    Served,
    by_group,
    by_tenant,
    forget_empty,
    in_flight,
)
from tests.support.reference_moves import Tasks
from tests.support.reference_settings import change, create, handed, lease_us, plan, within

from veilmq.model.commands import (
    AfterExpiry,
    AnyCommand,
    CancelMove,
    ChangeQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    PurgeQueue,
    Receive,
    RevertPlan,
    Send,
    StartMove,
    SuggestPlan,
    Undeliver,
)
from veilmq.model.errors import (
    AttemptNotRetryable,
    InFlightFull,
    LeaseExpired,
    LeaseTaken,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.model.instant import FOREVER, MINUTE_US
from veilmq.model.messages.states import STEPS, State, Step
from veilmq.model.outcomes import (
    Deleted,
    Extended,
    Outcome,
    Purged,
    QueueDeleted,
    Received,
    Sent,
    Undelivered,
)
from veilmq.model.settings.queue import NO_PLAN, DeduplicationScope, PlanState, QueueKey, QueueSettings

NO_BUCKET: Final = (0, Fraction(0), 0)
_STEPS: Final = {(step.source, step.event): step for step in STEPS}


class Message(msgspec.Struct, eq=False):
    """One message, for ever: dead ones stay and are GONE."""

    queue: "Queue"
    body: str
    priority: int
    sent: int
    own_expiry: int | None
    state: State
    due: int
    """End of the lease or delay; if there is none, since when it is visible."""
    turn: int = 0
    """Among messages visible since the same instant, the greater goes later: raised when a message is given back at
    once."""
    sequence: int = 0
    """Learnt from the store."""
    attempt: int = 0
    rotation: int = 0
    granted: int = 0
    first: int | None = None
    group: str | None = None
    id: bytes = b""
    """Learnt from the store."""
    came_from: QueueKey | None = None
    """The queue that dead-lettered it."""
    type: str | None = None
    lease_hint_us: int | None = None

    def expires(self) -> int:
        """The instant from which the message is dead."""
        return self.sent + self.queue.settings.retention_us if self.own_expiry is None else self.own_expiry

    def step(self, event: str, *, rotate: bool = False) -> None:
        """Take a step of the table."""
        step: Step = _STEPS[self.state, event]
        self.state = step.target
        self.attempt += step.raises_attempt
        self.rotation += step.raises_rotation and rotate


class Queue(msgspec.Struct, eq=False):
    """One incarnation of a queue."""

    key: QueueKey
    settings: QueueSettings
    messages: list[Message] = msgspec.field(default_factory=list)
    window: dict[tuple[str | None, str], Message] = msgspec.field(default_factory=dict)
    """FIFO: by group and deduplication id, what was taken last."""
    served: Served = msgspec.field(default_factory=dict)
    patience: Patience = msgspec.field(default_factory=Patience)
    attempts: dict[str, Attempt] = msgspec.field(default_factory=dict)
    """FIFO: by attempt id."""
    plan: PlanState = NO_PLAN
    bucket: tuple[int, Fraction, int] = NO_BUCKET
    """The rate, and how many messages it allowed at an instant."""

    def counts(self) -> tuple[int, int, int]:
        """Visible, delayed, in flight; includes dead messages that nobody met."""
        states = [message.state for message in self.messages]
        visible = sum(state in VISIBLE for state in states)
        return visible, states.count(State.DELAYED), states.count(State.IN_FLIGHT)


class Ticket(msgspec.Struct, frozen=True, eq=False):
    """The lease that a handle refers to."""

    message: Message
    queue: Queue
    attempt: int
    rotation: int


class Reference:
    """All queues and messages, and the meaning of all handles given so far."""

    def __init__(self) -> None:
        self.queues: dict[QueueKey, Queue] = {}
        self.tickets: dict[str, Ticket] = {}
        self.now = 0
        self.held_us = 0
        """How far the expiry clock is held back."""
        self.top = 0
        """The greatest sequence given so far."""
        self.turn = 0
        """Raised with each command, but for the extends of a batch: what they give back keeps the order of its
        sending."""
        self.tasks = Tasks(self)
        self.moves: dict[int, int] = {}
        """Dead-lettered since the last look: the sequence here, and in the dead-letter queue."""

    @property
    def expiry_now(self) -> int:
        """The expiry clock: retention and time to live are judged by it."""
        return self.now - self.held_us

    def settle(self, now: int) -> None:
        """The time is now `now`: leases and delays end."""
        self.now = now
        self.turn += 1
        for queue in self.queues.values():
            forget_empty(queue.served, queue.messages)
            for message in queue.messages:
                if message.due <= now and message.state is State.IN_FLIGHT:
                    message.step("lease expires")
                elif message.due <= now and message.state is State.DELAYED:
                    message.step("delay ends")

    def peek(self, key: QueueKey) -> list[Message]:
        """The result of a peek, in order."""
        queue = self.queues[key]
        if queue.settings.fifo:
            return [one for one in by_group(queue.messages, queue.served) if one.expires() > self.expiry_now]
        present = [one for one in queue.messages if one.state not in VISIBLE or one.expires() > self.expiry_now]
        shown: list[Message] = []
        for message in by_tenant(present, shown, msgspec.structs.replace(queue.patience)):
            shown.append(message)
        return shown

    def _turns(self, queue: Queue, taken: list[Message]) -> Iterator[Message]:
        """The messages that a receive meets, one after the other."""
        if queue.settings.fifo:
            return by_group(queue.messages, queue.served)
        return by_tenant(queue.messages, taken, queue.patience)

    def buried(self, sequences: Iterable[int]) -> None:
        """The store reports that it expired these: each must be dead."""
        everyone = {message.sequence: message for queue in self.queues.values() for message in queue.messages}
        for sequence in sequences:
            message = everyone.get(sequence)
            if message is not None and message.state is not State.GONE:
                assert message.expires() <= self.expiry_now, f"{sequence} was expired before its time"
                message.step("expire")

    def judge(self, command: AnyCommand, outcome: Outcome) -> None:
        """Run the command here and compare the store's outcome with the required one. Raises AssertionError."""
        self.turn += not isinstance(command, Extend)
        match command:
            case Send():
                self._send(command, outcome)
            case Receive():
                self._receive(command, outcome)
            case Extend():
                self._extend(command, outcome)
            case Delete():
                self._delete(command, outcome)
            case CreateQueue():
                create(self, command, outcome)
            case ChangeQueue():
                change(self, command, outcome)
            case SuggestPlan() | RevertPlan():
                plan(self, command, outcome)
            case StartMove():
                self.tasks.start(command, outcome)
            case CancelMove():
                self.tasks.cancel(command, outcome)
            case Undeliver():
                self._undeliver(command, outcome)
            case PurgeQueue() | DeleteQueue():
                self._empty(command, outcome)
            case other:
                raise AssertionError(f"the reference does not know {other}")

    def add(self, key: QueueKey, settings: QueueSettings) -> None:
        """A queue was created."""
        self.queues[key] = Queue(key, settings)

    def named(self, key: QueueKey, outcome: Outcome) -> Queue | None:
        """The queue, which the store must have found if it exists."""
        queue = self.queues.get(key)
        assert (queue is None) == (type(outcome) is QueueMissing), outcome
        return queue

    def _empty(self, command: PurgeQueue | DeleteQueue, outcome: Outcome) -> None:
        queue = self.named(command.queue, outcome)
        if queue is None:
            return
        assert isinstance(outcome, Purged | QueueDeleted)
        assert outcome.count == sum(queue.counts())
        for message in queue.messages:
            if message.state is not State.GONE:
                message.step("purge")
        queue.window.clear()
        queue.attempts.clear()
        queue.patience.passed_over = 0
        if isinstance(command, DeleteQueue):
            del self.queues[command.queue]

    def _send(self, command: Send, outcome: Outcome) -> None:
        queue = self.named(command.queue, outcome)
        if queue is None:
            return
        settings = queue.settings
        if command.size_bytes > settings.message_bytes_max:
            assert type(outcome) is MessageTooLarge, outcome
            return
        if settings.fifo and self._not_taken(queue, command, outcome):
            return
        delay_us = settings.delay_us if settings.fifo or command.delay_us is None else command.delay_us
        state = State.DELAYED if delay_us else State.READY
        own = None if command.ttl_us is None else min(self.now + command.ttl_us, FOREVER)
        message = Message(queue, command.body, command.priority, self.now, own, state, self.now + delay_us)
        message.group, message.type = command.extras.group, command.extras.type
        message.lease_hint_us = command.extras.lease_hint_us
        assert isinstance(outcome, Sent), outcome
        assert not outcome.duplicate
        message.id = outcome.id
        if settings.fifo:
            queue.window[message.group, self._identity(command)] = message
        assert outcome.sequence > self.top
        assert (outcome.sent, outcome.visible, outcome.expires) == (self.now, message.due, message.expires())
        message.sequence = self.top = outcome.sequence
        queue.messages.append(message)
        assert bool(outcome.handle) is command.wants_handle
        if outcome.handle:
            self._learn(outcome.handle, message)

    def _identity(self, command: Send) -> str:
        given = command.extras.deduplication_id
        return sha256(command.body.encode()).hexdigest() if given is None else given

    def _not_taken(self, queue: Queue, command: Send, outcome: Outcome) -> bool:
        """Whether a FIFO queue refuses the message or already has it."""
        extras = command.extras
        identified = extras.deduplication_id is not None or queue.settings.content_deduplication
        if extras.group is None or command.delay_us or not identified:
            assert type(outcome) is ParameterInvalid, outcome
            return True
        by_group = queue.settings.deduplication_scope is DeduplicationScope.GROUP
        known = [
            (True, first.id, first.sequence)
            for (group, identity), first in queue.window.items()
            if identity == self._identity(command) and (group == extras.group or not by_group)
            if first.sent + 5 * MINUTE_US > self.now
        ]
        if not known:
            return False
        assert isinstance(outcome, Sent), outcome
        assert (outcome.duplicate, outcome.id, outcome.sequence) in known
        return True

    def _replays(self, queue: Queue, command: Receive, outcome: Outcome) -> bool:
        """Whether the receive gets the messages of its attempt id again."""
        attempt = queue.attempts.get(command.attempt_id or "")
        if not queue.settings.fifo or attempt is None or attempt.until <= self.now:
            return False
        if attempt.has_changed(self.now, self.expiry_now):
            assert type(outcome) is AttemptNotRetryable, outcome
            return True
        if not attempt.holds(self.now, self.expiry_now):
            del queue.attempts[command.attempt_id or ""]
            return False
        assert isinstance(outcome, Received), outcome
        assert [(got.sequence, got.handle, got.receive_count) for got in outcome.messages] == [
            (message.sequence, handle, number) for message, number, _, _, handle in attempt.leases
        ]
        renewed = []
        for message, number, rotation, _, handle in attempt.leases:
            message.due = self.now + lease_us(message, command)
            renewed.append((message, number, rotation, message.due, handle))
            if message.due == self.now:
                message.step("lease expires")
                message.turn = self.turn
        attempt.leases = renewed
        assert [(got.body, got.due) for got in outcome.messages] == [(one[0].body, one[0].due) for one in renewed]
        return True

    def _receive(self, command: Receive, outcome: Outcome) -> None:
        queue = self.named(command.queue, outcome)
        within_rate = None if queue is None else within(queue, command, outcome, self.now)
        if queue is None or within_rate is None:
            return
        self._receive_of(queue, within_rate, outcome)
        if isinstance(outcome, Received):
            handed(queue, len(outcome.messages), self.now)

    def _receive_of(self, queue: Queue, command: Receive, outcome: Outcome) -> None:
        if self._replays(queue, command, outcome):
            return
        wanted = command.count_max
        if command.in_flight_max is not None:
            wanted = min(wanted, command.in_flight_max - queue.counts()[2])
            wait_us = queue.settings.wait_us if command.wait_us is None else command.wait_us
            if wanted <= 0 and not queue.settings.fifo and not wait_us:
                assert type(outcome) is InFlightFull, outcome
                return
        assert isinstance(outcome, Received), outcome
        granted: list[Message] = []
        forget_empty(queue.served, queue.messages)
        for message in self._turns(queue, granted):
            if len(granted) >= wanted:
                break
            if message.expires() <= self.expiry_now:
                message.step("expire")
            elif self._moves(message):
                continue
            else:
                self._grant(message, command)
                granted.append(message)
        seen = [
            (m.sequence, m.body, m.priority, m.sent, m.expires, m.receive_count, m.first_received, m.due)
            for m in outcome.messages
        ]
        assert seen == [
            (one.sequence, one.body, one.priority, one.sent, one.expires(), one.attempt, one.first, one.due)
            for one in granted
        ]
        queue.served |= {message.group: (self.now, self.turn) for message in granted}
        leases = []
        for got, message in zip(outcome.messages, granted, strict=True):
            self._learn(got.handle, message)
            leases.append((message, message.attempt, message.rotation, message.due, got.handle))
        if queue.settings.fifo and command.attempt_id is not None and leases:
            queue.attempts[command.attempt_id] = Attempt(self.now + 5 * MINUTE_US, leases)

    def _grant(self, message: Message, command: Receive) -> None:
        message.step("receive")
        message.granted = self.now
        message.due = self.now + lease_us(message, command)
        message.first = self.now if message.first is None else message.first
        message.turn = 0
        if message.due == self.now:
            message.step("lease expires")
            message.turn = self.turn

    def _moves(self, message: Message) -> bool:
        """Dead-letter the message if it was received too often."""
        redrive = message.queue.settings.redrive
        target = None if redrive is None else self.queues.get(redrive.target)
        if redrive is None or target is None or message.attempt < redrive.receive_count_max:
            return False
        message.step("dead-letter")
        # No answer contains its new sequence: the next one is assumed here, and the event must agree.
        self.top += 1
        self.moves[message.sequence] = self.top
        sent = self.now if target.settings.fifo else message.sent
        moved = Message(target, message.body, message.priority, sent, message.own_expiry, State.READY, self.now)
        moved.sequence = self.top
        moved.group, moved.id, moved.came_from = message.group, message.id, message.queue.key
        moved.type, moved.lease_hint_us = message.type, message.lease_hint_us
        moved.turn = 0 if target.settings.fifo else self.turn
        target.messages.append(moved)
        return True

    def _judged(self, command: Extend | Delete) -> Message | type[VeilError]:
        """The message that a handle may act on, or the error."""
        queue = self.queues.get(command.queue)
        ticket = self.tickets.get(command.handle)
        if queue is None:
            return QueueMissing
        if ticket is None or ticket.queue is not queue:
            return ReceiptInvalid
        message = ticket.message
        if message.state is State.GONE:
            return MessageGone
        if message.expires() <= self.expiry_now:
            message.step("expire")
            return MessageGone
        if (message.attempt, message.rotation) != (ticket.attempt, ticket.rotation):
            return LeaseTaken
        late = message.attempt > 0 and message.state is State.RETURNED and command.arrived > message.due
        if late and (command.after_expiry is AfterExpiry.REFUSE or queue.settings.fifo):
            return LeaseExpired
        return message

    def _delete(self, command: Delete, outcome: Outcome) -> None:
        found = self._judged(command)
        if isinstance(found, Message):
            assert type(outcome) is Deleted, outcome
            found.step("delete")
        else:
            assert type(outcome) is found, outcome

    def _extend(self, command: Extend, outcome: Outcome) -> None:
        found = self._judged(command)
        if not isinstance(found, Message):
            assert type(outcome) is found, outcome
            return
        cap_us = command.lease_total_us_max
        due = self.now + command.lease_us
        if cap_us is not None and command.lease_us and found.attempt and due > found.granted + cap_us:
            assert type(outcome) is ParameterInvalid, outcome
            return
        if found.queue.settings.fifo and command.lease_us and found.state is State.RETURNED and found.attempt:
            others = in_flight(found.queue.messages, found.group)
            if any(other.granted != found.granted and other.sequence < found.sequence for other in others):
                assert type(outcome) is LeaseExpired, outcome
                return
        assert isinstance(outcome, Extended), outcome
        assert outcome.due == due
        _move(found, command.lease_us, command.rotate)
        found.due, found.turn = due, 0 if command.lease_us else self.turn
        if command.body is not None:
            found.body = command.body
        assert (outcome.handle == command.handle) is not command.rotate
        self._learn(outcome.handle, found)

    def current(self, handle: str, state: State) -> bool:
        """Whether the handle is of the latest lease of a message in that state, in a queue that exists."""
        ticket = self.tickets[handle]
        message = ticket.message
        known = self.queues.get(ticket.queue.key) is ticket.queue and message.queue is ticket.queue
        latest = (message.attempt, message.rotation) == (ticket.attempt, ticket.rotation)
        return known and latest and message.state is state

    def _undeliver(self, command: Undeliver, outcome: Outcome) -> None:
        """Only for handles that are in flight, or stale: what an ended lease counts depends on who looked before."""
        held = [handle for handle in command.handles if self.current(handle, State.IN_FLIGHT)]
        assert isinstance(outcome, Undelivered)
        assert outcome.released == len(held)
        for handle in held:
            message = self.tickets[handle].message
            message.step("undelivered")
            message.due, message.turn = self.now, self.turn

    def _learn(self, handle: str, message: Message) -> None:
        known = self.tickets.get(handle)
        if known is None:
            self.tickets[handle] = Ticket(message, message.queue, message.attempt, message.rotation)
        else:
            assert (known.message, known.attempt, known.rotation) == (message, message.attempt, message.rotation)


def _move(message: Message, lease_us: int, rotate: bool) -> None:
    """The step that an extend takes, by where the message is and what the handle is worth."""
    if message.attempt == 0:
        message.step("extend (attempt 0)" if lease_us else "release (attempt 0)", rotate=rotate)
    elif message.state is State.IN_FLIGHT:
        message.step("extend" if lease_us else "release", rotate=rotate)
    else:
        message.step("extend after expiry" if lease_us else "release after expiry", rotate=rotate)
