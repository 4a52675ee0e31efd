"""Priority: 1 is most urgent, and is delivered first wherever a message comes from."""

from tests.support.contract.stage import Stage, bodies

from veilmq.model.instant import SECOND_US


class TestPriority:
    """Priority."""

    def test_the_most_urgent_goes_first_and_then_the_order_of_sends(self, stage: Stage) -> None:
        queue = stage.create()
        for body, priority in (("a", 8), ("b", 16), ("c", 1), ("d", 8), ("e", 1)):
            stage.send(queue, body, priority=priority)
        assert bodies(stage.peek(queue)) == ["c", "e", "a", "d", "b"]
        assert bodies(stage.receive(queue, 3) + stage.receive(queue, 10)) == ["c", "e", "a", "d", "b"]

    def test_what_came_back_stands_with_its_priority(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "low", priority=9)
        stage.send(queue, "delayed and high", priority=2, delay_us=SECOND_US)
        low = stage.take(queue)
        stage.extend(queue, low.handle, 0)
        stage.send(queue, "high", priority=2)
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["high", "delayed and high", "low"]

    def test_priorities_survive_a_reopening(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(8):
            stage.send(queue, str(number), priority=1 + number % 4)
        first = stage.receive(queue, 3, lease_us=SECOND_US)
        assert bodies(first) == ["0", "4", "1"]
        stage.reopen(kill=True)
        assert bodies(stage.receive(queue, 2)) == ["5", "2"]
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["0", "4", "1", "6", "3", "7"]
