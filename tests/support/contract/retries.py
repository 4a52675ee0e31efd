"""Retries: a message that its worker gives back is distinguished from one whose worker died."""

import pytest
from tests.support.contract.stage import TESTER, Stage, expect, sending

from veilmq.model.commands import AfterExpiry, StartMove
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.messages import Extras, Failure, Report, Reported
from veilmq.model.outcomes import Extended, MoveStarted
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.testing.for_each import for_each
from veilmq.testing.replaying import replay

RAISED = Report(Reported.RETRY, Failure("raised", "ValueError", "bad zip code"))
WORKING = Report(Reported.WORKING)
ENDS = ("lease_expired", "expired_after_change", "retry_due")


class TestRetries:
    """What an extend was for, and how the lease that it gave ends."""

    @for_each("fifo", [False, True], fresh="stage")
    def test_a_release_for_retry_comes_back_when_its_delay_is_over(self, stage: Stage, fifo: bool) -> None:
        queue = stage.create("jobs.fifo" if fifo else "jobs", fifo=fifo, content_deduplication=fifo)
        stage.send(queue, extras=Extras(group="g") if fifo else Extras())
        message = stage.take(queue, lease_us=MINUTE_US)
        stage.later(3 * SECOND_US)
        start = stage.following()
        expect(stage.extend(queue, message.handle, 10 * SECOND_US, report=RAISED), Extended)
        assert stage.counts(queue) == (0, 0, 1), "as AWS counts it"
        stage.later(10 * SECOND_US - 1)
        assert stage.receive(queue) == []
        stage.later(1)
        assert stage.take(queue).receive_count == 2
        given_back, due, received = stage.events(start)
        assert (given_back.kind, due.kind, received.kind) == ("released_for_retry", "retry_due", "received")
        assert (given_back.attempt, given_back.held_us, given_back.lease_us) == (1, 3 * SECOND_US, 10 * SECOND_US)
        assert given_back.detail == {"reason": "raised", "error_type": "ValueError", "error": "bad zip code"}
        assert (due.at, due.attempt, due.principal) == (stage.now, 1, "tester")
        assert received.visible_since == due.at

    def test_a_release_for_retry_without_a_delay_is_visible_at_once(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        start = stage.following()
        message = stage.take(queue)
        stage.extend(queue, message.handle, 0, report=RAISED)
        assert stage.take(queue).receive_count == 2
        assert stage.kinds(start) == ["received", "released_for_retry", "received"]
        replay(stage.events())

    @pytest.mark.parametrize("found", ["swept", "claimed", "extended", "reopened"])
    @for_each(
        ("steps", "end"),
        [
            ([], "lease_expired"),
            ([(10, None)], "expired_after_change"),
            ([(30, None)], "lease_expired"),
            ([(60, None)], "lease_expired"),
            ([(10, WORKING)], "lease_expired"),
            ([(10, None), (20, None)], "lease_expired"),
            ([(90, None), (20, None)], "expired_after_change"),
            ([(10, RAISED)], "retry_due"),
            ([(90, RAISED)], "retry_due"),
            ([(10, RAISED), (20, None)], "lease_expired"),
            ([(20, RAISED), (10, None)], "expired_after_change"),
        ],
        fresh="stage",
    )
    def test_the_end_says_what_the_last_extend_was_for(
        self, stage: Stage, steps: list[tuple[int, Report | None]], end: str, found: str
    ) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=30 * SECOND_US)
        for seconds, report in steps:
            expect(stage.extend(queue, message.handle, seconds * SECOND_US, report=report), Extended)
        start = stage.following()
        if found == "reopened":
            stage.reopen(kill=True)
        stage.later(2 * MINUTE_US)
        if found == "claimed":
            stage.take(queue)
        elif found == "extended":
            stage.extend(queue, message.handle, SECOND_US, after_expiry=AfterExpiry.ALLOW)
        else:
            stage.sweep()
        assert [kind for kind in stage.kinds(start) if kind in ENDS] == [end]
        replay(stage.events())

    def test_a_new_grant_knows_nothing_of_the_change_before(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        stage.extend(queue, stage.take(queue).handle, SECOND_US, report=RAISED)
        stage.later(SECOND_US)
        stage.take(queue, lease_us=SECOND_US)
        stage.later(SECOND_US)
        stage.sweep()
        assert stage.kinds()[-1] == "lease_expired"

    def test_handles_of_one_batch_keep_their_own_ends(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(20):
            stage.send(queue, str(number))
        held = stage.receive(queue, 20)
        stage.batch(
            [
                stage.extending(queue, message.handle, SECOND_US, report=RAISED if number % 2 else None)
                for number, message in enumerate(held)
            ]
        )
        start = stage.following()
        stage.later(SECOND_US)
        stage.sweep()
        ends = {event.sequence: event.kind for event in stage.events(start)}
        assert [ends[message.sequence] for message in held] == ["expired_after_change", "retry_due"] * 10

    def test_a_handle_stays_good_after_a_release_for_retry(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue)
        rotated = expect(stage.extend(queue, message.handle, SECOND_US, report=RAISED, rotate=True), Extended)
        assert rotated.handle != message.handle
        stage.delete(queue, rotated.handle)
        assert stage.kinds()[-2:] == ["released_for_retry", "deleted"]

    def test_what_was_never_received_is_only_moved(self, stage: Stage) -> None:
        queue = stage.create()
        handle = stage.send(queue, delay_us=MINUTE_US, wants_handle=True).handle
        stage.extend(queue, handle, SECOND_US, report=RAISED)
        stage.later(SECOND_US)
        assert stage.take(queue).extras == Extras()
        assert stage.kinds()[-2:] == ["extended", "received"]


class TestLastErrors:
    """A message keeps the reason of its last release, and a dead letter keeps how often it was given back."""

    def test_a_dead_letter_says_how_often_and_why_it_failed(self, stage: Stage) -> None:
        dead, queue = _with_dead_letters(stage, 3)
        stage.send(queue, "body", extras=Extras(type="resize"))
        for error in ("first", "second", "second"):
            _fail(stage, queue, Failure("raised", "ValueError", error))
        assert stage.receive(queue) == []
        (event,) = [event for event in stage.events() if event.kind == "dead_lettered"]
        assert event.attempt == 3
        detail = event.detail or {}
        assert (detail["receives"], detail["error_type"], detail["error"]) == (3, "ValueError", "second")
        for _ in range(2):  # also from the tables of a reopened store
            letter = stage.take(dead, lease_us=0)
            assert (letter.extras.dead_receives, letter.extras.type) == (3, "resize")
            assert (letter.extras.error_type, letter.extras.error) == ("ValueError", "second")
            stage.reopen(kill=True)

    def test_a_retry_without_an_error_leaves_the_last_one(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        _fail(stage, queue, Failure("raised", "KeyError", "'zip'"))
        _fail(stage, queue, Failure("busy"))
        assert stage.take(queue).extras.error_type == "KeyError"
        assert [event.detail for event in stage.events() if event.kind == "released_for_retry"] == [
            {"reason": "raised", "error_type": "KeyError", "error": "'zip'"},
            {"reason": "busy"},
        ]

    def test_a_message_that_is_moved_back_begins_without_an_error(self, stage: Stage) -> None:
        dead, queue = _with_dead_letters(stage, 1)
        stage.send(queue)
        _fail(stage, queue, Failure("raised", "ValueError", "first"))
        assert stage.receive(queue) == []
        expect(stage.do(StartMove(queue=dead, origin=TESTER)), MoveStarted)
        stage.sweep()
        message = stage.take(queue, lease_us=SECOND_US)
        assert (message.extras.error_type, message.extras.error) == ("", "")
        stage.later(SECOND_US)
        assert stage.receive(queue) == []
        *_, event = [event for event in stage.events() if event.kind == "dead_lettered"]
        assert {"error_type", "error"} & set(event.detail or {}) == set()

    def test_an_error_is_kept_without_the_body_being_written_again(self, stage: Stage) -> None:
        """Also in what a peek shows, and for the next receive of the same attempt."""
        queue = stage.create()
        stage.send(queue, "body")
        _fail(stage, queue, Failure("raised", "ValueError", "first"))
        (shown,) = stage.peek(queue)
        assert (shown.extras.error_type, shown.extras.error) == ("ValueError", "first")
        stage.reopen(kill=True)
        assert stage.take(queue).extras.error == "first"

    def test_the_body_that_a_retry_replaces_and_its_error_are_both_kept(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "step 0")
        new = sending(queue, "step 1")
        message = stage.take(queue)
        contents = {"body": new.body, "md5": new.md5, "size_bytes": new.size_bytes}
        stage.extend(queue, message.handle, 0, report=RAISED, **contents)
        again = stage.take(queue)
        assert (again.body, again.extras.error) == ("step 1", "bad zip code")


def _with_dead_letters(stage: Stage, receive_count_max: int) -> tuple[QueueKey, QueueKey]:
    dead = stage.create("dead")
    return dead, stage.create(redrive=RedrivePolicy(dead, receive_count_max))


def _fail(stage: Stage, queue: QueueKey, failure: Failure) -> None:
    message = stage.take(queue)
    expect(stage.extend(queue, message.handle, SECOND_US, report=Report(Reported.RETRY, failure)), Extended)
    stage.later(SECOND_US)
