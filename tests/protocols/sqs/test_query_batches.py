"""A batch in the Query form is read in one step if it is plain, and a plain answer is written in one: as the long way
does it."""

from typing import Any
from urllib.parse import quote, quote_plus, urlencode

from hypothesis import given
from hypothesis import strategies as st
from tests.protocols.sqs.conftest import Ring

from veilmq.model.errors import StoreFailed
from veilmq.model.instant import Instant
from veilmq.model.messages import NO_EXTRAS, Delivery
from veilmq.model.outcomes import Deleted, Outcome, Received, Sent
from veilmq.protocols import Request
from veilmq.protocols.sqs.call import Call
from veilmq.protocols.sqs.codec import Codec, Endpoint
from veilmq.protocols.sqs.errors import MALFORMED_QUERY_STRING, Refusal
from veilmq.protocols.sqs.forms import query_answers, query_batches, query_form
from veilmq.testing.for_each import for_each

URL = "http://localhost:9324/000000000000/jobs"
MEMBERS = {"SendMessageBatch": "MessageBody", "DeleteMessageBatch": "ReceiptHandle"}
ODD = ['"', "\\", "\\u0041", "%", "%4", "%zz", "%C3%A9", "%ff", "+", "=", "&", "é", "\t", "\n", "\x00", "", "null", "<"]
INJECTED = [
    'a","QueueUrl":"b',
    'a","SendMessageBatchRequestEntry.1.Id":"b',
    'a","DeleteMessageBatchRequestEntry.2.Id":"b',
]
VALUES = st.one_of(
    st.sampled_from([*ODD, *INJECTED]),
    st.text(max_size=9),
    st.lists(st.sampled_from([*ODD, "a", " ", "9"]), max_size=4).map("".join),
)
ENCODERS = [quote, quote_plus, lambda text: quote(text, safe=""), lambda text: text]
CHANGES = ["", "", "", "drop", "double", "drop double", "drop add", "drop drop", "drop drop add add", "swap", "add"]


def pairs_of(draw: st.DrawFn, action: str) -> list[tuple[str, str]]:
    """A batch: in most of them a parameter is missing, or another one there, or one twice, or in another place."""
    start, member = f"{action}RequestEntry.", MEMBERS[action]
    odd, value = draw(st.integers(1, 11)), draw(VALUES)
    pairs = [("QueueUrl", draw(st.sampled_from([URL, URL, ""])))]
    for number in range(1, draw(st.integers(1, 11)) + 1):
        pairs += [(f"{start}{number}.Id", str(number)), (f"{start}{number}.{member}", value if number == odd else "x")]
    for change in draw(st.sampled_from(CHANGES)).split():
        at = draw(st.integers(0, len(pairs) - 1))
        if change == "drop":
            del pairs[at]
        elif change == "double":
            pairs.append(pairs[at])
        elif change == "swap":
            pairs.reverse()
        else:
            name = draw(st.sampled_from([f"{start}1.DelaySeconds", f"{start}3.Id", "Entries", "x", "", "Action"]))
            pairs.insert(at, (name, value))
    return pairs


@st.composite
def forms(draw: st.DrawFn) -> bytes:
    action = draw(st.sampled_from(sorted(MEMBERS)))
    version = draw(st.sampled_from(["2012-11-05", "2011-10-01", "1999-01-01"]))
    encode = draw(st.sampled_from(ENCODERS))
    pairs = [f"{name}={encode(value)}" for name, value in pairs_of(draw, action)]
    text = "&".join([f"Action={action}", f"Version={version}", *pairs]) + draw(st.sampled_from(["", "", "", "&", "&x"]))
    return text.encode("utf-8", "surrogatepass")


def outcome_of(form: bytes, *, plain: bool) -> Any:
    request = Request("POST", b"/000000000000/jobs", {}, form, "::1", False, "the-id")
    try:
        if plain:
            return query_form.read(request, Endpoint())
        return query_form._read(form, request, Endpoint())
    except Refusal as refusal:
        return refusal.fault, refusal.message


SENDS = f"Action=SendMessageBatch&Version=2012-11-05&QueueUrl={quote(URL)}"
ENTRY = "&SendMessageBatchRequestEntry.{0}.Id={0}&SendMessageBatchRequestEntry.{0}.MessageBody="
FIRST, SECOND = ENTRY.format(1), ENTRY.format(2)
ODD_FORMS = [
    SENDS + FIRST + 'a","QueueUrl":"b',
    SENDS + FIRST + "\\u0041",
    SENDS + FIRST + "%C3%A9",
    SENDS + FIRST + "é",
    (SENDS + FIRST).encode() + b"\xff",
    (SENDS + FIRST + "%").encode() + b"\x80",
    SENDS + FIRST + "a=b",
    SENDS + FIRST + "%4",
    SENDS + FIRST + "a&SendMessageBatchRequestEntry.1.Id=2",
    SENDS + FIRST + "a&SendMessageBatchRequestEntry.2.Id=2&SendMessageBatchRequestEntry.3.MessageBody=b",
    SENDS + FIRST + "a&SendMessageBatchRequestEntry.3.Id=3",
    SENDS + FIRST + "a&SendMessageBatchRequestEntry.2.Id=2",
    SENDS + SECOND + "a",
    SENDS + "".join(ENTRY.format(number) + "a" for number in range(1, 12)),
    SENDS,
    SENDS + "&",
    SENDS.partition("&QueueUrl")[0] + FIRST + "a",
    SENDS.partition("&Version")[0] + FIRST + "a",
    "Action=SendMessageBatch&Version=2012-11-05",
    "Action=SendMessageBatch&",
]


@for_each("form", ODD_FORMS)
def test_an_odd_batch_is_read_pair_by_pair(form: str | bytes) -> None:
    raw = form.encode() if isinstance(form, str) else form
    assert query_batches.read_batch(raw) is None
    assert outcome_of(raw, plain=True) == outcome_of(raw, plain=False)


def test_what_takes_long_to_read_is_refused_before() -> None:
    fault, text = outcome_of(b"Action=SendMessage&MessageBody=" + b"%" * 10_001, plain=True)
    assert (fault, "percent signs" in text) == (MALFORMED_QUERY_STRING, True)
    assert outcome_of(b"Action=SendMessage&MessageBody=" + b"%41" * 10_001, plain=True)[1].message_body == "A" * 10_001


@given(forms())
def test_a_batch_is_read_in_one_step_as_pair_by_pair(form: bytes) -> None:
    assert outcome_of(form, plain=True) == outcome_of(form, plain=False)


def test_what_the_sdks_send_is_plain_and_what_is_odd_is_not() -> None:
    body = '{"a": [1, "x+y=z&%"], "\\n": "\\\\"}'
    members = [("QueueUrl", URL)]
    members += [(f"SendMessageBatchRequestEntry.{n}.{m}", body) for n in range(1, 11) for m in ("Id", "MessageBody")]
    plain = f"Action=SendMessageBatch&Version=2012-11-05&{urlencode(members)}"
    for count in (1, 10):
        row, found = query_batches.read_batch(plain.encode().rsplit(b"&", 20 - 2 * count)[0]) or (None, None)
        assert row is not None
        assert [(each.id, each.message_body) for each in found.entries] == [(body, body)] * count
    for odd in ["&x=y", "&SendMessageBatchRequestEntry.1.Id=1", "&SendMessageBatchRequestEntry.11.Id=1", "é", "%C3%A9"]:
        assert query_batches.read_batch((plain + odd).encode()) is None, odd


BATCH = "SendMessageBatchRequestEntry."
ASKED = {
    "SendMessage": "MessageBody=a",
    "SendMessage with attributes": "MessageBody=a&MessageAttribute.1.Name=n&MessageAttribute.1.Value.DataType=String"
    "&MessageAttribute.1.Value.StringValue=v",
    "SendMessageBatch": f"{BATCH}1.Id=a&{BATCH}1.MessageBody=a&{BATCH}2.Id=b&{BATCH}2.MessageBody=b",
    "SendMessageBatch that is partly refused": f"{BATCH}1.Id=a&{BATCH}1.MessageBody=a&{BATCH}2.Id=b",
    "ReceiveMessage": "MaxNumberOfMessages=2",
    "ReceiveMessage with attributes": "AttributeName.1=All",
    "DeleteMessageBatch that is partly refused": "DeleteMessageBatchRequestEntry.1.Id=a"
    "&DeleteMessageBatchRequestEntry.1.ReceiptHandle=h&DeleteMessageBatchRequestEntry.2.Id=b",
    "DeleteMessageBatch": "&".join(
        f"DeleteMessageBatchRequestEntry.{n}.{m}=h" for n in (1, 2) for m in ("Id", "ReceiptHandle")
    ).replace("2.Id=h", "2.Id=i"),
}


@given(st.sampled_from(sorted(ASKED)), st.lists(VALUES, max_size=2), st.booleans())
def test_a_plain_answer_is_written_in_one_step_as_from_its_result(asked: str, bodies: list[str], fails: bool) -> None:
    codec, at = Codec(Ring({}, checks=False), Endpoint()), Instant(0)
    action = asked.partition(" ")[0]
    form = f"Action={action}&Version=2012-11-05&QueueUrl={quote(URL)}&{ASKED[asked]}"
    call = codec.decode(Request("POST", b"/", {}, form.encode(), "::1", False, "the-id"), at, at)
    assert isinstance(call, Call)
    bodies = ["a&b<c>\rd", *bodies]
    came = [Delivery(bytes(16), 1, text, bytes(16), NO_EXTRAS, "me", 8, at, at, 1, at, "h") for text in bodies]
    right = {"Send": Sent(b"0123456789abcdef", 1, at, at, at), "Receive": Received(came), "Delete": Deleted()}
    outcomes: list[Outcome] = [right[type(command).__name__] for command in call.commands]
    if fails:
        outcomes[-1] = StoreFailed(reason="full")
    written = query_answers.write_plain(call, outcomes, ())
    assert (written is None) == (fails or " " in asked)
    if written is not None:
        result = call.row.answer(call, outcomes)
        assert not isinstance(result, Call)
        assert written == query_answers.write(action, result, call.form, "the-id", ())
