"""The pages of a database file that nothing uses.

Strategy: the header names the first trunk page, and each trunk names the next one and the free pages that it lists.
What cannot be right is passed over, so the list of a damaged file comes to an end.

Source: SQLite, "Database File Format", 1.5 (The Freelist).
"""

from collections.abc import Iterator
from itertools import chain

from veilmq.store.sqlite.raw import Image


def free_pages(image: Image) -> set[int]:
    """The pages of the free list, as far as it can be read."""
    return set(chain.from_iterable(_free(image)))


def _free(image: Image) -> Iterator[list[int]]:
    trunk = int.from_bytes(image[1][32:36]) if image.count else 0
    passed: set[int] = set()
    while 1 < trunk <= image.count and trunk not in passed:
        passed.add(trunk)
        page = image[trunk]
        count = min(int.from_bytes(page[4:8]), image.usable // 4 - 2)
        yield [trunk, *(int.from_bytes(page[8 + 4 * at : 12 + 4 * at]) for at in range(count))]
        trunk = int.from_bytes(page[:4])
