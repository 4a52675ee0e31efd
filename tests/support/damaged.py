"""Directories to damage, and what they held: for the tests of `check` and `check --repair`.

Strategy: a store lives a little of everything, part of it in the database, part in the WAL, part in the redo log, and
is killed. Each message that was acknowledged is known by its body. `differences` receives all that a directory still
has and compares.
"""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec
from tests.support.acknowledged import everything_in
from tests.support.contract.stage import Stage
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US, Instant
from veilmq.model.messages import Attribute, Extras
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.directory import DatabaseFailed, DatabaseUnusable, NotOurs
from veilmq.store.sqlite.repair import Repair
from veilmq.store.sqlite.repair.repair import repair
from veilmq.store.sqlite.store import SqliteStore
from veilmq.store.sqlite.tools import check

FILES: Final = ("veilmq.db", "veilmq.db-wal", "redo", "committed")
_OPTIONS: Final = msgspec.structs.replace(SMALL, redo_bytes=16 * 1024)


Content = tuple[str, Extras]
"""Where a message is, and what goes with its body."""


class Lived(msgspec.Struct):
    """A killed directory and what it must hold."""

    directory: Path
    now: Instant
    there: dict[str, Content] = {}
    """By body."""
    gone: set[str] = msgspec.field(default_factory=set)
    """Bodies of deleted messages."""
    rows: dict[str, list[str]] = {}
    """Every row of every table of the database, by table."""

    def copy(self, to: Path) -> Path:
        """A copy of the directory."""
        to.mkdir(mode=0o700)
        for name in FILES:
            if (self.directory / name).exists():
                shutil.copyfile(self.directory / name, to / name)
        return to

    def differences(self, directory: Path) -> list[str]:
        """Acknowledged messages that are not there, and deleted ones that are."""
        store = SqliteStore(directory, _OPTIONS)
        try:
            held = self._held(store)
        finally:
            store.close()
        kept = self.there.items()
        return [
            *(f"{body} is lost" for body, _ in kept if body not in held),
            *(f"{body} has {held[body]}" for body, content in kept if held.get(body, content) != content),
            *(f"{body} is back" for body in held.keys() & self.gone),
            *(f"{body} was never sent" for body in held.keys() - self.there.keys() - self.gone),
        ]

    def differing(self, directory: Path) -> list[str]:
        """Tables that do not hold what they held. The directory is not changed."""
        found = rows_of(directory / "veilmq.db")
        return [f"table {name} differs" for name in self.rows if self.rows[name] != found.get(name)]

    def _held(self, store: SqliteStore) -> dict[str, Content]:
        held: dict[str, Content] = {}
        later = Instant(self.now + 8 * DAY_US - HOUR_US)
        for queue in list(store.reader.queues):
            held |= {message.body: (queue.name, message.extras) for message in everything_in(store, queue, later)}
        return held


def live(directory: Path, *, body_bytes: int = 60, closed: bool = False, rounds: int = 1) -> Lived:
    """A directory in which everything happened; killed, or closed, so that all is in the database. In more rounds there
    is more of it."""
    stage = Stage(SqliteFactory(directory, _OPTIONS))
    lived = Lived(directory, stage.now, {}, set())
    number = 0
    kept: dict[str, Any] = {"retention_us": 14 * DAY_US}

    def send(queue: QueueKey, **fields: Any) -> None:
        nonlocal number
        number += 1
        body = f"message {number} of {queue.name} ".ljust(body_bytes, "x")
        stage.send(queue, body, **fields)
        extras = fields.get("extras", Extras())
        lived.there[body] = (queue.name, extras)

    def delete(queue: QueueKey, count: int = 1) -> None:
        for message in stage.receive(queue, count):
            stage.delete(queue, message.handle)
            del lived.there[message.body]
            lived.gone.add(message.body)

    def life(jobs: QueueKey, fifo: QueueKey, tenants: QueueKey) -> None:
        for _ in range(4):
            send(jobs)
            send(jobs, extras=Extras(attributes=(Attribute("kind", "String", "value"),)))
            send(jobs, delay_us=20 * SECOND_US)
            for group in "ab":
                send(fifo, extras=Extras(group=group, deduplication_id=str(number)))
                send(tenants, extras=Extras(group=group))
        delete(jobs, 2)
        delete(fifo)
        extended, released = stage.receive(jobs, 2, lease_us=600 * SECOND_US)
        stage.extend(jobs, extended.handle, 900 * SECOND_US)
        stage.extend(jobs, released.handle, 0)
        stage.receive(tenants, 1, lease_us=600 * SECOND_US)
        stage.later(SECOND_US)
        stage.sweep()

    dead = stage.create("dead", **kept)
    jobs = stage.create("jobs", redrive=RedrivePolicy(dead, 100), **kept)
    fifo = stage.create("jobs.fifo", **kept)
    tenants = stage.create("tenants", **kept)
    life(jobs, fifo, tenants)
    send(dead)
    stage.reopen()  # what was so far is in the database
    for _ in range(rounds):
        life(jobs, fifo, tenants)  # in the WAL
    plain = stage.create("plain", **kept)
    stage.sweep()
    for _ in range(4):  # in the redo log
        send(plain)
        send(plain)
        delete(plain)
    if closed:
        stage.store.close()
    else:
        stage.factory.kill(stage.store)
    lived.now = stage.now
    whole = lived.copy(directory.with_name("whole"))
    lived.rows = rows_of(whole / "veilmq.db")
    return lived


def rows_of(database: Path) -> dict[str, list[str]]:
    """Every row of every table, by table; without what only the redo log has."""
    with closing(apsw.Connection(str(database))) as connection:
        names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        return {str(name): [*map(repr, connection.execute(f"SELECT * FROM {name}"))] for (name,) in names}


class Verdict(msgspec.Struct):
    """What a damage did."""

    told: list[str]
    """What `check` and a start say."""
    differences: list[str]
    """After a start on the damaged directory, if that said nothing; else after the repair."""
    repair: Repair | None = None

    @property
    def name(self) -> str:
        """harmless, silent; or how it was repaired: in full, more cautiously than needed, in part, without a word."""
        if self.repair is None:
            return "silent" if self.differences else "harmless"
        if not self.differences:
            return "full" if self.repair.is_whole else "full, but uncertain"
        return "lost silently" if self.repair.is_whole else "partly"


def judge(lived: Lived, directory: Path, scratch: Path, backup: Path | None = None) -> Verdict:
    """Look at a damaged copy; repair it if that is told."""
    told: list[str] = []
    try:
        told = [problem.text for problem in check(directory / "veilmq.db").problems]
    except (DatabaseFailed, NotOurs) as error:
        told = [str(error)]
    if not told:
        try:
            differing = lived.differing(directory)
            return Verdict([], [*differing, *lived.differences(directory)])
        except (NotOurs, DatabaseUnusable) as error:
            told = [str(error)]
    shutil.rmtree(scratch, ignore_errors=True)
    report = repair(directory, scratch, backup, lambda stage, done, total: None)
    assert not report.problems, report.problems
    return Verdict(told, lived.differences(scratch), report)
