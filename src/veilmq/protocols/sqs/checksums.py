"""The MD5s in SQS's responses, which SDKs verify.

Strategy: one pass that appends to a hash. Source: Developer Guide, "Calculating the MD5 message digest for message
attributes": attributes sorted by name; of each, name, type and value, each after its length in four bytes, big endian;
a byte between type and value is 1 for text, 2 for binary.
"""

from collections.abc import Sequence
from hashlib import md5

from veilmq.model.message import Attribute


def body_md5(body: bytes) -> bytes:
    """MD5 of a body in UTF-8, 16 bytes."""
    return md5(body, usedforsecurity=False).digest()


def attributes_md5(attributes: Sequence[Attribute]) -> str:
    """MD5OfMessageAttributes, MD5OfMessageSystemAttributes: 32 hexadecimal digits."""
    parts: list[bytes] = []
    for attribute in sorted(attributes, key=lambda attribute: attribute.name):
        name, kind = attribute.name.encode(), attribute.type.encode()
        if isinstance(attribute.value, str):
            mark, value = b"\x01", attribute.value.encode()
        else:
            mark, value = b"\x02", attribute.value
        parts += (
            len(name).to_bytes(4),
            name,
            len(kind).to_bytes(4),
            kind,
            mark,
            len(value).to_bytes(4),
            value,
        )
    return md5(b"".join(parts), usedforsecurity=False).hexdigest()
