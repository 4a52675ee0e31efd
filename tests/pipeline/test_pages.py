"""docs/pipeline.md and docs/pipeline-drain.md run: their Python, top to bottom, against a server (see page_side.py)."""

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.pipeline.page_side import ORDERS, WORKED
from tests.support.java import without_spark
from tests.support.ports import kept_ports

from veilmq.pipeline.events import ARROW_SCHEMA
from veilmq.pipeline.options import DrainOptions
from veilmq.testing.local import ServerProcess

ROOT = Path(__file__).parents[2]
DRAIN = (ROOT / "docs" / "pipeline-drain.md").read_text()


def snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda found: f"_{found[1].lower()}", name)


def test_the_options_of_the_source_are_on_the_page_with_their_defaults() -> None:
    table = DRAIN.partition("| option | default | |")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`.+?`) \| (.*?) ?\|", table, re.M):
        found |= dict.fromkeys(map(snake, re.findall(r"`(\w+)`", names)), default.strip("`"))
    assert found.keys() == set(DrainOptions.__struct_fields__)
    defaults = dict(zip(DrainOptions.__struct_fields__[::-1], DrainOptions.__struct_defaults__[::-1], strict=False))
    # Those of a wrapping's own are on the wrapping's page, and texts of None are words.
    told = {name: default for name, default in found.items() if default and defaults.get(name) is not None}
    assert told == {name: str(defaults[name]).removesuffix(".0") for name in told}
    assert len(told) > 7


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("spark-processes")
def test_the_pages_run(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path).start()
    said = tmp_path / "said"
    try:
        place = urlsplit(server.sqs).netloc
        side = str(Path(__file__).with_name("page_side.py"))
        # A JVM may outlive a pipe: a file has no such end.
        with kept_ports(1) as (port,), said.open("w") as out, (tmp_path / "err").open("w") as err:
            command = [sys.executable, side, ROOT, server.data, place, server.admin, tmp_path, port]
            done = subprocess.run(
                list(map(str, command)),
                stdout=out,
                stderr=err,
                timeout=580,
                cwd=tmp_path,
                env=without_spark(),
            )
    finally:
        server.stop()
    assert done.returncode == 0, (tmp_path / "err").read_text()[-5_000:]
    told = json.loads(said.read_text().splitlines()[-1])
    drained, learnt = told["drain"], told["pipeline"]
    assert told["unrun"] == 0

    assert (drained["drained"], drained["rows"], drained["left"]) == (f"{ORDERS} 0\n", ORDERS, 0)
    columns = DRAIN.partition("\nColumns: ")[2].partition(", which together")[0]
    # In brackets is what a column holds.
    assert drained["columns"] == re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", columns, flags=re.S))
    assert drained["many"] == ["queue", *drained["columns"]]
    assert drained["bad_records"] == ""
    assert (drained["sent"], drained["own"]) == (2, ["order 1", "order 2"])
    assert drained["processed"] == f"{{'done': {WORKED}}}\n"
    counted = re.findall(r"`(veilmq_query_\w+)`", DRAIN)
    families = {re.sub("_(bucket|sum|count|created)$", "", name) for name in drained["metrics"]}
    assert len(counted) > 5
    assert set(counted) <= families

    assert learnt["columns"] == ARROW_SCHEMA.names
    assert learnt["events"] > 2 * ORDERS
    assert learnt["streamed"] >= learnt["events"]
    assert "timeout_s" in learnt["timeouts"]
    assert learnt["kept"] == 3
