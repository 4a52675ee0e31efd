"""The stage of the push tests is a module beside them; here are the fixtures that set it up."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stage import Stage


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def play(data: Path) -> Callable[..., None]:
    """Run a test with a stage."""

    def run(test: Callable[[Stage], Awaitable[None]], **options: Any) -> None:
        async def staged() -> None:
            async with Stage(data, **options) as stage:
                await test(stage)

        asyncio.run(staged())

    return run
