"""Half of a surrogate pair in JSON is refused like any other character that XML cannot carry: in its place, by name."""

import json
from typing import Any

import pytest

from veilmq.protocols.sqs.errors import MALFORMED_INPUT, Refusal
from veilmq.protocols.sqs.forms import json_form
from veilmq.testing.for_each import for_each

HALF = "\ud800"
FORBIDDEN = "was found in the message body, the set of allowed characters is"
URL = "http://127.0.0.1:9324/111122223333/jobs"
TEXT = {"DataType": "String", "StringValue": "v"}
TOKENS = "can only include alphanumeric and punctuation characters. 1 to 128 in length."
ENTRIES: list[tuple[dict[str, Any], str]] = [
    ({"MessageBody": HALF}, FORBIDDEN),
    ({"MessageBody": "a\udfffb"}, FORBIDDEN),
    ({"MessageGroupId": HALF}, "MessageGroupId " + TOKENS),
    ({"MessageDeduplicationId": HALF}, "not valid for this queue type"),
    ({"MessageAttributes": {"a": {**TEXT, "StringValue": "v" + HALF}}}, "message attribute 'a' value, the set"),
    ({"MessageAttributes": {"a": {**TEXT, "DataType": "String." + HALF}}}, "message attribute 'a' type"),
    ({"MessageAttributes": {HALF: TEXT}}, "in the message attribute name"),
    (
        {"MessageSystemAttributes": {"AWSTraceHeader": {**TEXT, "StringValue": HALF}}},
        "message system attribute 'AWSTraceHeader' value",
    ),
    ({"MessageSystemAttributes": {"AWSTraceHeader": TEXT, HALF: TEXT}}, "Message system attribute name"),
]


def ask(operation: str, given: dict[str, Any]) -> Any:
    """What the operation is given."""
    return json_form.read(f"AmazonSQS.{operation}".encode(), json.dumps(given).encode())[1]


@pytest.fixture
def client(served: Any) -> Any:
    """Of the JSON form, which alone can write a half."""
    return served.connect()


@for_each(("entry", "words"), ENTRIES)
def test_an_entry_fails_alone_and_is_told_why(client: Any, url: str, entry: dict[str, Any], words: str) -> None:
    entries = [{"Id": "1", "MessageBody": "good"}, {"Id": "2", "MessageBody": "x", **entry}]
    answer = client.send_message_batch(QueueUrl=url, Entries=entries)
    assert [line["Id"] for line in answer["Successful"]] == ["1"]
    assert [(line["Id"], line["SenderFault"], words in line["Message"]) for line in answer["Failed"]] == [
        ("2", True, True)
    ]
    assert client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"][0]["Body"] == "good"
    (one,) = client.send_message_batch(QueueUrl=url, Entries=entries[1:])["Failed"]
    assert words in one["Message"]


@for_each(("given", "words"), ENTRIES)
def test_a_single_message_is_told_the_same(
    served: Any, client: Any, url: str, given: dict[str, Any], words: str
) -> None:
    code, text = served.refused(client.send_message, **{"QueueUrl": url, "MessageBody": "x", **given})
    assert code in {"InvalidMessageContents", "InvalidParameterValue"}
    assert words in text


@pytest.mark.parametrize("method", ["delete_message", "change_message_visibility"])
def test_a_handle_with_one_is_none(served: Any, client: Any, url: str, method: str) -> None:
    given: dict[str, Any] = {"ReceiptHandle": HALF}
    if method != "delete_message":
        given["VisibilityTimeout"] = 1
    assert served.refused(getattr(client, method), QueueUrl=url, **given)[0] == "ReceiptHandleIsInvalid"
    answer = getattr(client, f"{method}_batch")(QueueUrl=url, Entries=[{"Id": "1", **given}])
    assert [line["Code"] for line in answer["Failed"]] == ["ReceiptHandleIsInvalid"]


@pytest.mark.parametrize("tags", [{HALF: "v"}, {"k": HALF}])
def test_a_tag_is_told_as_a_tag(served: Any, client: Any, url: str, tags: dict[str, str]) -> None:
    for method, given in (("tag_queue", {"QueueUrl": url, "Tags": tags}), ("create_queue", {"tags": tags})):
        asked = given if method == "tag_queue" else {"QueueName": "other", **given}
        code, text = served.refused(getattr(client, method), **asked)
        assert (code, text.startswith("Tag ")) == ("InvalidParameterValue", True)
    assert "Tags" not in client.list_queue_tags(QueueUrl=url)


@for_each(
    ("operation", "given", "place"),
    [
        ("UntagQueue", {"QueueUrl": URL, "TagKeys": ["a", HALF]}, "$.TagKeys[1]"),
        ("ListQueues", {"QueueNamePrefix": HALF}, "$.QueueNamePrefix"),
        ("SendMessage", {"QueueUrl": f"http://{HALF}/111122223333/jobs", "MessageBody": "x"}, "$.QueueUrl"),
        ("SendMessage", {"QueueUrl": URL, "MessageBody": "x", "Unknown": [{HALF: 1}]}, "$.Unknown[0].\ufffd"),
        ("SendMessage", {"QueueUrl": URL, "MessageBody": "x", "ReceiptHandle": HALF}, "$.ReceiptHandle"),
        ("DeleteMessage", {"QueueUrl": URL, "ReceiptHandle": "x", "MessageBody": HALF}, "$.MessageBody"),
        ("SendMessageBatch", {"Entries": [{"Id": HALF}]}, "$.Entries[0].Id"),
        ("SetQueueAttributes", {"Attributes": {"RedrivePolicy": HALF}}, "$.Attributes.RedrivePolicy"),
        (
            "SendMessage",
            {"MessageAttributes": {"a": {"StringListValues": [HALF]}}},
            "$.MessageAttributes.a.StringListValues[0]",
        ),
    ],
)
def test_where_no_check_would_meet_it_the_request_is_refused(operation: str, given: dict[str, Any], place: str) -> None:
    with pytest.raises(Refusal) as refused:
        ask(operation, given)
    assert refused.value.message == f"Half of a surrogate pair is no character - at `{place}`"


def test_a_whole_pair_is_a_character() -> None:
    assert ask("SendMessage", {"MessageBody": "\U0001f600"}).message_body == "\U0001f600"
    assert json_form.replaced_half_pairs("SendMessage", rb'{"MessageBody":"\ud83d\ude00"}') == {
        "MessageBody": "\U0001f600"
    }


@for_each(
    "body",
    [
        rb'{"MessageBody":"\ud800',
        rb'{"MessageBody":"\ud800","More":NaN}',
        rb'{"MessageBody":"\ud800","More":-Infinity}',
        rb'{"MessageBody":"\ud800","More":' + b"[" * 10_000,
    ],
    ids=["cut", "NaN", "Infinity", "deep"],
)
def test_what_is_no_json_besides_is_told_as_that(body: bytes) -> None:
    with pytest.raises(Refusal, match="not valid JSON") as refused:
        json_form.read(b"AmazonSQS.SendMessage", body)
    assert refused.value.fault is MALFORMED_INPUT


@for_each("wrong", [b"\xff", b"\xed\xa0\x80", b"\\ud800\xff"], ids=["no UTF-8", "a half in bytes", "beside a half"])
def test_bytes_that_are_no_utf_8_are_told_without_names_of_python(wrong: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        json_form.read(b"AmazonSQS.SendMessage", b'{"MessageBody":"' + wrong + b'"}')
    assert (refused.value.fault, refused.value.message) == (MALFORMED_INPUT, "The body is not UTF-8.")


def test_a_member_that_does_not_fit_is_named_beside_a_half() -> None:
    with pytest.raises(Refusal, match=r"at `\$\.DelaySeconds`"):
        ask("SendMessage", {"MessageBody": HALF, "DelaySeconds": 1.5})


def test_nobody_waits_for_a_body_of_very_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    body = rb'{"MessageBody":"\ud800","Unknown":[' + b"[]," * 25_000 + b"[]]}"
    monkeypatch.setattr(json_form, "_Replacing", None)  # nobody looks
    with pytest.raises(Refusal, match="The body is not valid JSON: ") as refused:
        json_form.read(b"AmazonSQS.SendMessage", body)
    assert refused.value.fault is MALFORMED_INPUT
    monkeypatch.undo()
    for text in ("[],", '"', "\\"):  # these are no values
        assert ask("SendMessage", {"MessageBody": HALF + text * 60_000}).message_body == "\ufffe" + text * 60_000
    attributes = {str(number): {"DataType": "String", "StringValue": HALF} for number in range(10)}
    largest = {"Queue": "orders", "Messages": [{"Body": "x", "Attributes": attributes}] * 256}
    _, sent = json_form.read(b"VeilMQ.Send", json.dumps(largest).encode())
    assert len(sent.messages) == 256
