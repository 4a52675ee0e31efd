"""An account of Azure Queue Storage.

Strategy: thin over a QueueServiceClient. Create Queue tells by its status whether the queue was there, and compares all
metadata; the port compares only what the template names, so a refused creation looks the metadata up. Source: "Create
Queue", "List Queues".
"""

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from veilmq.client.azure.calls import call
from veilmq.client.azure.queue import AzureQueue, capabilities_of
from veilmq.client.azure.settings import differing, metadata_of, with_incarnation
from veilmq.client.azure.under_way import UnderWay
from veilmq.client.capabilities import Capabilities
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.cloud_queue import CloudAccount
from veilmq.client.messages import Template
from veilmq.client.singly import Singly
from veilmq.client.unreadable import Policy, keep
from veilmq.model.errors import ParameterInvalid, QueueExists

T = TypeVar("T")

_NAME: Final = re.compile(r"[a-z0-9](?:-?[a-z0-9])+\Z")
_NAME_CHARACTERS: Final = range(3, 64)


class AzureAccount(CloudAccount):
    """An `Account` over azure-storage-queue's QueueServiceClient, whose retries and timeouts stay its own."""

    def __init__(
        self, client: Any, *, base64: bool = False, unreadable: Policy = keep, owns_client: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        """base64: bodies travel in base64, as the SDKs of other languages and Azure Functions have them; by default
        they travel as they are. unreadable: what to do with a received body that is no base64 then. owns_client: close
        it too."""
        super().__init__()
        self.client = client
        self.base64 = base64
        self.unreadable = unreadable
        self.singly = Singly("azure")
        self.under_way = UnderWay(client.close if owns_client else _nothing)
        self._clock = clock

    def queue(self, name: str) -> AzureQueue:
        """A queue that exists. Raises QueueMissing."""
        queue = AzureQueue(self, self.client.get_queue_client(_checked(name)), self._clock)
        queue.look()
        return self._opened(queue)

    def capabilities(self, name: str) -> Capabilities:
        """See `Account.capabilities`."""
        return capabilities_of(self.base64)

    def create(self, name: str, template: Template | None = None) -> bool:
        """Create Queue; True if there was none. Raises QueueExists, QueueDeletedRecently, ParameterInvalid."""
        wanted = metadata_of(template or Template())
        queue = self.client.get_queue_client(_checked(name))
        try:
            self.call(queue.create_queue, name, creating=True, metadata=with_incarnation(wanted))
        except QueueExists:
            there = self.call(queue.get_queue_properties, name).metadata or {}
            setting = differing(wanted, there)
            if setting is not None:
                raise QueueExists(queue=name, setting=setting) from None
            return False
        return True

    def delete(self, name: str) -> None:
        """Delete Queue. Raises QueueMissing."""
        self.call(self.client.get_queue_client(_checked(name)).delete_queue, name)

    def names(self, prefix: str = "") -> list[str]:
        """List Queues, all pages."""
        return self.call(self._listed, "", prefix=prefix)

    def call(self, operation: Callable[..., T], queue: str, **given: Any) -> T:
        """See `azure.calls.call`. Raises TransportError once the account is closed."""
        with self.under_way.call():
            return call(operation, queue, **given)

    def _listed(self, prefix: str, **given: Any) -> list[str]:
        return [queue.name for queue in self.client.list_queues(name_starts_with=prefix or None, **given)]

    def close(self) -> None:
        """Close the queues; the client too if it is ours, once no call is under way."""
        self._close_queues()
        self.singly.close()
        self.under_way.close()


def _nothing() -> None:
    """The client is its owner's."""


def _checked(name: str) -> str:
    """The name, which goes into a path. Raises ParameterInvalid."""
    if not _NAME.match(name) or len(name) not in _NAME_CHARACTERS:
        raise ParameterInvalid(parameter="name", reason="must be 3 to 63 of a-z, 0-9 and single hyphens between them")
    return name
