"""The limits of Amazon SQS, as data (SQS API Reference; Developer Guide, "Quotas").

Strategy: a limit is a named number with its unit; every check reads it from here.
"""

import re
from typing import Final

API_VERSION: Final = "2012-11-05"
API_VERSIONS: Final = frozenset({API_VERSION, "2008-01-01", "2009-02-01", "2011-10-01", "2012-08-01"})
"""Versions that clients may name in the Query form. All are treated as the latest one."""

QUEUE_NAME_CHARACTERS_MAX: Final = 80
QUEUE_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")
FIFO_QUEUE_NAME: Final = re.compile(r"(?=.{6,80}\Z)[A-Za-z0-9_-]+\.fifo\Z")
ANY_QUEUE_NAME: Final = rf"{QUEUE_NAME.pattern}|{FIFO_QUEUE_NAME.pattern}"
FIFO_SUFFIX: Final = ".fifo"
ACCOUNT: Final = re.compile(r"[0-9]{12}\Z")
ACCOUNT_PATH: Final = re.compile(rb".*/[0-9]{12}/[^/]+/?\Z")
"""Path of a queue's URL."""
REGION: Final = re.compile(r"[a-z0-9-]{1,64}\Z")

MESSAGE_BYTES_MAX: Final = 1_048_576
"""Body, attribute names, types and values of one message, and of all messages of a batch together."""
MESSAGE_BYTES_MAX_LEAST: Final = 1_024
ENTRIES_MAX: Final = 10
ENTRY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")
RECEIVE_COUNT_MAX: Final = 10
IN_FLIGHT_MAX: Final = 120_000

DELAY_SECONDS_MAX: Final = 900
VISIBILITY_SECONDS_MAX: Final = 43_200
LEASE_TOTAL_SECONDS_MAX: Final = 43_200
"""Counted from the receive, over all extensions (Developer Guide, "Visibility timeout")."""
WAIT_SECONDS_MAX: Final = 20
RETENTION_SECONDS_MIN: Final = 60
RETENTION_SECONDS_MAX: Final = 1_209_600
KMS_REUSE_SECONDS_MIN: Final = 60
KMS_REUSE_SECONDS_MAX: Final = 86_400
COOLDOWN_SECONDS: Final = 60
"""After DeleteQueue for the same name, and between two purges of a queue."""

ATTRIBUTES_MAX: Final = 10
ATTRIBUTE_NAME_CHARACTERS_MAX: Final = 256
ATTRIBUTE_TYPE_CHARACTERS_MAX: Final = 256
_NAME_CHARACTERS: Final = (
    r"A-Za-z0-9_\-\u00B7\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u037D\u037F-\u1FFF\u200C\u200D\u203F\u2040\u2070-\u218F"
    r"\u2C00-\u2FEF\u3001-\uD7FF\uF900-\uFDCF\uFDF0-\uFFFD\U00010000-\U000EFFFF"
)
"""The characters of XML 1.0's NameChar without colon and dot."""
ATTRIBUTE_NAME: Final = re.compile(rf"[{_NAME_CHARACTERS}]+(?:\.[{_NAME_CHARACTERS}]+)*\Z")
ATTRIBUTE_NAME_FORBIDDEN: Final = re.compile(rf"[^{_NAME_CHARACTERS}.]")
ATTRIBUTE_RESERVED: Final = ("aws.", "amazon.")
NUMBER_DIGITS_MAX: Final = 38
NUMBER_EXPONENT_MIN: Final = -128
NAMES_MAX: Final = 1_000
"""Names of attributes that a receive asks for. AWS has no such limit; a message has ten attributes."""
NUMBER_EXPONENT_MAX: Final = 126

TOKEN: Final = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}\Z")
"""MessageGroupId, MessageDeduplicationId and ReceiveRequestAttemptId."""
TRACE_BYTES_MAX: Final = 1_024

REDRIVE_RECEIVES_MIN: Final = 1
REDRIVE_RECEIVES_MAX: Final = 1_000
REDRIVE_SOURCES_MAX: Final = 10
LABEL_BYTES_MAX: Final = 2_048
"""Length of a queue attribute that is stored verbatim (KmsMasterKeyId, which has at most so much: KMS API)."""

LIST_QUEUES_MAX: Final = 1_000
POLICY_BYTES_MAX: Final = 8_192
REDRIVE_CHARACTERS_MAX: Final = 8_192
"""Of either redrive policy."""
POLICY_STATEMENTS_MAX: Final = 20
POLICY_ACTIONS_MAX: Final = 7
POLICY_PRINCIPALS_MAX: Final = 50
POLICY_CONDITIONS_MAX: Final = 10
"""Actions, principals and conditions (an operator with a key) are counted in each statement."""

TAGS_MAX: Final = 50
TAG_KEY_CHARACTERS_MAX: Final = 128
TAG_VALUE_CHARACTERS_MAX: Final = 256
TAG_RESERVED: Final = "aws:"
TAG_SYMBOLS: Final = "_.:/=+-@"
"""What tags may contain besides letters, digits and white space."""

SKEW_SECONDS_MAX: Final = 900
PRESIGNED_SECONDS_MAX: Final = 604_800

FORM_PAIRS_MAX: Final = 4_096
"""Parameters of a Query request: ten entries of ten attributes with three values each are 310."""
