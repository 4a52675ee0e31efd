"""The idempotency guard: what was done once is not done again.

Strategy: a record a key says "in progress" or "done, with this result". `judge` alone decides, as a pure function over
the record that is there; a guard stores it and makes reading and writing one step. A record in progress is taken over
by a later delivery of the same message (the queue has fenced the earlier one off), by anybody once its `until` is over,
and by nobody else: the other waits. Each takeover raises the fence, and only the holder of the newest fence may finish.
A handler that extends its lease moves `until` along, where the guard is a `Prolonging` one.

Source: document 003, 3 ("idempotent and resume-able").
"""

from typing import Any, Protocol, TypeGuard, runtime_checkable

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """Who wants to do the work of a key."""

    owner: str
    """Queue and message id."""
    attempt: int
    """Receive count of the message."""
    now: float
    """Unix seconds."""
    until: float
    """Unix seconds: from then on the owner cannot hold its message any more."""


class Record(msgspec.Struct, frozen=True):
    """What is known of a key."""

    fence: int
    owner: str
    attempt: int
    until: float
    done: bool = False
    result: Any = None
    """What JSON can say."""


class Begun(msgspec.Struct, frozen=True):
    """Do the work; then `finish` or `abandon` with this fence."""

    fence: int


class Done(msgspec.Struct, frozen=True):
    """Somebody has done it."""

    result: Any


class Busy(msgspec.Struct, frozen=True):
    """Somebody else is at it."""

    until: float
    """Unix seconds: by then it is done, or may be taken over."""


Answer = Begun | Done | Busy


class Superseded(Exception):
    """A newer claim took the key over: this result was not stored."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} was taken over by a newer delivery")
        self.key = key


class Guard(Protocol):
    """Records by key. Any thread, any process. Implementations raise what their storage raises."""

    def begin(self, key: str, claim: Claim) -> Answer:
        """Claim the key, in one step with the look whether that is possible."""
        ...

    def finish(self, key: str, fence: int, result: Any) -> None:
        """Durable when this returns. Raises Superseded, and TypeError for a result that JSON cannot say."""
        ...

    def abandon(self, key: str, fence: int) -> None:
        """The work was not done, and the next delivery may begin; nothing happens if the fence is not the newest."""
        ...


@runtime_checkable
class Prolonging(Protocol):
    """What a guard may do besides. Without it a claim ends where the lease would have ended when its work began."""

    def prolong(self, key: str, fence: int, now: float, until: float) -> None:
        """The owner holds its message until `until` at least; both as in `Claim`. Raises Superseded."""
        ...


def judge(record: Record | None, claim: Claim) -> Record | Done | Busy:
    """What a claim comes to: the record to write, or why there is none to write."""
    if record is None:
        return Record(fence=1, owner=claim.owner, attempt=claim.attempt, until=claim.until)
    if record.done:
        return Done(record.result)
    later = record.owner == claim.owner and record.attempt < claim.attempt
    if not later and claim.now < record.until:
        return Busy(record.until)
    return Record(fence=record.fence + 1, owner=claim.owner, attempt=claim.attempt, until=claim.until)


def _is_held(record: Record | None, fence: int) -> TypeGuard[Record]:
    """Whether the work is in progress under that fence."""
    return record is not None and record.fence == fence and not record.done


def finished(record: Record | None, key: str, fence: int, result: Any) -> Record:
    """The record of the finished work. Raises Superseded."""
    if not _is_held(record, fence):
        raise Superseded(key)
    return msgspec.structs.replace(record, done=True, result=result)


def prolonged(record: Record | None, key: str, fence: int, until: float) -> Record | None:
    """The record of a claim that lasts until `until`; None: nothing to write. Raises Superseded."""
    if not _is_held(record, fence):
        raise Superseded(key)
    return msgspec.structs.replace(record, until=until) if until > record.until else None


def abandoned(record: Record | None, fence: int) -> Record | None:
    """The record of a key that the next delivery may begin at once; None: nothing to write."""
    if not _is_held(record, fence):
        return None
    return msgspec.structs.replace(record, owner="", until=0.0)
