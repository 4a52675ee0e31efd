"""What a check of a whole data directory looked at, and what it found."""

from collections.abc import Callable
from typing import Final

import msgspec

PROBLEMS_MAX: Final = 1_000
"""Problems listed; more are only counted."""

Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it, and what there is in all."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is not in order."""

    kind: str
    """`file`, `body`, `quarantine`, `lease`, `message`, `group`, `queue`, `history` or `books`."""
    text: str


class Report(msgspec.Struct):
    """What was looked at, and what was found."""

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
        """Note a problem."""
        self.problems_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(kind, text))
