"""The connection to the cluster's PostgreSQL, and what must hold on it before a server trusts what it says.

Strategy: settings that decide whether a commit is durable are sent with the start of each connection, where they win
over those of the role and the database, and are read back: a pooler may have dropped them. What only an operator can
set is checked on each connection and at each renewal of the lease. Each refusal is one sentence that says what to do.

A commit whose wait for the standby is cancelled succeeds with a mere warning. So a session keeps what the server
remarked, and whoever needs certainty asks `Session.certain`.
"""

import re
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final, NamedTuple, cast

import psycopg
from psycopg import pq
from psycopg.abc import RV, PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import RowFactory, tuple_row

VERSION_MIN: Final = 14
CONNECT_SECONDS: Final = 5
LOCK_MS: Final = 2_000
"""How long a statement waits for a row or table that another session has locked."""
STATEMENT_SECONDS: Final = 10.0
"""How long a statement may take, with the standby's confirmation, before its connection counts as lost."""
_BETWEEN_SECONDS: Final = 0.05
"""If a connection's lock is held for longer than this, an exchange is under way."""

# A peer that is gone without a word is noticed within about ten seconds.
_NETWORK: Final[dict[str, Any]] = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "veilmq",
}
_SETTINGS: Final = {
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "client_min_messages": "notice",  # a role that hides warnings would hide that a commit was not replicated
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}
_STATE: Final = """
    select pg_is_in_recovery(),
           case when pg_is_in_recovery() then '0' else substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) end,
           (select system_identifier from pg_control_system()),
           btrim(current_setting('synchronous_standby_names')),
           current_setting('fsync'),
           current_setting('full_page_writes'),
           coalesce(current_setting('transaction_timeout', true), '0'),
           (select case when count(*) = count(sync_state) then coalesce(array_agg(lower(application_name))
                   filter (where sync_state <> 'async'), '{}') end from pg_stat_replication)
"""
# Only that for locks is never PostgreSQL's default, so it is missed where whatever is in between drops all of them.
_CHOSEN: Final = (
    "select " + ", ".join(f"current_setting('{name}')" for name in _SETTINGS)
    + ", (select setting from pg_settings where name = 'lock_timeout')"
)  # fmt: skip


class ClusterError(Exception):
    """Root of what can go wrong between a server and the cluster's PostgreSQL."""


class Unreachable(ClusterError):
    """PostgreSQL does not answer now. Trying again may help."""


class Uncertain(Unreachable):
    """It cannot be known whether PostgreSQL has done what it was asked, or whether that would survive a failover."""


class Unfit(ClusterError):
    """PostgreSQL answers, and a server must not work with it as it is. The text says what to do."""


class Seen(NamedTuple):
    """Which PostgreSQL a server has worked with. Kept with its data, so that it notices another one."""

    system: int = 0
    """The system identifier; 0: none yet."""
    timeline: int = 0
    """The highest timeline; each promotion of a standby begins one."""

    def after(self, other: "Seen") -> "Seen":
        """What is known after `other` was seen, too."""
        return Seen(other.system, max(self.timeline, other.timeline))


NOTHING: Final = Seen()


class Session(psycopg.Connection[tuple[Any, ...]]):
    """One connection, in autocommit. Belongs to one thread at a time; any thread may close it."""

    remarks: list[str]
    """Notices and warnings since the last `certain` began."""
    seconds_max: float = STATEMENT_SECONDS
    """Limit for each exchange."""
    timeline: int = 0
    """The primary's timeline when it was checked last."""
    missing: str = ""
    """The standbys that a commit waited for when that was checked last: too few of them were connected."""
    single_copy: bool = False
    """Whether commits waited for no standby when that was checked last."""

    def __init__(self, pgconn: pq.abc.PGconn, row_factory: RowFactory[tuple[Any, ...]] = tuple_row) -> None:
        self._closing = False
        super().__init__(pgconn, row_factory)
        self.remarks = []
        self.add_notice_handler(lambda notice: self.remarks.append(notice.message_primary or ""))

    def wait(self, gen: PQGen[RV], *args: Any, **options: Any) -> RV:
        """Instead of psycopg's, which waits for ever, and cancels what runs on an interrupt of the process: an exchange
        that takes too long is a lost connection."""
        end = perf_counter() + self.seconds_max
        try:
            wanted = next(gen)
            while True:
                wanted = gen.send(self._ready(wanted, end))
        except StopIteration as stop:
            return cast("RV", stop.value)
        except psycopg.errors.LockNotAvailable as error:
            if not self.missing:
                raise
            raise psycopg.errors.LockNotAvailable(f"{text_of(error)}, perhaps behind a commit{self._waits}") from error
        except BaseException as error:
            self._closing |= not isinstance(error, Exception)  # Ctrl-C: no rollback may follow on this connection
            raise
        finally:
            if self._closing:
                super().close()

    def close(self) -> None:
        """Close it. An exchange that is under way in another thread does so when it ends: freeing libpq's connection
        under it ends the process by a signal."""
        self._closing = True
        if self.lock.acquire(timeout=_BETWEEN_SECONDS):  # psycopg holds it for each exchange
            try:
                super().close()
            finally:
                self.lock.release()

    def _ready(self, wanted: int, end: float) -> int:
        """Which of what is wanted can be done: 1 reading, 2 writing."""
        socket = select.poll()
        socket.register(self.fileno(), (select.POLLIN if wanted & 1 else 0) | (select.POLLOUT if wanted & 2 else 0))
        found = socket.poll(max(0.0, end - perf_counter()) * 1_000)
        if not found:
            self._closing = True
            raise psycopg.OperationalError(f"no answer within {self.seconds_max:g} s{self._waits}")
        [(_, ready)] = found  # an error, too, is read
        return (1 if ready & ~select.POLLOUT else 0) | (2 if ready & select.POLLOUT else 0)

    @property
    def _waits(self) -> str:
        """Why it does not answer, if that is known."""
        return f": it waits for its standby {self.missing}, which was not connected" if self.missing else ""

    @contextmanager
    def certain(self, *, goes_on: bool = False) -> Iterator[None]:
        """What the block commits is committed and replicated when it ends.

        goes_on: it was begun before; remarks since then count. Raises Uncertain if the connection was lost, or if the
        server remarked anything.
        """
        if not goes_on:
            self.remarks.clear()
        try:
            yield
        except psycopg.Error as error:
            if self.closed or error.diag.severity_nonlocalized in {"FATAL", "PANIC"}:
                raise Uncertain(f"the connection to PostgreSQL was lost: {text_of(error)}") from error
            raise
        if self._closing:  # psycopg ends a transaction on a closed connection without a COMMIT and without an error
            raise Uncertain("the connection to PostgreSQL was closed meanwhile")
        if self.remarks:
            raise Uncertain(f"PostgreSQL remarked: {'; '.join(self.remarks)}")


@contextmanager
def unreachable(failed: str) -> Iterator[None]:
    """Within the block psycopg's errors are Unreachable. failed: what did not happen."""
    try:
        yield
    except psycopg.Error as error:
        raise Unreachable(f"{failed}: {text_of(error)}") from error


class Connected:
    """Keeps a session, and makes another when that one is gone."""

    _session: Session | None = None

    def close(self) -> None:
        """Let the connection go; the next call makes another."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _check(self, postgres: "Postgres", session: Session) -> Session:
        """The session, if what an operator may have changed is still right. Raises as `Postgres.check`; after Unfit the
        connection is gone, for another host may be the primary now."""
        try:
            postgres.check(session)
        except Unfit:
            Connected.close(self)
            raise
        return session

    @contextmanager
    def _asking(self, failed: str = "PostgreSQL does not answer") -> Iterator[None]:
        """Within the block psycopg's errors are Unreachable, which lets the connection go."""
        try:
            with unreachable(failed):
                yield
        except Unreachable:
            Connected.close(self)  # a subclass's `close` ends more than the connection
            raise


class Postgres:
    """Where the cluster's PostgreSQL is. Used by any thread."""

    def __init__(
        self,
        dsn: str,
        *,
        single_copy: bool = False,
        seen: Seen = NOTHING,
        lock_ms: int = LOCK_MS,
        seconds_max: float = STATEMENT_SECONDS,
    ) -> None:
        """dsn: with one host, or several of which one is the primary. single_copy: no standby has to confirm a commit.

        Raises Unfit if the dsn is none.
        """
        self.single_copy = single_copy
        self.seconds_max = seconds_max
        self._seen = seen
        self._answered = ""
        """The place that answered last. It is asked first: one whose machine is off takes seconds to time out."""
        self._lock = threading.Lock()
        try:
            given = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError:
            # libpq's own words repeat it, with the password.
            raise Unfit(
                "this is no connection string of PostgreSQL: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
            ) from None
        host, port, database = (str(given.get(name) or "") for name in ("host", "port", "dbname"))
        if (
            any("@" in each[1:] for each in host.split(",") if not each.startswith("/"))  # else a socket's directory
            or not re.fullmatch(r"[\d, ]*", port)
            or ("@" in database and dsn.startswith(("postgresql://", "postgres://")))
        ):
            # libpq takes the end of a password for the host, the port or the database, and names them in its errors.
            raise Unfit(
                "in a connection string, write a password's @ as %40, its / as %2F and its : as %3A, and name the user"
                " once, before the first host"
            )
        self._chosen = _SETTINGS | {"lock_timeout": str(lock_ms)}
        # Backslashes keep the spaces of a value together.
        ours = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in self._chosen.items())
        given["options"] = f"{given.get('options') or ''} {ours}".strip()
        self._places = [make_conninfo(**{**_NETWORK, **given, **place}) for place in _hosts(given)]

    @property
    def seen(self) -> Seen:
        """What was seen until now."""
        return self._seen

    @contextmanager
    def session(self, failed: str = "PostgreSQL does not answer") -> Iterator[Session]:
        """A session for the block, in which psycopg's errors are Unreachable. Raises Unreachable, Unfit."""
        with unreachable(failed), self.connect() as session:
            yield session

    def connect(self, *, widely: bool = False) -> Session:
        """A session on the primary that may be trusted.

        widely: ask all hosts and take the one with the highest timeline, instead of the first that will do. The first
        connection always does.
        Raises Unreachable, Unfit.
        """
        best: Session | None = None
        answered = ""
        widely = widely or not self._answered
        refusals: list[ClusterError] = []
        for place in sorted(self._places, key=lambda place: place != self._answered):
            try:
                session = self._open(place)
            except ClusterError as error:
                refusals.append(error)
                continue
            if best is not None and session.timeline <= best.timeline:
                session.close()
                continue
            if best is not None:
                best.close()
            best, answered = session, place
            if not widely:
                break
        if best is not None and best.timeline == self._seen.timeline:
            self._answered = answered
            return best
        if best is not None:  # a newer one was refused for another reason, or another thread has seen one meanwhile
            best.close()
            refusals.append(Unreachable("a standby was promoted meanwhile"))
        # What is wrong with the primary says most, and of several hosts the others are standbys.
        refusals.sort(key=lambda error: (isinstance(error, IsStandby), isinstance(error, Unreachable)))
        raise refusals[0]

    def check(self, session: Session) -> None:
        """Look again at what an operator may have changed. Raises Unfit; psycopg's errors if the session is lost."""
        row = session.execute(_STATE, prepare=True).fetchone()
        assert row is not None
        standby, timeline, system, names, fsync, full_pages, transaction_timeout, connected = row
        if standby:
            raise IsStandby("this PostgreSQL is a standby: name the primary")
        session.timeline = int(timeline, 16)
        self._compare(Seen(system, session.timeline))
        if not names and not self.single_copy:
            raise Unfit(
                "no standby confirms commits: set synchronous_standby_names in PostgreSQL, or start with --single-copy"
            )
        session.single_copy = not names
        session.missing = "" if connected is None else _missing(names, connected)
        if fsync != "on":
            raise Unfit("PostgreSQL does not sync its files: set fsync = on")
        if full_pages != "on":
            raise Unfit("PostgreSQL does not mend pages that a crash tore: set full_page_writes = on")
        if transaction_timeout != "0":
            raise Unfit("PostgreSQL ends transactions after a time: set transaction_timeout = 0 for this role")

    def is_usable(self, session: Session) -> bool:
        """Whether a session that was idle can be used: nothing came from the server meanwhile (when it ends a session
        it says why, and closes), and no standby was promoted."""
        if session.closed or session.timeline < self._seen.timeline:
            return False
        idle = select.poll()
        idle.register(session.fileno(), select.POLLIN)
        return not idle.poll(0)

    def _compare(self, found: Seen) -> None:
        with self._lock:
            seen = self._seen
            if seen.system not in {0, found.system}:
                raise Unfit(
                    f"this is another PostgreSQL (system identifier {found.system}, before it was {seen.system}): "
                    "name the right one, or give the server an empty directory"
                )
            if found.timeline < seen.timeline:
                raise Unfit(
                    f"this PostgreSQL is a former primary (timeline {found.timeline}, another one is at "
                    f"{seen.timeline}): stop it, and name the one that was promoted"
                )
            self._seen = seen.after(found)

    def _open(self, place: str) -> Session:
        try:
            session = Session.connect(place, autocommit=True)
        except psycopg.OperationalError as error:
            raise _refusal(error) from error
        session.seconds_max = self.seconds_max
        try:
            if session.info.server_version < VERSION_MIN * 10_000:
                raise Unfit(
                    f"PostgreSQL {session.info.server_version // 10_000} is too old: use {VERSION_MIN} or later"
                )
            chosen = session.execute(_CHOSEN).fetchone()
            for (name, wanted), found in zip(self._chosen.items(), chosen or (), strict=True):
                if found != wanted:
                    raise Unfit(
                        f"{name} is {found} on a new connection, not {wanted}: connect to PostgreSQL without a pooler"
                    )
            self.check(session)
        except BaseException as error:
            session.close()
            if isinstance(error, psycopg.Error):
                raise Unreachable(f"PostgreSQL does not answer: {text_of(error)}") from error
            raise
        return session


class IsStandby(Unfit):
    """What was named is a standby."""


def _hosts(given: dict[str, Any]) -> list[dict[str, str]]:
    """One connection each for the hosts of a dsn. Raises Unfit."""
    lists: dict[str, Sequence[str]] = {
        name: str(given[name]).split(",") for name in ("host", "hostaddr", "port") if given.get(name)
    }
    count = max((len(values) for name, values in lists.items() if name != "port"), default=1)
    if any(len(values) != count for name, values in lists.items() if name != "port" or len(values) > 1):
        raise Unfit("the connection string must name as many ports as hosts, or one port for all")
    return [
        {name: values[number if len(values) > 1 else 0] for name, values in lists.items()} for number in range(count)
    ]


def _refusal(error: psycopg.OperationalError) -> ClusterError:
    """Why no connection came about. libpq gives no code here, only text."""
    text = text_of(error)
    if any(
        part in text
        for part in (
            "authentication failed", "no pg_hba.conf entry", "does not exist", "no password supplied",
            "not permitted to log in",
        )
    ):  # fmt: skip
        return Unfit(f"correct the role, its password or the database, or create what is missing: {text}")
    if "unsupported startup parameter" in text:
        return Unfit(f"a pooler is in between, connect to PostgreSQL itself: {text}")
    if any(part in text for part in ("invalid port number", "invalid integer value", "value: ")) and "invalid " in text:
        return Unfit(f"correct the connection string: {text}")
    advice = ""
    if "certificate" in text or "unknown ca" in text:  # libpq does not say that it has expired
        advice = "; renew it, or correct host, sslrootcert or sslcert in the connection string"
    return Unreachable(f"PostgreSQL cannot be reached: {text}{advice}")


def _missing(setting: str, connected: Sequence[str]) -> str:
    """Which standbys a commit waits for, by synchronous_standby_names; connected: those it names, in lower case."""
    counted = re.fullmatch(r"(?:(?:first|any)\s+)?(\d+)\s*\((.*)\)", setting, re.IGNORECASE | re.DOTALL)
    required, listed = (int(counted[1]), counted[2]) if counted else (1, setting)
    lacking = required - len(connected)
    absent = [one for one in map("".join, re.findall(r'"([^"]+)"|([^\s,"]+)', listed)) if one.lower() not in connected]
    if lacking > 0 and "*" in absent:
        return "of any name" + (f" besides {' and '.join(connected)}" if connected else "")
    return (" or " if lacking < len(absent) else " and ").join(absent) if lacking > 0 else ""


def text_of(error: Exception) -> str:
    """What an error says, in one line; one of PostgreSQL without the DETAIL, HINT and CONTEXT that follow."""
    message = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return message or " ".join(str(error).split())
