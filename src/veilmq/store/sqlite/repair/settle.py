"""Puts every message of a salvaged database into one of the places where a message may be.

Strategy: what follows from other rows is made anew from them: groups, cursors, what is passed over. Where a choice is
left, the message can be received: nothing stays hidden for ever, and nothing is dropped.
"""

from typing import Any, Final

import apsw
import msgspec

from veilmq.model.commands import SERVER
from veilmq.model.instant import DAY_US
from veilmq.model.settings.queue import FIFO_SUFFIX, PRIORITY_DEFAULT, PRIORITY_MAX, QueueSettings, with_change
from veilmq.store.sqlite.batch.queues import SETTINGS_DECODER, SETTINGS_ENCODER
from veilmq.store.sqlite.batch.rollups import HOUR_PERIODS, HOURS, MINUTES, PERIOD_SHIFT
from veilmq.store.sqlite.messages.groups import FIRST_OF_FIFO, FIRST_OF_TENANT
from veilmq.store.sqlite.repair.salvage import STRAYS, Salvage
from veilmq.store.sqlite.repair.salvage.tables import read
from veilmq.store.sqlite.tools import HIDDEN_US_MAX
from veilmq.store.sqlite.tools.books import KEY_PARTS, incarnations
from veilmq.store.sqlite.upkeep.rollups import ROW_BYTES

_LIVE: Final = "(SELECT generation FROM queue WHERE deleted IS NULL)"
_FIFO: Final = f"(SELECT generation FROM queue WHERE deleted IS NULL AND substr(name, -5) = '{FIFO_SUFFIX}')"
_QUARANTINE: Final = "(SELECT sequence FROM quarantine)"
_GROUPED: Final = (
    f"group_id IS NOT NULL AND sequence NOT IN {_QUARANTINE}"
    f" AND (generation IN {_FIFO} OR priority = {PRIORITY_DEFAULT})"
)
_LINES: Final = (
    f"UPDATE message SET priority = {PRIORITY_DEFAULT} WHERE priority NOT BETWEEN 1 AND {PRIORITY_MAX}",
    f"UPDATE message SET line = priority WHERE line <> priority AND NOT ({_GROUPED})",
    "UPDATE message SET in_line = 1 WHERE in_line NOT IN (0, 1)",
    f"UPDATE message SET in_line = 0 WHERE sequence IN {_QUARANTINE}",
    "DELETE FROM message_group WHERE (generation, name) NOT IN"
    f" (SELECT generation, group_id FROM message WHERE {_GROUPED})",
    "INSERT OR IGNORE INTO message_group"
    f" SELECT {PRIORITY_MAX} + min(sequence), generation, group_id, 0, NULL, 0, 0, 0, NULL, NULL FROM message"
    f" WHERE {_GROUPED} AND (generation, group_id) NOT IN (SELECT generation, name FROM message_group)"
    " GROUP BY generation, group_id",
    "UPDATE message SET line = (SELECT number FROM message_group g WHERE g.generation = message.generation"
    f" AND g.name = message.group_id) WHERE {_GROUPED}",
)
_LEASES: Final = (
    f"DELETE FROM lease WHERE sequence NOT IN (SELECT sequence FROM message) OR sequence IN {_QUARANTINE}",
    "UPDATE lease SET hidden = 0, due = :now, attempt = 0, rotation = max(rotation, 0), first = NULL, ending = 0,"
    " failure = NULL WHERE hidden NOT IN (0, 1) OR attempt < 0 OR rotation < 0 OR (attempt > 0) <> (first IS NOT NULL)",
    "UPDATE lease SET hidden = 0, due = :now, ending = 0 WHERE due > :latest",
    "UPDATE lease SET (generation, line, in_line) = (SELECT m.generation, m.line, m.in_line FROM message m"
    " WHERE m.sequence = lease.sequence)",
    "INSERT INTO lease (sequence, generation, line, in_line, hidden, due, attempt, rotation, granted, first, origin)"
    " SELECT sequence, generation, line, 0, 0, :now, 0, 0, sent, NULL, :server FROM message"
    f" WHERE in_line = 0 AND sequence NOT IN {_QUARANTINE} AND sequence NOT IN (SELECT sequence FROM lease)",
    # A line's cursor is at its last leased message: what is before it without a lease is passed over.
    "WITH cursor AS (SELECT l.generation, l.line, max(max(l.sequence), ifnull(max(g.cursor), 0)) AS at FROM lease l"
    "  LEFT JOIN message_group g ON g.number = l.line WHERE l.in_line = 1 GROUP BY 1, 2"
    "  UNION ALL SELECT generation, number, cursor FROM message_group)"
    " INSERT OR IGNORE INTO lease"
    " (sequence, generation, line, in_line, hidden, due, attempt, rotation, granted, first, origin)"
    " SELECT m.sequence, m.generation, m.line, 1, 0, :now, 0, 0, m.sent, NULL, :server FROM cursor c"
    " JOIN message m ON m.generation = c.generation AND m.line = c.line AND m.in_line = 1 AND m.sequence <= c.at"
    f" WHERE m.sequence NOT IN (SELECT sequence FROM lease) AND m.generation NOT IN {_FIFO}",
    "INSERT OR IGNORE INTO origin SELECT DISTINCT origin, '', '', '' FROM lease",
)
_GROUPS: Final = (
    "UPDATE message_group SET cursor = ifnull((SELECT max(sequence) FROM lease l WHERE l.line = message_group.number"
    f" AND l.in_line = 1), 0) WHERE generation NOT IN {_FIFO}",
    "UPDATE message_group SET held = (SELECT count(*) FROM lease l WHERE l.generation = message_group.generation"
    f" AND l.line = number AND hidden = 1 AND attempt > 0) * (generation NOT IN {_FIFO})",
    "UPDATE message_group SET free = NULL, since = NULL, turn = NULL",
    f"UPDATE message_group SET (free, since, turn) = ({FIRST_OF_FIFO}) WHERE generation IN {_FIFO}",
    f"UPDATE message_group SET (free, since, turn) = ({FIRST_OF_TENANT.format(cursor='message_group.cursor')})"
    f" WHERE generation NOT IN {_FIFO}",
)
_REST: Final = (
    "DELETE FROM move_task WHERE source NOT IN (SELECT incarnation FROM queue WHERE deleted IS NULL)",
    "INSERT OR IGNORE INTO origin SELECT DISTINCT origin, '', '', '' FROM move_task",
    "DELETE FROM job WHERE source NOT IN (SELECT incarnation FROM queue WHERE deleted IS NULL)",
    "INSERT OR IGNORE INTO origin SELECT DISTINCT origin, '', '', '' FROM job",
    "DELETE FROM retiming WHERE incarnation NOT IN (SELECT incarnation FROM queue WHERE deleted IS NULL)",
    "DELETE FROM plan WHERE incarnation NOT IN (SELECT incarnation FROM queue WHERE deleted IS NULL)",
    "DELETE FROM send_template WHERE incarnation NOT IN (SELECT incarnation FROM queue WHERE deleted IS NULL)",
    "INSERT OR IGNORE INTO expiry_hold VALUES (1, 0)",
    "UPDATE expiry_hold SET held_us = max(held_us, 0)",
    "UPDATE rollup_period SET rows = 0, bytes = 0",  # in such a period, too, the server ran
    *(
        f"INSERT OR REPLACE INTO rollup_period SELECT {first} + (id >> {PERIOD_SHIFT}), count(*),"
        f" sum(length(numbers) + {ROW_BYTES}) FROM {table} GROUP BY 1"
        for table, first in ((MINUTES, 0), (HOURS, HOUR_PERIODS))
    ),
)


_DECODED: Final = ("topic", "subscription", "plan", "retiming", "job", "move_task", "send_template", MINUTES, HOURS)
"""Tables whose rows a server decodes, or `check`, and that no message needs."""


def settle(salvage: Salvage, now: int) -> None:
    """Make the tables consistent. now: the lease clock."""
    target = salvage.target
    _name_queues(salvage)
    _drop_garbage(target)
    _assign_queues(salvage)
    _make_lost_queues(salvage)
    salvage.drop_undecodable(*_DECODED)
    _drop_failures(salvage)
    target.execute("DELETE FROM quarantine WHERE sequence NOT IN (SELECT sequence FROM message)")
    for sequence in salvage.damaged:
        statement = "INSERT OR IGNORE INTO quarantine SELECT sequence, generation, ? FROM message WHERE sequence = ?"
        target.execute(statement, (now, sequence))
    target.execute(
        "UPDATE quarantine SET generation = (SELECT generation FROM message m WHERE m.sequence = quarantine.sequence)"
    )
    bound = {"now": now, "latest": now + HIDDEN_US_MAX, "server": server(target)}
    for statement in (*_LINES, *_LEASES, *_GROUPS, *_REST):
        target.execute(statement, {name: value for name, value in bound.items() if f":{name}" in statement})
    _drop_orphans(salvage)


_FAILURE: Final = msgspec.msgpack.Decoder(tuple[str, str])
_GENERATION: Final = (
    "SELECT max(ifnull((SELECT max(generation) FROM queue), 0), ifnull((SELECT max(generation) FROM message), 0),"
    " ifnull((SELECT generation FROM mark), 0))"
)


def server(target: apsw.Connection) -> int:
    """The number of the server as an origin."""
    values = (SERVER.protocol, SERVER.principal, SERVER.client)
    find = "SELECT id FROM origin WHERE (protocol, principal, client) = (?, ?, ?)"
    row: Any = target.execute(find, values).fetchone()
    if row is None:
        target.execute("INSERT INTO origin SELECT ifnull(max(id), 0) + 1, ?, ?, ? FROM origin", values)
        row = target.execute(find, values).fetchone()
    return int(row[0])


def _name_queues(salvage: Salvage) -> None:
    """Give queues whose settings cannot be read those that the history knows, or else the default ones.

    Of two retentions the longer one is kept: nothing expires by a flipped bit.
    """
    for incarnation, name, packed in read(salvage.target, "SELECT incarnation, name, settings FROM queue"):
        known = _settings(salvage, incarnation, name)
        try:
            settings = SETTINGS_DECODER.decode(packed)
        except (ValueError, RecursionError):
            salvage.export.add("queue", (incarnation, name, packed), "its settings cannot be decoded")
            settings = known or _default(name)
        if known is not None and known.retention_us > settings.retention_us:
            settings = with_change(settings, {"retention_us": known.retention_us})
        row = (SETTINGS_ENCODER.encode(settings), incarnation)
        salvage.target.execute("UPDATE queue SET settings = ? WHERE incarnation = ?", row)
        if salvage.names_are_damaged and incarnation in salvage.facts.settings:
            key = [salvage.facts.settings[incarnation][part] for part in KEY_PARTS]
            statement = "UPDATE OR IGNORE queue SET (account, region, name) = (?, ?, ?) WHERE incarnation = ?"
            salvage.target.execute(statement, (*key, incarnation))


def _settings(salvage: Salvage, incarnation: int, name: str) -> QueueSettings | None:
    """What the history knows."""
    known = salvage.facts.settings.get(incarnation)
    if known is None:
        return None
    try:
        return msgspec.convert(known["settings"] | {"fifo": name.endswith(FIFO_SUFFIX)}, QueueSettings)
    except ValueError:
        return None


def _default(name: str) -> QueueSettings:
    """The longest retention of SQS, so that nothing expires while somebody finds out what the queue was."""
    return with_change(QueueSettings(), {"fifo": name.endswith(FIFO_SUFFIX), "retention_us": 14 * DAY_US})


def _drop_garbage(target: apsw.Connection) -> None:
    """Do what the sweeper would: delete the messages of purged and deleted queues."""
    for table in ("lease", "quarantine", "message_group", "message"):
        target.execute(
            f"DELETE FROM {table} WHERE generation IN (SELECT generation FROM garbage) AND generation NOT IN {_LIVE}"
        )
    target.execute("DELETE FROM garbage")


def _assign_queues(salvage: Salvage) -> None:
    """Give messages of no queue the queue that the history knows, or else one of their own."""
    target, facts = salvage.target, salvage.facts
    live: dict[int, int] = {queue: generation for generation, queue in incarnations(target).items()}
    strays = f"SELECT sequence, id, generation FROM message WHERE sequence IN ({STRAYS})"
    for sequence, message, generation in read(target, strays):
        if (sequence, message) in facts.left:
            target.execute("DELETE FROM message WHERE sequence = ?", (sequence,))
            continue
        fact = facts.alive.get(sequence)
        if fact is not None and fact.id == message and fact.queue not in live:
            live[fact.queue] = _found_queue(salvage, fact.queue, generation)
        elif fact is None or fact.id != message:
            continue
        target.execute("UPDATE message SET generation = ? WHERE sequence = ?", (live[fact.queue], sequence))
    strays = f"SELECT DISTINCT generation FROM message WHERE sequence IN ({STRAYS})"
    for (generation,) in read(target, strays):
        highest: Any = target.execute("SELECT ifnull(max(incarnation), 0) FROM queue").get
        _found_queue(salvage, highest + 1, generation)


def _make_lost_queues(salvage: Salvage) -> None:
    """Make the queues again that the history knows and that held no message."""
    target, facts = salvage.target, salvage.facts
    known = {incarnation for (incarnation,) in read(target, "SELECT incarnation FROM queue")}
    for incarnation in sorted(facts.settings.keys() - facts.deleted - known):
        if salvage.in_doubt("queue", incarnation):
            ((highest,),) = read(target, _GENERATION)
            _found_queue(salvage, incarnation, highest + 1)


def _drop_failures(salvage: Salvage) -> None:
    """Take out last errors of workers that cannot be decoded: their messages would be quarantined."""
    for sequence, packed in read(salvage.target, "SELECT sequence, failure FROM lease WHERE failure IS NOT NULL"):
        try:
            _FAILURE.decode(packed)
        except (ValueError, RecursionError):
            salvage.export.add("lease", (sequence, packed), "its last error cannot be decoded")
            salvage.target.execute("UPDATE lease SET failure = NULL WHERE sequence = ?", (sequence,))


def _found_queue(salvage: Salvage, incarnation: int, generation: int) -> int:
    """Make a queue as the history knows it, or else with the default settings; returns its generation."""
    target = salvage.target
    known = salvage.facts.settings.get(incarnation, {})
    key = (known.get("account", "000000000000"), known.get("region", "us-east-1"))
    name = known.get("name", f"recovered-{generation}")
    taken = "SELECT 1 FROM queue WHERE (account, region, name) = (?, ?, ?) AND deleted IS NULL"
    if target.execute(taken, (*key, name)).fetchone():
        name = f"recovered-{generation}" + (FIFO_SUFFIX if name.endswith(FIFO_SUFFIX) else "")
    settings = _settings(salvage, incarnation, name) or _default(name)
    values = (incarnation, *key, name, generation, 0, 0, None, None, SETTINGS_ENCODER.encode(settings))
    target.execute("INSERT OR REPLACE INTO queue VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    salvage.report.found.append(f"queue {'/'.join((*key, name))}: made again, because its row cannot be read")
    return generation


def _drop_orphans(salvage: Salvage) -> None:
    """Take out subscriptions of topics that cannot be read: a start could not load them."""
    orphans = "SELECT * FROM subscription WHERE topic NOT IN (SELECT incarnation FROM topic)"
    for row in read(salvage.target, orphans):
        salvage.export.add("subscription", row, "its topic cannot be read")
        salvage.target.execute("DELETE FROM subscription WHERE id = ?", (row[0],))
