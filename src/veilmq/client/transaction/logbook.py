"""The operation log: its entries, one hidden for each transaction that is open, and how long everything may take.

Strategy: an entry is JSON and always carries the whole message, so whatever happens to the half message, the message is
not lost. If a send returns a handle, the entry is delayed by the transaction's timeout and deleted by that handle. If
not (SQS), the entry is sent without a delay and received at once, with a lease as long as the timeout; threads of one
process share what they find, and give back entries of other processes. Either way, an entry that nobody deletes becomes
visible after the timeout, and is then overdue. An entry's age is judged by the queue's clock, which producers and
checkers share; it is learned from messages that nobody received before. Source: document 002, "transaction messages",
step 2.

Times: settings that would silently lose a message are refused when the queue is wrapped: a half message that may appear
or end before it is decided, and a log that forgets entries before the last question. The defaults are those of the
documents' SDK. Source: document 002, "preparations" and "failure analysis".
"""

import logging
import threading
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from veilmq.client.clock import Clock
from veilmq.client.errors import TransportError
from veilmq.client.messages import Message, Received, original, plain
from veilmq.client.queue import Capabilities, HandleOnSend, Queue
from veilmq.client.shared import checks
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid, VeilError

ATTRIBUTE: Final = "veilmq.transaction"
"""If the queue has attributes, this one names the message's transaction: an idempotency key for consumers."""
_VERSION: Final = 1


class Verdict(StrEnum):
    """What became of the local operation."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    """Not done, and it never will be done."""
    UNKNOWN = "unknown"
    """Not decided yet: ask again."""


class Form(StrEnum):
    """Where the message waits for the verdict."""

    HIDDEN = "hidden"
    """As a half message in the queue, delayed beyond its own end; a commit makes it visible."""
    LOGGED = "logged"
    """Only in the log; a commit sends it."""


class Prepared(msgspec.Struct, frozen=True):
    """A transaction as `do_transaction` and `check_transaction` see it."""

    id: str
    message: Message
    handle: str | None
    """The half message's handle."""
    prepared: float
    """Unix seconds by the producer's clock."""


class Entry(msgspec.Struct, frozen=True):
    """A transaction as stored in the log."""

    version: int
    id: str
    form: Form
    message: Message
    handle: str | None
    prepared: float
    expires: float | None
    """An instant no later than the half message's end, in Unix seconds by the producer's clock."""

    def shown(self) -> Prepared:
        """The part that the application sees."""
        return Prepared(self.id, self.message, self.handle, self.prepared)


def new_entry(
    transaction: str, form: Form, message: Message, handle: str | None, at: float, life: float | None
) -> Entry:
    """A new entry. life: the half message's life, in seconds."""
    return Entry(_VERSION, transaction, form, message, handle, at, None if life is None else at + life)


def encode(entry: Entry) -> str:
    """The body of a log message."""
    return msgspec.json.encode(replace(entry, message=plain(entry.message))).decode()


def decode(body: str) -> Entry | None:
    """The entry in a log message; None if it has no form that we know."""
    try:
        entry = msgspec.json.decode(body, type=Entry)
        message = original(entry.message)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return replace(entry, message=message) if entry.version == _VERSION else None


def marked(entry: Entry, capabilities: Capabilities) -> Message:
    """The message to send: with the transaction's id if the queue can carry it."""
    message = entry.message
    if capabilities.attributes:
        message = replace(message, attributes={**message.attributes, ATTRIBUTE: entry.id})
    if capabilities.native_fifo and message.deduplication_id is None:
        message = replace(message, deduplication_id=entry.id)
    return message


def verdict_of(given: object) -> Verdict:
    """Accepts verdicts, and True and False for commit and roll back, as in the document. Raises ParameterInvalid."""
    if isinstance(given, bool):
        return Verdict.COMMIT if given else Verdict.ROLLBACK
    try:
        return Verdict(str(given))
    except ValueError:
        reason = f"must be a Verdict, True or False, not {given!r}"
        raise ParameterInvalid(parameter="verdict", reason=reason) from None


HALF_LIFE: Final = 47 * 3_600.0
HALF_DELAY: Final = 48 * 3_600.0
TIMEOUT: Final = 600.0
FIFO_TIMEOUT: Final = 180.0
DEDUPLICATION: Final = 300.0
"""How long a FIFO queue drops a second message with the same id (SQS Developer Guide, "exactly-once processing")."""
CHECK_EVERY: Final = 5.0
CLAIM_MAX: Final = 10
"""Entries received at once in the search for one's own."""
CLOCKS_APART: Final = 60.0
"""How far the queue's and the producer's clocks may differ when a half message's end is judged."""
log = logging.getLogger("veilmq.transaction")


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    timeout: float | None = None
    """From the log entry to the first question; None: 600, or 180 for a FIFO queue, which drops a second copy for only
    five minutes; that must be enough even if a checker dies."""
    check_every: float = CHECK_EVERY
    """Between two checks of the log."""
    check_lease: float = 60.0
    """Lease of a log entry while it is checked; must be longer than a check takes."""
    ask_every: float = 60.0
    """From an UNKNOWN to the next question."""
    ask_for: float = 3_600.0
    """From the timeout until an undecided transaction is parked."""
    half_life: float = HALF_LIFE
    """Time to live of a half message, and of the message that it becomes. If the protocol has no time to live of a
    message, the queue's retention counts."""
    half_delay: float = HALF_DELAY
    """Delay of a half message."""
    life_min: float = 24 * 3_600.0
    """If less of its life is left, a half message is not made visible but sent anew."""
    claim_for: float = 20.0
    """The longest search for one's own entry in a log whose sends return no handle."""

    @property
    def asked_after(self) -> float:
        """From the preparation to the first question."""
        return TIMEOUT if self.timeout is None else self.timeout

    @property
    def decided_within(self) -> float:
        """From the preparation until it is parked if it is still undecided."""
        return self.asked_after + self.ask_for


def form_for(given: Form | str | None, capabilities: Capabilities) -> Form:
    """The form to use; None: hidden where it is safe. Raises CapabilityMissing, ParameterInvalid."""
    # On a FIFO queue a message has no delay of its own, and a half message would block its group.
    safe = (
        capabilities.retention_below_delay
        and capabilities.delay_max > 0
        and capabilities.handle_on_send is not HandleOnSend.NEVER
    )
    if given is None:
        return Form.HIDDEN if safe else Form.LOGGED
    form = checks.choice(given, Form, "form")
    if form is Form.HIDDEN and not safe:
        missing = f"a message on {capabilities.protocol} that ends before its delay, with a handle from its send"
        raise CapabilityMissing(capability=missing)
    return form


def times_for(given: Times | None, capabilities: Capabilities) -> Times:
    """The times for this queue. Raises ParameterInvalid for values that are not durations."""
    times = Times() if given is None else given
    if not isinstance(times, Times):
        raise ParameterInvalid(parameter="times", reason=f"must be Times, not {type(times).__name__}")
    if times.timeout is None:
        timeout = FIFO_TIMEOUT if capabilities.native_fifo else TIMEOUT
        times = msgspec.structs.replace(times, timeout=timeout)
    for name in times.__struct_fields__:
        checks.positive(getattr(times, name), name)
    again = times.asked_after + times.check_every + times.check_lease
    if capabilities.native_fifo and again >= DEDUPLICATION:
        log.warning(
            "a commit may be repeated %.0f s after the first, when the queue no longer drops the copy (%.0f s): "
            "consumers need an idempotency guard, or the transactions a shorter timeout", again, DEDUPLICATION,
        )  # fmt: skip
    return times


def check_log(times: Times, form: Form, capabilities: Capabilities, retention: float | None) -> None:
    """Raises ParameterInvalid if the log, with its retention, cannot keep an entry long enough."""
    hidden_by = capabilities.lease_max if claims(capabilities) else capabilities.delay_max
    _at_most("timeout", times.asked_after, hidden_by, f"{capabilities.protocol} can hide a log entry")
    for name in ("check_lease", "ask_every"):
        _at_most(name, getattr(times, name), capabilities.lease_max, f"{capabilities.protocol} can lease")
    if times.check_lease < capabilities.lease_min:
        reason = f"{times.check_lease:g} s is below the {capabilities.lease_min:g} s of {capabilities.protocol}"
        raise ParameterInvalid(parameter="check_lease", reason=reason)
    needed = times.decided_within + times.check_lease
    if form is Form.HIDDEN:
        needed = max(needed, times.half_delay)
    if retention is not None and retention <= needed:
        reason = f"its retention of {retention:g} s must exceed {needed:g} s, or undecided transactions are lost"
        raise ParameterInvalid(parameter="log", reason=reason)


def check_half(times: Times, capabilities: Capabilities, retention: float | None) -> float:
    """The life of a half message in a queue with this retention.

    Raises ParameterInvalid if it could appear, or end, before it is decided.
    """
    _at_most("half_delay", times.half_delay, capabilities.delay_max, f"{capabilities.protocol} can delay")
    life, parameter, what = times.half_life, "half_life", "a life"
    if not capabilities.ttl:
        if retention is None:
            raise CapabilityMissing(capability=f"asking {capabilities.protocol} for a queue's retention")
        life, parameter, what = retention, "queue", "its retention"
    if life >= times.half_delay:
        reason = f"{what} of {life:g} s must be below the delay of {times.half_delay:g} s, or half messages appear"
        if not capabilities.ttl:
            reason += ": create it with a shorter Template(retention=), or say form='logged'"
        raise ParameterInvalid(parameter=parameter, reason=reason)
    needed = times.decided_within + times.life_min
    if life < needed:
        reason = f"{what} of {life:g} s is below timeout + ask_for + life_min = {needed:g} s"
        raise ParameterInvalid(parameter=parameter, reason=reason)
    return life


def claims(log: Capabilities) -> bool:
    """Whether a log entry's handle comes only from a receive."""
    return log.handle_on_send is HandleOnSend.NEVER


def _at_most(name: str, seconds: float, most: float, what: str) -> None:
    if seconds > most:
        raise ParameterInvalid(parameter=name, reason=f"{seconds:g} s is more than the {most:g} s that {what}")


class Logbook:
    """Thread-safe."""

    def __init__(self, queue: Queue, times: Times, clock: Clock) -> None:
        self.queue = queue
        self._times = times
        self._clock = clock
        self._claims = claims(queue.capabilities)
        self._ahead: float | None = None
        """Seconds that the queue's clock is ahead of our monotonic one; None: not known yet."""
        self._changed = threading.Condition()
        self._searching = False
        self._wanted: set[str] = set()
        self._found: dict[str, str] = {}

    def check_size(self, entry: Entry) -> None:
        """Raises MessageTooLarge if the log cannot take the entry."""
        size_bytes = self.queue.capabilities.transmitted_bytes(encode(entry))
        limit_bytes = self.queue.capabilities.body_bytes_max
        if size_bytes > limit_bytes:
            raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=limit_bytes)

    def write(self, entry: Entry) -> str:
        """Write the entry; returns its handle. Raises like `Queue.send`; TransportError if it was not found again."""
        body = encode(entry)
        if not self._claims:
            handle = self.queue.send(Message(body, delay=self._times.asked_after)).handle
            assert handle is not None, "checked by its capabilities"
            return handle
        with self._changed:
            self._wanted.add(entry.id)
        try:
            self.queue.send(Message(body))
            return self._claim(entry.id)
        finally:
            with self._changed:
                self._wanted.discard(entry.id)
                self._found.pop(entry.id, None)

    def erase(self, handle: str) -> None:
        """Delete an entry. If that fails now, the checker meets the entry again and settles it once more."""
        try:
            self.queue.delete(handle)
        except VeilError as error:
            log.info("a settled log entry stays for now: %s", error)

    def overdue(self, count_max: int) -> list[Received]:
        """Visible entries, leased for the time of a check. Raises like `Queue.receive`."""
        count = min(count_max, self.queue.capabilities.receive_messages_max)
        came = self._receive(count, self._times.check_lease)
        return self._sorted_out(came, self._times.check_lease) if self._claims else came

    def age(self, message: Received, entry: Entry) -> float:
        """Seconds since the entry was logged, by the queue's clock; until that is known, by the producer's and ours."""
        if self._ahead is None or message.sent is None:
            return self._clock.wall() - entry.prepared
        return self._clock.monotonic() + self._ahead - message.sent

    def _receive(self, count: int, lease: float, wait: float = 0.0) -> list[Received]:
        came = self.queue.receive(count, lease=lease, wait=wait)
        for message in came:
            if message.receive_count == 1 and message.first_received is not None:
                self._ahead = message.first_received - self._clock.monotonic()
        return came

    def _claim(self, transaction: str) -> str:
        """Find our own entry. One thread of the process searches for all."""
        deadline = self._clock.monotonic() + self._times.claim_for
        while True:
            with self._changed:
                while self._searching and transaction not in self._found and self._left(deadline) > 0:
                    self._changed.wait(self._left(deadline))
                handle = self._found.pop(transaction, None)
                if handle is not None:
                    return handle
                if self._left(deadline) <= 0:
                    reason = f"log entry of transaction {transaction} was not found within {self._times.claim_for:g} s"
                    raise TransportError(reason=reason, may_have_happened=True)
                self._searching = True
            try:
                wait = min(1.0, self.queue.capabilities.wait_max, max(0.0, self._left(deadline)))
                count = min(CLAIM_MAX, self.queue.capabilities.receive_messages_max)
                came = self._receive(count, self._times.asked_after, wait)
                for message in self._sorted_out(came, self._times.asked_after):
                    self._give_back(message)
            finally:
                with self._changed:
                    self._searching = False
                    self._changed.notify_all()

    def _left(self, deadline: float) -> float:
        return deadline - self._clock.monotonic()

    def _sorted_out(self, messages: list[Received], lease: float) -> list[Received]:
        """The overdue entries. Entries that a thread here waits for are passed to it; those of other processes are
        given back.
        """
        overdue = []
        for message in messages:
            entry = decode(message.body)
            with self._changed:
                wanted = entry is not None and entry.id in self._wanted
            if entry is not None and wanted:
                self._hand_over(entry.id, message, lease)
            elif entry is not None and self.age(message, entry) < self._times.asked_after:
                self._give_back(message)
            else:
                overdue.append(message)
        return overdue

    def _hand_over(self, transaction: str, message: Received, lease: float) -> None:
        handle = message.handle
        if lease != self._times.asked_after:
            try:
                handle = self.queue.extend(handle, self._times.asked_after)
            except VeilError as error:
                log.info("log entry of transaction %s comes again: %s", transaction, error)
                return
        with self._changed:
            self._found[transaction] = handle
            self._changed.notify_all()

    def _give_back(self, message: Received) -> None:
        try:
            self.queue.release(message.handle)
        except VeilError as error:
            log.info("a log entry comes back by itself: %s", error)
