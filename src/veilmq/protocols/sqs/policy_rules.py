"""Checks a queue's policy when it is set: known elements, actions, principals and operators, and the limits.

Strategy: a policy with a mistake is refused now and not only when it is deployed to AWS. A policy that is already in
force is never checked again, so that an upgrade changes nobody's access. Source: "Custom queries for the access policy
language" and "Quotas related to policies" in the SQS Developer Guide; "IAM JSON policy elements: Principal" and
"Condition operators" in the IAM User Guide; for the actions, the replies quoted in aws/aws-cdk #2381 and
cloudtools/awacs #34.
"""

import re
from typing import Any, Final

from veilmq.protocols.sqs import limits
from veilmq.protocols.sqs.policy import OVER, PolicyInvalid, split_operator, statements_of, texts_of

ACTIONS: Final = frozenset(
    {
        "AddPermission",
        "CancelMessageMoveTask",
        "ChangeMessageVisibility",
        "CreateQueue",
        "DeleteMessage",
        "DeleteQueue",
        "GetQueueAttributes",
        "GetQueueUrl",
        "ListDeadLetterSourceQueues",
        "ListMessageMoveTasks",
        "ListQueueTags",
        "ListQueues",
        "PurgeQueue",
        "ReceiveMessage",
        "RemovePermission",
        "SendMessage",
        "SetQueueAttributes",
        "StartMessageMoveTask",
        "TagQueue",
        "UntagQueue",
    }
)
"""Actions that a policy may name; a batch uses the action of its single form."""
_ACTIONS: Final = frozenset(action.lower() for action in ACTIONS)
_PREFIX: Final = "sqs:"
_ELEMENTS: Final = frozenset({"Version", "Id", "Statement"})
_PRINCIPALS: Final = frozenset({"AWS", "CanonicalUser", "Federated", "Service"})
_AWS: Final = re.compile(r"\*|[0-9]{12}|arn:aws[a-z-]*:(iam|sts)::([0-9]{12}|cloudfront|aws):.+|A[A-Z0-9]{15,127}")
"""Everybody, an account, an ARN, or the unique id of a deleted user or role."""
_OPERATORS: Final = frozenset(
    each.lower()
    for each in (
        *("StringEquals", "StringNotEquals", "StringEqualsIgnoreCase", "StringNotEqualsIgnoreCase"),
        *("StringLike", "StringNotLike", "ArnEquals", "ArnNotEquals", "ArnLike", "ArnNotLike"),
        *(
            f"{kind}{order}"
            for kind in ("Numeric", "Date")
            for order in ("Equals", "NotEquals", "LessThan", "LessThanEquals", "GreaterThan", "GreaterThanEquals")
        ),
        *("Bool", "BinaryEquals", "IpAddress", "NotIpAddress", "Null"),
    )
)


class PolicyTooLarge(Exception):
    """The policy exceeds a limit; the message says which."""


class ActionUnknown(Exception):
    """A statement names an action that SQS does not have."""

    def __init__(self, action: str) -> None:
        super().__init__(action)
        prefix, _, name = action.rpartition(":")
        self.shown = f"SQS:{name}" if prefix.lower() == "sqs" else action
        """As AWS writes it."""


def check_rules(policy: dict[str, Any]) -> None:
    """Check a well-formed policy. Raises PolicyInvalid, PolicyTooLarge (in AWS's words), ActionUnknown."""
    unknown = policy.keys() - _ELEMENTS
    if unknown:
        raise PolicyInvalid(f"unknown element {min(unknown)[:64]}")
    if "Statement" not in policy:
        raise PolicyInvalid("it has no Statement")
    statements = statements_of(policy)
    _check_limits(statements)
    for statement in statements:
        for action in texts_of(statement.get("Action", statement.get("NotAction"))):
            _check_action(action)
        _check_principal(statement.get("Principal", statement.get("NotPrincipal")))
        for operator in statement.get("Condition", {}):
            _check_operator(operator)


def _check_limits(statements: list[Any]) -> None:
    if len(statements) > limits.POLICY_STATEMENTS_MAX:
        raise PolicyTooLarge(
            f"{len(statements)} statements were found in the submitted policy, max allowed is "
            f"{limits.POLICY_STATEMENTS_MAX}"
        )
    for statement in statements:
        for what, found, most in (
            ("actions", len(texts_of(statement.get("Action", []))), limits.POLICY_ACTIONS_MAX),
            ("principals", _principals_in(statement), limits.POLICY_PRINCIPALS_MAX),
            ("conditions", sum(map(len, statement.get("Condition", {}).values())), limits.POLICY_CONDITIONS_MAX),
        ):
            if found > most:
                raise PolicyTooLarge(
                    f"{found} {what} were found in a statement from the submitted policy, max allowed is {most}"
                )


def _principals_in(statement: dict[str, Any]) -> int:
    principal = statement.get("Principal", statement.get("NotPrincipal"))
    return sum(len(texts_of(values)) for values in principal.values()) if isinstance(principal, dict) else 1


def _check_action(action: str) -> None:
    """Check an action: any pattern after `sqs:` is allowed, and `*` is every action."""
    wanted = action.lower()
    name = wanted.removeprefix(_PREFIX)
    if wanted == "*" or (wanted.startswith(_PREFIX) and ("*" in name or "?" in name or name in _ACTIONS)):
        return
    raise ActionUnknown(action)


def _check_principal(principal: Any) -> None:
    if principal == "*":
        return
    unknown = principal.keys() - _PRINCIPALS
    if unknown:
        raise PolicyInvalid(f"{min(unknown)[:64]} is no kind of principal")
    for text in texts_of(principal.get("AWS", [])):
        if not _AWS.fullmatch(text):
            raise PolicyInvalid(f"{text[:64]} is no principal")


def _check_operator(operator: str) -> None:
    over, name, _ = split_operator(operator.lower())
    if over not in OVER or name not in _OPERATORS:
        raise PolicyInvalid(f"{operator[:64]} is no operator of a condition")
