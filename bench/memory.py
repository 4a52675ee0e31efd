"""What a waiting message and a parked poll cost in memory, and whether fills and drains leave anything behind.

    .venv/bin/python bench/memory.py [--fills 20] [--messages 100000] [--polls 2000] [--only fills parked embedded]

A server in development mode is filled with messages of 200 bytes and drained again, `--fills` times (from the second
time on with a quarter of them), with four connections and batches of ten; after each step it is asked where its memory
is (`soak_memory`). A line through what the second half of the drains left must not rise by more than a MiB. Beside
that: connections that are idle and then parked in a receive, and a process that fills an embedded queue. Exit code 0 if
nothing grows, 1 otherwise.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import report
import soak_memory
from measure import load_1min, machine
from peers import DATA
from stalls import BODY, Caller

from veilmq.testing.local import ServerProcess

MIB = 1 << 20
LANES = 4
GROWTH_MIB_MAX = 1.0
SHOWN = (
    ("Rss", "resident"),
    ("malloc_used", "malloc, used"),
    ("malloc_free", "malloc, free"),
    ("sqlite", "of that SQLite"),
)

Look = Callable[[], dict[str, Any]]


def fill(url: str, queue: str, batches: int) -> int:
    """Send so many batches of ten; returns the messages."""
    caller = Caller(url)
    entries = [{"Id": str(n), "MessageBody": BODY} for n in range(10)]
    for _ in range(batches):
        if caller.sqs("SendMessageBatch", QueueUrl=queue, Entries=entries).get("Failed"):
            raise RuntimeError("a message was refused")
    return 10 * batches


def drain(url: str, queue: str, batches: int) -> int:
    """Receive and delete until the queue is empty; returns the messages."""
    caller, gone = Caller(url), 0
    while messages := caller.sqs("ReceiveMessage", QueueUrl=queue, MaxNumberOfMessages=10).get("Messages"):
        entries = [{"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]} for n, each in enumerate(messages)]
        caller.sqs("DeleteMessageBatch", QueueUrl=queue, Entries=entries)
        gone += len(messages)
    return gone


def fills(server: ServerProcess, look: Look, times: int, messages: int) -> list[dict[str, Any]]:
    """A look before, and after each fill and each drain."""
    queue = Caller(server.sqs).queue("memory")
    found = [look() | {"step": "start"}]
    with ThreadPoolExecutor(LANES) as pool:
        for number in range(times):
            for step in (fill, drain):
                done = sum(
                    pool.map(lambda _, step=step: step(server.sqs, queue, messages // 10 // LANES), range(LANES))
                )
                if done != messages // 10 // LANES * LANES * 10:
                    raise RuntimeError(f"{step.__name__} {number + 1}: {done} of {messages} messages")
                time.sleep(2)  # what was flushed behind it
                found.append(look() | {"step": step.__name__})
                shown = " ".join(f"{name}={found[-1][name] / MIB:.1f}" for name, _ in SHOWN)
                print(f"{step.__name__} {number + 1}: {shown} blocks={found[-1]['python_blocks']:,}", flush=True)
    return found


async def parked(server: ServerProcess, look: Look, polls: int) -> dict[str, float]:
    """Bytes that an idle connection costs, and a parked poll beside it."""
    place = urlsplit(server.sqs)
    queue = Caller(server.sqs).queue("parked")
    body = json.dumps({"QueueUrl": queue, "WaitTimeSeconds": 20}).encode()

    def request(action: str, body: bytes) -> bytes:
        head = f"POST / HTTP/1.1\r\nHost: {place.netloc}\r\nX-Amz-Target: AmazonSQS.{action}\r\n"
        return f"{head}Content-Type: application/x-amz-json-1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    writers: list[asyncio.StreamWriter] = []
    before = await asyncio.to_thread(look)
    for _ in range(polls):
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(request("ListQueues", b"{}"))
        await reader.readuntil(b"\r\n\r\n")
        writers.append(writer)
    idle = await asyncio.to_thread(look)
    for writer in writers:
        writer.write(request("ReceiveMessage", body))
    await asyncio.sleep(5)
    waiting = await asyncio.to_thread(look)
    for writer in writers:
        writer.close()
    return {
        "connection": (idle["Rss"] - before["Rss"]) / polls,
        "poll": (waiting["Rss"] - idle["Rss"]) / polls,
        "poll_python_blocks": (waiting["python_blocks"] - idle["python_blocks"]) / polls,
    }


def embedded(directory: Path, messages: int) -> None:
    """In a process of its own: prints its resident memory before and after it filled a queue."""
    import veilmq

    with veilmq.connect(f"veil://{directory}?queue=memory&create=1") as queue:
        queue.send_batch([BODY] * 10)
        before = soak_memory.look()
        for _ in range(messages // 1_000):
            queue.send_batch([BODY] * 1_000)
        print(json.dumps([before, soak_memory.look()]))


def cost(before: dict[str, Any], after: dict[str, Any], messages: int) -> dict[str, float]:
    """Bytes a message: all, and without what SQLite has more (its cache of pages has a bound)."""
    more, cached = (after[name] - before[name] for name in ("Rss", "sqlite"))
    return {"bytes": more / messages, "beside_cache": (more - cached) / messages}


def growth_mib(found: list[dict[str, Any]], name: str = "Rss") -> float:
    """What a line through the drains' second half rises by, from its beginning to its end."""
    left = [each[name] / MIB for each in found if each["step"] == "drain"]
    half = left[len(left) // 2 :]
    return statistics.linear_regression(range(len(half)), half).slope * (len(half) - 1) if len(half) > 1 else 0.0


def told(costs: dict[str, Any]) -> str:
    return f"{costs['bytes']:.0f} bytes, {costs['beside_cache']:.0f} of them beside SQLite's cache of pages"


def text_of(record: dict[str, Any]) -> str:
    """Markdown."""
    lines = [f"# memory, {record['at']}", ""]
    if found := record.get("fills"):
        verdict = "flat" if record["growth_mib"] <= GROWTH_MIB_MAX else "**grows**"
        lines += [
            f"Fills and drains of {record['messages']:,} messages. After the drains of the second half: {verdict} "
            f"({record['growth_mib']:+.2f} MiB). In the first fill a message takes "
            f"{told(record['message'])}.",
            "",
            f"| MiB after | {' | '.join(name for _, name in SHOWN)} | blocks of Python |",
            f"|---|{'---|' * (len(SHOWN) + 1)}",
        ]
        for number, each in enumerate(found):
            cells = " | ".join(f"{each[name] / MIB:.1f}" for name, _ in SHOWN)
            lines.append(f"| {each['step']} {(number + 1) // 2 or ''} | {cells} | {each['python_blocks']:,} |")
        lines.append("")
    if costs := record.get("parked"):
        lines += [f"{record['polls']:,} connections: {costs['connection']:,.0f} bytes each; a parked poll on one: "
                  f"{costs['poll']:,.0f} more.", ""]  # fmt: skip
    if costs := record.get("embedded"):
        lines += [f"Embedded, {record['messages']:,} messages: {told(costs)} each.", ""]
    lines += [f"Load before {record['load_at_start']:.2f}.", ""]
    return "\n".join([*lines, "; ".join(f"{key}: {value}" for key, value in machine().items())])


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/memory.py", description=__doc__)
    parser.add_argument("--fills", type=int, default=20)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--polls", type=int, default=2_000)
    parts = ["fills", "parked", "embedded"]
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument("--embedded", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.embedded:
        embedded(options.embedded, options.messages)
        return 0
    record: dict[str, Any] = {
        "scenario": "memory", "at": time.strftime("%Y-%m-%dT%H%MZ", time.gmtime()), "load_at_start": load_1min(),
        "machine": machine(), "messages": options.messages, "polls": options.polls,
    }  # fmt: skip
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="memory-", dir=DATA) as directory:
        home = Path(directory)
        if {"fills", "parked"} & {*options.only}:
            with soak_memory.watched(home / "memory"):
                server = ServerProcess(home, "--no-cooldowns").start()

            def look(word: str = "look") -> dict[str, Any]:
                return soak_memory.ask(home / "memory", word)

            try:
                if "parked" in options.only:
                    record["parked"] = asyncio.run(parked(server, look, options.polls))
                if "fills" in options.only:
                    found = record["fills"] = fills(server, look, options.fills, options.messages)
                    objects = look("objects")
                    del objects["longest"]
                    record["ended"] = [objects, look("trim")]
                    record["message"] = cost(found[0], found[1], options.messages)
                    record["growth_mib"] = growth_mib(found)
            finally:
                server.stop()
        if "embedded" in options.only:
            command = [
                sys.executable,
                __file__,
                "--embedded",
                str(home / "embedded"),
                "--messages",
                str(options.messages),
            ]
            before, after = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            record["embedded"] = cost(before, after, options.messages) | {"before": before, "after": after}
    quick = options.fills < 10 or len(options.only) < len(parts)
    print("\n" + report.save("memory", text_of(record), record, quick=quick))
    return 0 if record.get("growth_mib", 0.0) <= GROWTH_MIB_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
