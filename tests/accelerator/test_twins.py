"""Each function of the accelerator gives what Python gives, to the byte.

Strategy: Hypothesis draws what a client may send, plain or odd; both ways do it, and the first difference fails. What
the accelerator leaves to Python (None) is no difference, but what is plain must not be left.
"""

import shutil
import string
import sys
import tempfile
from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.server.test_plain import HEADERS, LIMITS, LINES, REQUESTS, framed
from tests.support.sqlite import SMALL, read_events
from tests.support.twins import NAMES, SHORTCUTS, WALL, Ring, both, in_python, read_by_both, signed

from veilmq import accelerator
from veilmq.accelerator import TWINS
from veilmq.model.commands import AfterExpiry, AnyCommand, CreateQueue, Delete, Origin, Receive, Send
from veilmq.model.errors import DiskLow, MessageGone, MessageTooLarge, ParameterInvalid
from veilmq.model.instant import HOUR_US, Instant
from veilmq.model.messages import NO_EXTRAS, Delivery, Extras
from veilmq.model.outcomes import Deleted, Outcome, Received, Sent
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols import Request, Response
from veilmq.protocols.sqs import auth, forms, plain
from veilmq.protocols.sqs.addresses import Endpoint
from veilmq.protocols.sqs.auth import Caller
from veilmq.protocols.sqs.call import Asked, Call, Form
from veilmq.protocols.sqs.codec import Codec
from veilmq.protocols.sqs.errors import Refusal
from veilmq.protocols.sqs.operations import OPERATIONS, messages
from veilmq.store.sqlite import batch
from veilmq.store.sqlite.messages import sends
from veilmq.store.sqlite.store import SqliteStore

accelerator.check()  # asked for, it must be there: skipped tests would pass
SIGNS = pytest.mark.skipif(auth._PLAIN_SCHEME is None, reason="the processor has no SHA extensions")
pytestmark = pytest.mark.skipif(accelerator.status != "on", reason=f"the accelerator is {accelerator.status}")


def test_every_function_is_compared_here():
    assert set(TWINS) | set(SHORTCUTS) == set(accelerator.functions())
    lacking = {name for name, (module, attribute) in SHORTCUTS.items() if getattr(module, attribute) is None}
    assert lacking == (set() if " sha_ni" in Path("/proc/cpuinfo").read_text() else {"plain_scheme"})


@settings(max_examples=800)
@given(st.one_of(REQUESTS, st.binary(max_size=80)), st.integers(0, 400), st.integers(0, 400), st.binary(max_size=3))
@example(framed(b"POST / HTTP/1.1", [b"Host: [::1%25eth0]:80"], b""), 0, 0, b"")
@example(framed(b"POST / HTTP/1.1", [b"Host: a%2f%4"], b""), 0, 0, b"")
@example(framed(b"DELETE /q HTTP/1.1", [b"Host: h:", b"Connection: Keep-ALIVE "], b"x"), 0, 0, b"")
def test_a_plain_request(data, begin, end, put):
    mutated = data[:begin] + put + data[end:] if begin < end else data
    for each in (data, mutated):
        read_by_both(each, LIMITS)


def test_a_name_of_one_character_changes_no_other_bytes():
    assert TWINS["read_plain"][1](framed(b"POST / HTTP/1.1", [b"Host: h", b"Q: x"], b""), LIMITS, "", True, str)
    assert bytes([ord("Q")]) == b"q".upper()


@given(st.lists(HEADERS, max_size=12), LINES, st.integers(0, 4_200))
def test_a_request_around_its_limits(headers, line, length):
    head = [b"Host:h", *headers, b"X:" + b"y" * length]
    read_by_both(framed(line, head, b"z" * min(length, 2_001)), LIMITS)


def test_a_head_that_is_just_too_long():
    for count in (1, 7):
        headers = [b"Host:h", *(b"X%d:y" % number for number in range(count))]
        taken = [
            read_by_both(framed(b"POST / HTTP/1.1", [*headers, b"X:" + b"y" * length], b""), LIMITS) is not None
            for length in range(3_980, 4_080)
        ]
        assert taken == sorted(taken, reverse=True)
        assert {*taken} == {True, False}


def seen(verifier: auth.Verifier, request: Request, wall: Instant = WALL) -> bool:
    """Whether the accelerator finds the signature right by itself."""
    return auth._PLAIN_SCHEME(request, wall, verifier._schemes, verifier._stamps) is not None


TEXTS = st.binary(max_size=70).map(lambda text: b"v" + text.strip() + b"v")


def without(request: Request, name: bytes) -> None:
    request.headers.pop(name, None)


def flip(request: Request, at: int) -> None:
    given = bytearray(request.headers.get(b"authorization", b"A"))
    given[at % len(given)] ^= 1
    request.headers[b"authorization"] = bytes(given)


CHANGES = st.one_of(
    st.sampled_from([*NAMES, b"authorization"]).map(lambda name: lambda request: without(request, name)),
    st.tuples(st.sampled_from(NAMES), TEXTS).map(lambda pair: lambda request: request.headers.update([pair])),
    st.integers(0, 400).map(lambda at: lambda request: flip(request, at)),
    st.just(lambda request: setattr(request, "method", "GET")),
    st.sampled_from([b"/q", b"*"]).map(lambda target: lambda request: setattr(request, "target", target)),
    st.just(lambda request: setattr(request, "body", request.body + b"x")),
    st.just(lambda request: setattr(request, "authority", b"other")),
    st.just(lambda request: request.headers.update({b"x-amz-new": b"unsigned"})),
    st.just(lambda request: request.headers.update({b"x-amz-security-token": b"t"})),
)


@SIGNS
@settings(max_examples=200)
@given(st.binary(max_size=2_000), st.tuples(TEXTS, TEXTS), st.lists(CHANGES, max_size=2), st.integers(-1_000, 1_000))
@example(b"", (b"h", b"t"), [lambda request: flip(request, len(b"AWS4-HMAC-SHA256 Credential="))], 0)  # the key's id
def test_a_signature(body, values, changes, late_s):
    ring = Ring()
    verifier = auth.Verifier(ring, None, "stand-in")
    request = signed(body, values)
    assert not seen(verifier, request)
    caller = [verifier.verify(request, WALL) for _ in range(2)][-1]  # the second time keeps the instant
    assert seen(verifier, request)
    assert both(lambda: verifier.verify(request, WALL)) is caller
    both(lambda: verifier.verify(request, Instant(WALL + late_s * 1_000_000)))
    for change in changes:
        change(request)
    got = both(lambda: verifier.verify(request, WALL))
    assert got is caller or isinstance(got, Refusal)
    ring.key = AccessKey("AKID", "another", "111122223333", grants=EVERYTHING)
    assert isinstance(both(lambda: verifier.verify(signed(body, values), WALL)), Refusal)


@SIGNS
def test_a_signature_of_the_day_before():
    """Its scope is of today, and its instant was seen."""
    verifier = auth.Verifier(Ring(), None, "stand-in")
    midnight, before = Instant(WALL - 15 * 60_000_000), b"20261126T235959Z"
    for _ in range(2):
        verifier.verify(signed(b"", stamp=b"20261127T000001Z"), midnight)
    verifier._stamps[before] = midnight // 1_000_000 - 1
    assert seen(verifier, signed(b"", stamp=b"20261127T000001Z"), midnight)
    assert isinstance(both(lambda: verifier.verify(signed(b"", stamp=before), midnight)), Refusal)


@SIGNS
def test_a_signature_of_a_body_of_any_length():
    verifier = auth.Verifier(Ring(), None, "stand-in")
    for _ in range(2):
        verifier.verify(signed(b""), WALL)
    for size in range(300):
        assert seen(verifier, signed(b"b" * size, (b"h" * (size % 70 + 1), b"t")))
        assert not seen(verifier, signed(b"b" * size + b"c", (b"h", b"t"), authorization=b"0" * 200))


QUEUE, FIFO = QueueKey("111122223333", "us-east-1", "jobs"), QueueKey("111122223333", "us-east-1", "jobs.fifo")
KEY = AccessKey("AKID", "secret", "111122223333", grants=EVERYTHING)
ORIGIN = Origin("sqs", "AKID", "test")
HEADERS_OF_TRACE = {b"x-amzn-trace-id": b"Root=1"}


def asked(headers: dict[bytes, bytes]) -> Asked:
    known: Any = {"jobs": QUEUE, "jobs.fifo": FIFO}
    request = Request("POST", b"/", headers, b"", "peer", False, "id")
    return Asked(request, Caller(KEY, "us-east-1", True, ORIGIN, known), Instant(5), Endpoint())


PLAIN = st.text(string.printable.replace("\x0b", "").replace("\x0c", ""), min_size=1, max_size=400)
BODIES = st.one_of(
    PLAIN,
    PLAIN,
    PLAIN,
    st.none(),
    st.text(max_size=20),
    st.sampled_from(["\x7f", "\x00", "é", "\ufffe", "x" * 1_048_577]),
)
ODD = st.one_of(*[st.none()] * 9, st.just(True))
IDS = st.one_of(
    st.from_regex(r"[A-Za-z0-9_-]{1,80}\Z"), st.sampled_from([None, "", "a", "b", "é", "a b", "x" * 81, "a\n"])
)
VALUE = forms.AttributeValue("String", "v")


def fields(body: str | None, odd: tuple[Any, ...]) -> dict[str, Any]:
    delay, attributes, system, deduplication, group = odd
    return {
        "message_body": body,
        "delay_seconds": delay and 901,
        "message_attributes": attributes and {"a": VALUE},
        "message_system_attributes": system and {"AWSTraceHeader": VALUE},
        "message_deduplication_id": deduplication and "d",
        "message_group_id": group and "g",
    }


MESSAGES = st.builds(fields, BODIES, st.tuples(ODD, ODD, ODD, ODD, ODD))
PLAIN_MESSAGES = st.builds(fields, PLAIN, st.just((None,) * 5))
TARGETS = st.tuples(st.sampled_from(["jobs", "jobs", "jobs", "jobs.fifo"]), st.sampled_from([{}, {}, HEADERS_OF_TRACE]))


def uuid_of(number: int) -> bytes:
    return bytes(range(number, number + 16))


def sent(number: int) -> Sent:
    return Sent(uuid_of(number), number, Instant(1), Instant(1), Instant(9))


def answer(operation: str, plan: Any, outcomes: list[Outcome]) -> Response | Call:
    row = OPERATIONS[operation]
    request = Request("POST", b"/", {}, b"", "peer", False, "id")
    call = Call(operation, KEY, plan[0], row, Form.JSON, plan[1], request, Endpoint())
    ring: Any = type("Ring", (), {"checks": False, "find": lambda self, key_id: KEY})()
    return Codec(ring, Endpoint()).encode(call, outcomes)


@settings(max_examples=200)
@given(st.one_of(MESSAGES, PLAIN_MESSAGES), TARGETS)
def test_a_message_that_is_sent(given_fields, target):
    given_input = forms.SendMessageInput(**given_fields, queue_url=target[0])
    plan = both(lambda: messages.plan_send(asked(target[1]), given_input))
    if isinstance(plan, tuple):
        for outcome in (sent(7), DiskLow(free_bytes=1)):
            both(lambda outcome=outcome: answer("SendMessage", plan, [outcome]))


ENTRIES = st.one_of(
    st.lists(st.tuples(IDS, MESSAGES), max_size=11),
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), PLAIN_MESSAGES), max_size=3),
    st.lists(st.tuples(IDS, PLAIN_MESSAGES), max_size=11, unique_by=lambda entry: entry[0]),
)


@settings(max_examples=200)
@given(ENTRIES, TARGETS, st.sets(st.integers(0, 10), max_size=2))
def test_a_batch_that_is_sent(given_entries, target, failing):
    entries = [forms.SendEntry(id=name, **each) for name, each in given_entries]
    given_input = forms.SendMessageBatchInput(queue_url=target[0], entries=entries)
    plan = both(lambda: messages.plan_send_batch(asked(target[1]), given_input))
    if isinstance(plan, tuple) and plan[0]:
        outcomes = [DiskLow(free_bytes=1) if at in failing else sent(at) for at in range(len(plan[0]))]
        both(lambda: answer("SendMessageBatch", plan, outcomes))


def test_what_is_plain_is_not_left_to_python():
    entries: list[Any] = [forms.SendEntry(id=str(at), message_body="x" * at) for at in range(1, 11)]
    plan = plain.PLAIN_SENDS(entries, QUEUE, ORIGIN)
    assert [command.size_bytes for command in plan[0]] == list(range(1, 11))
    assert plain.ENTRIES_JSON(plan[1], plan[0], [sent(at) for at in range(10)]) is not None
    assert plain.PLAIN_SEND(forms.SendMessageInput(message_body="a\tb"), QUEUE, ORIGIN) is not None
    gone = plain.PLAIN_DELETES([forms.DeleteEntry(id="a", receipt_handle="h")], QUEUE, ORIGIN, 5, AfterExpiry.ALLOW)
    assert plain.ENTRIES_JSON(gone[1], gone[0], [Deleted()]) == b'{"Successful":[{"Id":"a"}]}'
    assert plain.SENT_JSON(plan[0][:1], [sent(1)]) is not None
    assert plain.RECEIVED_JSON([delivery("x")]) is not None


HANDLES = st.one_of(st.text(max_size=70), st.none(), st.just("0f" * 33))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(IDS, HANDLES), max_size=11, unique_by=lambda entry: entry[0]),
    TARGETS,
    st.sets(st.integers(0, 10), max_size=2),
)
def test_a_batch_that_is_deleted(given_entries, target, failing):
    entries = [forms.DeleteEntry(id=name, receipt_handle=handle) for name, handle in given_entries]
    given_input = forms.DeleteMessageBatchInput(queue_url=target[0], entries=entries)
    plan = both(lambda: messages.plan_delete_batch(asked(target[1]), given_input))
    if isinstance(plan, tuple) and plan[0]:
        outcomes = [MessageGone(sequence=1, attempt=1) if at in failing else Deleted() for at in range(len(plan[0]))]
        both(lambda: answer("DeleteMessageBatch", plan, outcomes))


def delivery(body: str, handle: str = "0f" * 33) -> Delivery:
    return Delivery(uuid_of(3), 1, body, uuid_of(9), NO_EXTRAS, "me", 8, Instant(1), Instant(9), 1, Instant(1), handle)


@settings(max_examples=200)
@given(st.lists(st.builds(delivery, st.text(), st.text("0af", max_size=70)), max_size=11))
@example([delivery("".join(map(chr, range(0x800))))])
def test_messages_that_are_received(deliveries):
    both(lambda: answer("ReceiveMessage", ((Receive(queue=QUEUE, origin=ORIGIN),), None), [Received(deliveries)]))


def send(body: str, **changed: Any) -> Send:
    raw = body.encode()
    values = {"queue": QUEUE, "origin": ORIGIN, "body": body, "md5": md5(raw).digest(), "size_bytes": len(raw)}
    return Send(**(values | changed))


OTHER = Origin("sqs", "AKID", "other")
OTHER_QUEUE = QueueKey("111122223333", "us-east-1", "others")

REFUSED: list[dict[str, Any]] = [
    {"origin": OTHER, "size_bytes": 1 << 30},
    {"origin": OTHER, "must_appear": True, "ttl_us": HOUR_US, "delay_us": HOUR_US},
]
ODD_FIELDS: list[dict[str, Any]] = [
    *REFUSED,
    {"origin": OTHER},
    {"queue": msgspec.structs.replace(QUEUE)},
    {"queue": OTHER_QUEUE},
    {"priority": 1},
    {"delay_us": 0},
    {"delay_us": HOUR_US},
    {"ttl_us": HOUR_US},
    *({"extras": each} for each in (Extras(), Extras(group="g"), Extras(type="t"), Extras(lease_hint_us=9))),
    {"wants_handle": True},
    {"from_xml": True},
    {"must_appear": True, "ttl_us": HOUR_US, "delay_us": HOUR_US},
]
SENDS = st.builds(
    lambda body, odd: send(body, **odd),
    st.one_of(PLAIN, st.text(max_size=9), st.sampled_from(["x" * 16_385, "é" * 9_000])),
    st.one_of(st.just({}), st.sampled_from(ODD_FIELDS)),
)


class Played:
    """A store that is played on, with ids that repeat, and what it answered."""

    def __init__(self, path: Path, shuffled: int) -> None:
        self.now = Instant(1_795_000_000_000_000)
        numbers = iter(range(1, 1 << 20))
        self._fresh = lambda: [next(numbers).to_bytes(16) for _ in range(shuffled)]
        self.store = SqliteStore(path, SMALL)
        self.said: list[Any] = []
        self.handles: list[str] = []

    def batch(self, commands: list[AnyCommand]) -> None:
        """Apply and commit it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch, "fresh_ids", self._fresh)
            applied = self.store.apply(commands, self.now)
        if applied.wrote:
            self.store.commit()
        self.said.append(applied)
        for outcome in applied.outcomes:
            if type(outcome) is Received:
                self.handles += [message.handle for message in outcome.messages]
        self.now = Instant(self.now + 1_000)

    def end(self) -> list[Any]:
        """All that it said, its memtable and its history."""
        memtable = self.store._writer.memtable
        left = [(each.row, each.lease) for each in memtable.messages.values()]
        counts = [
            memtable._bytes,
            [(queue.visible, queue.in_flight, queue.next_due) for queue in memtable.queues.values()],
        ]
        with self.store.reader.look() as view:
            events = read_events(view, 0, 1 << 20)
        self.store.close()
        return [self.said, left, counts, events]


RECEIVES = st.builds(
    lambda count, lease_us, queue: Receive(queue=queue, origin=ORIGIN, count_max=count, lease_us=lease_us),
    st.integers(1, 10),
    st.sampled_from([None, HOUR_US, 2_000, 0]),
    st.sampled_from([QUEUE, QUEUE, OTHER_QUEUE]),
)
STEPS = st.one_of(
    st.lists(SENDS, min_size=1, max_size=20), st.lists(RECEIVES, min_size=1, max_size=3), st.integers(1, 20)
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with two queues."""
    path = tmp_path_factory.mktemp("made") / "data"
    store = SqliteStore(path, SMALL)
    for queue in (QUEUE, OTHER_QUEUE):
        store.apply([CreateQueue(queue=queue, origin=ORIGIN)], Instant(1_794_000_000_000_000))
        store.commit()
    store.close()
    return path


def played(path: Path, steps: list[Any], pool: int) -> list[Any]:
    """What a copy of the directory says to the steps."""
    with tempfile.TemporaryDirectory() as home:
        playing = Played(Path(shutil.copytree(path, Path(home) / "data")), pool)
        for step in steps:
            if isinstance(step, int):
                handles, playing.handles = playing.handles[:step], playing.handles[step:]
                step = [Delete(queue=QUEUE, origin=ORIGIN, handle=each, arrived=playing.now) for each in handles]
            if step:
                playing.batch(list(step))
        return playing.end()


@settings(max_examples=40)
@given(st.lists(STEPS, min_size=1, max_size=8), st.sampled_from([1, 3, 256]))
def test_what_a_store_says(made, steps, pool):
    got = played(made, steps, pool)
    with in_python():
        assert got == played(made, steps, pool)


@pytest.mark.parametrize("refused", REFUSED)
def test_a_new_client_whose_send_is_refused_is_not_recorded(made, refused):
    (applied,), *_ = played(made, [[send("a", **refused)]], 1)
    assert type(applied.outcomes[0]) in {MessageTooLarge, ParameterInvalid}
    assert not applied.wrote


def calls() -> list[Callable[[], Any]]:
    """A call of each function in which it does its work, and one in which it leaves it to Python."""
    _, read = TWINS["read_plain"]
    request = framed(b"POST / HTTP/1.1", [b"Host: h", b"X-Amz-Date: d", b"X-Other: o"], b"{}")
    entries = [forms.SendEntry(id=str(at), message_body="x" * 500) for at in range(10)]
    odd = [*entries[:9], forms.SendEntry(id="9", message_body="\x00")]
    gone = [forms.DeleteEntry(id=str(at), receipt_handle="h" * 500) for at in range(10)]
    plan = plain.PLAIN_SENDS(entries, QUEUE, ORIGIN)
    deletes = plain.PLAIN_DELETES(gone, QUEUE, ORIGIN, Instant(5), AfterExpiry.ALLOW)
    ids = [uuid_of(number) for number in range(10)]
    shared = (QUEUE, ORIGIN, 1, 1, 1, "me", Instant(5_000), Instant(9_000), 70_000, 16_384)
    verifier = auth.Verifier(Ring(), None, "stand-in")
    two_signed = signed(b"x" * 500), signed(b"x", user_agent=b"a")
    for _ in range(2):
        verifier.verify(two_signed[0], WALL)
    return [
        lambda: read(request, LIMITS, "peer", True, str),
        lambda: read(request.replace(b"X-Other", b"Host"), LIMITS, "peer", True, str),
        *[lambda each=each: seen(verifier, each) for each in two_signed if auth._PLAIN_SCHEME],
        lambda: plain.PLAIN_SENDS(entries, QUEUE, ORIGIN),
        lambda: plain.PLAIN_SENDS(odd, QUEUE, ORIGIN),
        lambda: plain.PLAIN_SEND(forms.SendMessageInput(message_body="x" * 500), QUEUE, ORIGIN),
        lambda: plain.PLAIN_DELETES(gone, QUEUE, ORIGIN, Instant(5), AfterExpiry.ALLOW),
        lambda: plain.PLAIN_DELETES([*gone, gone[0]][1:], QUEUE, ORIGIN, Instant(5), AfterExpiry.ALLOW),
        lambda: plain.PLAIN_DELETES([gone[0], gone[0]], QUEUE, ORIGIN, Instant(5), AfterExpiry.ALLOW),
        lambda: plain.SENT_JSON(plan[0][:1], [sent(1)]),
        lambda: plain.ENTRIES_JSON(plan[1], plan[0], [sent(at) for at in range(10)]),
        lambda: plain.ENTRIES_JSON(plan[1], plan[0], [*map(sent, range(9)), None]),
        lambda: plain.ENTRIES_JSON(deletes[1], deletes[0], [Deleted()] * 10),
        lambda: plain.RECEIVED_JSON([delivery("x" * 500), delivery("é\n" * 500)]),
        lambda: plain.RECEIVED_JSON([delivery("x" * 500), None]),
        lambda: sends._PLAIN_ROWS(list(plan[0]), ids, shared),
        lambda: sends._PLAIN_ROWS([*plan[0][:5], None], ids, shared),
    ]  # fmt: skip


def test_nothing_is_kept_after_a_call():
    watched = (None, True, QUEUE, ORIGIN, NO_EXTRAS, AfterExpiry.ALLOW)
    for number, call in enumerate(calls()):
        for _ in range(3):
            call()
        before = sys.getallocatedblocks(), [sys.getrefcount(each) for each in watched]
        for _ in range(500):
            call()
        after = sys.getallocatedblocks(), [sys.getrefcount(each) for each in watched]
        assert after[0] - before[0] < 100, number
        assert all(new - old < 100 for old, new in zip(before[1], after[1], strict=True)), number


def test_a_type_in_the_place_of_one_that_is_gone_has_its_own_fields():
    """A field's place is remembered by its type's address."""
    for number in range(60):
        before = [(f"a{at}", object, None) for at in range(number % 6)]
        entry = msgspec.defstruct("Entry", [*before, *((name, object, None) for name in ("id", "refusal", "command"))])
        deleted = msgspec.defstruct("Gone", [("x", int, 0)])
        answer = accelerator.shortcut("entries_json", int, int, None, entry, deleted)
        assert answer([entry(id="abc", command=0)], (1,), [deleted()]) == b'{"Successful":[{"Id":"abc"}]}'


def test_each_message_has_an_id_of_its_own(made):
    said, *_ = played(made, [[send("a"), send("b")], [send("c")], [send("d")] * 5], 256)
    ids = [outcome.id for applied in said for outcome in applied.outcomes]
    assert len(ids) == len({*ids}) == 8
