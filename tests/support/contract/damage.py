"""Damage: a damaged body is never delivered; all other messages are."""

import pytest
from tests.support.conservation import ledgers
from tests.support.contract.stage import Stage, bodies, refused

from veilmq.model.errors import MessageGone
from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US
from veilmq.model.messages import id_text
from veilmq.testing.for_each import for_each


class TestDamage:
    """Damage."""

    @for_each("leased", [False, True], fresh="stage")
    def test_a_damaged_message_is_quarantined_with_an_event(self, stage: Stage, leased: bool) -> None:
        queue = stage.create()
        damaged = stage.send(queue, "damaged")
        handle = stage.take(queue, lease_us=SECOND_US).handle if leased else ""
        stage.send(queue, "sound")
        stage.store.close()
        stage.factory.damage(damaged.sequence)
        stage.store = stage.factory.open()
        stage.later(SECOND_US)
        start = stage.following()
        assert bodies(stage.receive(queue, 10)) == ["sound"]
        assert stage.counts(queue) == (0, 0, 1)
        (event,) = [event for event in stage.events(start) if event.kind == "quarantined"]
        assert (event.sequence, event.message) == (damaged.sequence, id_text(damaged.id))
        if handle:
            refused(stage.delete(queue, handle), MessageGone)
        for _ in range(2):
            stage.later(HOUR_US)
            assert bodies(stage.receive(queue, 10)) == ["sound"]
            stage.reopen(kill=True)

    def test_a_peek_shows_no_damaged_body(self, stage: Stage) -> None:
        queue = stage.create()
        damaged = stage.send(queue, "damaged")
        stage.send(queue, "sound")
        stage.store.close()
        stage.factory.damage(damaged.sequence)
        stage.store = stage.factory.open()
        assert bodies(stage.peek(queue)) == ["sound"]

    def test_a_handle_from_the_send_meets_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        damaged = stage.send(queue, "damaged", wants_handle=True)
        stage.store.close()
        stage.factory.damage(damaged.sequence)
        stage.store = stage.factory.open()
        assert stage.receive(queue) == []
        refused(stage.extend(queue, damaged.handle, HOUR_US), MessageGone)
        refused(stage.delete(queue, damaged.handle), MessageGone)

    @pytest.mark.parametrize("ttl_us", [None, HOUR_US])
    def test_the_sweeper_gets_past_it(self, stage: Stage, ttl_us: int | None) -> None:
        queue = stage.create(retention_us=DAY_US)
        damaged = stage.send(queue, "damaged", ttl_us=ttl_us, wants_handle=True)
        stage.store.close()
        stage.factory.damage(damaged.sequence)
        stage.store = stage.factory.open()
        assert stage.receive(queue) == []
        stage.send(queue, "mortal", ttl_us=HOUR_US)
        stage.later(2 * DAY_US)
        stage.sweep_expired()
        refused(stage.delete(queue, damaged.handle), MessageGone)
        assert stage.counts(queue) == (0, 0, 0)
        (book,) = ledgers(stage.events()).values()
        assert (book.sent, book.quarantined, book.expired, book.live) == (2, 1, 1, 0)

    def test_a_purge_takes_it_with_it(self, stage: Stage) -> None:
        queue = stage.create()
        damaged = stage.send(queue, "damaged")
        stage.store.close()
        stage.factory.damage(damaged.sequence)
        stage.store = stage.factory.open()
        assert stage.receive(queue) == []
        stage.purge(queue)
        stage.sweep()
        assert stage.factory.rows(stage.store) == 0
