"""A SQLite store that takes only the steps of the table of states (model/messages/states.py): checked at each commit.

Strategy: after each commit every message is looked up in the store's places (`PLACES`), and the batch's events are
replayed over the table from where the messages were before. A step that the table does not have fails, and so does a
message that is then elsewhere, or whose attempt or rotation is another. Two steps have no event: the end of a delay,
and a raised delay of a FIFO queue.
"""

from collections.abc import Iterable
from typing import Final

import msgspec
from tests.support.sqlite import SqliteFactory

from veilmq.model.commands import AnyCommand
from veilmq.model.events import ENDED_BY_ITSELF, Event, Kind
from veilmq.model.instant import Instant
from veilmq.model.messages.states import STEPS, State
from veilmq.model.outcomes import Outcome
from veilmq.store import Options
from veilmq.store.sqlite.messages import MEMTABLE, MEMTABLE_LEASED, PLACES, ROWS_OF_A_MESSAGE
from veilmq.store.sqlite.store import SqliteStore

_STEPS: Final = {(step.source, step.event): step for step in STEPS}
_SILENT: Final = ("delay ends", "delay is raised (FIFO)")
_NAMES: Final = {
    Kind.RECEIVED: "receive",
    Kind.UNDELIVERED: "undelivered",
    Kind.DELETED: "delete",
    Kind.EXPIRED: "expire",
    Kind.DEAD_LETTERED: "dead-letter",
    Kind.MOVED: "move",
    Kind.QUARANTINED: "quarantine",
    **dict.fromkeys(ENDED_BY_ITSELF, "lease expires"),
}
_USES: Final = {Kind.EXTENDED: "extend", Kind.LEASE_RESUMED: "extend", Kind.RELEASED: "release"}
_CASES: Final = " ".join(f"WHEN {where.rows} THEN {number}" for number, where in enumerate(PLACES) if where.rows)
_FOUND: Final = (
    f"SELECT m.sequence, g.incarnation, CASE {_CASES} END, coalesce(l.attempt, 0), coalesce(l.rotation, 0)"
    f" FROM {ROWS_OF_A_MESSAGE} CROSS JOIN queue g ON g.generation = m.generation AND g.deleted IS NULL"
)


class Standing(msgspec.Struct):
    """Where one message is."""

    queue: int
    state: State
    attempt: int = 0
    rotation: int = 0


def standings(store: SqliteStore) -> dict[int, Standing]:
    """All messages of existing queues, by sequence, as the store has them. No batch is open."""
    writer = store._writer
    found = {}
    for sequence, queue, place, attempt, rotation in writer.connection.execute(_FOUND):
        assert place is not None, f"message {sequence} is in none of the places"
        found[sequence] = Standing(queue, PLACES[place].state, attempt, rotation)
    for sequence, unflushed in writer.memtable.messages.items():
        where = MEMTABLE_LEASED if unflushed.leased else MEMTABLE
        queue = writer.memtable.queues[unflushed.row.generation]
        assert sequence not in found, f"message {sequence} is in two places"
        found[sequence] = Standing(queue.incarnation, where.state, int(unflushed.leased))
    return {sequence: standing for sequence, standing in found.items() if standing.state is not State.GONE}


class SteppingStore(SqliteStore):
    """See the module."""

    def __init__(self, path: object, options: Options) -> None:
        super().__init__(path, options)  # type: ignore[arg-type]
        self._standings = standings(self)
        self.steps_taken: set[tuple[State, str]] = set()

    def commit(self) -> None:
        super().commit()
        self._check_steps()

    def _commit_alone(self, command: AnyCommand, now: Instant) -> Outcome:
        outcome = super()._commit_alone(command, now)
        self._check_steps()
        return outcome

    def _check_steps(self) -> None:
        self._follow(self._writer.events)
        found = standings(self)
        for sequence, told in list(self._standings.items()):
            there = found.pop(sequence, None)
            assert there is not None, f"message {sequence} was {told.state} by its events, and is gone"
            if told.state is not there.state:
                silent = [name for name in _SILENT if self._leads(told.state, name, there.state)]
                assert silent, f"message {sequence} was {told.state} by its events, and is {there.state}"
                self._step(sequence, silent[0])
            assert self._standings[sequence] == there, f"message {sequence}: {told} by its events, and it is {there}"
        assert not found, f"no event tells of messages {sorted(found)}"

    def _follow(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind == Kind.SENT:
                assert event.sequence is not None
                assert event.queue is not None
                is_delayed = event.visible_since != event.sent
                self._standings[event.sequence] = Standing(event.queue, State.DELAYED if is_delayed else State.READY)
            elif event.kind in {Kind.PURGED, Kind.QUEUE_DELETED}:
                for sequence in [each for each, known in self._standings.items() if known.queue == event.queue]:
                    self._step(sequence, "purge")
            elif event.sequence is not None and (name := self._name(event)) is not None:
                self._take(event.sequence, name, event)
                detail = event.detail or {}
                if "target_sequence" in detail:
                    state = State.READY if event.visible_since is None else State.RETURNED
                    self._standings[detail["target_sequence"]] = Standing(detail["target"], state)

    def _name(self, event: Event) -> str | None:
        """The event's name in the table; None if it is no step."""
        if event.kind == Kind.DEAD_LETTERED and (event.detail or {}).get("expired"):
            return "expire"
        known = self._standings.get(event.sequence or 0)
        if event.kind == Kind.DEAD_LETTERED and known is not None and known.state is State.IN_FLIGHT:
            return "dead-letter (push)"
        use = _USES.get(Kind(event.kind))
        if event.kind == Kind.RELEASED_FOR_RETRY:
            use = "extend" if event.lease_us else "release"
        if use is None:
            return _NAMES.get(Kind(event.kind))
        if not event.attempt:
            return f"{use} (attempt 0)"
        assert known is not None
        return f"{use} after expiry" if known.state is State.RETURNED else use

    def _take(self, sequence: int, name: str, event: Event) -> None:
        known = self._standings[sequence]
        if (known.state, name) not in _STEPS and known.state is State.DELAYED:
            self._step(sequence, "delay ends")
        self._step(sequence, name, rotates=event.rotation == known.rotation + 1)
        told = (event.attempt, event.rotation)
        assert told == (known.attempt, known.rotation), f"message {sequence}, {name}: {told} in the event, not {known}"

    def _step(self, sequence: int, name: str, *, rotates: bool = False) -> None:
        known = self._standings[sequence]
        step = _STEPS.get((known.state, name))
        assert step is not None, f"message {sequence}: the table has no step {name!r} from {known.state}"
        self.steps_taken.add((known.state, name))
        known.state = step.target
        known.attempt += step.raises_attempt
        known.rotation += step.raises_rotation and rotates
        if step.target is State.GONE:
            del self._standings[sequence]

    @staticmethod
    def _leads(source: State, name: str, target: State) -> bool:
        step = _STEPS.get((source, name))
        return step is not None and step.target is target


class SteppingFactory(SqliteFactory):
    """Opens such stores."""

    kind = SteppingStore
