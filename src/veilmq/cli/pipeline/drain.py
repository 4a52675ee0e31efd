"""What `veilmq pipeline archive`, `replay` and `check` do.

Strategy: the queue is checked before Spark starts, so that a wrong URL is reported at once. A check needs no Spark.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from veilmq.cli.failures import Exit, Failure, advice_on
from veilmq.cli.options import seconds
from veilmq.cli.pipeline import Where
from veilmq.cli.pipeline.session import make_place, place_of, print_json, reported, started
from veilmq.client.adapters.connect import connect, connect_account
from veilmq.model.errors import VeilError
from veilmq.pipeline.errors import SourceUnreachable
from veilmq.server.clock import wall

if TYPE_CHECKING:
    from veilmq.pipeline.sinks.checking import Checked


_SECRET: Final = re.compile(r"//.*@")
"""The part of a URL that may contain a secret."""


def archive(
    queue: str, queues: str | None, out: Path, kind: str, until: str | None, where_it_runs: Where, *, as_json: bool
) -> None:
    """Drain a queue, or the `queues` of an account, into `out`/messages. Raises Failure."""
    until_s = None if until is None else seconds("--until", until)
    with reported():
        from veilmq.pipeline.drain import drain
        from veilmq.pipeline.tables import check_format

        check_format(kind)
        _check(queue, queues)
        make_place(out)
        place = out.resolve()
        many: dict[str, Any] = {} if queues is None else {"queues": queues}
        with started(where_it_runs) as spark:
            done = drain(spark, queue, f"{kind}:{place / 'messages'}", place / "drain", until=until_s, **many)
        if as_json:
            print_json({name: getattr(done, name) for name in done.__struct_fields__})
        else:
            print(f"archived {done.messages} messages in {done.seconds:.1f} s, {done.bad_records} bad records")


def replay(
    table: Path,
    queue: str,
    where: str | None,
    key: str | None,
    where_it_runs: Where,
    *,
    as_json: bool,
) -> None:
    """Send the rows of a table to a queue. Raises Failure."""
    with reported():
        from veilmq.pipeline.sinks.queue import replay as job

        _check(queue)
        with started(where_it_runs) as spark:
            sent = job(spark, place_of(table), queue, where=where, key=key)
        if as_json:
            print_json({"messages": sent})
        else:
            print(f"sent {sent} messages")


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
        raise SourceUnreachable(
            f"--queue {_SECRET.sub('//***@', queue)} cannot be used: {error}.", "Is it there?"
        ) from None
