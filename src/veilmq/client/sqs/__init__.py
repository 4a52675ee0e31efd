"""The SQS adapter: Amazon SQS, and whatever speaks its protocol, through boto3.

Strategy: `calls` is the only module that meets botocore's exceptions; `sending` and `receiving` turn the port's values
into SQS's and back; `cancellable_wait` lets a waiting receive be given up; `account` and `queue` are the port.
"""

from veilmq.client.sqs.account import SqsAccount
from veilmq.client.sqs.queue import SqsQueue

__all__ = ["SqsAccount", "SqsQueue"]
