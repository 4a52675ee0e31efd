"""Checks the time of a signature: not too old and not too early.

Strategy: pure functions of the timestamp and the wall clock's reading. A header is valid for 15 minutes either way, a
signed URL for as long as it says. Source: AWS IAM User Guide, "Elements of an AWS API request signature". A wrong clock
is reported like a wrong signature (aws/aws-sdk-php #642); RequestExpired is for a URL past its own term ("Common
Errors" in the SQS API Reference).
"""

import calendar
import re
import time
from email.utils import parsedate_to_datetime
from typing import Final

from veilmq.model.instant import SECOND_US, Instant
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.authorization import show
from veilmq.protocols.sqs.errors import Refusal

SKEW_US: Final = limits.SKEW_SECONDS_MAX * SECOND_US

_STAMP: Final = re.compile(rb"[0-9]{8}T[0-9]{6}Z\Z")


def stamp_of(headers: dict[bytes, bytes]) -> bytes:
    """When the request was signed, from X-Amz-Date or Date."""
    stamp = headers.get(b"x-amz-date")
    if stamp is not None:
        return stamp
    date = headers.get(b"date")
    if date is None:
        text = "Authorization header requires existence of either a 'X-Amz-Date' or a 'Date' header."
        raise Refusal(errors.INCOMPLETE_SIGNATURE, text)
    if _STAMP.match(date):
        return date
    try:
        return parsedate_to_datetime(date.decode("latin-1")).strftime("%Y%m%dT%H%M%SZ").encode()
    except (ValueError, OverflowError):
        raise _bad_date(date) from None


def _bad_date(stamp: bytes) -> Refusal:
    text = f"Date must be in ISO-8601 'basic format'. Got '{show(stamp)}'. See http://en.wikipedia.org/wiki/ISO_8601"
    return Refusal(errors.INCOMPLETE_SIGNATURE, text)


def seconds_of(stamp: bytes) -> int:
    """Seconds since 1970 of `20260131T235959Z`."""
    if not _STAMP.match(stamp):
        raise _bad_date(stamp)
    year, month, day = int(stamp[:4]), int(stamp[4:6]), int(stamp[6:8])
    hour, minute, second = int(stamp[9:11]), int(stamp[11:13]), int(stamp[13:15])
    if not (year >= 1970 and 1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second <= 60):
        raise _bad_date(stamp)
    return calendar.timegm((year, month, day, hour, minute, second))


def _format(seconds: int) -> str:
    moment = time.gmtime(seconds)
    return time.strftime("%Y%m%dT%H%M%SZ", moment)


def check_stamp(stamp: bytes, seconds: int, day: bytes, wall: Instant, term_s: int | None = None) -> None:
    """`term_s`: the X-Amz-Expires of a signed URL. Raises SignatureDoesNotMatch if the stamp is too old, too early or
    of another day than the scope, RequestExpired if the URL's term is over."""
    if day != stamp[:8]:
        text = f"Date in Credential scope does not match the request's: '{show(day)}' != '{show(stamp[:8])}'."
        raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, text)
    lasts_s, fault = limits.SKEW_SECONDS_MAX, errors.SIGNATURE_DOES_NOT_MATCH
    if term_s is not None:
        lasts_s, fault = term_s, errors.REQUEST_EXPIRED
    if wall > (seconds + lasts_s) * SECOND_US:
        text = f"Signature expired: {show(stamp)} is now earlier than {_format(wall // SECOND_US - lasts_s)}"
        span = f"{lasts_s} s." if lasts_s % 60 else f"{lasts_s // 60} min."
        raise Refusal(fault, f"{text} ({_format(wall // SECOND_US)} - {span})")
    if wall < seconds * SECOND_US - SKEW_US:
        text = f"Signature not yet current: {show(stamp)} is still later than"
        later = _format(wall // SECOND_US + limits.SKEW_SECONDS_MAX)
        raise Refusal(errors.SIGNATURE_DOES_NOT_MATCH, f"{text} {later} ({_format(wall // SECOND_US)} + 15 min.)")


def term_of(value: bytes | None) -> int | None:
    """How many seconds a signed URL is valid, from X-Amz-Expires.

    It is optional: npm's aws4 and aws4fetch omit it, and their URLs are valid as long as a header is.
    """
    if value is None:
        return None
    if not value.isdigit() or len(value) > 9 or not 1 <= int(value) <= limits.PRESIGNED_SECONDS_MAX:
        text = f"X-Amz-Expires must be a number of seconds from 1 to {limits.PRESIGNED_SECONDS_MAX}."
        raise Refusal(errors.INCOMPLETE_SIGNATURE, text)
    return int(value)
