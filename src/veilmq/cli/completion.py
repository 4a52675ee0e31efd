"""Names of queues for the shell's completion.

Strategy: the words typed so far choose the server or directory. A shell waits for the result, so it comes within a
second or two, or is empty; errors are silent. A directory without a server is only read: the TAB key must not keep a
server from starting.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import typer

from veilmq.cli.exits import Failure

if TYPE_CHECKING:
    from veilmq.cli.admin_access import Target

_ANSWER_S: Final = 2
_NAMES_MAX: Final = 1_000


def queue_names(context: typer.Context, incomplete: str) -> list[str]:
    """Queues whose names begin with the text."""
    from veilmq.cli.admin_access import Target

    given = context.params
    files = (Path(given[name]) if given.get(name) else None for name in ("token_file", "data"))
    target = Target(given.get("admin"), *files)
    try:
        with _deadline():
            return list(islice(_names(target, given.get("account"), given.get("region"), incomplete), _NAMES_MAX))
    except (Failure, OSError):
        return []


def _names(target: "Target", account: str | None, region: str | None, prefix: str) -> Iterator[str]:
    """Raises Failure, OSError."""
    from veilmq.cli.admin_access import directory_of, http_access

    access = http_access(target, os.environ)
    if access is None:
        yield from _names_there(directory_of(target, os.environ), account, region, prefix)
        return
    try:
        home = access.home(account)
        for queue in access.queues(home.account, region or home.region, prefix):
            yield queue["name"]
    finally:
        access.close()


def _names_there(directory: Path, account: str | None, region: str | None, prefix: str) -> Iterator[str]:
    from veilmq.store.directory import DATABASE
    from veilmq.store.options import Options
    from veilmq.store.sqlite.disk.connections import SqliteError, open_reader
    from veilmq.store.sqlite.reading.view import SqliteView

    with suppress(SqliteError):
        connection = open_reader(directory / DATABASE, Options())
        try:
            for queue in SqliteView(connection).live_queues():
                key = queue.key
                if account in (None, key.account) and region in (None, key.region) and key.name.startswith(prefix):
                    yield key.name
        finally:
            connection.close()


@contextmanager
def _deadline() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_ANSWER_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
