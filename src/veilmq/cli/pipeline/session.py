"""What every command of the pipeline begins with, and what it prints.

Strategy: the history is looked for before the Spark session starts, so that a wrong URL is known at once. A refusal by
the pipeline ends as a Failure with its advice, also when it is inside one of Spark's traces. Users see the command's
own messages: Spark's duplicate log lines and the traces after Ctrl-C are suppressed. Results are short tables for
people, or a row a line with every column (`--json`).
"""

import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from veilmq.cli.failures import Exit, Failure, advice_on, check_directory
from veilmq.cli.output import in_json, time_text
from veilmq.cli.pipeline import Asked, Where
from veilmq.cli.signals import ended_by_interrupt
from veilmq.model.wording import counted
from veilmq.pipeline.errors import HistoryGap, OptionInvalid, PipelineError
from veilmq.store.directory import reached_here

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from veilmq.pipeline.events.reading import History
    from veilmq.pipeline.places import Place

    Events = Callable[[Sequence[str] | None], DataFrame]

SERVER_DEFAULT: Final = "http://127.0.0.1:9325"
_REFUSED: Final = re.compile(r"veilmq\.[\w.]+\.([A-Z]\w+): (.+)")
_TRACES: Final = (
    (r"""(?:^|: |\] )(No module named '[\w.]+'|Python in worker has[^,]+|Cannot run program "[^"]+")""",
     "Spark cannot run its Python workers",
     "Executors, and a Spark Connect server, need this Python with 'veilmq[pipeline]' and the package of the object "
     "store, if one is used (s3fs, adlfs). PYSPARK_PYTHON names it there."),
    (r"\[(?:FAILED_READ_FILE\.FILE_NOT_EXIST|PATH_NOT_FOUND)\] *(.*)", "a file is gone that the job was to read",
     "A tidy may have merged or dropped it meanwhile: run the job again."),
    # On a disk of --out, or of Spark's own temporary files.
    ("(No space left on device|Disk quota exceeded|Read-only file system|File too large)",
     "a file cannot be written", "Run it again when it can be."),
)  # fmt: skip
"""What is found in a trace, what it means, and how to fix it."""
_CLOSED: Final = (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
_SHORT_EVENTS: Final = 4_000_000
"""Up to so many, a job takes less CPU without Java's second compiler."""
JOB_CODES: Final = {"OptionInvalid": Exit.USAGE}
"""Exit codes by the error's class: its name is all that Spark reports of an error on an executor. Others are WRONG."""
_URL: Final = re.compile("([a-zA-Z][a-zA-Z0-9+.-]+):/+(.*)", re.DOTALL)
"""As a path is printed: of several slashes one is left."""
_REPEATING: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers of PySpark that print an exception when it is raised; our code reports it when it is caught."""
_BROKEN_OFF: Final = ("KeyboardInterrupt while ", "Exception while sending", "Exception occurred while shutting down")
"""How py4j's log messages about a call interrupted by Ctrl-C begin. The call itself also raises an error."""
_GATEWAY: Final = ("root", "py4j.clientserver")
"""The loggers that py4j uses for them."""


@contextmanager
def session(
    asked: Asked, environment: Mapping[str, str], *, hold: bool = True, plans: bool = False
) -> Iterator[tuple["SparkSession", "Events", "Seen"]]:
    """A Spark session, a function that loads the events (of some kinds; None: all), and their range of offsets.

    The range is fixed at the start, because a server appends events meanwhile. hold: keep the server from trimming it,
    and `tidy` from changing exported files. plans: some will be sent to the server. Raises Failure.
    """
    with reported(), ExitStack() as held:
        from veilmq.pipeline.events.export import unchanged
        from veilmq.pipeline.events.source import load
        from veilmq.pipeline.places import place
        from veilmq.pipeline.publish import check_rights
        from veilmq.pipeline.session import check_where
        from veilmq.pipeline.tables import check_format, check_replaced

        check_where(asked.master, asked.remote)
        out = None if asked.out is None else place_of(asked.out)
        check_format(asked.format, out)
        options = options_of(asked, environment)
        held.enter_context(unchanged(options.get("path") if hold else None))
        if plans:
            check_rights(*server_and_token(asked, environment))
        seen = _seen(asked, environment, hold=hold)
        options |= {"from": str(seen.start), "until": str(seen.stop)}
        if isinstance(out, Path) and asked.out is not None:
            make_place(asked.out)
        elif out is not None:
            check_replaced(place(out), asked.format)
        is_short = hold and seen.stop - seen.start <= _SHORT_EVENTS
        with started(Where(asked.master, asked.remote, asked.conf), is_short=is_short) as spark:
            yield spark, partial(load, spark, options), seen


def make_place(out: Path, named: str = "--out") -> None:
    """Make the directory and check that it can be written. Raises Failure, also if its parent is missing."""
    check_local(out, named)
    check_directory(out, named)
    try:
        out.mkdir(exist_ok=True)
        # It may exist and belong to another user, say to a service.
        TemporaryFile(dir=out).close()
    except OSError as error:
        mend = "Name a directory that you may write to."
        raise Failure(Exit.USAGE, f"{named}: {out}: {error.strerror}", mend) from None


def place_of(given: Path) -> Path | str:
    """The absolute path, or the URL that was given: as a `Path` it has lost a slash."""
    url = _URL.match(str(given))
    return given.resolve() if url is None else f"{url[1]}://{'/' if url[1] == 'file' else ''}{url[2]}"


def check_local(place: Path, named: str) -> None:
    """Raises Failure for a URL: as a path it would be a directory below this one."""
    url = _URL.match(str(place))
    if url is not None:
        mend = "Name a directory on a file system that is mounted here."
        raise Failure(Exit.USAGE, f"{named}: {url[1]}://{url[2]} is a URL, and this must be a directory", mend)


@contextmanager
def reported(codes: Mapping[str, Exit] = JOB_CODES) -> Iterator[None]:
    """Turn the pipeline's errors, here or on an executor, into a Failure with an exit code from `codes`."""
    try:
        yield
    except PipelineError as error:
        raise Failure(codes.get(type(error).__name__, Exit.WRONG), error.wrong, error.mend) from None
    except ImportError as error:
        if (error.name or "").startswith("pyspark."):
            from veilmq.pipeline.session import check_packages

            with reported({"Unready": Exit.USAGE}):
                check_packages()
        if isinstance(error, ModuleNotFoundError):
            mend = "Install what the pipeline needs: pip install 'veilmq[pipeline]'."
            raise Failure(Exit.USAGE, f"the package {error.name} is missing", mend) from None
        wrong = f"a package cannot be imported: {' '.join(str(error).split())}"
        raise Failure(Exit.USAGE, wrong, "Install what it lacks, or the package anew.") from None
    except RuntimeError as error:
        # Of Spark's errors, only those of its Java gateway are RuntimeErrors.
        raise Failure(Exit.WRONG, f"Spark: {error}") from None
    except _failures() as error:
        found = _REFUSED.findall(str(error))
        if found:
            name, message = found[-1]
            raise Failure(codes.get(name, Exit.WRONG), message) from None
        for pattern, wrong, mend in _TRACES:
            if told := re.search(pattern, str(error), re.MULTILINE):
                raise Failure(Exit.WRONG, f"{wrong}: {told[1]}", mend) from None
        if isinstance(error, _CLOSED) and error.filename is not None:
            is_closed = isinstance(error, PermissionError)
            mend = "May this user read and write it?" if is_closed else "Move it away, or name another place."
            raise Failure(Exit.WRONG, f"{error.filename}: {error.strerror}", mend) from None
        if type(error).__name__ == "StreamingQueryException":
            raise Failure(Exit.WRONG, f"Spark: {str(error).splitlines()[0]}", "Run it again: it goes on.") from None
        raise
    except _delta_failures() as error:
        mend = "Is the table whole? If another process wrote to it at the same time, run it again."
        raise Failure(Exit.WRONG, f"Delta: {str(error).strip().splitlines()[0]}", mend) from None


def _failures() -> tuple[type[BaseException], ...]:
    """The classes of errors to translate: the system's, and Spark's if Spark was imported."""
    if "pyspark" not in sys.modules:
        return (OSError,)
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    return (OSError, PySparkException, Py4JError)


def _delta_failures() -> tuple[type[BaseException], ...]:
    """The class of deltalake's errors, if it was imported."""
    if "deltalake" not in sys.modules:
        return ()
    from deltalake.exceptions import DeltaError

    return (DeltaError,)


def options_of(asked: Asked, environment: Mapping[str, str]) -> dict[str, str]:
    """For `veilmq-events`. Raises OptionInvalid."""
    if asked.path is not None and asked.server is not None:
        raise OptionInvalid("--server and --path exclude each other.", "Which history is it?")
    if asked.path is not None:
        options = {"path": str(place_of(asked.path))}
    else:
        options = {"server": server_of(asked, environment)}
        token = token_of(asked.token_file, environment)
        options |= {"token": token} if token else {}
        options |= {"certificate": str(asked.certificate)} if asked.certificate else {}
    options |= {"from": asked.start} if asked.start is not None else {}
    return options | ({"until": str(asked.until)} if asked.until is not None else {})


def history_of(asked: Asked, environment: Mapping[str, str]) -> "History":
    from veilmq.pipeline.events.reading import ParquetHistory, ServerHistory

    options = options_of(asked, environment)
    if "path" in options:
        return ParquetHistory(options["path"])
    return ServerHistory(options["server"], options.get("token"), options.get("certificate"))


class Seen(NamedTuple):
    """A range of one history: from offset `start` to before `stop`."""

    history: "History"
    start: int
    stop: int

    def first_instant(self) -> int | None:
        """When its first event happened; cheaper than reading all events."""
        from veilmq.pipeline.events.reading import first_instant

        return first_instant(*self)

    def last_instant(self) -> int | None:
        """When its last event happened."""
        from veilmq.pipeline.events.reading import last_instant

        return last_instant(*self)


def _seen(asked: Asked, environment: Mapping[str, str], *, hold: bool) -> Seen:
    """The range that `--from` and `--until` name. Raises OptionInvalid, HistoryGap."""
    from veilmq.pipeline.events.reading import OFFSET

    named, until = asked.start, asked.until
    if named is not None and named not in {"first", "next"} and not OFFSET.match(named):
        raise OptionInvalid(f"--from {named}: it is an offset, first or next.", "")
    if until is not None and not OFFSET.match(str(until)):
        raise OptionInvalid(f"--until {until}: it is an offset.", "")
    history = history_of(asked, environment)
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
    return Seen(history, start, following if until is None else min(following, until))


def server_of(asked: Asked, environment: Mapping[str, str]) -> str:
    return as_url(asked.server or environment.get("VEILMQ_ADMIN") or SERVER_DEFAULT)


def server_and_token(asked: Asked, environment: Mapping[str, str]) -> tuple[str, str | None, str | None]:
    certificate = str(asked.certificate) if asked.certificate else None
    return server_of(asked, environment), token_of(asked.token_file, environment), certificate


def as_url(text: str) -> str:
    return reached_here(text if "://" in text else f"http://{text}")


def token_of(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The server's token, or KEY_ID:SECRET; None if nobody named a file and there is none.

    Raises Failure, which never shows what the file holds: it may be another secret.
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


@contextmanager
def started(where: Where, *, is_short: bool = False) -> Iterator["SparkSession"]:
    """See `veilmq.pipeline.session.session`; the session is stopped at the end. Raises OptionInvalid."""
    from veilmq.pipeline.session import session

    settings = _settings(where.conf or [])
    for name in _GATEWAY:
        logging.getLogger(name).addFilter(_is_no_interruption)
    with ended_by_interrupt():  # an exception during Spark's start may leave Java hanging
        spark = session(where.master, where.remote, settings=settings, is_short=is_short)
    # PySpark's handler calls Java from inside the interrupted call, which fails with traces. Use Python's handler, not
    # the previous one: it handles the signal even if a shell ignored it for a background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Imported here: only now is it known that a suitable pyspark is installed.
    from py4j.protocol import Py4JError
    from pyspark.logger import PySparkLogger

    for name in _REPEATING:
        PySparkLogger.getLogger(name).disabled = True
    try:
        yield spark
    except KeyboardInterrupt:
        # The interrupted call may have broken the gateway; everything ends anyway.
        with suppress(Py4JError):
            hush(spark)
            for query in spark.streams.active:
                query.stop()
        raise
    finally:
        spark.stop()


def _settings(conf: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in conf:
        key, equals, value = each.partition("=")
        if not equals or not key.startswith("spark."):
            raise OptionInvalid(f"--conf {each}: it is no KEY=VALUE.", "It looks like spark.driver.memory=4g.")
        found[key] = value
    return found


def hush(spark: "SparkSession") -> None:
    """Silence Java before interrupting work: it would log a trace for each layer."""
    from pyspark.sql.utils import is_remote

    if not is_remote():
        spark.sparkContext.setLogLevel("OFF")


def _is_no_interruption(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_BROKEN_OFF)


PLACE: Final = ("account", "region")
ROWS_SHOWN: Final = 50


def records(rows: Any) -> list[dict[str, Any]]:
    """A pandas frame's rows; what is missing is None."""
    found = rows.astype(object).to_dict("records")
    return [{name: _plain(value) for name, value in row.items()} for row in found]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value != value:
        return None
    return value.tolist() if hasattr(value, "tolist") else value


def print_json(value: Any) -> None:
    print(in_json(value, default=_in_words))


def _in_words(value: Any) -> str:
    """For programs; all instants are in UTC, also those that do not say so."""
    if isinstance(value, datetime):
        return f"{value.replace(tzinfo=None).isoformat()}Z"
    return str(value)


def show(asked: Asked, rows: list[dict[str, Any]], columns: tuple[str, ...], more: int = 0) -> None:
    """Print the first rows, a figure with its interval, without the columns that say nothing; more: how many rows there
    are besides."""
    if asked.as_json:
        for row in rows:
            print_json(row)
        return
    if not rows:
        print("no rows: the history has too little for this analysis", file=sys.stderr)
        return
    from veilmq.cli.output import table

    # Queues of one name are told apart where there is more than one account or region.
    names = [*(name for name in PLACE if len({row.get(name) for row in rows}) > 1), *columns]
    lines = [[_figure(name, row) for name in names] for row in rows]
    kept = [at for at, cells in enumerate(zip(*lines, strict=True)) if any(cell != _NONE for cell in cells)]
    table([_head(names[at]) for at in kept], [[cells[at] for at in kept] for cells in lines[:ROWS_SHOWN]])
    more += max(0, len(rows) - ROWS_SHOWN)
    if more:
        print(f"... and {counted(more, 'more row')}: --json or --out shows all", file=sys.stderr)


def _head(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_share").replace("_", " ")


def _figure(name: str, row: Mapping[str, Any]) -> str:
    """A figure with its interval, if the row has one: `p50_s` from `p50_low_s` to `p50_high_s`, or `wait_s` from
    `wait_s_low` on. What is longer than anything that was seen is "at least" so much, and has a low end."""
    stem = name.removesuffix("_s")
    unit = name.removeprefix(stem)
    value = row.get(name)
    low, high = (row.get(f"{stem}_{end}{unit}", row.get(f"{name}_{end}")) for end in ("low", "high"))
    if low is None or (value is None and low == 0):
        return _cell(name, value)
    least = row.get(f"{stem}_at_least{unit}", row.get(f"at_least{unit}"))
    figure = _cell(name, value) if value is not None else f"at least {_cell(name, low if least is None else least)}"
    return f"{figure} ({_cell(name, low)} {'or more' if high is None else f'to {_cell(name, high)}'})"


_NONE: Final = "-"


def _cell(name: str, value: Any) -> str:
    """For people."""
    if value is None:
        return _NONE
    if isinstance(value, list):
        return ", ".join(_NONE if each is None else str(each) for each in value)
    if name.endswith("_s"):
        return time_text(float(value))
    if name.endswith("_share") or name == "gain":
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1_000 or value == round(value) else f"{value:.3g}"
    return str(value)


def dicts(found: "DataFrame") -> Iterator[dict[str, Any]]:
    """The rows, a partition at a time; instants in UTC, whatever the time zones of Spark and of this process."""
    from pyspark.sql import functions as F

    times = [name for name, kind in found.dtypes if kind == "timestamp"]
    if times:  # Spark Connect takes no empty list
        found = found.withColumns({name: F.unix_micros(name) for name in times})
    for row in found.toLocalIterator():
        instants = {name: datetime.fromtimestamp(row[name] / 1e6, UTC).replace(tzinfo=None) for name in times}
        yield row.asDict() | instants


def keeper(directory: Path | str, kind: str) -> "Callable[[Place], None]":
    """What `export` calls after each file; a directory that once became a Delta table stays one."""
    from veilmq.pipeline.places import place

    if kind == "parquet" and not (place(directory) / "_delta_log").is_dir():
        return lambda directory: None
    import deltalake  # noqa: F401 - said before anything is written

    from veilmq.pipeline.events.export import keep_as_delta
    from veilmq.pipeline.tables import check_format

    check_format(kind, directory)
    return keep_as_delta
