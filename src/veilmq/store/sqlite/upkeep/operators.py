"""What belongs to operators: their commands, each of which acts once for its id and is recorded in the history; the
sessions of the console; templates, which are messages kept to be sent again; and the values that all servers of a
cluster share.

Strategy: the outcome is kept in the batch that changes something, so no crash separates the two. A command that was
refused has changed nothing, and nothing is kept of it: with the same id it may be tried again. What is kept has three
bounds: its age, the number of rows, and their bytes. A session is a row that names no secret; it goes at its end, or
when there are too many. Source: draft-ietf-httpapi-idempotency-key-header.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from veilmq.model import commands
from veilmq.model.errors import ParameterInvalid, StoreFailed, VeilError, as_fields, from_fields
from veilmq.model.events import Event, Kind
from veilmq.model.instant import DAY_US
from veilmq.model.messages import id_text
from veilmq.model.outcomes import (
    JobStarted,
    Operated,
    Outcome,
    QueueChanged,
    QueueCreated,
    Recorded,
    Result,
    Shared,
    TemplateKept,
    TemplatesListed,
)
from veilmq.model.settings.access import SESSIONS_MAX, CloseSession, OpenSession, Share, UseSession
from veilmq.model.settings.queue import (
    TEMPLATES_BYTES_MAX,
    TEMPLATES_MAX,
    TEMPLATES_OF_ACCOUNT_MAX,
    DropTemplate,
    KeepTemplate,
    ListTemplates,
    Template,
)
from veilmq.store import MIB
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import LiveQueue

KEPT_US: Final = DAY_US
COMMANDS_MAX: Final = 10_000
OUTCOMES_BYTES_MAX: Final = 16 * MIB
"""Of all outcomes; the newest one is kept whatever its size."""
DROPPED_MAX: Final = 256
"""Rows that one sweep or command drops."""
_FIND: Final = "SELECT digest, outcomes FROM operator_command WHERE principal = ? AND id = ? AND at > ?"
_OLDEST: Final = "SELECT number, at, bytes_before FROM operator_command ORDER BY number LIMIT 1"
_NEWEST: Final = "SELECT number, bytes_before + length(outcomes) FROM operator_command ORDER BY number DESC LIMIT 1"
_DROP: Final = (
    "DELETE FROM operator_command WHERE number IN (SELECT number FROM operator_command ORDER BY number LIMIT ?1)"
    " AND (at <= ?2 OR number < ?3 AND (number <= ?4 OR bytes_before < ?5))"
)
_BEYOND: Final = (
    "DELETE FROM console_session WHERE digest IN"
    " (SELECT digest FROM console_session ORDER BY used DESC, opened DESC LIMIT -1 OFFSET ?)"
)
_RESULTS: Final[dict[str, Any]] = {each.__name__: each for each in Result.__subclasses__()}
_ENCODER: Final = msgspec.msgpack.Encoder()
_STORED: Final = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])


def operate(writer: Writer, command: commands.Operate, run: Callable[[commands.AnyCommand], Outcome]) -> Outcome:
    """Run the commands, unless they ran before under this id. run: handles one of them in the open batch."""
    if command.keeps:
        kept = writer.read_one(_FIND, (command.origin.principal, command.id, writer.now - KEPT_US))
        if kept is not None:
            return _repeated(command, *kept)
    if not command.commands:
        return Operated([])
    start, before = len(writer.events), _incarnation(writer, command)
    outcomes = [run(each) for each in command.commands]
    if not any(map(_changed, outcomes)):
        return Operated(outcomes)
    _record(writer, command, outcomes[0], start, _incarnation(writer, command) if before is None else before)
    if command.keeps:
        _keep(writer, command, outcomes)
    return Operated(outcomes)


def _repeated(command: commands.Operate, digest: bytes, packed: bytes) -> Outcome:
    if digest != command.digest:
        return Operated([], mismatch=True)
    try:
        return Operated([_unpacked(*each) for each in _STORED.decode(packed)], repeated=True)
    except (msgspec.MsgspecError, LookupError, TypeError):
        return StoreFailed(reason="this command was carried out, but its outcome was kept by another release")


def _unpacked(name: str, packed: msgspec.Raw) -> Outcome:
    result = _RESULTS.get(name)
    if result is None:
        return from_fields(name, msgspec.msgpack.decode(packed))
    return msgspec.msgpack.decode(packed, type=result)  # type: ignore[no-any-return]


def _changed(outcome: Outcome) -> bool:
    """Whether the command may have changed something."""
    if isinstance(outcome, QueueCreated):
        return outcome.created
    if isinstance(outcome, QueueChanged):
        return outcome.changed
    return not isinstance(outcome, VeilError)


def _incarnation(writer: Writer, command: commands.Operate) -> int | None:
    """The queue that the command is about, if it exists."""
    key = getattr(command.commands[0], "queue", None)
    queue = None if key is None else writer.queues.by_key.get(key)
    return None if queue is None else queue.incarnation


def _record(writer: Writer, command: commands.Operate, outcome: Outcome, start: int, incarnation: int | None) -> None:
    """Append the event: about a message if the events of the command from `start` on are about one message alone."""
    detail = {"id": command.id, "act": command.act, "asked": command.asked}
    if isinstance(outcome, JobStarted):
        detail["job"] = id_text(outcome.info.id)
    event = Event(Kind.OPERATOR_COMMAND, writer.now, incarnation, writer.origin(command.origin), detail=detail)
    messages = {(each.message, each.sequence) for each in writer.events[start:] if each.message is not None}
    if len(messages) == 1:
        ((event.message, event.sequence),) = messages
    writer.events.append(event)


def _keep(writer: Writer, command: commands.Operate, outcomes: list[Outcome]) -> None:
    named = [(type(each).__name__, as_fields(each) if isinstance(each, VeilError) else each) for each in outcomes]
    number = writer.next_number("operator_command")
    newest = writer.read_one(_NEWEST, ())
    values = (
        number, command.origin.principal, command.id, writer.now, command.digest, 0 if newest is None else newest[1],
        _ENCODER.encode(named),
    )  # fmt: skip
    writer.write("INSERT OR REPLACE INTO operator_command VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    drop_old(writer)


def drop_old(writer: Writer) -> int:
    """Drop what is beyond the bounds, oldest first, a few rows at a time; returns how many may have been dropped."""
    oldest, newest = writer.read_one(_OLDEST, ()), writer.read_one(_NEWEST, ())
    if oldest is None or newest is None:
        return 0
    ended, last, beyond = writer.now - KEPT_US, newest[0], newest[0] - COMMANDS_MAX
    bytes_min = newest[1] - OUTCOMES_BYTES_MAX
    if oldest[1] > ended and (oldest[0] == last or (oldest[0] > beyond and oldest[2] >= bytes_min)):
        return 0
    writer.write(_DROP, (DROPPED_MAX, ended, last, beyond, bytes_min))
    return DROPPED_MAX


def open_session(writer: Writer, command: OpenSession) -> Outcome:
    """Keep a new session of the console; of too many those go that were unused for longest."""
    row = msgspec.structs.astuple(command.session)
    writer.write("INSERT OR REPLACE INTO console_session VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    writer.write(_BEYOND, (SESSIONS_MAX,))
    return Recorded()


def use_session(writer: Writer, command: UseSession) -> Outcome:
    """Keep when a session was used; one that is over stays so."""
    values = (command.used, command.ends, command.digest)
    writer.write("UPDATE console_session SET used = ?, ends = ? WHERE digest = ?", values)
    return Recorded()


def close_session(writer: Writer, command: CloseSession) -> Outcome:
    """Delete a session."""
    writer.write("DELETE FROM console_session WHERE digest = ?", (command.digest,))
    return Recorded()


def drop_sessions(writer: Writer) -> None:
    """Delete the sessions that are over."""
    if writer.read_one("SELECT 1 FROM console_session WHERE ends <= ?", (writer.now,)) is not None:
        writer.write("DELETE FROM console_session WHERE ends <= ?", (writer.now,))


def share(writer: Writer, command: Share) -> Outcome:
    """Keep a value for all servers."""
    kept = writer.read_one("SELECT value FROM shared WHERE name = ?", (command.name,))
    if kept is not None and (kept[0] == command.value or not command.replaces):
        return Shared(kept[0])
    writer.write("INSERT OR REPLACE INTO shared VALUES (?, ?)", (command.name, command.value))
    return Shared(command.value)


_OF_QUEUE: Final = "SELECT count(*), count(*) FILTER (WHERE name = ?2) FROM send_template WHERE incarnation = ?1"
_OF_ACCOUNT: Final = (
    "SELECT count(*), ifnull(sum(length(message)), 0) FROM send_template t JOIN queue q USING (incarnation)"
    " WHERE q.account = ?1 AND NOT (t.incarnation = ?2 AND t.name = ?3)"
)


def keep_template(writer: Writer, command: KeepTemplate, queue: LiveQueue) -> Outcome:
    """Keep a message to be sent again."""
    ((count, is_there),) = writer.read(_OF_QUEUE, (queue.incarnation, command.name))
    ((others, others_bytes),) = writer.read(_OF_ACCOUNT, (queue.key.account, queue.incarnation, command.name))
    if not is_there and count >= TEMPLATES_MAX:
        return ParameterInvalid(parameter="name", reason=f"a queue has at most {TEMPLATES_MAX} templates: drop one")
    if others >= TEMPLATES_OF_ACCOUNT_MAX or others_bytes + len(command.message) > TEMPLATES_BYTES_MAX:
        reason = f"an account has at most {TEMPLATES_OF_ACCOUNT_MAX} templates and {TEMPLATES_BYTES_MAX} bytes of them"
        return ParameterInvalid(parameter="name", reason=reason)
    row = (queue.incarnation, command.name, command.message, writer.now, command.principal)
    writer.write("INSERT OR REPLACE INTO send_template VALUES (?, ?, ?, ?, ?)", row)
    return TemplateKept(new=not is_there)


def drop_template(writer: Writer, command: DropTemplate, queue: LiveQueue) -> Outcome:
    """Delete one."""
    ((_, is_there),) = writer.read(_OF_QUEUE, (queue.incarnation, command.name))
    if not is_there:
        return ParameterInvalid(parameter="name", reason="the queue has no template of that name")
    writer.write("DELETE FROM send_template WHERE incarnation = ? AND name = ?", (queue.incarnation, command.name))
    return Recorded()


def list_templates(writer: Writer, command: ListTemplates, queue: LiveQueue) -> Outcome:
    """Those of a queue."""
    rows = writer.read(
        "SELECT name, message, kept, principal FROM send_template WHERE incarnation = ? ORDER BY name",
        (queue.incarnation,),
    )
    return TemplatesListed([Template(*row) for row in rows])
