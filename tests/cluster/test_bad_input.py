"""What a server of a cluster says of what cannot work: refused or waited for, in a sentence that says what to do."""

import re
import secrets
import socket
import ssl
import subprocess
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import pytest
from botocore.exceptions import ClientError
from psycopg.conninfo import make_conninfo
from tests.cluster.conftest import Clock, Cluster
from tests.cluster.test_serving import Client, Servers, ready, run, servers, shown
from tests.support.commands import Run
from tests.support.postgres import Pair, Programs, Server, until

from veilmq.cluster.peer import Limits
from veilmq.cluster.postgres import Postgres, Uncertain
from veilmq.cluster.postgres.ownership import StillOwned
from veilmq.cluster.postgres.schema import init
from veilmq.cluster.tls import in_words
from veilmq.engine.directory import STATE_FORMAT
from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess

__all__ = ["run", "servers"]
pytestmark = pytest.mark.slow


def refused(server: ServerProcess) -> str:
    """The last line of one that does not start."""
    assert server.process.wait(20) == 2
    return server.log.read_text().splitlines()[-1]


class TestRefused:
    """The server does not start, and nothing is half made."""

    def test_the_data_of_a_server_alone(self, servers: Servers, tmp_path: Path) -> None:
        (tmp_path / "one").mkdir()
        ServerProcess(tmp_path / "one").start().stop()
        assert "bring the data into an empty cluster with `veilmq cluster import`, unless that was done" in refused(
            servers.begin("one")
        )

    def test_a_copy_is_not_served_alone(self, servers: Servers, tmp_path: Path) -> None:
        servers.start("one").stop()
        with pytest.raises(RuntimeError, match="start it with --cluster"):
            ServerProcess(tmp_path / "one").start()

    @for_each(
        "statement, said",
        [
            ("drop schema veilmq cascade", "run `veilmq cluster init` once"),
            ("update veilmq.shard set format = format + 1", "upgrade this server"),
            ("update veilmq.shard set layout = layout + 1", "a newer VeilMQ made this cluster"),
        ],
    )
    def test_what_is_in_the_database(self, servers: Servers, statement: str, said: str) -> None:
        servers.pair.primary.query(statement)
        try:
            assert said in refused(servers.begin("one"))
        finally:
            servers.pair.primary.query("drop schema if exists veilmq cascade")
            init(Postgres(servers.pair.dsn), state_format=STATE_FORMAT)

    def test_another_cluster_in_the_place_of_the_one_before(self, servers: Servers) -> None:
        servers.start("one").stop()
        servers.pair.primary.query("drop schema veilmq cascade")
        init(Postgres(servers.pair.dsn), state_format=STATE_FORMAT)
        said = refused(servers.begin("one"))
        assert "name the right database, or remove the data directory that was of the other one" in said
        assert servers.pair.primary.query("select count(*) from veilmq.server") == [(0,)]

    @for_each(
        "changed, said",
        [
            ({"user": "nobody"}, "correct the role, its password or the database, or create what is missing"),
            ({"dbname": "nothing"}, "correct the role, its password or the database, or create what is missing"),
            ({"user": "outsider"}, "use the role that created them"),
            ({"host": "standby"}, "this PostgreSQL is a standby: name the primary"),
        ],
    )
    def test_what_is_named(self, servers: Servers, run: Run, changed: dict[str, str], said: str) -> None:
        """By a server as by a command."""
        pair = servers.pair
        changed = {key: str(pair.standby.home) if value == "standby" else value for key, value in changed.items()}
        pair.primary.query("create role outsider login")
        try:
            dsn = make_conninfo(pair.primary.dsn, **changed)
            shown = run("cluster", "status", "--cluster", dsn)
            assert (shown.code, said in shown.err) == (1, True)
            if "host" in changed:
                assert said in refused(servers.begin("one", "--cluster", dsn))
            if changed == {"user": "outsider"}:
                pair.primary.query("grant usage on schema veilmq to outsider")
                pair.primary.query("grant all on all tables in schema veilmq to outsider")
                pair.primary.query("grant pg_monitor to outsider")
                assert "cannot make and drop the cluster's tables" in refused(servers.begin("one", "--cluster", dsn))
        finally:
            pair.primary.query("drop owned by outsider")
            pair.primary.query("drop role outsider")

    def test_asynchronous_replication(self, servers: Servers) -> None:
        primary = servers.pair.primary
        primary.set("synchronous_standby_names", "")
        try:
            assert "set synchronous_standby_names in PostgreSQL, or start with" in refused(servers.begin("one"))
        finally:
            primary.set("synchronous_standby_names", servers.pair.standby.name)

    def test_a_peer_port_at_all_addresses_without_one_for_the_others_and_one_in_use(
        self, servers: Servers, run: Run, tmp_path: Path
    ) -> None:
        keys = tmp_path / "keys.toml"
        run("keys", "new", "--into", str(keys))
        options = ("--peer", "0.0.0.0:0", "--insecure", "--credentials", str(keys))
        assert "say where they can with --advertise HOST:PORT" in refused(servers.begin("one", *options))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            server = servers.begin("one", "--peer", address)
            assert server.process.wait(20) == 4
            assert f"--peer {address}: the port is in use" in server.log.read_text()


def test_a_postgresql_that_is_not_there_yet_is_waited_for(own_pair: Pair, tmp_path: Path) -> None:
    """As long as it takes. A signal ends the wait."""
    init(Postgres(own_pair.dsn), state_format=STATE_FORMAT)
    own_pair.primary.stop("fast")
    servers = Servers(tmp_path, own_pair)
    try:
        first, second = (servers.begin(name) for name in ("one", "two"))
        for each in (first, second):
            until(lambda each=each: "PostgreSQL cannot be reached: " in each.log.read_text())
        assert second.stop() == 0
        own_pair.primary.start()
        Client(first.opened()).send("hello")
        assert "PostgreSQL answers again" in first.log.read_text()
    finally:
        servers.close()


def test_a_missing_standby_is_named(own_pair: Pair, run: Run) -> None:
    shard = init(Postgres(own_pair.dsn), state_format=STATE_FORMAT)
    name = own_pair.standby.name
    own_pair.standby.stop()
    until(lambda: own_pair.primary.query("select count(*) from pg_stat_replication") == [(0,)])
    waits = f": it waits for its standby {name}, which was not connected"
    with pytest.raises(Uncertain, match=f"within 1 s{waits}; .* may have been done all the same"):
        init(Postgres(own_pair.primary.dsn, seconds_max=1.0), state_format=STATE_FORMAT, keep_us=1)

    def says(missing: str) -> bool:
        lines = run("cluster", "status", "--cluster", own_pair.primary.dsn).out.splitlines()
        return f"standby   commits are not confirmed: every client waits for standby {missing}" in lines

    assert says(name)
    # What that `init` has locked stays locked.
    timed_out = f"canceling statement due to lock timeout, perhaps behind a commit{waits}"
    assert timed_out in run("cluster", "drain", "one", "--cluster", own_pair.primary.dsn).err
    with closing(Cluster(own_pair, shard)) as cluster:
        candidate = cluster.candidate("one", Clock())
        candidate.look()
        with pytest.raises(StillOwned, match=f"^an append of the owner is under way: {timed_out}$"):
            candidate.take_over()
    own_pair.primary.set("synchronous_standby_names", f'ANY 1 ("{name}", zz)')
    until(lambda: says(f"{name} or zz"))
    for any_name in ("*", "ANY 1 (*)", f"FIRST 1 ({name}, *)"):
        own_pair.primary.set("synchronous_standby_names", any_name)
        until(lambda: says("of any name"))
    own_pair.primary.set("synchronous_standby_names", f"FIRST 2 ({name.upper()}, zz)")
    own_pair.standby.start()
    until(lambda: says("zz"))
    own_pair.primary.set("synchronous_standby_names", "3 (*)")
    until(lambda: says(f"of any name besides {name}"))


def test_peers_of_another_secret_are_not_ready_and_say_why(servers: Servers) -> None:
    servers.start("one")
    servers.pair.primary.query("update veilmq.shard set secret = sha256('another')")
    second = servers.begin("two").opened()
    until(lambda: "another secret" in reasons(second))
    assert "start both again, so that they read that of their cluster" in reasons(second)
    assert not ready(second)


def test_an_address_that_leads_nowhere_is_told_at_both_ends(servers: Servers) -> None:
    first = servers.begin("one", "--advertise", "127.0.0.1:1").opened()
    until(lambda: "others cannot reach this server at 127.0.0.1:1, correct --advertise: " in first.log.read_text())
    second = servers.begin("two").opened()
    until(lambda: "cannot reach the owner at 127.0.0.1:1: " in reasons(second))
    assert not ready(second)
    third = servers.begin("three", "--advertise", second_address(second)).opened()
    until(lambda: "another server of the cluster answers there" in third.log.read_text())
    third.kill()  # its row names the address at which it starts again, so it need not wait
    assert "another server of this cluster is called" not in third.begin().opened().log.read_text()


def second_address(server: ServerProcess) -> str:
    """Where others reach a server."""
    (line,) = (line for line in server.log.read_text().splitlines() if "peers reach this server" in line)
    return line.rpartition(" at ")[2]


def reasons(server: ServerProcess) -> str:
    return str(httpx.get(f"{server.admin}/health/ready").json()["reasons"])


def test_the_peer_port_speaks_tls_where_the_server_has_a_certificate(servers: Servers, tmp_path: Path) -> None:
    def certificate(name: str) -> tuple[str, ...]:
        key, chain = tmp_path / f"{name}-key.pem", tmp_path / f"{name}.pem"
        subprocess.run(
            [
                "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-keyout", key, "-out", chain, "-days", "2", "-subj", "/CN=veil",
                "-addext", "subjectAltName=IP:127.0.0.1",
            ],
            check=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        key.chmod(0o600)
        return "--tls-cert", str(chain), "--tls-key", str(key)

    options = certificate("common")
    first, second = (servers.begin(name, *options).opened() for name in ("one", "two"))
    until(lambda: "connected to server one" in second.log.read_text())
    assert "others cannot reach" not in first.log.read_text()
    port = int(second_address(first).rpartition(":")[2])
    with ExitStack() as silent:
        for _ in range(Limits().strangers_max + 1):
            silent.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
        until(lambda: "its TLS handshake was the oldest of too many" in first.log.read_text())
    # Who has no certificate speaks no TLS, and is not let in.
    third = servers.begin("three").opened()
    until(lambda: "before it said who it is: check the address, and whether both use TLS" in third.log.read_text())
    fourth = servers.begin("four", *certificate("own")).opened()
    until(lambda: ": this server does not trust its certificate: add that of its issuer" in fourth.log.read_text())
    refused = ssl.SSLCertVerificationError(1, "refused")
    words = {
        9: "is not valid yet",
        10: "has expired",
        62: "is for another host",
        64: "is for another host",
        23: "is refused",
    }
    for refused.verify_code, said in words.items():
        assert in_words(refused).startswith(f"its certificate {said}")
    plain = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
    assert in_words(plain).startswith("it speaks no TLS, and this server does: check the address")
    assert in_words(EOFError()).endswith("check the address, and whether both use TLS")


def rolled_back(server: ServerProcess) -> float:
    counted = httpx.get(f"{server.admin}/metrics").text
    return float(re.findall(r"^veilmq_rolled_back_batches_total (\S+)$", counted, re.M)[0])


def test_a_full_disk_of_postgresql_is_said(postgres_programs: Programs, run: Run, tmp_path: Path) -> None:
    """And no table is left. A server that runs is ready, for it reads, and has a warning. Mounting takes root."""
    server = Server(postgres_programs, "full")
    server.make()
    server.start()
    mount = server.home / "small"
    mount.mkdir()
    owner = server.data.stat()
    options = f"size=2m,uid={owner.st_uid},gid={owner.st_gid},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mount], check=True)
    try:
        server.query(f"create tablespace small location '{mount}'")
        server.query("alter database postgres set default_tablespace = 'small'")
        with suppress(OSError), (mount / "filled").open("wb", buffering=0) as filled:
            while True:
                filled.write(bytes(4096))
        url = ("--cluster", server.dsn, "--single-copy")
        refused = run("cluster", "init", *url)
        assert refused.code == 1
        assert re.search("PostgreSQL did not create the tables: .*No space left on device", refused.err)
        assert server.query("select to_regnamespace('veilmq')") == [(None,)]
        (mount / "filled").unlink()
        assert run("cluster", "init", *url).code == 0
        alone = ServerProcess(tmp_path, *url, "--peer", "127.0.0.1:0")
        try:
            client = Client(alone.start())
            with suppress(OSError), (mount / "filled").open("wb", buffering=0) as filled:
                while True:
                    filled.write(bytes(4096))
            bodies = [secrets.token_hex(10_000) for _ in range(100)]
            with pytest.raises(ClientError):
                list(map(client.send, bodies))
            said = httpx.get(f"{alone.admin}/health/ready").json()
            assert (said["ready"], "No space left on device" in said["warnings"]["writes"]) == (True, True)
            assert rolled_back(alone) > 0
            assert (shown(alone)["standby_missing"], shown(alone)["single_copy"]) == (0, 1)
            assert "none confirms commits: losing" in run("cluster", "status", *url).out
            server.set("synchronous_standby_names", "zz")  # with a name there commits wait, whatever the switch says
            until(lambda: (shown(alone)["standby_missing"], shown(alone)["single_copy"]) == (1, 0))
            assert "every client waits for standby zz" in run("cluster", "status", *url).out
            until(lambda: shown(alone)["owner"] == 0)
            assert rolled_back(alone) > 0, "also once its lease has ended"
            server.set("synchronous_standby_names", "")
        finally:
            alone.stop()
    finally:
        server.stop()
        subprocess.run(["umount", mount], check=True)
