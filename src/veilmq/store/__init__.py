"""Stores: the protocol between the shell and whatever keeps the data. Each command that must be atomic is one store
command.

Strategy: a store takes a batch of concurrent commands and the instant to judge them by. It picks a serial order,
writes, and returns one outcome per command. `commit` makes the batch durable; it blocks, in whatever thread the shell
runs it. A store is what passes the contract suite (tests/support/contract). No higher room knows which store it has,
except `engine.directory` and the commands that work on a directory without a server. Everything outside the
batches reads through the store's `Reader` (reader.py).
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
        """Run the batch's statements. Nothing is durable, and no outcome may be sent, before `commit` returns.

        Raises StoreUnknown if the store failed and its state cannot be known: only `close` may be called after that.
        """
        ...

    @property
    def commit_takes_long(self) -> bool:
        """Whether the next `commit` may wait, or do more than make the batch durable. Then run it in a thread."""
        ...

    def commit(self) -> None:
        """Make the applied batch durable. Blocks.

        Raises StoreFailed (rolled back; the store can go on) or StoreUnknown (as in `apply`).
        """
        ...

    def apply_each(self, commands: Sequence[AnyCommand], now: Instant) -> Applied:
        """Apply and commit each command by itself, after a batch failed. Blocks; the outcomes are durable."""
        ...

    def query(self, command: Peek, now: Instant) -> Outcome:
        """Answer from committed state without changing anything. Blocks; any thread."""
        ...

    def close(self) -> None:
        """Release the files. A batch that was not committed is rolled back."""
        ...
