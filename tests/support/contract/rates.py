"""How many messages a queue delivers per second if its owner set a bound."""

from tests.support.contract.stage import TESTER, Stage, refused

from veilmq.model.commands import Receive
from veilmq.model.errors import RateExceeded
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import Extras
from veilmq.model.outcomes import Received


class TestRates:
    """`receives_per_second_max`."""

    def test_a_second_has_its_worth_and_no_more(self, stage: Stage) -> None:
        queue = stage.create(receives_per_second_max=4)
        for _ in range(20):
            stage.send(queue)
        assert len(stage.receive(queue, 3)) == 3
        assert len(stage.receive(queue, 10)) == 1, "what is left"
        error = refused(stage.do(Receive(queue=queue, origin=TESTER)), RateExceeded)
        assert error.limit == 4  # type: ignore[attr-defined]
        stage.later(SECOND_US // 2)
        assert len(stage.receive(queue, 10)) == 2
        stage.later(60 * SECOND_US)
        assert len(stage.receive(queue, 10)) == 4, "time without receives is not saved up beyond a second"

    def test_it_is_over_all_receives_of_a_batch(self, stage: Stage) -> None:
        queue = stage.create(receives_per_second_max=3)
        for _ in range(9):
            stage.send(queue)
        outcomes = stage.batch([Receive(queue=queue, origin=TESTER, count_max=2) for _ in range(3)]).outcomes
        got = [len(each.messages) for each in outcomes if isinstance(each, Received)]
        assert got == [2, 1]
        assert isinstance(outcomes[2], RateExceeded)

    def test_an_empty_queue_is_just_empty(self, stage: Stage) -> None:
        queue = stage.create(receives_per_second_max=1)
        for _ in range(5):
            assert stage.receive(queue) == []
        stage.send(queue)
        assert len(stage.receive(queue)) == 1, "receives that found nothing cost nothing"
        assert stage.receive(queue) == []

    def test_groups_keep_to_it_too(self, stage: Stage) -> None:
        fair, fifo = (
            stage.create("fair", receives_per_second_max=2),
            stage.create("f.fifo", content_deduplication=True, receives_per_second_max=2),
        )
        for queue in (fair, fifo):
            for number in range(4):
                stage.send(queue, str(number), extras=Extras(group=f"g{number}"))
            assert len(stage.receive(queue, 10)) == 2
            refused(stage.do(Receive(queue=queue, origin=TESTER)), RateExceeded)

    def test_what_an_attempt_gets_again_counts_against_those_that_follow(self, stage: Stage) -> None:
        fifo = stage.create("f.fifo", content_deduplication=True, receives_per_second_max=2)
        for group in "ab":
            stage.send(fifo, group, extras=Extras(group=group))
        for _ in range(2):
            assert len(stage.receive(fifo, 10, attempt_id="x")) == 2
        for group in "cde":
            stage.send(fifo, group, extras=Extras(group=group))
        for _ in range(2):
            refused(stage.do(Receive(queue=fifo, origin=TESTER)), RateExceeded)
        stage.later(2 * SECOND_US)
        assert len(stage.receive(fifo, 10)) == 2

    def test_it_is_set_changed_and_taken_away(self, stage: Stage) -> None:
        queue = stage.create()
        for _ in range(9):
            stage.send(queue)
        stage.change(queue, receives_per_second_max=1)
        assert stage.describe(queue).settings.receives_per_second_max == 1
        assert len(stage.receive(queue, 10)) == 1
        stage.change(queue, receives_per_second_max=None)
        assert len(stage.receive(queue, 10)) == 8

    def test_a_batch_that_failed_gives_back_what_it_took(self, stage: Stage) -> None:
        queue = stage.create(receives_per_second_max=1)
        stage.send(queue)
        stage.store.apply([Receive(queue=queue, origin=TESTER)], stage.now)
        stage.factory.abandon(stage.store)
        assert len(stage.receive(queue)) == 1
