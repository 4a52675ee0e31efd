"""The data of a server alone becomes a cluster's, and back."""

import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import apsw
import psycopg
import pytest
from tests.cluster.conftest import Clock, Cluster, begin
from tests.cluster.test_snapshots import LoggedFactory
from tests.support.commands import Run, in_process
from tests.support.contract.stage import Stage, bodies
from tests.support.following import compare
from tests.support.postgres import Pair
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.cli.failures import Exit
from veilmq.cli.output import instant
from veilmq.cluster.member.copy import Copy
from veilmq.cluster.moving import export_directory, import_directory
from veilmq.cluster.postgres import Postgres, Unfit
from veilmq.cluster.postgres.schema import init, look
from veilmq.cluster.postgres.snapshots import Snapshots
from veilmq.engine.directory import STATE_FORMAT
from veilmq.model.errors import ReceiptInvalid
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Deleted
from veilmq.store.directory import NotOurs
from veilmq.store.log import Follower
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.follower import SqliteFollower
from veilmq.store.sqlite.store import SqliteStore

NOW = Instant(1_800_000_000_000_000)


@pytest.fixture
def empty(shared_pair: Pair) -> Iterator[Cluster]:
    """A cluster with the state format of this release."""
    shared_pair.primary.query("drop schema if exists veilmq cascade")
    cluster = Cluster(shared_pair, init(Postgres(shared_pair.dsn), state_format=STATE_FORMAT, segment=64))
    yield cluster
    cluster.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return in_process(monkeypatch, capsys, tmp_path)


def follower(path: Path) -> Follower:
    return SqliteFollower(path, SMALL)


def connected(directory: Path) -> apsw.Connection:
    return connect(directory / "veilmq.db")


def same(one: Path, other: Path, but: tuple[str, ...] = ()) -> None:
    """The tables of both are equal, but those."""
    with closing(connected(one)) as first, closing(connected(other)) as second:
        for table in but:
            first.execute(f"DELETE FROM {table}")
            second.execute(f"DELETE FROM {table}")
        compare(first, second)


def played(directory: Path) -> tuple[Stage, str]:
    """A server alone with messages waiting, and the handle of one in flight."""
    stage = Stage(SqliteFactory(directory))
    jobs = stage.create()
    for number in range(20):
        stage.send(jobs, str(number))
    handle = stage.take(jobs).handle
    stage.send(jobs, "the last")
    return stage, handle


def test_nothing_is_lost_in_there_and_back(empty: Cluster, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    stage, handle = played(alone)
    stage.store.close()
    import_directory(empty.postgres(), alone, NOW)
    with pytest.raises(NotOurs, match="keeps: start it with --cluster; or it was imported into a cluster"):
        SqliteStore(alone, SMALL)
    # A server of the cluster owns it and deletes what was leased before.
    snapshots = Snapshots(empty.postgres(), empty.shard.incarnation)
    with closing(Copy(tmp_path / "member", follower, snapshots)) as copy:
        copy.catch_up(empty.reader())
        with closing(connected(alone)) as kept:
            compare(kept, copy.follower._connection)  # type: ignore[attr-defined]
    owner = empty.owner("one", clock := Clock())
    assert owner.before.clock == NOW
    log = empty.log(owner)
    stage.store = SqliteStore(tmp_path / "member", SMALL, log=log)
    jobs = next(iter(stage.store.reader.queues))
    assert isinstance(stage.delete(jobs, handle), Deleted)
    stage.send(jobs, "from the cluster")
    held = stage.take(jobs).handle
    stage.store.close()
    owner.hand_over("", NOW)
    moved = export_directory(empty.postgres(), tmp_path / "back", clock)
    same(tmp_path / "member", tmp_path / "back")
    assert moved.position == empty.reader().end()
    stage.store = SqliteStore(tmp_path / "back", SMALL)
    assert isinstance(stage.delete(jobs, held), Deleted)
    assert (
        len(bodies(stage.receive(jobs, 10)) + bodies(stage.receive(jobs, 10)) + bodies(stage.receive(jobs, 10))) == 20
    )
    stage.store.close()
    with empty.postgres().connect() as session:
        assert look(session).moved == str(tmp_path / "back")
    candidate = empty.candidate("two", clock)
    candidate.look()
    with pytest.raises(Unfit, match="was exported to"):
        candidate.take_over()


def test_what_only_the_redo_log_has_is_imported(empty: Cluster, tmp_path: Path) -> None:
    stage, _ = played(tmp_path / "alone")
    stage.factory.kill(stage.store)
    (tmp_path / "alone" / "import-killed").mkdir()  # a copy, by an import that was killed
    import_directory(empty.postgres(), tmp_path / "alone", NOW)
    assert not [*(tmp_path / "alone").glob("import-*")]
    snapshots = Snapshots(empty.postgres(), empty.shard.incarnation)
    with closing(Copy(tmp_path / "copy", follower, snapshots)) as copy:
        copy.catch_up(empty.reader())
        events = copy.follower._connection.execute("SELECT max(offset + count) FROM history").get  # type: ignore[attr-defined]
        assert events == 23  # created, 21 sends, a receive


def test_without_its_snapshot_nothing_is_filled(empty: Cluster, tmp_path: Path) -> None:
    """Its log alone is not the data."""
    stage, _ = played(tmp_path / "alone")
    stage.store.close()
    import_directory(empty.postgres(), tmp_path / "alone", NOW)
    empty.pair.primary.query("delete from veilmq.snapshot_part")
    snapshots = Snapshots(empty.postgres(), empty.shard.incarnation)
    with closing(Copy(tmp_path / "copy", follower, snapshots)) as copy, pytest.raises(Unfit, match="no snapshot"):
        copy.catch_up(empty.reader())


def test_a_restore_to_an_instant_and_its_words(empty: Cluster, run: Run, tmp_path: Path) -> None:
    """From the cluster while it serves, and from a backup."""
    stage = Stage(LoggedFactory(tmp_path / "owner", empty.log()))
    jobs = stage.create()
    stage.send(jobs, "first")
    handle, then = stage.take(jobs).handle, stage.now
    stage.later(SECOND_US)
    stage.send(jobs, "second")
    text = datetime.fromtimestamp(then / 1e6, UTC).isoformat()
    begun = ("restore", "new", "--from", empty.pair.dsn)
    ended = run(*begun, "--to", text)
    assert ended.code == 0
    assert "1 message and 1 lease in 1 queue" in ended.out
    assert f"the next record is of {instant(stage.now)}" in ended.out
    assert "receipt handles from before are void" in ended.out
    stage.store.close()
    stage.store = SqliteStore(tmp_path / "new", SMALL)
    assert isinstance(stage.delete(jobs, handle), ReceiptInvalid)
    stage.store.close()
    assert "new exists already" in run(*begun).err
    assert run(*begun[:2]).err.startswith("veilmq: --from: a cluster, an archive or a backup is needed\n")
    assert "expected an instant such as" in run("restore", "other", "--from", "new", "--to", "now").err
    backed = run("restore", "copy", "--from", "new")
    assert (backed.code, backed.out.splitlines()[0]) == (0, f"restored the state of {instant(then)}")
    for source, why in ((begun[3], "nothing from before that instant"), ("new", "it is of a later instant")):
        refused = run("restore", "other", "--from", source, "--to", "1971-01-01").err
        assert why in refused
        (first,) = re.findall("The first instant that can be restored: --to '(.+)'", refused)
        assert run("restore", f"first {why}", "--from", source, "--to", first).code == 0
    assert "there is no archive at nowhere" in run("restore", "other", "--from", "nowhere").err
    assert not (tmp_path / "other").exists()


def test_where_snapshots_are_kept_is_set_once_for_all_and_shown(empty: Cluster, run: Run, tmp_path: Path) -> None:
    """And an imported snapshot is one that no other server has verified."""
    at = ("--cluster", empty.pair.dsn)
    assert run("cluster", "init", *at, "--snapshots", str(tmp_path / "place"), "--keep", "7d").code == 0
    assert run("cluster", "init", *at).code == 0
    shown = run("cluster", "status", *at, "--json").json[0]
    assert (shown["snapshots"], shown["keep_s"]) == (str(tmp_path / "place"), 7 * 86_400)
    empty.pair.primary.query("update veilmq.shard set snapshots = 'memory://me:secret@host/a'")
    assert run("cluster", "status", *at, "--json").json[0]["snapshots"] == "memory://me:***@host/a"
    empty.pair.primary.query("update veilmq.shard set snapshots = %s", str(tmp_path / "place"))
    (tmp_path / "file").touch()
    assert "--snapshots: " in run("cluster", "init", *at, "--snapshots", str(tmp_path / "file")).err
    for relative in ("other", "file://other"):
        ended = run("cluster", "init", *at, "--snapshots", relative)
        assert (ended.code, "is a relative path" in ended.err, (tmp_path / "other").exists()) == (2, True, False)
    stage, _ = played(tmp_path / "alone")
    stage.store.close()
    import_directory(empty.postgres(), tmp_path / "alone", NOW)
    said = f"snapshot  of record 64, verified by no other server, at {tmp_path / 'place'}"
    assert said in run("cluster", "status", *at).out
    assert run("restore", "new", "--from", str(tmp_path / "place")).code == 0  # where PostgreSQL is lost
    same(tmp_path / "alone", tmp_path / "new", but=("secret",))


class TestRefused:
    """Each with one sentence, and nothing half made."""

    def test_imports(self, empty: Cluster, run: Run, tmp_path: Path) -> None:
        stage, _ = played(tmp_path / "alone")

        def refused() -> str:
            ended = run("cluster", "import", str(tmp_path / "alone"), "--cluster", empty.pair.dsn)
            assert ended.code
            assert empty.pair.primary.query("select moved from veilmq.shard") == [("",)]
            return ended.err

        assert "is held by pid" in refused()
        stage.store.close()
        shutil.copytree(tmp_path / "alone", damaged := tmp_path / "damaged")
        with (damaged / "veilmq.db").open("r+b") as file:
            file.seek(8_192)
            file.write(bytes(65_536))
        ended = run("cluster", "import", str(damaged), "--cluster", empty.pair.dsn)
        advice = f"see what can be had: veilmq check --data {damaged} --repair NEW_DIRECTORY --backup NEWEST_BACKUP"
        assert (ended.code, advice in ended.err) == (Exit.STORE, True), ended.err
        empty.pair.primary.query("update veilmq.shard set format = 1")
        assert "has state format 1, this release needs" in refused()
        empty.pair.primary.query(f"update veilmq.shard set format = {STATE_FORMAT}")
        assert "has no veilmq.db" in run("cluster", "import", str(tmp_path), "--cluster", empty.pair.dsn).err
        ended = run("cluster", "import", str(tmp_path / "alone"), "--cluster", empty.pair.dsn)
        assert (ended.code, ended.out.splitlines()[0].endswith("receipt handles stay good")) == (0, True)
        assert "the cluster is not empty" in refused()
        empty.pair.primary.query("drop schema veilmq cascade")
        init(Postgres(empty.pair.dsn), state_format=STATE_FORMAT)
        assert "is a copy that a server of a cluster keeps" in refused()

    def test_exports(self, empty: Cluster, run: Run, tmp_path: Path) -> None:
        def refused(directory: str = "new") -> str:
            ended = run("cluster", "export", str(tmp_path / directory), "--cluster", empty.pair.dsn)
            assert ended.code
            assert not (tmp_path / "new").exists()
            return ended.err

        assert "the cluster is empty" in refused()
        stage, _ = played(tmp_path / "alone")
        stage.store.close()
        import_directory(empty.postgres(), tmp_path / "alone", NOW)
        assert "exists already" in refused("alone")
        owner = empty.owner("one", Clock())
        ended = Event()

        def renew() -> None:
            while not ended.wait(0.05):
                owner.renew(NOW)

        renewing = begin(renew)
        try:
            assert "one serves this cluster: stop all of its servers first" in refused()
        finally:
            ended.set()
            renewing.result(10)
        with psycopg.connect(empty.pair.dsn) as other:
            other.execute("select from veilmq.shard for update")
            assert "stop all servers and other exports" in refused()
        assert run("cluster", "export", "new", "--cluster", empty.pair.dsn).code == 0
        shown = run("cluster", "status", "--cluster", empty.pair.dsn).out
        assert f"export    to {tmp_path / 'new'}: no server" in shown
        assert "could own" not in shown
        for command in ("handover", "finalize"):
            assert "data was exported to" in run("cluster", command, "--cluster", empty.pair.dsn).err
        again = run("cluster", "export", "other", "--cluster", empty.pair.dsn)
        assert f"an export to {tmp_path / 'new'} was begun before: serve only one of the two" in again.out
