"""`veilmq check --repair`: what can be had of a damaged data directory, in a new one. Here is its report: what a repair
found, and what it could not bring back.
"""

import json
from base64 import b64encode
from pathlib import Path
from typing import IO, Any, Final

import msgspec

MISSING_MAX: Final = 1_000
"""At most this many messages of a kind are listed; the rest are only counted."""


class QueueContent(msgspec.Struct):
    """What a queue of the new directory holds."""

    queue: str
    visible: int = 0
    delayed: int = 0
    in_flight: int = 0
    quarantined: int = 0
    missing: int = 0
    """Messages that were in it for certain, and whose content is nowhere."""


class MissingMessage(msgspec.Struct, frozen=True):
    """A message that was in a queue for certain, and whose content is nowhere."""

    queue: str
    id: str
    sequence: int
    sent: int


class Repair(msgspec.Struct):
    """A repair's report."""

    directory: str = ""
    found: list[str] = []
    """What was found where, a line each."""
    queues: list[QueueContent] = []
    missing: list[MissingMessage] = []
    missing_count: int = 0
    unsure_count: int = 0
    """Messages that are nowhere, and were in a queue before events that are missing."""
    again_count: int = 0
    earlier_count: int = 0
    """Messages whose body was updated, and which came from a place that may have an earlier one."""
    events_missing: int = 0
    """Events that were committed and are nowhere: what they did is not known."""
    pages_wrong: int = 0
    """Pages that do not match their checksums: what their rows say may be wrong."""
    may_miss: bool = False
    """Whether messages may be missing of which nothing is known."""
    tables_in_doubt: list[str] = []
    """Tables beside that of the messages whose rows may be missing, and follow from nothing else."""
    exported: int = 0
    """Rows that have no place in the new directory."""
    export: str = ""
    """The file that has them."""
    problems: list[str] = []
    """What `veilmq check` says about the new directory."""

    @property
    def is_whole(self) -> bool:
        """Whether everything that was acknowledged is in its place."""
        quarantined = any(each.quarantined for each in self.queues)
        short = self.missing_count or self.events_missing or self.may_miss or self.tables_in_doubt or self.exported
        unsure = self.again_count or self.earlier_count or self.pages_wrong or self.unsure_count
        return not (short or unsure or self.problems or quarantined)

    def of(self, queue: str) -> QueueContent:
        """The queue's line."""
        for each in self.queues:
            if each.queue == queue:
                return each
        self.queues.append(QueueContent(queue))
        return self.queues[-1]

    def miss(self, message: MissingMessage, *, is_sure: bool) -> None:
        """Record a missing message, or one that may have left."""
        if not is_sure:
            self.unsure_count += 1
            if self.unsure_count <= MISSING_MAX:
                self.found.append(f"message {message.id} of {message.queue} is missing, unless it had left")
            return
        self.missing_count += 1
        self.of(message.queue).missing += 1
        if len(self.missing) < MISSING_MAX:
            self.missing.append(message)

    def note_earlier(self, message: str) -> None:
        """Record a message that may have an earlier body."""
        self.earlier_count += 1
        if self.earlier_count <= MISSING_MAX:
            self.found.append(f"message {message}: its body had been updated, and this may be an earlier one")


class Export:
    """A file of JSON lines with the rows that have no place in the new directory; made with the first row."""

    def __init__(self, path: Path, report: Repair) -> None:
        self._path = path
        self._report = report
        self._file: IO[str] | None = None

    def add(self, table: str, row: tuple[Any, ...], reason: str) -> None:
        """Write a row, blobs in base64."""
        if self._file is None:
            self._file = self._path.open("x", encoding="utf-8")
            self._path.chmod(0o600)
            self._report.export = str(self._path)
        self._report.exported += 1
        line = {"table": table, "reason": reason, "row": row}
        self._file.write(json.dumps(line, default=lambda blob: {"base64": b64encode(blob).decode()}) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
