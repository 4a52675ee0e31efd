"""The tables of a cluster, in the schema `veilmq` of its database.

Strategy: one row says who owns a shard, and one carries the beat of its lease; the log is a table for each segment of
so many records, which is only inserted into and dropped whole, so that nothing has to be vacuumed. A segment's
constraint holds its numbers, because a record in the wrong table would be found by nobody. What must be the same on
all servers is in the row of the shard.

Before changing it: raise LAYOUT, and write the step from the layout before.
"""

import re
import secrets
from contextlib import suppress
from typing import Any, Final, LiteralString, NamedTuple
from uuid import UUID, uuid4

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from veilmq.cluster.postgres import Postgres, Session, Uncertain, Unfit, Unreachable, text_of
from veilmq.model.instant import SECOND_US

LAYOUT: Final = 1
SHARD: Final = 0
"""The only shard today."""
LEASE_US: Final = 3 * SECOND_US
SEGMENT_NAME: Final = f"log_{SHARD}_{{}}"
SECRET_BYTES: Final = 32
SEGMENT: Final = 4_096
"""Records of one segment: some 20 MB, and with large bodies a gigabyte. It is dropped as a whole."""

_TABLES: Final = """
    create table veilmq.shard (
        id int primary key, layout int not null, format int not null, incarnation uuid not null,
        segment bigint not null check (segment > 1), lease_us bigint not null check (lease_us > 0),
        epoch bigint not null, holder uuid, owner text not null, address text not null,
        secret bytea not null, moved text not null default '',
        snapshots text not null default '', keep_us bigint not null default 0
    );
    create table veilmq.lease (
        id int primary key references veilmq.shard,
        epoch bigint not null, beat bigint not null, clock bigint not null, renewed timestamptz not null,
        wanted text
    );
    create table veilmq.server (
        name text primary key, address text not null, holder uuid not null, release text not null,
        oldest int not null, newest int not null, format int not null, record bigint not null,
        role text not null, drained boolean not null, seen timestamptz not null
    );
    create table veilmq.snapshot (
        lsn bigint primary key, epoch bigint not null, checksum bigint not null, size bigint not null,
        parts text[] not null, clock bigint not null default 0,
        url text not null default '', folder text not null default '', verified_by text not null default '',
        written timestamptz not null default clock_timestamp()
    );
    create table veilmq.snapshot_part (
        lsn bigint, number int, content bytea not null, primary key (lsn, number)
    );
    alter table veilmq.snapshot_part alter column content set storage external;
    create table veilmq.proof (
        id int primary key references veilmq.shard,
        wanted bigint not null, asker text not null, asked timestamptz not null,
        claimed text, lsn bigint, digest bytea
    );
"""
_COLUMNS: Final[LiteralString] = (
    "incarnation, layout, format, segment, lease_us, epoch, holder, owner, address, secret, moved, snapshots, keep_us"
)
_KEEPING: Final = """
    update veilmq.shard set snapshots = coalesce(%s, snapshots), keep_us = coalesce(%s, keep_us) where id = %s
"""
# A record is compressed already, and nothing needs a vacuum before its table is dropped.
_SEGMENT: Final = """
    create table if not exists {table} (
        lsn bigint primary key check (lsn / {segment} = {number}),
        epoch bigint not null,
        record bytea not null
    ) with (autovacuum_enabled = false, toast.autovacuum_enabled = false);
    alter table {table} alter column record set storage external
"""


class Shard(NamedTuple):
    """A shard's row."""

    incarnation: UUID
    """Which cluster this is; a restore begins another."""
    layout: int
    """Number of the tables here."""
    format: int
    """Number of the state format, which says what records mean: an owner gives it to its tables when it opens them."""
    segment: int
    """Records of one segment."""
    lease_us: int
    """How long a renewal lasts."""
    epoch: int
    """Raised with each owner; 0: there was none yet."""
    holder: UUID | None
    """Who owns it; None: who is named by `owner`, or anybody if that is empty."""
    owner: str
    """The owner's name."""
    address: str
    """Where others reach the owner."""
    secret: bytes
    """By which servers know each other at the peer port."""
    moved: str
    """Where the data was exported to; empty: it is here."""
    snapshots: str
    """URL at which snapshots are kept; empty: in this database."""
    keep_us: int
    """For how long snapshots and the log go back, so that any instant can be restored; at least two snapshots."""


class Outdated(Unfit):
    """The cluster has a state format that this release does not work with."""


class Formats(NamedTuple):
    """The state formats that a release works with."""

    oldest: int
    newest: int

    def admit(self, shard: Shard) -> None:
        """Raises Outdated if the cluster's is none of them."""
        if shard.format > self.newest:
            raise Outdated(
                f"the cluster has state format {shard.format}, this release knows {self.newest}: upgrade this server"
            )
        if shard.format < self.oldest:
            raise Outdated(
                f"the cluster has state format {shard.format}, this release needs {self.oldest}: upgrade release by "
                "release, and run `veilmq cluster finalize` after each"
            )


class WrongCluster(Unfit):
    """The database holds another cluster than the one asked for."""


UNKNOWN: Final = "what was asked for may have been done all the same: run the command again"


def init(
    postgres: Postgres,
    *,
    state_format: int,
    incarnation: UUID | None = None,
    lease_us: int | None = None,
    segment: int = SEGMENT,
    snapshots: str | None = None,
    keep_us: int | None = None,
) -> Shard:
    """Create the tables of a cluster, or find that they are there: a second call changes nothing but `snapshots` and
    `keep_us`, where they are given.

    state_format: number of the state format that records begin with. incarnation: the one that must be there if there
    is one; None: any. lease_us: LEASE_US of a new cluster unless given. Raises Unreachable; Uncertain; Unfit, also if
    the cluster is there and has another lease than the one given.
    """
    failed = "did not change the cluster"
    with postgres.connect() as session:
        try:
            with session.certain(), session.transaction():
                session.execute("select pg_advisory_xact_lock(hashtext('veilmq'))")
                [(exists,)] = session.execute("select to_regclass('veilmq.shard') is not null")
                if not exists:
                    failed = "did not create the tables"
                    _create(session, state_format, incarnation or uuid4(), lease_us or LEASE_US, segment)
                elif lease_us is not None and (has_us := look(session).lease_us) != lease_us:
                    raise Unfit(
                        f"the cluster is there already, with a lease of {has_us / SECOND_US:g} s, which stays as it "
                        "was made: leave --lease out"
                    )
                if snapshots is not None or keep_us is not None:
                    session.execute(_KEEPING, (snapshots, keep_us, SHARD))
            with session.certain(goes_on=True):
                return look(session, incarnation=incarnation)
        except psycopg.errors.InsufficientPrivilege as error:
            [(exists,)] = session.execute("select to_regnamespace('veilmq') is not null")
            may_not = (
                "use the schema veilmq, which is there already: use the role that created it"
                if exists
                else f"create the tables: grant it CREATE on the database {session.info.dbname!r}"
            )
            raise Unfit(f"the role {session.info.user!r} may not {may_not} ({error.diag.message_primary})") from error
        except psycopg.OperationalError as error:
            raise Unreachable(f"PostgreSQL {failed}: {text_of(error)}") from error
        except Uncertain as error:
            raise Uncertain(f"{error}; {UNKNOWN}") from error


def _create(session: Session, state_format: int, incarnation: UUID, lease_us: int, segment: int) -> None:
    [(others,)] = session.execute(
        "select count(*) from pg_class where relnamespace = to_regnamespace('veilmq') and relkind = 'r'"
    )
    if others:
        raise Unfit("the schema veilmq holds tables that are not ours: use another database")
    session.execute("create schema if not exists veilmq" if _may_create(session) else "select 1")
    session.execute(_TABLES)
    session.execute(
        "insert into veilmq.shard values (%s, %s, %s, %s, %s, %s, 0, null, '', '', %b, '')",
        (SHARD, LAYOUT, state_format, incarnation, segment, lease_us, secrets.token_bytes(SECRET_BYTES)),
    )
    session.execute("insert into veilmq.lease values (%s, 0, 0, 0, clock_timestamp(), null)", (SHARD,))
    add_segment(session, 0, segment)


def _may_create(session: Session) -> bool:
    """Whether the schema is to be made: the operator may have made it for a role that may make none."""
    [(there,)] = session.execute("select to_regnamespace('veilmq') is not null")
    return not there


def look(session: Session, *, incarnation: UUID | None = None, lock: LiteralString = "") -> Shard:
    """The row of the shard.

    incarnation: the one that it must be of. lock: `for update`, within a transaction.
    Raises Unfit if there is no cluster, of another release or another one; psycopg's errors.
    """
    query = sql.SQL("select {} from veilmq.shard where id = %s {}").format(sql.SQL(_COLUMNS), sql.SQL(lock))
    try:
        with session.cursor(row_factory=class_row(Shard)) as cursor:
            shard = cursor.execute(query, (SHARD,)).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        shard = None
    except psycopg.errors.UndefinedColumn as error:
        raise Unfit(
            f"the schema veilmq is not of this release: upgrade this server or command ({error.diag.message_primary})"
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise Unfit(
            f"the role {session.info.user!r} may not use the cluster's tables: use the role that created them "
            f"({error.diag.message_primary})"
        ) from error
    if shard is None:
        raise Unfit(f"there is no cluster in the database {session.info.dbname!r}: run `veilmq cluster init` once")
    if shard.layout > LAYOUT:
        raise Unfit(f"a newer VeilMQ made this cluster (layout {shard.layout}; this one knows {LAYOUT}): upgrade")
    if incarnation is not None and shard.incarnation != incarnation:
        raise WrongCluster(
            f"the database holds the cluster {shard.incarnation}, not {incarnation}: name the right database, or "
            "remove the data directory that was of the other one"
        )
    return shard


def refuse_moved(shard: Shard) -> None:
    """Raises WrongCluster if the cluster's data is elsewhere now."""
    if shard.moved:
        raise WrongCluster(f"the cluster's data was exported to {shard.moved}: serve it there, or make a new cluster")


def admit(session: Session, incarnation: UUID | None) -> Shard:
    """As `look`, and that the role can do all that a server does: it also makes and drops segments."""
    shard = look(session, incarnation=incarnation)
    [(owns, creates, owner)] = session.execute(
        "select pg_has_role(relowner, 'usage'), has_schema_privilege('veilmq', 'create'), pg_get_userbyid(relowner) "
        "from pg_class where oid = 'veilmq.shard'::regclass"
    )
    if not (owns and creates):
        raise Unfit(
            f"the role {session.info.user!r} cannot make and drop the cluster's tables: use the role that created "
            f"them, {owner!r}, or grant that one to it"
        )
    return shard


# Segments


def segment_table(number: int) -> sql.Identifier:
    """The table of a segment."""
    return sql.Identifier("veilmq", SEGMENT_NAME.format(number))


def add_segment(session: Session, number: int, segment: int) -> None:
    """Create the table of a segment, unless it is there."""
    statement = sql.SQL(_SEGMENT).format(table=segment_table(number), segment=segment, number=number)
    # Of two that create it at once, one fails.
    with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
        session.execute(statement)


def segments(session: Session) -> list[int]:
    """Numbers of the segments that are there, rising."""
    rows: list[tuple[Any, ...]] = session.execute(
        "select relname from pg_class where relnamespace = 'veilmq'::regnamespace and relkind = 'r'"
    ).fetchall()
    names = (re.fullmatch(rf"log_{SHARD}_(\d+)", name) for (name,) in rows)
    return sorted(int(match[1]) for match in names if match)


def log_bytes(session: Session, lsn: int = 0, segment: int = SEGMENT) -> int:
    """Bytes of the records after lsn: of its own segment the share that they are of its records."""
    numbers = [number for number in segments(session) if number >= lsn // segment]
    names = [f"veilmq.{SEGMENT_NAME.format(number)}" for number in numbers]
    sizes = [
        int(size or 0)
        for (size,) in session.execute(
            "select pg_total_relation_size(to_regclass(name)) from unnest(%s::text[]) as name", (names,)
        )
    ]
    if lsn and numbers and numbers[0] == lsn // segment:
        query = sql.SQL("select coalesce(max(lsn), 0) from {}").format(segment_table(numbers[0]))
        [(last,)] = session.execute(query)
        sizes[0] = sizes[0] * (last - lsn) // (last % segment + 1)
    return sum(sizes)


def drop_segments(session: Session, lsn: int, segment: int) -> list[int]:
    """Drop each segment whose records are all below lsn, oldest first, and return their numbers.

    lsn: at most that of the last record, which stays: the next append looks for it.
    Raises psycopg.errors.LockNotAvailable if somebody reads one of them for long.
    """
    dropped = [number for number in segments(session) if (number + 1) * segment <= lsn]
    for number in dropped:
        session.execute(sql.SQL("drop table if exists {}").format(segment_table(number)))
    return dropped
