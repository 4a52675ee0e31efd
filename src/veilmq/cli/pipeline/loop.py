"""What `veilmq pipeline loop`, `tidy` and `--publish` do.

Strategy: one Spark session for all runs. If the first run is refused, the command ends, because the setup is wrong. A
later failure is reported on stderr and the next run tries again, because a restarting server is no reason to stop.
metrics.prom shows how long ago the last run succeeded.
"""

import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.options import seconds
from veilmq.cli.pipeline import Asked
from veilmq.cli.pipeline.session import history_of, options_of, print_json, reported, server_of, session, token_of
from veilmq.pipeline.errors import OptionInvalid
from veilmq.server.clock import wall

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from veilmq.pipeline.loop import Loop
    from veilmq.pipeline.publish import Queue


_PAUSE_MIN_S: Final = 1.0


def loop(
    asked: Asked, environment: Mapping[str, str], every: str | None, retention_days: int, *, publish: bool
) -> None:
    """See `veilmq.pipeline.loop`. Raises Failure."""
    from veilmq.pipeline.loop import Loop

    if asked.out is None:
        raise Failure(Exit.USAGE, "a loop needs a place", "Name one with --out DIR.")
    pause_s = None if every is None else seconds("--every", every)
    with reported():
        work = Loop(asked.out.resolve(), kind=asked.format, retention_days=retention_days)
    with session(asked, environment, hold=False) as (spark, _, _):
        told = _once(asked, environment, spark, work, publish=publish, told=False)
        while pause_s is not None:
            try:
                time.sleep(max(pause_s, _PAUSE_MIN_S))
                # Until a run has finished: the next one publishes plans that this one could not.
                knew, told = told, False
                with reported():
                    told = _once(asked, environment, spark, work, publish=publish, told=knew)
            except KeyboardInterrupt:
                return
            except Failure as failure:
                print(f"veilmq: {failure} {failure.advice}".rstrip(), file=sys.stderr, flush=True)


def _once(
    asked: Asked, environment: Mapping[str, str], spark: "SparkSession", work: "Loop", *, publish: bool, told: bool
) -> bool:
    """One run; whether the server knows all that was planned. Raises PipelineError."""
    history, options = history_of(asked, environment), options_of(asked, environment)
    ran = work.run(spark, history, options, floors=publish, now=wall() / 1e6, timer=time.perf_counter)
    if asked.as_json:
        print_json({name: getattr(ran, name) for name in ran.__struct_fields__})
    else:
        print(
            f"events {ran.start} to {ran.stop}: {ran.settled} leases settled, {ran.pending} pending, "
            f"{ran.planned} of {ran.groups} planned anew, "
            f"{f'{ran.left_out} deleted queues left out, ' if ran.left_out else ''}{ran.seconds:.1f} s",
            flush=True,
        )
    if publish and (ran.planned or not told):
        tell(asked, environment, work.plans())
        return True
    return told


def tell(asked: Asked, environment: Mapping[str, str], plans: "Mapping[Queue, Mapping[str, Any]]") -> None:
    """Publish plans to the server of `asked`, and print its answer to each. Raises PipelineError."""
    from veilmq.pipeline.publish import publish

    token = token_of(asked.token_file, environment)
    certificate = str(asked.certificate) if asked.certificate else None
    said = publish(plans, server_of(asked, environment), token, certificate)
    for (account, region, queue), verdict in said.items():
        if asked.as_json:
            print_json({"account": account, "region": region, "queue": queue, "said": verdict})
        else:
            print(f"{queue}: {verdict}", flush=True)


def tidy(place: Path, retention_days: int | None, vacuum_hours: int, *, as_json: bool) -> None:
    """See `veilmq.pipeline.tables`. Raises Failure."""
    with reported():
        from veilmq.pipeline import tables

        table = place / "cells" if (place / "state.json").exists() and (place / "cells").is_dir() else place
        if not table.is_dir():
            raise OptionInvalid(f"{place} is no directory.", "Name a table.")
        tables.check_grows(table)
        dropped = 0
        if retention_days is not None:
            today = datetime.fromtimestamp(wall() / 1e6, UTC).date()
            dropped = tables.retain(table, tables.oldest_kept(today, retention_days), vacuum_hours=vacuum_hours)
        joined = tables.compact(table)
    if as_json:
        print_json({"dropped": dropped, "files_joined": joined})
    else:
        what = "rows" if (table / "_delta_log").is_dir() else "days"
        print(f"{table}: dropped {what}: {dropped}, joined files: {joined}")
