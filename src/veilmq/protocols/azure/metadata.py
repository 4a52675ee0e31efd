"""Metadata of a queue: `x-ms-meta-*` headers, and the labels that store them.

Strategy: all metadata is one label, in JSON, because setting metadata replaces the whole. Names are compared without
case but keep the case in which they were set. That case is a label of its own, which does not count when two queues are
compared. Source: "Set Queue Metadata", "Setting and retrieving properties and metadata".
"""

from typing import Final

import msgspec

from veilmq.protocols.azure import limits
from veilmq.protocols.azure.errors import EMPTY_METADATA_KEY, INVALID_METADATA, METADATA_TOO_LARGE, Refusal
from veilmq.protocols.http import Request

LABEL: Final = "azure.metadata"
_HEADER_CASE: Final = "azure.spelling"
PREFIX: Final = b"x-ms-meta-"
_DECODER: Final = msgspec.json.Decoder(dict[str, str])


class Metadata(msgspec.Struct, frozen=True):
    """Metadata that a request gives."""

    values: dict[str, str]
    """Values by lower-case name."""
    header_case: dict[str, str]
    """Lower-case name -> name as sent, where they differ."""


def read_metadata(request: Request) -> Metadata:
    """Read the metadata in a request's headers. Raises Refusal."""
    metadata: dict[str, str] = {}
    total_bytes = 0
    for name, value in request.headers.items():
        if not name.startswith(PREFIX):
            continue
        key = name[len(PREFIX) :].decode("latin-1")
        if not key:
            raise Refusal(EMPTY_METADATA_KEY)
        text = value.decode("latin-1")
        if not limits.METADATA_NAME.match(key) or name in request.duplicates or not _printable(text):
            raise Refusal(INVALID_METADATA, {"HeaderName": name.decode("latin-1")})
        total_bytes += len(key) + len(value)
        metadata[key] = text
    if total_bytes > limits.METADATA_BYTES_MAX:
        raise Refusal(METADATA_TOO_LARGE, {"MaxLimit": str(limits.METADATA_BYTES_MAX)})
    sent = ((name, (request.header_case or {}).get(PREFIX + name.encode(), b"").decode()) for name in metadata)
    header_case = {name: text[len(PREFIX) :] for name, text in sent if text[len(PREFIX) :] not in {"", name}}
    return Metadata(metadata, header_case)


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable()


def values_label(metadata: Metadata) -> dict[str, str]:
    """The label that is compared when two queues are."""
    return {LABEL: _text(metadata.values)}


def labels_of(metadata: Metadata) -> dict[str, str]:
    """The labels that store exactly this metadata."""
    return values_label(metadata) | {_HEADER_CASE: _text(metadata.header_case)}


def _text(pairs: dict[str, str]) -> str:
    return msgspec.json.encode(pairs, order="sorted").decode() if pairs else ""


def metadata_of(labels: dict[str, str]) -> dict[str, str]:
    """The metadata in a queue's labels, by name as it was set."""
    text, spelled = labels.get(LABEL), labels.get(_HEADER_CASE)
    values = _DECODER.decode(text) if text else {}
    header_case = _DECODER.decode(spelled) if spelled else {}
    return {header_case.get(name, name): value for name, value in values.items()}


def as_headers(metadata: dict[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    """The headers that show it."""
    return tuple((PREFIX + name.encode(), value.encode()) for name, value in metadata.items())
