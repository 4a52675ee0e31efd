"""The sentence that says what happened to a message, in stories that a real engine and store lived by a clock."""

from collections.abc import Callable, Iterator
from hashlib import md5
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.clock import ManualClock
from tests.support.contract.stage import sending
from tests.support.sqlite import SqliteFactory

from veilmq.admin.history import Scope
from veilmq.admin.history.trace import shown_trace
from veilmq.admin.story import RULES, shown_story
from veilmq.engine.engine import Engine
from veilmq.model.commands import (
    AfterExpiry,
    AnyCommand,
    CreateQueue,
    CreateTopic,
    Delete,
    DeleteQueue,
    Extend,
    Origin,
    Publish,
    PurgeQueue,
    Receive,
    StartMove,
    Subscribe,
    Undeliver,
)
from veilmq.model.events import EventRecord
from veilmq.model.instant import DAY_US, SECOND_US, Instant
from veilmq.model.messages import Extras, Failure, Report, Reported
from veilmq.model.outcomes import Outcome, Published, Received, Sent
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.model.settings.topic import SubscriptionSettings, TopicKey
from veilmq.testing.for_each import for_each

QUEUE: Final = QueueKey("000000000000", "us-east-1", "orders")
DEAD: Final = QueueKey("000000000000", "us-east-1", "orders-dead")
FIFO: Final = QueueKey("000000000000", "us-east-1", "orders.fifo")
TEN: Final = Instant(1_764_151_200_000_000)
"""2025-11-26 10:00:00 UTC."""
SHOP, A, B, C = (Origin("sqs", "AKIA1", name) for name in ("shop", "worker-a", "worker-b", "worker-c"))
NEWS: Final = TopicKey("000000000000", "us-east-1", "news")
OPERATOR: Final = Origin("admin", "ann", "console Mozilla/5.0")


class Theatre:
    """An engine and a store with two queues; `orders` has leases of 30 s and three receives."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0
        self.renew()

    def renew(self) -> None:
        """A new stage for the next story."""
        if self.number:
            self.store.close()
        self.number += 1
        self.clock = ManualClock(TEN)
        self.store = SqliteFactory(self.path / str(self.number)).open()
        self.engine = Engine()
        self.message = b""
        self.call(CreateQueue(queue=DEAD, origin=OPERATOR))
        change: Any = {"redrive": RedrivePolicy(DEAD, 3)}
        self.call(CreateQueue(queue=QUEUE, origin=OPERATOR, change=change))
        self.call(CreateQueue(queue=FIFO, origin=OPERATOR, change={"fifo": True, "content_deduplication": True}))

    def call(self, *commands: AnyCommand) -> list[Outcome]:
        answers: list[Outcome] = []
        self.engine.submit("call", commands, self.clock.now)
        while (batch := self.engine.take_batch(self.clock.now)) is not None:
            applied = self.store.apply(batch.commands, self.clock.now)
            if applied.wrote:
                self.store.commit()
            for ticket, outcomes in self.engine.committed(batch, applied):
                answers += outcomes if ticket == "call" else []
        return answers

    def at(self, minute: int, second: int) -> None:
        """It is 10:MM:SS now; what is due happens first."""
        self.clock.advance(TEN + (minute * 60 + second) * SECOND_US - self.clock.now)
        self.tick()

    def tick(self) -> None:
        """Do what is due."""
        while (batch := self.engine.take_batch(self.clock.now)) is not None:
            applied = self.store.apply(batch.commands, self.clock.now)
            if applied.wrote:
                self.store.commit()
            self.engine.committed(batch, applied)

    def send(self, queue: QueueKey = QUEUE, **fields: Any) -> None:
        (sent,) = self.call(sending(queue, "hello", origin=SHOP, **fields))
        assert isinstance(sent, Sent)
        self.message = sent.id
        self.handle = sent.handle

    def receive(self, who: Origin, queue: QueueKey = QUEUE) -> str:
        (got,) = self.call(Receive(queue=queue, origin=who, count_max=1))
        assert isinstance(got, Received), got
        return got.messages[0].handle if got.messages else ""

    def delete(self, who: Origin, handle: str, queue: QueueKey = QUEUE) -> None:
        self.call(Delete(queue=queue, origin=who, handle=handle, arrived=self.clock.now))

    def extend(self, who: Origin, handle: str, seconds: int, report: Report | None = None) -> None:
        lease_us = seconds * SECOND_US
        self.call(
            Extend(
                queue=QUEUE,
                origin=who,
                handle=handle,
                lease_us=lease_us,
                arrived=self.clock.now,
                after_expiry=AfterExpiry.ALLOW,
                report=report,
            )
        )

    @property
    def incarnation(self) -> int:
        """Of `orders`."""
        return self.store.reader.queues[QUEUE].incarnation

    def fail(self, who: Origin, handle: str, error: str, seconds: int = 60) -> None:
        self.extend(who, handle, seconds, Report(Reported.RETRY, Failure("", "ValueError", error)))

    def told(self) -> tuple[str, str]:
        with self.store.reader.look() as view:
            story = shown_trace(view, self.message, 1_000_000, Scope(), self.clock.now)["story"]
        return story["rule"], story["sentence"]


Story = Callable[[Theatre], None]


@pytest.fixture
def theatre(tmp_path: Path) -> Iterator[Theatre]:
    theatre = Theatre(tmp_path)
    yield theatre
    theatre.store.close()


def waiting(on: Theatre) -> None:
    on.send()
    on.at(2, 0)


def delayed(on: Theatre) -> None:
    on.send(delay_us=300 * SECOND_US)
    on.at(1, 0)


def rescheduled(on: Theatre) -> None:
    on.send(wants_handle=True)
    on.extend(SHOP, on.handle, 600)


def in_flight(on: Theatre) -> None:
    on.send()
    on.at(2, 0)
    handle = on.receive(A)
    on.at(2, 20)
    on.extend(A, handle, 30)


def in_flight_again(on: Theatre) -> None:
    on.send()
    on.receive(A)
    on.at(0, 31)
    on.receive(B)


def back_after_loss(on: Theatre) -> None:
    on.send()
    on.receive(A)
    on.at(5, 0)


def back_after_release(on: Theatre) -> None:
    on.send()
    handle = on.receive(A)
    on.at(0, 10)
    on.extend(A, handle, 0)
    on.at(0, 40)


def retry(on: Theatre) -> None:
    on.send()
    handle = on.receive(A)
    on.at(0, 10)
    on.fail(A, handle, "no such customer")


def done(on: Theatre) -> None:
    on.send()
    on.at(0, 2)
    handle = on.receive(A)
    on.at(0, 14)
    on.delete(A, handle)


def done_extended(on: Theatre) -> None:
    on.send()
    handle = on.receive(A)
    for second in (20, 40):
        on.at(0, second)
        on.extend(A, handle, 30)
    on.at(1, 5)
    on.delete(A, handle)


def done_twice(on: Theatre) -> None:
    on.at(2, 0)
    on.send()
    on.at(2, 1)
    lost = on.receive(A)
    on.at(2, 31)
    other = on.receive(B)
    on.at(2, 40)
    on.delete(B, other)
    on.at(2, 52)
    on.delete(A, lost)


def done_three_times(on: Theatre) -> None:
    on.send()
    first = on.receive(A)
    on.at(0, 30)
    second = on.receive(B)
    on.at(1, 0)
    third = on.receive(C)
    on.at(1, 10)
    on.delete(C, third)
    on.at(1, 20)
    on.delete(A, first)
    on.delete(B, second)


def twice_under_one_name(on: Theatre) -> None:
    on.send()
    lost = on.receive(A)
    on.at(0, 30)
    other = on.receive(A)
    on.at(0, 35)
    on.delete(A, lost)
    on.at(0, 38)
    on.delete(A, other)


def being_done_again(on: Theatre) -> None:
    on.send()
    lost = on.receive(A)
    on.at(0, 30)
    on.receive(B)
    on.at(0, 45)
    on.delete(A, lost)


def repeated_delete(on: Theatre) -> None:
    on.send()
    handle = on.receive(A)
    on.at(0, 5)
    on.delete(A, handle)
    on.at(0, 6)
    on.delete(A, handle)


def deleted_late(on: Theatre) -> None:
    on.send()
    handle = on.receive(A)
    on.at(0, 51)
    on.delete(A, handle)


def resumed(on: Theatre) -> None:
    on.send()
    handle = on.receive(A)
    on.at(0, 40)
    on.extend(A, handle, 30)
    on.at(0, 50)
    on.delete(A, handle)


def died_then_done(on: Theatre) -> None:
    on.send()
    on.receive(A)
    on.at(0, 30)
    handle = on.receive(B)
    on.at(0, 33)
    on.delete(B, handle)


def failed_then_done(on: Theatre) -> None:
    on.send()
    for who in (A, B):
        on.fail(who, on.receive(who), "no such customer", 10)
        on.at(0, 10 if who is A else 20)
    handle = on.receive(C)
    on.at(0, 25)
    on.delete(C, handle)


def released_then_done(on: Theatre) -> None:
    on.send()
    on.extend(A, on.receive(A), 0)
    on.at(0, 1)
    on.delete(B, on.receive(B))


def undelivered(on: Theatre) -> None:
    on.send()
    handle = on.receive(A)
    on.call(Undeliver(queue=QUEUE, origin=A, handles=(handle,)))
    on.at(0, 7)


def die_three_times(on: Theatre) -> None:
    on.send()
    for turn in range(1, 4):
        on.receive(A)
        on.at(turn, 0)
    on.receive(A)  # moves it instead


def dead(on: Theatre) -> None:
    die_three_times(on)
    on.at(4, 0)


def dead_by_failures(on: Theatre) -> None:
    on.send()
    for turn in range(1, 4):
        on.fail(A, on.receive(A), "no such customer", 10)
        on.at(turn, 0)
    on.receive(A)


def dead_and_done(on: Theatre) -> None:
    die_three_times(on)
    handle = on.receive(B, DEAD)
    on.delete(B, handle, DEAD)


def redriven(on: Theatre) -> None:
    die_three_times(on)
    on.at(5, 0)
    on.call(StartMove(queue=DEAD, origin=OPERATOR))
    for second in range(1, 5):
        on.at(5, second)


def redriven_and_done(on: Theatre) -> None:
    redriven(on)
    handle = on.receive(B)
    on.at(5, 9)
    on.delete(B, handle)


def expired(on: Theatre) -> None:
    on.send(ttl_us=60 * SECOND_US)
    on.at(3, 0)
    on.receive(A)


def purged(on: Theatre) -> None:
    on.send()
    on.receive(A)
    on.call(sending(QUEUE, "another", origin=SHOP))
    on.at(1, 0)
    on.call(PurgeQueue(queue=QUEUE, origin=OPERATOR))


def gone_with_its_queue(on: Theatre) -> None:
    on.send()
    on.at(1, 0)
    on.call(DeleteQueue(queue=QUEUE, origin=OPERATOR))


def taken_back(on: Theatre) -> None:
    on.send(wants_handle=True)
    on.at(0, 3)
    on.delete(SHOP, on.handle)


def sent_twice(on: Theatre) -> None:
    extras = Extras(group="g", deduplication_id="d")
    on.send(FIFO, extras=extras)
    on.at(0, 9)
    on.send(FIFO, extras=extras)


def published(on: Theatre) -> None:
    """Its copies are done: no event of them names the id that the publish answered but `sent`."""
    on.call(CreateTopic(topic=NEWS, origin=OPERATOR))
    for queue in (QUEUE, DEAD):
        settings = SubscriptionSettings(endpoint=queue.name, queue=queue)
        on.call(Subscribe(topic=NEWS, origin=OPERATOR, name=queue.name, settings=settings))
    digest = md5(b"x", usedforsecurity=False).digest()
    (got,) = on.call(Publish(topic=NEWS, origin=SHOP, body="x", md5=digest, size_bytes=1))
    assert isinstance(got, Published)
    on.message = got.id
    for queue in (QUEUE, DEAD):
        on.delete(A, on.receive(A, queue), queue)
    on.at(9, 0)


STORIES: Final[list[tuple[Story, str, str]]] = [
    (
        waiting,
        "waiting",
        "Waiting in orders for 2 min, never received: sent at 10:00:00 by shop.",
    ),
    (
        delayed,
        "delayed",
        "Delayed: sent to orders at 10:00:00 by shop, it can be received from 10:05:00 on.",
    ),
    (
        rescheduled,
        "delayed",
        "Delayed: sent to orders at 10:00:00 by shop, it can be received from 10:10:00 on.",
    ),
    (
        published,
        "published",
        "Published to news at 10:00:00 by shop: 2 copies made. Each copy has an id of its own; its event `sent`"
        " names this one.",
    ),
    (
        in_flight,
        "in_flight",
        "In flight: worker-a received it at 10:02:00, and its lease ends at 10:02:50, extended once.",
    ),
    (
        in_flight_again,
        "in_flight",
        "In flight, for the 2nd time: worker-b received it at 10:00:31, and its lease ends at 10:01:01. "
        "Before, worker-a's lease of 30 s ended at 10:00:30 without a sign of it.",
    ),
    (
        back_after_loss,
        "back",
        "Waiting again in orders for 4 min 30 s, received once. Before, worker-a's lease of 30 s ended "
        "at 10:00:30 without a sign of it.",
    ),
    (
        back_after_release,
        "back",
        "Waiting again in orders for 30 s, received once. Before, worker-a gave it back at 10:00:10.",
    ),
    (
        retry,
        "retry",
        "Waiting for a retry, received once: worker-a gave it back at 10:00:10 for ValueError: no such "
        "customer; it can be received from 10:01:10 on.",
    ),
    (
        done,
        "processed",
        "Processed once: worker-a received it at 10:00:02 after 2 s in the queue and deleted it 12 s later.",
    ),
    (
        done_extended,
        "processed",
        "Processed once: worker-a received it at 10:00:00 and deleted it 65 s later, extended twice.",
    ),
    (
        done_twice,
        "processed_again",
        "Processed twice: worker-a's lease of 30 s ended at 10:02:31 while it worked; worker-b deleted "
        "it at 10:02:40; worker-a's delete at 10:02:52 was refused. Longest work seen: 51 s; a lease of "
        "60 s or extending every 15 s avoids this.",
    ),
    (
        done_three_times,
        "processed_again",
        "Processed 3 times: worker-a's lease of 30 s ended at 10:00:30 while it worked; worker-b's lease "
        "of 30 s ended at 10:01:00 while it worked; worker-c deleted it at 10:01:10; worker-a's delete "
        "at 10:01:20 was refused; worker-b's delete at 10:01:20 was refused. Longest work seen: 80 s; a "
        "lease of 2 min or extending every 15 s avoids this.",
    ),
    (
        twice_under_one_name,
        "processed_again",
        "Processed twice: receiver 1's lease of 30 s ended at 10:00:30 while it worked; receiver 2 "
        "deleted it at 10:00:38; receiver 1's delete at 10:00:35 was refused. Longest work seen: 35 s; a "
        "lease of 45 s or extending every 15 s avoids this.",
    ),
    (
        being_done_again,
        "being_processed_again",
        "Being processed again: worker-a's lease of 30 s ended at 10:00:30 while it worked, and its "
        "delete at 10:00:45 was refused; worker-b has it until 10:01:00. Longest work seen: 45 s; a "
        "lease of 60 s or extending every 15 s avoids this.",
    ),
    (
        repeated_delete,
        "processed",
        "Processed once: worker-a received it at 10:00:00 and deleted it 5 s later.",
    ),
    (
        deleted_late,
        "processed_late",
        "Processed once, but late: worker-a's lease of 30 s ended at 10:00:30, and it deleted the "
        "message at 10:00:51, before anybody else received it. Longest work seen: 51 s; a lease of 60 s "
        "or extending every 15 s avoids this.",
    ),
    (
        resumed,
        "processed_resumed",
        "Processed once: worker-a's lease of 30 s had ended at 10:00:30 when it extended it at 10:00:40; "
        "nobody else had received the message, and it deleted it at 10:00:50.",
    ),
    (
        died_then_done,
        "processed_after_loss",
        "Processed on receive 2: worker-a's lease of 30 s ended at 10:00:30 without a sign of it, as of "
        "a worker that died or gave up; worker-b received it at 10:00:30 and deleted it at 10:00:33.",
    ),
    (
        failed_then_done,
        "processed_after_failures",
        "Processed on receive 3: workers gave it back twice, at last for ValueError: no such customer; "
        "worker-c deleted it at 10:00:25.",
    ),
    (
        released_then_done,
        "processed_after_release",
        "Processed on receive 2: it was given back once before, by worker-a at 10:00:00; worker-b "
        "deleted it at 10:00:01.",
    ),
    (
        undelivered,
        "back",
        "Waiting again in orders for 7 s, received once. Before, worker-a gave it back at 10:00:00.",
    ),
    (
        die_three_times,
        "dead_letter",
        "Dead letter: received 3 times in orders and never deleted, so it went to orders-dead at "
        "10:03:00; 3 times a lease ended without a sign of its holder. It waits in orders-dead.",
    ),
    (
        dead,
        "dead_letter",
        "Dead letter: received 3 times in orders and never deleted, so it went to orders-dead at "
        "10:03:00; 3 times a lease ended without a sign of its holder. It waits in orders-dead.",
    ),
    (
        dead_by_failures,
        "dead_letter",
        "Dead letter: received 3 times in orders and never deleted, so it went to orders-dead at "
        "10:03:00; the last failure was ValueError: no such customer. It waits in orders-dead.",
    ),
    (
        dead_and_done,
        "dead_letter",
        "Dead letter: received 3 times in orders and never deleted, so it went to orders-dead at "
        "10:03:00; 3 times a lease ended without a sign of its holder. worker-b deleted it from "
        "orders-dead at 10:03:00.",
    ),
    (
        redriven,
        "moved",
        "Redriven: ann moved it from orders-dead to orders at 10:05:01. It waits in orders.",
    ),
    (
        redriven_and_done,
        "moved",
        "Redriven: ann moved it from orders-dead to orders at 10:05:01. worker-b deleted it from orders at 10:05:09.",
    ),
    (
        expired,
        "expired",
        "Expired at 10:01:00 after 60 s in orders, never received: it was never deleted.",
    ),
    (
        purged,
        "purged",
        "Purged from orders at 10:01:00 with all 2 messages by ann, received once.",
    ),
    (
        gone_with_its_queue,
        "purged",
        "Deleted with its queue at 10:01:00 by ann, never received.",
    ),
    (
        taken_back,
        "taken_back",
        "Taken back: shop deleted it at 10:00:03 before anybody received it.",
    ),
    (
        sent_twice,
        "waiting",
        "Waiting in orders.fifo for 9 s, never received: sent at 10:00:00 by shop. A second send of it "
        "at 10:00:09 was absorbed as a duplicate.",
    ),
]


@for_each("story, rule, sentence", STORIES, ids=[story.__name__ for story, _, _ in STORIES], fresh="theatre")
def test_a_story_is_told_in_one_sentence(theatre: Theatre, story: Story, rule: str, sentence: str) -> None:
    story(theatre)
    assert theatre.told() == (rule, sentence)


def test_what_was_trimmed_is_said_with_the_rest(theatre: Theatre) -> None:
    done_twice(theatre)
    with theatre.store.reader.look() as view:
        events = shown_trace(view, theatre.message, 1_000_000, Scope(), theatre.clock.now)["events"]
    story = shown_story(events[2:], theatre.clock.now, is_complete=False)
    assert story is not None
    assert story["sentence"].endswith(" What was before 10:02:31 is no longer kept.")
    assert shown_story([], theatre.clock.now, is_complete=False) is None


ADVISED: Final = {
    "advice": (
        {"recommended_us": 90 * SECOND_US, "at_least_us": None},
        "a lease of 90 s, the best timeout for all messages of orders, or leases of 20 s, extended every 10 s, avoid",
    ),
    "unknown": (
        {"recommended_us": None, "at_least_us": 60 * SECOND_US},
        "a lease of 60 s or more, the best timeout for all messages of orders, or leases of 20 s, extended every 10 s,"
        " avoid",
    ),
    "longer than usual": (
        {"recommended_us": 15 * SECOND_US, "at_least_us": None},
        "the best timeout for all messages of orders is 15 s, and this one takes longer: leases of 20 s, extended every"
        " 10 s, avoid",
    ),
    "too few": ({"extend": None}, "a lease of 60 s or extending every 15 s avoids"),
}


@for_each("what", ADVISED, fresh="theatre")
def test_the_advice_is_that_of_the_queue_or_says_why_not(theatre: Theatre, what: str) -> None:
    timeout, advice = ADVISED[what]
    shown = {"extend": {"lease_us": 20 * SECOND_US, "every_us": 10 * SECOND_US}} | timeout
    done_twice(theatre)
    with theatre.store.reader.look() as view:
        message, now = theatre.message, theatre.clock.now
        story = shown_trace(view, message, 1_000_000, Scope(), now, {theatre.incarnation: shown}.get)["story"]
    assert story["sentence"].endswith(f"Longest work seen: 51 s; {advice} this.")


def event(kind: str, at: int, **fields: Any) -> EventRecord:
    given = {"queue": "orders", "sequence": 1, "attempt": 0, "protocol": "sqs", "client": "shop"} | fields
    return EventRecord(offset=at, kind=kind, at=Instant(TEN + at * SECOND_US), **given)


SENT: Final = event("sent", 0)
PUSHING: Final = event("received", 2, attempt=1, detail={"lease_us": 30_000_000})
"""The server itself receives what it pushes."""
SHORT: Final = [
    (
        "damaged",
        [SENT, event("quarantined", 9)],
        "Damaged: what the disk gave back differs from what was sent, so it was set apart at 10:00:09 and nobody"
        " receives it.",
    ),
    (
        "pushed",
        [
            SENT,
            PUSHING,
            event("pushed", 3, attempt=1, detail={"status": 500}),
            event("pushed", 5, detail={"status": 204}),
            event("deleted", 5, attempt=1),
        ],
        "Pushed to its endpoint at 10:00:05, at the 2nd attempt.",
    ),
    (
        "pushed",
        [SENT, PUSHING, event("pushed", 3, attempt=1, detail={"status": 500})],
        "Not delivered yet: pushed once, last at 10:00:03 (status 500). It is tried again.",
    ),
    (
        "pushed",
        [
            SENT,
            PUSHING,
            event("pushed", 3, attempt=1, detail={"status": 0, "error": "refused"}),
            event("deleted", 4, attempt=1),
        ],
        "Not delivered: pushed once, last at 10:00:03 (refused). It was deleted at 10:00:04.",
    ),
    (
        "pushed",
        [
            SENT,
            PUSHING,
            event("pushed", 3, attempt=1, detail={"status": 500}),
            event("dead_lettered", 4, attempt=1, detail={"target_queue": "dead", "receives": 0}),
        ],
        "Not delivered: pushed once, last at 10:00:03 (status 500). It went to dead at 10:00:04. It waits in dead.",
    ),
    (
        "published",
        [event("published", 0, detail={"topic": "1/r/news", "copies": 0, "dead_lettered": 1, "left_out": 2})],
        "Published to news at 10:00:00 by shop: 0 copies made, 1 that a queue could not take sent to a dead-letter"
        " queue, 2 that a queue could not take left out. What was before 10:00:00 is no longer kept.",
    ),
    (
        "deleted",
        [event("extended", 3, attempt=7), event("deleted", 9, attempt=7)],
        "Deleted at 10:00:09 by shop, never received. What was before 10:00:03 is no longer kept.",
    ),
]


@for_each("rule, events, sentence", SHORT, ids=[rule for rule, *_ in SHORT])
def test_rules_of_what_a_test_cannot_live(rule: str, events: list[EventRecord], sentence: str) -> None:
    story = shown_story(events, Instant(TEN + 60 * SECOND_US), is_complete=events[0] is SENT)
    assert story == {"rule": rule, "sentence": sentence}


def test_a_sentence_names_the_first_and_the_last_of_many_lost_leases() -> None:
    many = 1_500
    events = [SENT]
    for number in range(1, many + 1):
        events.append(event("received", number * 10, attempt=number, lease_us=SECOND_US, client=f"w{number}"))
        if number < many:
            events.append(event("lease_expired", number * 10 + 1, attempt=number))
    events.append(event("deleted", many * 10, attempt=many))
    events += [event("delete_refused", many * 10 + 1, attempt=each, detail={}) for each in range(1, many)]
    story = shown_story(events, Instant(TEN + DAY_US), is_complete=True)
    assert story is not None
    assert story["sentence"].startswith(
        "Processed 1500 times: w1's lease of 1 s ended at 10:00:11 while it worked; w2's lease of 1 s ended at"
        " 10:00:21 while it worked; so did 1496 more; w1499's lease of 1 s ended at 14:09:51 while it worked; w1500"
        " deleted it at 14:10:00; w1's delete at 14:10:01 was refused; w2's"
    )
    assert len(story["sentence"]) < 700


def test_every_rule_has_a_story() -> None:
    assert {rule.name for rule in RULES} == {rule for _, rule, _ in STORIES} | {rule for rule, *_ in SHORT}
