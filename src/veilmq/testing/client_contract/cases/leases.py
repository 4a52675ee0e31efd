"""Leases: extend, release, expire, delete; and what a handle can do after its message was delivered again."""

import pytest

from veilmq.client.messages import Extension
from veilmq.model.errors import LeaseError, MessageGone, ParameterInvalid, ReceiptInvalid, VeilError
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage, unrefused


class TestLeases:
    """Leases."""

    def test_an_extension_counts_from_now(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue, lease=stage.brief)
        handle = queue.extend(message.handle, LONG)
        stage.pass_time(stage.brief + SECOND)
        assert queue.receive() == []
        queue.delete(handle)

    def test_an_extension_can_shorten(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        queue.extend(message.handle, SECOND)
        stage.pass_time(2 * SECOND)
        assert stage.take(queue).id == message.id

    def test_the_handle_to_use_next(self, stage: Stage) -> None:
        queue = stage.create()
        first = stage.held(queue).handle
        second = queue.extend(first, LONG)
        (third,) = queue.extend_batch([Extension(second, LONG)])
        assert isinstance(third, str)
        if queue.capabilities.receipts_rotate:
            assert len({first, second, third}) == 3
            for old in (first, second):
                with pytest.raises(LeaseError):
                    queue.extend(old, LONG)
                with pytest.raises(LeaseError):
                    queue.delete(old)
        else:
            assert first == second == third
        queue.delete(third)

    def test_an_extension_beyond_the_longest_lease_is_refused_and_changes_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        for lease in (queue.capabilities.lease_max + 1, -1, float("nan")):
            with pytest.raises(ParameterInvalid) as refused:
                queue.extend(message.handle, lease)
            assert refused.value.parameter == "lease"
        assert queue.receive() == []
        queue.delete(message.handle)

    def test_a_released_message_is_there_at_once(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        queue.release(message.handle)
        stage.back(queue)
        again = stage.take(queue)
        assert (again.id, again.receive_count) == (message.id, 2)

    def test_a_late_extend_holds_the_message_again(self, stage: Stage) -> None:
        """A message that nobody else received still belongs to the holder of the expired lease; only some protocols
        allow it."""
        queue = stage.create()
        message = stage.held(queue, lease=stage.brief)
        stage.pass_time(stage.brief + SECOND)
        try:
            handle = queue.extend(message.handle, LONG)
        except LeaseError:
            assert not queue.capabilities.extends_late
            assert stage.take(queue).receive_count == 2
            return
        assert queue.receive() == []
        queue.delete(handle)
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)

    def test_a_message_is_released_for_later(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        queue.release(message.handle, stage.brief)
        assert queue.receive() == []
        stage.pass_time(stage.brief + SECOND)
        assert stage.take(queue).id == message.id

    def test_a_deleted_message_is_gone_for_good(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue, lease=stage.brief)
        queue.delete(message.handle)
        stage.pass_time(stage.brief + SECOND)
        assert queue.receive() == []
        with pytest.raises(VeilError):
            queue.extend(message.handle, LONG)
        try:
            queue.delete(message.handle)  # some protocols report this, some do not
        except VeilError as error:
            assert isinstance(error, MessageGone | ReceiptInvalid)

    def test_fencing(self, stage: Stage) -> None:
        """A consumer that lost the lease to another one can neither extend, release nor delete the message."""
        queue = stage.create()
        old = stage.held(queue, lease=SECOND)
        stage.pass_time(2 * SECOND)
        new = stage.take(queue)
        assert new.id == old.id
        assert new.handle != old.handle
        with pytest.raises(LeaseError):
            queue.extend(old.handle, LONG)
        with pytest.raises(LeaseError):
            queue.release(old.handle)
        (refused,) = queue.extend_batch([Extension(old.handle, SECOND)])
        assert isinstance(refused, LeaseError)
        try:
            queue.delete(old.handle)  # SQS reports nothing and does nothing
        except VeilError as error:
            assert isinstance(error, LeaseError)
        assert queue.receive() == []
        handle = queue.extend(new.handle, LONG)
        queue.delete(handle)
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)

    def test_what_is_no_handle_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        message = stage.held(queue)
        for call in (lambda handle: queue.extend(handle, LONG), queue.release, queue.delete):
            wrong = unrefused(call, ["", "x", "0" * 66, "žluť", "AQEB/+=="], (ReceiptInvalid, ParameterInvalid))
            assert wrong == []
        queue.delete(message.handle)

    def test_a_handle_of_another_queue_is_refused(self, stage: Stage) -> None:
        one, other = stage.create(), stage.create()
        message = stage.held(one)
        for call in (lambda: other.extend(message.handle, LONG), lambda: other.delete(message.handle)):
            with pytest.raises((ReceiptInvalid, ParameterInvalid, LeaseError)):
                call()
        assert one.receive() == []
        one.delete(message.handle)

    def test_a_body_is_replaced_with_its_lease(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.body_replaceable:
            return
        message = stage.held(queue, "step 0")
        handle = queue.extend(message.handle, LONG, body="step 1\r\n")
        with pytest.raises(ParameterInvalid):
            queue.extend(handle, LONG, body="\0")
        queue.release(handle)
        stage.back(queue)
        assert stage.take(queue).body == "step 1\r\n"
