"""What a body is, and how a page shows it.

Strategy: a body is shown as what it is, and never more than that: JSON is indented without reading its numbers, so that
none is rounded; of an encrypted one the header alone is shown; a pointer to a large body is shown and never fetched;
bytes are hexadecimal. Nothing here interprets a body further.
"""

import base64
import binascii
import json
import re
from typing import Final, NamedTuple

SHOWN_CHARACTERS_MAX: Final = 200_000
"""More of a body is for the download."""
_BASE64: Final = re.compile(r"(?:[A-Za-z0-9+/]{4}){4,}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?|"
                            r"(?:[A-Za-z0-9+/]{4}){3,}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)")  # fmt: skip
_PART: Final = re.compile(r"[A-Za-z0-9_-]*")
_POINTERS: Final = ('{"veilmq.pointer":', ".payloadoffloading.PayloadS3Pointer", ".javamessaging.MessageS3Pointer")
_ROW_BYTES: Final = 16
_JSON_CHARACTERS_MAX: Final = 1 << 20


class Shown(NamedTuple):
    """What it is, how long, and the text to show; `decoded` is what base64 held."""

    kind: str
    text: str
    is_cut: bool = False
    decoded: str = ""
    decoded_kind: str = ""


def shown_body(body: str | None, body_base64: str | None) -> Shown:
    """A body as the API gives it: text, or base64 of what is no text any more."""
    if body is None:
        raw = base64.b64decode(body_base64 or "")
        return _cut("bytes that are no text", hexadecimal(raw))
    header = _jwe_header(body)
    if header is not None:
        return _cut("encrypted (JWE); this is its header", header)
    text = _indented(body)
    if text is not None:
        is_pointer = any(name in body[:200] for name in _POINTERS)
        return _cut("a pointer to a large body, not fetched" if is_pointer else "JSON", text)
    shown = _cut("text", body)
    if not _BASE64.fullmatch(body):
        return shown
    try:
        raw = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        return shown
    kind, decoded = _decoded(raw)
    return shown._replace(kind="base64", decoded=decoded[:SHOWN_CHARACTERS_MAX], decoded_kind=kind)


def _decoded(raw: bytes) -> tuple[str, str]:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return f"{len(raw)} bytes", hexadecimal(raw)
    shown = _indented(text)
    return ("text", text) if shown is None else ("JSON", shown)


def _cut(kind: str, text: str) -> Shown:
    return Shown(kind, text[:SHOWN_CHARACTERS_MAX], len(text) > SHOWN_CHARACTERS_MAX)


def hexadecimal(raw: bytes) -> str:
    """Rows of 16 bytes: offset, hexadecimal, ASCII."""
    rows = []
    for at in range(0, min(len(raw), SHOWN_CHARACTERS_MAX // 4), _ROW_BYTES):
        row = raw[at : at + _ROW_BYTES]
        plain = "".join(chr(each) if 32 <= each < 127 else "." for each in row)
        rows.append(f"{at:08x}  {row.hex(' '):<47}  {plain}")
    return "\n".join(rows)


def _jwe_header(body: str) -> str | None:
    """The protected header of a JWE in compact form (RFC 7516, 7.1), indented."""
    parts = body.split(".", 5)
    if len(parts) != 5 or not all(_PART.fullmatch(part) for part in parts) or len(parts[0]) > 10_000:
        return None
    try:
        header = base64.urlsafe_b64decode(parts[0] + "=" * (-len(parts[0]) % 4)).decode()
        found = json.loads(header)
    except (ValueError, RecursionError):
        return None
    return _indented(header) if isinstance(found, dict) and {"alg", "enc"} <= found.keys() else None


def _indented(text: str) -> str | None:
    """A JSON object or array with a line for each member; None if the text is none. Every token stays as it is."""
    if text.lstrip()[:1] not in ("{", "[") or len(text) > _JSON_CHARACTERS_MAX:
        return None
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    parts: list[str] = []
    depth = 0
    tokens = [match[0] for match in _TOKEN.finditer(text)]
    for place, token in enumerate(tokens):
        following = tokens[place + 1] if place + 1 < len(tokens) else ""
        if token in "{[" and following not in ("}", "]"):
            depth += 1
            parts.append(token + "\n" + "  " * depth)
        elif token in "}]" and tokens[place - 1] not in ("{", "["):
            depth -= 1
            parts.append("\n" + "  " * depth + token)
        elif token == ",":
            parts.append(",\n" + "  " * depth)
        else:
            parts.append(": " if token == ":" else token)
    return "".join(parts)


_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
