"""A queue of our server as a bridge's target that takes each message once, through the server's admin port.

Strategy: a message is one command with an `Idempotency-Key` made of the source's message id, so it is sent once
however often the bridge repeats it, also after a kill. The server remembers the last 10,000 commands of a day. A
command that was kept under the same key with other members is the same message with less time to live: it is there.
Each thread has a connection of its own.
"""

import base64
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from veilmq.cli.access import Target, http_access
from veilmq.cli.access.http import HttpAccess
from veilmq.cli.failures import Exit, Failure, Missing, Unreachable
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Message, Sent, typed
from veilmq.client.queue import Queue
from veilmq.client.shared.batches import attempt
from veilmq.client.shared.checks import as_message
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import ParameterInvalid, QueueMissing, VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.settings.queue import QueueKey

_PREFIX: Final = "bridge."
_KEY: Final = "Idempotency-Key"
"""In the server's text about a key that was used for another call."""


class Once(Wrapping):
    """The queue `inner`, to which messages go by way of the admin port. Each needs a deduplication id."""

    def __init__(self, inner: Queue, target: Target, named: tuple[str | None, str | None]) -> None:
        """named: account and region as the queue's URL has them. Raises Failure if the server does not answer."""
        super().__init__(inner)
        self._target = target
        self._own = threading.local()
        self._opened: list[HttpAccess] = []
        home = self._access().home(named[0])
        self._key = QueueKey(home.account, named[1] or home.region, inner.name)
        if inner.capabilities.native_fifo:
            raise Failure(Exit.USAGE, "--admin: not for a FIFO queue, which deduplicates by itself")

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """One command for each message."""
        return [attempt(self.send, each) for each in messages]

    def send(self, message: str | Message) -> Sent:
        """One command. Raises TransportError, ServiceError, QueueMissing, ParameterInvalid."""
        given = as_message(message)
        assert given.deduplication_id is not None
        command = f"{_PREFIX}{given.deduplication_id}"
        try:
            (shown,) = self._access().run("send", self._key, {"messages": [_members(given)]}, command)["messages"]
        except Unreachable as error:  # a repetition acts once, whatever has happened
            raise TransportError(reason=str(error), may_have_happened=False) from error
        except Missing as error:
            raise QueueMissing(queue=self.name) from error
        except Failure as error:
            if _KEY in str(error):
                return Sent(id="", duplicate=True)
            raise ServiceError(code="admin", status=400, request_id="", message=str(error)) from error
        if "error" in shown:
            raise ParameterInvalid(parameter="message", reason=str(shown["message"]))
        return Sent(id=str(shown["id"]))

    def _access(self) -> HttpAccess:
        access: HttpAccess | None = getattr(self._own, "access", None)
        if access is None:
            access = http_access(self._target, os.environ)
            assert access is not None, "an address was given"
            self._own.access = access
            self._opened.append(access)
        return access

    def close(self) -> None:
        """Close the connections, and the queue."""
        for access in self._opened:
            access.close()
        super().close()


def once(inner: Queue, admin: str, token_file: Path | None, named: tuple[str | None, str | None]) -> Once:
    """Raises Failure."""
    return Once(inner, Target(admin, token_file, None), named)


def _members(message: Message) -> Mapping[str, Any]:
    """As /api/v1 has them (`MessageInput`)."""
    given = replace(message, deduplication_id=None)
    return {
        "body": given.body,
        "ttl_us": None if given.ttl is None else round(given.ttl * SECOND_US),
        "priority": given.priority,
        "group": given.group,
        "type": given.type,
        "attributes": [_attribute(name, value) for name, value in given.attributes.items()],
    }


def _attribute(name: str, value: Any) -> dict[str, str]:
    kind, content = typed(name, value)
    text = content if isinstance(content, str) else base64.b64encode(content).decode()
    return {"name": name, "value": text, "type": kind}
