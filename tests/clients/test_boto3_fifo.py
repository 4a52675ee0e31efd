"""An unmodified boto3 program on FIFO queues, and on fair ones: order, locks, deduplication, attempts, attributes."""

import json
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5, sha256
from itertools import pairwise
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from veilmq.testing.client_contract import for_each
from veilmq.testing.local import LocalServer

OTHER_TYPE = "The request include parameter that is not valid for this queue type"
TOKEN = "can only include alphanumeric and punctuation characters. 1 to 128 in length"
NEITHER = "should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided explicitly"
THROUGHPUT = "To set FifoThroughputLimit to perMessageGroupId, the DeduplicationScope must be messageGroup."
NOT_FIFO = "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


@pytest.fixture
def sqs(veilmq_server: LocalServer) -> Any:
    return boto3.client(
        "sqs",
        endpoint_url=veilmq_server.sqs_url,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="y",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=40),
    )


def create(sqs: Any, name: str = "jobs.fifo", **attributes: str) -> str:
    """URL of a new FIFO queue that deduplicates by content."""
    given = {"FifoQueue": "true", "ContentBasedDeduplication": "true"} | attributes
    return str(sqs.create_queue(QueueName=name, Attributes=given)["QueueUrl"])


def put(sqs: Any, url: str, *texts: str) -> list[dict[str, Any]]:
    """Send messages; the first character of each is its group."""
    return [sqs.send_message(QueueUrl=url, MessageBody=text, MessageGroupId=text[0]) for text in texts]


def take(sqs: Any, url: str, count: int = 10, **how: Any) -> list[dict[str, Any]]:
    how = {"MaxNumberOfMessages": count, "AttributeNames": ["All"]} | how
    return list(sqs.receive_message(QueueUrl=url, **how).get("Messages", []))


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["Body"] for message in messages]


def delete(sqs: Any, url: str, *messages: dict[str, Any]) -> None:
    entries = [{"Id": str(i), "ReceiptHandle": one["ReceiptHandle"]} for i, one in enumerate(messages)]
    assert len(sqs.delete_message_batch(QueueUrl=url, Entries=entries)["Successful"]) == len(messages)


NOT_RETRYABLE = (
    "Value try for parameter ReceiveRequestAttemptId is invalid. Reason: "
    "The receiveRequestAttemptId is not valid anymore since the receive call is not retryable."
)


def refused(call: Any, **given: Any) -> tuple[str, str]:
    """Code and message of the error that the call must raise."""
    with pytest.raises(ClientError) as caught:
        call(**given)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


class TestOrder:
    def test_groups_keep_their_order_and_lock(self, sqs: Any) -> None:
        url = create(sqs)
        put(sqs, url, "a1", "b1", "a2", "b2", "c1")
        first = take(sqs, url, 3)
        assert bodies(first) == ["a1", "a2", "b1"]
        assert bodies(take(sqs, url)) == ["c1"]
        delete(sqs, url, first[2])
        assert bodies(take(sqs, url)) == ["b2"]
        delete(sqs, url, first[1])
        put(sqs, url, "a3")
        assert take(sqs, url) == []
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=first[0]["ReceiptHandle"], VisibilityTimeout=0)
        assert bodies(take(sqs, url)) == ["a1", "a3"]

    def test_a_released_message_comes_at_once_while_later_ones_of_its_group_are_in_flight(self, sqs: Any) -> None:
        url = create(sqs)
        put(sqs, url, "a1", "a2", "a3")
        first = take(sqs, url, 2)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(take, sqs, url, 10, WaitTimeSeconds=20)
            sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=first[0]["ReceiptHandle"], VisibilityTimeout=0)
            assert bodies(waiting.result(timeout=15)) == ["a1"]
        assert take(sqs, url) == []

    def test_sequence_numbers_have_twenty_digits_and_grow(self, sqs: Any) -> None:
        url = create(sqs)
        sent = put(sqs, url, "a1", "b1", "a2")
        entries = [{"Id": str(i), "MessageBody": f"c{i}", "MessageGroupId": "c"} for i in range(3)]
        sent += sqs.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]
        numbers = [one["SequenceNumber"] for one in sent]
        assert all(len(number) == 20 and number.isdigit() for number in numbers)
        assert all(int(one) < int(two) for one, two in pairwise(numbers))
        received = take(sqs, url)
        assert {one["Attributes"]["SequenceNumber"] for one in received} == set(numbers)
        assert [one["Attributes"]["MessageGroupId"] for one in received] == list("aabccc")
        assert received[0]["Attributes"]["MessageDeduplicationId"] == sha256(b"a1").hexdigest()

    def test_an_expired_handle_is_refused(self, sqs: Any, veilmq_server: LocalServer) -> None:
        url = create(sqs)
        put(sqs, url, "a1")
        (old,) = take(sqs, url, VisibilityTimeout=5)
        veilmq_server.advance(seconds=6)
        handle = old["ReceiptHandle"]
        text = f"Value {handle} for parameter ReceiptHandle is invalid. Reason: The receipt handle has expired."
        expected = ("InvalidParameterValue", text)
        assert refused(sqs.delete_message, QueueUrl=url, ReceiptHandle=handle) == expected
        late = {"QueueUrl": url, "ReceiptHandle": handle, "VisibilityTimeout": 9}
        assert refused(sqs.change_message_visibility, **late) == expected  # aws/aws-sdk-java #1628
        entry = {"Id": "1", "ReceiptHandle": handle}
        failed = {"Id": "1", "Code": "ReceiptHandleIsInvalid", "SenderFault": True}
        expired = {**failed, "Message": "The receipt handle has expired"}  # smaskalik/sqsmover #54
        assert sqs.delete_message_batch(QueueUrl=url, Entries=[entry])["Failed"] == [expired]
        longer = {**entry, "VisibilityTimeout": 9}
        assert sqs.change_message_visibility_batch(QueueUrl=url, Entries=[longer])["Failed"] == [expired]
        (again,) = take(sqs, url)
        assert again["Attributes"]["ApproximateReceiveCount"] == "2"
        assert refused(sqs.delete_message, QueueUrl=url, ReceiptHandle=handle)[0] == "InvalidParameterValue"
        delete(sqs, url, again)
        delete(sqs, url, again)
        longer["ReceiptHandle"] = again["ReceiptHandle"]
        gone = "Message does not exist or is not available for visibility timeout change"  # aws/aws-dotnet-messaging
        answer = sqs.change_message_visibility_batch(QueueUrl=url, Entries=[longer])
        assert answer["Failed"] == [{**failed, "Message": gone}]

    def test_who_waits_is_woken_when_the_group_is_free(self, sqs: Any, veilmq_server: LocalServer) -> None:
        url = create(sqs)
        put(sqs, url, "a1", "a2")
        (held,) = take(sqs, url, 1)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(take, sqs, url, 10, WaitTimeSeconds=20)
            put(sqs, url, "a3")
            delete(sqs, url, held)
            assert bodies(waiting.result(timeout=15)) == ["a2", "a3"]
            waiting = pool.submit(take, sqs, url, 10, WaitTimeSeconds=20)
            put(sqs, url, "b1")
            assert bodies(waiting.result(timeout=15)) == ["b1"]

    def test_purge_and_retention_free_groups(self, sqs: Any, veilmq_server: LocalServer) -> None:
        url = create(sqs, MessageRetentionPeriod="60")
        put(sqs, url, "a1", "a2")
        take(sqs, url, 1)
        sqs.purge_queue(QueueUrl=url)
        put(sqs, url, "a3")
        veilmq_server.advance(seconds=30)
        put(sqs, url, "a4")
        veilmq_server.advance(seconds=30)
        assert bodies(take(sqs, url)) == ["a4"]


class TestDelay:
    def test_it_is_the_queues_own(self, sqs: Any, veilmq_server: LocalServer) -> None:
        url = create(sqs, DelaySeconds="10")
        given = {"QueueUrl": url, "MessageBody": "a1", "MessageGroupId": "a"}
        code, text = refused(sqs.send_message, **given, DelaySeconds=5)
        assert (code, OTHER_TYPE in text) == ("InvalidParameterValue", True)
        sqs.send_message(**given, DelaySeconds=0)
        veilmq_server.advance(seconds=5)
        put(sqs, url, "a2")
        assert take(sqs, url) == []
        veilmq_server.advance(seconds=5)
        assert bodies(take(sqs, url)) == ["a1"]

    def test_a_change_acts_on_messages_that_are_there(self, sqs: Any, veilmq_server: LocalServer) -> None:
        url = create(sqs, DelaySeconds="900")
        put(sqs, url, "a1")
        sqs.set_queue_attributes(QueueUrl=url, Attributes={"DelaySeconds": "0"})
        assert bodies(take(sqs, url)) == ["a1"]


class TestDeduplication:
    def test_five_minutes_and_no_longer(self, sqs: Any, veilmq_server: LocalServer) -> None:
        url = create(sqs)
        (first,) = put(sqs, url, "a1")
        delete(sqs, url, *take(sqs, url))
        veilmq_server.advance(minutes=4, seconds=59)
        (again,) = put(sqs, url, "a1")
        assert (again["MessageId"], again["SequenceNumber"]) == (first["MessageId"], first["SequenceNumber"])
        assert take(sqs, url) == []
        veilmq_server.advance(seconds=2)
        (new,) = put(sqs, url, "a1")
        assert new["MessageId"] != first["MessageId"]
        assert bodies(take(sqs, url)) == ["a1"]

    def test_the_checksum_is_of_what_was_sent(self, sqs: Any) -> None:
        url = create(sqs)
        given = {"QueueUrl": url, "MessageGroupId": "a", "MessageDeduplicationId": "1"}
        sqs.send_message(MessageBody="one", **given)
        again = sqs.send_message(MessageBody="two", **given)
        assert again["MD5OfMessageBody"] == md5(b"two").hexdigest()
        (message,) = take(sqs, url)
        assert (message["Body"], message["Attributes"]["MessageDeduplicationId"]) == ("one", "1")

    def test_within_a_batch(self, sqs: Any) -> None:
        url = create(sqs)
        ids = ["x", "y", "x", None, None]
        entries: list[dict[str, str]] = [
            {"Id": str(i), "MessageBody": "same" if i > 2 else f"{i}", "MessageGroupId": "a"}
            | ({} if name is None else {"MessageDeduplicationId": name})
            for i, name in enumerate(ids)
        ]
        sent = sqs.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]
        assert [one["Id"] for one in sent] == list("01234")
        assert sent[0]["MessageId"] == sent[2]["MessageId"]
        assert sent[3]["SequenceNumber"] == sent[4]["SequenceNumber"]
        assert bodies(take(sqs, url)) == ["0", "1", "same"]

    def test_the_scope_of_a_group(self, sqs: Any) -> None:
        url = create(sqs, DeduplicationScope="messageGroup", FifoThroughputLimit="perMessageGroupId")
        for group in ("a", "b", "a"):
            sqs.send_message(QueueUrl=url, MessageBody=group, MessageGroupId=group, MessageDeduplicationId="same")
        assert bodies(take(sqs, url)) == ["a", "b"]

    def test_without_an_id_and_without_content_it_is_refused(self, sqs: Any) -> None:
        url = create(sqs, ContentBasedDeduplication="false")
        code, text = refused(sqs.send_message, QueueUrl=url, MessageBody="x", MessageGroupId="a")
        assert (code, NEITHER in text) == ("InvalidParameterValue", True)
        entries = [
            {"Id": "1", "MessageBody": "x", "MessageGroupId": "a"},
            {"Id": "2", "MessageBody": "y", "MessageGroupId": "a", "MessageDeduplicationId": "2"},
        ]
        code, text = refused(sqs.send_message_batch, QueueUrl=url, Entries=entries)
        assert (code, NEITHER in text) == ("InvalidParameterValue", True), "the batch as a whole"
        assert bodies(take(sqs, url)) == []

    @pytest.mark.parametrize("name", ["MessageGroupId", "MessageDeduplicationId"])
    def test_ids_have_up_to_128_letters_digits_and_signs(self, sqs: Any, name: str) -> None:
        url = create(sqs)
        given = {"QueueUrl": url, "MessageGroupId": "a", "MessageDeduplicationId": "1"}
        for body, value in enumerate(["x", "x" * 127, "x" * 128, PUNCTUATION]):
            given |= {"MessageDeduplicationId": f"id-{body}"}
            sqs.send_message(MessageBody=f"{body}", **given | {name: value})
        count = len(take(sqs, url))
        assert count == 4
        for value in ("", "x" * 129, "a b", "\u00e9"):
            code, text = refused(sqs.send_message, MessageBody="never", **given | {name: value})
            assert code in {"InvalidParameterValue", "MissingParameter"}
            assert name in text
        assert take(sqs, url, VisibilityTimeout=0) == []


class TestAttempts:
    def test_the_same_attempt_gets_the_same_messages(self, sqs: Any, veilmq_server: LocalServer) -> None:
        url = create(sqs)
        put(sqs, url, "a1", "a2", "b1")
        first = take(sqs, url, 2, ReceiveRequestAttemptId="try", VisibilityTimeout=30)
        veilmq_server.advance(seconds=29)
        again = take(sqs, url, 2, ReceiveRequestAttemptId="try", VisibilityTimeout=30)
        assert again == first
        veilmq_server.advance(seconds=29)
        assert bodies(take(sqs, url)) == ["b1"], "the timeout of a1 and a2 began anew"
        delete(sqs, url, *again)
        veilmq_server.advance(minutes=5)
        assert bodies(take(sqs, url, ReceiveRequestAttemptId="try")) == ["b1"], "after five minutes it is a new receive"

    def test_a_repeated_attempt_does_not_wait_behind_others(self, sqs: Any) -> None:
        url = create(sqs)
        put(sqs, url, "a1")
        first = take(sqs, url, ReceiveRequestAttemptId="try")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(take, sqs, url, 10, WaitTimeSeconds=20)
            assert take(sqs, url, ReceiveRequestAttemptId="try", WaitTimeSeconds=20) == first
            delete(sqs, url, *first)
            put(sqs, url, "a2")
            assert bodies(waiting.result(timeout=15)) == ["a2"]

    def test_a_changed_message_ends_it(self, sqs: Any) -> None:
        url = create(sqs)
        put(sqs, url, "a1", "b1")
        (first,) = take(sqs, url, 1, ReceiveRequestAttemptId="try")
        handle = first["ReceiptHandle"]
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=600)
        code, text = refused(sqs.receive_message, QueueUrl=url, ReceiveRequestAttemptId="try")
        assert (code, text) == ("InvalidParameterValue", NOT_RETRYABLE)
        assert bodies(take(sqs, url, 1, ReceiveRequestAttemptId="another")) == ["b1"]

    def test_only_on_fifo_and_of_right_form(self, sqs: Any) -> None:
        standard = sqs.create_queue(QueueName="standard")["QueueUrl"]
        sqs.send_message(QueueUrl=standard, MessageBody="one")
        assert bodies(take(sqs, standard, ReceiveRequestAttemptId="x")) == ["one"]
        assert take(sqs, standard, ReceiveRequestAttemptId="x") == [], "a standard queue takes no notice of it"
        url = create(sqs)
        for value in ("x" * 129, "a b"):
            code, text = refused(sqs.receive_message, QueueUrl=url, ReceiveRequestAttemptId=value)
            assert (code, TOKEN in text) == ("InvalidParameterValue", True)
        assert take(sqs, url, ReceiveRequestAttemptId="x" * 128) == []


class TestDeadLetters:
    def test_order_group_and_a_new_time(self, sqs: Any, veilmq_server: LocalServer) -> None:
        dead = create(sqs, "dead.fifo")
        arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
        url = create(sqs, RedrivePolicy=policy)
        put(sqs, url, "a1", "a2", "a3")
        (old, _) = take(sqs, url, 2, VisibilityTimeout=5)
        veilmq_server.advance(minutes=1)
        assert bodies(take(sqs, url)) == ["a3"]
        moved = take(sqs, dead)
        assert bodies(moved) == ["a1", "a2"]
        shown = moved[0]["Attributes"]
        assert shown["MessageGroupId"] == "a"
        # "The original message's deduplication ID will be replaced with the original message's ID" (Developer Guide).
        assert old["Attributes"]["MessageDeduplicationId"] != old["MessageId"] == moved[0]["MessageId"]
        assert shown["MessageDeduplicationId"] == old["MessageId"]
        assert shown["DeadLetterQueueSourceArn"].endswith(":jobs.fifo")
        assert int(shown["SentTimestamp"]) >= int(old["Attributes"]["SentTimestamp"]) + 60_000
        assert shown["SequenceNumber"] > old["Attributes"]["SequenceNumber"]

    def test_the_target_is_fifo_too(self, sqs: Any) -> None:
        standard = sqs.create_queue(QueueName="standard")["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=standard, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
        code, text = refused(
            sqs.create_queue, QueueName="jobs.fifo", Attributes={"FifoQueue": "true", "RedrivePolicy": policy}
        )
        assert (code, "same type" in text) == ("InvalidParameterValue", True)


class TestAttributes:
    def test_defaults(self, sqs: Any) -> None:
        url = sqs.create_queue(QueueName="plain.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
        shown = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert {name: shown[name] for name in shown if "Fifo" in name or "Dedup" in name} == {
            "FifoQueue": "true",
            "ContentBasedDeduplication": "false",
            "DeduplicationScope": "queue",
            "FifoThroughputLimit": "perQueue",
        }

    @for_each(
        "name, attributes, code, said",
        [
            ("jobs.fifo", {}, "InvalidParameterValue", NOT_FIFO),
            ("jobs", {"FifoQueue": "true"}, "InvalidParameterValue", "must end with .fifo suffix"),
            ("jobs", {"FifoQueue": "false"}, "InvalidAttributeName", "Unknown Attribute FifoQueue."),
            ("jobs", {"ContentBasedDeduplication": "true"}, "InvalidAttributeName", "ContentBasedDeduplication"),
            ("jobs", {"DeduplicationScope": "queue"}, "InvalidAttributeName", "DeduplicationScope"),
            ("jobs.fifo", {"FifoQueue": "true", "FifoThroughputLimit": "x"}, "InvalidAttributeValue", "Throughput"),
            (
                "jobs.fifo",
                {"FifoQueue": "true", "FifoThroughputLimit": "perMessageGroupId"},
                "InvalidAttributeValue",
                THROUGHPUT,
            ),
            ("x" * 76 + ".fifo", {"FifoQueue": "true"}, "InvalidParameterValue", "1 to 80"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, sqs: Any, name: str, attributes: dict[str, str], code: str, said: str
    ) -> None:
        found, text = refused(sqs.create_queue, QueueName=name, Attributes=attributes)
        assert (found, said in text) == (code, True), text
        assert "QueueUrls" not in sqs.list_queues()

    def test_a_name_of_eighty_characters(self, sqs: Any) -> None:
        assert create(sqs, "x" * 75 + ".fifo").endswith("x.fifo")

    def test_the_limit_of_a_group_needs_the_scope_of_a_group(self, sqs: Any) -> None:
        url = create(sqs)
        per_group = {"FifoThroughputLimit": "perMessageGroupId"}
        code, text = refused(sqs.set_queue_attributes, QueueUrl=url, Attributes=per_group)
        assert (code, THROUGHPUT in text) == ("InvalidAttributeValue", True)
        sqs.set_queue_attributes(QueueUrl=url, Attributes=per_group | {"DeduplicationScope": "messageGroup"})
        shown = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert (shown["FifoThroughputLimit"], shown["DeduplicationScope"]) == ("perMessageGroupId", "messageGroup")
        scope = {"DeduplicationScope": "queue"}
        assert refused(sqs.set_queue_attributes, QueueUrl=url, Attributes=scope)[0] == "InvalidAttributeValue"

    def test_the_kind_cannot_change(self, sqs: Any) -> None:
        url = create(sqs)
        sqs.set_queue_attributes(QueueUrl=url, Attributes={"FifoQueue": "true"})
        code, text = refused(sqs.set_queue_attributes, QueueUrl=url, Attributes={"FifoQueue": "false"})
        words = "Invalid value for the parameter FifoQueue. Reason: Modifying queue type is not supported."
        assert (code, text) == ("InvalidAttributeValue", words)

    def test_what_a_standard_queue_does_not_take(self, sqs: Any) -> None:
        url = sqs.create_queue(QueueName="standard")["QueueUrl"]
        code, text = refused(sqs.send_message, QueueUrl=url, MessageBody="x", MessageDeduplicationId="1")
        assert (code, OTHER_TYPE in text) == ("InvalidParameterValue", True)
        code, text = refused(sqs.send_message, QueueUrl=create(sqs), MessageBody="x")
        assert (code, "MessageGroupId" in text) == ("MissingParameter", True)


class TestFairQueues:
    @pytest.mark.slow
    def test_a_tenant_with_ten_thousand_does_not_starve_one_with_ten(self, sqs: Any) -> None:
        url = sqs.create_queue(QueueName="tenants")["QueueUrl"]
        noise = [{"Id": str(i), "MessageBody": "noisy", "MessageGroupId": "noisy"} for i in range(10)]
        with ThreadPoolExecutor(8) as pool:
            sent = list(pool.map(lambda _: sqs.send_message_batch(QueueUrl=url, Entries=noise), range(1_000)))
        assert sum(len(one["Successful"]) for one in sent) == 10_000
        for number in range(10):
            sqs.send_message(QueueUrl=url, MessageBody=f"quiet {number}", MessageGroupId="quiet")
        got = [body for _ in range(2) for body in bodies(take(sqs, url))]
        assert [body for body in got if body != "noisy"] == [f"quiet {number}" for number in range(10)]
        counts = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert counts["ApproximateNumberOfMessages"] == "9990"

    def test_its_messages_are_received_in_parallel_and_show_their_group(self, sqs: Any) -> None:
        url = sqs.create_queue(QueueName="tenants")["QueueUrl"]
        put(sqs, url, "a1", "a2", "b1")
        one, two = take(sqs, url, 1), take(sqs, url, 2)
        assert bodies(one + two) == ["a1", "b1", "a2"]
        assert [message["Attributes"]["MessageGroupId"] for message in two] == ["b", "a"]
        assert "SequenceNumber" not in two[0]["Attributes"]
