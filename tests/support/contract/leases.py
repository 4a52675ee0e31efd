"""Leases: extend, release, delete, undeliver; in time, late, and after a grant to another consumer."""

from typing import Any

import pytest
from tests.support.contract.stage import TESTER, Stage, expect, refused, sending

from veilmq.model.commands import AfterExpiry, Extend, Sweep, Undeliver
from veilmq.model.errors import LeaseExpired, LeaseTaken, MessageGone, MessageTooLarge, ParameterInvalid
from veilmq.model.instant import HOUR_US, SECOND_US, Instant
from veilmq.model.outcomes import Deleted, Extended, Undelivered
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

ALLOW, REFUSE = AfterExpiry.ALLOW, AfterExpiry.REFUSE
LEASE_US = 10 * SECOND_US


class TestLeases:
    """Leases."""

    def test_a_deleted_message_never_comes_back(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue)
        expect(stage.delete(queue, message.handle), Deleted)
        assert stage.counts(queue) == (0, 0, 0)
        for _ in range(2):
            stage.later(HOUR_US)
            assert stage.receive(queue) == []
            stage.reopen(kill=True)
        refused(stage.delete(queue, message.handle), MessageGone)
        refused(stage.extend(queue, message.handle, SECOND_US), MessageGone)

    def test_an_extension_counts_from_now_and_moves_the_end(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=LEASE_US)
        stage.later(4 * SECOND_US)
        extended = expect(stage.extend(queue, message.handle, LEASE_US), Extended)
        assert (extended.handle, extended.due) == (message.handle, stage.now + LEASE_US)
        stage.later(LEASE_US - 1)
        assert stage.receive(queue) == []
        stage.later(1)
        assert stage.take(queue).receive_count == 2

    def test_an_extension_can_shorten(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=HOUR_US)
        stage.extend(queue, message.handle, SECOND_US)
        stage.later(SECOND_US)
        assert stage.take(queue).id == message.id

    @for_each("refusal", [{"lease_total_us_max": LEASE_US}, {"size_bytes": 11}], fresh="stage")
    def test_a_late_extension_that_is_refused_tells_that_the_message_is_visible(
        self, stage: Stage, refusal: dict[str, Any]
    ) -> None:
        queue = stage.create(message_bytes_max=10)
        stage.send(queue)
        message = stage.take(queue, lease_us=LEASE_US)
        stage.later(LEASE_US + 1)
        extend = Extend(
            queue=queue,
            origin=TESTER,
            handle=message.handle,
            lease_us=1,
            arrived=stage.now,
            after_expiry=ALLOW,
            **refusal,
        )
        applied = stage.batch([extend, Sweep()])
        assert type(applied.outcomes[0]) in {ParameterInvalid, MessageTooLarge}
        assert applied.visible == {queue: 1}
        assert stage.counts(queue) == (1, 0, 0)

    def test_a_release_makes_the_message_visible_at_once(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue)
        applied = stage.batch([_extending(stage, queue, message.handle, 0)])
        assert applied.visible == {queue: 1}
        assert stage.counts(queue) == (1, 0, 0)
        assert stage.take(queue).receive_count == 2

    @for_each("kill", [False, True], fresh="stage")
    def test_a_lease_survives_a_reopening(self, stage: Stage, kill: bool) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=LEASE_US)
        stage.reopen(kill=kill)
        assert stage.receive(queue) == []
        expect(stage.extend(queue, message.handle, LEASE_US), Extended)
        expect(stage.delete(queue, message.handle), Deleted)

    @pytest.mark.parametrize("use", ["delete", "extend"])
    @for_each(
        "after_expiry, arrived_us, works, swept",
        [
            (*each, swept)
            for swept in (False, True)
            for each in (
                (ALLOW, 0, True), (ALLOW, 1, True), (ALLOW, SECOND_US, True), (REFUSE, 0, True), (REFUSE, 1, False),
            )
        ],
        fresh="stage",
    )  # fmt: skip
    def test_a_handle_whose_lease_has_ended(
        self, stage: Stage, use: str, after_expiry: AfterExpiry, arrived_us: int, works: bool, swept: bool
    ) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=LEASE_US)
        stage.later(LEASE_US + SECOND_US)
        if swept:
            stage.sweep()
        arrived = Instant(stage.now - SECOND_US + arrived_us)
        if use == "delete":
            outcome = stage.delete(queue, message.handle, after_expiry=after_expiry, arrived=arrived)
        else:
            outcome = stage.extend(queue, message.handle, LEASE_US, after_expiry=after_expiry, arrived=arrived)
        if not works:
            refused(outcome, LeaseExpired)
            assert stage.take(queue).receive_count == 2
        elif use == "delete":
            expect(outcome, Deleted)
            assert stage.receive(queue) == []
        else:
            expect(outcome, Extended)
            assert stage.counts(queue) == (0, 0, 1)
            stage.later(LEASE_US)
            assert stage.take(queue).receive_count == 2

    @for_each("after_expiry", [ALLOW, REFUSE], fresh="stage")
    def test_a_stale_handle_changes_nothing_even_if_it_arrived_in_time(
        self, stage: Stage, after_expiry: AfterExpiry
    ) -> None:
        queue = stage.create()
        stage.send(queue)
        old = stage.take(queue, lease_us=SECOND_US)
        arrived = stage.now
        stage.later(SECOND_US)
        new = stage.take(queue, lease_us=LEASE_US)
        for lease_us in (0, SECOND_US, HOUR_US):
            late = stage.extend(queue, old.handle, lease_us, after_expiry=after_expiry, arrived=arrived)
            refused(late, LeaseTaken)
        refused(stage.delete(queue, old.handle, after_expiry=after_expiry, arrived=arrived), LeaseTaken)
        assert stage.counts(queue) == (0, 0, 1)
        stage.later(LEASE_US - 1)
        assert stage.receive(queue) == []
        expect(stage.delete(queue, new.handle), Deleted)

    def test_a_rotating_extension_voids_the_handle_before_it(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        first = stage.take(queue).handle
        second = expect(stage.extend(queue, first, LEASE_US, rotate=True), Extended).handle
        third = expect(stage.extend(queue, second, LEASE_US, rotate=True), Extended).handle
        assert len({first, second, third}) == 3
        for old in (first, second):
            refused(stage.delete(queue, old), LeaseTaken)
            refused(stage.extend(queue, old, 0), LeaseTaken)
        stage.reopen(kill=True)
        refused(stage.delete(queue, second), LeaseTaken)
        expect(stage.delete(queue, third), Deleted)

    def test_a_rotation_outlives_the_lease(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        first = stage.take(queue, lease_us=SECOND_US)
        rotated = expect(stage.extend(queue, first.handle, SECOND_US, rotate=True), Extended).handle
        stage.later(SECOND_US)
        second = stage.take(queue, lease_us=SECOND_US)
        for old in (first.handle, rotated):
            refused(stage.delete(queue, old), LeaseTaken)
        expect(stage.delete(queue, second.handle), Deleted)

    def test_expiry_alone_voids_no_handle(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=SECOND_US)
        stage.later(HOUR_US)
        stage.sweep()
        expect(stage.extend(queue, message.handle, LEASE_US, after_expiry=ALLOW), Extended)
        assert stage.receive(queue) == []

    def test_the_cap_on_a_whole_lease_counts_from_its_grant(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=LEASE_US)
        stage.later(4 * SECOND_US)
        over = stage.extend(queue, message.handle, 6 * SECOND_US + 1, lease_total_us_max=LEASE_US)
        refused(over, ParameterInvalid)
        expect(stage.extend(queue, message.handle, 6 * SECOND_US, lease_total_us_max=LEASE_US), Extended)
        stage.later(6 * SECOND_US)
        again = stage.take(queue, lease_us=LEASE_US)
        expect(stage.extend(queue, again.handle, LEASE_US, lease_total_us_max=LEASE_US), Extended)
        expect(stage.extend(queue, again.handle, 0, lease_total_us_max=1), Extended)

    def test_a_body_is_replaced_with_its_lease(self, stage: Stage) -> None:
        queue = stage.create(message_bytes_max=20)
        stage.send(queue, "step 0")
        message = stage.take(queue, lease_us=LEASE_US)
        new = sending(queue, "step 1")
        stage.extend(queue, message.handle, SECOND_US, body=new.body, md5=new.md5, size_bytes=new.size_bytes)
        large = stage.extend(queue, message.handle, SECOND_US, body="x" * 21, md5=b"", size_bytes=21)
        refused(large, MessageTooLarge)
        stage.reopen(kill=True)
        stage.later(SECOND_US)
        assert stage.take(queue).body == "step 1"

    def test_a_message_id_must_match_if_it_is_named(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue)
        refused(stage.delete(queue, message.handle, message_id=b"\0" * 16), MessageGone)
        refused(stage.extend(queue, message.handle, 0, message_id=b"\0" * 16), MessageGone)
        expect(stage.extend(queue, message.handle, SECOND_US, message_id=message.id), Extended)
        expect(stage.delete(queue, message.handle, message_id=message.id), Deleted)

    def test_what_reached_nobody_is_visible_at_once_and_the_receive_counts(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        stage.send(queue)
        one, two = stage.receive(queue, 2)
        stage.delete(queue, two.handle)
        back = stage.do(Undeliver(queue=queue, origin=TESTER, handles=(one.handle, two.handle, "nonsense")))
        assert expect(back, Undelivered).released == 1
        again = stage.take(queue)
        assert (again.id, again.receive_count) == (one.id, 2)
        rotated = expect(stage.extend(queue, again.handle, SECOND_US, rotate=True), Extended).handle
        for handle, released in ((one.handle, 0), (again.handle, 0), (rotated, 1)):
            assert stage.counts(queue) == (0, 0, 1)
            back = stage.do(Undeliver(queue=queue, origin=TESTER, handles=(handle,)))
            assert expect(back, Undelivered).released == released
        assert stage.counts(queue) == (1, 0, 0)

    def test_the_next_due_is_never_later_than_the_first_end_of_a_lease(self, stage: Stage) -> None:
        queue = stage.create()
        for lease_us in (9, 3, 7, 5):
            stage.send(queue)
            stage.take(queue, lease_us=lease_us * SECOND_US)
        start = stage.now
        for end in (3, 5, 7, 9):
            due = stage.batch([]).next_due
            assert due is not None
            assert due <= start + end * SECOND_US
            stage.later(start + end * SECOND_US - stage.now)
            stage.sweep()
        assert stage.counts(queue) == (4, 0, 0)


def _extending(stage: Stage, queue: QueueKey, handle: str, lease_us: int) -> Extend:
    return Extend(queue=queue, origin=TESTER, handle=handle, lease_us=lease_us, arrived=stage.now)
