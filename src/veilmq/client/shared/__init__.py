"""What adapters and patterns share: here batches of any length, sent in requests of limited size; beside it checks
before any I/O, and threads.

Strategy: `batched` does it all: an entry that cannot be sent gets its error in its place, `split` cuts the rest by
count and by size in order, and `in_requests` sends piece after piece and returns a result or error for each entry. A
request that fails as a whole raises only if nothing of the batch can have happened. Once the connection fails, the rest
is not tried, and each such entry gets an error that says that it did not happen.

One by one (`Singly`), where the protocol has no batch request: the first entry goes alone, so that an error of the
whole call (the queue is gone, nobody answers) is raised before anything was done. The others go through a small thread
pool, in no promised order. Once the connection fails, the rest is not tried, and each such entry says so.

Patterns prepare entries themselves (`attempt`) and send those that can be sent (`through`, `send_prepared`): an entry
that cannot be sent stays here, and its error takes its place in the answer, as the port promises.

Copies for a dead-letter queue (`body_of_copy`): an empty body, which Azure's clients can send, becomes `(empty)` where
the target takes no empty one: else the message could never leave its queue.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from veilmq.client.errors import ServiceError, TransportError, may_have_happened
from veilmq.client.messages import Message, Sent
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.shared.threads import DaemonPool
from veilmq.model.errors import QueueMissing, VeilError

Given = TypeVar("Given")
Entry = TypeVar("Entry")
Result = TypeVar("Result")

NOT_TRIED = "not tried: the request before it in the same batch failed"
EMPTY_BODY: Final = "(empty)"


def body_of_copy(body: str, can: Capabilities) -> str:
    """The body with which a copy of a message goes to a queue with these capabilities."""
    return body if body or not can.body_bytes_min else EMPTY_BODY


def batched(
    given: Sequence[Given],
    make: Callable[[Given], Entry],
    request: Callable[[Sequence[Entry]], Sequence[Result | VeilError]],
    count_max: int,
    bytes_max: int = 0,
    size: Callable[[Entry], int] = lambda entry: 0,
) -> list[Result | VeilError]:
    """One result an entry, in order: the error that `make` raises for it, or the answer of `request` to what `make`
    returns."""

    def in_pieces(entries: Sequence[Entry]) -> list[Result | VeilError]:
        return list(in_requests(split(entries, count_max, bytes_max, size), request))

    return through([attempt(make, each) for each in given], in_pieces)


def split(entries: Sequence[Entry], count_max: int, bytes_max: int, size: Callable[[Entry], int]) -> list[list[Entry]]:
    """The entries in order, in pieces of at most `count_max` entries and `bytes_max` bytes.

    An entry larger than `bytes_max` becomes a piece of its own, for the server to refuse.
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
    """One result or error an entry, in order. Raises the first request's error if nothing of it happened."""
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
"""Errors that every entry would get if one gets them."""


class Singly:
    """The threads of one account, started when a batch needs them. Any thread."""

    def __init__(self, name: str) -> None:
        self._pool = DaemonPool(THREADS, f"veilmq-{name}")

    def batched(
        self, given: Sequence[Given], make: Callable[[Given], Entry], call: Callable[[Entry], Result]
    ) -> list[Result | VeilError]:
        """Like `run`, with what `make` returns for each entry; an error that `make` raises takes the place of the
        result."""
        return through([attempt(make, each) for each in given], lambda entries: self.run(entries, call))

    def run(self, entries: Sequence[Entry], call: Callable[[Entry], Result]) -> list[Result | VeilError]:
        """One result or error an entry, in order. Raises the first call's error if it concerns all of them and nothing
        can have happened."""
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
        """Start no further batch; calls in progress end by themselves."""
        self._pool.shutdown()

    def _started(
        self, one: Callable[[Entry], Result | VeilError], entry: Entry
    ) -> "Future[Result | VeilError] | VeilError":
        try:
            return self._pool.submit(one, entry)
        except RuntimeError:  # raised by the pool after its shutdown
            return TransportError(reason="the account is closed", may_have_happened=False)


def send_prepared(queue: Queue, prepared: Sequence[Message | VeilError]) -> list[Sent | VeilError]:
    """Send the messages as one batch; the errors stay where they are."""

    def send(messages: Sequence[Message]) -> list[Sent | VeilError]:
        return queue.send_batch(messages)

    return through(prepared, send)


def through(
    entries: Sequence[Given | VeilError], call: Callable[[Sequence[Given]], Sequence[Result]]
) -> list[Result | VeilError]:
    """Call `call` with the entries that are no errors; return its results in their places."""
    good = [entry for entry in entries if not isinstance(entry, VeilError)]
    results = iter(call(good) if good else ())
    return [entry if isinstance(entry, VeilError) else next(results) for entry in entries]


def attempt(make: Callable[[Given], Result], given: Given) -> Result | VeilError:
    """The result of `make`, or the typed error that it raises."""
    try:
        return make(given)
    except VeilError as error:
        return error
