"""Where a request's CPU goes: the samples of a running server under the life-cycle load, by what they were taken in.

    python bench/samples.py [--server fauxqs] [--seconds 10] [--connections 32] [--batch 1,10]

`wrk` drives the server as in the race, while `perf` (Debian's linux-perf) samples it 2,000 times a second. A sample in
the kernel counts for the system call that it came by, one outside for the library, and in the interpreter for whether
it runs bytecode or works for it. A part is its share of the samples times the CPU of a request.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import install
import report
from measure import Load, load_1min, machine, measured_run
from peers import KINDS, Peer, started

SAMPLES_A_SECOND = 2_000
WARM_S = 3
LIBRARIES = (
    ("the accelerator", r"veilmq/accelerator/"),
    ("event loop (uvloop, libuv)", r"uvloop"),
    ("SQLite (apsw)", r"apsw"),
    ("msgspec", r"msgspec"),
    ("hashes (OpenSSL and Python's own)", r"libcrypto|_hashlib|_md5|_sha|_blake|_hmac"),
    ("HTTP (llhttp)", r"httptools"),
    ("C library: memory, copies", r"libc[.-]|ld-linux|\[vdso\]"),
)
CALLS = (
    ("kernel: write to a socket", r"sys_(sendto|sendmsg|write)$|do_writev$"),
    ("kernel: read from a socket", r"sys_(recvfrom|recvmsg|read)$"),
    ("kernel: wait for sockets", r"sys_epoll_|do_epoll_"),
    ("kernel: write and sync the redo log", r"do_pwritev$|sys_(pwrite64|fdatasync|fsync)$"),
    ("kernel: hand over to another thread", r"futex"),
    ("kernel: another process takes the processor", r"exit_to_user_mode|irqentry"),
)
BYTECODE, INTERPRETER, OTHER_CALLS, REST = (
    "interpreter: bytecode", "interpreter: what it calls (calls, dictionaries, memory, collector)",
    "kernel: everything else", "everything else",
)  # fmt: skip


def part_of(stack: list[tuple[str, str]]) -> str:
    """What a sample was taken in. stack: symbols and the files they are in, the innermost first."""
    symbol, file = stack[0]
    if "kernel" in file:
        entered = [each for each, where in stack if "kernel" in where]
        for name, pattern in CALLS:
            if any(re.search(pattern, each) for each in entered):
                return name
        return OTHER_CALLS
    if re.search(r"libpython|/python3[.\d]*$", file):
        return BYTECODE if symbol.startswith("_PyEval_EvalFrame") else INTERPRETER
    return next((name for name, pattern in LIBRARIES if re.search(pattern, file)), REST)


def stacks(lines: Iterable[str]) -> Iterator[list[tuple[str, str]]]:
    """The samples in perf's text."""
    stack: list[tuple[str, str]] = []
    for line in lines:
        if line.strip():
            symbol, _, file = line.split(maxsplit=1)[-1].rpartition(" (")
            stack.append((symbol.partition("+")[0].strip(), file.rstrip(")\n")))
        elif stack:
            yield stack
            stack = []
    if stack:
        yield stack


class Sampled(NamedTuple):
    """A batch size."""

    parts: dict[str, float]
    """us of CPU a request."""
    cpu_us: float
    """A request, `perf` beside it."""
    rps: float


def sampled(peer: Peer, batch: int, connections: int, seconds: int) -> Sampled:
    """Drive and sample a server."""
    with started(peer, f"samples-{batch}") as server, tempfile.TemporaryDirectory() as place:
        wrk, proto = install.wrk(), peer.protos[0]
        queue = server.target(proto, server.new_queue(proto))
        measured_run(wrk, server.pid, queue, Load(WARM_S, connections, batch))
        file = f"{place}/samples"
        command = ["perf", "record", "-F", str(SAMPLES_A_SECOND), "-g", "-o", file, "-p", str(server.pid)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as recording:
            run = measured_run(wrk, server.pid, queue, Load(seconds, connections, batch))
            recording.terminate()
        told = ["perf", "script", "-i", file, "-F", "ip,sym,dso"]
        text = subprocess.run(told, check=True, capture_output=True, text=True).stdout
    found = Counter(part_of(stack) for stack in stacks(text.splitlines()))
    spent_us = run.cpu_us_per_request
    return Sampled({part: count / found.total() * spent_us for part, count in found.items()}, spent_us, run.rps)


def main() -> int:
    """Measure and write the report. 0, or 2 without perf."""
    parser = argparse.ArgumentParser(prog="bench/samples.py", description=__doc__)
    parser.add_argument("--server", choices=KINDS, default="veilmq")
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--batch", default="1,10")
    options = parser.parse_args()
    if shutil.which("perf") is None:
        print("bench/samples.py needs perf: apt install linux-perf", file=sys.stderr)
        return 2
    peer, load = KINDS[options.server](), load_1min()
    peer.install()
    found = {
        each: sampled(peer, each, options.connections, options.seconds) for each in map(int, options.batch.split(","))
    }
    first = next(iter(found.values()))
    parts = sorted({part for each in found.values() for part in each.parts}, key=lambda part: -first.parts.get(part, 0))
    heads = ["us of CPU a request", *("single" if each == 1 else f"batch of {each}" for each in found)]
    rows = [[part, *(f"{each.parts.get(part, 0):.1f}" for each in found.values())] for part in parts]
    rows.append(["in all, with `perf` beside it", *(f"{each.cpu_us:.1f}" for each in found.values())])
    rows.append(["requests a second", *(f"{each.rps:,.0f}" for each in found.values())])
    name = f"samples-{peer.name}"
    text = [
        f"# {name}, {time.strftime('%Y-%m-%dT%H%MZ', time.gmtime())}", "",
        *(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)), "",
        f"{peer.name} {peer.version}, {options.connections} connections. Load before {load:.2f}.", "",
        "; ".join(f"{key}: {value}" for key, value in machine().items()),
    ]  # fmt: skip
    record = {"load": load, "machine": machine(), "us": {each: of.parts for each, of in found.items()}}
    print("\n" + report.save(name, "\n".join(text), record, quick=options.seconds < 10))
    return 0


if __name__ == "__main__":
    sys.exit(main())
