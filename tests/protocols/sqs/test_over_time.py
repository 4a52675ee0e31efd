"""What takes minutes or hours, through botocore on a real store whose clock the test moves."""

from typing import Any

import pytest

from veilmq.testing.for_each import for_each

BASE = "http://127.0.0.1:9324/111122223333/"


def bodies(client: Any, url: str, **given: Any) -> list[str]:
    received = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, **given)
    return [message["Body"] for message in received.get("Messages", [])]


@pytest.mark.parametrize(
    ("seconds", "code"), [(59, "AWS.SimpleQueueService.QueueDeletedRecently"), (60, None), (61, None)]
)
def test_a_deleted_queues_name_is_free_after_a_minute(
    served: Any, client: Any, url: str, seconds: int, code: str | None
) -> None:
    client.delete_queue(QueueUrl=url)
    served.later(seconds)
    if code is None:
        client.create_queue(QueueName="jobs")
    else:
        assert served.refused(client.create_queue, QueueName="jobs")[0] == code


@pytest.mark.parametrize(
    ("seconds", "code"), [(59, "AWS.SimpleQueueService.PurgeQueueInProgress"), (60, None), (61, None)]
)
def test_a_queue_is_purged_once_a_minute(served: Any, client: Any, url: str, seconds: int, code: str | None) -> None:
    client.purge_queue(QueueUrl=url)
    served.later(seconds)
    if code is None:
        client.purge_queue(QueueUrl=url)
    else:
        assert served.refused(client.purge_queue, QueueUrl=url)[0] == code


def test_without_cooldowns_both_are_free_at_once(served: Any, client: Any, url: str) -> None:
    served.configure(cooldowns=False)
    client.purge_queue(QueueUrl=url)
    client.purge_queue(QueueUrl=url)
    client.delete_queue(QueueUrl=url)
    client.create_queue(QueueName="jobs")


@pytest.mark.parametrize(("more", "taken"), [(-1, True), (0, True), (1, False)])
def test_a_lease_lasts_twelve_hours_in_all(served: Any, client: Any, url: str, more: int, taken: bool) -> None:
    client.send_message(QueueUrl=url, MessageBody="x")
    (message,) = client.receive_message(QueueUrl=url, VisibilityTimeout=43_200)["Messages"]
    served.clock.advance(3_600_000_000)
    given = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"], "VisibilityTimeout": 11 * 3_600 + more}
    if taken:
        client.change_message_visibility(**given)
        served.later(11 * 3_600 + more - 1)
        assert bodies(client, url) == []
        served.later(1)
        assert bodies(client, url) == ["x"]
    else:
        code, text = served.refused(client.change_message_visibility, **given)
        assert code == "InvalidParameterValue"
        assert "Total VisibilityTimeout" in text
        # What was refused changed nothing: the lease ends when it would have.
        served.later(11 * 3_600 - 1)
        assert bodies(client, url) == []
        served.later(1)
        assert bodies(client, url) == ["x"]


def test_a_retention_that_is_changed_counts_for_what_is_there(served: Any, client: Any, url: str) -> None:
    client.send_message(QueueUrl=url, MessageBody="old")
    served.later(3_600)
    client.send_message(QueueUrl=url, MessageBody="new")
    client.set_queue_attributes(QueueUrl=url, Attributes={"MessageRetentionPeriod": "3600"})
    assert bodies(client, url, VisibilityTimeout=0) == ["new"]
    client.set_queue_attributes(QueueUrl=url, Attributes={"MessageRetentionPeriod": "7200"})
    served.later(7_199)
    assert bodies(client, url, VisibilityTimeout=0) == ["new"]
    served.later(1)
    assert bodies(client, url) == []
    shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["ApproximateNumberOfMessages"])["Attributes"]
    assert shown == {"ApproximateNumberOfMessages": "0"}


@for_each(("size", "taken"), [(1_023, True), (1_024, True), (1_025, False)])
def test_the_queues_own_limit_counts_attributes_too(served: Any, client: Any, url: str, size: int, taken: bool) -> None:
    client.set_queue_attributes(QueueUrl=url, Attributes={"MaximumMessageSize": "1024"})
    attribute = {"name": {"DataType": "String", "StringValue": "value"}}
    given = {"QueueUrl": url, "MessageBody": "x" * (size - len("nameStringvalue")), "MessageAttributes": attribute}
    if taken:
        client.send_message(**given)
    else:
        code, text = served.refused(client.send_message, **given)
        assert (code, "1024 bytes" in text) == ("InvalidParameterValue", True)


@for_each(
    ("asked", "shown"),
    [
        (None, None),
        (["All"], {"one", "two", "tenth", "other"}),
        ([".*"], {"one", "two", "tenth", "other"}),
        (["*"], {"one", "two", "tenth", "other"}),
        (["t.*"], {"two", "tenth"}),
        (["ten.*", "one"], {"tenth", "one"}),
        (["one", "nowhere"], {"one"}),
        (["x.*"], None),
        (["T.*"], None),
    ],
)
def test_filters_of_message_attributes(client: Any, url: str, asked: list[str] | None, shown: set[str] | None) -> None:
    attributes = {name: {"DataType": "String", "StringValue": name} for name in ("one", "two", "tenth", "other")}
    client.send_message(QueueUrl=url, MessageBody="x", MessageAttributes=attributes)
    given = {} if asked is None else {"MessageAttributeNames": asked}
    (message,) = client.receive_message(QueueUrl=url, **given)["Messages"]
    found = message.get("MessageAttributes")
    assert (found if found is None else set(found)) == shown
    assert ("MD5OfMessageAttributes" in message) is (shown is not None)


def test_a_receive_asks_for_a_bounded_number_of_attributes(served: Any, client: Any, url: str) -> None:
    """They are kept while it waits."""
    names = [f"n{number}" for number in range(1_001)]
    client.receive_message(QueueUrl=url, MessageAttributeNames=names[1:])
    code, text = served.refused(client.receive_message, QueueUrl=url, MessageAttributeNames=names)
    assert (code, "at most 1000 attributes" in text) == ("InvalidParameterValue", True)


def test_filters_of_system_attributes(served: Any, client: Any, url: str) -> None:
    trace = "Root=1-5759e988-bd862e3fe1be46a994272793"
    value = {"AWSTraceHeader": {"DataType": "String", "StringValue": trace}}
    sent = client.send_message(QueueUrl=url, MessageBody="x", MessageSystemAttributes=value)
    assert sent["MD5OfMessageSystemAttributes"]
    assert "MD5OfMessageAttributes" not in sent
    every = {
        "SenderId",
        "SentTimestamp",
        "ApproximateReceiveCount",
        "ApproximateFirstReceiveTimestamp",
        "AWSTraceHeader",
    }
    for given, shown in (
        ({}, None),
        ({"AttributeNames": ["All"]}, every),
        ({"MessageSystemAttributeNames": ["All"]}, every),
        ({"MessageSystemAttributeNames": ["AWSTraceHeader"]}, {"AWSTraceHeader"}),
        (
            {"AttributeNames": ["SenderId"], "MessageSystemAttributeNames": ["SentTimestamp"]},
            {"SenderId", "SentTimestamp"},
        ),
    ):
        (message,) = client.receive_message(QueueUrl=url, VisibilityTimeout=0, **given)["Messages"]
        found = message.get("Attributes")
        assert (found if found is None else set(found)) == shown
    assert served.refused(client.receive_message, QueueUrl=url, MessageSystemAttributeNames=["Nonsense"])[0] == (
        "InvalidAttributeName"
    )


def test_the_trace_header_of_the_request_counts_for_each_entry(served: Any, client: Any, url: str) -> None:
    served.more_headers = {"X-Amzn-Trace-Id": "Root=1-header"}
    own = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-own"}}
    entries = [{"Id": "1", "MessageBody": "1"}, {"Id": "2", "MessageBody": "2", "MessageSystemAttributes": own}]
    answer = client.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]
    assert ["MD5OfMessageSystemAttributes" in entry for entry in answer] == [False, True]
    received = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, MessageSystemAttributeNames=["All"])
    assert [each["Attributes"]["AWSTraceHeader"] for each in received["Messages"]] == ["Root=1-header", "Root=1-own"]


def test_one_kind_of_encryption_ends_the_other(served: Any, client: Any, url: str) -> None:
    def shown() -> dict[str, str]:
        names = ["KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds", "SqsManagedSseEnabled"]
        found: dict[str, str] = client.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
        return found

    def change(**attributes: str) -> None:
        client.set_queue_attributes(QueueUrl=url, Attributes=attributes)

    assert shown() == {"SqsManagedSseEnabled": "true"}
    change(KmsMasterKeyId="alias/a")
    kms = {"KmsMasterKeyId": "alias/a", "KmsDataKeyReusePeriodSeconds": "300", "SqsManagedSseEnabled": "false"}
    assert shown() == kms
    change(KmsDataKeyReusePeriodSeconds="60")
    assert shown() == kms | {"KmsDataKeyReusePeriodSeconds": "60"}
    change(SqsManagedSseEnabled="true")
    assert shown() == {"SqsManagedSseEnabled": "true"}
    change(KmsDataKeyReusePeriodSeconds="90")
    assert shown() == {"SqsManagedSseEnabled": "true"}
    change(SqsManagedSseEnabled="false")
    assert shown()["SqsManagedSseEnabled"] == "false"
    both = {"SqsManagedSseEnabled": "true", "KmsMasterKeyId": "alias/a"}
    assert served.refused(client.set_queue_attributes, QueueUrl=url, Attributes=both)[0] == "InvalidAttributeName"
