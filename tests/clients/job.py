"""The job of the Python frameworks: says that it began, may kill its worker once, and says that it is done."""

import os
import signal
import time
from pathlib import Path
from typing import Any

Job = dict[str, Any]
"""`id`; `seconds` that it takes; `crash`: a file that is made before the worker is killed, so that it is once."""


def work(record: str, job: Job) -> None:
    note(record, "begin", job["id"])
    marker = job.get("crash")
    if marker and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(job.get("seconds", 0))
    note(record, "done", job["id"])


def note(record: str, kind: str, job: str) -> None:
    with open(record, "a") as file:
        file.write(f"{kind} {job} {os.getpid()}\n")
