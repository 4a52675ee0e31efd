"""How fast a live queue of our server is drained into a table, exactly once: server and Spark on the same machine.

    .venv/bin/python bench/drain.py [--messages 200000] [--sink parquet|delta] [--max-rows 100000] [--scheme veil|sqs]
                                    [--queries 1]

Sends bodies of 200 bytes first, starts Spark and runs one small query to warm it up, then measures `drain` from its
call (the query's start and the first receive) to the queue empty and every delete confirmed. Prints the table's rows,
and how many of them are different. CPU seconds are printed by process, because other programs may use the machine: the
bound by CPU is the most that these cores could do without other work.

With `--queries` several drains of one group share the queue, each with a source process of its own.
"""

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deltalake import write_deltalake
from measure import MachineTicks, cpu_us, load_1min

import veilmq
from veilmq.pipeline.drain import drain
from veilmq.pipeline.drain.manifests import ARROW_SCHEMA
from veilmq.pipeline.session import session
from veilmq.testing.local import ServerProcess

BODY_BYTES = 200


def fill(url: str, count: int) -> None:
    with veilmq.connect(f"{url}?create=1") as queue:
        for start in range(0, count, 4_096):
            bodies = [f"{number:012}".ljust(BODY_BYTES, "x") for number in range(start, min(count, start + 4_096))]
            failed = [each for each in queue.send_batch(bodies) if isinstance(each, Exception)]
            assert not failed, failed[0]


class Cpu:
    """CPU seconds of each part until now."""

    def __init__(self, server: ServerProcess, spark: Any) -> None:
        self._server = server.process.pid
        self._jvm = int(spark._jvm.java.lang.ProcessHandle.current().pid())

    def read(self) -> dict[str, float]:
        """`python` is Spark's Python: the source on the driver, and the executors' workers."""
        own = _own_cpu_us(self._jvm)
        parts = {"server": cpu_us(self._server), "jvm": own, "python": cpu_us(self._jvm) - own}
        return {name: used / 1e6 for name, used in parts.items()} | {"this script": time.process_time()}


def _own_cpu_us(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1_000_000 // os.sysconf("SC_CLK_TCK")


def drain_all(spark: Any, url: str, sink: str, directory: Path, queries: int, **options: Any) -> int:
    """Several drains of the queue at the same time, into one Delta table or a Parquet table each; their batches."""
    if queries == 1:
        return drain(spark, url, f"{sink}:{directory / 'table'}", directory / "own", **options).batches

    if sink == "delta":
        # Two queries that create it at the same moment: one of them is refused.
        write_deltalake(directory / "table", ARROW_SCHEMA.empty_table())

    def run(number: int) -> int:
        table = directory / "table" / ("" if sink == "delta" else f"part={number}")
        group = directory / "group"
        return drain(spark, url, f"{sink}:{table}", group / str(number), group=group, until=120, **options).batches

    with ThreadPoolExecutor(queries) as pool:
        return sum(pool.map(run, range(queries)))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--sink", choices=("parquet", "delta"), default="parquet")
    parser.add_argument("--max-rows", type=int, default=100_000)
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--scheme", choices=("veil", "sqs"), default="veil")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--master", default="local[2]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="veilmq-bench-") as name:
        directory = Path(name)
        server = ServerProcess(directory).start()
        spark = session(given.master)
        try:
            place = server.sqs.removeprefix("http://").rstrip("/")
            for queue, count in (("warm", 1_000), ("live", given.messages)):
                fill(f"veil://{place}/{queue}", count)
                url = f"veil://{place}/{queue}" if given.scheme == "veil" else f"sqs://x:x@{place}/{queue}?tls=0"
                table = directory / queue / "table"
                cpu = Cpu(server, spark)
                before, machine, began = cpu.read(), MachineTicks.now(), time.perf_counter()
                batches = drain_all(
                    spark, url, given.sink, directory / queue, given.queries,
                    max_rows=given.max_rows, receivers=given.receivers,
                )  # fmt: skip
                seconds = time.perf_counter() - began
                after, machine_after = cpu.read(), MachineTicks.now()
                if queue == "warm":
                    continue
                if given.sink == "delta":
                    from deltalake import DeltaTable

                    bodies = DeltaTable(table).to_pyarrow_table(columns=["body"]).column("body")
                else:
                    bodies = spark.read.parquet(str(table)).select("body").toArrow().column("body")
                different = len(bodies.unique())
                used = {part: after[part] - before[part] for part in after}
                total = sum(used.values())
                others = (machine_after.busy - machine.busy) / os.sysconf("SC_CLK_TCK") - total
                print(f"{count / seconds:,.0f} messages/s: {count:,} in {seconds:.1f} s, {batches} batches")
                parts = ", ".join(f"{part} {1000 * each / count:.3f}" for part, each in used.items())
                print(f"CPU seconds for 1,000 messages: {1000 * total / count:.3f} ({parts})")
                cores = len(os.sched_getaffinity(0))
                print(f"{cores * count / total:,.0f} messages/s would take all of {cores} cores")
                print(f"others used {others / seconds:.2f} cores meanwhile, load {load_1min():.1f}")
                print(f"rows {len(bodies):,}, different {different:,}")
                if not len(bodies) == different == count:
                    return 1
        finally:
            spark.stop()
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
