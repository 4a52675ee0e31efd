"""TransactionQueue, TransactionOperations and TransactionChecker (document 002, transaction messages).

Strategy: ours is the pattern of the same name. The samples' True and False are COMMIT and ROLLBACK; a checker may
also answer `Verdict.UNKNOWN` to be asked again. The SDK's version, which its authors withdrew for losing messages,
swallows a failed commit and deletes the log; ours keeps the log entry until the message is out.
"""

from contextlib import ExitStack, suppress
from typing import Any, Protocol

from veilmq.client import checked
from veilmq.client.documents.exceptions import documented
from veilmq.client.documents.messages import Message, Sendable, outgoing
from veilmq.client.documents.queues import AnyQueue, MessageQueue, queue_of
from veilmq.client.queue import Account
from veilmq.client.transaction import Times
from veilmq.client.transaction import queue as ours
from veilmq.client.transaction.entry import Prepared, Verdict
from veilmq.model.errors import QueueMissing


class TransactionOperations(Protocol):
    """The local transaction."""

    def doTransaction(self, message: Message) -> bool | Verdict:
        """Do it; whether it is done. message: with its body, and its transaction's id as receipt handle."""
        ...


class TransactionChecker(Protocol):
    """Asked about a transaction that nobody finished."""

    def checkTransactionStatus(self, message: Message) -> bool | Verdict:
        """Whether it was done."""
        ...


@documented
class TransactionQueue(MessageQueue):
    """Local operation and message together, or neither. popMessage receives what was committed."""

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
    ) -> None:
        """owned: both queues are ours, and are closed with this one. Raises ParameterInvalid for times or queues that
        would lose a message."""
        check_checker(checker)
        self._account = account
        with ExitStack() as undo:
            self.queue = ours.TransactionQueue(
                undo.enter_context(queue_of(queue, owned=owned)),
                undo.enter_context(queue_of(log, owned=owned)),
                lambda prepared: checker.checkTransactionStatus(_message(prepared)),
                times=times,
            )
            undo.pop_all()
        self.queue.checker.start()

    def sendTransMessage(self, message: Sendable, operations: TransactionOperations) -> bool:
        """Do the operation and send the message; whether both are done."""
        checked.function(getattr(operations, "doTransaction", None), "operations")
        transaction = self.queue.send_transaction(
            outgoing(message), lambda prepared: operations.doTransaction(_message(prepared))
        )
        if isinstance(message, Message):
            message.message_id = transaction.id
        return transaction.outcome is ours.Outcome.COMMITTED

    def delete(self) -> None:
        """End the checker and delete both queues. Raises QueueMissing.

        The log goes first: its name is free again before the queue's, so that one that can be created has its log.
        """
        self.queue.checker.close()
        with suppress(QueueMissing):  # an earlier call got no further
            self._account.delete(self.queue.log.name)
        self._account.delete(self.queue.inner.name)


def check_checker(checker: Any) -> None:
    """Raises ParameterInvalid."""
    checked.function(getattr(checker, "checkTransactionStatus", None), "checker")


def _message(prepared: Prepared) -> Message:
    message = Message(prepared.message.body)
    message.receipt_handle = prepared.id
    return message
