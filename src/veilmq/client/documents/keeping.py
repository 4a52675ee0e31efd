"""The manager (documents 000 and 002), which extends messages while they are being processed; MessageReceiver (document
002).

Strategy: our classes are LeaseKeeper and Receiver.
"""

import threading
from contextlib import ExitStack
from typing import Any

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.documents.queues import AnyQueue, queue_of
from veilmq.client.documents.values import Message, documented, received_of
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.keeper.lease import Lease, State
from veilmq.client.messages import Received
from veilmq.client.receiver import Receiver
from veilmq.client.shared.threads import Closing


@documented
class Manager(Closing):
    """Extends a message's visibility in time, until it is deleted or MessageTimeout is over.

    A message may be one of this package, of ours, or of an SDK (aliyun-mns-sdk, boto3, azure-storage-queue).
    """

    def __init__(
        self,
        queue: AnyQueue,
        MessageMinimalLife: float = 10,
        TimerInterval: float = 10,
        QueueMessageVisibilityTimeout: float = 300,
        MessageTimeout: float = 5 * 3_600,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        """Seconds. Raises ParameterInvalid unless the visibility timeout exceeds interval and minimal life together."""
        with ExitStack() as undo:
            self.keeper = LeaseKeeper(
                undo.enter_context(queue_of(queue)),
                minimal_life=MessageMinimalLife,
                interval=TimerInterval,
                visibility_timeout=QueueMessageVisibilityTimeout,
                max_hold=MessageTimeout,
                clock=clock,
            )
            undo.pop_all()
        self._leases: dict[str, Lease] = {}
        """By the handle of the receive; finished leases are removed at the next call."""
        self._lock = threading.Lock()

    def RegisterMessage(self, message: Message | Received | Any) -> Lease:
        """Extend it from now on; call this right after the receive. Raises LeaseExpired if it is too late."""
        received = received_of(message)
        lease = self.keeper.register(received)
        with self._lock:
            if len(self._leases) > 2 * self.keeper.leases:
                self._leases = {key: each for key, each in self._leases.items() if each.state not in _ENDED}
            self._leases[received.handle] = lease
        return lease

    def DeleteMessage(self, message: Message | Received | Any) -> None:
        """Delete a finished message by its newest handle; one that is not registered, by the handle of its receive.

        Raises as `Queue.delete`.
        """
        received = received_of(message)
        with self._lock:
            lease = self._leases.get(received.handle)
        if lease is None:
            self.keeper.queue.delete(received.handle)
            return
        self.keeper.delete(lease)
        with self._lock:
            self._leases.pop(received.handle, None)

    def ChangeMessageVisibility(self, message: Message | Received | Any) -> bool:
        """Run one ChangeVisibilityTask for this message; return whether its visibility was changed."""
        return ChangeVisibilityTask(self, message).Run()

    def held(self, message: Message | Received | Any) -> Lease | None:
        """The lease of a registered message, unless it was deleted or given up."""
        with self._lock:
            lease = self._leases.get(received_of(message).handle)
        return None if lease is None or lease.state in _ENDED else lease

    def registerMessage(self, message: Message | Received | Any) -> Lease:
        """RegisterMessage."""
        return self.RegisterMessage(message)

    def deleteMessage(self, message: Message | Received | Any) -> None:
        """DeleteMessage, as document 002 writes it."""
        self.DeleteMessage(message)

    def close(self) -> None:
        """Stop extending, and release all leases. The caller's queue stays open."""
        self.keeper.close()
        self.keeper.queue.close()


_ENDED = (State.DONE, State.LOST)


@documented
class ChangeVisibilityTask:
    """One check of one registered message: the document's flowchart (docs/images/keeper-flow.svg).

    The manager checks by itself, at the registration and then in time; this is for an additional check.
    """

    def __init__(self, manager: Manager, message: Message | Received | Any) -> None:
        self._manager = manager
        self._message = message

    def Run(self) -> bool:
        """Change the visibility if that is due; return whether it was. Raises as `Lease.extend`."""
        lease = self._manager.held(self._message)
        if lease is None:
            return False
        parameters = self._manager.keeper.parameters
        if lease.remaining() > parameters.interval + parameters.minimal_life:
            return False
        lease.extend(parameters.visibility_timeout)
        return True


@documented
class MessageReceiver(Closing):
    """Each thread creates its own, over its own queue object or a shared one. All receivers of the same queue in this
    process share one long poll."""

    def __init__(self, queue: AnyQueue) -> None:
        self._queue = queue_of(queue)
        self.receiver = Receiver(self._queue)

    def receiveMessage(self, waitSeconds: float | None = None) -> Message | None:
        """The next message for this thread; None if none came in time. Without a wait, waits for ever."""
        found = self.receiver.receive(waitSeconds)
        return None if found is None else Message.of(found)

    def close(self) -> None:
        """Waiting callers get None at once. The caller's queue and the other receivers stay open."""
        self.receiver.close()
        self._queue.close()
