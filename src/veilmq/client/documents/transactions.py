"""TransactionQueue, TransactionOperations and TransactionChecker (document 002, transaction messages).

Strategy: ours is the pattern of the same name. The samples' True and False are COMMIT and ROLLBACK; a checker may
also answer `Verdict.UNKNOWN` to be asked again. The SDK's version, which its authors withdrew for losing messages,
swallows a failed commit and deletes the log; ours keeps the log entry until the message is out.
"""

from typing import Protocol

from veilmq.client import checked
from veilmq.client.documents.exceptions import documented
from veilmq.client.documents.messages import Message, Sendable, outgoing
from veilmq.client.documents.queues import MessageQueue
from veilmq.client.queue import Account, Queue
from veilmq.client.transaction import Times
from veilmq.client.transaction import queue as ours
from veilmq.client.transaction.entry import Prepared, Verdict


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
        self, account: Account, queue: Queue, log: Queue, checker: TransactionChecker, times: Times | None = None
    ) -> None:
        """Raises ParameterInvalid for times or queues that would lose a message."""
        checked.function(getattr(checker, "checkTransactionStatus", None), "checker")
        self._account = account
        self.queue = ours.TransactionQueue(
            queue, log, lambda prepared: checker.checkTransactionStatus(_message(prepared)), times=times
        )
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
        """End the checker and delete both queues."""
        self.queue.checker.close()
        self._account.delete(self.queue.inner.name)
        self._account.delete(self.queue.log.name)


def _message(prepared: Prepared) -> Message:
    message = Message(prepared.message.body)
    message.receipt_handle = prepared.id
    return message
