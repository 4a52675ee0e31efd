"""Where a topic of the service's own serves a pull topic.

Strategy: only if all that the pull topic says can be said there: one tag a subscription, bodies as they are published
and alike for all, and queues that nothing wraps: what is published past a wrapper would miss what the wrapper does.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from veilmq.client.native_topics import NativeSubscription, NativeTopics
from veilmq.client.queue import Account, Queue
from veilmq.client.topics.definitions import Definition, Form, Subscription
from veilmq.client.topics.encoding import Encoding
from veilmq.model.errors import CapabilityMissing


def natively(subscriptions: Iterable[Subscription]) -> list[NativeSubscription]:
    """The same in the service's words."""
    return [NativeSubscription(each.name, each.queue, each.tags[0] if each.tags else None) for each in subscriptions]


def native_topics_of(
    account: Account, definition: Definition, bodies: Any, queues: Collection[Queue] | None = None
) -> NativeTopics | None:
    """The service's topics if they serve this one. Raises QueueMissing, if the queues are not given."""
    topics = _topics_of(account)
    if topics is None or _unfit(topics, definition, bodies) is not None:
        return None
    found: Sequence[Queue] = (
        [account.queue(each.queue) for each in definition.subscriptions] if queues is None else list(queues)
    )
    serves = all(each.capabilities.native_topics and each.account is account for each in found)
    return topics if serves else None


def check_fits(account: Account, definition: Definition, bodies: Any) -> None:
    """Raises CapabilityMissing if the service's own topics cannot serve this one."""
    topics = _topics_of(account)
    reason = "native_topics" if topics is None else _unfit(topics, definition, bodies)
    if reason is not None:
        raise CapabilityMissing(capability=reason)


def delete_native(account: Account, definition: Definition) -> None:
    """Delete the service's topic, if there is one of this definition. Raises what the service does."""
    topics = _topics_of(account)
    if definition.form is Form.NATIVE and topics is not None:
        topics.delete(definition.topic)


def _topics_of(account: Account) -> NativeTopics | None:
    offered = getattr(account, "topics", None)
    return None if offered is None else offered()


def _unfit(topics: NativeTopics, definition: Definition, bodies: Any) -> str | None:
    """What it asks that the service's topics cannot do."""
    if bodies is not None:
        return "native topics with bodies that differ"
    if any(each.encoding is not Encoding.RAW for each in definition.subscriptions):
        return "native topics with an encoding of a subscription's own"
    if any(len(each.tags) > 1 for each in definition.subscriptions):
        return "native topics with several tags of a subscription"
    fits = topics.fits(definition.topic, natively(definition.subscriptions))
    return None if fits else "native topics with such names, tags or queues"
