"""The data directories that this process has open: one shell each, however many accounts use it.

Strategy: a table of shells by resolved path, with a count of users; the last user to leave closes the directory.
Directories that are still open when the interpreter ends are closed then. A forked child starts with an empty table:
the parent keeps its directories, and the child may not use them.
"""

import atexit
import threading
from pathlib import Path

from veilmq.client.adapters.embedded.shell import Shell
from veilmq.client.clock import Clock
from veilmq.client.errors import TransportError
from veilmq.client.threads import KEPT, forget_in_child
from veilmq.engine import open_directory
from veilmq.model.errors import ParameterInvalid
from veilmq.store.directory import DirectoryHeld, DirectoryUnsafe, holds_database
from veilmq.store.errors import DatabaseUnusable, NotOurs, SchemaRefused, SqliteTooOld
from veilmq.store.options import Options


class _Entry:
    """An open directory."""

    def __init__(self, shell: Shell, options: Options | None) -> None:
        self.shell = shell
        self.options = options
        self.users = 0


class _Table:
    """The open directories."""

    def __init__(self) -> None:
        self.entries: dict[Path, _Entry] = {}
        self.lock = threading.Lock()

    def forget(self) -> None:
        """In a forked child nothing is open; SQLite forbids it to use or close its parent's connections."""
        for entry in self.entries.values():
            entry.shell.forget()
            KEPT.append(entry)
        self.entries = {}
        self.lock = threading.Lock()


_table = _Table()
forget_in_child(_table)


def take(path: Path, clock: Clock, options: Options | None, create: bool) -> Shell:
    """The directory's shell, opened if necessary. Return it with `give_back`.

    create: make the directory if it is missing. Raises TransportError (held by another process, unsafe, unusable; the
    reason says which), ParameterInvalid (no directory, or open here with another clock or other options).
    """
    path = path.absolute().resolve()
    with _table.lock:
        entry = _table.entries.get(path)
        if entry is None:
            entry = _table.entries[path] = _Entry(_open(path, clock, options, create), options)
        elif entry.shell.clock is not clock or entry.options != options:
            raise ParameterInvalid(parameter="directory", reason="open in this process with another clock or options")
        entry.users += 1
        return entry.shell


def give_back(shell: Shell) -> None:
    """Remove one user; the last one closes the directory."""
    with _table.lock:
        for path, entry in _table.entries.items():
            if entry.shell is shell:
                entry.users -= 1
                if not entry.users:
                    # Closed under the lock, so that the next one to open the directory finds it free.
                    shell.close()
                    del _table.entries[path]
                return


def _open(path: Path, clock: Clock, options: Options | None, create: bool) -> Shell:
    try:
        if not create and not holds_database(path):
            raise ParameterInvalid(parameter="directory", reason=f"{path} holds no queues (create=1 makes it)")
        engine, store = open_directory(path, options=options)
    except DirectoryHeld as error:
        raise TransportError(reason=_held(error), may_have_happened=False) from error
    except (DirectoryUnsafe, DatabaseUnusable, NotOurs, SchemaRefused, SqliteTooOld) as error:
        raise TransportError(reason=str(error), may_have_happened=False) from error
    except OSError as error:
        raise ParameterInvalid(parameter="directory", reason=f"{path}: {error.strerror}") from error
    return Shell(engine, store, clock)


def _held(error: DirectoryHeld) -> str:
    """Which process holds it, and the URL to use instead."""
    holder = error.holder
    who = f"pid {holder.pid}" if holder else "another process"
    url = holder.listeners.get("sqs") if holder else None
    if url is None:
        return f"{error.directory} is held by {who}, which serves no port: one process owns a data directory"
    scheme, _, address = url.partition("://")
    tls = "?tls=1" if scheme == "https" else ""
    return f"{error.directory} is held by {who}, use veil://{address.rstrip('/')}/NAME{tls}"


def _close_all() -> None:
    """Called when the interpreter ends."""
    with _table.lock:
        for entry in _table.entries.values():
            entry.shell.close()
        _table.entries.clear()


atexit.register(_close_all)
