"""Values that no call takes: each is a typed error before anything is sent, and the queue is as it was."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from math import inf, nan
from typing import Any, Final

import pytest

from veilmq.client.messages import Extension, Message, Sent
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, ReceiptInvalid, VeilError
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage

MANY: Final = 300
"""Messages of a batch that takes more than one request everywhere."""

NO_DURATION: Final = [None, "3", b"3", True, nan, timedelta(seconds=3), Decimal(3)]
NO_COUNT: Final = [None, "3", 1.5, True, nan]


def fails(error: type[VeilError] | tuple[type[VeilError], ...], call: Callable[[], Any]) -> VeilError:
    """What the call raises."""
    with pytest.raises(error) as refused:
        call()
    return refused.value


class TestValues:
    """Wrong types, and numbers out of every range."""

    @pytest.mark.parametrize("message", [b"bytes", 3, None, {"a": 1}, ["a"]], ids=repr)
    def test_what_is_no_message_is_refused(self, stage: Stage, message: Any) -> None:
        queue = stage.create()
        fails(ParameterInvalid, lambda: queue.send(message))
        assert [type(each) for each in queue.send_batch(["a", message])] == [Sent, ParameterInvalid]
        assert [each.body for each in stage.empty(queue)] == ["a"]

    @pytest.mark.parametrize("messages", ["abc", b"abc", None, 3], ids=repr)
    def test_what_is_no_list_is_no_batch(self, stage: Stage, messages: Any) -> None:
        queue = stage.create()
        fails(ParameterInvalid, lambda: queue.send_batch(messages))
        self._is_empty(queue)

    @pytest.mark.parametrize(
        "fields",
        [{"body": None}, {"body": b"x"}, {"attributes": None}, {"attributes": [("a", "b")]}, {"attributes": {3: "x"}},
         {"type": 3}, {"group": 3}, {"deduplication_id": 3}, {"tag": 3}, {"priority": "1"}, {"priority": 1.5},
         {"priority": True}, {"delay": "3"}, {"delay": timedelta(seconds=3)}, {"delay": True}, {"ttl": "3"},
         {"lease_hint": "3"}],
        ids=repr,
    )  # fmt: skip
    def test_a_field_of_another_type_is_refused(self, stage: Stage, fields: dict[str, Any]) -> None:
        queue = stage.create()
        refused = fails(ParameterInvalid, lambda: queue.send(Message(**{"body": "x", **fields})))
        assert isinstance(refused, ParameterInvalid)
        (field,) = fields
        assert refused.parameter.partition("[")[0] == field
        assert queue.receive() == []

    @pytest.mark.parametrize("field", ["delay", "ttl", "lease_hint"])
    @pytest.mark.parametrize("seconds", [nan, inf, -inf, 10**400], ids=["nan", "inf", "minus-inf", "endless"])
    def test_a_duration_without_an_end_is_refused(self, stage: Stage, field: str, seconds: float) -> None:
        queue = stage.create()
        message = Message("x", **{field: seconds})  # type: ignore[arg-type]
        if (field, seconds) == ("ttl", inf):
            try:
                queue.send(message)
            except (ParameterInvalid, CapabilityMissing):
                assert queue.receive() == []
            else:
                assert stage.take(queue).expires is None
            return
        fails((ParameterInvalid, CapabilityMissing), lambda: queue.send(message))
        assert queue.receive() == []

    def test_an_empty_body_is_refused(self, stage: Stage) -> None:
        """But by a pattern whose messages are never empty."""
        queue = stage.create()
        if isinstance(queue, Wrapping):
            return
        fails(ParameterInvalid, lambda: queue.send(""))
        held = stage.held(queue)
        if queue.capabilities.body_replaceable:
            fails(ParameterInvalid, lambda: queue.extend(held.handle, LONG, body=""))
            fails(ParameterInvalid, lambda: queue.extend(held.handle, LONG, body=3))  # type: ignore[arg-type]
        queue.delete(held.handle)

    @pytest.mark.parametrize("group", ["", "a b", "x" * 129, "é"], ids=["empty", "space", "long", "accent"])
    def test_a_group_that_cannot_be_is_refused(self, stage: Stage, group: str) -> None:
        queue = stage.create()
        if not queue.capabilities.groups:
            return
        fails(ParameterInvalid, lambda: queue.send(Message("x", group=group)))
        queue.send(Message("x", group="x" * 128))
        assert len(stage.empty(queue)) == 1

    @pytest.mark.parametrize(
        "attributes",
        [{"a": Decimal("1E+127")}, {"a": 1e-129}, {"a": 10**38 + 1}, {"AWS.x": "x"}, {"amazon.x": "x"}],
        ids=["large", "small", "digits", "aws", "amazon"],
    )
    def test_attributes_that_sqs_does_not_have_are_refused(self, stage: Stage, attributes: dict[str, Any]) -> None:
        queue = stage.create()
        if not queue.capabilities.attributes:
            return
        fails(ParameterInvalid, lambda: queue.send(Message("x", attributes)))
        widest = {"a": Decimal("1E+126"), "b": 1e-128, "c": 10**126, "d": 0}
        queue.send(Message("x", widest))
        assert {name: Decimal(str(value)) for name, value in stage.take(queue).attributes.items()} == {
            name: Decimal(str(value)) for name, value in widest.items()
        }

    @pytest.mark.parametrize(
        ("field", "value"),
        [("count_max", value) for value in NO_COUNT]
        + [("lease", value) for value in (*NO_DURATION[1:], inf)]
        + [("wait", value) for value in (*NO_DURATION, inf)],
        ids=repr,
    )
    def test_a_receive_takes_numbers_alone(self, stage: Stage, field: str, value: Any) -> None:
        queue = stage.create()
        queue.send("x")
        refused = fails(ParameterInvalid, lambda: queue.receive(**{field: value}))
        assert isinstance(refused, ParameterInvalid)
        assert refused.parameter == field
        assert stage.take(queue).receive_count == 1

    def test_a_lease_of_nothing_is_over_at_once(self, stage: Stage) -> None:
        """Where the service has none it is refused."""
        queue = stage.create()
        queue.send("x")
        try:
            (message,) = queue.receive(lease=0)
        except ParameterInvalid as refused:
            assert refused.parameter == "lease"
            assert queue.capabilities.lease_min >= SECOND
            assert stage.take(queue).receive_count == 1
        else:
            assert message.lease_end <= stage.clock.monotonic()
            assert stage.take(queue).receive_count == 2

    @pytest.mark.parametrize("seconds", [*NO_DURATION, inf], ids=repr)
    def test_a_lease_is_changed_by_numbers_alone(self, stage: Stage, seconds: Any) -> None:
        queue = stage.create()
        handle = stage.held(queue).handle
        for parameter, call in (
            ("lease", lambda: queue.extend(handle, seconds)),
            ("delay", lambda: queue.release(handle, seconds)),
        ):
            refused = fails(ParameterInvalid, call)
            assert isinstance(refused, ParameterInvalid)
            assert refused.parameter == parameter
        assert queue.receive() == []
        queue.delete(handle)

    @pytest.mark.parametrize("handle", [None, 3, b"x"], ids=repr)
    def test_what_is_no_text_is_no_handle(self, stage: Stage, handle: Any) -> None:
        queue = stage.create()
        for call in (lambda: queue.extend(handle, LONG), lambda: queue.release(handle), lambda: queue.delete(handle)):
            fails(ReceiptInvalid, call)

    @pytest.mark.parametrize("count", [*NO_COUNT, 0, -1], ids=repr)
    def test_a_peek_takes_a_number_alone(self, stage: Stage, count: Any) -> None:
        queue = stage.create()
        if queue.capabilities.peek:
            fails(ParameterInvalid, lambda: queue.peek(count))

    def test_one_wrong_entry_costs_a_long_batch_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        entries: list[Any] = [*(f"m{number}" for number in range(MANY)), 3]
        results = queue.send_batch(entries)
        assert [type(each) for each in results] == [*[Sent] * MANY, ParameterInvalid]
        handles: list[Any] = [message.handle for message in stage.empty(queue)]
        assert len(handles) == MANY
        handles.insert(1, None)
        deleted = queue.delete_batch(handles)
        assert [place for place, each in enumerate(deleted) if each is not None] == [1]
        assert isinstance(deleted[1], ReceiptInvalid)
        self._is_empty(queue)

    def test_extensions_that_are_none_leave_the_others_alone(self, stage: Stage) -> None:
        queue = stage.create()
        handle = stage.held(queue).handle
        wrong: list[Any] = [3, None, Extension(None, LONG), Extension(handle, "3"), Extension(handle, nan)]  # type: ignore[arg-type]
        results = queue.extend_batch([*wrong, Extension(handle, LONG)])
        kinds = [ParameterInvalid, ParameterInvalid, ReceiptInvalid, ParameterInvalid, ParameterInvalid]
        assert [type(each) for each in results[:-1]] == kinds
        assert isinstance(results[-1], str)
        queue.delete(results[-1])
        self._is_empty(queue)

    @staticmethod
    def _is_empty(queue: Queue) -> None:
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)
