"""AdaptiveTimeout at work: a real server, worker processes that are killed at random, work of two seconds or so.

The work is the simulation's lognormal one, ten times as fast (median 2 s). What a worker process knew of processing
times dies with it, as it would anywhere.
"""

import itertools
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tests.client.adaptive_worker import LONGEST_SECONDS, SHORTEST_SECONDS

import veilmq
from veilmq.testing import chance
from veilmq.testing.local import ServerProcess

MESSAGES = 500
WORKERS = 4
KILLS = 10
PAUSE_SECONDS = (2.0, 6.0)
"""Between two kills."""
DEADLINE_SECONDS = 600
ON_THE_WAY_SECONDS = 1.0
"""How long after its sender's death an extension may reach the server, by clocks that differ a little."""
PROGRAM = Path(__file__).with_name("adaptive_worker.py")


class Crew:
    """The worker processes. `killed` tells between what times each that was killed died, by its pid."""

    def __init__(self, url: str, directory: Path) -> None:
        self.command = [sys.executable, str(PROGRAM), url, str(directory)]
        self.log = directory / "workers.log"
        self.killed: dict[int, tuple[float, float]] = {}
        self.living = [self.start() for _ in range(WORKERS)]

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill(self, place: int) -> None:
        worker = self.living[place]
        before = time.time()
        worker.kill()
        worker.wait()
        self.killed[worker.pid] = before, time.time()
        self.living[place] = self.start()

    def end(self) -> None:
        for worker in self.living:
            worker.terminate()
        for worker in self.living:
            assert worker.wait(60) == 0, self.log.read_text()


def events(server: ServerProcess) -> list[dict]:
    token = (server.data / "admin-token").read_text().strip()
    url = f"{server.admin}/api/v1/events?from=first&limit=1000000"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})) as answer:
        return [json.loads(line) for line in answer]


def starts(directory: Path) -> dict[str, dict[int, tuple[float, int]]]:
    """By message and receive count: when it was started, and by which process."""
    found: dict[str, dict[int, tuple[float, int]]] = {}
    for file in directory.glob("*.notes"):
        for line in file.read_text().splitlines():
            what, message, count, at = line.split()
            if what == "start":
                found.setdefault(message, {})[int(count)] = float(at), int(file.stem)
    return found


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_killed_workers_cost_little_and_living_ones_are_left_alone(tmp_path: Path) -> None:
    random = chance(3)
    server = ServerProcess(tmp_path).start()
    url = f"veil://{server.sqs.partition('//')[2]}/jobs"
    with veilmq.connect(url + "?create=1") as queue:
        queue.send_batch([str(min(2 * random.lognormvariate(0, 1), 24.0)) for _ in range(MESSAGES)])
        crew = Crew(url, tmp_path)
        end = time.monotonic() + DEADLINE_SECONDS
        for _ in range(KILLS):
            time.sleep(random.uniform(*PAUSE_SECONDS))
            crew.kill(random.randrange(WORKERS))
        while (stats := queue.stats()).visible + (stats.in_flight or 0):
            assert time.monotonic() < end, stats
            time.sleep(0.05)
        crew.end()
    told = events(server)
    assert server.stop() == 0

    assert sum(event["kind"] == "deleted" for event in told) == MESSAGES, "each is done once"
    started = starts(tmp_path)
    assert len(started) == MESSAGES
    crashes = duplicates = 0
    for attempts in started.values():
        turns = [attempts[count] for count in sorted(attempts)]
        for (_, process), (when, _) in itertools.pairwise(turns):
            crashed = process in crew.killed and crew.killed[process][0] < when
            crashes, duplicates = crashes + crashed, duplicates + (not crashed)
    assert crashes >= KILLS, "the kills hit workers that worked"
    assert duplicates <= MESSAGES / 100

    # The message of a dead worker is back when the plan's longest lease is over, at the latest.
    waits = []
    for event in told:
        if event["kind"] == "lease_expired":
            _, process = started[event["message"]].get(event["attempt"], (0.0, 0))
            if process in crew.killed:
                waits.append(event["at"] / 1e6 - crew.killed[process][1])
    assert len(waits) >= KILLS
    assert max(waits) <= LONGEST_SECONDS + ON_THE_WAY_SECONDS
    lengths = {event["lease_us"] / 1e6 for event in told if event["kind"] == "extended"}
    assert SHORTEST_SECONDS <= min(lengths) <= max(lengths) <= LONGEST_SECONDS, "the plan's, and no others"
