"""AddPermission, RemovePermission, TagQueue, UntagQueue, ListQueueTags: operations that change part of a setting.

Strategy: read the setting, change it, and write it if it did not change meanwhile. The first command only reads the
queue, but as a change, so that the caller needs exactly the grant to change. Each further one is a compare-and-set. A
caller that loses the race tries again with the winner's value, so one caller always makes progress.

Permissions are statements of the queue's Policy attribute, by label, in the form that AWS gives them. Tags are one
setting of a queue. Source: the operations in the SQS API Reference; "Quotas" (policies) and "Amazon SQS cost allocation
tags" in the SQS Developer Guide.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from veilmq.model.commands import ChangeQueue, DescribeQueue
from veilmq.model.outcomes import Outcome, QueueChanged, QueueDescribed
from veilmq.model.settings.queue import QueueInfo, SettingsChange
from veilmq.protocols.sqs import errors, forms, limits
from veilmq.protocols.sqs.addresses import arn, partition
from veilmq.protocols.sqs.auth.authorize import ACROSS_ACCOUNTS, note
from veilmq.protocols.sqs.auth.policy import ACTIONS, VERSIONS, PolicyInvalid, read_policy, statements_of
from veilmq.protocols.sqs.call import Asked, Call, Plan, sole
from veilmq.protocols.sqs.errors import LABEL_PREFIX, Refusal, check_text, invalid_value, missing, policy_too_long
from veilmq.protocols.sqs.forms import (
    AddPermissionInput,
    QueueInput,
    RemovePermissionInput,
    TagQueueInput,
    UntagQueueInput,
)

Edit = Callable[[QueueInfo], SettingsChange]
"""The change for a queue in this state; empty: nothing. Raises Refusal."""
_NEVER: Final[SettingsChange] = {"tags": None}
"""An expectation that never holds: nothing is changed, and the outcome shows the queue."""


def plan_edit(asked: Asked, queue_url: str | None, edit: Edit) -> Plan:
    """Start an edit of the queue."""
    command = ChangeQueue(queue=asked.queue(queue_url), origin=asked.caller.origin, change={}, expected=_NEVER)
    return (command,), edit


def answer_edit(call: Call, outcomes: Sequence[Outcome]) -> forms.Empty | Call:
    """An empty result, or the next attempt."""
    outcome: QueueChanged = sole(call, outcomes)
    if outcome.changed:
        note(call.endpoint, outcome.info)
        return forms.EMPTY
    edit: Edit = call.memo
    change = edit(outcome.info)
    if not change:
        return forms.EMPTY
    (asked,) = call.commands
    assert isinstance(asked, ChangeQueue)
    expected = {name: getattr(outcome.info.settings, name) for name in change}
    command = msgspec.structs.replace(asked, change=change, expected=expected)
    return msgspec.structs.replace(call, commands=(command,))


_LABEL = LABEL_PREFIX + "Policy"
_ACTIONS = frozenset(ACROSS_ACCOUNTS.values())
_OWNERS = "Only the queue owner is allowed to invoke this action."


def plan_add(asked: Asked, given: AddPermissionInput) -> Plan:
    """AddPermission."""
    label, accounts, actions = _label(given.label), given.aws_account_ids, given.actions
    if not accounts:
        raise missing("AWSAccountIds")
    if not actions:
        raise missing("Actions")
    if len(actions) > limits.POLICY_ACTIONS_MAX:
        text = f"{len(actions)} Actions were found, maximum allowed is {limits.POLICY_ACTIONS_MAX}."
        raise Refusal(errors.OVER_LIMIT, text)
    if len(accounts) > limits.POLICY_PRINCIPALS_MAX:
        text = f"{len(accounts)} principals were found, maximum allowed is {limits.POLICY_PRINCIPALS_MAX}."
        raise Refusal(errors.OVER_LIMIT, text)
    for account in accounts:
        if not limits.ACCOUNT.match(account):
            raise invalid_value("PrincipalId", f"[{account}]", "Unable to verify.")
    for action in actions:
        if action != "*" and action not in _ACTIONS:
            raise invalid_value("ActionName", f"SQS:{action}", _OWNERS if action in ACTIONS else errors.NO_ACTION)
    where = partition(asked.queue(given.queue_url).region)
    principals = [f"arn:{where}:iam::{account}:root" for account in dict.fromkeys(accounts)]
    named = [f"SQS:{action}" for action in dict.fromkeys(actions)]

    def edit(info: QueueInfo) -> SettingsChange:
        resource = arn(info.key)
        policy = _policy(info)
        statements = statements_of(policy)
        if any(statement.get("Sid") == label for statement in statements):
            raise invalid_value("Label", label, "Already exists.")
        if len(statements) >= limits.POLICY_STATEMENTS_MAX:
            text = f"A policy can have at most {limits.POLICY_STATEMENTS_MAX} statements."
            raise Refusal(errors.OVER_LIMIT, text)
        statement = {
            "Sid": label,
            "Effect": "Allow",
            "Principal": {"AWS": _one(principals)},
            "Action": _one(named),
            "Resource": resource,
        }
        return _change(policy | {"Statement": [*statements, statement]})

    return plan_edit(asked, given.queue_url, edit)


def plan_remove(asked: Asked, given: RemovePermissionInput) -> Plan:
    """RemovePermission; removing the last statement removes the policy."""
    label = _label(given.label)

    def edit(info: QueueInfo) -> SettingsChange:
        policy = _policy(info)
        statements = statements_of(policy)
        left = [statement for statement in statements if statement.get("Sid") != label]
        if len(left) == len(statements):
            raise invalid_value("Label", label, "can't find label on existing policy.")
        return _change(policy | {"Statement": left}) if left else {"labels": info.settings.labels | {_LABEL: ""}}

    return plan_edit(asked, given.queue_url, edit)


def _label(label: str | None) -> str:
    if not label:
        raise missing("Label")
    if not limits.ENTRY_ID.match(label):
        reason = "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length."
        raise invalid_value("Label", label, reason)
    return label


def _policy(info: QueueInfo) -> dict[str, Any]:
    """The queue's policy, or an empty one."""
    text = info.settings.labels.get(_LABEL)
    if text:
        try:
            return read_policy(text)
        except PolicyInvalid as wrong:  # stored before the form was checked
            raise Refusal(errors.INVALID_ATTRIBUTE_VALUE, f"The queue's Policy is invalid: {wrong}.") from None
    return {"Version": VERSIONS[0], "Id": f"{arn(info.key)}/SQSDefaultPolicy", "Statement": []}


def _one(values: list[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else values


def _change(policy: dict[str, Any]) -> SettingsChange:
    text = msgspec.json.encode(policy).decode()
    if len(text.encode()) > limits.POLICY_BYTES_MAX:
        raise policy_too_long()
    return {"labels": {_LABEL: text}}


_KEY_LENGTH: Final = f"Tag keys must be between 1 and {limits.TAG_KEY_CHARACTERS_MAX} characters in length."
_VALUE_LENGTH: Final = f"Tag values must be between 0 and {limits.TAG_VALUE_CHARACTERS_MAX} characters in length."
_CHARACTERS: Final = "may only contain unicode letters, digits, white space, or one of these symbols: _ . : / = + - @"


def check_tags(tags: dict[str, str], queue: str) -> dict[str, str]:
    """Check the tags of a queue. Raises Refusal."""
    if len(tags) > limits.TAGS_MAX:
        raise _too_many(queue)
    for key, value in tags.items():
        _check_key(key)
        if len(value) > limits.TAG_VALUE_CHARACTERS_MAX:
            raise Refusal(errors.INVALID_PARAMETER_VALUE, _VALUE_LENGTH)
        _check_characters("TagValue", "values", value)
    return tags


def _check_key(key: str) -> None:
    if not 1 <= len(key) <= limits.TAG_KEY_CHARACTERS_MAX:
        raise Refusal(errors.INVALID_PARAMETER_VALUE, _KEY_LENGTH)
    _check_characters("TagKey", "keys", key)


def _check_characters(parameter: str, what: str, text: str) -> None:
    """Developer Guide, "Amazon SQS standard queue quotas" (queue tag)."""
    if text.lower().startswith(limits.TAG_RESERVED):
        raise invalid_value(parameter, text, f"Must not begin with {limits.TAG_RESERVED}")
    if not all(each.isalnum() or each.isspace() or each in limits.TAG_SYMBOLS for each in text):
        raise Refusal(errors.INVALID_PARAMETER_VALUE, f"Tag {what} {_CHARACTERS}")
    check_text(text, f"queue tag {what}")


def _too_many(queue: str) -> Refusal:
    return Refusal(errors.INVALID_PARAMETER_VALUE, f"Too many tags added for queue {queue}.")


def plan_tag(asked: Asked, given: TagQueueInput) -> Plan:
    """TagQueue."""
    tags = given.tags if given.tags is not None else given.query_tags
    if not tags:
        raise missing("Tags")
    added = check_tags(tags, asked.queue(given.queue_url).name)

    def edit(info: QueueInfo) -> SettingsChange:
        present = info.settings.tags
        merged = present | added
        if len(merged) > limits.TAGS_MAX:
            raise _too_many(info.key.name)
        return {} if merged == present else {"tags": merged}

    return plan_edit(asked, given.queue_url, edit)


def plan_untag(asked: Asked, given: UntagQueueInput) -> Plan:
    """UntagQueue; an unknown key is no error."""
    if given.tag_keys is None:
        raise missing("TagKeys")
    if not given.tag_keys or not all(given.tag_keys):  # AWS's answer to an empty list: getmoto/moto #1686
        raise Refusal(errors.INVALID_PARAMETER_VALUE, _KEY_LENGTH)
    if len(given.tag_keys) > limits.TAGS_MAX:
        reason = f"A queue has at most {limits.TAGS_MAX} tags."
        raise invalid_value("TagKeys", len(given.tag_keys), reason)
    removed = frozenset(given.tag_keys)

    def edit(info: QueueInfo) -> SettingsChange:
        left = {key: value for key, value in info.settings.tags.items() if key not in removed}
        return {} if left == info.settings.tags else {"tags": left}

    return plan_edit(asked, given.queue_url, edit)


def plan_list_tags(asked: Asked, given: QueueInput) -> Plan:
    """ListQueueTags."""
    return (DescribeQueue(queue=asked.queue(given.queue_url), origin=asked.caller.origin),), None


def answer_list_tags(call: Call, outcomes: Sequence[Outcome]) -> forms.ListQueueTagsResult:
    """ListQueueTagsResult."""
    described: QueueDescribed = sole(call, outcomes)
    return forms.ListQueueTagsResult(described.info.settings.tags or None)
