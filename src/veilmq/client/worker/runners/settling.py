"""What follows a handler: delete, release with backoff, or dead-letter, also over an unreliable connection.

Strategy: one table from verdict to action. An action that cannot reach the queue is retried until the lease is over. If
it is given up, the keeper forgets the lease, so that the message comes back when the lease ends. Every message gets
exactly one of Counts' outcomes, whatever fails on the way.

Dead letters: send to the dead-letter queue, then delete; never the other way round. A crash in between leaves the
message in both queues: a FIFO target drops the second send by its deduplication id; elsewhere the reader of the dead
letters sees the message's id in `veilmq.dead_letter.id`. A queue with its own dead-letter rule needs none of this:
leave out `poison_after`.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

from veilmq.client.clock import Clock, Stop
from veilmq.client.keeper.lease import REFUSALS
from veilmq.client.messages import Message, Received
from veilmq.client.queue import Queue, is_closed
from veilmq.client.shared import body_of_copy
from veilmq.client.shared.lifetimes import in_one_process
from veilmq.client.shared.outages import Outages
from veilmq.client.worker.guard import Superseded
from veilmq.client.worker.job import Cause, Hand
from veilmq.client.worker.job.results import HandlerFailed, Result, Verdict, of_error
from veilmq.client.worker.metrics import Counts
from veilmq.client.worker.options import Backoff, ErrorReport, Options, chance
from veilmq.model.errors import (
    CapabilityMissing,
    MessageTooLarge,
    ParameterInvalid,
    QueueMissing,
    UsageError,
    VeilError,
)
from veilmq.model.messages import Failure, failure_of
from veilmq.model.wording import counted

PREFIX: Final = "veilmq.dead_letter."
_REASON_CHARACTERS: Final = 300


class DeadLetters:
    """Sends the failed messages of the queue `source` to `target`."""

    def __init__(self, source: str, target: Queue) -> None:
        self.source = source
        self.target = target

    def send(self, received: Received, reason: str) -> None:
        """Send the message durably. Raises like `Queue.send`."""
        # Without the marks of an earlier dead-lettering.
        attributes = {name: value for name, value in received.attributes.items() if not name.startswith(PREFIX)}
        values: dict[str, Any] = {
            "reason": "".join(each if each.isprintable() else " " for each in reason)[:_REASON_CHARACTERS] or "failed",
            "id": received.id,
            "queue": self.source,
            "receive_count": received.receive_count,
        }
        marks = {PREFIX + name: value for name, value in values.items()}
        # The type is sent as an attribute too.
        room = self.target.capabilities.attributes_max - len(attributes) - (received.type is not None)
        marks = dict(list(marks.items())[: max(0, room)])
        try:
            self.target.send(self._message(received, attributes | marks))
        except (MessageTooLarge, ParameterInvalid, CapabilityMissing):
            # The message matters more than our marks: try without them.
            if not marks:
                raise
            self.target.send(self._message(received, attributes))

    def _message(self, received: Received, attributes: dict[str, Any]) -> Message:
        able = self.target.capabilities
        return Message(
            body=body_of_copy(received.body, able),
            attributes=attributes if able.attributes else {},
            type=received.type if able.attributes else None,
            priority=received.priority if able.priorities else None,
            group=(received.group or received.id) if able.native_fifo else (received.group if able.groups else None),
            deduplication_id=received.id if able.native_fifo else None,
        )


log = logging.getLogger("veilmq.worker")

_AGAIN = Backoff(first=0.1, longest=5.0)
_TRIES_MAX = 20
_LEFT = ("unsettled", "lost", "expired")
"""Outcomes of messages that can be neither deleted nor released: their leases run out."""
_REASONS = {Verdict.FAILED: "raised", Verdict.RETRY: "asked", Verdict.REJECTED: "rejected"}
"""The reason that a release for a retry reports, by the handler's verdict."""
_OF_THIS_CALL = (UsageError, CapabilityMissing)
"""Errors of one call, that a repetition does not cure."""


class Settling:
    """Settles messages in hand: deletes, releases or dead-letters each of them. Thread-safe; blocks during calls to the
    queue."""

    def __init__(
        self, queue: Queue, options: Options, counts: Counts, dead_letters: DeadLetters | None, clock: Clock
    ) -> None:
        self._queue = queue
        self._options = options
        self._counts = counts
        self._dead_letters = dead_letters
        self._longest = queue.capabilities.lease_max
        self._over = Stop(clock)
        self._outages = Outages(log, f"queue {queue.name}", clock)

    def give_up(self) -> None:
        """Shutdown: try each action only once from now on."""
        self._over.set()

    def report(self, call: str, error: BaseException) -> None:
        """A call to the queue failed: count it, log it, call on_error. Errors that are no VeilError are logged with a
        traceback, and a queue that cannot be reached is not logged at every try."""
        self._counts.failed(call, error)
        if not isinstance(error, VeilError):
            log.error("queue %s: %s failed", self._queue.name, call, exc_info=error)
            return
        if isinstance(error, _OF_THIS_CALL) and not isinstance(error, QueueMissing):
            log.warning("queue %s: %s failed: %s", self._queue.name, call, error)
        else:
            self._outages.failed(call, error)
        if self._options["on_error"] is not None:
            self._call_back(self._options["on_error"], error)

    def worked(self, call: str) -> None:
        """A call to the queue succeeded."""
        self._outages.worked(call)

    def _call_back(self, callback: Callable[..., object], *values: Any) -> None:
        """Call a user's callback. Its errors are logged and stop nothing; even its sys.exit() ends no thread."""
        try:
            in_one_process(callback, *values)
        except BaseException:
            log.exception("queue %s: a callback failed", self._queue.name)

    def lose(self, hand: Hand, detail: str) -> None:
        """The lease is gone: cancel the handler, and call on_lost once."""
        if hand.cancelled.set(Cause.LOST, detail):
            log.warning("queue %s: message %s: %s", self._queue.name, hand.message.id, detail)
            if self._options["on_lost"] is not None:
                self._call_back(self._options["on_lost"], hand.message)

    def settle(self, hand: Hand, result: Result, seconds: float) -> bool:
        """Carry out the result. Returns whether the message no longer blocks its group (deleted or dead-lettered).

        An error on the way, in our code or the user's, is a failure of this message alone: nothing is raised.
        """
        try:
            outcome = self._carry_out(hand, result)
        except BaseException as error:
            log.exception("queue %s: message %s: a bug in the worker", self._queue.name, hand.message.id)
            outcome = self._fail_by_fault(hand, error)
        self.end(hand, outcome, seconds)
        return outcome in ("done", "dead_lettered")

    def repeat(self, hand: Hand, value: Any) -> bool:
        """The guard has the result already: only delete. Returns whether the message no longer blocks its group."""
        if self._options["on_result"] is not None:
            self._call_back(self._options["on_result"], hand.message, value)
        outcome = self._delete(hand)
        self.end(hand, "repeated" if outcome == "done" else outcome)
        return outcome == "done"

    def give_back(self, hand: Hand, delay: float = 0, outcome: str = "stopped") -> None:
        """Give it back unworked."""
        self.end(hand, self._release(hand, delay, outcome, Failure(outcome) if delay else None))

    def await_delete(self, hand: Hand) -> None:
        """Shutdown: wait for a delete that is under way, and release the message if that failed. Whoever deletes it
        counts its outcome."""
        self._release(hand, 0, "stopped")

    def end(self, hand: Hand, outcome: str, seconds: float = 0.0) -> None:
        """Count its outcome: it is finished. The first one counts, if a shutdown gives back what is being settled."""
        if outcome in _LEFT:
            hand.lease.forget()  # if the keeper went on extending, it would come back only after max_hold
        if hand.settle():
            self._counts.ended(outcome, seconds)

    def poisoned(self, hand: Hand) -> bool:
        """Whether it was received more often than `poison_after` allows: a crash prevented its dead-lettering
        before."""
        most = self._options["poison_after"]
        return most is not None and hand.message.receive_count > most

    def _fail_by_fault(self, hand: Hand, error: BaseException) -> str:
        """Treat it as a handler's failure, with backoff and the poison limit. If that fails too, its lease runs out."""
        try:
            return self._carry_out(hand, of_error(error))
        except BaseException:
            log.exception("queue %s: message %s is left to its lease", self._queue.name, hand.message.id)
            return "unsettled"

    def _carry_out(self, hand: Hand, result: Result) -> str:
        verdict = result.verdict
        if verdict is Verdict.DONE:
            return self._done(hand, result)
        self._abandon(hand)
        if hand.lost:
            return "lost"
        # A handler that raises after a cancellation, or whose process was killed for it, has not failed.
        if verdict is Verdict.STOPPED or (verdict is Verdict.FAILED and hand.cancelled.cause is Cause.SHUTDOWN):
            return self._release(hand, 0, "stopped")
        if verdict is not Verdict.RETRY:
            log.warning("queue %s: message %s failed (receive %d): %s", self._queue.name, hand.message.id,
                        hand.message.receive_count, result.error,
                        exc_info=HandlerFailed(result.trace) if result.trace else None)  # fmt: skip
        most = self._options["poison_after"]
        worn = most is not None and hand.message.receive_count >= most
        if self._dead_letters is not None and (worn or verdict is Verdict.REJECTED):
            outcome = self._dead_letter(self._dead_letters, hand, result.error)
            if outcome is not None:
                return outcome
        delay = self.backoff(hand) if result.delay is None else result.delay
        return self._release(hand, delay, "retry" if verdict is Verdict.RETRY else "failed", self._failure(result))

    def backoff(self, hand: Hand) -> float:
        """Seconds until the message's next attempt."""
        return in_one_process(self._options["retry"].delay, hand.message.receive_count, chance())

    def _failure(self, result: Result) -> Failure:
        """What is reported of a failed attempt: as much as the user allows."""
        reason = _REASONS[result.verdict]
        wanted = self._options["error_report"]
        if wanted is ErrorReport.NONE:
            return Failure(reason)
        failure = failure_of(reason, result.error_type, result.error.removeprefix(f"{result.error_type}: "))
        line = ""
        if wanted is ErrorReport.LINE:
            line = failure.error
        elif callable(wanted):
            try:
                line = in_one_process(lambda: str(wanted(failure.error)))
            except BaseException:
                log.exception(
                    "queue %s: error_report failed: the failure is reported without the error's text", self._queue.name
                )
        return failure_of(reason, failure.error_type, line)

    def _done(self, hand: Hand, result: Result) -> str:
        guard, claim = self._options["guard"], hand.held_claim
        if guard is not None and claim is not None:
            try:
                in_one_process(guard.finish, claim.key, claim.fence, result.value)
            except Superseded as error:
                self.lose(hand, str(error))
                return "lost"
            except BaseException as error:
                # The next delivery does not see the work as done, so the message must come back and be worked again.
                log.exception("queue %s: message %s: its result was not stored", self._queue.name, hand.message.id)
                if isinstance(error, TypeError):
                    self._abandon(hand)
                return self._release(hand, self.backoff(hand), "failed", self._failure(of_error(error)))
        if self._options["on_result"] is not None:
            self._call_back(self._options["on_result"], hand.message, result.value)
        return self._delete(hand)

    def _abandon(self, hand: Hand) -> None:
        claim, hand.held_claim, hand.keep_claim = hand.held_claim, None, None
        if self._options["guard"] is not None and claim is not None:
            self._call_back(self._options["guard"].abandon, claim.key, claim.fence)

    def _delete(self, hand: Hand) -> str:
        if not hand.may_delete():
            return "stopped"
        outcome = self._insist("delete", hand, hand.lease.delete) or "done"
        if outcome == "done":
            self._call_back(hand.drop_progress)
        return outcome

    def _release(self, hand: Hand, delay: float, outcome: str, failure: Failure | None = None) -> str:
        delay = min(max(delay, 0.0), self._longest)
        give_back_rest, hand.before_release = hand.before_release, None
        if give_back_rest is not None:
            give_back_rest()
        return self._insist("release", hand, lambda: hand.lease.release(delay, failure=failure)) or outcome

    def _dead_letter(self, dead_letters: DeadLetters, hand: Hand, reason: str) -> str | None:
        """Dead-letter the message. None if it could not be sent: then it stays in its queue."""
        if hand.abandoned:
            return "stopped"
        try:
            dead_letters.send(hand.message, reason)
        except VeilError as error:
            self.report("dead_letter", error)
            return None
        self.worked("dead_letter")
        log.warning("queue %s: message %s went to %s after %s: %s", self._queue.name, hand.message.id,
                    dead_letters.target.name, counted(hand.message.receive_count, "receive"), reason)  # fmt: skip
        outcome = self._delete(hand)
        return "dead_lettered" if outcome == "done" else outcome

    def dead_letter(self, hand: Hand, reason: str) -> bool:
        """Dead-letter a message that must not be worked any more. Returns whether it no longer blocks its group."""
        outcome = None
        self._abandon(hand)
        if self._dead_letters is not None and not hand.lost:
            outcome = self._dead_letter(self._dead_letters, hand, reason)
        if outcome is None:
            delay, failure = self.backoff(hand), failure_of("poisoned", text=reason)
            outcome = "lost" if hand.lost else self._release(hand, delay, "failed", failure)
        self.end(hand, outcome)
        return outcome == "dead_lettered"

    def _insist(self, name: str, hand: Hand, call: Callable[[], None]) -> str | None:
        """Make the call, with retries. None if it succeeded, else the outcome that says why not."""
        tries = 0
        while True:
            try:
                call()
            except REFUSALS as error:
                self._counts.failed(name, error)
                self.lose(hand, f"{name}: {error}")
                return "lost"
            except VeilError as error:
                self.report(name, error)
                tries += 1
                hopeless = isinstance(error, _OF_THIS_CALL) or is_closed(self._queue) or hand.lease.remaining() <= 0
                if hopeless or tries >= _TRIES_MAX or self._over.wait(_AGAIN.delay(tries, chance())):
                    return "unsettled"
            else:
                self.worked(name)
                return None
