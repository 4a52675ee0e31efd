"""Reads query parameters: whole numbers in a range, and required texts."""

import re
from typing import Final

from veilmq.protocols.azure import limits
from veilmq.protocols.azure.errors import bad_parameter, missing_parameter, out_of_range

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}\Z")


def whole_number(parameters: dict[str, str], name: str, minimum: int, maximum: int) -> int | None:
    """The parameter's value; None if it is not given. Raises Refusal: not a number, or out of range."""
    text = parameters.get(name)
    if text is None:
        return None
    if not _INTEGER.match(text):
        raise bad_parameter(name, text, "Not a whole number.")
    value = int(text)
    if not minimum <= value <= maximum:
        raise out_of_range(name, text, minimum, maximum)
    return value


def required(parameters: dict[str, str], name: str) -> str:
    """The parameter's text. Raises Refusal: MissingRequiredQueryParameter."""
    text = parameters.get(name)
    if not text:
        raise missing_parameter(name)
    return text


def check_timeout(parameters: dict[str, str]) -> None:
    """Check that `timeout` is a number of seconds; a value above the service's maximum means the maximum, so any is
    accepted."""
    whole_number(parameters, "timeout", 0, limits.TIMEOUT_SECONDS_MAX)
