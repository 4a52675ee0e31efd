"""Admin access directly to a data directory: engine and store in this process, one call at a time.

Strategy: the loop of the server's shell without threads: submit, take a batch, apply, commit, deliver. A waiting
receive sleeps until the engine has something due: nobody else can send meanwhile, but leases and delays end.
"""

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins

import veilmq
from veilmq.admin.api import Refused, described, inputs, operator, views
from veilmq.admin.api.operations import OPERATIONS, Asked
from veilmq.admin.api.operator import AnyJob
from veilmq.admin.history import (
    Scope,
    all_moves,
    covers,
    event_lines,
    find_start,
    oldest_ages_us,
    topics_of,
)
from veilmq.admin.history.messages import Caller, find_message, find_sends, message_page, quarantine_page
from veilmq.admin.history.trace import shown_trace
from veilmq.admin.holders import (
    AllFailuresInput,
    BlockedInput,
    FailuresInput,
    HoldersInput,
    Rights,
    Unstored,
    all_failures_page,
    blocked_counts,
    blocked_page,
    failure_page,
    holder_page,
    shown_waiters,
)
from veilmq.admin.past import PastInput, past_page
from veilmq.admin.rollups import LiveRates, Wanted, live_part, rates_of, rollup_page, worst_at_once
from veilmq.admin.timeouts import TimeoutInput, timeout_page
from veilmq.admin.timeouts.cache import Timeouts, WrongInput
from veilmq.cli.access import EVERYTHING, Home, Piece, failure_of, several_accounts
from veilmq.cli.failures import Exit, Failure, NoServer, advice_on, check_command, foreign
from veilmq.cli.options import refused_value
from veilmq.engine.directory import DatabaseError, open_directory
from veilmq.engine.engine import Engine
from veilmq.model.commands import AnyCommand, ListQueues, Origin, Peek, Sweep
from veilmq.model.errors import StoreError, VeilError
from veilmq.model.events import HistoryTrimmed
from veilmq.model.instant import Instant
from veilmq.model.messages import id_text
from veilmq.model.outcomes import Outcome, QueuesListed
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT, HOME_REGION_DEFAULT
from veilmq.model.settings.queue import QueueKey
from veilmq.server.clock import LeaseClock
from veilmq.store import Options, Store
from veilmq.store.directory import (
    DatabaseUnusable,
    DirectoryHeld,
    DirectoryUnsafe,
    NotOurs,
    SchemaOlder,
    SchemaRefused,
    SqliteTooOld,
)

_SLEEP_S_MAX: Final = 1.0
_SCAN_MAX: Final = 20_000_000
_CATCHING_UP: Final = 16
"""Sweeps that add what happened just before the directory was closed to the rollups."""
_ORIGIN: Final = Origin("admin", "admin", f"veilmq/{veilmq.__version__} (command line)")


@contextmanager
def open_direct(directory: Path) -> Iterator["DirectAccess"]:
    """Open a directory and hold it meanwhile. Raises Failure.

    Data of an older schema is not migrated: a look during an upgrade must not prevent a downgrade.
    """
    try:
        engine, store = open_directory(directory, options=Options(migrates=False))
    except DirectoryHeld as error:
        raise Failure(Exit.DIRECTORY, str(error), "Use its owner's admin port: --admin HOST:PORT.") from None
    except SchemaOlder as error:
        raise Failure(Exit.DIRECTORY, str(error), "After that start, older releases refuse the data.") from None
    except NotOurs as error:
        raise foreign(directory, error) from None
    except (DirectoryUnsafe, DatabaseUnusable, SchemaRefused, SqliteTooOld) as error:
        raise Failure(Exit.DIRECTORY, str(error)) from None
    except OSError as error:
        advice = advice_on(directory, "Run the command as the server's user; it must be able to write there.")
        if error.errno == errno.EROFS:
            advice = f"{directory} is mounted read-only: copy all of it elsewhere, and look there."
        raise Failure(Exit.DIRECTORY, f"{error.filename or directory}: {error.strerror}", advice) from None
    except DatabaseError as error:
        raise _unreadable(directory, error) from None
    try:
        try:
            yield DirectAccess(engine, store, directory)
        finally:
            store.close()
    except DatabaseError as error:
        raise _unreadable(directory, error) from None


def _unreadable(directory: Path, error: DatabaseError) -> Failure:
    return Failure(
        Exit.STORE, f"{directory}: {type(error).__name__}: {error}", f"Check it with: {check_command(directory)}"
    )


class DirectAccess:
    """`AdminAccess`, which describes each method, on a directory that it holds."""

    def __init__(self, engine: Engine, store: Store, directory: Path) -> None:
        self._engine, self._store, self._directory = engine, store, directory
        self._clock = LeaseClock()
        self._clock.start(store.mark)

    @property
    def mark(self) -> Instant:
        """The latest instant that the data has seen."""
        return self._store.mark

    def run(
        self, operation: str, queue: QueueKey, members: Mapping[str, Any], command_id: str | None = None
    ) -> dict[str, Any]:
        row = OPERATIONS[operation]
        with self._failures():
            checked = _key(queue)
        with self._failures(operation):
            asked = Asked(checked, _ORIGIN, self._clock.now())
            wanted = inputs.convert(dict(members), row.shape)
            commands = row.plan(asked, wanted)
            if command_id is None:
                shown = row.show(self._call(commands))
                if operation == "describe":
                    shown["blocked"] = blocked_counts(self._store.reader, checked, self._clock.now())
                return shown
            return row.show(self._carry_out(operator.Asked(operation, str(checked), wanted), commands, command_id))

    def _carry_out(self, asked: operator.Asked, commands: Sequence[AnyCommand], command_id: str) -> list[Outcome]:
        """As the admin port does with the same id. Raises Failure, VeilError."""
        command = operator.operate(_ORIGIN, asked, commands, operator.checked_id(command_id))
        (outcome,) = self._call([command])
        return operator.done(command, outcome).outcomes

    def home(self, account: str | None) -> Home:
        """The account of development mode, or the only one that has queues here. Only its server knows its home
        region."""
        return Home(account or self._sole_account(), HOME_REGION_DEFAULT)

    def _sole_account(self) -> str:
        found = {key.account for key in self._store.reader.queues}
        if not found or DEVELOPMENT_ACCOUNT in found:
            return DEVELOPMENT_ACCOUNT
        if len(found) > 1:
            raise several_accounts("here are queues of several accounts", found)
        return found.pop()

    def queues(self, account: str, region: str | None, prefix: str, minutes: int = 0) -> Iterator[dict[str, Any]]:
        wanted = self._checked(account, region, prefix)
        command = ListQueues(
            origin=_ORIGIN,
            account=None if account == "*" else account,
            region=region,
            prefix=wanted.prefix,
            count_max=len(self._store.reader.queues) + 1,
        )
        with self._failures():
            (outcome,) = self._call([command])
        assert isinstance(outcome, QueuesListed)
        by_key = self._store.reader.queues
        lines = [(by_key[info.key], list(by_key[info.key].ready)) for info in outcome.queues]
        with self._failures():
            ages = oldest_ages_us(self._store.reader, lines, self._clock.now())
        rates: dict[int, dict[str, Any]] = {}
        if minutes:
            self._catch_up()
            live = LiveRates.of(self._store.reader, outcome.queues, self._clock.now())
            rates = rates_of(self._store.reader, live, minutes)
        for info in outcome.queues:
            shown = views.shown_listed(info, ages.get(info.incarnation))
            yield shown | {"rates": rates[info.incarnation]} if minutes else shown

    def topics(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        """Without a server nothing is pushed."""
        self._checked(account, region, prefix)
        for key in topics_of(self._store.reader, account, region, prefix):
            yield views.shown_topic(self._store.reader, self._store.reader.topics[key], None)

    def moves(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        self._checked(account, region, prefix)
        for task in all_moves(self._store.reader):
            if covers(task.source, account, region, prefix):
                yield views.shown_move(task)

    def jobs(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        self._checked(account, region, prefix)
        for job in operator.all_jobs(self._store.reader):
            if covers(job.source, account, region, prefix):
                yield to_builtins(operator.shown_job(job))

    def job(self, job: str) -> dict[str, Any]:
        """It goes on a step: no server does that here."""
        self._call([Sweep()])
        return to_builtins(operator.shown_job(self._job(job)))  # type: ignore[no-any-return]

    def _job(self, job: str) -> AnyJob:
        with self._failures():
            wanted = inputs.message_id(job, "job")
            found = operator.find_job(self._store.reader, wanted)
            if found is None:
                raise operator.missing(job)
            return found

    def start_job(self, queue: QueueKey, members: Mapping[str, Any], command_id: str) -> dict[str, Any]:
        with self._failures("start_job"):
            key = _key(queue)
            wanted = inputs.convert({**members, "queue": views.shown_key(key)}, inputs.JobInput)
            asked = operator.Asked("start_job", str(key), wanted)
            outcomes = self._carry_out(asked, [operator.starting(_ORIGIN, key, wanted)], command_id)
            return to_builtins(operator.shown_outcome(outcomes))  # type: ignore[no-any-return]

    def cancel_job(self, job: str, command_id: str) -> dict[str, Any]:
        found = self._job(job)
        with self._failures():
            asked = operator.Asked("cancel_job", id_text(found.id), inputs.Nothing())
            outcomes = self._carry_out(asked, [operator.cancelling(_ORIGIN, found)], command_id)
            return to_builtins(operator.shown_outcome(outcomes, job))  # type: ignore[no-any-return]

    def quarantined(self, account: str, region: str | None, prefix: str, *, bodies: bool) -> Iterator[dict[str, Any]]:
        self._checked(account, region, prefix)

        def page(after: str) -> dict[str, Any]:
            def wanted(queue: QueueKey) -> bool:
                return covers(queue, account, region, prefix)

            return quarantine_page(self._store.reader, wanted, after, inputs.PAGE_MAX, bodies=bodies)

        return (message for each in self._pages(page) for message in each["messages"])

    def messages(self, queue: QueueKey, wanted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:

        def page(after: str) -> dict[str, Any]:
            key, given = _key(queue), inputs.convert({**wanted, "after": after}, inputs.PageInput)
            return message_page(self._store.reader, key, given, self._clock.now())

        return self._pages(page)

    def holders(self, queue: QueueKey, client: str) -> Iterator[dict[str, Any]]:
        """Without a server nobody waits."""

        def page(after: str) -> dict[str, Any]:
            given = {"client": client, "limit": inputs.PAGE_MAX, "after": after}
            key, wanted = _key(queue), inputs.convert(given, HoldersInput)
            found = holder_page(self._store.reader, key, wanted, self._clock.now())
            return found | {"waiters": shown_waiters(Counter())}

        return self._pages(page)

    def blocked(self, queue: QueueKey, limit: int) -> dict[str, Any]:
        with self._failures():
            key, wanted = _key(queue), inputs.convert({"limit": limit}, BlockedInput)
            return blocked_page(self._store.reader, key, wanted, self._clock.now())

    def rollups(self, queue: QueueKey, wanted: Mapping[str, Any]) -> dict[str, Any]:
        with self._failures():
            live = live_part(self._store.reader, _key(queue), self._clock.now())
            return rollup_page(self._store.reader, live, inputs.convert(dict(wanted), inputs.RollupsInput))

    def past(self, queue: QueueKey, wanted: Mapping[str, Any]) -> dict[str, Any]:
        with self._failures():
            key, asked = _key(queue), inputs.convert(dict(wanted), PastInput)
            return past_page(self._store.reader, key, asked, self._clock.now())

    def timeout(self, queue: QueueKey, tried_us: int | None) -> dict[str, Any]:
        with self._failures():
            live = live_part(self._store.reader, _key(queue), self._clock.now())
            wanted = inputs.convert({"timeout_us": tried_us}, TimeoutInput)
            with self._store.reader.look() as view:
                return timeout_page(view, live.queue, wanted, live.now)

    def worst(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        with self._failures():
            asked = inputs.convert(dict(wanted), inputs.WorstInput)
            account = asked.account or self._sole_account()
            return worst_at_once(self._store.reader, account, Wanted(asked, lambda _: True), self._clock.now())

    def wrong_timeouts(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        with self._failures():
            asked = inputs.convert(dict(wanted), WrongInput)
            account = asked.account or self._sole_account()
            return Timeouts(self._store.reader).wrong_at_once(account, asked, self._clock.now())

    def failures(self, queue: QueueKey, minutes: int) -> dict[str, Any]:
        with self._failures():
            wanted = inputs.convert({"minutes": minutes}, FailuresInput)
            self._catch_up()
            live = live_part(self._store.reader, _key(queue), self._clock.now())
            return failure_page(self._store.reader, live, wanted, lines=True)

    def all_failures(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        with self._failures():
            given = {name: value for name, value in wanted.items() if value is not None}
            asked = inputs.convert(given, AllFailuresInput)
            self._catch_up()
            unstored = Unstored.of(self._store.reader, self._clock.now())
            account = asked.account or self._sole_account()
            everything = Rights(lambda _: True, lambda _: True)
            return all_failures_page(self._store.reader, unstored, account, asked, everything)

    def _catch_up(self) -> None:
        for _ in range(_CATCHING_UP):
            self._call([Sweep()])

    def workers(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        raise NoServer(self._directory)

    def accounts(self) -> Iterator[dict[str, Any]]:
        raise NoServer(self._directory)

    def message(self, message: str, *, bodies: bool) -> dict[str, Any]:
        wanted = inputs.FindInput(scan=_SCAN_MAX, bodies=bodies)
        with self._failures():
            looking = Caller(_ORIGIN, self._clock.now())
            found = find_message(self._store.reader, inputs.message_id(message), wanted, Scope(), looking)
            if found.peeks:
                self._call(found.peeks)
        return to_builtins(found.shown)  # type: ignore[no-any-return]

    def sends(self, deduplication_id: str, queue: str | None) -> dict[str, Any]:
        given = {"deduplication_id": deduplication_id, "queue": queue, "scan": _SCAN_MAX}
        with self._failures():
            return find_sends(self._store.reader, inputs.convert(given, inputs.SendsInput), Scope())

    def trace(self, message: str) -> dict[str, Any]:
        with self._failures(), self._store.reader.look() as view:
            now = self._clock.now()
            timeouts = Timeouts(self._store.reader)
            message_id = inputs.message_id(message)
            found = shown_trace(view, message_id, _SCAN_MAX, Scope(), now, lambda queue: timeouts.of(view, queue, now))
        return to_builtins(found)  # type: ignore[no-any-return]

    def events(self, start: str, limit: int, follow_s: float, wanted: Mapping[str, str] = EVERYTHING) -> Piece:
        """Without a server nothing new can come, so it does not wait."""
        with self._failures(), self._store.reader.look() as view:
            scope = Scope(wanted=inputs.convert(dict(wanted), inputs.EventsInput).chosen())
            found = find_start(view, start)
            stop = min(found.start + limit, found.following)
            return Piece(event_lines(view, found.start, stop, scope), found.start, stop)

    def accept_clock(self, command_id: str) -> dict[str, Any]:
        with self._failures():
            asked = operator.Asked("accept_clock", "clock", inputs.Nothing())
            (outcome,) = self._carry_out(asked, [self._clock.accepting()], command_id)
            return views.shown_clock(outcome)

    def _call(self, commands: Sequence[AnyCommand]) -> list[Outcome]:
        """Run one call to its end. Raises Failure if the store fails."""
        first = commands[0]
        if isinstance(first, Peek):
            return [self._store.query(first, self._clock.now())]
        engine = self._engine
        ticket = object()
        engine.submit(ticket, list(commands), self._clock.now())
        while True:
            answers = engine.expire_waiters(self._clock.now())
            batch = engine.take_batch(self._clock.now())
            if batch is not None:
                applied = self._store.apply(batch.commands, self._clock.now())
                if applied.wrote:
                    self._store.commit()
                answers += engine.committed(batch, applied)
            for answered, outcomes in answers:
                if answered is ticket:
                    return outcomes
            if batch is None:
                now = self._clock.now()
                due = engine.next_due(now)
                time.sleep(_SLEEP_S_MAX if due is None else min(max(due - now, 0) / 1e6, _SLEEP_S_MAX))

    def _pages(self, page: Callable[[str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """All pages: each asks for what comes after the one before. Raises Failure."""
        after: str | None = ""
        while after is not None:
            with self._failures():
                found = page(after)
            yield found
            after = found["after"]

    def _checked(self, account: str, region: str | None, prefix: str) -> inputs.ListInput:
        """Check the input as the admin port would. Raises Failure."""
        given = {"account": account, "region": region, "prefix": prefix}
        with self._failures():
            return inputs.convert({name: each for name, each in given.items() if each is not None}, inputs.ListInput)

    @contextmanager
    def _failures(self, operation: str = "") -> Iterator[None]:
        """Turn a command's errors into those of the command line."""
        try:
            yield
        except StoreError as error:
            raise Failure(Exit.STORE, str(error), f"Check it with: {check_command(self._directory)}") from None
        except VeilError as error:
            answer = described(error)
            message = answer["message"]
            if answer["field"]:
                message = refused_value(answer["field"], message, operation=operation)
            raise failure_of(answer["error"], message, answer) from None
        except Refused as refused:
            raise failure_of(refused.error, refused.message, {}) from None
        except HistoryTrimmed as error:
            raise failure_of("history_trimmed", str(error), {"first_offset": error.first_offset}) from None


def _key(queue: QueueKey) -> QueueKey:
    """The queue, whose account, region and name are checked as the admin port does. Raises ParameterInvalid."""
    return inputs.queue_key(queue.account, queue.region, queue.name)
