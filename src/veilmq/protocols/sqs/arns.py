"""Amazon Resource Names of queues and keys, for responses, policies and errors.

Strategy: `arn:partition:sqs:region:account:name`; a table maps the region to the partition. Source: "Amazon Resource
Names" in the IAM User Guide; the regions of each partition as botocore's `partitions.json` has them.
"""

from typing import Final

from veilmq.model.queue import QueueKey

_PARTITIONS: Final = (
    ("cn-", "aws-cn"),
    ("us-gov-", "aws-us-gov"),
    ("us-iso-", "aws-iso"),
    ("us-isob-", "aws-iso-b"),
    ("eu-isoe-", "aws-iso-e"),
    ("us-isof-", "aws-iso-f"),
    ("eusc-", "aws-eusc"),
)
USUAL: Final = "aws"
"""Partition of every other region."""


def partition(region: str) -> str:
    """The partition of a region."""
    for prefix, name in _PARTITIONS:
        if region.startswith(prefix):
            return name
    return USUAL


def arn(queue: QueueKey) -> str:
    """Amazon Resource Name of a queue."""
    return f"arn:{partition(queue.region)}:sqs:{queue.region}:{queue.account}:{queue.name}"


def user_arn(region: str, account: str, key_id: str) -> str:
    """Amazon Resource Name of the user of a key, in a region's partition."""
    return f"arn:{partition(region)}:iam::{account}:user/{key_id}"
