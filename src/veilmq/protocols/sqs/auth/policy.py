"""Queue policies: parses and evaluates JSON in AWS's access policy language.

Strategy: a policy is checked when it is set, and evaluated when a caller names the queue. An explicit deny wins and
binds the queue's own account too; a caller of another account also needs an allow. A condition that cannot be evaluated
here (an unknown operator or key) never widens access: in an allow it does not match, in a deny it does.

The check when a policy is set covers its form, its elements, actions, principals and operators, and the limits: a
mistake is refused then and not only when the policy is deployed to AWS. A policy that is already in force is never
checked again, so that an upgrade changes nobody's access. Source: "Custom queries for the access policy language" and
"Quotas related to policies" in the SQS Developer Guide; "IAM JSON policy elements reference" in the IAM User Guide; for
the actions, the replies quoted in aws/aws-cdk #2381 and cloudtools/awacs #34.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from fnmatch import translate
from functools import lru_cache
from ipaddress import ip_address, ip_network
from operator import eq, ge, gt, le, lt
from typing import Any, Final

import msgspec

from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.sqs import limits
from veilmq.protocols.sqs.addresses import USUAL, arn, partition

VERSIONS: Final = ("2008-10-17", "2012-10-17")
EFFECTS: Final = ("Allow", "Deny")
"""Not a set: the given value may be a list, which is not hashable."""
_ELEMENTS: Final = frozenset(
    {
        "Sid",
        "Effect",
        "Principal",
        "NotPrincipal",
        "Action",
        "NotAction",
        "Resource",
        "NotResource",
        "Condition",
    }
)
_VARIABLE: Final = "${"
"""The start of a policy variable; none is supported here."""
_ACCOUNT_OF_ARN: Final = re.compile(r"arn:aws[a-z-]*:(?:iam|sts)::([0-9]{12}):(.+)\Z")


class PolicyInvalid(Exception):
    """The text is not a valid policy; the message says why."""


class AccessRequest(msgspec.Struct, frozen=True):
    """A caller, an action and a queue, as a policy sees them."""

    account: str
    user: str
    action: str
    """Without `sqs:`."""
    queue: QueueKey
    context: dict[str, str]
    """Values of condition keys, the keys in lower case."""


def read_policy(text: str) -> dict[str, Any]:
    """The policy, its form checked. Raises PolicyInvalid."""
    try:
        policy = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        raise PolicyInvalid("it is not JSON") from None
    if not isinstance(policy, dict):
        raise PolicyInvalid("it is not a JSON object")
    if policy.get("Version", VERSIONS[0]) not in VERSIONS:
        raise PolicyInvalid(f"Version must be {' or '.join(VERSIONS)}")
    for statement in statements_of(policy):
        _check_statement(statement)
    return policy


@lru_cache(256)
def shown_policy(text: str) -> str:
    """A policy as AWS shows it: without blanks, and with the default Version if it names none
    (hashicorp/terraform-provider-aws #22505, #24046)."""
    try:
        policy = read_policy(text)
    except PolicyInvalid:  # stored before the form was checked
        return text
    return msgspec.json.encode(policy if "Version" in policy else {"Version": VERSIONS[0]} | policy).decode()


def policy_meaning(text: str) -> str:
    """A normal form: equal for policies that differ only in blanks, the order of names, or a default Version. An
    invalid policy is returned unchanged."""
    try:
        policy = read_policy(text)
    except PolicyInvalid:
        return text
    return msgspec.json.encode({"Version": VERSIONS[0]} | policy, order="deterministic").decode()


def statements_of(policy: dict[str, Any]) -> list[Any]:
    """Its statements; a single one need not be in a list."""
    statements = policy.get("Statement", [])
    return statements if isinstance(statements, list) else [statements]


def _check_statement(statement: Any) -> None:
    if not isinstance(statement, dict):
        raise PolicyInvalid("a statement must be an object")
    unknown = statement.keys() - _ELEMENTS
    if unknown:
        raise PolicyInvalid(f"unknown element {min(unknown)[:64]}")
    if statement.get("Effect") not in EFFECTS:
        raise PolicyInvalid("Effect must be Allow or Deny")
    for name in ("Principal", "Action", "Resource"):
        given = [each for each in (name, "Not" + name) if each in statement]
        if len(given) != 1:
            raise PolicyInvalid(f"a statement must have one of {name} and Not{name}")
        if name == "Principal":
            _check_principal(given[0], statement[given[0]])
        elif not texts_of(statement[given[0]]):
            raise PolicyInvalid(f"{given[0]} must be a text or a list of texts")
    _check_condition(statement.get("Condition", {}))


def _check_condition(condition: Any) -> None:
    if not isinstance(condition, dict) or not all(isinstance(keys, dict) for keys in condition.values()):
        raise PolicyInvalid("Condition must be an object of objects")
    for keys in condition.values():
        for values in keys.values():
            if not all(isinstance(value, str | bool | int | float) for value in _listed(values)):
                raise PolicyInvalid("the values of a condition must be texts, numbers or truth values")


def _check_principal(name: str, principal: Any) -> None:
    if principal == "*":
        return
    if not isinstance(principal, dict) or not principal or not all(texts_of(values) for values in principal.values()):
        raise PolicyInvalid(f'{name} must be "*" or an object of principals')


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def texts_of(value: Any) -> list[str]:
    """The texts of an element; empty if it is anything else."""
    values = _listed(value)
    return values if all(isinstance(each, str) for each in values) else []


class Decision(Enum):
    """The result of evaluating a policy."""

    SILENT = "silent"
    ALLOWED = "allowed"
    DENIED = "denied"


def evaluate(policy: dict[str, Any], asking: AccessRequest) -> Decision:
    """Evaluate the policy; a deny wins wherever it is."""
    decision = Decision.SILENT
    for statement in statements_of(policy):
        deny = statement["Effect"] == "Deny"
        if _names(statement, asking) and _holds(statement.get("Condition", {}), asking.context, deny):
            if deny:
                return Decision.DENIED
            decision = Decision.ALLOWED
    return decision


def may_deny(policy: dict[str, Any]) -> bool:
    """Whether the policy could deny anything to anybody."""
    return any(statement["Effect"] == "Deny" for statement in statements_of(policy))


def _names(statement: dict[str, Any], asking: AccessRequest) -> bool:
    """Whether the statement matches caller, action and queue."""
    if "Principal" in statement:
        if not _is_principal(statement["Principal"], asking):
            return False
    elif _is_principal(statement["NotPrincipal"], asking):
        return False
    action = f"sqs:{asking.action}".lower()
    named = texts_of(statement.get("Action", statement.get("NotAction")))
    if _like_any([pattern.lower() for pattern in named], action) is not ("Action" in statement):
        return False
    resources = texts_of(statement.get("Resource", statement.get("NotResource")))
    if any(_VARIABLE in each for each in resources):
        return bool(statement["Effect"] == "Deny")
    queue = arn(asking.queue)
    matches = _like_any(resources, queue)
    if not matches and (elsewhere := partition(asking.queue.region)) != USUAL:
        # Policies from before queues had their region's partition still match.
        matches = _like_any(resources, queue.replace(elsewhere, USUAL, 1))
    return matches is ("Resource" in statement)


def _is_principal(principal: Any, asking: AccessRequest) -> bool:
    if principal == "*":
        return True
    for text in texts_of(principal.get("AWS", [])):
        if text in {"*", asking.account}:
            return True
        found = _ACCOUNT_OF_ARN.match(text)
        if found is not None and found[1] == asking.account and found[2] in {"root", f"user/{asking.user}"}:
            return True
    return False


@lru_cache(1_024)
def _pattern(text: str) -> re.Pattern[str]:
    """IAM's patterns have `*` and `?`, but no character sets."""
    return re.compile(translate(text.replace("[", "[[]")))


def _like(pattern: str, text: str) -> bool:
    return _pattern(pattern).match(text) is not None


def _like_any(patterns: list[str], text: str) -> bool:
    return any(_like(pattern, text) for pattern in patterns)


def _in_network(wanted: str, given: str) -> bool:
    """An IPv4 client of a listener for both is `::ffff:192.0.2.1` there (RFC 4291), and in its networks all the same.

    Raises ValueError for an invalid network or address.
    """
    network, address = ip_network(wanted, strict=False), ip_address(given)
    plain = getattr(address, "ipv4_mapped", None) or address
    return address in network or plain in network


_OPERATORS: Final[dict[str, Callable[[str, str], bool]]] = {
    "stringequals": lambda wanted, given: wanted == given,
    "stringequalsignorecase": lambda wanted, given: wanted.lower() == given.lower(),
    "stringlike": _like,
    "arnequals": _like,
    "arnlike": _like,
    "bool": lambda wanted, given: wanted.lower() == given.lower(),
    "ipaddress": _in_network,
}
_NEGATED: Final = {
    "stringnotequals": "stringequals",
    "stringnotequalsignorecase": "stringequalsignorecase",
    "stringnotlike": "stringlike",
    "arnnotequals": "arnequals",
    "arnnotlike": "arnlike",
    "notipaddress": "ipaddress",
}
OVER: Final = frozenset({"", "foranyvalue", "forallvalues"})
"""Prefixes of an operator. For a single value both have no effect; for no value `forallvalues` is true and
`foranyvalue` false."""
_TIMES: Final = frozenset({"aws:currenttime", "aws:epochtime"})
"""Condition keys whose value is the instant of the request, in seconds since 1970."""
_ORDERS: Final[dict[str, Callable[[float, float], bool]]] = {
    "equals": eq,
    "lessthan": lt,
    "lessthanequals": le,
    "greaterthan": gt,
    "greaterthanequals": ge,
}
"""Comparisons after `Date` in an operator, and after `Numeric` if the key is aws:EpochTime."""
KEYS: Final = _TIMES | frozenset(
    {
        "aws:securetransport",
        "aws:sourceip",
        "aws:principalaccount",
        "aws:principalarn",
        "aws:useragent",
        # Keys of calls that AWS services make for a user: known, but never present.
        "aws:sourcearn",
        "aws:sourceaccount",
        "aws:principalorgid",
        "aws:principalorgpaths",
        # Keys of calls through a VPC or with a second factor: the same.
        "aws:sourcevpc",
        "aws:sourcevpce",
        "aws:vpcsourceip",
        "aws:multifactorauthage",
        "aws:multifactorauthpresent",
    }
)
"""Supported condition keys."""


def _holds(condition: dict[str, dict[str, Any]], context: dict[str, str], deny: bool) -> bool:
    """Whether every condition holds; one that cannot be evaluated holds only in a deny."""
    for operator, keys in condition.items():
        for key, values in keys.items():
            judged = _condition_holds(
                operator.lower(), key.lower(), [_plain(value) for value in _listed(values)], context
            )
            if not (deny if judged is None else judged):
                return False
    return True


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _condition_holds(operator: str, key: str, values: list[str], context: dict[str, str]) -> bool | None:
    """Whether the condition holds; None if operator or key are unknown."""
    if key not in KEYS or any(_VARIABLE in value for value in values):
        return None
    given = context.get(key)
    if operator == "null":
        wanted = {value.lower() for value in values}
        return str(given is None).lower() in wanted if wanted and wanted <= {"true", "false"} else None
    over, operator, optional = split_operator(operator)
    if over not in OVER:
        return None
    if key in _TIMES and given is not None:
        return _judge_time(operator, key, values, float(given))
    negated = operator in _NEGATED
    compare = _OPERATORS.get(_NEGATED.get(operator, operator))
    if compare is None:
        return None
    if given is None:
        return optional or (negated if not over else over == "forallvalues")
    try:
        return any(compare(value, given) for value in values) is not negated
    except ValueError:  # an invalid network
        return None


def split_operator(operator: str) -> tuple[str, str, bool]:
    """Split a lower-case operator: prefix (`foranyvalue`), operator, and whether it ends in `ifexists`."""
    over, _, name = operator.removesuffix("ifexists").rpartition(":")
    return over, name, operator.endswith("ifexists")


def _judge_time(operator: str, key: str, values: list[str], given: float) -> bool | None:
    """Whether the condition on the request's instant holds; None if operator or values are unknown."""
    kind = "numeric" if key == "aws:epochtime" and operator.startswith("numeric") else "date"
    order = operator.removeprefix(kind) if operator.startswith(kind) else ""
    negated = order == "notequals"
    compare = _ORDERS.get("equals" if negated else order)
    instants = [instant for value in values if (instant := _instant(value)) is not None]
    if compare is None or len(instants) < len(values):
        return None
    return any(compare(given, instant) for instant in instants) is not negated


def _instant(text: str) -> float | None:
    """Seconds since 1970 of a date (ISO 8601, or seconds as a number); None if it is invalid."""
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


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
_ACTION_PREFIX: Final = "sqs:"
_POLICY_ELEMENTS: Final = frozenset({"Version", "Id", "Statement"})
_PRINCIPALS: Final = frozenset({"AWS", "CanonicalUser", "Federated", "Service"})
_AWS: Final = re.compile(r"\*|[0-9]{12}|arn:aws[a-z-]*:(iam|sts)::([0-9]{12}|cloudfront|aws):.+|A[A-Z0-9]{15,127}")
"""Everybody, an account, an ARN, or the unique id of a deleted user or role."""
_OPERATOR_NAMES: Final = frozenset(
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
    unknown = policy.keys() - _POLICY_ELEMENTS
    if unknown:
        raise PolicyInvalid(f"unknown element {min(unknown)[:64]}")
    if "Statement" not in policy:
        raise PolicyInvalid("it has no Statement")
    statements = statements_of(policy)
    _check_limits(statements)
    for statement in statements:
        for action in texts_of(statement.get("Action", statement.get("NotAction"))):
            _check_action(action)
        _check_principal_known(statement.get("Principal", statement.get("NotPrincipal")))
        for operator in statement.get("Condition", {}):
            _check_operator_known(operator)


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
    name = wanted.removeprefix(_ACTION_PREFIX)
    if wanted == "*" or (wanted.startswith(_ACTION_PREFIX) and ("*" in name or "?" in name or name in _ACTIONS)):
        return
    raise ActionUnknown(action)


def _check_principal_known(principal: Any) -> None:
    if principal == "*":
        return
    unknown = principal.keys() - _PRINCIPALS
    if unknown:
        raise PolicyInvalid(f"{min(unknown)[:64]} is no kind of principal")
    for text in texts_of(principal.get("AWS", [])):
        if not _AWS.fullmatch(text):
            raise PolicyInvalid(f"{text[:64]} is no principal")


def _check_operator_known(operator: str) -> None:
    over, name, optional = split_operator(operator.lower())
    if over not in OVER or name not in _OPERATOR_NAMES or (name == "null" and optional):
        raise PolicyInvalid(f"{operator[:64]} is no operator of a condition")
