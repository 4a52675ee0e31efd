"""Which events of the history a reader wants: of some kinds, of one queue, of one message.

Strategy: as what a key may see, what a reader wants is decided for each event by its stored fields, before it is joined
with names or written. Offsets count all events, so that a reader goes on where it stopped whatever it leaves out.
"""

from typing import Any, Final, NamedTuple

from veilmq.model.errors import ParameterInvalid
from veilmq.model.events import Kind
from veilmq.store import View

_KINDS: Final = {kind.name.lower(): int(kind) for kind in Kind}


def kinds_of(text: str) -> frozenset[int] | None:
    """Kinds by their names, with commas between; None for no text. Raises ParameterInvalid."""
    names = [name for each in text.split(",") if (name := each.strip().replace(" ", "_"))]
    for name in names:
        if name not in _KINDS:
            raise ParameterInvalid(parameter="kind", reason=f"{name!r} is none of {', '.join(sorted(_KINDS))}")
    return frozenset(_KINDS[name] for name in names) or None


class Wanted(NamedTuple):
    """What is asked for; None: whatever there is."""

    kinds: frozenset[int] | None = None
    queue: str | None = None
    """A name, of whatever account and region, or account/region/name; deleted queues of that name too."""
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
    """What is asked for, with the queues by their incarnations."""

    kinds: frozenset[int] | None
    queues: frozenset[int] | None
    message: bytes | None

    def takes(self, kind: int, queue: int | None, message: bytes | None, detail: dict[str, Any] | None) -> bool:
        """Whether the event is wanted; one that takes a message to another queue is of both."""
        if self.kinds is not None and kind not in self.kinds:
            return False
        if self.queues is not None and queue not in self.queues:
            target = detail.get("target") if detail else None
            if not isinstance(target, int) or target not in self.queues:
                return False
        if self.message is None or message == self.message:
            return True
        return detail is not None and detail.get("target_message") == self.message.hex()
