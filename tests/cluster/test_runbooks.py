"""docs/cluster-runbooks.md typed in order, on a real PostgreSQL and servers: what it says is printed, and helps."""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from markdown_it import MarkdownIt
from tests.cluster.test_serving import Client, Servers, ready, run
from tests.support.commands import Run
from tests.support.postgres import Pair, Programs, Server, until

from veilmq.cluster.postgres import Postgres
from veilmq.cluster.postgres.schema import init
from veilmq.engine.directory import STATE_FORMAT
from veilmq.testing.local import ServerProcess

__all__ = ["run"]
pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/cluster-runbooks.md"
_PROMPT = re.compile(r"^(\w*)\$ (.*)$")
_CHANGING = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+(?:[.:]\d+)*(?:\.dev\d+)?")
"""What no two runs have alike: names of clusters, numbers, addresses, releases."""


def blocks() -> dict[str, list[str]]:
    """The lines in code blocks, by section."""
    found: dict[str, list[str]] = {}
    tokens = MarkdownIt().parse(PAGE.read_text())
    section = ""
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            section = following.content
        elif token.type in {"code_block", "fence"}:
            found.setdefault(section, []).extend(line.strip() for line in token.content.splitlines())
    return found


class Machines:
    """Two databases and two servers, and what is typed on them."""

    def __init__(self, pair: Pair, path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair, self.path = pair, path
        self.databases = {"db1": pair.primary, "db2": pair.standby}
        self.servers = Servers(path, pair)
        self.running: dict[str, ServerProcess] = {}
        self.by_hand: dict[str, Callable[[], object]] = {}
        """What the test does for a command that only an operating system has."""
        self._run, self._environment = run, monkeypatch
        self.serves_from(pair)

    def serves_from(self, pair: Pair) -> None:
        """What VEILMQ_CLUSTER names from now on."""
        self.pair = self.servers.pair = pair
        self._environment.setenv("VEILMQ_CLUSTER", pair.dsn)

    def start(self, *options: str) -> Client:
        """Both servers, `one` first; a client of `two`."""
        for name in ("one", "two"):
            self.running[name] = self.servers.start(name, *options)
        return Client(self.running["two"])

    def stop(self, name: str) -> None:
        self.running.pop(name).stop()

    def empty(self) -> None:
        """Give both servers empty data directories."""
        for name in ("one", "two"):
            shutil.rmtree(self.path / name / "data")

    def follow(self, section: str) -> None:
        """Type what a section of the page shows, and compare what is printed."""
        lines = blocks()[section]
        starts = [number for number, line in enumerate(lines) if _PROMPT.match(line)]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            found = _PROMPT.match(lines[start])
            assert found is not None
            printed = self._type(found[1], found[2])
            if expected := lines[start + 1 : end]:
                assert [_CHANGING.sub("N", line) for line in printed] == [_CHANGING.sub("N", line) for line in expected]

    def _type(self, machine: str, line: str) -> list[str]:
        if (by_hand := self.by_hand.pop(f"{machine}$ {line}", None)) is not None:
            by_hand()
            return []
        program, *words = shlex.split(line)
        if program == "psql":
            for word in words:
                if word != "-c":
                    self.databases[machine].query(word)
            return []
        assert program == "veilmq", line
        done = self._run(*(self._place(word, machine) for word in words))
        assert done.code == 0, done.err
        standby = done.out.replace(f"standby   {self.pair.standby.name}:", "standby   db2:")
        return standby.replace(str(self.path), "/var/backups/veilmq").splitlines()

    def _place(self, word: str, machine: str) -> str:
        """Paths are those of the test: a server's data directory, and what is made beside it."""
        if word == "/var/lib/veilmq":
            return str(self.path / machine / "data")
        return word.replace("/var/backups/veilmq/", f"{self.path}/")


@pytest.fixture
def machines(own_pair: Pair, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    init(Postgres(own_pair.dsn), state_format=STATE_FORMAT, lease_us=1_000_000)

    machines = Machines(own_pair, tmp_path, run, monkeypatch)
    yield machines
    assert machines.by_hand == {}
    machines.servers.close()


@pytest.fixture
def other_pair(postgres_programs: Programs) -> Iterator[Pair]:
    pair = Pair(postgres_programs, 900)
    yield pair
    pair.stop()
    for server in (pair.primary, pair.standby):
        shutil.rmtree(server.home)


def test_a_server_is_lost(machines: Machines) -> None:
    client = machines.start()
    client.send("before")
    machines.running["one"].kill()
    client.send("after")
    machines.pair.primary.query("update veilmq.server set seen = seen - interval '1 min' where name = 'one'")
    machines.follow("A server is lost")


def test_postgresql_s_primary_is_lost(machines: Machines, postgres_programs: Programs) -> None:
    client = machines.start()
    client.send("before")
    machines.pair.primary.kill()
    new = Server(postgres_programs, "c900")
    machines.by_hand = {
        'db1$ pg_basebackup -d "host=db2 application_name=db1" -D $PGDATA -R -X stream -c fast': lambda: renamed(
            new, machines
        ),
        "db1$ pg_ctl start -D $PGDATA": new.start,
    }
    try:
        machines.follow("PostgreSQL's primary is lost")
        until(lambda: sends(client), seconds=40)
        assert client.counts()[0] >= 2
    finally:
        new.stop()


def sends(client: Client) -> bool:
    try:
        client.send("after")
    except ClientError:
        return False
    return True


def renamed(new: Server, machines: Machines) -> None:
    """A standby that calls itself db1, at the place of the old primary."""
    new.name = "db1"
    new.copy(machines.pair.standby)


def test_the_standby_is_lost(machines: Machines) -> None:
    machines.start().send("before")
    machines.pair.standby.stop()
    machines.follow("The standby is lost")
    for name in ("one", "two"):
        machines.stop(name)
    client = machines.start("--single-copy")
    client.send("after")
    assert client.counts() == (2, 0)


def test_both_are_lost(machines: Machines, other_pair: Pair) -> None:
    client = machines.start()
    for number in range(10):
        client.send(str(number))
    for server in (machines.pair.primary, machines.pair.standby):
        server.kill()
    machines.by_hand = {
        "two$ systemctl stop veilmq": machines.running["two"].kill,
        "one$ systemctl stop veilmq": machines.running["one"].kill,
    }
    machines.serves_from(other_pair)
    machines.follow("Both PostgreSQL are lost")
    machines.empty()
    assert machines.start().counts() == (10, 0)


def test_an_upgrade_and_a_move(machines: Machines, other_pair: Pair) -> None:
    client = machines.start()
    client.send("one")
    machines.follow("Upgrade")
    ((_, handle),) = client.receive()
    client.send("two")
    machines.by_hand = {
        "one$ systemctl stop veilmq": lambda: machines.stop("one"),
        "two$ systemctl stop veilmq": lambda: machines.stop("two"),
        "one$ export VEILMQ_CLUSTER=postgresql://veilmq@db3,db4/veilmq": lambda: machines.serves_from(other_pair),
    }
    machines.follow("Move to another PostgreSQL")
    machines.empty()
    client = machines.start()
    client.delete(handle)
    assert client.counts() == (1, 0)
    until(lambda: all(ready(each) for each in machines.running.values()))


def test_the_page_has_no_other_commands() -> None:
    """But for the restore, which tests/store/test_restoring.py does."""
    shown = [line for lines in blocks().values() for line in lines if _PROMPT.match(line)]
    restores = [line for line in shown if line.startswith("$ veilmq restore")]
    assert (len(shown), len(restores)) == (20, 1)
