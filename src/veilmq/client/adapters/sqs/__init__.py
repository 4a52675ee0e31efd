"""The SQS adapter: Amazon SQS, and other services with its protocol, through boto3.

Strategy: `calls` is the only module that handles botocore's exceptions; it also converts the port's messages to SQS's
and back. `queue` implements the port.
"""

from veilmq.client.adapters.sqs.calls import new_client
from veilmq.client.adapters.sqs.queue import SqsAccount, SqsQueue

__all__ = ["SqsAccount", "SqsQueue", "new_client"]
