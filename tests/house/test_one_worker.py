"""What is marked for one worker runs on one: pytest-xdist 3.8 under pytest 9.2 spread it and said nothing (#1386).

A small test set of its own is run on two workers, as `make test` runs ours.
"""

import re

import pytest
from tests.house.test_alone import run

SET = """
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(12))
def test_on_one_worker(number):
    pass

@pytest.mark.parametrize("number", range(12))
def test_on_any(number):
    pass
"""


@pytest.mark.slow
def test_a_group_has_one_worker(tmp_path):
    (tmp_path / "test_set.py").write_text(SET)
    said = run(tmp_path, "--dist", "loadgroup", "-v")
    ran = re.findall(r"\[(gw\d)\].* PASSED test_set\.py::(\w+)", said)
    assert {worker for worker, _ in ran} == {"gw0", "gw1"}
    assert len({worker for worker, name in ran if name == "test_on_one_worker"}) == 1
    assert len(ran) == 24
