"""The work of the pipeline's commands on the history, once or in a loop, and of `veilmq events export`.

Strategy: what all share is in session.py. `--out` gets tables and, of `report`, a page.

A loop has one Spark session for all runs. If the first run is refused, the command ends, because the setup is wrong. A
later failure is reported on stderr and the next run tries again, because a restarting server is no reason to stop.
metrics.prom shows how long ago the last run succeeded.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.options import seconds
from veilmq.cli.output import bar
from veilmq.cli.pipeline import Asked
from veilmq.cli.pipeline.drain import stream_of, written
from veilmq.cli.pipeline.session import (
    JOB_CODES,
    PLACE,
    ROWS_SHOWN,
    SERVER_DEFAULT,
    as_url,
    dicts,
    history_of,
    keeper,
    make_place,
    options_of,
    place_of,
    print_json,
    records,
    reported,
    server_and_token,
    server_of,
    session,
    show,
    token_of,
)
from veilmq.model.wording import counted
from veilmq.pipeline.errors import OptionInvalid
from veilmq.server.clock import wall

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from veilmq.pipeline.loop import Loop
    from veilmq.pipeline.publish.plans import Queue
    from veilmq.pipeline.report import Analysis

SHOWN: Final = {
    "survival": ("queue", "type", "attempts", "censored_share", "p50_s", "p90_s", "p99_s", "reach_s"),
    "timeouts": (
        "queue", "type", "attempts", "today_lease_s", "today_cost", "timeout_s", "timeout_cost", "first_lease_s",
        "renew_after_s", "cost", "note",
    ),
    "split": (
        "queue", "part", "types", "attempts", "median_s", "timeout_s", "recovery_s", "together_recovery_s", "gain",
    ),
    "whatif": (
        "queue", "type", "under", "timeout_s", "workers", "messages", "duplicates", "recovery_s", "wait_s",
        "wait_p95_s", "cost", "cost_change", "note",
    ),
    "helped": (
        "queue", "changed", "what", "hours", "messages_before", "messages_after", "cost_before", "cost_after", "change",
        "verdict",
    ),
    "health": (
        "from", "queue", "received", "redeliveries", "stale_deletes", "dead_letters", "oldest_s", "raise_to_s",
    ),
    "audit": ("rule", "offset", "queue", "sequence", "attempt", "said"),
}  # fmt: skip
_ROWS_AT_ONCE: Final = 50_000
_EXPORT_CODES: Final = {**JOB_CODES, "TokenRefused": Exit.USAGE, "SourceUnreachable": Exit.ADDRESS}


def attempts(asked: Asked, environment: Mapping[str, str]) -> None:
    """See `veilmq.pipeline.jobs.attempts`. Raises Failure."""
    from veilmq.pipeline.jobs import attempts as job

    with session(asked, environment) as (_, events, seen):
        leases = job.attempts(events(job.KINDS), seen.last_instant())
        if asked.out is not None:
            _write(asked, leases, "attempts")
        groups = (*PLACE, "queue", "type", "outcome")
        outcomes = leases.groupBy(*groups).count().orderBy("queue", "type", "outcome", *PLACE)
        if asked.as_json and asked.out is None:
            for row in leases.toLocalIterator():
                print_json(row.asDict())
        else:
            show(asked, [row.asDict() for row in outcomes.collect()], ("queue", "type", "outcome", "count"))


def analysis(asked: Asked, environment: Mapping[str, str], name: str, *, publish: bool = False) -> None:
    """One of survival, timeouts and split; publish: of timeouts, to the server. Raises Failure."""
    from veilmq.pipeline.publish.plans import plans_of
    from veilmq.pipeline.report import Analysis

    with session(asked, environment, plans=publish) as (spark, events, seen):
        found = Analysis(events(None), of=events, until=seen.last_instant())
        _write_analysis(asked, spark, found, (name,))
        rows = {"survival": "quantiles"}.get(name, name)
        show(asked, records(getattr(found, rows)), SHOWN[name])
        if name != "survival":
            _report_left_out(found)
        if publish:
            floors_us = {tuple(row[:3]): int(row[3]) for row in found.floors.itertuples(index=False, name=None)}
            send_plans(asked, environment, plans_of(records(found.timeouts), floors_us))


def _instant(at_us: int | None) -> datetime | None:
    return None if at_us is None else datetime.fromtimestamp(at_us / 1e6, UTC)


def whatif(
    asked: Asked,
    environment: Mapping[str, str],
    timeouts: Sequence[str],
    extend: str | None,
    workers: int | None,
    split: str | None,
) -> None:
    """See `veilmq.pipeline.whatif`. Raises Failure."""
    if split not in {None, "type"}:
        raise Failure(Exit.USAGE, f"--split: {split} is not known", "It is: --split type.")
    by_type = {kind: seconds("--timeout", time) for kind, is_one, time in map(_by_type, timeouts) if is_one}
    general = [seconds("--timeout", kind) for kind, is_one, _ in map(_by_type, timeouts) if not is_one]
    if len(general) > 1:
        raise Failure(Exit.USAGE, "--timeout is given twice for all messages", "Name a type: --timeout video=5m.")
    if not timeouts and extend is None and workers is None:
        raise Failure(Exit.USAGE, "there is nothing to try", "Give --timeout, --extend or --workers.")
    with reported():
        from veilmq.pipeline import whatif as job
        from veilmq.pipeline.jobs.attempts import KINDS, attempts

        wanted = job.Wanted(
            timeout_s=general[0] if general else None,
            by_type_s=by_type,
            extend_s=None if extend is None else seconds("--extend", extend),
            workers=workers,
            by_type=split is not None,
        )
    with session(asked, environment) as (_, events, seen):
        leases = attempts(events(KINDS), seen.last_instant())
        if by_type:
            job.check_types(leases, by_type)
        found = job.whatif(leases, events(job.KINDS), wanted).orderBy("queue", "type", "under", *PLACE)
        if asked.out is not None:
            found = found.cache()
            _write(asked, found, "whatif")
        show(asked, records(found.toPandas()), SHOWN["whatif"])


def helped(asked: Asked, environment: Mapping[str, str], *, revert: bool) -> None:
    """See `veilmq.pipeline.jobs.plan_changes`; revert: at the server, what got worse. Raises Failure."""
    if revert and asked.path is not None:
        raise Failure(Exit.USAGE, "--revert is for a server's own history", "Leave --path out.")
    with session(asked, environment, plans=revert) as (_, events, seen):
        from veilmq.pipeline.jobs import attempts as leases
        from veilmq.pipeline.jobs import plan_changes as job
        from veilmq.pipeline.publish import take_back

        by_hour = job.hours(leases.attempts(events(leases.KINDS), seen.last_instant()))
        found = job.helped(by_hour, job.changes(events([job.KIND]))).orderBy("queue", *PLACE)
        if asked.out is not None:
            found = found.cache()
            _write(asked, found, "helped")
        rows = [row.asDict() for row in found.collect()]
        show(
            asked, [row | {name: _instant(row[name]) for name in ("changed", "made")} for row in rows], SHOWN["helped"]
        )
        worse = {
            tuple(row[name] for name in job.QUEUE): (row["made"], job.reason(row)) for row in rows if job.is_worse(row)
        }
        if revert and worse:
            for (*_, queue), verdict in take_back(worse, *server_and_token(asked, environment)).items():
                print(f"{queue}: {verdict}", file=sys.stderr)


def _by_type(given: str) -> tuple[str, str, str]:
    """The type of `--timeout TYPE=TIME`, the sign and the time; a type may have such a sign of its own."""
    return given.rpartition("=") if "=" in given else (given, "", "")


def report(asked: Asked, environment: Mapping[str, str]) -> None:
    """All analyses, and a page. Raises Failure."""
    from veilmq.pipeline.places import place
    from veilmq.pipeline.report import Analysis, page

    if asked.out is None:
        raise Failure(Exit.USAGE, "a report needs a place", "Name one with --out DIR.")
    with reported():
        _check_replaced(asked, ("survival", "quantiles", "timeouts", "redelivery", "split", "health"))
    with session(asked, environment) as (spark, events, seen):
        found = Analysis(events(None), of=events, since=seen.first_instant(), until=seen.last_instant())
        _write_analysis(asked, spark, found, ("survival", "timeouts", "split", "health"))
        source = str(asked.path or server_of(asked, environment))
        deleted = [queue[-1] for queue in found.left_out]
        text = page(found, source=source, offsets=(seen.start, seen.stop), now=wall() / 1e6, left_out=deleted)
        out = place_of(asked.out)
        (place(out) / "report.html").write_bytes(text.encode())
        show(asked, records(found.timeouts), SHOWN["timeouts"])
        _report_left_out(found)
    if not asked.as_json:
        print(f"wrote {out if isinstance(out, str) else asked.out}/report.html")


def health(
    asked: Asked,
    environment: Mapping[str, str],
    window: str,
    failures: int,
    *,
    follow: bool,
    checkpoint: Path | None = None,
) -> None:
    """See `veilmq.pipeline.jobs.health`. Raises Failure."""
    from veilmq.pipeline.jobs import health as job

    window_ms = round(seconds("--window", window) * 1_000)
    if not window_ms:
        raise Failure(Exit.USAGE, "--window: must be above 0")
    if follow and asked.out is None:
        raise Failure(Exit.USAGE, "--follow writes a table", "Name its place with --out DIR.")
    if checkpoint is not None and not follow:
        raise Failure(Exit.USAGE, "--checkpoint is for --follow")
    stream = None
    with reported():
        if follow and asked.out is not None:
            stream = stream_of(asked.out, asked.format, checkpoint)
        elif asked.out is not None:
            _check_replaced(asked, ("health",))
    with session(asked, environment, hold=not follow) as (spark, events, _):
        if stream is not None:
            source = spark.readStream.format("veilmq-events").options(**options_of(asked, environment)).load()
            written(spark, job.health(source, window=f"{window_ms} milliseconds", failures=failures), stream)
            return
        looked_at = events(job.KINDS)
        found = job.health(looked_at, window=f"{window_ms} milliseconds", failures=failures)
        _show_all(asked, found, "health", ("from", "queue"))


def audit(asked: Asked, environment: Mapping[str, str]) -> Exit:
    """See `veilmq.pipeline.jobs.audit`. Raises Failure."""
    from veilmq.pipeline.jobs import audit as job

    with session(asked, environment) as (_, events, _):
        found = job.audit(events(None))
        rows = _show_all(asked, found, "audit", ("offset", "rule"), none="nothing is wrong")
    return Exit.WRONG if rows else Exit.DONE


def export(
    directory: Path,
    server: str | None,
    token_file: Path | None,
    certificate: Path | None,
    start: int | None,
    until: int | None,
    environment: Mapping[str, str],
    *,
    kind: str,
    as_json: bool,
) -> None:
    """See `veilmq.pipeline.events.export`. Raises Failure."""
    with reported(_EXPORT_CODES):
        try:
            from veilmq.pipeline.events.export import export as job
            from veilmq.pipeline.events.reading import ServerHistory
        except ModuleNotFoundError as error:
            raise Failure(
                Exit.USAGE, f"the package {error.name} is missing", "Install it: pip install 'veilmq[arrow]'."
            ) from None
        url = as_url(server or environment.get("VEILMQ_ADMIN") or SERVER_DEFAULT)
        history = ServerHistory(url, token_of(token_file, environment), str(certificate) if certificate else None)
        place = place_of(directory)
        kept = keeper(place, kind)
        if isinstance(place, Path):
            make_place(directory, "DIR")
        try:
            with bar() as advance:
                first, stop = job(
                    history,
                    directory if isinstance(place, Path) else place,
                    start=start,
                    until=until,
                    progress=lambda done, total: advance("exporting", done, total),
                    kept=kept,
                )
        except OSError as error:
            mend = "The existing files are complete: the next export continues after them."
            raise Failure(Exit.WRONG, f"{directory}: {error.strerror or error}", mend) from None
    if as_json:
        print_json({"from": first, "until": stop, "events": stop - first})
    else:
        print(f"exported {counted(stop - first, 'event')}, offsets {first} to {stop}")


def _write_analysis(asked: Asked, spark: "SparkSession", found: "Analysis", names: tuple[str, ...]) -> None:
    """The tables of these jobs, each under its own name."""
    from veilmq.pipeline.estimates.buckets import arrow_of
    from veilmq.pipeline.jobs import split, survival, timeouts

    if asked.out is None:
        return
    wanted: dict[str, tuple[Any, str]] = {}
    if "survival" in names:
        wanted |= {"survival": (found.curve, survival.CURVE_SCHEMA)}
        wanted |= {"quantiles": (found.quantiles, survival.QUANTILES_SCHEMA)}
    if "timeouts" in names:
        wanted |= {"timeouts": (found.timeouts, timeouts.SCHEMA)}
        wanted |= {"redelivery": (found.redelivery, timeouts.CURVE_SCHEMA)}
    if "split" in names:
        wanted |= {"split": (found.split, split.SCHEMA)}
    for name, (rows, schema) in wanted.items():
        _write(asked, spark.createDataFrame(arrow_of(rows, schema)).coalesce(1), name)
    if "health" in names:
        _write(asked, found.windows.orderBy("from", "account", "region", "queue"), "health")


def _report_left_out(found: "Analysis") -> None:
    """Report on stderr what is not in the table."""
    if not found.left_out:
        return
    names = [queue[-1] for queue in found.left_out[:ROWS_SHOWN]]
    more = len(found.left_out) - len(names)
    listed = ", ".join(names) + (f" and {more} more" if more else "")
    print(f"left out, for they were deleted: {listed}", file=sys.stderr)


def _check_replaced(asked: Asked, names: tuple[str, ...]) -> None:
    """Raises OptionInvalid if a table to be written belongs to a stream."""
    from veilmq.pipeline.places import place
    from veilmq.pipeline.tables import check_replaced

    assert asked.out is not None
    for name in names:
        check_replaced(place(place_of(asked.out)) / name, asked.format)


def _show_all(asked: Asked, found: "DataFrame", name: str, order: tuple[str, ...], none: str | None = None) -> int:
    """Write and show a result that grows with the history; returns how many rows were shown. The driver never holds
    more than it shows, or with --json `_ROWS_AT_ONCE`.

    none: to be said if there are no rows.
    """
    from pyspark import StorageLevel

    found = found.persist(StorageLevel.DISK_ONLY)  # in memory it would fill the heap that sorts and fetches it
    try:
        if asked.out is not None:
            _write(asked, found, name)
        if asked.as_json:
            shown, pieces = 0, 1 + found.count() // _ROWS_AT_ONCE
            for row in dicts(found.repartitionByRange(pieces, *order).sortWithinPartitions(*order)):
                print_json(row)
                shown += 1
            return shown
        rows = list(dicts(found.orderBy(*order).limit(ROWS_SHOWN)))
        if not rows and none is not None:
            print(none)
            return 0
        show(asked, rows, SHOWN[name], more=found.count() - ROWS_SHOWN if len(rows) == ROWS_SHOWN else 0)
        return len(rows)
    finally:
        found.unpersist()


def _write(asked: Asked, frame: "DataFrame", name: str) -> None:
    from veilmq.pipeline.places import place
    from veilmq.pipeline.tables import write

    assert asked.out is not None
    write(frame, place(place_of(asked.out)) / name, asked.format)


_PAUSE_MIN_S: Final = 1.0


class PlansRefused(Failure):
    """The server did not take every plan."""


def loop(
    asked: Asked, environment: Mapping[str, str], every: str | None, retention_days: int, *, publish: bool
) -> None:
    """See `veilmq.pipeline.loop`. Raises Failure."""
    if asked.out is None:
        raise Failure(Exit.USAGE, "a loop needs a place", "Name one with --out DIR.")
    pause_s = None if every is None else seconds("--every", every)
    with reported():
        from veilmq.pipeline.loop import Loop

        work = Loop(place_of(asked.out), kind=asked.format, retention_days=retention_days)
    with session(asked, environment, hold=False, plans=publish) as (spark, _, _):
        published = False
        try:
            published = _once(asked, environment, spark, work, publish=publish, published=False)
        except PlansRefused as refused:  # the run itself went well
            if pause_s is None:
                raise
            print(f"veilmq: {refused} {refused.advice}", file=sys.stderr, flush=True)
        while pause_s is not None:
            try:
                time.sleep(max(pause_s, _PAUSE_MIN_S))
                # Until a run has finished: the next one publishes plans that this one could not.
                knew, published = published, False
                with reported():
                    published = _once(asked, environment, spark, work, publish=publish, published=knew)
            except KeyboardInterrupt:
                return
            except Failure as failure:
                print(f"veilmq: {failure} {failure.advice}".rstrip(), file=sys.stderr, flush=True)


def _once(
    asked: Asked, environment: Mapping[str, str], spark: "SparkSession", work: "Loop", *, publish: bool, published: bool
) -> bool:
    """One run; whether the server knows all that was planned. Raises PipelineError."""
    history, options = history_of(asked, environment), options_of(asked, environment)
    ran = work.run(spark, history, options, now=wall() / 1e6, timer=time.perf_counter)
    if asked.as_json:
        print_json({name: getattr(ran, name) for name in ran.__struct_fields__})
    else:
        left_out = f"{counted(ran.left_out, 'deleted queue')} left out, " if ran.left_out else ""
        print(
            f"events {ran.start} to {ran.stop}: {counted(ran.settled, 'lease')} settled, {ran.pending} pending, "
            f"{ran.planned} of {ran.groups} planned anew, {left_out}{ran.seconds:.1f} s",
            flush=True,
        )
    if publish and (worse := work.worse()):
        from veilmq.pipeline.publish import take_back

        send_plans(asked, environment, worse, take_back)
    if publish and (ran.planned or not published):
        send_plans(asked, environment, work.plans())
        return True
    return published


def send_plans(asked: Asked, environment: Mapping[str, str], plans: "Mapping[Queue, Any]", how: Any = None) -> None:
    """Publish plans to the server of `asked` (how: or take them back), and print its answer to each. Raises
    PipelineError; PlansRefused."""
    from veilmq.pipeline.publish import OFF, TAKEN, publish

    verdicts = (how or publish)(plans, *server_and_token(asked, environment))
    for (account, region, queue), verdict in verdicts.items():
        if asked.as_json:
            print_json({"account": account, "region": region, "queue": queue, "said": verdict})
        else:
            print(f"{queue}: {verdict}", flush=True)
    refused = sum(verdict not in (*TAKEN, OFF) for verdict in verdicts.values())
    if how is None and refused:
        message = f"the server did not take {refused} of {len(verdicts)} plans"
        raise PlansRefused(Exit.WRONG, message, "The line of each queue says why.")


def tidy(place: Path, retention_days: int | None, vacuum_hours: int, *, as_json: bool) -> None:
    """See `veilmq.pipeline.tables`. Raises Failure."""
    with reported():
        from veilmq.pipeline import tables
        from veilmq.pipeline.loop import between_runs, growing
        from veilmq.pipeline.places import place as placed

        found = place if isinstance(url := place_of(place), Path) else placed(url)
        is_loop = (found / "cells").is_dir() and any(found.glob("state.json*"))
        wanted = growing(found) if is_loop else [found]
        if not found.is_dir():
            raise OptionInvalid(f"{place} is no directory.", "Name a table.")
        for table in wanted:
            tables.check_grows(table)
        today = datetime.fromtimestamp(wall() / 1e6, UTC).date()
        oldest = None if retention_days is None else tables.oldest_kept(today, retention_days)
        with between_runs(found) if is_loop else nullcontext():
            dropped = 0
            if oldest is not None:
                dropped = max(tables.retain(table, oldest) for table in wanted)
            joined = sum(map(tables.compact, wanted))
            for table in wanted:
                tables.vacuum(table, vacuum_hours)
    if as_json:
        print_json({"dropped": dropped, "files_joined": joined})
    else:
        what = "rows" if (found / "_delta_log").is_dir() else "days"
        print(f"{found}: dropped {what}: {dropped}, joined files: {joined}")
