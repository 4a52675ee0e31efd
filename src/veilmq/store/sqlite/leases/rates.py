"""How many messages a queue hands out in a second, if its owner set a bound.

Strategy: a bucket that fills at that rate and holds a second's worth. It is in memory alone and full after a restart;
a batch that is rolled back puts its messages back into it. An empty queue costs nothing of it.
"""

from collections.abc import Callable

import msgspec

from veilmq.model.commands import Receive
from veilmq.model.errors import RateExceeded
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Outcome, Received
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.batch.writer import Writer
from veilmq.store.sqlite.leases.claims import RETURNS_MAX
from veilmq.store.sqlite.messages.expiry import look_for_due


def receive_within(
    writer: Writer, queue: LiveQueue, rate: int, command: Receive, receive: Callable[[Receive], Outcome]
) -> Outcome:
    """What `receive` gives of what is left of this second; RateExceeded if that is nothing, and messages are there."""
    if writer.now >= queue.next_due:
        look_for_due(writer, queue, RETURNS_MAX)
    # As if each message took its part of a second, and the queue might be a second behind. In parts of a microsecond,
    # as many as the rate has, so that all stays whole.
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
            queue.woken += 1  # it got less than it asked for, and there is more: who waits must hear of the rate
    return outcome
