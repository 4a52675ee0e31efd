"""The soak drives a server as it says, and tells growth from noise."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import soak

    return soak


def test_only_what_grows_in_the_last_half_is_told(soak: Any) -> None:
    def sample(minute: int, rss_mib: float, files: int) -> Any:
        return soak.Sample(60.0 * minute, rss_mib, 40 + minute % 3, 9, files, 20 + 5.0 * (minute % 2), 1.0)

    # Memory fills up at first and is steady then; a file is added every ten minutes.
    found = soak.trends([sample(n, min(60.0 + n, 80.0) + n % 2, 10 + n // 10) for n in range(60)])
    assert [trend.name for trend in found if not trend.is_flat] == ["files"]


@pytest.mark.slow
def test_a_short_soak_gets_the_answers_that_it_expects() -> None:
    command = [sys.executable, ROOT / "bench" / "soak.py", "--minutes", "0.2", "--every", "1", "--scale", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    record = json.loads((ROOT / "bench" / "results" / "soak-quick.json").read_text())
    assert record["in_order"]
    assert record["unexpected"] == {}
    assert set(record["answers"]) == {"sqs", "azure", "mns", "admin"}
    assert all(record["answers"].values())
