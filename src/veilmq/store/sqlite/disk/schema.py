"""The tables, and the migrations that create them.

Strategy: `user_version` counts the migrations applied. Each is a script; at open, all missing ones run in one
transaction. A file of a newer version is refused.

Before changing it: migrations are append-only; a released one never changes (tests/store/fixtures holds a file of every
released version). Every table has a primary key, and none uses AUTOINCREMENT: a copy made statement by statement must
assign the same numbers (`last_number`).
"""

import os
from functools import cache
from typing import Final

import apsw

from veilmq.model.messages import KEY_BYTES
from veilmq.store.directory import NotOurs, SchemaNewer, SchemaUnreleased

EPOCH_BYTES: Final = 16
APPLICATION_ID: Final = 0x564D5131  # "VMQ1"
_UNRELEASED_ID: Final = 0x5645494C  # "VEIL": files from before the first release

_FIRST: Final = """
CREATE TABLE mark (
    id         INTEGER PRIMARY KEY CHECK (id = 1),
    clock      INTEGER NOT NULL,     -- high-water mark of the lease clock
    sequence   INTEGER NOT NULL,     -- last message sequence assigned
    generation INTEGER NOT NULL,     -- last generation assigned
    offset     INTEGER NOT NULL      -- next offset of the history
) STRICT;

CREATE TABLE last_number (
    kind TEXT PRIMARY KEY,           -- queue (its incarnation), topic, subscription, move_task
    last INTEGER NOT NULL            -- the last number assigned; none is assigned twice
) STRICT;

CREATE TABLE secret (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    receipts BLOB NOT NULL,          -- key of the receipt handles; a backup gets a fresh one
    epoch    BLOB NOT NULL           -- identifies this history; a backup gets a fresh one
) STRICT;

CREATE TABLE queue (
    incarnation INTEGER PRIMARY KEY,
    account     TEXT NOT NULL,
    region      TEXT NOT NULL,
    name        TEXT NOT NULL,
    generation  INTEGER NOT NULL,    -- of its messages; a purge assigns another
    created     INTEGER NOT NULL,
    modified    INTEGER NOT NULL,
    purged      INTEGER,             -- last purge
    deleted     INTEGER,             -- when; the row is kept while the history may name it
    settings    BLOB NOT NULL        -- msgpack of QueueSettings
) STRICT;
CREATE UNIQUE INDEX queue_by_name ON queue (account, region, name) WHERE deleted IS NULL;
CREATE INDEX queue_deleted ON queue (deleted, account, region, name) WHERE deleted IS NOT NULL;

CREATE TABLE message (
    sequence   INTEGER PRIMARY KEY,  -- grows over all queues, never assigned twice
    generation INTEGER NOT NULL,
    line       INTEGER NOT NULL,     -- a priority, or the number of a group, which is greater than any priority
    in_line    INTEGER NOT NULL,     -- 1: it has its place in the line, by sequence. 0: it is beside the line, and only
                                     -- its lease says where; or it is in quarantine, and `line` is its priority
    priority   INTEGER NOT NULL,
    id         BLOB NOT NULL,
    sent       INTEGER NOT NULL,
    expires    INTEGER,              -- own expiry; NULL: by the queue's present retention
    sender     TEXT NOT NULL,
    group_id   TEXT,
    type       TEXT,
    extras     BLOB,                 -- msgpack of Extras
    md5        BLOB NOT NULL,
    body       BLOB NOT NULL         -- UTF-8
) STRICT;
CREATE INDEX message_line ON message (generation, line) WHERE in_line = 1;
-- Whether a group has messages beside its line.
CREATE INDEX message_aside ON message (generation, line) WHERE in_line = 0 AND line > 16;
CREATE INDEX message_expiry ON message (generation, expires) WHERE expires IS NOT NULL;

CREATE TABLE lease (
    sequence   INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    line       INTEGER NOT NULL,     -- as in message
    in_line    INTEGER NOT NULL,     -- as in message; 1: the cursor of that line is at or beyond this sequence
    hidden     INTEGER NOT NULL,     -- 1: delayed or in flight until due; 0: visible since due
    due        INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,     -- grants so far; 0: delayed, never received
    rotation   INTEGER NOT NULL,
    granted    INTEGER NOT NULL,     -- start of the latest lease; the send, for attempt 0
    first      INTEGER,              -- first grant
    origin     INTEGER NOT NULL,     -- who holds or held the lease
    turn       INTEGER NOT NULL DEFAULT 0,  -- of those visible since the same `due` the greater goes later: an offset
                                     -- of the history if it was given back at once, else 0
    ending     INTEGER NOT NULL DEFAULT 0,  -- what it means if the lease runs out: LeaseEnding (model/events.py)
    failure    BLOB                  -- msgpack: type and first line of the last error that a worker reported
) STRICT;
CREATE INDEX lease_hidden ON lease (generation, due) WHERE hidden = 1;
CREATE INDEX lease_returned ON lease (generation, line) WHERE hidden = 0;
CREATE INDEX lease_turn ON lease (generation, line, due, turn) WHERE hidden = 0;

CREATE TABLE quarantine (
    sequence   INTEGER PRIMARY KEY,  -- a damaged message: its body does not match its MD5, nobody receives it
    generation INTEGER NOT NULL,
    at         INTEGER NOT NULL
) STRICT;

CREATE TABLE garbage (
    generation INTEGER PRIMARY KEY   -- rows with this generation are deleted by the sweeper
) STRICT;

CREATE TABLE origin (
    id        INTEGER PRIMARY KEY,
    protocol  TEXT NOT NULL,
    principal TEXT NOT NULL,
    client    TEXT NOT NULL
) STRICT;

CREATE TABLE history (
    offset       INTEGER PRIMARY KEY,  -- of the first event in the row
    count        INTEGER NOT NULL,
    at           INTEGER NOT NULL,     -- the batch's instant
    bytes_before INTEGER NOT NULL,     -- events' bytes in all earlier rows
    version      INTEGER NOT NULL,
    events       BLOB NOT NULL         -- msgpack of a list of Event
) STRICT;

CREATE TABLE topic (
    incarnation INTEGER PRIMARY KEY,
    account     TEXT NOT NULL,
    region      TEXT NOT NULL,
    name        TEXT NOT NULL,
    created     INTEGER NOT NULL,
    modified    INTEGER NOT NULL,
    settings    BLOB NOT NULL        -- msgpack of TopicSettings
) STRICT;
CREATE UNIQUE INDEX topic_by_name ON topic (account, region, name);

CREATE TABLE subscription (
    id       INTEGER PRIMARY KEY,
    topic    INTEGER NOT NULL,       -- incarnation
    name     TEXT NOT NULL,
    created  INTEGER NOT NULL,
    modified INTEGER NOT NULL,
    settings BLOB NOT NULL           -- msgpack of SubscriptionSettings
) STRICT;
CREATE UNIQUE INDEX subscription_by_name ON subscription (topic, name);

CREATE TABLE message_group (
    number     INTEGER PRIMARY KEY,  -- its messages' line: 16 + the sequence of the one that began it
    generation INTEGER NOT NULL,
    name       TEXT NOT NULL,
    held       INTEGER NOT NULL,     -- standard queue: messages in flight; FIFO: 0
    free       INTEGER,              -- the message that a claim would take; NULL: none (on FIFO: the first is hidden)
    granted    INTEGER NOT NULL,     -- FIFO: when the latest batch was leased
    cursor     INTEGER NOT NULL,     -- standard queue: the last sequence that was claimed from the line
    served     INTEGER NOT NULL,     -- FIFO: offset of the history at `granted`
    since      INTEGER,              -- its place among the groups that wait: visible since then,
    turn       INTEGER               -- and of those the greater goes later; NULL without `free`
) STRICT;
CREATE UNIQUE INDEX message_group_name ON message_group (generation, name);
CREATE UNIQUE INDEX message_group_free ON message_group (generation, held, since, turn, free) WHERE free IS NOT NULL;
-- Standard queues: of the groups with messages in flight, which has waited longest.
CREATE UNIQUE INDEX message_group_busy ON message_group (generation, since, turn, free)
    WHERE held > 0 AND free IS NOT NULL;
-- The sweeper: which groups may have messages that have expired, whatever their turns are.
CREATE UNIQUE INDEX message_group_oldest ON message_group (generation, free) WHERE free IS NOT NULL;

CREATE TABLE deduplication (
    sequence INTEGER PRIMARY KEY,    -- of the message that was taken; ends grow with it
    ends     INTEGER NOT NULL,
    key      BLOB NOT NULL,          -- digest of generation and deduplication id, then perhaps one of the group
    message  BLOB NOT NULL,
    md5      BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX deduplication_key ON deduplication (key);

CREATE TABLE receive_attempt (
    number     INTEGER PRIMARY KEY,  -- ends grow with it
    ends       INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    id         TEXT NOT NULL,
    leases     BLOB NOT NULL         -- msgpack of (handle, due) of each message that was granted
) STRICT;
CREATE UNIQUE INDEX receive_attempt_id ON receive_attempt (generation, id);

CREATE TABLE move_task (
    number      INTEGER PRIMARY KEY,
    id          BLOB NOT NULL,       -- 16 bytes, what its handle names
    source      INTEGER NOT NULL,    -- the queue's incarnation
    destination BLOB,                -- msgpack of QueueKey; NULL: each message goes back to where it came from
    rate        INTEGER,             -- messages a second, if that was asked for
    status      TEXT NOT NULL,
    failure     TEXT,
    origin      INTEGER NOT NULL,    -- who began it
    started     INTEGER NOT NULL,
    used        INTEGER NOT NULL,    -- up to this instant the rate is used up
    last        INTEGER NOT NULL,    -- sequence of the last message that there was at the start; later ones stay
    moved       INTEGER NOT NULL,
    to_move     INTEGER NOT NULL
) STRICT;
CREATE INDEX move_task_source ON move_task (source, number);
CREATE UNIQUE INDEX move_task_active ON move_task (source) WHERE status IN ('running', 'cancelling');

CREATE TABLE plan (
    incarnation INTEGER PRIMARY KEY,
    plans       BLOB NOT NULL         -- msgpack of PlanState
) STRICT;

CREATE TABLE snapshot (
    id    INTEGER PRIMARY KEY CHECK (id = 1),
    first INTEGER NOT NULL,          -- offsets of the newest complete snapshot in the history: its begin
    last  INTEGER NOT NULL           -- and its end
) STRICT;

CREATE TABLE retiming (
    incarnation INTEGER PRIMARY KEY, -- a FIFO queue whose changed delay has not reached all of its messages
    generation  INTEGER NOT NULL,
    before      BLOB NOT NULL,       -- msgpack: the delays that they may still have
    last        INTEGER NOT NULL,    -- sequence of the last message that there was at the change
    line        INTEGER NOT NULL,    -- line of the last message that was examined,
    sequence    INTEGER NOT NULL     -- and its sequence
) STRICT;

CREATE TABLE memtable (
    offset   INTEGER PRIMARY KEY,    -- of the first event of the batch that sent them
    messages BLOB NOT NULL           -- msgpack of a list of rows of `message`, as they were then
) STRICT;

CREATE TABLE redo_log (
    id         INTEGER PRIMARY KEY CHECK (id = 1),
    file_bytes INTEGER NOT NULL      -- size of the file, as long as it may hold what the tables lack; else 0
) STRICT;
"""

_EXPIRY_HOLD: Final = """
CREATE TABLE expiry_hold (
    id      INTEGER PRIMARY KEY CHECK (id = 1),
    held_us INTEGER NOT NULL         -- how far the expiry clock is behind the lease clock
) STRICT;
INSERT INTO expiry_hold VALUES (1, 0);
"""

_HISTORY_INDEX: Final = """
CREATE TABLE history_index (
    id    INTEGER PRIMARY KEY,       -- part of the names * 2^48 + offset at which the block of the history begins
    until INTEGER NOT NULL,          -- offset at which the block ends
    names BLOB NOT NULL              -- sorted names that the block has, cut to 4 bytes (batch/history_index.py)
) STRICT;
"""

_OPERATORS: Final = """
CREATE TABLE operator_command (
    number       INTEGER PRIMARY KEY, -- grows with `at`
    principal    TEXT NOT NULL,
    id           TEXT NOT NULL,
    at           INTEGER NOT NULL,
    digest       BLOB NOT NULL,      -- of what was asked
    bytes_before INTEGER NOT NULL,   -- outcomes' bytes in all earlier rows
    outcomes     BLOB NOT NULL       -- msgpack of (type, fields) of each
) STRICT;
CREATE UNIQUE INDEX operator_command_id ON operator_command (principal, id);
"""

_ROLLUPS: Final = """
CREATE TABLE rollup_minute (
    id      INTEGER PRIMARY KEY,     -- number of the minute since 1970 * 2^36 + the queue's incarnation
    numbers BLOB NOT NULL            -- msgpack of a list: what the queue held, then keys and counts (store/rollups.py)
) STRICT;
CREATE TABLE rollup_hour (
    id      INTEGER PRIMARY KEY,     -- as above, of hours
    numbers BLOB NOT NULL
) STRICT;
CREATE TABLE rollup_period (
    id    INTEGER PRIMARY KEY,       -- a minute or (+ 2^40) an hour in which the server ran
    rows  INTEGER NOT NULL,          -- rollups that there are of it
    bytes INTEGER NOT NULL
) STRICT;
CREATE TABLE rollup_mark (
    id      INTEGER PRIMARY KEY CHECK (id = 1),
    offset  INTEGER NOT NULL,        -- all events before it are in the rollups
    garbage INTEGER NOT NULL         -- 1: perhaps there are rollups of deleted queues
) STRICT;
INSERT INTO rollup_mark VALUES (1, ifnull((SELECT offset FROM mark), 0), 0);
"""

_JOBS: Final = """
CREATE TABLE job (
    number      INTEGER PRIMARY KEY,
    id          BLOB NOT NULL,       -- 16 bytes
    act         TEXT NOT NULL,
    source      INTEGER NOT NULL,    -- the queue's incarnation
    destination BLOB,                -- msgpack of QueueKey
    filter      BLOB NOT NULL,       -- msgpack of Filter
    rate        INTEGER,             -- messages a second, if that was asked for
    dry_run     INTEGER NOT NULL,
    status      TEXT NOT NULL,
    failure     TEXT,
    origin      INTEGER NOT NULL,    -- who began it
    started     INTEGER NOT NULL,
    ended       INTEGER,
    used        INTEGER NOT NULL,    -- up to this instant the rate is used up
    last        INTEGER NOT NULL,    -- sequence of the last message that there was at the start; later ones stay
    walk        INTEGER NOT NULL,    -- which order it goes through (upkeep/jobs),
    line        INTEGER NOT NULL,    -- and where it is in that order: the last message that was looked at
    sequence    INTEGER NOT NULL,
    total       INTEGER NOT NULL,
    seen        INTEGER NOT NULL,
    matched     INTEGER NOT NULL,
    done        INTEGER NOT NULL,
    failed      INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX job_id ON job (id);
CREATE UNIQUE INDEX job_active ON job (source) WHERE status IN ('running', 'cancelling');
"""

_SESSIONS: Final = """
CREATE TABLE console_session (
    digest     BLOB PRIMARY KEY,     -- of the secret in the browser's cookie, which is nowhere else
    proof      BLOB NOT NULL,        -- digest, keyed with that secret, of the token or the key that signed in
    key        TEXT,                 -- the access key; NULL: the admin token
    client     TEXT NOT NULL,
    reads_only INTEGER NOT NULL,
    opened     INTEGER NOT NULL,
    used       INTEGER NOT NULL,
    ends       INTEGER NOT NULL      -- the sweeper deletes it then
) STRICT;
CREATE INDEX console_session_ends ON console_session (ends);
"""

_LOG_POSITION: Final = """
CREATE TABLE log_position (
    id       INTEGER PRIMARY KEY CHECK (id = 1),  -- no row: the server is alone, and no log has its batches
    lsn      INTEGER NOT NULL,       -- number of the last record that is in the tables
    epoch    INTEGER NOT NULL,       -- under which it was appended
    checksum INTEGER NOT NULL        -- of that record
) STRICT;
"""

_TEMPLATES: Final = """
CREATE TABLE send_template (
    incarnation INTEGER NOT NULL,    -- the queue's
    name        TEXT NOT NULL,
    message     BLOB NOT NULL,       -- JSON, as the admin port takes it in a send
    kept        INTEGER NOT NULL,
    principal   TEXT NOT NULL,
    PRIMARY KEY (incarnation, name)
) STRICT;
"""

_SHARED: Final = """
CREATE TABLE shared (
    name  TEXT PRIMARY KEY,
    value BLOB NOT NULL              -- what all servers of a cluster have: the admin token, the key of pushes ...
) STRICT;
"""

_CHECKSUMS: Final = ""
"""The tables stay. From this version on pages may have checksums, which older releases would leave as they were."""

MIGRATIONS: Final[tuple[str, ...]] = (
    _FIRST, _EXPIRY_HOLD, _HISTORY_INDEX, _OPERATORS, _ROLLUPS, _JOBS, _SESSIONS, _LOG_POSITION, _TEMPLATES,
    _SHARED, _CHECKSUMS,
)  # fmt: skip
VERSION: Final = len(MIGRATIONS)
CHECKSUMS: Final = MIGRATIONS.index(_CHECKSUMS) + 1
OLDEST_SERVED: Final = CHECKSUMS - 1
"""The oldest version that a store works with. A server of a cluster keeps the tables of the release before until all
servers know newer ones, so a release that adds a migration to those of the last leaves this at the last one's VERSION,
and works with both."""
CHECKING: Final = "cksmvfs"
"""SQLite's VFS of pages with checksums. Source: https://sqlite.org/cksumvfs.html"""
CHECKSUM_BYTES: Final = 8
"""At the end of each page."""
_FOREIGN: Final = "veilmq.db is not a VeilMQ database"


def fresh_secret() -> tuple[bytes, bytes]:
    """The values of `secret`, for a new database, or for a copy in which handles and offsets of the old one are
    void."""
    return os.urandom(KEY_BYTES), os.urandom(EPOCH_BYTES)


_BEGUN: Final = " UNION ALL ".join(
    f"SELECT * FROM (SELECT 1 FROM {table} LIMIT 1)"
    for table in ("mark", "secret", "last_number", "history", "queue", "message")
)


def is_begun(connection: apsw.Connection) -> bool:
    """Whether the first start of the database came to an end: it then had rows."""
    return connection.execute(_BEGUN).fetchone() is not None


def check(connection: apsw.Connection) -> int:
    """The version of the file; changes nothing. Raises SchemaNewer, SchemaUnreleased or NotOurs."""
    found = int(connection.pragma("user_version"))
    owner = int(connection.pragma("application_id"))
    if owner == _UNRELEASED_ID:
        raise SchemaUnreleased(found)
    if owner != APPLICATION_ID and (found or owner or connection.execute("SELECT count(*) FROM sqlite_schema").get):
        raise NotOurs(_FOREIGN)
    if found > VERSION:
        raise SchemaNewer(found, VERSION)
    return found


def check_ours(connection: apsw.Connection) -> int:
    """The same for readers, for whom an empty file is not ours either."""
    if connection.pragma("application_id") not in {APPLICATION_ID, _UNRELEASED_ID}:
        raise NotOurs(_FOREIGN)
    return check(connection)


_STATEMENTS: Final = "SELECT hex(name), hex(sql) FROM sqlite_schema WHERE sql IS NOT NULL"
"""In hexadecimal: damaged text may not be UTF-8."""


def strangers(connection: apsw.Connection) -> list[str]:
    """The names of tables and indexes that are missing, more than there must be, or not as they were created: SQLite
    may still read a statement in which a bit flipped."""
    expected = _statements(tuple(MIGRATIONS[: int(connection.pragma("user_version"))]))
    found = connection.execute(_STATEMENTS).fetchall()
    return sorted(
        {bytes.fromhex(str(name)).decode(errors="replace") for name, _ in expected.symmetric_difference(found)}
    )


@cache
def _statements(scripts: tuple[str, ...]) -> frozenset[tuple[object, ...]]:
    connection = apsw.Connection(":memory:")
    for script in scripts:
        connection.execute(script)
    found = frozenset(connection.execute(_STATEMENTS).fetchall())
    connection.close()
    return found


def migrate(connection: apsw.Connection, version: int | None = None) -> int:
    """Migrate the file to a version, or to `VERSION`, in one transaction; returns the version it had. Raises as `check`
    does."""
    found, wanted = check(connection), VERSION if version is None else version
    if found >= wanted:
        return found
    with connection:
        for script in MIGRATIONS[found:version]:
            connection.execute(script)
        connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", wanted)
    return found


def begin_anew(connection: apsw.Connection, version: int) -> None:
    """Empty the file, and create the tables of a version."""
    connection.config(apsw.SQLITE_DBCONFIG_RESET_DATABASE, 1)
    give_checksums(connection, version)
    connection.execute("VACUUM")
    connection.config(apsw.SQLITE_DBCONFIG_RESET_DATABASE, 0)
    connection.wal_checkpoint()  # so that each connection sees in the file whether pages have checksums
    migrate(connection, version)


def is_unfilled(connection: apsw.Connection, version: int) -> bool:
    """Whether a follower has made the file, of an older version than this, and has applied no record yet."""
    if check(connection) >= version:
        return False
    filled = "SELECT EXISTS (SELECT 1 FROM log_position) OR EXISTS (SELECT 1 FROM secret)"
    return not connection.execute(filled).get


def has_checksums(connection: apsw.Connection) -> bool:
    """Whether the pages of the file have checksums."""
    return connection.reserve_bytes() == CHECKSUM_BYTES


def give_checksums(connection: apsw.Connection, version: int) -> None:
    """Let the pages of an empty file of that version have checksums, if its VFS writes them. Those of a file with
    tables have them from the next VACUUM on."""
    if connection.open_vfs == CHECKING:
        connection.reserve_bytes("main", CHECKSUM_BYTES if version >= CHECKSUMS else 0)
