"""What a queue can do, as data: a pattern chooses its behaviour by these fields and never asks which cloud it is on."""

from enum import StrEnum

import msgspec


class HandleOnSend(StrEnum):
    """When a send returns a handle."""

    NEVER = "never"
    DELAYED = "delayed"
    ALWAYS = "always"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and abilities of one adapter's queue. An ability that is not set is absent. Durations in seconds, sizes in
    bytes as transmitted."""

    protocol: str
    """`embedded`, `veil`, `sqs`, `azure` or `mns`: only to be shown to people."""
    body_bytes_max: int
    """Largest `transmitted_bytes(body)`; with `base64_body` the caller's own body may be three quarters of it."""
    batch_messages_max: int
    """Most entries that send_batch and delete_batch send in one request; longer batches are split."""
    receive_messages_max: int
    lease_min: float
    """Shortest lease above 0 that a receive may ask for."""
    lease_max: float
    lease_total_max: float | None = None
    """Cap on a lease with all its extensions, counted from the receive (SQS: 12 h)."""
    wait_max: float
    """Longest wait of one request; a longer wait is refused. 0: the queue never waits."""
    delay_max: float
    batch_extend: bool = False
    """One request can extend many leases."""
    receipts_rotate: bool = False
    """An extend invalidates the handle that it was given."""
    handle_on_send: HandleOnSend = HandleOnSend.NEVER
    body_replaceable: bool = False
    retention_below_delay: bool = False
    """A message may expire before its delay ends."""
    base64_body: bool = False
    """The adapter encodes bodies: three bytes become four on the wire."""
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
    """A receive that asks for no lease uses the sender's hint."""
    tags: bool = False
    """A message may have a tag."""
    body_bytes_min: int = 1
    """0 where an empty body can be sent."""
    extends_late: bool = False
    """An extend after the lease's end succeeds if nobody else has received the message since, and is refused otherwise.
    So an answer without an error means that the message is held."""
    release_min: float = 0
    """Shortest delay of a release; a shorter one is raised to this (MNS: 1 s)."""

    def transmitted_bytes(self, body: str) -> int:
        """Bytes of `body` on the wire: UTF-8, in base64 where the adapter encodes."""
        size_bytes = len(body.encode())
        return (size_bytes + 2) // 3 * 4 if self.base64_body else size_bytes
