"""Reads the database's own file, without the WAL over it: whether it is whole, and up to which commit it goes.

Strategy: SQLite takes a page that is neither in the WAL nor in the file for one of zeros, and does not notice that the
file under a WAL is an older copy, or a newer one. But each page of the database is in one of the two, and the table
`mark`, which each batch changes, is a single page.

Before changing it: any state that a crash leaves must pass. A checkpoint may be half done, and its last page torn: so
only a page with its checksum counts.

Source: SQLite, "Database File Format", 1.3 (The Database Header), 1.6 (B-tree Pages), 2.1 (Record Format), 4.1 (WAL
File Format).
"""

from itertools import count, takewhile
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any, Final

import apsw

_LOCK_BYTE: Final = 0x40000000
"""Its page is never written."""
_FIRST: Final = Struct(">16xH10xI")
"""Of the first page: the size of a page, and how many there are."""
_WAL_HEADER_BYTES: Final = 32
_SALTS: Final = slice(16, 24)
_FRAME: Final = Struct(">II8s8x")
"""Page, size of the database after a commit, salts, checksums."""
_CELL_AT: Final = slice(8, 10)
_LEAF_OF_ONE: Final = b"\x0d\0\0\0\1"
_WIDTHS: Final = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)
"""Bytes of a column, by its type in the record; the last two types are 0 and 1 themselves."""


def lacks(path: Path, connection: apsw.Connection) -> str | None:
    """Why pages of the database are missing; None: they are there. connection: in a read transaction, or a server's
    checkpoint could move pages between two looks. Raises apsw.Error, OSError."""
    size, pages = int(connection.pragma("page_size")), int(connection.pragma("page_count"))
    there = path.stat().st_size
    if there >= pages * size:
        return None
    in_wal = _pages_of(Path(connection.filename_wal), size) | {_LOCK_BYTE // size + 1}
    missing = sum(number not in in_wal for number in range(there // size + 1, pages + 1))
    if not missing:
        return None
    return f"{path} is cut, to {there} of {pages * size} bytes, and {missing} of its pages are missing"


def missing_end(path: Path) -> str:
    """What to add to SQLite's error if the file is shorter than its first page says; else "". Call with no connection
    open, as closing the file drops SQLite's locks."""
    try:
        with path.open("rb") as file:
            size, pages = _FIRST.unpack(file.read(_FIRST.size))
        there = path.stat().st_size
    except (OSError, StructError):
        return ""
    return f"; the file is cut, to {there} of {size * pages} bytes" if there < size * pages else ""


def _pages_of(wal: Path, size: int) -> set[int]:
    """Numbers of the pages in a WAL. Frames behind its last commit count, too. Raises OSError."""
    if not wal.exists():
        return set()
    with wal.open("rb", buffering=0) as file:
        salts = file.read(_WAL_HEADER_BYTES)[_SALTS]

        def frame(number: int) -> bytes:
            file.seek(_WAL_HEADER_BYTES + number * (_FRAME.size + size))
            return file.read(_FRAME.size)

        whole = takewhile(lambda head: len(head) == _FRAME.size, map(frame, count()))
        return {page for page, _, found in map(_FRAME.unpack, whole) if found == salts}


def mark_of(connection: apsw.Connection) -> tuple[int, int] | None:
    """Offset of the next event and lease clock, as the file has them; None: that cannot be known. Raises
    apsw.Error."""
    size = int(connection.pragma("page_size"))
    root: Any = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'mark'").get
    try:
        _, page = connection.read("main", 0, (root - 1) * size, size)
    except apsw.IOError:  # its checksum is wrong
        return None
    try:
        is_whole = connection.execute("SELECT verify_checksum(?)", (page,)).get
    except apsw.SQLError:  # this SQLite cannot say
        return None
    if not is_whole or not page.startswith(_LEAF_OF_ONE):
        return None
    at = int.from_bytes(page[_CELL_AT], "big") + 2  # behind the cell's length and rowid, one byte each
    kinds = page[at + 1 : at + page[at]]
    at += page[at]
    columns = []
    for kind in kinds:
        width = _WIDTHS[kind]
        columns.append(kind - 8 if kind > 7 else int.from_bytes(page[at : at + width], "big", signed=True))
        at += width
    _, clock, _, _, offset = columns
    return offset, clock
