"""What an operator gives a server: settings, and files of queues to declare. Here is how any file of an operator is
read: with a bound on size, and TOML with the line of each value.

Strategy: everything is checked when it is read, and an error names the file and the line or the setting. tomllib gives
values without positions, so a scan of the lines finds the table headers and the keys below them; that is good enough
for error messages. No message repeats a value: it may be a secret.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final

FILE_BYTES_MAX: Final = 4 * 1024 * 1024

_HEADER: Final = re.compile(r"\s*\[\[?([A-Za-z0-9_.\s-]+)\]\]?\s*(?:#.*)?$")
_DEPTH_MAX: Final = 4
"""Parts of a table header: nothing that is looked up is deeper."""
_KEY: Final = re.compile(r"\s*\"?([A-Za-z0-9_-]+)\"?\s*=")
_AT: Final = re.compile(r"\(at (?:line (\d+), column (\d+)|end of document)\)")


class FileInvalid(Exception):
    """A file that cannot be used: its path, the line, and the reason; `str` shows all three.

    errno: the system's, if the file could not be read; None if its contents are wrong.
    """

    def __init__(self, path: Path, reason: str, line: int | None = None, errno: int | None = None) -> None:
        super().__init__(f"{path}: {reason}" if line is None else f"{path}: line {line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason
        self.errno = errno


def read_text(path: Path, *, private: bool = False) -> str:
    """The text of a file, without a byte order mark. Raises FileInvalid.

    private: refuse it if anybody but its owner may read or write it.
    """
    try:
        # Check the open file, so that nobody can swap it between the check and the read.
        with open(path, "rb") as file:
            if private and os.fstat(file.fileno()).st_mode & 0o077:
                raise FileInvalid(path, f"it holds secrets and is open to other users: chmod 600 {path}")
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise FileInvalid(path, f"cannot be read: {error.strerror}", errno=error.errno) from None
    if len(raw) > FILE_BYTES_MAX:
        raise FileInvalid(path, f"is longer than {FILE_BYTES_MAX} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileInvalid(path, "is not UTF-8", error.object[: error.start].count(b"\n") + 1) from None


def read_toml(path: Path, *, private: bool = False) -> tuple[dict[str, Any], "LineNumbers"]:
    """The contents of a TOML file, and their line numbers. Raises FileInvalid."""
    return parse_toml(path, read_text(path, private=private))


def parse_toml(path: Path, text: str) -> tuple[dict[str, Any], "LineNumbers"]:
    """The same for the file's text. Raises FileInvalid."""
    try:
        return tomllib.loads(text), LineNumbers(text)
    except (ValueError, RecursionError) as error:  # ValueError: an integer beyond Python's own bound of digits, too
        # The rest of tomllib's message may quote the file.
        found = _AT.search(str(error))
        if found is None:
            raise FileInvalid(path, "is not TOML") from None
        line = int(found[1]) if found[1] else text.rstrip("\n").count("\n") + 1
        reason = f"is not TOML at column {found[2]}" if found[1] else "is not TOML: it ends too early"
        raise FileInvalid(path, reason, line) from None


class LineNumbers:
    """The line numbers of tables and keys: ("account", 1, "key", 0) is the first `[[account.key]]` of the second
    account."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[Any, ...], int] = {}
        counts: dict[tuple[Any, ...], int] = {}
        here: tuple[Any, ...] = ()
        for number, line in enumerate(text.splitlines(), 1):
            header = _HEADER.match(line)
            if header is not None:
                *around, last = (part.strip() for part in header[1].split(".", _DEPTH_MAX)[:_DEPTH_MAX])
                here = ()
                for part in around:
                    here = (*here, part, counts.get((*here, part), 0))
                here = (*here, last)
                counts[here] = counts.get(here, -1) + 1
                here = (*here, counts[here])
                self._lines[here] = number
                self._lines.setdefault(here[:-1], number)
                continue
            key = _KEY.match(line)
            if key is not None:
                self._lines.setdefault((*here, key[1]), number)

    def of(self, *where: Any) -> int | None:
        """The line of `where`, for example ("account", 0, "key", 2, "secret"), or of the closest enclosing table."""
        for length in range(len(where), 0, -1):
            if where[:length] in self._lines:
                return self._lines[where[:length]]
        return None
