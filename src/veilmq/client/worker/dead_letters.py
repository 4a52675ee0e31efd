"""Messages that no worker can work: where they go.

Strategy: send to the dead-letter queue, then delete; never the other way round. A crash in between leaves the message
in both: on a FIFO target its id absorbs the second send, elsewhere whoever looks at dead letters sees its id in
`veilmq.dead_letter.id`. A queue with a dead-letter rule of its own needs none of this: leave `poison_after` away.
"""

from typing import Any, Final

from veilmq.client.messages import Message, Received
from veilmq.client.queue import Queue
from veilmq.model.errors import CapabilityMissing, MessageTooLarge, ParameterInvalid

PREFIX: Final = "veilmq.dead_letter."
ATTRIBUTES_MAX: Final = 10
_REASON_CHARACTERS: Final = 300


class DeadLetters:
    """Sends to `target` what failed in the queue named `source`."""

    def __init__(self, source: str, target: Queue) -> None:
        self.source = source
        self.target = target

    def send(self, received: Received, reason: str) -> None:
        """Durable when this returns. Raises as `Queue.send`."""
        attributes = dict(received.attributes)
        told: dict[str, Any] = {
            "reason": "".join(each if each.isprintable() else " " for each in reason)[:_REASON_CHARACTERS] or "failed",
            "id": received.id,
            "queue": self.source,
            "receive_count": received.receive_count,
        }
        marks = {PREFIX + name: value for name, value in told.items()}
        # A message that was dead-lettered before keeps only what is told now.
        attributes = {name: value for name, value in attributes.items() if not name.startswith(PREFIX)}
        # The type travels as an attribute too.
        room = ATTRIBUTES_MAX - len(attributes) - (received.type is not None)
        marks = dict(list(marks.items())[: max(0, room)])
        try:
            self.target.send(self._message(received, attributes | marks))
        except (MessageTooLarge, ParameterInvalid, CapabilityMissing):
            # The message matters, not our notes on it.
            if not marks:
                raise
            self.target.send(self._message(received, attributes))

    def _message(self, received: Received, attributes: dict[str, Any]) -> Message:
        able = self.target.capabilities
        return Message(
            body=received.body,
            attributes=attributes if able.attributes else {},
            type=received.type if able.attributes else None,
            priority=received.priority if able.priorities else None,
            group=(received.group or received.id) if able.native_fifo else (received.group if able.groups else None),
            deduplication_id=received.id if able.native_fifo else None,
        )
