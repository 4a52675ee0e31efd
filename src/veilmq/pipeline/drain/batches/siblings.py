"""Other drains of the same queues: which messages are theirs.

    GROUP/one/manifests      or      GROUP/one
    GROUP/two/manifests              GROUP/two

What the lease gives: while a drain lives, no other one receives what it holds. What stands in the way: a drain that was
killed, or stopped for longer than a lease, lets go of messages that may be in its table already. Whoever receives them
then must not emit them again, and cannot know: only the other's checkpoint says whether its last batch counts.

Strategy: all drains of a queue keep their directories below one, the option `group`, and look at each other's
manifests. A message that comes for the first time (`receive_count` is 1) is nobody's; that is nearly every one, and
costs nothing. Any other is looked for among the others' ids:

    in a batch that its drain committed     it is in that table: it is deleted
    in the last batch                       undecided: it is left to its drain, until that goes on
    nowhere                                 it is ours

For this to hold a drain also checks, after its manifest is on disk, that it held every lease until then: otherwise
another one may have looked before the manifest was there. If not, it takes the manifest back.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from veilmq.pipeline.drain.batches import loaded
from veilmq.pipeline.drain.batches.queues import NAME, joined
from veilmq.pipeline.drain.manifests import OWNER, numbered, read_owner
from veilmq.pipeline.errors import ManifestDamaged
from veilmq.pipeline.options import GROUP_DEPTH_MAX

_DEPTHS: Final = tuple("/".join("*" * depth) for depth in range(1, GROUP_DEPTH_MAX + 1))


class Siblings:
    """The other drains below `group`. For one thread."""

    def __init__(self, group: Path, own: Path, queue: str) -> None:
        """own: the drain's own directory. queue: the name of what it drains."""
        self._group, self._own, self._queue = group, own.resolve(), queue
        self._keys: dict[Path, frozenset[str]] = {}

    def claims(self, ids: Iterable[str]) -> dict[str, bool]:
        """Those of the ids that are another drain's; True: its batch was committed.

        Raises ManifestDamaged, DirectoryForeign.
        """
        asked = {_key(self._queue, each): each for each in ids}
        found: dict[str, bool] = {}
        seen: dict[Path, frozenset[str]] = {}
        for directory in self._directories():
            for path, is_committed in self._files(directory, seen):
                found |= {asked[key]: is_committed for key in asked.keys() & seen[path]}
        self._keys = seen
        return found

    def _directories(self) -> Iterator[Path]:
        for depth in _DEPTHS:
            for path in self._group.glob(f"{depth}/{OWNER}"):
                if path.parent.resolve() != self._own:
                    yield path.parent

    def _files(self, directory: Path, seen: dict[Path, frozenset[str]]) -> list[tuple[Path, bool]]:
        """The directory's files as they were at one moment, with their keys in `seen`.

        Its drain may turn a manifest into a file of ids meanwhile, and a listing that runs then may show neither. Names
        are never used again, so two equal listings have missed nothing.
        """
        listed: list[tuple[int, Path]] | None = None
        while True:
            before, reached = listed, read_owner(directory)
            listed = [*numbered(directory, "arrow"), *numbered(directory, "ids")]
            if listed != before:
                continue
            queue, reach = reached  # from before the listing: one from after it may be of another batch of that number
            try:
                for _, path in listed:
                    seen[path] = self._keys.get(path) or _keys(path, queue)
            except ManifestDamaged:
                if all(path.exists() for _, path in listed):
                    raise
                continue
            return [(path, path.suffix == ".ids" or seq <= reach) for seq, path in listed]


def _keys(path: Path, queue: str) -> frozenset[str]:
    if path.suffix == ".arrow":
        return frozenset(_key(queue, each.id) for each in loaded(path))
    try:
        return frozenset(_key(queue, each) for each in path.read_text().split("\n"))
    except OSError as error:
        raise ManifestDamaged(f"{path} cannot be read: {error.strerror}.", "Restore it from a backup.") from None


def _key(queue: str, message: str) -> str:
    """The same for drains of one queue and of many."""
    return message if queue == NAME else joined(queue, message)
