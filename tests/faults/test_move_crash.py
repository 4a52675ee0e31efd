"""A move task under a process that dies at every point of the store: each message is in one of its two queues, once.

Strategy: a child opens the directory, sweeps with a clock of its own, and kills itself at a named point; the parent
looks, and starts the next child, until the task is done.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.clock import ManualClock
from tests.support.contract.moves import latest_move
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies
from tests.support.sqlite import SqliteFactory

from veilmq.model.commands import StartMove
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.moves import MoveStatus
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.sqlite.store import CRASH_POINTS
from veilmq.store.sqlite.tools import check

DEAD = QueueKey(ACCOUNT, REGION, "dead")
OTHER = QueueKey(ACCOUNT, REGION, "other")
MESSAGES = 30
CHILD = """
import sys
from pathlib import Path
from veilmq.model.commands import Sweep
from veilmq.store.sqlite.store import SqliteStore
from tests.support.crashing import die_at
from tests.support.sqlite import SMALL

path, now, point, nth = sys.argv[1:]
store = SqliteStore(Path(path), SMALL, die_at(point, int(nth)))
for second in range(3):
    if store.apply([Sweep()], int(now) + second * 1_000_000).wrote:
        store.commit()
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_no_message_is_lost_or_doubled(tmp_path: Path, point: str) -> None:
    factory = SqliteFactory(tmp_path / "data")
    stage = Stage(factory)
    stage.create("dead")
    stage.create("jobs", redrive=RedrivePolicy(DEAD, 1))
    stage.create("other")
    for number in range(MESSAGES):
        stage.send(DEAD, str(number))
    stage.do(StartMove(queue=DEAD, origin=TESTER, destination=OTHER, rate_max=5))
    now = stage.now
    stage.store.close()
    moved = 0
    for life in range(20):
        now = Instant(now + SECOND_US)
        dies = subprocess.run([sys.executable, "-c", CHILD, str(factory.path), str(now), point, str(life % 2 + 1)])
        assert dies.returncode == -9
        now = Instant(now + 3 * SECOND_US)
        stage = Stage(factory)
        stage.clock = ManualClock(now)
        there, here = bodies(stage.peek(OTHER, MESSAGES)), bodies(stage.peek(DEAD, MESSAGES))
        task = latest_move(stage, DEAD)
        stage.store.close()
        assert [*there, *here] == [str(number) for number in range(MESSAGES)]
        assert task.moved == len(there) >= moved
        moved = task.moved
        if task.status is MoveStatus.COMPLETED or (life > 2 and point not in {"after commit", "after checkpoint"}):
            break
    stage = Stage(factory)
    stage.clock = ManualClock(now)
    while latest_move(stage, DEAD).status is MoveStatus.RUNNING:
        stage.later(SECOND_US)
        stage.sweep()
    assert bodies(stage.receive(OTHER, MESSAGES)) == [str(number) for number in range(MESSAGES)]
    stage.store.close()
    assert check(factory.path / "veilmq.db").problems == []
