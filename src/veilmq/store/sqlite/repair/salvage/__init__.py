"""Takes over every row that can be read, and looks elsewhere for those that cannot.

Strategy: copy the tables row by row into a new database. Where rows may be missing, the range of their numbers is in
doubt: only there do older versions of the damaged pages, pages that no table leads to any more, and the backup count.
The history decides which messages had left, and which are missing; what it does not know is delivered again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import apsw
import msgspec

from veilmq.model.messages import id_text
from veilmq.model.wording import counted
from veilmq.store.sqlite.disk.redo import Entry
from veilmq.store.sqlite.disk.rows import MessageRow, readable_row
from veilmq.store.sqlite.raw import Accepts, Gap, Image, Row, Values, leaf_rows, rows
from veilmq.store.sqlite.raw.free_list import free_pages
from veilmq.store.sqlite.raw.logs import Frame, is_whole, mended_message
from veilmq.store.sqlite.repair import Export, MissingMessage, Repair
from veilmq.store.sqlite.repair.salvage.tables import EVENTS, JOURNAL, Backup, Table, accepts_schema, read, tables
from veilmq.store.sqlite.tools.backup import OWN
from veilmq.store.sqlite.tools.books import Entered, Facts, Recorded, entered, incarnations

NUMBER_MAX: Final = (1 << 63) - 1
_LEFT_OUT: Final = frozenset(
    {"secret", "receive_attempt", "redo_log", "snapshot", "history_index", "rollup_mark", *OWN}
)
"""Tables that mean nothing in the new database: it has a key of its own, nobody is signed in there, and its history
begins with a snapshot."""
_DERIVED: Final = _LEFT_OUT | {
    "mark", "last_number", "message_group", "quarantine", "rollup_minute", "rollup_hour", "rollup_period",
}  # fmt: skip
"""Tables that follow from others, or only count what they hold."""
STRAYS: Final = (
    "SELECT sequence FROM message WHERE generation NOT IN (SELECT generation FROM queue WHERE deleted IS NULL)"
    " AND generation NOT IN (SELECT generation FROM garbage)"
)
"""Messages of no queue."""
_NAMED: Final = "SELECT incarnation, account || '/' || region || '/' || name FROM queue"
_GONE: Final = "SELECT generation FROM garbage UNION SELECT generation FROM queue WHERE deleted IS NOT NULL"
_LEASE: Final = (
    "INSERT INTO lease (sequence, generation, line, in_line, hidden, due, attempt, rotation, granted, first, origin)"
    " SELECT sequence, generation, line, in_line, 1, ?, ?, 0, ?, ?, ? FROM message WHERE sequence = ?"
    " ON CONFLICT DO UPDATE SET (hidden, due, attempt, granted, first, origin) = (1, excluded.due, excluded.attempt,"
    " excluded.granted, ifnull(first, excluded.first), excluded.origin) WHERE attempt < excluded.attempt"
)
"""The lease that the history knows, unless the row is as new."""
_EVENTS_AT: Final = "SELECT events FROM history WHERE offset = ?"
_OF_MESSAGES: Final = ("message", "memtable")
_FILLED: Final = ("queue", "topic", "subscription", "message", "lease", "origin")
_OFFSET: Final = "SELECT offset FROM mark"
_HIGHEST: Final = "SELECT max(ifnull((SELECT max(sequence) FROM message), 0), ifnull((SELECT sequence FROM mark), 0))"

Range = tuple[int, int]
"""The first and the last number of rows that may be missing."""


class Salvage:
    """The rows of one damaged database, on their way into a new one."""

    def __init__(
        self, target: apsw.Connection, image: Image, frames: Sequence[Frame], report: Repair, export: Export
    ) -> None:
        """target: a new database, in a transaction. frames: everything in the WAL."""
        self.target = target
        self.report = report
        self.export = export
        self.damaged: dict[int, bytes] = {}
        """Messages that cannot be delivered: ids by sequence."""
        self.facts = Facts(self._is_wanted, self._has)
        self.history_is_whole = True
        self.asks_of_all = False  # what the history knows: a whole page in the place of another leaves no gap
        self.names_are_damaged = False
        """Whether an index has another name for a queue than its row: then the history decides."""
        self._image = image
        self._frames = frames
        self._tables = tables(target)
        self._doubt: dict[str, list[Range]] = {name: [] for name in self._tables}
        self._seen: set[int] = set()
        self._root_of = self._roots()
        self._astray: list[Values] = []
        """Messages whose sequence is not what it was."""
        self._journal: dict[int, MessageRow] = {}
        self._strays: set[int] = set()
        self._listed: dict[int, int] = {}
        """Generations of messages that have no row, but an entry in an index or a lease: a page was lost unnoticed."""
        self._fillable: set[int] = set()  # of these, but not of a queue whose row is certainly gone
        self._first_event = NUMBER_MAX

    def in_doubt(self, table: str, number: int) -> bool:
        """Whether that row may be missing."""
        is_listed = table == "message" and number in self._fillable
        return is_listed or any(low <= number <= high for low, high in self._doubt[table])

    def doubt_everything(self) -> None:
        """Some page is not the newest, and nobody knows which: any row may be missing."""
        for ranges in self._doubt.values():
            ranges.append((0, NUMBER_MAX))

    def _is_wanted(self, sequence: int) -> bool:
        is_kept = sequence in self._journal or sequence in self._strays or sequence in self.damaged
        return is_kept or self.in_doubt("message", sequence) or bool(self._doubt["memtable"])

    def _has(self, sequence: int) -> bool | None:
        return self._is_there(self._tables["message"], sequence) if self.asks_of_all else None

    def copy(self) -> None:
        """Take over all tables."""
        self.target.execute("DELETE FROM expiry_hold")
        for name, table in self._tables.items():
            if name not in _LEFT_OUT and name in self._root_of:
                self._copy(table, self._root_of[name])
        doubted = [name for name, ranges in self._doubt.items() if ranges and name not in _LEFT_OUT]
        for name in doubted:
            self.report.found.append(f"veilmq.db: table {name} has pages that cannot be read, or not to the end")
        self.report.tables_in_doubt = sorted({*doubted}.difference(_DERIVED, _OF_MESSAGES))

    def note_listed(self, messages: Iterable[tuple[int, int]]) -> None:
        """Put those of these sequences (with generations) that have no row in doubt: a whole page was lost."""
        table, gone = self._tables["message"], {of for (of,) in read(self.target, _GONE)}
        self._listed = {each: of for each, of in messages if of not in gone and not self._is_there(table, each)}
        live = incarnations(self.target)
        self._fillable = {each for each, of in self._listed.items() if of in live or self._doubt["queue"]}

    def keys(self) -> list[bytes]:
        """The receipt keys with which the redo log may have been written."""
        table = self._tables["secret"]
        found = rows(self._image, self._root_of.get("secret", 0), table.accepts, set(), set())
        return [each.values[1] for each in found if isinstance(each, Row)]

    def _roots(self) -> dict[str, int]:
        """Root pages by table. If the schema cannot be read to the end, the others are where a new database has them;
        else there are no others: the database is of an older release."""
        new = read(self.target, "SELECT name, rootpage FROM sqlite_schema WHERE type = 'table'")
        roots: dict[str, int] = {}
        is_whole = True
        for each in rows(self._image, 1, accepts_schema, set(), self._seen):
            if isinstance(each, Gap):
                is_whole = False
            elif each.values[0] == "table" and each.values[1] in self._tables:
                roots[each.values[1]] = each.values[3]
        return roots if is_whole and "message" in roots else dict(new) | roots

    def _copy(self, table: Table, root: int) -> None:
        last, is_open = -1, False
        for each in rows(self._image, root, table.accepts, self._image.suspects, self._seen):
            if isinstance(each, Gap):
                is_open = True
                continue
            row = table.row(each.rowid, each.values)
            if each.is_misplaced or each.rowid <= last:
                if table.name == "message":
                    self._astray.append(row)
                else:
                    self.export.add(table.name, row, "its number is not what it was")
                is_open = True
                continue
            if is_open:
                self._doubt[table.name].append((last, each.rowid))
                is_open = False
            last = each.rowid
            self._take(table, row, "the database has two of them")
        if is_open:
            self._doubt[table.name].append((last, NUMBER_MAX))

    def _take(self, table: Table, row: Values, reason: str) -> bool:
        """Insert a row. One that cannot be there twice goes into the export."""
        plain = readable_row(row)
        try:
            self.target.execute(table.insert, plain)
        except apsw.FullError:  # the row is not to blame, and SQLite may have rolled back
            raise
        except apsw.Error as error:
            self.export.add(table.name, row, str(error))
            return False
        if not self.target.changes():
            self.export.add(table.name, row, reason)
            return False
        if plain != row:
            self.report.found.append(f"{table.name} {row[0]}: its text is damaged")
        if table.name == "message":
            if plain != row:
                self.damaged[row[0]] = row[5]
            elif not is_whole(row[13], row[12], row[11]):
                self._mend(row)
        return True

    def _mend(self, row: Values) -> None:
        """Flip the one bit back that makes a message whole again, or remember that it is damaged."""
        if (mended := mended_message(*row[11:])) is None:
            self.damaged[row[0]] = row[5]
            return
        self.target.execute("UPDATE message SET (extras, md5, body) = (?, ?, ?) WHERE sequence = ?", (*mended, row[0]))
        self.report.found.append(f"message {id_text(row[5])}: one bit of it was flipped back")

    def read_journal(self, entries: Iterable[Entry]) -> None:
        """Learn of the messages that have no rows yet. entries: of the redo log, by offset."""
        for entry in entries:
            row = (entry.offset, entry.count, entry.at, entry.bytes_before, entry.version, entry.events)
            self.target.execute("INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?, ?, ?)", row)
            self._journal |= {each.sequence: each for each in entry.messages}
        for offset, packed in read(self.target, "SELECT offset, messages FROM memtable"):
            try:
                self._journal |= {each.sequence: each for each in JOURNAL.decode(packed)}
            except (ValueError, RecursionError):
                self.export.add("memtable", (offset, packed), "it cannot be decoded")
                self.report.may_miss = True
        self.target.execute("DELETE FROM memtable")

    def learn(self) -> None:
        """Read the history for what it says about the rows in doubt. Rows that cannot be decoded are dropped."""
        self._strays = {sequence for (sequence,) in self.target.execute(STRAYS)}
        expected: int | None = None
        broken: list[Values] = []
        rows_of_history: Any = self.target.cursor().execute("SELECT * FROM history ORDER BY offset")
        for row in rows_of_history:
            offset, count, *_, packed = row
            if expected not in (None, offset):
                self.history_is_whole = False
                self.facts.forget()
            self._first_event = min(self._first_event, offset)
            expected = offset + count
            try:
                self.facts.learn(EVENTS.decode(packed))
            except (ValueError, RecursionError):
                broken.append(row)
                self.facts.forget()
        for row in broken:
            self.history_is_whole = False
            self.export.add("history", row, "it cannot be decoded")
            self.target.execute("DELETE FROM history WHERE offset = ?", (row[0],))
        self.history_is_whole &= self._first_event == 0 or self.facts.has_snapshot
        if any(high == NUMBER_MAX for _, high in self._doubt["history"]):
            self.facts.forget()

    def reconcile_times(self, clock: int) -> None:
        """Where a row and the history disagree about a time, keep the later one: nothing expires by a flipped bit."""
        recorded = Recorded(self.target, [])
        differ: list[Entered] = []
        for (packed,) in read(self.target, "SELECT events FROM history ORDER BY offset"):
            for event in EVENTS.decode(packed):
                if recorded.compare(event):
                    differ += entered(event)
        for each in differ:
            self._believe(each, clock)
        if differ:
            self.report.found.append(
                f"{counted(len(differ), 'message')}: row and history disagree; the later time is kept"
            )

    def _believe(self, each: Entered, clock: int) -> None:
        if max(each.sent, each.own_expiry or 0) > NUMBER_MAX:
            return
        sent = each.sent if each.sent <= clock else 0
        self.target.execute(
            "UPDATE message SET sent = min(max(sent, ?), ?), expires = iif(expires IS NULL OR ? IS NULL, NULL,"
            " max(expires, ?)) WHERE sequence = ? AND id = ? AND (sent, expires) IS NOT (?, ?)",
            (sent, clock, each.own_expiry, each.own_expiry, each.sequence, each.id, each.sent, each.own_expiry),
        )

    def fill(self, backup: Backup | None, following: int) -> None:
        """Look for the rows in doubt in all other places. following: the next offset, as far as it is known."""
        self.target.execute("CREATE INDEX salvage ON message (id)")
        self._drop_left()
        branched = backup is not None and self._has_branched(backup)
        reached = 0 if backup is None else next(backup.read(_OFFSET))[0]
        is_newest = backup is not None and not branched and reached >= following
        updated, taken = self.report.earlier_count, 0
        if backup is not None and branched:
            where = backup.database.parent
            self.report.found.append(f"the backup {where} has another history: only what it proves is taken from it")
        for name in _FILLED:
            table = self._tables[name]
            if not (self._doubt[name] or (self._fillable and name == "message")):
                continue
            if count := self._fill(table, self._elsewhere(table)):
                self.report.found.append(f"{name}: {counted(count, 'row')} came from older or stray pages of veilmq.db")
            if backup is None or branched:
                continue
            if count := self._fill(table, self._in_backup(table, backup), is_newest=is_newest):
                taken += count * (name == "message")
                self.report.found.append(
                    f"{name}: {counted(count, 'row')} came from the backup {backup.database.parent}"
                )
        if is_newest:
            self.report.tables_in_doubt = sorted({*self.report.tables_in_doubt}.difference(_FILLED))
        self._place_journal()
        self._place_astray()
        taken += self._search(backup, is_newest)
        if taken and reached < self._first_event:
            self.report.earlier_count = max(self.report.earlier_count, updated + taken)
            self.report.found.append("the backup is older than the history: bodies from it may have been updated since")
        self.target.execute("DROP INDEX salvage")

    def _drop_left(self) -> None:
        """Remove rows of old pages whose messages had left, by the history."""
        for sequence, message in self.facts.left:
            self.target.execute("DELETE FROM message WHERE sequence = ? AND id = ?", (sequence, message))

    def _has_branched(self, backup: Backup) -> bool:
        """Whether the last offset that both histories have was given to other events: one of the two was served again
        from an earlier copy, and the same numbers name other messages. One flipped bit makes no other events."""
        for (offset,) in backup.read("SELECT offset FROM history ORDER BY offset DESC"):
            for (ours,) in read(self.target, _EVENTS_AT, (offset,)):
                ((events,),) = backup.read(_EVENTS_AT, (offset,))
                return (int.from_bytes(ours) ^ int.from_bytes(events)).bit_count() > 1
        return False

    def _fill(self, table: Table, candidates: Iterable[Values], *, is_newest: bool = False) -> int:
        """is_newest: what comes from there is the last state."""
        count = 0
        for row in candidates:
            number = row[table.key or 0]
            if not self.in_doubt(table.name, number) or self._is_there(table, number):
                continue
            if table.name == "message":
                if (number, row[5]) in self.facts.left or self._is_another(number, row[5]) or self._went_on(row):
                    continue
                self._count_again(row)
            if self._take(table, row, "another has its name"):
                count += 1
                if table.name == "message" and not is_newest and number in self.facts.updated:
                    self.report.note_earlier(id_text(row[5]))
        return count

    def _is_there(self, table: Table, number: int) -> bool:
        return self.target.execute(f"SELECT 1 FROM {table.name} WHERE rowid = ?", (number,)).fetchone() is not None

    def _is_another(self, sequence: int, message: bytes) -> bool:
        """Whether the sequence is known to be that of another message."""
        known = self.facts.alive.get(sequence) or self._journal.get(sequence)
        return known is not None and known.id != message

    def _went_on(self, row: Values) -> bool:
        """Whether the message is in another queue meanwhile, or its queue was purged or deleted."""
        if self.target.execute("SELECT 1 FROM message WHERE id = ? AND sequence > ?", (row[5], row[0])).fetchone():
            return True
        return bool(self.target.execute("SELECT 1 FROM garbage WHERE generation = ?", (row[1],)).fetchone())

    def _count_again(self, row: Values) -> None:
        if row[0] not in self.facts.alive or not self.history_is_whole:
            self.report.again_count += 1

    def _elsewhere(self, table: Table) -> Iterator[Values]:
        image, accepts = self._image, surely(table)
        for versions in image.older.values():
            for content in versions:
                for each in leaf_rows(_Replaced(image, content), 2, accepts):
                    yield table.row(each.rowid, each.values)
        free = free_pages(image)
        for number in range(2, image.count + 1):
            if number not in self._seen and number not in free:
                yield from (table.row(each.rowid, each.values) for each in leaf_rows(image, number, accepts))

    def _in_backup(self, table: Table, backup: Backup) -> Iterator[Values]:
        listed = ((each, each) for each in self._fillable if table.name == "message")
        for between in chain(self._doubt[table.name], listed):
            yield from backup.read(f"SELECT * FROM {table.name} WHERE rowid BETWEEN ? AND ?", between)
        if table.name == "message":
            yield from backup.unflushed()

    def _place_journal(self) -> None:
        table = self._tables["message"]
        for sequence, each in self._journal.items():
            if (sequence, each.id) in self.facts.left or self._is_there(table, sequence):
                continue
            if self._take(table, msgspec.structs.astuple(each), "another message has its sequence"):
                if sequence in self.facts.updated:
                    self.report.note_earlier(id_text(each.id))
                self._lease(sequence)

    def _lease(self, sequence: int) -> None:
        if (lease := self.facts.received.get(sequence)) is not None:
            values = (lease.due, lease.attempt, lease.at, lease.at, lease.origin, sequence)
            self.target.execute(_LEASE, values)

    def renew_leases(self) -> None:
        """Some pages are old, and nobody knows which: take the leases from the history where it has later ones."""
        for sequence in self.facts.received:
            self._lease(sequence)

    def _place_astray(self) -> None:
        """Give messages whose sequence was damaged the one that the history knows, or else a new one."""
        known = {fact.id: sequence for sequence, fact in self.facts.alive.items()}
        table = self._tables["message"]
        for row in self._astray:
            if self.target.execute("SELECT 1 FROM message WHERE id = ?", (row[5],)).fetchone():
                continue
            sequence = known.get(row[5])
            if sequence is None or self._is_there(table, sequence):
                highest: Any = self.target.execute(_HIGHEST).get
                sequence = highest + 1
                self.target.execute("UPDATE mark SET sequence = ?", (sequence,))
            self._take(table, (sequence, *row[1:]), "another message has its sequence")

    def _search(self, backup: Backup | None, is_newest: bool) -> int:
        """Look for the content of messages that must be there in every page that ever was, and in the backup: their ids
        and MD5s prove it. Returns how many came from the backup."""
        wanted = {sequence: fact.id for sequence, fact in self._missing()}
        wanted |= {sequence: each for sequence, each in self.damaged.items() if sequence not in self.facts.updated}
        if not wanted:
            return 0
        pages = (self._image[number] for number in range(2, self._image.count + 1))
        contents = chain((frame.content for frame in reversed(self._frames)), pages)
        if found := self._find(wanted, chain.from_iterable(map(self._messages_in, contents))):
            self.report.found.append(f"{counted(found, 'message')} came from old pages of veilmq.db or veilmq.db-wal")
        if backup is None or not (found := self._find(wanted, self._wanted_in(backup, wanted), is_newest=is_newest)):
            return 0
        self.report.found.append(f"{counted(found, 'message')} came from the backup {backup.database.parent}")
        return found

    def _find(self, wanted: dict[int, bytes], rows_found: Iterable[Values], *, is_newest: bool = False) -> int:
        """Take the wanted messages among these, and remove them from the wanted; returns how many."""
        before = len(wanted)
        for row in rows_found:
            if wanted.get(row[0]) == row[5] and is_whole(*row[13:10:-1]):
                del wanted[row[0]]
                if self.damaged.pop(row[0], None) is not None:
                    self.target.execute("DELETE FROM message WHERE sequence = ?", (row[0],))
                self._take(self._tables["message"], row, "another message has its sequence")
                if not is_newest and row[0] in self.facts.updated:
                    self.report.note_earlier(id_text(row[5]))
            if not wanted:
                break
        return before - len(wanted)

    def _wanted_in(self, backup: Backup, wanted: dict[int, bytes]) -> Iterator[Values]:
        for sequence in list(wanted):
            yield from backup.read("SELECT * FROM message WHERE sequence = ?", (sequence,))
        yield from backup.unflushed()

    def _messages_in(self, content: bytes) -> Iterator[Values]:
        """Rows of messages in a page, if it is a leaf of `message` or of the journal."""
        pages, table = _Replaced(self._image, content), self._tables["message"]
        yield from (table.row(each.rowid, each.values) for each in leaf_rows(pages, 2, surely(table)))
        for each in leaf_rows(pages, 2, surely(self._tables["memtable"])):
            yield from map(msgspec.structs.astuple, JOURNAL.decode(each.values[1]))

    def _missing(self) -> Iterator[tuple[int, Entered]]:
        """The messages that were there by the history, and are nowhere."""
        for sequence, fact in sorted(self.facts.alive.items()):
            if not self.target.execute("SELECT 1 FROM message WHERE sequence = ? OR id = ?", (sequence, fact.id)).get:
                yield sequence, fact

    def drop_undecodable(self, *names: str) -> None:
        """Take rows out that a server could not decode."""
        for name in names:
            table = self._tables[name]
            for rowid, *row in read(self.target, f"SELECT rowid, * FROM {name}"):
                values = [None if at == table.key else value for at, value in enumerate(row)]
                if not table.accepts(rowid, tuple(values), True):
                    self.export.add(name, tuple(row), "it cannot be decoded")
                    self.target.execute(f"DELETE FROM {name} WHERE rowid = ?", (rowid,))

    def list_missing(self) -> None:
        """Report the messages that were there by the history, and are nowhere."""
        names: dict[int, str] = dict(read(self.target, _NAMED))
        for sequence, fact in self._missing():
            name = names.get(fact.queue, f"number {fact.queue}")
            message = MissingMessage(name, id_text(fact.id), sequence, fact.sent)
            self.report.miss(message, is_sure=sequence not in self.facts.unsure)
        known = self.facts.alive.keys() | {sequence for sequence, _ in self.facts.left}
        unknown = {each: of for each, of in self._listed.items() if each not in known}
        queues, table = incarnations(self.target), self._tables["message"]
        for of, count in Counter(of for each, of in unknown.items() if not self._is_there(table, each)).items():
            self.report.may_miss = True
            what = f"{counted(count, 'message')} perhaps missing, of which only an index or a lease is left"
            self.report.found.append(f"queue {names.get(queues.get(of, 0), 'unknown')}: {what}")
        if any(self._doubt[name] for name in _OF_MESSAGES) and not self.history_is_whole:
            self.report.may_miss = True


def surely(table: Table) -> Accepts:
    """Accepts only rows that prove themselves."""
    return lambda rowid, values, _surely: table.accepts(rowid, values, True)


class _Replaced:
    """The pages of an image, with page 2 replaced."""

    def __init__(self, image: Image, content: bytes) -> None:
        self.count, self.usable = image.count, image.usable
        self._image, self._content = image, content

    def __getitem__(self, number: int) -> bytes:
        return self._content if number == 2 else self._image[number]
