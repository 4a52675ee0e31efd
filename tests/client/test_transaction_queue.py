"""An operation and its message: both or neither, whoever dies where.

The document's failure analysis (document 002) has one test a letter and case: `test_a_...` to `test_d_...` for the
producer, `test_consumer_...`, `test_service_...`.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.client.too_deep import TOO_DEEP
from tests.client.transaction_stage import HOUR, KINDS, Killed, Network, NoHandle, Place, left_behind
from tests.support.embedded import EmbeddedClient

from veilmq.client.adapters.connect import connect
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.encrypted import EncryptedQueue, Keys, new_key
from veilmq.client.errors import TransportError
from veilmq.client.messages import Message, Received, Sent, Template
from veilmq.client.queue import Capabilities
from veilmq.client.transaction import ATTRIBUTE, Form, Outcome, Prepared, Times, TransactionQueue, Verdict
from veilmq.client.transaction.logbook import Entry, encode
from veilmq.client.unreadable import keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid, QueueMissing, VeilError
from veilmq.model.messages import Failure
from veilmq.testing.client_contract import for_each


@pytest.fixture(params=list(KINDS))
def place(request: pytest.FixtureRequest, embedded: EmbeddedClient) -> Place:
    return Place(embedded, request.param)


@pytest.fixture
def hidden(embedded: EmbeddedClient) -> Place:
    return Place(embedded, "hidden")


@pytest.fixture
def logged(embedded: EmbeddedClient) -> Place:
    return Place(embedded, "azure")


# The steps.


def test_the_form_follows_what_the_queue_can(place: Place) -> None:
    assert place.opened().form is (Form.HIDDEN if place.kind == "hidden" else Form.LOGGED)


def test_what_stays_undecided_is_parked_in_the_pattern_of_the_log(hidden: Place) -> None:
    """Else it was plain text in the parked queue, and a large message never got there."""
    keys = Keys(new_key())
    log = EncryptedQueue(hidden.log, keys, unreadable=keep)
    with pytest.raises(ParameterInvalid, match="the log is in EncryptedQueue") as refused:
        hidden.opened(log=log)
    assert refused.value.parameter == "parked"
    hidden.opened(log=log, parked=EncryptedQueue(hidden.queue, keys, unreadable=keep))


def test_a_committed_message_is_consumed_once(place: Place) -> None:
    attributes = {"kind": b"\0x"} if place.queue.capabilities.attributes else {}
    sent = place.opened().send_transaction(Message("order 7", attributes=attributes), place.ledger.do)
    assert sent.outcome is Outcome.COMMITTED
    assert place.ledger.done == [sent.id]
    (message,) = place.consumed()
    assert message.body == "order 7"
    if place.kind != "azure":
        assert (message.attributes["kind"], message.attributes[ATTRIBUTE]) == (b"\0x", sent.id)
    assert place.left() == 0
    assert place.ledger.asked == 0


def test_a_message_rolled_back_is_never_seen(place: Place) -> None:
    sent = place.opened().send_transaction("order 7", place.ledger.refuse)
    assert sent.outcome is Outcome.ROLLED_BACK
    place.embedded.pass_time(49 * HOUR)
    assert place.bodies() == []
    assert place.left() == 0


def test_nobody_sees_the_message_before_the_commit(place: Place) -> None:
    def do(prepared: Prepared) -> Verdict:
        assert prepared.message.body == "order 7"
        assert place.bodies() == []
        assert place.left() == 1
        return Verdict.COMMIT

    place.opened().send_transaction("order 7", do)
    assert place.bodies() == ["order 7"]


@pytest.mark.parametrize("done", [True, False])
def test_an_operation_that_raises_is_asked_about(place: Place, done: bool) -> None:
    """It may have got as far as its own commit before it raised."""

    def do(prepared: Prepared) -> bool:
        if done:
            place.ledger.do(prepared)
        raise RuntimeError("connection lost")

    with pytest.raises(RuntimeError):
        place.opened().send_transaction("order 7", do)
    assert place.bodies() == (["order 7"] if done else [])
    assert place.left() == 0


def test_the_log_entry_carries_the_whole_message(place: Place) -> None:
    def do(prepared: Prepared) -> Verdict:
        place.ledger.do(prepared)
        return Verdict.UNKNOWN

    queue = place.opened()
    whole = Message("order 7", priority=3)
    if place.queue.capabilities.attributes:
        whole = replace(whole, attributes={"n": 1, "b": b"\xff", "s": "x"}, type="order")
    assert queue.send_transaction(whole, do).outcome is Outcome.PENDING
    # Nothing is left of the half message, whoever took it.
    place.embedded.account.delete("orders")
    place.embedded.account.create("orders")
    place.queue = KINDS[place.kind](place.embedded.account.queue("orders"))
    place.embedded.pass_time(601)
    assert place.opened().checker.run_once() == 1
    (message,) = place.consumed()
    assert (message.body, message.type, message.priority) == ("order 7", whole.type, 3)
    assert whole.attributes.items() <= message.attributes.items()


# The failure analysis: the producer failed.


def test_a_reads_the_log_entries_that_nobody_confirmed_in_time(place: Place) -> None:
    left_behind(place)
    checker = place.opened().checker
    place.embedded.pass_time(590)
    assert checker.run_once() == 0
    assert place.ledger.asked == 0
    place.embedded.pass_time(11)
    assert checker.run_once() == 1


def test_b_asks_what_became_of_the_operation(place: Place) -> None:
    left_behind(place)
    left_behind(place, done=False)
    place.embedded.pass_time(601)
    assert place.opened().checker.run_once() == 2
    assert place.ledger.asked == 2
    assert place.bodies() == ["order 7"]


def test_c_commits_what_was_done(place: Place) -> None:
    left_behind(place)
    assert place.bodies() == []
    place.embedded.pass_time(601)
    place.opened().checker.run_once()
    assert place.bodies() == ["order 7"]
    assert place.lost == []


def test_c_rolls_back_what_was_not_done(hidden: Place) -> None:
    left_behind(hidden, done=False)
    assert hidden.queue.stats().delayed == 1
    hidden.embedded.pass_time(601)
    assert hidden.opened().checker.run_once() == 1
    assert hidden.queue.stats().delayed == 0


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
def test_c_committing_once_more_has_no_effect(hidden: Place, received: bool, deleted: bool) -> None:
    """The producer committed and died before it confirmed; a consumer may be anywhere by now."""
    network = Network(4, "killed before")
    with pytest.raises(Killed):
        hidden.opened(network.over(hidden.queue), network.over(hidden.log)).send_transaction("7", hidden.ledger.do)
    came = hidden.queue.receive(lease=HOUR) if received or deleted else []
    if deleted:
        hidden.queue.delete(came[0].handle)
    hidden.embedded.pass_time(601)
    assert hidden.opened().checker.run_once() == 1
    if received and not deleted:
        assert hidden.bodies() == []
        hidden.queue.release(came[0].handle)
    assert hidden.bodies() == ([] if deleted else ["7"])
    assert hidden.lost == []


def test_a_commit_that_fails_is_tried_again_at_once(place: Place) -> None:
    in_vain = [TransportError(reason="unreachable", may_have_happened=False)] * 2
    prepared = False

    class Failing(Wrapping):
        def send(self, message: str | Message) -> Sent:
            if prepared and in_vain:
                raise in_vain.pop()
            return super().send(message)

        def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
            if in_vain:
                raise in_vain.pop()
            super().release(handle, delay, failure=failure)

    def do(transaction: Prepared) -> bool:
        nonlocal prepared
        prepared = True
        return place.ledger.do(transaction)

    assert place.opened(Failing(place.queue)).send_transaction("order 7", do).outcome is Outcome.COMMITTED
    assert place.bodies() == ["order 7"]
    assert (in_vain, place.ledger.asked, place.left()) == ([], 0, 0)


@pytest.mark.parametrize("in_vain", [0, 1])
def test_c_a_commit_whose_answer_is_lost_is_not_sent_again(hidden: Place, in_vain: int) -> None:
    """The producer tries again, at first perhaps in vain, and the message has been consumed meanwhile."""
    came: list[Received] = []
    unreached = [TransportError(reason="unreachable", may_have_happened=False)] * in_vain

    class Consuming(Wrapping):
        def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
            if came and unreached:
                raise unreached.pop()
            super().release(handle, delay, failure=failure)
            came.extend(hidden.consumed())
            raise TransportError(reason="the answer was lost", may_have_happened=True)

    sent = hidden.opened(Consuming(hidden.queue)).send_transaction("order 7", hidden.ledger.do)
    assert sent.outcome is Outcome.COMMITTED
    assert [message.body for message in came] == ["order 7"]
    assert hidden.bodies() == []
    assert hidden.lost == []


def test_a_half_message_that_somebody_took_away_is_sent_from_the_entry(hidden: Place) -> None:
    """Purged, say: the operation is done, so the message must come."""

    def do(prepared: Prepared) -> bool:
        assert prepared.handle is not None
        hidden.queue.delete(prepared.handle)
        return hidden.ledger.do(prepared)

    sent = hidden.opened().send_transaction("order 7", do)
    assert sent.outcome is Outcome.COMMITTED
    assert hidden.bodies() == ["order 7"]
    assert hidden.lost == [sent.id]


def test_d_confirms_the_log_entry(place: Place) -> None:
    left_behind(place)
    place.embedded.pass_time(601)
    checker = place.opened().checker
    checker.run_once()
    assert place.left() == 0
    place.embedded.pass_time(HOUR)
    assert checker.run_once() == 0
    assert place.ledger.asked == 1


# The failure analysis: the consumer failed, the service cannot be reached.


def test_consumer_that_dies_leaves_the_message_to_the_next(place: Place) -> None:
    place.opened().send_transaction("order 7", place.ledger.do)
    (first,) = place.queue.receive(lease=30)
    assert place.queue.receive() == []
    place.embedded.pass_time(31)
    (second,) = place.queue.receive(lease=30)
    assert (second.id, second.receive_count) == (first.id, 2)
    place.queue.delete(second.handle)
    assert place.bodies() == []


@pytest.mark.parametrize("done", [True, False])
def test_service_that_cannot_be_reached_is_caught_up_with(place: Place, done: bool) -> None:
    network = Network(10_000, "cut from here")

    def do(prepared: Prepared) -> bool:
        network.step = network.calls + 1
        return place.ledger.do(prepared) if done else False

    queue = place.opened(network.over(place.queue), network.over(place.log))
    outcome = queue.send_transaction("order 7", do).outcome
    assert outcome is (Outcome.ROLLED_BACK if not done and place.kind != "hidden" else Outcome.PENDING)
    place.embedded.pass_time(601)
    with pytest.raises(TransportError):
        queue.checker.run_once()
    network.step = 0
    queue.checker.run_once()
    assert place.bodies() == (["order 7"] if done else [])
    assert place.left() == 0


def test_service_that_cannot_be_reached_at_first_starts_no_operation(place: Place) -> None:
    network = Network(1, "cut from here")
    with pytest.raises(TransportError):
        place.opened(network.over(place.queue), network.over(place.log)).send_transaction("7", place.ledger.do)
    assert place.ledger.done == []


def test_a_half_message_that_could_not_be_logged_is_taken_back(hidden: Place) -> None:
    network = Network(1, "cut from here")
    with pytest.raises(TransportError):
        hidden.opened(log=network.over(hidden.log)).send_transaction("7", hidden.ledger.do)
    assert hidden.ledger.done == []
    assert hidden.queue.stats().delayed == 0


# Half messages that end.


def test_a_half_message_that_ended_is_sent_again_and_told(hidden: Place) -> None:
    """The document's form loses it: the operation is done, and its message is gone."""
    transaction = left_behind(hidden)
    hidden.embedded.pass_time(47 * HOUR + 60)
    assert hidden.opened().checker.run_once() == 1
    (message,) = hidden.consumed()
    assert message.attributes[ATTRIBUTE] == transaction
    assert hidden.lost == [transaction]


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("consumed", [False, True])
def test_a_commit_late_in_a_half_messages_life_sends_anew(hidden: Place, committed: bool, consumed: bool) -> None:
    if committed:
        network = Network(4, "killed before")
        with pytest.raises(Killed):
            hidden.opened(network.over(hidden.queue), network.over(hidden.log)).send_transaction("7", hidden.ledger.do)
    else:
        left_behind(hidden)
    before = hidden.consumed() if consumed else []
    hidden.embedded.pass_time(40 * HOUR)
    assert hidden.opened().checker.run_once() == 1
    assert len(before) + len(hidden.consumed()) == 1
    assert len(hidden.lost) == (0 if before else 1)
    hidden.embedded.pass_time(HOUR)
    assert hidden.bodies() == []


def test_the_message_sent_anew_outlives_the_half_message(hidden: Place) -> None:
    left_behind(hidden)
    hidden.embedded.pass_time(46 * HOUR)
    hidden.opened().checker.run_once()
    hidden.embedded.pass_time(24 * HOUR)
    assert hidden.bodies() == ["order 7"]


def test_a_failing_on_lost_does_not_send_once_more(hidden: Place) -> None:
    left_behind(hidden)
    hidden.lost = None  # type: ignore[assignment]
    hidden.embedded.pass_time(47 * HOUR + 60)
    checker = hidden.opened().checker
    assert checker.run_once() == 1
    hidden.embedded.pass_time(HOUR)
    assert checker.run_once() == 0
    assert hidden.bodies() == ["order 7"]


# Undecided, for ever or for now.


def test_unknown_is_asked_again_and_then_parked(place: Place) -> None:
    left_behind(place)
    place.ledger.answer = Verdict.UNKNOWN
    queue = place.opened()
    place.embedded.pass_time(601)
    while place.left():
        queue.checker.run_once()
        place.embedded.pass_time(60)
    assert place.ledger.asked == 61
    assert place.bodies() == []
    assert queue.parked().stats().visible == 1
    assert queue.parked().name == "log-parked"
    assert queue.parked().stats().retention == 14 * 86_400
    assert queue.settle_parked(lambda prepared: Verdict.UNKNOWN) == 0
    assert queue.parked().stats().visible == 1
    assert queue.settle_parked(lambda prepared: True) == 1
    assert place.bodies() == ["order 7"]
    assert queue.parked().stats().visible == queue.parked().stats().in_flight == 0


def test_a_parked_transaction_can_be_rolled_back(place: Place) -> None:
    left_behind(place, done=False)
    place.ledger.answer = Verdict.UNKNOWN
    place.embedded.pass_time(5 * HOUR)
    queue = place.opened()
    assert queue.checker.run_once() == 1
    assert queue.settle_parked(lambda prepared: Verdict.ROLLBACK) == 1
    place.embedded.pass_time(49 * HOUR)
    assert place.bodies() == []


def parked_entries(queue: TransactionQueue, count: int) -> list[str]:
    """Their ids."""
    ids = [f"t{number}" for number in range(count)]
    for identity in ids:
        queue.parked().send(encode(Entry(1, identity, Form.LOGGED, Message("order"), None, 0.0, None)))
    return ids


@pytest.mark.parametrize("verdict", list(Verdict))
def test_each_parked_one_is_asked_about_once_however_slowly(hidden: Place, verdict: Verdict) -> None:
    queue = hidden.opened()
    ids, asked = parked_entries(queue, 6), []

    def decide(prepared: Prepared) -> Verdict:
        asked.append(prepared.id)
        hidden.embedded.pass_time(queue.times.check_lease * 0.7)
        assert len(asked) <= 6
        return verdict

    known = verdict is not Verdict.UNKNOWN
    assert queue.settle_parked(decide) == 6 * known
    assert sorted(asked) == ids
    stats = queue.parked().stats()
    assert (stats.visible, stats.in_flight) == (6 * (not known), 0)
    assert len(hidden.bodies()) == 6 * (verdict is Verdict.COMMIT)


def test_what_decide_raises_is_raised_whoever_has_the_leases(hidden: Place) -> None:
    queue = hidden.opened()
    asked = 0
    parked_entries(queue, 3)

    def decide(prepared: Prepared) -> Verdict:
        nonlocal asked
        asked += 1
        if asked == 3:
            hidden.embedded.pass_time(queue.times.check_lease + 1)
            assert queue.parked().receive(), "the first one, by another process"
            raise KeyError(prepared.id)
        return Verdict.UNKNOWN

    with pytest.raises(KeyError):
        queue.settle_parked(decide)
    assert queue.parked().stats().visible == 2


def test_unknown_is_decided_when_it_is_known(place: Place) -> None:
    left_behind(place)
    place.ledger.answer = Verdict.UNKNOWN
    place.embedded.pass_time(601)
    checker = place.opened().checker
    assert checker.run_once() == 0
    place.ledger.answer = None
    assert checker.run_once() == 0
    place.embedded.pass_time(61)
    assert checker.run_once() == 1
    assert place.bodies() == ["order 7"]


def test_a_check_that_raises_is_asked_again(place: Place) -> None:
    left_behind(place)
    place.embedded.pass_time(601)
    answers: list[object] = [RuntimeError("database down"), "perhaps", None, Verdict.COMMIT]

    def check(prepared: Prepared) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    checker = TransactionQueue(place.queue, place.log, check, clock=place.embedded.clock).checker
    for _ in range(4):
        checker.run_once()
        place.embedded.pass_time(61)
    assert place.bodies() == ["order 7"]


def test_a_transaction_under_way_here_is_left_alone(place: Place) -> None:
    """It takes longer than its timeout, and the checker of the same process meets its entry."""
    queue = place.opened()

    def do(prepared: Prepared) -> bool:
        for _ in range(20):
            place.embedded.pass_time(601)
            assert queue.checker.run_once() == 0
        return place.ledger.do(prepared)

    assert queue.send_transaction("order 7", do).outcome is Outcome.COMMITTED
    assert place.ledger.asked == 0
    assert place.bodies() == ["order 7"]
    place.embedded.pass_time(601)
    queue.checker.run_once()
    assert place.left() == 0
    if place.kind == "hidden":
        assert place.bodies() == []


@pytest.mark.parametrize(
    "body", ["hello", f'{{"message":{{"body":"x","attributes":{{"a":{TOO_DEEP}}}}}}}'], ids=["text", "deep"]
)
def test_what_is_no_entry_is_parked(place: Place, body: str) -> None:
    place.log.send(body)
    queue = place.opened()
    assert queue.checker.run_once() == 1
    assert [message.body for message in queue.parked().receive()] == [body]


# Commits that are lost for good.


def without_its_queue(place: Place, **options: Any) -> tuple[TransactionQueue, Callable[[Prepared], bool]]:
    queue = place.opened(**options)

    def do(prepared: Prepared) -> bool:
        place.embedded.account.delete("orders")
        return place.ledger.do(prepared)

    return queue, do


def test_a_commit_that_can_never_succeed_is_compensated(place: Place) -> None:
    queue, do = without_its_queue(place, compensate=place.ledger.undo)
    sent = queue.send_transaction("order 7", do)
    assert sent.outcome is Outcome.COMPENSATED
    assert (place.ledger.done, place.ledger.undone) == ([], [sent.id])
    assert place.left() == 0


def test_a_commit_that_can_never_succeed_is_parked_if_nobody_compensates(place: Place) -> None:
    queue, do = without_its_queue(place)
    assert queue.send_transaction("order 7", do).outcome is Outcome.PENDING
    place.embedded.pass_time(601)
    assert queue.checker.run_once() == 1
    assert queue.parked().stats().visible == 1


def test_the_checker_compensates_too(place: Place) -> None:
    transaction = left_behind(place)
    place.embedded.pass_time(601)
    seen: list[VeilError] = []

    def undo(prepared: Prepared, error: VeilError) -> None:
        place.ledger.undo(prepared, error)
        seen.append(error)

    opened = place.opened(compensate=undo)
    place.embedded.account.delete("orders")
    assert opened.checker.run_once() == 1
    assert place.ledger.undone == [transaction]
    assert isinstance(seen[0], QueueMissing)


# What cannot work is refused.


@for_each(
    "kind, times, parameter",
    [
        ("hidden", Times(half_life=48 * HOUR), "half_life"),
        ("hidden", Times(half_life=20 * HOUR), "half_life"),
        ("hidden", Times(half_delay=8 * 24 * HOUR), "half_delay"),
        ("hidden", Times(half_delay=7 * 24 * HOUR), "log"),
        ("azure", Times(ask_for=8 * 24 * HOUR), "log"),
        ("sqs", Times(timeout=8 * 24 * HOUR), "timeout"),
        ("azure", Times(timeout=8 * 24 * HOUR), "timeout"),
        ("azure", Times(timeout=0), "timeout"),
        ("azure", Times(check_lease=float("nan")), "check_lease"),
        ("azure", Times(check_lease=1e-6), "check_lease"),
        ("azure", Times(ask_every=8 * 24 * HOUR), "ask_every"),
    ],
)
def test_times_that_cannot_work_are_refused(embedded: EmbeddedClient, kind: str, times: Times, parameter: str) -> None:
    with pytest.raises(ParameterInvalid) as caught:
        Place(embedded, kind).opened(times=times)
    assert caught.value.parameter == parameter


def test_a_queue_whose_half_messages_would_appear_is_refused(embedded: EmbeddedClient) -> None:
    """MNS has no time to live of a message: the queue's retention must be below the delay."""

    class Mns(Wrapping):
        @property
        def capabilities(self) -> Capabilities:
            return replace(self.inner.capabilities, ttl=False)

    place = Place(embedded, "hidden")
    with pytest.raises(ParameterInvalid) as caught:
        place.opened(Mns(place.queue))
    assert caught.value.parameter == "queue"
    embedded.account.create("short", Template(retention=47 * HOUR))
    queue = Mns(embedded.account.queue("short"))
    assert place.opened(queue).send_transaction("order 7", place.ledger.do).outcome is Outcome.COMMITTED
    assert [message.body for message in queue.receive()] == ["order 7"]


def test_forms_and_logs_that_cannot_be_are_refused(logged: Place, tmp_path: Path) -> None:
    with pytest.raises(CapabilityMissing):
        logged.opened(form="hidden")
    with pytest.raises(ParameterInvalid, match="form"):
        logged.opened(form="half")
    with pytest.raises(ParameterInvalid, match="another queue"):
        logged.opened(log=logged.queue)
    with EmbeddedAccount(tmp_path / "other") as account:  # two objects of one queue
        account.create("orders")
        same = connect(f"veil://{tmp_path}/other?queue=orders")
        with same, pytest.raises(ParameterInvalid, match="another queue"):
            TransactionQueue(account.queue("orders"), same, logged.ledger.check, form="logged")


def test_messages_that_cannot_be_are_refused_before_the_operation(place: Place) -> None:
    queue = place.opened()
    with pytest.raises(MessageTooLarge):
        queue.send_transaction("x" * (place.queue.capabilities.body_bytes_max - 10), place.ledger.do)
    with pytest.raises(ParameterInvalid):
        queue.send_transaction(Message(b"bytes"), place.ledger.do)  # type: ignore[arg-type]
    if place.kind == "hidden":
        with pytest.raises(ParameterInvalid, match="delay"):
            queue.send_transaction(Message("x", delay=5), place.ledger.do)
    assert place.ledger.done == []
    assert place.left() == 0


def test_it_is_a_queue(place: Place) -> None:
    with place.opened() as queue:
        queue.send("plain")
        assert [message.body for message in queue.receive()] == ["plain"]


def test_the_checkers_thread_settles_by_itself(embedded: EmbeddedClient, tmp_path: Path) -> None:
    place = Place(embedded, "hidden")
    left_behind(place)
    embedded.pass_time(601)
    queue = place.opened(times=Times(check_every=0.001))
    with queue.checker:
        (message,) = place.queue.receive(wait=30)
    assert message.body == "order 7"
    queue.checker.close()


# A log whose sends return no handle.


def test_processes_share_a_log_without_handles(embedded: EmbeddedClient) -> None:
    """Each finds its own entry, and gives the others' back."""
    place = Place(embedded, "sqs")
    first, second = place.opened(), place.opened()

    def inner(prepared: Prepared) -> bool:
        return place.ledger.do(prepared)

    def outer(prepared: Prepared) -> bool:
        assert second.send_transaction("inner", inner).outcome is Outcome.COMMITTED
        assert first.checker.run_once() == 0
        return place.ledger.do(prepared)

    place.log.send(foreign := _foreign(place))
    assert first.send_transaction("outer", outer).outcome is Outcome.COMMITTED
    assert sorted(place.bodies()) == ["inner", "outer"]
    assert [message.body for message in place.log.receive(10)] == [foreign]


def _foreign(place: Place) -> str:
    """The entry of a process that is about to look for it."""
    embedded = place.embedded
    embedded.account.create("elsewhere", Template(retention=7 * 24 * HOUR))
    other = NoHandle(embedded.account.queue("elsewhere"))
    with pytest.raises(Killed):
        place.opened(log=other).send_transaction("foreign", _die)
    embedded.pass_time(1)
    assert other.stats().in_flight == 1
    embedded.pass_time(600)
    (message,) = other.receive()
    body = msgspec.json.decode(message.body)
    body["prepared"] = embedded.clock.wall()
    return msgspec.json.encode(body).decode()


def _die(prepared: Prepared) -> bool:
    raise Killed


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "veilmq.transaction")


def test_a_checker_that_is_closed_does_not_first_ask_about_all_there_is(embedded: EmbeddedClient) -> None:
    place = Place(embedded, "hidden")
    place.ledger.answer = Verdict.UNKNOWN
    producer = place.opened()
    for _ in range(25):
        producer.send_transaction("x", lambda prepared: Verdict.UNKNOWN)
    asking, closing = threading.Event(), threading.Event()

    def check(prepared: Prepared) -> Verdict:
        asking.set()
        assert closing.wait(20)
        return Verdict.ROLLBACK

    queue = TransactionQueue(place.queue, place.log, check, clock=embedded.clock)
    queue.checker.start()
    embedded.clock.advance(3 * HOUR)
    assert asking.wait(20)
    closer = threading.Thread(target=queue.checker.close)
    closer.start()
    while not queue.checker._stop.is_set():
        closer.join(0.001)
    closing.set()
    closer.join(20)
    assert not closer.is_alive()
    assert queue.log.stats().visible >= 15


@for_each(
    "message",
    [Message(""), Message("x", attributes={"AWS.order": 7}), Message("x", attributes={f"a{n}": n for n in range(11)}),
     Message("x", group="a b"), Message("x", delay=-1), Message("x", priority=99)],
    ids=repr,
)  # fmt: skip
def test_what_can_never_be_sent_starts_no_operation(place: Place, message: Message) -> None:
    with pytest.raises((ParameterInvalid, CapabilityMissing)):
        place.opened().send_transaction(message, place.ledger.do)
    assert (place.ledger.done, place.left(), place.bodies()) == ([], 0, [])


def test_what_azure_cannot_carry_starts_no_operation(logged: Place) -> None:
    with pytest.raises(CapabilityMissing, match="attributes"):
        logged.opened().send_transaction(Message("paid", attributes={"order": 7}), logged.ledger.do)
    assert (logged.ledger.done, logged.left()) == ([], 0)


def test_what_is_no_function_is_told_before_anything_is_prepared(place: Place) -> None:
    nothing: Any = None
    with pytest.raises(ParameterInvalid, match="do_transaction"):
        place.opened().send_transaction("paid", nothing)
    with pytest.raises(ParameterInvalid, match="check_transaction"):
        TransactionQueue(place.queue, place.log, nothing)
    assert (place.left(), place.bodies()) == (0, [])
