"""Paging of lists: the request headers, and the marker of the next page.

Strategy: a marker is the last name of its page in base64, so that no state is kept between pages. Names that MNS does
not allow are left out, so a page may be short or empty and still have a next page.
"""

from base64 import b64decode, urlsafe_b64encode
from typing import NamedTuple

from veilmq.protocols.mns import limits
from veilmq.protocols.mns.call import Asked
from veilmq.protocols.mns.errors import bad, out_of_range
from veilmq.protocols.mns.parameters import boolean, integer


class Page(NamedTuple):
    """The requested part of a list."""

    prefix: str
    after: str
    count_max: int
    with_meta: bool


def read_page(asked: Asked) -> Page:
    """x-mns-prefix, x-mns-marker, x-mns-ret-number and x-mns-with-meta. Raises Refusal: InvalidArgument."""
    count = limits.RET_NUMBER_DEFAULT
    given = asked.header(b"x-mns-ret-number")
    if given:
        value = integer(given)
        if value is None or not 1 <= value <= limits.RET_NUMBER_MAX:
            raise out_of_range("x-mns-ret-number", 1, limits.RET_NUMBER_MAX)
        count = value
    with_meta = boolean(asked.header(b"x-mns-with-meta") or "false")
    if with_meta is None:
        raise bad("x-mns-with-meta", "it is true or false.")
    return Page(asked.header(b"x-mns-prefix"), _read_marker(asked.header(b"x-mns-marker")), count, with_meta)


def _read_marker(text: str) -> str:
    if not text:
        return ""
    try:
        name = b64decode(text.encode("ascii"), b"-_", validate=True).decode()
    except ValueError:
        name = ""
    if not name:
        raise bad("x-mns-marker", "it is not one that a list gave.")
    return name


def marker_of(names: list[str], more: bool) -> str:
    """The element with the next page's marker; empty on the last page."""
    if not more:
        return ""
    return f"<NextMarker>{urlsafe_b64encode(names[-1].encode()).decode()}</NextMarker>"
