"""The operations of MNS: here one row each, the look-up of a request's operation, and those on the account itself; by
noun in the files beside this one, which turn requests into commands, and outcomes into responses.

Strategy: a new operation is a pair of functions and a row here. The kind of path and the method select a row, or a
small function that reads the query.

Of the account's attributes, LoggingBucket is stored and shown but has no effect. It is a label of a hidden queue, and
so as durable as any setting. Source: the Python and Java SDKs.
"""

from collections.abc import Callable, Sequence
from typing import Final

from veilmq.model.commands import ChangeQueue, CreateQueue, DescribeQueue
from veilmq.model.errors import QueueMissing, SubscriptionMissing, TopicMissing
from veilmq.model.outcomes import Outcome, QueueDescribed
from veilmq.model.settings.access import AccessKey
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols import Response
from veilmq.protocols.mns import errors, limits
from veilmq.protocols.mns.addresses import Kind
from veilmq.protocols.mns.call import Asked, Call, Operation, Plan, answer_delete, answer_nothing, sole
from veilmq.protocols.mns.errors import Refusal, bad
from veilmq.protocols.mns.fields import document, elements, flag, members_of
from veilmq.protocols.mns.operations import messages, queues, topics

ACCOUNT_QUEUE = "mns/account"
"""The hidden queue whose labels are the account's attributes; no protocol allows a slash in names."""
_LABEL = "mns.account.logging_bucket"
_ORDER = "0"


def _account_queue(key: AccessKey) -> QueueKey:
    return QueueKey(key.account, key.home_region, ACCOUNT_QUEUE)


def _plan_attributes(asked: Asked) -> Plan:
    """GetAccountAttributes."""
    return (DescribeQueue(queue=_account_queue(asked.caller.key), origin=asked.caller.origin),), None


def _answer_attributes(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with the bucket, which may be empty."""
    labels: dict[str, str] = {}
    if not isinstance(outcomes[0], QueueMissing):
        described: QueueDescribed = sole(call, outcomes)
        labels = described.info.settings.labels
    return document("Account", elements({"LoggingBucket": labels.get(_LABEL, "")}))


def _plan_set_attributes(asked: Asked) -> Plan:
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


def _plan_nothing(asked: Asked) -> Plan:
    """An operation that needs no engine."""
    return (), None


def _answer_account(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """GetAccount: 200 with the account's id."""
    return document("Account", elements({"AccountId": call.key.account}))


def _answer_open(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """OpenService: always succeeds; there is nothing to order."""
    return document("OpenService", elements({"OrderId": _ORDER}))


_CREATE_QUEUE: Final = Operation("CreateQueue", queues.plan_create, queues.answer_create)
_SET_QUEUE: Final = Operation("SetQueueAttributes", queues.plan_change, answer_nothing)
_CREATE_TOPIC: Final = Operation("CreateTopic", topics.plan_create, topics.answer_create)
_SET_TOPIC: Final = Operation("SetTopicAttributes", topics.plan_change, answer_nothing)
_SUBSCRIBE: Final = Operation("Subscribe", topics.plan_subscribe, topics.answer_subscribe)
_SET_SUBSCRIPTION: Final = Operation("SetSubscriptionAttributes", topics.plan_change_subscription, answer_nothing)
_SEND: Final = Operation("SendMessage", messages.plan_send, messages.answer_send)
_RECEIVE: Final = Operation("ReceiveMessage", messages.plan_receive, messages.answer_messages)
_PEEK: Final = Operation("PeekMessage", messages.plan_peek, messages.answer_messages)
_DELETE: Final = Operation("DeleteMessage", messages.plan_delete, answer_nothing)
_DELETE_BATCH: Final = Operation("BatchDeleteMessage", messages.plan_batch_delete, messages.answer_batch_delete)
_GET_ACCOUNT_ATTRIBUTES: Final = Operation("GetAccountAttributes", _plan_attributes, _answer_attributes)
_SET_ACCOUNT_ATTRIBUTES: Final = Operation("SetAccountAttributes", _plan_set_attributes, answer_nothing)
_GET_ACCOUNT: Final = Operation("GetAccount", _plan_nothing, _answer_account)


def _override(create: Operation, change: Operation) -> Callable[[Asked], Operation]:
    return lambda asked: change if flag(asked.parameters, "metaoverride") else create


def _look(asked: Asked) -> Operation:
    return _PEEK if asked.parameters and flag(asked.parameters, "peekonly") else _RECEIVE


def _delete(asked: Asked) -> Operation:
    if "receipthandle" in asked.parameters:
        return _DELETE
    if not asked.request.body:
        raise Refusal(errors.MISSING_RECEIPT_HANDLE)
    return _DELETE_BATCH


def _account(asked: Asked) -> Operation:
    if flag(asked.parameters, "accountmeta"):
        return _GET_ACCOUNT_ATTRIBUTES
    if "account" in asked.parameters:
        return _GET_ACCOUNT
    raise Refusal(errors.INVALID_REQUEST_URL)


def _set_account(asked: Asked) -> Operation:
    if flag(asked.parameters, "accountmeta"):
        return _SET_ACCOUNT_ATTRIBUTES
    raise Refusal(errors.INVALID_REQUEST_URL)


TABLE: Final[dict[tuple[Kind, str], Operation | Callable[[Asked], Operation]]] = {
    (Kind.ROOT, "GET"): _account,
    (Kind.ROOT, "PUT"): _set_account,
    (Kind.OPEN_SERVICE, "POST"): Operation("OpenService", _plan_nothing, _answer_open),
    (Kind.QUEUES, "GET"): Operation("ListQueue", queues.plan_list, queues.answer_list),
    (Kind.QUEUE, "PUT"): _override(_CREATE_QUEUE, _SET_QUEUE),
    (Kind.QUEUE, "GET"): Operation("GetQueueAttributes", queues.plan_describe, queues.answer_describe),
    (Kind.QUEUE, "DELETE"): Operation("DeleteQueue", queues.plan_delete, answer_delete(QueueMissing)),
    (Kind.QUEUE_MESSAGES, "POST"): _SEND,
    (Kind.QUEUE_MESSAGES, "GET"): _look,
    (Kind.QUEUE_MESSAGES, "DELETE"): _delete,
    (Kind.QUEUE_MESSAGES, "PUT"): Operation(
        "ChangeMessageVisibility", messages.plan_change_visibility, messages.answer_change_visibility
    ),
    (Kind.TOPICS, "GET"): Operation("ListTopic", topics.plan_list, topics.answer_list),
    (Kind.TOPIC, "PUT"): _override(_CREATE_TOPIC, _SET_TOPIC),
    (Kind.TOPIC, "GET"): Operation("GetTopicAttributes", topics.plan_describe, topics.answer_describe),
    (Kind.TOPIC, "DELETE"): Operation("DeleteTopic", topics.plan_delete, answer_delete(TopicMissing)),
    (Kind.TOPIC_MESSAGES, "POST"): Operation("PublishMessage", topics.plan_publish, topics.answer_publish),
    (Kind.SUBSCRIPTIONS, "GET"): Operation(
        "ListSubscriptionByTopic", topics.plan_list_subscriptions, topics.answer_list_subscriptions
    ),
    (Kind.SUBSCRIPTION, "PUT"): _override(_SUBSCRIBE, _SET_SUBSCRIPTION),
    (Kind.SUBSCRIPTION, "GET"): Operation(
        "GetSubscriptionAttributes", topics.plan_describe_subscription, topics.answer_describe_subscription
    ),
    (Kind.SUBSCRIPTION, "DELETE"): Operation(
        "Unsubscribe", topics.plan_unsubscribe, answer_delete(SubscriptionMissing)
    ),
}


def find(asked: Asked) -> Operation:
    """The row of the operation that a request names. Raises Refusal: InvalidRequestURL, or for a missing query
    parameter."""
    row = TABLE.get((asked.place.kind, asked.request.method))
    if row is None:
        raise Refusal(errors.INVALID_REQUEST_URL)
    return row if isinstance(row, Operation) else row(asked)
