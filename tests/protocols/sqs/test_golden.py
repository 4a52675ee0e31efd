"""Bytes on the wire, both forms, in and out: what must not change unnoticed."""

import msgspec

from veilmq.model.commands import Delete, Receive, Send
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.instant import Instant
from veilmq.model.messages import Attribute, Delivery, Extras
from veilmq.model.outcomes import Deleted, Outcome, QueueChanged, QueueDescribed, QueuesListed, Received, Sent
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.model.settings.queue import QueueCounts, QueueInfo, QueueKey, QueueSettings
from veilmq.protocols import Request, Response
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint


class Ring:
    """Development mode."""

    checks = False

    def find(self, key_id: str) -> AccessKey:
        return AccessKey(key_id, "", "000000000000", grants=EVERYTHING)


URL = "http://localhost:9324/000000000000/q"
SENT = Sent(bytes(range(16)), 1, Instant(0), Instant(0), Instant(0))
ID = b"00010203-0405-0607-0809-0a0b0c0d0e0f"
MD5 = b"5d41402abc4b2a76b9719d911017c592"
DELIVERY = Delivery(
    bytes(range(16)),
    1,
    'a<b>&"\r\n]]>\u2603',
    bytes.fromhex(MD5.decode()),
    Extras((Attribute("n", "Number", "1"), Attribute("b", "Binary", b"\x00\xff"))),
    "AKID",
    8,
    Instant(1_000_000),
    Instant(9),
    2,
    Instant(2_000_000),
    "ab" * 33,
    Instant(3),
)
XML = b'<?xml version="1.0"?>'
SPACE = b'xmlns="http://queue.amazonaws.com/doc/2012-11-05/"'
METADATA = b"<ResponseMetadata><RequestId>the-id</RequestId></ResponseMetadata>"
FORM = b"application/x-www-form-urlencoded; charset=utf-8"


def ask(request: Request, *outcomes: Outcome) -> tuple[Call | None, Response]:
    codec = Codec(Ring(), Endpoint())
    answer = codec.decode(request, Instant(0), Instant(5))
    if isinstance(answer, Response):
        return None, answer
    return answer, codec.encode(answer, outcomes)


def json(operation: str, body: str, *outcomes: Outcome) -> tuple[Call | None, Response]:
    headers = {
        b"host": b"localhost:9324",
        b"content-type": b"application/x-amz-json-1.0",
        b"x-amz-target": f"AmazonSQS.{operation}".encode(),
    }
    return ask(Request("POST", b"/", headers, body.encode(), "::1", False, "the-id"), *outcomes)


def query(form: bytes, *outcomes: Outcome, target: bytes = b"/", accept: bytes = b"") -> tuple[Call | None, Response]:
    headers = {b"host": b"localhost:9324", b"content-type": FORM, b"accept": accept}
    return ask(Request("POST", target, headers, form, "::1", False, "the-id"), *outcomes)


def test_send_in_json() -> None:
    call, answer = json("SendMessage", f'{{"QueueUrl": "{URL}", "MessageBody": "hello", "Unknown": 1}}', SENT)
    assert call is not None
    assert isinstance(call.commands[0], Send)
    assert answer == Response(
        200,
        b"application/x-amz-json-1.0",
        b'{"MD5OfMessageBody":"' + MD5 + b'","MessageId":"' + ID + b'"}',
        ((b"x-amzn-RequestId", b"the-id"),),
    )


def test_send_in_query() -> None:
    url = b"http%3A%2F%2Flocalhost%3A9324%2F000000000000%2Fq"
    form = b"Action=SendMessage&Version=2012-11-05&QueueUrl=" + url + b"&MessageBody=hello"
    _, answer = query(form, SENT)
    assert answer == Response(
        200,
        b"text/xml",
        XML
        + b"<SendMessageResponse "
        + SPACE
        + b"><SendMessageResult><MessageId>"
        + ID
        + b"</MessageId><MD5OfMessageBody>"
        + MD5
        + b"</MD5OfMessageBody></SendMessageResult>"
        + METADATA
        + b"</SendMessageResponse>",
        ((b"x-amzn-RequestId", b"the-id"),),
    )


def test_receive_in_json() -> None:
    body = f'{{"QueueUrl":"{URL}","MessageAttributeNames":["All"],"AttributeNames":["SentTimestamp"]}}'
    call, answer = json("ReceiveMessage", body, Received([DELIVERY]))
    assert call is not None
    assert isinstance(call.commands[0], Receive)
    assert answer.body == (
        b'{"Messages":[{"MessageId":"' + ID + b'","ReceiptHandle":"' + b"ab" * 33 + b'","MD5OfBody":"' + MD5 + b'",'
        b'"Body":"a<b>&\\"\\r\\n]]>\xe2\x98\x83","Attributes":{"SentTimestamp":"1000"},'
        b'"MD5OfMessageAttributes":"a75af2162064b5620e337e05d8ca0cb3",'
        b'"MessageAttributes":{"n":{"DataType":"Number","StringValue":"1"},"b":{"DataType":"Binary","BinaryValue":"AP8="}}}]}'
    )
    assert json("ReceiveMessage", f'{{"QueueUrl":"{URL}"}}', Received([]))[1].body == b"{}"


def test_receive_in_query_on_the_queues_url() -> None:
    form = b"Action=ReceiveMessage&MessageAttributeName.1=All&AttributeName.1=SentTimestamp"
    call, answer = query(form, Received([DELIVERY]), target=b"/000000000000/q")
    assert call is not None
    assert call.commands[0].queue == QueueKey("000000000000", "us-east-1", "q")  # type: ignore[union-attr]
    assert answer.body == (
        XML
        + b"<ReceiveMessageResponse "
        + SPACE
        + b"><ReceiveMessageResult><Message><MessageId>"
        + ID
        + b"</MessageId>"
        b"<ReceiptHandle>" + b"ab" * 33 + b"</ReceiptHandle><MD5OfBody>" + MD5 + b"</MD5OfBody>"
        b'<Body>a&lt;b&gt;&amp;"&#xD;\n]]&gt;\xe2\x98\x83</Body>'
        b"<Attribute><Name>SentTimestamp</Name><Value>1000</Value></Attribute>"
        b"<MD5OfMessageAttributes>a75af2162064b5620e337e05d8ca0cb3</MD5OfMessageAttributes>"
        b"<MessageAttribute><Name>n</Name><Value><StringValue>1</StringValue><DataType>Number</DataType></Value></MessageAttribute>"
        b"<MessageAttribute><Name>b</Name><Value><BinaryValue>AP8=</BinaryValue><DataType>Binary</DataType></Value></MessageAttribute>"
        b"</Message></ReceiveMessageResult>" + METADATA + b"</ReceiveMessageResponse>"
    )


def test_void_answers() -> None:
    call, answer = json("DeleteMessage", f'{{"QueueUrl":"{URL}","ReceiptHandle":"h"}}', Deleted())
    assert call is not None
    assert isinstance(call.commands[0], Delete)
    assert (answer.status, answer.content_type, answer.body) == (200, b"application/x-amz-json-1.0", b"")
    _, answer = query(b"Action=DeleteMessage&ReceiptHandle=h", Deleted(), target=b"/000000000000/q")
    assert answer.body == XML + b"<DeleteMessageResponse " + SPACE + b">" + METADATA + b"</DeleteMessageResponse>"


ERROR: VeilError = QueueMissing(queue="q")


def test_errors() -> None:
    _, answer = json("PurgeQueue", f'{{"QueueUrl":"{URL}"}}', ERROR)
    assert answer == Response(
        400,
        b"application/x-amz-json-1.0",
        b'{"__type":"com.amazonaws.sqs#QueueDoesNotExist","message":"The specified queue does not exist."}',
        (
            (b"x-amzn-RequestId", b"the-id"),
            (b"x-amzn-query-error", b"AWS.SimpleQueueService.NonExistentQueue;Sender"),
        ),
    )
    # Errors that the model lacks are in another namespace: http4k/http4k #1336, brefphp/laravel-bridge #154.
    for operation, given, shape in (
        ("DeleteMessage", "", b"MissingRequiredParameter"),
        ("ReceiveMessage", ',"MaxNumberOfMessages":0', b"InvalidParameterValue"),
    ):
        _, answer = json(operation, f'{{"QueueUrl":"{URL}"{given}}}')
        assert answer.body.startswith(b'{"__type":"com.amazon.coral.service#%bException",' % shape)
    _, answer = query(b"Action=PurgeQueue", ERROR, target=b"/000000000000/q")
    assert answer == Response(
        400,
        b"text/xml",
        XML
        + b"<ErrorResponse "
        + SPACE
        + b"><Error><Type>Sender</Type><Code>AWS.SimpleQueueService.NonExistentQueue</Code>"
        + b"<Message>The specified queue does not exist for this wsdl version.</Message><Detail/></Error>"
        + b"<RequestId>the-id</RequestId></ErrorResponse>",
        ((b"x-amzn-RequestId", b"the-id"),),
    )


def test_query_answered_in_json() -> None:
    accept = b"application/json"
    _, answer = query(b"Action=DeleteMessage&ReceiptHandle=h", Deleted(), target=b"/000000000000/q", accept=accept)
    assert answer.content_type == b"application/json"
    assert answer.body == b'{"DeleteMessageResponse":{"ResponseMetadata":{"RequestId":"the-id"}}}'
    _, answer = query(b"Action=ReceiveMessage", Received([]), target=b"/000000000000/q", accept=accept)
    assert b'"ReceiveMessageResult":{"messages":null}' in answer.body
    _, answer = query(b"Action=ListQueues", QueuesListed([], False), accept=accept)
    assert b'"ListQueuesResult":{"queueUrls":[],"nextToken":null}' in answer.body
    _, answer = query(b"Action=PurgeQueue", ERROR, target=b"/000000000000/q", accept=accept)
    assert answer.body == (
        b'{"Error":{"Code":"AWS.SimpleQueueService.NonExistentQueue",'
        b'"Message":"The specified queue does not exist for this wsdl version.","Type":"Sender"},"RequestId":"the-id"}'
    )


def test_query_answered_in_json_says_null_and_lists_pairs() -> None:
    """As API Gateway's users know it: every member is there, and maps are lists."""
    accept, target = b"application/json", b"/000000000000/q"
    _, answer = query(b"Action=SendMessage&MessageBody=x", SENT, target=target, accept=accept)
    result = msgspec.json.decode(answer.body)["SendMessageResponse"]["SendMessageResult"]
    assert result["MD5OfMessageBody"] == "9dd4e461268c8034f5c8564e155c67a6"
    assert {name for name, value in result.items() if value is None} == {
        "MD5OfMessageAttributes",
        "MD5OfMessageSystemAttributes",
        "SequenceNumber",
    }
    form = b"Action=GetQueueAttributes&AttributeName.1=DelaySeconds"
    _, answer = query(form, QueueDescribed(INFO), target=target, accept=accept)
    result = msgspec.json.decode(answer.body)["GetQueueAttributesResponse"]["GetQueueAttributesResult"]
    assert result == {"Attributes": [{"Name": "DelaySeconds", "Value": "0"}]}
    tagged = msgspec.structs.replace(INFO, settings=QueueSettings(tags={"team": "a"}))
    _, answer = query(b"Action=ListQueueTags", QueueDescribed(tagged), target=target, accept=accept)
    result = msgspec.json.decode(answer.body)["ListQueueTagsResponse"]["ListQueueTagsResult"]
    assert result == {"Tags": [{"Key": "team", "Value": "a"}]}


def test_entries_come_in_the_order_of_their_numbers() -> None:
    pairs = [
        f"SendMessageBatchRequestEntry.{n}.{name}={value}"
        for n in (10, 2, 1)
        for name, value in (("MessageBody", f"b{n}"), ("Id", f"i{n}"))
    ]
    form = "Action=SendMessageBatch&" + "&".join(pairs)
    call, answer = query(form.encode(), SENT, SENT, SENT, target=b"/000000000000/q")
    assert call is not None
    assert [command.body for command in call.commands if isinstance(command, Send)] == ["b1", "b2", "b10"]
    assert answer.body.count(b"<SendMessageBatchResultEntry><Id>i") == 3


def test_old_names_without_numbers() -> None:
    form = (
        b"Action=SendMessage&MessageBody=x&MessageAttribute.Name=a&MessageAttribute.Value.DataType=String&"
        b"MessageAttribute.Value.StringValue=v+w%2B"
    )
    call, _ = query(form, SENT, target=b"/000000000000/q")
    assert call is not None
    assert call.commands[0].extras.attributes == (Attribute("a", "String", "v w+"),)  # type: ignore[union-attr]


def test_a_list_of_one_needs_no_number() -> None:
    """As the API Reference's examples have it: `&AttributeName=All`, and a slash after the queue's name."""
    form = b"Action=ReceiveMessage&MaxNumberOfMessages=5&VisibilityTimeout=15&AttributeName=All"
    call, answer = query(form, Received([DELIVERY]), target=b"/000000000000/q/")
    assert call is not None
    assert isinstance(call.commands[0], Receive)
    assert (call.commands[0].queue.name, call.commands[0].count_max) == ("q", 5)
    assert b"<Name>SentTimestamp</Name>" in answer.body
    tagged = msgspec.structs.replace(INFO, settings=QueueSettings(tags={"QueueType": "x"}))
    call, _ = query(b"Action=UntagQueue&TagKey=QueueType", QueueChanged(tagged, False), target=b"/000000000000/q")
    assert call is not None
    call, answer = query(b"Action=GetQueueAttributes&AttributeName=", QueueDescribed(INFO), target=b"/000000000000/q")
    assert call is not None
    assert b"<GetQueueAttributesResult/>" in answer.body


INFO = QueueInfo(QueueKey("000000000000", "us-east-1", "q"), 1, Instant(0), Instant(0), QueueSettings(), QueueCounts())


def test_attributes_in_query() -> None:
    form = b"Action=GetQueueAttributes&AttributeName.1=DelaySeconds&AttributeName.2=VisibilityTimeout"
    _, answer = query(form, QueueDescribed(INFO), target=b"/000000000000/q")
    assert (
        b"<GetQueueAttributesResult><Attribute><Name>VisibilityTimeout</Name><Value>30</Value></Attribute>"
        b"<Attribute><Name>DelaySeconds</Name><Value>0</Value></Attribute></GetQueueAttributesResult>"
    ) in answer.body
