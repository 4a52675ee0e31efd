"""The story of one message: what happened to it in one sentence, from its trace.

Strategy: `life_of` gathers the events (life.py), and a table of rules chooses the sentence: the first rule that applies
counts, so the special ones stand before the general. Each is a test of the life and a text, no more. Times are UTC, to
the second, with the date where it is not the day of the first event. What a reader could do is said with it. The
command line and the API show the same sentence.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from veilmq.admin.story.life import Lease, Life, TimeoutOf, life_of, unknown
from veilmq.model.events import EventRecord
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, SECOND_US, Instant

_UNITS: Final = ((DAY_US, "d"), (HOUR_US, "h"), (MINUTE_US, "min"), (SECOND_US, "s"))
_LEASES_S: Final = (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 43_200)
"""Lengths of leases that people choose."""
_ROOM: Final = 1.15
"""A lease that is to cover a work is so much longer."""
_LOST_NAMED_MAX: Final = 3
"""Of leases that ran out while their holder worked: the first ones and the last."""
_TURNS: Final = ("once", "twice")


class Rule(NamedTuple):
    """A name, when it applies, and what it says."""

    name: str
    applies: Callable[[Life], bool]
    sentence: Callable[[Life], str]


def story_of(life: Life) -> tuple[str, str]:
    """The rule's name and the sentence."""
    rule = next(each for each in RULES if each.applies(life))
    parts = [rule.sentence(life)]
    if life.absorbed and rule.name != "damaged":
        parts.append(f"A second send of it at {_at(life, life.absorbed[-1])} was absorbed as a duplicate.")
    if not life.is_complete:
        parts.append(f"What was before {_at(life, life.first)} is no longer kept.")
    return rule.name, " ".join(parts)


def _at(life: Life, instant: int | None) -> str:
    """The time of day, with the date if it is another day than the first event's."""
    assert instant is not None
    try:
        time = datetime.fromtimestamp(instant // SECOND_US, UTC)
        first = datetime.fromtimestamp(life.first // SECOND_US, UTC)
    except (ValueError, OverflowError, OSError):
        return "a time far away"
    return time.strftime("%H:%M:%S") if time.date() == first.date() else time.strftime("%Y-%m-%d %H:%M:%S")


def span(span_us: int, *, minutes_from: int = 2) -> str:
    """30 s, 1.5 s, 2 min 5 s, 4 d. minutes_from: spans of fewer minutes than this are shown in seconds, as people say
    them of leases of about a minute."""
    for place, (unit_us, name) in enumerate(_UNITS):
        if span_us < unit_us * (minutes_from if name == "min" else 1):
            continue
        if unit_us == SECOND_US:
            return f"{rounded(span_us, unit_us)} s"
        whole, rest = divmod(span_us, unit_us)
        smaller_us, smaller = _UNITS[place + 1]
        return f"{whole} {name}" + (f" {rest // smaller_us} {smaller}" if rest // smaller_us else "")
    return "0 s" if span_us < 1_000 else f"{span_us // 1_000} ms"


def rounded(span_us: int, unit_us: int) -> str:
    """The number of units, below ten with one digit behind the point."""
    whole, rest = divmod(span_us, unit_us)
    return f"{span_us / unit_us:.1f}".removesuffix(".0") if whole < 10 and rest else str(whole)


def times(count: int) -> str:
    """once, twice, 3 times."""
    return _TURNS[count - 1] if 0 < count <= len(_TURNS) else f"{count} times"


def _late(life: Life) -> list[Lease]:
    """Leases that ran out while their holder worked on: its delete or extension came later."""
    return [lease for lease in life.leases if lease.expired is not None and _sign_after(lease)]


def _sign_after(lease: Lease) -> bool:
    assert lease.expired is not None
    signs = [each.at for each in lease.refused] + ([lease.ended] if lease.ending == "deleted" else [])
    return any(at is not None and at >= lease.expired for at in signs)


def _advice(life: Life) -> str:
    """The lease that would have been long enough."""
    longest_us = max((lease.worked_us for lease in life.leases), default=0)
    if longest_us <= 0:
        return ""
    late = _late(life)
    of_queue = _of_all_messages(life.timeout_of(late[0].incarnation), longest_us, late[0].queue) if late else ""
    if of_queue:
        return f" Longest work seen: {span(longest_us)}; {of_queue}."
    needed_s = longest_us * _ROOM / SECOND_US
    lease_s = next((each for each in _LEASES_S if each >= needed_s), _LEASES_S[-1])
    granted_us = max(min((lease.lease_us for lease in late), default=0), SECOND_US)
    return (
        f" Longest work seen: {span(longest_us)}; a lease of {span(lease_s * SECOND_US)} or extending every"
        f" {span(granted_us // 2)} avoids this."
    )


def _of_all_messages(timeout: Mapping[str, Any] | None, longest_us: int, queue: str) -> str:
    """What the queue's page advises, if it does, and whether that would have been enough for this message."""
    if timeout is None or timeout["extend"] is None:
        return ""
    extend, best_us, least_us = timeout["extend"], timeout["recommended_us"], timeout["at_least_us"]
    extending = f"leases of {span(extend['lease_us'])}, extended every {span(extend['every_us'])},"
    known_us = least_us if best_us is None else best_us
    if known_us is None:
        return f"{extending} avoid this"
    best = f"{span(known_us)} or more" if best_us is None else span(known_us)
    if longest_us > known_us:
        return (
            f"the best timeout for all messages of {queue} is {best}, and this one takes longer: {extending} avoid this"
        )
    return f"a lease of {best}, the best timeout for all messages of {queue}, or {extending} avoid this"


def _deleter(life: Life) -> Lease | None:
    return next((lease for lease in life.leases if lease.ending == "deleted"), None)


def _winner(life: Life) -> Lease:
    """The same, for a rule that applies only if there is one."""
    found = _deleter(life)
    assert found is not None
    return found


def _length(lease: Lease) -> str:
    """How long a lease was that ran out, with its extensions."""
    if not lease.extended or lease.expired is None:
        return span(lease.lease_us)
    return f"{span(lease.expired - lease.began)}, extended {times(len(lease.extended))},"


def _processed_again(life: Life) -> str:
    lost = [lease for lease in _late(life) if lease.ending != "deleted"]
    winner = _winner(life)
    named = lost if len(lost) <= _LOST_NAMED_MAX else [*lost[: _LOST_NAMED_MAX - 1], lost[-1]]
    parts = [
        f"{lease.name}'s lease of {_length(lease)} ended at {_at(life, lease.expired)} while it worked"
        for lease in named
    ]
    if len(named) < len(lost):
        parts.insert(-1, f"so did {len(lost) - len(named)} more")
    parts.append(f"{winner.name} deleted it at {_at(life, winner.ended)}")
    parts += [
        f"{lease.name}'s delete at {_at(life, lease.late_delete.at)} was refused"
        for lease in named
        if lease.late_delete is not None
    ]
    return f"Processed {times(len(lost) + 1)}: {'; '.join(parts)}.{_advice(life)}"


def _worked_twice(life: Life) -> bool:
    winner = _deleter(life)
    return winner is not None and any(
        lease is not winner and any(each.act == "delete" for each in lease.refused) for lease in _late(life)
    )


def _working_twice(life: Life) -> bool:
    last = life.last
    return (
        life.end == ""
        and last is not None
        and not last.ending
        and any(lease is not last and lease.refused for lease in _late(life))
    )


def _being_processed_again(life: Life) -> str:
    last = life.last
    assert last is not None
    lost = next(lease for lease in _late(life) if lease is not last and lease.refused)
    refused = lost.refused[-1]
    return (
        f"Being processed again: {lost.name}'s lease of {_length(lost)} ended at {_at(life, lost.expired)}"
        f" while it worked, and its {refused.act} at {_at(life, refused.at)} was refused; {last.name} has it"
        f" until {_at(life, last.due)}.{_advice(life)}"
    )


def _deleted_late(life: Life) -> str:
    winner = _winner(life)
    return (
        f"Processed once, but late: {winner.name}'s lease of {_length(winner)} ended at"
        f" {_at(life, winner.expired)}, and it deleted the message at {_at(life, winner.ended)}, before anybody else"
        f" received it.{_advice(life)}"
    )


def _resumed(life: Life) -> str:
    winner = _winner(life)
    return (
        f"Processed once: {winner.name}'s lease of {span(winner.lease_us)} had ended at"
        f" {_at(life, winner.expired)} when it extended it at {_at(life, winner.resumed)}; nobody else had received the"
        f" message, and it deleted it at {_at(life, winner.ended)}."
    )


def _after_loss(life: Life) -> str:
    winner = _winner(life)
    lost = [lease for lease in life.leases if lease.ending == "expired"]
    last = lost[-1]
    return (
        f"Processed on receive {life.leases.index(winner) + 1}: {last.name}'s lease of {_length(last)}"
        f" ended at {_at(life, last.expired)} without a sign of it, as of a worker that died or gave up;"
        f" {winner.name} received it at {_at(life, winner.began)} and deleted it at {_at(life, winner.ended)}."
    )


def _after_failures(life: Life) -> str:
    winner = _winner(life)
    failed = [lease for lease in life.leases if lease.ending == "failed"]
    error = failed[-1].error
    return (
        f"Processed on receive {life.leases.index(winner) + 1}: workers gave it back {times(len(failed))}"
        f"{f', at last for {error}' if error else ''}; {winner.name} deleted it at {_at(life, winner.ended)}."
    )


def _after_release(life: Life) -> str:
    winner = _winner(life)
    given_back = [lease for lease in life.leases if lease.ending in {"released", "undelivered"}]
    return (
        f"Processed on receive {life.leases.index(winner) + 1}: it was given back {times(len(given_back))} before, by"
        f" {given_back[-1].name} at {_at(life, given_back[-1].ended)}; {winner.name} deleted it at"
        f" {_at(life, winner.ended)}."
    )


def _done(life: Life) -> str:
    winner = _winner(life)
    waited = "" if not winner.waited_us else f" after {span(winner.waited_us)} in the queue"
    extended = f", extended {times(len(winner.extended))}" if winner.extended else ""
    ended_us = (winner.ended or winner.began) - winner.began
    return (
        f"Processed once: {winner.name} received it at {_at(life, winner.began)}{waited} and deleted it"
        f" {span(ended_us)} later{extended}."
    )


def _dead(life: Life) -> str:
    move = life.moves[-1]
    error = f"; the last failure was {move.error}" if move.error else ""
    expired = [lease for lease in life.leases if lease.ending == "expired"]
    how = ""
    if expired and not error:
        how = f"; {times(len(expired))} a lease ended without a sign of its holder"
    return (
        f"Dead letter: received {times(max(move.receives, 1))} in {move.source} and never deleted, so it went to"
        f" {move.target or 'its dead-letter queue'} at {_at(life, move.at)}{error}{how}.{_where_now(life)}"
    )


def _where_now(life: Life) -> str:
    """What has become of a message since it was moved."""
    here = life.here
    winner = _deleter(life)
    if life.end == "deleted" and winner is not None:
        return f" {winner.name} deleted it from {winner.queue} at {_at(life, winner.ended)}."
    if life.end:
        return f" {_ENDS[life.end]} at {_at(life, life.ended)}."
    if here and not here[-1].ending:
        return f" {here[-1].name} has it until {_at(life, here[-1].due)}."
    return f" It waits in {life.queue}." if life.queue else " It waits there."


_ENDS: Final = {
    "deleted": "It was deleted",
    "expired": "It expired",
    "purged": "It was purged",
    "queue_deleted": "Its queue was deleted",
    "quarantine_dropped": "It was dropped from quarantine",
}


def _moved(life: Life) -> str:
    move = life.moves[-1]
    dead = any(each.how == "dead_lettered" for each in life.moves)
    what = "Redriven" if dead else "Moved"
    return (
        f"{what}: {move.who or 'an operator'} moved it from {move.source} to {move.target or 'another queue'} at"
        f" {_at(life, move.at)}.{_where_now(life)}"
    )


def _received(life: Life) -> str:
    return f"received {times(len(life.leases))}" if life.leases else "never received"


def _expired(life: Life) -> str:
    lived = "" if life.sent is None or life.ended is None else f" after {span(max(0, life.ended - life.sent))}"
    return f"Expired at {_at(life, life.ended)}{lived} in {life.queue}, {_received(life)}: it was never deleted."


def _purged(life: Life) -> str:
    others = f" with all {life.count} messages" if life.count > 1 else ""
    by = f" by {life.ended_by}" if life.ended_by else ""
    what = "Deleted with its queue" if life.end == "queue_deleted" else f"Purged from {life.queue}"
    return f"{what} at {_at(life, life.ended)}{others}{by}, {_received(life)}."


def _damaged(life: Life) -> str:
    dropped = f" {life.ended_by or 'an operator'} dropped it at {_at(life, life.ended)}." if life.end else ""
    return (
        f"Damaged: what the disk gave back differs from what was sent, so it was set apart at"
        f" {_at(life, life.quarantined)} and nobody receives it.{dropped}"
    )


def _in_flight(life: Life) -> str:
    last = life.last
    assert last is not None
    before = len(life.leases) - 1
    again = f", for the {_nth(before + 1)} time" if before else ""
    extended = f", extended {times(len(last.extended))}" if last.extended else ""
    over = "ended" if last.due <= life.now else "ends"
    reason = _reason_of(life.leases[-2], life) if before else ""
    return (
        f"In flight{again}: {last.name} received it at {_at(life, last.began)}, and its lease {over} at"
        f" {_at(life, last.due)}{extended}.{reason}"
    )


def _nth(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def _reason_of(lease: Lease, life: Life) -> str:
    """Why the lease before did not end with a delete."""
    at = _at(life, lease.ended) if lease.ended is not None else ""
    if lease.ending == "expired":
        return f" Before, {lease.name}'s lease of {_length(lease)} ended at {at} without a sign of it."
    if lease.ending == "failed":
        return f" Before, {lease.name} gave it back at {at}{f' for {lease.error}' if lease.error else ''}."
    if lease.ending:
        return f" Before, {lease.name} gave it back at {at}."
    return ""


def _retry(life: Life) -> str:
    last = life.last
    assert last is not None
    error = f" for {last.error}" if last.error else ""
    return (
        f"Waiting for a retry, {_received(life)}: {last.name} gave it back at {_at(life, last.ended)}{error}; it"
        f" can be received from {_at(life, last.retry_at)} on."
    )


def _back(life: Life) -> str:
    last = life.last
    assert last is not None
    waited_us = max(0, life.now - (last.retry_at or last.ended or life.now))
    return f"Waiting again in {life.queue} for {span(waited_us)}, {_received(life)}.{_reason_of(last, life)}"


def _delayed(life: Life) -> str:
    until = max(life.visible or 0, life.rescheduled or 0)
    by = f" by {life.sender}" if life.sender else ""
    return (
        f"Delayed: sent to {life.queue} at {_at(life, life.sent)}{by}, it can be received from {_at(life, until)} on."
    )


def _published(life: Life) -> str:
    topic, copies = str(life.published.get("topic", "")).rpartition("/")[2], life.published.get("copies", 0)
    by = f" by {life.sender}" if life.sender else ""
    parts = [f"{copies} cop{'y' if copies == 1 else 'ies'} made"]
    parts += [
        f"{life.published[name]} that a queue could not take {became}"
        for name, became in (("dead_lettered", "sent to a dead-letter queue"), ("left_out", "left out"))
        if life.published.get(name)
    ]
    own = " Each copy has an id of its own; its event `sent` names this one." if copies else ""
    return f"Published to {topic} at {_at(life, life.sent)}{by}: {', '.join(parts)}.{own}"


def _waiting(life: Life) -> str:
    if life.sent is None:
        return f"Waiting in {life.queue}, {_received(life)} as far as the history goes."
    since = max(life.sent, life.visible or 0, life.rescheduled or 0)
    by = f" by {life.sender}" if life.sender else ""
    waited = span(max(0, life.now - since))
    return f"Waiting in {life.queue} for {waited}, never received: sent at {_at(life, life.sent)}{by}."


def _taken_back(life: Life) -> str:
    return (
        f"Taken back: {life.ended_by or 'its sender'} deleted it at {_at(life, life.ended)} before anybody received it."
    )


def _is_of_pushes(life: Life) -> bool:
    """Whether nothing came after its pushes: the server itself received it for each of them."""
    if not life.pushes or (life.moves and life.moves[-1].how == "moved"):
        return False
    return not life.leases or life.leases[-1].began <= life.pushes[-1].at


def _pushed(life: Life) -> str:
    last, often = life.pushes[-1], times(len(life.pushes))
    if not last.failure:
        tries = "" if len(life.pushes) == 1 else f", at the {_nth(len(life.pushes))} attempt"
        return f"Pushed to its endpoint at {_at(life, last.at)}{tries}."
    failed = f"pushed {often}, last at {_at(life, last.at)} ({last.failure})"
    if life.moves and life.moves[-1].at >= last.at:
        went = f"It went to {life.moves[-1].target} at {_at(life, life.moves[-1].at)}."
        return f"Not delivered: {failed}. {went}{_where_now(life)}"
    if life.end:
        return f"Not delivered: {failed}. {_ENDS[life.end]} at {_at(life, life.ended)}."
    return f"Not delivered yet: {failed}. It is tried again."


def _deleted(life: Life) -> str:
    return f"Deleted at {_at(life, life.ended)}{f' by {life.ended_by}' if life.ended_by else ''}, {_received(life)}."


def _ends(*names: str) -> Callable[[Life], bool]:
    return lambda life: life.end in names


def _done_after(*endings: str) -> Callable[[Life], bool]:
    """Deleted by a holder, after leases that ended so."""
    return lambda life: _deleter(life) is not None and any(lease.ending in endings for lease in life.leases)


def _last_was(*endings: str) -> Callable[[Life], bool]:
    return lambda life: life.last is not None and life.last.ending in endings


def _is_later(life: Life, instant: Instant | None) -> bool:
    return instant is not None and instant > life.now


RULES: Final = (
    Rule("damaged", lambda life: life.quarantined is not None, _damaged),
    Rule("processed_again", _worked_twice, _processed_again),
    Rule("pushed", _is_of_pushes, _pushed),
    Rule("moved", lambda life: bool(life.moves) and life.moves[-1].how == "moved", _moved),
    Rule("dead_letter", lambda life: bool(life.moves), _dead),
    Rule("purged", _ends("purged", "queue_deleted"), _purged),
    Rule("expired", _ends("expired"), _expired),
    Rule("processed_resumed", lambda life: (won := _deleter(life)) is not None and won.resumed is not None, _resumed),
    Rule(
        "processed_late",
        lambda life: (won := _deleter(life)) is not None and won.expired is not None,
        _deleted_late,
    ),
    Rule("processed_after_loss", _done_after("expired"), _after_loss),
    Rule("processed_after_failures", _done_after("failed"), _after_failures),
    Rule("processed_after_release", _done_after("released", "undelivered"), _after_release),
    Rule("processed", lambda life: _deleter(life) is not None, _done),
    Rule("taken_back", lambda life: life.end == "deleted" and not life.leases and life.is_complete, _taken_back),
    Rule("deleted", lambda life: bool(life.end), _deleted),
    Rule("being_processed_again", _working_twice, _being_processed_again),
    Rule("in_flight", _last_was(""), _in_flight),
    Rule("retry", lambda life: _last_was("failed")(life) and _is_later(life, life.leases[-1].retry_at), _retry),
    Rule("back", lambda life: life.last is not None, _back),
    Rule("published", lambda life: bool(life.published), _published),
    Rule(
        "delayed",
        lambda life: life.sent is not None and max(life.visible or 0, life.rescheduled or 0) > life.now,
        _delayed,
    ),
    Rule("waiting", lambda life: True, _waiting),
)
"""The first that applies counts."""


def shown_story(
    events: Sequence[EventRecord], now: Instant, *, is_complete: bool, timeout_of: TimeoutOf = unknown
) -> dict[str, Any] | None:
    """{rule, sentence}; None if there is no event."""
    if not events:
        return None
    rule, sentence = story_of(life_of(events, now, is_complete=is_complete, timeout_of=timeout_of))
    return {"rule": rule, "sentence": sentence}
