"""Account attributes, the account's id, OpenService.

Strategy: LoggingBucket is stored and shown but has no effect. It is a label of a hidden queue, and so as durable as any
setting. Source: the Python and Java SDKs.
"""

from collections.abc import Sequence

from veilmq.model.commands import ChangeQueue, CreateQueue, DescribeQueue
from veilmq.model.errors import QueueMissing
from veilmq.model.outcomes import Outcome, QueueDescribed
from veilmq.model.settings.access import AccessKey
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.http import Response
from veilmq.protocols.mns import limits
from veilmq.protocols.mns.call import Asked, Call, Plan, sole
from veilmq.protocols.mns.errors import bad
from veilmq.protocols.mns.xml import document, elements, members_of

ACCOUNT_QUEUE = "mns/account"
"""The hidden queue whose labels are the account's attributes; no protocol allows a slash in names."""
_LABEL = "mns.account.logging_bucket"
_ORDER = "0"


def _account_queue(key: AccessKey) -> QueueKey:
    return QueueKey(key.account, key.home_region, ACCOUNT_QUEUE)


def plan_get(asked: Asked) -> Plan:
    """GetAccountAttributes."""
    return (DescribeQueue(queue=_account_queue(asked.caller.key), origin=asked.caller.origin),), None


def answer_get(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with the bucket, which may be empty."""
    labels: dict[str, str] = {}
    if not isinstance(outcomes[0], QueueMissing):
        described: QueueDescribed = sole(call, outcomes)
        labels = described.info.settings.labels
    return document("Account", elements({"LoggingBucket": labels.get(_LABEL, "")}))


def plan_set(asked: Asked) -> Plan:
    """SetAccountAttributes."""
    fields = members_of(asked.request.body, "Account")
    queue, origin = _account_queue(asked.caller.key), asked.caller.origin
    labels = {}
    if "LoggingBucket" in fields:
        bucket = fields["LoggingBucket"].text
        if len(bucket) > limits.LOGGING_BUCKET_CHARACTERS_MAX or fields["LoggingBucket"].children:
            raise bad("LoggingBucket", f"it has at most {limits.LOGGING_BUCKET_CHARACTERS_MAX} characters.")
        labels[_LABEL] = bucket
    change = {"labels": labels}
    return (CreateQueue(queue=queue, origin=origin), ChangeQueue(queue=queue, origin=origin, change=change)), None


def plan_none(asked: Asked) -> Plan:
    """An operation that needs no engine."""
    return (), None


def answer_account(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """GetAccount: 200 with the account's id."""
    return document("Account", elements({"AccountId": call.key.account}))


def answer_open(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """OpenService: always succeeds; there is nothing to order."""
    return document("OpenService", elements({"OrderId": _ORDER}))
