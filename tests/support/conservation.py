"""The conservation law: of every queue, sent + moved in = live + deleted + expired + purged + moved out + quarantined.

Strategy: the ledger is computed from the history alone, so that it can check the store's own figures.
"""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from veilmq.model.events import EventRecord, Kind


class Ledger(msgspec.Struct):
    """What one incarnation of a queue got and lost."""

    sent: int = 0
    moved_in: int = 0
    deleted: int = 0
    expired: int = 0
    purged: int = 0
    moved_out: int = 0
    quarantined: int = 0

    @property
    def live(self) -> int:
        """The number of messages that the queue holds by the law."""
        lost = self.deleted + self.expired + self.purged + self.moved_out + self.quarantined
        return self.sent + self.moved_in - lost


def ledgers(events: Iterable[EventRecord]) -> dict[int, Ledger]:
    """A ledger for each incarnation that the history names; the history must be whole."""
    books: dict[int, Ledger] = defaultdict(Ledger)
    for event in events:
        if event.incarnation is None:
            continue
        book = books[event.incarnation]
        match event.kind:
            case "sent":
                book.sent += 1
            case "deleted":
                book.deleted += 1
            case "expired":
                book.expired += 1
            case "quarantined":
                book.quarantined += 1
            case "purged" | "queue_deleted":
                assert event.detail is not None
                book.purged += event.detail["count"]
            case "dead_lettered" | "moved":
                assert event.detail is not None
                book.moved_out += 1
                books[event.detail["target"]].moved_in += 1
            case other:
                assert other.upper() in Kind.__members__, other
    return books
