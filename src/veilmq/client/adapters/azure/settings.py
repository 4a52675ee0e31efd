"""Settings of a queue, kept in its metadata because Queue Storage has none.

Strategy: what a template names is stored as `veilmq_*` metadata, and every client of this adapter uses it: for a
receive without a lease, or a send without a delay or time to live. Other clients of the queue do not know it. Metadata
that cannot be read counts as not set, because anybody may write it. A creation also stores a unique incarnation, so
that a queue that was deleted and created again differs from its predecessor.
"""

import math
import re
from collections.abc import Mapping
from typing import Final
from uuid import uuid4

import msgspec

from veilmq.client.adapters.azure.calls import MESSAGE_BYTES_MAX
from veilmq.client.messages import Template
from veilmq.model.errors import CapabilityMissing, ParameterInvalid

LEASE_MAX: Final = 604_800
DELAY_MAX: Final = 604_799
"""Less than the time to live, which is 7 days unless the message names another."""
TTL_MAX: Final = 2_147_483_647
NEVER: Final = -1
"""The time to live of a message that never expires; math.inf in the port."""

_PREFIX: Final = "veilmq_"
_INCARNATION: Final = "veilmq_incarnation"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RANGES: Final = {
    "visibility_timeout": (1, LEASE_MAX),
    "delay": (0, DELAY_MAX),
    "retention": (1, TTL_MAX),
    "message_bytes_max": (1, MESSAGE_BYTES_MAX),
}
"""Field of `Settings` and of `Template` -> least and most."""


class Settings(msgspec.Struct, frozen=True):
    """The settings in a queue's metadata. Seconds and bytes; None: the service's default."""

    visibility_timeout: int | None = None
    delay: int | None = None
    retention: int | None = None
    """-1: unlimited."""
    message_bytes_max: int | None = None
    incarnation: str | None = None


def metadata_of(template: Template) -> dict[str, str]:
    """The metadata of a queue to create. Raises CapabilityMissing, ParameterInvalid naming the template's field."""
    if template.fifo or template.content_deduplication:
        raise CapabilityMissing(capability="native_fifo")
    if template.dead_letter_queue is not None or template.receive_count_max is not None:
        raise CapabilityMissing(capability="dead_letter_queue")
    metadata = dict(template.tags)
    for name, value in metadata.items():
        if not _NAME.match(name) or name.lower().startswith(_PREFIX):
            reason = f"{name!r} is no name of metadata: letters, digits and _, not beginning with {_PREFIX}"
            raise ParameterInvalid(parameter="tags", reason=reason)
        if not (value.isascii() and value.isprintable() and value == value.strip() and value):
            raise ParameterInvalid(parameter="tags", reason=f"the value of {name} must be printable ASCII")
    for field in _RANGES:
        number = _setting(field, getattr(template, field))
        if number is not None:
            metadata[_PREFIX + field] = str(number)
    return metadata


def _setting(field: str, value: float | None) -> int | None:
    if value is None:
        return None
    if field == "retention" and value == math.inf:
        return NEVER
    least, most = _RANGES[field]
    if not least <= value <= most or value != int(value):
        raise ParameterInvalid(parameter=field, reason=f"must be a whole number from {least} to {most}, not {value}")
    return int(value)


def with_incarnation(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata with a value that is unique to this creation."""
    return {**metadata, _INCARNATION: uuid4().hex}


def settings_of(metadata: Mapping[str, str]) -> Settings:
    """The settings that can be read from a queue's metadata."""
    found = {name.lower(): value for name, value in metadata.items()}
    numbers = {field: _number(field, found.get(_PREFIX + field, "")) for field in _RANGES}
    return Settings(**numbers, incarnation=found.get(_INCARNATION) or None)


def _number(field: str, text: str) -> int | None:
    if field == "retention" and text == str(NEVER):
        return NEVER
    least, most = _RANGES[field]
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) else -1
    return number if least <= number <= most else None


def differing(wanted: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """The first setting or tag that differs between what is wanted and the metadata of an existing queue."""
    there = {name.lower(): value for name, value in found.items()}
    for name, value in wanted.items():
        if there.get(name.lower()) != value:
            return name.removeprefix(_PREFIX)
    return None
