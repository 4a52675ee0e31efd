"""Metadata of a queue: `x-ms-meta-*` headers, and the label that keeps them.

Strategy: all of it is one label, in JSON, because setting metadata replaces the whole. Names come from the listener in
lower case, as HTTP has no case in them. Source: "Set Queue Metadata", "Naming and referencing metadata".
"""

from typing import Final

import msgspec

from veilmq.protocols.azure import limits
from veilmq.protocols.azure.errors import EMPTY_METADATA_KEY, INVALID_METADATA, METADATA_TOO_LARGE, Refusal
from veilmq.protocols.http import Request

LABEL: Final = "azure.metadata"
_PREFIX: Final = b"x-ms-meta-"
_DECODER: Final = msgspec.json.Decoder(dict[str, str])


def read_metadata(request: Request) -> dict[str, str]:
    """Metadata that a request's headers give. Raises Refusal."""
    metadata: dict[str, str] = {}
    total_bytes = 0
    for name, value in request.headers.items():
        if not name.startswith(_PREFIX):
            continue
        key = name[len(_PREFIX) :].decode("latin-1")
        if not key:
            raise Refusal(EMPTY_METADATA_KEY)
        text = value.decode("latin-1")
        if not limits.METADATA_NAME.match(key) or name in request.duplicates or not _printable(text):
            raise Refusal(INVALID_METADATA, {"HeaderName": name.decode("latin-1")})
        total_bytes += len(key) + len(value)
        metadata[key] = text
    if total_bytes > limits.METADATA_BYTES_MAX:
        raise Refusal(METADATA_TOO_LARGE, {"MaxLimit": str(limits.METADATA_BYTES_MAX)})
    return metadata


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable()


def label_of(metadata: dict[str, str]) -> dict[str, str]:
    """The labels that keep this metadata and no other."""
    return {LABEL: msgspec.json.encode(metadata, order="sorted").decode() if metadata else ""}


def metadata_of(labels: dict[str, str]) -> dict[str, str]:
    """The metadata that a queue's labels keep."""
    text = labels.get(LABEL)
    return _DECODER.decode(text) if text else {}


def as_headers(metadata: dict[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    """The headers that show it."""
    return tuple((_PREFIX + name.encode(), value.encode()) for name, value in metadata.items())
