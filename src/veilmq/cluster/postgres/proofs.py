"""What another server says of its tables, before a snapshot of this one's is published.

Strategy: whoever wants to publish asks, with the record that its copy has at least. One other server answers: it reads
its own tables as they are at some record from that one on, and writes their digest and the record's number. The asker
then brings its copy to that very record and compares. So nobody has to stop at a record. A follower answers at once;
the owner leaves that to the followers for some seconds.
"""

from typing import Any, Final, LiteralString, NamedTuple
from uuid import UUID

import psycopg

from veilmq.cluster.postgres import Connected, Postgres, Session, Unreachable
from veilmq.cluster.postgres.schema import SHARD, look

OWNER_WAITS_SECONDS: Final = 5.0
_OLD_SECONDS: Final = 900.0
"""After that nobody waits for an answer any more."""

_ASK: Final[LiteralString] = """
    insert into veilmq.proof values (%s, %s, %s, clock_timestamp(), null, null, null)
    on conflict (id) do update set wanted = excluded.wanted, asker = excluded.asker, asked = excluded.asked,
        claimed = null, lsn = null, digest = null
"""
_CLAIM: Final[LiteralString] = """
    update veilmq.proof set claimed = %s
    where id = %s and claimed is null and asker <> %s and wanted <= %s
        and extract(epoch from clock_timestamp() - asked) between %s and %s
    returning wanted
"""
_ANSWER: Final[LiteralString] = (
    "update veilmq.proof set lsn = %s, digest = %b where id = %s and claimed = %s and wanted = %s"
)
_LOOK: Final[LiteralString] = "select claimed, lsn, digest from veilmq.proof where id = %s and asker = %s"


class Proof(NamedTuple):
    """What another server has said."""

    by: str
    """Its name, once it is about to answer; empty: nobody is."""
    lsn: int
    """0: it has not answered yet."""
    digest: bytes


class Proofs(Connected):
    """Asks and answers, as one server. One thread."""

    def __init__(self, postgres: Postgres, incarnation: UUID, name: str) -> None:
        self._postgres = postgres
        self._incarnation = incarnation
        self._name = name

    def ask(self, lsn: int) -> None:
        """Ask for the digest at that record or a later one. Raises Unreachable, Unfit."""
        self._execute(_ASK, (SHARD, lsn, self._name))

    def look(self) -> Proof:
        """What was answered until now. Raises Unreachable, Unfit."""
        row = self._execute(_LOOK, (SHARD, self._name))
        by, lsn, digest = row or (None, None, None)
        return Proof(by or "", lsn or 0, bytes(digest or b""))

    def claim(self, lsn: int, *, owns: bool) -> int | None:
        """Whether this server, which has that record, is to answer: what to hand to `answer`. Raises Unreachable,
        Unfit."""
        waits_s = OWNER_WAITS_SECONDS if owns else 0.0
        row = self._execute(_CLAIM, (self._name, SHARD, self._name, lsn, waits_s, _OLD_SECONDS))
        return None if row is None else int(row[0])

    def answer(self, claimed: int, lsn: int, digest: bytes) -> None:
        """Say what this server's tables hold at that record. Raises Unreachable, Unfit."""
        self._execute(_ANSWER, (lsn, digest, SHARD, self._name, claimed))

    def _execute(self, statement: LiteralString, parameters: tuple[Any, ...]) -> tuple[Any, ...] | None:
        try:
            cursor = self._connected().execute(statement, parameters)
            return cursor.fetchone() if cursor.description else None
        except psycopg.Error as error:
            self.close()
            raise Unreachable(f"PostgreSQL does not answer: {error}") from error

    def _connected(self) -> Session:
        if self._session is None or not self._postgres.is_usable(self._session):
            self.close()
            self._session = self._postgres.connect()
            look(self._session, incarnation=self._incarnation)
        return self._session
