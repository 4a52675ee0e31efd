"""A child process of a worker, and what goes through the pipe to its parent.

Strategy: the main thread runs the handler, as in an ordinary program (`run_child`). A reader thread receives work,
cancellations and answers from the parent. Objects of the user's code are sent to the parent as bytes inside a plain
frame: if they cannot be unpickled there, only their own message fails and the conversation stays in step. When the pipe
ends, the parent is gone, and the child exits at once, whatever it is doing.
"""

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

import msgspec

from veilmq.client.clock import SYSTEM
from veilmq.client.messages import Received
from veilmq.client.shared.signals import SIGNALS, StopSignals
from veilmq.client.worker.job import Cancellation, Cause, Job
from veilmq.client.worker.job.checkpoints import encode_state
from veilmq.client.worker.job.results import Result, Verdict, call
from veilmq.model.errors import LeaseExpired, ParameterInvalid, VeilError, as_fields

GONE = 70
"""Exit code of a child whose parent is gone or sent something that cannot be read here."""


class Item(msgspec.Struct, frozen=True):
    """A message as it is sent to a child."""

    message: Received
    state: Any
    deadline: float


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
    """Entry point of the process. Signals that stop a worker do not end it: it ends when the parent asks it to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not SIG_IGN: a program that a handler starts would inherit that, and nobody could terminate it.
    with StopSignals(lambda: None, (signal.SIGTERM,)):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            found = resolve(handler)
        except Exception as error:
            pipe.send(("broken", f"{error}\n{traceback.format_exc()}"))
            raise SystemExit(1) from error
        try:
            _Child(pipe).serve(found, batch)
        except (EOFError, OSError):
            sys.exit(GONE)
