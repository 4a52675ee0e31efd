"""Handlers in child processes, for CPU-bound work: both ends of the pipe.

Strategy: one thread of the parent owns each child (`_Place`). It sends messages through a pipe, does what the child
asks meanwhile (checkpoints, extensions), and receives the results. Leases stay in the parent, so that no computation
starves them. If a child dies, its messages fail and are released with backoff, and a new child is started; until one
runs, its place takes no messages. A child that ignores a cancellation for `kill_after` seconds is killed. Children are
spawned, not forked, because the parent has threads.

The child (`run_child`): its main thread runs the handler, as in an ordinary program. A reader thread receives work,
cancellations and answers from the parent. Objects of the user's code are sent to the parent as bytes inside a plain
frame: if they cannot be unpickled there, only their own message fails and the conversation stays in step. When the pipe
ends, the parent is gone, and the child exits at once, whatever it is doing. Only the parent handles Ctrl-C and SIGTERM,
because a terminal or a service manager sends them to the whole process group.
"""

import atexit
import contextlib
import importlib
import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Final

import msgspec

from veilmq.client.clock import SYSTEM
from veilmq.client.messages import Received
from veilmq.client.shared.threads import DaemonPool
from veilmq.client.worker.job import STOPPED, Cancellation, Cause, Hand, Job, Result, Verdict, call
from veilmq.client.worker.job.checkpoints import encode_state
from veilmq.client.worker.options import Backoff, chance
from veilmq.client.worker.runners.flow import Flow, failed
from veilmq.model.errors import LeaseExpired, ParameterInvalid, VeilError, as_fields

GONE = 70
"""Exit code of a child whose parent is gone or sent something that cannot be read here."""

PARENTS_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""Signals that stop a worker. Its children ignore them and end when the parent asks them to."""
_START_SECONDS: Final = 60.0
_AGAIN: Final = Backoff(first=0.2, longest=5.0)
"""Pause between two attempts to replace a process."""
_CONTEXT: Final = multiprocessing.get_context("spawn")

log = logging.getLogger("veilmq.worker")


class Item(msgspec.Struct, frozen=True):
    """A message as it is sent to a child."""

    message: Received
    state: Any
    deadline: float


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


def resolve(name: str) -> Callable[..., Any]:
    """The handler with that `module:name`; if it is decorated, the function itself. Raises ParameterInvalid."""
    module, _, path = name.partition(":")
    if module.startswith(".") or "/" in module:
        reason = f"{name!r} names a file or a relative module: name it as `import` does, such as jobs:handle"
        raise ParameterInvalid(parameter="handler", reason=reason)
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        if module.endswith(".py"):
            reason = f"name the module as `import` does, {module.removesuffix('.py')}:{path}"
        raise ParameterInvalid(parameter="handler", reason=f"{name!r} cannot be imported: {reason}") from error
    found = getattr(found, "handler", found)
    if not callable(found):
        raise ParameterInvalid(parameter="handler", reason=f"{name!r} cannot be called")
    handler: Callable[..., Any] = found
    return handler


def packed(content: Any) -> bytes:
    """Pickled for the pipe. Raises whatever the user's objects raise during pickling."""
    return bytes(ForkingPickler.dumps(content))


def carried(error: Exception) -> Any:
    """An error in the form that goes through the pipe: VeilErrors as class and fields, others as text."""
    if isinstance(error, VeilError):
        return type(error), as_fields(error)
    return RuntimeError, f"{type(error).__name__}: {error}"


def raise_carried(error: Any) -> None:
    """Raise the error that `carried` took apart."""
    if error is None:
        return
    kind, content = error
    raise kind(**content) if isinstance(content, dict) else kind(content)


class _Calls:
    """A job's calls, made through the pipe."""

    def __init__(self, child: "_Child", unit: int, index: int, attempt: int) -> None:
        self._child = child
        self._unit = unit
        self._index = index
        self._attempt = attempt

    def checkpoint(self, state: Any, lease: float | None) -> float:
        # As JSON, which it must be anyway, so that the parent does not need the classes of the handler's objects.
        return self._ask("checkpoint", encode_state(state), lease)

    def extend(self, seconds: float) -> float:
        return self._ask("extend", seconds)

    def _ask(self, kind: str, *content: Any) -> float:
        deadline = self._child.ask(self._unit, (kind, self._index, *content))
        if deadline is None:
            raise LeaseExpired(sequence=0, attempt=self._attempt)
        return deadline


class _Child:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._work: SimpleQueue[list[Item]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._tokens: list[Cancellation] = []
        self._unit = 0
        """Number of the handler call in progress; 0: none."""
        self._lock = threading.Lock()
        self._asking = threading.Lock()

    def serve(self, handler: Callable[[Any], Any], batch: bool) -> None:
        """Run handler calls until the parent is gone."""
        threading.Thread(target=self._read, name="veilmq child", daemon=True).start()
        self.send("ready")
        while True:
            items = self._work.get()
            jobs = [
                Job(
                    item.message,
                    _Calls(self, self._unit, index, item.message.receive_count),
                    self._tokens[index],
                    item.state,
                    item.deadline,
                    SYSTEM,
                )
                for index, item in enumerate(items)
            ]
            results = call(handler, jobs, batch)
            with self._asking:
                self._unit = 0
            self.send("results", _packed_results(results))

    def ask(self, unit: int, question: tuple[Any, ...]) -> float | None:
        """Ask the parent one question at a time; returns what the parent's call returned, and raises what it raised.

        None: the handler's call is over, but a thread of it still runs. The parent would take the question for the
        next message's.
        """
        content = packed(question)
        with self._asking:
            if unit != self._unit:
                return None
            self.send("question", content)
            error, deadline = self._answers.get()
            raise_carried(error)
            return float(deadline)

    def send(self, kind: str, *content: Any) -> None:
        with self._lock:
            self._pipe.send((kind, *content))

    def _read(self) -> None:
        try:
            while True:
                kind, *content = self._pipe.recv()
                if kind == "work":
                    unit, items = content
                    self._tokens = [Cancellation() for _ in items]
                    self._unit = unit
                    self._work.put(items)
                elif kind == "cancel":
                    unit, index, cause, detail = content
                    if unit == self._unit:
                        self._tokens[index].set(Cause(cause), detail)
                else:
                    self._answers.put(content[0])
        except (EOFError, OSError):
            pass  # the parent is gone
        except Exception:  # noqa: BLE001 a class that cannot be imported here may fail in any way
            traceback.print_exc()
        finally:
            # A thread that waits for an unreadable answer would wait for ever.
            os._exit(GONE)


def _packed_results(results: list[Result]) -> bytes:
    try:
        return packed(results)
    except Exception as error:  # noqa: BLE001 the user's objects may fail in any way
        reason = f"what the handler returned cannot leave its process: {type(error).__name__}: {error}"
        return packed([Result(Verdict.FAILED, error=reason)] * len(results))


def run_child(pipe: Connection, handler: str, batch: bool) -> None:
    """Entry point of the process."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    try:
        found = resolve(handler)
    except Exception as error:
        pipe.send(("broken", f"{error}\n{traceback.format_exc()}"))
        raise SystemExit(1) from error
    try:
        _Child(pipe).serve(found, batch)
    except (EOFError, OSError):
        sys.exit(GONE)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Block the parent's signals while a child starts, until the child ignores them: Ctrl-C goes to all processes of a
    terminal, and a child that is still starting would end with a traceback."""
    resource_tracker.ensure_running()  # start multiprocessing's own process first: its start would unblock the signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
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
        # If the program exits without a stop: multiprocessing would send SIGTERM and wait, but children ignore SIGTERM.
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
        self._cancels = DaemonPool(1, "veilmq worker cancels")
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
            log.exception("a worker process cannot be spoken with; a new one takes its place")
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
                log.warning("a worker process could be replaced again, after %d tries", tries)
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
