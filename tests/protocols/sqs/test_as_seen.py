"""What AWS answers where its reference is silent or says otherwise, each with where it was seen.

Strategy: real clients of both forms on a real store; only the clock is the test's.
"""

import base64
import json
from typing import Any

import msgspec
import pytest

from veilmq.model.settings.access import Action, Grant
from veilmq.testing.for_each import for_each

ARN = "arn:aws:sqs:us-east-1:111122223333:"
COUNTS = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible", "ApproximateNumberOfMessagesDelayed")


def counts(client: Any, url: str) -> tuple[int, int, int]:
    """Visible, in flight, delayed."""
    shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=list(COUNTS))["Attributes"]
    visible, in_flight, delayed = (int(shown[name]) for name in COUNTS)
    return visible, in_flight, delayed


class TestTheNameOfAQueueInPlaceOfItsUrl:
    """aws-sdk-js-v3 #6150: programs in production name queues so, and its documentation tells how to go on with it."""

    def test_it_is_the_callers_own(self, served: Any, client: Any, url: str) -> None:
        client.send_message(QueueUrl="jobs", MessageBody="x")
        (message,) = client.receive_message(QueueUrl="jobs")["Messages"]
        client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        assert counts(client, url) == (0, 0, 0)
        other = served.connect(key=served.other)
        assert served.refused(other.send_message, QueueUrl="jobs", MessageBody="x") == (
            "AWS.SimpleQueueService.NonExistentQueue",
            "The specified queue does not exist.",
        )

    def test_a_fifo_queue_too(self, client: Any) -> None:
        client.create_queue(QueueName="jobs.fifo", Attributes={"FifoQueue": "true"})
        sent = client.send_message(
            QueueUrl="jobs.fifo", MessageBody="x", MessageGroupId="g", MessageDeduplicationId="d"
        )
        assert "SequenceNumber" in sent

    def test_a_slash_at_the_end_of_a_url_changes_nothing(self, client: Any, url: str) -> None:
        """So the API Reference writes it in the examples of the Query form."""
        client.send_message(QueueUrl=url + "/", MessageBody="x")
        assert counts(client, url) == (1, 0, 0)

    def test_a_url_of_the_form_that_emulators_gave_out_is_the_callers_own(
        self, served: Any, client: Any, url: str
    ) -> None:
        """softwaremill/elasticmq #117, #421, localstack/localstack #2518, #9185: `/queue/NAME` without an account."""
        client.send_message(QueueUrl="http://127.0.0.1:9324/queue/jobs", MessageBody="x")
        (message,) = client.receive_message(QueueUrl="http://127.0.0.1:9324/queue/jobs/")["Messages"]
        client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        assert counts(client, url) == (0, 0, 0)
        other = served.connect(key=served.other)
        assert served.refused(other.send_message, QueueUrl="/queue/jobs", MessageBody="x") == (
            "AWS.SimpleQueueService.NonExistentQueue",
            "The specified queue does not exist.",
        )


class TestTheApproximateCounters:
    """They are exact here, whether a sweep has come or not: what the next receive would get is visible."""

    def test_a_receive_that_holds_nothing(self, client: Any, url: str) -> None:
        client.send_message(QueueUrl=url, MessageBody="x")
        assert client.receive_message(QueueUrl=url, VisibilityTimeout=0)["Messages"]
        assert counts(client, url) == (1, 0, 0)

    @pytest.mark.parametrize(("seconds", "expected"), [(29, (0, 1, 1)), (30, (1, 0, 1)), (60, (2, 0, 0))])
    def test_leases_and_delays_that_end(
        self, served: Any, client: Any, url: str, seconds: int, expected: tuple[int, int, int]
    ) -> None:
        client.send_message(QueueUrl=url, MessageBody="held")
        client.send_message(QueueUrl=url, MessageBody="delayed", DelaySeconds=60)
        assert client.receive_message(QueueUrl=url)["Messages"]
        served.clock.advance(seconds * 1_000_000)
        assert counts(client, url) == expected

    def test_a_move_task_counts_what_is_visible_again(self, client: Any, url: str) -> None:
        client.create_queue(
            QueueName="source",
            Attributes={"RedrivePolicy": json.dumps({"deadLetterTargetArn": ARN + "jobs", "maxReceiveCount": 1})},
        )
        client.send_message(QueueUrl=url, MessageBody="x")
        assert client.receive_message(QueueUrl=url, VisibilityTimeout=0)["Messages"]
        client.start_message_move_task(SourceArn=ARN + "jobs", DestinationArn=ARN + "source")
        (task,) = client.list_message_move_tasks(SourceArn=ARN + "jobs")["Results"]
        assert task["ApproximateNumberOfMessagesToMove"] == 1


class TestCreateQueueThatMeetsAQueue:
    """ "A queue already exists with the same name and a different value for attribute ..." names what differs."""

    @for_each(
        "attributes",
        [
            {"SqsManagedSseEnabled": "true"},
            {"VisibilityTimeout": "30", "MaximumMessageSize": "1048576", "MessageRetentionPeriod": "345600"},
            {"Policy": "", "RedrivePolicy": "", "KmsMasterKeyId": ""},
            {"RedriveAllowPolicy": '{"redrivePermission":"allowAll"}'},
        ],
    )
    def test_defaults_that_are_spelled_out_are_no_difference(
        self, client: Any, url: str, attributes: dict[str, str]
    ) -> None:
        assert client.create_queue(QueueName="jobs", Attributes=attributes)["QueueUrl"] == url
        client.set_queue_attributes(QueueUrl=url, Attributes={"SqsManagedSseEnabled": "true"})
        assert client.create_queue(QueueName="jobs", Attributes=attributes)["QueueUrl"] == url

    @for_each(
        ("name", "text"),
        [
            ("SqsManagedSseEnabled", "false"),
            ("KmsMasterKeyId", "alias/mine"),
            ("Policy", '{"Statement":[]}'),
            ("DelaySeconds", "1"),
        ],
    )
    def test_the_attribute_that_differs_is_named(
        self, served: Any, client: Any, url: str, name: str, text: str
    ) -> None:
        words = f"A queue already exists with the same name and a different value for attribute {name}"
        found = served.refused(client.create_queue, QueueName="jobs", Attributes={name: text})
        assert found == ("QueueAlreadyExists", words)
        client.set_queue_attributes(QueueUrl=url, Attributes={name: text})
        assert client.create_queue(QueueName="jobs", Attributes={name: text})["QueueUrl"] == url

    def test_the_one_label_of_several_that_differs_is_named(self, served: Any, client: Any) -> None:
        asked = {"KmsMasterKeyId": "alias/mine", "Policy": '{"Statement":[]}'}
        client.create_queue(QueueName="locked", Attributes=asked)
        found = served.refused(
            client.create_queue, QueueName="locked", Attributes={**asked, "Policy": '{"Statement":[],"Id":"x"}'}
        )
        assert found[1].endswith("attribute Policy")
        found = served.refused(client.create_queue, QueueName="locked", Attributes={**asked, "KmsMasterKeyId": "b"})
        assert found[1].endswith("attribute KmsMasterKeyId")

    def test_a_key_is_reused_for_five_minutes_unless_one_says_otherwise(self, served: Any, client: Any) -> None:
        """ "KmsDataKeyReusePeriodSeconds: Default: 300 (5 minutes)": what GetQueueAttributes shows can be asked for."""
        key, default = {"KmsMasterKeyId": "alias/mine"}, {"KmsDataKeyReusePeriodSeconds": "300"}
        url = client.create_queue(QueueName="locked", Attributes=key)["QueueUrl"]
        shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=list(default))["Attributes"]
        assert client.create_queue(QueueName="locked", Attributes=key | shown)["QueueUrl"] == url
        client.set_queue_attributes(QueueUrl=url, Attributes=key | {"KmsDataKeyReusePeriodSeconds": "600"})
        assert client.create_queue(QueueName="locked", Attributes=key)["QueueUrl"] == url
        found = served.refused(client.create_queue, QueueName="locked", Attributes=key | default)
        assert found[1].endswith("attribute KmsDataKeyReusePeriodSeconds")

    def test_encryption_that_was_ended(self, served: Any, client: Any, url: str) -> None:
        client.set_queue_attributes(QueueUrl=url, Attributes={"SqsManagedSseEnabled": "false"})
        found = served.refused(client.create_queue, QueueName="jobs", Attributes={"SqsManagedSseEnabled": "true"})
        assert found[1].endswith("attribute SqsManagedSseEnabled")


@for_each(
    ("name", "text"),
    [
        ("FifoQueue", "false"),
        ("ContentBasedDeduplication", "false"),
        ("DeduplicationScope", "queue"),
        ("FifoThroughputLimit", "perQueue"),
    ],
)
def test_a_standard_queue_does_not_know_what_only_fifo_queues_have(
    served: Any, client: Any, url: str, name: str, text: str
) -> None:
    """aws/aws-sdk-ruby #1350: refused, where one would expect `false`."""
    for call, given in (
        (client.get_queue_attributes, {"QueueUrl": url, "AttributeNames": ["QueueArn", name]}),
        (client.set_queue_attributes, {"QueueUrl": url, "Attributes": {name: text}}),
        (client.create_queue, {"QueueName": "jobs", "Attributes": {name: text}}),
    ):
        words = f"Unknown Attribute {name}."
        if "Attributes" in given and name in {"DeduplicationScope", "FifoThroughputLimit"}:
            words = f"You can specify the {name} only when FifoQueue is set to true."
        assert served.refused(call, **given) == ("InvalidAttributeName", words)
    assert name not in client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    fifo = client.create_queue(QueueName="jobs.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    assert set(client.get_queue_attributes(QueueUrl=fifo, AttributeNames=[name])["Attributes"]) == {name}


def test_a_redrive_policy_needs_its_count(served: Any, client: Any, url: str) -> None:
    """rubyonjets/jets #101, against the reference's "Default: 10"."""
    policy = json.dumps({"deadLetterTargetArn": ARN + "dead"})
    words = "Reason: Redrive policy does not contain mandatory attribute: maxReceiveCount."
    found = served.refused(client.set_queue_attributes, QueueUrl=url, Attributes={"RedrivePolicy": policy})
    assert found == ("InvalidParameterValue", f"Value {policy} for parameter RedrivePolicy is invalid. {words}")


@for_each(
    ("name", "value", "words"),
    [
        # softwaremill/elasticmq #373
        (
            "piyo",
            {"DataType": "String", "StringValue": ""},
            "Message (user) attribute 'piyo' must contain a non-empty value of type 'String'.",
        ),
        # grafana/k6-jslib-aws #65
        (
            "my-attribute",
            {"DataType": "my-attribute-value", "StringValue": "x"},
            "The type of message (user) attribute 'my-attribute' is invalid. You must use only the following supported "
            "type prefixes: Binary, Number, String.",
        ),
        # aws/aws-sdk-java #1692
        (
            "HTTPStatus",
            {"DataType": "", "StringValue": "200"},
            "The message attribute 'HTTPStatus' must contain non-empty message attribute type.",
        ),
        # boto/boto #3348
        (
            "PARAMETER_NAME",
            {},
            "The message attribute 'PARAMETER_NAME' must contain non-empty message attribute value.",
        ),
        # aws/aws-sdk-php #694
        ("", {"DataType": "String", "StringValue": "x"}, "The request must contain non-empty message attribute name."),
        (
            "n",
            {"DataType": "Number.int", "StringValue": "one"},
            "Can't cast the value of message (user) attribute 'n' to a number.",
        ),
    ],
)
def test_what_is_wrong_with_a_message_attribute(
    served: Any, client: Any, url: str, name: str, value: dict[str, str], words: str
) -> None:
    message = {"MessageBody": "x", "MessageAttributes": {name: value}}
    assert served.refused(client.send_message, QueueUrl=url, **message) == ("InvalidParameterValue", words)
    # ruby-shoryuken/shoryuken #769, lumigo-io/lumigo-CLI #94, nulib/meadow #3349: a list, though it is empty, and the
    # whole batch.
    code, words = "AWS.SimpleQueueService.UnsupportedOperation", "Message attribute list values in {} operation are not"
    empty = "BinaryListValues" if name else "StringListValues"
    lists = {"DataType": "String", "StringValue": "v", empty: []}
    message["MessageAttributes"] = {"a": lists}
    found = served.refused(client.send_message, QueueUrl=url, **message)
    assert found == (code, words.format("SendMessage") + " supported.")
    entries = [{"Id": "1", "MessageBody": "x"}, {"Id": "2", **message}]
    found = served.refused(client.send_message_batch, QueueUrl=url, Entries=entries)
    assert found == (code, words.format("SendMessageBatch") + " supported.")
    assert counts(client, url) == (0, 0, 0)


@for_each(
    ("value", "shown"),
    [
        ({"DataType": "String", "StringValue": "v", "BinaryValue": b""}, {"DataType": "String", "StringValue": "v"}),
        ({"DataType": "Binary", "BinaryValue": b"v", "StringValue": ""}, {"DataType": "Binary", "BinaryValue": b"v"}),
    ],
)
def test_an_empty_value_of_the_other_kind_is_none(
    client: Any, url: str, value: dict[str, Any], shown: dict[str, Any]
) -> None:
    """aws/aws-sdk-go #178: some clients send it along."""
    client.send_message(QueueUrl=url, MessageBody="x", MessageAttributes={"a": value})
    (message,) = client.receive_message(QueueUrl=url, MessageAttributeNames=["All"])["Messages"]
    assert message["MessageAttributes"] == {"a": shown}


def test_an_empty_value_of_the_other_kind_is_none_in_a_system_attribute_too(served: Any, client: Any, url: str) -> None:
    header: dict[str, Any] = {"DataType": "String", "StringValue": "Root=1-2-3", "BinaryValue": b""}
    given = {"QueueUrl": url, "MessageBody": "x"}
    client.send_message(**given, MessageSystemAttributes={"AWSTraceHeader": header})
    (message,) = client.receive_message(QueueUrl=url, MessageSystemAttributeNames=["AWSTraceHeader"])["Messages"]
    assert message["Attributes"] == {"AWSTraceHeader": "Root=1-2-3"}
    for wrong in ({"AWSTraceHeader": {**header, "BinaryValue": b"v"}}, {"AWSTraceHeader": header, "Other": header}):
        assert served.refused(client.send_message, **given, MessageSystemAttributes=wrong)[0] == "InvalidParameterValue"


@for_each("text", ["null", "NULL", "nuLl"])
def test_bytes_whose_base64_is_a_word_stay_bytes(client: Any, url: str, text: str) -> None:
    value = {"DataType": "Binary", "BinaryValue": base64.b64decode(text)}
    entry = {"MessageBody": text, "MessageAttributes": {text: value}}
    client.send_message(QueueUrl=url, **entry)
    client.send_message_batch(QueueUrl=url, Entries=[{"Id": text, **entry}])
    given = {"QueueUrl": url, "MaxNumberOfMessages": 10, "MessageAttributeNames": ["All"]}
    shown = [(each["Body"], each["MessageAttributes"]) for each in client.receive_message(**given)["Messages"]]
    assert shown == [(text, {text: value})] * 2


@pytest.mark.parametrize(("length", "code"), [(524_288, None), (524_289, "AWS.SimpleQueueService.BatchRequestTooLong")])
def test_an_entry_that_is_refused_counts_for_the_length_of_its_batch(
    served: Any, client: Any, url: str, length: int, code: str | None
) -> None:
    """BatchRequestTooLong: "The length of all the messages put together is more than the limit." """
    attribute = {"DataType": "String", "StringValue": "v" * 90}
    entries = [
        {"Id": "right", "MessageBody": "x" * length},
        {"Id": "wrong", "MessageBody": "x" * (524_288 - 100), "MessageAttributes": {"AWS.": attribute}},
    ]
    if code is None:
        answer = client.send_message_batch(QueueUrl=url, Entries=entries)
        assert [each["Id"] for each in answer["Successful"]] == ["right"]
        assert [each["Id"] for each in answer["Failed"]] == ["wrong"]
    else:
        words = "Batch requests cannot be longer than 1048576 bytes. You have sent 1048577 bytes."
        found = served.refused(client.send_message_batch, QueueUrl=url, Entries=entries)
        assert found == (code, words)
        assert counts(client, url) == (0, 0, 0)


def test_a_dead_letter_keeps_its_times(served: Any, client: Any, url: str) -> None:
    """softwaremill/elasticmq #386: SentTimestamp and ApproximateFirstReceiveTimestamp are those of the source."""
    redrive = json.dumps({"deadLetterTargetArn": ARN + "jobs", "maxReceiveCount": 1})
    source = client.create_queue(QueueName="source", Attributes={"RedrivePolicy": redrive})["QueueUrl"]
    client.send_message(QueueUrl=source, MessageBody="x")
    served.later(1)
    asked = {"AttributeNames": ["All"], "VisibilityTimeout": 0}
    (first,) = client.receive_message(QueueUrl=source, **asked)["Messages"]
    served.later(5)
    assert "Messages" not in client.receive_message(QueueUrl=source, **asked)
    for _ in range(2):
        served.later(1)
        (dead,) = client.receive_message(QueueUrl=url, **asked)["Messages"]
        for name in ("SentTimestamp", "ApproximateFirstReceiveTimestamp"):
            assert dead["Attributes"][name] == first["Attributes"][name]
    client.start_message_move_task(SourceArn=ARN + "jobs")
    served.later(5)
    (again,) = client.receive_message(QueueUrl=source, **asked)["Messages"]
    times = [int(again["Attributes"][name]) for name in ("SentTimestamp", "ApproximateFirstReceiveTimestamp")]
    assert times == sorted(times)
    assert times[0] > int(first["Attributes"]["ApproximateFirstReceiveTimestamp"])


@for_each("group", [None, ""], fresh="served")
def test_a_fifo_batch_with_an_entry_that_names_no_group_is_refused_as_a_whole(
    served: Any, client: Any, group: str | None
) -> None:
    """And with another code than a single message: aws/aws-sdk-java #1316, Jimdo/sqs-dead-letter-handling #10,
    lumigo-io/lumigo-CLI #100, ruby-shoryuken/shoryuken #470."""
    attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
    url = client.create_queue(QueueName="jobs.fifo", Attributes=attributes)["QueueUrl"]
    words = "The request must contain the parameter MessageGroupId."
    wrong: dict[str, str] = {"MessageBody": "2"} if group is None else {"MessageBody": "2", "MessageGroupId": group}
    entries = [{"Id": "1", "MessageBody": "1", "MessageGroupId": "a"}, {"Id": "2", **wrong}]
    found = served.refused(client.send_message_batch, QueueUrl=url, Entries=entries)
    assert found == ("InvalidParameterValue", words)
    assert served.refused(client.send_message, QueueUrl=url, **wrong) == ("MissingParameter", words)
    assert counts(client, url) == (0, 0, 0)
    entries[1] = {"Id": "2", "MessageBody": "", "MessageGroupId": "a"}
    answer = client.send_message_batch(QueueUrl=url, Entries=entries)
    assert ([one["Id"] for one in answer["Successful"]], [one["Id"] for one in answer["Failed"]]) == (["1"], ["2"])


def test_a_fifo_batch_with_an_entry_without_a_deduplication_id_is_refused_as_a_whole(served: Any, client: Any) -> None:
    """localstack/localstack #8596, if the queue makes none."""
    url = client.create_queue(QueueName="jobs.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    entries = [{"Id": each, "MessageBody": each, "MessageGroupId": "a"} for each in "123"]
    code, text = served.refused(client.send_message_batch, QueueUrl=url, Entries=entries)
    words = (
        "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided explicitly"
    )
    assert (code, text) == ("InvalidParameterValue", words)
    assert counts(client, url) == (0, 0, 0)
    entries[1]["MessageDeduplicationId"] = "b"
    assert served.refused(client.send_message_batch, QueueUrl=url, Entries=entries) == (code, text)
    assert counts(client, url) == (0, 0, 0)
    wrong = [entries[1], {"Id": "4", "MessageBody": "", "MessageGroupId": "a"}]
    assert served.refused(client.send_message_batch, QueueUrl=url, Entries=wrong) == (code, text)
    client.set_queue_attributes(QueueUrl=url, Attributes={"ContentBasedDeduplication": "true"})
    answer = client.send_message_batch(QueueUrl=url, Entries=entries)
    assert [one["Id"] for one in answer["Successful"]] == ["1", "2", "3"]


def test_a_fifo_batch_that_may_not_be_sent_is_told_so_and_nothing_of_the_queue(served: Any, client: Any) -> None:
    url = client.create_queue(QueueName="jobs.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    entries: list[dict[str, str]] = [{"Id": each, "MessageBody": each, "MessageGroupId": "a"} for each in "12"]
    entries[0]["MessageDeduplicationId"] = "b"
    missing = served.refused(client.send_message_batch, QueueUrl=url.replace("jobs", "none"), Entries=entries)
    assert missing[0] == "AWS.SimpleQueueService.NonExistentQueue"
    ring = served.codec._verifier._keyring
    key = ring.keys["AKIDEXAMPLE"]
    ring.keys[key.id] = msgspec.structs.replace(key, grants=(Grant(frozenset({Action.RECEIVE})),))
    assert served.refused(client.send_message_batch, QueueUrl=url, Entries=entries)[0] == "AccessDenied"
    friend = served.connect(key=served.other)
    assert served.refused(friend.send_message_batch, QueueUrl=url, Entries=entries)[0] == "AccessDenied"


def test_a_message_of_a_batch_that_is_too_long_has_words_of_its_own(served: Any, client: Any) -> None:
    url = client.create_queue(QueueName="small", Attributes={"MaximumMessageSize": "1024"})["QueueUrl"]
    code, text = served.refused(client.send_message, QueueUrl=url, MessageBody="x" * 1_025)
    words = "Reason: Message must be shorter than 1024 bytes."
    assert (code, text) == ("InvalidParameterValue", f"One or more parameters are invalid. {words}")
    answer = client.send_message_batch(QueueUrl=url, Entries=[{"Id": "1", "MessageBody": "x" * 1_025}])
    (failed,) = answer["Failed"]
    words = f"One or more parameters cannot be validated. {words}"
    assert (failed["Code"], failed["Message"]) == ("InvalidParameterValue", words)


def test_an_entry_with_a_parameter_of_the_other_type_of_queue_has_words_of_its_own(client: Any, url: str) -> None:
    """aws/aws-sdk-js #3187, suredone/qdone #55: without the parameter, which a single send names."""
    fifo = client.create_queue(QueueName="jobs.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    of_fifo = {"MessageGroupId": "g", "MessageDeduplicationId": "d"}
    for queue, entry in ((url, of_fifo), (fifo, {**of_fifo, "DelaySeconds": 1})):
        answer = client.send_message_batch(QueueUrl=queue, Entries=[{"Id": "1", "MessageBody": "x", **entry}])
        (failed,) = answer["Failed"]
        words = "The request include parameter that is not valid for this queue type"
        assert (failed["Code"], failed["Message"]) == ("InvalidParameterValue", words)


def test_names_of_attributes_in_other_alphabets(client: Any, url: str) -> None:
    given = {"gr\u00f6\u00dfe.\u4e2d\u6587": {"DataType": "String", "StringValue": "v"}}
    sent = client.send_message(QueueUrl=url, MessageBody="x", MessageAttributes=given)
    (message,) = client.receive_message(QueueUrl=url, MessageAttributeNames=["gr\u00f6.*", *given])["Messages"]
    assert message["MessageAttributes"] == given
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]


def test_a_queue_may_be_its_own_dead_letter_queue(served: Any, client: Any, url: str) -> None:
    policy = json.dumps({"deadLetterTargetArn": ARN + "jobs", "maxReceiveCount": 1})
    client.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy})
    assert client.list_dead_letter_source_queues(QueueUrl=url)["queueUrls"] == [url]
    client.send_message(QueueUrl=url, MessageBody="x")
    for count in "123":
        asked = {"MessageSystemAttributeNames": ["All"], "VisibilityTimeout": 1}
        (message,) = client.receive_message(QueueUrl=url, **asked)["Messages"]
        assert message["Attributes"]["ApproximateReceiveCount"] == count
        served.later(1)
    assert counts(client, url) == (1, 0, 0)
    client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    assert counts(client, url) == (0, 0, 0)


def test_a_batch_has_no_list_of_what_did_not_happen(client: Any, url: str) -> None:
    """The service model requires both lists, but AWS omits an empty one (aws/aws-sdk #657, async-aws/aws #1620), and
    `hasFailed()` of the SDK for Java 2 is true of an empty one (aws/aws-sdk-java-v2 #4713, #4759)."""

    def lists(answer: dict[str, Any]) -> set[str]:
        return set(answer) - {"ResponseMetadata"}

    sent = client.send_message_batch(QueueUrl=url, Entries=[{"Id": "1", "MessageBody": "x"}])
    assert lists(sent) == {"Successful"}
    (message,) = client.receive_message(QueueUrl=url)["Messages"]
    entry = {"Id": "1", "ReceiptHandle": message["ReceiptHandle"]}
    changed = client.change_message_visibility_batch(QueueUrl=url, Entries=[{**entry, "VisibilityTimeout": 5}])
    assert lists(changed) == {"Successful"}
    assert lists(client.delete_message_batch(QueueUrl=url, Entries=[entry])) == {"Successful"}
    refused = client.delete_message_batch(QueueUrl=url, Entries=[{"Id": "1", "ReceiptHandle": "nonsense"}])
    assert lists(refused) == {"Failed"}
    assert lists(client.send_message_batch(QueueUrl=url, Entries=[{"Id": "1", "MessageBody": ""}])) == {"Failed"}


def test_a_standard_queue_takes_no_notice_of_an_attempt_id(client: Any, url: str) -> None:
    """awspring/spring-cloud-aws #529: its first releases sent one to every queue, and AWS took it."""
    for body in "ab":
        client.send_message(QueueUrl=url, MessageBody=body)
    asked = {"QueueUrl": url, "ReceiveRequestAttemptId": "try 1"}
    bodies = [message["Body"] for _ in range(3) for message in client.receive_message(**asked).get("Messages", ())]
    assert sorted(bodies) == ["a", "b"]


def test_true_and_false_are_read_in_any_case(client: Any) -> None:
    """ansible-collections/community.aws: `sqs_queue`, made for AWS, makes its FIFO queues with FifoQueue=True."""
    url = client.create_queue(QueueName="jobs.fifo", Attributes={"FifoQueue": "True"})["QueueUrl"]
    given = {"ContentBasedDeduplication": "TRUE", "SqsManagedSseEnabled": "False"}
    client.set_queue_attributes(QueueUrl=url, Attributes=given)
    names = ["FifoQueue", "ContentBasedDeduplication", "SqsManagedSseEnabled"]
    shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
    assert [shown[name] for name in names] == ["true", "true", "false"]
    same = {"FifoQueue": "true", "ContentBasedDeduplication": "true", "SqsManagedSseEnabled": "FALSE"}
    assert client.create_queue(QueueName="jobs.fifo", Attributes=same)["QueueUrl"] == url


def test_an_entry_without_its_lease_is_named(client: Any, url: str) -> None:
    """aws/aws-sdk-go-v2 #2250: it left 0 out, and this was the answer."""
    for body in "ab":
        client.send_message(QueueUrl=url, MessageBody=body)
    messages = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    entries = [{"Id": str(at), "ReceiptHandle": each["ReceiptHandle"]} for at, each in enumerate(messages)]
    entries[0]["VisibilityTimeout"] = 0
    answer = client.change_message_visibility_batch(QueueUrl=url, Entries=entries)
    assert [each["Id"] for each in answer["Successful"]] == ["0"]
    assert [(each["Code"], each["Message"]) for each in answer["Failed"]] == [
        (
            "MissingParameter",
            "The request must contain the parameter ChangeMessageVisibilityBatchRequestEntry.2.VisibilityTimeout.",
        )
    ]
