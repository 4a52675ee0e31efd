"""A message's way through the worker, except for the handler's call itself: it waits in `Ready`, then `Flow` takes it.

Strategy: `prepare` takes out the messages that must not be worked (lost, expired, poisoned, done before); `finish`
carries out the results of the others. In a FIFO group the first message that stays in the queue blocks the rest, which
is given back in order, unworked. Threads, child processes and coroutines differ only in how they call the handler in
between. `work` is the edge: any error inside costs its message one receive, like a failed handler, and never ends a
runner.

Ready: one line. On FIFO queues each group has a lane and stands in the line once, and not at all while one of its
messages is worked; so no two messages of a group run at the same time and none overtakes another. Receives reserve
their places first, so the messages in hand never exceed the capacity. Only as many takers are woken as there are items,
because there may be hundreds. Generic over the items; starts no threads.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from veilmq.client.clock import Clock
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import in_one_process
from veilmq.client.shared.threads import Alarm, DaemonPool
from veilmq.client.worker.guard import Begun, Claim, Done, Guard, Prolonging, Superseded
from veilmq.client.worker.job import Cause, Hand, HeldClaim
from veilmq.client.worker.job.results import STOPPED, Result, Verdict, of_error
from veilmq.client.worker.metrics import Counts, Spans
from veilmq.client.worker.options import Options
from veilmq.client.worker.runners.settling import Settling
from veilmq.model.errors import LeaseTaken


class Grouped(Protocol):
    """An item that can wait here."""

    @property
    def lane(self) -> str | None: ...


Item = TypeVar("Item", bound=Grouped)


class Ready(Generic[Item]):
    """Up to `capacity` items, reserved or in hand (waiting or being worked). Thread-safe."""

    def __init__(self, capacity: int, quota: int | None = None) -> None:
        """quota: how many places can be reserved in total."""
        self.capacity = capacity
        self._quota = quota
        self.in_hand = 0
        self._reserved = 0
        self._line: deque[Item | str] = deque()
        self._lanes: dict[str, deque[Item]] = {}
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        """Notified when the line grows, for takers."""
        self._less = threading.Condition(self._lock)
        """Notified when fewer places are in use, for receives and `wait_until_free`."""
        self._closed = False

    def reserve(self, most: int) -> int:
        """Wait, and reserve places for a receive: at least 1, at most `most`; 0 if it is closed or the quota is used
        up."""
        with self._lock:
            self._less.wait_for(lambda: self._closed or self._used_up() or self._free() > 0)
            if self._closed:
                return 0
            found = max(0, min(most, self._free()))
            self._reserved += found
            if self._quota is not None:
                self._quota -= found
            return found

    def unreserve(self, places: int) -> None:
        """Return reserved places that no item took."""
        with self._lock:
            self._reserved -= places
            if self._quota is not None:
                self._quota += places
            self._less.notify_all()

    def put(self, items: Sequence[Item]) -> bool:
        """Put all items in line, in reserved places. False if it is closed: the caller keeps the items and the
        places."""
        with self._lock:
            if self._closed:
                return False
            self._reserved -= len(items)
            self.in_hand += len(items)
            for item in items:
                self._append(item)
            self._more.notify(len(items))
            return True

    def take(self, most: int) -> list[Item]:
        """Wait for items and take up to `most`; empty when closed. Their groups wait until `done`."""
        with self._lock:
            while not self._line:
                if self._closed:
                    return []
                self._more.wait()
            taken: list[Item] = []
            while self._line and len(taken) < most:
                first = self._line.popleft()
                if not isinstance(first, str):
                    taken.append(first)
                    continue
                self._busy.add(first)
                lane = self._lanes[first]
                while lane and len(taken) < most:
                    taken.append(lane.popleft())
                if not lane:
                    del self._lanes[first]
            return taken

    def done(self, items: Sequence[Item]) -> None:
        """Report taken items as finished, whatever their outcome."""
        with self._lock:
            self.in_hand -= len(items)
            for lane in {item.lane for item in items} - {None}:
                assert lane is not None
                self._busy.discard(lane)
                if lane in self._lanes:
                    self._line.append(lane)
                    self._more.notify()
            self._less.notify_all()

    def holds(self, lane: str | None) -> bool:
        """Whether items of this group wait."""
        with self._lock:
            return lane in self._lanes

    def withdraw(self, lane: str) -> list[Item]:
        """Remove a group's waiting items, in order: they must not run after a failure. Their places become free."""
        with self._lock:
            rest = list(self._lanes.pop(lane, ()))
            self.in_hand -= len(rest)
            if lane not in self._busy and lane in self._line:
                self._line.remove(lane)
            self._less.notify_all()
            return rest

    def close(self) -> list[Item]:
        """Accept and hand out nothing more. Returns all waiting items, in order."""
        with self._lock:
            self._closed = True
            rest: list[Item] = []
            for each in self._line:
                rest += [each] if not isinstance(each, str) else self._lanes.pop(each)
            for lane in self._lanes.values():
                rest += lane
            self._line.clear()
            self._lanes.clear()
            self.in_hand -= len(rest)
            self._more.notify_all()
            self._less.notify_all()
            return rest

    def wait_until_free(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds until nothing is in hand. Returns whether that happened."""
        with self._lock:
            return self._less.wait_for(lambda: self.in_hand == 0, timeout)

    def wait_until_closed(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until it is closed. Returns whether it is."""
        with self._lock:
            return self._less.wait_for(lambda: self._closed, timeout)

    def _append(self, item: Item) -> None:
        lane = item.lane
        if lane is None:
            self._line.append(item)
            return
        waiting = self._lanes.get(lane)
        if waiting is None:
            waiting = self._lanes[lane] = deque()
            if lane not in self._busy:
                self._line.append(lane)
        waiting.append(item)

    def _free(self) -> int:
        free = self.capacity - self.in_hand - self._reserved
        return free if self._quota is None else min(free, self._quota)

    def _used_up(self) -> bool:
        return self._quota == 0 and self._reserved == 0


_SETTLERS: Final = 16
"""Threads that settle a batch's messages, so that a batch takes about one round trip."""

log = logging.getLogger("veilmq.worker")

Call = Callable[[Sequence[Hand]], list[Result]]
"""Runs the handler; returns one result for each message."""


class Flow:
    """The flow of one run. Thread-safe."""

    def __init__(
        self, options: Options, ready: Ready[Hand], settling: Settling, counts: Counts, spans: Spans, clock: Clock
    ) -> None:
        self.options = options
        self.ready = ready
        self.spans = spans
        self.clock = clock
        self.alarm = Alarm(clock, "veilmq worker alarm")
        self._settling = settling
        self._counts = counts
        self._lock = threading.Lock()
        self._running: dict[Hand, None] = {}
        self._plain = options["keeper"] is False
        self._stop_before = options["stop_before_expiry"] or 0.0
        self._closed = False
        self._pool: DaemonPool | None = None
        if (options["batch"] or 1) > 1:
            self._pool = DaemonPool(_SETTLERS, "veilmq worker settler")

    def take(self) -> list[Hand]:
        """The messages for the next call of the handler; empty when the worker stops."""
        hands = self.ready.take(self.options["batch"] or 1)
        with self._lock:
            self._running.update(dict.fromkeys(hands))
        return hands

    def done(self, hands: Sequence[Hand]) -> None:
        """Report these messages as finished."""
        with self._lock:
            for hand in hands:
                self._running.pop(hand, None)
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
                    self.spans.record(span, results)
                self.finish(todo, results, self.clock.monotonic() - start)
        except BaseException as error:
            log.exception("a bug in the worker: its messages go back")
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
                self._settling.give_back(hand)
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
                self._send_back(hand.lane, more=more)
        return todo

    def prepare_at_once(self, hands: Sequence[Hand]) -> bool:
        """Do the work of `prepare`, if every message is to be worked and no blocking call is needed; else do nothing
        and return False."""
        if self.options["guard"] is not None or self.options["checkpoints"] is not None:
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
        if self._pool is None or self._closed or len(chains) == 1:
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
            self._send_back(lane, more=more)

    def close(self) -> None:
        """Stop taking, watching and settling."""
        self._closed = True  # `finish` no longer uses the pool, which is shut down below
        self.alarm.close()
        if self._pool is not None:
            self._pool.shutdown()

    def rescue(self, hands: Sequence[Hand], error: BaseException) -> None:
        """Fail all of these that are not settled. A release without delay would bring them back at once, over and
        over."""
        left = [hand for hand in hands if not hand.settled]
        self.finish(left, [of_error(error)] * len(left), 0.0)

    def cancel_running(self, cause: Cause) -> None:
        """Set the token of every message whose handler runs."""
        for hand in self._snapshot():
            hand.cancelled.set(cause)

    def abandon_running(self, seconds: float) -> None:
        """Give back the messages whose handlers still run: their results come too late. Waits up to `seconds` for the
        queue; what it has not answered by then comes back when its lease ends."""
        with self._lock:
            left, self._running = self._running, {}
        chains: dict[object, list[Hand]] = {}
        for hand in reversed(left):  # of a group the last message first
            chains.setdefault(hand.lane or hand, []).append(hand)
        pool = DaemonPool(_SETTLERS, "veilmq worker release")
        ended, _ = wait([pool.submit(self._abandon, chain) for chain in chains.values()], seconds)
        pool.shutdown()
        for each in ended:
            if (error := each.exception()) is not None:
                log.error("a bug in the worker: its messages come back when their leases end", exc_info=error)

    def _abandon(self, hands: Sequence[Hand]) -> None:
        for hand in hands:
            if hand.lost:
                continue
            if hand.abandon():
                self._settling.give_back(hand)
            else:
                self._settling.await_delete(hand)

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
        self._send_back(lane, more=True)

    def _send_back(self, lane: str, *, more: bool) -> None:
        """Give back the waiting messages of a group.

        more: whether some waited before the last message was settled and still do. If not, those that wait now were
        received after it and may be worked.
        """
        for hand in self.ready.withdraw(lane) if more else ():
            self._settling.give_back(hand)

    def _sort_out(self, hand: Hand) -> bool | None:
        """None: work it. Else it was settled; True: it no longer blocks its group."""
        if hand.lost or hand.lease.remaining() <= 0:
            self._settling.end(hand, "lost" if hand.lost else "expired")
            return False
        if hand.deadline <= self.clock.monotonic():
            # With a `stop_before_expiry` longer than a lease this happens at each delivery: then with a delay.
            never = self._stop_before >= hand.seconds
            delay = self._settling.backoff(hand) if never else 0
            self._settling.give_back(hand, delay, "expired")
            return False
        try:
            # Ask the guard first: a message that is done or being worked elsewhere is not poison, however often it
            # came.
            if self.options["guard"] is not None and (out := self._begin(hand, self.options["guard"])) is not None:
                return out
            if self._settling.poisoned(hand):
                most = self.options["poison_after"]
                reason = f"received more than {most} times; a worker may have died of it"
                return self._settling.dead_letter(hand, reason)
            hand.load()
        except BaseException as error:  # noqa: BLE001 a guard's or a record's storage may fail in any way
            return self._settling.settle(hand, of_error(error), 0.0)
        return None

    def _begin(self, hand: Hand, guard: Guard) -> bool | None:
        """Like `_sort_out`; None: the message has the claim."""
        key_of = self.options["guard_key"]
        key = hand.key if key_of is None else checks.text(in_one_process(key_of, hand.message), "guard_key")
        held_until = hand.lease.held_until
        wall = self.clock.wall()
        until = wall + max(held_until - self.clock.monotonic(), 0.0)
        answer = in_one_process(guard.begin, key, Claim(hand.key, hand.message.receive_count, wall, until))
        if isinstance(answer, Done):
            return self._settling.repeat(hand, answer.result)
        if not isinstance(answer, Begun):
            delay = self._settling.backoff(hand)
            self._settling.give_back(hand, min(delay, max(answer.until - wall, 0.0)), "busy")
            return False
        hand.held_claim = HeldClaim(key, answer.fence, held_until)
        if isinstance(guard, Prolonging):
            hand.keep_claim = partial(self._keep_claim, hand, guard)
        return None

    def _keep_claim(self, hand: Hand, guard: Prolonging) -> None:
        """Extend the claim so that it ends no earlier than the lease."""
        claim, until = hand.held_claim, hand.lease.held_until
        if claim is None or until <= claim.until:
            return
        wall = self.clock.wall()
        try:
            until_wall = wall + max(until - self.clock.monotonic(), 0.0)
            in_one_process(guard.prolong, claim.key, claim.fence, wall, until_wall)
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
