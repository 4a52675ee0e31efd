"""The rules of one message and of its leases: not lost, not invented, not changed, neither too early nor too late.

Strategy, leases: one at a time, stale handles change nothing, deleted is deleted, counts grow. A grant happened between
the begin and the end of its receive. One grant surely came before another if its receive ended before the other began
or, where both have counts, if its count is lower. What must still have been running is decided by `surely_runs_until`,
which takes the least that the acknowledged calls allow.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import accumulate, pairwise
from typing import NamedTuple

from veilmq.checking.lives import Granted, History, Life, with_highest_before
from veilmq.checking.log import FOREVER, Kind, Operation, Outcome, end_of
from veilmq.checking.report import Promises, Report, Rule
from veilmq.model.settings.queue import FIFO_SUFFIX


def check_message(history: History, life: Life, report: Report) -> None:
    """Check one message; after `check_leases`. Lowers `life.gone_low` to its expiry."""
    if life.sends:
        _check_content(life, report)
        _check_times(history, life, report)
        _check_place(life, report)
        _check_loss(history, life, report)
        if len(life.sends) > 1 and not life.queue.endswith(FIFO_SUFFIX):
            what = f"{len(life.sends)} sends were acknowledged as the one message {life.message} of queue {life.queue}"
            report.add(Rule.LOST, life.queue, life.message, what, life.sends)


def check_invented(history: History, report: Report) -> None:
    """Each message that no acknowledged send has needs a send without an answer, of its queue and body."""
    unknown: dict[tuple[str, str], list[Life]] = defaultdict(list)
    for life in history.lives.values():
        if not life.sends:
            unknown[life.queue, life.grants[0].grant.body].append(life)
    for (queue, body), lives in unknown.items():
        lives.sort(key=lambda each: each.born_high)
        for number, life in enumerate(lives, 1):
            if life.maybe_count < number:
                what = f"message {life.message} came from queue {queue}, but no send can have sent it"
                refused = history.refused_sends.get((queue, body), [])[:3]
                proof = [*refused, *life.maybe_sent, life.grants[0].operation]
                report.add(Rule.INVENTED, queue, life.message, what, proof)


def _check_content(life: Life, report: Report) -> None:
    uses = [each for uses in life.uses.values() for each in uses]
    bodies = {each.body for each in life.written} | {
        each.body for each in uses if each.kind is Kind.EXTEND and each.body
    }
    groups = {each.group for each in life.written}
    number = life.sequence
    for operation, grant in life.grants:
        if grant.body not in bodies:
            what = f"message {life.message} of queue {life.queue} came with body {grant.body}, which nobody wrote"
        elif grant.group not in groups and grant.group is not None:
            what = f"message {life.message} of queue {life.queue} came in group {grant.group}"
        elif grant.sequence is not None and grant.sequence != number and operation.queue == life.queue:
            what = f"message {life.message} of queue {life.queue} came with sequence number {grant.sequence}"
        else:
            continue
        report.add(Rule.CHANGED, life.queue, life.message, what, [*life.sends, operation])
        return


def _check_times(history: History, life: Life, report: Report) -> None:
    promises = history.promises
    rescheduled = any(each.lease in life.uses for each in life.sends if each.lease is not None)
    visible = life.born_low + promises.at_least(min(each.delay_us for each in life.written))
    life.gone_low = min(life.gone_low, _expires_low(promises, life))
    known = _ttls(promises, life)
    expired = FOREVER
    if len(known) == len(life.written):
        expired = life.born_high + promises.at_most(max(known))
    for each in life.grants:
        if each.returned < visible and not rescheduled:
            what = f"message {life.message} of queue {life.queue} was received before its delay had ended"
            report.add(Rule.EARLY, life.queue, life.message, what, [*life.sends, each.operation])
            return
        if each.invoked > expired and each.operation.queue == life.queue:
            what = f"message {life.message} of queue {life.queue} was received after it had expired"
            report.add(Rule.LATE, life.queue, life.message, what, [*life.sends, each.operation])
            return


def _ttls(promises: Promises, life: Life) -> list[int]:
    ttls = (each.ttl_us if each.ttl_us is not None else promises.retention_us for each in life.written)
    return [each for each in ttls if each is not None]


def _expires_low(promises: Promises, life: Life) -> int:
    """From when on it may have expired."""
    known = _ttls(promises, life)
    return life.born_low + promises.at_least(min(known)) if known else FOREVER


def _check_place(life: Life, report: Report) -> None:
    for operation, _ in life.grants:
        if operation.queue not in life.places:
            what = f"message {life.message} of queue {life.queue} came from queue {operation.queue}"
            report.add(Rule.INVENTED, operation.queue, life.message, what, [*life.sends, operation])
            return


def _check_loss(history: History, life: Life, report: Report) -> None:
    # Drains of queues in which, by the log, it cannot have been do not count.
    entered = zip(life.places, life.entered, strict=True)
    drains = history.drained(tuple(queue for queue, low in entered if low < FOREVER))
    if drains and all(map(history.is_drained, life.places)) and life.born_high <= drains[0].invoked:
        found = any(each.returned >= drains[0].invoked for each in life.grants)
        if life.gone_low > end_of(drains[-1]) and not found:
            what = f"message {life.message} of queue {life.queue} was acknowledged, and a drain did not find it"
            uses = [each for uses in life.uses.values() for each in uses]
            last = [each.operation for each in life.grants[-1:]]
            report.add(Rule.LOST, life.queue, life.message, what, [*life.sends, *last, *uses[-3:], *drains])
    elif not life.grants and life.gone_low == FOREVER and any(each.outcome is Outcome.OK for each in life.sends):
        report.not_yet_seen += 1


def check_leases(history: History, life: Life, report: Report) -> None:
    """Check one message; sets `life.stale` and `life.gone_low`."""
    counted = _check_counts(life, report)
    if counted:
        life.grants.sort(key=lambda each: each.grant.count)
    _check_overlaps(history.promises, life, counted, report)
    deletes = _check_uses(history, life, counted, report)
    purges = history.purges.get(life.queue)
    purged = purges.first_after(life.born_high) if purges is not None else None
    _check_returns(history.promises, life, deletes, purged, report)
    life.gone_low = min(life.gone_low, history.purged_low(life))


def _check_counts(life: Life, report: Report) -> bool:
    """Whether the counts give the order of all grants."""
    if len({each.operation.queue for each in life.grants}) > 1:
        by_queue: dict[str, list[Granted]] = defaultdict(list)
        for each in life.grants:
            by_queue[each.operation.queue].append(each)
        for grants in by_queue.values():
            _grows(life, [each for each in grants if each.grant.count], report)
        return False
    counted = [each for each in life.grants if each.grant.count]
    return _grows(life, counted, report) and len(counted) == len(life.grants)


def _grows(life: Life, grants: list[Granted], report: Report) -> bool:
    """Grants of one queue."""
    by_count: dict[int, Granted] = {}
    for each, best in with_highest_before(
        grants, lambda each: each.invoked, lambda each: each.returned, lambda each: each.grant.count
    ):
        other = by_count.setdefault(each.grant.count, each)
        if other is each and best is not None and best.grant.count > each.grant.count:
            other = best
        if other is not each:
            counts = f"{other.grant.count}, then {each.grant.count}"
            what = f"message {life.message} of queue {life.queue} came with receive count {counts}"
            report.add(Rule.COUNT, life.queue, life.message, what, [other.operation, each.operation])
            return False
    return True


def surely_runs_until(promises: Promises, life: Life, granted: Granted, low: int, high: int) -> tuple[int, Operation]:
    """Until when the lease must have been running, as seen by something that happened between `low` and `high`; and the
    call that says so."""
    grant = granted.grant
    calls = [(granted.invoked, granted.returned, grant.lease_us, granted.operation)]
    for each in life.uses.get(grant.lease, ()):
        if each.kind is not Kind.DELETE and each.invoked < high:
            calls.append((each.invoked, end_of(each), each.lease_us, each))
    # Calls that ended before another acknowledged one began were replaced by it.
    last = max(invoked for invoked, end, _, _ in calls if end <= low or invoked == granted.invoked)
    left = [
        (invoked + promises.at_least(lease_us), call)
        for invoked, end, lease_us, call in calls
        if end > last or invoked == last
    ]
    return min(left, key=lambda each: each[0])


def _check_overlaps(promises: Promises, life: Life, counted: bool, report: Report) -> None:
    for first, second in pairwise(life.grants):
        end, call = surely_runs_until(promises, life, first, second.invoked, second.returned)
        if second.returned >= end:
            continue
        if not counted and first.returned > second.invoked:
            other, _ = surely_runs_until(promises, life, second, first.invoked, first.returned)
            if first.returned >= other:
                continue
        what = (
            f"message {life.message} of queue {life.queue} was granted as lease {second.grant.lease} "
            f"while lease {first.grant.lease} was still running"
        )
        report.add(Rule.OVERLAP, life.queue, life.message, what, [first.operation, call, second.operation])


class _Deletes(NamedTuple):
    """Of the deletes that surely happened, those that were answered first."""

    by_place: list[Operation | None]
    """After it the message is neither there nor in a place before: it was deleted, or had moved on."""

    def of(self, queue: str, life: Life) -> Operation | None:
        """After which it is not in that queue."""
        return self.by_place[life.place_of(queue)]


def _check_uses(history: History, life: Life, counted: bool, report: Report) -> _Deletes:
    promises = history.promises
    later = _Successors(life, counted)
    sent = {each.lease for each in life.sends if each.lease is not None}
    place = {each.grant.lease: index for index, each in enumerate(life.grants)}
    deletes: list[Operation] = []
    accepted: list[tuple[Operation, Operation]] = []
    """Stale deletes, each with what made its handle stale."""
    for lease, uses in life.uses.items():
        granted = None if lease in sent else life.grants[place[lease]]
        successor = later.first() if granted is None else later.of(place[lease], granted)
        rotated = _Rotations(uses)
        for use in uses:
            proof = successor.operation if successor is not None and successor.returned <= use.invoked else None
            if proof is None:
                proof = rotated.before(use)
            if use.kind is not Kind.DELETE:
                if proof is not None and use.outcome is Outcome.OK:
                    _stale(life, use, [proof], report)
            elif proof is None:
                deletes.append(use)
            elif use.outcome is Outcome.OK:
                life.stale.append(use)
                accepted.append((use, proof))
    life.gone_low = min((each.invoked for each in deletes), default=FOREVER)
    if promises.stale_deletes_refused:
        for use, proof in accepted:
            # A message that is gone, to the dead-letter queue for example, may be deleted again.
            if min(life.gone_low, _moved_low(history, life, use)) > end_of(use):
                _stale(life, use, [proof], report)
    done = sorted((each for each in deletes if each.outcome is Outcome.OK), key=end_of)
    if not promises.stale_deletes_refused:
        done = [each for each in done if _surely_held(promises, life, place, each)]
    found = _Deletes([_first_delete(promises, life, place, done, at) for at in range(len(life.places))])
    _check_uses_of_deleted(life, found, report)
    return found


def _first_delete(
    promises: Promises, life: Life, place: dict[int, int], done: list[Operation], at: int
) -> Operation | None:
    """A late delete finds nothing where the message has moved on."""
    for each in done:
        if life.place_of(each.queue) >= at or _surely_held(promises, life, place, each):
            return each
    return None


def _moved_low(history: History, life: Life, use: Operation) -> int:
    """From when on it may have moved on from the queue of this use: not if later drains did not find it behind that."""
    behind = life.place_of(use.queue) + 1
    later = life.places[behind:]
    if not later:
        return FOREVER
    drains = history.drained(later)
    seen = any(each.operation.queue not in life.places[:behind] for each in life.grants)
    if drains and drains[0].invoked >= end_of(use) and not seen:
        gone_low = min(_expires_low(history.promises, life), history.purged_low(life, behind))
        if gone_low > end_of(drains[-1]):
            return FOREVER
    return life.entered[behind]


def _check_uses_of_deleted(life: Life, deletes: _Deletes, report: Report) -> None:
    for uses in life.uses.values():
        for use in uses:
            late = use.kind is not Kind.DELETE and use.outcome is Outcome.OK
            deleted = deletes.of(use.queue, life)
            if late and deleted is not None and use.invoked >= end_of(deleted):
                _stale(life, use, [deleted], report)


def _stale(life: Life, use: Operation, proof: list[Operation], report: Report) -> None:
    grants = [each.operation for each in life.grants if each.grant.lease == use.lease]
    what = f"queue {life.queue} accepted the void handle of lease {use.lease} of message {life.message} ({use.kind})"
    report.add(Rule.STALE, life.queue, life.message, what, [*grants, *proof, use])


def _surely_held(promises: Promises, life: Life, place: dict[int, int], delete: Operation) -> bool:
    """Whether the lease was surely still running when the delete happened."""
    if delete.lease is None or delete.lease not in place:
        return False
    rotating = [each for each in life.uses[delete.lease] if each.rotates and each.rotation >= delete.rotation]
    if any(each.invoked < end_of(delete) for each in rotating):
        return False
    granted = life.grants[place[delete.lease]]
    end, _ = surely_runs_until(promises, life, granted, delete.invoked, end_of(delete))
    return end_of(delete) < end


class _Successors:
    """Which grant surely came after another, and was answered first."""

    def __init__(self, life: Life, counted: bool) -> None:
        self._counted = counted
        self._invoked = [each.invoked for each in life.grants]
        self._first: list[Granted] = list(accumulate(reversed(life.grants), self._earlier))[::-1]

    @staticmethod
    def _earlier(a: Granted, b: Granted) -> Granted:
        return b if b.returned <= a.returned else a

    def first(self) -> Granted | None:
        return self._first[0] if self._first else None

    def of(self, place: int, granted: Granted) -> Granted | None:
        at = place + 1 if self._counted else bisect_left(self._invoked, granted.returned, place + 1)
        return self._first[at] if at < len(self._first) else None


class _Rotations:
    """Which extends of one lease replaced its handle."""

    def __init__(self, uses: list[Operation]) -> None:
        rotating = [each for each in uses if each.rotates and each.outcome is Outcome.OK]
        rotating.sort(key=end_of)
        self._ends = [end_of(each) for each in rotating]
        self._highest: list[Operation] = list(accumulate(rotating, self._higher))

    @staticmethod
    def _higher(a: Operation, b: Operation) -> Operation:
        return b if b.rotation > a.rotation else a

    def before(self, use: Operation) -> Operation | None:
        """An extend that had replaced the handle before this use of it."""
        at = bisect_right(self._ends, use.invoked)
        if not at or self._highest[at - 1].rotation < use.rotation or self._highest[at - 1] is use:
            return None
        return self._highest[at - 1]


def _check_returns(promises: Promises, life: Life, deletes: _Deletes, purged: Operation | None, report: Report) -> None:
    for granted in life.grants:
        deleted = deletes.of(granted.operation.queue, life)
        if deleted is not None and granted.invoked >= end_of(deleted):
            what = f"message {life.message} of queue {life.queue} was received after its delete was acknowledged"
            holder = [each.operation for each in life.grants if each.grant.lease == deleted.lease]
            report.add(Rule.RESURRECTED, life.queue, life.message, what, [*holder, deleted, granted.operation])
            return
    if purged is not None:
        # What moved to the dead-letter queue before is no longer the purge's.
        back = next((each for each in life.at_home if each.invoked >= end_of(purged) + promises.purge_us), None)
        if back is not None:
            what = f"message {life.message} of queue {life.queue} was received after its queue was purged"
            report.add(Rule.RESURRECTED, life.queue, life.message, what, [*life.sends[:1], purged, back.operation])
