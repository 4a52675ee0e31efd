"""Why messages of a queue failed: failures of one kind, with the same type of error and alike first lines, are a cause.

Strategy: lines are alike if they differ only in words with a digit, such as ids. Words of fewer than four characters
count, because `404` and `500` are not the same. A cause keeps its count and the newest line and message as the example.
The first causes of a minute are kept, `CAUSES_MAX` of them; of the others only the number is known, from the counts.
"""

import re
from typing import Final, NamedTuple

import msgspec

CAUSES_MAX: Final = 16
"""Of one queue and minute."""
LINE_CHARACTERS_MAX: Final = 160
"""Of an error's first line; at most 640 bytes."""
_VARYING: Final = re.compile(r"(?<![\w-])(?=[\w-]*\d)[\w-]{4,}")


class Cause(NamedTuple):
    """What failures have in common."""

    kind: int
    error_type: str
    alike: str


class Seen(msgspec.Struct, array_like=True, gc=False):
    """The failures of one cause, as stored."""

    kind: int
    """Key of the count (veilmq.store.rollups)."""
    error_type: str
    error: str
    """First line of the newest."""
    count: int
    first: int
    newest: int
    message: bytes
    """Of the newest."""

    def cause(self) -> Cause:
        """What they have in common."""
        return Cause(self.kind, self.error_type, _VARYING.sub("#", self.error))

    def add(self, later: "Seen") -> None:
        """Add what was seen later."""
        self.count += later.count
        self.first = min(self.first, later.first)
        if later.newest >= self.newest:
            self.newest, self.message, self.error = later.newest, later.message, later.error


class Causes:
    """Of one queue and minute."""

    __slots__ = ("found",)

    def __init__(self, seen: list[Seen] | None = None) -> None:
        self.found = {each.cause(): each for each in seen or ()}

    def add(self, seen: Seen) -> None:
        """Add failures of one cause."""
        cause = seen.cause()
        known = self.found.get(cause)
        if known is not None:
            known.add(seen)
        elif len(self.found) < CAUSES_MAX:
            self.found[cause] = seen

    def copy(self) -> "Causes":
        """A copy that does not change with this one."""
        return Causes([msgspec.structs.replace(each) for each in self.found.values()])
