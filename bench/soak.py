"""Whether a server under a steady mixed load stops growing: memory, open files, threads, files and bytes on disk.

    .venv/bin/python bench/soak.py [--minutes 60] [--scale 1.0] [--every 10]

Starts a server with credentials on loopback and drives it with 200 requests a second (`soak_load`): lives of messages
over SQS, Azure and MNS, FIFO groups, topics with push, and churn of queues, topics, clients and connections, refusals
and long polls. Beside them two clients use a queue of their own, and the history checker judges what they saw. Bounds
are set low enough to be reached in the first half; caches of names, whose bounds are fixed, are filled by requests for
queues that do not exist (`Stage.names`). Where the memory is, the server is asked once a minute (`soak_memory`). In the
last half a line is fitted to the samples of each figure: what it grew in that half must be below its allowance. At the
end `veilmq check` must find everything in order. Exit code 0 if all is flat, 1 if something grew, 2 if requests got
unexpected answers or the checker found a violation.
"""

import argparse
import http.server
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import report
import soak_memory
from measure import cpu_us, load_1min, machine
from peers import DATA
from soak_load import CREDENTIALS, KEY, SECRET, Counted, Ports, Stage, lanes

from veilmq.driver import ROUND_SECONDS, Figures, Plan, Run
from veilmq.driver.recorded import Recording
from veilmq.testing.local import VEILMQ, ServerProcess

MIB = 1 << 20
OPTIONS = (
    "--history-bytes-max", str(8 * MIB), "--cache-bytes", str(8 * MIB), "--reserve-bytes", str(MIB),
    "--push-allow", "127.0.0.0/8", "--no-cooldowns",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One look at the server."""

    at_s: float
    rss_mib: float
    open_files: int
    threads: int
    files: int
    """In the data directory."""
    disk_mib: float
    """Of these files."""
    log_kib: float


ALLOWED: dict[str, tuple[float, float]] = {
    "rss_mib": (1.0, 0.01), "open_files": (3.0, 0.0), "threads": (1.0, 0.0), "files": (0.5, 0.0),
    "disk_mib": (1.0, 0.02),
}  # fmt: skip
"""Growth in the last half that counts as flat: so much, or that part of the mean if that is more. The log is not among
them: refusals are logged, at most ten lines a second for each reason."""


def look(server: ServerProcess, began: float) -> Sample:
    """A sample of this moment. Raises OSError if the server is gone."""
    process = Path(f"/proc/{server.process.pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
    sizes = []
    for path in server.data.iterdir():
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return Sample(
        at_s=round(time.monotonic() - began, 1),
        rss_mib=int(status["VmRSS"].split()[0]) / 1024,
        open_files=len(os.listdir(process / "fd")),
        threads=int(status["Threads"]),
        files=len(sizes),
        disk_mib=sum(sizes) / MIB,
        log_kib=server.log.stat().st_size / 1024,
    )


@dataclass(frozen=True)
class Trend:
    """The line through one figure's samples of the last half."""

    name: str
    mean: float
    least: float
    most: float
    growth: float
    """Of the line, from the beginning of that half to its end."""
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.allowed

    def told(self) -> str:
        verdict = "flat" if self.is_flat else "**grows**"
        spread = f"{self.least:.1f} to {self.most:.1f}"
        return f"| {self.name} | {self.mean:.1f} | {spread} | {self.growth:+.2f} | {self.allowed:.2f} | {verdict} |"


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Of the last half of the samples, for each figure that must be flat."""
    half = samples[len(samples) // 2 :]
    times = [sample.at_s for sample in half]
    found = []
    for name, (least, part) in ALLOWED.items():
        values = [float(getattr(sample, name)) for sample in half]
        slope = statistics.linear_regression(times, values).slope
        mean = statistics.fmean(values)
        allowed = max(least, part * mean)
        found.append(Trend(name, mean, min(values), max(values), slope * (times[-1] - times[0]), allowed))
    return found


@contextmanager
def endpoint() -> Iterator[str]:
    """An HTTP endpoint that takes every push; its URL."""

    class Taking(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Taking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def judged(url: str, seconds: float) -> Figures:
    """What the checker says of two clients that use a queue of their own for so long."""
    plan = Plan(url=url, name="judged", clients=2, seed=33, interval=0.2, dead_letters=True)
    run = Run(plan, plan.promises(), Recording())
    run.open()
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not run.figures.undrained:
        run.round(min(ROUND_SECONDS, left))
    run.close()
    return run.figures


def soak(
    server: ServerProcess, minutes: float, scale: float, every_s: float, counted: Counted, memory: Path
) -> tuple[list[Sample], list[dict[str, Any]], Figures]:
    """Drive the server for so long; the samples, where its memory was (each minute, the objects each quarter), and what
    the history checker says."""
    urls = {name: str(getattr(server, name)) for name in ("sqs", "azure", "mns", "admin")}
    token = (server.data / "admin-token").read_text().strip()
    stop = threading.Event()
    account = f"sqs://{KEY}:{SECRET}@{urlsplit(urls['sqs']).netloc}/?tls=0&retries=0"
    with endpoint() as url, ThreadPoolExecutor(1, "judged") as pool:
        stage = Stage(Ports(urls, token, counted), url)
        running = lanes(stage, scale, lambda: Ports(urls, token, counted), stop)
        began = time.monotonic()
        for lane in running:
            lane.start()
        judging = pool.submit(judged, account, 60 * minutes)
        samples: list[Sample] = []
        found: list[dict[str, Any]] = []
        try:
            while time.monotonic() - began < 60 * minutes:
                time.sleep(every_s)
                samples.append(look(server, began))
                if len(samples) % 6 == 1:
                    shown = " ".join(f"{name}={value:.1f}" for name, value in asdict(samples[-1]).items())
                    print(f"{shown} answers={counted.answers.total()}", flush=True)
                    quarters = sum("types" in each for each in found)
                    is_quarter = samples[-1].at_s >= 15 * minutes * (quarters + 1)
                    found.append(soak_memory.ask(memory, "objects" if is_quarter else "look"))
            found += [soak_memory.ask(memory, word) for word in ("objects", "trim")]
        finally:
            stop.set()
            for lane in running:
                lane.join(30)
    return samples, found, judging.result()


def text_of(record: dict[str, Any], found: Sequence[Trend]) -> str:
    """Markdown."""
    grown = [trend.name for trend in found if not trend.is_flat]
    verdict = f"grows: {', '.join(grown)}" if grown else "flat"
    answers = ", ".join(f"{count:,} {protocol}" for protocol, count in sorted(record["answers"].items()))
    return "\n".join(
        [
            f"# soak, {record['at']}",
            "",
            f"{record['minutes']:g} minutes, {record['requests_per_s']:.0f} requests a second ({answers}), "
            f"{record['cpu_percent']:.0f} % of a core. Last half: {verdict}.",
            "",
            "| last half | mean | least to most | growth of the fitted line | allowed | |",
            "|---|---|---|---|---|---|",
            *(trend.told() for trend in found),
            "",
            f"History checker: {record['judged_operations']:,} operations, {record['judged_violations']} violations. "
            f"Unexpected answers: {record['unexpected_total']}. `veilmq check` after it: "
            f"{'in order' if record['in_order'] else '**PROBLEMS**'}. Settings: {' '.join(OPTIONS)}.",
            f"Load before {record['load_at_start']:.2f}.",
            "",
            "; ".join(f"{key}: {value}" for key, value in machine().items()),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/soak.py", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--scale", type=float, default=1.0, help="times the rates of soak_load")
    parser.add_argument("--every", type=float, default=10, help="seconds between samples")
    options = parser.parse_args()
    load, counted = load_1min(), Counted()
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-", dir=DATA) as directory:
        credentials = Path(directory, "credentials.toml")
        credentials.write_text(CREDENTIALS)
        credentials.chmod(0o600)
        memory = Path(directory, "memory")
        with soak_memory.watched(memory):
            server = ServerProcess(Path(directory), "--credentials", str(credentials), *OPTIONS).start()
        try:
            before = cpu_us(server.process.pid)
            began = time.monotonic()
            samples, looks, figures = soak(server, options.minutes, options.scale, options.every, counted, memory)
            cpu, took = (cpu_us(server.process.pid) - before) / 1e6, time.monotonic() - began
        finally:
            ended = server.stop()
        checked = subprocess.run([*VEILMQ, "check", "--data", str(server.data)], capture_output=True, check=False)
        print(checked.stdout.decode()[-2_000:] if checked.returncode else "in order", f"exit {ended}")
    found = trends(samples)
    unexpected = dict(counted.unexpected.most_common(50))
    record: dict[str, Any] = {
        "scenario": "soak", "at": time.strftime("%Y-%m-%dT%H%MZ", time.gmtime()), "load_at_start": load,
        "minutes": options.minutes, "requests_per_s": counted.answers.total() / took, "cpu_percent": 100 * cpu / took,
        "answers": dict(counted.answers), "unexpected": unexpected, "unexpected_total": counted.unexpected.total(),
        "in_order": checked.returncode == 0 and ended == 0, "machine": machine(),
        "judged_operations": figures.report.operations, "judged_violations": figures.report.counts.total(),
        "memory": [{name: value for name, value in each.items() if name != "longest"} for each in looks],
        "trends": [asdict(trend) for trend in found], "samples": [asdict(sample) for sample in samples],
    }  # fmt: skip
    print("\n" + report.save("soak", text_of(record, found), record, quick=options.minutes < 30))
    print("longest at the end:", *next((each["longest"] for each in looks[::-1] if "longest" in each), ()), sep="\n")
    for what, count in unexpected.items():
        print(f"unexpected, {count} times: {what}")
    print(figures.undrained, figures.report, sep="\n")
    if unexpected or not record["in_order"] or not figures.clean:
        return 2
    return 0 if all(trend.is_flat for trend in found) else 1


if __name__ == "__main__":
    sys.exit(main())
