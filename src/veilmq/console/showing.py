"""How values and bodies look on a page, and how values are typed into one: the templates' environment and its filters;
what a form takes, written out and read back.

Strategy: autoescape for every template, and nothing marks text as markup (tests/house/test_console.py): whatever comes
from a queue is text. A filter returns plain text; markup is in templates alone. All times are UTC, and a page says so.

A body is shown as what it is, and never more than that: JSON is indented without reading its numbers, so that none is
rounded; of an encrypted one the header alone is shown; a pointer to a large body is shown and never fetched; bytes are
hexadecimal. Nothing here interprets a body further.
"""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse

from veilmq.admin.story import rounded, span
from veilmq.console import ApiRefused
from veilmq.model.instant import DAY_US, HOUR_US, MILLISECOND_US, MINUTE_US, SECOND_US
from veilmq.model.wording import short_client

_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def duration(span_us: int | None) -> str:
    """In two units at most: 1 h 20 min, 51 s, 1.2 s."""
    if span_us is None:
        return "–"
    size_us = abs(span_us)
    sign = "-" if span_us < 0 else ""
    if size_us >= SECOND_US:
        return sign + span(size_us, minutes_from=1)
    if size_us >= MILLISECOND_US:
        return f"{sign}{rounded(size_us, MILLISECOND_US)} ms"
    return "0 s" if not size_us else f"{sign}{size_us} µs"


def count(number: int | None) -> str:
    """With thin spaces between thousands."""
    return "–" if number is None else f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def many(number: int, one: str, more: str = "") -> str:
    """1 message, 2 messages. more: if it is not `one` with an s."""
    return f"{count(number)} {one if number == 1 else more or f'{one}s'}"


def blocked(counts: dict[str, Any]) -> str:
    """How many messages are blocked: with `≥` if there may be more."""
    return ("" if counts["complete"] else "≥ ") + count(counts["messages"])


def rate(number: float | None) -> str:
    """With two digits behind the point at most, and from 100 on with none."""
    if number is None:
        return "–"
    return count(round(number)) if number >= 100 else f"{number:.2f}".rstrip("0").rstrip(".")


def size(size_bytes: int | None) -> str:
    """512 bytes, 1.5 MiB."""
    if size_bytes is None:
        return "–"
    for unit, name in _SIZES:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size_bytes} byte{'s' * (size_bytes != 1)}"


def iso(instant: int) -> str:
    """ISO 8601 to the microsecond."""
    try:
        return datetime.fromtimestamp(instant // SECOND_US, UTC).strftime("%Y-%m-%dT%H:%M:%S") + (
            f".{instant % SECOND_US:06d}Z"
        )
    except (ValueError, OverflowError, OSError):
        return "never"


def clock_time(instant: int, now: int | None = None) -> str:
    """The time of day to the millisecond; with the date if that is not today's."""
    text = iso(instant)
    if text == "never":
        return text
    date, time = text[:10], text[11:23]
    return time if now is not None and iso(now)[:10] == date else f"{date} {time[:8]}"


def ago(instant: int, now: int) -> str:
    """51 s ago, in 8 s."""
    span_us = now - instant
    if abs(span_us) < SECOND_US:
        return "now"
    return f"{duration(span_us)} ago" if span_us > 0 else f"in {duration(-span_us)}"


UNITS_US: Final = {"s": SECOND_US, "min": MINUTE_US, "h": HOUR_US, "d": DAY_US}


class FormWrong(ApiRefused):
    """A field that cannot be understood."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(400, {"error": "form", "field": field, "message": message})


def named(error: ApiRefused, labels: Mapping[str, str]) -> str:
    """The error's text, with the form's label for the field in the place of the API's name, which users of the form do
    not know. Of `redrive.target` it is the label of the target, if that has one. A label of the form itself stays."""
    field = error.field or ""
    label = next((labels[name] for name in (field, *reversed(re.split(r"[.\[\]]+", field))) if name in labels), None)
    return error.words if label is None else FormWrong(label, error.message).words


def duration_typed(span: int) -> str:
    """A duration as it may be typed, exactly, in the largest unit that divides it."""
    for name in ("d", "h", "min"):
        if span and span % UNITS_US[name] == 0:
            return f"{span // UNITS_US[name]} {name}"
    return f"{span / UNITS_US['s']:.6f}".rstrip("0").rstrip(".") + " s"


def span_us(field: str, text: str) -> int:
    """A duration as typed: 30 s, 5 min, 1.5 h; a number alone is seconds. Raises FormWrong."""
    number, unit = text.strip(), "s"
    for name in sorted(UNITS_US, key=len, reverse=True):
        if number.endswith(name):
            number, unit = number.removesuffix(name).strip(), name
            break
    try:
        span = round(float(number) * UNITS_US[unit])
    except (ValueError, OverflowError):
        raise FormWrong(field, f"expected a duration such as 30 s, 5 min, 1.5 h or 4 d, not {text!r}") from None
    return span


def number(field: str, text: str) -> int:
    """A whole number as typed. Raises FormWrong."""
    if not (text.isascii() and text.isdigit() and len(text) < 16):  # what JSON carries, and no day in us is longer
        raise FormWrong(field, f"expected a whole number, not {text!r}")
    return int(text)


def attributes_typed(attributes: list[dict[str, str]]) -> str:
    """A line of name=value for each; a JSON list if not all are of the type String."""
    if all(each["type"] == "String" for each in attributes):
        return pairs_typed({each["name"]: each["value"] for each in attributes})
    return json.dumps(attributes, ensure_ascii=False)


def attributes_read(text: str) -> list[dict[str, str]]:
    """The same back. Raises FormWrong."""
    if not text.lstrip().startswith("["):
        pairs = pairs_read("attributes", text)
        return [{"name": name, "type": "String", "value": value} for name, value in pairs.items()]
    try:
        found = _loaded(text)
    except (ValueError, RecursionError):
        raise FormWrong("attributes", "expected a JSON list of {name, type, value}, no name twice") from None
    assert isinstance(found, list)  # the API looks at what is in it
    return found


def _loaded(text: str) -> Any:
    """Raises ValueError, also for half a surrogate pair, which no protocol can carry; RecursionError."""
    found = json.loads(text, object_pairs_hook=_once)
    json.dumps(found, ensure_ascii=False).encode()
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError if a name is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def pairs_typed(pairs: dict[str, str]) -> str:
    """A line of name=value for each; as JSON if lines could not say it."""
    parts = [part for pair in pairs.items() for part in pair]
    odd = any(len(part.splitlines()) > 1 or part != part.strip() for part in parts)
    if odd or "=" in "".join(pairs) or next(iter(pairs), "").startswith("{"):
        return json.dumps(pairs, ensure_ascii=False)
    return "\n".join(f"{name}={value}" for name, value in pairs.items())


def pairs_read(field: str, text: str) -> dict[str, str]:
    """The same back. Raises FormWrong."""
    if text.lstrip().startswith("{"):
        try:
            found = _loaded(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            text = "expected a JSON object of texts, no name twice, or a line of name=value for each"
            raise FormWrong(field, text)
        return found
    pairs: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not name or not equals:
            raise FormWrong(field, f"expected name=value, not {line!r}")
        if name in pairs:
            raise FormWrong(field, f"{name!r} is there twice")
        pairs[name] = value
    return pairs


def _environment() -> Environment:
    folder = str(files("veilmq.console") / "templates")
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (duration, count, many, blocked, rate, size, iso, clock_time, ago, short_client)
    made.filters |= {each.__name__: each for each in filters}
    made.globals["parts"] = made.get_template("parts.html").module
    return made


_TEMPLATES: Final = _environment()


def page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """The page of a template."""
    return HTMLResponse(_TEMPLATES.get_template(template).render(**values), status)


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
    inner = _decoded(raw)
    is_cut = shown.is_cut or inner.is_cut
    return shown._replace(kind="base64", decoded=inner.text, decoded_kind=inner.kind, is_cut=is_cut)


def _decoded(raw: bytes) -> Shown:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return _cut(f"{len(raw)} bytes", hexadecimal(raw))
    shown = _indented(text)
    return _cut("text", text) if shown is None else _cut("JSON", shown)


def _cut(kind: str, text: str) -> Shown:
    return Shown(kind, text[:SHOWN_CHARACTERS_MAX], len(text) > SHOWN_CHARACTERS_MAX)


def hexadecimal(raw: bytes) -> str:
    """Rows of 16 bytes: offset, hexadecimal, ASCII. Of a longer body more than `SHOWN_CHARACTERS_MAX` characters."""
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
    """A JSON object or array with a line for each member, up to where it is cut; None if the text is none. Every token
    stays as it is."""
    if text.lstrip()[:1] not in ("{", "[") or len(text) > _JSON_CHARACTERS_MAX:
        return None
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    parts: list[str] = []
    depth = length = 0
    before = ""
    for token, following in pairwise(chain((match[0] for match in _TOKEN.finditer(text)), ("",))):
        part = ": " if token == ":" else token
        if token in "{[" and following not in ("}", "]"):
            depth += 1
            part += "\n" + "  " * depth
        elif token in "}]" and before not in ("{", "["):
            depth -= 1
            part = "\n" + "  " * depth + token
        elif token == ",":
            part += "\n" + "  " * depth
        parts.append(part)
        length += len(part)
        if length > SHOWN_CHARACTERS_MAX:
            break  # each line of a deep body is long
        before = token
    return "".join(parts)


_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
