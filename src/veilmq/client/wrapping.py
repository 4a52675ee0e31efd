"""A queue around a queue: passes every call on to `inner`.

Strategy: a pattern inherits from this and overrides what it changes. `inner` is public, so that a stack can be walked.
"""

from collections.abc import Hashable, Sequence

from veilmq.client.messages import Extension, Message, Peeked, Received, Recommended, Sent, Stats
from veilmq.client.queue import Account, Capabilities, Queue, identity_of, is_closed
from veilmq.client.threads import Closing
from veilmq.model.errors import VeilError
from veilmq.model.reports import Failure


class Wrapping(Closing):
    """A `Queue` that does what `inner` does."""

    def __init__(self, inner: Queue) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def account(self) -> Account:
        return self.inner.account

    @property
    def identity(self) -> Hashable | None:
        """See `veilmq.client.queue`: that of `inner`, unless the pattern receives differently."""
        return identity_of(self.inner) if type(self).receive is Wrapping.receive else None

    @property
    def closed(self) -> bool:
        """Whether `inner` is closed."""
        return is_closed(self.inner)

    def send(self, message: str | Message) -> Sent:
        return self.inner.send(message)

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        return self.inner.send_batch(messages)

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        return self.inner.receive(count_max, lease=lease, wait=wait)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        return self.inner.extend(handle, lease, body=body)

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        return self.inner.extend_batch(extensions)

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        self.inner.release(handle, delay, failure=failure)

    def delete(self, handle: str) -> None:
        self.inner.delete(handle)

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        return self.inner.delete_batch(handles)

    def peek(self, count_max: int = 1) -> list[Peeked]:
        return self.inner.peek(count_max)

    def stats(self) -> Stats:
        return self.inner.stats()

    def recommended(self) -> Recommended | None:
        return self.inner.recommended()

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()
