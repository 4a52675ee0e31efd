"""`veilmq calibrate`: load-tests a handler on real messages, and recommends a timeout.

Strategy: a worker runs the handler; its meter collects the times; client/calibration.py evaluates them. A table and
bars for people, one JSON object for programs.
"""

import sys
import threading
from typing import Final

import msgspec

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.options import seconds
from veilmq.cli.output import time_text
from veilmq.cli.work import handler_of, kind_of, open_queue, run
from veilmq.client.timeouts.schedule import Calibration, Sample
from veilmq.client.timeouts.schedule import calibrate as judge
from veilmq.server.logs import set_up

_BAR: Final = 40


class _Collecting:
    """A worker's meter that keeps the handler's times."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._lock = threading.Lock()

    def ended(self, queue: str, outcome: str, seconds: float) -> None:
        """A done message gives an exact time, a failed or lost one a lower bound; without a handler there is no
        time."""
        if seconds > 0 and outcome in ("done", "failed", "dead_lettered", "lost", "unsettled"):
            with self._lock:
                self.samples.append(Sample(seconds, outcome in ("done", "unsettled")))

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
