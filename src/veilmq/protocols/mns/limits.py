"""The limits of MNS, as data ("Limits", and the pages of the operations).

Strategy: a limit is a named number with its unit; every check reads it from here. The settings that a queue's owner
gives in XML are rows, read and written by the same loop.
"""

import re
from typing import Final, NamedTuple

from veilmq.model.instant import SECOND_US

VERSION: Final = b"2015-06-06"

NAME_WHOLE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,119}")
"""The same, with its length."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*\Z")
"""Queues, topics and subscriptions."""
NAME_CHARACTERS_MAX: Final = 120
SUBSCRIPTION_NAME_CHARACTERS_MAX: Final = 255

MESSAGE_BYTES_MIN: Final = 1_024
MESSAGE_BYTES_MAX: Final = 65_536
"""A body as transmitted, and all bodies of a batch together."""
DOCUMENT_BYTES_MAX: Final = 6 * MESSAGE_BYTES_MAX + 65_536
"""A whole document: each byte of a body may be an entity (`&quot;`)."""
XML_DEPTH_MAX: Final = 8
XML_ELEMENTS_MAX: Final = 8_192
QUERY_PAIRS_MAX: Final = 32

BATCH_MAX: Final = 16
DELAY_SECONDS_MAX: Final = 604_800
VISIBILITY_SECONDS_MAX: Final = 43_200
WAIT_SECONDS_MAX: Final = 30
RETENTION_SECONDS_MIN: Final = 60
RETENTION_SECONDS_MAX: Final = 1_296_000
"""15 days, as in older documents; newer ones say 7."""
TOPIC_RETENTION_SECONDS: Final = 86_400
TAG_CHARACTERS_MAX: Final = 16
GROUP_CHARACTERS_MAX: Final = 128
RECEIVE_COUNT_MAX: Final = 1_000
"""DlqPolicy's MaxReceiveCount, as in SQS."""
RET_NUMBER_MAX: Final = 1_000
RET_NUMBER_DEFAULT: Final = 1_000
SKEW_SECONDS_MAX: Final = 900
ENDPOINT_CHARACTERS_MAX: Final = 1_024
LOGGING_BUCKET_CHARACTERS_MAX: Final = 256
HANDLE_CHARACTERS_MAX: Final = 1_024

PROPERTIES_MAX: Final = 50
"""User properties of a message ("Message attributes"); system properties are a fixed set."""
PROPERTY_VALUE_CHARACTERS_MAX: Final = 4_096
"""As transmitted: BINARY in base64."""
PROPERTY_NAME: Final = re.compile(r"(?!\.)(?!.*\.\.)[A-Za-z0-9_.-]{1,256}(?<!\.)\Z")
"""Names that SQS also allows, so that its clients can read the property."""
PROPERTY_NAME_RESERVED: Final = ("aws.", "amazon.")


class QueueNumber(NamedTuple):
    """A queue setting that is a whole number."""

    setting: str
    """Field of `QueueSettings`."""
    unit: int
    """The size of MNS's unit, in the field's unit."""
    minimum: int
    maximum: int
    default: int
    noun: str


RATE_MAX: Final = 1_000_000
"""MaxReceivesPerSecond. The service's own bound is not documented."""
QUEUE_NUMBERS: Final = {
    "DelaySeconds": QueueNumber("delay_us", SECOND_US, 0, DELAY_SECONDS_MAX, 0, "seconds"),
    "MaximumMessageSize": QueueNumber(
        "message_bytes_max", 1, MESSAGE_BYTES_MIN, MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX, "bytes"
    ),
    "MessageRetentionPeriod": QueueNumber(
        "retention_us", SECOND_US, RETENTION_SECONDS_MIN, RETENTION_SECONDS_MAX, 345_600, "seconds"
    ),
    "VisibilityTimeout": QueueNumber("visibility_timeout_us", SECOND_US, 1, VISIBILITY_SECONDS_MAX, 30, "seconds"),
    "PollingWaitSeconds": QueueNumber("wait_us", SECOND_US, 0, WAIT_SECONDS_MAX, 0, "seconds"),
}
