"""Parses durations on the command line."""

import re
from typing import Final

from veilmq.cli.exits import Exit, Failure

_UNITS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|)")


def seconds(option: str, text: str) -> float:
    """30, 30s, 500ms, 5m, 2h, 4d in seconds. Raises Failure."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise Failure(Exit.USAGE, f"{option}: expected a time such as 30s, 500ms, 5m, 2h or 4d, not {text!r}")
    return float(found[1]) * _UNITS[found[2]]
