"""One request of a browser that is signed in: what a page's code is given.

Strategy: a page asks `/api/v1` (`visit.api`) and shows a template. An act is a POST with the session's CSRF token and a
key of its form: the key goes to the API, too, and a form that is sent twice acts once and shows the same answer twice.
A form whose key was used with other contents does nothing, and is shown again with them and a key of its own.
What a page shows is also a file (`Visit.download`): rows of plain values, as JSON or as CSV that no spreadsheet takes
for a formula: a text that it would compute gets an apostrophe before it, as OWASP advises; numbers keep their digits.
"""

import asyncio
import csv
import io
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hmac import compare_digest
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from veilmq.admin.api import Refused
from veilmq.console import ApiRefused, Calls
from veilmq.console.sessions import Done, Session, form_of, hashed
from veilmq.console.showing import iso, page
from veilmq.model.settings.access import Action

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are wide forms, which some spreadsheets take for the others. Source: OWASP, CSV Injection."""
_ONCE: Final = re.compile(r"[0-9a-f]{32}")
_REUSED: Final = (
    "This form was sent before, with other contents. Nothing was done now: send it again if you want this, too."
)
Work = Callable[[dict[str, str], str], Awaitable[Done]]
"""Does what a form asks for; the second argument is the form's key. Raises ApiRefused."""


class Page(NamedTuple):
    """A page or an act. is_polled: a page's script asks for it, which is no use of the session."""

    path: str
    shown: "Callable[[Visit], Awaitable[Response]]"
    method: str = "GET"
    is_polled: bool = False


class Visit:
    """The request, its session, and the API with the session's rights."""

    def __init__(
        self, request: Request, session: Session, api: Calls, now: int, *, shows_bodies: bool, in_cluster: bool
    ) -> None:
        self.shows_bodies = shows_bodies
        self.in_cluster = in_cluster
        self.request = request
        self.session = session
        self.api = api
        self.now = now
        self._form: dict[str, str] | None = None

    @property
    def members(self) -> dict[str, str]:
        """The query string; the last one counts."""
        return dict(self.request.query_params)

    def may(self, action: str, account: str | None = None, queue: str | None = None) -> bool:
        """Whether the session may do it, for a page that hides what would be refused."""
        return self.session.caller.may(Action(action), account, queue)

    def show(self, template: str, status: int = 200, **values: Any) -> Response:
        """The page of a template."""
        done = self.session.acts.get(self.members.get("done", ""))
        shown = {"visit": self, "now": self.now, "said": "" if done is None else done.text}
        return page(template, status, **(shown | values))

    def news(self, cells: Mapping[str, str], *, is_over: bool = False) -> Response:
        """Texts of cells for the page's script, and when they were true. is_over: the page shows something else now,
        and is to be loaded again."""
        headers = {"as-of": iso(self.now)}
        if not is_over:
            headers["etag"] = f'"{hashed(repr(sorted(cells.items()))).hex()[:24]}"'
        return JSONResponse({"cells": cells, "over": is_over}, headers=headers)

    def download(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Response:
        """The rows as an attachment, in the `form` that the address asks for. name: of the file, of characters that
        need no quoting."""
        form = self.members.get("form", "json")
        if form not in {"csv", "json"}:
            raise Refused(400, "no_form", "The form is csv or json.")
        named = {"content-disposition": f'attachment; filename="{name}.{form}"'}
        shown = [flat(row) for row in rows]
        if form == "csv":
            return Response(in_csv(shown), media_type="text/csv; charset=utf-8", headers=named)
        return Response(msgspec.json.encode(shown), media_type="application/json", headers=named)

    @property
    def query(self) -> str:
        """The query string with its question mark, or nothing."""
        query = self.request.url.query
        return f"?{query}" if query else ""

    @property
    def pages(self) -> list[tuple[str, str, str]]:
        """The pages beside the start page, for the page's head: name, address, label."""
        pages = (
            ("events", "*", "workers", "Workers"),
            ("describe-queue", None, "failures", "Failures"),
            ("describe-topics", None, "topics", "Topics"),
            ("describe-queue", None, "jobs", "Jobs"),
            ("list-queues", None, "accounts", "Accounts"),
            ("list-queues", None, "server", "Server"),
            *([("settings", None, "cluster", "Cluster")] if self.in_cluster else []),
        )
        return [(name, f"/console/{name}", label) for action, of, name, label in pages if self.may(action, queue=of)]

    @property
    def who(self) -> str:
        """The signed-in key, for the page's head."""
        key = self.session.caller.key
        return "admin" if key is None else key.id

    @property
    def account(self) -> str | None:
        """Whose queues a list is about: of all accounts for the admin token, of its own for a key."""
        return "*" if self.session.caller.key is None else None

    @property
    def once(self) -> str:
        """A new key for a form."""
        return secrets.token_hex(16)

    def here(self, **changed: Any) -> str:
        """This page's address with other members; those of None are left out."""
        members = {name: value for name, value in (self.members | changed).items() if value not in (None, "")}
        members.pop("done", None)
        query = urlencode(members)
        return self.request.url.path + (f"?{query}" if query else "")

    async def checked_form(self) -> tuple[dict[str, str], str]:
        """The form and its key. Raises Refused (403) if it is not one of this session's pages."""
        if self._form is None:
            self._form = await form_of(self.request)
        given = self._form
        if not compare_digest(given.get("csrf", "").encode("utf-8", "surrogatepass"), self.session.csrf.encode()):
            raise Refused(403, "form_refused", "the form is from another session: load the page again")
        once = given.get("once", "")
        if not _ONCE.fullmatch(once):
            raise Refused(400, "form_refused", "the form has no key of its own")
        return given, once

    async def act(self, work: Work, refused: Callable[[dict[str, str], ApiRefused], Awaitable[Response]]) -> Response:
        """Do what the form asks for, once, and go to the page that shows it. refused: answers if the API refuses."""
        given, once = await self.checked_form()
        async with self.session.turn:
            done, asked = self.session.acts.get(once), _asked(self.request.url.path, given)
            if done is None:
                try:
                    done = (await asyncio.shield(work(given, once)))._replace(asked=asked)
                except ApiRefused as error:
                    return await refused(given, error)
                self.session.remember(once, done)
            elif done.asked != asked:
                return await refused(given, ApiRefused(422, {"error": "form_reused", "message": _REUSED}))
        mark = "&" if "?" in done.location else "?"
        return RedirectResponse(f"{done.location}{mark}{urlencode({'done': once})}", 303)


def _asked(path: str, given: Mapping[str, str]) -> bytes:
    """Tells what one form asks for from what another one does."""
    return hashed(repr((path, sorted(each for each in given.items() if each[0] not in {"csrf", "once"}))))


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
