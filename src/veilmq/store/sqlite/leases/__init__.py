"""Leases: granted to receives, by the kind of queue and at the rate that its owner set; used through handles.py.

Strategy: a standard queue that never had a message with a group is served by `claims` alone and pays for nothing else.
A rate is a token bucket that fills at that rate and holds one second's worth. It is only in memory, and full after a
restart; a batch that is rolled back returns its tokens. An empty queue uses none.
"""

from collections.abc import Callable
from itertools import islice
from math import inf

import msgspec

from veilmq.model.commands import Receive
from veilmq.model.errors import QueueMissing, RateExceeded
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Outcome, Received
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.leases import claims, group_claims
from veilmq.store.sqlite.leases.claims import RETURNS_MAX
from veilmq.store.sqlite.leases.expiry import look_for_due
from veilmq.store.sqlite.messages.groups import update_rows


def receive_all(writer: Writer, commands: list[Receive]) -> list[Outcome]:
    """Receives in their order; those next to each other that are alike share most of the work."""
    outcomes: list[Outcome] = []
    while (place := len(outcomes)) < len(commands):
        if place < len(commands) - 1:
            outcomes += _receive_alike(writer, commands, place)
        if place == len(outcomes):
            outcomes.append(receive(writer, commands[place]))
    return outcomes


def _receive_alike(writer: Writer, commands: list[Receive], place: int) -> list[Outcome]:
    """The outcomes of the commands from that place on that are like the first of them and need nothing special."""
    first = commands[place]
    key, origin, cap = first.queue, first.origin, first.in_flight_max
    queue = writer.queue(key)
    if queue is None or queue.groups is not None or queue.settings.receives_per_second_max is not None:
        return []
    if writer.bytes_left <= 0 or (line := claims.shared_line(writer, queue)) is None:
        return []
    room = inf if cap is None else cap - queue.in_flight
    end = place
    for command in islice(commands, place, None):
        room -= command.count_max
        if room < 0 or command.origin is not origin or command.queue is not key or command.in_flight_max != cap:
            break
        end += 1
    outcomes = claims.receive_alike(writer, queue, line, commands[place:end]) if end - place > 1 else []
    if writer.bytes_left <= 0 and queue.visible:
        queue.woken += 1  # as in `receive`
    return outcomes


def receive(writer: Writer, command: Receive) -> Outcome:
    """Lease up to `count_max` messages; empty if none is available. Fewer, or none, if the batch has delivered enough
    bytes."""
    if writer.bytes_left <= 0:
        return Received([], cut=True)
    queue = writer.queue(command.queue)
    if queue is None:
        return QueueMissing(queue=str(command.queue))
    if (rate := queue.settings.receives_per_second_max) is not None:
        outcome = receive_within(writer, queue, rate, command, lambda within: _receive(writer, queue, within))
    else:
        outcome = _receive(writer, queue, command)
    if writer.bytes_left <= 0 and queue.visible:
        queue.woken += 1  # this receive may have got fewer than there are: wake a parked one for the rest
    return outcome


def _receive(writer: Writer, queue: LiveQueue, command: Receive) -> Outcome:
    if queue.groups is None:
        return claims.receive(writer, queue, command)
    if writer.now >= queue.next_due:
        look_for_due(writer, queue, claims.RETURNS_MAX)
    update_rows(writer, queue)
    if queue.settings.fifo:
        return group_claims.receive_fifo(writer, queue, command)
    return group_claims.receive_fair(writer, queue, command)


def receive_within(
    writer: Writer, queue: LiveQueue, rate: int, command: Receive, receive: Callable[[Receive], Outcome]
) -> Outcome:
    """Receive within what is left of this second; RateExceeded if nothing is left and there are messages."""
    if writer.now >= queue.next_due:
        look_for_due(writer, queue, RETURNS_MAX)
    # Each message uses its part of a second, and the queue may be at most a second behind. The unit is a microsecond
    # divided by the rate, so that all values are integers.
    known, until = queue.handed
    began = max(until if known == rate else 0, (writer.now - SECOND_US) * rate)
    left = (writer.now * rate - began) // SECOND_US
    if left <= 0 and queue.visible:
        return RateExceeded(queue=str(command.queue), limit=rate)
    outcome = receive(msgspec.structs.replace(command, count_max=min(command.count_max, max(left, 1))))
    if type(outcome) is Received and outcome.messages:
        writer.touch(queue)
        queue.handed = (rate, began + len(outcome.messages) * SECOND_US)
        if len(outcome.messages) == left < command.count_max and queue.visible:
            queue.woken += 1  # more is visible: wake a parked receive for RateExceeded
    return outcome
