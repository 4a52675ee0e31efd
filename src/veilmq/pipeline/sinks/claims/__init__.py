"""Which batches of which query a Delta table has: the transactions of its commits ("Transaction Identifiers").

    <query>             the number of its last batch; <query> is the id that its checkpoint keeps
    <app>               of a query with a name: the last number under that name, and <app>/<query> is the query's own
    <query>/offsets     the number again, with a digest of what Spark logged of the batch before it ran

Strategy: a number alone does not tell one batch from another. Two copies of a checkpoint give their next batches the
same number, and so does one that was restored from a backup. Spark logs each batch in `offsets/NUMBER`, with the
instant and the sources' offsets, before it runs, and repeats exactly that batch after a crash. So the digest of that
file is the batch's mark: of a repeated batch it is the same, and of two batches of one number it differs. The number is
in it, because a release that knows no marks may commit the next batch.

Before changing it: a batch that is taken for a repeated one is written nowhere, and a drain deletes its messages. A
mark that changes for a repeated batch stops its query for good. Without a mark the number decides.
"""

import hashlib
from pathlib import Path
from typing import Any, Final, NamedTuple

from veilmq.pipeline.errors import DeltaRefused, OptionInvalid
from veilmq.pipeline.places import here

OFFSETS: Final = "offsets"
"""The log in a checkpoint that has an entry for each batch before it runs."""
_DIGEST_BITS: Final = 32
_NUMBERS: Final = 1 << 31
"""A transaction's version has 63 bits."""
MEND_BACK: Final = (
    "Bring the newest checkpoint and a drain's directory back. Or start again with new ones and a new table."
)
_MEND_COPY: Final = (
    "Go on with the copy that wrote that batch. If there is no other, start again with a new checkpoint, and a drain "
    "with a new directory: the table may then get rows of its last batch a second time."
)


class Claim(NamedTuple):
    """A batch that a query has for a table."""

    app: str
    """The query's id, or a name for it."""
    query: str
    batch: int
    mark: int | None = None
    """See `mark_of`."""
    after: int | None = None
    """The batch that must be the table's last one of `app`, -1 for none; None: any."""

    @property
    def own(self) -> str:
        """The application that no other query has."""
        return self.app if self.app == self.query else f"{self.app}/{self.query}"

    @property
    def _marks(self) -> str:
        return f"{self.query}/{OFFSETS}"

    def versions(self, table: Any) -> dict[str, int]:
        """The transactions of the commit that adds the batch to a deltalake table."""
        found = {self.app: max(self.batch, last(table, self.app)), self.own: self.batch}
        return found if self.mark is None else found | {self._marks: self.mark}

    def is_late(self, table: Any) -> bool:
        """Whether the table has another last batch of `app` than `after`."""
        return self.after is not None and last(table, self.app) != self.after

    def is_held(self, table: Any, path: str) -> bool:
        """Whether this version of the table has the batch. table: None if there is none.

        Raises DeltaRefused if the batch may be another one of that number, and as deltalake does.
        """
        has = last(table, self.own)
        if has > self.batch and self.after is None:  # Spark repeats only the last one
            raise DeltaRefused(went_back(path, has, self.batch), MEND_BACK)
        if has == self.batch and self.is_of_a_copy(table):
            raise DeltaRefused(copied(path, self.batch), _MEND_COPY)
        if has >= self.batch:
            return True
        if has < 0 and last(table, self.app) >= self.batch:
            mend = "Bring that query's checkpoint back, or give this one another name."
            wrong = f"The table {path} has batch {self.batch} of another query under the name app={self.app}."
            raise DeltaRefused(wrong, mend)
        return False

    def is_of_a_copy(self, table: Any) -> bool:
        """Whether the table has another batch of this number, and both are marked."""
        has = table.transaction_version(self._marks)
        if has is None or self.mark is None:
            return False
        return bool(has >> _DIGEST_BITS == self.mark >> _DIGEST_BITS and has != self.mark)


def mark_of(checkpoint: Path | str, batch: int) -> int | None:
    """The mark of a query's batch; None: its checkpoint is not here, as one that only Spark's connector reaches.

    Raises OptionInvalid if it is here and cannot be read: without a mark, the batch of a copy would count as repeated.
    """
    there = here(checkpoint) if checkpoint else None
    if there is None:
        return None
    entry = there / OFFSETS / str(batch)
    try:
        logged = entry.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        wrong = f"{entry} of the query's checkpoint cannot be read: {error.strerror}."
        raise OptionInvalid(wrong, "Let the driver's user read it, and run the query again.") from None
    digest = int.from_bytes(hashlib.sha256(logged).digest()) >> (256 - _DIGEST_BITS)
    return (batch % _NUMBERS) << _DIGEST_BITS | digest


def last(table: Any, app: str) -> int:
    """The application's last batch; -1: there is none, or no table."""
    version = None if table is None else table.transaction_version(app)
    return -1 if version is None else int(version)


def went_back(table: str, has: int | str, reached: int) -> str:
    """What is wrong with a table of which a query's checkpoint knows the batches up to `reached` (-1: none)."""
    known = f"ends with batch {reached}" if reached >= 0 else "has none"
    return f"{table} has batch {has} of this query, and the checkpoint {known}: it is of an earlier time."


def copied(table: str, batch: int | str) -> str:
    """What is wrong with a table that has another batch of that number."""
    return f"{table} has another batch {batch} of this query: its checkpoint was copied, or is of an earlier time."
