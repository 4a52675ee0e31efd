"""What the embedded adapter can do, as data.

Strategy: the engine itself has few limits. These keep messages valid in the other protocols where that is free
(attributes as in SQS), and bound everything else. Durations in seconds.
"""

import re
from typing import Final

import msgspec

from veilmq.client.queue import Capabilities, HandleOnSend
from veilmq.model.instant import DAY_US, SECOND_US
from veilmq.model.queue import QueueSettings

DURATION_MIN: Final = 0.001
LEASE_MAX: Final = 7.0 * DAY_US / SECOND_US
DELAY_MAX: Final = LEASE_MAX
WAIT_MAX: Final = 3_600.0
LIFE_MAX: Final = 3_650.0 * DAY_US / SECOND_US
"""Longest retention, and longest time to live."""
MESSAGES_MAX: Final = 1_000
"""Messages in one request. Each request is one batch of the engine, which serves nobody else meanwhile."""
REQUEST_BYTES_MAX: Final = 16 << 20
"""Bodies of one request, unless it has a single larger one."""
BODY_BYTES_MAX: Final = 64 << 20
RECEIVE_COUNT_MAX: Final = 1_000
"""As SQS's maxReceiveCount."""
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,120}(?:\.fifo)?\Z")
TEXT_CHARACTERS_MAX: Final = 256
"""Of a type or tag."""
TAGS_MAX: Final = 50

CAPABILITIES: Final = Capabilities(
    protocol="embedded",
    body_bytes_max=1 << 20,
    batch_messages_max=MESSAGES_MAX,
    receive_messages_max=MESSAGES_MAX,
    lease_min=DURATION_MIN,
    lease_max=LEASE_MAX,
    wait_max=WAIT_MAX,
    delay_max=DELAY_MAX,
    batch_extend=True,
    handle_on_send=HandleOnSend.ALWAYS,
    body_replaceable=True,
    retention_below_delay=True,
    attributes=True,
    peek=True,
    priorities=True,
    ttl=True,
    groups=True,
    native_topics=True,
    lease_hints=True,
    tags=True,
    extends_late=True,
)
"""Of a queue with the default largest body."""


def capabilities_of(settings: QueueSettings) -> Capabilities:
    """Of a queue with these settings. A FIFO queue has one delay for all its messages, and one order."""
    return msgspec.structs.replace(
        CAPABILITIES,
        body_bytes_max=settings.message_bytes_max,
        delay_max=0 if settings.fifo else DELAY_MAX,
        priorities=not settings.fifo,
        native_fifo=settings.fifo,
        extends_late=not settings.fifo,
    )
