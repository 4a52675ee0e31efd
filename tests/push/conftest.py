"""The stage of the push tests is a module beside them; here are the fixtures that set it up."""

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stage import Stage


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Run a test with a stage, whose directory is new."""
    numbers = itertools.count()

    def run(test: Callable[[Stage], Awaitable[None]], **options: Any) -> None:
        async def staged() -> None:
            directory = tmp_path / f"data-{next(numbers)}"
            directory.mkdir(mode=0o700)
            async with Stage(directory, **options) as stage:
                await test(stage)

        asyncio.run(staged())

    return run
