"""Closing: twice is once, who waits comes back, and afterwards nothing goes."""

import pytest

from veilmq.client.errors import TransportError
from veilmq.testing.client_contract.stage import Stage


class TestClosing:
    """Close."""

    def test_a_closed_queue_does_nothing_more(self, stage: Stage) -> None:
        queue = stage.create()
        held = stage.held(queue)
        queue.close()
        queue.close()
        for call in (lambda: queue.send("x"), queue.receive, lambda: queue.delete(held.handle), queue.stats):
            with pytest.raises(TransportError) as refused:
                call()
            assert not refused.value.may_have_happened

    def test_other_queues_of_the_account_go_on(self, stage: Stage) -> None:
        queue = stage.create()
        again = stage.account.queue(queue.name)
        queue.close()
        again.send("x")
        assert len(stage.empty(again)) == 1

    def test_a_with_block_closes(self, stage: Stage) -> None:
        with stage.create() as queue:
            queue.send("x")
        with pytest.raises(TransportError):
            queue.send("y")

    def test_who_waits_comes_back(self, stage: Stage) -> None:
        queue = stage.create()
        waited = stage.aside(lambda: queue.receive(wait=stage.wait(queue)))
        queue.close()
        try:
            assert waited() == []
        except TransportError:
            pass
        other = stage.account.queue(queue.name)
        other.send("x")
        # The poll that was given up may still be parked in the server, and gives back what it brings.
        assert len(stage.aside(lambda: other.receive(wait=stage.wait(other)))()) == 1
