"""Translates parameter names in errors of servers, stores and workers to command-line options.

Strategy: the lower rooms name a value by its member or parameter (`wait_us`, `messages[0].ttl_us`), but a user knows
the option. One table maps them; units that nobody typed are left out.
"""

import re
from typing import Final

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
