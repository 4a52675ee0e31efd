"""The SQS adapter: Amazon SQS, and whatever speaks its protocol, through boto3.

Strategy: `calls` is the only module that meets botocore's exceptions; `messages` turns the port's values into SQS's
and back; `queue` is the port.
"""

from veilmq.client.sqs.queue import SqsAccount, SqsQueue

__all__ = ["SqsAccount", "SqsQueue"]
