"""Which servers a cluster has, how they and their log stand, and what an operator decides: drain, forget, the format.

Strategy: each server has a row, by its name, and writes into it about once a second that it is there. A row stays when
its server stops, for it is to come back: only an operator removes it. The state format is that of the tables, and what
is packed in them. A release works with some formats; the one that a cluster has changes only when every server in these
rows knows the new one. The shard's row is locked for that, as it is when a server registers: so either the change sees
the server, or the server sees the change.

Before changing it: nothing rests on these rows alone. A server that nobody counted meets records of a format that it
does not know, and stops there with its copy as it is.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import datetime
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

import msgspec

from veilmq.cluster.postgres import Connected, Postgres, Session, Unfit, Unreachable
from veilmq.cluster.postgres.log.reading import LogReader
from veilmq.cluster.postgres.ownership import DOUBTED, Server
from veilmq.cluster.postgres.schema import SHARD, Formats, log_bytes, look, refuse_moved, segments
from veilmq.store.archive import shown_url

T = TypeVar("T")

ALIVE_SECONDS: Final = 5.0
"""A server that was not seen for so long is silent."""
STILL_SECONDS: Final = 0.5
"""A standby that lacks some of the log, and for so long applies and reports nothing, stands still."""
_LOOK_SECONDS: Final = 0.1

# An instant in the future is from before the clock was set back: the server has not been seen since.
_SEEN: Final = """
    select holder, role <> 'stopped' and abs(extract(epoch from clock_timestamp() - seen)) < %s, seen,
           abs(extract(epoch from clock_timestamp() - seen))::float8, address
    from veilmq.server where name = %s for update
"""
_REGISTER: Final = """
    insert into veilmq.server as mine
    (name, address, holder, release, oldest, newest, format, record, role, drained, seen)
    values (%s, %s, %s, %s, %s, %s, 0, 0, 'starting', false, clock_timestamp())
    on conflict (name) do update set (address, holder, release, oldest, newest, role, drained, seen)
    = (excluded.address, excluded.holder, excluded.release, excluded.oldest, excluded.newest, excluded.role,
       mine.drained and not %s, excluded.seen)
    returning drained
"""
# It need not outlive anything, so it waits for no standby; nor long for a lock, since an owner must renew its lease.
_REPORT: Final = """
    with soon as materialized (
        select set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '200ms', true)
    )
    update veilmq.server set address = %s, format = %s, record = %s, role = %s, seen = clock_timestamp()
    from soon where name = %s and holder = %s and address = any(%s) returning drained
"""
_LIST: Final = """
    select name, address, release, oldest, newest, format, record, role, drained,
           abs(extract(epoch from clock_timestamp() - seen))::float8
    from veilmq.server order by name
"""
_ASK: Final = "update veilmq.lease set wanted = %s where id = %s returning epoch"
_LEASE: Final = """
    select beat, greatest(0, extract(epoch from clock_timestamp() - renewed))::float8 from veilmq.lease where id = %s
"""
# `reply_time` is the standby's clock: it is only compared with itself.
_STANDBYS: Final = """
    select application_name, coalesce(sync_state, ''), coalesce(state, ''),
           coalesce(extract(epoch from replay_lag), 0)::float8, pid,
           case when replay_lsn < pg_current_wal_flush_lsn() then (reply_time, replay_lsn)::text end
    from pg_stat_replication order by 1
"""
_SNAPSHOT: Final = """
    select coalesce(max(lsn), 0),
           case when count(*) > 0 then greatest(0, extract(epoch from clock_timestamp() - max(written))) end::float8,
           coalesce((select verified_by from veilmq.snapshot order by lsn desc limit 1), '')
    from veilmq.snapshot
"""
FILLING: Final = "filling"
"""The role of a server whose copy was thrown away, and is being filled again: it cannot own the queues meanwhile."""
STARTING: Final = "starting"
"""The role of a server until it has all of the log. It may have to fill its copy first, so it cannot own the queues."""
_UNTIL: Final = {FILLING: "has filled its copy", STARTING: "has caught up with the log"}
_NOT_TAKEN: Final = "PostgreSQL did not store that this server is alive"

log = logging.getLogger("veilmq.cluster")


class NameTaken(Unfit):
    """Another server of the same name is running, or was a moment ago."""

    def __init__(self, name: str, seen: datetime, silent_s: float) -> None:
        super().__init__(f"another server of this cluster is called {name}: give one of them another --cluster-name")
        self.seen, self.silent_s = seen, silent_s
        """When it reported last that it is there, and how long ago, by PostgreSQL's clock."""


class Registered(msgspec.Struct):
    """A server that belongs to the cluster, whether or not it runs."""

    name: str
    address: str
    release: str
    oldest: int
    newest: int
    """State formats that its release works with."""
    format: int
    """Of its copy."""
    record: int
    """The last one that its copy has."""
    role: str
    """`owner`, `follower`, `drained`, `starting`, `filling`, `stopped`: what it reported last."""
    drained: bool
    """Whether an operator wants it to own nothing."""
    seen_s: float
    """How long ago it was seen, by PostgreSQL's clock."""

    @property
    def is_running(self) -> bool:
        """Whether it was seen lately."""
        return self.role != "stopped" and self.seen_s < ALIVE_SECONDS

    @property
    def absence(self) -> str:
        """`not running`: it was stopped. `silent`: it ended otherwise, or PostgreSQL does not take its report, as while
        that waits for a standby. Empty: it runs."""
        if self.is_running:
            return ""
        return "not running" if self.role == "stopped" else "silent"

    def knows(self, state_format: int) -> bool:
        """Whether its release works with that format."""
        return self.oldest <= state_format <= self.newest


class ServerState(NamedTuple):
    """What a server reports of itself."""

    role: str
    format: int
    record: int


class Registry(Connected):
    """One server's row. Any thread."""

    def __init__(self, postgres: Postgres, incarnation: UUID, server: Server, release: str, formats: Formats) -> None:
        self._turn = threading.RLock()
        self.reported = ServerState(STARTING, 0, 0)
        """What was reported last, and stored."""
        self.drained = False
        """Whether an operator wants this server to own nothing."""
        self.server = server
        self._addresses: set[str] = set()
        """All that were written here. A server that runs on a copy of this one's directory has another one."""
        self._postgres = postgres
        self._incarnation = incarnation
        self._release = release
        self._formats = formats

    def register(self, *, again: bool = False) -> None:
        """Write the row. A server that starts is not drained; again: it runs already.

        A copy of a server's directory has the same holder. So the row is also another server's, while that is alive, if
        it has another address. One that was killed and starts at another one waits until it has been silent.
        Raises NameTaken, Unreachable, Unfit.
        """
        name, address, holder = self.server[:3]
        with self._asking(_NOT_TAKEN):
            session = self._connected()
            with session.certain(), session.transaction():
                shard = look(session, incarnation=self._incarnation, lock="for key share")
                self._formats.admit(shard)
                before = session.execute(_SEEN, (ALIVE_SECONDS, name)).fetchone()
                ours = self._addresses if again else {address} - {""}
                if before is not None and before[1] and (before[0] != holder or before[4] not in ours):
                    raise NameTaken(name, *before[2:4])
                self._addresses.add(address)
                formats = (self._formats.oldest, self._formats.newest)
                row = session.execute(_REGISTER, (name, address, holder, self._release, *formats, not again)).fetchone()
                assert row is not None
                self.drained = row[0]

    def report(self, state: ServerState) -> None:
        """Report what this server is and has; learn whether it is to be drained. Raises as `register`."""
        with self._turn:
            self._report(state)

    def _report(self, state: ServerState) -> None:
        name, address, holder = self.server[:3]
        role = "drained" if self.drained and state.role in {"follower", FILLING} else state.role
        with self._asking(_NOT_TAKEN):
            values = (address, state.format, state.record, role, name, holder, list(self._addresses))
            self._addresses.add(address)
            row = self._connected().execute(_REPORT, values, prepare=True).fetchone()
        if row is None:  # an operator took it for gone
            self.register(again=True)
            self._report(state)
            return
        self.reported = state
        if row[0] != self.drained:
            self.drained = row[0]
            log.info("%s by an operator", "drained" if self.drained else "not drained any more")
            self._report(state)

    def leave(self) -> None:
        """Say that the server stops, unless the connection is lost."""
        with self._turn:
            if self._session is not None and not self._session.closed:
                with suppress(Unreachable, Unfit):
                    self.report(self.reported._replace(role="stopped"))
            self.close()

    def _connected(self) -> Session:
        if self._session is None or not self._postgres.is_usable(self._session):
            self.close()
            self._session = self._postgres.connect()
        return self._session


def servers(session: Session) -> list[Registered]:
    """All of them, by name. Raises psycopg's errors."""
    return [Registered(*row) for row in session.execute(_LIST)]


def drain(session: Session, name: str, *, undo: bool = False) -> None:
    """Want a server to own nothing, and to answer those who ask for its health that it is not ready; or end that.

    Raises Unfit if there is no such server, or no other that could own the queues; psycopg's errors.
    """
    with session.transaction():
        look(session, lock="for update")  # of two at once, the second counts the first one's server as drained
        found = servers(session)
        _named(found, name)
        if not undo and not another(found, name):
            raise Unfit(f"{_no_other(found, name)}, before you drain {name}")
        session.execute("update veilmq.server set drained = %s where name = %s", (not undo, name))


def forget(session: Session, name: str) -> None:
    """Remove a server that will not come back. Raises Unfit if there is none or it is running; psycopg's errors."""
    with session.transaction():
        look(session, lock="for key share")
        found = _named(servers(session), name)
        if found.is_running:
            raise Unfit(f"server {name} is running, it was seen {found.seen_s:.1f} s ago: stop it first")
        session.execute("delete from veilmq.server where name = %s", (name,))


def finalize(session: Session) -> int:
    """Let the cluster have the newest state format that a server knows, and return it: the next owner gives it to the
    tables.

    Raises Unfit if another server does not know it, or the data is elsewhere now; psycopg's errors, Uncertain.
    """
    with session.certain(), session.transaction():
        shard = look(session, lock="for update")
        refuse_moved(shard)
        found = servers(session)
        wanted = max([shard.format, *(each.newest for each in found)])
        _refuse_old(found, wanted)
        session.execute("update veilmq.shard set format = %s where id = %s", (wanted, SHARD))
    return wanted


def ask_to_hand_over(session: Session, to: str, *, doubted: bool = False, anew: bool = False) -> int:
    """Ask the owner to hand over to a server, or with an empty name to any other; it looks at each renewal. Returns the
    epoch that then ends. doubted: and to fill its copy anew, since it is not what its records have made of other
    servers'. anew: if there is no other server, the owner may take over from itself. Raises Unfit if that server, or no
    other one, could own the queues; psycopg's errors."""
    found, shard = servers(session), look(session)
    if not to and not any(each.is_running for each in found):
        refuse_moved(shard)
        raise Unfit("no server of this cluster is running: start one")
    if (to or not anew) and (why := _why_not_owner(found, shard.owner, to)):
        raise Unfit(why)
    if to and to == shard.owner and shard.holder is not None and not doubted:
        return shard.epoch  # it owns the queues already
    [(epoch,)] = session.execute(_ASK, (f"{to}{DOUBTED}" if doubted else to, SHARD))
    return int(epoch)


def another(found: Sequence[Registered], name: str) -> bool:
    """Whether a server other than the one of that name could own the queues."""
    return any(each.role not in _UNTIL for each in _others(found, name))


def _others(found: Sequence[Registered], name: str) -> list[Registered]:
    return [each for each in found if each.name != name and each.is_running and not each.drained]


def _no_other(found: Sequence[Registered], name: str) -> str:
    none = f"no {'other ' if name else ''}server could own the queues"
    if not (others := _others(found, name)):
        return f"{none}: start one, or undrain one"
    return f"{none}: wait until {others[0].name} {_UNTIL[others[0].role]}"


def _why_not_owner(found: Sequence[Registered], owner: str, to: str) -> str:
    if not to:
        return "" if another(found, owner) else _no_other(found, owner)
    wanted = {each.name: each for each in found}.get(to)
    if wanted is None:
        return _unknown(found, to)
    if wanted.drained or not wanted.is_running:
        why = "drained" if wanted.drained else f"{wanted.absence}, it was seen {wanted.seen_s:.0f} s ago"
        return f"server {to} is {why}: name another one"
    if wanted.role in _UNTIL:
        return f"server {to} is {wanted.role}: wait until it {_UNTIL[wanted.role]}, or name another one"
    return ""


def _refuse_old(found: Sequence[Registered], wanted: int) -> None:
    old = [f"{each.name} (release {each.release})" for each in found if not each.knows(wanted)]
    if old:
        raise Unfit(
            f"state format {wanted} is not known to {', '.join(old)}: upgrade them, or `veilmq cluster forget` who "
            "will not come back"
        )


def _named(found: Sequence[Registered], name: str) -> Registered:
    for each in found:
        if each.name == name:
            return each
    raise Unfit(_unknown(found, name))


def _unknown(found: Sequence[Registered], name: str) -> str:
    names = ", ".join(each.name for each in found)
    return f"there is no server {name}: name one of {names}" if found else "no server has joined yet"


class Standby(msgspec.Struct):
    """A standby that follows the primary now."""

    name: str
    sync: str
    """`sync` or `quorum`: it confirms commits; `async` or `potential`: it does not."""
    state: str
    lag_s: float
    """As it reported last, by the primary's clock."""
    stands_still: bool = False
    """Whether it lacks something and reported nothing while we looked: for how long it has, its clock alone knows."""


class Status(msgspec.Struct, kw_only=True):
    """The state of a cluster, as its PostgreSQL shows it to anybody who asks."""

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
    """URL at which snapshots are kept, without a password; empty: in PostgreSQL."""
    keep_s: float = 0.0
    """How far a restore can go back at least; 0: to the older of two snapshots."""
    moved: str = ""
    """Directory to which `veilmq cluster export` takes or took the data; empty: it is here."""
    standbys: list[Standby]
    missing: str = ""
    """The standbys that every client waits for: too few of those that must confirm commits are connected. Empty: none,
    or this role may not see it."""
    single_copy: bool
    """Whether commits wait for no standby, so that what is acknowledged is on one machine."""
    servers: list[Registered]
    """All that belong to the cluster, by name."""

    def server(self, name: str) -> Registered | None:
        """The one of that name."""
        return next((each for each in self.servers if each.name == name), None)

    def why_not_owner(self, to: str) -> str:
        """Why that server, or with an empty name any but the owner, could not own the queues; empty: it could."""
        return _why_not_owner(self.servers, self.owner, to)

    @property
    def confirming(self) -> int:
        """Standbys that confirm commits."""
        return sum(standby.sync in {"sync", "quorum"} for standby in self.standbys)

    @property
    def blind(self) -> bool:
        """Whether this role may not see which standbys confirm commits."""
        return not all(standby.sync for standby in self.standbys)


def within(postgres: Postgres, act: Callable[[Session], T]) -> T:
    """What a function of the registry does or finds, on a connection of its own. Raises Unreachable, Unfit."""
    with postgres.session() as session:
        look(session)
        return act(session)


def _standbys(session: Session) -> list[Standby]:
    """Looks again for `STILL_SECONDS` if one of them may stand still. Raises psycopg's errors."""
    found = session.execute(_STANDBYS).fetchall()
    still = {pid: said for *_, pid, said in found if said is not None}
    for _ in range(round(STILL_SECONDS / _LOOK_SECONDS)):
        if not still:
            break
        session.execute("select pg_sleep(%s)", (_LOOK_SECONDS,))
        found = session.execute(_STANDBYS).fetchall()
        still = {pid: said for *_, pid, said in found if said is not None and still.get(pid) == said}
    return [Standby(name, sync, state, lag_s, pid in still) for name, sync, state, lag_s, pid, _ in found]


def status(postgres: Postgres) -> Status:
    """Ask. Raises Unreachable, Unfit."""
    with postgres.session() as session:
        shard, missing, single_copy = look(session), session.missing, session.single_copy
        [(beat, renewed_s)] = session.execute(_LEASE, (SHARD,))
        size = log_bytes(session)
        [(snapshot, snapshot_age_s, verified_by)] = session.execute(_SNAPSHOT)
        standbys = _standbys(session)
        count, registered = len(segments(session)), servers(session)
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
        snapshots=shown_url(shard.snapshots),
        keep_s=shard.keep_us / 1e6,
        moved=shard.moved,
        standbys=standbys,
        missing=missing,
        single_copy=single_copy,
        servers=registered,
    )
