"""How long clients wait for a hand-over and for a take-over after kill -9, warm and cold, with many messages.

    python bench/takeover.py [--handovers 50] [--messages 1000000] [--part handovers,warm,cold]

Strategy: a client of a server that never owns the queues sends all the time, without retries; a pause is the longest
gap between two answers around what is done. A take-over counts from the end of the dead owner's lease, which PostgreSQL
tells. Cold: every server is dead, and one starts with an empty directory, from the snapshot and the log.
"""

import argparse
import http.client
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import install
import measure
import peers
import report
from measure import MeasureFailed
from scenarios import Lane, Settings, preload
from sqs import CallFailed

from cluster import Member, postgres_pair

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.postgres import Pair, until

from veilmq.cluster.postgres import Postgres
from veilmq.cluster.registry import ask_to_hand_over, status

HANDOVER_MS, WARM_S, COLD_S = 200.0, 2.0, 10.0


class Sender:
    """Sends all the time, over one connection, and notes when it was answered."""

    def __init__(self, server: peers.Server) -> None:
        self.caller = server.caller("json")
        self.queue_url = self.caller.create_queue("sent-to")
        self.answered: list[float] = []
        self.errors: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: len(self.answered) > 10)

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self.caller.host, self.caller.port, timeout=60)
        while not self._ended.is_set():
            headers, body = self.caller.request("SendMessage", {"QueueUrl": self.queue_url, "MessageBody": "x"})
            try:
                connection.request("POST", "/", body, headers)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200:
                    self.errors.append(text.decode()[:200])
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
                connection.close()
            self.answered.append(time.time())

    def pause_s(self, since: float) -> float:
        """The longest gap since then, once some more answers came."""
        count = len(self.answered)
        until(lambda: len(self.answered) > count + 5, 60)
        found = [each for each in self.answered if each >= since]
        return max(after - before for before, after in zip([since, *found], found, strict=False))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def handed_over(pair: Pair, sender: Sender, names: list[str], count: int) -> list[float]:
    """Pauses of hand-overs to and fro, in ms."""
    postgres, pauses = Postgres(pair.dsn), []
    for number in range(count):
        to = names[(names.index(status(postgres).owner) + 1) % len(names)]
        since = time.time()
        with postgres.connect() as session:
            epoch = ask_to_hand_over(session, to)
        until(lambda epoch=epoch: (found := status(postgres)).epoch > epoch + 1 and found.owned, 60)
        pauses.append(sender.pause_s(since) * 1e3)
        time.sleep(0.1 * (number % 5))
    return pauses


def lease_ended(pair: Pair) -> float:
    """When the owner's lease ends, by the wall clock of this machine."""
    text = "select extract(epoch from renewed)::float8 + lease_us / 1e6 from veilmq.lease join veilmq.shard using (id)"
    return float(pair.primary.query(text)[0][0])


def taken_over(pair: Pair, owner: peers.Server, sender: Sender) -> tuple[float, float]:
    """Seconds from the end of the killed owner's lease to the next answer, and the whole pause."""
    owner.kill()
    ended, since = lease_ended(pair), time.time()
    count = len(sender.answered)
    until(lambda: len(sender.answered) > count + 1, 60)
    answered = next(each for each in sender.answered if each > ended - 0.5)
    return answered - ended, answered - since


def from_nothing(pair: Pair, server: peers.Server) -> tuple[float, float, float]:
    """Seconds from the start of a server with an empty directory to its first answer, those that are the dead owner's
    lease, and those of CPU."""
    shutil.rmtree(server.place.directory / "data")
    ended = lease_ended(pair)
    began = time.time()
    server.launch()
    server.wait_ready(pause_s=0.01)
    return time.time() - began, max(0.0, ended - began), measure.cpu_us(server.pid) / 1e6


@contextmanager
def three(pair: Pair) -> Iterator[list[peers.Server]]:
    with (
        peers.started(Member("one", pair.dsn), "one") as one,
        peers.started(Member("two", pair.dsn), "two") as two,
        peers.started(Member("three", pair.dsn), "three") as third,
    ):
        yield [one, two, third]


def measured(pair: Pair, options: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """All parts that were asked for."""
    found: dict[str, Any] = {}
    parts = options.part.split(",")
    with three(pair) as (one, two, third):
        sender = Sender(third)
        if "handovers" in parts:
            pauses = handed_over(pair, sender, ["one", "two"], options.handovers)
            found["handovers_ms"] = pauses
            settings.say(
                f"{len(pauses)} hand-overs: pause median {statistics.median(pauses):.0f} ms, p90 "
                f"{measure.percentile(pauses, 90):.0f}, longest {max(pauses):.0f} (goal: median of {HANDOVER_MS:.0f}); "
                f"{len(sender.errors)} errors {sender.errors[:2]}, {len(sender.answered):,} answers"
            )
        if {"warm", "cold"} & set(parts):
            lane = Lane(third, "json", third.new_queue("json"))
            preload(lane, options.messages, settings)
            until(lambda: all(each <= 5 for each in behind(pair, (one, two, third))), 600)
        if "warm" in parts:
            servers = {"one": one, "two": two}
            name = status(Postgres(pair.dsn)).owner
            after_s, pause_s = taken_over(pair, servers[name], sender)
            found["warm_s"] = after_s
            now = status(Postgres(pair.dsn))
            settings.say(
                f"warm take-over by {now.owner}, {options.messages:,} messages: serving {after_s:.2f} s after the "
                f"lease's end (goal {WARM_S:.0f}), {pause_s:.2f} s after the kill; {len(sender.errors)} errors"
            )
        sender.end()
        if "cold" in parts:
            for server in (one, two, third):
                if server.process is not None:
                    server.kill()
            now = status(Postgres(pair.dsn))
            after_s, lease_s, cpu_s = from_nothing(pair, two)
            found["cold_s"] = after_s
            settings.say(
                f"cold start, {now.records:,} records, snapshot of {now.snapshot:,}, log {now.log_bytes / 2**20:.0f} "
                f"MiB: {after_s:.2f} s (goal {COLD_S:.0f}), {cpu_s:.2f} s of CPU of its own; the dead owner's lease "
                f"ended {lease_s:.2f} s after the start"
            )
    return found


def behind(pair: Pair, servers: tuple[peers.Server, ...]) -> list[int]:
    """How many records the copies lack."""
    import apsw

    end = status(Postgres(pair.dsn)).records
    found = []
    for server in servers:
        connection = apsw.Connection(str(server.place.directory / "data/veilmq.db"), flags=apsw.SQLITE_OPEN_READONLY)
        lsn: Any = connection.execute("SELECT lsn FROM log_position").get
        found.append(end - lsn)
        connection.close()
    return found


def main() -> int:
    """Measure and write the report. 0, or 2 if nothing could run."""
    parser = argparse.ArgumentParser(prog="bench/takeover.py", description="pauses of hand-overs and take-overs")
    parser.add_argument("--handovers", type=int, default=50)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--part", default="handovers,warm,cold")
    options = parser.parse_args()
    peers.DATA.mkdir(exist_ok=True)
    said: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        said.append(text)

    try:
        settings = Settings(install.wrk(), 1, 10, "json", say=say)
        load = measure.load_1min()
        with postgres_pair() as pair:
            found = measured(pair, options, settings)
    except (install.Missing, peers.ServerGone, MeasureFailed, CallFailed, OSError) as error:
        print(f"bench/takeover.py: {error}", file=sys.stderr)
        return 2
    finally:
        peers.stop_all()
    load = max(load, measure.load_1min())
    text = [
        f"# takeover, {time.strftime('%Y-%m-%dT%H%MZ', time.gmtime())}", "", *(f"- {each}" for each in said), "",
        f"Load at most {load:.2f} before and after.", "", "; ".join(f"{k}: {v}" for k, v in measure.machine().items()),
    ]  # fmt: skip
    quick = options.handovers < 50 or options.messages < 1_000_000 or len(options.part.split(",")) < 3
    print(report.save("takeover", "\n".join(text), {"load": load, "machine": measure.machine()} | found, quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
