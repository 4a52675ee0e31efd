"""Who must be told of lost leases, told where nothing of the keeper's can break.

Strategy: callbacks are the user's code: they run one after another in a thread of their own that ends when all are
told. One that raises ends that thread, as any unhandled error (threading.excepthook); a new one tells the rest. Where
no thread can be started, the caller's has to do.
"""

import threading
from collections import deque
from collections.abc import Callable


class Teller:
    """Runs callbacks, in order, in a thread of their own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._running = False

    def tell(self, calls: list[Callable[[], object]]) -> None:
        """Run `calls` soon."""
        if not calls:
            return
        with self._lock:
            self._calls.extend(calls)
            if self._running:
                return
            self._running = True
        self._start()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:  # "can't start new thread": told here, rather than not at all
            self._run()

    def _run(self) -> None:
        done = False
        try:
            while True:
                with self._lock:
                    if not self._calls:
                        self._running, done = False, True
                        return
                    call = self._calls.popleft()
                call()
        finally:
            if not done:
                self._start()
