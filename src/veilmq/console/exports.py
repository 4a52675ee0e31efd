"""What a page shows, as a file: JSON, or CSV that no spreadsheet takes for a formula.

Strategy: rows of plain values, flattened. In CSV each text is quoted, and one that a spreadsheet would compute gets an
apostrophe before it, as OWASP advises; numbers stay numbers, and those beyond 2^53 keep their digits. It is always an
attachment.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.responses import Response

from veilmq.admin.api.errors import Refused
from veilmq.console.visit import Visit

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n")


def flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The row with inner members under dotted names; lists as JSON."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = msgspec.json.encode(value).decode() if isinstance(value, list) else value
    return found


def in_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """RFC 4180, with a row of names; a row without a member has an empty field there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow([_harmless(name) for name in names])
    for row in rows:
        writer.writerow([_harmless(row.get(name)) for name in names])
    return text.getvalue()


def _harmless(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value


def download(visit: Visit, name: str, rows: Sequence[Mapping[str, Any]]) -> Response:
    """The rows as the `form` that the address asks for. name: of the file, of characters that need no quoting."""
    form = visit.members.get("form", "json")
    if form not in {"csv", "json"}:
        raise Refused(400, "no_form", "The form is csv or json.")
    named = {"content-disposition": f'attachment; filename="{name}.{form}"'}
    if form == "csv":
        return Response(in_csv(rows), media_type="text/csv; charset=utf-8", headers=named)
    return Response(msgspec.json.encode(rows), media_type="application/json", headers=named)
