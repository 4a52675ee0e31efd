"""AddPermission and RemovePermission: statements of the queue's policy, by label.

Strategy: both are edits of the Policy attribute; a statement has the form that AWS gives it. Source: AddPermission and
RemovePermission in the SQS API Reference; limits from "Quotas" (policies) in the SQS Developer Guide.
"""

from typing import Any

import msgspec

from veilmq.model.queue import QueueInfo, SettingsChange
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.arns import arn, partition
from veilmq.protocols.sqs.call import Asked, Plan
from veilmq.protocols.sqs.errors import LABEL_PREFIX, NO_ACTION, Refusal, invalid_value, missing, policy_too_long
from veilmq.protocols.sqs.inputs import AddPermissionInput, RemovePermissionInput
from veilmq.protocols.sqs.operations.authorize import ACROSS_ACCOUNTS
from veilmq.protocols.sqs.operations.editing import plan_edit
from veilmq.protocols.sqs.policy import VERSIONS, PolicyInvalid, read_policy, statements_of
from veilmq.protocols.sqs.policy_rules import ACTIONS

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
            raise invalid_value("ActionName", f"SQS:{action}", _OWNERS if action in ACTIONS else NO_ACTION)
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
            raise invalid_value("Label", label, "can't find label.")
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
