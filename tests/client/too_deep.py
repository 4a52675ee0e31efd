"""JSON that nests deeper than any Python reads.

How deep that is differs: 3.11 ends at its 1,000 calls, 3.13 at 10,000 in C, and 3.14 where the stack of 8 MiB does.
"""

from typing import Final

TOO_DEEP: Final = "[" * 200_000 + "]" * 200_000
