"""What `veilmq pipeline archive` and `replay` do.

Strategy: the queue is looked for before Spark starts, so that a wrong URL is known at once.
"""

import re
from pathlib import Path
from typing import Final

from veilmq.cli.durations import seconds
from veilmq.cli.pipeline_run import _print_json, _told, make_place
from veilmq.cli.pipeline_spark import started
from veilmq.client.connect import connect
from veilmq.model.errors import VeilError
from veilmq.pipeline.errors import SourceUnreachable

_SECRET: Final = re.compile(r"//.*@")
"""What may hold one in a URL."""


def archive(
    queue: str, out: Path, kind: str, until: str | None, master: str | None, remote: str | None, *, as_json: bool
) -> None:
    """Drain a queue into `out`/messages. Raises Failure."""
    until_s = None if until is None else seconds("--until", until)
    with _told():
        from veilmq.pipeline.drain import drain
        from veilmq.pipeline.jobs.tables import check_format

        check_format(kind)
        _check(queue)
        make_place(out)
        place = out.resolve()
        with started(master, remote) as spark:
            done = drain(spark, queue, f"{kind}:{place / 'messages'}", place / "drain", until=until_s)
        if as_json:
            _print_json({name: getattr(done, name) for name in done.__struct_fields__})
        else:
            print(f"archived {done.messages} messages in {done.seconds:.1f} s, {done.quarantined} in quarantine")


def replay(
    table: Path,
    queue: str,
    where: str | None,
    key: str | None,
    master: str | None,
    remote: str | None,
    *,
    as_json: bool,
) -> None:
    """Send the rows of a table to a queue. Raises Failure."""
    with _told():
        from veilmq.pipeline.jobs.replaying import replay as job

        _check(queue)
        with started(master, remote) as spark:
            sent = job(spark, table.resolve(), queue, where=where, key=key)
        if as_json:
            _print_json({"messages": sent})
        else:
            print(f"sent {sent} messages")


def _check(queue: str) -> None:
    """Raises SourceUnreachable."""
    try:
        connect(queue).close()
    except VeilError as error:
        raise SourceUnreachable(
            f"--queue {_SECRET.sub('//***@', queue)} cannot be used: {error}.", "Is it there?"
        ) from None
