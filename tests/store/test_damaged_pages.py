"""Pages whose numbers make no sense are read to an end."""

from struct import pack_into

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
