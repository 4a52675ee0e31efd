"""Handlers in child processes, for those that compute.

Strategy: a thread here owns each child: it sends messages through a pipe, does what the child asks meanwhile
(checkpoints, extensions), and takes the results. Leases stay in this process, so that no computation starves them. A
child that dies fails its messages, which go back with backoff, and is replaced; one that goes on for `kill_after`
seconds after it was told to stop is killed. Children are spawned, not forked: this process has threads.
"""

import atexit
import contextlib
import logging
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from veilmq.client.worker.child import Item, carried, reference, run
from veilmq.client.worker.flow import Flow, failed
from veilmq.client.worker.hand import Hand
from veilmq.client.worker.results import Result
from veilmq.model.errors import ParameterInvalid

_START_SECONDS: Final = 60.0
_CONTEXT: Final = multiprocessing.get_context("spawn")

log = logging.getLogger("veilmq.worker")


class ProcessRunners:
    """Run `handler` in child processes on messages of `flow` until its line is closed."""

    def __init__(self, flow: Flow, handler: Callable[[Any], Any]) -> None:
        self._children = [_Child(flow, reference(handler)) for _ in range(flow.parameters.concurrency)]

    @property
    def pids(self) -> list[int]:
        """Of the children that live."""
        return [child.pid for child in self._children if child.pid is not None]

    def start(self) -> None:
        """Returns once the handlers can run. Raises ParameterInvalid if they never will."""
        # A program that ends without a stop: children ignore the SIGTERM that multiprocessing would send and wait for.
        atexit.register(self.kill)
        try:
            for child in self._children:
                child.spawn()
            for child in self._children:
                child.await_ready()
        except BaseException:
            self.kill()
            raise
        for number, child in enumerate(self._children, 1):
            threading.Thread(target=child.serve, name=f"veilmq worker {number}", daemon=True).start()

    def kill(self) -> None:
        """Shutdown, and handlers still run."""
        for child in self._children:
            child.end()

    def close(self) -> None:
        """Nothing is left to run."""
        self.kill()
        for child in self._children:
            child.bury()
        atexit.unregister(self.kill)


class _Child:
    """One place in the pool: a child process, and its successors."""

    def __init__(self, flow: Flow, handler: str) -> None:
        self._flow = flow
        self._handler = handler
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Any = None
        self._ended = False
        self._unit = 0
        """Number of the call that the child works on; 0: none."""
        self._units = count(1)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.is_alive() else None

    def spawn(self) -> None:
        """Start a process; it is not ready yet."""
        ours, theirs = _CONTEXT.Pipe()
        batch = self._flow.parameters.batch is not None
        process = _CONTEXT.Process(target=run, args=(theirs, self._handler, batch), name="veilmq worker", daemon=True)
        process.start()
        theirs.close()
        with self._lock:
            self._process, self._pipe = process, ours
            if self._ended:
                process.kill()

    def await_ready(self) -> None:
        """Raises ParameterInvalid if the process cannot run the handler."""
        reason = "its process ended before it was ready"
        try:
            if not self._pipe.poll(_START_SECONDS):
                self.kill()
                raise ParameterInvalid(parameter="handler", reason=f"not imported within {_START_SECONDS:g} s")
            kind, *content = self._pipe.recv()
        except (EOFError, OSError):
            kind, content = "broken", [reason]
        if kind != "ready":
            raise ParameterInvalid(parameter="handler", reason=str(content[0]).strip())

    def serve(self) -> None:
        """Take messages until the line is closed."""
        while hands := self._flow.take():
            self._flow.work(hands, self._call)
            if not self._ended and not self._process.is_alive():
                self._restore()

    def kill(self) -> None:
        """End the process, whatever it does; its messages fail, and the next ones get a new process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """End the process for good."""
        self._ended = True
        self.kill()

    def bury(self) -> None:
        """Wait until it has ended."""
        if self._process is not None:
            self._process.join(_START_SECONDS)

    def _call(self, hands: Sequence[Hand]) -> list[Result]:
        if (self._process is None or not self._process.is_alive()) and (broken := self._restore()):
            return failed(broken, len(hands))
        unit = next(self._units)
        try:
            with self._lock:
                self._unit = unit
            self._send(("work", unit, [Item(hand.message, hand.state, hand.deadline) for hand in hands]))
            for index, hand in enumerate(hands):
                hand.cancelled.on_set(partial(self._cancel, unit, index, hands))
            return self._converse(hands)
        except (EOFError, OSError):
            self._process.join(_START_SECONDS)
            code = self._process.exitcode
            log.warning("a worker process ended with code %s while it worked; a new one takes its place", code)
            return failed(f"its process ended with code {code}", len(hands))
        finally:
            with self._lock:
                self._unit = 0

    def _restore(self) -> str:
        """Start a successor; why it cannot run, or nothing. Then it is tried again with the next message."""
        with self._lock:
            self._pipe.close()
        self._process.join(_START_SECONDS)
        try:
            self.spawn()
            self.await_ready()
        except (ParameterInvalid, OSError) as error:  # OSError: the machine has no more processes, or files
            log.error("a worker process cannot be replaced: %s", error)
            self.kill()
            return str(error)
        return ""

    def _converse(self, hands: Sequence[Hand]) -> list[Result]:
        while True:
            kind, *content = self._pipe.recv()
            if kind == "results":
                results: list[Result] = content[0]
                return results
            error = None
            try:
                if kind == "checkpoint":
                    hands[content[0]].checkpoint(content[1], content[2])
                else:
                    hands[content[0]].extend(content[1])
            except Exception as raised:  # noqa: BLE001 raised again in the child, where the handler is
                error = carried(raised)
            self._send(("answer", error))

    def _send(self, said: tuple[Any, ...]) -> None:
        with self._lock:
            self._pipe.send(said)

    def _cancel(self, unit: int, index: int, hands: Sequence[Hand]) -> None:
        """Tell the child; and kill it, if none of its messages is wanted any more and it does not end."""
        if self._unit != unit:
            return
        token = hands[index].cancelled
        with contextlib.suppress(OSError, ValueError):
            self._send(("cancel", unit, index, str(token.cause), token.detail))
        if all(hand.cancelled for hand in hands):
            clock, wait = self._flow.clock, self._flow.parameters.kill_after
            self._flow.alarm.at(clock.monotonic() + wait, partial(self._overdue, unit))

    def _overdue(self, unit: int) -> None:
        with self._lock:
            if self._unit == unit:
                log.warning("a worker process went on after it was told to stop: it is killed")
                self._process.kill()
