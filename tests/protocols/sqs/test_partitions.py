"""ARNs of regions outside the usual partition, as clients of those regions see and send them.

Strategy: real clients of both forms, signing for such a region, on a real store.
"""

import json
from typing import Any

import botocore.loaders
import msgspec
import pytest
from tests.protocols.sqs.conftest import KEY, Ring

from veilmq.protocols.sqs.addresses import partition
from veilmq.protocols.sqs.codec import Codec, Endpoint

MINE, FRIEND = "111122223333", "444455556666"


def test_every_region_of_aws_is_of_its_partition() -> None:
    """By botocore's own table; what is no region of AWS's is of the usual one."""
    for each in botocore.loaders.Loader().load_data("partitions")["partitions"]:
        for region in each["regions"]:
            if not region.endswith("-global"):
                assert partition(region) == each["id"], region
    assert {partition(name) for name in ("", "cn", "local", "us-east-1", "eu-west-9")} == {"aws"}


@pytest.mark.parametrize("form", ["json", "query"])
@pytest.mark.parametrize(("region", "name"), [("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov")])
class TestQueues:
    def test_a_queues_arn_in_every_place_where_it_shows(self, served: Any, form: str, region: str, name: str) -> None:
        client = served.connect(form, region=region)
        start = f"arn:{name}:sqs:{region}:{MINE}:"
        dead = client.create_queue(QueueName="dead")["QueueUrl"]
        shown = client.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]
        assert shown == {"QueueArn": start + "dead"}
        policy = {"deadLetterTargetArn": start + "dead", "maxReceiveCount": 1}
        url = client.create_queue(QueueName="jobs", Attributes={"RedrivePolicy": json.dumps(policy)})["QueueUrl"]
        shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["RedrivePolicy"])["Attributes"]
        assert json.loads(shown["RedrivePolicy"]) == policy
        allow = {"redrivePermission": "byQueue", "sourceQueueArns": [start + "jobs"]}
        client.set_queue_attributes(QueueUrl=dead, Attributes={"RedriveAllowPolicy": json.dumps(allow)})
        shown = client.get_queue_attributes(QueueUrl=dead, AttributeNames=["RedriveAllowPolicy"])["Attributes"]
        assert json.loads(shown["RedriveAllowPolicy"]) == allow

        client.send_message(QueueUrl=url, MessageBody="x")
        assert client.receive_message(QueueUrl=url, VisibilityTimeout=0)["Messages"]
        assert "Messages" not in client.receive_message(QueueUrl=url)
        (message,) = client.receive_message(QueueUrl=dead, AttributeNames=["All"], VisibilityTimeout=0)["Messages"]
        assert message["Attributes"]["DeadLetterQueueSourceArn"] == start + "jobs"
        client.start_message_move_task(SourceArn=start + "dead", DestinationArn=start + "jobs")
        (task,) = client.list_message_move_tasks(SourceArn=start + "dead")["Results"]
        assert (task["SourceArn"], task["DestinationArn"]) == (start + "dead", start + "jobs")

    def test_a_policy_names_queues_and_principals_so(self, served: Any, form: str, region: str, name: str) -> None:
        owner, friend = served.connect(form, region=region), served.connect(form, served.other, region)
        url = owner.create_queue(QueueName="jobs")["QueueUrl"]
        owner.add_permission(QueueUrl=url, Label="it", AWSAccountIds=[FRIEND], Actions=["SendMessage"])
        policy = json.loads(owner.get_queue_attributes(QueueUrl=url, AttributeNames=["Policy"])["Attributes"]["Policy"])
        (statement,) = policy["Statement"]
        assert statement["Principal"] == {"AWS": f"arn:{name}:iam::{FRIEND}:root"}
        assert statement["Resource"] == f"arn:{name}:sqs:{region}:{MINE}:jobs"
        friend.send_message(QueueUrl=url, MessageBody="x")
        for resource in (statement["Resource"], statement["Resource"].replace(name, "aws"), "arn:*:jobs"):
            denied = {"Statement": [statement | {"Effect": "Deny", "Resource": resource}, statement]}
            owner.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps(denied)})
            code, text = served.refused(friend.send_message, QueueUrl=url, MessageBody="x")
            assert (code, statement["Resource"] in text) == ("AccessDenied", True), resource
        denied = {"Statement": [statement | {"Effect": "Deny", "Resource": "arn:aws:sqs:us-east-1:*"}, statement]}
        owner.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps(denied)})
        friend.send_message(QueueUrl=url, MessageBody="x")

    def test_who_was_not_granted_an_action_reads_so(self, served: Any, form: str, region: str, name: str) -> None:
        client = served.connect(form, region=region)
        url = client.create_queue(QueueName="jobs")["QueueUrl"]
        served.codec = Codec(Ring({KEY.id: msgspec.structs.replace(KEY, grants=())}), Endpoint())
        for call, given in (
            (client.send_message, {"MessageBody": "x"}),
            (client.send_message_batch, {"Entries": [{"Id": "1", "MessageBody": "x"}]}),
        ):
            assert served.refused(call, QueueUrl=url, **given) == (
                "AccessDenied",
                f"User: arn:{name}:iam::{MINE}:user/{KEY.id} is not authorized to perform: sqs:sendmessage on "
                f"resource: arn:{name}:sqs:{region}:{MINE}:jobs because no identity-based policy allows the "
                "sqs:sendmessage action (grant send)",
            )
