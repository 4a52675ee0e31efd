"""Policies and permissions: what opens a queue to another account, and what does not."""

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from veilmq.model.commands import ChangeQueue, DescribeQueue, Origin
from veilmq.model.settings.queue import QueueKey, SettingsChange
from veilmq.protocols.sqs import limits
from veilmq.protocols.sqs.auth.authorize import ACROSS_ACCOUNTS, note
from veilmq.protocols.sqs.auth.policy import AccessRequest, Decision, PolicyInvalid, evaluate, read_policy
from veilmq.protocols.sqs.errors import LABEL_PREFIX
from veilmq.protocols.sqs.operations import OPERATIONS
from veilmq.protocols.sqs.veil.operations import VEIL_OPERATIONS
from veilmq.testing.for_each import for_each

OWNER, FRIEND = "111122223333", "444455556666"
ARN = f"arn:aws:sqs:us-east-1:{OWNER}:jobs"
QUEUE = QueueKey(OWNER, "us-east-1", "jobs")
CONDITIONS = {
    "Null": {
        f"aws:{name}": "true"
        for name in ("SourceArn", "SourceAccount", "SourceVpc", "SourceVpce", "VpcSourceIp", "MultiFactorAuthAge")
    },
    "StringNotEquals": {f"aws:{name}": "x" for name in ("PrincipalOrgID", "PrincipalOrgPaths", "PrincipalAccount")},
    "DateGreaterThan": {"aws:CurrentTime": "1970-01-02"},
}
"""Ten, and all of them hold."""
MISSING = "AWS.SimpleQueueService.NonExistentQueue"


@pytest.fixture(params=["json", "query"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def owner(served: Any, form: str) -> Any:
    return served.connect(form)


@pytest.fixture
def friend(served: Any, form: str) -> Any:
    return served.connect(form, served.other)


@pytest.fixture
def url(owner: Any) -> str:
    return str(owner.create_queue(QueueName="jobs")["QueueUrl"])


def policy_of(client: Any, url: str) -> Any:
    attributes = client.get_queue_attributes(QueueUrl=url, AttributeNames=["Policy"]).get("Attributes", {})
    return json.loads(attributes["Policy"]) if attributes else None


class TestPermissions:
    """AddPermission and RemovePermission."""

    def test_a_permission_becomes_a_statement_in_aws_form(self, owner: Any, url: str) -> None:
        owner.add_permission(QueueUrl=url, Label="friend", AWSAccountIds=[FRIEND], Actions=["SendMessage"])
        owner.add_permission(QueueUrl=url, Label="both", AWSAccountIds=[FRIEND, OWNER], Actions=["*", "PurgeQueue"])
        assert policy_of(owner, url) == {
            "Version": "2008-10-17",
            "Id": f"{ARN}/SQSDefaultPolicy",
            "Statement": [
                {
                    "Sid": "friend",
                    "Effect": "Allow",
                    "Principal": {"AWS": f"arn:aws:iam::{FRIEND}:root"},
                    "Action": "SQS:SendMessage",
                    "Resource": ARN,
                },
                {
                    "Sid": "both",
                    "Effect": "Allow",
                    "Principal": {"AWS": [f"arn:aws:iam::{FRIEND}:root", f"arn:aws:iam::{OWNER}:root"]},
                    "Action": ["SQS:*", "SQS:PurgeQueue"],
                    "Resource": ARN,
                },
            ],
        }
        owner.remove_permission(QueueUrl=url, Label="friend")
        assert [statement["Sid"] for statement in policy_of(owner, url)["Statement"]] == ["both"]
        owner.remove_permission(QueueUrl=url, Label="both")
        assert policy_of(owner, url) is None

    def test_a_permission_opens_what_it_names_until_it_is_removed(
        self, served: Any, owner: Any, friend: Any, url: str
    ) -> None:
        assert served.refused(friend.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
        owner.add_permission(QueueUrl=url, Label="friend", AWSAccountIds=[FRIEND], Actions=["SendMessage"])
        friend.send_message(QueueUrl=url, MessageBody="x")
        assert friend.send_message_batch(QueueUrl=url, Entries=[{"Id": "1", "MessageBody": "y"}])["Successful"]
        for call, given in (
            (friend.receive_message, {}),
            (friend.get_queue_attributes, {"AttributeNames": ["All"]}),
            (friend.delete_queue, {}),
            (friend.purge_queue, {}),
        ):
            assert served.refused(call, QueueUrl=url, **given)[0].startswith("AccessDenied")
        third = served.connect("json", served.third)
        assert served.refused(third.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
        owner.remove_permission(QueueUrl=url, Label="friend")
        assert served.refused(friend.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
        messages = owner.receive_message(QueueUrl=url, MaxNumberOfMessages=10, AttributeNames=["SenderId"])["Messages"]
        assert [(each["Body"], each["Attributes"]["SenderId"]) for each in messages] == [
            ("x", served.other.id),
            ("y", served.other.id),
        ]

    def test_a_queue_url_is_found_by_its_owner(self, served: Any, owner: Any, friend: Any, url: str) -> None:
        asked = {"QueueName": "jobs", "QueueOwnerAWSAccountId": OWNER}
        assert served.refused(friend.get_queue_url, **asked)[0] == MISSING
        owner.add_permission(QueueUrl=url, Label="friend", AWSAccountIds=[FRIEND], Actions=["GetQueueUrl"])
        assert friend.get_queue_url(**asked)["QueueUrl"] == url
        assert served.refused(friend.get_queue_url, **asked | {"QueueName": "nowhere"})[0] == MISSING
        assert served.refused(friend.get_queue_url, QueueName="jobs")[0] == MISSING
        assert owner.get_queue_url(**asked)["QueueUrl"] == url
        code, _ = served.refused(friend.get_queue_url, QueueName="jobs", QueueOwnerAWSAccountId="12")
        assert code == "InvalidParameterValue"

    @for_each("form", ["json", "query"])
    @for_each("name", ["jobs", "nowhere", "no name!"])
    def test_whether_there_is_another_accounts_queue_is_not_told(
        self, served: Any, url: str, form: str, name: str
    ) -> None:
        friend = served.connect(form, served.other)
        words = "The specified queue does not exist or you do not have access to it."
        assert served.refused(friend.get_queue_url, QueueName=name, QueueOwnerAWSAccountId=OWNER) == (MISSING, words)
        # Of one's own account it is: with its id or without.
        own = "The specified queue does not exist" + (" for this wsdl version." if form == "query" else ".")
        for given in ({}, {"QueueOwnerAWSAccountId": FRIEND}):
            assert served.refused(friend.get_queue_url, QueueName=name, **given) == (MISSING, own)

    def test_messages_are_worked_through_across_accounts(self, owner: Any, friend: Any, url: str) -> None:
        actions = ["ReceiveMessage", "DeleteMessage", "ChangeMessageVisibility"]
        owner.add_permission(QueueUrl=url, Label="worker", AWSAccountIds=[FRIEND], Actions=actions)
        for number in range(3):
            owner.send_message(QueueUrl=url, MessageBody=str(number))
        handles = [
            each["ReceiptHandle"] for each in friend.receive_message(QueueUrl=url, MaxNumberOfMessages=3)["Messages"]
        ]
        friend.change_message_visibility(QueueUrl=url, ReceiptHandle=handles[0], VisibilityTimeout=100)
        entries = [{"Id": "1", "ReceiptHandle": handles[0], "VisibilityTimeout": 0}]
        assert friend.change_message_visibility_batch(QueueUrl=url, Entries=entries)["Successful"]
        friend.delete_message(QueueUrl=url, ReceiptHandle=handles[1])
        deleted = friend.delete_message_batch(QueueUrl=url, Entries=[{"Id": "1", "ReceiptHandle": handles[2]}])
        assert deleted["Successful"]
        assert owner.receive_message(QueueUrl=url)["Messages"][0]["Body"] == "0"

    @for_each(
        ("given", "code"),
        [
            ({"Label": "there"}, "InvalidParameterValue"),
            ({"Label": "no spaces"}, "InvalidParameterValue"),
            ({"Label": ""}, "MissingParameter"),
            ({"AWSAccountIds": []}, "MissingParameter"),
            ({"AWSAccountIds": ["12345"]}, "InvalidParameterValue"),
            ({"Actions": []}, "MissingParameter"),
            ({"Actions": ["CreateQueue"]}, "InvalidParameterValue"),
            ({"Actions": ["Nonsense"]}, "InvalidParameterValue"),
        ],
    )
    def test_what_is_no_permission_is_refused_and_changes_nothing(
        self, served: Any, owner: Any, url: str, given: dict[str, Any], code: str
    ) -> None:
        right: dict[str, Any] = {"QueueUrl": url, "AWSAccountIds": [FRIEND], "Actions": ["SendMessage"]}
        owner.add_permission(Label="there", **right)
        before = policy_of(owner, url)
        assert served.refused(owner.add_permission, **right | {"Label": "new"} | given)[0] == code
        assert policy_of(owner, url) == before
        owner.remove_permission(QueueUrl=url, Label="there")

    @for_each("step", [-1, 0, 1])
    @for_each(
        ("most", "make", "code"),
        [
            (80, lambda count: {"Label": "l" * count}, "InvalidParameterValue"),
            (limits.POLICY_ACTIONS_MAX, lambda count: {"Actions": ["SendMessage"] * count}, "OverLimit"),
            (
                limits.POLICY_PRINCIPALS_MAX,
                lambda count: {"AWSAccountIds": [f"{number:012}" for number in range(count)]},
                "OverLimit",
            ),
        ],
        ids=["label", "actions", "accounts"],
    )
    def test_the_limits_of_a_permission(
        self, served: Any, owner: Any, url: str, step: int, most: int, make: Any, code: str
    ) -> None:
        given = {"QueueUrl": url, "Label": "new", "AWSAccountIds": [FRIEND], "Actions": ["SendMessage"]}
        given |= make(most + step)
        if step <= 0:
            owner.add_permission(**given)
        else:
            assert served.refused(owner.add_permission, **given)[0] == code
        assert (policy_of(owner, url) is None) is (step > 0)
        if step <= 0:
            owner.remove_permission(QueueUrl=url, Label=given["Label"])

    @for_each(("digits", "code"), [(11, "InvalidParameterValue"), (12, MISSING), (13, "InvalidParameterValue")])
    def test_an_account_has_twelve_digits(self, served: Any, owner: Any, digits: int, code: str) -> None:
        asked = {"QueueName": "nowhere", "QueueOwnerAWSAccountId": "4" * digits}
        assert served.refused(owner.get_queue_url, **asked)[0] == code

    def test_the_limits_of_a_policy(self, served: Any, owner: Any, url: str) -> None:
        actions = sorted(set(ACROSS_ACCOUNTS.values()))[:7]
        for number in range(limits.POLICY_STATEMENTS_MAX):
            accounts = [f"{each:012}" for each in range(50 if number == 0 else 1)]
            label = ("l" * 78 if number == 0 else "") + f"{number:02}"
            named = actions if number == 0 else actions[:1]
            owner.add_permission(QueueUrl=url, Label=label, AWSAccountIds=accounts, Actions=named)
        code, text = served.refused(
            owner.add_permission, QueueUrl=url, Label="more", AWSAccountIds=[FRIEND], Actions=["*"]
        )
        assert (code, "20 statements" in text) == ("OverLimit", True)
        assert len(policy_of(owner, url)["Statement"]) == 20
        # org.mule.modules.sqs, RemovePermissionTestCases: of AWS in us-east-1.
        words = "Value more for parameter Label is invalid. Reason: can't find label on existing policy."
        found = served.refused(owner.remove_permission, QueueUrl=url, Label="more")
        assert found == ("InvalidParameterValue", words)

    def test_a_permission_that_makes_the_policy_too_long(self, served: Any, owner: Any, url: str) -> None:
        given = {"AWSAccountIds": [f"{each:012}" for each in range(50)], "Actions": ["SendMessage"]}
        for number in range(4):
            owner.add_permission(QueueUrl=url, Label=str(number), **given)
        found = served.refused(owner.add_permission, QueueUrl=url, Label="4", **given)
        assert found == ("OverLimit", "Submitted policy is over max allowed size.")
        assert len(policy_of(owner, url)["Statement"]) == 4

    @for_each("form", ["json", "query"])
    @for_each("size", [8_191, 8_192, 8_193, 70_000])
    def test_the_bytes_of_a_policy(self, served: Any, url: str, form: str, size: int) -> None:
        """Developer Guide, "Amazon SQS policy quotas"; the words are AWS's (aws/aws-sdk-net #378)."""
        client = served.connect(form)
        short = json.dumps({"Id": "\u00e9", "Statement": [_statement()]}, ensure_ascii=False)
        text = short.replace("\u00e9", "\u00e9" + "x" * (size - len(short.encode())))
        assert len(text.encode()) == size
        if size <= 8_192:
            client.set_queue_attributes(QueueUrl=url, Attributes={"Policy": text})
            return
        for call, given in (
            (client.set_queue_attributes, {"QueueUrl": url}),
            (client.create_queue, {"QueueName": "p"}),
        ):
            found = served.refused(call, Attributes={"Policy": text}, **given)
            assert found == ("OverLimit", "Submitted policy is over max allowed size.")

    @for_each(
        ("statements", "words"),
        [
            ([{}] * 21, "21 statements were found in the submitted policy, max allowed is 20"),
            (
                [{"Action": ["sqs:SendMessage"] * 8}],
                "8 actions were found in a statement from the submitted policy, max allowed is 7",
            ),
            (
                [{"Principal": {"AWS": [FRIEND] * 50, "Service": "sns.amazonaws.com"}}],
                "51 principals were found in a statement from the submitted policy, max allowed is 50",
            ),
            (
                [{"Condition": CONDITIONS | {"Bool": {"aws:SecureTransport": "true"}}}],
                "11 conditions were found in a statement from the submitted policy, max allowed is 10",
            ),
        ],
    )
    def test_what_a_policy_has_too_many_of(
        self, served: Any, owner: Any, url: str, statements: list[dict[str, Any]], words: str
    ) -> None:
        """In AWS's words: dapr/components-contrib #1780, ministryofjustice/cloud-platform-environments #9082."""
        text = json.dumps({"Statement": [_statement(**statement) for statement in statements]})
        found = served.refused(owner.set_queue_attributes, QueueUrl=url, Attributes={"Policy": text})
        assert found == ("OverLimit", words)

    def test_as_many_as_a_policy_may_have(self, owner: Any, url: str) -> None:
        """Every statement counts for itself: 20 topics, each with a condition, were no more than 20 statements to AWS
        (aws/aws-cdk #16303)."""
        wide = _statement(Action=["sqs:SendMessage"] * 7, Principal={"AWS": [FRIEND] * 50})
        statements = [_statement(Condition=CONDITIONS)] * 2 + [wide] * 2 + [_statement()] * 16
        text = json.dumps({"Statement": statements})
        owner.set_queue_attributes(QueueUrl=url, Attributes={"Policy": text})
        assert policy_of(owner, url) == {"Version": "2008-10-17"} | json.loads(text)

    def test_a_policy_from_before_a_limit_stays_in_force(self, served: Any, owner: Any, friend: Any, url: str) -> None:
        statements = [_statement(Sid=str(number)) for number in range(limits.POLICY_STATEMENTS_MAX)]
        shut = _statement(
            Effect="Deny", Action="sqs:PurgeQueue", Condition=CONDITIONS | {"Bool": {"aws:SecureTransport": "false"}}
        )
        text = json.dumps({"Statement": [*statements, shut]})
        change: SettingsChange = {"labels": {LABEL_PREFIX + "Policy": text}}
        served.store.apply([ChangeQueue(queue=QUEUE, origin=Origin("test", "test"), change=change)], served.clock.now)
        served.store.commit()
        friend.send_message(QueueUrl=url, MessageBody="x")
        owner.set_queue_attributes(
            QueueUrl=url, Attributes={"DelaySeconds": "1"}
        )  # what has a Deny is known by its changes
        assert served.refused(owner.purge_queue, QueueUrl=url)[0].startswith("AccessDenied")


def _asking(**changes: Any) -> AccessRequest:
    values: dict[str, Any] = {
        "account": FRIEND,
        "user": "AKIDSOMEBODY",
        "action": "SendMessage",
        "queue": QUEUE,
        "context": {
            "aws:securetransport": "false",
            "aws:currenttime": "1780315200.0",
            "aws:epochtime": "1780315200.0",
            "aws:sourceip": "10.1.2.3",
            "aws:principalaccount": FRIEND,
            "aws:principalarn": f"arn:aws:iam::{FRIEND}:user/AKIDSOMEBODY",
        },
    }
    return AccessRequest(**values | changes)


def _statement(**changes: Any) -> dict[str, Any]:
    statement = {"Effect": "Allow", "Principal": "*", "Action": "sqs:SendMessage", "Resource": ARN} | changes
    return {name: value for name, value in statement.items() if value is not None}


def _decision(*statements: dict[str, Any], **asking: Any) -> bool:
    policy = {"Version": "2012-10-17", "Statement": list(statements)}
    return evaluate(read_policy(json.dumps(policy)), _asking(**asking)) is Decision.ALLOWED


class TestLanguage:
    """What a policy says."""

    @for_each(
        ("changes", "allowed"),
        [
            ({}, True),
            ({"Principal": {"AWS": "*"}}, True),
            ({"Principal": {"AWS": FRIEND}}, True),
            ({"Principal": {"AWS": [OWNER, f"arn:aws:iam::{FRIEND}:root"]}}, True),
            ({"Principal": {"AWS": f"arn:aws:iam::{FRIEND}:user/AKIDSOMEBODY"}}, True),
            ({"Principal": {"AWS": f"arn:aws:iam::{FRIEND}:user/SOMEONE"}}, False),
            ({"Principal": {"AWS": OWNER}}, False),
            ({"Principal": {"Service": "sns.amazonaws.com"}}, False),
            ({"Principal": None, "NotPrincipal": {"AWS": OWNER}}, True),
            ({"Principal": None, "NotPrincipal": {"AWS": FRIEND}}, False),
            ({"Action": "SQS:sendmessage"}, True),
            ({"Action": ["sqs:ReceiveMessage", "sqs:Send*"]}, True),
            ({"Action": "*"}, True),
            ({"Action": "sqs:*"}, True),
            ({"Action": "sns:*"}, False),
            ({"Action": "sqs:SendMessag?"}, True),
            ({"Action": "sqs:Send[A-Z]essage"}, False),
            ({"Action": "sqs:ReceiveMessage"}, False),
            ({"Action": None, "NotAction": "sqs:ReceiveMessage"}, True),
            ({"Action": None, "NotAction": "sqs:SendMessage"}, False),
            ({"Resource": "*"}, True),
            ({"Resource": f"arn:aws:sqs:*:{OWNER}:j*"}, True),
            ({"Resource": [ARN + "2", ARN]}, True),
            ({"Resource": ARN + "2"}, False),
            ({"Resource": ARN.replace("us-east-1", "eu-west-1")}, False),
            ({"Resource": None, "NotResource": ARN}, False),
        ],
    )
    def test_caller_action_and_queue(self, changes: dict[str, Any], allowed: bool) -> None:
        assert _decision(_statement(**changes)) is allowed

    @for_each(
        ("condition", "allows_with", "denies_with"),
        [
            ({"Bool": {"aws:SecureTransport": "false"}}, True, True),
            ({"Bool": {"aws:SecureTransport": True}}, False, False),
            ({"IpAddress": {"aws:SourceIp": ["10.0.0.0/8", "192.0.2.1"]}}, True, True),
            ({"IpAddress": {"aws:SourceIp": "192.0.2.1"}}, False, False),
            ({"NotIpAddress": {"aws:SourceIp": "192.0.2.0/24"}}, True, True),
            ({"NotIpAddress": {"aws:SourceIp": "10.1.0.0/16"}}, False, False),
            ({"StringEquals": {"AWS:PrincipalAccount": FRIEND}}, True, True),
            ({"StringNotEquals": {"aws:PrincipalAccount": [OWNER, FRIEND]}}, False, False),
            ({"StringLike": {"aws:PrincipalArn": "arn:aws:iam::*:user/AKID*"}}, True, True),
            # Known, and not there for a caller who is no service:
            ({"ArnLike": {"aws:SourceArn": "*"}}, False, False),
            ({"ArnEquals": {"aws:SourceArn": "arn:aws:sns:us-east-1:1:topic"}}, False, False),
            ({"ArnNotEquals": {"aws:SourceArn": "arn:aws:sns:us-east-1:1:topic"}}, True, True),
            ({"StringEqualsIfExists": {"aws:SourceAccount": OWNER}}, True, True),
            ({"StringNotEquals": {"aws:SourceVpce": "vpce-1a2b3c4d"}}, True, True),
            ({"StringEquals": {"aws:SourceVpce": "vpce-1a2b3c4d"}}, False, False),
            ({"Bool": {"aws:MultiFactorAuthPresent": "false"}}, False, False),
            ({"BoolIfExists": {"aws:MultiFactorAuthPresent": "false"}}, True, True),
            ({"Null": {"aws:MultiFactorAuthAge": True}}, True, True),
            ({"Null": {"aws:SourceArn": "true"}}, True, True),
            ({"Null": {"aws:SourceArn": "false"}}, False, False),
            ({"Null": {"aws:SourceArn": ["True", "FALSE"]}}, True, True),
            ({"Null": {"aws:SourceArn": "yes"}}, False, True),
            ({"Null": {"aws:SourceArn": []}}, False, True),
            ({"ForAnyValue:StringLike": {"aws:PrincipalOrgPaths": "o-a1b2c3/*"}}, False, False),
            ({"ForAnyValue:StringNotLike": {"aws:PrincipalOrgPaths": "o-a1b2c3/*"}}, False, False),
            ({"ForAllValues:StringLike": {"aws:PrincipalOrgPaths": "o-a1b2c3/*"}}, True, True),
            ({"ForAnyValue:StringLikeIfExists": {"aws:PrincipalOrgPaths": "o-a1b2c3/*"}}, True, True),
            ({"ForAnyValue:StringEquals": {"aws:PrincipalAccount": [OWNER, FRIEND]}}, True, True),
            ({"ForAllValues:StringNotEquals": {"aws:PrincipalAccount": [OWNER, FRIEND]}}, False, False),
            # Not understood: it lets nobody in, and keeps everybody out.
            ({"IpAddress": {"aws:SourceIp": "no address"}}, False, True),
            ({"NotIpAddress": {"aws:SourceIp": "192.0.2.0/33"}}, False, True),
            ({"StringNotEquals": {"aws:PrincipalAccount": "${aws:SourceAccount}"}}, False, True),
            ({"StringLike": {"aws:PrincipalArn": "*${aws:username}"}}, False, True),
            ({"ForSomeValues:StringEquals": {"aws:PrincipalAccount": FRIEND}}, False, True),
            ({"ForAnyValue:Null": {"aws:SourceArn": "true"}}, False, True),
            ({"StringEquals": {"aws:RequestTag/colour": "blue"}}, False, True),
            ({"DateGreaterThan": {"aws:CurrentTime": "2026-06-01T12:00Z"}}, False, False),
            ({"DateGreaterThanEquals": {"aws:CurrentTime": "2026-06-01T12:00Z"}}, True, True),
            ({"DateGreaterThan": {"aws:CurrentTime": "2026-06-01T11:59:59.999Z"}}, True, True),
            ({"DateLessThan": {"aws:CurrentTime": "2026-06-01T14:00:01+02:00"}}, True, True),
            ({"DateLessThan": {"aws:CurrentTime": "2026-06-01T14:00:00+02:00"}}, False, False),
            ({"DateLessThanEquals": {"aws:CurrentTime": "2026-06-01"}}, False, False),
            ({"DateEquals": {"aws:CurrentTime": ["2026-01-01", "2026-06-01T12:00:00"]}}, True, True),
            ({"DateNotEquals": {"aws:CurrentTime": ["2026-01-01", "2026-06-01T12:00:00Z"]}}, False, False),
            ({"DateLessThanIfExists": {"aws:EpochTime": "1780315201"}}, True, True),
            ({"NumericLessThan": {"aws:EpochTime": 1780315200}}, False, False),
            ({"NumericLessThanEquals": {"aws:EpochTime": 1780315200}}, True, True),
            ({"Null": {"aws:CurrentTime": "true"}}, False, False),
            ({"DateGreaterThan": {"aws:CurrentTime": "yesterday"}}, False, True),
            ({"DateGreaterThan": {"aws:CurrentTime": ["2020-01-01", "yesterday"]}}, False, True),
            ({"NumericLessThan": {"aws:CurrentTime": "2030-01-01"}}, False, True),
            ({"DateSoonAfter": {"aws:CurrentTime": "2020-01-01"}}, False, True),
            ({"GreaterThan": {"aws:CurrentTime": "2020-01-01"}}, False, True),
            ({"StringLike": {"aws:CurrentTime": "2*"}}, False, True),
            ({"DateGreaterThan": {"aws:TokenIssueTime": "2020-01-01T00:00:00Z"}}, False, True),
            ({"NumericLessThan": {"aws:PrincipalAccount": 5}}, False, True),
            ({"Bool": {"aws:SecureTransport": "false"}, "StringEquals": {"aws:PrincipalAccount": OWNER}}, False, False),
        ],
    )
    def test_conditions(self, condition: dict[str, Any], allows_with: bool, denies_with: bool) -> None:
        assert _decision(_statement(Condition=condition)) is allows_with
        denied = not _decision(_statement(), _statement(Effect="Deny", Condition=condition))
        assert denied is denies_with

    @for_each("address", ["::ffff:192.0.2.7", "::ffff:c000:207", "192.0.2.7"])
    def test_an_ipv4_client_of_a_listener_for_both(self, address: str) -> None:
        for network, is_in in (("192.0.2.0/24", True), ("10.0.0.0/8", False), ("2001:db8::/32", False)):
            within = _statement(Condition={"IpAddress": {"aws:SourceIp": network}})
            context = {"aws:sourceip": address}
            assert _decision(within, context=context) is is_in
            assert _decision(_statement(), within | {"Effect": "Deny"}, context=context) is not is_in

    @for_each("resource", ["Resource", "NotResource"])
    def test_a_resource_with_a_variable_is_not_understood(self, resource: str) -> None:
        statement = {name: value for name, value in _statement().items() if name != "Resource"}
        statement[resource] = "arn:aws:sqs:*:*:${aws:username}"
        assert not _decision(statement)
        assert not _decision(_statement(), statement | {"Effect": "Deny"})

    def test_a_date_without_an_offset_is_in_utc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        within = {
            "DateGreaterThan": {"aws:CurrentTime": "2026-06-01T11:59:00"},
            "DateLessThan": {"aws:CurrentTime": "2026-06-01T12:01:00"},
        }
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        try:
            assert _decision(_statement(Condition=within))
        finally:
            monkeypatch.undo()
            time.tzset()

    def test_a_deny_wins_wherever_it_stands(self) -> None:
        deny = _statement(Effect="Deny", Principal={"AWS": FRIEND})
        assert not _decision(_statement(), deny)
        assert not _decision(deny, _statement())
        assert _decision(deny, _statement(), account=OWNER)
        assert not _decision()

    @for_each(
        "text",
        [
            "",
            "not json",
            "[]",
            '{"Version": "2020-01-01", "Statement": []}',
            '{"Statement": ["x"]}',
            *(
                json.dumps({"Statement": _statement(**changes)})
                for changes in (
                    {"Effect": "Maybe"},
                    {"Effect": ["Allow"]},
                    {"Principal": None},
                    {"NotPrincipal": "*"},
                    {"Principal": "me"},
                    {"Principal": {}},
                    {"Action": None},
                    {"Action": 5},
                    {"Action": []},
                    {"Resource": None},
                    {"Condition": []},
                    {"Condition": {"Bool": "x"}},
                    {"Condition": {"Bool": {"aws:SecureTransport": {}}}},
                    {"Condition": {"Bool": {"aws:SecureTransport": ["true", {}]}}},
                    {"Unknown": 1},
                )
            ),
        ],
    )
    def test_what_is_no_policy_is_refused(self, text: str) -> None:
        with pytest.raises(PolicyInvalid):
            read_policy(text)


class TestAcrossAccounts:
    """A policy of the owner's own, and the rest of the rules."""

    def test_a_policy_is_judged_as_it_stands_now(self, served: Any, owner: Any, friend: Any, url: str) -> None:
        policy = {"Version": "2012-10-17", "Statement": [_statement(Action="sqs:*")]}
        owner.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps(policy)})
        friend.send_message(QueueUrl=url, MessageBody="x")
        policy["Statement"].append(  # type: ignore[attr-defined]
            _statement(Effect="Deny", Action="*", Condition={"Bool": {"aws:SecureTransport": "false"}})
        )
        owner.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps(policy)})
        assert served.refused(friend.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
        served.secure = True
        friend.send_message(QueueUrl=url, MessageBody="y")
        owner.set_queue_attributes(QueueUrl=url, Attributes={"Policy": ""})
        assert served.refused(friend.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")

    def test_an_invalid_policy_is_refused_and_the_old_one_stays(self, served: Any, owner: Any, url: str) -> None:
        owner.add_permission(QueueUrl=url, Label="friend", AWSAccountIds=[FRIEND], Actions=["*"])
        before = policy_of(owner, url)
        bad = json.dumps({"Statement": [_statement(Effect="Maybe")]})
        code, text = served.refused(owner.set_queue_attributes, QueueUrl=url, Attributes={"Policy": bad})
        assert (code, "Effect" in text) == ("InvalidAttributeValue", True)
        assert policy_of(owner, url) == before

    def test_no_policy_opens_what_only_the_owner_may(self, served: Any, owner: Any, friend: Any, url: str) -> None:
        policy = {"Version": "2012-10-17", "Statement": [_statement(Action="*", Resource="*")]}
        owner.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps(policy)})
        for call, given in (
            (friend.add_permission, {"Label": "me", "AWSAccountIds": [FRIEND], "Actions": ["*"]}),
            (friend.remove_permission, {"Label": "me"}),
            (friend.delete_queue, {}),
            (friend.set_queue_attributes, {"Attributes": {"DelaySeconds": "1"}}),
            (friend.tag_queue, {"Tags": {"a": "b"}}),
            (friend.untag_queue, {"TagKeys": ["a"]}),
            (friend.list_queue_tags, {}),
        ):
            assert served.refused(call, QueueUrl=url, **given)[0].startswith("AccessDenied")
        for call, given in (
            (friend.start_message_move_task, {"SourceArn": ARN}),
            (friend.list_message_move_tasks, {"SourceArn": ARN}),
        ):
            assert served.refused(call, **given)[0].startswith("AccessDenied")
        friend.list_dead_letter_source_queues(QueueUrl=url)
        friend.purge_queue(QueueUrl=url)

    def test_a_permission_that_is_limited_in_time(self, served: Any, owner: Any, friend: Any, url: str) -> None:
        """Developer Guide, "Basic examples of Amazon SQS policies": between two instants of one day. It is the
        calendar's day, whatever the clock of the leases says."""
        served.clock.advance(90 * 86_400_000_000)
        for from_now, allowed in ((60, False), (-60, True), (-10_740, True), (-10_860, False)):
            start = datetime.now(UTC) + timedelta(seconds=from_now)
            hours = {
                "DateGreaterThan": {"aws:CurrentTime": start.isoformat()},
                "DateLessThan": {"aws:CurrentTime": (start + timedelta(hours=3)).isoformat()},
            }
            policy = {"Version": "2012-10-17", "Statement": [_statement(Action="sqs:ReceiveMessage", Condition=hours)]}
            owner.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps(policy)})
            if allowed:
                friend.receive_message(QueueUrl=url)
            else:
                assert served.refused(friend.receive_message, QueueUrl=url)[0] == "AccessDenied"

    def test_whether_a_queue_exists_is_not_told(self, served: Any, friend: Any, url: str) -> None:
        there = served.refused(friend.send_message, QueueUrl=url, MessageBody="x")
        nowhere = served.refused(friend.send_message, QueueUrl=url.replace("jobs", "nope"), MessageBody="x")
        assert there[0] == nowhere[0]
        assert there[1].replace("jobs", "nope") == nowhere[1]

    @pytest.mark.parametrize("form", ["json", "query"])
    def test_the_message_says_what_refused(self, served: Any, owner: Any, url: str, form: str) -> None:
        """microsoft/aspire #3333; aws/serverless-application-model #3633 for a batch."""
        friend = served.connect(form, served.other)
        user = f"User: arn:aws:iam::{FRIEND}:user/{served.other.id} is not authorized to perform: "
        entries = [{"Id": "1", "MessageBody": "x"}]
        for call, given, action in (
            (friend.send_message, {"MessageBody": "x"}, "sqs:sendmessage"),
            (friend.send_message_batch, {"Entries": entries}, "sqs:sendmessage"),
            (friend.delete_queue, {}, "sqs:deletequeue"),
        ):
            words = f"{user}{action} on resource: {ARN} because no resource-based policy allows the {action} action"
            assert served.refused(call, QueueUrl=url, **given)[1] == words
        text = json.dumps({"Statement": [_statement(), _statement(Effect="Deny", Principal={"AWS": FRIEND})]})
        owner.set_queue_attributes(QueueUrl=url, Attributes={"Policy": text})
        words = f"{user}sqs:sendmessage on resource: {ARN} with an explicit deny in a resource-based policy"
        assert served.refused(friend.send_message_batch, QueueUrl=url, Entries=entries)[1] == words

    def test_own_operations_are_never_open_to_others(self) -> None:
        assert ACROSS_ACCOUNTS.keys() < OPERATIONS.keys()
        # The same operation under the same name, in the other dialect too.
        assert ACROSS_ACCOUNTS.keys() & {row.name for row in VEIL_OPERATIONS.values()} == {"PurgeQueue"}


OWN = {
    "SendMessage": ("send_message", {"MessageBody": "x"}),
    "SendMessageBatch": ("send_message_batch", {"Entries": [{"Id": "1", "MessageBody": "x"}]}),
    "ReceiveMessage": ("receive_message", {}),
    "DeleteMessage": ("delete_message", {"ReceiptHandle": "x"}),
    "ChangeMessageVisibility": ("change_message_visibility", {"ReceiptHandle": "x", "VisibilityTimeout": 1}),
    "GetQueueAttributes": ("get_queue_attributes", {"AttributeNames": ["All"]}),
    "SetQueueAttributes": ("set_queue_attributes", {"Attributes": {"DelaySeconds": "1"}}),
    "AddPermission": ("add_permission", {"Label": "l", "AWSAccountIds": [FRIEND], "Actions": ["*"]}),
    "TagQueue": ("tag_queue", {"Tags": {"a": "b"}}),
    "ListQueueTags": ("list_queue_tags", {}),
    "PurgeQueue": ("purge_queue", {}),
    "DeleteQueue": ("delete_queue", {}),
}


class TestOwnAccount:
    """An explicit deny binds the keys of the queue's own account too."""

    def set(self, client: Any, url: str, *statements: dict[str, Any]) -> None:
        text = json.dumps({"Version": "2012-10-17", "Statement": list(statements)}) if statements else ""
        client.set_queue_attributes(QueueUrl=url, Attributes={"Policy": text})

    @for_each("operation", OWN)
    def test_what_is_denied(self, served: Any, owner: Any, url: str, operation: str) -> None:
        name, given = OWN[operation]
        call = getattr(owner, name)
        action = f"sqs:{operation.removesuffix('Batch')}"
        self.set(owner, url, _statement(Effect="Deny", Action=action))
        code, text = served.refused(call, QueueUrl=url, **given)
        assert code.startswith("AccessDenied")
        assert text.endswith(f"{action.lower()} on resource: {ARN} with an explicit deny in a resource-based policy")
        other = owner.create_queue(QueueName="other")["QueueUrl"]
        owner.send_message(QueueUrl=other, MessageBody="another queue is not meant")
        for statement in (
            _statement(Effect="Deny", Action=action, Principal={"AWS": FRIEND}),
            _statement(Effect="Deny", Action="sqs:ListDeadLetterSourceQueues"),
            _statement(Effect="Allow", Action=action, Principal={"AWS": FRIEND}),
        ):
            self.set(owner, url)
            self.set(owner, url, statement)
            served.later(60)
            if operation in {"DeleteMessage", "ChangeMessageVisibility"}:
                assert served.refused(call, QueueUrl=url, **given)[0] == "ReceiptHandleIsInvalid"
            elif operation not in {"DeleteQueue", "AddPermission"}:
                call(QueueUrl=url, **given)

    def test_a_deny_of_plain_http(self, served: Any, owner: Any, url: str) -> None:
        condition = {"Bool": {"aws:SecureTransport": "false"}}
        self.set(owner, url, _statement(Effect="Deny", Action="sqs:*", Condition=condition))
        assert served.refused(owner.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
        served.secure = True
        owner.send_message(QueueUrl=url, MessageBody="x")

    def test_behind_a_trusted_proxy_its_word_counts(self, served: Any, owner: Any, url: str) -> None:
        served.configure(trusted_proxy=True)
        condition = {"NotIpAddress": {"aws:SourceIp": "192.0.2.7"}, "Bool": {"aws:SecureTransport": "true"}}
        self.set(owner, url, _statement(Effect="Deny", Action="sqs:SendMessage", Condition=condition))
        for proto, source, sent in (
            ("https", "198.51.100.1, 192.0.2.7", True),
            ("https", "192.0.2.7, 198.51.100.1", False),
            ("https", "unknown", False),
            ("http", "198.51.100.1", True),
        ):
            served.more_headers = {"X-Forwarded-Proto": proto, "X-Forwarded-For": source}
            if sent:
                owner.send_message(QueueUrl=url, MessageBody="x")
            else:
                assert served.refused(owner.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
        served.configure()
        self.set(owner, url, _statement(Effect="Deny", Action="sqs:SendMessage", Condition=condition))
        owner.send_message(QueueUrl=url, MessageBody="nobody is believed")

    def test_nothing_changed_and_the_way_out(self, served: Any, owner: Any, url: str) -> None:
        owner.send_message(QueueUrl=url, MessageBody="kept")
        self.set(owner, url, _statement(Effect="Deny", Action="*"))
        for name, given in OWN.values():
            assert served.refused(getattr(owner, name), QueueUrl=url, **given)[0].startswith("AccessDenied")
        both = {"Policy": "", "DelaySeconds": "1"}
        assert served.refused(owner.set_queue_attributes, QueueUrl=url, Attributes=both)[0].startswith("AccessDenied")
        self.set(owner, url)  # the policy alone may go
        assert [message["Body"] for message in owner.receive_message(QueueUrl=url)["Messages"]] == ["kept"]

    def test_a_queue_made_with_its_policy(self, served: Any, owner: Any) -> None:
        text = json.dumps({"Statement": _statement(Effect="Deny", Resource="*")})
        url = owner.create_queue(QueueName="new", Attributes={"Policy": text})["QueueUrl"]
        assert served.refused(owner.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
        owner.delete_queue(QueueUrl=url)
        assert served.refused(owner.send_message, QueueUrl=url, MessageBody="x")[0] == MISSING

    def test_a_statement_that_is_taken_away(self, served: Any, owner: Any, url: str) -> None:
        self.set(owner, url, _statement(Effect="Deny", Sid="no"), _statement(Effect="Allow", Sid="yes"))
        assert served.refused(owner.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
        owner.remove_permission(QueueUrl=url, Label="no")
        owner.send_message(QueueUrl=url, MessageBody="x")
        assert not served.codec._endpoint.guarded

    def test_a_queue_that_is_deleted_is_forgotten(self, served: Any, owner: Any, url: str) -> None:
        """Each one was asked about whenever a move task named no destination."""
        self.set(owner, url, _statement(Effect="Deny"))
        owner.delete_queue(QueueUrl=url)
        source = owner.create_queue(QueueName="dead")["QueueUrl"]
        arn = owner.get_queue_attributes(QueueUrl=source, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        served.refused(owner.start_message_move_task, SourceArn=arn)
        assert not served.codec._endpoint.guarded

    def test_a_server_that_starts_knows_who_denies(self, served: Any, owner: Any, url: str) -> None:
        self.set(owner, url, _statement(Effect="Deny", Action="sqs:SendMessage"))
        described = served.store.apply(
            [DescribeQueue(queue=QUEUE, origin=Origin("test", "tester"))], served.clock.now
        ).outcomes[0]
        served.configure()
        owner.send_message(QueueUrl=url, MessageBody="nobody told the new codec")
        note(served.codec._endpoint, described.info)
        assert served.refused(owner.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
