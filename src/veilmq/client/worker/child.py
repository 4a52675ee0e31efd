"""The child process of a worker: runs the handler, and asks its parent for everything else.

Strategy: the main thread runs the handler, so that it is an ordinary program; a reader thread takes what the parent
sends: work, cancellations, answers. When the pipe ends the parent is gone, and the child ends at once, in whatever it
is. Ctrl-C and SIGTERM are the parent's to handle: a terminal or a service manager sends them to the whole group.
"""

import importlib
import inspect
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import msgspec

from veilmq.client.clock import SYSTEM
from veilmq.client.messages import Received
from veilmq.client.worker.cancellation import Cancellation, Cause
from veilmq.client.worker.job import Job
from veilmq.client.worker.results import Result, Verdict, call
from veilmq.model.errors import ParameterInvalid, VeilError, as_fields

GONE = 70
"""Exit code of a child whose parent went away."""


class Item(msgspec.Struct, frozen=True):
    """A message, as it goes to a child."""

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
    """The handler of that `module:name`; of a decorated one, the function itself. Raises ParameterInvalid."""
    module, _, path = name.partition(":")
    if module.startswith(".") or "/" in module:
        reason = f"{name!r} names a file or a relative module: name it as `import` does, such as jobs:handle"
        raise ParameterInvalid(parameter="handler", reason=reason)
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ParameterInvalid(parameter="handler", reason=f"{name!r} cannot be imported: {error}") from error
    found = getattr(found, "handler", found)
    if not callable(found):
        raise ParameterInvalid(parameter="handler", reason=f"{name!r} cannot be called")
    handler: Callable[..., Any] = found
    return handler


def carried(error: Exception) -> Any:
    """An error as it goes through the pipe: VeilErrors as class and fields, others as text."""
    if isinstance(error, VeilError):
        return type(error), as_fields(error)
    return RuntimeError, f"{type(error).__name__}: {error}"


def raise_carried(error: Any) -> None:
    """Raise what `carried` took apart."""
    if error is None:
        return
    kind, content = error
    raise kind(**content) if isinstance(content, dict) else kind(content)


class _Calls:
    """A job's calls, through the pipe."""

    def __init__(self, child: "_Child", index: int) -> None:
        self._child = child
        self._index = index

    def checkpoint(self, state: Any, lease: float | None) -> None:
        self._child.ask(("checkpoint", self._index, state, lease))

    def extend(self, seconds: float) -> None:
        self._child.ask(("extend", self._index, seconds))


class _Child:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._work: SimpleQueue[list[Item]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._tokens: list[Cancellation] = []
        self._unit = 0
        self._lock = threading.Lock()
        self._asking = threading.Lock()

    def serve(self, handler: Callable[[Any], Any], batch: bool) -> None:
        """Until the parent goes away."""
        threading.Thread(target=self._read, name="veilmq child", daemon=True).start()
        self.send(("ready",))
        while True:
            items = self._work.get()
            jobs = [
                Job(item.message, _Calls(self, index), self._tokens[index], item.state, item.deadline, SYSTEM)
                for index, item in enumerate(items)
            ]
            self._answer(call(handler, jobs, batch))

    def ask(self, question: tuple[Any, ...]) -> None:
        """One question at a time; raises what the parent's call raised."""
        with self._asking:
            self.send(question)
            raise_carried(self._answers.get())

    def send(self, said: tuple[Any, ...]) -> None:
        with self._lock:
            self._pipe.send(said)

    def _answer(self, results: list[Result]) -> None:
        try:
            self.send(("results", results))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            reason = f"what the handler returned cannot leave its process: {error}"
            self.send(("results", [Result(Verdict.FAILED, error=reason)] * len(results)))

    def _read(self) -> None:
        try:
            while True:
                kind, *content = self._pipe.recv()
                if kind == "work":
                    self._unit, items = content
                    self._tokens = [Cancellation() for _ in items]
                    self._work.put(items)
                elif kind == "cancel":
                    unit, index, cause, detail = content
                    if unit == self._unit:
                        self._tokens[index].set(Cause(cause), detail)
                else:
                    self._answers.put(content[0])
        except (EOFError, OSError):
            os._exit(GONE)


def run(pipe: Connection, handler: str, batch: bool) -> None:
    """Entry point of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        found = resolve(handler)
    except Exception as error:
        pipe.send(("broken", f"{error}\n{traceback.format_exc()}"))
        raise SystemExit(1) from error
    try:
        _Child(pipe).serve(found, batch)
    except (EOFError, OSError):
        sys.exit(GONE)
