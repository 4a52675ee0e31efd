"""Whatever is killed, wherever: rows = different rows = sent, and the queue is empty.

One queue, directory and table live through all kills of a scheme, one process after the other; leases are so short that
messages come again in between.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.pipeline import drain_side
from tests.pipeline.drain_stage import Stage, left, send

from veilmq.pipeline.sinks.ownership import check_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("spark-processes")]
DRIVER_STEPS = [step for step, whom in drain_side.STEPS.items() if whom != "executor"]
SCHEMES = ("veil",)
FEW_STEPS = ["in-read", "after-sink-commit", "source-in-receive", "amid-deletes"]
"""`--all-kills` adds the others, and the other schemes; `make pipeline-faults` kills at all of them."""
PROCESS_SECONDS = 400
ROOT = Path(__file__).parents[2]


def run(stage: Stage, url: str, step: str, *further: str) -> int:
    """The exit code of one process; none of its children is left. `further`: master, options."""
    stage.directory.mkdir(exist_ok=True, parents=True)
    log = stage.directory / f"log-{step or 'last'}"
    command = [sys.executable, drain_side.__file__, url, str(stage.directory), step, *further]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb", "SPARK_LOCAL_DIRS": str(stage.directory)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment,
            cwd=stage.directory,
        )  # fmt: skip
        try:
            return process.wait(PROCESS_SECONDS)
        finally:
            # The group is the process's own: what a killed driver leaves behind ends here.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def rows(stage: Stage) -> list[str]:
    table = f"{stage.directory}/table"
    if not DeltaTable.is_deltatable(table):
        return []
    found: list[str] = DeltaTable(table).to_pyarrow_table(columns=["body"])["body"].to_pylist()
    return found


def log_of(stage: Stage, step: str) -> str:
    return (stage.directory / f"log-{step or 'last'}").read_text(errors="replace")[-4_000:]


# What a kill leaves behind is the same on every protocol, but for what an old handle may still do: `amid-deletes`
# leaves handles of messages that are deleted, and of others that are not.
def test_a_killed_driver_loses_nothing_and_repeats_nothing(stage: Stage, scheme: str, all_kills: bool) -> None:
    steps = ["amid-deletes"]
    if scheme == "veil":
        steps = DRIVER_STEPS if all_kills else FEW_STEPS
    sent = [f"body {number}" for number in range(drain_side.BATCH_ROWS * (len(steps) * 2 + 2))]
    with stage.make(timeout=2) as queue:
        send(queue, sent)
        for step in steps:
            assert run(stage, stage.url(scheme), step) != 0, log_of(stage, step)
            assert (stage.directory / f"killed-{step}").exists(), log_of(stage, step)
            check_table("delta", f"{stage.directory}/table", stage.directory / "checkpoint")
            found = rows(stage)
            assert len(found) == len(set(found)), f"after {step}"
        assert left(queue) > 0
        assert run(stage, stage.url(scheme), "") == 0, log_of(stage, "")
        assert sorted(rows(stage)) == sorted(sent)
        assert left(queue) == 0


def test_two_drains_of_many_queues_are_killed_in_turns_and_no_message_is_in_two_tables(
    stage: Stage, all_kills: bool
) -> None:
    """While one dies with a batch that only its table knows, the other goes on, in small batches.

    With `--all-kills` it dies at every step."""
    one, two = (Stage(stage.server, stage.directory / "group" / name) for name in ("one", "two"))
    names = [f"{stage.name}-{each}" for each in ("a", "b", "c")]
    url = stage.url(name="")
    options = {"queues": f"{stage.name}-*", "group": str(stage.directory / "group"), "refresh": "1"}
    sent: list[str] = []

    def more(count: int) -> None:
        for name in names:
            with stage.make(name, timeout=2) as queue:
                send(queue, new := [f"{name} {len(sent)} {number}" for number in range(count)])
            sent.extend(new)

    more(100)
    with ThreadPoolExecutor(1) as beside:
        other = beside.submit(run, two, url, "", "local[1]", json.dumps(options | {"maxRows": "20"}))
        for step in DRIVER_STEPS if all_kills else ("after-sink-commit",):
            more(100)
            assert run(one, url, step, "local[1]", json.dumps(options)) != 0, log_of(one, step)
            assert (one.directory / f"killed-{step}").exists(), log_of(one, step)
        assert run(one, url, "", "local[1]", json.dumps(options)) == 0, log_of(one, "")
        assert other.result() == 0, log_of(two, "")
    assert sorted(rows(one) + rows(two)) == sorted(sent)
    assert min(len(rows(one)), len(rows(two))) >= 100
    for name in names:
        with stage.make(name, timeout=2) as queue:
            assert left(queue) == 0
