"""Answers that something between client and service wrote (a proxy, a portal), and their error.

Strategy: a service gives each of its answers a request id, but not all emulators do, and a gateway may remove it. So an
id is demanded once an earlier answer had one; before that, only what the body can show decides. Header names are
compared in any case: proxies change it.
"""

from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from veilmq.client.errors import TransportError

_REDIRECTED: Final = 300


class RequestIds:
    """Whether the answers of one account or client have request ids. Any thread."""

    def __init__(self, header: str) -> None:
        """header: the one with the id, in lower case."""
        self.header = header
        self._seen = False

    def known(self, headers: Mapping[str, str], fits: Callable[[], bool]) -> bool:
        """Whether an answer can be the service's. fits: asked where no answer had an id: can the body be?"""
        if _header(headers, self.header) is not None:
            self._seen = True
            return True
        return not self._seen and fits()

    def lacking(self, headers: Mapping[str, str]) -> str:
        """The header, if it is demanded and missing; else an empty text."""
        return self.header if self._seen and _header(headers, self.header) is None else ""


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """By its name in lower case. headers: an SDK's own mapping, whose keys may be as they were sent."""
    found = headers.get(name)
    return next((value for key, value in headers.items() if key.lower() == name), None) if found is None else found


def foreign_answer(
    status: int, url: str = "", headers: Mapping[str, str] | None = None, lacking: str = ""
) -> TransportError:
    """The error for an answer that is no refusal and cannot be the service's: a redirection, the log-in page of a proxy
    or portal, an answer that was cut off. url: that was asked. lacking: the header or value whose absence shows it."""
    host = place_of(url)
    what, why = f"the answer is a web page or the like (HTTP {status})", "wrote it, or cut it off"
    if status >= _REDIRECTED:
        to = place_of(_header(headers or {}, "location") or "")
        what, why = f"the answer is a redirection{f' to {to}' if to else ''} (HTTP {status})", "wrote it"
    elif lacking:
        what, why = f"HTTP {status} without {lacking}", "wrote that answer, or removed or changed the header"
    reason = f"{f'{host}: ' if host else ''}{what}: something between here and the service {why}"
    return TransportError(reason=reason, may_have_happened=True)


def place_of(url: str) -> str:
    """Host and port of a URL, without user, password and query, any of which may be secret."""
    try:
        place = urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return ""
    return "".join(each for each in place if each.isprintable())
