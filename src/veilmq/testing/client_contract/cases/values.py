"""What an adapter does by itself: it refuses wrong values in every call, before anything is sent.

`TestValues` tries every wrong value, and the queue does not change. `TestSmoke` is the minimum for another form of an
adapter that has passed the whole suite: one message through every call, refusals before any I/O, and a deleted queue.
"""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from math import inf, nan
from typing import Any, Final

from veilmq.client.messages import Extension, Message, Sent
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueMissing, ReceiptInvalid
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage, sent, unrefused

MANY: Final = 300
"""Messages in a batch that takes more than one request on every adapter."""

NO_DURATION: Final = [None, "3", b"3", True, nan, timedelta(seconds=3), Decimal(3)]
NO_COUNT: Final = [None, "3", 1.5, True, nan]


NO_FIELDS: Final[list[dict[str, Any]]] = [
    {"body": None}, {"body": b"x"}, {"attributes": None}, {"attributes": [("a", "b")]}, {"attributes": {3: "x"}},
    {"type": 3}, {"group": 3}, {"deduplication_id": 3}, {"tag": 3}, {"priority": "1"}, {"priority": 1.5},
    {"priority": True}, {"delay": "3"}, {"delay": timedelta(seconds=3)}, {"delay": True}, {"ttl": "3"},
    {"lease_hint": "3"},
]  # fmt: skip
NO_RECEIVE: Final[list[dict[str, Any]]] = [
    *({"count_max": value} for value in NO_COUNT),
    *({"lease": value} for value in (*NO_DURATION[1:], inf)),
    *({"wait": value} for value in (*NO_DURATION, inf)),
]
NO_SQS_ATTRIBUTES: Final[list[dict[str, Any]]] = [
    {"a": Decimal("1E+127")}, {"a": 1e-129}, {"a": 10**38 + 1}, {"AWS.x": "x"}, {"amazon.x": "x"},
]  # fmt: skip
BODY: Final = "žluť 漢 <&>\r\n"
REFUSED: Final[dict[str, Callable[[Queue], Any]]] = {
    "no message": lambda queue: queue.send(3),  # type: ignore[arg-type]
    "a field of another type": lambda queue: queue.send(Message("x", delay="3")),  # type: ignore[arg-type]
    "a body that XML cannot carry": lambda queue: queue.send("\0"),
    "no list": lambda queue: queue.send_batch("abc"),
    "no count": lambda queue: queue.receive(0),
    "no lease": lambda queue: queue.receive(lease=-1),
    "no wait": lambda queue: queue.receive(wait=float("nan")),
    "a handle that is no text": lambda queue: queue.delete(3),  # type: ignore[arg-type]
    "a lease that is no number": lambda queue: queue.extend("0" * 66, "3"),  # type: ignore[arg-type]
}
NEED_THE_QUEUE: Final[dict[str, Callable[[Queue, str], Any]]] = {
    "send": lambda queue, _: queue.send("x"),
    "send_batch": lambda queue, _: queue.send_batch(["x"]),
    "receive": lambda queue, _: queue.receive(),
    "extend": lambda queue, handle: queue.extend(handle, LONG),
    "delete": lambda queue, handle: queue.delete(handle),
    "stats": lambda queue, _: queue.stats(),
}


def _only(fields: dict[str, Any]) -> str:
    (field,) = fields
    return field


class TestValues:
    """Wrong types, and numbers out of range."""

    def test_what_is_no_message_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        wrong: list[Any] = [b"bytes", 3, None, {"a": 1}, ["a"]]
        assert unrefused(queue.send, wrong) == []
        assert [type(result) for result in queue.send_batch(["a", *wrong])] == [Sent, *[ParameterInvalid] * len(wrong)]
        assert [message.body for message in stage.empty(queue)] == ["a"]

    def test_what_is_no_list_is_no_batch(self, stage: Stage) -> None:
        queue = stage.create()
        assert unrefused(queue.send_batch, ["abc", b"abc", None, 3]) == []
        self._is_empty(queue)

    def test_a_field_of_another_type_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        assert (
            unrefused(lambda fields: queue.send(Message(**{"body": "x", **fields})), NO_FIELDS, parameter=_only) == []
        )
        assert queue.receive() == []

    def test_a_duration_without_an_end_is_refused(self, stage: Stage) -> None:
        """A time to live, however, may be infinite, where messages have one."""
        queue = stage.create()
        endless: list[dict[str, Any]] = [
            {field: seconds}
            for field in ("delay", "ttl", "lease_hint")
            for seconds in (nan, inf, -inf, 10**400)
            if (field, seconds) != ("ttl", inf)
        ]
        errors = (ParameterInvalid, CapabilityMissing)
        assert unrefused(lambda fields: queue.send(Message("x", **fields)), endless, errors) == []
        assert queue.receive() == []
        try:
            queue.send(Message("x", ttl=inf))
        except errors:
            assert queue.receive() == []
        else:
            assert stage.take(queue).expires is None

    def test_an_empty_body_is_refused(self, stage: Stage) -> None:
        """Except by a pattern whose messages are never empty."""
        queue = stage.create()
        if isinstance(queue, Wrapping):
            return
        assert unrefused(queue.send, [""]) == []
        held = stage.held(queue)
        if queue.capabilities.body_replaceable:
            assert unrefused(lambda body: queue.extend(held.handle, LONG, body=body), ["", 3]) == []
        queue.delete(held.handle)

    def test_a_group_that_cannot_be_is_refused(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.groups:
            return
        assert unrefused(lambda group: queue.send(Message("x", group=group)), ["", "a b", "x" * 129, "é"]) == []
        queue.send(Message("x", group="x" * 128))
        assert len(stage.empty(queue)) == 1

    def test_attributes_that_sqs_does_not_have_are_refused(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.attributes:
            return
        assert unrefused(lambda attributes: queue.send(Message("x", attributes)), NO_SQS_ATTRIBUTES) == []
        widest = {"a": Decimal("1E+126"), "b": 1e-128, "c": 10**126, "d": 0}
        queue.send(Message("x", widest))
        assert {name: Decimal(str(value)) for name, value in stage.take(queue).attributes.items()} == {
            name: Decimal(str(value)) for name, value in widest.items()
        }

    def test_a_receive_takes_numbers_alone(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send("x")
        assert unrefused(lambda fields: queue.receive(**fields), NO_RECEIVE, parameter=_only) == []
        assert stage.take(queue).receive_count == 1

    def test_a_lease_of_nothing_is_over_at_once(self, stage: Stage) -> None:
        """If the service has no such lease, it is refused."""
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

    def test_a_lease_is_changed_by_numbers_alone(self, stage: Stage) -> None:
        queue = stage.create()
        handle = stage.held(queue).handle
        wrong: list[Any] = [*NO_DURATION, inf]
        assert unrefused(lambda lease: queue.extend(handle, lease), wrong, parameter=lambda _: "lease") == []
        assert unrefused(lambda delay: queue.release(handle, delay), wrong, parameter=lambda _: "delay") == []
        assert queue.receive() == []
        queue.delete(handle)

    def test_what_is_no_text_is_no_handle(self, stage: Stage) -> None:
        queue = stage.create()
        for call in (lambda handle: queue.extend(handle, LONG), queue.release, queue.delete):
            assert unrefused(call, [None, 3, b"x"], ReceiptInvalid) == []

    def test_a_peek_takes_a_number_alone(self, stage: Stage) -> None:
        queue = stage.create()
        if queue.capabilities.peek:
            assert unrefused(queue.peek, [*NO_COUNT, 0, -1]) == []

    def test_one_wrong_entry_costs_a_long_batch_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        entries: list[Any] = [*(f"m{number}" for number in range(MANY)), 3]
        results = queue.send_batch(entries)
        assert [type(result) for result in results] == [*[Sent] * MANY, ParameterInvalid]
        handles: list[Any] = [message.handle for message in stage.empty(queue)]
        assert len(handles) == MANY
        handles.insert(1, None)
        deleted = queue.delete_batch(handles)
        assert [place for place, result in enumerate(deleted) if result is not None] == [1]
        assert isinstance(deleted[1], ReceiptInvalid)
        self._is_empty(queue)

    def test_extensions_that_are_none_leave_the_others_alone(self, stage: Stage) -> None:
        queue = stage.create()
        handle = stage.held(queue).handle
        wrong: list[Any] = [3, None, Extension(None, LONG), Extension(handle, "3"), Extension(handle, nan)]  # type: ignore[arg-type]
        results = queue.extend_batch([*wrong, Extension(handle, LONG)])
        kinds = [ParameterInvalid, ParameterInvalid, ReceiptInvalid, ParameterInvalid, ParameterInvalid]
        assert [type(result) for result in results[:-1]] == kinds
        assert isinstance(results[-1], str)
        queue.delete(results[-1])
        self._is_empty(queue)

    @staticmethod
    def _is_empty(queue: Queue) -> None:
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)


class TestSmoke:
    """In place of the classes that another form of the adapter has passed."""

    def test_a_message_goes_through_every_call(self, stage: Stage) -> None:
        queue = stage.create()
        sending = [queue.send(BODY), *map(sent, queue.send_batch([BODY, Message(BODY)]))]
        if queue.capabilities.peek:
            assert [message.body for message in queue.peek(3)] == [BODY] * 3
        held = stage.empty(queue)
        assert {(message.id, message.body) for message in held} == {(result.id, BODY) for result in sending}
        replaceable = queue.capabilities.body_replaceable
        handle = queue.extend(held[0].handle, LONG, body=BODY * 2 if replaceable else None)
        (again,) = queue.extend_batch([Extension(handle, LONG)])
        assert isinstance(again, str)
        queue.release(again)
        stage.back(queue)
        message = stage.take(queue)
        assert (message.id, message.body) == (held[0].id, BODY * (1 + replaceable))
        queue.delete(message.handle)
        assert queue.delete_batch([message.handle for message in held[1:]]) == [None, None]
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)

    def test_what_cannot_be_is_refused_before_any_io(self, stage: Stage) -> None:
        """Tested on a deleted queue."""
        queue = stage.create()
        stage.account.delete(queue.name)
        assert unrefused(lambda what: REFUSED[what](queue), REFUSED, (ParameterInvalid, ReceiptInvalid)) == []

    def test_each_call_tells_that_the_queue_is_gone(self, stage: Stage) -> None:
        queue = stage.create()
        handle = stage.held(queue).handle
        stage.account.delete(queue.name)
        assert unrefused(lambda call: NEED_THE_QUEUE[call](queue, handle), NEED_THE_QUEUE, QueueMissing) == []
