"""What a queue can do, as data: patterns choose their form by these fields and never ask which cloud it is."""

from enum import StrEnum

import msgspec


class HandleOnSend(StrEnum):
    """When a send returns a handle."""

    NEVER = "never"
    DELAYED = "delayed"
    ALWAYS = "always"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and abilities of one adapter's queue. An ability that is not named is not there. Durations in
    seconds, sizes in bytes as transmitted."""

    protocol: str
    """`embedded`, `veil`, `sqs`, `azure` or `mns`: for messages to people only."""
    body_bytes_max: int
    """Largest `transmitted_bytes(body)`: with `base64_body` the caller's own bytes are three quarters of it."""
    batch_messages_max: int
    """Largest send_batch and delete_batch that is one request; longer ones are split."""
    receive_messages_max: int
    lease_min: float
    """Shortest lease that a receive may name, above 0."""
    lease_max: float
    lease_total_max: float | None = None
    """Cap on all extensions together, from the receive (SQS: 12 h)."""
    wait_max: float
    """Longest wait of one request; longer waits are refused, 0 never waits."""
    delay_max: float
    batch_extend: bool = False
    """One request extends many."""
    receipts_rotate: bool = False
    """An extend voids the handle it was given."""
    handle_on_send: HandleOnSend = HandleOnSend.NEVER
    body_replaceable: bool = False
    retention_below_delay: bool = False
    """A message may expire before its delay ends."""
    base64_body: bool = False
    """The adapter encodes bodies, so that four bytes travel for three."""
    attributes: bool = False
    peek: bool = False
    priorities: bool = False
    ttl: bool = False
    groups: bool = False
    """Message groups on this queue (FIFO, or a fair standard queue)."""
    native_fifo: bool = False
    """This queue is a FIFO queue: group order, deduplication."""
    native_topics: bool = False
    lease_hints: bool = False
    """Receives that name no lease honour the sender's hint."""
    tags: bool = False
    """A message may have a tag of its own."""
    body_bytes_min: int = 1
    """0 where an empty body can be sent."""
    extends_late: bool = False
    """An extend after the lease's end is granted if nobody else received the message since, and refused if somebody
    did: then an answer without an error means that the message is held."""
    release_min: float = 0
    """Shortest delay of a release: what is released sooner is visible after this (MNS: 1 s)."""

    def transmitted_bytes(self, body: str) -> int:
        """Bytes of `body` as they travel: UTF-8, after base64 where the adapter encodes."""
        size_bytes = len(body.encode())
        return (size_bytes + 2) // 3 * 4 if self.base64_body else size_bytes
