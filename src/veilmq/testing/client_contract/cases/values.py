"""What an adapter does by itself, before any I/O: it refuses wrong values in every call, and what its queue cannot do.

`TestCapabilities`: a queue refuses what its capabilities exclude. `TestSendable`: they predict what it refuses to send.
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
from veilmq.client.shared import attempt
from veilmq.client.shared.checks import check_sendable
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueMissing, ReceiptInvalid
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage, message_with, sent, unrefused

NEEDS: dict[str, Callable[[Queue], Any]] = {
    "peek": lambda queue: queue.peek(),
    "ttl": lambda queue: queue.send(message_with(queue, ttl=60)),
    "priorities": lambda queue: queue.send(message_with(queue, priority=1)),
    "groups": lambda queue: queue.send(Message("x", group="g")),
    "attributes": lambda queue: queue.send(message_with(queue, attributes={"a": "b"})),
    "native_fifo": lambda queue: queue.send(Message("x", group="g", deduplication_id="d")),
    "lease_hints": lambda queue: queue.send(message_with(queue, lease_hint=60)),
    "body_replaceable": lambda queue: queue.extend("0" * 66, LONG, body="x"),
}
"""By field of `Capabilities`: a call that needs it."""
CASES: Final[list[dict[str, Any]]] = [
    {}, {"body": ""}, {"body": "\x00"}, {"body": "x" * 200_000}, {"body": "x" * (2 << 20)},
    {"attributes": {"a.b": "x"}}, {"attributes": {"AWS.a": "x"}}, {"attributes": {"a..b": "x"}},
    {"attributes": {"a b": "x"}}, {"attributes": {"a" * 257: "x"}}, {"attributes": {"a": ""}},
    {"attributes": {"a": "\ufffe"}}, {"attributes": {"a": True}}, {"attributes": {f"a{n}": n for n in range(10)}},
    {"attributes": {f"a{n}": n for n in range(10)}, "type": "kind"}, {"attributes": {f"a{n}": n for n in range(11)}},
    {"group": "tenant"}, {"group": "a b"}, {"group": "x" * 129},
    {"deduplication_id": "x"}, {"delay": -1}, {"delay": 10**9}, {"ttl": 60}, {"ttl": 0}, {"ttl": -1},
    {"priority": 1}, {"priority": 0}, {"priority": 17}, {"type": "kind"}, {"lease_hint": 30}, {"lease_hint": 0},
    {"lease_hint": 10**9}, {"tag": "red"},
]  # fmt: skip


class TestCapabilities:
    """Capabilities."""

    def test_nothing_was_learnt_for_a_new_queue(self, stage: Stage) -> None:
        assert stage.create().recommended() is None

    def test_what_it_cannot_do_is_refused_before_any_io(self, stage: Stage) -> None:
        queue = stage.create()
        stage.account.delete(queue.name)
        missing = [capability for capability in NEEDS if not getattr(queue.capabilities, capability)]
        assert unrefused(lambda capability: NEEDS[capability](queue), missing, CapabilityMissing) == []

    def test_in_a_batch_it_is_the_entrys_error(self, stage: Stage) -> None:
        queue = stage.create()
        fields: dict[str, Any] = {"ttl": 60, "priorities": 1, "attributes": {"a": "b"}}
        missing = [name for name in fields if not getattr(queue.capabilities, name)]
        words = {"priorities": "priority"}
        entries = [message_with(queue, **{words.get(name, name): fields[name]}) for name in missing]
        results = queue.send_batch(["a", *entries, "b"])
        assert [type(result).__name__ for result in results] == ["Sent", *["CapabilityMissing"] * len(missing), "Sent"]
        assert len(stage.empty(queue)) == 2

    def test_the_account_knows_them_before_there_is_a_queue(self, stage: Stage) -> None:
        queue = stage.create()
        found = stage.account.capabilities(f"{queue.name}-missing")
        for field in ("protocol", "delay_max", "lease_max", "ttl", "native_fifo", "handle_on_send"):
            assert getattr(found, field) == getattr(queue.capabilities, field)

    def test_they_make_sense(self, stage: Stage) -> None:
        able = stage.create().capabilities
        assert able.receive_messages_max >= 1
        assert able.batch_messages_max >= 1
        assert 0 < able.lease_min <= able.lease_max <= (able.lease_total_max or able.lease_max)
        assert able.wait_max >= 0
        assert able.delay_max >= 0
        assert able.body_bytes_max >= 64 * 1024 - 1024

    def test_a_peek_takes_no_lease(self, stage: Stage) -> None:
        queue = stage.create()
        if not queue.capabilities.peek:
            return
        assert queue.peek() == []
        sent = queue.send("x\r\ny")
        for _ in range(2):
            (peeked,) = queue.peek()
            assert (peeked.id, peeked.body, peeked.receive_count) == (sent.id, "x\r\ny", 0)
        message = stage.take(queue)
        assert message.receive_count == 1
        assert queue.peek() == []


class TestSendable:
    """For patterns that act before the send in a way that a refusal cannot undo (client/shared/checks.py)."""

    def test_what_a_send_refuses_is_refused_before(self, stage: Stage) -> None:
        queue = stage.create()
        differ = []
        for fields in CASES:
            message = Message(**{"body": "x", **fields})
            judged = attempt(lambda each: check_sendable(each, queue.capabilities), message)
            sent = attempt(queue.send, message)
            if type(judged) is not (type(None) if isinstance(sent, Sent) else type(sent)):
                differ.append(f"{fields!r:.80}: judged {judged!r:.80}, sent {sent!r:.80}")
        assert differ == []


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
        # A batch is any collection or iterator, but no text.
        calls: list[Any] = [(queue.extend_batch, "extensions"), (queue.delete_batch, "handles")]
        for call, name in [*calls, (queue.send_batch, "messages")]:
            assert unrefused(call, ["ab", None, 3], parameter=lambda _, name=name: name) == []  # type: ignore[misc]
        iterated: Any = iter([Extension(stage.held(queue).handle, LONG)])
        (extended,) = queue.extend_batch(iterated)
        iterated = iter([extended])
        assert queue.delete_batch(iterated) == [None]
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
