"""An unmodified boto3 program on standard queues: the whole life of a message, and AWS's own error classes."""

import json
import threading
import time
import urllib.error
import urllib.request
from hashlib import md5
from typing import Any

import pytest
from botocore.exceptions import ClientError

from veilmq.testing.client_contract import for_each


def only(answer: dict[str, Any]) -> dict[str, Any]:
    (message,) = answer["Messages"]
    return dict(message)


def test_a_message_lives_and_dies(sqs: Any, queue: str) -> None:
    body = "grüße\r\n<&>\t\U0001f41d"
    sent = sqs.send_message(QueueUrl=queue, MessageBody=body)
    assert sent["MD5OfMessageBody"] == md5(body.encode()).hexdigest()
    message = only(sqs.receive_message(QueueUrl=queue, AttributeNames=["All"]))
    assert (message["Body"], message["MessageId"]) == (body, sent["MessageId"])
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"
    assert "Messages" not in sqs.receive_message(QueueUrl=queue)
    sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=600)
    sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    counts = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
    assert [counts[f"ApproximateNumberOfMessages{kind}"] for kind in ("", "NotVisible", "Delayed")] == ["0", "0", "0"]


def test_a_lease_that_runs_out_comes_back_by_itself(sqs: Any, queue: str) -> None:
    sqs.send_message(QueueUrl=queue, MessageBody="again")
    first = only(sqs.receive_message(QueueUrl=queue, VisibilityTimeout=1))
    again = only(sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=5, AttributeNames=["All"]))
    assert again["Attributes"]["ApproximateReceiveCount"] == "2"
    assert again["ReceiptHandle"] != first["ReceiptHandle"]
    # The first worker is late: its delete is a success that deletes nothing, as at AWS.
    sqs.delete_message(QueueUrl=queue, ReceiptHandle=first["ReceiptHandle"])
    sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=again["ReceiptHandle"], VisibilityTimeout=0)
    assert only(sqs.receive_message(QueueUrl=queue))["Body"] == "again"


def test_batches_answer_each_entry_for_itself(sqs: Any, queue: str) -> None:
    entries = [{"Id": str(i), "MessageBody": f"body {i}"} for i in range(10)]
    entries[3]["DelaySeconds"] = 901  # type: ignore[assignment]
    sent = sqs.send_message_batch(QueueUrl=queue, Entries=entries)
    assert len(sent["Successful"]) == 9
    assert [(each["Id"], each["SenderFault"]) for each in sent["Failed"]] == [("3", True)]
    received = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)["Messages"]
    assert [each["Body"] for each in received] == [f"body {i}" for i in range(10) if i != 3]
    named = [{"Id": each["Body"][-1], "ReceiptHandle": each["ReceiptHandle"]} for each in received]
    extended = sqs.change_message_visibility_batch(
        QueueUrl=queue, Entries=[each | {"VisibilityTimeout": 60} for each in named[:5]]
    )
    assert len(extended["Successful"]) == 5
    deleted = sqs.delete_message_batch(QueueUrl=queue, Entries=[*named, {"Id": "x", "ReceiptHandle": "nonsense"}][:10])
    assert len(deleted["Successful"]) == 9
    assert [each["Id"] for each in deleted["Failed"]] == ["x"]


def test_a_parked_receive_is_woken_by_a_send(shared: Any, connect: Any, sqs: Any, queue: str) -> None:
    got: list[str] = []

    def wait() -> None:
        got.append(only(connect(shared).receive_message(QueueUrl=queue, WaitTimeSeconds=20))["Body"])

    waiting = threading.Thread(target=wait)
    waiting.start()
    sqs.send_message(QueueUrl=queue, MessageBody="wake up")
    waiting.join(15)
    assert got == ["wake up"]


def test_a_delayed_message_wakes_a_parked_receive(sqs: Any, queue: str) -> None:
    started = time.monotonic()
    sqs.send_message(QueueUrl=queue, MessageBody="later", DelaySeconds=3)
    assert "Messages" not in sqs.receive_message(QueueUrl=queue)
    assert only(sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=20))["Body"] == "later"
    assert time.monotonic() - started >= 3


def test_dead_letters(sqs: Any, queue: str) -> None:
    dead = sqs.create_queue(QueueName="the-dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 2})
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"RedrivePolicy": policy})
    shown = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["RedrivePolicy"])["Attributes"]
    assert json.loads(shown["RedrivePolicy"]) == {"deadLetterTargetArn": arn, "maxReceiveCount": 2}
    sent = sqs.send_message(QueueUrl=queue, MessageBody="poison")
    for _ in range(2):
        assert only(sqs.receive_message(QueueUrl=queue, VisibilityTimeout=0))["MessageId"] == sent["MessageId"]
    assert "Messages" not in sqs.receive_message(QueueUrl=queue)
    assert only(sqs.receive_message(QueueUrl=dead))["MessageId"] == sent["MessageId"]


def test_message_attributes_keep_types_and_checksums(sqs: Any, queue: str) -> None:
    attributes = {
        "text": {"DataType": "String", "StringValue": "värde"},
        "number": {"DataType": "Number.int", "StringValue": "42"},
        "bytes": {"DataType": "Binary", "BinaryValue": bytes(range(256))},
    }
    # boto3 checks MD5OfMessageBody itself; the attributes' checksum must agree between send and receive.
    sent = sqs.send_message(QueueUrl=queue, MessageBody="x", MessageAttributes=attributes)
    message = only(sqs.receive_message(QueueUrl=queue, MessageAttributeNames=["All"]))
    assert message["MessageAttributes"] == attributes
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]


def test_purge_and_delete(sqs: Any, queue: str) -> None:
    for _ in range(3):
        sqs.send_message(QueueUrl=queue, MessageBody="gone soon")
    sqs.purge_queue(QueueUrl=queue)
    assert "Messages" not in sqs.receive_message(QueueUrl=queue)
    with pytest.raises(sqs.exceptions.PurgeQueueInProgress):
        sqs.purge_queue(QueueUrl=queue)
    sqs.delete_queue(QueueUrl=queue)
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.send_message(QueueUrl=queue, MessageBody="x")
    with pytest.raises(sqs.exceptions.QueueDeletedRecently):
        sqs.create_queue(QueueName=queue.rpartition("/")[2])


def test_queues_are_found_and_compared(sqs: Any, queue: str) -> None:
    name = queue.rpartition("/")[2]
    assert sqs.get_queue_url(QueueName=name)["QueueUrl"] == queue
    assert queue in sqs.list_queues(QueueNamePrefix=name)["QueueUrls"]
    assert sqs.create_queue(QueueName=name)["QueueUrl"] == queue
    with pytest.raises(sqs.exceptions.QueueNameExists):
        sqs.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "77"})
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.get_queue_url(QueueName=name + "-not")


def test_a_queues_name_stands_for_its_url(sqs: Any, queue: str) -> None:
    name = queue.rpartition("/")[2]
    sqs.send_message(QueueUrl=name, MessageBody="x")
    assert only(sqs.receive_message(QueueUrl=queue, VisibilityTimeout=0))["Body"] == "x"
    counts = sqs.get_queue_attributes(QueueUrl=name, AttributeNames=["ApproximateNumberOfMessages"])["Attributes"]
    assert counts == {"ApproximateNumberOfMessages": "1"}


def test_a_queues_url_opened_in_a_browser(sqs: Any, queue: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(queue, timeout=10)
    with raised.value as answer:
        assert (answer.status, answer.read()) == (404, b"<UnknownOperationException/>\n")
    sqs.send_message(QueueUrl=queue, MessageBody="x")
    asked = urllib.request.Request(
        f"{queue}/?Action=ReceiveMessage&AttributeName=SentTimestamp", headers={"Accept": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        (message,) = json.loads(answer.read())["ReceiveMessageResponse"]["ReceiveMessageResult"]["messages"]
    assert (message["Body"], message["MessageAttributes"]) == ("x", None)
    assert [each["Name"] for each in message["Attributes"]] == ["SentTimestamp"]


@for_each(
    "operation, given, error, status",
    [
        ("change_message_visibility", {"ReceiptHandle": "AQ=="}, "ReceiptHandleIsInvalid", 404),
        ("delete_message", {"ReceiptHandle": "AQ=="}, "ReceiptHandleIsInvalid", 404),
        ("send_message", {"MessageBody": "\x00"}, "InvalidMessageContents", 400),
        ("send_message_batch", {"Entries": []}, "EmptyBatchRequest", 400),
        ("send_message_batch", {"Entries": [{"Id": "a", "MessageBody": "x"}] * 2}, "BatchEntryIdsNotDistinct", 400),
        ("get_queue_attributes", {"AttributeNames": ["Nonsense"]}, "InvalidAttributeName", 400),
        ("set_queue_attributes", {"Attributes": {"VisibilityTimeout": "43201"}}, "InvalidAttributeValue", 400),
    ],
)
def test_errors_come_out_as_botocores_own_classes(
    sqs: Any, queue: str, operation: str, given: dict[str, Any], error: str, status: int
) -> None:
    extra = {"VisibilityTimeout": 1} if operation == "change_message_visibility" else {}
    with pytest.raises(getattr(sqs.exceptions, error)) as raised:
        getattr(sqs, operation)(QueueUrl=queue, **given, **extra)
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == status


@pytest.mark.parametrize("batch", [False, True])
def test_a_late_extend_takes_up_the_lease_that_nobody_else_got(sqs: Any, queue: str, batch: bool) -> None:
    sqs.send_message(QueueUrl=queue, MessageBody="x")
    handle = only(sqs.receive_message(QueueUrl=queue, VisibilityTimeout=0))["ReceiptHandle"]
    assert counts(sqs, queue) == (1, 0)
    assert extended(sqs, queue, handle, 60, batch) is None
    assert counts(sqs, queue) == (0, 1)
    assert "Messages" not in sqs.receive_message(QueueUrl=queue)
    assert extended(sqs, queue, handle, 0, batch) is None
    assert extended(sqs, queue, handle, 0, batch) is None, "a second release changes nothing"
    assert only(sqs.receive_message(QueueUrl=queue))["ReceiptHandle"] != handle


@pytest.mark.parametrize("batch", [False, True])
def test_a_superseded_handle_neither_extends_nor_releases(sqs: Any, queue: str, batch: bool) -> None:
    sqs.send_message(QueueUrl=queue, MessageBody="x")
    old = only(sqs.receive_message(QueueUrl=queue, VisibilityTimeout=0))["ReceiptHandle"]
    only(sqs.receive_message(QueueUrl=queue, VisibilityTimeout=60))
    refusal = "ReceiptHandleIsInvalid" if batch else "InvalidParameterValue"
    for seconds in (0, 60):
        assert extended(sqs, queue, old, seconds, batch) == refusal
    assert counts(sqs, queue) == (0, 1)


def extended(sqs: Any, queue: str, handle: str, seconds: int, batch: bool) -> str | None:
    """Change the visibility; the error's code, if it is refused."""
    given = {"ReceiptHandle": handle, "VisibilityTimeout": seconds}
    if batch:
        answer = sqs.change_message_visibility_batch(QueueUrl=queue, Entries=[{"Id": "a", **given}])
        return next((each["Code"] for each in answer.get("Failed", ())), None)
    try:
        sqs.change_message_visibility(QueueUrl=queue, **given)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return None


def counts(sqs: Any, queue: str) -> tuple[int, int]:
    """How many messages are visible, and in flight."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)["Attributes"]
    return int(found[names[0]]), int(found[names[1]])


def test_a_lease_ends_twelve_hours_after_the_receive_at_the_latest(sqs: Any, queue: str) -> None:
    sqs.send_message(QueueUrl=queue, MessageBody="x")
    handle = only(sqs.receive_message(QueueUrl=queue))["ReceiptHandle"]
    with pytest.raises(ClientError, match="Total VisibilityTimeout"):
        sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=handle, VisibilityTimeout=43_200)


def test_regions_and_accounts_do_not_meet(shared: Any, connect: Any, sqs: Any, queue: str) -> None:
    name = queue.rpartition("/")[2]
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        connect(shared, region="eu-west-1").get_queue_url(QueueName=name)
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        connect(shared, key="123456789012").get_queue_url(QueueName=name)
