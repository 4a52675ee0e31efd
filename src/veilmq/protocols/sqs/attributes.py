"""Queue attributes: converts SQS's names and texts to settings, and back.

Strategy: one table holds the plain numbers with unit and range. The few structured ones (RedrivePolicy,
RedriveAllowPolicy) and those of SQS alone (Policy, encryption: kept as labels, enforced nowhere below) have a function
each. Labels are changed one by one: labels that are not named stay, and an empty text removes one. Source:
SetQueueAttributes and GetQueueAttributes in the SQS API Reference.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.model.instant import SECOND_US, seconds
from veilmq.model.settings.queue import (
    DeduplicationScope,
    QueueInfo,
    QueueKey,
    RedriveAllowPolicy,
    RedrivePermission,
    RedrivePolicy,
    SettingsChange,
)
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.addresses import arn, is_fifo, queue_of_arn
from veilmq.protocols.sqs.auth.policy import (
    ActionUnknown,
    PolicyInvalid,
    PolicyTooLarge,
    check_rules,
    policy_meaning,
    read_policy,
    shown_policy,
)
from veilmq.protocols.sqs.errors import LABEL_PREFIX, Refusal, check_text, invalid_value, policy_too_long, redrive_text


class _Number(NamedTuple):
    field: str
    minimum: int
    maximum: int
    unit: int


_NUMBERS: Final = {
    "VisibilityTimeout": _Number("visibility_timeout_us", 0, limits.VISIBILITY_SECONDS_MAX, SECOND_US),
    "DelaySeconds": _Number("delay_us", 0, limits.DELAY_SECONDS_MAX, SECOND_US),
    "MessageRetentionPeriod": _Number(
        "retention_us", limits.RETENTION_SECONDS_MIN, limits.RETENTION_SECONDS_MAX, SECOND_US
    ),
    "ReceiveMessageWaitTimeSeconds": _Number("wait_us", 0, limits.WAIT_SECONDS_MAX, SECOND_US),
    "MaximumMessageSize": _Number("message_bytes_max", limits.MESSAGE_BYTES_MAX_LEAST, limits.MESSAGE_BYTES_MAX, 1),
}
_FIFO_ONLY: Final = frozenset({"ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit"})
_LABELS: Final = ("Policy", "KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds", "SqsManagedSseEnabled")
_READ_ONLY: Final = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
    "CreatedTimestamp",
    "LastModifiedTimestamp",
    "QueueArn",
)
NAMES: Final = frozenset(
    {"All", "FifoQueue", "RedrivePolicy", "RedriveAllowPolicy", *_NUMBERS, *_FIFO_ONLY, *_LABELS, *_READ_ONLY}
)
"""QueueAttributeName of the service model."""

_REUSE: Final = LABEL_PREFIX + "KmsDataKeyReusePeriodSeconds"
_REUSE_DEFAULT: Final = "300"
_ONE_ENCRYPTION: Final = (
    "You can use one type of server-side encryption (SSE) at one time. You can either enable KMS SSE or SQS SSE."
)


def unknown_name(name: str) -> Refusal:
    """InvalidAttributeName."""
    shown = name if len(name) <= 256 else name[:256] + "..."
    return Refusal(errors.INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {shown}.")


def _fifo_only(name: str) -> Refusal:
    """The refusal on a standard queue: it does not know ContentBasedDeduplication; for the two newer attributes AWS has
    a longer message."""
    if name == "ContentBasedDeduplication":
        return unknown_name(name)
    return Refusal(errors.INVALID_ATTRIBUTE_NAME, f"You can specify the {name} only when FifoQueue is set to true.")


def _bad_value(name: str) -> Refusal:
    return Refusal(errors.INVALID_ATTRIBUTE_VALUE, f"Invalid value for the parameter {name}.")


def _number(text: str, minimum: int, maximum: int, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10 or not minimum <= int(text) <= maximum:
        raise _bad_value(name)
    return int(text)


def _boolean(text: str, name: str) -> bool:
    # Ansible's sqs_queue, and any program that calls Python's str(), sends "True".
    if text.lower() not in {"true", "false"}:
        raise _bad_value(name)
    return text.lower() == "true"


def settings_change(queue: QueueKey, attributes: dict[str, str], creating: bool) -> SettingsChange:
    """The settings that these attributes set. Raises Refusal: InvalidAttributeName, InvalidAttributeValue."""
    change: SettingsChange = {}
    labels: dict[str, str] = {}
    for name, text in attributes.items():
        number = _NUMBERS.get(name)
        if number is not None:
            change[number.field] = _number(text, number.minimum, number.maximum, name) * number.unit
        elif name in _LABELS:
            labels[LABEL_PREFIX + name] = _label(name, text, creating)
        elif name in _SETTERS:
            if name in _FIFO_ONLY and not is_fifo(queue.name):
                raise _fifo_only(name)
            _SETTERS[name](change, text, queue)
        elif name == "FifoQueue":
            _check_fifo(text, queue, creating)
        else:
            raise unknown_name(name)
    _check_encryption(labels, creating)
    _check_throughput(change)
    if creating and is_fifo(queue.name):
        change["fifo"] = True
    if labels:
        change["labels"] = labels
    return change


def _check_fifo(text: str, queue: QueueKey, creating: bool) -> None:
    """The name decides: the attribute may only agree with it, and a standard queue does not know it."""
    value = _boolean(text, "FifoQueue")
    if not creating:
        if not is_fifo(queue.name):
            raise unknown_name("FifoQueue")
        if not value:
            words = "Invalid value for the parameter FifoQueue. Reason: Modifying queue type is not supported."
            raise Refusal(errors.INVALID_ATTRIBUTE_VALUE, words)
    elif not value:
        raise unknown_name("FifoQueue")
    elif not is_fifo(queue.name):
        text = (
            "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, must end with "
            ".fifo suffix and be 1 to 80 in length."
        )
        raise Refusal(errors.INVALID_PARAMETER_VALUE, text)


def _check_encryption(labels: dict[str, str], creating: bool) -> None:
    if labels.get(LABEL_PREFIX + "KmsMasterKeyId") and labels.get(LABEL_PREFIX + "SqsManagedSseEnabled") == "true":
        raise Refusal(errors.INVALID_ATTRIBUTE_VALUE if creating else errors.INVALID_ATTRIBUTE_NAME, _ONE_ENCRYPTION)
    # One kind of encryption removes the other, as on AWS. The default has no label, so a CreateQueue that names it
    # explicitly matches the same queue.
    if labels.get(_REUSE) == _REUSE_DEFAULT:
        labels[_REUSE] = ""
    if labels.get(LABEL_PREFIX + "KmsMasterKeyId"):
        labels.setdefault(LABEL_PREFIX + "SqsManagedSseEnabled", "false")
    elif labels.get(LABEL_PREFIX + "SqsManagedSseEnabled") == "true":
        labels[LABEL_PREFIX + "SqsManagedSseEnabled"] = ""
        labels.setdefault(LABEL_PREFIX + "KmsMasterKeyId", "")


def _check_throughput(change: SettingsChange) -> None:
    if change.get("throughput_per_group") and change.get("deduplication_scope") is DeduplicationScope.QUEUE:
        raise Refusal(errors.INVALID_ATTRIBUTE_VALUE, errors.THROUGHPUT)


def _label(name: str, text: str, creating: bool) -> str:
    if name == "Policy" and len(text.encode()) > limits.POLICY_BYTES_MAX:
        raise policy_too_long()
    if name != "Policy" and len(text.encode()) > limits.LABEL_BYTES_MAX:
        raise _bad_value(name)
    if text:
        check_text(text, f"queue attribute '{name}' value", errors.INVALID_ATTRIBUTE_VALUE)
    if name == "Policy" and text:
        _check_policy(text)
    elif name == "KmsDataKeyReusePeriodSeconds":
        return str(_number(text, limits.KMS_REUSE_SECONDS_MIN, limits.KMS_REUSE_SECONDS_MAX, name))
    elif name == "SqsManagedSseEnabled":
        return "true" if _boolean(text, name) else "false"
    return text


def spelled_as(labels: dict[str, str], present: dict[str, str]) -> dict[str, str]:
    """The labels of a change, each replaced by the present text if both mean the same."""
    spelled = dict(labels)
    for name, meaning in _MEANINGS.items():
        if name in labels and meaning(labels[name]) == meaning(present.get(name, "")):
            spelled[name] = present.get(name, "")
    return spelled


_MEANINGS: Final[dict[str, Callable[[str], object]]] = {
    LABEL_PREFIX + "Policy": policy_meaning,
    _REUSE: lambda text: int(text or _REUSE_DEFAULT),
}
"""Labels that can be written in several ways -> a function to their normal form."""


def _check_policy(text: str) -> None:
    try:
        check_rules(read_policy(text))
    except ActionUnknown as wrong:
        raise invalid_value("ActionName", wrong.shown, errors.NO_ACTION) from None
    except PolicyTooLarge as wrong:
        raise Refusal(errors.OVER_LIMIT, str(wrong)) from None
    except PolicyInvalid as wrong:
        # The first sentence is AWS's whole message.
        reason = f"Invalid value for the parameter Policy. Reason: {wrong}."
        raise Refusal(errors.INVALID_ATTRIBUTE_VALUE, reason) from None


def _set_redrive(change: SettingsChange, text: str, queue: QueueKey) -> None:
    if not text:
        change["redrive"] = None
        return
    value = _redrive_object(text)
    # The reference documents a default count of 10, but AWS refuses a policy without one.
    for name in ("maxReceiveCount", "deadLetterTargetArn"):
        if value.get(name) is None:
            reason = f"Redrive policy does not contain mandatory attribute: {name}."
            raise invalid_value("RedrivePolicy", text, reason)
    target_arn, count = value["deadLetterTargetArn"], value["maxReceiveCount"]
    target = queue_of_arn(target_arn) if isinstance(target_arn, str) else None
    if target is None:
        service = target_arn.split(":")[2:3] if isinstance(target_arn, str) else []
        if service and service != ["sqs"]:
            raise invalid_value("RedrivePolicy", text, "Only SQS queues are valid resources for deadLetterTargetArn.")
        raise invalid_value("RedrivePolicy", text, "Invalid value for deadLetterTargetArn.")
    if isinstance(count, str) and count.isascii() and count.isdigit() and len(count) <= 10:
        count = int(count)
    if type(count) is not int or not limits.REDRIVE_RECEIVES_MIN <= count <= limits.REDRIVE_RECEIVES_MAX:
        shown = str(count)[:64]
        reason = f"Invalid value for maxReceiveCount: {shown}, valid values are from 1 to 1000 both inclusive."
        raise invalid_value("RedrivePolicy", text, reason)
    if target.region != queue.region:
        raise invalid_value("RedrivePolicy", text, "Dead-letter target must be in same region as the source.")
    if target.account != queue.account:
        raise invalid_value("RedrivePolicy", text, "Dead-letter target owner should be same as the source.")
    if is_fifo(target.name) is not is_fifo(queue.name):  # AWS ends this message with two full stops
        raise invalid_value("RedrivePolicy", text, "Dead-letter queue must be same type of queue as the source..")
    change["redrive"] = RedrivePolicy(target, count)


def _redrive_object(text: str) -> dict[str, Any]:
    if len(text) > limits.REDRIVE_CHARACTERS_MAX:  # JSON of megabytes would take seconds
        reason = f"Redrive policy is over {limits.REDRIVE_CHARACTERS_MAX} characters."
        raise invalid_value("RedrivePolicy", text, reason)
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid_value("RedrivePolicy", text, "Redrive policy is not a valid JSON map.")
    return value


class _RedriveAllow(msgspec.Struct, rename="camel"):
    """RedriveAllowPolicy in its JSON text."""

    redrive_permission: RedrivePermission
    source_queue_arns: list[str] | None = None


def _set_redrive_allow(change: SettingsChange, text: str, queue: QueueKey) -> None:
    if not text:
        change["redrive_allow"] = None
        return
    if len(text) > limits.REDRIVE_CHARACTERS_MAX:
        raise _bad_redrive_allow(f", as it is over {limits.REDRIVE_CHARACTERS_MAX} characters.")
    try:
        policy = msgspec.json.decode(text, type=_RedriveAllow)
    except (ValueError, RecursionError):
        raise _bad_redrive_allow(_UNSUPPORTED) from None
    permission, arns = policy.redrive_permission, policy.source_queue_arns or []
    if permission is not RedrivePermission.BY_QUEUE:
        if arns:
            reason = "You can specify source queue ARNs only when the permission type is byQueue."
            raise invalid_value("RedriveAllowPolicy", text, f"{_NO_REDRIVE_ALLOW}. {reason}")
    elif not 1 <= len(arns) <= limits.REDRIVE_SOURCES_MAX:
        most = limits.REDRIVE_SOURCES_MAX
        reason = f"When you specify the byQueue permission type, you must also specify between 1 and {most}"
        raise invalid_value("RedriveAllowPolicy", text, f"{_NO_REDRIVE_ALLOW}. {reason} source queue ARNs.")
    sources = tuple(source for source in map(queue_of_arn, arns) if source is not None)
    if len(sources) != len(arns):
        raise _bad_redrive_allow(_UNSUPPORTED)
    change["redrive_allow"] = RedriveAllowPolicy(permission, sources)


_NO_REDRIVE_ALLOW: Final = "Amazon SQS can't create the redrive allow policy"
_UNSUPPORTED: Final = ", as it\u2019s in an unsupported format."


def _bad_redrive_allow(reason: str) -> Refusal:
    text = "Invalid value for the parameter RedriveAllowPolicy. Reason:"
    return Refusal(errors.INVALID_ATTRIBUTE_VALUE, f"{text} {_NO_REDRIVE_ALLOW}{reason}")


def _set_content_deduplication(change: SettingsChange, text: str, queue: QueueKey) -> None:
    change["content_deduplication"] = _boolean(text, "ContentBasedDeduplication")


def _set_deduplication_scope(change: SettingsChange, text: str, queue: QueueKey) -> None:
    try:
        change["deduplication_scope"] = DeduplicationScope(text)
    except ValueError:
        raise _bad_value("DeduplicationScope") from None


def _set_throughput(change: SettingsChange, text: str, queue: QueueKey) -> None:
    if text not in {"perQueue", "perMessageGroupId"}:
        raise _bad_value("FifoThroughputLimit")
    change["throughput_per_group"] = text == "perMessageGroupId"


_SETTERS: Final[dict[str, Callable[[SettingsChange, str, QueueKey], None]]] = {
    "RedrivePolicy": _set_redrive,
    "RedriveAllowPolicy": _set_redrive_allow,
    "ContentBasedDeduplication": _set_content_deduplication,
    "DeduplicationScope": _set_deduplication_scope,
    "FifoThroughputLimit": _set_throughput,
}


def checked_names(names: Iterable[str], queue: QueueKey) -> list[str]:
    """The names of a GetQueueAttributes. Raises Refusal for a name that SQS does not know, or not for this kind of
    queue."""
    names = list(names)
    for name in names:
        # "To determine whether a queue is FIFO, you can check whether QueueName ends with the .fifo suffix": a standard
        # queue has no such attribute, not even one that is false (aws/aws-sdk-ruby #1350).
        if name not in NAMES or ((name in _FIFO_ONLY or name == "FifoQueue") and not is_fifo(queue.name)):
            raise unknown_name(name)
    return names


def attributes_of(info: QueueInfo, names: Iterable[str]) -> dict[str, str]:
    """The result of GetQueueAttributes: the named attributes that the queue has."""
    wanted = frozenset(names)
    if not wanted:
        return {}
    every = "All" in wanted
    return {name: text for name, text in _all_of(info).items() if every or name in wanted}


def _all_of(info: QueueInfo) -> dict[str, str]:
    settings, counts = info.settings, info.counts
    texts = {
        "QueueArn": arn(info.key),
        "ApproximateNumberOfMessages": str(counts.visible),
        "ApproximateNumberOfMessagesNotVisible": str(counts.in_flight),
        "ApproximateNumberOfMessagesDelayed": str(counts.delayed),
        "CreatedTimestamp": str(seconds(info.created)),
        "LastModifiedTimestamp": str(seconds(info.modified)),
    }
    for name, number in _NUMBERS.items():
        texts[name] = str(getattr(settings, number.field) // number.unit)
    labels = {name: settings.labels.get(LABEL_PREFIX + name, "") for name in _LABELS}
    labels["SqsManagedSseEnabled"] = labels["SqsManagedSseEnabled"] or ("false" if labels["KmsMasterKeyId"] else "true")
    # Stored, but shown only with a key (hashicorp/terraform-provider-aws #19786).
    reuse = labels["KmsDataKeyReusePeriodSeconds"] or _REUSE_DEFAULT
    labels["KmsDataKeyReusePeriodSeconds"] = reuse if labels["KmsMasterKeyId"] else ""
    labels["Policy"] = labels["Policy"] and shown_policy(labels["Policy"])
    texts.update((name, text) for name, text in labels.items() if text)
    if settings.redrive is not None:
        texts["RedrivePolicy"] = redrive_text(settings.redrive)
    if settings.redrive_allow is not None:
        texts["RedriveAllowPolicy"] = _redrive_allow_text(settings.redrive_allow)
    if settings.fifo:
        texts["FifoQueue"] = "true"
        texts["ContentBasedDeduplication"] = "true" if settings.content_deduplication else "false"
        texts["DeduplicationScope"] = settings.deduplication_scope.value
        texts["FifoThroughputLimit"] = "perMessageGroupId" if settings.throughput_per_group else "perQueue"
    return texts


def _redrive_allow_text(policy: RedriveAllowPolicy) -> str:
    value: dict[str, Any] = {"redrivePermission": policy.permission.value}
    if policy.permission is RedrivePermission.BY_QUEUE:
        value["sourceQueueArns"] = [arn(source) for source in policy.sources]
    return msgspec.json.encode(value).decode()
