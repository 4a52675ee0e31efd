"""A queue refuses what its capabilities exclude, before any I/O; and they predict what it refuses to send."""

from collections.abc import Callable
from typing import Any, Final

from veilmq.client.messages import Message, Sent
from veilmq.client.queue import Queue
from veilmq.client.shared.batches import attempt
from veilmq.client.shared.checks import check_sendable
from veilmq.model.errors import CapabilityMissing
from veilmq.testing.client_contract.stage import LONG, Stage, message_with, unrefused

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
    {"attributes": {f"a{n}": n for n in range(11)}}, {"group": "tenant"}, {"group": "a b"}, {"group": "x" * 129},
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
