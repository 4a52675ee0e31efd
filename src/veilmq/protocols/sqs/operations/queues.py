"""Operations on queues: create and delete, list and look up, attributes, purge.

Strategy: names and attributes are checked here; the engine decides whether a queue exists and is the same.

The store compares labels as plain texts. If a CreateQueue of an existing queue differs in one, the queue's own labels
are read, and the CreateQueue is sent again with the stored text of every label that means the same. So a stored text
matches any other text with the same meaning. Source: CreateQueue in the SQS API Reference ("the exact names and values
of all the queue's attributes").
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from veilmq.model.commands import ChangeQueue, CreateQueue, DeleteQueue, DescribeQueue, ListQueues, PurgeQueue
from veilmq.model.errors import QueueExists, QueueMissing, RedriveRefused, VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Outcome, QueueChanged, QueueCreated, QueueDescribed, QueuesListed
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.sqs import errors, forms, limits
from veilmq.protocols.sqs.addresses import is_queue_name, queue_url, url_start
from veilmq.protocols.sqs.attributes import attributes_of, checked_names, settings_change, spelled_as
from veilmq.protocols.sqs.auth.authorize import note, reads_first
from veilmq.protocols.sqs.call import Asked, Call, Plan, sole
from veilmq.protocols.sqs.errors import Refusal, fault_of, invalid_value, missing, redrive_refused
from veilmq.protocols.sqs.forms import (
    CreateQueueInput,
    GetQueueAttributesInput,
    GetQueueUrlInput,
    ListDeadLetterSourceQueuesInput,
    ListQueuesInput,
    QueueInput,
    SetQueueAttributesInput,
)
from veilmq.protocols.sqs.operations.permissions_and_tags import check_tags

_NAME_RULE = "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length"


def cooldown_us(asked: Asked) -> int:
    """After a delete before a queue of that name may be created, and after a purge before the next."""
    return limits.COOLDOWN_SECONDS * SECOND_US if asked.endpoint.cooldowns else 0


def plan_create(asked: Asked, given: CreateQueueInput) -> Plan:
    """CreateQueue."""
    name = given.queue_name
    if not name:
        raise errors.no_queue_name()
    attributes = given.attributes or {}
    queue = QueueKey(asked.caller.key.account, asked.caller.region, name)
    # A FIFO queue needs both the suffix and the attribute; either alone is refused.
    if not is_queue_name(name) or (
        name.endswith(limits.FIFO_SUFFIX) and attributes.get("FifoQueue", "").lower() != "true"
    ):
        raise Refusal(errors.INVALID_PARAMETER_VALUE, _NAME_RULE)
    change = settings_change(queue, attributes, creating=True)
    # An existing queue must have these tags, if any are given (Bogdanp/dramatiq_sqs #13).
    if given.tags:
        change["tags"] = check_tags(given.tags, name)
    command = CreateQueue(queue=queue, origin=asked.caller.origin, change=change, cooldown_us=cooldown_us(asked))
    return (command,), attributes.get("RedrivePolicy")


def _check_redrive(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Raises Refusal if the dead-letter queue is not acceptable; the memo is the policy as sent."""
    if isinstance(outcomes[0], RedriveRefused) and call.memo:
        raise redrive_refused(outcomes[0], call.memo)


def answer_create(call: Call, outcomes: Sequence[Outcome]) -> forms.QueueUrlResult | Call:
    """CreateQueueResult; or a further call, if the existing queue may differ only in the text of a label."""
    further = compared(call, outcomes)
    if further is not None:
        return further
    _check_redrive(call, outcomes)
    created: QueueCreated = sole(call, outcomes)
    note(call.endpoint, created.info)
    return forms.QueueUrlResult(_url(call, created.info.key))


def _url(call: Call, queue: QueueKey) -> str:
    return queue_url(url_start(call.endpoint, call.request, queue.region), queue)


def _listed(call: Call, listed: QueuesListed) -> tuple[list[str], str | None]:
    """URLs of queues of one region, and NextToken; the memo is whether the list has pages."""
    if not listed.queues:
        return [], None
    start = url_start(call.endpoint, call.request, listed.queues[0].key.region)
    token = _token_of_name(listed.queues[-1].key.name) if listed.more and call.memo else None
    return [queue_url(start, info.key) for info in listed.queues], token


def plan_get_url(asked: Asked, given: GetQueueUrlInput) -> Plan:
    """GetQueueUrl."""
    name, owner = given.queue_name, given.queue_owner_aws_account_id
    if not name:
        raise errors.no_queue_name()
    if owner is not None and not limits.ACCOUNT.match(owner):
        raise invalid_value("QueueOwnerAWSAccountId", owner, "An account id has 12 digits.")
    caller = asked.caller
    account = owner or caller.key.account
    absent = errors.NO_QUEUE if account == caller.key.account else errors.NO_QUEUE_TO_SEE
    if not is_queue_name(name):
        raise Refusal(errors.QUEUE_DOES_NOT_EXIST, absent)
    queue = QueueKey(account, caller.region, name)
    if caller.verified and account != caller.key.account:
        asked.foreign = queue
    return (DescribeQueue(queue=queue, origin=caller.origin),), absent


def answer_get_url(call: Call, outcomes: Sequence[Outcome]) -> forms.QueueUrlResult:
    """GetQueueUrlResult; the memo is the message for a missing queue."""
    if isinstance(outcomes[0], QueueMissing):
        raise Refusal(errors.QUEUE_DOES_NOT_EXIST, call.memo)
    described: QueueDescribed = sole(call, outcomes)
    return forms.QueueUrlResult(_url(call, described.info.key))


def plan_list(asked: Asked, given: ListQueuesInput) -> Plan:
    """ListQueues. Without MaxResults there is no NextToken, however many queues there are."""
    count = _page(given.max_results)
    command = ListQueues(
        origin=asked.caller.origin,
        account=asked.caller.key.account,
        region=asked.caller.region,
        prefix=given.queue_name_prefix or "",
        after=_name_of_token(given.next_token) if given.next_token else "",
        count_max=count or limits.LIST_QUEUES_MAX,
        names=limits.ANY_QUEUE_NAME,
        by_alias=False,
    )
    return (command,), count is not None


def answer_list(call: Call, outcomes: Sequence[Outcome]) -> forms.ListQueuesResult:
    """ListQueuesResult."""
    urls, token = _listed(call, sole(call, outcomes))
    return forms.ListQueuesResult(urls or None, token)


def _page(count: int | None) -> int | None:
    """MaxResults, checked."""
    if count is not None and not 1 <= count <= limits.LIST_QUEUES_MAX:
        reason = f"MaxResults must be an integer between 1 and {limits.LIST_QUEUES_MAX}"
        raise invalid_value("MaxResults", count, reason)
    return count


def plan_list_sources(asked: Asked, given: ListDeadLetterSourceQueuesInput) -> Plan:
    """ListDeadLetterSourceQueues; pages as ListQueues has them."""
    target = asked.queue(given.queue_url)
    count = _page(given.max_results)
    exists = DescribeQueue(queue=target, origin=asked.caller.origin)
    command = ListQueues(
        origin=asked.caller.origin,
        account=target.account,
        region=target.region,
        after=_name_of_token(given.next_token) if given.next_token else "",
        count_max=count or limits.LIST_QUEUES_MAX,
        names=limits.ANY_QUEUE_NAME,
        by_alias=False,
        dead_letter_target=target,
    )
    return (exists, command), count is not None


def answer_list_sources(call: Call, outcomes: Sequence[Outcome]) -> forms.ListDeadLetterSourceQueuesResult:
    """ListDeadLetterSourceQueuesResult."""
    sole(call, outcomes)
    listed = outcomes[1]
    if isinstance(listed, VeilError):
        raise fault_of(listed, call.commands[1])
    assert isinstance(listed, QueuesListed)
    return forms.ListDeadLetterSourceQueuesResult(*_listed(call, listed))


def _token_of_name(name: str) -> str:
    return urlsafe_b64encode(name.encode()).decode()


def _name_of_token(token: str) -> str:
    try:
        name = urlsafe_b64decode(token.encode()).decode()
    except ValueError:
        name = ""
    if not is_queue_name(name):
        raise Refusal(errors.INVALID_PARAMETER_VALUE, "Invalid or expired next token.")
    return name


def plan_delete_queue(asked: Asked, given: QueueInput) -> Plan:
    """DeleteQueue."""
    return (DeleteQueue(queue=asked.queue(given.queue_url), origin=asked.caller.origin),), None


def plan_purge(asked: Asked, given: QueueInput) -> Plan:
    """PurgeQueue."""
    queue = asked.queue(given.queue_url)
    return (PurgeQueue(queue=queue, origin=asked.caller.origin, cooldown_us=cooldown_us(asked)),), None


def plan_get_attributes(asked: Asked, given: GetQueueAttributesInput) -> Plan:
    """GetQueueAttributes; without names it only confirms that the queue exists."""
    queue = asked.queue(given.queue_url)
    names = checked_names(given.attribute_names or (), queue)
    return (DescribeQueue(queue=queue, origin=asked.caller.origin),), names


def answer_get_attributes(call: Call, outcomes: Sequence[Outcome]) -> forms.GetQueueAttributesResult:
    """GetQueueAttributesResult; only the queue's owner sees its policy."""
    described: QueueDescribed = sole(call, outcomes)
    found = attributes_of(described.info, call.memo)
    if described.info.key.account != call.key.account:
        found.pop("Policy", None)
    return forms.GetQueueAttributesResult(found or None)


def plan_set_attributes(asked: Asked, given: SetQueueAttributesInput) -> Plan:
    """SetQueueAttributes."""
    queue = asked.queue(given.queue_url)
    if not given.attributes:
        raise missing("Attribute.Name")  # as AWS says in both forms: pulumi/pulumi-aws #5677
    change = settings_change(queue, given.attributes, creating=False)
    command = ChangeQueue(queue=queue, origin=asked.caller.origin, change=change)
    return (command,), given.attributes.get("RedrivePolicy")


def answer_set_attributes(call: Call, outcomes: Sequence[Outcome]) -> forms.Empty:
    """The empty result."""
    _check_redrive(call, outcomes)
    changed: QueueChanged = sole(call, outcomes)
    note(call.endpoint, changed.info)
    return forms.EMPTY


def answer_void(call: Call, outcomes: Sequence[Outcome]) -> forms.Empty:
    """The empty result of DeleteQueue, PurgeQueue and SetQueueAttributes."""
    sole(call, outcomes)
    return forms.EMPTY


class _Held(NamedTuple):
    """The refused call, and its refusal unless the queue proves to be the same."""

    call: Call
    refused: QueueExists


def compared(call: Call, outcomes: Sequence[Outcome]) -> Call | None:
    """A call that reads the queue's labels, if a CreateQueue was refused because of one."""
    (command,), (outcome,) = call.commands, outcomes
    assert isinstance(command, CreateQueue)
    if not isinstance(outcome, QueueExists) or outcome.setting not in command.change.get("labels", ()):
        return None
    described = DescribeQueue(queue=command.queue, origin=command.origin)
    return reads_first(call, (described,), _answer, _Held(call, outcome))


def _answer(call: Call, outcomes: Sequence[Outcome]) -> Call:
    held: _Held = call.memo
    (command,), (outcome,) = held.call.commands, outcomes
    assert isinstance(command, CreateQueue)
    if isinstance(outcome, QueueDescribed):
        labels = command.change["labels"]
        spelled = spelled_as(labels, outcome.info.settings.labels)
        if spelled != labels:
            again = msgspec.structs.replace(command, change=command.change | {"labels": spelled})
            return msgspec.structs.replace(held.call, commands=(again,))
    raise fault_of(held.refused, command)
