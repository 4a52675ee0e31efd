"""Pages with numbers that cannot be are read, and the reading ends; a row that an index names in vain is damage."""

from struct import pack_into

import pytest
from tests.support.contract.stage import Stage
from tests.support.sqlite import store_of

from veilmq.model.errors import StoreUnknown
from veilmq.model.messages import Extras
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.raw import LEAF, Gap, rows

USABLE = 4096


class OnePage:
    """A database of one page, behind the file's header."""

    count = 2
    usable = USABLE

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __getitem__(self, number: int) -> bytes:
        assert number == self.count
        return self._content


def test_a_free_block_that_follows_itself() -> None:
    content = bytearray(USABLE)
    # An empty leaf. Its first free block is at 4,000, where the next one is named: 4,000 again, and of no size.
    pack_into(">BHHHB", content, 0, LEAF, 4_000, 0, 4_000, 0)
    pack_into(">HH", content, 4_000, 4_000, 0)
    assert list(rows(OnePage(bytes(content)), 2, lambda *_: True, set(), set())) == [Gap(2)]


def test_a_message_that_only_an_index_has(stage: Stage) -> None:
    """As two pages that changed places leave it."""
    queue = stage.create("jobs.fifo")
    sent = stage.send(queue, "1", extras=Extras(group="north", deduplication_id="1"))
    stage.store.close()
    database = store_of(stage).directory.database
    connection = connect(database)
    where = "type = 'index' AND tbl_name = 'message'"
    indexes = connection.execute(f"SELECT rowid, * FROM sqlite_schema WHERE {where}").fetchall()
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(f"DELETE FROM sqlite_schema WHERE {where}")
    connection.close()
    connection = connect(database)
    connection.execute("DELETE FROM message")
    connection.execute("PRAGMA writable_schema = ON")
    connection.executemany(
        "INSERT INTO sqlite_schema (rowid, type, name, tbl_name, rootpage, sql) VALUES (?, ?, ?, ?, ?, ?)", indexes
    )
    connection.close()
    stage.open()
    with pytest.raises(StoreUnknown, match=f"message {sent.sequence} has no row.*veilmq check"):
        stage.receive(queue)
