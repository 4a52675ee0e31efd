"""Each limit one step below, at, and one above, through clients of both forms.

Strategy: `around` and `span` make the three points of each bound. What needs a store, a clock or a signature has its
three in test_codec, test_in_flight, test_over_time, test_policy, test_signature and test_tags.
"""

import json
from collections.abc import Callable
from typing import Any

from veilmq.model.instant import Instant
from veilmq.model.outcomes import Deleted, Extended, QueueChanged, QueueCreated, QueuesListed, Received, Sent
from veilmq.model.settings.queue import QueueCounts, QueueInfo, QueueKey, QueueSettings
from veilmq.testing.for_each import for_each

URL = "http://127.0.0.1:9324/111122223333/jobs"
ARN = "arn:aws:sqs:us-east-1:111122223333:jobs"
FIFO_URL = URL + ".fifo"
MIB = 1_048_576
BAD = "InvalidParameterValue"
SENT = Sent(bytes(16), 1, Instant(0), Instant(0), Instant(0))
INFO = QueueInfo(
    QueueKey("111122223333", "us-east-1", "jobs"), 1, Instant(0), Instant(0), QueueSettings(), QueueCounts()
)
SEND = {"QueueUrl": URL, "MessageBody": "x"}
FIFO = {"QueueUrl": FIFO_URL, "MessageBody": "x", "MessageGroupId": "g"}
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def attribute(name: str = "a", kind: str = "String", value: str = "v") -> dict[str, Any]:
    return {**SEND, "MessageAttributes": {name: {"DataType": kind, "StringValue": value}}}


def span(lowest: int, highest: int) -> list[tuple[int, bool]]:
    """Both bounds of a range, each one step below, at and above; and whether that is in it."""
    return [
        (value, lowest <= value <= highest)
        for value in sorted({bound + step for bound in (lowest, highest) for step in (-1, 0, 1)})
    ]


def numbers(method: str, arguments: dict[str, Any], member: str, lowest: int, highest: int) -> list[Any]:
    """Cases of an integer member."""
    return [
        (method, {**arguments, member: value}, "ok" if inside else BAD)
        for value, inside in (*span(lowest, highest), (10**30, False), (-(10**30), False))
    ]


def around(method: str, most: int, code: str, make: Callable[[int], dict[str, Any]]) -> list[Any]:
    """Cases of a size or count: one below the most, the most, and one above, which is refused with the code."""
    return [(method, make(most + step), "ok" if step <= 0 else code) for step in (-1, 0, 1)]


def texts(method: str, arguments: dict[str, Any], member: str, characters: int) -> list[Any]:
    """Cases of a text that is too long by one character."""
    return around(method, characters, BAD, lambda count: {**arguments, member: "a" * count})


def attributes(count: int) -> dict[str, Any]:
    return {**SEND, "MessageAttributes": {str(n): {"DataType": "String", "StringValue": "v"} for n in range(count)}}


def trace(value: str, kind: str = "String") -> dict[str, Any]:
    return {**SEND, "MessageSystemAttributes": {"AWSTraceHeader": {"DataType": kind, "StringValue": value}}}


def fifo(characters: int) -> dict[str, Any]:
    name = "a" * (characters - len(".fifo")) + ".fifo"
    return {"QueueName": name, "Attributes": {"FifoQueue": "true"}}


def setting(name: str, value: str | dict[str, Any]) -> dict[str, Any]:
    """Of SetQueueAttributes."""
    return {"QueueUrl": URL, "Attributes": {name: value if isinstance(value, str) else json.dumps(value)}}


def policy(count: int = 1, **changes: Any) -> dict[str, Any]:
    statement = {"Effect": "Allow", "Principal": "*", "Action": "sqs:SendMessage", "Resource": ARN, **changes}
    return setting("Policy", {"Statement": [statement] * count})


def policy_bytes(size: int) -> dict[str, Any]:
    """A policy of so many bytes, one of its characters two of them."""
    short = '{"Id":"\u00e9","Statement":[]}'
    return setting("Policy", short.replace("\u00e9", "\u00e9" + "x" * (size - len(short.encode()))))


BATCHES: dict[str, dict[str, Any]] = {
    "send_message_batch": {"MessageBody": "x"},
    "delete_message_batch": {"ReceiptHandle": "h"},
    "change_message_visibility_batch": {"ReceiptHandle": "h", "VisibilityTimeout": 1},
}
"""Batch operation -> what an entry has besides its id."""


def batch(method: str, *ids: str) -> dict[str, Any]:
    return {"QueueUrl": URL, "Entries": [{"Id": identity, **BATCHES[method]} for identity in ids]}


def sized(total_bytes: int) -> dict[str, Any]:
    """Ten entries of so many bytes together."""
    sizes = [total_bytes // 10] * 9 + [total_bytes - total_bytes // 10 * 9]
    return {"QueueUrl": URL, "Entries": [{"Id": str(n), "MessageBody": "x" * size} for n, size in enumerate(sizes)]}


TOO_MANY = "AWS.SimpleQueueService.TooManyEntriesInBatchRequest"
BAD_ID = "AWS.SimpleQueueService.InvalidBatchEntryId"
CASES: list[tuple[str, dict[str, Any], str]] = [
    *numbers("send_message", SEND, "DelaySeconds", 0, 900),
    *numbers("receive_message", {"QueueUrl": URL}, "MaxNumberOfMessages", 1, 10),
    *numbers("receive_message", {"QueueUrl": URL}, "VisibilityTimeout", 0, 43_200),
    *numbers("receive_message", {"QueueUrl": URL}, "WaitTimeSeconds", 0, 20),
    *numbers("change_message_visibility", {"QueueUrl": URL, "ReceiptHandle": "h"}, "VisibilityTimeout", 0, 43_200),
    *numbers("list_queues", {}, "MaxResults", 1, 1_000),
    *texts("create_queue", {}, "QueueName", 80),
    *texts("send_message", {"QueueUrl": URL}, "MessageBody", MIB),
    *texts("send_message", SEND, "MessageGroupId", 128),
    *texts("send_message", FIFO, "MessageDeduplicationId", 128),
    *texts("receive_message", {"QueueUrl": FIFO_URL}, "ReceiveRequestAttemptId", 128),
    ("send_message", {**SEND, "MessageGroupId": PUNCTUATION}, "ok"),
    ("send_message", {**SEND, "MessageGroupId": "a b"}, BAD),
    ("send_message", {**SEND, "MessageGroupId": "\u00e9"}, BAD),
    *around(
        "send_message",
        MIB,
        BAD,
        lambda size: {"QueueUrl": URL, "MessageBody": "\u00e9" * (size // 2) + "x" * (size % 2)},
    ),
    *around("send_message", MIB, BAD, lambda size: {**attribute(), "MessageBody": "x" * (size - len("aStringv"))}),
    ("create_queue", fifo(5), BAD),
    ("create_queue", fifo(6), "ok"),
    ("create_queue", fifo(7), "ok"),
    *around("create_queue", 80, BAD, fifo),
    *around("create_queue", 50, BAD, lambda count: {"QueueName": "a", "tags": {str(n): "v" for n in range(count)}}),
    *around("create_queue", 128, BAD, lambda count: {"QueueName": "a", "tags": {"k" * count: "v"}}),
    *around("create_queue", 256, BAD, lambda count: {"QueueName": "a", "tags": {"k": "v" * count}}),
    *around("send_message", 10, BAD, attributes),
    *around("send_message", 256, BAD, lambda count: attribute("n" * count)),
    ("send_message", attribute("a.b-c_d"), "ok"),
    *[
        ("send_message", attribute(name), BAD)
        for name in (".a", "a.", "a..b", "a b", "a:b", "\u00d7", "\u2028", "AWS.a", "amazon.a", "Aws.")
    ],
    *around("send_message", 256, BAD, lambda count: attribute("\u00e9" * count)),
    *[("send_message", attribute(name), "ok") for name in ("\u00c9t\u00e9.\u4e2d\u6587", "\U00010400", "a\u0301")],
    *around(
        "send_message",
        MIB,
        BAD,
        lambda size: {**attribute("\u00e9"), "MessageBody": "x" * (size - len("\u00e9Stringv".encode()))},
    ),
    ("send_message", attribute("awsome"), "ok"),
    *around("send_message", 256, BAD, lambda count: attribute(kind="String.".ljust(count, "t"))),
    *[("send_message", attribute(kind=kind), BAD) for kind in ("string", "Text", "StringList", "")],
    ("send_message", attribute(value=""), BAD),
    ("send_message", attribute(value="\x00"), BAD),
    *around("send_message", 38, BAD, lambda count: attribute(kind="Number", value="9" * count)),
    *around("send_message", 126, BAD, lambda exponent: attribute(kind="Number", value=f"1e{exponent}")),
    *around("send_message", 128, BAD, lambda exponent: attribute(kind="Number", value=f"1E-{exponent}")),
    *[
        ("send_message", attribute(kind="Number", value=value), "ok")
        for value in ("0", "-1.5", "+.5", "5.", "0." + "0" * 50 + "1", "1" + "0" * 100, "000" + "9" * 38)
    ],
    *[
        ("send_message", attribute(kind="Number", value=value), BAD)
        for value in ("", "x", "1,5", "NaN", "inf", "0x1", "1_0", " 1", "\u0661", ".", "1" * 600)
    ],
    ("send_message", {**SEND, "MessageAttributes": {"a": {"DataType": "Binary", "StringValue": "v"}}}, BAD),
    ("send_message", {**SEND, "MessageAttributes": {"a": {"DataType": "String", "BinaryValue": b"v"}}}, BAD),
    (
        "send_message",
        {**SEND, "MessageAttributes": {"a": {"DataType": "String", "StringValue": "v", "StringListValues": ["v"]}}},
        "AWS.SimpleQueueService.UnsupportedOperation",
    ),
    ("send_message", {**SEND, "MessageSystemAttributes": {"Other": {"DataType": "String", "StringValue": "v"}}}, BAD),
    ("send_message", trace("1", kind="Number"), BAD),
    *around("send_message", 1_024, BAD, lambda count: trace("v" * count)),
    *[
        case
        for method in BATCHES
        for case in (
            *around(method, 10, TOO_MANY, lambda count, method=method: batch(method, *map(str, range(count)))),
            *around(method, 80, BAD_ID, lambda count, method=method: batch(method, "a" * count)),
        )
    ],
    *around("send_message_batch", MIB, "AWS.SimpleQueueService.BatchRequestTooLong", sized),
    *[
        (
            "set_queue_attributes",
            setting("RedrivePolicy", {"deadLetterTargetArn": ARN + "-dead", "maxReceiveCount": count}),
            "ok" if inside else BAD,
        )
        for count, inside in span(1, 1_000)
    ],
    *[
        (
            "set_queue_attributes",
            setting("RedriveAllowPolicy", {"redrivePermission": "byQueue", "sourceQueueArns": [ARN] * count}),
            "ok" if inside else BAD,
        )
        for count, inside in span(1, 10)
    ],
    *around("set_queue_attributes", 2_048, "InvalidAttributeValue", lambda size: setting("KmsMasterKeyId", "k" * size)),
    *around("set_queue_attributes", 8_192, "OverLimit", policy_bytes),
    *around("set_queue_attributes", 20, "OverLimit", policy),
    *around("set_queue_attributes", 7, "OverLimit", lambda count: policy(Action=["sqs:SendMessage"] * count)),
    *around("set_queue_attributes", 50, "OverLimit", lambda count: policy(Principal={"AWS": ["111122223333"] * count})),
    *around(
        "set_queue_attributes",
        10,
        "OverLimit",
        lambda count: policy(Condition={"StringEquals": {f"aws:Key{number}": "x" for number in range(count)}}),
    ),
]
OUTCOMES = {
    "send_message": [SENT],
    "send_message_batch": [SENT] * 10,
    "delete_message_batch": [Deleted()] * 10,
    "change_message_visibility_batch": [Extended("h", Instant(0))] * 10,
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


@for_each("form", ["json", "query"])
@for_each("method", sorted({case[0] for case in CASES}))
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


@for_each("name", NUMBERS)
def test_queue_attributes_have_ranges(wire: Any, name: str) -> None:
    lowest, highest = NUMBERS[name]
    for text, code in [
        *((str(value), "ok" if inside else "InvalidAttributeValue") for value, inside in span(lowest, highest)),
        *[(text, "InvalidAttributeValue") for text in ("", "x", "1.5", " 1", "1e2", "\u0661\u0661", "9" * 5000, "+61")],
    ]:
        arguments = {"QueueUrl": URL, "Attributes": {name: text}}
        assert (text[:20], outcome(wire, "set_queue_attributes", arguments)) == (text[:20], code)
