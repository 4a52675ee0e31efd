"""The work of the commands in pipeline.py.

Strategy: the history is checked before Spark starts, so that a wrong URL is reported at once. Tables for people are
short; `--json` prints every column, one row per line; `--out` gets tables and, for `report`, a page. A pipeline error
ends the command as a Failure with its advice, even if it is inside a Spark trace.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from veilmq.cli.durations import seconds
from veilmq.cli.exits import Exit, Failure
from veilmq.cli.obstacles import advice_on, check_directory
from veilmq.cli.output import in_json
from veilmq.cli.pipeline import Asked
from veilmq.cli.pipeline_spark import started
from veilmq.cli.progress import bar
from veilmq.pipeline.errors import HistoryGap, OptionInvalid, PipelineError
from veilmq.server.clock import wall

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from veilmq.pipeline.events.reading import History
    from veilmq.pipeline.jobs.analysis import Analysis

    _Events = Callable[[Sequence[str] | None], DataFrame]

SERVER_DEFAULT: Final = "http://127.0.0.1:9325"
_SHOWN: Final = {
    "survival": ("queue", "type", "attempts", "censored_share", "p50_s", "p90_s", "p99_s", "at_least_s", "reach_s"),
    "timeouts": (
        "queue", "type", "attempts", "today_lease_s", "today_cost", "timeout_s", "timeout_at_least_s", "timeout_cost",
        "first_lease_s", "renew_after_s", "cost", "cost_low", "cost_high", "note",
    ),
    "split": ("queue", "part", "types", "median_s", "timeout_s", "recovery_s", "together_recovery_s", "gain"),
    "health": (
        "from", "queue", "received", "redeliveries", "stale_deletes", "dead_letters", "oldest_s", "raise_to_s",
    ),
    "audit": ("rule", "offset", "queue", "sequence", "attempt", "said"),
}  # fmt: skip
_PLACE: Final = ("account", "region")
_ROWS_SHOWN: Final = 50
_REFUSED: Final = re.compile(r"veilmq\.[\w.]+\.([A-Z]\w+): (.+)")
_UNWRITTEN: Final = re.compile("No space left on device|Disk quota exceeded|Read-only file system|File too large")
_JOB_CODES: Final = {"OptionInvalid": Exit.USAGE}
_EXPORT_CODES: Final = {**_JOB_CODES, "TokenRefused": Exit.USAGE, "SourceUnreachable": Exit.ADDRESS}
"""Exit codes by the name of the pipeline's error, because Spark reports only its name; others are WRONG."""


def attempts(asked: Asked, environment: Mapping[str, str]) -> None:
    """See `veilmq.pipeline.jobs.attempts`. Raises Failure."""
    from veilmq.pipeline.jobs import attempts as job

    with _session(asked, environment) as (_, events, seen):
        leases = job.attempts(events(job.KINDS), seen.last_instant())
        if asked.out is not None:
            _write(asked, leases, "attempts")
        groups = (*_PLACE, "queue", "type", "outcome")
        outcomes = leases.groupBy(*groups).count().orderBy("queue", "type", "outcome", *_PLACE)
        if asked.as_json and asked.out is None:
            for row in leases.toLocalIterator():
                _print_json(row.asDict())
        else:
            _show(asked, [row.asDict() for row in outcomes.collect()], ("queue", "type", "outcome", "count"))


def analysis(asked: Asked, environment: Mapping[str, str], name: str, *, publish: bool = False) -> None:
    """One of survival, timeouts and split; publish: of timeouts, to the server. Raises Failure."""
    from veilmq.cli.pipeline_loop import tell
    from veilmq.pipeline.jobs.analysis import Analysis
    from veilmq.pipeline.publish import plans_of

    with _session(asked, environment) as (spark, events, seen):
        found = Analysis(events(None), of=events, until=seen.last_instant())
        _write_analysis(asked, spark, found, (name,))
        rows = {"survival": "quantiles"}.get(name, name)
        _show(asked, _records(getattr(found, rows)), _SHOWN[name])
        if name != "survival":
            _tell_left_out(found)
        if publish:
            floors_us = {tuple(row[:3]): int(row[3]) for row in found.floors.itertuples(index=False, name=None)}
            tell(asked, environment, plans_of(_records(found.timeouts), floors_us))


def report(asked: Asked, environment: Mapping[str, str]) -> None:
    """All analyses, and a page. Raises Failure."""
    from veilmq.pipeline.jobs.analysis import Analysis
    from veilmq.pipeline.report.page import page

    if asked.out is None:
        raise Failure(Exit.USAGE, "a report needs a place", "Name one with --out DIR.")
    with _told():
        _check_replaced(asked.out, ("survival", "quantiles", "timeouts", "redelivery", "split", "health"))
    with _session(asked, environment) as (spark, events, seen):
        found = Analysis(events(None), of=events, since=seen.first_instant(), until=seen.last_instant())
        _write_analysis(asked, spark, found, ("survival", "timeouts", "split", "health"))
        source = str(asked.path or _server(asked, environment))
        deleted = [queue[-1] for queue in found.left_out]
        text = page(found, source=source, offsets=(seen.start, seen.stop), now=wall() / 1e6, left_out=deleted)
        (asked.out / "report.html").write_text(text)
        _show(asked, _records(found.timeouts), _SHOWN["timeouts"])
        _tell_left_out(found)
    if not asked.as_json:
        print(f"wrote {asked.out / 'report.html'}")


def health(asked: Asked, environment: Mapping[str, str], window: str, failures: int, *, follow: bool) -> None:
    """See `veilmq.pipeline.jobs.health`. Raises Failure."""
    from veilmq.cli.pipeline_follow import check_place
    from veilmq.cli.pipeline_follow import follow as follow_health
    from veilmq.pipeline.jobs import health as job

    window_ms = round(seconds("--window", window) * 1_000)
    if not window_ms:
        raise Failure(Exit.USAGE, "--window: must be above 0")
    if follow and asked.out is None:
        raise Failure(Exit.USAGE, "--follow writes a table", "Name its place with --out DIR.")
    with _told():
        if follow and asked.out is not None:
            check_place(asked.out, asked.format)
        elif asked.out is not None:
            _check_replaced(asked.out, ("health",))
    with _session(asked, environment, hold=not follow) as (spark, events, _):
        if follow:
            follow_health(asked, environment, spark, f"{window_ms} milliseconds", failures)
            return
        looked_at = events(job.KINDS)
        found = job.health(looked_at, window=f"{window_ms} milliseconds", failures=failures).orderBy("from", "queue")
        if asked.out is not None:
            _write(asked, found, "health")
        _show(asked, _records(found.toPandas()), _SHOWN["health"])


def audit(asked: Asked, environment: Mapping[str, str]) -> Exit:
    """See `veilmq.pipeline.jobs.audit`. Raises Failure."""
    from veilmq.pipeline.jobs import audit as job

    with _session(asked, environment) as (_, events, _):
        found = job.audit(events(None))
        if asked.out is not None:
            _write(asked, found, "audit")
        rows = [row.asDict() for row in found.limit(10_000).collect()]
        if rows or asked.as_json:
            _show(asked, rows, _SHOWN["audit"])
        else:
            print("nothing is wrong")
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
    as_json: bool,
) -> None:
    """See `veilmq.pipeline.events.export`. Raises Failure."""
    with _told(_EXPORT_CODES):
        try:
            from veilmq.pipeline.events.export import export as job
            from veilmq.pipeline.events.reading import ServerHistory
        except ModuleNotFoundError as error:
            raise Failure(
                Exit.USAGE, f"the package {error.name} is missing", "Install it: pip install 'veilmq[arrow]'."
            ) from None
        url = _url(server or environment.get("VEILMQ_ADMIN") or SERVER_DEFAULT)
        history = ServerHistory(url, _token(token_file, environment), str(certificate) if certificate else None)
        make_place(directory, "DIR")
        try:
            with bar() as advance:
                first, stop = job(
                    history,
                    directory,
                    start=start,
                    until=until,
                    progress=lambda done, total: advance("exporting", done, total),
                )
        except OSError as error:
            mend = "The existing files are complete: the next export continues after them."
            raise Failure(Exit.WRONG, f"{directory}: {error.strerror or error}", mend) from None
    if as_json:
        _print_json({"from": first, "until": stop, "events": stop - first})
    else:
        print(f"exported {stop - first} events, offsets {first} to {stop}")


# The parts


@contextmanager
def _session(
    asked: Asked, environment: Mapping[str, str], *, hold: bool = True
) -> Iterator[tuple["SparkSession", "_Events", "_Seen"]]:
    """A Spark session, a function that returns the events (of some kinds; None: all), and their offsets, which stay
    fixed although a server goes on. hold: the first event must not be trimmed. Raises Failure."""
    with _told():
        from veilmq.pipeline.events import load
        from veilmq.pipeline.jobs.tables import check_format

        check_format(asked.format)
        options = _options(asked, environment)
        seen = _seen(asked, environment, hold=hold)
        options |= {"from": str(seen.start), "until": str(seen.stop)}
        if asked.out is not None:
            make_place(asked.out)
        with started(asked.master, asked.remote) as spark:
            yield spark, partial(load, spark, options), seen


def make_place(out: Path, named: str = "--out") -> None:
    """Make the directory to write to. Raises Failure, also if its parent is missing."""
    check_directory(out, named)
    try:
        out.mkdir(exist_ok=True)
        # It may exist and refuse files, for example if it belongs to a service's user.
        TemporaryFile(dir=out).close()
    except OSError as error:
        mend = "Name a directory that you may write to."
        raise Failure(Exit.USAGE, f"{named}: {out}: {error.strerror}", mend) from None


@contextmanager
def _told(codes: Mapping[str, Exit] = _JOB_CODES) -> Iterator[None]:
    """Turn the pipeline's errors, wherever they were raised, into a Failure with the code in `codes`."""
    try:
        yield
    except PipelineError as error:
        raise Failure(codes.get(type(error).__name__, Exit.WRONG), error.wrong, error.mend) from None
    except ModuleNotFoundError as error:
        mend = "Install what the pipeline needs: pip install 'veilmq[pipeline]'."
        raise Failure(Exit.USAGE, f"the package {error.name} is missing", mend) from None
    except RuntimeError as error:
        # Spark's own errors are not RuntimeErrors, except those of its Java gateway.
        raise Failure(Exit.WRONG, f"Spark: {error}") from None
    except _failures() as error:
        found = _REFUSED.findall(str(error))
        if found:
            name, said = found[-1]
            raise Failure(codes.get(name, Exit.WRONG), said) from None
        unwritten = _UNWRITTEN.search(str(error))
        if unwritten is not None:  # on a disk of --out, or of Spark's own temporary files
            mend = "Run it again when it can be."
            raise Failure(Exit.WRONG, f"a file cannot be written: {unwritten[0]}", mend) from None
        if isinstance(error, PermissionError) and error.filename is not None:
            mend = "May this user read and write it?"
            raise Failure(Exit.WRONG, f"{error.filename}: {error.strerror}", mend) from None
        if type(error).__name__ == "StreamingQueryException":
            raise Failure(Exit.WRONG, f"Spark: {str(error).splitlines()[0]}", "Run it again: it goes on.") from None
        raise


def _failures() -> tuple[type[BaseException], ...]:
    """Errors of the system, and of Spark if it was imported."""
    if "pyspark" not in sys.modules:
        return (OSError,)
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    return (OSError, PySparkException, Py4JError)


def _options(asked: Asked, environment: Mapping[str, str]) -> dict[str, str]:
    """For `veilmq-events`. Raises OptionInvalid."""
    if asked.path is not None and asked.server is not None:
        raise OptionInvalid("--server and --path exclude each other.", "Which history is it?")
    if asked.path is not None:
        options = {"path": str(asked.path.resolve())}
    else:
        options = {"server": _server(asked, environment)}
        token = _token(asked.token_file, environment)
        options |= {"token": token} if token else {}
        options |= {"certificate": str(asked.certificate)} if asked.certificate else {}
    options |= {"from": asked.start} if asked.start is not None else {}
    return options | ({"until": str(asked.until)} if asked.until is not None else {})


def _history(asked: Asked, environment: Mapping[str, str]) -> "History":
    from veilmq.pipeline.events.reading import ParquetHistory, ServerHistory

    options = _options(asked, environment)
    if "path" in options:
        return ParquetHistory(options["path"])
    return ServerHistory(options["server"], options.get("token"), options.get("certificate"))


class _Seen(NamedTuple):
    """The analysed events of one history: from offset `start` to before `stop`."""

    history: "History"
    start: int
    stop: int

    def first_instant(self) -> int | None:
        """The instant of the first event, read without the others."""
        from veilmq.pipeline.events.reading import first_instant

        return first_instant(*self)

    def last_instant(self) -> int | None:
        """The instant of the last event."""
        from veilmq.pipeline.events.reading import last_instant

        return last_instant(*self)


def _seen(asked: Asked, environment: Mapping[str, str], *, hold: bool) -> _Seen:
    """The requested events. Raises OptionInvalid, HistoryGap."""
    from veilmq.pipeline.events.reading import OFFSET

    named, until = asked.start, asked.until
    if named is not None and named not in {"first", "next"} and not OFFSET.match(named):
        raise OptionInvalid(f"--from {named}: it is an offset, first or next.", "")
    if until is not None and not OFFSET.match(str(until)):
        raise OptionInvalid(f"--until {until}: it is an offset.", "")
    history = _history(asked, environment)
    held = history.hold(None) if hold and named in {None, "first"} else None
    first, following = history.bounds()
    match named:
        case None | "first":
            start = first if held is None else held
        case "next":
            start = following
        case _:
            start = int(named)
    if not first <= start <= following:
        raise HistoryGap(f"There is no offset {start}.", f"The history holds {first} to {following}.")
    if hold and held is None:
        history.hold(start)
    if until is not None and until < start:
        raise OptionInvalid(f"--until {until} is before offset {start}, where it is to begin.", "")
    return _Seen(history, start, following if until is None else min(following, until))


def _server(asked: Asked, environment: Mapping[str, str]) -> str:
    return _url(asked.server or environment.get("VEILMQ_ADMIN") or SERVER_DEFAULT)


def _url(text: str) -> str:
    return text if "://" in text else f"http://{text}"


def _token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The server's token, or KEY_ID:SECRET; None if no file is named and the default does not exist.

    Raises Failure, which never shows the file's contents: it may be another secret.
    """
    from veilmq.pipeline.events.reading import authorization

    named = environment.get("VEILMQ_TOKEN_FILE")
    home = Path(environment.get("VEILMQ_DATA") or "veilmq-data") / "admin-token"
    place = file or (Path(named) if named else home)
    try:
        token = place.read_bytes().decode().strip()
        authorization(token)
    except FileNotFoundError:
        if file is None and not named:
            return None
        raise Failure(Exit.USAGE, f"{place} is not there", "Name the server's admin-token file.") from None
    except OSError as error:
        raise Failure(
            Exit.USAGE, f"{place}: {error.strerror}", advice_on(place, "Name a file that you may read.")
        ) from None
    except (UnicodeDecodeError, OptionInvalid):
        mend = "Name the server's admin-token, or a file with KEY_ID:SECRET of an access key."
        raise Failure(Exit.USAGE, f"{place} holds no token", mend) from None
    return token


def _write_analysis(asked: Asked, spark: "SparkSession", found: "Analysis", names: tuple[str, ...]) -> None:
    """The tables of these jobs, each under its own name."""
    from veilmq.pipeline.jobs import health as windows
    from veilmq.pipeline.jobs import split, survival, timeouts
    from veilmq.pipeline.jobs.buckets import arrow_of

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
    if "health" in names:
        wanted |= {"health": (found.health, windows.SCHEMA)}
    for name, (rows, schema) in wanted.items():
        _write(asked, spark.createDataFrame(arrow_of(rows, schema)).coalesce(1), name)


def _tell_left_out(found: "Analysis") -> None:
    """Report on stderr what is not in the table."""
    if not found.left_out:
        return
    names = [queue[-1] for queue in found.left_out[:_ROWS_SHOWN]]
    more = len(found.left_out) - len(names)
    said = ", ".join(names) + (f" and {more} more" if more else "")
    print(f"left out, for they were deleted: {said}", file=sys.stderr)


def _check_replaced(out: Path, names: tuple[str, ...]) -> None:
    """Raises OptionInvalid if a table to be written belongs to a stream."""
    from veilmq.pipeline.jobs.tables import check_replaced

    for name in names:
        check_replaced(out.resolve() / name)


def _write(asked: Asked, frame: "DataFrame", name: str) -> None:
    from veilmq.pipeline.jobs.tables import write

    assert asked.out is not None
    write(frame, asked.out.resolve() / name, asked.format)


def _records(rows: Any) -> list[dict[str, Any]]:
    """A pandas frame's rows; what is missing is None."""
    found = rows.astype(object).to_dict("records")
    return [{name: _plain(value) for name, value in row.items()} for row in found]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value != value:
        return None
    return value.tolist() if hasattr(value, "tolist") else value


def _print_json(value: Any) -> None:
    print(in_json(value, default=_in_words))


def _in_words(value: Any) -> str:
    """A value for programs; all instants are in UTC, also those without a zone."""
    if isinstance(value, datetime):
        return f"{value.replace(tzinfo=None).isoformat()}Z"
    return str(value)


def _show(asked: Asked, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    if asked.as_json:
        for row in rows:
            _print_json(row)
        return
    if not rows:
        print("the history has no such events", file=sys.stderr)
        return
    from veilmq.cli.remote_tables import table

    # Show account and region if there is more than one.
    places = [name for name in _PLACE if len({row.get(name) for row in rows}) > 1]
    kept = [*places, *(name for name in columns if any(row.get(name) is not None for row in rows))]
    cells = [[_cell(name, row.get(name)) for name in kept] for row in rows[:_ROWS_SHOWN]]
    table([_head(name) for name in kept], cells)
    if len(rows) > _ROWS_SHOWN:
        print(f"... and {len(rows) - _ROWS_SHOWN} rows more: --json or --out shows all", file=sys.stderr)


def _head(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_share").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    """For people."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join("-" if each is None else str(each) for each in value)
    if name.endswith("_s"):
        return _time(float(value))
    if name.endswith("_share") or name == "gain":
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1_000 or value == round(value) else f"{value:.3g}"
    return str(value)


def _time(value: float) -> str:
    if value < 1:
        return f"{value * 1_000:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7_200 else f"{value / 3_600:.3g} h"
