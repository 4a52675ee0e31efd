"""Frames of the peer port: every command, outcome and error that crosses is the same on the other side."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.contract.stage import TESTER, sending
from tests.support.model_values import ARRIVED, value_of

from veilmq.cluster import age_us
from veilmq.cluster.peer import AGE_US_MAX
from veilmq.cluster.peer.frames import (
    ACCEPTED,
    ENCODER,
    FROM_CALLER,
    FROM_OWNER,
    AnswerSoon,
    Bye,
    Call,
    Cancel,
    Garbage,
    NotOwner,
    Ping,
    outcomes_of,
    settle,
    unpacked,
)
from veilmq.model.commands import (
    AnyCommand,
    ChangeQueue,
    CheckClock,
    Delete,
    Extend,
    Operate,
    Receive,
    RecordPolls,
    RecordPush,
    Send,
    Sweep,
)
from veilmq.model.errors import QueueMissing, StoreUnknown, leaves
from veilmq.model.instant import HOUR_US, Instant
from veilmq.model.outcomes import Result, Sent
from veilmq.model.settings.access import Share
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

QUEUE = QueueKey("000000000000", "us-east-1", "jobs")


def across(commands: tuple[Any, ...], age: int = 0) -> tuple[Any, ...]:
    """The commands as the owner has them; they arrived at `ARRIVED` by its clock."""
    call = FROM_CALLER.decode(ENCODER.encode(Call(7, age, commands)))
    settle(call.commands, call.age_us, ARRIVED)
    return call.commands  # type: ignore[no-any-return]


@for_each("kind", sorted(ACCEPTED, key=str), ids=lambda kind: kind.__name__)
def test_every_command_is_the_same_at_the_owner(kind: type) -> None:
    @settings(max_examples=8)
    @given(st.lists(value_of(kind), min_size=1, max_size=2))
    def crosses(commands: list[Any]) -> None:
        came = across(tuple(commands))
        assert came == tuple(commands)
        assert repr(came) == repr(tuple(commands))  # an enum equals its text, and a bool its number

    crosses()


@for_each("kind", [*Result.__subclasses__(), *leaves()], ids=lambda kind: kind.__name__)
def test_every_outcome_and_error_is_the_same_at_the_caller(kind: type) -> None:
    @settings(max_examples=8)
    @given(st.lists(value_of(kind), min_size=1, max_size=2))
    def crosses(outcomes: list[Any]) -> None:
        frame = FROM_OWNER.decode(ENCODER.encode(outcomes_of(7, outcomes)))
        came = unpacked(frame.outcomes)
        assert (frame.id, came) == (7, outcomes)
        assert repr(came) == repr(outcomes)

    crosses()


def test_what_is_the_owners_own_is_no_command_of_a_peer() -> None:
    left = set(get_args(AnyCommand)) - ACCEPTED
    assert left == {Sweep, CheckClock, RecordPolls, RecordPush, Share}
    for kind in (b"Sweep", b"CheckClock", b"RecordPolls", b"RecordPush"):
        packed = ENCODER.encode([1, 1, 0, [{"type": kind.decode()}]])
        with pytest.raises(msgspec.ValidationError):
            FROM_CALLER.decode(packed)


def test_a_call_arrived_as_long_ago_at_the_owner_as_at_its_caller() -> None:
    """The clocks of the two differ by years."""
    theirs = Instant(5_000_000)
    delete = Delete(queue=QUEUE, origin=TESTER, handle="h", arrived=theirs)
    extend = Extend(queue=QUEUE, origin=TESTER, handle="h", lease_us=1, arrived=theirs)
    operate = Operate(origin=TESTER, id="1", keeps=True, digest=b"", act="a", asked={}, commands=(delete,))
    age = age_us((delete, extend), submitted=Instant(theirs + 100), now=Instant(theirs + 700))
    assert age == 700
    (deleted, extended, operated) = across((delete, extend, operate), age)
    assert deleted.arrived == extended.arrived == operated.commands[0].arrived == ARRIVED - 700
    assert age_us((sending(QUEUE),), submitted=theirs, now=Instant(theirs + 9)) == 9


def test_a_wrong_clock_makes_no_call_older_than_the_bound_or_of_the_future() -> None:
    delete = Delete(queue=QUEUE, origin=TESTER, handle="h", arrived=Instant(0))
    assert across((delete,), HOUR_US)[0].arrived == ARRIVED - AGE_US_MAX
    assert across((delete,), -HOUR_US)[0].arrived == ARRIVED
    assert age_us((delete,), submitted=Instant(100), now=Instant(40)) == 40
    assert age_us((sending(QUEUE),), submitted=Instant(100), now=Instant(40)) == 0


@for_each(
    "change",
    [{"no_such_setting": 1}, {"visibility_timeout_us": "long"}, {"redrive": {"target": "nowhere"}}],
)
def test_a_setting_that_the_model_does_not_have_is_garbage(change: dict[str, Any]) -> None:
    with pytest.raises(Garbage):
        across((ChangeQueue(queue=QUEUE, origin=TESTER, change=change),))


def test_an_operators_command_that_the_model_does_not_have_is_garbage() -> None:
    fields: dict[str, Any] = {"id": "1", "keeps": True, "digest": b"", "act": "a", "asked": {}}
    with pytest.raises(Garbage):
        across((Operate(origin=TESTER, commands=({"type": "Sweep"},), **fields),))


def test_an_error_that_the_model_does_not_have_may_mean_anything() -> None:
    """A later release's owner says it. Only this call hears of it, and the connection stays."""
    found = [
        ["error", "Tired", {}],
        ["error", "QueueMissing", {"of": "later"}],
        ["error", "QueueMissing", {"queue": "q"}],
    ]
    frame = FROM_OWNER.decode(ENCODER.encode([4, 1, found]))
    unknown, changed, known = unpacked(frame.outcomes)
    assert isinstance(unknown, StoreUnknown)
    assert "Tired" in str(unknown)
    assert isinstance(changed, StoreUnknown)
    assert known == QueueMissing(queue="q")


RECEIVE = Receive(queue=QUEUE, origin=TESTER, count_max=2)
SEND = Send(queue=QUEUE, origin=TESTER, body="hi", md5=b"16 bytes of MD5.", size_bytes=2)
SENT = Sent(b"16 bytes of uuid", 1, Instant(2), Instant(3), Instant(4))
GOLDEN: list[tuple[Any, str]] = [
    (
        Call(1, 2, (SEND,)),
        "94010102918da474797065a453656e64a5717565756583a76163636f756e74ac303030303030303030303030a6726567"
        "696f6ea975732d656173742d31a46e616d65a46a6f6273a66f726967696e83a870726f746f636f6ca3737173a9707269"
        "6e636970616ca6746573746572a6636c69656e74a8636f6e7472616374a4626f6479a26869a36d6435c4103136206279"
        "746573206f66204d44352eaa73697a655f627974657302a87072696f7269747908a864656c61795f7573c0a674746c5f"
        "7573c0a66578747261739d90c0c0c0c0c0c0c0c0c000a0a0ac77616e74735f68616e646c65c2a866726f6d5f786d6cc2"
        "ab6d7573745f617070656172c2",
    ),
    (
        Call(3, 0, (RECEIVE,)),
        "940103009188a474797065a752656365697665a5717565756583a76163636f756e74ac303030303030303030303030a6"
        "726567696f6ea975732d656173742d31a46e616d65a46a6f6273a66f726967696e83a870726f746f636f6ca3737173a9"
        "7072696e636970616ca6746573746572a6636c69656e74a8636f6e7472616374a9636f756e745f6d617802a86c656173"
        "655f7573c0a7776169745f7573c0ad696e5f666c696768745f6d6178c0aa617474656d70745f6964c0",
    ),
    (
        Cancel(3),
        "920203",
    ),
    (
        AnswerSoon(3),
        "920303",
    ),
    (
        outcomes_of(1, [SENT]),
        "9304019192a453656e7487a26964c4103136206279746573206f662075756964a873657175656e636501a473656e7402"
        "a776697369626c6503a76578706972657304a668616e646c65a0a96475706c6963617465c2",
    ),
    (
        outcomes_of(1, [QueueMissing(queue="jobs")]),
        "9304019193a56572726f72ac51756575654d697373696e6781a57175657565a46a6f6273",
    ),
    (
        outcomes_of(3, []),
        "93040390",
    ),
    (
        NotOwner(3, "10.0.0.2:9330"),
        "930503ad31302e302e302e323a39333330",
    ),
    (
        NotOwner(3, None),
        "930503c0",
    ),
    (
        Ping(),
        "9106",
    ),
    (
        Bye(7),
        "920707",
    ),
]


@for_each("frame, packed", GOLDEN)
def test_frames_keep_their_bytes_between_releases(frame: Any, packed: str) -> None:
    assert ENCODER.encode(frame).hex() == packed
