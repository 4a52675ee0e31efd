"""What a policy may say when it is set, how it is shown, and to whom."""

import json
from typing import Any

import botocore.session
import pytest

from veilmq.model.commands import ChangeQueue, Origin
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.sqs.auth.policy import ACTIONS, ActionUnknown, check_rules
from veilmq.protocols.sqs.errors import LABEL_PREFIX
from veilmq.testing.for_each import for_each

OWNER, FRIEND = "111122223333", "444455556666"
ARN = f"arn:aws:sqs:us-east-1:{OWNER}:jobs"
STATEMENT = {"Effect": "Allow", "Principal": "*", "Action": "sqs:*", "Resource": ARN}
NO_POLICY = "Invalid value for the parameter Policy. Reason: "
TWICE = "ForAnyValue:ForAllValues:Bool"
NO_ACTION = "Please refer to the appropriate WSDL for a list of valid actions."


def text_of(**changes: Any) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": STATEMENT | changes})


def shown(client: Any, url: str, name: str = "Policy") -> dict[str, str]:
    found: dict[str, str] = client.get_queue_attributes(QueueUrl=url, AttributeNames=[name]).get("Attributes", {})
    return found


def test_the_actions_are_those_of_the_model_but_for_batches() -> None:
    operations = botocore.session.get_session().get_service_model("sqs").operation_names
    assert {name for name in operations if not name.endswith("Batch")} == ACTIONS


@for_each(
    ("action", "told"),
    [
        ("sqs:SendMessageBatch", "SQS:SendMessageBatch"),
        ("SQS:ChangeMessageVisibilityBatch", "SQS:ChangeMessageVisibilityBatch"),
        (["sqs:SendMessage", "sqs:Send"], "SQS:Send"),
        ("SendMessage", "SendMessage"),
        ("sns:Publish", "sns:Publish"),
        ("s3:*", "s3:*"),
        ("", ""),
    ],
)
@for_each("member", ["Action", "NotAction"])
def test_an_unknown_action_is_refused_and_changes_nothing(
    served: Any, client: Any, url: str, member: str, action: Any, told: str
) -> None:
    statement = {name: value for name, value in STATEMENT.items() if name != "Action"} | {member: action}
    given = {"Policy": json.dumps({"Statement": statement})}
    reason = f"Value {told} for parameter ActionName is invalid. Reason: {NO_ACTION}"
    assert served.refused(client.set_queue_attributes, QueueUrl=url, Attributes=given) == (
        "InvalidParameterValue", reason
    )  # fmt: skip
    assert shown(client, url) == {}


@for_each(
    "changes",
    [
        {"Action": ["sqs:SendMessage", "SQS:receivemessage", "sqs:Get*", "sqs:?agQueue", "*"]},
        {"Principal": {"AWS": [FRIEND, f"arn:aws:iam::{FRIEND}:root", f"arn:aws-cn:iam::{FRIEND}:role/path/x", "*"]}},
        {"Principal": {"AWS": f"arn:aws:sts::{FRIEND}:assumed-role/x/y"}},
        {"Principal": {"AWS": "AIDACKCEVSQ6C2EXAMPLE"}},
        {"Principal": {"AWS": "arn:aws:iam::cloudfront:user/CloudFront Origin Access Identity E1"}},
        {"Principal": {"Service": ["sns.amazonaws.com", "s3.amazonaws.com"]}},
        {"Principal": {"Federated": "cognito-identity.amazonaws.com", "CanonicalUser": "79a59df900b949e5"}},
        {"Condition": {"ArnLike": {"aws:SourceArn": "arn:aws:s3:*:*:b"}, "bool": {"aws:SecureTransport": "true"}}},
        {"Condition": {"StringEqualsIfExists": {"aws:SourceAccount": FRIEND}, "Null": {"aws:SourceIp": "false"}}},
        {"Condition": {"ForAnyValue:StringLike": {"aws:PrincipalOrgPaths": ["o-1/*"]}}},
        {"Condition": {"ForAllValues:NumericLessThanEqualsIfExists": {"aws:MultiFactorAuthAge": 3600}}},
    ],
    ids=str,
)
def test_what_policies_say_is_taken(client: Any, url: str, changes: dict[str, Any]) -> None:
    client.set_queue_attributes(QueueUrl=url, Attributes={"Policy": text_of(**changes)})
    assert json.loads(shown(client, url)["Policy"]) == json.loads(text_of(**changes))


@for_each(
    ("text", "why"),
    [
        ("{}", "it has no Statement"),
        ('{"Statement": [], "Statements": []}', "unknown element Statements"),
        (text_of(Principal={"Foo": "x"}), "Foo is no kind of principal"),
        (text_of(Principal={"AWS": "not-an-account"}), "not-an-account is no principal"),
        (text_of(Principal={"AWS": [FRIEND, "4444"]}), "4444 is no principal"),
        (text_of(Principal={"AWS": "arn:aws:sns:us-east-1:1:t"}), "arn:aws:sns:us-east-1:1:t is no principal"),
        (text_of(Condition={"Foo": {"aws:SourceIp": "::1"}}), "Foo is no operator of a condition"),
        (text_of(Condition={"IfExists": {"aws:SourceIp": "::1"}}), "IfExists is no operator of a condition"),
        (text_of(Condition={"NullIfExists": {"aws:SourceArn": "true"}}), "NullIfExists is no operator of a condition"),
        (
            text_of(Condition={"ForAnyValue:ForAllValues:Bool": {"k": "x"}}),
            "ForAnyValue:ForAllValues:Bool is no operator of a condition",
        ),
        (text_of(Condition={"ForSome:Bool": {"aws:SourceIp": "x"}}), "ForSome:Bool is no operator of a condition"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(served: Any, client: Any, url: str, text: str, why: str) -> None:
    refused = served.refused(client.set_queue_attributes, QueueUrl=url, Attributes={"Policy": text})
    assert refused == ("InvalidAttributeValue", f"{NO_POLICY}{why}.")
    assert shown(client, url) == {}


def test_one_that_is_in_force_is_not_asked_again(served: Any, client: Any, url: str) -> None:
    """Set before these rules: it goes on, and is shown."""
    queue = QueueKey(OWNER, "us-east-1", "jobs")
    statements = [STATEMENT, STATEMENT | {"Action": ["sqs:SendMessageBatch"], "Principal": {"Foo": "x"}}]
    change: Any = {"labels": {LABEL_PREFIX + "Policy": json.dumps({"Statement": statements})}}
    served.store.apply([ChangeQueue(queue=queue, origin=Origin("test", "test"), change=change)], served.clock.now)
    served.store.commit()
    served.connect("json", served.other).send_message(QueueUrl=url, MessageBody="x")
    assert json.loads(shown(client, url)["Policy"])["Statement"] == statements


@for_each(
    ("given", "kept"),
    [
        ('{\n "Statement": [ ],\t"Id": "x y" }', '{"Version":"2008-10-17","Statement":[],"Id":"x y"}'),
        ('{"Id":"é","Version": "2012-10-17", "Statement":[]}', '{"Id":"é","Version":"2012-10-17","Statement":[]}'),
    ],
)
def test_it_is_shown_without_blanks_and_with_its_version(client: Any, url: str, given: str, kept: str) -> None:
    client.set_queue_attributes(QueueUrl=url, Attributes={"Policy": given})
    assert shown(client, url) == {"Policy": kept}
    client.create_queue(QueueName="jobs", Attributes={"Policy": given})


@for_each("name", ["All", "Policy"])
def test_the_owner_alone_is_shown_it(served: Any, client: Any, url: str, name: str) -> None:
    client.set_queue_attributes(QueueUrl=url, Attributes={"Policy": text_of()})
    friend = served.connect("json", served.other)
    assert "Policy" not in shown(friend, url, name)
    assert "Policy" in shown(client, url, name)


def test_a_pattern_is_no_name() -> None:
    with pytest.raises(ActionUnknown):
        check_rules({"Statement": STATEMENT | {"Action": "sqs"}})
