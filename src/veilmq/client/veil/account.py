"""One account and region of our own server.

Strategy: one pool of connections and one signer; a queue gets calls of its own over them. The key decides the account;
`account` names another one where the server lets a key do that (development mode).
"""

import ssl
import threading
import weakref
from typing import Final

from veilmq.client import checked
from veilmq.client.capabilities import Capabilities
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.closing import Closing
from veilmq.client.identity import ById, fingerprint
from veilmq.client.messages import Template
from veilmq.client.queue_attributes import creation_attributes
from veilmq.client.veil.calls import Calls, operation
from veilmq.client.veil.connections import Pool
from veilmq.client.veil.queue import DESCRIBE, VeilQueue, capabilities_of
from veilmq.client.veil.signing import Signer
from veilmq.model.access import HOME_REGION_DEFAULT
from veilmq.model.errors import ParameterInvalid
from veilmq.protocols.sqs.inputs import CreateQueueInput, ListQueuesInput
from veilmq.protocols.sqs.operations import veil_shapes as shapes
from veilmq.protocols.sqs.results import ListQueuesResult

PORT_DEFAULT: Final = 9324
TIMEOUT_SECONDS: Final = 30.0
CONNECT_TIMEOUT_SECONDS: Final = 5.0
_NOBODY: Final = "veilmq"
"""Key id and secret where none are given: development mode takes any."""
_PAGE_MAX: Final = 1_000

_CREATE: Final = operation("VeilMQ.CreateQueue", shapes.CreateQueueResult, repeatable=True)
_DELETE: Final = operation("VeilMQ.DeleteQueue", shapes.PurgeQueueResult, repeatable=False)
_LIST: Final = operation("AmazonSQS.ListQueues", ListQueuesResult, repeatable=True)


class VeilAccount(Closing):
    """An `Account` on our server. Safe for threads; after a fork the child opens connections of its own."""

    def __init__(
        self,
        host: str,
        port: int | None = None,
        key: str | None = None,
        secret: str | None = None,
        *,
        tls: bool | ssl.SSLContext = False,
        region: str = HOME_REGION_DEFAULT,
        account: str | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
        clock: Clock = SYSTEM,
    ) -> None:
        """Opens no connection yet.

        `tls`: True verifies by the system's authorities; a context by its own. `account`: 12 digits, if not the key's.
        `token`: of temporary credentials. `timeout`: seconds for an answer, beyond what a receive waits. Raises
        ParameterInvalid.
        """
        if not host or "/" in host or host.count(":") == 1:
            raise ParameterInvalid(
                parameter="host", reason="is a name or an address alone; a URL is what connect() takes"
            )
        if (key is None) is not (secret is None):
            raise ParameterInvalid(parameter="secret", reason="key and secret need each other")
        checked.positive(timeout, "timeout")
        checked.positive(connect_timeout, "connect_timeout")
        port = PORT_DEFAULT if port is None else port
        shown = f"[{host}]" if ":" in host else host
        try:
            signer = Signer(f"{shown}:{port}", key or _NOBODY, secret or _NOBODY, region, token, clock)
        except ValueError as error:
            raise ParameterInvalid(parameter="account", reason=str(error)) from error
        context = ssl.create_default_context() if tls is True else tls or None
        self.identity = (
            "veil", host.lower(), port, region, ById(context) if isinstance(tls, ssl.SSLContext) else tls,
            fingerprint(key or _NOBODY, secret or _NOBODY, token), ById(clock),
        )  # fmt: skip
        """See `veilmq.client.identity`."""
        self._pool = Pool(host, port, context, connect_timeout, clock)
        self._signer = signer
        self._timeout = timeout
        self._clock = clock
        self._prefix = "" if account is None else f"{account}/"
        self._calls = self._new_calls("")
        self._lock = threading.Lock()
        self._queues: weakref.WeakSet[VeilQueue] = weakref.WeakSet()

    def _new_calls(self, name: str) -> Calls:
        return Calls(self._pool, self._signer, self._timeout, name)

    def queue(self, name: str) -> VeilQueue:
        """A queue that exists. Raises QueueMissing."""
        calls = self._new_calls(name)
        path = self._prefix + name
        calls.call(DESCRIBE, shapes.QueueInput(queue=path))
        queue = VeilQueue(self, calls, name, path, self._clock)
        with self._lock:
            self._queues.add(queue)
        return queue

    def capabilities(self, name: str) -> Capabilities:
        """See `Account.capabilities`."""
        return capabilities_of(name)

    def create(self, name: str, template: Template | None = None) -> bool:
        """VeilMQ.CreateQueue. Raises QueueExists, QueueDeletedRecently, ParameterInvalid."""
        template = template or Template()
        dead_letter_arn = None
        if template.dead_letter_queue is not None:
            path = self._prefix + template.dead_letter_queue
            target = self._new_calls(template.dead_letter_queue).call(DESCRIBE, shapes.QueueInput(queue=path)).result
            dead_letter_arn = f"arn:aws:sqs:{target.region}:{target.account}:{target.name}"
        attributes = creation_attributes(name, template, dead_letter_arn)
        given = CreateQueueInput(queue_name=name, attributes=attributes, tags=dict(template.tags) or None)
        done = self._new_calls(name).call(_CREATE, given)
        return bool(done.result.created or done.again)

    def delete(self, name: str) -> None:
        """VeilMQ.DeleteQueue. Raises QueueMissing."""
        self._new_calls(name).call(_DELETE, shapes.QueueInput(queue=self._prefix + name))

    def names(self, prefix: str = "") -> list[str]:
        """ListQueues, all pages."""
        names: list[str] = []
        given = ListQueuesInput(queue_name_prefix=prefix or None, max_results=_PAGE_MAX)
        while True:
            page = self._calls.call(_LIST, given).result
            names += [url.rpartition("/")[2] for url in page.queue_urls or ()]
            if not page.next_token:
                return names
            given.next_token = page.next_token

    def close(self) -> None:
        """Close the queues and let all connections go."""
        with self._lock:
            queues = list(self._queues)
        self._pool.close()
        self._calls.close()
        for queue in queues:
            queue.close()
