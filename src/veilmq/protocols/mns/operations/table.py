"""The operations of the API, one row each, and the look-up of a request's operation.

Strategy: the kind of path and the method select a row, or a small function that reads the query.
"""

from collections.abc import Callable
from typing import Final

from veilmq.protocols.mns import errors
from veilmq.protocols.mns.addresses import Kind
from veilmq.protocols.mns.call import Asked, Operation, answer_nothing
from veilmq.protocols.mns.errors import Refusal
from veilmq.protocols.mns.operations import account, messages, queues, subscriptions, topics
from veilmq.protocols.mns.parameters import flag

_CREATE_QUEUE: Final = Operation("CreateQueue", queues.plan_create, queues.answer_create)
_SET_QUEUE: Final = Operation("SetQueueAttributes", queues.plan_change, answer_nothing)
_CREATE_TOPIC: Final = Operation("CreateTopic", topics.plan_create, topics.answer_create)
_SET_TOPIC: Final = Operation("SetTopicAttributes", topics.plan_change, answer_nothing)
_SUBSCRIBE: Final = Operation("Subscribe", subscriptions.plan_subscribe, subscriptions.answer_subscribe)
_SET_SUBSCRIPTION: Final = Operation("SetSubscriptionAttributes", subscriptions.plan_change, answer_nothing)
_SEND: Final = Operation("SendMessage", messages.plan_send, messages.answer_send)
_RECEIVE: Final = Operation("ReceiveMessage", messages.plan_receive, messages.answer_messages)
_PEEK: Final = Operation("PeekMessage", messages.plan_peek, messages.answer_messages)
_DELETE: Final = Operation("DeleteMessage", messages.plan_delete, answer_nothing)
_DELETE_BATCH: Final = Operation("BatchDeleteMessage", messages.plan_batch_delete, messages.answer_batch_delete)
_GET_ACCOUNT_ATTRIBUTES: Final = Operation("GetAccountAttributes", account.plan_get, account.answer_get)
_SET_ACCOUNT_ATTRIBUTES: Final = Operation("SetAccountAttributes", account.plan_set, answer_nothing)
_GET_ACCOUNT: Final = Operation("GetAccount", account.plan_none, account.answer_account)


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
    (Kind.OPEN_SERVICE, "POST"): Operation("OpenService", account.plan_none, account.answer_open),
    (Kind.QUEUES, "GET"): Operation("ListQueue", queues.plan_list, queues.answer_list),
    (Kind.QUEUE, "PUT"): _override(_CREATE_QUEUE, _SET_QUEUE),
    (Kind.QUEUE, "GET"): Operation("GetQueueAttributes", queues.plan_describe, queues.answer_describe),
    (Kind.QUEUE, "DELETE"): Operation("DeleteQueue", queues.plan_delete, queues.answer_delete),
    (Kind.QUEUE_MESSAGES, "POST"): _SEND,
    (Kind.QUEUE_MESSAGES, "GET"): _look,
    (Kind.QUEUE_MESSAGES, "DELETE"): _delete,
    (Kind.QUEUE_MESSAGES, "PUT"): Operation(
        "ChangeMessageVisibility", messages.plan_change_visibility, messages.answer_change_visibility
    ),
    (Kind.TOPICS, "GET"): Operation("ListTopic", topics.plan_list, topics.answer_list),
    (Kind.TOPIC, "PUT"): _override(_CREATE_TOPIC, _SET_TOPIC),
    (Kind.TOPIC, "GET"): Operation("GetTopicAttributes", topics.plan_describe, topics.answer_describe),
    (Kind.TOPIC, "DELETE"): Operation("DeleteTopic", topics.plan_delete, topics.answer_delete),
    (Kind.TOPIC_MESSAGES, "POST"): Operation("PublishMessage", topics.plan_publish, topics.answer_publish),
    (Kind.SUBSCRIPTIONS, "GET"): Operation(
        "ListSubscriptionByTopic", subscriptions.plan_list, subscriptions.answer_list
    ),
    (Kind.SUBSCRIPTION, "PUT"): _override(_SUBSCRIBE, _SET_SUBSCRIPTION),
    (Kind.SUBSCRIPTION, "GET"): Operation(
        "GetSubscriptionAttributes", subscriptions.plan_describe, subscriptions.answer_describe
    ),
    (Kind.SUBSCRIPTION, "DELETE"): Operation(
        "Unsubscribe", subscriptions.plan_unsubscribe, subscriptions.answer_unsubscribe
    ),
}


def find(asked: Asked) -> Operation:
    """The row of the operation that a request names. Raises Refusal: InvalidRequestURL, or for a missing query
    parameter."""
    row = TABLE.get((asked.place.kind, asked.request.method))
    if row is None:
        raise Refusal(errors.INVALID_REQUEST_URL)
    return row if isinstance(row, Operation) else row(asked)
