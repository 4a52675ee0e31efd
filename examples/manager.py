"""The documents' worker (documents 000 and 002): receive, register, process, delete by the manager.

The queue's visibility timeout is short, the work takes longer, and nobody else sees the message meanwhile. A worker
that crashes is followed by another one after that short timeout.
"""

import time

from veilmq.client.documents import CloudAccount, Manager, Message, QueueMeta
from veilmq.testing.local import LocalServer

TIMEOUT = 3

with LocalServer.temporary() as server:
    client = CloudAccount("id", "secret", server.mns_url).getMNSClient()
    queueMeta = QueueMeta()
    queueMeta.setQueueName("jobs")
    queueMeta.setVisibilityTimeout(TIMEOUT)
    queue = client.createQueue(queueMeta)
    queue.putMessage(Message("M1"))
    crashed = Manager(queue, MessageMinimalLife=1, TimerInterval=1, QueueMessageVisibilityTimeout=TIMEOUT)
    message = queue.popMessage(30)
    assert message is not None
    crashed.RegisterMessage(message)
    crashed.keeper.close(release=False)  # what a crash leaves behind: a lease that nobody extends
    died = time.monotonic()

    manager = Manager(queue, MessageMinimalLife=1, TimerInterval=1, QueueMessageVisibilityTimeout=TIMEOUT)
    message = queue.popMessage(30)
    assert message is not None
    manager.RegisterMessage(message)
    print(f"after the crash received again within {TIMEOUT + 1} s: {time.monotonic() - died < TIMEOUT + 1}")
    others = 0
    for _ in range(3 * TIMEOUT):
        time.sleep(1)  # the work
        others += queue.popMessage(0) is not None
    print(f"worked {3 * TIMEOUT} s with a timeout of {TIMEOUT} s, others saw it: {others} times")
    manager.deleteMessage(message)
    time.sleep(TIMEOUT)
    print("left:", "nothing" if queue.popMessage(0) is None else "the message")
    manager.close()
    client.close()
