"""Queue attributes become settings, and settings the same attributes again."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilmq.model.instant import Instant
from veilmq.model.settings.queue import (
    DeduplicationScope,
    QueueCounts,
    QueueInfo,
    QueueKey,
    QueueSettings,
    RedriveAllowPolicy,
    RedrivePermission,
    RedrivePolicy,
)
from veilmq.protocols import show
from veilmq.protocols.sqs.addresses import arn, queue_of_arn
from veilmq.protocols.sqs.attributes import NAMES, attributes_of, settings_change
from veilmq.protocols.sqs.errors import Refusal
from veilmq.testing.for_each import for_each

QUEUE = QueueKey("111122223333", "eu-west-1", "jobs")
FIFO = QueueKey("111122223333", "eu-west-1", "jobs.fifo")
DEAD = QueueKey("111122223333", "eu-west-1", "dead")


def info(settings: QueueSettings, queue: QueueKey = QUEUE) -> QueueInfo:
    counts = QueueCounts(visible=1, delayed=2, in_flight=3)
    return QueueInfo(queue, 9, Instant(1_700_000_000_999_999), Instant(1_700_000_001_000_000), settings, counts)


def refused(attributes: dict[str, str], queue: QueueKey = QUEUE, creating: bool = False) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        settings_change(queue, attributes, creating)
    return caught.value.fault.code, caught.value.message


def test_a_new_queue_shows_amazons_defaults() -> None:
    assert attributes_of(info(QueueSettings()), ["All"]) == {
        "QueueArn": "arn:aws:sqs:eu-west-1:111122223333:jobs",
        "ApproximateNumberOfMessages": "1",
        "ApproximateNumberOfMessagesNotVisible": "3",
        "ApproximateNumberOfMessagesDelayed": "2",
        "CreatedTimestamp": "1700000000",
        "LastModifiedTimestamp": "1700000001",
        "VisibilityTimeout": "30",
        "DelaySeconds": "0",
        "MessageRetentionPeriod": "345600",
        "ReceiveMessageWaitTimeSeconds": "0",
        "MaximumMessageSize": "1048576",
        "SqsManagedSseEnabled": "true",
    }


def test_only_what_is_asked_for_is_shown() -> None:
    shown = attributes_of(info(QueueSettings()), ["DelaySeconds", "RedrivePolicy", "QueueArn"])
    assert shown == {"DelaySeconds": "0", "QueueArn": "arn:aws:sqs:eu-west-1:111122223333:jobs"}
    assert attributes_of(info(QueueSettings()), []) == {}


FULL = {
    "VisibilityTimeout": "43200",
    "DelaySeconds": "900",
    "MessageRetentionPeriod": "60",
    "ReceiveMessageWaitTimeSeconds": "20",
    "MaximumMessageSize": "1024",
    "Policy": '{"Version": "2012-10-17",\n "Statement": []}',
    "KmsMasterKeyId": "alias/my-key",
    "KmsDataKeyReusePeriodSeconds": "86400",
    "SqsManagedSseEnabled": "false",
    "RedriveAllowPolicy": '{"redrivePermission":"denyAll"}',
    "FifoQueue": "true",
    "ContentBasedDeduplication": "true",
    "DeduplicationScope": "messageGroup",
    "FifoThroughputLimit": "perMessageGroupId",
    "RedrivePolicy": '{"deadLetterTargetArn":"arn:aws:sqs:eu-west-1:111122223333:dead.fifo","maxReceiveCount":3}',
}


def test_every_attribute_comes_back_as_it_was_set() -> None:
    settings = QueueSettings(**settings_change(FIFO, FULL, creating=True))
    shown = attributes_of(info(settings, FIFO), ["All"])
    assert {name: shown[name] for name in FULL} == FULL | {"Policy": '{"Version":"2012-10-17","Statement":[]}'}
    assert set(shown) == NAMES - {"All"}
    assert settings.deduplication_scope is DeduplicationScope.GROUP
    assert settings.labels["sqs.Policy"] == FULL["Policy"]


def test_the_receive_count_may_be_a_number_or_a_text() -> None:
    for count in (3, "3"):
        policy = {"deadLetterTargetArn": arn(DEAD), "maxReceiveCount": count}
        change = settings_change(QUEUE, {"RedrivePolicy": json.dumps(policy)}, creating=False)
        assert change == {"redrive": RedrivePolicy(DEAD, 3)}


def test_redrive_policies_have_at_most_8192_characters() -> None:
    target = json.dumps({"deadLetterTargetArn": arn(DEAD), "maxReceiveCount": 3})
    for name, text in (("RedrivePolicy", target), ("RedriveAllowPolicy", '{"redrivePermission":"denyAll"}')):
        assert settings_change(QUEUE, {name: text.ljust(8_192)}, creating=False)
        code, words = refused({name: text.ljust(8_193)})
        assert code == ("InvalidParameterValue" if name == "RedrivePolicy" else "InvalidAttributeValue")
        assert "over 8192 characters" in words


@for_each(("count", "right"), [(0, False), (1, True), (2, True), (999, True), (1000, True), (1001, False)])
def test_receive_counts_have_a_range(count: int, right: bool) -> None:
    text = json.dumps({"deadLetterTargetArn": arn(DEAD), "maxReceiveCount": count})
    if right:
        assert settings_change(QUEUE, {"RedrivePolicy": text}, creating=False)
    else:
        code, message = refused({"RedrivePolicy": text})
        assert code == "InvalidParameterValue"
        assert f"Invalid value for maxReceiveCount: {count}, valid values are from 1 to 1000 both inclusive." in message


@for_each(
    ("policy", "reason"),
    [
        ("{", "not a valid JSON map"),
        ("[]", "not a valid JSON map"),
        ("1" * 5000, "not a valid JSON map"),
        ("{}", "mandatory attribute: maxReceiveCount"),
        (json.dumps({"deadLetterTargetArn": arn(DEAD)}), "mandatory attribute: maxReceiveCount"),
        (json.dumps({"deadLetterTargetArn": arn(DEAD), "maxReceiveCount": None}), "mandatory attribute"),
        ('{"maxReceiveCount": 1}', "mandatory attribute: deadLetterTargetArn"),
        *(
            (json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": 1}), reason)
            for target, reason in (
                (7, "Invalid value for deadLetterTargetArn"),
                ("dead", "Invalid value for deadLetterTargetArn"),
                ("arn:aws:sns:eu-west-1:111122223333:dead", "Only SQS queues are valid resources for deadLetter"),
                ("arn:aws:sqs:eu-west-1:444455556666:dead", "owner should be same"),
                ("arn:aws:sqs:us-east-1:111122223333:dead", "target must be in same region as the source."),
                ("arn:aws:sqs:eu-west-1:111122223333:dead.fifo", "queue must be same type of queue as the source.."),
            )
        ),
        *(
            (
                json.dumps({"deadLetterTargetArn": arn(DEAD), "maxReceiveCount": count}),
                "Invalid value for maxReceiveCount",
            )
            for count in (True, 1.5, "x", "", [1], "9" * 5000, -1)
        ),
    ],
)
def test_a_wrong_redrive_policy_says_what_is_wrong(policy: str, reason: str) -> None:
    code, message = refused({"RedrivePolicy": policy})
    assert code == "InvalidParameterValue"
    assert "for parameter RedrivePolicy is invalid" in message
    assert reason in message


def test_policies_end_with_an_empty_text() -> None:
    change = settings_change(QUEUE, {"RedrivePolicy": "", "RedriveAllowPolicy": "", "Policy": ""}, creating=False)
    assert change == {"redrive": None, "redrive_allow": None, "labels": {"sqs.Policy": ""}}
    settings = QueueSettings(labels={"sqs.Policy": ""})
    assert "Policy" not in attributes_of(info(settings), ["All"])


@for_each(
    ("policy", "permission", "sources"),
    [
        ({"redrivePermission": "allowAll"}, RedrivePermission.ALLOW_ALL, ()),
        ({"redrivePermission": "denyAll", "sourceQueueArns": []}, RedrivePermission.DENY_ALL, ()),
        (
            {"redrivePermission": "byQueue", "sourceQueueArns": [arn(QUEUE)] * 10},
            RedrivePermission.BY_QUEUE,
            (QUEUE,) * 10,
        ),
    ],
)
def test_redrive_allow_policies(
    policy: dict[str, Any], permission: RedrivePermission, sources: tuple[QueueKey]
) -> None:
    change = settings_change(DEAD, {"RedriveAllowPolicy": json.dumps(policy)}, creating=False)
    assert change == {"redrive_allow": RedriveAllowPolicy(permission, sources)}
    shown = json.loads(attributes_of(info(QueueSettings(**change)), ["RedriveAllowPolicy"])["RedriveAllowPolicy"])
    assert shown == {name: value for name, value in policy.items() if value}


UNSUPPORTED = ", as it\u2019s in an unsupported format."
ONE_TO_TEN = ". When you specify the byQueue permission type, you must also specify between 1 and 10 source queue ARNs."
BY_QUEUE_ALONE = ". You can specify source queue ARNs only when the permission type is byQueue."


@for_each(
    ("policy", "reason"),
    [
        ("{", UNSUPPORTED),
        ([], UNSUPPORTED),
        ({}, UNSUPPORTED),
        ({"redrivePermission": "some"}, UNSUPPORTED),
        ({"redrivePermission": ["allowAll"]}, UNSUPPORTED),
        ({"redrivePermission": "allowAll", "sourceQueueArns": [arn(QUEUE)]}, BY_QUEUE_ALONE),
        ({"redrivePermission": "denyAll", "sourceQueueArns": [arn(QUEUE)]}, BY_QUEUE_ALONE),
        ({"redrivePermission": "byQueue"}, ONE_TO_TEN),
        ({"redrivePermission": "byQueue", "sourceQueueArns": []}, ONE_TO_TEN),
        ({"redrivePermission": "byQueue", "sourceQueueArns": [arn(QUEUE)] * 11}, ONE_TO_TEN),
        ({"redrivePermission": "byQueue", "sourceQueueArns": [7]}, UNSUPPORTED),
        ({"redrivePermission": "byQueue", "sourceQueueArns": ["jobs"]}, UNSUPPORTED),
        ({"redrivePermission": "byQueue", "sourceQueueArns": "x"}, UNSUPPORTED),
    ],
)
def test_wrong_redrive_allow_policies(policy: object, reason: str) -> None:
    """The codes as in yavosh/pail, sqs-edge-cases."""
    text = policy if isinstance(policy, str) else json.dumps(policy)
    code, start = "InvalidParameterValue", f"Value {show(text)} for parameter RedriveAllowPolicy is invalid."
    if reason == UNSUPPORTED:
        code, start = "InvalidAttributeValue", "Invalid value for the parameter RedriveAllowPolicy."
    words = f"{start} Reason: Amazon SQS can't create the redrive allow policy{reason}"
    assert refused({"RedriveAllowPolicy": text}) == (code, words)


@for_each(
    ("attributes", "code"),
    [
        ({"QueueArn": "x"}, "InvalidAttributeName"),
        ({"All": "x"}, "InvalidAttributeName"),
        ({"": "x"}, "InvalidAttributeName"),
        ({"ApproximateNumberOfMessages": "1"}, "InvalidAttributeName"),
        ({"ContentBasedDeduplication": "true"}, "InvalidAttributeName"),
        ({"xml_body": "base64"}, "InvalidAttributeName"),
        ({"FifoQueue": "true"}, "InvalidAttributeName"),
        ({"FifoQueue": "false"}, "InvalidAttributeName"),
        ({"FifoQueue": "yes"}, "InvalidAttributeValue"),
        ({"Policy": "no object"}, "InvalidAttributeValue"),
        ({"Policy": "[]"}, "InvalidAttributeValue"),
        ({"Policy": "[" * 8_192}, "InvalidAttributeValue"),
        ({"Policy": "[" * 100_000}, "OverLimit"),
        ({"Policy": '"' + "x" * 65_536 + '"'}, "OverLimit"),
        ({"KmsMasterKeyId": "x" * 2_049}, "InvalidAttributeValue"),
        ({"KmsMasterKeyId": "\x00"}, "InvalidAttributeValue"),
        ({"SqsManagedSseEnabled": "yes"}, "InvalidAttributeValue"),
        ({"SqsManagedSseEnabled": "true", "KmsMasterKeyId": "k"}, "InvalidAttributeName"),
    ],
)
def test_what_cannot_be_set_is_named(attributes: dict[str, str], code: str) -> None:
    assert refused(attributes)[0] == code


def test_fifo_attributes_have_values_of_their_own() -> None:
    assert settings_change(FIFO, {"FifoQueue": "true"}, creating=False) == {}
    for attributes in (
        {"ContentBasedDeduplication": "1"},
        {"DeduplicationScope": "group"},
        {"FifoThroughputLimit": "perGroup"},
        {"DeduplicationScope": "queue", "FifoThroughputLimit": "perMessageGroupId"},
    ):
        assert refused(attributes, FIFO)[0] == "InvalidAttributeValue"


def test_one_kind_of_encryption_ends_the_other() -> None:
    change = settings_change(QUEUE, {"KmsMasterKeyId": "k"}, creating=False)
    assert change["labels"] == {"sqs.KmsMasterKeyId": "k", "sqs.SqsManagedSseEnabled": "false"}
    shown = attributes_of(info(QueueSettings(labels=change["labels"])), ["All"])
    assert (shown["KmsMasterKeyId"], shown["SqsManagedSseEnabled"]) == ("k", "false")
    assert shown["KmsDataKeyReusePeriodSeconds"] == "300"
    change = settings_change(QUEUE, {"SqsManagedSseEnabled": "true"}, creating=False)
    # Neither label is what a queue without any has, so that a CreateQueue which spells it out meets the same queue.
    assert change["labels"] == {"sqs.SqsManagedSseEnabled": "", "sqs.KmsMasterKeyId": ""}
    assert attributes_of(info(QueueSettings()), ["SqsManagedSseEnabled"]) == {"SqsManagedSseEnabled": "true"}


@for_each(("text", "label"), [("300", ""), ("0300", ""), ("0600", "600")])
def test_the_default_reuse_period_is_no_label(text: str, label: str) -> None:
    change = settings_change(QUEUE, {"KmsDataKeyReusePeriodSeconds": text}, creating=False)
    assert change["labels"] == {"sqs.KmsDataKeyReusePeriodSeconds": label}


def test_other_protocols_labels_are_not_shown() -> None:
    settings = QueueSettings(labels={"azure.Policy": "x", "Policy": "y"})
    assert set(attributes_of(info(settings), ["All"])) == set(attributes_of(info(QueueSettings()), ["All"]))


@given(st.text(max_size=60) | st.from_regex(r"arn:aws[a-z-]*:sqs:[a-z0-9-]*:[0-9]*:[A-Za-z0-9_.-]*", fullmatch=True))
def test_an_arn_is_a_queues_or_nobodys(text: str) -> None:
    queue = queue_of_arn(text)
    assert queue is None or text.partition(":sqs:")[2] == arn(queue).partition(":sqs:")[2]


@given(
    st.dictionaries(st.sampled_from(sorted(NAMES)) | st.text(max_size=10), st.text() | st.sampled_from(["true", "60"]))
)
def test_any_attributes_are_set_or_refused(attributes: dict[str, str]) -> None:
    for queue in (QUEUE, FIFO):
        for creating in (True, False):
            refusals = []
            try:
                QueueSettings(**settings_change(queue, attributes, creating))
            except Refusal as refusal:
                refusals.append(refusal)
            assert all(refusal.fault.status == 400 for refusal in refusals)
