"""Each limit one below, at, and one above, through clients of both forms."""

from typing import Any

import pytest

from veilmq.model.instant import Instant
from veilmq.model.outcomes import Extended, QueueChanged, QueueCreated, QueuesListed, Received, Sent
from veilmq.model.queue import QueueCounts, QueueInfo, QueueKey, QueueSettings

URL = "http://127.0.0.1:9324/111122223333/jobs"
FIFO_URL = URL + ".fifo"
MIB = 1_048_576
SENT = Sent(bytes(16), 1, Instant(0), Instant(0), Instant(0))
INFO = QueueInfo(
    QueueKey("111122223333", "us-east-1", "jobs"), 1, Instant(0), Instant(0), QueueSettings(), QueueCounts()
)
SEND = {"QueueUrl": URL, "MessageBody": "x"}
FIFO = {"QueueUrl": FIFO_URL, "MessageBody": "x", "MessageGroupId": "g"}
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def attribute(name: str = "a", kind: str = "String", value: str = "v") -> dict[str, Any]:
    return {**SEND, "MessageAttributes": {name: {"DataType": kind, "StringValue": value}}}


def ranges(name: str, lowest: int, highest: int) -> list[tuple[str, str]]:
    return [
        (str(value), "ok" if lowest <= value <= highest else name)
        for value in (lowest - 1, lowest, highest, highest + 1)
    ]


def numbers(method: str, arguments: dict[str, Any], member: str, lowest: int, highest: int) -> list[Any]:
    """Cases of an integer member."""
    values = (lowest - 1, lowest, highest, highest + 1)
    return [
        (method, {**arguments, member: value}, "ok" if lowest <= value <= highest else "InvalidParameterValue")
        for value in (*values, 10**30, -(10**30))
    ]


def texts(
    method: str, arguments: dict[str, Any], member: str, characters: int, code: str, text: str = "a"
) -> list[Any]:
    """Cases of a text that is too long by one character."""
    return [
        (method, {**arguments, member: text * count}, "ok" if count <= characters else code)
        for count in (characters - 1, characters, characters + 1)
    ]


def entries(count: int) -> list[dict[str, str]]:
    return [{"Id": str(number), "MessageBody": "x"} for number in range(count)]


def sized(total_bytes: int) -> dict[str, Any]:
    """Ten entries of so many bytes together."""
    sizes = [total_bytes // 10] * 9 + [total_bytes - total_bytes // 10 * 9]
    return {"QueueUrl": URL, "Entries": [{"Id": str(n), "MessageBody": "x" * size} for n, size in enumerate(sizes)]}


BAD = "InvalidParameterValue"
CASES = [
    *numbers("send_message", SEND, "DelaySeconds", 0, 900),
    *numbers("receive_message", {"QueueUrl": URL}, "MaxNumberOfMessages", 1, 10),
    *numbers("receive_message", {"QueueUrl": URL}, "VisibilityTimeout", 0, 43_200),
    *numbers("receive_message", {"QueueUrl": URL}, "WaitTimeSeconds", 0, 20),
    *numbers("change_message_visibility", {"QueueUrl": URL, "ReceiptHandle": "h"}, "VisibilityTimeout", 0, 43_200),
    *numbers("list_queues", {}, "MaxResults", 1, 1_000),
    *texts("create_queue", {}, "QueueName", 80, BAD),
    *texts("send_message", {"QueueUrl": URL}, "MessageBody", MIB, BAD),
    *texts("send_message", SEND, "MessageGroupId", 128, BAD),
    *texts("send_message", FIFO, "MessageDeduplicationId", 128, BAD),
    *texts("receive_message", {"QueueUrl": FIFO_URL}, "ReceiveRequestAttemptId", 128, BAD),
    ("send_message", {**SEND, "MessageGroupId": PUNCTUATION}, "ok"),
    ("send_message", {**SEND, "MessageGroupId": "a b"}, BAD),
    ("send_message", {**SEND, "MessageGroupId": "\u00e9"}, BAD),
    ("send_message", {"QueueUrl": URL, "MessageBody": "\u00e9" * (MIB // 2)}, "ok"),
    ("send_message", {"QueueUrl": URL, "MessageBody": "\u00e9" * (MIB // 2) + "x"}, BAD),
    ("send_message", {**attribute(), "MessageBody": "x" * (MIB - 8)}, "ok"),
    ("send_message", {**attribute(), "MessageBody": "x" * (MIB - 7)}, BAD),
    ("create_queue", {"QueueName": "a" * 75 + ".fifo", "Attributes": {"FifoQueue": "true"}}, "ok"),
    ("create_queue", {"QueueName": "a" * 76 + ".fifo", "Attributes": {"FifoQueue": "true"}}, BAD),
    ("create_queue", {"QueueName": ".fifo", "Attributes": {"FifoQueue": "true"}}, BAD),
    ("create_queue", {"QueueName": "a", "tags": {str(n): "v" for n in range(50)}}, "ok"),
    ("create_queue", {"QueueName": "a", "tags": {str(n): "v" for n in range(51)}}, BAD),
    ("create_queue", {"QueueName": "a", "tags": {"k" * 128: "v" * 256}}, "ok"),
    ("create_queue", {"QueueName": "a", "tags": {"k" * 129: "v"}}, BAD),
    ("create_queue", {"QueueName": "a", "tags": {"k": "v" * 257}}, BAD),
    (
        "send_message",
        {**SEND, "MessageAttributes": {str(n): {"DataType": "String", "StringValue": "v"} for n in range(10)}},
        "ok",
    ),
    (
        "send_message",
        {**SEND, "MessageAttributes": {str(n): {"DataType": "String", "StringValue": "v"} for n in range(11)}},
        BAD,
    ),
    ("send_message", attribute("n" * 256), "ok"),
    ("send_message", attribute("n" * 257), BAD),
    ("send_message", attribute("a.b-c_d"), "ok"),
    *[
        ("send_message", attribute(name), BAD)
        for name in (".a", "a.", "a..b", "a b", "\u00e9", "AWS.a", "amazon.a", "Aws.")
    ],
    ("send_message", attribute("awsome"), "ok"),
    ("send_message", attribute(kind="String." + "t" * 249), "ok"),
    ("send_message", attribute(kind="String." + "t" * 250), BAD),
    *[("send_message", attribute(kind=kind), BAD) for kind in ("string", "Text", "StringList", "")],
    ("send_message", attribute(value=""), BAD),
    ("send_message", attribute(value="\x00"), "InvalidMessageContents"),
    *[
        ("send_message", attribute(kind="Number", value=value), "ok")
        for value in (
            "0",
            "-1.5",
            "+.5",
            "5.",
            "1e126",
            "1E-128",
            "9" * 38,
            "0." + "0" * 50 + "1",
            "1" + "0" * 100,
            "000" + "9" * 38,
        )
    ],
    *[
        ("send_message", attribute(kind="Number", value=value), BAD)
        for value in (
            "",
            "x",
            "1e127",
            "1e-129",
            "9" * 39,
            "1,5",
            "NaN",
            "inf",
            "0x1",
            "1_0",
            " 1",
            "\u0661",
            ".",
            "1" * 600,
        )
    ],
    ("send_message", {**SEND, "MessageAttributes": {"a": {"DataType": "Binary", "StringValue": "v"}}}, BAD),
    ("send_message", {**SEND, "MessageAttributes": {"a": {"DataType": "String", "BinaryValue": b"v"}}}, BAD),
    (
        "send_message",
        {**SEND, "MessageAttributes": {"a": {"DataType": "String", "StringValue": "v", "StringListValues": ["v"]}}},
        BAD,
    ),
    ("send_message", {**SEND, "MessageSystemAttributes": {"Other": {"DataType": "String", "StringValue": "v"}}}, BAD),
    (
        "send_message",
        {**SEND, "MessageSystemAttributes": {"AWSTraceHeader": {"DataType": "Number", "StringValue": "1"}}},
        BAD,
    ),
    (
        "send_message",
        {**SEND, "MessageSystemAttributes": {"AWSTraceHeader": {"DataType": "String", "StringValue": "v" * 1024}}},
        "ok",
    ),
    (
        "send_message",
        {**SEND, "MessageSystemAttributes": {"AWSTraceHeader": {"DataType": "String", "StringValue": "v" * 1025}}},
        BAD,
    ),
    ("send_message_batch", {"QueueUrl": URL, "Entries": entries(10)}, "ok"),
    (
        "send_message_batch",
        {"QueueUrl": URL, "Entries": entries(11)},
        "AWS.SimpleQueueService.TooManyEntriesInBatchRequest",
    ),
    ("send_message_batch", sized(MIB), "ok"),
    ("send_message_batch", sized(MIB + 1), "AWS.SimpleQueueService.BatchRequestTooLong"),
    ("send_message_batch", {"QueueUrl": URL, "Entries": [{"Id": "a" * 80, "MessageBody": "x"}]}, "ok"),
    (
        "send_message_batch",
        {"QueueUrl": URL, "Entries": [{"Id": "a" * 81, "MessageBody": "x"}]},
        "AWS.SimpleQueueService.InvalidBatchEntryId",
    ),
]
OUTCOMES = {
    "send_message": [SENT],
    "send_message_batch": [SENT] * 10,
    "receive_message": [Received([])],
    "change_message_visibility": [Extended("h", Instant(0))],
    "create_queue": [QueueCreated(INFO, True)],
    "set_queue_attributes": [QueueChanged(INFO)],
    "list_queues": [QueuesListed([], False)],
}


def outcome(wire: Any, method: str, arguments: dict[str, Any]) -> str:
    count = len(arguments.get("Entries", [0]))
    wire.answers(*OUTCOMES[method][:count])
    try:
        getattr(wire.client, method)(**arguments)
    except wire.client.exceptions.ClientError as error:
        answer = error.response
    else:
        return "ok"
    assert 400 <= answer["ResponseMetadata"]["HTTPStatusCode"] < 500
    return str(answer["Error"]["Code"])


@pytest.mark.parametrize("form", ["json", "query"])
@pytest.mark.parametrize("method", sorted({case[0] for case in CASES}))
def test_limits_are_kept_to_the_byte(make_wire: Any, form: str, method: str) -> None:
    wire = make_wire(form)
    wrong = []
    for name, arguments, code in CASES:
        if name == method:
            got = outcome(wire, method, arguments)
            # A number that no integer holds does not get as far as the limit in the JSON form.
            if got != code and not (form == "json" and code == BAD and got == "MalformedInput"):
                wrong.append((str(arguments)[:200], code, got))
    assert not wrong


NUMBERS = {
    "VisibilityTimeout": (0, 43_200),
    "DelaySeconds": (0, 900),
    "MessageRetentionPeriod": (60, 1_209_600),
    "ReceiveMessageWaitTimeSeconds": (0, 20),
    "MaximumMessageSize": (1_024, 1_048_576),
    "KmsDataKeyReusePeriodSeconds": (60, 86_400),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_queue_attributes_have_ranges(wire: Any, name: str) -> None:
    lowest, highest = NUMBERS[name]
    for text, code in [
        *ranges("InvalidAttributeValue", lowest, highest),
        *[(text, "InvalidAttributeValue") for text in ("", "x", "1.5", " 1", "1e2", "\u0661\u0661", "9" * 5000, "+61")],
    ]:
        arguments = {"QueueUrl": URL, "Attributes": {name: text}}
        assert (text[:20], outcome(wire, "set_queue_attributes", arguments)) == (text[:20], code)
