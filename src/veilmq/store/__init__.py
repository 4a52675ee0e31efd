"""Stores: what must be atomic, behind one small protocol.

Strategy: a store takes a batch of concurrent commands with the instant to judge them by, picks a serial order, writes,
and reports an outcome for each; `commit` makes them durable and blocks meanwhile, in whatever thread the shell chose. A
store is what passes the contract suite (tests/support/contract). Nothing above this room knows which one it has,
but for `engine.open_directory` and what the command line does to a directory that nobody serves. What is read beside
the batches goes through its `Reader` (reader.py).
"""

from collections.abc import Sequence
from typing import Protocol

from veilmq.model.commands import AnyCommand, Peek
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Applied, Outcome
from veilmq.store.directory import DataDirectory
from veilmq.store.reader import Reader, View

__all__ = ["Reader", "Store", "View"]


class Store(Protocol):
    """One batch at a time: apply, commit, apply, commit ... `query` may run beside it, in any thread."""

    @property
    def directory(self) -> DataDirectory:
        """Where the data is."""
        ...

    @property
    def reader(self) -> Reader:
        """Reads what was applied and committed."""
        ...

    @property
    def mark(self) -> Instant:
        """High-water mark of the lease clock, as last committed."""
        ...

    def apply(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        """Run the batch's statements. Nothing is durable, and no outcome may leave, before `commit` returns.

        Raises StoreUnknown if the store failed where its state cannot be known: no further call is allowed but `close`.
        """
        ...

    @property
    def commit_takes_long(self) -> bool:
        """Whether the next `commit` may do more than make the batch durable, or wait: then it belongs in a thread."""
        ...

    def commit(self) -> None:
        """Make the applied batch durable. Blocks.

        Raises StoreFailed (rolled back, the store lives) or StoreUnknown (as in `apply`).
        """
        ...

    def apply_each(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        """Apply and commit each command by itself, after a batch failed. Blocks; the outcomes are durable."""
        ...

    def query(self, command: Peek, now: Instant) -> Outcome:
        """Answer from committed state, changing nothing. Blocks; any thread."""
        ...

    def close(self) -> None:
        """Let the files go. A batch that was not committed is rolled back."""
        ...
