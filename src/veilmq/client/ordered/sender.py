"""The sending side: numbers without gaps or duplicates.

Strategy: write ahead. A number and its message are made durable before the message is sent, and stay so until it
certainly arrived or certainly did not. A message that a crash or a lost answer left open is sent again with the same
number before anything else; the receiver drops the second copy by its number. If the queue refuses a message for good,
its number goes to the next message, or is declared void if later numbers were already sent. Source: document 002,
OrderedQueueWrapper.
"""

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
from msgspec.structs import replace

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import TransportError, may_have_happened
from veilmq.client.messages import Message, Sent, plain
from veilmq.client.ordered.numbering import (
    Mark,
    Pending,
    SenderState,
    Side,
    check_queue,
    decode,
    marking_of,
    packed,
    unpacked,
)
from veilmq.client.ordered.storage import Storage, locked
from veilmq.client.queue import Queue
from veilmq.client.shared import attempt, checks, through
from veilmq.client.shared.checks import as_message, text_bytes
from veilmq.model.errors import MessageTooLarge, ParameterInvalid, QueueMissing, VeilError

CHECK_SECONDS: Final = 60.0
"""The longest time between two checks of the queue's incarnation."""
GROUP: Final = "veilmq.ordered"
"""The only group on a FIFO queue."""
_VOID: Final = Message("void")

log = logging.getLogger("veilmq.ordered")


class OrderedSender(Side):
    """Numbers messages. One process holds the storage; its threads may send. The order is that of their calls.

    A call that raises with `may_have_happened` leaves its message open (`pending`). To send an equal message next is to
    send it again, with the same number; to send a different one sends the open one first. After `close` every call
    raises TransportError; in a forked child, StorageHeld.
    """

    _role = "sender"

    def __init__(
        self,
        queue: Queue,
        storage: Storage,
        *,
        marking: str = "auto",
        reset: bool = False,
        check_every: float = CHECK_SECONDS,
        clock: Clock = SYSTEM,
    ) -> None:
        """marking: `auto`, `attribute`, `body`, or a form such as the document's `#num#`. reset: begin a new epoch,
        whatever is stored. check_every: seconds between checks whether the queue was created anew.

        Raises StorageHeld, StateInvalid, QueueRecreated, ParameterInvalid, the errors of `stats` and of the storage.
        """
        checks.seconds(check_every, "check_every", 0, math.inf)
        self.queue = checks.queue(queue)
        self._marking = marking_of(marking, queue.capabilities)
        self._clock = clock
        self._check_every = check_every
        self._lock = threading.Lock()
        self._storage = locked(storage, clock)
        self._storage.acquire()
        self._pid = self._this()
        self._checked = clock.monotonic()
        """When the queue's incarnation was last checks."""
        try:
            self._open(reset)
        except BaseException:
            self._storage.release()
            raise

    @property
    def epoch(self) -> int:
        """Greater after each reset."""
        return self._state.epoch

    @property
    def next_number(self) -> int:
        """The next new message's number; all lower ones are given out."""
        return self._state.next

    @property
    def pending(self) -> list[Message]:
        """Messages that may or may not have arrived; `settle` decides them."""
        self._enter()
        with self._lock:
            return [unpacked(each.message) for each in self._state.pending if not each.void]

    def send(self, message: str | Message) -> Sent:
        """Send it under the next number. Raises like `Queue.send`, QueueRecreated, StorageLost, the storage's errors,
        and ParameterInvalid for a message with its own time to live, which would leave a gap.
        """
        (result,) = self._send([message])
        if isinstance(result, VeilError):
            raise result
        return result

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """Send them under consecutive numbers, in this order.

        An entry that the queue refused for good has no number. After an entry with an unknown outcome nothing more is
        sent: the errors of the later ones say that they did not happen. If the storage failed to save an entry's
        number, the outcome of the entry is unknown too.
        """
        return self._send(checks.batch(messages))

    def settle(self) -> None:
        """Send again what an earlier call, or an earlier process, left open. Raises like `send`. If the queue refuses
        one now, it is no longer open: a refusal is raised at the end, and each is logged.
        """
        with self._using():
            self._check()
            refused = [each for each in self._send_pending() if isinstance(each, VeilError)]
        if refused:
            raise refused[0]

    def reset(self) -> None:
        """Begin a new epoch with number 1, and forget open messages; for a queue that was created anew."""
        with self._using():
            self._reset()

    def close(self) -> None:
        """Wait for a send in progress and release the storage; the queue stays open. Idempotent; does nothing in a
        forked child.
        """
        if self.inherited:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._storage.release()

    @contextmanager
    def _using(self) -> Iterator[None]:
        self._enter()
        with self._lock:
            self._check_open()
            yield

    def _open(self, reset: bool) -> None:
        data = self._storage.load()
        incarnation = self._incarnation()
        if data is None or reset:
            self._state = SenderState(queue=self.queue.name, incarnation=incarnation, epoch=0)
            self._reset(decode(SenderState, data, str(self._storage)).epoch if data is not None else 0)
            return
        state = decode(SenderState, data, str(self._storage))
        check_queue(state, self.queue.name, incarnation, str(self._storage))
        self._state = state

    def _incarnation(self) -> str | None:
        return self.queue.stats().incarnation

    def _reset(self, epoch: int | None = None) -> None:
        # Taken from the clock, so that an epoch whose storage was lost is still a lower one.
        before = self._state.epoch if epoch is None else epoch
        fresh = max(int(self._clock.wall() * 1_000), before + 1)
        asked = self._clock.monotonic()
        self._save(SenderState(queue=self.queue.name, incarnation=self._incarnation(), epoch=fresh))
        self._checked = asked

    def _save(self, state: SenderState) -> None:
        self._storage.save(msgspec.json.encode(state))
        self._state = state

    def _check(self) -> None:
        """Check that the queue is still the one that these numbers belong to. If it is not, every call raises."""
        asked = self._clock.monotonic()
        if asked - self._checked >= self._check_every:
            check_queue(self._state, self.queue.name, self._incarnation(), str(self._storage))
            self._checked = asked

    def _send(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        acceptable = [attempt(self._acceptable, each) for each in messages]
        with self._using():
            self._check()
            return through(acceptable, self._outcomes)

    def _outcomes(self, messages: Sequence[Message]) -> list[Sent | VeilError]:
        """Send the open messages first; the first given ones may be these again. Then the rest, one request at a
        time."""
        again = self._again(messages)
        try:
            outcomes = self._send_pending()[:again]
        except VeilError as error:
            return [_still_open(error)] * again + _not_tried(len(messages) - again, error)
        step = self.queue.capabilities.batch_messages_max if self._marking.voids else 1
        stored = again
        for first in range(again, len(messages), step):
            following = first + step
            rest = _not_tried(len(messages[following:]), None)
            try:
                pending = self._write_ahead(messages[first:following])
                stored = first
                came = self._transmit(pending, last=not rest)
            except Exception as error:
                if not stored:
                    raise  # the open messages are the first ones, so the whole call may be repeated
                return outcomes[:stored] + [_unstored(error)] * len(messages[stored:following]) + rest
            outcomes += came
            if not self._state.pending:
                stored = len(outcomes)
            elif any(isinstance(each, VeilError) for each in came):
                return outcomes + rest
        return outcomes

    def _acceptable(self, given: str | Message) -> Message:
        """The message, if it can get a number. Raises ParameterInvalid, MessageTooLarge."""
        message = as_message(given)
        if message.ttl is not None:
            raise ParameterInvalid(parameter="ttl", reason="a message that expires leaves a gap in the order")
        capabilities = self.queue.capabilities
        if len(text_bytes(message.body)) < capabilities.body_bytes_min:  # with its number it would not be empty
            raise ParameterInvalid(parameter="body", reason="must not be empty")
        plain(message)
        marked = self._marked(Mark(self._state.epoch, self._state.next), message)
        size_bytes = capabilities.transmitted_bytes(marked.body)
        if size_bytes > capabilities.body_bytes_max:
            raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=capabilities.body_bytes_max)
        return message

    def _again(self, messages: Sequence[Message]) -> int:
        """How many of the messages are the open ones, sent again: all of those, at the start, or none."""
        pending = [each.message for each in self._state.pending if not each.void]
        return len(pending) if pending == [packed(each) for each in messages[: len(pending)]] else 0

    def _send_pending(self) -> list[Sent | VeilError]:
        """Send the open messages, until none is open. Returns their outcomes, without the voids."""
        outcomes: list[Sent | VeilError] = []
        for each in self._state.pending:
            message, mark = self._numbered(each)
            answer: Sent | VeilError
            try:
                answer = self.queue.send(self._marked(mark, message))
            except VeilError as error:
                if each.void or not self._marking.voids or not isinstance(error, ParameterInvalid | MessageTooLarge):
                    raise
                # The first attempt may have arrived nevertheless: the receiver takes whichever comes first, it or this
                # void.
                void = Pending(each.number, packed(_VOID), void=True)
                log.warning("queue %s: number %d is void: %s", self.queue.name, each.number, error)
                self._replace(each, void)
                self.queue.send(self._marked(mark._replace(void=True), _VOID))
                answer = error
            if not each.void:
                outcomes.append(answer)
        if self._state.pending:
            self._save(replace(self._state, pending=[]))
        return outcomes

    def _replace(self, old: Pending, new: Pending) -> None:
        pending = [new if each == old else each for each in self._state.pending]
        self._save(replace(self._state, pending=pending))

    def _numbered(self, pending: Pending) -> tuple[Message, Mark]:
        return unpacked(pending.message), Mark(self._state.epoch, pending.number, pending.void)

    def _marked(self, mark: Mark, message: Message) -> Message:
        marked = self._marking.write(message, mark)
        if not self.queue.capabilities.native_fifo:
            return marked
        return replace(marked, group=GROUP, deduplication_id=f"{mark.epoch}.{mark.number}")

    def _write_ahead(self, messages: Sequence[Message]) -> list[Pending]:
        """Number one request's messages, durably. Earlier open messages must be decided."""
        following = self._state.next
        pending = [Pending(number, packed(each)) for number, each in enumerate(messages, following)]
        self._save(replace(self._state, next=following + len(messages), pending=pending))
        return pending

    def _transmit(self, pending: Sequence[Pending], last: bool) -> list[Sent | VeilError]:
        """Send one request. last: save that all messages are decided; else they stay open until the next numbers are
        saved."""
        outcomes = self._request(pending)
        failed = [(each, error) for each, error in zip(pending, outcomes, strict=True) if isinstance(error, VeilError)]
        undecided = [each for each, error in failed if may_have_happened(error)]
        refused = [each for each, error in failed if not may_have_happened(error)]
        if failed or last:
            self._decide(undecided, refused)
        return outcomes

    def _request(self, pending: Sequence[Pending]) -> list[Sent | VeilError]:
        marked = [self._marked(mark, message) for message, mark in map(self._numbered, pending)]
        try:
            if len(marked) == 1:
                return [self.queue.send(marked[0])]
            return self.queue.send_batch(marked)
        except QueueMissing as error:
            self._checked -= self._check_every
            return [error] * len(marked)
        except VeilError as error:
            return [error] * len(marked)

    def _decide(self, undecided: Sequence[Pending], refused: Sequence[Pending]) -> None:
        """Numbers at the end that no message has are given out again; those in between become void."""
        following = self._state.next
        free = {each.number for each in refused}
        while following - 1 in free:
            following -= 1
            free.discard(following)
        voids = [Pending(number, packed(_VOID), void=True) for number in free]
        self._save(replace(self._state, next=following, pending=sorted([*undecided, *voids], key=_number)))
        if voids and not undecided:
            try:
                self._send_pending()
            except Exception:  # noqa: BLE001 a storage may raise anything
                # They stay open and are sent before anything else; the caller gets its own outcomes.
                return


def _not_tried(count: int, error: VeilError | None) -> list[Sent | VeilError]:
    reason = "not sent: an earlier message is undecided" + (f" ({error})" if error is not None else "")
    return [TransportError(reason=reason, may_have_happened=False)] * count


def _still_open(error: VeilError) -> VeilError:
    """The error of a repeated attempt: the first one may have arrived, whatever became of this one."""
    if isinstance(error, TransportError) and not error.may_have_happened:
        return TransportError(reason=error.reason, may_have_happened=True)
    return error


def _unstored(error: Exception) -> VeilError:
    if isinstance(error, VeilError):
        return error
    return TransportError(reason=f"the numbers cannot be stored: {error}", may_have_happened=True)


def _number(pending: Pending) -> int:
    return pending.number
