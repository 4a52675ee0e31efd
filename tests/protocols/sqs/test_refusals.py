"""What a request gets wrong is refused before the engine, with AWS's code and words, through clients of both forms."""

from typing import Any

import pytest

from veilmq.protocols.sqs.errors import MALFORMED_INPUT, QUERY_WORDS, Refusal
from veilmq.protocols.sqs.forms import json_form
from veilmq.testing.for_each import for_each

URL = "http://127.0.0.1:9324/111122223333/jobs"
FIFO_URL = URL + ".fifo"
HANDLE = {"QueueUrl": URL, "ReceiptHandle": "a handle"}
SEND = {"QueueUrl": URL, "MessageBody": "x"}
ENTRY = {"Id": "1", "MessageBody": "x"}
FORBIDDEN = (
    "Invalid binary character '{}' was found in the {}, the set of allowed characters is #x9 | #xA | #xD | "
    "[#x20-#xD7FF] | [#xE000-#xFFFD] | [#x10000-#x10FFFF]."
)


def attribute(name: str = "a", **value: Any) -> dict[str, Any]:
    return {**SEND, "MessageAttributes": {name: {"DataType": "String", **value}}}


REFUSED = [
    ("send_message", {"QueueUrl": URL}, "MissingParameter", "The request must contain the parameter MessageBody."),
    (
        "send_message",
        {"QueueUrl": "jobs/1", "MessageBody": "x"},
        "AWS.SimpleQueueService.NonExistentQueue",
        "The specified queue does not exist.",
    ),
    (
        "send_message",
        {"QueueUrl": URL + "!", "MessageBody": "x"},
        "AWS.SimpleQueueService.NonExistentQueue",
        "The specified queue does not exist.",
    ),
    (
        "send_message",
        {**SEND, "MessageBody": "a\x0bb"},
        "InvalidMessageContents",
        FORBIDDEN.format("#xB", "message body"),
    ),
    (
        "send_message",
        {**SEND, "MessageBody": "\uffff"},
        "InvalidMessageContents",
        FORBIDDEN.format("#xFFFF", "message body"),
    ),
    (
        "send_message",
        attribute(StringValue="v\x1f"),
        "InvalidParameterValue",
        FORBIDDEN.format("#x1F", "message attribute 'a' value"),
    ),
    (
        "send_message",
        attribute(DataType="String.\x01", StringValue="v"),
        "InvalidParameterValue",
        FORBIDDEN.format("#x1", "message attribute 'a' type"),
    ),
    (
        "send_message",
        attribute("a b", StringValue="v"),
        "InvalidParameterValue",
        (
            "Invalid non-alphanumeric character '#x20' was found in the message attribute name. Can only include "
            "alphanumeric characters, hyphens, underscores, or dots."
        ),
    ),
    (
        "send_message",
        attribute(".a", StringValue="v"),
        "InvalidParameterValue",
        "Invalid message attribute name starting with character '.' was found.",
    ),
    (
        "send_message",
        attribute("a.", StringValue="v"),
        "InvalidParameterValue",
        "Invalid message attribute name ending with character '.' was found.",
    ),
    (
        "send_message",
        attribute("a..b", StringValue="v"),
        "InvalidParameterValue",
        "Message attribute name can not have successive '.' character.",
    ),
    (
        "send_message",
        attribute(DataType="Binary.gif", StringValue="v"),
        "InvalidParameterValue",
        "The message attribute 'a' with type 'Binary.gif' must use field 'Binary'.",
    ),
    (
        "send_message",
        attribute(BinaryValue=b"v"),
        "InvalidParameterValue",
        "The message attribute 'a' with type 'String' must use field 'String'.",
    ),
    (
        "send_message",
        attribute(StringValue="v", BinaryValue=b"v"),
        "InvalidParameterValue",
        "Message attribute 'a' has multiple values.",
    ),
    (
        "send_message",
        {**SEND, "MessageDeduplicationId": "d"},
        "InvalidParameterValue",
        (
            "Value d for parameter MessageDeduplicationId is invalid. Reason: The request include parameter that "
            "is not valid for this queue type."
        ),
    ),
    (
        "send_message",
        {"QueueUrl": FIFO_URL, "MessageBody": "x"},
        "MissingParameter",
        "The request must contain the parameter MessageGroupId.",
    ),
    (
        "send_message",
        {"QueueUrl": FIFO_URL, "MessageBody": "x", "MessageGroupId": "g", "DelaySeconds": 1},
        "InvalidParameterValue",
        (
            "Value 1 for parameter DelaySeconds is invalid. Reason: The request include parameter that is not "
            "valid for this queue type."
        ),
    ),
    (
        "receive_message",
        {"QueueUrl": URL, "AttributeNames": ["Nonsense"]},
        "InvalidAttributeName",
        "Unknown Attribute Nonsense.",
    ),
    ("delete_message", {"QueueUrl": URL}, "MissingParameter", "The request must contain the parameter MessageHandle."),
    (
        "change_message_visibility",
        HANDLE,
        "MissingParameter",
        "The request must contain the parameter VisibilityTimeout.",
    ),
    (
        "send_message_batch",
        {"QueueUrl": URL, "Entries": []},
        "AWS.SimpleQueueService.EmptyBatchRequest",
        "There should be at least one SendMessageBatchRequestEntry in the request.",
    ),
    (
        "send_message_batch",
        {"QueueUrl": URL, "Entries": [ENTRY, ENTRY]},
        "AWS.SimpleQueueService.BatchEntryIdsNotDistinct",
        "Id 1 repeated.",
    ),
    (
        "send_message_batch",
        {"QueueUrl": URL, "Entries": [{"MessageBody": "x"}]},
        "MissingParameter",
        "The request must contain the parameter SendMessageBatchRequestEntry.1.Id.",
    ),
    *[
        (
            method,
            {"QueueUrl": URL, "Entries": [{"Id": entry_id, **entry}]},
            "AWS.SimpleQueueService.InvalidBatchEntryId",
            (
                "A batch entry id can only contain alphanumeric characters, hyphens and underscores. It can be at most "
                "80 letters long."
            ),
        )
        for method, entry_id, entry in (
            ("send_message_batch", "", {"MessageBody": "x"}),
            ("delete_message_batch", "", {"ReceiptHandle": "x"}),
            ("delete_message_batch", "a b", {"ReceiptHandle": "x"}),
            ("change_message_visibility_batch", "", {"ReceiptHandle": "x", "VisibilityTimeout": 1}),
        )
    ],
    *[
        (
            method,
            {},
            "InvalidParameterValue",
            "Value for parameter QueueName is invalid. Reason: Must specify a queue name.",
        )
        for method in ("create_queue", "get_queue_url")
    ],
    (
        "create_queue",
        {"QueueName": "a.b"},
        "InvalidParameterValue",
        "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length",
    ),
    (
        "create_queue",
        {"QueueName": "a.fifo"},
        "InvalidParameterValue",
        "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length",
    ),
    (
        "create_queue",
        {"QueueName": "a", "Attributes": {"FifoQueue": "true"}},
        "InvalidParameterValue",
        (
            "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, must end "
            "with .fifo suffix and be 1 to 80 in length."
        ),
    ),
    (
        "create_queue",
        {"QueueName": "a", "Attributes": {"FifoQueue": "false"}},
        "InvalidAttributeName",
        "Unknown Attribute FifoQueue.",
    ),
    ("list_queues", {"NextToken": "%%%"}, "InvalidParameterValue", "Invalid or expired next token."),
    (
        "get_queue_attributes",
        {"QueueUrl": URL, "AttributeNames": ["Nonsense"]},
        "InvalidAttributeName",
        "Unknown Attribute Nonsense.",
    ),
    (
        "set_queue_attributes",
        {"QueueUrl": URL, "Attributes": {}},
        "MissingParameter",
        "The request must contain the parameter Attribute.Name.",  # pulumi/pulumi-aws #5677
    ),
]


@for_each(("method", "arguments", "code", "message"), REFUSED, ids=[f"{case[0]}-{n}" for n, case in enumerate(REFUSED)])
def test_what_is_wrong_is_named(
    make_wire: Any, form: str, method: str, arguments: dict[str, Any], code: str, message: str
) -> None:
    wire = make_wire(form)
    with pytest.raises(wire.client.exceptions.ClientError) as caught:
        getattr(wire.client, method)(**arguments)
    error = caught.value.response["Error"]
    assert (error["Code"], error["Message"]) == (
        code,
        QUERY_WORDS.get(message, message) if form == "query" else message,
    )
    assert not wire.calls


@pytest.fixture(params=["json", "query"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


NO_STRING = "NUMBER_VALUE can not be converted to a String"
NO_INTEGER = "STRING_VALUE can not be converted to an Integer"


@for_each(
    ("target", "body", "words"),
    [
        (b"AmazonSQS.ReceiveMessage", b'{"VisibilityTimeout":"30"}', NO_INTEGER + " - at `$.VisibilityTimeout`"),
        (b"AmazonSQS.SendMessage", b'{"DelaySeconds":""}', NO_INTEGER + " - at `$.DelaySeconds`"),
        (b"AmazonSQS.SendMessageBatch", b'{"Entries":[{"DelaySeconds":"x"}]}', NO_INTEGER + " - at `$.Entries[0]"),
        (b"AmazonSQS.SendMessage", b'{"MessageBody":5}', NO_STRING + " - at `$.MessageBody`"),
        (b"AmazonSQS.CreateQueue", b'{"Attributes":{"DelaySeconds":1.5}}', NO_STRING + " - at `$.Attributes[...]`"),
        (
            b"AmazonSQS.SendMessage",
            b'{"MessageBody":[]}',
            "Start of list found where not expected - at `$.MessageBody`",
        ),
        (
            b"AmazonSQS.ReceiveMessage",
            b'{"MaxNumberOfMessages":{}}',
            "Start of structure or map found where not expected. - at `$.MaxNumberOfMessages`",
        ),
        (b"AmazonSQS.UntagQueue", b'{"TagKeys":"team"}', "Expected list or null - at `$.TagKeys`"),
        # Another pair of types keeps the words of the house, and so does its own dialect.
        (b"AmazonSQS.ReceiveMessage", b'{"VisibilityTimeout":true}', "does not fit ReceiveMessage: Expected"),
        (b"VeilMQ.Send", b'{"Messages":[{"Priority":"1"}]}', "does not fit Send: Expected"),
    ],
)
def test_a_value_of_another_type(target: bytes, body: bytes, words: str) -> None:
    """async-aws/aws #1667."""
    with pytest.raises(Refusal) as refused:
        json_form.read(target, body)
    assert refused.value.fault is MALFORMED_INPUT
    assert refused.value.fault.shape.endswith("#SerializationException")
    assert words in refused.value.message
