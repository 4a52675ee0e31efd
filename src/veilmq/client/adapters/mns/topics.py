"""Topics of MNS.

Strategy: a subscription has a queue's endpoint and the SIMPLIFIED format, so that a copy is the published body; a
publish is one request, encoded as a send to a queue is. The endpoint's account and region are read from the host name,
as in the SDK. Source: the pages of CreateTopic, Subscribe and PublishMessage; the SDK's CloudPullTopic (Java).
"""

from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

import msgspec
from mns.mns_request import (  # type: ignore[import-untyped]
    CreateTopicRequest,
    CreateTopicResponse,
    DeleteTopicRequest,
    DeleteTopicResponse,
    GetSubscriptionAttributesRequest,
    GetSubscriptionAttributesResponse,
    ListSubscriptionByTopicRequest,
    ListSubscriptionByTopicResponse,
    PublishMessageRequest,
    PublishMessageResponse,
    SubscribeRequest,
    SubscribeResponse,
)

from veilmq.client.adapters.cloud import names_on_pages
from veilmq.client.adapters.mns.calls import Entry, ThreadClients, entry_of
from veilmq.client.errors import ServiceError, SubscriptionExists, TopicMissing
from veilmq.client.messages import Message
from veilmq.client.queue import TAG_CHARACTERS_MAX, Capabilities, NativePublished, NativeSubscription, are_names
from veilmq.client.shared import Singly
from veilmq.model.errors import VeilError

_QUEUES: Final = ":queues/"
_PAGE_MAX: Final = 1_000
_MESSAGE_BYTES_MAX: Final = 65_536
"""Of a topic; a queue that was created by another protocol may accept more."""
_CREATED: Final = 201


def _is_tag(text: str) -> bool:
    """Whether a publish delivers the text unchanged: a push puts it into a header, and XML loses the blanks around
    it."""
    return (
        1 <= len(text) <= TAG_CHARACTERS_MAX
        and text == text.strip()
        and not any(character < " " or character == "\x7f" for character in text)
    )


class Owner(Protocol):
    """What topics need from the account (veilmq.client.adapters.mns)."""

    clients: ThreadClients
    singly: Singly

    def look(self, name: str) -> Any:
        """GetQueueAttributes."""

    def call(self, method: str, request: Any, response: Any, queue: str) -> Any:
        """See `MnsAccount.call`."""

    def capabilities(self, name: str) -> Capabilities:
        """See `Account.capabilities`."""


class MnsTopics:
    """See `NativeTopics`; made by `MnsAccount.topics`."""

    def __init__(self, account: Owner) -> None:
        self._account = account

    def fits(self, topic: str, subscriptions: Collection[NativeSubscription]) -> bool:
        return are_names(topic, subscriptions) and all(each.tag is None or _is_tag(each.tag) for each in subscriptions)

    def carries(self, message: Message) -> bool:
        """See `NativeTopics`. Delay and priority exist only for a queue's messages."""
        return message.delay is None and message.priority is None and (message.tag is None or _is_tag(message.tag))

    def create(self, topic: str, queues: Collection[str]) -> bool:
        """CreateTopic. See `NativeTopics`."""
        queue_limits = (self._account.look(name).maximum_message_size for name in queues)
        limit_bytes = min(_MESSAGE_BYTES_MAX, *queue_limits)
        try:
            answer = self._call("create_topic", CreateTopicRequest(topic, limit_bytes), CreateTopicResponse(), topic)
        except ServiceError as error:
            if error.code == "TopicAlreadyExist":
                return False  # exists with another limit: its subscriptions decide whether it is the same
            raise
        return bool(answer.status == _CREATED)

    def subscriptions(self, topic: str) -> list[NativeSubscription]:
        """ListSubscriptionByTopic, all pages, and GetSubscriptionAttributes of each."""

        def page(marker: str | None) -> tuple[list[str], str]:
            request = ListSubscriptionByTopicRequest(topic, "", _PAGE_MAX, marker or "")
            answer = self._call("list_subscription_by_topic", request, ListSubscriptionByTopicResponse(), topic)
            return answer.subscriptionurl_list, answer.next_marker

        return [self._subscription(topic, name) for name in names_on_pages(page)]

    def _subscription(self, topic: str, name: str) -> NativeSubscription:
        request = GetSubscriptionAttributesRequest(topic, name)
        found = self._call("get_subscription_attributes", request, GetSubscriptionAttributesResponse(), topic)
        _, mark, queue = found.endpoint.rpartition(_QUEUES)
        return NativeSubscription(name, queue if mark else "", found.filter_tag or None)

    def subscribe(self, topic: str, subscription: NativeSubscription) -> None:
        """Subscribe. See `NativeTopics`."""
        name, queue, tag = subscription
        request = SubscribeRequest(topic, name, self._endpoint(queue), "BACKOFF_RETRY", "SIMPLIFIED", tag or "")
        try:
            self._call("subscribe", request, SubscribeResponse(), topic, queue)
        except ServiceError as error:
            if error.code != "SubscriptionAlreadyExist":
                raise
            # The service may write an endpoint's region differently than we do.
            if self._subscription(topic, name) != subscription:
                raise SubscriptionExists(topic=topic, subscription=name, setting="endpoint") from error

    def delete(self, topic: str) -> None:
        """DeleteTopic. See `NativeTopics`."""
        try:
            self._call("delete_topic", DeleteTopicRequest(topic), DeleteTopicResponse(), topic)
        except TopicMissing:
            return

    def publish(self, topic: str, messages: Sequence[Message]) -> list[NativePublished | VeilError]:
        """PublishMessage, one by one, a few at a time. See `NativeTopics`."""

        def made(message: Message) -> tuple[Entry, str, str | None]:
            entry = entry_of(msgspec.structs.replace(message, tag=None, group=None), self._account.capabilities(topic))
            return entry, message.tag or "", message.group

        def send(each: tuple[Entry, str, str | None]) -> NativePublished:
            entry, tag, group = each
            request = PublishMessageRequest(topic, entry.body, tag, message_group_id=group or "")
            request.user_properties, request.system_properties = entry.user, entry.system
            answer = self._call("publish_message", request, PublishMessageResponse(), topic)
            return NativePublished(answer.message_id, None)

        return self._account.singly.batched(messages, made, send)

    def _endpoint(self, queue: str) -> str:
        account, _, rest = self._account.clients.host.partition(".mns.")
        region = rest.partition(".")[0] if rest else "us-east-1"
        return f"acs:mns:{region.removesuffix('-internal')}:{account.partition(':')[0]}{_QUEUES}{queue}"

    def _call(self, method: str, request: Any, response: Any, topic: str, queue: str = "") -> Any:
        try:
            return self._account.call(method, request, response, queue)
        except ServiceError as error:
            if error.code == "TopicNotExist":
                raise TopicMissing(topic=topic) from error
            raise
