"""What `veilmq pipeline archive`, `replay` and `check` do, and the stream of `health --follow`.

Strategy: the queue is checked before Spark starts, so that a wrong URL is reported at once, and so is the place of a
stream's table: a job's table and a stream's may not overwrite each other. A check needs no Spark. Of a table at a URL,
Spark's checkpoint has a place of its own: only Spark writes it, and it may know no store.
"""

import re
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from veilmq.cli.failures import Exit, Failure, advice_on
from veilmq.cli.options import seconds
from veilmq.cli.pipeline import Where
from veilmq.cli.pipeline.session import hush, make_place, place_of, print_json, reported, started
from veilmq.client.adapters.connect import connect, connect_account
from veilmq.model.errors import VeilError
from veilmq.model.wording import counted
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable, unusable
from veilmq.server.clock import wall

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from veilmq.pipeline.sinks.checking import Checked

_TABLE: Final = "health"
_LOOK_SECONDS: Final = 1
_NEWER: Final = "Bring the newest checkpoint back, or name another --out."
_SECRET: Final = re.compile(r"//.*@")
"""The part of a URL that may contain a secret."""


def archive(
    queue: str,
    queues: str | None,
    out: Path,
    kind: str,
    until: str | None,
    checkpoint: Path | None,
    where_it_runs: Where,
    *,
    as_json: bool,
) -> None:
    """Drain a queue, or the `queues` of an account, into `out`/messages. Raises Failure."""
    until_s = None if until is None else seconds("--until", until)
    with reported():
        from veilmq.pipeline.drain import drain
        from veilmq.pipeline.tables import check_format

        check_format(kind, place_of(out))
        _check(queue, queues)
        place = _place(out, kind)
        spot = _checkpoint(place, checkpoint)
        given: dict[str, Any] = {} if queues is None else {"queues": queues}
        with started(where_it_runs) as spark:
            table = f"{kind}:{place / 'messages'}"
            done = drain(spark, queue, table, place / "drain", until=until_s, checkpoint=spot, **given)
        if as_json:
            print_json({name: getattr(done, name) for name in done.__struct_fields__})
        else:
            archived, bad = counted(done.messages, "message"), counted(done.bad_records, "bad record")
            print(f"archived {archived} in {done.seconds:.1f} s, {bad}")


def _place(out: Path, kind: str) -> Any:
    """The local directory, made, or the URL. Raises OptionInvalid, Failure."""
    from veilmq.pipeline.places import place

    found = place_of(out)
    if isinstance(found, Path):
        make_place(out)
    elif kind != "delta":
        raise OptionInvalid(
            f"{found}: Spark writes {kind} there only by a connector of its own.", "Use --format delta."
        )
    return place(found)


def _checkpoint(out: Any, given: Path | None) -> Path | str | None:
    """Where Spark keeps a stream's progress; None: in its usual place beside a local table. Raises OptionInvalid."""
    if given is None and not isinstance(out, Path):
        mend = "Name a directory with --checkpoint DIR, and keep it: the stream goes on from there."
        raise OptionInvalid(f"{out} is a URL, and Spark's own progress needs another place.", mend)
    return None if given is None else place_of(given)


def replay(table: Path, queue: str, where: str | None, key: str | None, where_it_runs: Where, *, as_json: bool) -> None:
    """Send the rows of a table to a queue. Raises Failure."""
    with reported():
        from veilmq.pipeline.sinks.queue import replay as job

        _check(queue)
        with started(where_it_runs) as spark:
            sent = job(spark, place_of(table), queue, where=where, key=key)
        if as_json:
            print_json({"messages": sent})
        else:
            print(f"sent {counted(sent, 'message')}")


def check(table: str, storage: Path | None, *, as_json: bool) -> None:
    """Look for the files that a table names. Raises Failure, also if one is missing."""
    options = None if storage is None else _storage(storage)
    with reported():
        from veilmq.pipeline.sinks.checking import check as look

        found = look(table, options, now=wall() / 1e6)
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        show(found)
    if found.missing:
        rows = [each.rows for each in found.missing]
        known = sum(each for each in rows if each is not None)
        lost = f"rows in them: {'unknown' if rows == [None] * len(rows) else known}"
        mend = 'Bring them back from a backup; "Missing files" in docs/pipeline-drain.md says how to read the rest.'
        raise Failure(Exit.WRONG, f"files of {found.table} are missing: {len(rows)}, {lost}", mend)


class Stream(NamedTuple):
    """A stream's table and what goes with it."""

    table: str
    checkpoint: str
    kind: str
    """The table's format."""


def stream_of(out: Path, kind: str, checkpoint: Path | None) -> Stream:
    """The table of `health --follow` in `out`, checked. Raises OptionInvalid, TableForeign, Failure."""
    from veilmq.pipeline.sinks.ownership import check_table
    from veilmq.pipeline.tables import check_format, checkpoint_of

    check_format(kind, place_of(out))
    place = _place(out, kind)
    table = place / _TABLE
    spot = _checkpoint(place, checkpoint) or checkpoint_of(table)
    has_begun = not isinstance(spot, Path) or (spot / "offsets").is_dir()
    if not has_begun and any(table.iterdir() if table.is_dir() else ()):
        raise OptionInvalid(f"{table} is a table of no stream.", "Name another --out, or take it away.")
    check_table(kind, str(table), spot, mend_newer=_NEWER)
    return Stream(str(table), str(spot), kind)


def written(spark: "SparkSession", rows: "DataFrame", stream: Stream) -> None:
    """Write the rows as they come, until Ctrl-C. Raises TableForeign, OptionInvalid."""
    from veilmq.pipeline.sinks.ownership import check_table

    check_table(stream.kind, stream.table, stream.checkpoint, spark, _NEWER)
    query = (
        rows.writeStream.format({"delta": "veilmq-delta"}.get(stream.kind, stream.kind))
        .outputMode("append")
        .option("path", stream.table)
        .option("checkpointLocation", stream.checkpoint)
        .trigger(processingTime="10 seconds")
        .start()
    )
    is_over = threading.Event()
    # Poll in short calls: interrupting a call leaves Spark's gateway in a bad state.
    handler = signal.signal(signal.SIGINT, lambda *_: is_over.set())
    try:
        while not is_over.is_set() and not query.awaitTermination(_LOOK_SECONDS):
            pass
        if is_over.is_set():
            hush(spark)
            query.stop()
    finally:
        signal.signal(signal.SIGINT, handler)


def show(found: "Checked") -> None:
    print(f"{found.table}: version {found.version}, files: {found.files}, missing: {len(found.missing)}")
    for each in found.missing:
        by = "an entry of the log that is gone" if each.version is None else f"version {each.version}"
        rows = "unknown" if each.rows is None else each.rows
        print(f"  {each.path}: added by {by}, rows: {rows}{'' if each.is_current else ', removed since'}")


def _storage(file: Path) -> dict[str, str]:
    """Raises Failure."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except OSError as error:
        advice = advice_on(file, "Name a file that you may read.")
        raise Failure(Exit.USAGE, f"--storage {file}: {error.strerror}", advice) from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        mend = 'It looks like {"aws_region": "eu-west-1"}.'
        raise Failure(Exit.USAGE, f"--storage {file} is no JSON object of texts", mend) from None


def _check(queue: str, queues: str | None = None) -> None:
    """Raises SourceUnreachable."""
    try:
        (connect(queue) if queues is None else connect_account(queue)).close()
    except VeilError as error:
        raise SourceUnreachable(*unusable(f"--queue {_SECRET.sub('//***@', queue)}", error)) from None
