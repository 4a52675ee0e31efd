"""What a request is judged by before it goes on: in every dialect, and by nothing that could not be asked."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from veilmq.model.commands import AnyCommand, ChangeQueue, DescribeQueue, Origin
from veilmq.model.errors import Overloaded
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Applied
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.sqs.errors import LABEL_PREFIX
from veilmq.protocols.sqs.veil.operations import VEIL_OPERATIONS
from veilmq.testing.for_each import for_each

OWNER, FRIEND = "111122223333", "444455556666"
QUEUE = QueueKey(OWNER, "us-east-1", "jobs")


def policy(effect: str, action: str, **more: Any) -> dict[str, str]:
    """The attribute, with one statement."""
    statement = {"Effect": effect, "Principal": "*", "Action": f"sqs:{action}", "Resource": "*", **more}
    return {"Policy": json.dumps({"Statement": statement})}


@pytest.fixture
def owner(served: Any) -> Any:
    return served.connect()


@pytest.fixture
def friend(served: Any) -> Any:
    return served.connect(key=served.other)


@pytest.fixture
def url(owner: Any) -> str:
    return str(owner.create_queue(QueueName="jobs")["QueueUrl"])


VEIL = {
    "Send": ("SendMessage", {"Messages": [{"Body": "x"}]}),
    "Receive": ("ReceiveMessage", {}),
    "Peek": ("ReceiveMessage", {}),
    "Extend": ("ChangeMessageVisibility", {"Entries": [{"Handle": "h", "Lease": 1}]}),
    "Delete": ("DeleteMessage", {"Handles": ["h"]}),
    "DescribeQueue": ("GetQueueAttributes", {}),
    "PurgeQueue": ("PurgeQueue", {}),
    "DeleteQueue": ("DeleteQueue", {}),
}


@for_each("operation", VEIL)
def test_a_deny_binds_the_veilmq_operations_too(served: Any, owner: Any, url: str, operation: str) -> None:
    assert VEIL.keys() == VEIL_OPERATIONS.keys() - {"CreateQueue"}
    action, given = VEIL[operation]

    def status() -> int:
        body = json.dumps({"Queue": "jobs", **given}).encode()
        headers = {"Content-Type": "application/x-amz-json-1.0", "X-Amz-Target": f"VeilMQ.{operation}"}
        request = AWSRequest("POST", "http://127.0.0.1:9324/", headers, body)
        key = served.key
        SigV4Auth(Credentials(key.id, key.secret), "sqs", "us-east-1").add_auth(request)
        return int(served.send(request.prepare()).status_code)

    owner.set_queue_attributes(QueueUrl=url, Attributes=policy("Deny", action))
    assert status() == 403
    owner.set_queue_attributes(QueueUrl=url, Attributes=policy("Deny", "ListDeadLetterSourceQueues"))
    if operation != "Peek":  # of which a store's writer knows nothing
        assert status() == 200


class Busy:
    """A store that answers no question about a queue, and does everything else."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.commit = store.commit

    def apply(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        if any(isinstance(command, DescribeQueue) for command in commands):
            return Applied(now, [Overloaded(limit=1) for _ in commands], False)
        applied: Applied = self._store.apply(commands, now)
        return applied


@pytest.mark.parametrize("attributes", [policy("Deny", "PurgeQueue"), policy("Allow", "SendMessage")])
def test_a_call_whose_question_fails_is_not_done(
    served: Any, owner: Any, friend: Any, url: str, attributes: dict[str, str]
) -> None:
    owner.set_queue_attributes(QueueUrl=url, Attributes=attributes)
    client = owner if "Deny" in attributes["Policy"] else friend
    store, served.store = served.store, Busy(served.store)
    assert served.refused(client.send_message, QueueUrl=url, MessageBody="x")[0] == "ServiceUnavailable"
    served.store = store
    assert "Messages" not in owner.receive_message(QueueUrl=url)


def test_a_deny_of_a_user_agent(served: Any, owner: Any, url: str) -> None:
    old = {"StringLike": {"aws:UserAgent": "old-sdk/*"}}
    owner.set_queue_attributes(QueueUrl=url, Attributes=policy("Deny", "SendMessage", Condition=old))
    owner.send_message(QueueUrl=url, MessageBody="x")
    served.more_headers = {"User-Agent": "old-sdk/1.2"}
    assert served.refused(owner.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")


def test_a_policy_from_before_its_form_was_checked(served: Any, owner: Any, friend: Any, url: str) -> None:
    """It opens and shuts nothing, and what was meant by it is not lost to AddPermission."""
    labels = {LABEL_PREFIX + "Policy": '{"Statement": "everybody"}'}
    served.store.apply(
        [ChangeQueue(queue=QUEUE, origin=Origin("test", "test"), change={"labels": labels})], served.clock.now
    )
    served.store.commit()
    assert served.refused(friend.send_message, QueueUrl=url, MessageBody="x")[0].startswith("AccessDenied")
    owner.send_message(QueueUrl=url, MessageBody="x")
    for call, given in (
        (owner.add_permission, {"AWSAccountIds": [FRIEND], "Actions": ["SendMessage"]}),
        (owner.remove_permission, {}),
    ):
        assert served.refused(call, QueueUrl=url, Label="l", **given)[0] == "InvalidAttributeValue"
    attributes = owner.get_queue_attributes(QueueUrl=url, AttributeNames=["Policy"])["Attributes"]
    assert attributes == {"Policy": labels[LABEL_PREFIX + "Policy"]}


@pytest.mark.parametrize(
    ("queue", "action"),
    [
        ("dead", "StartMessageMoveTask"),
        ("dead", "ReceiveMessage"),
        ("dead", "DeleteMessage"),
        ("other", "SendMessage"),
        ("jobs", "SendMessage"),
    ],
)
def test_a_move_task_needs_what_it_does(served: Any, owner: Any, queue: str, action: str) -> None:
    """It sends to `other` if that is named, else back to `jobs`."""
    urls = {name: owner.create_queue(QueueName=name)["QueueUrl"] for name in ("dead", "other", "jobs")}
    arns = {name: f"arn:aws:sqs:us-east-1:{OWNER}:{name}" for name in urls}
    redrive = json.dumps({"deadLetterTargetArn": arns["dead"], "maxReceiveCount": 1})
    owner.set_queue_attributes(QueueUrl=urls["jobs"], Attributes={"RedrivePolicy": redrive})
    owner.set_queue_attributes(QueueUrl=urls[queue], Attributes=policy("Deny", action))
    given = {"SourceArn": arns["dead"]} | ({} if queue == "jobs" else {"DestinationArn": arns["other"]})
    if queue == "jobs":
        owner.set_queue_attributes(QueueUrl=urls["other"], Attributes=policy("Deny", action))  # not its dead letters
    code, text = served.refused(owner.start_message_move_task, **given)
    assert code.startswith("AccessDenied")
    assert f"sqs:{action.lower()} on resource: {arns[queue]}" in text
    assert owner.list_message_move_tasks(SourceArn=arns["dead"]).get("Results", []) == []
    owner.set_queue_attributes(QueueUrl=urls[queue], Attributes=policy("Deny", "PurgeQueue"))
    assert owner.start_message_move_task(**given)["TaskHandle"]
