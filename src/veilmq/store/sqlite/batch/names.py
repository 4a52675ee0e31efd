"""Sorted names, for lists that are read in pages.

Strategy: one sorted list per account and region, so that the cost of a page depends on its length, not on the number of
names. Names appended out of order are sorted at the next read.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from veilmq.model.queue import QueueKey

Place = tuple[str, str]
"""Account and region."""


class OrderedNames:
    """Names of queues; a name occurs once in an account and region."""

    def __init__(self) -> None:
        self._names: dict[Place, list[str]] = {}
        self._unsorted: set[Place] = set()

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, key: QueueKey) -> None:
        """Add a name."""
        place = (key.account, key.region)
        names = self._names.setdefault(place, [])
        if names and names[-1] > key.name:
            self._unsorted.add(place)
        names.append(key.name)

    def remove(self, key: QueueKey) -> None:
        """Remove a name."""
        place = (key.account, key.region)
        names = self._sorted(place)
        del names[bisect_left(names, key.name)]
        if not names:
            del self._names[place]

    def places(self, account: str | None, region: str | None) -> list[Place]:
        """Accounts and regions with names, ordered by `account/region/`; None: any."""
        if account is not None and region is not None:
            return [(account, region)] if (account, region) in self._names else []
        found = [each for each in self._names if account in (None, each[0]) and region in (None, each[1])]
        return sorted(found, key="{0[0]}/{0[1]}/".format)

    def following(self, place: Place, prefix: str, after: str) -> Iterator[str]:
        """The names in that place that begin with `prefix` and are greater than `after`, in order."""
        if place not in self._names:
            return
        names = self._sorted(place)
        for at in range(max(bisect_left(names, prefix), bisect_right(names, after)), len(names)):
            if not names[at].startswith(prefix):
                return
            yield names[at]

    def _sorted(self, place: Place) -> list[str]:
        names = self._names[place]
        if place in self._unsorted:
            self._unsorted.remove(place)
            names.sort()
        return names
