"""Who reads the history, and from where on: what is being read is not trimmed meanwhile.

Strategy: a history that is full loses its oldest events all the time, and a reader that begins with them would never
come to read them. So a reader names the offset that it needs next, and until when; trimming spares what comes from
there on. It is a courtesy with bounds: it ends by itself, it lets the history grow by no more than half its size, and
it means nothing on a low disk (history.py). Readers' threads and the writer's call it.
"""

import threading
from typing import Final

HOLDS_MAX: Final = 1_000
"""Of more at once, the ones that end first are forgotten."""


class Holds:
    """The offsets that readers need, of one store. Instants are the store's. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[object, tuple[int, int]] = {}

    def keep(self, reader: object, offset: int, until: int) -> None:
        """Spare what comes from `offset` on until the instant `until`, in the place of what the reader held before."""
        with self._lock:
            self._held[reader] = (until, offset)
            if len(self._held) > HOLDS_MAX:
                del self._held[min(self._held, key=self._held.__getitem__)]

    def release(self, reader: object) -> None:
        """The reader needs nothing more."""
        with self._lock:
            self._held.pop(reader, None)

    def first(self, now: int) -> int | None:
        """The least offset that is held; None if nothing is."""
        with self._lock:
            if not self._held:
                return None
            self._held = {reader: held for reader, held in self._held.items() if held[0] > now}
            return min((offset for _, offset in self._held.values()), default=None)
