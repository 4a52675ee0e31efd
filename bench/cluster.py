"""Two servers and PostgreSQL with a synchronous standby, beside one server on a local disk: lives a second, and CPU.

    python bench/cluster.py [--pairs 5] [--seconds 10] [--connections 1,32] [--batch 1,10]

Strategy: everything runs at once on one machine, and one lane at a time is driven: the server alone, the owner, and the
owner through its follower, in alternating order. So a ratio compares runs that follow each other. Beside each run
stands the CPU of a request of every process that has a part in it. PostgreSQL syncs to the same disk as the server
alone; how long a follower is behind is sampled from its own file in further runs, which count for nothing else.
"""

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import apsw
import install
import measure
import peers
import psycopg
import report
from measure import Load, MeasureFailed, Run
from scenarios import Lane, Settings, counted_run
from sqs import CallFailed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.postgres import ROLE, Pair, programs

from veilmq.cluster.postgres import Postgres
from veilmq.cluster.postgres.schema import init
from veilmq.engine.directory import STATE_FORMAT

LIVES_MIN, CPU_MAX = 0.75, 1.15
LAG_EVERY_S = 0.005
_WAL_FILES = 40
_SETTINGS = {"shared_buffers": "128MB", "min_wal_size": f"{_WAL_FILES * 16}MB"}


class Member(peers.VeilMQ):
    """A server of the cluster."""

    def __init__(self, name: str, dsn: str) -> None:
        super().__init__()
        self.name, self.dsn = name, dsn

    def command(self, place: peers.Place) -> list[str]:
        return [*super().command(place), "--cluster-name", self.name, "--peer", "127.0.0.1:0"]

    def environment(self, place: peers.Place) -> dict[str, str]:
        return {"VEILMQ_CLUSTER": self.dsn}


@dataclass
class Cluster:
    """What runs while a lane is driven."""

    pair: Pair
    alone: peers.Server
    owner: peers.Server
    follower: peers.Server

    def cpu_us(self) -> dict[str, int]:
        """CPU of each part until now. PostgreSQL's sessions are the servers', most of it the one that appends."""
        found = {name: measure.cpu_us(getattr(self, name).pid) for name in ("alone", "owner", "follower")}
        found["standby"] = measure.cpu_us(self.pair.standby.pid)
        found["session"] = found["walsender"] = 0
        primary = self.pair.primary.pid
        for child in Path(f"/proc/{primary}/task/{primary}/children").read_text().split():
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{child}/cmdline").read_text()
                spent = measure.cpu_us(int(child))
                if "walsender" in title:
                    found["walsender"] += spent
                elif f" {ROLE} " in title:
                    found["session"] += spent
        found["primary"] = measure.cpu_us(primary)
        return found

    def commits(self, server: peers.Server) -> tuple[float, float]:
        """Commits of a server until now, and their seconds."""
        token = (server.place.directory / "data" / "admin-token").read_text().strip()
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.place.admin_port}/metrics", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
        found = [re.search(rf"^veilmq_commit_seconds_{what} (\S+)$", text, re.MULTILINE) for what in ("count", "sum")]
        count, total = (0.0 if each is None else float(each.group(1)) for each in found)
        return count, total


@contextlib.contextmanager
def postgres_pair() -> Iterator[Pair]:
    """PostgreSQL with its standby on a disk, and an empty cluster in it."""
    where = Path(tempfile.gettempdir())  # a socket's path has 107 bytes
    measure.refuse_memory(where)
    with programs(where) as found:
        pair = Pair(found, **_SETTINGS)
        try:
            init(Postgres(pair.dsn), state_format=STATE_FORMAT)
            fill_wal(pair)
            yield pair
        finally:
            pair.stop()


def fill_wal(pair: Pair) -> None:
    """PostgreSQL writes its WAL into old files, once it has any. Before, each 16 MB begin with 0.1 s in which a file of
    zeros is written on both servers, and nothing is confirmed. Each megabyte is confirmed by the standby: a checkpoint
    removes what it has not read yet."""
    with psycopg.connect(pair.primary.dsn, autocommit=True) as primary:
        for _ in range(_WAL_FILES * 16):
            primary.execute("select pg_logical_emit_message(true, 'bench', repeat('x', 1048576))")
        primary.execute("checkpoint")
        primary.execute("set synchronous_commit = remote_apply")
        primary.execute("select pg_current_xact_id()")
        with psycopg.connect(pair.standby.dsn, autocommit=True) as standby:
            standby.execute("checkpoint")


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Everything, started."""
    with (
        postgres_pair() as pair,
        peers.started(peers.VeilMQ(), "alone") as alone,
        peers.started(Member("owner", pair.dsn), "owner") as owner,
        peers.started(Member("follower", pair.dsn), "follower") as follower,
    ):
        follower._queues = 1_000_000  # names of its own, in the same cluster
        yield Cluster(pair, alone, owner, follower)


@dataclass(frozen=True)
class Spent:
    """A run, and what each part spent on a request of it."""

    server: str
    """The server that carried it out: "alone" or "owner"."""

    run: Run
    cpu_us: dict[str, float]
    commit_ms: float
    requests_a_commit: float


@dataclass
class Row:
    """One shape of load: the runs of each lane, in turns."""

    batch: int
    connections: int
    runs: dict[str, list[Spent]] = field(default_factory=dict)
    lag_ms: dict[str, tuple[float, float]] = field(default_factory=dict)

    def ratios(self, lane: str, of: Callable[[Spent], float]) -> tuple[float, float, float]:
        """Median, least and greatest ratio of a lane to the server alone."""
        found = [
            of(one) / of(alone)
            for one, alone in zip(self.runs[lane], self.runs["alone"], strict=True)
            if not one.run.void and not alone.run.void
        ]
        return (statistics.median(found), min(found), max(found)) if found else (0.0, 0.0, 0.0)

    def median(self, lane: str, of: Callable[[Spent], float]) -> float:
        return statistics.median(of(each) for each in self.runs[lane])


def driven(cluster: Cluster, lane: Lane, load: Load, settings: Settings) -> Spent:
    """One run of a lane, with the CPU of everybody."""
    server = cluster.alone if lane.server is cluster.alone else cluster.owner
    before, (commits, seconds) = cluster.cpu_us(), cluster.commits(server)
    run = counted_run(lane, load, settings)
    after, (commits_after, seconds_after) = cluster.cpu_us(), cluster.commits(server)
    count = max(1.0, commits_after - commits)
    cpu = {name: (after[name] - before[name]) / max(1, run.requests) for name in after}
    name = "alone" if server is cluster.alone else "owner"
    found = Spent(name, run, cpu, (seconds_after - seconds) / count * 1e3, run.requests / count)
    shown = "  ".join(f"{name} {us:.1f}" for name, us in cpu.items())
    settings.say(f"    us a request: {shown}; commit {found.commit_ms:.2f} ms, {found.requests_a_commit:.1f} requests")
    return found


def lags_ms(cluster: Cluster, run: Callable[[], object]) -> list[float]:
    """How long the follower's copy is behind the owner's clock while something runs, sampled. Both servers read the
    same machine's clock, and the owner's last batch is some part of it."""
    database = cluster.follower.place.directory / "data" / "veilmq.db"
    found: list[float] = []
    ended = threading.Event()

    def sample() -> None:
        connection = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
        while not ended.wait(LAG_EVERY_S):
            clock: Any = connection.execute("SELECT clock FROM mark").get
            found.append(time.time() * 1e3 - clock / 1e3)
        connection.close()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        run()
    finally:
        ended.set()
        thread.join()
    return found[int(1 / LAG_EVERY_S) : -int(0.5 / LAG_EVERY_S)]  # not what came before the load and after it


def measured(cluster: Cluster, batch: int, connections: int, options: argparse.Namespace, settings: Settings) -> Row:
    """One shape of load."""
    lanes = {
        "alone": Lane(cluster.alone, "json", label="alone"),
        "owner": Lane(cluster.owner, "json", label="owner"),
        "through": Lane(cluster.follower, "json", label="through"),
    }
    row = Row(batch, connections, {name: [] for name in lanes})
    load = Load(options.seconds, connections, batch)
    settings.say(f"batches of {batch}, {connections} connections")
    for lane in lanes.values():
        lane.run(Load(3, connections, batch), settings.wrk)
    for turn in range(options.pairs):
        order = list(lanes)[turn % 3 :] + list(lanes)[: turn % 3]
        for name in order:
            row.runs[name].append(driven(cluster, lanes[name], load, settings))
    for name in ("owner", "through"):
        found = lags_ms(cluster, lambda name=name: lanes[name].run(load, settings.wrk))  # type: ignore[misc]
        if found:
            row.lag_ms[name] = (statistics.median(found), measure.percentile(found, 99))
    return row


PARTS = ("owner", "follower", "session", "walsender", "primary", "standby")


def lines(rows: list[Row]) -> list[str]:
    """The report's tables."""
    ratios = _table(
        "lane", "messages a request", "connections", "lives ratio (min to max)", "goal", "CPU ratio (min to max)",
        "goal", "lives/s", "server's CPU us/request", "p50, p99 ms",
    )  # fmt: skip
    parts = _table(
        "lane", "messages a request", "connections", *PARTS, "commit ms", "requests a commit", "behind ms: median, p99"
    )
    for row in rows:
        for lane in row.runs:
            ratios.append(_line(lane, row.batch, row.connections, *_ratio_cells(row, lane)))
            if lane != "alone":
                parts.append(_line(lane, row.batch, row.connections, *_part_cells(row, lane)))
    text = "CPU of every part, us a request (`session` and `walsender` are some of `primary`):"
    return [*ratios, "", text, "", *parts]


def _ratio_cells(row: Row, lane: str) -> list[str]:
    cells = ["1", "", "1", ""]
    if lane != "alone":
        lives = row.ratios(lane, lambda each: each.run.deleted)
        cpu = row.ratios(lane, lambda each: each.cpu_us[each.server])
        judged = lane == "owner" and row.connections > 1
        cells = [
            _spread(lives), _verdict(lives[0] >= LIVES_MIN, f">= {LIVES_MIN}") if judged else "",
            _spread(cpu), _verdict(cpu[0] <= CPU_MAX, f"<= {CPU_MAX}") if judged else "",
        ]  # fmt: skip
    p50, p99 = (row.median(lane, lambda each, name=name: getattr(each.run, name)) for name in ("p50_ms", "p99_ms"))
    deleted, cpu_us = (
        row.median(lane, lambda each: each.run.deleted),
        row.median(lane, lambda each: each.cpu_us[each.server]),
    )
    return [*cells, f"{deleted:,.0f}", f"{cpu_us:.1f}", f"{p50:.2f}, {p99:.2f}"]


def _part_cells(row: Row, lane: str) -> list[str]:
    cells = [f"{row.median(lane, lambda each, part=part: each.cpu_us[part]):.1f}" for part in PARTS]
    cells.append(f"{row.median(lane, lambda each: each.commit_ms):.2f}")
    cells.append(f"{row.median(lane, lambda each: each.requests_a_commit):.1f}")
    return [*cells, "{:.0f}, {:.0f}".format(*row.lag_ms.get(lane, (0.0, 0.0)))]


def _table(*heads: str) -> list[str]:
    return [_line(*heads), "|" + "---|" * len(heads)]


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _spread(found: tuple[float, float, float]) -> str:
    return "**{:.2f}** ({:.2f} to {:.2f})".format(*found)


def _verdict(met: bool, goal: str) -> str:
    return f"{goal}: {'met' if met else 'missed'}"


def written(rows: list[Row], options: argparse.Namespace, disk: measure.Disk, load: float) -> bool:
    """Print and write the report; whether every run counts."""
    runs = [each.run for row in rows for lane in row.runs.values() for each in lane]
    counts = not any(run.void for run in runs)
    text = [
        f"# cluster, {time.strftime('%Y-%m-%dT%H%MZ', time.gmtime())}", "",
        f"Runs of {options.seconds} s in turns, bodies of 200 bytes; a ratio is to the server alone, and the median of",
        f"{options.pairs}.{'' if counts else ' **Some runs are void.**'}", "", *lines(rows), "",
        f"fdatasync ({disk.filesystem}): p50 {disk.p50_us / 1e3:.3f} ms, p99 {disk.p99_us / 1e3:.3f} ms. Load before",
        f"the benchmark {load:.2f}; in a run at most {max(run.steal_percent for run in runs):.1f} % steal.", "",
        "; ".join(f"{key}: {value}" for key, value in measure.machine().items()),
    ]  # fmt: skip
    record = {"load_at_start": load, "disk": asdict(disk), "machine": measure.machine()}
    record["rows"] = [asdict(row) for row in rows]
    quick = options.pairs < 5 or options.seconds < 10
    print("\n" + report.save("cluster", "\n".join(text), record, quick))
    return counts


def main() -> int:
    """Measure and write the report. 0 if every run counted, 1 if not, 2 if nothing could run."""
    parser = argparse.ArgumentParser(prog="bench/cluster.py", description="a cluster beside one server on a local disk")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--connections", default="1,32")
    parser.add_argument("--batch", default="1,10")
    options = parser.parse_args()
    peers.DATA.mkdir(exist_ok=True)
    try:
        wrk = install.wrk()
        disk, load = measure.fdatasync(peers.DATA), measure.load_1min()
        settings = Settings(wrk, options.pairs, options.seconds, "json", say=lambda text: print(text, flush=True))
        with cluster() as found:
            rows = [
                measured(found, int(batch), int(connections), options, settings)
                for batch in options.batch.split(",")
                for connections in options.connections.split(",")
            ]
    except (install.Missing, peers.ServerGone, MeasureFailed, CallFailed, OSError) as error:
        print(f"bench/cluster.py: {error}", file=sys.stderr)
        return 2
    finally:
        peers.stop_all()
    return 0 if written(rows, options, disk, load) else 1


if __name__ == "__main__":
    sys.exit(main())
