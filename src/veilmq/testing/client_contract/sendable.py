"""A queue's capabilities predict what it refuses to send."""

from typing import Any, Final

from veilmq.client.batches import attempt
from veilmq.client.checks import check_sendable
from veilmq.client.messages import Message, Sent
from veilmq.testing.client_contract.stage import Stage

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


class TestSendable:
    """For patterns that act before the send in a way that a refusal cannot undo (client/checks.py)."""

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
