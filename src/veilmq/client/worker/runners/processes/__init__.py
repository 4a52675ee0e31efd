"""Handlers in child processes, for CPU-bound work: the parent's end of the pipe.

Strategy: one thread of the parent owns each child (`_Place`). It sends messages through a pipe, does what the child
asks meanwhile (checkpoints, extensions), and receives the results. Leases stay in the parent, so that no computation
starves them. If a child dies, its messages fail and are released with backoff, and a new child is started; until one
runs, its place takes no messages. A child that ignores a cancellation for `kill_after` seconds is killed. Children are
spawned, not forked, because the parent has threads. Only the parent handles Ctrl-C and SIGTERM, because a terminal or a
service manager sends them to the whole process group.
"""

import atexit
import contextlib
import inspect
import logging
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from multiprocessing import resource_tracker
from typing import Any, Final

import msgspec

from veilmq.client.shared.signals import SIGNALS
from veilmq.client.shared.threads import DaemonPool
from veilmq.client.worker.job import Hand
from veilmq.client.worker.job.results import STOPPED, Result
from veilmq.client.worker.options import Backoff, chance
from veilmq.client.worker.runners.flow import Flow, failed
from veilmq.client.worker.runners.processes.child import Item, carried, packed, run_child
from veilmq.model.errors import ParameterInvalid
from veilmq.model.wording import counted

_START_SECONDS: Final = 60.0
_AGAIN: Final = Backoff(first=0.2, longest=5.0)
"""Pause between two attempts to replace a process."""
_CONTEXT: Final = multiprocessing.get_context("spawn")

log = logging.getLogger("veilmq.worker")


def reference(handler: Callable[..., Any]) -> str:
    """`module:name` under which a child process finds the handler. Raises ParameterInvalid if there is none."""
    module, name = getattr(handler, "__module__", None), getattr(handler, "__qualname__", "")
    of_object = inspect.ismethod(handler) and not isinstance(handler.__self__, type)
    if of_object or not module or not name or "<" in name:
        raise ParameterInvalid(
            parameter="handler",
            reason=f"{handler!r} has no name that a child process can import: define it in a module",
        )
    return f"{module}:{name}"


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Block the parent's signals while a child starts, until the child ignores them: Ctrl-C goes to all processes of a
    terminal, and a child that is still starting would end with a traceback."""
    resource_tracker.ensure_running()  # start multiprocessing's own process first: its start would unblock the signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class ProcessRunners:
    """Run `handler` in child processes on messages of `flow` until its line is closed."""

    def __init__(self, flow: Flow, handler: Callable[[Any], Any]) -> None:
        self._children = [_Place(flow, reference(handler)) for _ in range(flow.options["concurrency"])]

    @property
    def pids(self) -> list[int]:
        """Process ids of the living children."""
        return [child.pid for child in self._children if child.pid is not None]

    def start(self) -> None:
        """Returns once the handlers can run. Raises ParameterInvalid if they never will."""
        # If the program exits without a stop: multiprocessing would wait after a SIGTERM, which these children survive.
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
        """Kill the children whose handlers still run at shutdown."""
        for child in self._children:
            child.end()

    def close(self) -> None:
        """Close after the last handler."""
        self.kill()
        for child in self._children:
            child.bury()
        atexit.unregister(self.kill)


class _Place:
    """One place in the pool: a child process, and its replacements."""

    def __init__(self, flow: Flow, handler: str) -> None:
        self._flow = flow
        self._handler = handler
        self._lock = threading.Lock()
        """Guards the process and its unit. Held only briefly, so that a child that does not read can still be
        killed."""
        self._sending = threading.RLock()  # reentrant: the pool sends from this thread if it cannot start another
        """Guards the pipe; may be held as long as the child does not read."""
        self._cancels = DaemonPool(1, "veilmq worker cancellations")
        self._process: Any = None
        self._pipe: Any = None
        self._ended = False
        self._unit = 0
        """Number of the call that the child is working on; 0: none."""
        self._units = count(1)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.is_alive() else None

    def spawn(self) -> None:
        """Start a process, without waiting until it is ready."""
        ours, theirs = _CONTEXT.Pipe()
        batch = self._flow.options["batch"] is not None
        process = _CONTEXT.Process(
            target=run_child, args=(theirs, self._handler, batch), name="veilmq worker", daemon=True
        )
        with _undisturbed():
            process.start()
        theirs.close()
        with self._lock:
            self._process, self._pipe = process, ours
            if self._ended:
                process.kill()

    def await_ready(self) -> None:
        """Raises ParameterInvalid if the process cannot run the handler."""
        reason = (
            "its process ended before it was ready: what its module does besides defining things belongs below "
            'if __name__ == "__main__":'
        )
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
        """Work messages until the line is closed."""
        while self._revive() and (hands := self._flow.take()):
            self._revive()  # it may have died while idle
            self._flow.work(hands, self._call)

    def kill(self) -> None:
        """Kill the process, whatever it does. Its messages fail, and the next ones get a new process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """End the process without a replacement."""
        self._ended = True
        self.kill()

    def bury(self) -> None:
        """Wait until the process has ended."""
        if self._process is not None:
            self._process.join(_START_SECONDS)

    def _call(self, hands: Sequence[Hand]) -> list[Result]:
        if not self._process.is_alive():
            return [STOPPED] * len(hands)  # none of them has begun
        unit = next(self._units)
        try:
            work = packed(("work", unit, [Item(hand.message, hand.state, hand.deadline) for hand in hands]))
        except Exception as error:  # noqa: BLE001 the state comes from the user's storage: it may be anything
            return failed(f"its state cannot be sent to a process: {type(error).__name__}: {error}", len(hands))
        try:
            with self._lock:
                self._unit = unit
            with self._sending:
                # Before the messages are sent, so that a child that does not read is killed too. The cancel follows
                # them.
                for index, hand in enumerate(hands):
                    hand.cancelled.on_set(partial(self._cancel, unit, index, hands))
                self._pipe.send_bytes(work)
            return self._converse(hands)
        except (EOFError, OSError):
            self._process.join(_START_SECONDS)
            self._discard()  # it may have closed its pipe and still live
            code = self._process.exitcode
            if self._ended:
                log.warning("a worker process that still works is killed, because the worker stops")
            else:
                log.warning("a worker process ended with code %s while it worked; a new one takes its place", code)
            return failed(f"its process ended with code {code}", len(hands))
        except Exception as error:
            # The child's next output would be taken for the next message's, and the child may be waiting for an answer.
            log.exception("the exchange with a worker process failed; a new one takes its place")
            self._discard()
            return failed(f"{type(error).__name__}: {error}", len(hands))
        finally:
            with self._lock:
                self._unit = 0

    def _revive(self) -> bool:
        """Wait for a process that can work; False if the line is closed first.

        A half-finished deploy or a machine short of memory is no message's fault, so messages in hand wait as well.
        """
        tries, pause = 0, 0.0
        while not self._process.is_alive():
            if self._flow.ready.wait_until_closed(pause) or self._ended:
                return False
            broken = self._restore()
            if broken and not tries and not self._ended:
                log.error("a worker process cannot be replaced; no message is given to it until it can: %s", broken)
            elif tries and not broken:
                log.warning("a worker process could be replaced again, after %s", counted(tries, "attempt"))
            tries += 1
            pause = _AGAIN.delay(tries, chance())
        return True

    def _restore(self) -> str:
        """Start a new process. Returns why it cannot run, or an empty text."""
        with self._sending:
            self._pipe.close()
        self._process.join(_START_SECONDS)
        try:
            self.spawn()
            self.await_ready()
        except Exception as error:  # noqa: BLE001 the machine may run out of anything: processes, files, memory
            self._discard()
            return str(error)
        return ""

    def _discard(self) -> None:
        """Discard the process: after this, nobody takes it for one that can work."""
        self.kill()
        self._process.join(_START_SECONDS)

    def _converse(self, hands: Sequence[Hand]) -> list[Result]:
        while True:
            kind, content = self._pipe.recv()
            if kind == "results":
                return _read_results(content, len(hands))
            error, deadline = None, 0.0
            try:
                deadline = _do(content, hands)
            except Exception as raised:  # noqa: BLE001 raised again in the child, in the handler
                error = carried(raised)
            self._send(packed(("answer", (error, deadline))))

    def _send(self, data: bytes) -> None:
        with self._sending:
            self._pipe.send_bytes(data)

    def _send_to(self, unit: int, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._unit == unit:
                self._send(data)

    def _cancel(self, unit: int, index: int, hands: Sequence[Hand]) -> None:
        """Tell the child to cancel. If none of its messages is wanted any more and it does not end, kill it."""
        if self._unit != unit:
            return
        token = hands[index].cancelled
        # Not in this thread: whoever sets tokens (the keeper, a stop) must not wait for a child that does not read.
        self._cancels.submit(self._send_to, unit, packed(("cancel", unit, index, str(token.cause), token.detail)))
        if all(hand.cancelled for hand in hands):
            clock, wait = self._flow.clock, self._flow.options["kill_after"]
            self._flow.alarm.at(clock.monotonic() + wait, partial(self._overdue, unit))

    def _overdue(self, unit: int) -> None:
        with self._lock:
            if self._unit == unit:
                log.warning("a worker process went on after it was told to stop: it is killed")
                self._process.kill()


def _do(question: bytes, hands: Sequence[Hand]) -> float:
    """Do what a handler asks for. Raises the call's errors, and the errors of unpickling its values."""
    kind, index, *content = pickle.loads(question)
    hand: Hand = hands[index]
    if kind == "checkpoint":
        state, lease = content
        return hand.checkpoint(msgspec.json.decode(state), lease)
    return hand.extend(*content)


def _read_results(content: bytes, count: int) -> list[Result]:
    try:
        results: list[Result] = pickle.loads(content)
    except Exception as error:  # noqa: BLE001 the user's class may fail in any way
        return failed(f"what the handler returned cannot be read here: {type(error).__name__}: {error}", count)
    return results
