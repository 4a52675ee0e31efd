"""An account and region of Alibaba Cloud MNS.

Strategy: thin over aliyun-mns-sdk, of whose Account only the host and the credentials are used: each thread has a
client of its own. CreateQueue compares all attributes, with defaults for those that are left out; the port compares
only what the template names, so a queue that is there is looked at. Source: the pages of CreateQueue and ListQueue.
"""

import re
import threading
import weakref
from typing import Any, Final

from mns.mns_request import (  # type: ignore[import-untyped]
    CreateQueueRequest,
    CreateQueueResponse,
    DeleteQueueRequest,
    DeleteQueueResponse,
    GetQueueAttributesRequest,
    GetQueueAttributesResponse,
    ListQueueRequest,
    ListQueueResponse,
)

from veilmq.client.capabilities import Capabilities
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.closing import Closing
from veilmq.client.messages import Template
from veilmq.client.mns.queue import MnsQueue, capabilities_of
from veilmq.client.mns.thread_clients import ThreadClients
from veilmq.client.mns.topics import MnsTopics
from veilmq.client.singly import Singly
from veilmq.client.unreadable import Policy, keep
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueExists, QueueMissing

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*\Z")
_PREFIX: Final = re.compile(r"[A-Za-z0-9-]*\Z")
_PAGE_MAX: Final = 1_000
_CREATED: Final = 201
_SETTINGS: Final = {
    "visibility_timeout": "visibility_timeout",
    "delay": "delay_seconds",
    "retention": "message_retention_period",
    "wait": "polling_wait_seconds",
    "message_bytes_max": "maximum_message_size",
}
"""Field of a template -> of the SDK's requests and answers."""


class MnsAccount(Closing):
    """An `Account` over aliyun-mns-sdk's `mns.account.Account`."""

    def __init__(self, account: Any, *, base64: bool = True, unreadable: Policy = keep, clock: Clock = SYSTEM) -> None:
        """base64: bodies travel in base64, as the SDKs of Python and Java have them by default; False: as they are,
        as those of Go and Node.js have them. unreadable: what to do with a received body that is no base64 then."""
        self.base64 = base64
        self.unreadable = unreadable
        self.singly = Singly("mns")
        self.clients = ThreadClients(account)
        self._clock = clock
        self._lock = threading.Lock()
        self._queues: weakref.WeakSet[MnsQueue] = weakref.WeakSet()

    def queue(self, name: str) -> MnsQueue:
        """A queue that exists. Raises QueueMissing."""
        queue = MnsQueue(self, _checked(name), self._clock)
        queue.look()
        with self._lock:
            self._queues.add(queue)
        return queue

    def capabilities(self, name: str) -> Capabilities:
        """See `Account.capabilities`."""
        return capabilities_of(self.base64)

    def create(self, name: str, template: Template | None = None) -> bool:
        """CreateQueue; True if there was none. Raises QueueExists, QueueDeletedRecently, ParameterInvalid."""
        wanted = _wanted(template or Template())
        _checked(name)
        if self._agrees(name, wanted):
            return False
        request = CreateQueueRequest(name, **wanted)
        try:
            answer = self.clients.call("create_queue", request, CreateQueueResponse(), name)
        except QueueExists:
            # Somebody was faster, with other settings: perhaps not with those that are asked for here.
            if self._agrees(name, wanted):
                return False
            raise
        return bool(answer.status == _CREATED)

    def _agrees(self, name: str, wanted: dict[str, int]) -> bool:
        """Whether the queue is there as it is wanted. Raises QueueExists if it is there and is not."""
        try:
            there = self.look(name)
        except QueueMissing:
            return False
        for field, attribute in _SETTINGS.items():
            if attribute in wanted and getattr(there, attribute) != wanted[attribute]:
                raise QueueExists(queue=name, setting=field)
        return True

    def look(self, name: str) -> Any:
        """GetQueueAttributes: the SDK's answer. Raises QueueMissing."""
        request = GetQueueAttributesRequest(name)
        return self.clients.call("get_queue_attributes", request, GetQueueAttributesResponse(), name)

    def delete(self, name: str) -> None:
        """DeleteQueue. Raises QueueMissing."""
        _checked(name)
        self.look(name)  # the service deletes what is not there without a word
        self.clients.call("delete_queue", DeleteQueueRequest(name), DeleteQueueResponse(), name)

    def names(self, prefix: str = "") -> list[str]:
        """ListQueue, all pages."""
        if not _PREFIX.match(prefix):
            return []
        names: list[str] = []
        marker = ""
        while True:
            request = ListQueueRequest(prefix, _PAGE_MAX, marker)
            answer = self.clients.call("list_queue", request, ListQueueResponse(), "")
            names += [url.rpartition("/")[2] for url in answer.queueurl_list]
            marker = answer.next_marker
            if not marker:
                return names

    def topics(self) -> MnsTopics:
        """The service's own topics, for pull topics."""
        return MnsTopics(self)

    def close(self) -> None:
        """Close the queues and all connections."""
        with self._lock:
            queues = list(self._queues)
        for queue in queues:
            queue.close()
        self.singly.close()
        self.clients.close()


def _checked(name: str) -> str:
    """The name, which goes into a path. Raises ParameterInvalid."""
    if not _NAME.match(name):
        reason = "must have letters, digits and hyphens, and begin with a letter or digit"
        raise ParameterInvalid(parameter="name", reason=reason)
    return name


def _wanted(template: Template) -> dict[str, int]:
    """Arguments of CreateQueueRequest. Raises CapabilityMissing, ParameterInvalid naming the template's field."""
    if template.fifo or template.content_deduplication:
        raise CapabilityMissing(capability="native_fifo")
    if template.dead_letter_queue is not None or template.receive_count_max is not None:
        raise CapabilityMissing(capability="dead_letter_queue")
    if template.tags:
        raise CapabilityMissing(capability="queue tags")
    wanted = {}
    for field, argument in _SETTINGS.items():
        value = getattr(template, field)
        if value is None:
            continue
        if not isinstance(value, int | float) or type(value) is bool or not 0 <= value < 2**31 or value != int(value):
            raise ParameterInvalid(parameter=field, reason=f"must be a whole number, and not negative: {value!r}")
        wanted[argument] = int(value)
    return wanted
