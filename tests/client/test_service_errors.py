"""Every error that the service model names, and every one that our server has, is one of the house's."""

import gzip
import json
from pathlib import Path

import botocore

from veilmq.client.adapters.service_errors import Refusal, error_of
from veilmq.client.errors import ServiceError
from veilmq.model.errors import (
    CapabilityMissing,
    InFlightFull,
    LeaseExpired,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    PurgeInProgress,
    QueueDeletedRecently,
    QueueExists,
    QueueMissing,
    QueuesFull,
    ReceiptInvalid,
    VeilError,
)
from veilmq.testing.client_contract import for_each

PREFIX = "AWS.SimpleQueueService."
GONE = "Message does not exist or is not available for visibility timeout change."
SAID: list[tuple[str, str, VeilError]] = [
    ("QueueDoesNotExist", "", QueueMissing(queue="q")),
    (f"{PREFIX}NonExistentQueue", "", QueueMissing(queue="q")),
    ("QueueNameExists", "a different value for attribute DelaySeconds", QueueExists(queue="q", setting="delay")),
    ("QueueNameExists", "the same name and different tags", QueueExists(queue="q", setting="tags")),
    ("QueueAlreadyExists", "exists", QueueExists(queue="q", setting="setting")),
    (f"{PREFIX}QueueDeletedRecently", "", QueueDeletedRecently(queue="q", wait_us=60_000_000)),
    (f"{PREFIX}PurgeQueueInProgress", "", PurgeInProgress(queue="q", wait_us=60_000_000)),
    ("ReceiptHandleIsInvalid", "bad", ReceiptInvalid(reason="bad")),
    ("ReceiptHandleIsInvalid", "The receipt handle has expired", LeaseExpired(sequence=0, attempt=0)),
    ("ReceiptHandleIsInvalid", GONE.removesuffix("."), MessageGone(sequence=0, attempt=0)),
    ("InvalidIdFormat", "bad", ReceiptInvalid(reason="bad")),
    (f"{PREFIX}MessageNotInflight", "", LeaseExpired(sequence=0, attempt=0)),
    ("OverLimit", "", InFlightFull(queue="q", limit=120_000)),
    (
        "OverLimit",
        "The maximum number of queues of an account is reached: 3.",
        QueuesFull(account="of this key", limit=3),
    ),
    (
        "QueueNumExceededLimit",
        "The number of queues exceeds the limit: 3.",
        QueuesFull(account="of this key", limit=3),
    ),
    (
        f"{PREFIX}BatchRequestTooLong",
        "Batch requests cannot be longer than 262144 bytes. You have sent 262145 bytes.",
        MessageTooLarge(size_bytes=262_145, limit_bytes=262_144),
    ),
    (
        "InvalidParameterValue",
        "One or more parameters are invalid. Reason: Message must be shorter than 1024 bytes.",
        MessageTooLarge(size_bytes=77, limit_bytes=1_024),
    ),
    (
        "InvalidParameterValue",
        f"Value h for parameter ReceiptHandle is invalid. Reason: {GONE}",
        MessageGone(sequence=0, attempt=0),
    ),
    (
        "InvalidParameterValueException",
        "Value h for parameter ReceiptHandle is invalid. Reason: The receipt handle has expired.",
        LeaseExpired(sequence=0, attempt=0),
    ),
    (
        "InvalidParameterValue",
        "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length",
        ParameterInvalid(
            parameter="name",
            reason="Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length, not 'q'",
        ),
    ),
    (
        "InvalidParameterValue",
        "Value 901 for parameter DelaySeconds is invalid. Reason: DelaySeconds must be >= 0 and <= 900.",
        ParameterInvalid(parameter="delay", reason="DelaySeconds must be >= 0 and <= 900."),
    ),
    (
        "InvalidParameterValue",
        "Value x for parameter Novel is invalid",
        ParameterInvalid(parameter="Novel", reason="Value x for parameter Novel is invalid"),
    ),
    ("InvalidParameterValue", "no", ParameterInvalid(parameter="request", reason="no")),
    (
        "MissingParameter",
        "The request must contain the parameter MessageGroupId.",
        ParameterInvalid(parameter="group", reason="The request must contain the parameter MessageGroupId."),
    ),
    ("InvalidMessageContents", "no", ParameterInvalid(parameter="body", reason="no")),
    ("InvalidAttributeName", "no", ParameterInvalid(parameter="attribute", reason="no")),
    ("InvalidAttributeValue", "no", ParameterInvalid(parameter="attribute", reason="no")),
    (f"{PREFIX}UnsupportedOperation", "no", CapabilityMissing(capability="no")),
]


def said(code: str, message: str, status: int = 400, queue: str = "q") -> Refusal:
    return Refusal(code, status, "r-1", message, queue, 77)


@for_each("code, message, error", SAID)
def test_what_was_said(code: str, message: str, error: VeilError) -> None:
    assert error_of(said(code, message)) == error


def test_a_fifo_queue_holds_fewer_in_flight() -> None:
    assert error_of(said("OverLimit", "", queue="q.fifo")) == InFlightFull(queue="q.fifo", limit=20_000)


def test_a_request_too_large_in_any_words() -> None:
    assert error_of(said("413", "<xml>", 413)) == MessageTooLarge(size_bytes=77, limit_bytes=1_048_576)


AS_THEY_STAND = {
    "BatchEntryIdsNotDistinct", "EmptyBatchRequest", "InvalidAddress", "InvalidBatchEntryId", "InvalidSecurity",
    "KmsAccessDenied", "KmsDisabled", "KmsInvalidKeyUsage", "KmsInvalidState", "KmsNotFound", "KmsOptInRequired",
    "KmsThrottled", "RequestThrottled", "ResourceNotFoundException", "TooManyEntriesInBatchRequest",
}  # fmt: skip
"""Those for which the house has no word."""


def test_the_table_covers_the_service_model() -> None:
    path = Path(botocore.__file__).parent / "data/sqs/2012-11-05/service-2.json.gz"
    shapes = json.loads(gzip.decompress(path.read_bytes()))["shapes"]
    names = {name for name, shape in shapes.items() if shape.get("exception")}
    assert {name for name in names if isinstance(error_of(said(name, "m")), ServiceError)} == AS_THEY_STAND


@for_each("code", [*sorted(AS_THEY_STAND), "AccessDenied", "NeverHeardOf"])
def test_what_has_no_word_is_told_as_it_stands(code: str) -> None:
    error = error_of(said(code, "m", 403))
    assert error == ServiceError(code=code, status=403, request_id="r-1", message="m")


def test_a_refusal_without_a_code_is_named_by_its_status() -> None:
    assert error_of(said("", "m", 403)) == ServiceError(code="HTTP 403", status=403, request_id="r-1", message="m")


@for_each(
    "code, status, retryable",
    [("InternalFailure", 500, True), ("RequestThrottled", 400, True), ("X", 429, True), ("AccessDenied", 403, False)],
)
def test_what_is_worth_another_try(code: str, status: int, retryable: bool) -> None:
    error = error_of(said(code, "m", status))
    assert isinstance(error, ServiceError)
    assert error.retryable is retryable
