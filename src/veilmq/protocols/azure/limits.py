"""The limits of Azure Queue Storage, as data (REST API; "Scalability and performance targets for Queue Storage").

Strategy: a limit is a named number with its unit; every check reads it from here. Versions are the dates of
`x-ms-version`, which sort as text.
"""

import re
from typing import Final

QUEUE_NAME: Final = re.compile(r"[a-z0-9](?:-?[a-z0-9])*\Z")
QUEUE_NAME_WHOLE: Final = re.compile(r"(?=.{3,63}\Z)[a-z0-9](?:-?[a-z0-9])*")
"""The same, with its length."""
QUEUE_NAME_CHARACTERS_MIN: Final = 3
QUEUE_NAME_CHARACTERS_MAX: Final = 63
VERSION: Final = re.compile(r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])\Z")

VERSION_UPDATE: Final = "2011-08-18"
"""Update Message, `visibilitytimeout` of Put Message, messages of 64 KiB, leases of 7 days; before 8 KiB, 2 hours."""
VERSION_CORS: Final = "2013-08-15"
"""CORS rules, minute metrics, statistics, partial changes of the service properties."""
VERSION_EMPTY_LENGTH: Final = "2015-02-21"
"""From here on a Content-Length of 0 is signed as the empty text, and the resource of a service SAS begins with
`/queue`."""
VERSION_SAS_ADDRESSES: Final = "2015-04-05"
"""`sip` and `spr` in a SAS, and account SAS."""
VERSION_PUT_RESULT: Final = "2016-05-31"
"""Put Message answers with the message's id, times and pop receipt. Empty headers are signed from here on."""
VERSION_LONG_TTL: Final = "2017-07-29"
"""A time to live may be longer than 7 days, or -1: never."""
VERSION_BEARER: Final = "2017-11-09"
VERSION_SAS_SCOPE: Final = "2020-12-06"
"""The string to sign of an account SAS has a line for the encryption scope."""
VERSION_BEARER_ACL: Final = "2025-07-05"
"""Get and Set Queue ACL with a bearer token."""
VERSION_DELEGATION: Final = "2026-02-06"
"""Get User Delegation Key and user delegation SAS for queues."""
VERSION_SAS_OLDEST: Final = "2012-02-12"
"""Queue SAS and stored access policies."""

MESSAGE_BYTES_MAX: Final = 65_536
MESSAGE_BYTES_MAX_OLD: Final = 8_192
BODY_BYTES_MAX: Final = 6 * MESSAGE_BYTES_MAX + 4_096
"""A whole Put or Update request: each byte of a message may be an entity (`&quot;`)."""
DOCUMENT_BYTES_MAX: Final = 65_536
"""Service properties, access policies, key info."""
VISIBILITY_SECONDS_MAX: Final = 604_800
VISIBILITY_SECONDS_MAX_OLD: Final = 7_200
TTL_SECONDS_MAX_OLD: Final = 604_800
TTL_SECONDS_MAX: Final = 999_999_999_999_999_999
"""Any positive number (Put Message), with at most this many digits."""
TTL_SECONDS_COUNTED_MAX: Final = 2_147_483_647
"""68 years; longer means for ever."""
TTL_NEVER: Final = -1
TTL_SECONDS_DEFAULT: Final = 604_800
COUNT_MAX: Final = 32
LIST_MAX: Final = 5_000
TIMEOUT_SECONDS_MAX: Final = 2_147_483_647

METADATA_PREFIX: Final = b"x-ms-meta-"
METADATA_BYTES_MAX: Final = 8_192
METADATA_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
"""A C# identifier, limited to the characters of HTTP header names."""
CLIENT_REQUEST_ID_CHARACTERS_MAX: Final = 1_024

POLICIES_MAX: Final = 5
POLICY_ID_CHARACTERS_MAX: Final = 64
RETENTION_DAYS_MAX: Final = 365
CORS_RULES_MAX: Final = 5
CORS_BYTES_MAX: Final = 2_048
CORS_NAME_CHARACTERS_MAX: Final = 256
CORS_ORIGINS_MAX: Final = 64
CORS_HEADERS_MAX: Final = 64
CORS_PREFIXES_MAX: Final = 2

SKEW_SECONDS_MAX: Final = 900
DELEGATION_SECONDS_MAX: Final = 604_800
TOKEN_BYTES_MAX: Final = 16_384

QUERY_PAIRS_MAX: Final = 64
XML_DEPTH_MAX: Final = 8
XML_NODES_MAX: Final = 1_024
