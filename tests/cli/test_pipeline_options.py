"""What `veilmq pipeline` refuses before it starts Spark, which takes ten seconds."""

import subprocess
from collections.abc import Callable

import pytest

from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.session import session
from veilmq.testing.for_each import for_each

Command = Callable[..., "subprocess.CompletedProcess[str]"]
NOWHERE = ("--path", "nowhere")


@for_each("arguments", [("attempts",), ("timeouts",), ("loop", "--out", "never-made")], ids=" ".join)
def test_a_format_that_is_none(veilmq: Command, arguments: tuple[str, ...]) -> None:
    """With or without --out, and before anything of a history is looked for."""
    done = veilmq("pipeline", *arguments, *NOWHERE, "--format", "csv")
    assert (done.returncode, done.stdout) == (2, "")
    assert "format='csv' is none of parquet and delta" in done.stderr


@pytest.mark.parametrize("option", ["--from", "--until"])
def test_a_loop_has_no_bounds(veilmq: Command, option: str) -> None:
    assert option not in veilmq("pipeline", "loop", "--help").stdout
    assert option in veilmq("pipeline", "timeouts", "--help").stdout
    refused = veilmq("pipeline", "loop", *NOWHERE, "--out", "never-made", option, "3")
    assert refused.returncode == 2
    assert f"No such option: {option}" in refused.stderr


def test_spark_runs_in_one_place() -> None:
    with pytest.raises(OptionInvalid, match="exclude each other"):
        session("local[1]", "sc://127.0.0.1:1")
