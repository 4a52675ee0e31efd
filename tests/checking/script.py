"""Short histories by hand: one call a line, its begin and its end in seconds."""

from typing import Any, Final

from veilmq.checking import check
from veilmq.checking.log import Grant, Kind, Operation, Outcome
from veilmq.checking.report import Promises, Report

SECOND: Final = 1_000_000
EXACT: Final = Promises(tolerance_us=0)
"""A thousandth of each duration is still allowed."""


class Script:
    """`report()` checks what was written so far."""

    def __init__(self, queue: str = "jobs") -> None:
        self.queue = queue
        self.log: list[Operation] = []

    def _add(self, kind: Kind, begin: float, end: float | None, outcome: Outcome, **fields: Any) -> None:
        given = {"queue": self.queue, "client": "c", **fields}
        returned = None if end is None else round(end * SECOND)
        number = len(self.log) + 1
        invoked = round(begin * SECOND)
        self.log.append(
            Operation(number=number, kind=kind, invoked=invoked, returned=returned, outcome=outcome, **given)
        )

    def send(self, message: str, begin: float, end: float, outcome: Outcome = Outcome.OK, **fields: Any) -> None:
        """With the id as its body."""
        fields = {"body": message, **fields}
        self._add(Kind.SEND, begin, end, outcome, message=message if outcome is Outcome.OK else "", **fields)

    def receive(self, begin: float, end: float, *grants: Grant, **fields: Any) -> None:
        self._add(Kind.RECEIVE, begin, end, Outcome.OK, grants=grants, **fields)

    def use(
        self, kind: Kind, lease: int, begin: float, end: float, outcome: Outcome = Outcome.OK, **fields: Any
    ) -> None:
        if "seconds" in fields:
            fields["lease_us"] = round(fields.pop("seconds") * SECOND)
        self._add(kind, begin, end, outcome, lease=lease, **fields)

    def extend(self, *given: Any, **fields: Any) -> None:
        self.use(Kind.EXTEND, *given, **fields)

    def release(self, *given: Any, **fields: Any) -> None:
        self.use(Kind.RELEASE, *given, **fields)

    def delete(self, *given: Any, **fields: Any) -> None:
        self.use(Kind.DELETE, *given, **fields)

    def purge(self, begin: float, end: float, outcome: Outcome = Outcome.OK, **fields: Any) -> None:
        self._add(Kind.PURGE, begin, end, outcome, **fields)

    def drain(self, begin: float, end: float | None, outcome: Outcome = Outcome.OK, **fields: Any) -> None:
        self._add(Kind.DRAIN, begin, end, outcome, **fields)

    def report(self, promises: Promises = EXACT) -> Report:
        return check(self.log, promises)

    def found(self, promises: Promises = EXACT) -> list[str]:
        """Names of the broken rules."""
        return sorted(rule.name for rule in self.report(promises).counts)


def grant(message: str, lease: int, seconds: float = 30, **fields: Any) -> Grant:
    """Of a message whose body is its id."""
    return Grant(**{"message": message, "lease": lease, "lease_us": round(seconds * SECOND), "body": message, **fields})
