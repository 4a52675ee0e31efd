"""Batches where the protocol has no request for them: one request an entry, a few at a time.

Strategy: the first entry goes alone, so that what is wrong with the whole call (the queue is gone, nobody answers) is
raised before anything was done; the others go through a small pool of threads, in no promised order. Once the way is
broken the rest is not tried: each such entry says so.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from veilmq.client.daemons import DaemonPool
from veilmq.client.errors import ServiceError, TransportError, may_have_happened
from veilmq.client.prepared import attempt, through
from veilmq.client.requests import NOT_TRIED
from veilmq.model.errors import QueueMissing, VeilError

THREADS: Final = 8
OF_ALL: Final = (QueueMissing, TransportError, ServiceError)
"""What is wrong with every entry if it is wrong with one."""

Given = TypeVar("Given")
Entry = TypeVar("Entry")
Result = TypeVar("Result")


class Singly:
    """The threads of one account; they start when a batch needs them. Any thread."""

    def __init__(self, name: str) -> None:
        self._pool = DaemonPool(THREADS, f"veilmq-{name}")

    def batched(
        self, given: Sequence[Given], make: Callable[[Given], Entry], call: Callable[[Entry], Result]
    ) -> list[Result | VeilError]:
        """As `run` with what `make` makes of each; what it raises of an entry takes the place of its result."""
        return through([attempt(make, each) for each in given], lambda entries: self.run(entries, call))

    def run(self, entries: Sequence[Entry], call: Callable[[Entry], Result]) -> list[Result | VeilError]:
        """One result or error an entry, in order. Raises what the first call raised if it is wrong with all of them and
        nothing can have happened."""
        if not entries:
            return []
        broken = threading.Event()

        def one(entry: Entry) -> Result | VeilError:
            if broken.is_set():
                return TransportError(reason=NOT_TRIED, may_have_happened=False)
            try:
                return call(entry)
            except VeilError as error:
                if isinstance(error, TransportError):
                    broken.set()
                return error

        first = one(entries[0])
        if isinstance(first, OF_ALL) and not may_have_happened(first):
            raise first
        started = [self._started(one, entry) for entry in entries[1:]]
        return [first, *(each if isinstance(each, VeilError) else each.result() for each in started)]

    def close(self) -> None:
        """No further batch starts; what is under way ends by itself."""
        self._pool.shutdown()

    def _started(
        self, one: Callable[[Entry], Result | VeilError], entry: Entry
    ) -> "Future[Result | VeilError] | VeilError":
        try:
            return self._pool.submit(one, entry)
        except RuntimeError:  # the pool says so once it is shut down
            return TransportError(reason="the account is closed", may_have_happened=False)
