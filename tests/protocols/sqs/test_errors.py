"""Every error of the house becomes one of SQS's, and reaches clients of both forms as the class they catch."""

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from veilmq.model.commands import SERVER, ChangeQueue, CreateQueue, Delete, Extend, PurgeQueue, Receive, Send
from veilmq.model.errors import (
    CapabilityMissing,
    DiskLow,
    InFlightFull,
    LeaseExpired,
    LeaseTaken,
    MessageGone,
    MessageTooLarge,
    Overloaded,
    ParameterInvalid,
    PurgeInProgress,
    QueueDeletedRecently,
    QueueExists,
    QueueMissing,
    ReceiptInvalid,
    RedriveRefused,
    StoreFailed,
    StoreUnknown,
    VeilError,
    leaves,
)
from veilmq.model.instant import Instant
from veilmq.model.outcomes import QueueDescribed
from veilmq.model.settings.access import Action
from veilmq.model.settings.queue import QueueCounts, QueueInfo, QueueKey, QueueSettings
from veilmq.protocols import Request
from veilmq.protocols.sqs.codec import Codec
from veilmq.protocols.sqs.errors import QUERY_WORDS, fault_of
from veilmq.protocols.sqs.operations import OPERATIONS
from veilmq.testing.for_each import for_each

URL = "http://127.0.0.1:9324/111122223333/jobs"
FIFO_URL = URL + ".fifo"
QUEUE = QueueKey("111122223333", "us-east-1", "jobs")
COMMANDS = (
    Send(queue=QUEUE, origin=SERVER, body="x", md5=bytes(16), size_bytes=1),
    Receive(queue=QUEUE, origin=SERVER),
    Extend(queue=QUEUE, origin=SERVER, handle="h", lease_us=5_000_000, arrived=Instant(0)),
    Delete(queue=QUEUE, origin=SERVER, handle="h", arrived=Instant(0)),
    CreateQueue(queue=QUEUE, origin=SERVER),
    ChangeQueue(queue=QUEUE, origin=SERVER, change={}),
    PurgeQueue(queue=QUEUE, origin=SERVER),
)


def sample(leaf: type[VeilError]) -> VeilError:
    return leaf(**{name: 7 if leaf.__annotations__[name] is int else "some text" for name in leaf.fields})


@for_each("leaf", list(leaves()), ids=lambda leaf: leaf.__name__)
def test_the_table_is_total(leaf: type[VeilError]) -> None:
    for command in COMMANDS:
        refusal = fault_of(sample(leaf), command)
        assert refusal.message
        assert refusal.fault.sender is (refusal.fault.status < 500)


HANDLE = {"QueueUrl": URL, "ReceiptHandle": "a handle"}
EXTEND = {**HANDLE, "VisibilityTimeout": 43_200}
GONE = (
    "Value a handle for parameter ReceiptHandle is invalid. "
    "Reason: Message does not exist or is not available for visibility timeout change."
)
EXPIRED = "Value a handle for parameter ReceiptHandle is invalid. Reason: The receipt handle has expired."
LEASE = {"sequence": 1, "attempt": 1}
SEND = {"QueueUrl": URL, "MessageBody": "x"}
SAID = [
    (
        "change_message_visibility",
        EXTEND,
        LeaseExpired(**LEASE),
        "InvalidParameterValue",
        400,
        EXPIRED,
    ),
    ("change_message_visibility", EXTEND, MessageGone(**LEASE), "InvalidParameterValue", 400, GONE),
    ("change_message_visibility", EXTEND, LeaseTaken(**LEASE), "InvalidParameterValue", 400, GONE),
    (
        "change_message_visibility",
        EXTEND,
        ReceiptInvalid(reason="x"),
        "ReceiptHandleIsInvalid",
        404,
        "The input receipt handle is invalid.",
    ),
    (
        "change_message_visibility",
        EXTEND,
        ParameterInvalid(parameter="lease_us", reason="x"),
        "InvalidParameterValue",
        400,
        (
            "Value 43200 for parameter VisibilityTimeout is invalid. Reason: Total VisibilityTimeout for the "
            "message is beyond the limit [43200 seconds]"
        ),
    ),
    (
        "delete_message",
        HANDLE,
        ReceiptInvalid(reason="x"),
        "ReceiptHandleIsInvalid",
        404,
        f'The input receipt handle "{HANDLE["ReceiptHandle"]}" is not a valid receipt handle.',
    ),
    ("delete_message", {**HANDLE, "QueueUrl": FIFO_URL}, LeaseExpired(**LEASE), "InvalidParameterValue", 400, EXPIRED),
    (
        "delete_message",
        HANDLE,
        QueueMissing(queue="jobs"),
        "AWS.SimpleQueueService.NonExistentQueue",
        400,
        "The specified queue does not exist.",
    ),
    (
        "send_message",
        SEND,
        MessageTooLarge(size_bytes=9, limit_bytes=8),
        "InvalidParameterValue",
        400,
        "One or more parameters are invalid. Reason: Message must be shorter than 8 bytes.",
    ),
    (
        "send_message",
        SEND,
        DiskLow(free_bytes=1),
        "ServiceUnavailable",
        503,
        "The disk is nearly full. Try again later.",
    ),
    ("send_message", SEND, StoreUnknown(reason="x"), "InternalFailure", 500, "The outcome of the request is unknown."),
    (
        "send_message",
        SEND,
        StoreFailed(reason="x"),
        "InternalFailure",
        500,
        "The request was not carried out. Try again.",
    ),
    (
        "send_message",
        SEND,
        Overloaded(limit=1),
        "ServiceUnavailable",
        503,
        "The server is overloaded. Try again later.",
    ),
    (
        "send_message",
        SEND,
        ParameterInvalid(parameter="deduplication_id", reason="needed"),
        "InvalidParameterValue",
        400,
        (
            "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided "
            "explicitly"
        ),
    ),
    (
        "receive_message",
        {"QueueUrl": URL},
        InFlightFull(queue="jobs", limit=120_000),
        "OverLimit",
        403,
        (
            "Too many messages have been received without being deleted. Please delete your received messages or let "
            "them timeout before receiving more."
        ),
    ),
    (
        "create_queue",
        {"QueueName": "jobs"},
        QueueExists(queue="jobs", setting="delay_us"),
        "QueueAlreadyExists",
        400,
        "A queue already exists with the same name and a different value for attribute DelaySeconds",
    ),
    (
        "create_queue",
        {"QueueName": "jobs"},
        QueueExists(queue="jobs", setting="name"),
        "QueueAlreadyExists",
        400,
        "Another queue has this name as its alias.",
    ),
    (
        "create_queue",
        {"QueueName": "jobs"},
        QueueDeletedRecently(queue="jobs", wait_us=1),
        "AWS.SimpleQueueService.QueueDeletedRecently",
        400,
        "You must wait 60 seconds after deleting a queue before you can create another with the same name.",
    ),
    (
        "create_queue",
        {"QueueName": "jobs.fifo", "Attributes": {"FifoQueue": "true"}},
        CapabilityMissing(capability="FIFO queues"),
        "AWS.SimpleQueueService.UnsupportedOperation",
        400,
        "not supported here: FIFO queues.",
    ),
    (
        "purge_queue",
        {"QueueUrl": URL},
        PurgeInProgress(queue="jobs", wait_us=1),
        "AWS.SimpleQueueService.PurgeQueueInProgress",
        403,
        "Only one PurgeQueue operation on jobs is allowed every 60 seconds.",
    ),
    (
        "set_queue_attributes",
        {"QueueUrl": URL, "Attributes": {"DelaySeconds": "1"}},
        RedriveRefused(target="dead", reason="denied"),
        "InvalidParameterValue",
        400,
        "Value dead for parameter RedrivePolicy is invalid. Reason: Dead letter target: denied.",
    ),
]


@for_each(
    ("method", "arguments", "error", "code", "status", "message"),
    SAID,
    ids=[f"{case[0]}-{type(case[2]).__name__}" for case in SAID],
)
def test_clients_of_both_forms_meet_the_error(
    wire: Any, method: str, arguments: dict[str, Any], error: VeilError, code: str, status: int, message: str
) -> None:
    wire.answers(error)
    with pytest.raises(wire.client.exceptions.ClientError) as caught:
        getattr(wire.client, method)(**arguments)
    response = caught.value.response
    assert response["Error"]["Code"] == code
    query = b"x-amz-target" not in wire.requests[-1].headers
    assert response["Error"]["Message"] == (QUERY_WORDS.get(message, message) if query else message)
    assert response["Error"]["Type"] == ("Sender" if status < 500 else "Receiver")
    assert response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert response["ResponseMetadata"]["RequestId"] == wire.requests[-1].request_id
    shape = CLASSES.get(code)
    assert type(caught.value) is (
        getattr(wire.client.exceptions, shape) if shape else wire.client.exceptions.ClientError
    )


CLASSES = {
    "AWS.SimpleQueueService.NonExistentQueue": "QueueDoesNotExist",
    "AWS.SimpleQueueService.PurgeQueueInProgress": "PurgeQueueInProgress",
    "AWS.SimpleQueueService.QueueDeletedRecently": "QueueDeletedRecently",
    "AWS.SimpleQueueService.UnsupportedOperation": "UnsupportedOperation",
    "OverLimit": "OverLimit",
    "QueueAlreadyExists": "QueueNameExists",
    "ReceiptHandleIsInvalid": "ReceiptHandleIsInvalid",
}
"""The class that a client catches; the other codes are no shapes of the model."""


@for_each("error", [LeaseExpired(**LEASE), LeaseTaken(**LEASE), MessageGone(**LEASE)])
def test_a_stale_handle_deletes_nothing_and_succeeds(wire: Any, error: VeilError) -> None:
    wire.answers(error)
    wire.client.delete_message(**HANDLE)
    answer = wire.client.delete_message_batch(QueueUrl=URL, Entries=[{"Id": "1", "ReceiptHandle": "a handle"}])
    assert answer["Successful"] == [{"Id": "1"}]
    fifo = {**HANDLE, "QueueUrl": FIFO_URL}
    if isinstance(error, MessageGone):
        wire.client.delete_message(**fifo)
    else:
        with pytest.raises(wire.client.exceptions.ClientError, match="receipt handle has expired"):
            wire.client.delete_message(**fifo)
        answer = wire.client.delete_message_batch(QueueUrl=FIFO_URL, Entries=[{"Id": "1", "ReceiptHandle": "a handle"}])
        assert [(each["Code"], each["Message"]) for each in answer["Failed"]] == [
            ("ReceiptHandleIsInvalid", "The receipt handle has expired")
        ]


def test_a_batch_of_which_nothing_could_be_done_may_be_tried_again(wire: Any) -> None:
    entries = [{"Id": "1", "MessageBody": "x"}, {"Id": "2", "MessageBody": "y"}]
    wire.answers(DiskLow(free_bytes=1), DiskLow(free_bytes=1))
    with pytest.raises(wire.client.exceptions.ClientError) as caught:
        wire.client.send_message_batch(QueueUrl=URL, Entries=entries)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    wire.answers(DiskLow(free_bytes=1), MessageTooLarge(size_bytes=9, limit_bytes=8))
    answer = wire.client.send_message_batch(QueueUrl=URL, Entries=entries)
    assert [(each["Code"], each["SenderFault"]) for each in answer["Failed"]] == [
        ("ServiceUnavailable", False),
        ("InvalidParameterValue", True),
    ]


def test_the_model_and_the_table_name_the_same_operations(wire: Any) -> None:
    assert set(OPERATIONS) == set(wire.client.meta.service_model.operation_names)


def test_another_accounts_queue_is_denied(wire: Any) -> None:
    wire.answers(QueueMissing(queue="jobs"))
    with pytest.raises(wire.client.exceptions.ClientError) as caught:
        wire.client.receive_message(QueueUrl=URL.replace("111122223333", "444455556666"))
    assert caught.value.response["Error"]["Code"] == "AccessDenied"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def _request(headers: dict[bytes, bytes]) -> Request:
    return Request("POST", b"/", headers, b"", "::1", False, "an-id")


JSON = {b"x-amz-target": b"AmazonSQS.SendMessage"}


def test_refusals_of_the_server_speak_the_requests_form(wire: Any) -> None:
    codec: Codec = wire.codec
    wire.answers(QueueDescribed(QueueInfo(QUEUE, 1, Instant(0), Instant(0), QueueSettings(), QueueCounts())))
    wire.client.get_queue_url(QueueName="jobs")
    denied = codec.denied(wire.calls[-1], Action.DESCRIBE_QUEUE)
    assert denied.status == 403
    assert b"AccessDenied" in denied.body
    assert (
        b"is not authorized to perform: sqs:getqueueurl on resource: arn:aws:sqs:us-east-1:111122223333:jobs"
        in denied.body
    )

    failure = codec.failure(_request(JSON))
    assert (failure.status, dict(failure.headers)[b"x-amzn-query-error"]) == (500, b"InternalFailure;Receiver")
    assert json.loads(failure.body)["__type"] == "com.amazon.coral.service#InternalFailure"
    tree = ElementTree.fromstring(codec.failure(_request({})).body)
    assert tree.find(".//{*}Code").text == "InternalFailure"  # type: ignore[union-attr]
    assert tree.find(".//{*}Type").text == "Receiver"  # type: ignore[union-attr]


@for_each("status", [400, 403, 404, 405, 408, 413, 414, 417, 418, 429, 431, 500, 501, 503, 507])
def test_the_listeners_refusals_keep_their_status(wire: Any, status: int) -> None:
    codec: Codec = wire.codec
    for request in (None, _request({}), _request(JSON)):
        answer = codec.refuse(status, "too <large>", request, "an-id")
        assert answer.status == status
        assert (b"x-amzn-RequestId", b"an-id") in answer.headers
        assert b"too <large>" in answer.body or b"too &lt;large&gt;" in answer.body
