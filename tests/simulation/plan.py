"""What a seed decides before its life begins: the machine, the store, who works on it, and what goes wrong."""

from typing import Final, NamedTuple

from tests.support.clock import EPOCH

from veilmq import testing
from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import TopicKey
from veilmq.testing import Random

JOBS: Final = QueueKey("000000000000", "us-east-1", "jobs")
DEAD: Final = QueueKey("000000000000", "us-east-1", "dead")
FIFO: Final = QueueKey("000000000000", "us-east-1", "jobs.fifo")
DEAD_FIFO: Final = QueueKey("000000000000", "us-east-1", "dead.fifo")
COPIES: Final = QueueKey("000000000000", "us-east-1", "copies")
TOPIC: Final = TopicKey("000000000000", "us-east-1", "news")
START: Final = EPOCH


class Plan(NamedTuple):
    """One life."""

    clients: int
    calls: int
    """Of all clients together."""
    think_us: int
    """Between an answer and the next call, on average."""
    fifo_share: float
    """Of the calls: those on the FIFO queue."""
    body_bytes: int
    """The longest body."""
    kind: str
    """Type of file system."""
    redo_bytes: int
    checkpoint_bytes: int
    batch_messages_max: int
    slow_us_max: int
    """The longest sync."""
    ends: int
    """How often the server ends before its last life."""
    steps_clock: bool
    """Wall time is set now and then."""
    step_us_max: int
    expires: bool
    """Some messages have a time to live. Not where a step of the clock is not accepted: it keeps them."""
    fills: bool
    """The disk is full now and then."""
    fails: bool
    """Writes and syncs fail now and then."""
    flips: bool
    """A bit flips while the server is down."""
    tenants: float
    """Of the messages of the standard queue: those of tenants (fair queues)."""
    fifo_dies: bool
    """The FIFO queue has dead letters."""
    attempts: float
    """Of the receives from FIFO queues: those with an attempt id."""
    has_tables: bool
    """The first server finds a database without queues."""
    moves: bool
    """Messages go from queue to queue (moving.py)."""

    @property
    def receives_max(self) -> int:
        """Receives before a message goes to the dead letters."""
        return 1 if self.moves else 3


def plan_of(seed: int, chance: Random) -> Plan:
    """Draw a plan."""
    ends = chance.choice((0, 1, 1, 2, 2, 3))
    steps_clock = chance.random() < 0.2
    of_fifo = testing.chance(-1 - seed)
    step_us_max = chance.choice((5 * SECOND_US, HOUR_US // 2, 10 * DAY_US))
    return Plan(
        clients=chance.choice((1, 2, 3, 4, 6)),
        calls=chance.choice((10, 20, 40, 60)),
        think_us=chance.choice((500, 5_000, 100_000, SECOND_US)),
        fifo_share=chance.choice((0.0, 0.2, 0.5, 1.0)),
        body_bytes=chance.choice((20, 20, 400, 3_000, 20_000)),
        kind=chance.choice(("ext4", "xfs", "", "")),
        redo_bytes=chance.choice((32_768, 32_768, 8_192, 0)),
        checkpoint_bytes=chance.choice((16_384, 65_536, 1 << 20)),
        batch_messages_max=chance.choice((512, 512, 10, 1)),
        slow_us_max=chance.choice((0, 0, 1_000, 50_000, 3 * SECOND_US)),
        ends=ends,
        steps_clock=steps_clock,
        step_us_max=step_us_max,
        expires=not steps_clock or step_us_max < HOUR_US,
        fills=chance.random() < 0.15,
        fails=chance.random() < 0.2,
        flips=ends > 0 and chance.random() < 0.1,
        tenants=chance.choice((0.0, 0.0, 0.5, 1.0)),
        fifo_dies=of_fifo.random() < 0.5,
        attempts=of_fifo.choice((0.0, 0.5, 0.9)),
        has_tables=of_fifo.random() < 0.75,
        moves=testing.chance(seed).random() < 0.2,
    )
