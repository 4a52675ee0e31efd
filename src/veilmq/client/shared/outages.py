"""What is logged and counted of calls that fail again and again.

Strategy of the log: a queue that is away for an hour must not fill it. Of each kind of call and error (each code of a
ServiceError is a kind), the first failure is logged, and while it lasts one line every `EVERY_SECONDS`. A line has the
number of the call's failures since the line before it. The first success after failures that were not logged is logged
too. If a call fails and works alternately, that is one such pair of lines in `EVERY_SECONDS`.

Strategy of the metrics (`Kinds`): an error counts under its class, and a ServiceError under its code. A proxy may make
up any number of codes, so only the first `CODES_MAX` have a kind of their own.
"""

import logging
import re
import threading
from typing import Final

from veilmq.client.clock import Clock
from veilmq.client.errors import ServiceError
from veilmq.model.errors import VeilError

EVERY_SECONDS: Final = 60.0
CODES_MAX: Final = 50
_CODE: Final = re.compile(r"[\w .:-]{1,100}", re.ASCII)


class Outages:
    """The failing calls to `what` (a queue, for example). Any thread."""

    def __init__(self, log: logging.Logger, what: str, clock: Clock) -> None:
        self._log = log
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._unlogged: dict[str, int] = {}
        """By call: its failures since the last line about it."""
        self._silent_until: dict[tuple[str, type[BaseException], str], float] = {}
        self._failing: set[str] = set()
        """The calls whose last line says that they failed."""

    def failed(self, call: str, error: BaseException) -> None:
        """The call failed. An error that is no VeilError is logged as an error, with its traceback."""
        kind = (call, type(error), error.code if isinstance(error, ServiceError) else "")
        with self._lock:
            failures = self._unlogged.get(call, 0) + 1
            now = self._clock.monotonic()
            if now < self._silent_until.get(kind, now):
                self._unlogged[call] = failures
                return
            self._unlogged.pop(call, None)
            # Only those that are still silent: a proxy may make up any number of codes.
            self._silent_until = {each: until for each, until in self._silent_until.items() if now < until}
            self._silent_until[kind] = now + EVERY_SECONDS
            self._failing.add(call)
        often = f" (failures since the last line: {failures})" if failures > 1 else ""
        trace = None if isinstance(error, VeilError) else error
        level = logging.WARNING if trace is None else logging.ERROR
        self._log.log(level, "%s: %s failed: %s%s", self._what, call, error, often, exc_info=trace)

    def worked(self, call: str) -> None:
        """The call succeeded."""
        if call not in self._unlogged:  # without the lock: nearly always
            return
        with self._lock:
            if call not in self._failing:  # it fails and works alternately, which a line of this minute says already
                return
            failures = self._unlogged.pop(call, 0)
            self._failing.discard(call)
        if failures:
            self._log.warning("%s: %s works again (failures since the last line: %d)", self._what, call, failures)


class Kinds:
    """Short names of errors, for a label of metrics: see the module. Any thread."""

    def __init__(self) -> None:
        self._codes: set[str] = set()
        self._lock = threading.Lock()

    def of(self, error: BaseException) -> str:
        """The error's class, or the code of a ServiceError."""
        if isinstance(error, ServiceError) and _CODE.fullmatch(error.code):
            with self._lock:
                if len(self._codes) < CODES_MAX:
                    self._codes.add(error.code)
                if error.code in self._codes:
                    return error.code
        return type(error).__name__
