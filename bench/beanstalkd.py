"""VeilMQ beside beanstalkd, which syncs each write of a job (`-f 0`), by lives a second and CPU.

    python bench/beanstalkd.py [--pairs 5] [--seconds 10]

Strategy: both are driven in turns over 32 connections with single messages of 200 bytes, so a ratio compares runs that
follow each other. beanstalkd speaks its own protocol: each connection puts, reserves and deletes a job, in a loop; its
load generator is this process. VeilMQ answers signed SQS requests of wrk. beanstalkd checks no signature, and keeps its
jobs in memory and in a log; it writes nothing for a reservation, so a lease is gone after a kill.
"""

import argparse
import asyncio
import contextlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import install
import measure
import peers
import report
import uvloop
from measure import Load, MeasureFailed
from scenarios import Lane, Settings, counted_run
from sqs import CallFailed

CONNECTIONS = 32
BODY = b"x" * 200
GOAL = 1.5
_LEASE_S = 600
_START_S = 10
_PUT = b"put 0 0 %d %d\r\n%b\r\n" % (_LEASE_S, len(BODY), BODY)


class Turn(NamedTuple):
    """One run."""

    lives: float
    """A second."""
    cpu_us: float
    """Of the server, a request: a third of a life."""


class Client(asyncio.Protocol):
    """One connection: puts a job, reserves one and deletes it, in a loop."""

    def __init__(self) -> None:
        self.lives = 0
        self.failed = ""
        self._left = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self.transport.write(_PUT)

    def data_received(self, data: bytes) -> None:
        answer = self._left + data
        line, end, rest = answer.partition(b"\r\n")
        kind = line.split(b" ", 1)[0]
        if not end or (kind == b"RESERVED" and len(rest) < len(BODY) + 2):
            self._left = answer
            return
        self._left = b""
        if kind == b"INSERTED":
            self.transport.write(b"reserve\r\n")
        elif kind == b"RESERVED":
            self.transport.write(b"delete %b\r\n" % line.split(b" ")[1])
        elif kind == b"DELETED":
            self.lives += 1
            self.transport.write(_PUT)
        else:
            self.failed = line.decode(errors="replace")
            self.transport.close()


async def driven(port: int, seconds: float) -> float:
    """Lives a second. Raises MeasureFailed if beanstalkd answered anything else."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(CONNECTIONS)]
    before, began = sum(client.lives for client in clients), time.monotonic()
    await asyncio.sleep(seconds)
    lives = (sum(client.lives for client in clients) - before) / (time.monotonic() - began)
    for client in clients:
        client.transport.abort()
    if failed := next((client.failed for client in clients if client.failed), ""):
        raise MeasureFailed(f"beanstalkd answered {failed}")
    return lives


@contextmanager
def beanstalkd(program: Path) -> Iterator[tuple[int, int]]:
    """A running one with an empty log: its pid and port."""
    port, _ = peers.free_ports()
    with (
        tempfile.TemporaryDirectory(dir=peers.DATA) as log,
        subprocess.Popen(
            [str(program), "-l", "127.0.0.1", "-p", str(port), "-b", log, "-f", "0"], stdin=subprocess.DEVNULL
        ) as process,
    ):
        try:
            deadline = time.monotonic() + _START_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if time.monotonic() > deadline or process.poll() is not None:
                    raise MeasureFailed(f"beanstalkd does not listen after {_START_S} s")
                time.sleep(0.02)
            yield process.pid, port
        finally:
            process.terminate()
            process.wait(_START_S)


def measured(program: Path, settings: Settings) -> list[tuple[Turn, Turn]]:
    """Pairs of turns, VeilMQ's and beanstalkd's, each first in every second pair."""
    load = Load(settings.seconds, CONNECTIONS, 1)
    with peers.started(peers.VeilMQ(), "beside-beanstalkd") as server, beanstalkd(program) as (pid, port):
        lane = Lane(server, "json")

        def ours() -> Turn:
            run = counted_run(lane, load, settings)
            return Turn(run.deleted, run.cpu_us_per_request)

        def theirs() -> Turn:
            before = measure.cpu_us(pid)
            lives = asyncio.run(driven(port, settings.seconds))
            turn = Turn(lives, (measure.cpu_us(pid) - before) / max(1.0, 3 * lives * settings.seconds))
            settings.say(f"  beanstalkd   {turn.lives:>8,.0f} del/s  {turn.cpu_us:>6.1f} us CPU/request")
            return turn

        ours(), theirs()
        pairs = []
        for number in range(settings.pairs):
            if number % 2:
                pairs.append((theirs(), ours())[::-1])
            else:
                pairs.append((ours(), theirs()))
    return pairs


def main() -> int:
    """Measure and write the report. 0, or 2 if nothing could run."""
    parser = argparse.ArgumentParser(prog="bench/beanstalkd.py", description="VeilMQ beside beanstalkd")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    options = parser.parse_args()
    peers.DATA.mkdir(exist_ok=True)
    uvloop.install()
    try:
        wrk, program = install.wrk(), install.debian_program("beanstalkd", "beanstalkd")
        version = re.sub(r"^beanstalkd ", "", install.output_of([str(program), "-v"]).strip())
        disk, load = measure.fdatasync(peers.DATA), measure.load_1min()
        settings = Settings(wrk, options.pairs, options.seconds, "json", say=lambda text: print(text, flush=True))
        pairs = measured(program, settings)
    except (install.Missing, peers.ServerGone, MeasureFailed, CallFailed, OSError) as error:
        print(f"bench/beanstalkd.py: {error}", file=sys.stderr)
        return 2
    finally:
        peers.stop_all()
    ratios = sorted(ours.lives / theirs.lives for ours, theirs in pairs)
    ratio = statistics.median(ratios)
    ours, theirs = ([statistics.median(part) for part in zip(*side, strict=True)] for side in zip(*pairs, strict=True))
    text = [
        f"# beanstalkd, {time.strftime('%Y-%m-%dT%H%MZ', time.gmtime())}", "",
        f"beanstalkd {version} with `-f 0`; {CONNECTIONS} connections, single messages of {len(BODY)} bytes, in turns",
        f"of {options.seconds} s, the median of {len(pairs)} pairs. It checks no signature, and its reservations are",
        "in memory alone.", "",
        f"- lives a second: **{ratio:.2f}** times beanstalkd's ({ratios[0]:.2f} to {ratios[-1]:.2f}; {ours[0]:,.0f} :"
        f" {theirs[0]:,.0f}; goal {GOAL}: {'met' if ratio >= GOAL else 'missed'})",
        f"- CPU of the server a request: {ours[1]:.1f} : {theirs[1]:.1f} us", "",
        f"Load before {load:.2f} and after {measure.load_1min():.2f}; fdatasync p50 {disk.p50_us / 1e3:.3f} ms, p99",
        f"{disk.p99_us / 1e3:.3f} ms ({disk.filesystem}).", "",
        "; ".join(f"{key}: {value}" for key, value in measure.machine().items()),
    ]  # fmt: skip
    record = {"load": load, "machine": measure.machine(), "version": version, "pairs": pairs}
    quick = options.pairs < 5 or options.seconds < 10
    print("\n" + report.save("beanstalkd", "\n".join(text), record, quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
