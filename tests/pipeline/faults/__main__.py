"""Kills and faults at every step of a drain and its sinks, each in its turn; counts rows that are lost or double.

Strategy: seven streams live through all faults, each with its queue, checkpoint, manifests and sink. A round sends new
messages, arms the fault that has struck least in this run and in those of the record before it (of the stream that was
struck least, then at random), and runs the stream; after some it runs again until it ends well. A step in a process of
Python's is struck there (side.py), a request to a store by the store (s3_side.py), and what only the JVM does by
SIGKILL of the whole process group when the file of that step appears, or at a random moment. On a store the source's
steps are struck by SIGKILL of everything, too. A fault that did not strike is not counted, and after three times its
turn is over as if it had. Every some rounds, and at the end, each stream runs until its queue is empty, and what it
wrote is compared with what was sent.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from tests.pipeline.cluster_stage import ROOT, environment
from tests.pipeline.drain_stage import Stage, left
from tests.pipeline.faults import side
from tests.pipeline.stores import Store, azurite, moto, told

from veilmq.client.messages import Message
from veilmq.pipeline.sinks.checking import check
from veilmq.testing import Random
from veilmq.testing.local import ServerProcess

SCHEMA = pa.schema([("id", pa.string()), ("body", pa.string()), ("type", pa.string())])
HOWS = ("kill", "raise")
ALL = "kill all"
"""JVM and Python."""
SOURCE_STEPS = ("received", "manifest not logged", "before deletes", "amid deletes", "amid read")
CLAIM_STEPS = ("before claim", "after claim")
SINK_STEPS = ("amid write", "rows written", "before commit", "after commit")
REQUESTS = ("request", "answer")
KILLS = ("kill-before", "kill-after")
AWAY_SECONDS = 2.0
RUN_SECONDS = 180.0
ROUNDS_PER_CHECK = 25
MISSES = 3
TYPES = ("order", "x y/z=%20", "語" * 100)
RESTED = 0.7
"""The share of rounds after which a stream is left as it is, until it is struck again."""


class Stream:
    """One of them. `store`: where manifests are, and the table if it is Delta; None: on the local disk. partition: the
    table's column, or none."""

    def __init__(self, stage: Stage, name: str, sink: str, store: Store | None = None, *, partition: str = "") -> None:
        self.partition = partition
        self.stage, self.name, self.sink, self.store = stage, name, sink, store
        self.marks = stage.directory / name
        (self.marks / "m").mkdir(parents=True)
        self.queue = stage.make(name, timeout=2)
        self.sent: set[str] = set()
        self.got: list[str] = []
        self.rows = 700 if sink == "queue" else 60
        self.directory = f"{store.url}/{name}/m" if store else str(self.marks / "m")
        self.table = f"{store.url}/{name}/t" if store and sink == "delta" else str(self.marks / "t")
        self.storage = store.storage() if store and sink == "delta" else {}
        if sink == "delta":
            often = {"delta.checkpointInterval": "2"}
            write_deltalake(
                self.table, SCHEMA.empty_table(), configuration=often, storage_options=self.storage or None,
                partition_by=[partition] if partition else None,
            )  # fmt: skip
        if sink == "queue":
            self.table = stage.url(name=f"{name}-out.fifo")
            self.target = stage.make(f"{name}-out.fifo", fifo=True, timeout=30)

    def setting(self) -> dict[str, str]:
        """For side.py."""
        return {
            "url": self.stage.url(name=self.name), "directory": self.directory, "marks": str(self.marks),
            "sink": self.sink, "table": self.table, "storage": json.dumps(self.storage),
            "rows": "700" if self.sink == "queue" else "40", "partition": self.partition,
        }  # fmt: skip

    def send(self) -> None:
        bodies = [f"{self.name} {number}" for number in range(len(self.sent), len(self.sent) + self.rows)]
        messages = [Message(body, type=TYPES[number % len(TYPES)]) for number, body in enumerate(bodies)]
        failed = [each for each in self.queue.send_batch(messages) if isinstance(each, Exception)]
        assert not failed, failed[0]
        self.sent.update(bodies)

    def written(self) -> list[str]:
        """The bodies that the sink has."""
        if self.sink == "delta":
            table = DeltaTable(self.table, storage_options=self.storage or None).to_pyarrow_table(columns=["body"])
            return list(table["body"].to_pylist())
        if self.sink == "parquet":
            return [row for file in logged(Path(self.table)) for row in pq.read_table(file)["body"].to_pylist()]
        while came := self.target.receive(64):
            self.got += [each.body for each in came]
            self.target.delete_batch([each.handle for each in came])
        return self.got

    def faults(self) -> Iterator[tuple[str, ...]]:
        """What can strike it."""
        steps = [*SOURCE_STEPS, *(SINK_STEPS if self.sink != "parquet" else CLAIM_STEPS)]
        yield from (("step", step, how) for step in steps for how in HOWS)
        if self.sink == "delta":
            yield ("step", "two commit", "raise")
        yield from (("appears", name) for name in self.files())
        yield ("moment",)
        if self.store is None:
            return
        yield from (("step", step, ALL) for step in SOURCE_STEPS)
        ends = [".arrow"]
        if self.sink == "delta":
            ends += [".json", ".zstd.parquet", "_last_checkpoint", ".checkpoint.parquet"]
        yield from (("store", end, do) for end in ends for do in REQUESTS)
        yield from (("away", end, do) for end in ends for do in REQUESTS)
        yield from (("kill", end, do) for end in ends for do in KILLS)

    def files(self) -> dict[str, Callable[[], int]]:
        """How many files of each step there are on the local disk."""
        checkpoint, table = self.marks / "checkpoint", Path(self.table)
        found = {
            "offset logged": lambda: count(checkpoint / "offsets", str.isdigit),
            "commit logged": lambda: count(checkpoint / "commits", str.isdigit),
        }
        if self.store is None:
            found["manifest written"] = lambda: count(self.marks / "m", lambda name: name.endswith(".arrow"))
        if self.sink == "parquet" or (self.sink == "delta" and self.store is None):
            found["part file"] = lambda: len(list(table.rglob("part-*"))) if table.is_dir() else 0
        if self.sink == "parquet":
            found["sink log"] = lambda: count(table / "_spark_metadata", str.isdigit)
            found["claim"] = lambda: max((int(each.name) for each in (table / "_claims").glob("0*")), default=0)
        if self.sink == "delta" and self.store is None:
            found["sink log"] = lambda: count(table / "_delta_log", lambda name: name.endswith(".json"))
        return found


def count(directory: Path, counts: Callable[[str], bool]) -> int:
    try:
        return sum(map(counts, os.listdir(directory)))
    except FileNotFoundError:
        return 0


def logged(table: Path) -> list[str]:
    """The files that Spark's own log of a stream's table says count."""
    entries = sorted((each for each in (table / "_spark_metadata").iterdir() if each.stem.isdigit()), key=number_of)
    last = max((place for place, each in enumerate(entries) if each.suffix == ".compact"), default=0)
    lines = [line for each in entries[last:] for line in each.read_text().splitlines()[1:]]
    return [urlsplit(json.loads(line)["path"]).path for line in lines]


def number_of(path: Path) -> tuple[int, bool]:
    """A compacted entry has its own number's rows, too."""
    return int(path.stem), path.suffix == ".compact"


class Side:
    """The process of Spark, started when it is needed."""

    def __init__(self, directory: Path, setting: Path) -> None:
        self._directory, self._setting = directory, setting
        self._process: subprocess.Popen[str] | None = None
        self._said: Queue[dict[str, Any] | None] = Queue()
        self.starts = 0

    def run(self, stream: str, strikes: Callable[[], bool] = lambda: False) -> str | None:
        """The error of one run; "" if it was killed, None if it ended well. strikes: whether to kill now."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(json.dumps({"stream": stream}) + "\n")
        process.stdin.flush()
        end = time.monotonic() + RUN_SECONDS
        while True:
            try:
                said = self._said.get(timeout=0.001)
            except Empty:
                if strikes():
                    self.kill()
                    return ""
                if time.monotonic() > end:
                    self.kill()
                    raise TimeoutError(f"{stream} did not end") from None
                continue
            if said is None:
                self.kill()
                return ""
            error: str | None = said["error"]
            return error

    @property
    def group(self) -> int:
        """For the stores: they kill the group."""
        return self._running().pid

    def kill(self) -> None:
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None:
            return self._process
        self.starts += 1
        self._said = said = Queue()
        with (self._directory / "side.log").open("ab") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, side.__file__, str(self._setting)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, start_new_session=True, cwd=self._directory,
                env=environment(self._directory, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'src'}"),
            )  # fmt: skip

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    said.put(json.loads(line))
            said.put(None)

        threading.Thread(target=listen, daemon=True).start()
        assert "ready" in (said.get(timeout=120) or {}), "Spark did not start"
        return process


class Conductor:
    """The rounds."""

    def __init__(self, side: Side, streams: list[Stream], chance: Random, before: Counter[str]) -> None:
        self.side, self.streams, self.chance, self.before = side, streams, chance, before
        self.struck: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.faults = {
            f"{stream.name}: {fault[0]} {': '.join(fault[1:])}".strip(): (stream, fault)
            for stream in streams
            for fault in stream.faults()
        }
        self.kills = 0
        self.violations: list[str] = []

    def round(self) -> None:
        name = self.next()
        stream, fault = self.faults[name]
        stream.send()
        began = time.monotonic()
        did = self.strike(stream, fault)
        print(f"{time.monotonic() - began:6.1f} s  {name}{'' if did else ': not reached'}", flush=True)
        (self.struck if did else self.missed)[name] += 1
        # What is sent to a FIFO queue again counts as the same for five minutes.
        if stream.sink != "queue" and self.chance.random() < RESTED:
            return
        for tries in range(5):
            if self.side.run(stream.name) is None:
                return
            time.sleep(tries)
        self.violations.append(f"{stream.name} does not go on after {name}")

    def next(self) -> str:
        """The fault that struck least, of the stream that was struck least."""
        streams: Counter[str] = Counter()
        for name, times in self.struck.items():
            streams[self.faults[name][0].name] += times
        turns = {name: self.struck[name] + self.before[name] + self.missed[name] // MISSES for name in self.faults}
        least = min((turns[name], streams[stream.name]) for name, (stream, _) in self.faults.items())
        return self.chance.choice(
            [name for name, (stream, _) in self.faults.items() if (turns[name], streams[stream.name]) == least]
        )

    def strike(self, stream: Stream, fault: tuple[str, ...]) -> bool:
        """Whether it did."""
        if fault[0] == "step":
            path = stream.marks / side.FAULT
            (stream.marks / side.STRUCK).unlink(missing_ok=True)
            skip = self.chance.choice([0, 0, 1])
            path.write_text(json.dumps({"step": fault[1], "how": fault[2], "skip": skip, "group": self.side.group}))
            self.side.run(stream.name)
            path.unlink(missing_ok=True)
            did = (stream.marks / side.STRUCK).exists()
            self.kills += did and fault[2] in {"kill", ALL}
            return did
        if fault[0] in {"store", "away", "kill"}:
            return self.strike_store(stream, fault)
        if fault[0] == "appears":
            of = stream.files()[fault[1]]
            wanted = of() + self.chance.choice([1, 1, 2])
            did = self.side.run(stream.name, lambda: of() >= wanted) == ""
        else:
            self.side.group  # it is running, so that the moment is one of the stream's  # noqa: B018
            when = time.monotonic() + self.chance.uniform(0.05, 3.0)
            did = self.side.run(stream.name, lambda: time.monotonic() > when) == ""
        self.kills += did
        return did

    def strike_store(self, stream: Stream, fault: tuple[str, ...]) -> bool:
        store = stream.store
        assert store is not None
        away = {"away": "1"} if fault[0] == "away" else {}
        store.fault(at=fault[1], do=fault[2], pid=str(-self.side.group), **away)
        back: list[float] = []

        def look() -> bool:
            """A store that is away comes back."""
            if away and not back and not store.is_armed():
                back.append(time.monotonic() + AWAY_SECONDS)
            if back and back[0] < time.monotonic():
                store.fault()
                back[0] = float("inf")
            return False

        self.side.run(stream.name, look)
        did = not store.is_armed()
        store.fault()
        self.kills += did and fault[0] == "kill"
        return did

    def check(self) -> None:
        """All streams end, and what they wrote is what was sent."""
        for stream in filter(lambda each: each.sent, self.streams):
            end = time.monotonic() + RUN_SECONDS
            while left(stream.queue):
                try:
                    self.side.run(stream.name)
                except TimeoutError as error:
                    self.violations.append(str(error))
                if time.monotonic() > end:
                    self.violations.append(f"{stream.name}: {left(stream.queue)} messages stay in the queue")
                    break
            rows = stream.written()
            lost, double = len(stream.sent - set(rows)), len(rows) - len(set(rows))
            foreign = len(set(rows) - stream.sent)
            if lost or double or foreign:
                self.violations.append(f"{stream.name}: {lost} lost, {double} double, {foreign} that nobody sent")
            if stream.sink != "queue":
                missing = check(stream.table, stream.storage or None, now=time.time()).missing
                if missing:
                    self.violations.append(f"{stream.name}: {len(missing)} files are missing")


def conduct(directory: Path, faults: int, seed: int, minutes: float, before: Counter[str]) -> dict[str, Any]:
    began = time.monotonic()
    with ExitStack() as stack:
        s3, abfs = stack.enter_context(moto()), stack.enter_context(azurite())
        for store in (s3, abfs):
            stack.enter_context(told(store.environment))
        server = ServerProcess(directory).start()
        stack.callback(server.stop)
        stage = Stage(server, directory)
        streams = [
            Stream(stage, "delta", "delta"),
            Stream(stage, "delta-parted", "delta", partition="type"),
            Stream(stage, "delta-s3", "delta", s3),
            Stream(stage, "delta-abfs", "delta", abfs),
            Stream(stage, "parquet", "parquet"),
            Stream(stage, "parquet-s3", "parquet", s3),
            Stream(stage, "queue", "queue"),
        ]
        setting = directory / "setting.json"
        setting.write_text(json.dumps({stream.name: stream.setting() for stream in streams}))
        spark = Side(directory, setting)
        stack.callback(spark.kill)
        conductor = Conductor(spark, streams, Random(seed), before)
        rounds = 0
        while conductor.struck.total() < faults and time.monotonic() - began < minutes * 60:
            try:
                conductor.round()
            except TimeoutError as error:
                conductor.violations.append(str(error))
            rounds += 1
            if rounds % ROUNDS_PER_CHECK == 0:
                conductor.check()
                print(
                    f"{conductor.struck.total()} faults, {conductor.kills} of them kills, in {rounds} rounds,"
                    f" {time.monotonic() - began:.0f} s; {len(conductor.violations)} violations",
                    flush=True,
                )
        conductor.check()
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "revision": revision(),
            "seed": seed, "rounds": rounds, "faults": conductor.struck.total(), "kills": conductor.kills,
            "spark_starts": spark.starts, "seconds": round(time.monotonic() - began),
            "messages": {stream.name: len(stream.sent) for stream in streams},
            "distinct": len(conductor.struck), "of": len(conductor.faults),
            "struck": dict(sorted(conductor.struck.items())), "did_not_strike": dict(sorted(conductor.missed.items())),
            "violations": conductor.violations,
        }  # fmt: skip


def revision() -> str:
    """Of the tree, with `-dirty` if it is changed."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make pipeline-faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="end after so many [200]")
    parser.add_argument("--minutes", type=float, default=90.0, help="or after so long [90]")
    parser.add_argument("--seed", type=int, help="of streams, steps and moments [the time]")
    parser.add_argument("--record", type=Path, default=Path(".tools/pipeline-faults.json"))
    given = parser.parse_args()
    seed = int(time.time()) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends, too
    runs = json.loads(given.record.read_text()).get("runs", []) if given.record.exists() else []
    before: Counter[str] = Counter()
    for run in runs:
        before.update(run["struck"])
    with tempfile.TemporaryDirectory(prefix="veilmq-pipeline-faults-") as directory:
        record = conduct(Path(directory), given.faults, seed, given.minutes, before)
    given.record.parent.mkdir(exist_ok=True)
    given.record.write_text(json.dumps({"runs": [*runs, record]}, indent=1, ensure_ascii=False) + "\n")
    for violation in record["violations"]:
        print("VIOLATION", violation)
    print(
        f"{record['faults']} faults ({record['distinct']} of {record['of']} kinds), {record['kills']} of them kills,"
        f" {sum(record['messages'].values())} messages,"
        f" {record['seconds']} s: {len(record['violations'])} violations"
    )
    return 1 if record["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
