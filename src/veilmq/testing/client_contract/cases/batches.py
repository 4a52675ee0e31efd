"""Batches: one result or one error per entry, in order, each independent of the others."""

import pytest

from veilmq.client.messages import Extension, Message, Sent
from veilmq.model.errors import MessageTooLarge, ParameterInvalid, QueueMissing, VeilError
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage, sent


class TestBatches:
    """send_batch, extend_batch, delete_batch."""

    def test_more_than_one_request_takes(self, stage: Stage) -> None:
        queue = stage.create()
        bodies = [f"m{number}" for number in range(25)]
        results = [sent(result) for result in queue.send_batch(bodies)]
        received = stage.empty(queue)
        assert {message.id: message.body for message in received} == {
            result.id: body for result, body in zip(results, bodies, strict=True)
        }
        handles = queue.extend_batch([Extension(message.handle, LONG) for message in received])
        assert all(isinstance(handle, str) for handle in handles)
        assert queue.delete_batch([str(handle) for handle in handles]) == [None] * 25
        assert (queue.stats().visible, queue.stats().in_flight or 0) == (0, 0)

    def test_nothing_to_do(self, stage: Stage) -> None:
        queue = stage.create()
        assert (queue.send_batch([]), queue.extend_batch([]), queue.delete_batch([])) == ([], [], [])

    def test_large_messages_share_no_request_that_cannot_carry_them(self, stage: Stage) -> None:
        queue = stage.create()
        size = queue.capabilities.body_bytes_max // 4
        bodies = [f"{number}" * size for number in range(6)]
        bodies = [body[: size * 3 // 4] for body in bodies]
        for result in queue.send_batch(bodies):
            sent(result)
        assert sorted(message.body[0] for message in stage.empty(queue)) == list("012345")

    def test_messages_that_cannot_be_leave_the_others_alone(self, stage: Stage) -> None:
        queue = stage.create()
        large = "x" * (queue.capabilities.body_bytes_max + 1)
        late = [f"m{number}" for number in range(12)]
        entries: list[str | Message] = ["a", "bad\0", Message("b"), large, Message("c", delay=-1), *late]
        results = queue.send_batch(entries)
        kinds = [type(result) for result in results]
        assert kinds == [Sent, ParameterInvalid, Sent, MessageTooLarge, ParameterInvalid, *[Sent] * 12]
        assert {message.body for message in stage.empty(queue)} == {"a", "b", *late}

    def test_extends_that_cannot_be_leave_the_others_alone(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send_batch([f"m{number}" for number in range(12)])
        held = stage.empty(queue)
        gone = held[5]
        queue.delete(gone.handle)
        extensions = [Extension(message.handle, LONG) for message in held]
        extensions.insert(0, Extension("no-handle", LONG))
        extensions.append(Extension(held[0].handle, queue.capabilities.lease_max + 1))
        results = queue.extend_batch(extensions)
        failed = [place for place, result in enumerate(results) if isinstance(result, VeilError)]
        assert failed == [0, 6, 13]
        assert isinstance(results[13], ParameterInvalid)

    def test_each_extension_has_its_own_length(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send_batch(["short", "long"])
        held = {message.body: message for message in stage.empty(queue)}
        extensions = [Extension(held["short"].handle, SECOND), Extension(held["long"].handle, LONG)]
        assert all(isinstance(handle, str) for handle in queue.extend_batch(extensions))
        stage.pass_time(2 * SECOND)
        assert [message.body for message in stage.empty(queue)] == ["short"]

    def test_deletes_that_cannot_be_leave_the_others_alone(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send_batch([f"m{number}" for number in range(12)])
        held = stage.empty(queue)
        handles = [message.handle for message in held]
        results = queue.delete_batch([*handles[:3], "no-handle", *handles[3:]])
        assert [place for place, result in enumerate(results) if result is not None] == [3]
        assert isinstance(results[3], VeilError)
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)

    def test_a_queue_that_is_gone_raises(self, stage: Stage) -> None:
        queue = stage.create()
        held = stage.held(queue)
        stage.account.delete(queue.name)
        for call in (
            lambda: queue.send_batch(["a", "b"]),
            lambda: queue.extend_batch([Extension(held.handle, LONG)]),
            lambda: queue.delete_batch([held.handle]),
        ):
            with pytest.raises(QueueMissing):
                call()
