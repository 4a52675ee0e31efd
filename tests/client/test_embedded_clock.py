"""A step of the clock while a directory was closed: nothing expires by it until the clock is synchronised."""

from pathlib import Path

import pytest
from tests.support.contract.stage import Stage
from tests.support.sqlite import SqliteFactory

from veilmq.client.adapters.embedded.shell import Call, Shell
from veilmq.engine.engine import Engine
from veilmq.model.commands import CheckClock, Sweep
from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US
from veilmq.model.outcomes import ClockChecked

STEP_US = 10 * DAY_US


class Clock:
    """Of a machine that stands still."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def monotonic(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds


def held_us(path: Path, seconds: float, *, synchronised: bool) -> tuple[int, int]:
    """What the program's shell holds back when it has swept, and how many messages there are then."""
    store = SqliteFactory(path).open(clock_step_us_max=HOUR_US)
    shell = Shell(Engine(), store, Clock(seconds), lambda: synchronised)
    outcome: object = None
    for _ in range(10):  # between two calls it is idle, and looks at the clock
        shell.run(Call((Sweep(),)))
        (outcome,) = shell.run(Call((CheckClock(),)))
    (queue,) = store.reader.queues.values()
    visible = queue.visible
    shell.close()
    assert isinstance(outcome, ClockChecked)
    return outcome.held_us, visible


@pytest.mark.parametrize("synchronised", [False, True])
def test_a_step_is_accepted_once_the_clock_is_synchronised(tmp_path: Path, synchronised: bool) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data"))
    stage.send(stage.create())
    stage.store.close()
    seconds = (stage.now + STEP_US) / SECOND_US
    expected = (0, 0) if synchronised else (STEP_US, 1)
    assert held_us(tmp_path / "data", seconds, synchronised=synchronised) == expected
