"""The measurements: completed lives by wrk, CPU and memory of a server's whole process tree, the disk, the machine.

CPU comes from /proc/PID/stat in ticks of 10 ms (over 10 s the error is far below 1 %), for the server, its living
descendants and those it has reaped. The tree is found by parent and by session: each server has its own session.
"""

import os
import platform
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

BENCH = Path(__file__).resolve().parent
TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}


class MeasureFailed(Exception):
    """A measurement returned nothing readable."""


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    session: int
    own_ticks: int
    reaped_ticks: int
    rss_bytes: int


def _processes() -> Iterator[_Process]:
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text()
        except OSError:
            continue
        # The name in parentheses may hold blanks; fields after it are counted from 3 (man 5 proc).
        f = text[text.rindex(")") + 2 :].split()
        yield _Process(
            pid=int(entry.name),
            parent=int(f[1]),
            session=int(f[3]),
            own_ticks=int(f[11]) + int(f[12]),
            reaped_ticks=int(f[13]) + int(f[14]),
            rss_bytes=int(f[21]) * PAGE_BYTES,
        )


def _tree(root: int) -> list[_Process]:
    everyone = list(_processes())
    found = {p.pid for p in everyone if root in (p.pid, p.session)}
    grown = True
    while grown:
        more = {p.pid for p in everyone if p.parent in found and p.pid not in found}
        found |= more
        grown = bool(more)
    return [p for p in everyone if p.pid in found]


def cpu_us(root: int) -> int:
    """CPU microseconds that the process tree has used, reaped children of the root included."""
    return sum(p.own_ticks + (p.reaped_ticks if p.pid == root else 0) for p in _tree(root)) * TICK_US


def rss_bytes(root: int) -> int:
    return sum(p.rss_bytes for p in _tree(root))


@dataclass(frozen=True)
class MachineTicks:
    """The machine's CPU time since it started, in ticks of all its cores."""

    steal: int
    busy: int
    total: int

    @classmethod
    def now(cls) -> "MachineTicks":
        fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return cls(fields[7], sum(fields) - fields[3] - fields[4], sum(fields))

    def steal_percent_since(self, before: "MachineTicks") -> float:
        return 100 * (self.steal - before.steal) / max(1, self.total - before.total)


def load_1min() -> float:
    return os.getloadavg()[0]


def filesystem_of(path: Path) -> str:
    """Type of the file system that holds `path`."""
    real, best, kind = os.path.realpath(path), "", "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        point = left.split()[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount on the same point covers the earlier
            best, kind = point, right.split()[0]
    if not best:  # in a chroot the mount that holds us may not be listed
        done = subprocess.run(["stat", "-f", "-c", "%T", real], check=False, capture_output=True, text=True)
        kind = done.stdout.strip() or kind
    return kind


def refuse_memory(directory: Path) -> None:
    kind = filesystem_of(directory)
    if kind in MEMORY_FILESYSTEMS:
        raise MeasureFailed(f"the data directory lies on {kind}, where fsync costs nothing: use a checkout on a disk")


@dataclass(frozen=True)
class Disk:
    """fdatasync after a write of 4 KiB at the end of a file."""

    p50_us: float
    p99_us: float
    filesystem: str


def fdatasync(directory: Path, samples: int = 300) -> Disk:
    path = directory / "fdatasync.probe"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    taken = []
    try:
        for _ in range(samples):
            os.write(fd, bytes(4096))
            start = time.perf_counter()
            os.fdatasync(fd)
            taken.append((time.perf_counter() - start) * 1e6)
    finally:
        os.close(fd)
        path.unlink()
    return Disk(statistics.median(taken), percentile(taken, 99), filesystem_of(directory))


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@dataclass(frozen=True)
class Load:
    """One run of wrk: duration, connections, messages per request."""

    seconds: int
    connections: int
    batch: int
    only_send: bool = False
    body_bytes: int = 200
    pause_ms: int = 0
    """Of each connection before each request."""


@dataclass(frozen=True)
class Target:
    """Where the load goes: `path` is the request path, `authority` the Host that is signed."""

    proto: str
    authority: str
    path: str
    queue_url: str
    key: str
    secret: str

    def wrk_command(self, wrk: str, load: Load) -> tuple[list[str], dict[str, str]]:
        """Command and environment of the load generator."""
        env = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "PROTO": self.proto,
            "QURL": self.queue_url,
            "QPATH": self.path,
            "HOSTHDR": self.authority,
            "BATCH": str(load.batch),
            "BODY_BYTES": str(load.body_bytes),
            "PAUSE_MS": str(load.pause_ms),
            "SIGN": "1",
        }
        env.pop("ONLY", None)
        if load.only_send:
            env["ONLY"] = "send"
        return wrk_line(wrk, load, "lifecycle.lua", f"http://{self.authority}/"), env


def wrk_line(wrk: str, load: Load, script: str, url: str) -> list[str]:
    # A timeout of wrk's default 2 s would count a slow peer's answers as errors.
    flags = ["-t1", f"-c{load.connections}", f"-d{load.seconds}s", "--timeout", "10s"]
    return [wrk, *flags, "-s", str(BENCH / script), url]


@dataclass(frozen=True)
class Run:
    """The result of one run of wrk. Rates are messages a second, latencies are those of a request."""

    requests: int
    seconds: float
    rps: float
    sent: float
    received: float
    deleted: float
    bad: int
    socket_errors: int
    p50_ms: float
    p99_ms: float
    cpu_us_per_request: float
    cores: float
    rss_mib: float
    load_before: float
    steal_percent: float
    other_cores: float
    void: str = ""


def measured_run(wrk: str, server_pid: int, target: Target, load: Load) -> Run:
    """Drive one server and measure it meanwhile; raises MeasureFailed if wrk's output cannot be read."""
    command, env = target.wrk_command(wrk, load)
    load_before, ticks, cpu, children_s = load_1min(), MachineTicks.now(), cpu_us(server_pid), _children_s()
    try:
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=load.seconds + 60)
    except subprocess.TimeoutExpired:
        raise MeasureFailed(f"wrk did not end within {load.seconds + 60} s") from None
    spent, rss, after = cpu_us(server_pid) - cpu, rss_bytes(server_pid), MachineTicks.now()
    run = _parse(done.stdout + done.stderr, load, spent, rss)
    wrk_us = (_children_s() - children_s) * 1e6
    others_us = max(0.0, (after.busy - ticks.busy) * TICK_US - spent - wrk_us)
    return replace(
        run,
        load_before=load_before,
        steal_percent=after.steal_percent_since(ticks),
        other_cores=others_us / 1e6 / max(1e-9, run.seconds),
    )


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _parse(text: str, load: Load, spent_us: int, rss: int) -> Run:
    rates = r"rps=(\S+) (?:sent|put)/s=(\S+) (?:recv|got)/s=(\S+) del/s=(\S+)"
    result = re.search(rf"RESULT {rates} bad=(\d+) p50=([\d.]+)ms p99=([\d.]+)ms", text)
    total = re.search(r"(\d+) requests in ([\d.]+)(ms|s|m)", text)
    if result is None or total is None:
        raise MeasureFailed(f"wrk printed no result:\n{text[-1500:]}")
    requests, seconds = int(total.group(1)), float(total.group(2)) * {"ms": 1e-3, "s": 1, "m": 60}[total.group(3)]
    rps, sent, received, deleted = (float(result.group(i)) for i in range(1, 5))
    bad, p50, p99 = int(result.group(5)), float(result.group(6)), float(result.group(7))
    errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    broken = sum(map(int, errors.groups())) if errors else 0
    why = []
    if bad:
        why.append(f"{bad} answers were not 200, the first: {_first_bad(text)}")
    if broken:
        why.append(f"{broken} socket errors")
    if not requests:
        why.append("no request was answered")
    # wrk counts a send when it leaves: each connection may have one message on its way at the end.
    if not load.only_send and received < 0.95 * sent - load.connections / seconds:
        why.append(f"received {received:.0f}/s of {sent:.0f}/s sent")
    return Run(
        requests=requests,
        seconds=seconds,
        rps=rps,
        sent=sent,
        received=received,
        deleted=deleted,
        bad=bad,
        socket_errors=broken,
        p50_ms=p50,
        p99_ms=p99,
        cpu_us_per_request=spent_us / max(1, requests),
        cores=spent_us / 1e6 / max(1e-9, seconds),
        rss_mib=rss / 2**20,
        load_before=0.0,
        steal_percent=0.0,
        other_cores=0.0,
        void="; ".join(why),
    )


def _first_bad(text: str) -> str:
    """lifecycle.lua prints status and body of the first answers that were not 200, before anything else of wrk's."""
    match = re.search(r"^(\d{3}\t.{0,160})", text, re.MULTILINE)
    return " ".join(match.group(1).split()) if match else "not shown"


def machine() -> dict[str, str]:
    """What a reader needs to know about the machine, without its name or any path on it."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    system = re.search(r'PRETTY_NAME="(.+)"', Path("/etc/os-release").read_text())
    kernel = re.match(r"[\d.]+", platform.release())
    return {
        "processor": f"{len(os.sched_getaffinity(0))} x {cpu.group(1) if cpu else platform.machine()}",
        "memory": f"{int(memory.group(1)) / 2**20:.0f} GiB" if memory else "unknown",
        "system": f"{system.group(1) if system else 'Linux'}, kernel {kernel.group() if kernel else 'unknown'}",
        "python": platform.python_version(),
    }


def answered_ok(text: str) -> int:
    """How many requests got a 200, from the output of a run whose server may have died meanwhile."""
    total = re.search(r"(\d+) requests in ", text)
    bad = re.search(r" bad=(\d+)", text)
    return int(total.group(1)) - (int(bad.group(1)) if bad else 0) if total else 0
