"""Push delay of healthy endpoints with and without twenty dead ones, alternating on one server.

    make bench ARGS="--push"        or alone: .venv/bin/python bench/push.py [--pairs 5] [--count 150] [--rate 50]

A turn is a new topic with four healthy endpoints and, every second time, twenty dead ones: five refuse, five accept a
push and never answer, five answer a byte a second, five answer 500. The ports are new each time, so that the server has
to discover each dead endpoint in the turn. The delay runs from the publish being written to the whole push being read
at the endpoint. Goal: median and p99 with dead endpoints at most 1.2 times those without; a ratio compares pooled
delays. Exit code 0 if both are met, 1 if not, 2 if a push was lost.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import report
from measure import cpu_us, fdatasync, load_1min, machine, percentile
from peers import DATA

from veilmq.testing.local import ServerProcess

GOAL = 1.2
HEALTHY, DEAD_OF_A_KIND = 4, 5
COUNT, RATE = 150, 50.0
WARM = 20
LOST_AFTER_S = 60
KINDS = ("refuses", "hangs", "dribbles", "errors")


@dataclass
class Turn:
    """One topic's life. Delays in milliseconds, one for each push to a healthy endpoint."""

    dead: bool
    delays: list[float]
    cpu_ms_per_publish: float

    def summary(self) -> dict[str, float | bool]:
        return {
            "dead": self.dead,
            "pushes": len(self.delays),
            "median_ms": statistics.median(self.delays),
            "p99_ms": percentile(self.delays, 99),
            "cpu_ms_per_publish": self.cpu_ms_per_publish,
        }


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """The body of one request."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(length)


@asynccontextmanager
async def endpoint(kind: str, arrivals: list[tuple[int, float]]) -> AsyncIterator[str]:
    """An endpoint's URL. A healthy one records the number and time of each arrival."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while True:
                body = await read_request(reader)
                if kind == "healthy":
                    arrivals.append((int(body), time.perf_counter()))
                    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                elif kind == "errors":
                    writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")
                elif kind == "hangs":
                    await asyncio.sleep(3600)
                else:
                    for byte in b"HTTP/1.1 200 OK\r\nX-Slow: 1\r\n":
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(1)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the server gave up, or the turn is over
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if kind == "refuses":
        server.close()
    yield f"http://127.0.0.1:{port}/hook"
    server.close()
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Publisher:
    """One connection to the MNS port."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)

    async def ask(self, method: str, target: str, body: str = "") -> None:
        """Raises RuntimeError for an error."""
        raw = body.encode()
        self._writer.write(
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        )
        told = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = next((int(x[15:]) for x in told.split(b"\r\n") if x.startswith(b"content-length:")), 0)
        answer = await self._reader.readexactly(length)
        if not 200 <= int(told.split(b" ", 2)[1]) < 300:
            raise RuntimeError(f"{method} {target}: {answer.decode()}")

    def close(self) -> None:
        self._writer.close()


async def turn(server: ServerProcess, publisher: Publisher, topic: str, dead: bool, count: int, rate: float) -> Turn:
    """Publish `count` messages at `rate` a second, and wait for the last push. Raises RuntimeError if one is lost."""
    arrivals: list[tuple[int, float]] = []
    wanted = ["healthy"] * HEALTHY + (list(KINDS) * DEAD_OF_A_KIND if dead else [])
    async with AsyncExitStack() as stack:
        await publisher.ask("PUT", f"/topics/{topic}", "<Topic/>")
        for place, kind in enumerate(wanted):
            url = await stack.enter_async_context(endpoint(kind, arrivals))
            settings = f"<Endpoint>{url}</Endpoint><NotifyContentFormat>SIMPLIFIED</NotifyContentFormat>"
            await publisher.ask(
                "PUT", f"/topics/{topic}/subscriptions/s{place}", f"<Subscription>{settings}</Subscription>"
            )
        await asyncio.sleep(1)  # the room looks for subscriptions twice a second
        sent: dict[int, float] = {}
        before = cpu_us(server.process.pid)
        begun = time.perf_counter()
        for number in range(WARM + count):
            await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
            sent[number] = time.perf_counter()
            await publisher.ask(
                "POST", f"/topics/{topic}/messages", f"<Message><MessageBody>{number}</MessageBody></Message>"
            )
        deadline = time.perf_counter() + LOST_AFTER_S
        while len(arrivals) < HEALTHY * (WARM + count) and time.perf_counter() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        spent_ms = (cpu_us(server.process.pid) - before) / 1e3
        if len(arrivals) < HEALTHY * (WARM + count):
            raise RuntimeError(f"{HEALTHY * (WARM + count) - len(arrivals)} pushes never came")
        await publisher.ask("DELETE", f"/topics/{topic}")
    delays = [(at - sent[number]) * 1e3 for number, at in arrivals if number >= WARM]
    return Turn(dead, delays, spent_ms / (WARM + count))


async def run(server: ServerProcess, pairs: int, count: int, rate: float) -> list[Turn]:
    """The turns, with and without dead endpoints; the order alternates."""
    publisher = Publisher(server.mns)
    await publisher.open()
    turns = [await turn(server, publisher, "warm", True, count // 4, rate)]
    for pair in range(pairs):
        for dead in ((False, True), (True, False))[pair % 2]:
            done = await turn(server, publisher, f"t{len(turns)}", dead, count, rate)
            turns.append(done)
            told = done.summary()
            print(
                f"  {'beside 20 dead' if dead else 'alone         '} {told['pushes']} pushes: median "
                f"{told['median_ms']:.2f} ms, p99 {told['p99_ms']:.2f} ms, load {load_1min():.2f}",
                flush=True,
            )
    publisher.close()
    return turns[1:]


def text_of(record: dict[str, object], rows: list[dict[str, float | bool]], ratios: dict[str, float]) -> str:
    """Markdown."""
    lines = [f"# push, {record['at']}", ""]
    if record["quick"]:
        lines += ["**QUICK RUN: shows that the benchmark works. No figure of it may be quoted.**", ""]
    lines += [
        f"{HEALTHY} healthy endpoints, {record['rate']} publishes a second, {len(rows) // 2} pairs of turns.",
        "",
        "| turn | pushes | median ms | p99 ms | server CPU ms a publish |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {'beside 20 dead' if row['dead'] else 'alone'} | {row['pushes']:,} | {row['median_ms']:.2f} "
        f"| {row['p99_ms']:.2f} | {row['cpu_ms_per_publish']:.2f} |"
        for row in rows
    ]
    verdicts = [
        f"{name} **{ratio:.2f}** (<= {GOAL}: {'met' if ratio <= GOAL else 'missed'})" for name, ratio in ratios.items()
    ]
    lines += ["", f"Pooled, beside the dead to alone: {', '.join(verdicts)}.", ""]
    lines += [f"Load before {record['load_at_start']:.2f}: compare the ratios.", ""]
    lines += ["; ".join(f"{key}: {value}" for key, value in machine().items())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/push.py", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--count", type=int, default=COUNT, help="publishes a turn")
    parser.add_argument("--rate", type=float, default=RATE, help="publishes a second")
    parser.add_argument("--quick", action="store_true", help="two short pairs, not to be quoted")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.count = 2, 100
    return bench(options.pairs, options.count, options.rate, options.quick)


def bench(pairs: int, count: int, rate: float, quick: bool) -> int:
    """Measure, print, and write to bench/results."""
    load = load_1min()
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="push-", dir=DATA) as directory:
        disk = fdatasync(DATA)
        server = ServerProcess(Path(directory), "--push-allow", "127.0.0.0/8").start()
        try:
            turns = asyncio.run(run(server, pairs, count, rate))
        except RuntimeError as error:
            print(f"bench/push.py: {error}", file=sys.stderr)
            return 2
        finally:
            server.stop()
    pooled = {dead: [delay for each in turns if each.dead is dead for delay in each.delays] for dead in (True, False)}
    ratios = {
        "median": statistics.median(pooled[True]) / statistics.median(pooled[False]),
        "p99": percentile(pooled[True], 99) / percentile(pooled[False], 99),
    }
    rows = [each.summary() for each in turns]
    record: dict[str, object] = {
        "scenario": "push", "at": time.strftime("%Y-%m-%dT%H%MZ", time.gmtime()), "quick": quick,
        "load_at_start": load, "rate": rate, "machine": machine(), "disk": asdict(disk), "turns": rows,
        "ratios": ratios, "goal": GOAL,
    }  # fmt: skip
    text = text_of(record, rows, ratios)
    print("\n" + report.save("push", text, record, quick))
    return 0 if max(ratios.values()) <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
