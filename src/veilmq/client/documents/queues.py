"""The queues that the documents' classes accept, and the classes that wrap one queue: MessageQueue with its security,
large, transaction and ordered forms.

Strategy: a parameter that takes a queue takes any: one of ours, a class of this package, or an SDK's own queue object.
Each class here wraps one queue of ours, `queue`, so they can be stacked.

Encryption: our class is EncryptedQueue. It has a standard format (JWE), binds messages to their queue's name, and its
keys can be rotated. A plain-text message that somebody sent by mistake does not stop the queue.

Large messages: our class is LargeMessageQueue. `ossClient` is a URL up to the bucket (`s3://`, `oss://`,
`file:///directory`), because fsspec provides the object store; `ossBucketName` is appended.

Transactions: our class is the pattern of the same name. The samples' True and False mean COMMIT and ROLLBACK; a checker
may also return `Verdict.UNKNOWN` to be asked again. The SDK's version, which its authors withdrew because it lost
messages, ignores a failed commit and deletes the log entry; ours keeps the entry until the message is sent.

Order: our class is OrderedQueue with the document's own marking, `#num#`. The sample deletes a message before it
returns it, and a crash loses the message. Here a message is acknowledged when the program goes on without an error: by
the next ReceiveMessageInOrder, by DeleteMessage, by `close`, or by the normal end of the program. A program that ends
by an exception or is killed has not acknowledged the message, and gets it again.
"""

import atexit
import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from msgspec.structs import replace

from veilmq.client import transaction as ours
from veilmq.client.adapters.connect import connect
from veilmq.client.documents.values import Message, Sendable, documented, outgoing
from veilmq.client.encrypted import EncryptedQueue
from veilmq.client.encrypted.keys import ALGORITHMS, Key, KeyFile, Keys, add_key, new_key
from veilmq.client.large import LargeMessageQueue
from veilmq.client.messages import Template
from veilmq.client.ordered import OrderedQueue
from veilmq.client.ordered.storage import LocalFile, Storage
from veilmq.client.queue import Account, Capabilities, Queue
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Closing
from veilmq.client.transaction import Times
from veilmq.client.transaction.logbook import Prepared, Verdict
from veilmq.client.unreadable import DeadLetters, Policy, keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import LeaseError, ParameterInvalid, QueueMissing, ReceiptInvalid, VeilError

SQS_WAIT_SECONDS_MAX: Final = 20
"""Longest wait that a queue of SQS, or of a server through its SQS port, can be created with."""

Made = TypeVar("Made")
_logged: set[str] = set()
_lock = threading.Lock()
log = logging.getLogger("veilmq.documents")


class OverQueue(Closing):
    """A class of this package that wraps a queue of ours."""

    queue: Queue


AnyQueue = Queue | OverQueue | Any
"""Also an SDK's queue object: mns.queue.Queue, boto3's sqs.Queue, Azure's QueueClient."""


class _Lent(Wrapping):
    """The caller's queue: closing its wrapper leaves it open."""

    def close(self) -> None:
        """Does nothing: the caller closes the queue."""


def queue_of(source: AnyQueue, *, owned: bool = False, parameter: str = "queue") -> Queue:
    """Our queue for `source`. Closing it closes only what was opened here: our queue over an SDK's object; with
    `owned`, also the given queue.

    Raises ParameterInvalid if it is not a queue, and as `connect` does.
    """
    if isinstance(source, OverQueue):
        source = source.queue
    if callable(getattr(source, "extend_batch", None)):
        ours: Queue = source
        return ours if owned else _Lent(ours)
    if isinstance(source, str):
        raise ParameterInvalid(parameter=parameter, reason="must be a queue, not text: veilmq.connect(url) gives one")
    try:
        return connect(source)
    except ParameterInvalid as error:
        named = parameter if error.parameter == "source" else error.parameter
        raise ParameterInvalid(parameter=named, reason=error.reason) from error


def wait_within(capabilities: Capabilities, seconds: float) -> float:
    """`seconds`, or the longest wait that the protocol has."""
    if checks.seconds(seconds, "waitSeconds", 0, math.inf) <= capabilities.wait_max:
        return seconds
    _log_once(
        f"{capabilities.protocol} waits {capabilities.wait_max:g} s at most: a wait of {seconds:g} s is lowered to that"
    )
    return capabilities.wait_max


def with_wait_within(template: Template, make: Callable[[Template], Made]) -> Made:
    """`make(template)`; if the protocol refuses the polling wait, again with SQS's longest."""
    try:
        return make(template)
    except ParameterInvalid:
        if template.wait is None or template.wait <= SQS_WAIT_SECONDS_MAX:
            raise
        made = make(replace(template, wait=SQS_WAIT_SECONDS_MAX))
    _log_once(
        f"a queue's polling wait is {SQS_WAIT_SECONDS_MAX} s at most here: {template.wait:g} s is lowered to that"
    )
    return made


def _log_once(line: str) -> None:
    with _lock:
        if line in _logged:
            return
        _logged.add(line)
    log.warning("%s (logged once)", line)


@documented
class MessageQueue(OverQueue):
    """putMessage, popMessage, peekMessage and deleteMessage over `queue`."""

    _dead_letters: Queue | None = None

    def putMessage(self, message: Sendable) -> Message:
        """Send; return the message with its id, and with its handle where the protocol gives one."""
        sent = self.queue.send(outgoing(message))
        put = message if isinstance(message, Message) else Message.like(message)
        put.message_id = sent.id
        put.receipt_handle = sent.handle or ""
        return put

    def popMessage(self, waitSeconds: float = 0) -> Message | None:
        """Receive one message within the wait; None if none came (the SDK's MessageNotExist)."""
        found = self.queue.receive(wait=wait_within(self.queue.capabilities, waitSeconds))
        return Message.of(found[0]) if found else None

    def peekMessage(self) -> Message | None:
        """The next message, without a lease; None if there is none. CapabilityMissing where the protocol has no
        peek."""
        found = self.queue.peek()
        return Message.peeked(found[0]) if found else None

    def deleteMessage(self, receiptHandle: str) -> None:
        """Delete a finished message."""
        self.queue.delete(receiptHandle)

    def changeMessageVisibilityTimeout(self, receiptHandle: str, visibilityTimeout: float) -> str:
        """Let the lease end after that many seconds; 0 gives the message back. Returns the handle to use next."""
        if visibilityTimeout == 0:
            self.queue.release(receiptHandle)
            return receiptHandle
        return self.queue.extend(receiptHandle, visibilityTimeout)

    def close(self) -> None:
        """Close what this object opened; the caller's queue stays open."""
        self.queue.close()
        if self._dead_letters is not None:
            self._dead_letters.close()

    def _set_aside(self) -> Policy:
        """The policy for messages that cannot be read."""
        return keep if self._dead_letters is None else DeadLetters(self._dead_letters)


_DEFAULT: Final = "A256GCM"
_JAVA: Final = {"AES": _DEFAULT, "AES/GCM/NOPADDING": _DEFAULT}
"""Java's name, in upper case -> ours."""
_WEAK: Final = frozenset({"DES", "DESEDE", "TRIPLEDES", "BLOWFISH", "RC2", "RC4", "ARCFOUR"})


def _algorithm_of(name: Any) -> str:
    """Our name of the algorithm; accepts Java's names, too. Raises ParameterInvalid."""
    if not isinstance(name, str):
        raise ParameterInvalid(parameter="algorithm", reason=f"must be text, not {type(name).__name__}")
    ours = _JAVA.get(name.upper(), name)
    if ours in ALGORITHMS:
        return ours
    why = "is too weak and not offered" if name.upper() in _WEAK else "is not offered"
    reason = f"{name[:40]} {why}: take AES (which is {_DEFAULT}), or one of {', '.join(ALGORITHMS)}"
    raise ParameterInvalid(parameter="algorithm", reason=reason)


class SecurityKeyGenerator:
    """Generates keys. algorithm: one of ours, or Java's AES, which is A256GCM."""

    @staticmethod
    def generate(algorithm: str = _DEFAULT) -> Key:
        """A new key, in memory. Raises ParameterInvalid."""
        return new_key(_algorithm_of(algorithm))

    @staticmethod
    def generateToFile(path: str | Path, algorithm: str = _DEFAULT) -> KeyFile:
        """A new key in a file of mode 0600; its older keys can still decrypt. Raises ParameterInvalid."""
        add_key(path, new_key(_algorithm_of(algorithm)))
        return KeyFile(path)


@documented
class SecurityQueue(MessageQueue):
    """putMessage encrypts, popMessage decrypts."""

    def __init__(
        self,
        queue: AnyQueue,
        key: Key | Keys | KeyFile,
        algorithm: str | AnyQueue | None = None,
        deadLetterQueue: AnyQueue | None = None,
    ) -> None:
        """algorithm: the only one allowed; None: the one that each key was generated for. deadLetterQueue: where
        messages go that cannot be decrypted; without one they stay in the queue and come again. The third argument may
        also be the dead-letter queue.

        Raises ParameterInvalid, also if the newest key is for another algorithm.
        """
        if algorithm is not None and not isinstance(algorithm, str):
            if deadLetterQueue is not None:
                raise ParameterInvalid(parameter="algorithm", reason=f"must be text, not {type(algorithm).__name__}")
            algorithm, deadLetterQueue = None, algorithm
        allowed = ALGORITHMS if algorithm is None else (_algorithm_of(algorithm),)
        with ExitStack() as undo:
            inner = undo.enter_context(queue_of(queue))
            if deadLetterQueue is not None:
                self._dead_letters = undo.enter_context(queue_of(deadLetterQueue, parameter="deadLetterQueue"))
            keys = Keys(key) if isinstance(key, Key) else key
            self.queue = EncryptedQueue(inner, keys, unreadable=self._set_aside(), algorithms=allowed)
            undo.pop_all()


@documented
class BigMessageSizeQueue(MessageQueue):
    """Large bodies go to the object store; small ones go through the queue unchanged."""

    queue: LargeMessageQueue

    def __init__(
        self, cq: AnyQueue, ossClient: str, ossBucketName: str, deadLetterQueue: AnyQueue | None = None
    ) -> None:
        """deadLetterQueue: where messages go whose object is missing or damaged; without one they stay in the queue and
        come again."""
        ossClient = checks.text(ossClient, "ossClient")
        with ExitStack() as undo:
            inner = undo.enter_context(queue_of(cq, parameter="cq"))
            if deadLetterQueue is not None:
                self._dead_letters = undo.enter_context(queue_of(deadLetterQueue, parameter="deadLetterQueue"))
            place = f"{ossClient.rstrip('/')}/{ossBucketName}"
            self.queue = LargeMessageQueue(inner, place, unreadable=self._set_aside())
            undo.pop_all()

    def setBigMessageSize(self, bigMessageSize: int) -> None:
        """Bytes above which a body goes to the object store; default 64 KiB."""
        self.queue.threshold_bytes = checks.at_least(bigMessageSize, "bigMessageSize", 0)

    def setNeedDeleteMessageObjectOnOSSFlag(self, flag: bool) -> None:
        """Whether a delete also deletes the object; default yes."""
        self.queue.delete_object = flag


class TransactionOperations(Protocol):
    """The local transaction."""

    def doTransaction(self, message: Message) -> bool | Verdict:
        """Do it; return whether it is done. message: has its body, and the transaction's id as receipt handle."""


class TransactionChecker(Protocol):
    """Asked about unfinished transactions."""

    def checkTransactionStatus(self, message: Message) -> bool | Verdict:
        """Whether it was done."""


@documented
class TransactionQueue(MessageQueue):
    """A local operation and its message: both happen or neither does. popMessage receives committed messages."""

    queue: ours.TransactionQueue

    def __init__(
        self,
        account: Account,
        queue: AnyQueue,
        log: AnyQueue,
        checker: TransactionChecker,
        times: Times | None = None,
        *,
        owned: bool = False,
        parked: AnyQueue | None = None,
    ) -> None:
        """owned: close both queues with this object. parked: for what stays undecided, where a log is encrypted or
        large. Raises ParameterInvalid for times or queues that would lose a message."""
        check_checker(checker)
        self._account = account
        with ExitStack() as undo:
            self.queue = ours.TransactionQueue(
                undo.enter_context(queue_of(queue, owned=owned)),
                undo.enter_context(queue_of(log, owned=owned, parameter="log")),
                lambda prepared: checker.checkTransactionStatus(_message(prepared)),
                times=times,
                parked=None if parked is None else queue_of(parked, parameter="parked"),
            )
            undo.pop_all()
        self.queue.checker.start()

    def sendTransMessage(self, message: Sendable, operations: TransactionOperations) -> bool:
        """Do the operation and send the message; return whether both are done."""
        checks.function(getattr(operations, "doTransaction", None), "operations")
        transaction = self.queue.send_transaction(
            outgoing(message), lambda prepared: operations.doTransaction(_message(prepared))
        )
        if isinstance(message, Message):
            message.message_id = transaction.id
        return transaction.outcome is ours.Outcome.COMMITTED

    def delete(self) -> None:
        """End the checker and delete both queues. Raises QueueMissing.

        The log goes first, so its name becomes free before the queue's: whenever the queue can be created again, its
        log can be, too.
        """
        self.queue.checker.close()
        with suppress(QueueMissing):  # an earlier call may have stopped halfway
            self._account.delete(self.queue.log.name)
        self._account.delete(self.queue.inner.name)


def check_checker(checker: Any) -> None:
    """Raises ParameterInvalid."""
    checks.function(getattr(checker, "checkTransactionStatus", None), "checker")


def _message(prepared: Prepared) -> Message:
    message = Message(prepared.message.body)
    message.receipt_handle = prepared.id
    return message


log = logging.getLogger("veilmq.documents")


class LocalDiskStorage(LocalFile):
    """Sequence numbers in a local file: `{"localFileName": path}`."""

    def __init__(self, config: Mapping[str, str]) -> None:
        super().__init__(checks.path(checks.mapping(config, "config").get("localFileName"), "localFileName"))


@documented
class OrderedQueueWrapper(OverQueue):
    """Strict order over a queue that is only roughly ordered: one sending and one receiving process."""

    queue: OrderedQueue

    def __init__(
        self,
        queue: AnyQueue,
        sendSeqIdPersistStorage: Storage | None = None,
        receiveSeqIdPersistStorage: Storage | None = None,
    ) -> None:
        """Raises what `OrderedQueue` raises: a second process on the same storage, a queue that was created again."""
        with ExitStack() as undo:
            self.queue = OrderedQueue(
                undo.enter_context(queue_of(queue)),
                send_storage=sendSeqIdPersistStorage,
                receive_storage=receiveSeqIdPersistStorage,
                marking="#num#",
            )
            undo.pop_all()
        self._handed: str | None = None
        """Handle of the message that was returned last, until it is acknowledged."""
        self._by: threading.Thread | None = None
        """The thread that received it."""

    def SendMessageInOrder(self, message: Sendable) -> Message:
        """Send it after everything that was sent before."""
        sent = self.queue.send(outgoing(message))
        put = message if isinstance(message, Message) else Message.like(message)
        put.message_id = sent.id
        return put

    def ReceiveMessageInOrder(self, wait_seconds: float = 0) -> Message | None:
        """The next message in order, within the wait; None if none came. Acknowledges the previous one."""
        self._acknowledge()
        _AT_EXIT.add(self)
        found = self.queue.receive(wait=wait_seconds)
        if not found:
            return None
        self._handed, self._by = found[0].handle, threading.current_thread()
        return Message.of(found[0])

    def DeleteMessage(self, message: Message) -> None:
        """Acknowledge it now instead of at the next receive."""
        self.queue.delete(message.receipt_handle)
        if self._handed == message.receipt_handle:
            self._handed = None

    def close(self) -> None:
        """Acknowledge the message that was returned last, and close the storages; the caller's queue stays open.

        While an exception is being handled (in its `except` or `finally`, or at the end of a `with` that it leaves) the
        message is not acknowledged, and comes again.
        """
        try:
            if sys.exc_info()[0] is None:
                self._acknowledge()
        finally:
            self._handed = None
            _AT_EXIT.discard(self)
            self.queue.close()

    def _acknowledge(self) -> None:
        """A failed acknowledgement is retried at the next call; nothing else is returned until it succeeds."""
        if self._handed is None:
            return
        try:
            self.queue.delete(self._handed)
        except (LeaseError, ReceiptInvalid):
            self._handed = None
            raise
        self._handed = None

    def _end(self, failed: bool) -> None:
        """The program ends. A message that another thread received may still be in work, so it is not acknowledged."""
        try:
            if not failed and self._by is threading.main_thread():
                self._acknowledge()
        finally:
            self.queue.receiver.close()


class _AtExit:
    """Closes the receiving wrappers when the interpreter ends, so that the next program need not wait."""

    def __init__(self) -> None:
        self._wrappers: dict[int, OrderedQueueWrapper] = {}

    def add(self, wrapper: OrderedQueueWrapper) -> None:
        """Close it at the end, before objects that were opened earlier."""
        if id(wrapper) not in self._wrappers:
            self._wrappers[id(wrapper)] = wrapper
            atexit.unregister(self.run)
            atexit.register(self.run)

    def discard(self, wrapper: OrderedQueueWrapper) -> None:
        """Forget a wrapper that was closed."""
        self._wrappers.pop(id(wrapper), None)

    def run(self) -> None:
        """Called when the interpreter ends; `sys.last_value` holds an exception that ended the program."""
        for wrapper in list(self._wrappers.values()):
            if wrapper.queue.receiver.inherited:
                continue  # belongs to the process from which this one was forked
            try:
                wrapper._end(failed=hasattr(sys, "last_value"))
            except (VeilError, OSError) as error:
                log.warning("the message received last may come again: %s", error)


_AT_EXIT: Final = _AtExit()
