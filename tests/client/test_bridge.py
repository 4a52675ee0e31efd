"""A bridge between real queues: what goes over, what stays, and what happens when a queue does not answer."""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from veilmq.client.adapters.connect import connect, open_address, parse_url
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.bridge import BATCH, Bridge, Options, Pace
from veilmq.client.bridge.carrying import carried, differences
from veilmq.client.clock import SYSTEM, Stop
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Message, Received, Sent, Template
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, LeaseError, LeaseTaken, ParameterInvalid, VeilError
from veilmq.testing.client_contract.stage import MovableClock
from veilmq.testing.for_each import for_each
from veilmq.testing.local import LocalServer

NAMES = ("from", "goal")
WHOLE = Message("one", {"n": 7, "raw": b"\0\1"}, ttl=3_600, priority=2, group="g", type="invoice")


@pytest.fixture
def account(tmp_path: Path) -> Any:
    with EmbeddedAccount(tmp_path / "data") as account:
        for name in ("from", "to", "from.fifo", "to.fifo"):
            account.create(name)
        yield account


def bridged(source: Queue, target: Queue, **options: Any) -> Any:
    return Bridge(source, target, Options(**{"lease": 30, "until_empty": True} | options)).run()


def bodies(queue: Queue) -> list[str]:
    found: list[Received] = []
    while messages := queue.receive(BATCH, lease=60):
        found += messages
    return sorted(message.body for message in found)


class Faulty(Wrapping):
    """A queue whose answers get lost or are refused, as often as told; what was asked is done if `done`."""

    def __init__(self, inner: Queue, faults: list[VeilError], *, done: bool = False) -> None:
        super().__init__(inner)
        self.faults, self.done = faults, done

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        if not self.faults:
            return self.inner.send_batch(messages)
        if self.done:
            self.inner.send_batch(messages)
        return [self.faults.pop()] * len(messages) if self.done else self._raise()

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        if not self.faults:
            return self.inner.delete_batch(handles)
        for handle in handles:
            with suppress(LeaseError):  # asked again, it has gone back already
                self.inner.release(handle)
        return [self.faults.pop()] * len(handles)

    def _raise(self) -> list[Sent | VeilError]:
        raise self.faults.pop()


LOST = TransportError(reason="the answer was lost", may_have_happened=True)
AWAY = TransportError(reason="nobody answers", may_have_happened=False)
DENIED = ServiceError(code="AccessDenied", status=403, request_id="r", message="sqs:DeleteMessage")
BROKEN = ServiceError(code="InternalError", status=500, request_id="r", message="again")


def bridged_fast(source: Queue, target: Queue, **options: Any) -> Any:
    """As `bridged`, on a clock that runs five times as fast."""
    clock = MovableClock()
    run = Bridge(source, target, Options(**{"lease": 300, "until_empty": True} | options), clock)
    return run.run(lambda counts: clock.advance(0.4))


def test_moves_a_message_with_all_that_both_queues_can_carry(account: EmbeddedAccount) -> None:
    with account.queue("from") as source, account.queue("to") as target:
        source.send(WHOLE)
        before = source.peek()[0]
        counts = bridged(source, target)
        (found,) = target.receive()
        assert (counts.sent, counts.deleted, counts.refused) == (1, 1, 0)
        for field in ("body", "attributes", "group", "priority", "type"):
            assert getattr(found, field) == getattr(before, field)
        assert found.expires == pytest.approx(before.expires, abs=2)
        assert source.stats().in_flight == source.stats().visible == 0


@for_each(("target", "days"), [("azure", math.inf), ("veil", 14)])
def test_a_message_of_azure_that_never_expires_lives_as_long_as_it_can(
    veilmq_server: LocalServer, target: str, days: float
) -> None:
    azure = veilmq_server.azure_url.replace("http", "azure", 1) + "/devstoreaccount1/{}?tls=0"
    urls = {"azure": azure.format("goal"), "veil": veilmq_server.queue_url("goal")}
    with connect(f"{azure.format('from')}&create=1") as source, veilmq_server.connect("goal"):
        source.send(Message("kept", ttl=math.inf))
        with connect(urls[target]) as goal:
            assert bridged(source, goal).sent == 1
            (found,) = goal.receive()
    assert ((found.expires or math.inf) - found.sent) / 86_400 == pytest.approx(days, abs=0.01)


@pytest.mark.parametrize("ways", [("sqs", "azure"), ("azure", "mns"), ("mns", "veil"), ("veil", "sqs")])
def test_crosses_protocols(veilmq_server: LocalServer, ways: tuple[str, str]) -> None:
    veilmq_server.connect("from").send_batch([f"m{number}" for number in range(25)])
    veilmq_server.connect("goal")
    urls = {
        "sqs": veilmq_server.sqs_url.replace("http://", "sqs://any:any@", 1) + "/{}?tls=0",
        "azure": veilmq_server.azure_url.replace("http", "azure", 1) + "/devstoreaccount1/{}?tls=0",
        "mns": veilmq_server.mns_url.replace("http://", "mns://any:any@", 1) + "/{}?base64=0",
        "veil": veilmq_server.queue_url("{}").replace("%7B%7D", "{}"),
    }
    source, target = (urls[way].replace("//{", "/{").format(name) for way, name in zip(ways, NAMES, strict=True))
    with connect(source) as start, connect(target) as end:
        counts = bridged(start, end, limit=25)
    assert (counts.sent, counts.deleted) == (25, 25)
    assert bodies(veilmq_server.connect("goal")) == sorted(f"m{number}" for number in range(25))
    assert veilmq_server.connect("from").stats().visible == 0


class TestFifo:
    def test_keeps_the_order_of_each_group(self, account: EmbeddedAccount) -> None:
        with account.queue("from.fifo") as source, account.queue("to.fifo") as target:
            sent = [Message(str(number), group=f"g{number % 3}", deduplication_id=str(number)) for number in range(60)]
            source.send_batch(sent)
            assert bridged(source, target, limit=60).sent == 60
            came: dict[str | None, list[int]] = {}
            while messages := target.receive(BATCH):
                for message in messages:
                    came.setdefault(message.group, []).append(int(message.body))
                target.delete_batch([message.handle for message in messages])
        assert came == {f"g{group}": list(range(group, 60, 3)) for group in range(3)}

    def test_keeps_the_order_when_one_message_must_be_sent_again(self, account: EmbeddedAccount) -> None:
        class Stumbling(Wrapping):
            """Does not take the first message of the first batch, but the others."""

            stumbled = False

            def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
                if self.stumbled:
                    return self.inner.send_batch(messages)
                self.stumbled = True
                return [AWAY, *self.inner.send_batch(messages[1:])]

        with account.queue("from.fifo") as source, account.queue("to.fifo") as target:
            source.send_batch(
                [Message(body, group=body[0], deduplication_id=body) for body in ("a1", "a2", "b1", "a3")]
            )
            assert bridged(source, Stumbling(target), limit=4, workers=1).sent == 4
            came = []
            while messages := target.receive(1):
                came.append(messages[0].body)
                target.delete(messages[0].handle)
        assert [body for body in came if body[0] == "a"] == ["a1", "a2", "a3"]
        assert came[0] == "b1"

    def test_absorbs_what_was_sent_again(self, account: EmbeddedAccount) -> None:
        with account.queue("from") as source, account.queue("to.fifo") as target:
            source.send_batch([str(number) for number in range(10)])
            counts = bridged(source, Faulty(target, [LOST], done=True), limit=10, workers=1)
            assert (counts.sent, counts.uncertain, counts.duplicates) == (10, 10, 10)
            assert target.stats().visible == 10

    def test_keeps_messages_apart_that_had_one_deduplication_id(self, account: EmbeddedAccount) -> None:
        """Legal at the source after five minutes; the second must not be dropped at the target as a duplicate."""
        can = account.capabilities("to.fifo")
        same = {"body": "x", "group": "g", "deduplication_id": "day", "handle": "", "lease_end": 0.0}
        first, second = (carried(Received(id=name, **same), can, None, 0) for name in "ab")
        assert first.deduplication_id != second.deduplication_id

    @pytest.mark.parametrize(("given", "group"), [(None, "an-id"), ("jobs", "jobs")])
    def test_gives_a_group_to_a_message_without_one(
        self, account: EmbeddedAccount, given: str | None, group: str
    ) -> None:
        message = Received(id="an-id", body="x", handle="", lease_end=0)
        assert carried(message, account.capabilities("to.fifo"), given, 0).group == group

    def test_is_not_copied(self, account: EmbeddedAccount) -> None:
        with account.queue("from.fifo") as source, account.queue("to") as target:
            with pytest.raises(CapabilityMissing, match="the rest of a group"):
                bridged(source, target, copies=True)


def test_a_copy_leaves_every_message_at_the_source(account: EmbeddedAccount) -> None:
    with account.queue("from") as source, account.queue("to") as target:
        source.send_batch([str(number) for number in range(35)])
        counts = bridged(source, target, copies=True)
        assert (counts.sent, counts.deleted) == (35, 0)
        assert source.stats().visible == target.stats().visible == 35


def test_what_the_target_refuses_stays_and_the_rest_goes(account: EmbeddedAccount, tmp_path: Path) -> None:
    with account.queue("from") as source, EmbeddedAccount(tmp_path / "other") as other:
        other.create("to", Template(message_bytes_max=2_000))
        source.send_batch(["x" * 5_000, *map(str, range(20))])
        with other.queue("to") as target:
            counts = bridged(source, target)
            assert (counts.sent, counts.refused, list(counts.reasons.values())) == (20, 1, [1])
            assert "MessageTooLarge" in next(iter(counts.reasons))
            assert (source.stats().visible, target.stats().visible) == (1, 20)


class TestWhenAQueueDoesNotAnswer:
    def test_it_is_asked_again(self, account: EmbeddedAccount) -> None:
        with account.queue("from") as source, account.queue("to") as target:
            source.send("one")
            counts = bridged(source, Faulty(target, [AWAY, AWAY]), limit=1)
            assert (counts.sent, counts.uncertain) == (1, 0)
            assert bodies(target) == ["one"]

    def test_it_is_asked_again_though_the_source_is_empty(self, account: EmbeddedAccount) -> None:
        with account.queue("from") as source, account.queue("to") as target:
            source.send("one")
            assert bridged_fast(source, Faulty(target, [AWAY] * 6)).sent == 1
            assert bodies(target) == ["one"]

    def test_it_gives_up_and_gives_back(self, account: EmbeddedAccount) -> None:
        with account.queue("from") as source, account.queue("to") as target:
            source.send("one")
            with pytest.raises(TransportError):
                bridged(source, Faulty(target, [AWAY] * 9), give_up_after=0.2)
            assert (source.stats().visible, target.stats().visible) == (1, 0)

    def test_what_the_target_has_is_deleted_before_it_gives_up(self, account: EmbeddedAccount) -> None:
        class Half(Wrapping):
            """Takes the first message of a batch, and then answers no more."""

            def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
                if len(messages) == 1:
                    raise AWAY
                return [self.inner.send(messages[0]), *[AWAY] * (len(messages) - 1)]

        with account.queue("from") as source, account.queue("to") as target:
            source.send_batch(["one", "two"])
            with pytest.raises(TransportError):
                bridged(source, Half(target), workers=1, give_up_after=0.2)
            assert (source.stats().visible, target.stats().visible) == (1, 1)

    def test_what_cannot_be_deleted_is_not_sent_again(self, account: EmbeddedAccount) -> None:
        with account.queue("from") as source, account.queue("to") as target:
            source.send("one")
            counts = bridged(Faulty(source, [LeaseTaken(sequence=0, attempt=0)]), target)
            assert (counts.sent, counts.received, counts.deleted, counts.undeleted) == (1, 2, 1, 0)

    @pytest.mark.parametrize(("fault", "many"), [(DENIED, 3), (BROKEN, 200)])
    def test_it_ends_if_the_source_lets_nothing_be_deleted(
        self, account: EmbeddedAccount, fault: VeilError, many: int
    ) -> None:
        """Else it would receive the same messages again and again."""
        with account.queue("from") as source, account.queue("to") as target:
            source.send("one")
            with pytest.raises(ServiceError):
                bridged_fast(Faulty(source, [fault] * many), target, lease=4, give_up_after=3, workers=1)
            assert (source.stats().visible, target.stats().visible) == (1, 1)


def test_a_stop_settles_what_is_in_hand(account: EmbeddedAccount) -> None:
    with account.queue("from") as source, account.queue("to") as target:
        source.send_batch([str(number) for number in range(500)])
        run = Bridge(source, target, Options(rate=200))
        counts = run.run(lambda counts: run.stop() if counts.sent else None)
        stats = source.stats()
        assert counts.sent == counts.deleted == target.stats().visible == 500 - stats.visible < 500
        assert stats.in_flight == 0


def test_the_same_queue_is_refused(account: EmbeddedAccount) -> None:
    with account.queue("from") as source, account.queue("from") as target:
        with pytest.raises(ParameterInvalid, match="same queue"):
            Bridge(source, target, Options())


@for_each(
    ("wrong", "said"),
    [
        ({"workers": 0}, "workers: must be a whole number"),
        ({"lease": 1.5}, "lease: "),
        ({"rate": 0}, "rate: 0 is not a finite number of messages a second above 0"),
        ({"limit": 0}, "limit: must be a whole number"),
        ({"group": "a b"}, "group: "),
    ],
)
def test_wrong_options_are_refused(account: EmbeddedAccount, wrong: dict[str, Any], said: str) -> None:
    with account.queue("from") as source, account.queue("to") as target:
        with pytest.raises(ParameterInvalid, match=said):
            Bridge(source, target, msgspec.structs.replace(Options(), **wrong))


def test_a_rate_is_kept_and_a_limit(account: EmbeddedAccount) -> None:
    clock = MovableClock()
    pace, stop = Pace(2, 5, clock), Stop(clock)
    assert pace.take(BATCH, Stopped()) == 0
    clock.advance(10)
    assert pace.take(BATCH, stop) == 2  # no more than a second's worth at once
    pace.give_back(1)
    assert pace.take(BATCH, stop) == 1
    clock.advance(10)
    assert [pace.take(BATCH, stop), pace.take(1, Stopped())] == [2, 0]
    clock.advance(10)
    assert [pace.take(BATCH, stop), pace.take(BATCH, stop)] == [1, 0]


class Stopped(Stop):
    """Does not wait, and is not set at first."""

    def __init__(self) -> None:
        super().__init__(SYSTEM)
        self.waited = False

    def is_set(self) -> bool:
        return self.waited

    def wait(self, seconds: float) -> bool:
        self.waited = True
        return True


@for_each(
    ("source", "target", "lost"),
    [
        ("veil://h/a", "veil://h/b", []),
        ("sqs://h/a", "veil://h/b", []),
        ("veil://h/a", "sqs://h/b", ["priorities", "the instant"]),
        ("sqs://h/a", "azure://h/devstoreaccount1/b", ["message attributes", "message groups"]),
        ("sqs://h/a.fifo", "sqs://h/b", ["order within a group"]),
        ("sqs://h/a.fifo", "sqs://h/b.fifo", ["deduplication ids"]),
        ("mns://a:b@h/a", "sqs://h/b", ["priorities"]),
        ("azure://h/devstoreaccount1/a", "azure://h/devstoreaccount1/b", []),
        ("azure://h/devstoreaccount1/a", "veil://h/b", ["a message that never expires"]),
        ("azure://h/devstoreaccount1/a", "sqs://h/b", ["the instant"]),
    ],
)
def test_what_is_lost_is_said(source: str, target: str, lost: list[str]) -> None:
    able = []
    for url in (source, target):
        address = parse_url(url)
        with open_address(address) as account:
            able.append(account.capabilities(address.queue or ""))
    said = differences(*able, None, copies=False)
    types = source.startswith(("sqs:", "veil:"))
    assert any(each.text.startswith("custom attribute types") for each in said) == types
    found = [each.text for each in said if each.is_lost]
    assert len(found) == len(lost)
    assert all(text.startswith(begin) for text, begin in zip(found, lost, strict=True))
