"""Latency at half load: how long a send takes, and how soon a parked receive has its message.

    .venv/bin/python bench/latency.py [--seconds 20] [--connections 32]

First `wrk` drives the life-cycle load as fast as it can. Then it pauses so long before each request that it does half
of that, and beside it a probe sends a message to a queue of its own every 5 ms, where another connection's receive is
parked. Goals: the 99th percentile of a send within four syncs and 2 ms (a sync: the median fdatasync on the same disk,
just before), and the receive's answer, in the median, within a millisecond of the send's, which is that of its commit:
the receive has a commit of its own. Exit code 0 if both are met, 1 if not. The probe's own time is in the figures.
"""

import argparse
import re
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import install
import report
from measure import Load, cpu_us, fdatasync, load_1min, machine, measured_run, percentile
from peers import Server, VeilMQ, started

SYNCS, MORE_MS, WAKE_MS = 4, 2.0, 1.0
EVERY_S = 0.005


class Line:
    """One connection on which requests are written and answers read when their time has come."""

    def __init__(self, server: Server, queue_url: str) -> None:
        self.caller, self.queue_url = server.caller("json"), queue_url
        self.socket = socket.create_connection(("127.0.0.1", server.place.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, action: str, **parameters: object) -> None:
        self.socket.sendall(self.caller.wire(action, {"QueueUrl": self.queue_url, **parameters}))

    def read(self) -> bytes:
        """The body of one answer. Raises RuntimeError for an error."""
        answer = self.socket.recv(65_536)
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self.socket.recv(65_536)
        found = re.search(rb"content-length: *(\d+)", answer[:end], re.IGNORECASE)
        size = end + 4 + int(found.group(1) if found else 0)
        while len(answer) < size:
            answer += self.socket.recv(65_536)
        if answer[9:12] != b"200":
            raise RuntimeError(answer[:300].decode(errors="replace"))
        return answer[end + 4 :]


def probed(server: Server, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds of each send, and from its answer to that of the parked receive."""
    queue_url = server.new_queue("json")
    sender, receiver = Line(server, queue_url), Line(server, queue_url)
    sends, wakes = [], []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        receiver.write("ReceiveMessage", WaitTimeSeconds=20, VisibilityTimeout=3600)
        time.sleep(EVERY_S)
        begun = time.perf_counter()
        sender.write("SendMessage", MessageBody="x" * 200)
        sender.read()
        answered = time.perf_counter()
        body = receiver.read()
        wakes.append((time.perf_counter() - answered) * 1e3)
        sends.append((answered - begun) * 1e3)
        handle = body.partition(b'"ReceiptHandle":"')[2].partition(b'"')[0].decode()
        sender.write("DeleteMessage", ReceiptHandle=handle)
        sender.read()
    return sends, wakes


def measured(server: Server, seconds: int, connections: int) -> dict[str, Any]:
    """Everything for the report."""
    disk = fdatasync(server.place.directory)
    full = measured_run(
        install.wrk(), server.pid, server.target("json", server.new_queue("json")), Load(5, connections, 1)
    )
    alone = probed(server, 5)
    load = Load(seconds + 2, connections, 1)
    command, environment = server.target("json", server.new_queue("json")).wrk_command(install.wrk(), load)
    pause_ms = 1e3 * connections / (full.rps / 2) - full.p50_ms / 2
    with subprocess.Popen(
        command, env={**environment, "PAUSE_MS": f"{pause_ms:.3f}"}, stdout=subprocess.PIPE, text=True
    ) as driving:
        time.sleep(1)
        before, began = cpu_us(server.pid), time.monotonic()
        sends, wakes = probed(server, seconds)
        cores = (cpu_us(server.pid) - before) / 1e6 / (time.monotonic() - began)
        text, _ = driving.communicate()
    rate = re.search(r"RESULT rps=(\S+)", text)
    return {
        "disk": asdict(disk), "full_rps": full.rps, "rps": float(rate.group(1)) if rate else 0.0, "cores": cores,
        "probes": len(sends), "goal_ms": SYNCS * disk.p50_us / 1e3 + MORE_MS,
        "send_ms": spread(sends), "wake_ms": spread(wakes),
        "send_alone_ms": spread(alone[0]), "wake_alone_ms": spread(alone[1]),
    }  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    """Percentiles."""
    return {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)} | {"max": max(values)}


def text_of(record: dict[str, Any]) -> str:
    """Markdown."""
    send, wake = record["send_ms"], record["wake_ms"]
    verdicts = [
        f"send p99 {send['p99']:.2f} ms (goal {record['goal_ms']:.2f}: {'met' if record['met'][0] else 'missed'})",
        f"receive {wake['p50']:.2f} ms behind it (goal {WAKE_MS:.0f}: {'met' if record['met'][1] else 'missed'})",
    ]
    rows = [
        f"| {name} | {' | '.join(f'{record[key][each]:.2f}' for each in ('p50', 'p90', 'p99', 'max'))} |"
        for name, key in (
            ("send, at half load", "send_ms"), ("receive behind it", "wake_ms"),
            ("send, alone", "send_alone_ms"), ("receive behind it", "wake_alone_ms"),
        )
    ]  # fmt: skip
    return "\n".join(
        [
            f"# latency, {record['at']}",
            "",
            "; ".join(verdicts) + ".",
            "",
            f"{record['rps']:,.0f} requests a second of {record['full_rps']:,.0f}, at {record['cores']:.2f} cores; "
            f"fdatasync p50 {record['disk']['p50_us'] / 1e3:.2f}, p99 {record['disk']['p99_us'] / 1e3:.2f} ms.",
            "",
            "| ms | p50 | p90 | p99 | longest |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"{record['probes']:,} probes. Load before {record['load_at_start']:.2f}.",
            "",
            "; ".join(f"{key}: {value}" for key, value in machine().items()),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/latency.py", description=__doc__)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--connections", type=int, default=32)
    options = parser.parse_args()
    load, peer = load_1min(), VeilMQ()
    peer.install()
    with started(peer, "latency") as server:
        found = measured(server, options.seconds, options.connections)
    record = {
        "scenario": "latency", "at": time.strftime("%Y-%m-%dT%H%MZ", time.gmtime()), "load_at_start": load,
        "machine": machine(), **found,
    }  # fmt: skip
    record["met"] = [found["send_ms"]["p99"] <= found["goal_ms"], found["wake_ms"]["p50"] <= WAKE_MS]
    print("\n" + report.save("latency", text_of(record), record, quick=options.seconds < 10))
    return 0 if all(record["met"]) else 1


if __name__ == "__main__":
    sys.exit(main())
