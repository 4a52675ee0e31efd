"""Log lines on stderr, for people or for programs.

Strategy: the standard library's logging with one handler on the root. Text that clients control (a name, a user agent)
must not start a new line, so control characters are escaped; JSON does so by itself. A caller may pass
`extra={"request": id}`. Whatever clients do, a kind of line comes at most `LINES_MAX` times a second: see `Flood`.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

LINES_MAX: Final = 100
"""Lines a second of one kind: those of one call in the code. Refused requests have finer bounds (http/refusals.py)."""
_KINDS_MAX: Final = 1_000
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up(form: Literal["human", "json"], level: str, stream: TextIO | None = None) -> None:
    """Send all log records of this process to `stream`, by default stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Json() if form == "json" else Human())
    handler.addFilter(Flood())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    # Libraries log every step; leave that out.
    for chatty in ("asyncio", "uvicorn", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(max(_LEVELS[level], logging.WARNING))


class Flood(logging.Filter):
    """Leaves out lines of a kind that comes too often; the next one that is written says how many."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, list[int]] = {}
        """Of each kind: the second, the lines written in it, the lines left out since the last one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the line."""
        if len(self._kinds) > _KINDS_MAX:  # a library that formats its texts itself
            self._kinds.clear()
        kind = self._kinds.setdefault(str(record.msg), [0, 0, 0])
        if kind[0] != int(record.created):
            kind[:2] = [int(record.created), 0]
        if kind[1] >= LINES_MAX:
            kind[2] += 1
            return False
        kind[1] += 1
        if kind[2]:
            record.msg = f"{record.getMessage()} ({kind[2]} lines like this one were left out)"
            record.args, kind[2] = None, 0
        return True


class Human(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING veilmq.shell: text`, and a traceback's lines indented below."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or several for a traceback."""
        text = _escaped(record.getMessage())
        request = getattr(record, "request", None)
        line = f"{_instant(record)} {record.levelname:<7} {record.name}: {text}"
        if request is not None:
            line += f" (request {request})"
        if record.exc_info:
            # Split at newlines only: an exception may quote what a client sent.
            line += "".join(f"\n    {_escaped(each)}" for each in self.formatException(record.exc_info).split("\n"))
        return line


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class Json(logging.Formatter):
    """One object a line: at, level, logger, message; request and traceback if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "at": _instant(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = getattr(record, "request", None)
        if request is not None:
            line["request"] = request
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _instant(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1_000:03}Z"
