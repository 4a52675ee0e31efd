"""The state of a cluster, as its PostgreSQL shows it to anybody who asks; and the way of an operator's wish there."""

from collections.abc import Callable
from contextlib import closing
from typing import Final, TypeVar
from uuid import UUID

import msgspec
import psycopg

from veilmq.cluster.postgres import Postgres, Session, Unreachable
from veilmq.cluster.postgres.log.reading import LogReader
from veilmq.cluster.postgres.schema import SHARD, log_bytes, look, segments
from veilmq.cluster.registry import Registered, servers

T = TypeVar("T")

_LEASE: Final = """
    select beat, greatest(0, extract(epoch from clock_timestamp() - renewed))::float8 from veilmq.lease where id = %s
"""
_STANDBYS: Final = """
    select application_name, coalesce(sync_state, ''), coalesce(state, ''),
           coalesce(extract(epoch from replay_lag), 0)::float8
    from pg_stat_replication order by 1
"""
_SNAPSHOT: Final = """
    select coalesce(max(lsn), 0), greatest(0, extract(epoch from clock_timestamp() - max(written)))::float8,
           coalesce((select verified_by from veilmq.snapshot order by lsn desc limit 1), '')
    from veilmq.snapshot
"""


class Standby(msgspec.Struct):
    """A standby that follows the primary now."""

    name: str
    sync: str
    """`sync` or `quorum`: it confirms commits; `async` or `potential`: it does not."""
    state: str
    lag_s: float


class Status(msgspec.Struct, kw_only=True):
    """See the module."""

    incarnation: UUID
    format: int
    owner: str
    """Empty: nobody, or whoever is faster."""
    address: str
    epoch: int
    lease_s: float
    renewed_s: float
    """How long ago the owner renewed its lease, by PostgreSQL's clock."""
    owned: bool
    """Whether that was within a lease."""
    records: int
    """Number of the last record."""
    segments: int
    log_bytes: int
    snapshot: int
    """Number of the last record in the newest snapshot; 0: there is none."""
    snapshot_age_s: float | None
    """How long ago it was written, by PostgreSQL's clock."""
    snapshot_verified_by: str = ""
    """The server that had the same tables; empty: there was no other."""
    snapshots: str = ""
    """URL at which snapshots are kept; empty: in PostgreSQL."""
    keep_s: float = 0.0
    """How far a restore can go back at least; 0: to the older of two snapshots."""
    standbys: list[Standby]
    servers: list[Registered]
    """All that belong to the cluster, by name."""

    def server(self, name: str) -> Registered | None:
        """The one of that name."""
        return next((each for each in self.servers if each.name == name), None)

    @property
    def confirming(self) -> int:
        """Standbys that confirm commits."""
        return sum(standby.sync in {"sync", "quorum"} for standby in self.standbys)


def within(postgres: Postgres, act: Callable[[Session], T]) -> T:
    """What a function of the registry does or finds, on a connection of its own. Raises Unreachable, Unfit."""
    try:
        with postgres.connect() as session:
            look(session)
            return act(session)
    except psycopg.Error as error:
        raise Unreachable(f"PostgreSQL does not answer: {error}") from error


def status(postgres: Postgres) -> Status:
    """Ask. Raises Unreachable, Unfit."""
    try:
        with postgres.connect() as session:
            shard = look(session)
            [(beat, renewed_s)] = session.execute(_LEASE, (SHARD,))
            size = log_bytes(session)
            [(snapshot, snapshot_age_s, verified_by)] = session.execute(_SNAPSHOT)
            standbys = [Standby(*row) for row in session.execute(_STANDBYS)]
            count, registered = len(segments(session)), servers(session)
    except psycopg.Error as error:
        raise Unreachable(f"PostgreSQL does not answer: {error}") from error
    with closing(LogReader(postgres, shard.incarnation)) as reader:
        end = reader.end()
    lease_s = shard.lease_us / 1e6
    return Status(
        incarnation=shard.incarnation,
        format=shard.format,
        owner=shard.owner,
        address=shard.address,
        epoch=shard.epoch,
        lease_s=lease_s,
        renewed_s=renewed_s,
        owned=shard.holder is not None and bool(beat) and renewed_s <= lease_s,
        records=end.lsn,
        segments=count,
        log_bytes=size,
        snapshot=snapshot,
        snapshot_age_s=snapshot_age_s,
        snapshot_verified_by=verified_by,
        snapshots=shard.snapshots,
        keep_s=shard.keep_us / 1e6,
        standbys=standbys,
        servers=registered,
    )
