"""What real clients of both forms ask arrives as commands, and what the engine says arrives at the clients."""

from collections.abc import Callable
from hashlib import md5
from typing import Any
from uuid import UUID

import pytest

from veilmq.model.commands import (
    AfterExpiry,
    ChangeQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    ListQueues,
    Origin,
    PurgeQueue,
    Receive,
    Send,
)
from veilmq.model.errors import MessageTooLarge, QueueMissing, ReceiptInvalid
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.messages import NO_EXTRAS, Attribute, Delivery, Extras
from veilmq.model.outcomes import (
    Deleted,
    Extended,
    Purged,
    QueueChanged,
    QueueCreated,
    QueueDeleted,
    QueueDescribed,
    QueuesListed,
    Received,
    Sent,
)
from veilmq.model.settings.queue import QueueCounts, QueueInfo, QueueKey, QueueSettings
from veilmq.protocols.sqs.limits import ANY_QUEUE_NAME
from veilmq.testing.for_each import for_each

URL = "http://127.0.0.1:9324/111122223333/jobs"
FIFO_URL = URL + ".fifo"
QUEUE = QueueKey("111122223333", "us-east-1", "jobs")
FIFO_QUEUE = QueueKey("111122223333", "us-east-1", "jobs.fifo")
ID = bytes(range(16))
SENT = Sent(ID, 42, Instant(1), Instant(1), Instant(2))
NASTY = 'tab\t line\n return\r\n <a href="x">&amp; \' ]]> \u00e9 \u2603 \U0001f600 \u0085\u2028 +%20 end '


def info(name: str = "jobs", **settings: Any) -> QueueInfo:
    key = QueueKey("111122223333", "us-east-1", name)
    counts = QueueCounts(visible=1, delayed=2, in_flight=3)
    return QueueInfo(key, 1, Instant(5_500_000), Instant(6_500_000), QueueSettings(**settings), counts)


def test_a_message_goes_out_whole(wire: Any) -> None:
    wire.answers(SENT)
    answer = wire.client.send_message(QueueUrl=URL, MessageBody=NASTY, DelaySeconds=7)
    (command,) = wire.commands
    assert command == Send(
        queue=QUEUE,
        origin=command.origin,
        body=NASTY,
        md5=md5(NASTY.encode()).digest(),
        size_bytes=len(NASTY.encode()),
        delay_us=7 * SECOND_US,
    )
    assert command.origin == Origin("sqs", "AKIDEXAMPLE", wire.requests[-1].headers[b"user-agent"].decode()[:256])
    assert answer["MD5OfMessageBody"] == md5(NASTY.encode()).hexdigest()
    assert answer["MessageId"] == str(UUID(bytes=ID))
    assert set(answer) == {"MD5OfMessageBody", "MessageId", "ResponseMetadata"}
    assert answer["ResponseMetadata"]["RequestId"] == wire.requests[-1].request_id


def test_attributes_go_out_with_their_checksums(wire: Any) -> None:
    wire.answers(SENT)
    answer = wire.client.send_message(
        QueueUrl=URL,
        MessageBody="body",
        MessageAttributes={
            "zeta": {"DataType": "Number.int", "StringValue": "-12.5e3"},
            "alpha": {"DataType": "String", "StringValue": NASTY},
            "bytes": {"DataType": "Binary.png", "BinaryValue": b"\x00\xff&"},
        },
        MessageSystemAttributes={"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988-bd862e3f"}},
        MessageGroupId="tenant-1",
    )
    (command,) = wire.commands
    assert isinstance(command, Send)
    assert sorted(command.extras.attributes, key=lambda attribute: attribute.name) == [
        Attribute("alpha", "String", NASTY),
        Attribute("bytes", "Binary.png", b"\x00\xff&"),
        Attribute("zeta", "Number.int", "-12.5e3"),
    ]
    assert (command.extras.group, command.extras.trace) == ("tenant-1", "Root=1-5759e988-bd862e3f")
    names_and_types = len("zetaNumber.intalphaStringbytesBinary.png")
    assert command.size_bytes == 4 + names_and_types + len(b"-12.5e3") + len(NASTY.encode()) + 3
    assert answer["MD5OfMessageAttributes"] == documented_md5(
        ("alpha", "String", NASTY), ("bytes", "Binary.png", b"\x00\xff&"), ("zeta", "Number.int", "-12.5e3")
    )
    trace = ("AWSTraceHeader", "String", "Root=1-5759e988-bd862e3f")
    assert answer["MD5OfMessageSystemAttributes"] == documented_md5(trace)


def documented_md5(*attributes: tuple[str, str, str | bytes]) -> str:
    """By the letter of the Developer Guide, and by no code of ours."""
    digest = md5()
    for name, kind, value in attributes:
        for part in (name.encode(), kind.encode()):
            digest.update(len(part).to_bytes(4, "big") + part)
        content = value.encode() if isinstance(value, str) else value
        mark = 1 if isinstance(value, str) else 2
        digest.update(bytes([mark]) + len(content).to_bytes(4, "big") + content)
    return digest.hexdigest()


def test_the_trace_header_counts_if_no_attribute_says_otherwise(wire: Any) -> None:
    wire.answers(SENT)
    wire.more_headers["X-Amzn-Trace-Id"] = "Root=1-header"
    answer = wire.client.send_message(QueueUrl=URL, MessageBody="body")
    assert wire.commands[0].extras.trace == "Root=1-header"
    assert "MD5OfMessageSystemAttributes" not in answer
    trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-attribute"}}
    wire.client.send_message(QueueUrl=URL, MessageBody="body", MessageSystemAttributes=trace)
    assert wire.commands[0].extras.trace == "Root=1-attribute"


def test_a_batch_is_answered_entry_by_entry(wire: Any) -> None:
    wire.answers(SENT, MessageTooLarge(size_bytes=3000, limit_bytes=2048))
    answer = wire.client.send_message_batch(
        QueueUrl=URL,
        Entries=[
            {"Id": "a", "MessageBody": "one", "MessageAttributes": {"n": {"DataType": "Number", "StringValue": "1"}}},
            {"Id": "b", "MessageBody": "\x01"},
            {"Id": "c", "MessageBody": "x" * 3000, "DelaySeconds": 0},
            {"Id": "d", "MessageBody": "late", "DelaySeconds": 901},
        ],
    )
    assert [command.body for command in wire.commands] == ["one", "x" * 3000]
    (success,) = answer["Successful"]
    assert success == {
        "Id": "a",
        "MessageId": str(UUID(bytes=ID)),
        "MD5OfMessageBody": md5(b"one").hexdigest(),
        "MD5OfMessageAttributes": documented_md5(("n", "Number", "1")),
    }
    failures = {failure["Id"]: failure for failure in answer["Failed"]}
    assert {identity: failure["Code"] for identity, failure in failures.items()} == {
        "b": "InvalidMessageContents",
        "c": "InvalidParameterValue",
        "d": "InvalidParameterValue",
    }
    assert all(failure["SenderFault"] is True for failure in failures.values())
    assert failures["c"]["Message"].endswith("Message must be shorter than 2048 bytes.")


def test_a_batch_to_a_missing_queue_fails_as_one(wire: Any) -> None:
    missing = QueueMissing(queue="jobs")
    wire.answers(missing, missing)
    entries = [{"Id": "1", "ReceiptHandle": "x"}, {"Id": "2", "ReceiptHandle": "y"}]
    with pytest.raises(wire.client.exceptions.QueueDoesNotExist):
        wire.client.delete_message_batch(QueueUrl=URL, Entries=entries)


def test_a_receive_without_wishes_is_plain(wire: Any, deliver: Callable[..., Delivery]) -> None:
    body_md5 = md5(NASTY.encode()).digest()
    wire.answers(Received([deliver(NASTY, md5=body_md5), deliver("second")]))
    answer = wire.client.receive_message(QueueUrl=URL)
    assert wire.commands == (Receive(queue=QUEUE, origin=wire.commands[0].origin, in_flight_max=120_000),)
    assert answer["Messages"] == [
        {
            "MessageId": str(UUID(bytes=ID)),
            "ReceiptHandle": "0a" * 33,
            "MD5OfBody": md5(NASTY.encode()).hexdigest(),
            "Body": NASTY,
        },
        {"MessageId": str(UUID(bytes=ID)), "ReceiptHandle": "0a" * 33, "MD5OfBody": "00" * 16, "Body": "second"},
    ]


def test_a_receive_says_how_many_how_long_and_how_patiently(wire: Any) -> None:
    wire.answers(Received([]))
    answer = wire.client.receive_message(QueueUrl=URL, MaxNumberOfMessages=10, VisibilityTimeout=0, WaitTimeSeconds=20)
    (command,) = wire.commands
    assert (command.count_max, command.lease_us, command.wait_us) == (10, 0, 20 * SECOND_US)
    assert "Messages" not in answer


EXTRAS = Extras(
    (Attribute("bar.one", "String", "1"), Attribute("bar.two", "Number", "2"), Attribute("raw", "Binary", b"\x00")),
    group="g",
    deduplication_id="d",
    trace="Root=1",
    dead_letter_source=QueueKey("111122223333", "us-east-1", "source"),
)
SYSTEM = {
    "SenderId": "AKIDEXAMPLE",
    "SentTimestamp": "1700000000123",
    "ApproximateReceiveCount": "3",
    "ApproximateFirstReceiveTimestamp": "1700000001999",
    "MessageGroupId": "g",
    "MessageDeduplicationId": "d",
    "AWSTraceHeader": "Root=1",
    "DeadLetterQueueSourceArn": "arn:aws:sqs:us-east-1:111122223333:source",
}


@for_each(
    ("asked", "shown"),
    [
        ({"AttributeNames": ["All"]}, SYSTEM),
        ({"MessageSystemAttributeNames": ["All"]}, SYSTEM),
        (
            {"AttributeNames": ["SenderId", "Policy"], "MessageSystemAttributeNames": ["MessageGroupId"]},
            {"SenderId": "AKIDEXAMPLE", "MessageGroupId": "g"},
        ),
        ({"AttributeNames": ["SequenceNumber", "Policy"]}, None),
    ],
)
def test_system_attributes_are_shown_as_asked(
    wire: Any, deliver: Callable[..., Delivery], asked: dict[str, list[str]], shown: dict[str, str] | None
) -> None:
    wire.answers(Received([deliver(extras=EXTRAS)]))
    (message,) = wire.client.receive_message(QueueUrl=URL, **asked)["Messages"]
    assert message.get("Attributes") == shown
    assert "MessageAttributes" not in message


def test_a_fifo_message_has_a_sequence_number(wire: Any, deliver: Callable[..., Delivery]) -> None:
    wire.answers(Received([deliver()]))
    answer = wire.client.receive_message(QueueUrl=FIFO_URL, AttributeNames=["All"], ReceiveRequestAttemptId="try-1")
    assert answer["Messages"][0]["Attributes"]["SequenceNumber"] == "00000000000000000012"
    assert wire.commands[0].attempt_id == "try-1"


@for_each(
    ("names", "shown"),
    [
        (["All"], ["bar.one", "bar.two", "raw"]),
        ([".*"], ["bar.one", "bar.two", "raw"]),
        (["bar.*"], ["bar.one", "bar.two"]),
        (["raw", "bar.two", "none"], ["bar.two", "raw"]),
        (["bar"], []),
        (["ba.*"], ["bar.one", "bar.two"]),
        (["bar.one.*"], ["bar.one"]),
        (["a.*"], []),
        ([], []),
    ],
)
def test_message_attributes_are_filtered(
    wire: Any, deliver: Callable[..., Delivery], names: list[str], shown: list[str]
) -> None:
    wire.answers(Received([deliver(extras=EXTRAS)]))
    (message,) = wire.client.receive_message(QueueUrl=URL, MessageAttributeNames=names)["Messages"]
    values = {
        "bar.one": {"StringValue": "1", "DataType": "String"},
        "bar.two": {"StringValue": "2", "DataType": "Number"},
        "raw": {"BinaryValue": b"\x00", "DataType": "Binary"},
    }
    assert message.get("MessageAttributes", {}) == {name: values[name] for name in shown}
    kept = [attribute for attribute in EXTRAS.attributes if attribute.name in shown]
    expected = documented_md5(*((each.name, each.type, each.value) for each in kept)) if kept else None
    assert message.get("MD5OfMessageAttributes") == expected


def test_deletes_and_extensions_arrive_with_their_rules(wire: Any) -> None:
    wire.answers(Deleted())
    wire.client.delete_message(QueueUrl=URL, ReceiptHandle="h")
    origin = wire.commands[0].origin
    assert wire.commands == (Delete(queue=QUEUE, origin=origin, handle="h", arrived=Instant(77)),)
    wire.client.delete_message(QueueUrl=FIFO_URL, ReceiptHandle="h")
    assert wire.commands[0].after_expiry is AfterExpiry.REFUSE
    wire.answers(Extended("h", Instant(9)))
    wire.client.change_message_visibility(QueueUrl=URL, ReceiptHandle="h", VisibilityTimeout=43_200)
    assert wire.commands == (
        Extend(
            queue=QUEUE,
            origin=origin,
            handle="h",
            lease_us=43_200 * SECOND_US,
            arrived=Instant(77),
            after_expiry=AfterExpiry.ALLOW,
            lease_total_us_max=43_200 * SECOND_US,
        ),
    )
    wire.client.change_message_visibility(QueueUrl=FIFO_URL, ReceiptHandle="h", VisibilityTimeout=1)
    assert wire.commands[0].after_expiry is AfterExpiry.REFUSE


def test_batches_of_deletes_and_extensions(wire: Any) -> None:
    wire.answers(Deleted(), ReceiptInvalid(reason="forged"))
    entries = [{"Id": "1", "ReceiptHandle": "x"}, {"Id": "2", "ReceiptHandle": "y"}]
    answer = wire.client.delete_message_batch(QueueUrl=URL, Entries=entries)
    assert [command.handle for command in wire.commands] == ["x", "y"]
    assert answer["Successful"] == [{"Id": "1"}]
    assert answer["Failed"] == [
        {
            "Id": "2",
            "SenderFault": True,
            "Code": "ReceiptHandleIsInvalid",
            "Message": 'The input receipt handle "y" is not a valid receipt handle.',
        }
    ]
    wire.answers(Extended("x", Instant(9)))
    entries = [
        {"Id": "1", "ReceiptHandle": "x", "VisibilityTimeout": 5},
        {"Id": "2", "ReceiptHandle": "y", "VisibilityTimeout": 43_201},
        {"Id": "3", "ReceiptHandle": "z"},
    ]
    answer = wire.client.change_message_visibility_batch(QueueUrl=URL, Entries=entries)
    assert [command.lease_us for command in wire.commands] == [5 * SECOND_US]
    assert answer["Successful"] == [{"Id": "1"}]
    assert [(each["Id"], each["Code"]) for each in answer["Failed"]] == [
        ("2", "InvalidParameterValue"),
        ("3", "MissingParameter"),
    ]


def test_a_queue_is_created_described_changed_purged_deleted(wire: Any) -> None:
    wire.answers(QueueCreated(info(), True))
    attributes = {"VisibilityTimeout": "45", "MaximumMessageSize": "2048"}
    answer = wire.client.create_queue(QueueName="jobs", Attributes=attributes, tags={"team": "blue + green"})
    origin = wire.commands[0].origin
    assert wire.commands == (
        CreateQueue(
            queue=QUEUE,
            origin=origin,
            change={
                "visibility_timeout_us": 45 * SECOND_US,
                "message_bytes_max": 2048,
                "tags": {"team": "blue + green"},
            },
            cooldown_us=60 * SECOND_US,
        ),
    )
    assert answer["QueueUrl"] == URL

    wire.answers(QueueDescribed(info()))
    assert wire.client.get_queue_url(QueueName="jobs")["QueueUrl"] == URL
    assert wire.commands == (DescribeQueue(queue=QUEUE, origin=origin),)
    answer = wire.client.get_queue_attributes(QueueUrl=URL, AttributeNames=["VisibilityTimeout", "QueueArn", "Policy"])
    assert answer["Attributes"] == {"VisibilityTimeout": "30", "QueueArn": "arn:aws:sqs:us-east-1:111122223333:jobs"}
    assert "Attributes" not in wire.client.get_queue_attributes(QueueUrl=URL)

    wire.answers(QueueChanged(info()))
    wire.client.set_queue_attributes(QueueUrl=URL, Attributes={"DelaySeconds": "3"})
    assert wire.commands == (ChangeQueue(queue=QUEUE, origin=origin, change={"delay_us": 3 * SECOND_US}),)

    wire.answers(Purged(3))
    wire.client.purge_queue(QueueUrl=URL)
    assert wire.commands == (PurgeQueue(queue=QUEUE, origin=origin, cooldown_us=60 * SECOND_US),)
    wire.answers(QueueDeleted(0))
    wire.client.delete_queue(QueueUrl=URL)
    assert wire.commands == (DeleteQueue(queue=QUEUE, origin=origin),)


def test_queues_are_listed_by_pages(wire: Any) -> None:
    wire.answers(QueuesListed([info("a"), info("b-2")], True))
    answer = wire.client.list_queues(QueueNamePrefix="x", MaxResults=2)
    origin = wire.commands[0].origin
    assert wire.commands == (
        ListQueues(
            origin=origin,
            account="111122223333",
            region="us-east-1",
            prefix="x",
            count_max=2,
            names=ANY_QUEUE_NAME,
            by_alias=False,
        ),
    )
    assert answer["QueueUrls"] == [URL.replace("jobs", "a"), URL.replace("jobs", "b-2")]
    wire.answers(QueuesListed([], False))
    last = wire.client.list_queues(MaxResults=2, NextToken=answer["NextToken"])
    assert wire.commands[0].after == "b-2"
    assert "QueueUrls" not in last
    assert "NextToken" not in last
    wire.answers(QueuesListed([info("a")], True))
    assert "NextToken" not in wire.client.list_queues()
    assert wire.commands[0].count_max == 1_000


def test_a_fifo_queue_is_carried_through(wire: Any) -> None:
    wire.answers(QueueCreated(info("jobs.fifo", fifo=True), True))
    attributes = {
        "FifoQueue": "true",
        "ContentBasedDeduplication": "true",
        "DeduplicationScope": "messageGroup",
        "FifoThroughputLimit": "perMessageGroupId",
    }
    wire.client.create_queue(QueueName="jobs.fifo", Attributes=attributes)
    (command,) = wire.commands
    assert command.queue == FIFO_QUEUE
    assert command.change == {
        "fifo": True,
        "content_deduplication": True,
        "deduplication_scope": "messageGroup",
        "throughput_per_group": True,
    }
    wire.answers(SENT)
    answer = wire.client.send_message(
        QueueUrl=FIFO_URL, MessageBody="x", MessageGroupId="g", MessageDeduplicationId="d", DelaySeconds=0
    )
    assert wire.commands[0].extras == Extras(group="g", deduplication_id="d")
    assert wire.commands[0].delay_us is None
    assert answer["SequenceNumber"] == "00000000000000000042"
    entry = {"Id": "1", "MessageBody": "x", "MessageGroupId": "g", "MessageDeduplicationId": "d"}
    (line,) = wire.client.send_message_batch(QueueUrl=FIFO_URL, Entries=[entry])["Successful"]
    assert line["SequenceNumber"] == answer["SequenceNumber"]


def test_a_plain_message_has_no_extras_of_its_own(wire: Any) -> None:
    wire.answers(SENT)
    wire.client.send_message(QueueUrl=URL, MessageBody="x")
    assert wire.commands[0].extras is NO_EXTRAS
    assert wire.commands[0].origin is wire.calls[0].commands[0].origin
    wire.client.send_message(QueueUrl=URL, MessageBody="y")
    assert wire.calls[0].commands[0].origin is wire.calls[1].commands[0].origin
