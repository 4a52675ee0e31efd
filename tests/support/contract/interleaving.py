"""Readers beside a writer: they see only committed data, which only grows at its end.

Strategy: readers have their own connections (a peek, the history), and look after every step of the writer: applied,
committed, rolled back, reopened. What was read once never changes, and nothing new appears before it.
"""

from typing import Any

import pytest
from tests.support.contract.stage import TESTER, Stage, expect, sending

from veilmq.model.commands import Peek
from veilmq.model.messages import NO_EXTRAS, Extras
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey

_HISTORY_MAX = 10_000


class _Readers:
    """Two readers of one store, and all that they have seen."""

    def __init__(self, stage: Stage, queue: QueueKey) -> None:
        self._stage = stage
        self._queue = queue
        self.offsets: list[tuple[int, str, int | None]] = []
        self.sequences: list[int] = []

    def look(self) -> int:
        """Read again; returns how many messages are there."""
        stage = self._stage
        events = stage.factory.history(stage.store, 0, _HISTORY_MAX)
        offsets = [(event.offset, event.kind, event.sequence) for event in events]
        assert [offset for offset, _, _ in offsets] == list(range(len(offsets))), "no offset is left out"
        assert offsets[: len(self.offsets)] == self.offsets, "nothing is read before what was read already"
        peek = Peek(queue=self._queue, origin=TESTER, count_max=1_000)
        found = expect(stage.store.query(peek, stage.now), Received).messages
        sequences = [message.sequence for message in found]
        assert sequences == sorted(set(sequences))
        assert sequences[: len(self.sequences)] == self.sequences
        assert [number for _, kind, number in offsets if kind == "sent"] == sequences, "both readers see the same"
        self.offsets, self.sequences = offsets, sequences
        return len(sequences)


class TestInterleaving:
    """Readers and a writer, step by step."""

    @pytest.mark.parametrize("name", ["jobs", "jobs.fifo"])
    def test_a_reader_sees_whole_batches_in_their_order(self, stage: Stage, name: str) -> None:
        fifo: dict[str, Any] = {"content_deduplication": True} if name.endswith(".fifo") else {}
        queue = stage.create(name, **fifo)
        readers = _Readers(stage, queue)
        there = readers.look()
        for round_ in range(12):
            count = 1 + round_ % 4
            extras = Extras(group="g") if fifo else NO_EXTRAS
            commands = [sending(queue, f"{round_} {number}", extras=extras) for number in range(count)]
            assert stage.store.apply(commands, stage.now).wrote
            assert readers.look() == there, "what is applied is not committed yet"
            if round_ % 3 == 2:
                stage.factory.abandon(stage.store)
                assert readers.look() == there, "what was rolled back is not read"
                continue
            stage.store.commit()
            there += count
            assert readers.look() == there
            if round_ % 5 == 4:
                stage.reopen(kill=True)
                assert readers.look() == there
