"""A message's way through the worker, except for the handler's call itself.

Strategy: `prepare` takes out the messages that must not be worked (lost, expired, poisoned, done before); `finish`
settles the others. In a FIFO group the first message that stays in the queue blocks the rest, which is given back in
order, unworked. Threads, child processes and coroutines differ only in how they call the handler in between. `work` is
the edge: any error inside costs its message one receive, like a failed handler, and never ends a runner.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from veilmq.client.clock import Clock
from veilmq.client.threads import DaemonPool
from veilmq.client.worker.alarm import Alarm
from veilmq.client.worker.guard import Begun, Claim, Done, Guard, Prolonging, Superseded
from veilmq.client.worker.hand import Hand, HeldClaim
from veilmq.client.worker.job import STOPPED, Cause, Result, Verdict, of_error
from veilmq.client.worker.metrics import Counts, Spans
from veilmq.client.worker.parameters import Parameters, chance
from veilmq.client.worker.ready import Ready
from veilmq.client.worker.settling import Settling
from veilmq.model.errors import LeaseTaken

_SETTLERS: Final = 16
"""Threads that settle a batch's messages, so that a batch takes about one round trip."""

log = logging.getLogger("veilmq.worker")

Call = Callable[[Sequence[Hand]], list[Result]]
"""Runs the handler; returns one result for each message."""


class Flow:
    """The flow of one run. Thread-safe."""

    def __init__(
        self, parameters: Parameters, ready: Ready[Hand], settling: Settling, counts: Counts, spans: Spans, clock: Clock
    ) -> None:
        self.parameters = parameters
        self.ready = ready
        self.spans = spans
        self.clock = clock
        self.alarm = Alarm(clock, "veilmq worker alarm")
        self._settling = settling
        self._counts = counts
        self._lock = threading.Lock()
        self._running: set[Hand] = set()
        self._plain = parameters.keeper is False
        self._stop_before = parameters.stop_before_expiry or 0.0
        self._pool: DaemonPool | None = None
        if (parameters.batch or 1) > 1:
            self._pool = DaemonPool(_SETTLERS, "veilmq worker settler")

    def take(self) -> list[Hand]:
        """The messages for the next call of the handler; empty when the worker stops."""
        hands = self.ready.take(self.parameters.batch or 1)
        with self._lock:
            self._running.update(hands)
        return hands

    def done(self, hands: Sequence[Hand]) -> None:
        """Report these messages as finished."""
        with self._lock:
            self._running.difference_update(hands)
        for hand in hands:
            hand.disarm()
        self.ready.done(hands)
        self._counts.in_hand(lambda: self.ready.in_hand)

    def work(self, hands: Sequence[Hand], call: Call) -> None:
        """Prepare the messages, call the handler, settle them and report them finished, all in this thread."""
        try:
            if todo := self.prepare(hands):
                start = self.clock.monotonic()
                with self.spans.around([hand.message for hand in todo]) as span:
                    results = call(todo)
                    self.spans.tell(span, results)
                self.finish(todo, results, self.clock.monotonic() - start)
        except BaseException as error:
            log.exception("a worker's own fault: the messages go back")
            self.rescue(hands, error)
        finally:
            self.done(hands)

    def prepare(self, hands: Sequence[Hand]) -> list[Hand]:
        """Settle the messages that must not be worked; return the others."""
        todo: list[Hand] = []
        blocked: set[str] = set()
        for at, hand in enumerate(hands):
            if hand.settled:
                continue
            if hand.lane in blocked:
                self._settling.release(hand)
                continue
            more = self.ready.holds(hand.lane)
            self._lead(hand, hands[at + 1 :])
            out = self._sort_out(hand)
            more = more and hand.before_release is not None
            hand.before_release = None
            if out is None:
                todo.append(hand)
                self._watch(hand)
            elif not out and hand.lane is not None:
                # Earlier messages of its group are still to be worked, so the later ones in the queue must wait.
                blocked.add(hand.lane)
                self._send_back(hand.lane, more)
        return todo

    def prepare_at_once(self, hands: Sequence[Hand]) -> bool:
        """Do the work of `prepare`, if every message is to be worked and no blocking call is needed; else do nothing
        and return False."""
        if self.parameters.guard is not None or self.parameters.checkpoints is not None:
            return False
        now = self.clock.monotonic()
        for hand in hands:
            if hand.lost or min(hand.lease.deadline, hand.deadline) <= now or self._settling.poisoned(hand):
                return False
        for hand in hands:
            self._watch(hand)
        return True

    def finish(self, hands: Sequence[Hand], results: Sequence[Result], seconds: float) -> None:
        """Settle the worked messages: those of a group in order, all others at the same time."""
        chains: dict[object, list[tuple[Hand, Result]]] = {}
        for hand, result in zip(hands, results, strict=True):
            chains.setdefault(hand.lane or hand, []).append((hand, result))
        if self._pool is None or len(chains) == 1:
            for chain in chains.values():
                self._finish_chain(chain, seconds)
        else:
            # list() raises what any of them raised.
            list(self._pool.map(lambda chain: self._finish_chain(chain, seconds), chains.values()))

    def _finish_chain(self, chain: Sequence[tuple[Hand, Result]], seconds: float) -> None:
        blocked = False
        lane = chain[0][0].lane
        more = self.ready.holds(lane)
        for at, (hand, result) in enumerate(chain):
            if self._ours(hand) and not hand.settled:
                self._lead(hand, [each for each, _ in chain[at + 1 :]])
                out = self._settling.settle(hand, STOPPED if blocked else result, seconds)
                blocked = blocked or not out
                more = more and hand.before_release is not None
        if blocked and lane is not None:
            self._send_back(lane, more)

    def close(self) -> None:
        """Stop taking, watching and settling."""
        self.alarm.close()
        if self._pool is not None:
            self._pool.shutdown()

    def rescue(self, hands: Sequence[Hand], error: BaseException) -> None:
        """Fail all of these that are not settled. A release without delay would bring them back at once, over and
        over."""
        left = [hand for hand in hands if not hand.settled]
        self.finish(left, [of_error(error)] * len(left), 0.0)

    def tell_running(self, cause: Cause) -> None:
        """Set the token of every message whose handler runs."""
        for hand in self._snapshot():
            hand.cancelled.set(cause)

    def abandon_running(self) -> int:
        """Give back the messages whose handlers still run: their results come too late. Returns how many."""
        with self._lock:
            left, self._running = self._running, set()
        for hand in sorted(left, key=lambda hand: hand.key):
            if not hand.lost:
                self._settling.release(hand)
        return len(left)

    def _snapshot(self) -> list[Hand]:
        with self._lock:
            return list(self._running)

    def _ours(self, hand: Hand) -> bool:
        """False if `abandon_running` has given it back."""
        with self._lock:
            return hand in self._running

    def _lead(self, hand: Hand, others: Sequence[Hand]) -> None:
        """Before this message is given back, give back the later ones of its group, both in `others` and in line.

        A released message can be received at once, even while later ones of its group are in flight. So another
        receiver, or this worker, could have it while we hold what follows.
        """
        if hand.lane is not None:
            rest = [each for each in others if each.lane == hand.lane]
            hand.before_release = partial(self._give_back_rest, hand.lane, rest)

    def _give_back_rest(self, lane: str, rest: Sequence[Hand]) -> None:
        for hand in rest:
            if self._ours(hand) and not hand.settled:
                self._settling.settle(hand, STOPPED, 0.0)
        self._send_back(lane, True)

    def _send_back(self, lane: str, more: bool) -> None:
        """Give back the waiting messages of a group.

        more: whether some waited before the last message was settled and still do. If not, those that wait now were
        received after it and may be worked.
        """
        for hand in self.ready.withdraw(lane) if more else ():
            self._settling.release(hand)

    def _sort_out(self, hand: Hand) -> bool | None:
        """None: work it. Else it was settled; True: it no longer blocks its group."""
        if hand.lost or hand.lease.remaining() <= 0:
            self._settling.end(hand, "lost" if hand.lost else "expired")
            return False
        if hand.deadline <= self.clock.monotonic():
            self._settling.release(hand, outcome="expired")
            return False
        try:
            # Ask the guard first: a message that is done or being worked elsewhere is not poison, however often it
            # came.
            if self.parameters.guard is not None and (out := self._begin(hand, self.parameters.guard)) is not None:
                return out
            if self._settling.poisoned(hand):
                most = self.parameters.poison_after
                reason = f"received more than {most} times; a worker may have died of it"
                return self._settling.dead_letter(hand, reason)
            hand.load()
        except BaseException as error:  # noqa: BLE001 a guard's or a record's storage may fail in any way
            return self._settling.settle(hand, of_error(error), 0.0)
        return None

    def _begin(self, hand: Hand, guard: Guard) -> bool | None:
        """Like `_sort_out`; None: the message has the claim."""
        key = hand.key if self.parameters.guard_key is None else self.parameters.guard_key(hand.message)
        held_until = hand.held_until
        wall = self.clock.wall()
        until = wall + max(held_until - self.clock.monotonic(), 0.0)
        answer = guard.begin(key, Claim(hand.key, hand.message.receive_count, wall, until))
        if isinstance(answer, Done):
            return self._settling.repeat(hand, answer.result)
        if not isinstance(answer, Begun):
            delay = self.parameters.retry.delay(hand.message.receive_count, chance())
            self._settling.release(hand, min(delay, max(answer.until - wall, 0.0)), "busy")
            return False
        hand.held_claim = HeldClaim(key, answer.fence, held_until)
        if isinstance(guard, Prolonging):
            hand.keep_claim = partial(self._keep_claim, hand, guard)
        return None

    def _keep_claim(self, hand: Hand, guard: Prolonging) -> None:
        """Extend the claim so that it ends no earlier than the lease."""
        claim, until = hand.held_claim, hand.held_until
        if claim is None or until <= claim.until:
            return
        wall = self.clock.wall()
        try:
            guard.prolong(claim.key, claim.fence, wall, wall + max(until - self.clock.monotonic(), 0.0))
        except Superseded as error:
            self._settling.lose(hand, str(error))
            raise LeaseTaken(sequence=0, attempt=hand.message.receive_count) from error
        claim.until = until

    def _watch(self, hand: Hand) -> None:
        """Notify the handler before its time is over, unless the keeper does."""
        if self._plain or self._stop_before:
            self._arm(hand, hand.deadline)

    def _arm(self, hand: Hand, when: float) -> None:
        def earlier() -> None:
            if hand.deadline < when:
                self._arm(hand, hand.deadline)

        hand.disarm()
        if not hand.settled:
            hand.on_extended = earlier
            hand.timer = self.alarm.at(when, partial(self._due, hand, when))

    def _due(self, hand: Hand, when: float) -> None:
        if not self._ours(hand) or hand.cancelled:
            return
        if hand.deadline > when:
            self._arm(hand, hand.deadline)  # its handler extended it
        elif self._stop_before:
            hand.cancelled.set(Cause.EXPIRING)
        else:
            self._settling.lose(hand, "the lease ended, and nobody keeps it")


def failed(error: str, count: int) -> list[Result]:
    """`count` equal failures, one for each message."""
    return [Result(Verdict.FAILED, error=error)] * count
