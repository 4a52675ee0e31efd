"""The console over a large store: how long a page takes, and what ten browsers that watch cost the data ports.

    .venv/bin/python bench/console.py [--queues 100000] [--messages 10000000] [--pairs 2] [--data DIR] [--quick]

The data are made by the store's own commands in this process, a batch of some thousand sends a commit, with sweeps
between, as if they had come within an hour; a tenth of the messages is in one queue, and some are leased. `--data`
keeps them for another run. Then a server runs on them. A page is asked for one after the other over one connection; its
time is the client's, on loopback. The start page comes first and again last, for a server has work after its start. For
the data ports a probe (bench/stalls.py) sends, receives and deletes, a request every 2 ms, in turns with and without
ten clients that ask what a page's script asks, every 3 s and with the ETag of the answer before. Goals: start page 200
ms, message page 100 ms (median), p99 of the probe's pooled answers at most 1.1 times as long. Exit code 0 if all are
met, 1 if not.
"""

import argparse
import http.client
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import md5
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import report
from measure import cpu_us, load_1min, machine, percentile, rss_bytes
from peers import DATA
from stalls import probing

from veilmq.model.commands import CreateQueue, Origin, Receive, Send, Sweep
from veilmq.model.instant import HOUR_US, Instant
from veilmq.model.messages import Extras, id_text
from veilmq.model.outcomes import Sent
from veilmq.model.settings.queue import QueueKey
from veilmq.store import Options
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing.local import ServerProcess

GOALS_MS = {"start": 200, "message": 100}
GOAL_P99 = 1.1
WATCHERS = 10
EVERY_S = 3.0
TURN_S = 62.0
"""Longer than a minute: the sweeper looks at every queue with messages once a minute, some seconds in one stretch."""
ASKED = 40
"""Times that each page is asked for."""
HISTORY_BYTES = 8 << 30
"""So large that no snapshot is due meanwhile."""
BATCH = 2_000
ACCOUNT, REGION = "000000000000", "us-east-1"
MAKER = Origin("sqs", "AKBENCH", "bench/console.py")
BODY = "x" * 100
DIGEST = md5(BODY.encode(), usedforsecurity=False).digest()


def key(name: str) -> QueueKey:
    return QueueKey(ACCOUNT, REGION, name)


def make(directory: Path, queues: int, messages: int, minutes: float) -> tuple[int, list[str]]:
    """Fill a new store, with as many messages as can be made in that time; returns how many, and ids of some, of those
    sent first and last among them."""
    deadline = time.monotonic() + 60 * minutes
    store = SqliteStore(directory, Options(history_bytes_max=1 << 40, reserve_bytes=0, floor_bytes=0))
    now = time.time_ns() // 1_000 - HOUR_US
    names = ["deep", "probe", *(f"queue-{number:06}" for number in range(queues - 2))]
    total = queues + messages
    step_us = HOUR_US // (total // BATCH + 1)
    ids: list[str] = []
    done = 0

    def run(commands: list[Any]) -> list[Any]:
        nonlocal now, done
        now += step_us
        applied = store.apply([*commands, Sweep(steps_max=64)], Instant(now))
        store.commit()
        done += len(commands)
        if done // 1_000_000 != (done - len(commands)) // 1_000_000:
            print(f"  made {done:,} of {total:,}", flush=True)
        return applied.outcomes

    for start in range(0, queues, BATCH):
        run([CreateQueue(queue=key(name), origin=MAKER) for name in names[start : start + BATCH]])
    sent = Extras(type="order")
    for start in range(0, messages, BATCH):
        if time.monotonic() > deadline:
            messages = start
            break
        some = range(start, min(start + BATCH, messages))
        places = ("deep" if number % 10 == 0 else names[2 + number // 90 % (queues - 2)] for number in some)
        outcomes = run([
            Send(queue=key(name), origin=MAKER, body=BODY, md5=DIGEST, size_bytes=len(BODY), extras=sent)
            for name in places
        ])  # fmt: skip
        if start % (max(1, messages // BATCH // 100) * BATCH) == 0:
            ids += [id_text(each.id) for each in outcomes[:1] if isinstance(each, Sent)]
    for start in range(0, min(1_000, queues), 100):
        leasing = [
            Receive(queue=key(name), origin=MAKER, count_max=10, lease_us=6 * HOUR_US)
            for name in names[start : start + 100]
        ]
        run(leasing)
    store.close()
    return messages, [*ids[:10], *ids[-10:], *ids[10:-10:4]]


class Browser:
    """One that is signed in."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(server.admin).netloc, timeout=60)
        self._origin = server.admin
        self.headers: dict[str, str] = {}
        token = (server.data / "admin-token").read_text().strip()
        given = urlencode({"secret": token}).encode()
        kind = {"content-type": "application/x-www-form-urlencoded", "origin": self._origin}
        status, headers, _ = self.ask("/console/sign-in", "POST", given, kind)
        assert status == 303, status
        self.headers = {"cookie": headers["set-cookie"].partition(";")[0]}

    def ask(
        self, path: str, method: str = "GET", body: bytes = b"", more: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        self._connection.request(method, path, body, self.headers | (more or {}))
        answer = self._connection.getresponse()
        return answer.status, answer.headers, answer.read()

    def news_of(self, path: str) -> str:
        """What the script of that page asks for."""
        found = re.search(rb'data-news="([^"]*)"', self.ask(path)[2])
        assert found is not None, path
        return found[1].decode().replace("&amp;", "&")


@dataclass
class Timed:
    """A page."""

    name: str
    path: str
    first_ms: float = 0.0
    each_ms: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0

    @property
    def median_ms(self) -> float:
        return statistics.median(self.each_ms)

    def told(self) -> str:
        goal = GOALS_MS.get(self.name)
        verdict = "" if goal is None else f" (<= {goal}: {'met' if self.median_ms <= goal else 'missed'})"
        figures = f"{self.median_ms:.1f}{verdict} | {max(self.each_ms):.1f} | {self.first_ms:.1f} | {self.cpu_ms:.1f}"
        return f"| {self.name} | {figures} |"


def pages(server: ServerProcess, ids: list[str], asked: int) -> list[Timed]:
    """Ask for each page some times; for another message each time."""
    browser = Browser(server)
    deep = f"/console/queues/{ACCOUNT}/{REGION}"
    rows = [
        Timed("start, right after the server's start", "/console/"),
        Timed("start, by prefix", "/console/?prefix=queue-05"),
        Timed("start, its news", browser.news_of("/console/")),
        Timed("deep queue", f"{deep}/deep"),
        Timed("deep queue, its news", browser.news_of(f"{deep}/deep")),
        Timed("shallow queue", f"{deep}/queue-000500"),
        Timed("message", "/console/messages/"),
        Timed("workers", "/console/workers"),
        Timed("failures", "/console/failures"),
        Timed("start", "/console/"),
    ]
    for row in rows:
        before = cpu_us(server.process.pid)
        for number in range(asked + 1):
            path = row.path + (ids[number % len(ids)] if row.name == "message" else "")
            begun = time.perf_counter()
            status, _, _ = browser.ask(path)
            taken = (time.perf_counter() - begun) * 1e3
            assert status == 200, (path, status)
            if number == 0:
                row.first_ms = taken
            else:
                row.each_ms.append(taken)
        row.cpu_ms = (cpu_us(server.process.pid) - before) / 1e3 / (asked + 1)
        print(f"  {row.name:<38} median {row.median_ms:.1f} ms, longest {max(row.each_ms):.1f}", flush=True)
    return rows


@contextmanager
def watching(server: ServerProcess) -> Iterator[list[int]]:
    """Ten open pages, as long as the block runs; how many answers each status had is added to the list."""
    over, answers = threading.Event(), list[int]()
    queue = f"/console/queues/{ACCOUNT}/{REGION}"
    opened = ["/console/"] * 5 + [f"{queue}/deep"] * 2 + [f"{queue}/probe"] * 2 + ["/console/workers"]
    assert len(opened) == WATCHERS

    def watch(number: int, path: str) -> None:
        browser, tag = Browser(server), ""
        news = browser.news_of(path)
        over.wait(EVERY_S * number / WATCHERS)
        while not over.is_set():
            more = {"accept": "application/json"} | ({"if-none-match": tag} if tag else {})
            status, headers, _ = browser.ask(news, more=more)
            tag = headers.get("etag", tag)
            answers.append(status)
            over.wait(EVERY_S)

    threads = [threading.Thread(target=watch, args=each) for each in enumerate(opened)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


def turn(server: ServerProcess, watched: bool, seconds: float) -> list[float]:
    """The probe's answers, in ms."""
    taken: list[list[float]] = []
    before = cpu_us(server.process.pid)
    with ExitStack() as stack:
        answers = stack.enter_context(watching(server)) if watched else []
        with probing(server, taken):
            time.sleep(seconds)
    found = [each[0] for each in taken]
    spent = (cpu_us(server.process.pid) - before) / 1e3 / len(found)
    print(
        f"  {'watched' if watched else 'alone  '} {len(found)} answers: median {statistics.median(found):.2f} ms, "
        f"p99 {percentile(found, 99):.2f} ms, CPU {spent:.2f} ms each, {len(answers)} polls, load {load_1min():.2f}",
        flush=True,
    )
    assert set(answers) <= {200, 304}, set(answers)
    return found


def text_of(record: dict[str, Any], rows: list[Timed]) -> str:
    """Markdown."""
    lines = [f"# console, {record['at']}", ""]
    if record["quick"]:
        lines += ["**QUICK RUN: shows that the benchmark works. No figure of it may be quoted.**", ""]
    ratio, p99 = record["p99_ratio"], record["p99_ms"]
    lines += [
        f"{record['queues']:,} queues, {record['messages']:,} messages, a tenth of them in one queue; made in "
        f"{record['made_s']:.0f} s, database {record['database_bytes'] / 2**30:.2f} GiB; the server started in "
        f"{record['start_s']:.1f} s and had {record['rss_bytes'] / 2**20:.0f} MiB.",
        "",
        "| page | median ms | longest ms | first ms | server's CPU ms |",
        "|---|---|---|---|---|",
        *(row.told() for row in rows),
        "",
        f"p99 of the data port while {WATCHERS} browsers watch, to that without: **{ratio:.2f}** (<= {GOAL_P99}: "
        f"{'met' if ratio <= GOAL_P99 else 'missed'}); {p99['watched']:.2f} ms and {p99['alone']:.2f} ms, medians "
        f"{record['median_ms']['watched']:.2f} and {record['median_ms']['alone']:.2f}.",
        "",
        f"Load before {record['load_at_start']:.2f}: compare the ratio.",
        "",
        "; ".join(f"{name}: {value}" for name, value in machine().items()),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/console.py", description=__doc__)
    parser.add_argument("--queues", type=int, default=100_000)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--minutes", type=float, default=30, help="as many messages as can be made in this time")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--data", type=Path, help="keep the data here, or use those that are here")
    parser.add_argument("--quick", action="store_true", help="a small store and one short pair, not to be quoted")
    options = parser.parse_args()
    seconds, asked = TURN_S, ASKED
    if options.quick:
        options.queues, options.messages, options.pairs, seconds, asked = 1_000, 20_000, 1, 4.0, 5
    DATA.mkdir(exist_ok=True)
    with ExitStack() as stack:
        home = options.data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="console-", dir=DATA)))
        kept = home / "ids"
        if not kept.exists():
            home.mkdir(exist_ok=True)
            begun = time.monotonic()
            made, ids = make(home / "data", options.queues, options.messages, options.minutes)
            kept.write_text("\n".join([str(time.monotonic() - begun), str(made), *ids]))
        made_s, made, *ids = kept.read_text().splitlines()
        options.messages = int(made)
        return measured(
            ServerProcess(home, "--history-bytes-max", str(HISTORY_BYTES)), ids, float(made_s), options, seconds, asked
        )


def measured(
    server: ServerProcess, ids: list[str], made_s: float, options: argparse.Namespace, seconds: float, asked: int
) -> int:
    """Measure, print, and write to bench/results."""
    load, begun = load_1min(), time.monotonic()
    server.start()
    start_s = time.monotonic() - begun
    try:
        rows = pages(server, ids, asked)
        pooled: dict[bool, list[float]] = {True: [], False: []}
        turn(server, False, seconds)  # a server has work after its start
        for pair in range(options.pairs):
            for watched in ((False, True), (True, False))[pair % 2]:
                pooled[watched] += turn(server, watched, seconds)
        memory = rss_bytes(server.process.pid)
    finally:
        server.stop()
    named = {"watched": pooled[True], "alone": pooled[False]}
    p99 = {name: percentile(found, 99) for name, found in named.items()}
    record: dict[str, Any] = {
        "scenario": "console", "at": time.strftime("%Y-%m-%dT%H%MZ", time.gmtime()), "quick": options.quick,
        "load_at_start": load, "machine": machine(), "queues": options.queues, "messages": options.messages,
        "made_s": made_s, "start_s": start_s, "rss_bytes": memory,
        "database_bytes": (server.data / "veilmq.db").stat().st_size,
        "pages": [{"name": row.name, "median_ms": row.median_ms, "longest_ms": max(row.each_ms),
                   "first_ms": row.first_ms, "cpu_ms": row.cpu_ms} for row in rows],
        "p99_ms": p99, "median_ms": {name: statistics.median(found) for name, found in named.items()},
        "p99_ratio": p99["watched"] / p99["alone"], "goals_ms": GOALS_MS, "goal_p99": GOAL_P99,
    }  # fmt: skip
    print("\n" + report.save("console", text_of(record, rows), record, options.quick))
    late = [row for row in rows if row.median_ms > GOALS_MS.get(row.name, float("inf"))]
    return 1 if late or record["p99_ratio"] > GOAL_P99 else 0


if __name__ == "__main__":
    sys.exit(main())
