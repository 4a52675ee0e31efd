"""Batches of any length over requests of a bounded one.

Strategy: `batched` is the whole way of a batch: what cannot be sent is refused in its place, `split` cuts the rest by
number and by size, keeping the order, and `in_requests` sends piece after piece and gives every entry its result or
error. A request that fails as a whole raises only if nothing of the batch can have happened. Once the way is broken the
rest is not tried: each such entry says so, and that nothing of it happened.

One by one, where the protocol has no request for a batch: the first entry goes alone, so that what is wrong with the
whole call (the queue is gone, nobody answers) is raised before anything was done; the others go through a small pool of
threads, in no promised order. Once the way is broken the rest is not tried: each such entry says so.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from veilmq.client.daemons import DaemonPool
from veilmq.client.errors import ServiceError, TransportError, may_have_happened
from veilmq.client.sendable import attempt, through
from veilmq.model.errors import QueueMissing, VeilError

Given = TypeVar("Given")
Entry = TypeVar("Entry")
Result = TypeVar("Result")

NOT_TRIED = "not tried: the request before it in the same batch failed"


def batched(
    given: Sequence[Given],
    make: Callable[[Given], Entry],
    request: Callable[[Sequence[Entry]], Sequence[Result | VeilError]],
    count_max: int,
    bytes_max: int = 0,
    size: Callable[[Entry], int] = lambda entry: 0,
) -> list[Result | VeilError]:
    """One result an entry, in order: what `make` raises of it, or what `request` answers for what it makes of it."""

    def in_pieces(entries: Sequence[Entry]) -> list[Result | VeilError]:
        return list(in_requests(split(entries, count_max, bytes_max, size), request))

    return through([attempt(make, each) for each in given], in_pieces)


def split(entries: Sequence[Entry], count_max: int, bytes_max: int, size: Callable[[Entry], int]) -> list[list[Entry]]:
    """The entries in their order, in pieces of at most `count_max` entries and `bytes_max` bytes.

    An entry that is larger than `bytes_max` is a piece of its own, for the server to refuse.
    """
    pieces: list[list[Entry]] = []
    room_bytes = -1
    for entry in entries:
        entry_bytes = size(entry)
        if not pieces or len(pieces[-1]) >= count_max or entry_bytes > room_bytes:
            pieces.append([])
            room_bytes = bytes_max
        pieces[-1].append(entry)
        room_bytes -= entry_bytes
    return pieces


def in_requests(
    pieces: Sequence[Sequence[Entry]], request: Callable[[Sequence[Entry]], Sequence[Result | VeilError]]
) -> Iterator[Result | VeilError]:
    """One result or error an entry, in order. Raises what the first request raised if nothing of it happened."""
    broken = False
    for number, piece in enumerate(pieces):
        if broken:
            yield from [TransportError(reason=NOT_TRIED, may_have_happened=False)] * len(piece)
            continue
        try:
            results = request(piece)
        except VeilError as error:
            if number == 0 and not may_have_happened(error):
                raise
            broken = isinstance(error, TransportError)
            results = [error] * len(piece)
        yield from results


THREADS: Final = 8
OF_ALL: Final = (QueueMissing, TransportError, ServiceError)
"""What is wrong with every entry if it is wrong with one."""


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
