"""One message: what a sender gives, and what a receiver gets, with the receipt handle of its lease. And what a client
reports of its work. Beside it are its states.

Strategy: the body is text of XML 1.0 characters, stored and returned exactly. Fields that most messages lack
(attributes, group, trace header ...) are in one optional `Extras` value, so that a plain message does not pay for them.

In a queue whose `xml_body` is base64, the body that XML clients send is decoded before it is stored, and encoded again
for them. A body is stored as text, so base64 that does not decode to UTF-8 text of XML characters is refused.

A receipt handle is the unforgeable name of one lease: queue incarnation, message sequence, attempt and rotation, and a
12-byte MAC over them, in lower-case hex: 66 characters that need no escaping in a URL, as MNS requires. A handle is
current when attempt and rotation both match the stored ones; only a grant raises the attempt, only an extend of a
protocol that rotates raises the rotation. The key is a row of the store: a restored backup has a fresh one and honours
no old handle. The MAC is keyed BLAKE2s (RFC 7693), six times as fast here as HMAC-SHA256
(docs/decisions/0002-receipt-mac.md).

What a client reports with an extend is that it is still working, or that it gives the message back for a retry, and
why. On the wire it is one request header, the same on every protocol (docs/veil-protocol.md, "What became of the
work"):

    x-veilmq-outcome: retry;reason=raised;type=ValueError;error=bad%20zip%20code

The value of the header is a word and parameters, percent-encoded like a URL's query, so that any language can write it.
The header only adds to the history, so a malformed or too long one is ignored and the request is carried out without
it. Writing cuts text that is too long; reading refuses it.
"""

import binascii
import os
import re
import struct
from base64 import b64encode
from enum import StrEnum
from hashlib import blake2s
from hashlib import md5 as md5_of
from hmac import compare_digest
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes
from zlib import adler32, crc32

import msgspec

from veilmq.model.errors import ParameterInvalid
from veilmq.model.instant import Instant
from veilmq.model.settings.queue import QueueKey

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MARKED = bytes(byte if byte in b"\t\n\r" or 0x20 <= byte < 0x7F else 0x80 for byte in range(256))
_UUID = struct.Struct("8s4s4s4s12s")
_IDS: Final = struct.Struct("16s" * 256)
_VERSION_4: Final = bytes(byte & 0x0F | 0x40 for byte in range(256))
_VARIANT: Final = bytes(byte & 0x3F | 0x80 for byte in range(256))
"""What random bytes 6 and 8 become in a UUID of version 4 (RFC 9562, 5.4)."""
REPORT_HEADER: Final = b"x-veilmq-outcome"
HEADER_BYTES_MAX: Final = 4_096
REASON_CHARACTERS_MAX: Final = 32
TYPE_CHARACTERS_MAX: Final = 80
ERROR_CHARACTERS_MAX: Final = 256
_REASON: Final = re.compile(rf"[a-z][a-z0-9-]{{0,{REASON_CHARACTERS_MAX - 1}}}")
_HEADER: Final = re.compile(
    rb"(?P<outcome>[a-z]+)(?P<parameters>(?:[ \t]*;[ \t]*[a-z]+=(?:[A-Za-z0-9._~-]|%[0-9A-Fa-f]{2})*)*)"
)
_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def fresh_ids() -> list[bytes]:
    """256 message ids that nobody has: UUIDs of version 4, of 16 bytes."""
    pool = bytearray(os.urandom(_IDS.size))
    pool[6::16] = pool[6::16].translate(_VERSION_4)
    pool[8::16] = pool[8::16].translate(_VARIANT)
    return list(_IDS.unpack(pool))


MARK: Final = slice(9, 16)
"""Where the id of a message of a FIFO queue has the mark of its deduplication id; what is before it is random."""
_MARKED_ID: Final = struct.Struct(">9sIHB")


def marked_id(fresh: bytes, deduplication_id: str) -> bytes:
    """The id with a mark of the deduplication id, so that the history finds a message by it, though it has only ids. It
    stays a UUID of version 4. The mark is the CRC-32 of the text and 24 bits of its Adler-32."""
    text = deduplication_id.encode()
    other = adler32(text)
    return _MARKED_ID.pack(fresh, crc32(text), other & 0xFFFF, other >> 16 & 0xFF)


def id_text(message_id: bytes) -> str:
    """The canonical text of a message id, a UUID of 16 bytes."""
    return b"-".join(_UUID.unpack(message_id.hex().encode())).decode()


def is_plain(body: bytes) -> bool:
    """Whether all bytes are printable ASCII, tabs and line ends, as in most bodies: then no character is forbidden."""
    return body.translate(_MARKED).isascii()


def first_forbidden_character(body: str) -> int | None:
    """Index of the first character that XML 1.0 cannot carry, or None (SQS SendMessage; Azure Put Message).

    A lone surrogate is one of them: it has no UTF-8 form.
    """
    if body.isascii() and is_plain(body.encode()):
        return None
    found = _NOT_XML.search(body)
    return None if found is None else found.start()


class Attribute(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message attribute with SQS's type string (`String`, `Number`, `Binary`, each with an optional `.custom`)."""

    name: str
    type: str
    value: Any
    """str, or bytes for a Binary attribute (msgspec cannot decode a union of the two)."""

    @property
    def size_bytes(self) -> int:
        """What counts of it for the largest message that a queue takes: name, type and value."""
        value = self.value if isinstance(self.value, bytes) else self.value.encode()
        return len(self.name.encode()) + len(self.type.encode()) + len(value)


class Extras(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Fields that only some messages have."""

    attributes: tuple[Attribute, ...] = ()
    group: str | None = None
    deduplication_id: str | None = None
    trace: str | None = None
    """SQS's AWSTraceHeader."""
    type: str | None = None
    """Message type: processing times are learnt per type."""
    tag: str | None = None
    """MNS's MessageTag."""
    lease_hint_us: int | None = None
    """The sender's wish for the first lease of this message (docs/client.md, "The interface")."""
    dead_letter_source: QueueKey | None = None
    """The queue that dead-lettered the message, if one did."""
    published_id: bytes | None = None
    """For a copy that waits to be pushed or is a dead letter: the published message's id, 16 bytes."""
    dead_first_received: Instant | None = None
    """When the queue that dead-lettered the message first handed it out; None on FIFO queues, where the times start
    afresh."""
    dead_receives: int = 0
    """How often the message was received from the queues that dead-lettered it."""
    error_type: str = ""
    """Type of the error with which a worker last gave the message back."""
    error: str = ""
    """First line of that error's text."""


NO_EXTRAS: Final = Extras()


class Delivery(msgspec.Struct, gc=False):
    """One message as a receive (or a peek) hands it out.

    `handle` is empty and `due` None for a peek, which grants no lease.
    """

    id: bytes
    """16 bytes, a UUID of version 4; never changes, not even when the message is dead-lettered."""
    sequence: int
    body: str
    md5: bytes
    """MD5 of the body in UTF-8, 16 bytes."""
    extras: Extras
    sender: str
    priority: int
    sent: Instant
    expires: Instant
    receive_count: int
    """Grants so far, this one included."""
    first_received: Instant | None
    handle: str = ""
    due: Instant | None = None
    """End of the lease just granted."""
    lease_us: int | None = None
    """Length of the lease just granted: it began at `due - lease_us`."""


class StoredBody(NamedTuple):
    """A body as stored, with its MD5 and size."""

    body: str
    md5: bytes
    size_bytes: int


def decode_xml_body(text: str) -> StoredBody | ParameterInvalid:
    """Decode a body that an XML client sent in base64 (RFC 4648, with padding)."""
    try:
        raw = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
        body = raw.decode()
    except ValueError:
        return ParameterInvalid(parameter="body", reason="this queue takes base64 of text in UTF-8")
    if first_forbidden_character(body) is not None:
        return ParameterInvalid(parameter="body", reason="the decoded text has a character that XML cannot carry")
    return StoredBody(body, md5_of(raw, usedforsecurity=False).digest(), len(raw))


def encode_xml_body(body: str) -> str:
    """Encode a stored body for an XML client."""
    return b64encode(body.encode()).decode()


KEY_BYTES: Final = 32
_MAC_BYTES: Final = 12
_VERSION: Final = 1
_FIELDS: Final = struct.Struct(">BIQII")
HANDLE_CHARACTERS: Final = 2 * (_FIELDS.size + _MAC_BYTES)
_FIELDS_CHARACTERS: Final = 2 * _FIELDS.size


def rotation_of(handle: str) -> int:
    """The rotation in a handle that was just granted here; its MAC is not checked."""
    return int(_FIELDS.unpack(bytes.fromhex(handle[:_FIELDS_CHARACTERS]))[-1])


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The contents of a genuine handle."""

    queue: int
    """Incarnation of the queue that granted the lease."""
    sequence: int
    attempt: int
    """Receive count at the grant; 0 from a send."""
    rotation: int


class ReceiptKey:
    """Seals and opens handles with one secret of `KEY_BYTES` bytes."""

    __slots__ = ("_keyed",)

    def __init__(self, secret: bytes) -> None:
        self._keyed = blake2s(key=secret, digest_size=_MAC_BYTES)

    def seal(self, queue: int, sequence: int, attempt: int, rotation: int) -> str:
        """The handle of one lease: `HANDLE_CHARACTERS` of `0-9 a-f`."""
        fields = _FIELDS.pack(_VERSION, queue, sequence, attempt, rotation)
        keyed = self._keyed.copy()
        keyed.update(fields)
        return (fields + keyed.digest()).hex()

    def unseal(self, handle: str) -> Receipt | None:
        """The handle's contents; None for anything that `seal` did not make with this key."""
        if len(handle) != HANDLE_CHARACTERS or not handle.isascii():
            return None
        try:
            _, *fields = _FIELDS.unpack(bytes.fromhex(handle[:_FIELDS_CHARACTERS]))
        except (ValueError, struct.error):
            return None
        return Receipt(*fields) if compare_digest(self.seal(*fields), handle) else None


class Reported(StrEnum):
    """The purpose of an extend."""

    WORKING = "working"
    """The sender keeps working, even if the lease gets shorter: if it expires, the worker is gone."""
    RETRY = "retry"
    """The sender gives the message back, to be tried again when the lease ends."""


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why a message is given back. Unknown fields are empty. One line each, without bodies."""

    reason: str = ""
    """`raised` (the handler did), `asked` (it asked for a retry), `busy` (another worker has the key), `released`
    (given back unworked) or another word of lower-case letters, digits and hyphens."""
    error_type: str = ""
    error: str = ""
    """First line of the error's text."""


NO_FAILURE: Final = Failure()


class Report(msgspec.Struct, frozen=True, gc=False):
    """The contents of a valid header."""

    reported: Reported
    failure: Failure = NO_FAILURE


def failure_of(reason: str, error_type: str = "", text: str = "") -> Failure:
    """A failure within the bounds: the first non-empty line of the text, without control characters."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return Failure(reason, _cut(error_type, TYPE_CHARACTERS_MAX), _cut(line, ERROR_CHARACTERS_MAX))


WORKING: Final = Report(Reported.WORKING)
RELEASED: Final = Failure("released")
"""Given back without a known failure."""


def report_of(delay: float, failure: Failure | None) -> Report | None:
    """What a client reports with a release; nothing without a delay or failure."""
    if failure is None:
        return Report(Reported.RETRY, RELEASED) if delay else None
    return Report(Reported.RETRY, failure)


def write_header(reported: Reported, failure: Failure = NO_FAILURE) -> str:
    """The header's value, in ASCII. An invalid reason is left out; text that is too long is cut."""
    parts = [reported.value]
    if _REASON.fullmatch(failure.reason):
        parts.append(f"reason={failure.reason}")
    for name, text, most in (
        ("type", failure.error_type, TYPE_CHARACTERS_MAX),
        ("error", failure.error, ERROR_CHARACTERS_MAX),
    ):
        if cut := _cut(text, most):
            parts.append(f"{name}={quote(cut, safe='', errors='replace')}")
    return ";".join(parts)


def read_header(value: bytes | None) -> Report | None:
    """Parse the header; None if it is missing, malformed, too long or of an unknown outcome."""
    if value is None or len(value) > HEADER_BYTES_MAX:
        return None
    found = _HEADER.fullmatch(value)
    if found is None:
        return None
    try:
        reported = Reported(found["outcome"].decode())
        given = _parameters(found["parameters"])
    except ValueError:  # another outcome, or no UTF-8
        return None
    if given is None:
        return None
    failure = Failure(given.get(b"reason", ""), given.get(b"type", ""), given.get(b"error", ""))
    if failure.reason and not _REASON.fullmatch(failure.reason):
        return None
    for text, most in ((failure.error_type, TYPE_CHARACTERS_MAX), (failure.error, ERROR_CHARACTERS_MAX)):
        if len(text) > most or _CONTROLS.search(text):
            return None
    return Report(reported, failure if reported is Reported.RETRY else NO_FAILURE)


def _parameters(text: bytes) -> dict[bytes, str] | None:
    """The parameters by name; None if one repeats. Unknown ones are ignored. Raises UnicodeDecodeError."""
    given: dict[bytes, str] = {}
    for part in text.split(b";")[1:]:
        name, _, value = part.strip(b" \t").partition(b"=")
        if name in given:
            return None
        given[name] = unquote_to_bytes(value).decode()
    return given


def _cut(text: str, most: int) -> str:
    """The text without control characters and lone surrogates, cut to `most` characters."""
    text = text[: 4 * most].encode("utf-8", "replace").decode()
    return _CONTROLS.sub(" ", text).strip()[:most]
