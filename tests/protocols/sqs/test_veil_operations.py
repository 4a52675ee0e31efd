"""The VeilMQ operations: what the house's own client signs and sends arrives as commands, and outcomes come back typed.

The requests are those that the client's own signer makes, parsed as the listener parses them.
"""

from typing import Any

import msgspec
import pytest

from veilmq.client.adapters.service_errors import Refusal, error_of
from veilmq.client.adapters.veil.calls import Signer, failure_of, received_of
from veilmq.model.commands import (
    AfterExpiry,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    Origin,
    Peek,
    PurgeQueue,
    Receive,
    Send,
)
from veilmq.model.errors import ParameterInvalid, QueueMissing, VeilError, leaves
from veilmq.model.instant import DAY_US, SECOND_US, Instant
from veilmq.model.messages import WORKING, Attribute, Delivery, Extras
from veilmq.model.outcomes import (
    Deleted,
    Extended,
    Purged,
    QueueCreated,
    QueueDeleted,
    QueueDescribed,
    Received,
    Sent,
)
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.model.settings.queue import QueueCounts, QueueInfo, QueueKey, QueueSettings, RedrivePolicy
from veilmq.protocols import Request, Response
from veilmq.protocols.sqs import veil
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint
from veilmq.protocols.sqs.operations.message_attributes import body_md5
from veilmq.protocols.sqs.veil.operations import VEIL_OPERATIONS
from veilmq.testing.for_each import for_each

KEY = AccessKey("AKIDEXAMPLE", "a secret", "111122223333", grants=EVERYTHING)
QUEUE = QueueKey(KEY.account, "us-east-1", "jobs")
FIFO = QueueKey(KEY.account, "us-east-1", "jobs.fifo")
WALL_S = 1_800_000_000
ARRIVED = Instant(5 * SECOND_US)
SENT = Sent(bytes(range(16)), 42, Instant(1), Instant(1), Instant(2), "ab" * 33)
LINE = {"Id": "00010203-0405-0607-0809-0a0b0c0d0e0f", "Handle": "ab" * 33}


class Ring:
    """One key."""

    checks = True

    def find(self, key_id: str) -> AccessKey | None:
        return KEY if key_id == KEY.id else None


class Stopped:
    """A clock that stands still."""

    def wall(self) -> float:
        return float(WALL_S)

    def monotonic(self) -> float:
        return 0.0


def parsed(raw: bytes) -> Request:
    """What the listener makes of it."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    method, target, _ = first.split(b" ")
    headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
    return Request(method.decode(), target, headers, body, "127.0.0.1", False, "0" * 36)


class Door:
    """A codec, and requests signed by the client."""

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        self.codec = Codec(Ring(), endpoint or Endpoint())
        self.signer = Signer("queues.example:9324", KEY.id, KEY.secret, "us-east-1", None, Stopped())

    def ask(self, target: str, given: Any) -> Call | Response:
        raw = given if isinstance(given, bytes) else msgspec.json.encode(given)
        request = parsed(self.signer.request(target.encode(), raw))
        return self.codec.decode(request, Instant(WALL_S * SECOND_US), ARRIVED)

    def call(self, name: str, given: Any) -> Call:
        asked = self.ask(f"VeilMQ.{name}", given)
        assert isinstance(asked, Call), asked
        return asked

    def refusal(self, name: str, given: Any) -> tuple[int, str, str]:
        """(status, shape, message)."""
        asked = self.ask(f"VeilMQ.{name}", given)
        assert isinstance(asked, Response), asked
        body = msgspec.json.decode(asked.body)
        return asked.status, body["__type"].rpartition("#")[2], body["message"]

    def answer(self, name: str, given: Any, *outcomes: Any) -> Any:
        response = self.codec.encode(self.call(name, given), outcomes)
        assert response.status == 200, response
        return msgspec.json.decode(response.body)


@pytest.fixture
def door() -> Door:
    return Door()


ORIGIN = Origin("sqs", KEY.id, "")


def send_of(body: str, **more: Any) -> Send:
    raw = body.encode()
    values = {"md5": body_md5(raw), "size_bytes": len(raw), "origin": ORIGIN, "queue": QUEUE, **more}
    return Send(body=body, **values)


def without_client(command: Any) -> Any:
    """The user agent has its own test."""
    if hasattr(command, "origin"):
        command.origin = ORIGIN
    return command


ATTRIBUTES = {
    "n": {"DataType": "Number", "StringValue": "1.5"},
    "s": {"DataType": "String.mine", "StringValue": "é"},
    "b": {"DataType": "Binary", "BinaryValue": "AP8="},
}
EVERYTHING_OF_A_MESSAGE = {
    "Body": "all ☃",
    "Attributes": ATTRIBUTES,
    "Delay": 604_800,
    "TimeToLive": 0.5,
    "Priority": 1,
    "Group": "tenant",
    "Type": "resize",
    "LeaseHint": 2.25,
    "Tag": "blue",
}
STORED_ATTRIBUTES = (
    Attribute("n", "Number", "1.5"),
    Attribute("s", "String.mine", "é"),
    Attribute("b", "Binary", b"\x00\xff"),
)
COMMANDS = [
    ("Send", {"Queue": "jobs", "Messages": [{"Body": "x"}]}, [send_of("x")]),
    (
        "Send",
        {"Queue": "jobs", "Messages": [{"Body": "x"}, {"Body": "tab\t\r\n é"}], "WantHandles": True},
        [send_of("x", wants_handle=True), send_of("tab\t\r\n é", wants_handle=True)],
    ),
    (
        "Send",
        {"Queue": "jobs", "Messages": [EVERYTHING_OF_A_MESSAGE]},
        [
            send_of(
                "all ☃",
                size_bytes=7 + (1 + 6 + 3) + (1 + 11 + 2) + (1 + 6 + 2),
                delay_us=7 * DAY_US,
                ttl_us=SECOND_US // 2,
                priority=1,
                extras=Extras(
                    attributes=STORED_ATTRIBUTES, group="tenant", type="resize", tag="blue", lease_hint_us=2_250_000
                ),
            )
        ],
    ),
    (
        "Send",
        {"Queue": "jobs.fifo", "Messages": [{"Body": "x", "Group": "g", "DeduplicationId": "d", "Delay": 0}]},
        [send_of("x", queue=FIFO, extras=Extras(group="g", deduplication_id="d"))],
    ),
    ("Receive", {"Queue": "jobs"}, [Receive(queue=QUEUE, origin=ORIGIN)]),
    (
        "Receive",
        {"Queue": "111122223333/jobs", "CountMax": 64, "Lease": 0.25, "Wait": 60},
        [Receive(queue=QUEUE, origin=ORIGIN, count_max=64, lease_us=250_000, wait_us=60 * SECOND_US)],
    ),
    (
        "Extend",
        {"Queue": "jobs", "Entries": [{"Handle": "h", "Lease": 604_800}, {"Handle": "i", "Lease": 0, "Body": "new"}]},
        [
            Extend(
                queue=QUEUE, origin=ORIGIN, handle="h", lease_us=7 * DAY_US, arrived=ARRIVED,
                after_expiry=AfterExpiry.ALLOW, report=WORKING,
            ),
            Extend(
                queue=QUEUE, origin=ORIGIN, handle="i", lease_us=0, arrived=ARRIVED, body="new",
                md5=body_md5(b"new"), size_bytes=3, after_expiry=AfterExpiry.ALLOW, report=WORKING,
            ),
        ],
    ),
    (
        "Extend",
        {"Queue": "jobs.fifo", "Entries": [{"Handle": "h", "Lease": 1}]},
        [
            Extend(
                queue=FIFO, origin=ORIGIN, handle="h", lease_us=SECOND_US, arrived=ARRIVED,
                after_expiry=AfterExpiry.REFUSE, report=WORKING,
            ),
        ],
    ),
    (
        "Delete",
        {"Queue": "jobs", "Handles": ["h"]},
        [Delete(queue=QUEUE, origin=ORIGIN, handle="h", arrived=ARRIVED, after_expiry=AfterExpiry.ALLOW)],
    ),
    (
        "Delete",
        {"Queue": "jobs.fifo", "Handles": ["h"]},
        [Delete(queue=FIFO, origin=ORIGIN, handle="h", arrived=ARRIVED, after_expiry=AfterExpiry.REFUSE)],
    ),
    ("Peek", {"Queue": "jobs", "CountMax": 3}, [Peek(queue=QUEUE, origin=ORIGIN, count_max=3)]),
    ("DescribeQueue", {"Queue": "jobs"}, [DescribeQueue(queue=QUEUE, origin=ORIGIN)]),
    ("DeleteQueue", {"Queue": "jobs"}, [DeleteQueue(queue=QUEUE, origin=ORIGIN)]),
    ("PurgeQueue", {"Queue": "jobs"}, [PurgeQueue(queue=QUEUE, origin=ORIGIN, cooldown_us=60 * SECOND_US)]),
    (
        "CreateQueue",
        {"QueueName": "jobs", "Attributes": {"DelaySeconds": "5"}},
        [CreateQueue(queue=QUEUE, origin=ORIGIN, change={"delay_us": 5 * SECOND_US}, cooldown_us=60 * SECOND_US)],
    ),
]  # fmt: skip


@for_each(("name", "given", "commands"), COMMANDS, ids=lambda value: value if type(value) is str else "")
def test_a_request_becomes_commands(door: Door, name: str, given: Any, commands: list[Any]) -> None:
    assert [without_client(each) for each in door.call(name, given).commands] == commands


def test_every_operation_is_in_the_list_above() -> None:
    assert {name for name, _, _ in COMMANDS} == set(VEIL_OPERATIONS)


def test_the_client_is_named_in_the_origin(door: Door) -> None:
    (command,) = door.call("Peek", {"Queue": "jobs"}).commands
    assert command.origin.principal == KEY.id
    assert command.origin.client.startswith("veilmq/")


def test_no_cooldown_where_the_server_has_none() -> None:
    (command,) = Door(Endpoint(cooldowns=False)).call("PurgeQueue", {"Queue": "jobs"}).commands
    assert command.cooldown_us == 0


WRONG_MESSAGES = [
    ({}, "Body"),
    ({"Body": ""}, "Body"),
    ({"Body": "nul\u0000"}, "Body"),
    ({"Body": "\uffff"}, "Body"),
    ({"Body": "x", "Delay": -0.1}, "Delay"),
    ({"Body": "x", "Delay": 604_800.1}, "Delay"),
    ({"Body": "x", "Delay": 1e300}, "Delay"),
    ({"Body": "x", "TimeToLive": 0}, "TimeToLive"),
    ({"Body": "x", "TimeToLive": 1e-7}, "TimeToLive"),
    ({"Body": "x", "TimeToLive": 1_209_601}, "TimeToLive"),
    ({"Body": "x", "Priority": 0}, "Priority"),
    ({"Body": "x", "Priority": 17}, "Priority"),
    ({"Body": "x", "Group": ""}, "Group"),
    ({"Body": "x", "Group": "a b"}, "Group"),
    ({"Body": "x", "DeduplicationId": "d"}, "DeduplicationId"),
    ({"Body": "x", "Type": ""}, "Type"),
    ({"Body": "x", "Type": "t" * 257}, "Type"),
    ({"Body": "x", "Type": "\u0001"}, "Type"),
    ({"Body": "x", "Tag": ""}, "Tag"),
    ({"Body": "x", "LeaseHint": 0}, "LeaseHint"),
    ({"Body": "x", "LeaseHint": 604_801}, "LeaseHint"),
    ({"Body": "x", "Attributes": {"a": {"DataType": "Number", "StringValue": "one"}}}, "Attributes"),
    ({"Body": "x", "Attributes": {"AWS.a": {"DataType": "String", "StringValue": "one"}}}, "Attributes"),
    (
        {"Body": "x", "Attributes": {f"a{i}": {"DataType": "String", "StringValue": "1"} for i in range(11)}},
        "Attributes",
    ),
]
WRONG_FIFO_MESSAGES = [
    ({"Body": "x"}, "Group"),
    ({"Body": "x", "Group": "g", "Delay": 1}, "Delay"),
    ({"Body": "x", "Group": "g", "Priority": 8}, "Priority"),
    ({"Body": "x", "Group": "g", "DeduplicationId": ""}, "DeduplicationId"),
]


@for_each(
    ("queue", "message", "parameter"),
    [("jobs", *each) for each in WRONG_MESSAGES] + [("jobs.fifo", *each) for each in WRONG_FIFO_MESSAGES],
)
def test_what_is_wrong_with_a_message_is_its_own_matter(
    door: Door, queue: str, message: dict[str, Any], parameter: str
) -> None:
    good = {"Body": "good", "Group": "g"}
    given = {"Queue": queue, "Messages": [good, message, good]}
    assert [command.body for command in door.call("Send", given).commands] == ["good", "good"]
    first, second, third = door.answer("Send", given, SENT, SENT)["Results"]
    assert first == third
    assert "Error" not in first
    assert second["Error"]["Name"] == "ParameterInvalid"
    assert second["Error"]["Fields"]["parameter"] == parameter
    assert second["Error"]["Fields"]["reason"]
    assert parameter in second["Error"]["Message"]


def test_a_message_too_large_is_told_with_both_sizes(door: Door) -> None:
    given = {"Queue": "jobs", "Messages": [{"Body": "é" * 524_289}]}
    asked = door.ask("VeilMQ.Send", given)
    assert isinstance(asked, Call)
    (question,) = asked.commands  # nothing is left to ask the engine, but whether there is the queue
    assert isinstance(question, DescribeQueue)
    missing = door.codec.encode(asked, [QueueMissing(queue="jobs")])
    assert isinstance(missing, Response)
    assert b"QueueDoesNotExist" in missing.body
    info = QueueInfo(QUEUE, 7, Instant(0), Instant(0), QueueSettings(), QueueCounts())
    answer = door.codec.encode(asked, [QueueDescribed(info)])
    assert isinstance(answer, Response)
    (line,) = msgspec.json.decode(answer.body)["Results"]
    assert line["Error"]["Name"] == "MessageTooLarge"
    assert line["Error"]["Fields"] == {"size_bytes": 1_048_578, "limit_bytes": 1_048_576}


@pytest.mark.parametrize("body", ["", "\u0001"])
def test_a_new_body_is_checked_as_a_sent_one_is(door: Door, body: str) -> None:
    given = {"Queue": "jobs", "Entries": [{"Handle": "h", "Lease": 1, "Body": body}, {"Handle": "h", "Lease": 1}]}
    (failure,) = door.answer("Extend", given, Extended("h", Instant(0)))["Failures"]
    assert failure["Index"] == 0
    assert failure["Error"]["Fields"]["parameter"] == "Body"


WRONG_EXTENSIONS = [
    ({"Lease": 1}, "Handle"),
    ({"Handle": "", "Lease": 1}, "Handle"),
    ({"Handle": "h"}, "Lease"),
    ({"Handle": "h", "Lease": -1}, "Lease"),
    ({"Handle": "h", "Lease": 604_801}, "Lease"),
]


@for_each(("entry", "parameter"), WRONG_EXTENSIONS)
def test_what_is_wrong_with_an_extension_is_its_own_matter(door: Door, entry: dict[str, Any], parameter: str) -> None:
    given = {"Queue": "jobs", "Entries": [{"Handle": "h", "Lease": 1}, entry]}
    (failure,) = door.answer("Extend", given, Extended("h", Instant(0)))["Failures"]
    assert failure["Index"] == 1
    assert failure["Error"]["Fields"]["parameter"] == parameter


def test_an_empty_handle_is_told(door: Door) -> None:
    (failure,) = door.answer("Delete", {"Queue": "jobs", "Handles": ["h", ""]}, Deleted())["Failures"]
    assert (failure["Index"], failure["Error"]["Name"]) == (1, "ParameterInvalid")


NO_QUEUE = (400, "MissingRequiredParameterException", "The request must contain the parameter Queue.")
REFUSED = [
    *((name, {}, *NO_QUEUE[1:]) for name in ("Receive", "Peek", "DescribeQueue", "DeleteQueue", "PurgeQueue")),
    ("Send", {"Messages": [{"Body": "x"}]}, *NO_QUEUE[1:]),
    ("Send", {"Queue": "jobs"}, "MissingRequiredParameterException", "Messages"),
    ("Send", {"Queue": "jobs", "Messages": []}, "MissingRequiredParameterException", "Messages"),
    ("Send", {"Queue": "jobs", "Messages": [{"Body": "x"}] * 257}, "InvalidParameterValueException", "at most 256"),
    ("Send", {"Queue": "jobs", "Messages": [{"Body": "x" * 600_000}] * 2}, "BatchRequestTooLong", "1200000 bytes"),
    ("Send", {"Queue": "jobs", "Messages": [{"Body": 5}]}, "SerializationException", "Messages[0].Body"),
    ("Send", {"Queue": "a b", "Messages": [{"Body": "x"}]}, "QueueDoesNotExist", "does not exist"),
    (
        "Send",
        {"Queue": "222222222222/jobs", "Messages": [{"Body": "x"}]},
        "AccessDeniedException",
        "no resource-based policy",
    ),
    ("Peek", {"Queue": "1/jobs"}, "QueueDoesNotExist", "does not exist"),
    ("Extend", {"Queue": "jobs"}, "MissingRequiredParameterException", "Entries"),
    ("Extend", {"Queue": "jobs", "Entries": [{}] * 257}, "InvalidParameterValueException", "at most 256"),
    ("Delete", {"Queue": "jobs"}, "MissingRequiredParameterException", "Handles"),
    ("Delete", {"Queue": "jobs", "Handles": ["h"] * 257}, "InvalidParameterValueException", "at most 256"),
    ("Receive", {"Queue": "jobs", "CountMax": 0}, "InvalidParameterValueException", "CountMax"),
    ("Receive", {"Queue": "jobs", "CountMax": 65}, "InvalidParameterValueException", "CountMax"),
    ("Receive", {"Queue": "jobs", "Lease": -1}, "InvalidParameterValueException", "Lease"),
    ("Receive", {"Queue": "jobs", "Lease": 604_801}, "InvalidParameterValueException", "Lease"),
    ("Receive", {"Queue": "jobs", "Wait": 60.5}, "InvalidParameterValueException", "Wait"),
    ("Receive", {"Queue": "jobs", "Wait": "5"}, "SerializationException", "Wait"),
    ("Peek", {"Queue": "jobs", "CountMax": 65}, "InvalidParameterValueException", "CountMax"),
    ("DescribeQueue", b"{", "SerializationException", "JSON"),
    ("CreateQueue", {"QueueName": "a b"}, "InvalidParameterValueException", "alphanumeric"),
    ("Fly", {}, "UnknownOperationException", "VeilMQ.Fly"),
]


@for_each(("name", "given", "shape", "text"), REFUSED)
def test_what_is_wrong_with_a_request_refuses_it(door: Door, name: str, given: Any, shape: str, text: str) -> None:
    status, found, message = door.refusal(name, given)
    assert found == shape
    assert status == (403 if shape == "AccessDeniedException" else 400)
    assert text in message


def test_what_a_later_client_says_is_ignored(door: Door) -> None:
    assert door.call("Receive", {"Queue": "jobs", "Plan": {"of": "tomorrow"}}).commands


@for_each("name", sorted(set(VEIL_OPERATIONS) - {"CreateQueue", "DeleteQueue", "PurgeQueue"}))
def test_they_are_no_operations_of_sqs(door: Door, name: str) -> None:
    asked = door.ask(f"AmazonSQS.{name}", {"Queue": "jobs"})
    assert isinstance(asked, Response)
    assert b"not valid for this endpoint" in asked.body


def test_a_changed_byte_breaks_the_signature(door: Door) -> None:
    raw = door.signer.request(b"VeilMQ.Peek", b'{"Queue":"jobs"}')
    for changed in (raw.replace(b'"jobs"', b'"jobz"'), raw.replace(b"VeilMQ.Peek", b"VeilMQ.Send")):
        response = door.codec.decode(parsed(changed), Instant(WALL_S * SECOND_US), ARRIVED)
        assert isinstance(response, Response)
        assert b"InvalidSignatureException" in response.body


def test_temporary_credentials_sign_their_token() -> None:
    temporary = AccessKey("ASIA", "s", KEY.account, grants=EVERYTHING, session_token="to/ken+=")

    class TokenRing(Ring):
        def find(self, key_id: str) -> AccessKey | None:
            return temporary

    codec = Codec(TokenRing(), Endpoint())
    for token, expected in (("to/ken+=", Call), ("other", Response), (None, Response)):
        signer = Signer("h:1", "ASIA", "s", "us-east-1", token, Stopped())
        asked = codec.decode(
            parsed(signer.request(b"VeilMQ.Peek", b'{"Queue":"jobs"}')), Instant(WALL_S * SECOND_US), ARRIVED
        )
        assert type(asked) is expected


# Answers.


def sample(leaf: type[VeilError]) -> VeilError:
    return leaf(**{name: 7 if leaf.__annotations__[name] is int else "some text" for name in leaf.fields})


@for_each("leaf", [leaf for leaf in leaves() if leaf is not QueueMissing], ids=lambda leaf: leaf.__name__)
def test_an_entrys_error_reaches_the_client_whole(door: Door, leaf: type[VeilError]) -> None:
    error = sample(leaf)
    given = {"Queue": "jobs", "Messages": [{"Body": "x"}, {"Body": "y"}]}
    _, line = door.answer("Send", given, SENT, error)["Results"]
    assert failure_of(msgspec.convert(line["Error"], veil.Failure)) == error
    (failed,) = door.answer("Delete", {"Queue": "jobs", "Handles": ["h", "i"]}, Deleted(), error)["Failures"]
    assert failed["Index"] == 1
    assert failure_of(msgspec.convert(failed["Error"], veil.Failure)) == error


@for_each(
    ("name", "given"),
    [
        ("Send", {"Queue": "jobs", "Messages": [{"Body": "x"}]}),
        ("Receive", {"Queue": "jobs"}),
        ("Extend", {"Queue": "jobs", "Entries": [{"Handle": "h", "Lease": 1}]}),
        ("Delete", {"Queue": "jobs", "Handles": ["h"]}),
        ("Peek", {"Queue": "jobs"}),
        ("DescribeQueue", {"Queue": "jobs"}),
        ("DeleteQueue", {"Queue": "jobs"}),
        ("PurgeQueue", {"Queue": "jobs"}),
    ],
)
def test_a_missing_queue_is_the_whole_requests_matter(door: Door, name: str, given: Any) -> None:
    response = door.codec.encode(door.call(name, given), [QueueMissing(queue="jobs")])
    assert response.status == 400
    code = dict(response.headers)[b"x-amzn-query-error"].decode().partition(";")[0]
    said = Refusal(code, 400, "", "", "jobs")
    assert error_of(said) == QueueMissing(queue="jobs")


def test_a_send_is_answered_by_line(door: Door) -> None:
    twice = Sent(SENT.id, 43, Instant(1), Instant(1), Instant(2), duplicate=True)
    given = {"Queue": "jobs.fifo", "Messages": [{"Body": "x", "Group": "g"}] * 2}
    assert door.answer("Send", given, SENT, twice)["Results"] == [
        {**LINE, "SequenceNumber": 42},
        {"Id": LINE["Id"], "SequenceNumber": 43, "Duplicate": True},
    ]
    assert door.answer("Send", {"Queue": "jobs", "Messages": [{"Body": "x"}]}, SENT)["Results"] == [LINE]


def test_what_was_done_needs_no_words(door: Door) -> None:
    given = {"Queue": "jobs", "Entries": [{"Handle": "h", "Lease": 1}]}
    assert door.answer("Extend", given, Extended("h", Instant(0))) == {}
    assert door.answer("Delete", {"Queue": "jobs", "Handles": ["h"]}, Deleted()) == {}
    assert door.answer("Receive", {"Queue": "jobs"}, Received([])) == {}


def delivery(**more: Any) -> Delivery:
    values: dict[str, Any] = {
        "id": SENT.id,
        "sequence": 42,
        "body": "hello",
        "md5": bytes(16),
        "extras": Extras(),
        "sender": "me",
        "priority": 8,
        "sent": Instant(1_500_000),
        "expires": Instant(9_000_000),
        "receive_count": 2,
        "first_received": Instant(2_500_000),
        "handle": "cd" * 33,
        "due": Instant(ARRIVED + 40 * SECOND_US),
        "lease_us": 30 * SECOND_US,
    }
    return Delivery(**{**values, **more})


def test_a_receive_tells_all_there_is(door: Door) -> None:
    extras = Extras(
        attributes=STORED_ATTRIBUTES,
        group="g",
        deduplication_id="d",
        type="resize",
        tag="blue",
        dead_letter_source=QUEUE,
        dead_receives=3,
        error_type="ValueError",
        error="bad zip",
    )
    received = Received([delivery(extras=extras)], waited_us=10 * SECOND_US)
    answer = door.answer("Receive", {"Queue": "jobs.fifo", "CountMax": 2}, received)
    message = {
        "Id": LINE["Id"],
        "Body": "hello",
        "Sent": 1.5,
        "Expires": 9.0,
        "Handle": "cd" * 33,
        "Lease": 30.0,
        "ReceiveCount": 2,
        "FirstReceived": 2.5,
        "SequenceNumber": 42,
        "Attributes": ATTRIBUTES,
        "Group": "g",
        "DeduplicationId": "d",
        "Type": "resize",
        "Tag": "blue",
        "DeadLetterSource": "jobs",
        "DeadLetterReceives": 3,
        "LastError": {"Type": "ValueError", "Text": "bad zip"},
    }
    assert answer == {"Messages": [message], "Waited": 10.0}
    wire = msgspec.convert(answer, veil.MessagesResult)
    received = received_of(wire.messages[0], 1_000 + wire.waited, None)
    assert received.lease_end == 1_040
    assert received.attributes == {"n": 1.5, "s": "é", "b": b"\x00\xff"}


def test_a_plain_message_is_short(door: Door) -> None:
    (message,) = door.answer("Receive", {"Queue": "jobs"}, Received([delivery()]))["Messages"]
    assert set(message) == {"Id", "Body", "Sent", "Expires", "Handle", "Lease", "ReceiveCount", "FirstReceived"}


def test_a_peek_shows_no_handle(door: Door) -> None:
    peeked = delivery(handle="", due=None, lease_us=None, receive_count=0, first_received=None, priority=3)
    (message,) = door.answer("Peek", {"Queue": "jobs"}, Received([peeked]))["Messages"]
    assert message == {"Id": LINE["Id"], "Body": "hello", "Sent": 1.5, "Expires": 9.0, "Priority": 3}


def test_a_queue_is_described(door: Door) -> None:
    settings = QueueSettings(redrive=RedrivePolicy(QueueKey(KEY.account, "us-east-1", "dead"), 5), tags={"a": "b"})
    info = QueueInfo(QUEUE, 7, Instant(1_500_000), Instant(2_500_000), settings, QueueCounts(1, 2, 3))
    assert door.answer("DescribeQueue", {"Queue": "jobs"}, QueueDescribed(info)) == {
        "Name": "jobs",
        "Account": KEY.account,
        "Region": "us-east-1",
        "Incarnation": 7,
        "Created": 1.5,
        "Modified": 2.5,
        "Visible": 1,
        "Delayed": 2,
        "InFlight": 3,
        "VisibilityTimeout": 30.0,
        "Delay": 0.0,
        "Retention": 345_600.0,
        "Wait": 0.0,
        "MessageBytesMax": 1_048_576,
        "DeadLetterQueue": "dead",
        "ReceiveCountMax": 5,
        "Tags": {"a": "b"},
    }
    created = QueueCreated(info, True)
    assert door.answer("CreateQueue", {"QueueName": "jobs"}, created) == {"Created": True, "Incarnation": 7}
    assert door.answer("PurgeQueue", {"Queue": "jobs"}, Purged(3)) == {"Count": 3}
    assert door.answer("DeleteQueue", {"Queue": "jobs"}, QueueDeleted(4)) == {"Count": 4}


@for_each(
    ("field", "member"),
    [("deduplication_id", "DeduplicationId"), ("group", "Group"), ("delay_us", "Delay"), ("ttl_us", "TimeToLive")],
)
def test_what_the_store_refuses_is_named_as_the_member(door: Door, field: str, member: str) -> None:
    refused = ParameterInvalid(parameter=field, reason="no")
    (line,) = door.answer("Send", {"Queue": "jobs.fifo", "Messages": [{"Body": "x", "Group": "g"}]}, refused)["Results"]
    assert line["Error"]["Fields"] == {"parameter": member, "reason": "no"}
    assert line["Error"]["Message"] == f"{member}: no"
