"""The pipeline's speed: events into a noop sink, jobs by size, a run of the loop over 1 % new events.

    python bench/pipeline.py [--events 1000000,3000000,10000000] [--live 1000000] [--cores 2] [--only NAMES] [--write]
    python bench/pipeline.py --only commands --commands audit --events 1000000,3000000,10000000,30000000
    python bench/pipeline.py --only wide

Strategy: generated histories of 100 queues with 200 message types, exported as by `veilmq events export`, kept between
runs in build/pipeline-bench. A long one is a short one over and over, each time later and of new messages: so a job's
cost by size is measured on work of one kind. The source, the jobs' reader and Spark's bare scan of the same files
alternate; a figure is the best run. A client creates a live server's history in advance. Other programs may use the
machine, so each figure comes with the CPU seconds of Spark, its Java and its Python together, and with the load before
and after. `commands` runs the command itself: Spark's start is in its figures. `wide` runs `health` on 10,000 queues
with 300 windows each, and says how much memory its Python and its Java had at most. Ratios depend less on the machine
than seconds do.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from measure import load_1min

from veilmq.client.adapters.connect import connect
from veilmq.pipeline.events import ARROW_SCHEMA, export, source
from veilmq.pipeline.events.reading import Bounds, ParquetHistory, ServerHistory, last_instant
from veilmq.pipeline.jobs import audit as audits
from veilmq.pipeline.jobs import health as windows
from veilmq.pipeline.jobs.attempts import KINDS, attempts
from veilmq.pipeline.jobs.timeouts import timeouts
from veilmq.pipeline.loop import Loop
from veilmq.pipeline.session import session
from veilmq.testing.local import ServerProcess

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.histories import Workload, bimodal, history, lognormal, pareto, write

DATA = Path(__file__).resolve().parents[1] / "build" / "pipeline-bench"
RESULTS = Path(__file__).resolve().parent / "results"
QUEUES = 100
LAWS = [
    lognormal(5, 0.5),
    lognormal(20, 1),
    lognormal(120, 0.7),
    bimodal(2, 60, 0.2),
    pareto(5, 1.5),
    lognormal(60, 1.2),
]
EVENTS_A_MESSAGE = 5.45
TURNS = 3
TILE = 3_000_000
"""A longer history repeats one of so many events."""
WIDE = (10_000, 300)
"""Queues, and windows of five minutes in each of which each queue has an event."""
COMMANDS = ("audit", "health", "attempts", "timeouts")
NOW = 1_767_312_000.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def exported(events: int) -> Path:
    """A history of about that many events."""
    place = DATA / f"events-{events}"
    if events > TILE and not place.exists():
        export.export(Repeated(exported(TILE), round(events / TILE)), place)
    if not place.exists():
        messages = int(events / EVENTS_A_MESSAGE / QUEUES / 2)
        workloads = [
            Workload(
                f"queue-{queue:03}",
                LAWS[(queue + 3 * kind) % len(LAWS)],
                f"type-{kind}",
                messages,
                lease=60 if queue % 2 else 30,
                extend=20 if queue % 3 else None,
                crashes_per_second=1 / 2_000,
            )
            for queue in range(QUEUES)
            for kind in range(2)
        ]
        write(history(workloads, seed=1), place)
    return place


class Repeated:
    """A short exported history several times as one, as a `reading.History`: offsets, times and messages go on."""

    def __init__(self, place: Path, times: int) -> None:
        self.epoch = ""
        self._of = ParquetHistory(str(place))
        self._rows = self._of.bounds().following
        self._times = times
        first, last = ({int(each.column("at")[at].as_py()) for each in self._of.read(*of)} for at, of in (
            (0, (0, 1)), (-1, (self._rows - 1, self._rows))))  # fmt: skip
        self._span = max(last) - min(first) + 60_000_000

    def bounds(self) -> Bounds:
        return Bounds(0, self._rows * self._times)

    def hold(self, start: int | None) -> int:
        return start or 0

    def splits(self, start: int, stop: int, rows: int) -> list[tuple[int, int]]:
        return [(at, min(at + rows, stop)) for at in range(start, stop, rows)]

    def read(self, start: int, stop: int) -> Iterator[Any]:
        while start < stop:
            turn, low = divmod(start, self._rows)
            high = min(low + stop - start, self._rows)
            for batch in self._of.read(low, high):
                yield self._later(batch, turn)
            start += high - low

    def _later(self, batch: Any, turn: int) -> Any:
        later = {"offset": self._rows, "sequence": self._rows, "message": None, "at": self._span, "sent": self._span}
        later |= {"visible_since": self._span}
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name, step in later.items():
            if step is not None:
                columns[name] = pc.add(columns[name], turn * step)
            elif turn:
                columns[name] = pc.binary_join_element_wise(pc.utf8_slice_codeunits(columns[name], 2), f"{turn:02}", "")
        # A queue is created once.
        columns["kind"] = pc.if_else(
            pc.and_(pc.equal(columns["kind"], "queue_created"), turn > 0), "polled", columns["kind"]
        )
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)


class Cpu:
    """CPU seconds of this process and all its descendants except `but`, as they run.

    Sampled twice a second: Spark ends its Python workers without waiting for them, so their CPU is not added to its
    own.
    """

    def __init__(self, but: frozenset[int] = frozenset()) -> None:
        self._but = but
        self._ended = threading.Event()
        self._first: dict[tuple[int, str], int] = {}
        self._last: dict[tuple[int, str], int] = {}
        self.peak_mb: dict[str, int] = {}
        """The most memory that a process had, by its program's name; of the others, as this one made the histories."""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Cpu":
        self._first = self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._last |= self._look()

    @property
    def seconds(self) -> float:
        used = sum(ticks - self._first.get(process, 0) for process, ticks in self._last.items())
        return used * _TICK_S

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            self._last |= self._look()

    def _look(self) -> dict[tuple[int, str], int]:
        """Ticks by process: its pid and start time."""
        parents: dict[int, int] = {}
        used: dict[tuple[int, str], int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                parents[int(entry.name)] = int(fields[1])
                used[int(entry.name), fields[19]] = int(fields[11]) + int(fields[12])

        def ours(pid: int) -> bool:
            while pid and pid not in self._but:
                if pid == os.getpid():
                    return True
                pid = parents.get(pid, 0)
            return False

        found = {process: ticks for process, ticks in used.items() if ours(process[0])}
        for pid in {pid for pid, _ in found} - {os.getpid()}:
            try:
                told = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            except OSError:
                continue
            name, peak_mb = told["Name"].strip(), int(told.get("VmHWM", "0 kB").split()[0]) // 1_024
            self.peak_mb[name] = max(peak_mb, self.peak_mb.get(name, 0))
        return found


def timed(work: Callable[[], Any], but: frozenset[int] = frozenset()) -> dict[str, Any]:
    """Seconds, CPU seconds, and the load before and after."""
    load = load_1min()
    with Cpu(but) as cpu:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
    used = {"seconds": round(seconds, 3), "cpu_seconds": round(cpu.seconds, 2), "load": [load, load_1min()]}
    return used | {"peak_mb": cpu.peak_mb}


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The quickest."""
    return min(runs, key=lambda each: each["seconds"])


def noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def noop_of(read: Callable[[], Any]) -> None:
    noop(read())


def load(spark: Any, **options: Any) -> Any:
    return spark.read.format("veilmq-events").options(**options).load()


def rate(rows: int, run: dict[str, Any]) -> dict[str, Any]:
    """With rows a second, by the clock and by what two cores' CPU would do."""
    by_cpu = 2 * rows / max(run["cpu_seconds"], 1e-9)
    return run | {"rows": rows, "rows_a_second": round(rows / run["seconds"]), "rows_a_second_by_cpu": round(by_cpu)}


def scan(spark: Any, place: Path) -> dict[str, Any]:
    rows = ParquetHistory(str(place)).bounds().following
    ways = {
        "source": lambda: load(spark, path=str(place)),
        "jobs": lambda: source.load(spark, {"path": str(place)}),
        "spark": lambda: spark.read.parquet(str(place)),
    }
    runs: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, read in ways.items():
            runs[way].append(timed(partial(noop_of, read)))
    return {way: rate(rows, best(each)) for way, each in runs.items()}


def live(spark: Any, events: int) -> dict[str, Any]:
    """From a server whose history holds about that many events."""
    with tempfile.TemporaryDirectory(dir=DATA) as directory:
        process = ServerProcess(Path(directory))
        process.start()
        try:
            with connect(f"veil://{process.sqs.removeprefix('http://')}/orders?create=1") as queue:
                for _ in range(events // 3_000):
                    queue.send_batch(["x" * 200] * 1_000)
                    left = 1_000
                    while left:
                        taken = queue.receive(queue.capabilities.receive_messages_max, lease=600)
                        queue.delete_batch([each.handle for each in taken])
                        left -= len(taken)
            token = (process.data / "admin-token").read_text().strip()
            server = ServerHistory(process.admin, token)
            rows = server.bounds().following
            bare, through = [], []
            for _ in range(TURNS):
                bare.append(timed(lambda: [each.num_rows for each in server.read(0, rows)]))
                through.append(timed(lambda: noop(load(spark, server=process.admin, token=token))))
        finally:
            process.stop()
    return {"spark": rate(rows, best(through)), "without_spark": rate(rows, best(bare))}


def by_size(spark: Any, places: dict[int, Path]) -> dict[str, Any]:
    """Jobs from Parquet to their rows, in a session that has warmed up."""
    found: dict[str, Any] = {}
    for size, place in places.items():
        history = ParquetHistory(str(place))
        rows = history.bounds().following
        # As the commands do: without `until` the events are read once more, for the last instant.
        until = last_instant(history, 0, rows)

        events = partial(source.load, spark, {"path": str(place)})
        jobs: dict[str, Callable[[], Any]] = {
            "timeouts": partial(_timeouts, events, until),
            "attempts": partial(_attempts, events, until),
            "health": partial(_health, events),
            "audit": partial(_audit, events),
        }
        for job, work in jobs.items():
            found.setdefault(job, {})[str(size)] = rate(rows, timed(work))
            print(job, size, json.dumps(found[job][str(size)]), flush=True)
    return found


def _timeouts(events: Callable[..., Any], until: int | None) -> None:
    timeouts(attempts(events(KINDS), until)).collect()


def _attempts(events: Callable[..., Any], until: int | None) -> None:
    noop(attempts(events(KINDS), until))


def _health(events: Callable[..., Any]) -> None:
    noop(windows.health(events(windows.KINDS)))


def _audit(events: Callable[..., Any]) -> None:
    audits.audit(events()).collect()


def wide(cores: int) -> dict[str, Any]:
    """`health` on many queues and windows: every row is printed, none is kept."""
    queues, windows = WIDE
    place = DATA / f"wide-{queues}-{windows}"
    if not place.exists():
        rows = queues * windows
        at = np.repeat(np.arange(windows), queues) * 300_000_000 + 1_767_225_600_000_000
        columns: dict[str, Any] = {
            name: pa.nulls(rows, kind) for name, kind in zip(ARROW_SCHEMA.names, ARROW_SCHEMA.types, strict=True)
        }
        number = np.tile(np.arange(queues), windows)
        names = pa.array([f"queue-{each:05}" for each in range(queues)])
        columns |= {
            "offset": pa.array(np.arange(rows)), "kind": pa.array(["sent"] * rows), "at": pa.array(at),
            "sent": pa.array(at), "visible_since": pa.array(at), "queue": names.take(pa.array(number)),
            "incarnation": pa.array(number + 1), "sequence": pa.array(np.arange(rows)),
            "attempt": pa.array(np.zeros(rows, int)),
            "account": pa.array(["000000000000"] * rows), "region": pa.array(["us-east-1"] * rows),
        }  # fmt: skip
        write(pa.table(columns, schema=ARROW_SCHEMA), place)
    command = [sys.executable, "-m", "veilmq", "pipeline", "health", "--path", str(place), "--json"]
    command += ["--master", f"local[{cores}]"]
    with tempfile.TemporaryFile(dir=DATA) as said:
        run = timed(partial(subprocess.run, command, stdout=said, check=True))
        said.seek(0)
        printed = sum(1 for _ in said)
    assert printed == queues * windows, printed
    return run | {"rows": printed}


def commands(cores: int, places: dict[int, Path], names: Sequence[str]) -> dict[str, Any]:
    """The commands as users run them: Python, Java and Spark from their start to their end."""
    found: dict[str, Any] = {}
    for size, place in places.items():
        rows = ParquetHistory(str(place)).bounds().following
        for name in names:
            command = [sys.executable, "-m", "veilmq", "pipeline", name, "--path", str(place)]
            command += ["--master", f"local[{cores}]"]
            with tempfile.TemporaryFile(dir=DATA) as said:
                run = timed(partial(subprocess.run, command, stdout=said, check=True))
            found.setdefault(name, {})[str(size)] = rate(rows, run)
            print("veilmq pipeline", name, size, json.dumps(found[name][str(size)]), flush=True)
    return found


def loop(spark: Any, place: Path) -> dict[str, Any]:
    """A run over 95 %, then five over 1 % each: the first one compiles what the later ones reuse."""
    bounds = ParquetHistory(str(place)).bounds()

    class Until(ParquetHistory):
        def __init__(self, percent: int) -> None:
            super().__init__(str(place))
            self._following = bounds.first + (bounds.following - bounds.first) * percent // 100

        def bounds(self) -> Any:
            return bounds._replace(following=self._following)

    options = {"path": str(place)}
    with tempfile.TemporaryDirectory(dir=DATA) as directory:
        work, ran = Loop(Path(directory) / "loop"), []

        def run(percent: int) -> dict[str, Any]:
            history = Until(percent)
            return timed(lambda: ran.append(work.run(spark, history, options, now=NOW, timer=time.perf_counter)))

        full, *new = [run(percent) for percent in range(95, 101)]
    later = sorted(new[1:], key=lambda each: each["cpu_seconds"])[len(new) // 2 - 1]
    # What a run over everything would have taken.
    whole = {name: full[name] / 0.95 for name in ("seconds", "cpu_seconds")}
    return {
        "full": full,
        "first_new": new[0],
        "new": later | {"events": ran[-1].stop - ran[-1].start, "planned_anew": ran[-1].planned},
        "share": round(later["seconds"] / whole["seconds"], 4),
        "share_by_cpu": round(later["cpu_seconds"] / whole["cpu_seconds"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", default="1000000,3000000,10000000")
    parser.add_argument("--live", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", default="scan,live,jobs,commands,loop")
    parser.add_argument("--commands", default=",".join(COMMANDS), help="of `commands`, some")
    parser.add_argument(
        "--write",
        action="store_true",
        help="Put the figures into bench/results/pipeline.json, beside those that are there.",
    )
    given = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    wanted = set(given.only.split(","))
    found: dict[str, Any] = {"cores": given.cores}
    if "wide" in wanted:
        found["wide"] = wide(given.cores)
        print("wide", json.dumps(found["wide"]), flush=True)
    places = {int(each): exported(int(each)) for each in given.events.split(",")} if wanted != {"wide"} else {}
    if "commands" in wanted:  # while no other Java runs
        found["commands"] = commands(given.cores, places, given.commands.split(","))
    if wanted - {"commands", "wide"}:
        _in_session(given, wanted, places, found)
    if given.write:
        file = RESULTS / "pipeline.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        if "commands" in found:
            earlier = kept.get("commands", {})
            found["commands"] = {
                name: earlier.get(name, {}) | found["commands"].get(name, {})
                for name in COMMANDS
                if name in earlier or name in found["commands"]
            }
        file.write_text(json.dumps(kept | found, indent=2) + "\n")


def _in_session(given: Any, wanted: set[str], places: dict[int, Path], found: dict[str, Any]) -> None:
    largest = places[max(places)]
    spark = session(f"local[{given.cores}]", settings={"spark.driver.memory": "6g", "spark.log.level": "ERROR"})
    try:
        # Spark's one-time compiling and importing does not count as the pipeline's.
        timeouts(attempts(load(spark, path=str(places[min(places)]), until=100_000))).collect()
        for name, work in (
            ("scan", lambda: scan(spark, largest)),
            ("live", lambda: live(spark, given.live)),
            ("jobs", lambda: by_size(spark, places)),
            ("loop", lambda: loop(spark, largest)),
        ):
            if name in wanted:
                found[name] = work()
                print(name, json.dumps(found[name]), flush=True)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
