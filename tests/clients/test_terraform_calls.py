"""The calls of Terraform's `aws_sqs_queue` (its AWS provider, internal/service/sqs/queue.go), by botocore: create with
tags, read until what was asked for is there, update, tag, take away, delete, and read until the queue is gone.

The provider itself is not run here: its registry is none of those that the tests may use.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError
from tests.clients.conftest import Connect

from veilmq.testing.local import ServerProcess

DEFAULTS = {
    "VisibilityTimeout": "30",
    "MaximumMessageSize": "262144",
    "MessageRetentionPeriod": "345600",
    "DelaySeconds": "0",
    "ReceiveMessageWaitTimeSeconds": "0",
}
"""What the provider sends for a resource that says nothing."""
JSON = {"Policy", "RedrivePolicy", "RedriveAllowPolicy"}
EQUAL_IN_A_ROW = 6


@pytest.fixture(scope="module")
def sqs(tmp_path_factory: pytest.TempPathFactory, connect: Connect) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("terraform")
    server = ServerProcess(directory).start()
    yield connect(server)
    server.stop()


def read(sqs: Any, url: str) -> dict[str, str]:
    found: dict[str, str] = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    return found


def is_as_asked(found: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    """As the provider compares: JSON by its value; what is set to nothing may be missing."""
    for name, value in asked.items():
        there = found.get(name, "")
        if (json.loads(there) != json.loads(value)) if name in JSON and value and there else there != value:
            return False
    return True


def applied(sqs: Any, url: str, asked: Mapping[str, str]) -> None:
    assert all(is_as_asked(read(sqs, url), asked) for _ in range(EQUAL_IN_A_ROW)), read(sqs, url)


def test_a_queue_lives_as_terraform_has_it(sqs: Any) -> None:
    dead = sqs.create_queue(QueueName="dead", Attributes=DEFAULTS)["QueueUrl"]
    arn = read(sqs, dead)["QueueArn"]
    redrive = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 4})
    allow = json.dumps({"redrivePermission": "byQueue", "sourceQueueArns": [arn.replace("dead", "orders")]})
    asked = DEFAULTS | {"DelaySeconds": "90", "ReceiveMessageWaitTimeSeconds": "10", "RedrivePolicy": redrive}
    tags = {"Environment": "production", "empty": ""}

    url = sqs.create_queue(QueueName="orders", Attributes=asked, tags=tags)["QueueUrl"]
    assert len(urlsplit(url).path.split("/")) == 3  # the provider takes the name from there
    applied(sqs, url, asked)
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == tags
    # Its plan is empty then: it creates again with what it has, as after an interrupted apply.
    assert sqs.create_queue(QueueName="orders", Attributes=asked, tags=tags)["QueueUrl"] == url

    sqs.set_queue_attributes(
        QueueUrl=dead, Attributes={"RedriveAllowPolicy": allow}
    )  # aws_sqs_queue_redrive_allow_policy
    applied(sqs, dead, {"RedriveAllowPolicy": allow})
    resource = read(sqs, url)["QueueArn"]
    rule = {"Sid": "a", "Effect": "Allow", "Principal": "*", "Action": "sqs:SendMessage", "Resource": resource}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [rule]})
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": policy})
    applied(sqs, url, {"Policy": policy})

    changed = {"VisibilityTimeout": "45", "DelaySeconds": "0", "RedrivePolicy": "", "Policy": ""}
    sqs.set_queue_attributes(QueueUrl=url, Attributes=changed)
    applied(sqs, url, changed)
    sqs.untag_queue(QueueUrl=url, TagKeys=["empty"])
    sqs.tag_queue(QueueUrl=url, Tags={"Environment": "test"})
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"Environment": "test"}

    sqs.delete_queue(QueueUrl=url)
    for _ in range(EQUAL_IN_A_ROW):
        with pytest.raises(ClientError) as gone:
            read(sqs, url)
        assert gone.value.response["Error"]["Code"] == "AWS.SimpleQueueService.NonExistentQueue"


def test_a_fifo_queue_has_its_own_attributes(sqs: Any) -> None:
    asked = DEFAULTS | {
        "FifoQueue": "true",
        "ContentBasedDeduplication": "true",
        "DeduplicationScope": "messageGroup",
        "FifoThroughputLimit": "perMessageGroupId",
    }
    url = sqs.create_queue(QueueName="orders.fifo", Attributes=asked)["QueueUrl"]
    applied(sqs, url, asked)
    changed = {
        "ContentBasedDeduplication": "false", "DeduplicationScope": "queue", "FifoThroughputLimit": "perQueue",
    }  # fmt: skip
    sqs.set_queue_attributes(QueueUrl=url, Attributes=changed)
    applied(sqs, url, changed)


def test_an_encrypted_queue_is_as_it_was_asked_for(sqs: Any) -> None:
    asked = DEFAULTS | {"SqsManagedSseEnabled": "true"}
    url = sqs.create_queue(QueueName="encrypted", Attributes=asked)["QueueUrl"]
    applied(sqs, url, asked)
