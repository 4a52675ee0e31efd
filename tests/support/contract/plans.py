"""Plans: a learnt first lease applies to receives that name none, within the owner's limits."""

from typing import Any

from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, expect, refused

from veilmq.model.commands import CreateQueue, RevertPlan, SuggestPlan
from veilmq.model.errors import CapabilityMissing, QueueMissing
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.outcomes import Outcome, QueueChanged, QueueCreated
from veilmq.model.settings.queue import Adaptive, LeasePlan, QueueKey


def suggest(stage: Stage, queue: QueueKey, **plan: Any) -> Outcome:
    return stage.do(SuggestPlan(queue=queue, origin=TESTER, plan=LeasePlan(**plan)))


def leased_us(stage: Stage, queue: QueueKey, kind: str | None = None, **fields: Any) -> int:
    """For how long a fresh message of that type is leased."""
    stage.send(queue, extras=Extras(type=kind))
    message = stage.take(queue, **fields)
    assert message.due is not None
    stage.delete(queue, message.handle)
    return message.due - stage.now


class TestPlans:
    """Suggested and applied first leases."""

    def test_a_suggestion_is_shown_and_changes_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        info = expect(suggest(stage, queue, lease_us=5 * MINUTE_US, why="1,000 attempts"), QueueChanged).info
        assert info.plan.suggested is not None
        assert (info.plan.suggested.lease_us, info.plan.suggested.made) == (5 * MINUTE_US, stage.now)
        assert info.plan.applied is None
        assert leased_us(stage, queue) == 30 * SECOND_US

    def test_an_applied_plan_lengthens_the_first_lease_by_type(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        suggest(stage, queue, lease_us=MINUTE_US, by_type={"film": 10 * MINUTE_US})
        assert leased_us(stage, queue) == MINUTE_US
        assert leased_us(stage, queue, "film") == 10 * MINUTE_US
        assert leased_us(stage, queue, "other") == MINUTE_US
        assert stage.events()[-2].source == "plan"
        assert stage.describe(queue).settings.visibility_timeout_us == 30 * SECOND_US

    def test_who_names_a_lease_gets_it(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        suggest(stage, queue, lease_us=10 * MINUTE_US)
        assert leased_us(stage, queue, lease_us=SECOND_US) == SECOND_US

    def test_without_leave_it_never_shortens(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        suggest(stage, queue, lease_us=5 * SECOND_US)
        assert leased_us(stage, queue) == 30 * SECOND_US

    def test_with_leave_it_shortens_to_the_owners_minimum_and_no_foreign_heartbeats_floor(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY, first_lease_min_us=10 * SECOND_US)
        suggest(stage, queue, lease_us=5 * SECOND_US)
        assert leased_us(stage, queue) == 10 * SECOND_US
        suggest(stage, queue, lease_us=5 * SECOND_US, floor_us=20 * SECOND_US)
        assert leased_us(stage, queue) == 20 * SECOND_US

    def test_a_small_change_is_none(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        suggest(stage, queue, lease_us=100 * SECOND_US)
        suggest(stage, queue, lease_us=115 * SECOND_US)
        assert leased_us(stage, queue) == 100 * SECOND_US
        suggest(stage, queue, lease_us=125 * SECOND_US)
        assert leased_us(stage, queue) == 125 * SECOND_US

    def test_the_plan_before_comes_back(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        suggest(stage, queue, lease_us=MINUTE_US)
        suggest(stage, queue, lease_us=10 * MINUTE_US)
        expect(stage.do(RevertPlan(queue=queue, origin=TESTER)), QueueChanged)
        assert leased_us(stage, queue) == MINUTE_US
        expect(stage.do(RevertPlan(queue=queue, origin=TESTER)), QueueChanged)
        assert leased_us(stage, queue) == 10 * MINUTE_US

    def test_what_was_taken_back_does_not_come_back_by_itself(self, stage: Stage) -> None:
        """Suggested again, or nearly the same; another one is put in force."""
        queue = stage.create(adaptive=Adaptive.APPLY)
        suggest(stage, queue, lease_us=10 * MINUTE_US, by_type={"film": 20 * MINUTE_US})
        expect(stage.do(RevertPlan(queue=queue, origin=TESTER)), QueueChanged)
        for lease_us, film_us in ((10 * MINUTE_US, 20 * MINUTE_US), (11 * MINUTE_US, 19 * MINUTE_US)):
            suggest(stage, queue, lease_us=lease_us, by_type={"film": film_us})
            assert leased_us(stage, queue) == 30 * SECOND_US
        stage.change(queue, retention_us=60 * MINUTE_US)
        assert leased_us(stage, queue) == 30 * SECOND_US
        suggest(stage, queue, lease_us=10 * MINUTE_US, by_type={"film": 40 * MINUTE_US})
        assert leased_us(stage, queue, "film") == 40 * MINUTE_US

    def test_the_owners_new_decision_brings_it_back(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        suggest(stage, queue, lease_us=10 * MINUTE_US)
        expect(stage.do(RevertPlan(queue=queue, origin=TESTER)), QueueChanged)
        stage.change(queue, first_lease_min_us=SECOND_US)
        assert leased_us(stage, queue) == 10 * MINUTE_US

    def test_taking_back_one_plan_twice_is_taking_it_back_once(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        made = stage.now
        suggest(stage, queue, lease_us=10 * MINUTE_US)
        start = stage.following()
        for _ in range(2):
            stage.later(SECOND_US)
            expect(stage.do(RevertPlan(queue=queue, origin=TESTER, why="it got worse", made=made)), QueueChanged)
        assert leased_us(stage, queue) == 30 * SECOND_US
        (event,) = (each for each in stage.events(start) if each.kind == "queue_changed")
        assert event.detail == {"plan": "reverted", "applied": None, "why": "it got worse"}

    def test_the_owner_switches_it_on_and_off(self, stage: Stage) -> None:
        queue = stage.create()
        suggest(stage, queue, lease_us=MINUTE_US)
        stage.change(queue, adaptive=Adaptive.APPLY)
        assert leased_us(stage, queue) == MINUTE_US
        stage.change(queue, adaptive=Adaptive.SUGGEST)
        assert leased_us(stage, queue) == 30 * SECOND_US
        stage.change(queue, adaptive=Adaptive.OFF)
        assert stage.describe(queue).plan.suggested is None
        refused(suggest(stage, queue, lease_us=MINUTE_US), CapabilityMissing)

    def test_a_longer_timeout_of_the_queue_lengthens_the_plan(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        suggest(stage, queue, lease_us=MINUTE_US)
        stage.change(queue, visibility_timeout_us=5 * MINUTE_US)
        assert leased_us(stage, queue) == 5 * MINUTE_US

    def test_plans_survive_a_reopening_and_every_change_is_an_event(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        start = stage.following()
        suggest(stage, queue, lease_us=MINUTE_US)
        before = stage.describe(queue).plan
        stage.reopen(kill=True)
        assert stage.describe(queue).plan == before
        (event,) = stage.events(start)
        assert (event.kind, event.detail["plan"]) == ("queue_changed", "suggested")  # type: ignore[index]
        assert event.detail["applied"]["lease_us"] == MINUTE_US  # type: ignore[index]

    def test_what_was_rolled_back_is_forgotten(self, stage: Stage) -> None:
        queue = stage.create(adaptive=Adaptive.APPLY)
        stage.store.apply([SuggestPlan(queue=queue, origin=TESTER, plan=LeasePlan(lease_us=MINUTE_US))], stage.now)
        stage.factory.abandon(stage.store)
        assert leased_us(stage, queue) == 30 * SECOND_US
        assert stage.describe(queue).plan.suggested is None

    def test_creating_again_does_not_trip_over_the_owners_plan(self, stage: Stage) -> None:
        queue = stage.create()
        stage.change(queue, adaptive=Adaptive.APPLY, first_lease_min_us=SECOND_US)
        again = stage.do(CreateQueue(queue=queue, origin=TESTER, compare_all=True))
        assert not expect(again, QueueCreated).created

    def test_a_missing_queue_is_told(self, stage: Stage) -> None:
        gone = QueueKey(ACCOUNT, REGION, "gone")
        refused(suggest(stage, gone, lease_us=MINUTE_US), QueueMissing)
        refused(stage.do(RevertPlan(queue=gone, origin=TESTER)), QueueMissing)
