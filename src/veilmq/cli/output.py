"""Output of commands: in any encoding, to a file that may be full or a pipe that may close; tables and a progress bar.

Strategy: a character that stdout cannot encode is written as a JSON escape (`\\u20ac`), so that JSON stays valid. The
command flushes its own buffer: otherwise the interpreter would report an error at exit in its own words. The bar is for
long work, on stderr if that is a terminal. rich is imported only when a table is printed. Control characters in all
foreign text are escaped: a body must not drive a terminal.
"""

import codecs
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

OUTPUT_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of a file that is full."""
_ESCAPED: Final = "veilmq.escaped"
_DRIVING: Final = re.compile("[\x7f-\x9f]")
"""Control characters that JSON need not escape but terminals obey; a message's body may contain them."""
Advance = Callable[[str, int, int], None]
"""Called with the current step, how much of it is done, and its total."""
_WIDTH_PIPED: Final = 200
_ASCII_HEAD: Final = "    \n    \n -- \n" + 5 * "    \n"
"""The frame of a table whose only line is a rule below the heads, where stdout has no `─`; the form is rich's."""
_IDS: Final = frozenset({"message", "job", "task"})
_WORD_MAX: Final = 40
"""Characters of a cell without blanks that is not folded: a UUID has 36."""
_SHORT_MAX: Final = 8
"""Characters of a cell with blanks that is not folded either: a duration, such as 1.23 min."""
_FOLDED_MIN: Final = 12
"""Width of a column that is folded."""
LEFT_OUT: Final = "left out on a terminal as narrow as this"
_ROUNDED_UP: Final = 0.9995
"""From here on three digits make it 1."""
_UNITS: Final = ((86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s"), (1_000, "ms"))


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def in_json(value: Any, default: Callable[[Any], object] | None = None) -> str:
    """A value as JSON in one line; default: converts values that JSON does not know."""
    return tamed(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=default))


def time_text(seconds: float) -> str:
    """A duration in its nearest unit, with three digits."""
    if seconds < _ROUNDED_UP:
        return f"{_digits(seconds * 1_000)} ms"
    if seconds < 120:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds / 60)} min" if seconds < 7_200 else f"{_digits(seconds / 3_600)} h"


def _digits(number: float) -> str:
    """Three of them, and all before the point."""
    return f"{number:.0f}" if abs(number) >= 1_000 * _ROUNDED_UP else f"{number:.3g}"


def lease_named(by: str, lease_us: int) -> str:
    """The lease in force of a queue, by what decides it (`by` of GET .../timeout)."""
    named = {
        "queue": "visibility timeout of {}",
        "receive": "lease of {} that receives ask for",
        "plan": "lease of {} by a plan",
    }
    return named[by].format(duration(lease_us))


def lease_change(queue: str, by: str, best_us: int | None) -> str:
    """What to type, so that the leases of a queue become as long as that; empty if nobody knows how long."""
    if best_us is None:
        return ""
    seconds = max(1, round(best_us / 1_000_000))
    if by == "receive":
        return (
            f"Worker(..., lease={seconds}), veilmq work --lease {seconds}s, or VisibilityTimeout={seconds} of a receive"
        )
    if by == "plan":
        return f"veilmq queues plan {queue}"
    return f"veilmq queues set {queue} --visibility-timeout {seconds}s"


def tamed(text: str) -> str:
    """Equivalent JSON without terminal control characters."""
    return _DRIVING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def columns(heads: Sequence[str], rows: Iterable[Sequence[object]], *, cuts: bool = False) -> "Table":
    """Columns for a person, to be printed; cuts: each row is one line."""
    from rich.box import SIMPLE_HEAD, Box
    from rich.table import Table
    from rich.text import Text

    has_rules = (sys.stdout.encoding or "").lower().startswith("utf")
    shown = Table(*heads, box=SIMPLE_HEAD if has_rules else Box(_ASCII_HEAD, ascii=True), pad_edge=False)
    for column in shown.columns:
        column.no_wrap = column.header == "message"  # to be copied
    for row in rows:
        texts = [printable(str(cell)) for cell in row]
        sides: list[JustifyMethod] = ["right" if isinstance(cell, int) else "left" for cell in row]
        shown.add_row(*(Text(text, justify=side, no_wrap=cuts) for text, side in zip(texts, sides, strict=True)))
    return shown


class _Fitted(NamedTuple):
    """A table that fits into a width, if one can."""

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    cells: list[list[str]]
    """By column."""
    widths: Sequence[int]
    frame: int
    """Characters between the columns, and at the edges."""
    left_out: list[str]

    def drawn(self, rows: Iterable[Sequence[object]], *, folds: bool = True) -> "Table":
        """Rows in its columns, to be printed; folds: else each row is one line, and long cells are cut."""
        shown = columns(self.heads, rows, cuts=not folds)
        for column, width in zip(shown.columns, self.widths, strict=True):
            column.width, column.overflow, column.no_wrap = width, "fold" if folds else "ellipsis", False
        return shown


def _fitted(heads: Sequence[str], rows: Sequence[Sequence[object]], spare: Sequence[str], room: int) -> _Fitted:
    """Long cells are folded, but not ids and numbers, to be copied. If these alone are wider than the room, columns of
    the `spare` heads are left out, from the first on; or else the table is wider, too."""
    from rich.cells import cell_len

    frame = 3 * len(heads) - 1
    cells = [[printable(str(row[at])) for row in rows] for at in range(len(heads))]
    widths = [max(map(cell_len, [head, *texts])) for head, texts in zip(heads, cells, strict=True)]
    if frame + sum(widths) > room:
        least = []
        for at, (head, texts) in enumerate(zip(heads, cells, strict=True)):
            if head in _IDS or all(cell_len(each) <= (_SHORT_MAX if " " in each else _WORD_MAX) for each in texts):
                least.append(max(map(cell_len, [*head.split(), *texts])))
                widths[at] = least[at]
            else:
                least.append(max([min(widths[at], _FOLDED_MIN), *map(cell_len, head.split())]))
        if spare and frame + sum(least) > room:
            kept = [at for at, head in enumerate(heads) if head != spare[0]]
            rest = [[row[at] for at in kept] for row in rows]
            found = _fitted([heads[at] for at in kept], rest, spare[1:], room)
            return found._replace(left_out=[spare[0], *found.left_out])
        widths = _narrowed(widths, least, max(room, frame + sum(least)) - frame)
    return _Fitted(heads, rows, cells, widths, frame, [])


def fitted_columns(
    heads: Sequence[str], rows: Sequence[Sequence[object]], spare: Sequence[str], room: int, *, folds: bool
) -> tuple["Table", list[str]]:
    """Columns for a person, to be printed, and the heads of those that were left out, both as in `table`; folds: see
    `_Fitted.drawn`."""
    fitted = _fitted(heads, rows, spare, room)
    return fitted.drawn(fitted.rows, folds=folds), fitted.left_out


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], spare: Sequence[str] = ()) -> None:
    """Print columns for a person, cut nowhere: see `_fitted`; and on stderr the heads of those that were left out. rich
    prints only the heads: a row would take it 0.5 ms."""
    from rich.cells import cell_len
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_PIPED)
    fitted = _fitted(heads, list(rows), spare, console.width)
    _, rows, cells, widths, frame, left_out = fitted
    if frame + sum(widths) > console.width:
        console.size = frame + sum(widths), console.height  # a width alone is none if TERM is dumb
    with console.capture() as head_lines:
        console.print(fitted.drawn(()))
    *above, below = head_lines.get().splitlines(keepends=True)
    sys.stdout.write("".join(above))
    for at, row in enumerate(rows):
        parts = [_folded(texts[at], width) for texts, width in zip(cells, widths, strict=True)]
        for line in zip_longest(*parts, fillvalue=""):
            padded = []
            for text, cell, width in zip(line, row, widths, strict=True):
                blanks = " " * (width - cell_len(text))
                padded.append(blanks + text if isinstance(cell, int) else text + blanks)
            sys.stdout.write(f" {'   '.join(padded)} \n")
    sys.stdout.write(below)
    if left_out:
        print(f"{LEFT_OUT}: {', '.join(left_out)}", file=sys.stderr)


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that fit into the room together: the widest columns give way first, none below its least."""
    left = [min(width, max(room, smallest)) for width, smallest in zip(widths, least, strict=True)]
    while sum(left) > room:
        widest = max((width, at) for at, width in enumerate(left) if width > least[at])
        left[widest[1]] -= 1
    return left


def _folded(text: str, width: int) -> list[str]:
    """The text in lines of at most this width, broken at blanks where there are some."""
    from rich.cells import cell_len, chop_cells

    if cell_len(text) <= width:
        return [text]
    lines = [""]
    for word in re.findall(r"\s*\S+\s*", text):
        bare = word.rstrip()
        if cell_len(lines[-1] + bare) <= width:
            lines[-1] += word
        else:
            lines += chop_cells(bare, width)
            lines[-1] += word[len(bare) :]
    return [line.rstrip() for line in lines if line] or [""]


def printable(text: str) -> str:
    """The text with all invisible characters but blanks escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def instant(instant_us: int | None) -> str:
    """UTC to the millisecond; `never` for None."""
    if instant_us is None:
        return "never"
    try:
        return datetime.fromtimestamp(instant_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):
        return "never"


def duration(duration_us: int) -> str:
    """In the largest unit that keeps it readable: 30 s, 4 d, 1.5 h."""
    for unit_us, name in _UNITS:
        if abs(duration_us) >= unit_us * _ROUNDED_UP:
            return f"{_digits(duration_us / unit_us)} {name}"
    return f"{duration_us} us" if duration_us else "0 s"


def print_json(value: object) -> None:
    """Print the value as one line of JSON."""
    print(in_json(value))


def write_new(path: Path, lines: Iterable[str]) -> int:
    """Write a file (mode 0600) that is not there yet, whole or not at all; return the number of lines. Raises
    OSError."""
    from veilmq.store.files import take_name

    if path.exists():
        raise FileExistsError(errno.EEXIST, "it exists already", str(path))
    part, count = path.with_name(f".{path.name}.{os.getpid()}.part"), 0
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            for count, line in enumerate(lines, 1):  # noqa: B007 the last one is the number of all
                file.write(line + "\n")
        take_name(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return count


def prepare_output() -> None:
    """Let stdout accept every character; a stream that was closed at the start becomes /dev/null."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error(_ESCAPED, _escape)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPED)


def drop_output() -> None:
    """Discard the buffer that nobody reads: the interpreter would complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def bar() -> Iterator[Advance]:
    """Show a bar while the body runs; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage)
            progress.update(tasks[stage], completed=done, total=total)

        yield advance
