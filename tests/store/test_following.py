"""What each batch changed, applied to another file, gives the same tables: the contract suite and random commands."""

from pathlib import Path

import pytest
from tests.store.test_machine import StoreMachine, play
from tests.support import contract
from tests.support.contract import stage  # noqa: F401 - a fixture
from tests.support.following import FollowedFactory

pytestmark = pytest.mark.slow


@pytest.fixture
def store_factory(tmp_path: Path) -> FollowedFactory:
    return FollowedFactory(tmp_path / "data")


for cases in contract.SUITE:
    globals()[cases.__name__] = cases


class FollowedMachine(StoreMachine):
    """The store and the model, with a follower."""

    factory = FollowedFactory


@pytest.mark.timeout(600)
def test_random_commands_give_the_same_tables() -> None:
    play(FollowedMachine, examples=12, steps=40)
