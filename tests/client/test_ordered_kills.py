"""Producer and consumer are killed 40 times at random over 4,000 messages: strict order, none lost, none twice.

VEILMQ_ORDERED_KILLS=100 kills 100 times over 10,000.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.client.ordered_sides import LEASE_SECONDS, connection

import veilmq
from veilmq.client.ordered import OrderedReceiver, TableStorage
from veilmq.testing import chance
from veilmq.testing.local import ServerProcess

KILLS = int(os.environ.get("VEILMQ_ORDERED_KILLS", "40"))
MESSAGES = KILLS * 100
DEADLINE_SECONDS = 600
SIDES = Path(__file__).with_name("ordered_sides.py")


class Side:
    """One program, killed whenever its progress passes one of the marks, and started again."""

    def __init__(self, role: str, url: str, directory: Path, kills: int, seed: int) -> None:
        self.command = [sys.executable, str(SIDES), role, url, str(directory), str(MESSAGES)]
        self.log = directory / f"{role}.log"
        self.chance = chance(seed)
        self.marks = sorted(self.chance.sample(range(MESSAGES), kills))
        self.killed = 0
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, stdout=log)

    def look(self, progress: int) -> bool:
        """Kill it if it is time; whether it is done."""
        code = self.process.poll()
        if code is not None:
            assert code == 0, self.log.read_text()
            # Its last marks may lie where it was faster than the looks: then it dies while it starts.
            if not self.marks:
                return True
            self.start()
        if self.marks and progress >= self.marks[0]:
            self.marks.pop(0)
            time.sleep(self.chance.random() * (0.3 if self.chance.random() < 0.3 else 0.01))
            self.process.kill()
            self.process.wait()
            self.killed += 1
            self.start()
        return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def sent(directory: Path) -> int:
    try:
        return int(msgspec.json.decode((directory / "send").read_bytes())["next"]) - 1
    except FileNotFoundError:
        return 0


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--simulate", "disorder=4").start()
    url = f"veil://{server.sqs.partition('//')[2]}/orders"
    veilmq.connect(url + "?create=1").close()
    there = connection(tmp_path)()
    there.execute("CREATE TABLE done (place INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT)")
    there.commit()
    sides = [
        Side("produce", url, tmp_path, KILLS // 2, seed=1),
        Side("consume", url, tmp_path, KILLS - KILLS // 2, seed=2),
    ]
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            (done,) = there.execute("SELECT count(*) FROM done").fetchone()
            if all([sides[0].look(sent(tmp_path)), sides[1].look(done)]):
                break
            assert time.monotonic() < deadline, f"{done} messages, {[side.killed for side in sides]} kills"
            time.sleep(0.002)
    finally:
        for side in sides:
            side.end()
    assert sum(side.killed for side in sides) == KILLS
    came = [body for (body,) in there.execute("SELECT body FROM done ORDER BY place")]
    assert len(came) == len(set(came)) == MESSAGES
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert len(told) >= MESSAGES - 5 * KILLS
    assert [(number, body) for number, body in told if came[int(number) - 1] != body] == []
    nothing_is_left(url, tmp_path)
    there.close()
    assert server.stop() == 0


def nothing_is_left(url: str, directory: Path) -> None:
    """The copies that kills left behind are dropped by their numbers, and then the queue is empty."""
    storage = TableStorage(connection(directory), "receiver")
    with veilmq.connect(url) as queue:
        with OrderedReceiver(queue, storage, lease=LEASE_SECONDS) as receiver:
            assert receiver.next_number == MESSAGES + 1
            for _ in range(20):
                assert receiver.receive(wait=0.2) == []
                stats = queue.stats()
                if stats.visible == stats.in_flight == 0:
                    return
    raise AssertionError(stats)
