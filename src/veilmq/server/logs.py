"""Log lines on stderr, for people or for programs; and limits that keep refused requests, and receives that may not
wait, from flooding the log.

Strategy: the standard library's logging with one handler on the root. Text that clients control (a name, a user agent)
must not start a new line, so control characters are escaped; JSON does so by itself. A caller may pass
`extra={"request": id}`. Whatever clients do, a kind of line comes at most `LINES_MAX` times a second: see `Flood`.

Of each reason for a refusal, ten refused requests a second have a line of their own; the others are counted, and a
second after the first of them one line says how many there were. A line is made only if it is written.

Receives are answered empty when too many wait already, and refused while clients do not read their answers. The engine
counts both, the first by queue and limit. Once a second the counts are taken, added to the metrics, and logged in one
line per queue and limit, at most once a minute: a client that polls in a tight loop must not fill the log, nor one that
makes a queue for each poll, so beyond `QUEUES_MAX` the others share a line. Of unread answers there is one line a
second while receives are refused.
"""

import asyncio
import json
import logging
import re
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

from veilmq.engine import Limits
from veilmq.engine.long_polls import Unread, WaitingRoom
from veilmq.model.settings.queue import QueueKey
from veilmq.model.wording import counted

LINES_MAX: Final = 100
"""Lines a second of one kind: those of one call in the code. Refused requests have finer bounds."""
_KINDS_MAX: Final = 1_000
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
REFUSED_LINES_MAX: Final = 10
"""Lines a second of one reason for a refusal."""
REASONS_MAX: Final = 100
"""Distinct reasons that are counted in one second; further ones count together."""
WINDOW_S: Final = 1.0
_OTHER: Final = "other"


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
            record.msg = f"{record.getMessage()} (left out {counted(kind[2], 'line')} like this one)"
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


class RefusalLog:
    """The refused requests of one port, or its dropped connections. Use it on the loop."""

    def __init__(self, port: str, logger: logging.Logger, verb: str = "refused", noun: str = "request") -> None:
        """verb, noun: what the port did, and to what, in the line that counts."""
        self._port = port
        self._verb = verb
        self._noun = noun
        self._logger = logger
        self._begun_s = float("-inf")
        self._seen: Counter[str] = Counter()
        """Refusals of this second, by reason."""
        self._hidden: Counter[str] = Counter()
        """Refusals without a line, since the last report."""
        self._timer: asyncio.TimerHandle | None = None

    def takes(self, reason: str) -> bool:
        """Whether to write a line for a refusal. Otherwise it is counted, and the count is written in a second."""
        if not self._logger.isEnabledFor(logging.INFO):
            return False
        loop = asyncio.get_running_loop()
        taken = self.takes_at(reason, loop.time())
        if not taken and self._timer is None:
            self._timer = loop.call_later(WINDOW_S, self.report)
        return taken

    def write(self, peer: str, status: int, reason: str, request_id: str | None = None) -> None:
        """Log a refusal that HTTP's rules or a bound demand, or count it."""
        if self.takes(f"{status} {reason}"):
            extra = {"request": request_id}
            self._logger.info("%s: refused %s: %d %s", self._port, peer, status, reason, extra=extra)

    def takes_at(self, reason: str, now_s: float) -> bool:
        """The same without a timer. now_s: seconds of any monotonic clock."""
        if now_s - self._begun_s >= WINDOW_S:
            self._begun_s = now_s
            self._seen.clear()
        if reason not in self._seen and len(self._seen) >= REASONS_MAX:
            reason = _OTHER
        self._seen[reason] += 1
        if self._seen[reason] <= REFUSED_LINES_MAX:
            return True
        self._hidden[reason] += 1
        return False

    def report(self) -> None:
        """Write how many refusals had no line."""
        self._timer = None
        hidden, self._hidden = self._hidden, Counter()
        for reason, count in hidden.items():
            more = counted(count, f"more {self._noun}")
            self._logger.info("%s: %s %s like these: %s", self._port, self._verb, more, reason)


LOOK_S: Final = 1.0
QUIET_S: Final = 60.0
QUEUES_MAX: Final = 100
"""Lines a minute about queues, and then one for all others."""
_LIMITS: Final = ("parked_max", "parked_per_account_max", "parked_per_queue_max")

logger = logging.getLogger("veilmq.waits")


class RefusedWaits:
    """Watches one engine's waiting room from `start` to `stop`."""

    def __init__(self, waiting: WaitingRoom, limits: Limits, unread: Unread) -> None:
        self.refused: Counter[str] = Counter(dict.fromkeys(_LIMITS, 0))
        """Counts since the start, by limit."""
        self._waiting = waiting
        self._limits = limits
        self._unread = unread
        self._refused_unread = 0
        self._unreported: Counter[tuple[QueueKey | None, str]] = Counter()
        """By queue and limit; None: the queues that share a line."""
        self._reported_s: dict[tuple[QueueKey | None, str], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start watching. Call on the loop."""
        self._tick()

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self.look(loop.time())
        self._timer = loop.call_later(LOOK_S, self._tick)

    def look(self, now_s: float) -> None:
        """Take the engine's counts, and log what is due. now_s: seconds of any monotonic clock."""
        unread = self._unread
        if unread.refused > self._refused_unread:
            count, self._refused_unread = unread.refused - self._refused_unread, unread.refused
            text = "refused %s: clients have not read %d bytes of answers; %d may be unread, %d of one account"
            logger.warning(text, counted(count, "receive"), unread.bytes, unread.bytes_max, unread.account_bytes_max)
        if self._waiting.refused:
            taken, self._waiting.refused = self._waiting.refused, Counter()
            for (queue, limit), count in taken.items():
                self.refused[limit] += count
                self._unreported[self._place(queue, limit)] += count
        if self._reported_s:
            self._reported_s = {
                each: reported_s for each, reported_s in self._reported_s.items() if now_s - reported_s < QUIET_S
            }
        for each in [each for each in self._unreported if each not in self._reported_s]:
            self._reported_s[each] = now_s
            named, limit = each
            count, value = self._unreported.pop(each), getattr(self._limits, limit)
            text = "%s: answered %s empty instead of letting them wait: %s is %d"
            logger.warning(text, "other queues" if named is None else named, counted(count, "receive"), limit, value)

    def _place(self, queue: QueueKey, limit: str) -> tuple[QueueKey | None, str]:
        """Where the queue's receives are counted until a line reports them."""
        known = self._unreported.keys() | self._reported_s.keys()
        return (queue, limit) if (queue, limit) in known or len(known) < QUEUES_MAX else (None, limit)
