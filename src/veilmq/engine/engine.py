"""The engine: batches, waiting receives, timers.

Strategy: a call (one request's commands and the shell's ticket for it) enters by `submit`, becomes part of a `Batch`,
and leaves `committed` as an `Answer`. A receive that finds nothing and may wait is parked instead. The store's
`visible` hints and the deadlines decide which parked receives try again. A shell loops over take_batch, apply, commit,
committed, deliver; when there is nothing to take, it sleeps until `next_due`.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from veilmq.engine import Limits
from veilmq.engine.long_polls import Brake, Credits, Polls, Unread, Waiter, WaitingRoom
from veilmq.engine.upkeep import Upkeep
from veilmq.model.commands import (
    AnyCommand,
    ChangeQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    Operate,
    Receive,
    RecordPolls,
    Sweep,
    Undeliver,
)
from veilmq.model.errors import Overloaded, RateExceeded, VeilError
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Applied, Operated, Outcome, QueueDeleted, Received
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import is_hidden

Answer = tuple[Any, list[Outcome]]
"""A call's ticket and its outcomes, in the order of its commands, ready to send."""


class Call(msgspec.Struct, gc=False, eq=False):
    """Commands that were submitted together. A ticket of None marks the engine's own."""

    ticket: Any
    commands: Sequence[AnyCommand]
    submitted: Instant
    waiter: Waiter | None = None
    """Set for a receive that was parked before."""
    messages: int = 1
    """How many messages it may touch."""


class Batch(msgspec.Struct, gc=False, eq=False):
    """What the store applies in one transaction."""

    calls: list[Call]
    commands: list[AnyCommand]


_BEFORE_CLAIMS: Final = (Delete, Extend, Operate)  # an Operate may contain them
_SETTING: Final = frozenset({CreateQueue, ChangeQueue, DeleteQueue, Operate})  # what may change or delete a queue


class Engine:
    """One store's engine. Not thread-safe: one shell, one thread."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.waiting = WaitingRoom(self.limits)
        self._parked = self.waiting.parked
        self.polls = Polls()
        self.unread = Unread(self.limits.unread_bytes_max)
        self._brake = Brake()
        self._pending: deque[Call] = deque()
        self._pending_messages = 0  # what the submitted ones may touch
        self._ready: list[Answer] = []
        self._credits = Credits(self.unread)
        self._cut: list[Call] = []
        """Receives for which the last batch had no bytes left; they come first in the next one."""
        self._gone: set[Any] = set()
        """Tickets of calls that are with the engine or the store, and whose clients are gone."""
        self._impatient: set[Any] = set()
        """Receives that may not park any more: see `answer_soon`."""
        self._last_batch: Instant | None = None
        self._batch_max = self.limits.batch_messages_max
        self._batch_messages = 0
        self._upkeep = Upkeep(self.limits)
        self._draining = False

    @property
    def busy(self) -> bool:
        """Whether there is a batch to take."""
        return bool(self._pending)

    @property
    def backlog(self) -> int:
        """Pending calls."""
        return len(self._pending)

    @property
    def fills_a_batch(self) -> bool:
        """Whether the pending calls fill a whole batch."""
        return self._pending_messages >= self._batch_max

    def submit(self, ticket: Any, commands: Sequence[AnyCommand], now: Instant) -> None:
        """Queue a call; its answer comes out of `committed` or `expire_waiters` under the ticket (hashable, unique)."""
        if len(self._pending) >= self.limits.pending_max:
            self._ready.append((ticket, [Overloaded(limit=self.limits.pending_max)] * len(commands)))
            return
        first = commands[0]
        # A repeated attempt id has its messages already, so it does not queue behind others.
        if type(first) is Receive:
            if self._parked and first.attempt_id is None:
                wait_us = self.waiting.wait_behind(first)
                if wait_us:
                    self._park(ticket, first, now, wait_us, now)
                    return
            messages = first.count_max
        else:
            messages = len(first.commands) if type(first) is Operate else len(commands)
        self._pending.append(Call(ticket, commands, now, None, messages))
        self._pending_messages += messages

    def cancel(self, ticket: Any) -> None:
        """The client is gone: forget its parked receive, or release what its running receive gets."""
        if self.waiting.take(ticket) is None and not self._brake.cancel(ticket):
            self._gone.add(ticket)

    def answer_soon(self, ticket: Any) -> None:
        """The client sends nothing more, and may be gone: its receive waits no longer.

        A parked one is answered empty, and so is one that was woken: no message goes to a dead consumer. One that has
        only just come is answered with what it finds now.
        """
        waiter = self.waiting.take(ticket)
        if waiter is not None:
            self.polls.count(waiter.command, empty=True)
        elif not self._brake.cancel(ticket):
            self._impatient.add(ticket)
            return
        self._ready.append((ticket, [Received([])]))

    def undeliver(self, command: Receive, outcome: Received, now: Instant) -> None:
        """The answer could not be written: release the leases at once."""
        handles = tuple(message.handle for message in outcome.messages)
        # A client with an attempt id will retry and must find its messages unchanged.
        if handles and command.attempt_id is None:
            release = Undeliver(queue=command.queue, origin=command.origin, handles=handles)
            self._pending.append(Call(None, (release,), now))

    def take_batch(self, now: Instant) -> Batch | None:
        """The next batch, or None if there is nothing to do. The previous one must have been returned."""
        self._wake()
        self._schedule(now)
        if not self._pending:
            self._last_batch = now
            return None
        calls, commands, pending = list[Call](), list[AnyCommand](), self._pending
        stalled = self._last_batch is None or now - self._last_batch > self.limits.stall_us
        if stalled and len(pending) > 1:
            _racers_first(pending)
        self._last_batch = now
        apart = self._batch_max < self.limits.batch_messages_max or len(pending) > self.limits.beside_a_sweep_max
        messages, watches = 0, bool(self._gone or self._impatient or self.unread.near)
        while pending and messages < self._batch_max:
            call = pending.popleft()
            if apart and type(call.commands[0]) is Sweep:  # its duration says nothing about other commands
                if calls:
                    pending.appendleft(call)
                else:
                    calls, commands, messages = [call], [*call.commands], call.messages
                break
            if watches and self._passes_over(call, now):
                continue
            calls.append(call)
            commands += call.commands
            messages += call.messages
        self._pending_messages = sum(call.messages for call in pending)
        self._batch_messages = 0 if len(calls) == 1 and calls[0].ticket is None else messages
        if not calls and self._credits:
            return self.take_batch(now)
        return Batch(calls, commands) if calls else None

    def paced(self, took_us: int) -> None:
        """Adjust the size of the next batch to the time that the last one's statements took.

        The cost of a command is not known in advance (bodies, copies, dead letters). A batch that took too long halves
        the number of messages; a short one doubles it again.
        """
        if not self._batch_messages:
            return
        if took_us > self.limits.batch_us:
            self._batch_max = max(1, self._batch_messages // 2)
        elif self._batch_max < self.limits.batch_messages_max and took_us < self.limits.batch_us // 2:
            self._batch_max = min(2 * self._batch_max, self.limits.batch_messages_max)

    def committed(self, batch: Batch, applied: Applied) -> list[Answer]:
        """The batch is durable: return the answers that may be sent now. Receives that found nothing may stay
        parked."""
        answers = self._take_ready()
        outcomes = applied.outcomes
        self._upkeep.store_due = applied.next_due
        for queue, visible in applied.visible.items():
            self._credits.add(queue, visible)
        at, gone = 0, self._gone
        changed, deleted = False, list[QueueKey]()
        for call in batch.calls:
            commands, ticket = call.commands, call.ticket
            first, count = commands[0], len(commands)
            mine = outcomes[at : at + count]
            at += count
            if type(first) is Receive:
                self._received(call, first, mine, applied.at, answers)
            elif ticket is None:
                if type(first) is Sweep:
                    self._upkeep.swept(mine[0])
            else:
                if gone:
                    gone.discard(ticket)
                answers.append((ticket, mine))
                if type(first) in _SETTING:
                    changed = True
                    deleted += _deleted_queues(first, mine[0])
        if self._cut:
            self._pending.extendleft(reversed(self._cut))
            self._cut = []
        if changed:
            self.waiting.forget_waits()
        for queue in deleted:  # last, because a receive parked by this batch may wait for them too
            self._retry(self.waiting.take_all(queue))
        answers += self._take_ready()
        return answers

    def failed(self, batch: Batch, error: VeilError) -> list[Answer]:
        """The batch failed or its outcome is unknown: every call in it gets the same error."""
        answers = self._take_ready()
        for call in batch.calls:
            self._gone.discard(call.ticket)
            self._impatient.discard(call.ticket)
            if call.ticket is not None:
                answers.append((call.ticket, [error] * len(call.commands)))
        return answers

    def expire_waiters(self, now: Instant) -> list[Answer]:
        """Answers for receives whose wait is over, and for those that were refused at once."""
        answers = self._take_ready()
        answers += [(ticket, [Received([])]) for ticket in self._brake.take_due(now)]
        for waiter in self.waiting.take_expired(now):
            self.polls.count(waiter.command, empty=True)
            answers.append((waiter.ticket, [Received([])]))
        return answers

    def drain_waiters(self) -> list[Answer]:
        """At shutdown: answer all parked receives empty, and park none from now on."""
        self._draining = True
        tickets = [*self._brake.take_all(), *(waiter.ticket for waiter in self.waiting.take_all())]
        answers = self._take_ready()
        answers += [(ticket, [Received([])]) for ticket in tickets]
        return answers

    def flush_polls(self, now: Instant) -> None:
        """Queue the poll counts so far for the history (each minute, and at shutdown)."""
        self._upkeep.polls_begun(now)
        if self.polls:
            self._pending.append(Call(None, (RecordPolls(polls=self.polls.take()),), now))

    def next_due(self, now: Instant) -> Instant | None:
        """When the shell must call again even if nothing is submitted; `now` or earlier means at once."""
        if self._pending or self._ready or self._upkeep.has_more or self._credits:
            return now
        dues = [self._upkeep.next_sweep]
        braked = self._brake.next_due()
        if braked is not None:
            dues.append(braked)
        deadline = self.waiting.next_deadline()
        if deadline is not None:
            dues.append(deadline)
            awaited = self._upkeep.next_awaited_sweep
            if awaited is not None:
                dues.append(awaited)
        return min(dues)

    @property
    def waking(self) -> bool:
        """Whether a parked receive is about to try again, or an answer is about to be sent."""
        return bool(self._credits and self._parked) or bool(self._ready)

    def next_wake(self) -> Instant | None:
        """The earliest instant at which a lease, a delay or a wait may end; None if none will."""
        ends = (self.waiting.next_deadline(), self._brake.next_due(), self._upkeep.store_due)
        return min((due for due in ends if due is not None), default=None)

    def _take_ready(self) -> list[Answer]:
        ready, self._ready = self._ready, []
        for ticket, _ in ready:
            self._gone.discard(ticket)
            self._impatient.discard(ticket)
        return ready

    def _park(self, ticket: Any, command: Receive, began: Instant, wait_us: int, now: Instant) -> None:
        """Park behind all others; if the room is full, answer empty at once or a little later."""
        deadline = Instant(began + wait_us)
        if self.waiting.has_room(command.queue):
            self.waiting.park(self.waiting.new(ticket, command, began, deadline))
            return
        self.polls.count(command, empty=True, refused=True)
        if self.limits.brake_us and len(self._brake) < self.limits.pending_max:
            self._brake.hold(ticket, Instant(min(deadline, now + self.limits.brake_us)))
        else:
            self._ready.append((ticket, [Received([])]))

    def _received(self, call: Call, command: Receive, mine: list[Outcome], at: Instant, answers: list[Answer]) -> None:
        outcome = mine[0]
        if type(outcome) is Received and outcome.messages and not (self._gone or self._impatient or self._parked):
            self.polls.count(command, empty=False)  # as most: nobody else is affected
            outcome.waited_us = max(0, at - call.submitted)
            answers.append((call.ticket, mine))
            return
        gone = call.ticket in self._gone
        self._gone.discard(call.ticket)
        if type(outcome) is Received and outcome.cut and not gone:
            self._cut.append(call)
            return
        impatient = call.ticket in self._impatient
        self._impatient.discard(call.ticket)
        if type(outcome) is Received:
            if command.attempt_id is not None and outcome.messages:
                # A retry of the same attempt (its first connection broke) gets the messages too.
                self._retry(self.waiting.take_attempt(command.queue, command.attempt_id))
            if gone:
                self._give_back(call, command, outcome, at)
                return
            if impatient and call.waiter is not None and command.attempt_id is None:
                self.undeliver(command, outcome, at)
                outcome = Received([], capped=outcome.capped)
                mine = [outcome]
            if not outcome.messages and not impatient:
                if self._parks(call, command, outcome, at):
                    return
            elif self._parked and len(outcome.messages) >= command.count_max and self.waiting.waits_for(command.queue):
                self._credits.add(command.queue, 1)
            elif outcome.capped and self._parked:
                self._pass_on(command.queue)
            outcome.waited_us = max(0, at - call.submitted)
            self.polls.count(command, empty=not outcome.messages)
        elif type(outcome) is RateExceeded:
            # Messages are available: queueing behind parked receives would leave them unclaimed.
            answers += [(waiter.ticket, [outcome]) for waiter in self.waiting.take_all(command.queue)]
        if not gone:
            answers.append((call.ticket, mine))

    def _give_back(self, call: Call, command: Receive, outcome: Received, at: Instant) -> None:
        """The client is gone: release what its receive got, and pass its wake on if it left messages."""
        self.undeliver(command, outcome, at)
        if outcome.cut and call.waiter is not None:
            self._credits.add(command.queue, command.count_max)
        elif outcome.capped and self._parked:
            self._pass_on(command.queue)

    def _parks(self, call: Call, command: Receive, outcome: Received, at: Instant) -> bool:
        """Park a receive that found nothing; False if it does not wait."""
        if self._draining:
            return False
        if call.waiter is not None:
            self.waiting.park(call.waiter)
            if outcome.capped:
                self._pass_on(command.queue)
            return True
        if outcome.wait_us:
            self._park(call.ticket, command, call.submitted, outcome.wait_us, at)
            self.waiting.note_wait(command, outcome.wait_us)
            return True
        return False

    def _pass_on(self, queue: QueueKey) -> None:
        """A cap stopped the receive that was woken, so wake one without a cap for the message."""
        waiter = self.waiting.take_free(queue)
        if waiter is not None:
            self._retry([waiter])

    def _passes_over(self, call: Call, now: Instant) -> bool:
        """Whether the call does not run in this batch: a receive whose client is gone or waits no longer, or one that
        is held back."""
        command, gone = call.commands[0], call.ticket in self._gone
        if gone:
            self._gone.discard(call.ticket)
            self._impatient.discard(call.ticket)
        if type(command) is Receive and (gone or (call.waiter is not None and call.ticket in self._impatient)):
            if call.waiter is not None:
                self._credits.add(command.queue, command.count_max)
            if not gone:
                self._ready.append((call.ticket, [Received([])]))
            return True
        return self.unread.near and self._holds_back(call, now)

    def _holds_back(self, call: Call, now: Instant) -> bool:
        """Whether the call must not get messages now, because clients have not read their answers: then it is parked
        or refused. The server's own receives, for pushes, go on."""
        command = call.commands[0]
        if type(command) is not Receive or is_hidden(command.queue.name):
            return False
        if not self.unread.refuses(command.queue.account):
            return False
        if call.waiter is None and not command.wait_us:
            self.unread.refused += 1
            self._ready.append((call.ticket, [Overloaded(limit=self.unread.bytes_max)]))
        elif self._draining or call.ticket in self._impatient:
            self._ready.append((call.ticket, [Received([])]))
        else:
            self._credits.withhold(command.queue, command.count_max)
            if call.waiter is not None:
                self.waiting.park(call.waiter)
            else:
                self._park(call.ticket, command, call.submitted, command.wait_us or 0, now)
        return True

    def _retry(self, waiters: list[Waiter]) -> None:
        self._pending.extend(map(_again, waiters))

    def _wake(self) -> None:
        """Let as many of the first waiters claim as there are newly visible messages, before any newcomer."""
        woken: list[Call] = []
        for queue, left in self._credits.take().items():
            while left > 0:
                waiter = self.waiting.take_first(queue)
                if waiter is None:
                    break
                left -= waiter.command.count_max
                woken.append(_again(waiter))
        self._pending.extendleft(reversed(woken))

    def _schedule(self, now: Instant) -> None:
        """Append the maintenance commands that are due."""
        if self._upkeep.sweep_is_due(now, awaited=bool(self._parked)):
            self._upkeep.sweep_begun(now)
            self._pending.append(Call(None, (Sweep(steps_max=self.limits.sweep_steps_max),), now))
        if self._upkeep.polls_are_due(now):
            self.flush_polls(now)


def _deleted_queues(command: AnyCommand, outcome: Outcome) -> list[QueueKey]:
    """The queue that a call deleted, also if an operator asked for it."""
    if type(command) is Operate and type(outcome) is Operated and command.commands and outcome.outcomes:
        command, outcome = command.commands[0], outcome.outcomes[0]
    return [command.queue] if type(command) is DeleteQueue and type(outcome) is QueueDeleted else []


def _again(waiter: Waiter) -> Call:
    """The parked receive, as a call to try again."""
    return Call(waiter.ticket, (waiter.command,), waiter.began, waiter, waiter.command.count_max)


def _racers_first(pending: deque[Call]) -> None:
    """After a stall: put deletes and extends that had arrived before any claim or sweep that could take their
    message."""
    calls = sorted(pending, key=lambda call: type(call.commands[0]) not in _BEFORE_CLAIMS)  # otherwise as they came
    pending.clear()
    pending.extend(calls)
