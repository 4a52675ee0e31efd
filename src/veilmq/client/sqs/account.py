"""An account and region of Amazon SQS.

Strategy: thin over a boto3 client. Queue URLs come from SQS itself (GetQueueUrl), never from a guess. SQS does not tell
whether CreateQueue created, so `create` asks before: of two who create at the same time both may be told True.
"""

from typing import Any, Final

from veilmq.client.capabilities import Capabilities
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.cloud_queue import CloudAccount
from veilmq.client.messages import Template
from veilmq.client.queue_attributes import creation_attributes
from veilmq.client.sqs.calls import Calls, member
from veilmq.client.sqs.queue import SqsQueue, capabilities_of
from veilmq.model.errors import QueueMissing

_PAGE_MAX: Final = 1_000


class SqsAccount(CloudAccount):
    """An `Account` over a boto3 SQS client (`boto3.client("sqs", ...)`), whose retries and timeouts stay its own."""

    def __init__(
        self, client: Any, *, owner: str | None = None, owns_client: bool = False, clock: Clock = SYSTEM
    ) -> None:
        """`owner`: account of 12 digits whose queues are meant, if not the caller's. `owns_client`: close it too."""
        super().__init__()
        self.client = client
        self._owner = owner
        self._owns_client = owns_client
        self._clock = clock
        self._calls = Calls(client)

    def queue(self, name: str) -> SqsQueue:
        """A queue that exists. Raises QueueMissing."""
        queue = SqsQueue(self, self._calls, name, self._url(name), self._clock)
        return self._opened(queue)

    def capabilities(self, name: str) -> Capabilities:
        """See `Account.capabilities`."""
        return capabilities_of(name)

    def create(self, name: str, template: Template | None = None) -> bool:
        """CreateQueue; True if there was none. Raises QueueExists, QueueDeletedRecently, ParameterInvalid."""
        template = template or Template()
        dead_letter_arn = None
        if template.dead_letter_queue is not None:
            url = self._url(template.dead_letter_queue)
            answer = self._calls.call(
                "get_queue_attributes", template.dead_letter_queue, QueueUrl=url, AttributeNames=["QueueArn"]
            )
            dead_letter_arn = member(member(answer, "Attributes"), "QueueArn")
        attributes = creation_attributes(name, template, dead_letter_arn)
        try:
            self._url(name)
        except QueueMissing:
            existed = False
        else:
            existed = True
        given: dict[str, Any] = {"tags": dict(template.tags)} if template.tags else {}
        self._calls.call("create_queue", name, QueueName=name, Attributes=attributes, **given)
        return not existed

    def delete(self, name: str) -> None:
        """DeleteQueue. Raises QueueMissing."""
        self._calls.call("delete_queue", name, QueueUrl=self._url(name))

    def names(self, prefix: str = "") -> list[str]:
        """ListQueues, all pages."""
        names: list[str] = []
        given: dict[str, Any] = {"MaxResults": _PAGE_MAX}
        if prefix:
            given["QueueNamePrefix"] = prefix
        while True:
            answer = self._calls.call("list_queues", "", **given)
            names += [url.rpartition("/")[2] for url in answer.get("QueueUrls", ())]
            token = answer.get("NextToken")
            if not token:
                return names
            given["NextToken"] = token

    def close(self) -> None:
        """Close the queues; the client too if it is ours."""
        self._close_queues()
        self._calls.close()
        if self._owns_client:
            self.client.close()

    def _url(self, name: str) -> str:
        given: dict[str, Any] = {} if self._owner is None else {"QueueOwnerAWSAccountId": self._owner}
        url: str = member(self._calls.call("get_queue_url", name, QueueName=name, **given), "QueueUrl")
        return url
