"""Parked long polls: what thousands of them cost an idle server, and how fast one gets a sent message.

Each poll has its own connection and waits 20 s (SQS's maximum); the polls wait at CROWD_QUEUES queues. The server's CPU
is read over a window that ends well before the first poll does. The latency runs from the send being written to the
parked receive's answer being read, at a queue of its own, once alone and once among the other polls.
"""

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any

import measure
from measure import MeasureFailed
from peers import Peer, Server, started
from scenarios import Settings, shared_protos
from sqs import Proto

WAIT_S = 20
CROWD_QUEUES = 20
WINDOW_S = 8
SETTLE_S = 2
CPU_PERCENT_MAX, RSS_MIB_MAX, LATENCY_MS_MAX = 1.0, 60, 5.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Door:
    """One server, queue and wire form: opens connections and makes requests."""

    server: Server
    proto: Proto
    queue_url: str

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.place.port)

    def request(self, action: str, **parameters: object) -> bytes:
        path = self.server.peer.path_of(self.queue_url)
        return self.server.caller(self.proto).wire(action, {"QueueUrl": self.queue_url, **parameters}, path)

    def poll(self) -> bytes:
        return self.request("ReceiveMessage", WaitTimeSeconds=WAIT_S, VisibilityTimeout=3600)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of one answer of known or chunked length."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, lines = int(head.split(b" ", 2)[1]), head.lower().split(b"\r\n")
    for line in lines:
        if line.startswith(b"content-length:"):
            return status, await reader.readexactly(int(line.split(b":")[1]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return status, body


async def _latencies_ms(door: Door, count: int) -> list[float]:
    (poll_in, poll_out), (send_in, send_out) = await door.open(), await door.open()
    taken = []
    try:
        for number in range(count):
            poll_out.write(door.poll())
            await poll_out.drain()
            send = door.request("SendMessage", MessageBody=f"message {number}")
            await asyncio.sleep(0.01)  # long enough for the poll to be parked
            start = time.perf_counter()
            send_out.write(send)
            status, body = await asyncio.wait_for(_answer(poll_in), WAIT_S + 5)
            taken.append((time.perf_counter() - start) * 1e3)
            sent_status, _ = await _answer(send_in)
            if (status, sent_status) != (200, 200) or f"message {number}".encode() not in body:
                raise MeasureFailed(f"parked receive: HTTP {status}, send: HTTP {sent_status}: {body[:200]!r}")
    finally:
        poll_out.close()
        send_out.close()
    return taken


async def _parked(server: Server, proto: Proto, count: int, samples: int) -> Result:
    lone, *crowd = (Door(server, proto, server.new_queue(proto)) for _ in range(1 + CROWD_QUEUES))
    alone = await _latencies_ms(lone, samples)
    idle_us, idle_start = measure.cpu_us(server.pid), time.perf_counter()
    await asyncio.sleep(WINDOW_S / 2)
    idle = 100 * (measure.cpu_us(server.pid) - idle_us) / 1e6 / (time.perf_counter() - idle_start)
    rss_before = measure.rss_bytes(server.pid)
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        # 100 at a time, so that no listen queue overflows.
        for _ in range(0, count, 100):
            connections += await asyncio.gather(*(lone.open() for _ in range(min(100, count - len(connections)))))
        first_poll = time.perf_counter()
        for (_, writer), door in zip(connections, itertools.cycle(crowd), strict=False):
            writer.write(door.poll())
        await asyncio.gather(*(writer.drain() for _, writer in connections))
        answers = [asyncio.ensure_future(_answer(reader)) for reader, _ in connections]
        await asyncio.sleep(SETTLE_S)
        spent, start = measure.cpu_us(server.pid), time.perf_counter()
        await asyncio.sleep(WINDOW_S)
        percent = 100 * (measure.cpu_us(server.pid) - spent) / 1e6 / (time.perf_counter() - start)
        rss_after = measure.rss_bytes(server.pid)
        amid = await _latencies_ms(lone, samples)
        held_s = time.perf_counter() - first_poll
        early = sum(task.done() for task in answers)
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    finally:
        for _, writer in connections:
            writer.close()
    void = ""
    if early:
        void = f"{early} of {count} polls were answered early"
    elif held_s >= WAIT_S:
        void = f"the measurement took {held_s:.0f} s, longer than the polls"
    return {
        "server": server.peer.name,
        "parked": count,
        "void": void,
        "idle_percent_before": idle,
        "idle_percent": percent,
        "rss_mib_more": (rss_after - rss_before) / 2**20,
        "rss_mib": rss_after / 2**20,
        "samples": samples,
        "alone_ms_median": measure.percentile(alone, 50),
        "alone_ms_p99": measure.percentile(alone, 99),
        "amid_ms_median": measure.percentile(amid, 50),
        "amid_ms_p99": measure.percentile(amid, 99),
    }


def parked(subjects: list[Peer], count: int, settings: Settings, samples: int = 200) -> Result:
    rows = []
    for subject in subjects:
        proto, _ = shared_protos(subject, subject, settings.proto)
        settings.say(f"{subject.name}: {count:,} parked polls")
        with started(subject, "parked") as server:
            load = measure.load_1min()
            row = asyncio.run(_parked(server, proto, count, samples))
        row["load_before"] = load
        row["goals"] = {"idle_percent": CPU_PERCENT_MAX, "rss_mib_more": RSS_MIB_MAX, "alone_ms_median": LATENCY_MS_MAX}
        settings.say(
            f"{subject.name}: idle {row['idle_percent']:.2f} % CPU, {row['rss_mib_more']:.0f} MiB more, a sent message "
            f"after {row['alone_ms_median']:.2f} ms alone, {row['amid_ms_median']:.2f} ms amid them {row['void']}"
        )
        rows.append(row)
    return {"rows": rows}
