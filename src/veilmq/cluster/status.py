"""The state of a cluster, as its PostgreSQL shows it to anybody who asks; and what an operator asks of its owner."""

from contextlib import closing
from typing import Final
from uuid import UUID

import msgspec
import psycopg

from veilmq.cluster.postgres import Postgres, Unreachable
from veilmq.cluster.postgres.log.reading import LogReader
from veilmq.cluster.postgres.schema import SHARD, log_bytes, look, segments

_LEASE: Final = """
    select beat, greatest(0, extract(epoch from clock_timestamp() - renewed))::float8 from veilmq.lease where id = %s
"""
_STANDBYS: Final = """
    select application_name, coalesce(sync_state, ''), coalesce(state, ''),
           coalesce(extract(epoch from replay_lag), 0)::float8
    from pg_stat_replication order by 1
"""
_SNAPSHOT: Final = """
    select coalesce(max(lsn), 0), greatest(0, extract(epoch from clock_timestamp() - max(written)))::float8
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
    standbys: list[Standby]

    @property
    def confirming(self) -> int:
        """Standbys that confirm commits."""
        return sum(standby.sync in {"sync", "quorum"} for standby in self.standbys)


_ASK: Final = "update veilmq.lease set wanted = %s where id = %s returning epoch"


def ask_to_hand_over(postgres: Postgres, to: str) -> int:
    """Ask the owner to hand over to a server, or with an empty name to any; it looks at each renewal. Returns the epoch
    that then ends. Raises Unreachable, Unfit."""
    try:
        with postgres.connect() as session:
            look(session)
            [(epoch,)] = session.execute(_ASK, (to, SHARD))
    except psycopg.Error as error:
        raise Unreachable(f"PostgreSQL does not answer: {error}") from error
    return int(epoch)


def status(postgres: Postgres) -> Status:
    """Ask. Raises Unreachable, Unfit."""
    try:
        with postgres.connect() as session:
            shard = look(session)
            [(beat, renewed_s)] = session.execute(_LEASE, (SHARD,))
            size = log_bytes(session)
            [(snapshot, snapshot_age_s)] = session.execute(_SNAPSHOT)
            standbys = [Standby(*row) for row in session.execute(_STANDBYS)]
            count = len(segments(session))
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
        standbys=standbys,
    )
