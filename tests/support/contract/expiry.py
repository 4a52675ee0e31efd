"""Expiry: by the message's time to live or the queue's current retention; it takes precedence in every state."""

from typing import Any

import pytest
from tests.support.contract.stage import Stage, bodies, expect, refused, sending

from veilmq.model.errors import MessageGone, ParameterInvalid
from veilmq.model.instant import DAY_US, FOREVER, HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.outcomes import Deleted, Extended, Sent
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

STATES = ("ready", "delayed", "in flight", "returned", "returned and seen", "delay ended")


def _put(stage: Stage, queue: QueueKey, state: str, ttl_us: int | None) -> str:
    """A message in that state; returns its handle."""
    delay_us = {"delayed": DAY_US, "delay ended": SECOND_US}.get(state, 0)
    handle = stage.send(queue, state, ttl_us=ttl_us, delay_us=delay_us, wants_handle=True).handle
    if state in {"in flight", "returned", "returned and seen"}:
        handle = stage.take(queue, lease_us=DAY_US if state == "in flight" else SECOND_US).handle
    if state == "returned and seen":
        stage.later(SECOND_US)
        stage.sweep()
    return handle


class TestExpiry:
    """Expiry."""

    @pytest.mark.parametrize("own", [False, True])
    @pytest.mark.parametrize("swept", [False, True])
    @for_each("state", STATES, fresh="stage")
    def test_a_message_is_never_met_after_its_expiry(self, stage: Stage, state: str, swept: bool, own: bool) -> None:
        queue = stage.create(retention_us=4 * DAY_US if own else HOUR_US)
        start, begun = stage.now, stage.following()
        handle = _put(stage, queue, state, HOUR_US if own else None)
        stage.later(start + HOUR_US - stage.now)
        if swept:
            stage.sweep()
        assert stage.receive(queue, 10) == []
        assert stage.peek(queue) == []
        refused(stage.extend(queue, handle, DAY_US), MessageGone)
        refused(stage.delete(queue, handle), MessageGone)
        assert stage.counts(queue) == (0, 0, 0)
        (event,) = [event for event in stage.events(begun) if event.kind == "expired"]
        assert event.at == start + HOUR_US

    @for_each("state", STATES, fresh="stage")
    def test_a_message_is_there_until_its_expiry(self, stage: Stage, state: str) -> None:
        queue = stage.create()
        start = stage.now
        handle = _put(stage, queue, state, HOUR_US)
        stage.later(start + HOUR_US - 1 - stage.now)
        stage.sweep()
        assert sum(stage.counts(queue)) == 1
        stage.extend(queue, handle, 0)
        assert bodies(stage.receive(queue)) == [state]

    def test_the_sweeper_takes_nobody_before_its_time(self, stage: Stage) -> None:
        queue = stage.create()
        for ttl_us in (SECOND_US, SECOND_US + 1, SECOND_US + 2):
            stage.send(queue, str(ttl_us), ttl_us=ttl_us)
        stage.later(SECOND_US)
        for left in (2, 1, 0):
            stage.reopen()
            stage.sweep()
            assert stage.counts(queue) == (left, 0, 0)
            stage.later(1)

    @for_each("kill", [None, True], fresh="stage")
    def test_the_queues_retention_of_today_counts(self, stage: Stage, kill: bool | None) -> None:
        queue = stage.create(retention_us=DAY_US)
        stage.send(queue, "plain")
        stage.send(queue, "own", ttl_us=2 * DAY_US)
        stage.later(2 * HOUR_US)
        stage.change(queue, retention_us=HOUR_US)
        if kill is not None:
            stage.reopen(kill=kill)
        assert bodies(stage.peek(queue)) == ["own"]
        stage.sweep()
        assert stage.counts(queue) == (1, 0, 0)
        stage.send(queue, "young")
        stage.later(HOUR_US)
        stage.change(queue, retention_us=DAY_US)
        assert bodies(stage.receive(queue, 10)) == ["own", "young"], "nobody had met its death"

    @for_each(
        ("settings", "own", "taken"),
        [
            ({"retention_us": HOUR_US}, {"delay_us": HOUR_US}, False),
            ({"retention_us": HOUR_US}, {"delay_us": HOUR_US - 1}, True),
            ({"retention_us": DAY_US}, {"delay_us": HOUR_US, "ttl_us": HOUR_US}, False),
            ({"retention_us": HOUR_US}, {"delay_us": HOUR_US, "ttl_us": HOUR_US + 1}, True),
            ({"delay_us": HOUR_US}, {"ttl_us": HOUR_US}, False),
            ({"delay_us": HOUR_US}, {"ttl_us": HOUR_US, "delay_us": 0}, True),
            ({"delay_us": HOUR_US, "retention_us": HOUR_US}, {}, False),
            ({}, {}, True),
        ],
        fresh="stage",
    )
    def test_who_must_appear_is_not_dead_before(
        self, stage: Stage, settings: dict[str, Any], own: dict[str, Any], taken: bool
    ) -> None:
        queue = stage.create(f"jobs-{stage.following()}", **settings)
        outcome = stage.do(sending(queue, must_appear=True, **own))
        assert isinstance(outcome, Sent if taken else ParameterInvalid)
        assert sum(stage.counts(queue)) == taken
        assert isinstance(stage.do(sending(queue, **own)), Sent), "who does not ask for it may die unseen"

    @pytest.mark.parametrize("received", [False, True])
    def test_an_extension_may_go_beyond_the_expiry_and_saves_nobody(self, stage: Stage, received: bool) -> None:
        queue = stage.create()
        handle = stage.send(queue, ttl_us=HOUR_US, wants_handle=True).handle
        if received:
            handle = stage.take(queue).handle
        extended = expect(stage.extend(queue, handle, DAY_US, rotate=True), Extended)
        assert extended.due == stage.now + DAY_US
        stage.later(HOUR_US - 1)
        assert sum(stage.counts(queue)) == 1
        stage.later(1)
        refused(stage.extend(queue, extended.handle, DAY_US, rotate=True), MessageGone)
        stage.later(DAY_US)
        assert stage.receive(queue) == []
        assert stage.kinds().count("expired") == 1

    def test_time_to_live_without_end(self, stage: Stage) -> None:
        queue = stage.create(retention_us=MINUTE_US)
        stage.send(queue, "for ever", ttl_us=FOREVER)
        stage.later(1000 * DAY_US)
        stage.sweep()
        assert stage.take(queue).expires == FOREVER

    def test_the_dead_at_the_head_do_not_hide_the_living(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(150):
            stage.send(queue, str(number), ttl_us=SECOND_US)
        stage.send(queue, "alive")
        stage.later(SECOND_US)
        got: list[str] = []
        for _ in range(4):
            got += bodies(stage.receive(queue, 1))
        assert got == ["alive"]

    @for_each("group", [None, "a"], fresh="stage")
    def test_a_receive_that_meets_the_dead_gives_no_more_than_was_asked_for(
        self, stage: Stage, group: str | None
    ) -> None:
        queue = stage.create()
        for ttl_us in (SECOND_US, *[HOUR_US] * 5):
            stage.send(queue, ttl_us=ttl_us, extras=Extras(group=group))
        stage.later(SECOND_US)
        assert len(stage.receive(queue, 3)) == 3

    @for_each("state", ["ready", "delayed", "in flight"], fresh="stage")
    def test_the_sweeper_comes_again_for_what_it_left(self, stage: Stage, state: str) -> None:
        queue = stage.create()
        _put(stage, queue, state, HOUR_US)
        stage.send(queue, ttl_us=SECOND_US)
        stage.later(SECOND_US)
        stage.sweep()
        assert sum(stage.counts(queue)) == 1
        stage.later(HOUR_US)
        stage.sweep_expired()
        assert stage.counts(queue) == (0, 0, 0)

    def test_the_sweeper_finds_the_dead_in_every_line_and_among_the_returned(self, stage: Stage) -> None:
        queue = stage.create(retention_us=HOUR_US)
        for number in range(400):
            stage.send(queue, str(number), priority=1 + number % 16)
        for message in stage.receive(queue, 40):
            stage.extend(queue, message.handle, 0)
        stage.later(HOUR_US)
        stage.sweep_expired()
        assert stage.counts(queue) == (0, 0, 0)
        assert stage.kinds().count("expired") == 400
        assert stage.factory.rows(stage.store) == 0

    @pytest.mark.parametrize("name", ["jobs", "jobs.fifo"])
    def test_the_sweeper_finds_the_dead_of_a_group_that_was_served_lately(self, stage: Stage, name: str) -> None:
        queue = stage.create(name, retention_us=HOUR_US)
        for number in range(5):
            stage.send(queue, extras=Extras(group="old", deduplication_id=f"old {number}"))
        stage.later(HOUR_US // 2)
        held = stage.take(queue, lease_us=HOUR_US)
        young = [Extras(group=f"young {number}", deduplication_id=f"young {number}") for number in range(600)]
        stage.batch([sending(queue, extras=extras) for extras in young])
        if name == "jobs.fifo":  # there the one in flight would hold back the others, here it makes its tenant the last
            expect(stage.delete(queue, held.handle), Deleted)
        stage.later(HOUR_US // 2)
        stage.sweep_expired()
        assert stage.counts(queue)[0] == 600
        assert stage.kinds().count("expired") == 4 + (name == "jobs")

    @pytest.mark.parametrize("name", ["jobs", "jobs.fifo"])
    def test_messages_with_a_long_life_hide_no_dead_ones_of_other_groups(self, stage: Stage, name: str) -> None:
        queue = stage.create(name, retention_us=HOUR_US)
        stage.batch(
            [
                sending(queue, extras=Extras(group="long", deduplication_id=str(number)), ttl_us=FOREVER)
                for number in range(300)
            ]
        )
        for number in range(3):
            stage.send(queue, extras=Extras(group="short", deduplication_id=f"short {number}"))
        stage.later(HOUR_US)
        stage.sweep()
        assert stage.counts(queue) == (300, 0, 0)
        assert stage.kinds().count("expired") == 3

    def test_returned_messages_hide_no_dead_ones_of_a_lower_priority(self, stage: Stage) -> None:
        queue = stage.create(retention_us=HOUR_US)
        stage.batch([sending(queue, priority=9) for _ in range(3)])
        old = stage.receive(queue, 3)
        stage.later(HOUR_US // 2)
        stage.batch([sending(queue, priority=1) for _ in range(300)])
        young = stage.receive(queue, 300)
        stage.batch([stage.releasing(queue, message.handle) for message in (*old, *young)])
        stage.later(HOUR_US // 2)
        stage.sweep_expired()
        assert stage.counts(queue) == (300, 0, 0)
        assert stage.kinds().count("expired") == 3

    @for_each("held", ["in line", "beside it", "of a tenant", "delayed", "first of a group"])
    def test_no_lease_and_no_delay_keeps_a_dead_message(self, stage: Stage, held: str) -> None:
        queue = stage.create(held.replace(" ", "-") + ".fifo" * (held == "first of a group"), retention_us=DAY_US)
        group = "a" if held in {"of a tenant", "first of a group"} else None
        for number in range(3):
            delay_us = {"beside it": SECOND_US, "delayed": DAY_US // 2}.get(held, 0)
            stage.send(queue, extras=Extras(group=group, deduplication_id=str(number)), delay_us=delay_us)
        stage.later(SECOND_US)
        if held != "delayed":
            stage.take(queue, lease_us=DAY_US // 2)
        stage.change(queue, retention_us=MINUTE_US)
        stage.later(MINUTE_US)
        stage.sweep_expired()
        assert stage.counts(queue) == (0, 0, 0)
        assert stage.factory.rows(stage.store) == 0

    def test_a_look_at_a_time_finds_the_dead_among_many_in_flight(self, stage: Stage) -> None:
        """Beside the lines, where only the leases say who is there."""
        queue = stage.create(retention_us=HOUR_US)
        for count, ttl_us in ((300, DAY_US), (1, None), (300, DAY_US)):
            stage.batch([sending(queue, delay_us=SECOND_US, ttl_us=ttl_us) for _ in range(count)])
        stage.later(SECOND_US)
        while stage.receive(queue, 250, lease_us=DAY_US):
            pass
        stage.later(HOUR_US)
        for _ in range(3):
            assert stage.counts(queue)[2] >= 600
            stage.sweep_expired()
        assert stage.counts(queue) == (0, 0, 600)
