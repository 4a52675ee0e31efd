"""TransactionQueue, TransactionOperations and TransactionChecker (document 002, transaction messages).

Strategy: ours is the pattern of the same name. The samples' True and False are COMMIT and ROLLBACK; a checker may
also answer `Verdict.UNKNOWN` to be asked again. The SDK's version, which its authors withdrew for losing messages,
swallows a failed commit and deletes the log; ours keeps the log entry until the message is out.
"""

from typing import Protocol

from veilmq.client.closing import Closing
from veilmq.client.documents.messages import Message
from veilmq.client.queue import Account, Queue
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


class TransactionQueue(Closing):
    """Local operation and message together, or neither."""

    def __init__(self, account: Account, queue: Queue, log: Queue, checker: TransactionChecker) -> None:
        self._account = account
        self.queue = ours.TransactionQueue(
            queue, log, lambda prepared: checker.checkTransactionStatus(_message(prepared))
        )
        self.queue.checker.start()

    def sendTransMessage(self, message: Message, operations: TransactionOperations) -> bool:
        """Do the operation and send the message; whether both are done."""
        transaction = self.queue.send_transaction(
            message.message_body, lambda prepared: operations.doTransaction(_message(prepared))
        )
        message.message_id = transaction.id
        return transaction.outcome is ours.Outcome.COMMITTED

    def popMessage(self, waitSeconds: float = 0) -> Message | None:
        """Receive one message of a transaction that was committed; None if nothing came."""
        found = self.queue.receive(wait=waitSeconds)
        return Message.of(found[0]) if found else None

    def deleteMessage(self, receiptHandle: str) -> None:
        """Done with it."""
        self.queue.delete(receiptHandle)

    def close(self) -> None:
        """End the checker, and let both queues go: what is undecided is asked about by the next checker."""
        self.queue.close()

    def delete(self) -> None:
        """End the checker and delete both queues."""
        self.queue.checker.close()
        self._account.delete(self.queue.inner.name)
        self._account.delete(self.queue.log.name)


def _message(prepared: Prepared) -> Message:
    message = Message(prepared.message.body)
    message.receipt_handle = prepared.id
    return message
