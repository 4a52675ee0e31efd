"""The thread that runs the engine of one data directory, and the directories that this process has open.

Strategy: callers put their calls into an inbox and wait. One thread takes all calls that have arrived, applies them as
one batch, commits it and answers. The next calls gather during the commit, so many threads share one fsync. Receives
that may wait are parked in the engine's waiting room; the thread sleeps until a call arrives or something is due. If
the thread ends for any reason, every waiting caller gets an error: none hangs.

The open directories: a table of shells by resolved path, one each, however many accounts use it, with a count of users;
the last user to leave closes the directory. Directories that are still open when the interpreter ends are closed then.
A forked child starts with an empty table: the parent keeps its directories, and the child may not use them.
"""

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from veilmq.client.clock import Clock
from veilmq.client.errors import ForkRefused, TransportError
from veilmq.client.shared.lifetimes import KEPT, OfProcess, forget_in_child
from veilmq.engine.directory import open_directory
from veilmq.engine.engine import Answer, Engine
from veilmq.engine.lease_clock import AHEAD_US_MAX, LeaseClock
from veilmq.model.commands import AnyCommand, Peek, Receive, Sweep
from veilmq.model.errors import ParameterInvalid, StoreFailed, StoreUnknown, VeilError, as_fields
from veilmq.model.instant import MINUTE_US, SECOND_US, Instant
from veilmq.model.outcomes import Applied, Outcome, Received, Swept
from veilmq.store import Options, RollbackLog, Store
from veilmq.store.directory import (
    DatabaseUnusable,
    DirectoryHeld,
    DirectoryUnsafe,
    NotOurs,
    SchemaRefused,
    SqliteTooOld,
    holds_database,
)
from veilmq.store.synchronised import is_synchronised

CLOSE_SECONDS: Final = 10.0
"""How long `close` waits for a commit in progress."""
_REST_SECONDS_MAX: Final = 1.0
_STEP_LOOK_US: Final = MINUTE_US
"""How often the system is asked whether its clock is synchronised."""
_UNACCEPTED: Final = (
    "the machine's clock is %d s ahead of what the data has accepted: nothing expires by that step until the clock is"
    " synchronised, or `veilmq clock accept --data DIR` while the directory is closed"
)

logger = logging.getLogger("veilmq.embedded")


class Call:
    """Commands of one caller, who waits for their outcomes."""

    __slots__ = ("_answered", "cancelled", "commands", "outcomes")

    def __init__(self, commands: Sequence[AnyCommand]) -> None:
        self.commands = commands
        self.outcomes: list[Outcome] | None = None
        self.cancelled = False
        """Cancelled before it was taken in."""
        self._answered = threading.Lock()
        self._answered.acquire()

    def answer(self, outcomes: list[Outcome]) -> None:
        """Set the outcomes; only the first answer counts."""
        if self.outcomes is None:
            self.outcomes = outcomes
            self._answered.release()

    def wait(self) -> list[Outcome]:
        """Blocks until it is answered."""
        self._answered.acquire()
        assert self.outcomes is not None
        return self.outcomes


class _Cancel:
    """The call's caller no longer waits; `abandoned`: nor will it take an answer that is already there."""

    __slots__ = ("abandoned", "call")

    def __init__(self, call: Call, abandoned: bool) -> None:
        self.call = call
        self.abandoned = abandoned


class Shell(OfProcess):
    """Runs one engine on a thread of its own, from construction to `close`."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        clock: Clock,
        is_synchronised: Callable[[], bool] = is_synchronised,
    ) -> None:
        """is_synchronised: whether the system says that its clock is synchronised."""
        self.clock = clock
        self._pid = self._this()
        self._engine = engine
        self._store = store
        self._lease_clock = LeaseClock(
            lambda: Instant(int(clock.wall() * SECOND_US)), lambda: int(clock.monotonic() * 1_000_000_000)
        )
        self._lease_clock.start(store.mark)
        if self._lease_clock.ahead:
            logger.warning("the data is %d s ahead of this machine's clock", self._lease_clock.ahead_us // SECOND_US)
        self._clock_lock = threading.Lock()
        self._step_looked = Instant(0)
        self._rollbacks = RollbackLog(logger)
        self._is_synchronised = is_synchronised
        self._inbox: queue.SimpleQueue[Call | _Cancel | None] = queue.SimpleQueue()
        self._door = threading.Lock()
        """Held while something is put into the inbox, so that nothing is added after the last look into it."""
        self._shut: VeilError | None = None
        self._open_calls: set[Call] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="veilmq-embedded", daemon=True)
        self._thread.start()

    def now(self) -> Instant:
        """Now, on the lease clock. Any thread."""
        with self._clock_lock:
            return self._lease_clock.now()

    def monotonic(self, instant: Instant) -> float:
        """An instant of the lease clock, on the client's monotonic clock in seconds; if inexact, too early."""
        monotonic = self.clock.monotonic()
        return monotonic + (instant - self.now()) / SECOND_US

    def check_usable(self) -> None:
        """Raises TransportError if the directory was closed, ForkRefused in a forked child, StoreUnknown."""
        if self.inherited:
            raise ForkRefused(
                reason="a forked process may not use its parent's data directory: serve it, and connect to the server",
                may_have_happened=False,
            )
        if self._shut is not None:
            raise _again(self._shut)

    def run(self, call: Call) -> list[Outcome]:
        """The outcomes of the call's commands, once they are durable. Raises as `check_usable` does."""
        self.check_usable()
        with self._door:
            if self._shut is not None:
                raise _again(self._shut)
            self._inbox.put(call)
        return call.wait()

    def cancel(self, call: Call, *, abandoned: bool = False) -> None:
        """End a waiting receive, which returns no messages. If it was abandoned, its messages are released."""
        with self._door:
            if self._shut is None:
                self._inbox.put(_Cancel(call, abandoned))

    def query(self, command: Peek) -> Outcome:
        """Answer from committed state on the caller's thread."""
        self.check_usable()
        return self._store.query(command, self.now())

    def apply_due(self) -> None:
        """Apply everything that is due now, for clocks that tests move."""
        more = True
        while more:
            (outcome,) = self.run(Call((Sweep(),)))
            more = isinstance(outcome, Swept) and outcome.more

    def close(self) -> None:
        """Answer waiting calls, finish submitted ones, close the files. Idempotent; not for a forked child."""
        if self.inherited:
            return
        with self._door:
            if self._shut is None:
                self._shut = TransportError(reason="the data directory was closed", may_have_happened=False)
                self._inbox.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("a commit did not end within %.0f s", CLOSE_SECONDS)

    def forget(self) -> None:
        """In a forked child: leave the lock to the parent alone."""
        self._store.directory.close()

    def _run(self) -> None:
        """The thread's main loop."""
        failure: VeilError = StoreUnknown(reason="the thread of the data directory ended")
        try:
            while not (self._stopping and not self._engine.busy):
                self._turn()
            self._deliver(self._engine.expire_waiters(self.now()))
            failure = TransportError(reason="the data directory was closed", may_have_happened=False)
        except StoreUnknown as error:
            logger.critical("the store failed and its state is unknown: %s", error.reason)
            failure = error
        finally:
            self._end(failure)

    def _turn(self) -> None:
        """Take in new calls, then apply, commit and answer one batch; if there is none, sleep until something is
        due."""
        self._take_in()
        engine = self._engine
        now = self.now()
        self._deliver(engine.expire_waiters(now))
        batch = engine.take_batch(now)
        if batch is None:
            if self._store.reader.held_us:
                self._accept_step(now)
            self._rest(now)
            return
        try:
            applied = self._store.apply(batch.commands, now)
            if applied.wrote:
                applied = self._commit(batch.commands, applied)
        except StoreUnknown as error:
            self._deliver(engine.failed(batch, error))
            raise
        self._deliver(engine.committed(batch, applied))

    def _commit(self, commands: Sequence[AnyCommand], applied: Applied) -> Applied:
        try:
            self._store.commit()
        except StoreFailed as error:
            self._rollbacks.note(error, self.clock.monotonic())
            return self._store.apply_each(commands, applied.at)
        return applied

    def _rest(self, now: Instant) -> None:
        due = self._engine.next_due(now)
        seconds = _REST_SECONDS_MAX if due is None else min((due - now) / SECOND_US, _REST_SECONDS_MAX)
        if seconds <= 0 or self._stopping:
            return
        try:
            self._admit(self._inbox.get(timeout=seconds))
        except queue.Empty:
            return

    def _accept_step(self, now: Instant) -> None:
        """Let the expiry clock take a step of the machine's clock, if that is synchronised."""
        if now - self._step_looked < _STEP_LOOK_US:
            return
        unaccepted_us = self._lease_clock.unaccepted_us(self._store.reader.held_us)
        if unaccepted_us <= AHEAD_US_MAX:
            return
        if not self._is_synchronised():
            if not self._step_looked:
                logger.warning(_UNACCEPTED, unaccepted_us // SECOND_US)
            self._step_looked = now
            return
        commands = [self._lease_clock.accepting()]
        self._commit(commands, self._store.apply(commands, now))
        logger.info("the clock was %d s ahead of the data: accepted", unaccepted_us // SECOND_US)

    def _take_in(self) -> None:
        """Submit all calls that have arrived."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._admit(item)

    def _admit(self, item: Call | _Cancel | None) -> None:
        engine = self._engine
        if type(item) is Call:
            if item.cancelled:
                item.answer([Received([])])
                return
            self._open_calls.add(item)
            engine.submit(item, item.commands, self.now())
        elif type(item) is _Cancel:
            self._cancelled(item.call, item.abandoned)
        else:
            self._stopping = True
            self._deliver(engine.drain_waiters())
            engine.flush_polls(self.now())

    def _cancelled(self, call: Call, abandoned: bool) -> None:
        if call in self._open_calls:
            self._open_calls.discard(call)
            self._engine.cancel(call)
            call.answer([Received([])] * len(call.commands))
        elif call.outcomes is None:
            call.cancelled = True
        elif abandoned:
            command, outcome = call.commands[0], call.outcomes[0]
            if type(command) is Receive and type(outcome) is Received:
                self._engine.undeliver(command, outcome, self.now())

    def _deliver(self, answers: list[Answer]) -> None:
        for call, outcomes in answers:
            self._open_calls.discard(call)
            call.answer(outcomes)

    def _end(self, failure: VeilError) -> None:
        """Answer the remaining calls with the failure, and close the files."""
        with self._door:
            if self._shut is None:
                self._shut = failure
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if type(item) is Call:
                self._open_calls.add(item)
        for call in self._open_calls:
            call.answer([failure] * len(call.commands))
        self._store.close()


def _again(error: VeilError) -> VeilError:
    """The same error as a new exception: one that is raised repeatedly accumulates tracebacks."""
    return type(error)(**as_fields(error))


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


def take_shell(path: Path, clock: Clock, options: Options | None, create: bool) -> Shell:
    """The directory's shell, opened if necessary. Return it with `give_shell_back`.

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


def give_shell_back(shell: Shell) -> None:
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
    url = holder.url("sqs") if holder else None
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
