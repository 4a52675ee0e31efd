"""Queues of an account: create, find, list and delete them; and FIFO queues: order in a group, one lease at a time,
deduplication. Adapters without FIFO must refuse.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import pytest

from veilmq.client.messages import Message, Sent, Template
from veilmq.client.queue import Queue
from veilmq.model.errors import (
    CapabilityMissing,
    ParameterInvalid,
    QueueDeletedRecently,
    QueueExists,
    QueueMissing,
    VeilError,
)
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage, Text, unrefused
from veilmq.testing.for_each import for_each


class TestAccounts:
    """Account."""

    def test_creating_twice_is_creating_once(self, stage: Stage) -> None:
        name, template = stage.name("twice"), Template(visibility_timeout=60)
        assert stage.account.create(name, template) is True
        stage.account.queue(name).send("kept")
        assert stage.account.create(Text(name), template) is False
        assert stage.account.create(name) is False
        assert stage.take(stage.account.queue(name)).body == "kept"

    def test_another_setting_is_another_queue(self, stage: Stage) -> None:
        name = stage.name("other")
        stage.account.create(name, Template(visibility_timeout=60))
        with pytest.raises(QueueExists) as refused:
            stage.account.create(name, Template(visibility_timeout=61))
        assert (refused.value.queue, refused.value.setting) == (name, "visibility_timeout")
        assert stage.account.queue(name).stats().visibility_timeout in {60, None}

    def test_settings_are_told(self, stage: Stage) -> None:
        queue = stage.create(Template(visibility_timeout=61, retention=3_600, delay=2))
        stats = queue.stats()
        assert stats.visibility_timeout in {61, None}
        assert stats.retention in {3_600, None}
        assert stats.delay in {2, None}

    def test_stats_count(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send_batch(["a", "b", "c"])
        stage.take(queue)
        stats = queue.stats()
        assert (stats.visible, stats.in_flight) in {(2, 1), (2, None), (3, None)}

    def test_settings_that_cannot_be_are_refused(self, stage: Stage) -> None:
        name = stage.name("bad")
        counts: list[Any] = [0, 1_001, True, 2.0, "2"]
        templates: list[Any] = [
            Template(visibility_timeout=-1),
            Template(retention=-1),
            Template(delay=-1),
            {"delay": 5},
            Template(dead_letter_queue=5, receive_count_max=2),  # type: ignore[arg-type]
            Template(dead_letter_queue=name),
            Template(receive_count_max=2),
            Template(tags=["name"]),  # type: ignore[arg-type]
            Template(tags={"name": 5}),  # type: ignore[dict-item]
        ]
        assert unrefused(lambda template: stage.account.create(name, template), templates) == []
        dead_letters = [Template(dead_letter_queue=name, receive_count_max=count) for count in counts]
        create = partial(stage.account.create, name)
        assert unrefused(create, dead_letters, parameter=lambda _: "receive_count_max") == []
        assert name not in stage.account.names()

    def test_names_that_cannot_be_are_refused(self, stage: Stage) -> None:
        other_types: list[Any] = [None, 5, b"name", ["name"]]
        assert unrefused(stage.account.create, ["", "with space", "a/b", "x" * 300, *other_types]) == []
        assert unrefused(stage.account.queue, other_types) == []
        assert unrefused(stage.account.delete, other_types) == []
        assert unrefused(stage.account.names, other_types, parameter=lambda _: "prefix") == []

    def test_names_are_listed_by_their_beginning(self, stage: Stage) -> None:
        beginning = stage.name("list")
        wanted = sorted(f"{beginning}-{letter}" for letter in "abc")
        for name in wanted:
            stage.account.create(name)
        assert sorted(stage.account.names(Text(f"{beginning}-"))) == wanted
        assert set(wanted) <= set(stage.account.names())
        assert stage.account.names(f"{beginning}-x") == []

    def test_a_queue_that_is_not_there(self, stage: Stage) -> None:
        name = stage.name("missing")
        for call in (lambda: stage.account.queue(name).stats(), lambda: stage.account.delete(name)):
            with pytest.raises(QueueMissing) as refused:
                call()
            assert refused.value.queue == name

    def test_a_queue_that_was_deleted(self, stage: Stage) -> None:
        queue = stage.create()
        held = stage.held(queue)
        stage.account.delete(queue.name)
        assert queue.name not in stage.account.names()
        for call in (
            lambda: queue.send("x"),
            queue.receive,
            lambda: queue.extend(held.handle, LONG),
            lambda: queue.delete(held.handle),
            queue.stats,
        ):
            with pytest.raises(QueueMissing):
                call()

    def test_a_queue_that_was_made_again_is_another(self, stage: Stage) -> None:
        queue = stage.create()
        held, first = stage.held(queue), queue.stats().incarnation
        stage.account.delete(queue.name)
        stage.pass_time(SECOND)  # some services report creation times in whole seconds
        try:
            assert stage.account.create(queue.name)
        except QueueDeletedRecently:
            return
        again = stage.account.queue(queue.name)
        assert again.receive() == []
        assert first is None or again.stats().incarnation != first
        with pytest.raises(VeilError):
            again.extend(held.handle, LONG)

    def test_a_queue_knows_its_account_and_name(self, stage: Stage) -> None:
        queue = stage.create()
        name = queue.account.queue(Text(queue.name)).name
        assert (name, str(name)) == (queue.name, queue.name)


def fifo(stage: Stage, **settings: Any) -> Queue:
    """A new FIFO queue."""
    name = f"{stage.name('q')}.fifo"
    stage.account.create(name, Template(fifo=True, **{"visibility_timeout": LONG, **settings}))
    queue = stage.account.queue(name)
    assert queue.capabilities.native_fifo
    return queue


def put(queue: Queue, *bodies: str) -> list[Any]:
    """Send messages; the first character of each body is its group, the whole body its deduplication id."""
    return [queue.send(Message(body, group=body[0], deduplication_id=body)) for body in bodies]


class TestFifo:
    """FIFO queues."""

    def test_a_group_comes_in_its_order_one_by_one(self, stage: Stage) -> None:
        queue = fifo(stage)
        sent = put(queue, "a1", "a2", "a3")
        numbers = [result.sequence_number for result in sent]
        assert numbers == sorted(set(numbers))
        for body, number in zip(("a1", "a2", "a3"), numbers, strict=True):
            message = stage.take(queue)
            assert (message.body, message.group, message.sequence_number) == (body, "a", number)
            assert queue.receive() == []
            queue.delete(message.handle)

    def test_groups_do_not_wait_for_each_other(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(queue, "a1", "a2", "b1", "b2")
        first, second = stage.take(queue), stage.take(queue)
        assert {first.body, second.body} == {"a1", "b1"}
        assert queue.receive() == []
        queue.delete(first.handle)
        assert stage.take(queue).body == f"{first.body[0]}2"

    def test_a_released_message_is_still_the_first_of_its_group(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(queue, "a1", "a2")
        queue.release(stage.take(queue).handle)
        again = stage.take(queue)
        assert (again.body, again.receive_count) == ("a1", 2)

    def test_an_expired_lease_frees_the_group_and_its_handle_deletes_nothing(self, stage: Stage) -> None:
        queue = fifo(stage)
        put(queue, "a1", "a2")
        late = stage.take(queue, lease=SECOND)
        stage.pass_time(2 * SECOND)
        results = queue.delete_batch([late.handle])
        assert results != [None]
        assert stage.take(queue).body == "a1"

    def test_the_same_deduplication_id_is_the_same_message(self, stage: Stage) -> None:
        queue = fifo(stage)
        (first,) = put(queue, "a1")
        (again,) = put(queue, "a1")
        assert again.id == first.id
        assert len(stage.empty(queue)) == 1

    def test_the_same_content_is_the_same_message_where_the_queue_says_so(self, stage: Stage) -> None:
        queue = fifo(stage, content_deduplication=True)
        first, again = (queue.send(Message("x", group="g")) for _ in range(2))
        other = queue.send(Message("x", group="g", deduplication_id="another"))
        assert first.id == again.id != other.id
        for expected in (first, other):
            message = stage.take(queue)
            assert message.id == expected.id
            queue.delete(message.handle)
        assert queue.receive() == []

    refused: ClassVar[Sequence[Message]] = (
        Message("x", deduplication_id="d"),
        Message("x", group="g"),
        Message("x", group="g", deduplication_id="d", delay=1),
    )

    def test_what_a_message_must_have(self, stage: Stage) -> None:
        queue = fifo(stage)
        assert unrefused(queue.send, self.refused) == []
        for message in self.refused:
            for batch in ([message], [message, message]):
                results = queue.send_batch(batch)
                assert [type(result) for result in results] == [ParameterInvalid] * len(batch), message
        assert queue.receive() == []

    def test_of_a_batch_each_message_is_judged_for_itself(self, stage: Stage) -> None:
        queue = fifo(stage)
        right = Message("right", group="g", deduplication_id="d")
        for wrong in (Message("x", group="g"), Message("x", deduplication_id="e")):
            results = queue.send_batch([wrong, right, wrong])
            assert [type(result) for result in results] == [ParameterInvalid, Sent, ParameterInvalid]
        (message,) = queue.receive(10)
        assert message.body == "right"

    def test_the_name_of_a_fifo_queue(self, stage: Stage) -> None:
        fifo(stage)
        with pytest.raises(ParameterInvalid) as refused:
            stage.account.create(stage.name("q"), Template(fifo=True))
        assert refused.value.parameter == "name"


class TestNoFifo:
    """An account without FIFO queues."""

    @for_each("template", [Template(fifo=True), Template(content_deduplication=True)])
    @for_each("ending", ["", ".fifo"])
    def test_it_says_so_and_makes_nothing(self, stage: Stage, template: Template, ending: str) -> None:
        name = stage.name("q") + ending
        with pytest.raises(CapabilityMissing) as refused:
            stage.account.create(name, template)
        assert refused.value.capability == "native_fifo"
        assert name not in stage.account.names()
