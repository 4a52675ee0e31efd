"""`veilmq work` runs a handler on a queue's messages until SIGTERM; `veilmq calibrate` recommends a timeout for it.

Strategy: one table maps options to a worker's parameters. The handler is imported as `module:name` with the current
directory first on the path, like `python -m`. The log is on stderr, for people or as JSON; the last line on stdout says
what was done.

To calibrate, a worker runs the handler on real messages; its meter collects the times, and client/timeouts evaluates
them. A table and bars for people, one JSON object for programs.
"""

import importlib
import inspect
import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from veilmq.cli.failures import Exit, Failure, check_directory, closed_to_user
from veilmq.cli.options import refused_value, seconds
from veilmq.cli.output import time_text
from veilmq.client.adapters.cloud import name_client
from veilmq.client.adapters.connect import connect, parse_url
from veilmq.client.errors import TransportError
from veilmq.client.queue import Queue
from veilmq.client.timeouts import Calibration
from veilmq.client.timeouts import calibrate as judge
from veilmq.client.worker import (
    Backoff,
    Checkpoints,
    Counts,
    DirectoryGuard,
    FileCheckpoints,
    ObjectCheckpoints,
    PrometheusMeter,
    Worker,
)
from veilmq.client.worker.runners.processes.child import resolve
from veilmq.estimate.survival import Sample
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueMissing, UsageError, VeilError
from veilmq.server.config import PORT_MAX
from veilmq.server.logs import set_up

_ADVICE_AWAY: Final = (
    "Start a server with `veilmq serve`, or check host and port in the URL: veil:// goes to the --sqs port, 9324."
)
_TIMES: Final = ("lease", "stop_before_expiry", "wait", "drain", "give_up_after")
_SAME: Final = ("concurrency", "prefetch", "batch", "poison_after", "dead_letter_queue", "error_report")

T = TypeVar("T")

log = logging.getLogger("veilmq.worker")


def work(handler: str, url: str, given: Mapping[str, Any]) -> Exit:
    """Process messages until SIGTERM, or as `given` says. Raises Failure."""
    set_up("json" if given["as_json"] else "human", "info")
    found = handler_of(handler)
    try:
        name_client(given["name"])
    except ParameterInvalid as error:
        raise Failure(Exit.USAGE, f"--name: {error.reason}") from None
    with open_queue(url) as queue:
        counts = run(queue, found, {"kind": kind_of(found), **parameters(given)}, given)
    summary = {"received": counts.received, **counts.outcomes}
    if given["as_json"]:
        print(json.dumps(summary))
    else:
        print(", ".join(f"{name} {number}" for name, number in summary.items()))
    return Exit.DONE


def run(queue: Queue, handler: Callable[[Any], Any], options: dict[str, Any], given: Mapping[str, Any]) -> Counts:
    """Run a worker on the main thread. Raises Failure."""
    try:
        worker = Worker(queue, handler, **options)
        return worker.run(signals=True, until_empty=given["until_empty"], messages_max=given["count"])
    except ParameterInvalid as error:
        raise Failure(Exit.USAGE, refused_value(error.parameter, error.reason, worker=True)) from None
    except TransportError as error:
        raise Failure(Exit.ADDRESS, f"queue {queue.name}: {error}") from None
    except VeilError as error:
        raise Failure(Exit.WRONG, f"queue {queue.name}: {error}") from None


def handler_of(name: str) -> Callable[[Any], Any]:
    """The handler of that `module:name`. Raises Failure."""
    if name.count(":") != 1 or name.startswith(":") or name.endswith(":"):
        raise Failure(Exit.USAGE, f"expected MODULE:HANDLER, not {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    importlib.invalidate_caches()
    try:
        return resolve(name)
    except ParameterInvalid as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        is_own = missing is not None and f"{name.partition(':')[0]}.".startswith(f"{missing}.")
        places = f"{Path.cwd()}, on PYTHONPATH and among the installed packages"
        advice = f"Modules are looked for in {places}." if is_own else ""
        raise Failure(Exit.USAGE, error.reason, advice) from None
    except Exception as error:  # noqa: BLE001 the user's module may fail in any way
        advice = f"To see where: {sys.executable} -c 'import {name.partition(':')[0]}'"
        reason = str(error).strip().partition("\n")[0]
        raise Failure(Exit.USAGE, f"{name!r} cannot be imported: {type(error).__name__}: {reason}", advice) from None


def open_queue(url: str) -> Queue:
    """The queue of a URL. Raises Failure, which shows no secret."""
    try:
        return connect(url)
    except TransportError as error:
        code = Exit.DIRECTORY if url.startswith("veil:///") else Exit.ADDRESS
        raise Failure(code, error.reason, "" if code is Exit.DIRECTORY else _ADVICE_AWAY) from None
    except QueueMissing as error:
        advice = f"See `veilmq queues list`; make it with `veilmq queues create {error.queue}`, or create=1 in the URL."
        raise Failure(Exit.USAGE, f"--queue: {error}", advice) from None
    except ParameterInvalid as error:
        advice = ""
        if error.parameter == "directory":
            advice = closed_to_user(Path(parse_url(url).directory or ""), made=True)
        raise Failure(Exit.USAGE, f"--queue: {error.reason}", advice) from None
    except (UsageError, CapabilityMissing) as error:
        raise Failure(Exit.USAGE, f"--queue: {error}") from None
    except VeilError as error:
        raise Failure(Exit.WRONG, str(error)) from None


def parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's parameters. Raises Failure."""
    options = {name: given[name] for name in _SAME if given[name] is not None}
    for name in _TIMES:
        if given[name] is not None:
            options[name] = seconds(f"--{name.replace('_', '-')}", given[name])
    _add_keeper(options, given)
    if given["retry_first"] or given["retry_longest"]:
        options["retry"] = _backoff(given)
    if given["kind"] is not None:
        options["kind"] = given["kind"]
    if given["checkpoints"] is not None:
        options["checkpoints"] = _checkpoints(given["checkpoints"])
    if given["guard"] is not None:
        options["guard"] = _remembering("--guard", given["guard"], DirectoryGuard)
    if given["metrics"] is not None:
        options["metrics"] = _serve_metrics(given["metrics"])
    if given["traces"]:
        options["tracer"] = True
    return options


def kind_of(handler: Callable[[Any], Any]) -> str:
    """The default kind of a handler: where it runs."""
    return "async" if inspect.iscoroutinefunction(handler) else "threads"


def _add_keeper(options: dict[str, Any], given: Mapping[str, Any]) -> None:
    if not given["keeper"]:
        if given["max_hold"] is not None:
            raise Failure(Exit.USAGE, "--max-hold: is the keeper's, and --no-keeper takes it away")
        options["keeper"] = False
    elif given["max_hold"] is not None:
        options["keeper"] = {"max_hold": seconds("--max-hold", given["max_hold"])}


def _backoff(given: Mapping[str, Any]) -> Backoff:
    times = {name: given[f"retry_{name}"] for name in ("first", "longest") if given[f"retry_{name}"] is not None}
    try:
        return Backoff(**{name: seconds(f"--retry-{name}", text) for name, text in times.items()})
    except ParameterInvalid as error:
        reason = error.reason.replace("first = ", "--retry-first ")
        raise Failure(Exit.USAGE, f"--retry-{error.parameter}: {reason}") from None


def _checkpoints(place: str) -> Checkpoints:
    if "://" in place:
        return _or_usage("--checkpoints", lambda: ObjectCheckpoints(place))
    return _remembering("--checkpoints", Path(place), FileCheckpoints)


def _remembering(option: str, directory: Path, make: Callable[[Path], T]) -> T:
    """What keeps its files in that directory. A new one is logged, for it knows nothing of what was done before.

    Raises Failure, also if the directory's parent is missing.
    """
    check_directory(directory, option)
    is_new = not directory.exists()
    made = _or_usage(option, lambda: make(directory))
    if is_new:
        log.info("%s: made a new directory: %s", option, directory.absolute())
    return made


def _serve_metrics(address: str) -> PrometheusMeter:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise Failure(Exit.USAGE, f"--metrics: expected HOST:PORT, not {address!r}")
    if int(port) > PORT_MAX:
        raise Failure(Exit.USAGE, f"--metrics: a port is a number up to {PORT_MAX}, not {port}")
    try:
        meter = PrometheusMeter()
        from prometheus_client import start_http_server

        start_http_server(int(port), host.strip("[]") or "127.0.0.1")
    except CapabilityMissing as error:
        raise Failure(Exit.USAGE, f"--metrics: {error}") from None
    except (OSError, UnicodeError) as error:  # no machine can have a name that IDNA refuses
        raise Failure(Exit.ADDRESS, f"--metrics: {address}: {error}") from None
    return meter


def _or_usage(option: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except ParameterInvalid as error:
        _refuse(option, error.reason)
    except (OSError, ImportError) as error:
        _refuse(option, str(error))


def _refuse(option: str, reason: str) -> NoReturn:
    raise Failure(Exit.USAGE, f"{option}: {reason}")


_BAR: Final = 40


class _Collecting:
    """A worker's meter that keeps the handler's times."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._lock = threading.Lock()

    def ended(self, queue: str, outcome: str, seconds: float) -> None:
        """A done message gives an exact time, a failed or lost one a lower bound, and so does one that could not be
        settled: its handler may have failed. Without a handler there is no time."""
        if seconds > 0 and outcome in ("done", "failed", "dead_lettered", "lost", "unsettled"):
            with self._lock:
                self.samples.append(Sample(seconds, outcome == "done"))

    def failed(self, queue: str, call: str, error: str) -> None:
        """Not about times."""

    def in_hand(self, queue: str, messages: int) -> None:
        """Not about times."""


def calibrate(
    handler: str, url: str, count: int, concurrency: int, kind: str | None, wait: str | None, *, as_json: bool
) -> Exit:
    """Process up to `count` messages and print their times. Raises Failure."""
    set_up("human", "warning")
    found = handler_of(handler)
    meter = _Collecting()
    options = {
        "concurrency": concurrency,
        "kind": kind or kind_of(found),
        "wait": 5.0 if wait is None else seconds("--wait", wait),
        "metrics": meter,
    }
    with open_queue(url) as queue:
        run(queue, found, options, {"until_empty": True, "count": count})
    if not meter.samples:
        raise Failure(Exit.WRONG, "no message came: there is nothing to measure")
    calibration = judge(meter.samples)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(calibration) + b"\n")
        sys.stdout.buffer.flush()
    else:
        print(report(calibration))
    return Exit.DONE


def report(calibration: Calibration) -> str:
    """The calibration for people."""
    lines = [f"{calibration.finished} finished, {calibration.failed} failed", ""]
    most = max(bucket.finished + bucket.failed for bucket in calibration.histogram)
    for bucket in calibration.histogram:
        done = round(_BAR * bucket.finished / most)
        bad = round(_BAR * bucket.failed / most)
        number = bucket.finished + bucket.failed
        lines.append(f"  up to {time_text(bucket.upto):>7} {number:>7}  {'#' * done}{'x' * bad}")
    lines.append("")
    for name, value in calibration.percentiles.items():
        lines.append(f"  {name:<6} {'beyond the samples' if value is None else time_text(value)}")
    lines.append(f"  {'max':<6} {time_text(calibration.longest)}")
    keeper = (
        f"lease {time_text(calibration.first_lease)}, extended {time_text(calibration.renewal_margin)} before its end"
    )
    timeout = calibration.timeout
    plain = "not known, the longest runs failed" if timeout is None else f"a visibility timeout of {time_text(timeout)}"
    lines += ["", f"With a lease keeper: {keeper}.", f"Without: {plain}."]
    lines += [f"Note: {note}." for note in calibration.notes]
    return "\n".join(lines)
