"""The manager (documents 000 and 002), which extends messages while they are worked on; MessageReceiver (document 002).

Strategy: ours are LeaseKeeper and Receiver.
"""

from veilmq.client.closing import Closing
from veilmq.client.documents.messages import Message
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.keeper.lease import Lease
from veilmq.client.queue import Queue
from veilmq.client.receiver import Receiver


class Manager(Closing):
    """Changes visibility in time, until a message is deleted or MessageTimeout is over."""

    def __init__(
        self,
        queue: Queue,
        MessageMinimalLife: float = 10,
        TimerInterval: float = 10,
        QueueMessageVisibilityTimeout: float = 300,
        MessageTimeout: float = 5 * 3_600,
    ) -> None:
        """Seconds. Raises ParameterInvalid unless the visibility timeout exceeds interval and minimal life together."""
        self.keeper = LeaseKeeper(
            queue,
            minimal_life=MessageMinimalLife,
            interval=TimerInterval,
            visibility_timeout=QueueMessageVisibilityTimeout,
            max_hold=MessageTimeout,
        )

    def RegisterMessage(self, message: Message) -> Lease:
        """Hold it from now on; do it when it is received. Raises LeaseExpired if it is too late."""
        assert message.received is not None, "only a received message can be registered"
        return self.keeper.register(message.received)

    def DeleteMessage(self, message: Message) -> None:
        """Done with it, with the newest handle."""
        assert message.received is not None, "only a received message can be deleted"
        self.keeper.delete(message.received)

    def close(self) -> None:
        """Extend no more, and release what is held."""
        self.keeper.close()


class MessageReceiver:
    """Each thread makes one of its own, over a queue object of its own or a common one: all that receive from the same
    queue in this process share one parked poll."""

    def __init__(self, queue: Queue) -> None:
        self.receiver = Receiver(queue)

    def receiveMessage(self, waitSeconds: float | None = None) -> Message | None:
        """The next message for this thread; None if none came in time. Without a wait, for ever."""
        found = self.receiver.receive(waitSeconds)
        return None if found is None else Message.of(found)
