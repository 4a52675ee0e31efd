"""Where a new owner's lease clock begins: no lease ends early, whichever of the clocks is wrong."""

import pytest

from veilmq.cluster.member import begins_at
from veilmq.cluster.postgres.ownership import Before
from veilmq.model.instant import DAY_US, HOUR_US, SECOND_US, Instant

RENEWED = Instant(1_700_000_000 * SECOND_US)
"""The owner's lease clock at its last renewal."""
LOOKED = 4 * SECOND_US
"""For how long the new owner saw no renewal."""


@pytest.mark.parametrize(
    ("away_us", "wall_us", "went_us"),
    [
        pytest.param(4 * SECOND_US, 4 * SECOND_US, LOOKED, id="warm"),
        pytest.param(4 * SECOND_US, 4 * SECOND_US + HOUR_US, LOOKED, id="own wall time an hour ahead"),
        pytest.param(4 * SECOND_US, 4 * SECOND_US - HOUR_US, LOOKED, id="own wall time an hour behind"),
        pytest.param(4 * SECOND_US + HOUR_US, 4 * SECOND_US, LOOKED, id="PostgreSQL's clock set forward"),
        pytest.param(0, 4 * SECOND_US, LOOKED, id="PostgreSQL's clock set back"),
        pytest.param(DAY_US, DAY_US, DAY_US, id="all servers were off for a day"),
    ],
)
def test_the_lease_clock_goes_on_by_what_two_clocks_agree_on(away_us: int, wall_us: int, went_us: int) -> None:
    before = Before("one", RENEWED, LOOKED, away_us)
    assert begins_at(before, Instant(0), Instant(RENEWED + wall_us), 0) == RENEWED + went_us


def test_the_opening_of_the_store_counts_and_its_mark_is_not_undercut() -> None:
    before = Before("one", RENEWED, LOOKED, LOOKED)
    wall = Instant(RENEWED + LOOKED + SECOND_US)
    assert begins_at(before, Instant(0), wall, SECOND_US) == wall
    assert begins_at(before, Instant(wall + HOUR_US), wall, SECOND_US) == wall + HOUR_US
