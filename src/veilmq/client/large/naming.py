"""Names of objects: when each was made, for how long its message may live, and chance.

    QUEUE/1767225600-0-5f0c...        sent at that Unix second; lives as long as its queue retains
    QUEUE/1767225600-86400-5f0c...    a message with a time to live of its own

Strategy: a sweep judges an object without any message at hand, so what it must know stands in the name.
"""

import math
import re
import secrets
from typing import Any, Final

from veilmq.client.clock import Clock
from veilmq.model.errors import ParameterInvalid

_CHANCE_BYTES: Final = 16
_STAMP: Final = re.compile(r"(?:\A|/)([0-9]{1,12})-([0-9]{1,12})-[0-9a-f]{32}(?:/|\Z)")


def new_stamp(clock: Clock, ttl: Any) -> str:
    """Raises ParameterInvalid for a ttl that is no number of seconds."""
    if ttl is not None and not (isinstance(ttl, int | float) and math.isfinite(ttl) and ttl > 0):
        raise ParameterInvalid(parameter="ttl", reason=f"must be a number of seconds above 0, not {ttl!r}")
    life = 0 if ttl is None else math.ceil(ttl)
    return f"{int(clock.wall())}-{life}-{secrets.token_hex(_CHANCE_BYTES)}"


def made_and_life(key: str) -> tuple[float, float] | None:
    """(Unix seconds, own time to live or 0) from a key; None if it is not of this form."""
    found = _STAMP.search(key)
    return None if found is None else (float(found[1]), float(found[2]))
