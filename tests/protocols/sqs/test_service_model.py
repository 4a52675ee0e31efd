"""botocore's service model, walked: every operation answered, every input member taken, every documented error reached.

Strategy: the model is the list, the tables below say how. A member or an error that a later botocore adds fails here
until somebody says how; what cannot be reached is named with its reason. Everything goes through a real client to a
real store.
"""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from tests.support.contract.stage import sending

from veilmq.model.commands import Origin, Receive
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.errors import KMS_FAULTS
from veilmq.testing.for_each import for_each

ACCOUNT = "111122223333"
BASE = f"http://127.0.0.1:9324/{ACCOUNT}/"
URL, FIFO, NOWHERE = BASE + "jobs", BASE + "jobs.fifo", BASE + "nowhere"
ARN = f"arn:aws:sqs:us-east-1:{ACCOUNT}:"
STRING = {"DataType": "String", "StringValue": "x"}
BINARY = {"DataType": "Binary", "BinaryValue": b"\x00\xff"}
TRACE = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988-bd862e3fe1be46a994272793"}}
ATTRIBUTES = {"text": STRING, "bytes": BINARY}
MESSAGE = {"MessageBody": "x", "MessageAttributes": ATTRIBUTES, "MessageSystemAttributes": TRACE}
GROUPED = MESSAGE | {"MessageGroupId": "g", "MessageDeduplicationId": "d"}


class World:
    """Two queues, a dead-letter queue, a message in flight, and who asks."""

    def __init__(self, served: Any) -> None:
        self.served = served
        self.client = served.connect("json")
        self._make_queues()

    def renew(self) -> None:
        self.served.renew()
        self._make_queues()

    def _make_queues(self) -> None:
        self.client.create_queue(QueueName="dead")
        redrive = json.dumps({"deadLetterTargetArn": ARN + "dead", "maxReceiveCount": 5})
        self.client.create_queue(QueueName="jobs", Attributes={"RedrivePolicy": redrive})
        self.client.create_queue(QueueName="jobs.fifo", Attributes={"FifoQueue": "true"})

    def handle(self) -> str:
        """Of a new message in flight."""
        self.client.send_message(QueueUrl=URL, MessageBody="x")
        return str(self.client.receive_message(QueueUrl=URL)["Messages"][0]["ReceiptHandle"])

    def task(self) -> str:
        """Handle of a task that has begun."""
        return str(self.client.start_message_move_task(SourceArn=ARN + "dead")["TaskHandle"])

    def finished_task(self) -> str:
        """Handle of a task that has ended."""
        handle = self.task()
        self.served.later(1)
        return handle

    def call(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        """Carry the operation out."""
        return dict(self.client._make_api_call(operation, given))

    def error(self, operation: str, given: dict[str, Any]) -> str:
        """Name of the error shape that the operation answers."""
        with pytest.raises(self.client.exceptions.ClientError) as raised:
            self.call(operation, given)
        return type(raised.value).__name__


class Query(World):
    """The same, asked in the Query form: only there a request's own address stands for the queue's."""

    def __init__(self, world: World) -> None:
        self.served = world.served
        self.client = world.served.connect("query")


@pytest.fixture
def world(served: Any) -> World:
    return World(served)


Given = dict[str, Any]
GIVEN: dict[str, Callable[[World], list[Given]]] = {
    "AddPermission": lambda world: [
        {"QueueUrl": URL, "Label": "l", "AWSAccountIds": ["444455556666"], "Actions": ["SendMessage"]}
    ],
    "CancelMessageMoveTask": lambda world: [{"TaskHandle": world.task()}],
    "ChangeMessageVisibility": lambda world: [
        {"QueueUrl": URL, "ReceiptHandle": world.handle(), "VisibilityTimeout": 10}
    ],
    "ChangeMessageVisibilityBatch": lambda world: [
        {"QueueUrl": URL, "Entries": [{"Id": "1", "ReceiptHandle": world.handle(), "VisibilityTimeout": 10}]}
    ],
    "CreateQueue": lambda world: [
        {"QueueName": "new", "Attributes": {"DelaySeconds": "1"}, "tags": {"a": "b"}},
    ],
    "DeleteMessage": lambda world: [{"QueueUrl": URL, "ReceiptHandle": world.handle()}],
    "DeleteMessageBatch": lambda world: [
        {"QueueUrl": URL, "Entries": [{"Id": "1", "ReceiptHandle": world.handle()}]},
    ],
    "DeleteQueue": lambda world: [{"QueueUrl": URL}],
    "GetQueueAttributes": lambda world: [{"QueueUrl": URL, "AttributeNames": ["All"]}],
    "GetQueueUrl": lambda world: [{"QueueName": "jobs", "QueueOwnerAWSAccountId": ACCOUNT}],
    "ListDeadLetterSourceQueues": lambda world: [
        {"QueueUrl": BASE + "dead", "MaxResults": 1},
        {"QueueUrl": BASE + "dead", "MaxResults": 1, "NextToken": _token(world)},
    ],
    "ListMessageMoveTasks": lambda world: [{"SourceArn": ARN + "dead", "MaxResults": 10}],
    "ListQueueTags": lambda world: [{"QueueUrl": URL}],
    "ListQueues": lambda world: [{"QueueNamePrefix": "j", "MaxResults": 1, "NextToken": _token(world)}],
    "PurgeQueue": lambda world: [{"QueueUrl": URL}],
    "ReceiveMessage": lambda world: [
        {
            "QueueUrl": FIFO,
            "AttributeNames": ["All"],
            "MessageSystemAttributeNames": ["All"],
            "MessageAttributeNames": ["All", ".*", "te.*"],
            "MaxNumberOfMessages": 10,
            "VisibilityTimeout": 10,
            "WaitTimeSeconds": 0,
            "ReceiveRequestAttemptId": "again",
        }
    ],
    "RemovePermission": lambda world: [_with_permission(world)],
    "SendMessage": lambda world: [
        {"QueueUrl": URL, "DelaySeconds": 1, **MESSAGE},
        {"QueueUrl": FIFO, **GROUPED},
    ],
    "SendMessageBatch": lambda world: [
        {"QueueUrl": URL, "Entries": [{"Id": "1", "DelaySeconds": 1, **MESSAGE}]},
        {"QueueUrl": FIFO, "Entries": [{"Id": "1", **GROUPED}]},
    ],
    "SetQueueAttributes": lambda world: [{"QueueUrl": URL, "Attributes": {"DelaySeconds": "1"}}],
    "StartMessageMoveTask": lambda world: [
        {"SourceArn": ARN + "dead", "DestinationArn": ARN + "jobs", "MaxNumberOfMessagesPerSecond": 1}
    ],
    "TagQueue": lambda world: [{"QueueUrl": URL, "Tags": {"a": "b"}}],
    "UntagQueue": lambda world: [{"QueueUrl": URL, "TagKeys": ["a"]}],
}
"""Calls of each operation that name, together, every member of its input."""

RESERVED = {"StringListValues", "BinaryListValues"}
"""\"Not implemented. Reserved for future use.\" (the model's own words)."""

NO_MEANING = {("MessageSystemAttributes", "BinaryValue")}
"""AWSTraceHeader is the only system attribute that can be sent, and must be a String: any other type is refused."""


def _token(world: World) -> str:
    return str(world.client.list_queues(MaxResults=1)["NextToken"])


def _with_permission(world: World) -> Given:
    world.client.add_permission(QueueUrl=URL, Label="l", AWSAccountIds=["444455556666"], Actions=["*"])
    return {"QueueUrl": URL, "Label": "l"}


def members(shape: Any, seen: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all members in a shape, through lists and maps."""
    if shape.type_name == "structure":
        for name, member in shape.members.items():
            if name not in RESERVED and (*seen, name)[-2:] not in NO_MEANING:
                yield (*seen, name)
                yield from members(member, (*seen, name))
    elif shape.type_name == "list":
        yield from members(shape.member, seen)
    elif shape.type_name == "map":
        yield from members(shape.value, seen)


def named(shape: Any, value: Any, seen: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the members that a value gives."""
    if shape.type_name == "structure":
        for name, inside in value.items():
            yield (*seen, name)
            yield from named(shape.members[name], inside, (*seen, name))
    elif shape.type_name == "list":
        for inside in value:
            yield from named(shape.member, inside, seen)
    elif shape.type_name == "map":
        for inside in value.values():
            yield from named(shape.value, inside, seen)


@for_each("operation", sorted(GIVEN), fresh="world")
def test_every_operation_is_answered_and_takes_every_member(world: World, operation: str) -> None:
    shape = world.client.meta.service_model.operation_model(operation)
    calls = GIVEN[operation](world)
    covered = {path for given in calls for path in named(shape.input_shape, given)}
    assert covered == set(members(shape.input_shape))
    for given in calls:
        answer = world.call(operation, given)
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
        assert answer["ResponseMetadata"]["RequestId"]
        assert not answer.get("Failed"), answer


LACKING = {"Entries": "EmptyBatchRequest", "QueueUrl": "NonExistentQueue", "QueueName": "InvalidParameterValue"}
"""How AWS calls the lack of a member, if not MissingParameter; yavosh/pail recorded QueueUrl of SendMessage
and QueueName of GetQueueUrl, and other operations are by analogy."""


@for_each("operation", sorted(GIVEN))
def test_what_the_model_requires_is_asked_for(world: World, operation: str) -> None:
    """botocore checks that too; here its checks are off."""
    shape = world.client.meta.service_model.operation_model(operation).input_shape
    (given, *_) = GIVEN[operation](world)
    for name in shape.required_members:
        lacking = {member: value for member, value in given.items() if member != name}
        with pytest.raises(world.client.exceptions.ClientError) as raised:
            world.call(operation, lacking)
        code = raised.value.response["Error"]["Code"]
        assert code.endswith(LACKING.get(name, "MissingParameter")), name


def test_the_table_names_every_operation(world: World) -> None:
    assert set(GIVEN) == set(world.client.meta.service_model.operation_names)


def _queue_url(operation: str, world: World) -> bool:
    return "QueueUrl" in world.client.meta.service_model.operation_model(operation).input_shape.members


def _entries(operation: str, count: int, **more: Any) -> list[dict[str, Any]]:
    needed = {"SendMessageBatch": {"MessageBody": "x"}, "ChangeMessageVisibilityBatch": {"VisibilityTimeout": 1}}
    handle = {} if operation == "SendMessageBatch" else {"ReceiptHandle": "h"}
    return [{"Id": str(number), **handle, **needed.get(operation, {}), **more} for number in range(count)]


def _batch(count: int, **more: Any) -> Callable[[World, str, Given], str]:
    def reach(world: World, operation: str, given: Given) -> str:
        return world.error(operation, given | {"Entries": _entries(operation, count, **more)})

    return reach


def _changed(**changes: Any) -> Callable[[World, str, Given], str]:
    return lambda world, operation, given: world.error(operation, given | changes)


def _throttled(world: World, operation: str, given: Given) -> str:
    world.served.configure(requests_per_second_max=1)
    world.client.list_queues()
    return world.error(operation, given)


def _old_signature(world: World, operation: str, given: Given) -> str:
    world.served.more_headers = {"Authorization": "AWS AKIDEXAMPLE:c2lnbmF0dXJl"}
    return world.error(operation, given)


def _kms(state: str) -> Callable[[World, str, Given], str]:
    def reach(world: World, operation: str, given: Given) -> str:
        world.client.set_queue_attributes(QueueUrl=given["QueueUrl"], Attributes={"KmsMasterKeyId": "alias/broken"})
        world.served.configure(kms_faults=(("alias/fine", "disabled"), ("alias/broken", state)))
        return world.error(operation, given)

    return reach


def _full(world: World, operation: str, given: Given) -> str:
    """So many messages in flight as SQS allows, and one more."""
    world.client.create_queue(QueueName="full", Attributes={"VisibilityTimeout": "43200"})
    url, store, clock = BASE + "full", world.served.store, world.served.clock
    queue = QueueKey(ACCOUNT, "us-east-1", "full")
    origin = Origin("sqs", "tester")
    for count in (limits.IN_FLIGHT_MAX - 1, 1, 1):
        store.apply([sending(queue, str(number), origin=origin) for number in range(count)], clock.now)
        store.commit()
    store.apply([Receive(queue=queue, origin=origin, count_max=limits.IN_FLIGHT_MAX - 1)], clock.now)
    store.commit()
    # One below the limit: the last place is given, however many are asked for.
    assert len(world.client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]) == 1
    return world.error(operation, {"QueueUrl": url})


def _deleted(world: World, operation: str, given: Given) -> str:
    world.client.delete_queue(QueueUrl=URL)
    return world.error(operation, {"QueueName": "jobs"})


def _purged(world: World, operation: str, given: Given) -> str:
    world.client.purge_queue(QueueUrl=URL)
    return world.error(operation, given)


def _many_statements(world: World, operation: str, given: Given) -> str:
    statement = {"Effect": "Allow", "Principal": "*", "Action": "sqs:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement] * (limits.POLICY_STATEMENTS_MAX + 1)})
    return world.error(operation, given | {"Attributes": {"Policy": policy}})


def _finished(world: World, operation: str, given: Given) -> str:
    world.served.later(1)
    return world.error(operation, given)


Reach = Callable[[World, str, Given], str]
REACHED: dict[str, Reach] = {
    "RequestThrottled": _throttled,
    "InvalidSecurity": _old_signature,
    "QueueDoesNotExist": lambda world, operation, given: (
        world.error(operation, given | {"QueueUrl": NOWHERE + ".fifo" if operation == "ReceiveMessage" else NOWHERE})
        if _queue_url(operation, world)
        else world.error(operation, {"QueueName": "nowhere"})
    ),
    "InvalidAddress": lambda world, operation, given: Query(world).error(operation, given | {"QueueUrl": ""}),
    "TooManyEntriesInBatchRequest": _batch(11),
    "EmptyBatchRequest": _batch(0),
    "BatchEntryIdsNotDistinct": _batch(2, Id="same"),
    "InvalidBatchEntryId": _batch(1, Id="no spaces"),
    "BatchRequestTooLong": _batch(2, MessageBody="x" * (limits.MESSAGE_BYTES_MAX // 2 + 1)),
    "InvalidMessageContents": _changed(MessageBody="\x01"),
    **{"Kms" + "".join(part.capitalize() for part in state.split("-")): _kms(state) for state in KMS_FAULTS},
    "QueueDeletedRecently": _deleted,
    "QueueNameExists": _changed(QueueName="jobs"),
    "InvalidAttributeName": lambda world, operation, given: world.error(
        operation,
        given | ({"AttributeNames": ["Nonsense"]} if "AttributeNames" in given else {"Attributes": {"Nonsense": "1"}}),
    ),
    "InvalidAttributeValue": _changed(Attributes={"DelaySeconds": "901"}),
    "ReceiptHandleIsInvalid": _changed(ReceiptHandle="nonsense"),
    "PurgeQueueInProgress": _purged,
    "ResourceNotFoundException": lambda world, operation, given: world.error(
        operation, {"SourceArn": ARN + "nowhere"} if "SourceArn" in given else {"TaskHandle": _other_task(given)}
    ),
}
"""How an error is reached, whatever the operation."""
LISTS = {"a": {"DataType": "String", "StringValue": "v", "StringListValues": ["v"]}}
REACHED_BY: dict[tuple[str, str], Reach] = {
    ("AddPermission", "OverLimit"): _changed(Actions=["SendMessage"] * 8),
    ("ReceiveMessage", "OverLimit"): _full,
    ("SetQueueAttributes", "OverLimit"): _many_statements,
    ("CancelMessageMoveTask", "UnsupportedOperation"): _finished,
    ("SendMessage", "UnsupportedOperation"): _changed(MessageAttributes=LISTS),
    ("SendMessageBatch", "UnsupportedOperation"): _batch(1, MessageAttributes=LISTS),
}
NO_CASE = "every operation is carried out on every queue; AWS names no case"
NO_URL = "the operation names no queue URL that could be invalid"
NEVER: dict[tuple[str, str], str] = {
    ("ChangeMessageVisibility", "MessageNotInflight"): "no report of it is known; InvalidParameterValue is answered",
    ("DeleteMessage", "InvalidIdFormat"): "deprecated by AWS; ReceiptHandleIsInvalid is answered, as AWS does today",
    **{(name, "UnsupportedOperation"): NO_CASE for name in GIVEN if (name, "UnsupportedOperation") not in REACHED_BY},
    **{
        (name, "InvalidAddress"): NO_URL
        for name in (
            "CancelMessageMoveTask",
            "CreateQueue",
            "GetQueueUrl",
            "ListMessageMoveTasks",
            "ListQueues",
            "StartMessageMoveTask",
        )
    },
}


def _other_task(given: Given) -> str:
    inside = json.loads(b64decode(given["TaskHandle"]))
    return b64encode(json.dumps(inside | {"taskId": "0" * 8 + inside["taskId"][8:]}).encode()).decode()


def documented() -> list[tuple[str, str]]:
    """(operation, error) of the whole model."""
    model = botocore.session.Session().get_service_model("sqs")
    return [(name, shape.name) for name in model.operation_names for shape in model.operation_model(name).error_shapes]


DOCUMENTED = documented()


@for_each(("operation", "error"), [pair for pair in DOCUMENTED if pair not in NEVER], fresh="world")
def test_every_documented_error_is_reached(world: World, operation: str, error: str) -> None:
    reach = REACHED_BY.get((operation, error)) or REACHED[error]
    (given, *_) = GIVEN[operation](world)
    assert reach(world, operation, given) == error


STATUSES = {
    "InvalidAddress": 404,
    "InvalidSecurity": 403,
    "KmsOptInRequired": 403,
    "OverLimit": 403,
    "PurgeQueueInProgress": 403,
    "ReceiptHandleIsInvalid": 404,
    "RequestThrottled": 403,
    "ResourceNotFoundException": 404,
}
"""Of AWS's Smithy model (httpResponseCode), which botocore's does not have; every other error shape is 400. Replies of
the service show them in the JSON form too."""


def test_every_error_shape_has_its_status() -> None:
    known = [*vars(errors).values(), *KMS_FAULTS.values()]
    found = {
        fault.shape.removeprefix("com.amazonaws.sqs#"): fault.status
        for fault in known
        if isinstance(fault, errors.Fault) and fault.shape.startswith("com.amazonaws.sqs#")
    }
    shapes = {shape for _, shape in DOCUMENTED} - {"InvalidIdFormat", "MessageNotInflight"}
    assert {shape: found.get(shape) for shape in shapes} == {shape: STATUSES.get(shape, 400) for shape in shapes}


def test_what_is_never_reached_is_in_the_model() -> None:
    assert NEVER.keys() <= set(DOCUMENTED)


def test_what_is_never_reached_is_in_the_documents() -> None:
    page = (Path(__file__).parents[3] / "docs/sqs.md").read_text()
    rows = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1] for row in page.splitlines() if " | " in row}
    assert {error for _, error in NEVER} == rows.keys() & {error for _, error in DOCUMENTED}
    for error, where in rows.items():
        told = {name for name in GIVEN if name in re.findall("[A-Za-z]+", where)}
        if where.startswith("everywhere but in"):
            told = GIVEN.keys() - told
        if error in {error for _, error in NEVER}:
            assert told == {name for name, never in NEVER if never == error}


def test_nothing_else_fails_with_a_kms_key_that_works(world: World) -> None:
    world.client.set_queue_attributes(QueueUrl=URL, Attributes={"KmsMasterKeyId": "alias/fine"})
    world.served.configure(kms_faults=(("alias/broken", "disabled"),))
    world.client.send_message(QueueUrl=URL, MessageBody="x")
    assert world.client.receive_message(QueueUrl=URL)["Messages"]
    world.client.set_queue_attributes(QueueUrl=URL, Attributes={"KmsMasterKeyId": "alias/broken"})
    world.client.get_queue_attributes(QueueUrl=URL, AttributeNames=["All"])
    world.client.set_queue_attributes(QueueUrl=URL, Attributes={"SqsManagedSseEnabled": "true"})
    world.client.send_message(QueueUrl=URL, MessageBody="x")


def test_a_throttled_account_goes_on_after_a_second_and_others_all_the_time(world: World) -> None:
    world.served.configure(requests_per_second_max=3)
    for _ in range(3):
        world.client.list_queues()
    assert world.error("ListQueues", {}) == "RequestThrottled"
    world.served.connect("json", world.served.other).list_queues()
    world.served.clock.advance(333_333)
    assert world.error("ListQueues", {}) == "RequestThrottled"
    world.served.clock.advance(1)
    world.client.list_queues()
    assert world.error("ListQueues", {}) == "RequestThrottled"
    world.served.clock.advance(10_000_000)
    for _ in range(3):
        world.client.list_queues()
    assert world.error("ListQueues", {}) == "RequestThrottled"
