"""Options as users write them: times, and the option behind a parameter that an error names.

Strategy: the lower rooms name a value by its member or parameter (`wait_us`, `messages[0].ttl_us`) in errors of
servers, stores and workers, but a user knows the option. One table maps them; units that nobody typed are left out.
"""

import re
from typing import Final

from veilmq.cli.failures import Exit, Failure

_OPTIONS: Final = {
    # Members of /api/v1 (admin/api/inputs.py) and fields of the store's errors, without `_us`.
    "name": "QUEUE",
    "source": "QUEUE",
    "message_id": "MESSAGE_ID",
    "handles": "HANDLE",
    "task": "QUEUE",
    "messages": "BODY",
    "body": "BODY",
    "attributes": "--attribute",
    "redrive": "--dead-letters",
    "target": "--dead-letters",
    "receive_count_max": "--max-receives",
    "tags": "--tag",
    "destination": "--to",
    "rate_max": "--rate",
    "first_lease_min": "--first-lease-min",
    # A worker's parameters, and its keeper's.
    "handler": "MODULE:HANDLER",
    "messages_max": "--count",
}
_KEEPER: Final = {"visibility_timeout": "--lease", "interval": "--lease", "minimal_life": "--lease"}
"""Parameters of a worker's keeper that are derived from the lease."""
_INDEX: Final = re.compile(r"\[[^]]*\]")
_MICROSECONDS: Final = re.compile(r" \(\d+ microseconds\)")
_IN_SENTENCES: Final = {
    "kind=async": "--kind async",
    "poison_after": "--poison-after",
    "interval + minimal_life": "half of it",
}
_UNITS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|)")


def option_of(parameter: str, *, worker: bool = False) -> str:
    """The option or argument behind a member, field or parameter: `messages[0].delay_us` is `--delay`."""
    parts = [_INDEX.sub("", part).removesuffix("_us") for part in parameter.split(".")]
    if "attributes" in parts:  # its name, value or type
        return _OPTIONS["attributes"]
    known = (_KEEPER.get(parts[-1]) if worker else None) or _OPTIONS.get(parts[-1])
    return known or f"--{parts[-1].replace('_', '-')}"


def refused_value(parameter: str, reason: str, *, worker: bool = False) -> str:
    """The message about a refused value: `--wait: Expected at most 30s`."""
    said = _MICROSECONDS.sub("", reason)
    for below, above in _IN_SENTENCES.items():
        said = said.replace(below, above)
    return f"{option_of(parameter, worker=worker)}: {said}"


def seconds(option: str, text: str) -> float:
    """30, 30s, 500ms, 5m, 2h, 4d in seconds. Raises Failure."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise Failure(Exit.USAGE, f"{option}: expected a time such as 30s, 500ms, 5m, 2h or 4d, not {text!r}")
    return float(found[1]) * _UNITS[found[2]]
