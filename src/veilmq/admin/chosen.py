"""Filters of the history: by kind, queue and message.

Strategy: like a key's scope, a filter is applied to each event's stored fields, before names are joined or anything is
written. Offsets count all events, so a reader continues at the same place whatever it filters out.
"""

from typing import Any, Final, NamedTuple

from veilmq.model.errors import ParameterInvalid
from veilmq.model.events import Kind
from veilmq.store import View

_KINDS: Final = {kind.name.lower(): int(kind) for kind in Kind}


def kinds_of(text: str) -> frozenset[int] | None:
    """Kinds from a comma-separated list; None for an empty text. Raises ParameterInvalid."""
    names = [name for each in text.split(",") if (name := each.strip().replace(" ", "_"))]
    for name in names:
        if name not in _KINDS:
            raise ParameterInvalid(parameter="kind", reason=f"{name!r} is none of {', '.join(sorted(_KINDS))}")
    return frozenset(_KINDS[name] for name in names) or None


class Wanted(NamedTuple):
    """The requested filter; None in a field: no filter."""

    kinds: frozenset[int] | None = None
    queue: str | None = None
    """A name in any account and region, or account/region/name; includes deleted queues."""
    message: bytes | None = None

    def chosen(self, view: View) -> "Chosen | None":
        """What decides about stored events; None if all are wanted."""
        if self == (None, None, None):
            return None
        queues = None
        if self.queue is not None:
            queues = frozenset(view.incarnations_named(*self.queue.split("/")))
        return Chosen(self.kinds, queues, self.message)


class Chosen(NamedTuple):
    """The filter with queues by incarnation."""

    kinds: frozenset[int] | None
    queues: frozenset[int] | None
    message: bytes | None

    def takes(self, kind: int, queue: int | None, message: bytes | None, detail: dict[str, Any] | None) -> bool:
        """Whether the event is wanted; an event that moves a message belongs to both queues."""
        if self.kinds is not None and kind not in self.kinds:
            return False
        if self.queues is not None and queue not in self.queues:
            target = detail.get("target") if detail else None
            if not isinstance(target, int) or target not in self.queues:
                return False
        if self.message is None or message == self.message:
            return True
        return detail is not None and detail.get("target_message") == self.message.hex()
