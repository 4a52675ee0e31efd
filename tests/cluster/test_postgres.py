"""What must hold on PostgreSQL: each wrong setting, role and place is refused with a sentence that says what to do."""

import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from tests.cluster.conftest import Clock, Cluster
from tests.support.commands import Run, in_process
from tests.support.postgres import Pair, until

from veilmq.cluster.postgres import ClusterError, Postgres, Seen, Uncertain, Unfit, Unreachable
from veilmq.cluster.postgres.schema import LAYOUT, WrongCluster, admit, init, look
from veilmq.model.instant import Instant
from veilmq.store.log import NotAppended
from veilmq.testing.for_each import for_each


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return in_process(monkeypatch, capsys, tmp_path)


def as_role(pair: Pair, **changed: str) -> Postgres:
    return Postgres(make_conninfo(pair.primary.dsn, **changed))


@for_each(
    "make, said",
    [
        (lambda pair: Postgres("postgresql://me:secret@[host"), "no connection string(?!.*secret)"),
        (lambda pair: Postgres("postgresql://me:a@secret@localhost/veilmq"), "@ as %40(?!.*secret)"),
        (lambda pair: Postgres("postgresql://localhost:secret/secret@host/veilmq"), "/ as %2F(?!.*secret)"),
        (lambda pair: Postgres("postgresql://me:p@secret/w@127.0.0.1:5432/db"), "@ as %40(?!.*secret)"),
        (lambda pair: Postgres("postgresql://me:12/secret@localhost/veilmq"), "/ as %2F(?!.*secret)"),
        (lambda pair: Postgres("postgresql://me@db1,me@db2/veilmq"), "name the user once"),
        (lambda pair: Postgres("postgresql:///veilmq?host=/nowhere,/no@where"), "cannot be reached"),
        (lambda pair: Postgres("postgresql://db1,db2/veilmq?port=1,2,3"), "as many ports"),
        (lambda pair: Postgres("postgresql://db1/veilmq?port=1,2"), "as many ports"),
        (lambda pair: as_role(pair, sslmode="mostly"), "correct the connection string"),
        (lambda pair: as_role(pair, host="/nowhere"), "cannot be reached"),
        (lambda pair: as_role(pair, user="nobody"), "correct the role"),
        (lambda pair: as_role(pair, dbname="nothing"), "correct the role"),
        (lambda pair: as_role(pair, user="pg_monitor"), "correct the role"),
        (lambda pair: Postgres(pair.standby.dsn), "name the primary"),
        (lambda pair: Postgres(pair.primary.dsn, seen=Seen(7, 1)), "another PostgreSQL"),
        (lambda pair: Postgres(pair.primary.dsn, seen=Seen(0, 2)), "a former primary"),
    ],
)
def test_what_is_wrong_with_the_place_is_refused(
    shared_pair: Pair, make: Callable[[Pair], Postgres], said: str
) -> None:
    with pytest.raises(ClusterError, match=said):
        make(shared_pair).connect()


def test_a_certificate_that_is_refused_is_waited_for(tmp_path: Path) -> None:
    """It may have expired, and be renewed in an hour. What answers is TLS alone: the tests' PostgreSQL has none."""
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", key, "-out", chain, "-days", "2", "-subj", "/CN=db9",
        ],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    dsn = f"host=127.0.0.1 user=veilmq sslrootcert={chain}"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                assert len(connection.recv(8, socket.MSG_WAITALL)) == 8  # an SSLRequest
                connection.sendall(b"S")
                with (
                    suppress(OSError),
                    context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False) as secure,
                ):
                    secure.do_handshake()
                    secure.recv(1)

        for mode, refusal in (
            ("verify-full", "certificate "),
            (f"verify-ca sslcert={chain} sslkey={key}", "unknown ca"),
        ):
            answering = pool.submit(answer)
            with pytest.raises(Unreachable, match=rf"{refusal}.*; renew it, or correct host"):
                Postgres(f"{dsn} port={listener.getsockname()[1]} sslmode={mode}").connect()
            answering.result(20)
            context.verify_mode = ssl.CERT_REQUIRED  # and it trusts no authority


def test_a_session_is_closed_only_between_exchanges(shared_pair: Pair) -> None:
    """An owner lets its connections go while a renewal may be under way in another thread. libpq's memory must not be
    freed under it."""
    session = Postgres(shared_pair.primary.dsn).connect()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: session.execute("select 7, pg_sleep(0.5)").fetchone())
        until(session.lock.locked)
        session.close()
        row = asked.result()
    assert row is not None
    assert (row[0], session.closed) == (7, True)
    # Nor is anything certain that ends on a closed connection: a transaction there ends without a COMMIT.
    session = Postgres(shared_pair.primary.dsn).connect()
    with pytest.raises(Uncertain, match="closed meanwhile"), session.certain(), session.transaction():
        session.execute("select 1").connection.close()
    with pytest.raises(psycopg.OperationalError, match="closed"):
        session.execute("select 1")
    # Nor does an interrupted one go on with a rollback, which psycopg would report as an error of its own.
    session = Postgres(shared_pair.primary.dsn).connect()
    main = threading.main_thread().ident or 0
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (until(session.lock.locked), signal.pthread_kill(main, signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt), session.transaction():
            session.execute("select pg_sleep(20)")
    assert session.closed


def test_an_old_release_of_postgresql_is_refused(shared_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veilmq.cluster.postgres.VERSION_MIN", 99)
    with pytest.raises(Unfit, match=r"PostgreSQL \d+ is too old: use 99 or later"):
        Postgres(shared_pair.primary.dsn).connect()


def test_without_a_synchronous_standby_a_server_must_be_told_so(breakable: Cluster) -> None:
    primary = breakable.pair.primary
    owner = breakable.owner("one", Clock(), single_copy=False)
    log = breakable.log(owner)
    log.append(1, b"first")
    owner.renew(Instant(0))
    primary.set("synchronous_standby_names", "")
    with pytest.raises(Unfit, match="set synchronous_standby_names"):
        Postgres(primary.dsn).connect()
    Postgres(primary.dsn, single_copy=True).connect().close()
    # An owner notices at its next renewal, and appends nothing until it is mended.
    with pytest.raises(Unfit):
        owner.renew(Instant(1))
    with pytest.raises(NotAppended, match="set synchronous_standby_names"):
        log.append(2, b"second")
    primary.set("synchronous_standby_names", breakable.pair.standby.name)
    owner.renew(Instant(2))
    log.append(2, b"second")


@pytest.mark.parametrize("name", ["fsync", "full_page_writes"])
def test_files_that_a_crash_may_spoil_are_refused(breakable: Cluster, name: str) -> None:
    breakable.pair.primary.set(name, "off")
    with pytest.raises(Unfit, match=f"set {name} = on"):
        breakable.postgres().connect()


def test_the_settings_of_a_role_do_not_count(cluster: Cluster) -> None:
    """They are those with which a commit would not be durable, or a wait would end."""
    primary = cluster.pair.primary
    changed = {
        "synchronous_commit": "off", "default_transaction_isolation": "repeatable read", "statement_timeout": "1",
        "default_transaction_read_only": "on", "client_min_messages": "error", "lock_timeout": "1",
    }  # fmt: skip
    primary.query("create role careless login in role veilmq")
    try:
        for name, value in changed.items():
            primary.query(f"alter role careless set {name} = '{value}'")
        with as_role(cluster.pair, user="careless").connect() as session:
            found = [session.execute(f"show {name}").fetchone() for name in changed]
            assert found == [("on",), ("read committed",), ("0",), ("off",), ("notice",), ("2s",)]
        if primary.query("select current_setting('transaction_timeout', true)") != [(None,)]:  # from PostgreSQL 17 on
            primary.query("alter role careless set transaction_timeout = '1min'")
            with pytest.raises(Unfit, match="transaction_timeout = 0"):
                as_role(cluster.pair, user="careless").connect()
    finally:
        primary.query("drop role careless")


def test_settings_that_a_pooler_drops_are_missed(shared_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # libpq takes the last: what a pooler makes of our options.
    postgres = Postgres(shared_pair.primary.dsn)
    for options, said in (("-c synchronous_commit=local", "synchronous_commit is local"), ("", "lock_timeout is 0")):
        postgres._places = [make_conninfo(place, options=options) for place in postgres._places]
        with pytest.raises(Unfit, match=rf"{said} .* without a pooler"):
            postgres.connect()


class TestInit:
    def test_a_second_time_changes_nothing(self, cluster: Cluster) -> None:
        cluster.owner("one", Clock())
        with pytest.raises(Unfit, match="there already, with a lease of 3 s"):
            init(cluster.postgres(), state_format=9, segment=7, lease_us=5)
        again = init(cluster.postgres(), state_format=9, segment=7)
        assert again == cluster.shard._replace(epoch=1, owner="one", address="one:9400", holder=again.holder)

    def test_another_cluster_in_the_same_place_is_refused(self, cluster: Cluster) -> None:
        with pytest.raises(WrongCluster, match="name the right database"):
            init(cluster.postgres(), state_format=1, incarnation=uuid4())
        cluster.shard = cluster.shard._replace(incarnation=uuid4())
        with pytest.raises(WrongCluster):
            cluster.candidate("one", Clock()).look()

    def test_tables_of_others_are_left_alone(self, cluster: Cluster) -> None:
        primary = cluster.pair.primary
        primary.query("drop schema veilmq cascade")
        primary.query("create schema veilmq")
        primary.query("create table veilmq.theirs ()")
        with pytest.raises(Unfit, match="use another database"):
            init(cluster.postgres(), state_format=1)
        assert primary.query("select relname from pg_class where relnamespace = 'veilmq'::regnamespace") == [
            ("theirs",)
        ]

    def test_a_database_without_one_is_said(self, cluster: Cluster) -> None:
        cluster.pair.primary.query("drop schema veilmq cascade")
        with pytest.raises(Unfit, match="veilmq cluster init"):
            cluster.candidate("one", Clock()).look()
        assert init(cluster.postgres(), state_format=1).incarnation != cluster.shard.incarnation

    def test_a_newer_release_s_is_refused(self, cluster: Cluster) -> None:
        cluster.pair.primary.query("update veilmq.shard set layout = %s", LAYOUT + 1)
        with pytest.raises(Unfit, match="upgrade"):
            cluster.candidate("one", Clock()).look()
        cluster.pair.primary.query("alter table veilmq.shard drop column address")
        with pytest.raises(Unfit, match="upgrade"):
            cluster.candidate("two", Clock()).look()

    def test_a_role_that_may_not_is_told_what_it_needs(self, cluster: Cluster, run: Run) -> None:
        primary = cluster.pair.primary
        primary.query("create role plain login")
        try:
            with as_role(cluster.pair, user="plain").connect() as session, pytest.raises(Unfit, match="the role that"):
                look(session)
            with pytest.raises(Unfit, match="the role that"):
                init(as_role(cluster.pair, user="plain"), state_format=1)
            primary.query("grant usage on schema veilmq to plain")
            primary.query("grant select, insert, update, delete on all tables in schema veilmq to plain")
            with as_role(cluster.pair, user="plain").connect() as session, pytest.raises(Unfit, match="'veilmq', or"):
                admit(session, cluster.shard.incarnation)
            primary.query("drop schema veilmq cascade")
            with pytest.raises(Unfit, match="grant it CREATE"):
                init(as_role(cluster.pair, user="plain"), state_format=1)
            primary.query("create schema veilmq authorization plain")
            shard = init(as_role(cluster.pair, user="plain"), state_format=1)
            with as_role(cluster.pair, user="plain").connect() as session:
                assert admit(session, shard.incarnation) == shard
            for names in (cluster.pair.standby.name, ""):  # it may not see more of the standby than that it is there
                primary.set("synchronous_standby_names", names)
                dsn = make_conninfo(primary.dsn, user="plain")
                shown = run("cluster", "status", "--cluster", dsn, "--single-copy").out
                assert ("grant pg_monitor" in shown, "none confirms commits" in shown) == (bool(names), not names)
                assert f"standby   {cluster.pair.standby.name}: not known\n" in shown
        finally:
            primary.set("synchronous_standby_names", cluster.pair.standby.name)
            primary.query("drop schema veilmq cascade")
            primary.query("drop role plain")

    def test_nothing_is_half_made(self, cluster: Cluster) -> None:
        primary = cluster.pair.primary
        primary.query("drop schema veilmq cascade")
        with pytest.raises(psycopg.errors.CheckViolation):
            init(cluster.postgres(), state_format=1, segment=0)
        assert primary.query("select to_regnamespace('veilmq')") == [(None,)]


def test_of_several_hosts_the_primary_is_taken(shared_pair: Pair) -> None:
    hosts = f"/nowhere,{shared_pair.standby.home},{shared_pair.primary.home}"
    postgres = Postgres(make_conninfo(shared_pair.primary.dsn, host=hosts))
    with postgres.connect() as session:
        assert session.execute("select pg_is_in_recovery()").fetchone() == (False,)
    with pytest.raises(Unreachable):
        Postgres(make_conninfo(shared_pair.primary.dsn, host="/nowhere,/nor-here")).connect()


def test_the_host_that_answered_last_is_asked_first(shared_pair: Pair) -> None:
    """A first host whose machine is off takes seconds of each new connection, which is longer than a lease."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        asked = []

        def refuse() -> None:
            while True:
                connection, _ = gone.accept()
                asked.append(connection.close())

        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(refuse)
            try:
                primary = shared_pair.primary
                port = conninfo_to_dict(primary.dsn).get("port", 5432)
                hosts, ports = f"127.0.0.1,{primary.home}", f"{gone.getsockname()[1]},{port}"
                postgres = Postgres(make_conninfo(primary.dsn, host=hosts, port=ports))
                for _ in range(3):
                    postgres.connect().close()
            finally:
                gone.shutdown(socket.SHUT_RDWR)
                assert isinstance(ended.exception(10), OSError)
    assert len(asked) == 1
