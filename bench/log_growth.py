"""Whether the disk stays flat: the log's segments are dropped whole once a snapshot covers them.

    python bench/log_growth.py [--minutes 60] [--body-bytes 4000] [--connections 32] [--pause-ms 0] [--history-mib 64]

Strategy: two servers, and lives of messages in batches of ten with larger bodies, so that the log grows by many
snapshots' worth in the time. Sampled: the log, PostgreSQL's two directories without their WAL, whose size is a setting
of PostgreSQL, and the servers' directories, which keep the history as one server alone does. Flat: the log of the last
third of the time is at most a tenth larger than that of the third before. A snapshot is due when the log has grown by
what the state has, so the state must not grow: the history is bounded to what it reaches in the first minutes, and
each run has a new queue, since wrk leaves messages behind. With --pause-ms the load is even, also where the machine has
other work.
"""

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import install
import measure
import peers
import report
from measure import Load, MeasureFailed, measured_run
from sqs import CallFailed

from cluster import Member, postgres_pair

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.postgres import Pair

from veilmq.cluster.postgres import Postgres
from veilmq.cluster.registry import status

GROWTH_MAX = 1.1
_EVERY_S = 5.0


class Bounded(Member):
    """A server with a bound of its history."""

    def __init__(self, name: str, dsn: str, history_mib: int) -> None:
        super().__init__(name, dsn)
        self._history_bytes = history_mib << 20

    def command(self, place: peers.Place) -> list[str]:
        return [*super().command(place), "--history-bytes-max", str(self._history_bytes)]


class Sample(NamedTuple):
    """Sizes in MiB."""

    minute: float
    records: int
    log: float
    snapshot: int
    primary: float
    standby: float
    servers: float


def size_mib(directory: Path, without: str = "") -> float:
    """All files below a directory, but for a folder of that name."""
    total = 0
    for path in directory.rglob("*"):
        if without and without in path.parts:
            continue
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total / 2**20


def sampled(pair: Pair, servers: list[peers.Server], began: float) -> Sample:
    now = status(Postgres(pair.dsn))
    return Sample(
        (time.monotonic() - began) / 60,
        now.records,
        now.log_bytes / 2**20,
        now.snapshot,
        size_mib(pair.primary.data, "pg_wal"),
        size_mib(pair.standby.data, "pg_wal"),
        sum(size_mib(server.place.directory / "data") for server in servers),
    )


def soaked(pair: Pair, options: argparse.Namespace, wrk: str) -> tuple[list[Sample], int]:
    """The samples, and how many requests were made."""
    requests, samples, ended = 0, list[Sample](), threading.Event()
    with (
        peers.started(Bounded("owner", pair.dsn, options.history_mib), "owner") as owner,
        peers.started(Bounded("follower", pair.dsn, options.history_mib), "follower") as follower,
    ):
        began = time.monotonic()

        def watch() -> None:
            while not ended.wait(_EVERY_S):
                samples.append(sampled(pair, [owner, follower], began))
                shown = "  ".join(f"{name} {value:,.1f}" for name, value in samples[-1]._asdict().items())
                print(shown, flush=True)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            while time.monotonic() < began + options.minutes * 60:
                queue = owner.new_queue("json")
                target = owner.target("json", queue)
                load = Load(30, options.connections, 10, body_bytes=options.body_bytes, pause_ms=options.pause_ms)
                run = measured_run(wrk, owner.pid, target, load)
                if run.void:
                    raise MeasureFailed(run.void)
                requests += run.requests
                owner.drop_queue("json", queue)
        finally:
            ended.set()
            watching.join()
    return samples, requests


def main() -> int:
    """Measure and write the report. 0 if the disk was flat, 1 if not, 2 if nothing could run."""
    parser = argparse.ArgumentParser(prog="bench/log_growth.py", description="whether a cluster's disk stays flat")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--body-bytes", type=int, default=4000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--pause-ms", type=int, default=0, help="of each connection before each request")
    parser.add_argument("--history-mib", type=int, default=64)
    options = parser.parse_args()
    peers.DATA.mkdir(exist_ok=True)
    try:
        wrk, load = install.wrk(), measure.load_1min()
        with postgres_pair() as pair:
            samples, requests = soaked(pair, options, wrk)
    except (install.Missing, peers.ServerGone, MeasureFailed, CallFailed, OSError) as error:
        print(f"bench/log_growth.py: {error}", file=sys.stderr)
        return 2
    finally:
        peers.stop_all()
    third = len(samples) // 3
    most = [max(each.log for each in part) for part in (samples[third : 2 * third], samples[2 * third :])]
    flat = most[1] <= most[0] * GROWTH_MAX
    step = max(1, len(samples) // 12)
    rows = [f"| {' | '.join(f'{value:,.1f}' for value in each)} |" for each in samples[::step]]
    text = [
        f"# log growth, {time.strftime('%Y-%m-%dT%H%MZ', time.gmtime())}", "",
        f"{options.minutes:g} minutes, {requests:,} requests of ten messages over {options.connections} connections,",
        f"each {options.pause_ms} ms after the answer before, bodies of {options.body_bytes} bytes, a history of",
        f"{options.history_mib} MiB.",
        f"Sizes in MiB. The log reached {most[0]:,.0f} in the second third of the time and {most[1]:,.0f} in the last:",
        f"{'flat' if flat else 'NOT flat'}.", "",
        f"| {' | '.join(Sample._fields)} |", "|" + "---|" * len(Sample._fields), *rows, "",
        f"Load before {load:.2f}, after {measure.load_1min():.2f}.", "",
        "; ".join(f"{key}: {value}" for key, value in measure.machine().items()),
    ]  # fmt: skip
    record = {"load": load, "machine": measure.machine(), "samples": samples}
    print("\n" + report.save("log-growth", "\n".join(text), record, options.minutes < 60))
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
