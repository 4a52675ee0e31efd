"""Result of checking a whole data directory: what was checked, and the problems found."""

from collections.abc import Callable
from typing import Final

import msgspec

PROBLEMS_MAX: Final = 1_000
"""At most this many problems are listed; the rest are only counted."""

Progress = Callable[[str, int, int], None]
"""Called with the stage, the work done and the total."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    kind: str
    """`file`, `body`, `quarantine`, `lease`, `message`, `group`, `queue`, `history` or `books`."""
    text: str


class Report(msgspec.Struct):
    """What was checked, and what was found."""

    queues: int = 0
    messages: int = 0
    leases: int = 0
    body_bytes: int = 0
    events: int = 0
    history_first_offset: int = 0
    books: str = ""
    """`balanced`, `not balanced`, or why they could not be checked."""
    problems: list[Problem] = []
    problems_count: int = 0

    def add(self, kind: str, text: str) -> None:
        """Record a problem."""
        self.problems_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(kind, text))
