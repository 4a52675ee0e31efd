"""Whether the system says that its clock is synchronised.

Strategy: on Linux, `adjtimex` in a mode that changes nothing returns TIME_ERROR while no time service keeps the clock.
Where there is no such call, or a sandbox forbids it, the answer is no.
"""

import ctypes
from typing import Final

_TIMEX_BYTES: Final = 1024
"""More than a `struct timex` has; its first member, `modes`, is 0: read only."""
_TIME_ERROR: Final = 5


def is_synchronised() -> bool:
    """Whether a time service keeps the clock, as far as the system knows."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return False
    return 0 <= int(state) < _TIME_ERROR
