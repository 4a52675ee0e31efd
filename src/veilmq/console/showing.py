"""How values look on a page: the templates' environment and its filters.

Strategy: autoescape for every template, and nothing marks text as markup (tests/house/test_console.py): whatever comes
from a queue is text. A filter returns plain text; markup is in templates alone. All times are UTC, and a page says so.
"""

from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse

from veilmq.admin.story import rounded, span
from veilmq.model.instant import MILLISECOND_US, SECOND_US

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


def _environment() -> Environment:
    folder = str(files("veilmq.console") / "templates")
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "duration": duration,
        "count": count,
        "rate": rate,
        "size": size,
        "iso": iso,
        "clock_time": clock_time,
        "ago": ago,
    }
    made.globals["parts"] = made.get_template("parts.html").module
    return made


_TEMPLATES: Final = _environment()


def page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """The page of a template."""
    return HTMLResponse(_TEMPLATES.get_template(template).render(**values), status)
