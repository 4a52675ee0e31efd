"""120,000 messages in flight: the limit of a standard queue, one step below, at and above it, as a client meets it.

Strategy: the first 119,990 are sent and leased by the store's own batches, the rest by boto3.
"""

from typing import Any

import pytest
from tests.support.contract.stage import sending

from veilmq.model.commands import Origin, Receive
from veilmq.model.instant import HOUR_US
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.sqs import limits

JOBS = QueueKey("111122223333", "us-east-1", "jobs")
ORIGIN = Origin("test", "tester")
BATCH = 1_000


def in_flight(client: Any, url: str) -> int:
    name = "ApproximateNumberOfMessagesNotVisible"
    return int(client.get_queue_attributes(QueueUrl=url, AttributeNames=[name])["Attributes"][name])


def lease(served: Any, count: int) -> int:
    """Send and lease so many messages; how many were leased."""
    leased = 0
    while leased < count:
        wanted = min(BATCH, count - leased)
        receive = Receive(queue=JOBS, origin=ORIGIN, count_max=wanted, lease_us=HOUR_US, wait_us=0)
        for commands in ([sending(JOBS, "x")] * wanted, [receive]):
            applied = served.store.apply(commands, served.clock.now)
            served.store.commit()
        (outcome,) = applied.outcomes
        assert isinstance(outcome, Received)
        leased += len(outcome.messages)
    return leased


@pytest.mark.slow
def test_the_limit_is_met_exactly(served: Any) -> None:
    assert limits.IN_FLIGHT_MAX == 120_000
    client = served.connect()
    url = client.create_queue(QueueName="jobs")["QueueUrl"]
    assert lease(served, limits.IN_FLIGHT_MAX - 10) == limits.IN_FLIGHT_MAX - 10
    for number in range(20):
        client.send_message(QueueUrl=url, MessageBody=str(number))
    below = client.receive_message(QueueUrl=url, MaxNumberOfMessages=9)["Messages"]
    assert (len(below), in_flight(client, url)) == (9, limits.IN_FLIGHT_MAX - 1)
    (at,) = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    assert in_flight(client, url) == limits.IN_FLIGHT_MAX
    for form in ("json", "query"):
        code, text = served.refused(served.connect(form).receive_message, QueueUrl=url)
        assert code == "OverLimit"
        assert text.startswith("Too many messages have been received without being deleted. ")
        # "If you use long polling, Amazon SQS returns no error messages" (Developer Guide, standard queue quotas).
        assert "Messages" not in served.connect(form).receive_message(QueueUrl=url, WaitTimeSeconds=1)
    assert in_flight(client, url) == limits.IN_FLIGHT_MAX, "what was refused changed nothing"
    client.delete_message(QueueUrl=url, ReceiptHandle=at["ReceiptHandle"])
    assert len(client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]) == 1
    client.change_message_visibility(QueueUrl=url, ReceiptHandle=below[0]["ReceiptHandle"], VisibilityTimeout=0)
    assert len(client.receive_message(QueueUrl=url)["Messages"]) == 1
