"""VeilMQ's cluster beside pgmq on the same PostgreSQL with the same standby, also while a transaction holds xmin back.

    python bench/pgmq.py [--pairs 5] [--seconds 10] [--batch 1,10] [--held MINUTES] [--pause SECONDS]

Strategy: both run on one primary with a synchronous standby, and are driven in turns, so a ratio compares runs that
follow each other. pgmq is its SQL alone, called by pgbench over 32 connections: send, read, delete. VeilMQ answers
signed SQS requests of 32 connections. CPU is everybody's but the load generator's: PostgreSQL's, and for VeilMQ also
that of both servers. With --held a transaction with a snapshot stays open on the primary all the time, as a long report
or a forgotten session does, and dead rows cannot be vacuumed; a server alone is driven in the same turns, because in an
hour a machine may become slower, and it does without PostgreSQL. With --pause nothing is served for so long after each
pair, so that an hour does not need an hour's load.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import install
import measure
import peers
import psycopg
import report
from measure import Load, MeasureFailed
from scenarios import Lane, Settings, counted_run
from sqs import CallFailed

from cluster import Member, postgres_pair

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.postgres import Pair

VERSION = "1.1.4"
"""Of the package on PyPI, whose file pgmq.sql is installed."""
CONNECTIONS = 32
BODY = "x" * 200
LIVES_MIN, HELD_MIN = 2.0, 0.9
ONE = f"""
select pgmq.send('jobs', '"{BODY}"'::jsonb);
select coalesce((select msg_id from pgmq.read('jobs', 600, 1)), 0) as id \\gset
select pgmq.delete('jobs', :id::bigint);
"""
MANY = f"""
select count(*) from pgmq.send_batch('jobs', array_fill('"{BODY}"'::jsonb, array[%(n)d]));
select coalesce(array_agg(msg_id)::text, '{{}}') as ids from pgmq.read('jobs', 600, %(n)d) \\gset
select count(*) from pgmq.delete('jobs', (:ids)::text::bigint[]);
"""


class Turn(NamedTuple):
    """One run."""

    lives: float
    """A second."""
    cpu_us: float
    """Of everybody but the load generator, a life."""


class Pgmq:
    """pgmq on the primary, in the cluster's database: a transaction holds xmin back for its own database alone."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        python = Path(install.python_package("pgmq", VERSION))
        (sql,) = python.parent.parent.glob("lib/python*/site-packages/pgmq/sql/pgmq.sql")
        self._dsn = pair.primary.dsn
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(sql.read_text())
            connection.execute("select pgmq.create('jobs')")

    def run(self, seconds: int, batch: int) -> Turn:
        """Drive it. Raises MeasureFailed."""
        programs = self._pair.primary.programs
        script = programs.root / f"lives-{batch}.sql"
        script.write_text(ONE if batch == 1 else MANY % {"n": batch})
        flags = ["-n", "-M", "prepared", "-c", str(CONNECTIONS), "-j", "1", "-T", str(seconds), "-f", str(script)]
        before = postgres_us(self._pair)
        done = subprocess.run(
            [str(programs.program("pgbench")), *flags, self._dsn], check=False, capture_output=True, text=True
        )
        spent = postgres_us(self._pair) - before
        found = re.search(r"tps = ([\d.]+)", done.stdout)
        count = re.search(r"actually processed: (\d+)", done.stdout)
        if done.returncode or found is None or count is None:
            raise MeasureFailed(f"pgbench: {done.stdout}{done.stderr}"[-1500:])
        return Turn(float(found[1]) * batch, spent / max(1, int(count[1]) * batch))


def postgres_us(pair: Pair) -> int:
    """CPU of both servers of PostgreSQL until now."""
    return measure.cpu_us(pair.primary.pid) + measure.cpu_us(pair.standby.pid)


def driven(spent: Callable[[], int], lane: Lane, load: Load, settings: Settings) -> Turn:
    """Drive a server. spent: CPU of all that have a part in it until now, in us."""
    before = spent()
    run = counted_run(lane, load, settings)
    return Turn(run.deleted, (spent() - before) / max(1.0, run.deleted * run.seconds))


@contextmanager
def held(pair: Pair, how: bool) -> Iterator[None]:
    """A transaction holds its snapshot while the block runs, if `how`."""
    with psycopg.connect(pair.primary.dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        if how:
            connection.execute("select count(*) from pg_class")
        yield


def in_turns(
    run: dict[str, Callable[[], Turn]], goes_on: Callable[[int], bool], say: Callable[[str], None], pause_s: float
) -> Any:
    """Turns of both, each first in every second pair, and a pause after each pair."""
    found: dict[str, list[Turn]] = {name: [] for name in run}
    began, number = time.monotonic(), 0
    while goes_on(number):
        for name in sorted(run, reverse=bool(number % 2)):
            turn = run[name]()
            found[name].append(turn)
            minutes = (time.monotonic() - began) / 60
            say(
                f"  {minutes:5.1f} min  {name:<7} {turn.lives:>8,.0f} lives/s  {turn.cpu_us:>7.1f} us CPU a life"
                f"  load {measure.load_1min():.1f}"
            )
        number += 1
        time.sleep(pause_s)
    return found


def told(found: dict[str, list[Turn]]) -> str:
    ratios = [a.lives / b.lives for a, b in zip(found["veilmq"], found["pgmq"], strict=True)]
    cpu = {name: statistics.median(turn.cpu_us for turn in turns) for name, turns in found.items()}
    return (
        f"lives a second: **{statistics.median(ratios):.2f}** times pgmq's ({min(ratios):.2f} to {max(ratios):.2f}, "
        f"goal {LIVES_MIN:.0f}), CPU a life {cpu['veilmq']:.0f} : {cpu['pgmq']:.0f} us"
    )


def ends(values: list[float]) -> tuple[float, float]:
    """Medians of the first tenth and of the last."""
    part = max(1, len(values) // 10)
    return statistics.median(values[:part]), statistics.median(values[-part:])


def told_held(found: dict[str, list[Turn]], minutes: float) -> list[str]:
    lines = []
    for name, turns in found.items():
        lives, cpu = ends([turn.lives for turn in turns]), ends([turn.cpu_us for turn in turns])
        lines.append(
            f"{name}, {minutes:g} minutes of held xmin, the last tenth to the first: {lives[1] / lives[0]:.2f} of the "
            f"lives a second ({lives[0]:,.0f} to {lives[1]:,.0f}), CPU a life {cpu[0]:.0f} to {cpu[1]:.0f} us"
            + (f" (goal of lives {HELD_MIN})" if name == "veilmq" else "")
        )
    first, last = ends([a.lives / b.lives for a, b in zip(found["veilmq"], found["alone"], strict=True)])
    lines.append(
        f"veilmq's lives a second to those of a server alone in the same turns: {first:.2f} in the first tenth, "
        f"{last:.2f} in the last, {last / first:.2f} times (goal {HELD_MIN})"
    )
    return lines


def measured(pair: Pair, options: argparse.Namespace, settings: Settings) -> tuple[list[str], dict[str, Any]]:
    pgmq = Pgmq(pair)
    said, record = [], {}
    with (
        peers.started(Member("owner", pair.dsn), "owner") as owner,
        peers.started(Member("follower", pair.dsn), "follower") as follower,
        ExitStack() as more,
    ):
        lane = Lane(owner, "json", owner.new_queue("json"), "veilmq")
        if options.held:
            alone = more.enter_context(peers.started(peers.VeilMQ(), "alone"))
            control = Lane(alone, "json", alone.new_queue("json"), "alone")

        def by_all() -> int:
            return postgres_us(pair) + measure.cpu_us(owner.pid) + measure.cpu_us(follower.pid)

        for batch in map(int, options.batch.split(",")):
            load = Load(options.seconds, CONNECTIONS, batch)
            run: dict[str, Callable[[], Turn]] = {
                "veilmq": lambda load=load: driven(by_all, lane, load, settings),  # type: ignore[misc]
                "pgmq": lambda batch=batch: pgmq.run(options.seconds, batch),  # type: ignore[misc]
            }
            if options.held:
                run["alone"] = lambda load=load: driven(lambda: measure.cpu_us(alone.pid), control, load, settings)  # type: ignore[misc]
            for each in run.values():
                each()
            with held(pair, bool(options.held)):
                if options.held:
                    end = time.monotonic() + options.held * 60
                    found = in_turns(run, lambda _, end=end: time.monotonic() < end, settings.say, options.pause)  # type: ignore[misc]
                    said += [f"batches of {batch}: {line}" for line in told_held(found, options.held)]
                else:
                    found = in_turns(run, lambda number: number < options.pairs, settings.say, options.pause)
                    said.append(f"batches of {batch}: {told(found)}")
            record[str(batch)] = found
    return said, record


def main() -> int:
    """Measure and write the report. 0, or 2 if nothing could run."""
    parser = argparse.ArgumentParser(prog="bench/pgmq.py", description="a cluster beside pgmq on one PostgreSQL")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--batch", default="1,10")
    parser.add_argument("--held", type=float, default=0.0, help="minutes during which a transaction holds xmin back")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each pair of turns")
    options = parser.parse_args()
    peers.DATA.mkdir(exist_ok=True)
    try:
        wrk, disk, load = install.wrk(), measure.fdatasync(peers.DATA), measure.load_1min()
        settings = Settings(wrk, options.pairs, options.seconds, "json", say=lambda text: print(text, flush=True))
        with postgres_pair() as pair:
            said, record = measured(pair, options, settings)
    except (install.Missing, peers.ServerGone, MeasureFailed, CallFailed, OSError, psycopg.Error) as error:
        print(f"bench/pgmq.py: {error}", file=sys.stderr)
        return 2
    finally:
        peers.stop_all()
    name = "pgmq-held" if options.held else "pgmq"
    text = [
        f"# {name}, {time.strftime('%Y-%m-%dT%H%MZ', time.gmtime())}", "",
        f"pgmq's SQL of the package {VERSION}; {CONNECTIONS} connections, bodies of 200 bytes, in turns of",
        f"{options.seconds} s, {options.pause:g} s between the pairs.", "", *(f"- {line}" for line in said), "",
        f"Load before {load:.2f} and after {measure.load_1min():.2f}; fdatasync p50 {disk.p50_us / 1e3:.3f} ms, p99",
        f"{disk.p99_us / 1e3:.3f} ms ({disk.filesystem}).", "",
        "; ".join(f"{key}: {value}" for key, value in measure.machine().items()),
    ]  # fmt: skip
    quick = options.held < 10 if options.held else options.pairs < 5 or options.seconds < 10
    print(
        "\n" + report.save(name, "\n".join(text), {"load": load, "machine": measure.machine(), "runs": record}, quick)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
