"""Converts the Date header, RFC 1123 in GMT, to an instant and to the form of signature V4."""

import re
from calendar import timegm
from functools import lru_cache
from typing import Final

from veilmq.model.instant import SECOND_US, Instant
from veilmq.protocols.bounded import remembered

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_RFC1123: Final = re.compile(
    rb"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), ([0-3]?[0-9]) ([A-Z][a-z]{2}) ([12][0-9]{3}) "
    rb"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9]|60) (?:GMT|UTC|\+0000)\Z"
)
_DATE_BYTES_MAX: Final = 31
_MONTH_DAYS: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@remembered(_DATE_BYTES_MAX)
def read_date(text: bytes) -> Instant | None:
    """The instant of a date; None if it is invalid. Cached: all requests of a second have the same text."""
    found = _RFC1123.match(text)
    if found is None or found[2].decode() not in _MONTHS:
        return None
    month = _MONTHS.index(found[2].decode()) + 1
    day, year, hour, minute, second = (int(found[place]) for place in (1, 3, 4, 5, 6))
    if not 1 <= day <= _MONTH_DAYS[month - 1]:
        return None
    return Instant(timegm((year, month, day, hour, minute, second)) * SECOND_US)


@lru_cache(1_024)
def compact(text: bytes) -> bytes:
    """A date that `read_date` accepts, as `yyyyMMddTHHmmssZ`."""
    found = _RFC1123.match(text)
    assert found is not None
    month = _MONTHS.index(found[2].decode()) + 1
    return b"%b%02d%02dT%b%b%bZ" % (found[3], month, int(found[1]), found[4], found[5], found[6])
