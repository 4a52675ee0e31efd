"""What every SQS client does with our server, whatever language and protocol it speaks.

Strategy: a client is one function, `call(operation, **members)`, with the names, shapes and error codes of AWS's API
reference; sqs_clients.py has one for each program. The parts below are the scenario; each makes queues of its own under
the name that it is given. Time passes for real, and only as long as a delay or a lease of one second lasts.
"""

import json
from collections.abc import Callable
from hashlib import md5
from typing import Any, Final, Protocol

import pytest

TEXT: Final = "héllo\r\n\t<&> \"' 😀"
ATTRIBUTES: Final = {
    "text": {"DataType": "String", "StringValue": "grün & blau"},
    "number": {"DataType": "Number.int", "StringValue": "-17"},
    "raw": {"DataType": "Binary", "BinaryValue": b"\x01 bytes"},
}


class Refused(Exception):
    """The service's answer was an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Client(Protocol):
    """A program that speaks SQS."""

    def call(self, operation: str, **members: Any) -> dict[str, Any]:
        """The answer's members. Raises Refused."""
        ...


def create(client: Client, name: str, **attributes: str) -> str:
    return str(
        client.call("CreateQueue", QueueName=name, Attributes={"VisibilityTimeout": "600"} | attributes)["QueueUrl"]
    )


def take(client: Client, url: str, count: int = 10, **how: Any) -> list[dict[str, Any]]:
    """Receive, with all that there is to see."""
    how = {"MaxNumberOfMessages": count, "AttributeNames": ["All"], "MessageAttributeNames": ["All"]} | how
    return list(client.call("ReceiveMessage", QueueUrl=url, **how).get("Messages", []))


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["Body"] for message in messages]


def counts(client: Client, url: str) -> tuple[int, int]:
    """Visible and in flight."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = client.call("GetQueueAttributes", QueueUrl=url, AttributeNames=names)["Attributes"]
    return int(found[names[0]]), int(found[names[1]])


def arn_of(client: Client, url: str) -> str:
    return str(client.call("GetQueueAttributes", QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"])


def refusal(client: Client, operation: str, **members: Any) -> str:
    """Code of the error that the call must end with."""
    with pytest.raises(Refused) as caught:
        client.call(operation, **members)
    return caught.value.code


def life(client: Client, name: str) -> None:
    """Create, send with attributes, receive, extend, delete."""
    url = create(client, name)
    assert create(client, name) == url == client.call("GetQueueUrl", QueueName=name)["QueueUrl"]
    sent = client.call("SendMessage", QueueUrl=url, MessageBody=TEXT, MessageAttributes=ATTRIBUTES)
    assert sent["MD5OfMessageBody"] == md5(TEXT.encode()).hexdigest()
    (first,) = take(client, url)
    assert (first["MessageId"], first["Body"], first["MD5OfBody"]) == (
        sent["MessageId"],
        TEXT,
        sent["MD5OfMessageBody"],
    )
    assert first["MessageAttributes"] == ATTRIBUTES
    assert first["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    assert first["Attributes"]["ApproximateReceiveCount"] == "1"
    assert int(first["Attributes"]["SentTimestamp"]) <= int(first["Attributes"]["ApproximateFirstReceiveTimestamp"])
    assert take(client, url) == []
    handle = first["ReceiptHandle"]
    client.call("ChangeMessageVisibility", QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=0)
    (second,) = take(client, url)
    assert second["Attributes"]["ApproximateReceiveCount"] == "2"
    client.call("DeleteMessage", QueueUrl=url, ReceiptHandle=handle)
    assert counts(client, url) == (0, 1), "a stale handle deleted the message"
    fresh = second["ReceiptHandle"]
    client.call("ChangeMessageVisibility", QueueUrl=url, ReceiptHandle=fresh, VisibilityTimeout=43_000)
    client.call("DeleteMessage", QueueUrl=url, ReceiptHandle=fresh)
    assert counts(client, url) == (0, 0)
    client.call("DeleteQueue", QueueUrl=url)
    assert refusal(client, "GetQueueUrl", QueueName=name) == "AWS.SimpleQueueService.NonExistentQueue"


def batches(client: Client, name: str) -> None:
    """Each entry of a batch has its own outcome."""
    url = create(client, name)
    entries = [
        {"Id": text, "MessageBody": text, "DelaySeconds": delay} for text, delay in (("a", 0), ("b", 901), ("c", 0))
    ]
    answer = client.call("SendMessageBatch", QueueUrl=url, Entries=entries)
    assert [one["Id"] for one in answer["Successful"]] == ["a", "c"]
    assert [(one["Id"], one["Code"], one["SenderFault"]) for one in answer["Failed"]] == [
        ("b", "InvalidParameterValue", True)
    ]
    held = take(client, url)
    assert bodies(held) == ["a", "c"]
    named = [{"Id": one["Body"], "ReceiptHandle": one["ReceiptHandle"]} for one in held]
    extended = [entry | {"VisibilityTimeout": 0} for entry in named]
    answer = client.call("ChangeMessageVisibilityBatch", QueueUrl=url, Entries=extended)
    assert [one["Id"] for one in answer["Successful"]] == ["a", "c"]
    again = take(client, url)
    named = [{"Id": one["Body"], "ReceiptHandle": one["ReceiptHandle"]} for one in again]
    answer = client.call("DeleteMessageBatch", QueueUrl=url, Entries=[*named, {"Id": "x", "ReceiptHandle": "junk"}])
    assert sorted(one["Id"] for one in answer["Successful"]) == ["a", "c"]
    assert [(one["Id"], one["Code"]) for one in answer["Failed"]] == [("x", "ReceiptHandleIsInvalid")]
    assert counts(client, url) == (0, 0)


def dead_letters(client: Client, name: str) -> None:
    """What is received too often moves, names where it came from, and is moved back."""
    dead = create(client, f"{name}-dead")
    policy = json.dumps({"deadLetterTargetArn": arn_of(client, dead), "maxReceiveCount": 1})
    url = create(client, name, RedrivePolicy=policy)
    client.call("SendMessage", QueueUrl=url, MessageBody="poison")
    assert bodies(take(client, url, VisibilityTimeout=0)) == ["poison"]
    assert take(client, url) == []
    (moved,) = take(client, dead, VisibilityTimeout=0)
    assert moved["Body"] == "poison"
    assert moved["Attributes"]["DeadLetterQueueSourceArn"] == arn_of(client, url)
    assert client.call("ListDeadLetterSourceQueues", QueueUrl=dead)["queueUrls"] == [url]
    task = client.call("StartMessageMoveTask", SourceArn=arn_of(client, dead))
    assert task["TaskHandle"]
    assert bodies(take(client, url, WaitTimeSeconds=20)) == ["poison"]
    (shown,) = client.call("ListMessageMoveTasks", SourceArn=arn_of(client, dead))["Results"]
    assert shown["Status"] in ("RUNNING", "COMPLETED")


def fifo(client: Client, name: str) -> None:
    """Order and locks of groups, deduplication, attempts that replay."""
    url = create(client, f"{name}.fifo", FifoQueue="true")
    entries = [
        {"Id": text, "MessageBody": text, "MessageGroupId": text[0], "MessageDeduplicationId": text}
        for text in ("a1", "b1", "a2")
    ]
    sent = client.call("SendMessageBatch", QueueUrl=url, Entries=entries)["Successful"]
    numbers = [one["SequenceNumber"] for one in sent]
    assert numbers == sorted(numbers)
    assert {len(number) for number in numbers} == {20}
    again = client.call(
        "SendMessage", QueueUrl=url, MessageBody="other", MessageGroupId="a", MessageDeduplicationId="a1"
    )
    assert (again["MessageId"], again["SequenceNumber"]) == (sent[0]["MessageId"], numbers[0])
    (one,) = take(client, url, 1, ReceiveRequestAttemptId="try-1")
    assert take(client, url, 1, ReceiveRequestAttemptId="try-1") == [one]
    assert (one["Body"], one["Attributes"]["MessageGroupId"]) == ("a1", "a")
    assert (one["Attributes"]["MessageDeduplicationId"], one["Attributes"]["SequenceNumber"]) == ("a1", numbers[0])
    assert bodies(take(client, url)) == ["b1"], "the group of a message in flight is locked"
    client.call("DeleteMessage", QueueUrl=url, ReceiptHandle=one["ReceiptHandle"])
    assert bodies(take(client, url)) == ["a2"]
    assert refusal(client, "SendMessage", QueueUrl=url, MessageBody="x") == "MissingParameter"


def long_poll(client: Client, name: str) -> None:
    """A waiting receive is answered when a delay ends, and when a lease does."""
    url = create(client, name)
    client.call("SendMessage", QueueUrl=url, MessageBody="later", DelaySeconds=1)
    (delayed,) = take(client, url, WaitTimeSeconds=20, VisibilityTimeout=1)
    seen = delayed["Attributes"]
    assert int(seen["ApproximateFirstReceiveTimestamp"]) - int(seen["SentTimestamp"]) >= 1_000
    (back,) = take(client, url, WaitTimeSeconds=20)
    assert delayed["MessageId"] == back["MessageId"]
    assert back["Attributes"]["ApproximateReceiveCount"] == "2"
    assert delayed["ReceiptHandle"] != back["ReceiptHandle"]


def refusals(client: Client, name: str) -> None:
    """Errors reach the program under the codes that programs look for."""
    url = create(client, name)
    missing = url + "-missing"
    assert (
        refusal(client, "SendMessage", QueueUrl=missing, MessageBody="x") == "AWS.SimpleQueueService.NonExistentQueue"
    )
    assert refusal(client, "SendMessage", QueueUrl=url, MessageBody="\x00") == "InvalidMessageContents"
    assert refusal(client, "SendMessage", QueueUrl=url, MessageBody="x", DelaySeconds=901) == "InvalidParameterValue"
    assert refusal(client, "DeleteMessage", QueueUrl=url, ReceiptHandle="junk") == "ReceiptHandleIsInvalid"
    changed = {"QueueName": name, "Attributes": {"VisibilityTimeout": "7"}}
    assert refusal(client, "CreateQueue", **changed) == "QueueAlreadyExists"
    assert counts(client, url) == (0, 0)


SCENARIO: Final[tuple[Callable[[Client, str], None], ...]] = (life, batches, dead_letters, fifo, long_poll, refusals)


class Workers(Protocol):
    """A framework whose worker processes take jobs from a queue: `{"id", "seconds", "crash"}`.

    A job lasts `seconds`; if `crash` names a file that is not there, it makes the file and kills its own process.
    """

    def send(self, *jobs: dict[str, Any]) -> None:
        """Through whatever the framework's producers use."""
        ...

    def start(self) -> None:
        """One more worker process."""
        ...

    def event(self) -> tuple[str, str, int]:
        """What happens next: `begin` or `done`, the job's id, the process. Waits for it."""
        ...

    def stop(self) -> None:
        """Ask the workers to end as they do in a deployment, and wait; those that are dead already stay so."""
        ...


def until_done(workers: Workers, jobs: int) -> list[tuple[str, str, int]]:
    """What happens until so many jobs are done."""
    events: list[tuple[str, str, int]] = []
    while len([kind for kind, *_ in events if kind == "done"]) < jobs:
        events.append(workers.event())
    return events


def twenty_jobs(workers: Workers) -> None:
    """Each is done once."""
    names = [f"job-{number}" for number in range(20)]
    workers.start()
    workers.send(*({"id": name} for name in names))
    events = until_done(workers, 20)
    workers.stop()
    assert sorted(job for kind, job, _ in events if kind == "done") == sorted(names)
    assert len(events) == 40


def killed_worker(workers: Workers, marker: str) -> None:
    """The job of a worker that was killed is done by another one."""
    workers.send({"id": "deadly", "crash": marker})
    workers.start()
    workers.start()
    first, *rest = until_done(workers, 1)
    workers.stop()
    assert first[:2] == ("begin", "deadly")
    assert [event[:2] for event in rest] == [("begin", "deadly"), ("done", "deadly")]
    assert first[2] not in [process for *_, process in rest]


def heartbeat(workers: Workers, seconds: float) -> None:
    """A job longer than the visibility timeout stays with its worker, whoever else waits."""
    workers.start()
    workers.start()
    workers.send({"id": "long", "seconds": seconds})
    events = until_done(workers, 1)
    workers.stop()
    assert [event[:2] for event in events] == [("begin", "long"), ("done", "long")]
