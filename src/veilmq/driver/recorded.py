"""A queue that writes down what its callers do with it, for the history checker (`veilmq.checking`).

Strategy: `Recorded` wraps any queue. Each call is written before it begins, as unknown, and again with its answer. Many
queues of many threads write into one `Recording`, which knows the lease of each handle. Bodies enter the log as
digests. Retries hide answers: turn them off (`retries=0` in a URL).
"""

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Final

from msgspec.structs import replace

from veilmq.checking.log import Grant, Kind, Operation, Outcome, encoded
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.errors import may_have_happened
from veilmq.client.messages import Extension, Message, Received, Sent
from veilmq.client.queue import Queue
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import LeaseError, ParameterInvalid, VeilError
from veilmq.model.messages import Failure

_SECOND_US: Final = 1_000_000
_DIGITS: Final = 16


class Recording:
    """A log that grows. Thread-safe."""

    def __init__(self, file: BinaryIO | None = None, clock: Clock = SYSTEM) -> None:
        """`file` gets each line as it is written; closing it is up to the caller. `clock` must be the clock of the
        queues' adapters."""
        self._file = file
        self._clock = clock
        self._lock = threading.Lock()
        self._operations: list[Operation] = []
        self._taken = 0
        """How many operations came before those."""
        self._leases = 0
        self._handles: dict[str, tuple[int, int]] = {}
        """Lease and rotation of each handle."""

    @property
    def operations(self) -> list[Operation]:
        """The log so far."""
        with self._lock:
            return list(self._operations)

    def take(self) -> list[Operation]:
        """The log since the last call, which this forgets; the file keeps it. No call may be under way, and no handle
        may be used any more."""
        with self._lock:
            taken, self._operations = self._operations, []
            self._taken += len(taken)
            self._handles.clear()
        return taken

    def begin(self, kind: Kind, queue: str, **fields: Any) -> Operation:
        """Write a call that is about to begin."""
        client = threading.current_thread().name
        invoked = math.floor(self._clock.monotonic() * _SECOND_US)
        with self._lock:
            number = self._taken + len(self._operations)
            operation = Operation(number=number, client=client, kind=kind, queue=queue, invoked=invoked, **fields)
            self._operations.append(operation)
            self._write(operation)
        return operation

    def end(self, begun: Operation, outcome: Outcome, **fields: Any) -> None:
        """Write its answer."""
        returned = math.ceil(self._clock.monotonic() * _SECOND_US)
        operation = replace(begun, returned=returned, outcome=outcome, **fields)
        with self._lock:
            self._operations[begun.number - self._taken] = operation
            self._write(operation)

    def failed(self, begun: Operation, error: BaseException) -> None:
        """Write that it raised this."""
        refused = isinstance(error, VeilError) and not may_have_happened(error)
        self.end(begun, Outcome.FAIL if refused else Outcome.INFO, why=f"{type(error).__name__}: {error}")

    def grant(self, handle: str) -> int:
        """The number of a new lease with this handle."""
        with self._lock:
            self._leases += 1
            self._handles[handle] = (self._leases, 0)
            return self._leases

    def replaced(self, handle: str, lease: int, rotation: int) -> None:
        """Note a handle that an extend returned."""
        with self._lock:
            self._handles[handle] = (lease, rotation)

    def lease_of(self, handle: str) -> dict[str, int]:
        """Lease and rotation of a handle, as fields of an operation. Raises ParameterInvalid for one that did not come
        through this recording."""
        with self._lock:
            if handle not in self._handles:
                raise ParameterInvalid(parameter="handle", reason="did not come through this recording")
            lease, rotation = self._handles[handle]
        return {"lease": lease, "rotation": rotation}

    def _write(self, operation: Operation) -> None:
        if self._file is not None:
            self._file.write(encoded(operation))


class Recorded(Wrapping):
    """`queue`, with every send, receive, extend, release and delete in `recording`."""

    def __init__(self, queue: Queue, recording: Recording) -> None:
        super().__init__(queue)
        self.recording = recording

    def send(self, message: str | Message) -> Sent:
        with self._recorded([self._sending(message)]) as (begun,):
            sent = self.inner.send(message)
            self._sent(begun, sent)
        return sent

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        with self._recorded([self._sending(each) for each in messages]) as all_begun:
            answers = self.inner.send_batch(messages)
            for begun, answer in zip(all_begun, answers, strict=True):
                if isinstance(answer, VeilError):
                    self.recording.failed(begun, answer)
                else:
                    self._sent(begun, answer)
        return answers

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        with self._recorded([self.recording.begin(Kind.RECEIVE, self.name)]) as (begun,):
            messages = self.inner.receive(count_max, lease=lease, wait=wait)
            grants = tuple(self._grant(begun, message) for message in messages)
            self.recording.end(begun, Outcome.OK, grants=grants)
        return messages

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        with self._recorded([self._extending(handle, lease, body)]) as (begun,):
            answer = self.inner.extend(handle, lease, body=body)
            self._extended(begun, handle, answer)
        return answer

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        with self._recorded([self._extending(each.handle, each.lease, None) for each in extensions]) as all_begun:
            answers = self.inner.extend_batch(extensions)
            for begun, extension, answer in zip(all_begun, extensions, answers, strict=True):
                if isinstance(answer, VeilError):
                    self.recording.failed(begun, answer)
                else:
                    self._extended(begun, extension.handle, answer)
        return answers

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        fields = self.recording.lease_of(handle)
        rotates = self.capabilities.receipts_rotate
        begun = self.recording.begin(Kind.RELEASE, self.name, lease_us=_us(delay), rotates=rotates, **fields)
        with self._recorded([begun]):
            self.inner.release(handle, delay, failure=failure)
            self.recording.end(begun, Outcome.OK)

    def delete(self, handle: str) -> None:
        begun = self.recording.begin(Kind.DELETE, self.name, **self.recording.lease_of(handle))
        with self._recorded([begun]):
            self.inner.delete(handle)
            self.recording.end(begun, Outcome.OK)

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        leases = [self.recording.lease_of(each) for each in handles]
        with self._recorded([self.recording.begin(Kind.DELETE, self.name, **each) for each in leases]) as all_begun:
            answers = self.inner.delete_batch(handles)
            for begun, answer in zip(all_begun, answers, strict=True):
                if answer is None:
                    self.recording.end(begun, Outcome.OK)
                else:
                    self.recording.failed(begun, answer)
        return answers

    def drain(self, wait: float = 0, times: int = 1) -> int:
        """Receive and delete until nothing comes, and write that this was all; return the number of messages. All
        leases and delays must have ended before.

        Nothing comes if that many receives in a row, each of which waits so many seconds, return nothing. One that does
        not wait is enough for VeilMQ; Amazon's answer to it may be empty although there are messages. If a call fails,
        nothing is claimed.
        """
        begun = self.recording.begin(Kind.DRAIN, self.name)
        count = nothing = 0
        while nothing < times:
            messages = self.receive(self.capabilities.receive_messages_max, wait=wait)
            nothing = 0 if messages else nothing + 1
            count += len(messages)
            for message in messages:
                with suppress(LeaseError):  # the lease ended before: it comes again
                    self.delete(message.handle)
        self.recording.end(begun, Outcome.OK)
        return count

    @contextmanager
    def _recorded(self, begun: list[Operation]) -> Iterator[list[Operation]]:
        try:
            yield begun
        except BaseException as error:
            for each in begun:
                self.recording.failed(each, error)
            raise

    def _sending(self, message: str | Message) -> Operation:
        sent = Message(message) if isinstance(message, str) else message
        return self.recording.begin(
            Kind.SEND,
            self.name,
            body=_digest(sent.body),
            delay_us=_us(sent.delay or 0),
            ttl_us=None if sent.ttl is None else _us(sent.ttl),
            group=sent.group,
            deduplication=sent.deduplication_id,
        )

    def _sent(self, begun: Operation, sent: Sent) -> None:
        lease = None if sent.handle is None else self.recording.grant(sent.handle)
        self.recording.end(begun, Outcome.OK, message=sent.id, sequence=sent.sequence_number, lease=lease)

    def _grant(self, begun: Operation, message: Received) -> Grant:
        return Grant(
            message=message.id,
            lease=self.recording.grant(message.handle),
            lease_us=max(0, math.floor(message.lease_end * _SECOND_US) - begun.invoked),
            body=_digest(message.body),
            count=message.receive_count,
            group=message.group,
            deduplication=message.deduplication_id,
            sequence=message.sequence_number,
        )

    def _extending(self, handle: str, lease: float, body: str | None) -> Operation:
        return self.recording.begin(
            Kind.EXTEND,
            self.name,
            lease_us=_us(lease),
            body="" if body is None else _digest(body),
            rotates=self.capabilities.receipts_rotate,
            **self.recording.lease_of(handle),
        )

    def _extended(self, begun: Operation, handle: str, answer: str) -> None:
        if answer != handle and begun.lease is not None:
            self.recording.replaced(answer, begun.lease, begun.rotation + 1)
        self.recording.end(begun, Outcome.OK, rotates=begun.rotates and answer != handle)


def _us(seconds: float) -> int:
    return math.floor(seconds * _SECOND_US)


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
