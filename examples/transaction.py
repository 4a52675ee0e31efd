"""A local operation and its message: both or neither, with document 002's names (TransactionMessageDemo)."""

from veilmq.client.documents import Message, MNSClient, QueueMeta
from veilmq.testing.local import LocalServer

accounts = {"alice": 100, "bob": 0}


class Checker:
    """Asked about a transaction that nobody finished: here the ledger says."""

    def checkTransactionStatus(self, message: Message) -> bool:
        return message.getMessageBody() in done


class Transfer:
    """The local transaction."""

    def doTransaction(self, message: Message) -> bool:
        sender, receiver, amount = message.getMessageBody().split()
        if accounts[sender] < int(amount):
            return False
        accounts[sender] -= int(amount)
        accounts[receiver] += int(amount)
        done.add(message.getMessageBody())
        return True


done: set[str] = set()
with LocalServer.temporary() as server, server.account() as account:
    client = MNSClient(account)
    meta = QueueMeta()
    meta.setQueueName("transfers")
    queue = client.createTransQueue(meta, Checker())
    print("alice pays 60:", queue.sendTransMessage(Message("alice bob 60"), Transfer()))
    print("alice pays 60 again:", queue.sendTransMessage(Message("alice bob 60 "), Transfer()))
    print("accounts:", accounts)
    while (message := queue.popMessage()) is not None:
        print("told of:", message.getMessageBody())
        queue.deleteMessage(message.getReceiptHandle())
    queue.delete()
