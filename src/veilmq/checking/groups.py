"""The rules of FIFO queues: groups in order, sequence numbers that grow, duplicates dropped for exactly the window.

Strategy, order: a message may be granted only if everything before it in its group is gone or comes in the same
receive. Grants are taken in the order of their ends. A message that may be gone by then stays out of the way for good,
so one cursor over the group finds the first that must still be there. Messages are ordered by their sequence numbers;
in a group in which one has none, by the times of their sends, as far as these do not overlap.

Strategy, duplicates: every message of one deduplication id was accepted between two known instants. Two of them, both
surely within the window, are one too many; a send that was absorbed when the window had surely ended is lost.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from veilmq.checking.lives import Granted, History, Life, with_highest_before
from veilmq.checking.log import FOREVER, Kind, Operation, Outcome, end_of
from veilmq.checking.report import Report, Rule
from veilmq.model.settings.queue import FIFO_SUFFIX


def check_groups(history: History, report: Report) -> None:
    """Check all groups of all FIFO queues; after `check_leases` and `check_message`."""
    groups: dict[tuple[str, str], list[Life]] = defaultdict(list)
    queues: dict[str, list[Life]] = defaultdict(list)
    for life in history.lives.values():
        if life.queue.endswith(FIFO_SUFFIX):
            group = _group_of(life)
            if group is not None:
                groups[life.queue, group].append(life)
            queues[life.queue].append(life)
    for queue, lives in queues.items():
        _check_sequences(queue, lives, report)
    for (queue, group), lives in groups.items():
        _Group(history, queue, group, lives).check(report)


def _group_of(life: Life) -> str | None:
    """Duplicates may name other groups than the message that was first; then a grant says which is its own."""
    names = {each.group for each in life.written} if life.sends else {each.grant.group for each in life.grants}
    if len(names) > 1:
        names = {life.grants[0].grant.group} if life.grants else set()
    return next(iter(names), None)


def _check_sequences(queue: str, lives: list[Life], report: Report) -> None:
    """What was acknowledged before another send began has the lower number."""
    numbered = [each for each in lives if each.sequence is not None]
    for life, highest in with_highest_before(
        numbered, lambda each: each.born_low, lambda each: each.born_high, lambda each: each.sequence or 0
    ):
        if highest is not None and (life.sequence or 0) <= (highest.sequence or 0):
            what = (
                f"message {life.message} of queue {queue} was sent after message {highest.message}, "
                f"and has sequence number {life.sequence} after {highest.sequence}"
            )
            report.add(Rule.SEQUENCE, queue, life.message, what, [*_origin(highest), *_origin(life)])
            return


def _origin(life: Life) -> list[Operation]:
    return (life.sends or life.maybe_sent)[:1] or [each.operation for each in life.grants[:1]]


class _Group:
    def __init__(self, history: History, queue: str, group: str, lives: list[Life]) -> None:
        self._queue, self._group = queue, group
        self._moves = queue in history.promises.dead_letters
        self._unknown = history.unknown_receives.get(queue, FOREVER)
        numbered = all(each.sequence is not None for each in lives)
        bounds = [self._numbers(each) if numbered else (each.born_low, each.born_high) for each in lives]
        order = sorted(range(len(lives)), key=lambda index: bounds[index][1])
        self._lives = [lives[index] for index in order]
        self._low = [bounds[index][0] for index in order]
        self._high = [bounds[index][1] for index in order]
        self._gone = [self._gone_low(each) for each in self._lives]

    @staticmethod
    def _numbers(life: Life) -> tuple[int, int]:
        sequence = life.sequence or 0
        return 2 * sequence, 2 * sequence - 1  # equal numbers are no order

    def _gone_low(self, life: Life) -> int:
        """A message that was received may move to the dead-letter queue, at its next turn; also if it came with an
        answer that got lost."""
        if not self._moves:
            return life.gone_low
        seen = min((each.invoked for each in life.grants), default=FOREVER)
        if not life.at_home:
            seen = min(seen, max(self._unknown, life.born_low))
        return min(life.gone_low, seen)

    def check(self, report: Report) -> None:
        """Report the first grant that was out of order."""
        grants = [
            (granted, index)
            for index, life in enumerate(self._lives)
            for granted in life.grants
            if granted.operation.queue == self._queue
        ]
        grants.sort(key=lambda each: each[0].returned)
        first = 0
        for granted, index in grants:
            while first < len(self._lives) and self._gone[first] < granted.returned:
                first += 1
            blocked = self._before(first, index, granted)
            if blocked is not None:
                later = self._lives[index]
                what = (
                    f"message {later.message} of group {self._group} was received, but message {blocked.message} "
                    "was sent before it and was still there"
                )
                holder = [each.operation for each in blocked.grants if each.invoked <= granted.returned]
                proof = [*_origin(blocked), *_origin(later), *holder[-3:], granted.operation]
                report.add(Rule.GROUP_ORDER, self._queue, later.message, what, proof)
                return

    def _before(self, first: int, index: int, granted: Granted) -> Life | None:
        """An earlier message that must still be there and is not in the same receive."""
        together: set[str] | None = None
        for place in range(first, len(self._lives)):
            if self._high[place] > self._low[index]:
                return None
            if place == index or self._gone[place] < granted.returned:
                continue
            if together is None:
                together = {each.message for each in granted.operation.grants}
            if self._lives[place].message not in together:
                return self._lives[place]
        return None


def check_duplicates(history: History, log: Iterable[Operation], report: Report) -> None:
    """Check all deduplication ids of all FIFO queues."""
    ids: dict[tuple[str, str | None, str], _Id] = defaultdict(_Id)
    by_group = history.promises.deduplication_by_group
    for operation in log:
        queue = operation.queue
        if not queue.endswith(FIFO_SUFFIX):
            continue
        if operation.kind is Kind.SEND and operation.deduplication is not None:
            ids[queue, operation.group if by_group else None, operation.deduplication].sent(operation)
        for grant in operation.grants:
            life = history.lives[grant.message]
            if grant.deduplication is not None and life.queue == queue:
                key = queue, grant.group if by_group else None, grant.deduplication
                ids[key].received(grant.message, operation)
    for (queue, _, name), each in ids.items():
        each.check(history, queue, name, report)


class _Id:
    """The messages of one deduplication id. Each was accepted between `low` and `high`."""

    def __init__(self) -> None:
        self.answers: list[Operation] = []
        self.unknown: list[Operation] = []
        self.low: dict[str, int] = {}
        self.high: dict[str, int] = {}
        self.proof: dict[str, Operation] = {}

    def sent(self, operation: Operation) -> None:
        if operation.outcome is Outcome.OK:
            self.answers.append(operation)
            self._seen(operation.message, operation)
            self.low[operation.message] = min(operation.invoked, self.low.get(operation.message, FOREVER))
        elif operation.outcome is Outcome.INFO:
            self.unknown.append(operation)

    def received(self, message: str, operation: Operation) -> None:
        self._seen(message, operation)

    def _seen(self, message: str, operation: Operation) -> None:
        if end_of(operation) < self.high.get(message, FOREVER):
            self.high[message] = end_of(operation)
            self.proof[message] = operation

    def check(self, history: History, queue: str, name: str, report: Report) -> None:
        window_us = history.promises.deduplication_us
        unknown = min((each.invoked for each in self.unknown), default=FOREVER)
        low = {message: min(self.low.get(message, FOREVER), unknown) for message in self.high}
        order = sorted((each for each in self.high if low[each] < FOREVER), key=lambda each: self.high[each])
        purges = history.purges.get(queue)
        for first, second in pairwise(order):
            begin, end = min(low[first], low[second]), self.high[second]
            purged = purges is not None and purges.may_take(begin) <= end
            if end - begin < history.promises.at_least(window_us) and not purged:
                what = f"queue {queue} took two messages, {first} and {second}, with deduplication id {name}"
                report.add(Rule.DEDUPLICATION, queue, second, what, [self.proof[first], self.proof[second]])
                return
        for answer in self.answers:
            high = self.high[answer.message]
            if answer.invoked > high + history.promises.at_most(window_us):
                what = (
                    f"queue {queue} dropped a send as a duplicate of message {answer.message}, "
                    f"though the window of deduplication id {name} had ended"
                )
                proof = [self.proof[answer.message], answer]
                report.add(Rule.DEDUPLICATION, queue, answer.message, what, proof)
                return
