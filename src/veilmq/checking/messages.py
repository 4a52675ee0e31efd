"""The rules of one message: not lost, not invented, not changed, neither too early nor too late."""

from collections import defaultdict

from veilmq.checking.lives import History, Life
from veilmq.checking.log import FOREVER, Kind, Operation, Outcome
from veilmq.checking.report import Report, Rule
from veilmq.model.settings.queue import FIFO_SUFFIX


def check_message(history: History, life: Life, report: Report) -> None:
    """Check one message; after `check_leases`. Lowers `life.gone_low` to its expiry."""
    if life.sends:
        _check_content(life, report)
        _check_times(history, life, report)
        _check_place(history, life, report)
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
    ttls = [each.ttl_us if each.ttl_us is not None else promises.retention_us for each in life.written]
    known = [each for each in ttls if each is not None]
    expired = FOREVER
    if known:
        life.gone_low = min(life.gone_low, life.born_low + promises.at_least(min(known)))
        if len(known) == len(ttls):
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


def _check_place(history: History, life: Life, report: Report) -> None:
    places = history.places(life)
    for operation, _ in life.grants:
        if operation.queue not in places:
            what = f"message {life.message} of queue {life.queue} came from queue {operation.queue}"
            report.add(Rule.INVENTED, operation.queue, life.message, what, [*life.sends, operation])
            return


def _check_loss(history: History, life: Life, report: Report) -> None:
    drains: list[Operation] = []
    for queue in history.places(life):
        if queue in history.drains:
            drains.append(history.drains[queue])
    whole = len(drains) == len(history.places(life))
    begin = min((each.invoked for each in drains), default=FOREVER)
    if whole and life.born_high <= drains[0].invoked:
        end = max(each.returned or FOREVER for each in drains)
        if life.gone_low > end and not any(each.returned >= begin for each in life.grants):
            what = f"message {life.message} of queue {life.queue} was acknowledged, and a drain did not find it"
            uses = [each for uses in life.uses.values() for each in uses]
            last = [each.operation for each in life.grants[-1:]]
            report.add(Rule.LOST, life.queue, life.message, what, [*life.sends, *last, *uses[-3:], *drains])
    elif not life.grants and life.gone_low == FOREVER and any(each.outcome is Outcome.OK for each in life.sends):
        report.not_yet_seen += 1
