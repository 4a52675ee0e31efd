"""The program of test_adaptive_live.py: a worker whose leases an AdaptiveTimeout chooses, ready to die at any instant.

It notes each start and each end in a file of its own, in one write each, so that a kill tears no line.
"""

import os
import sys
import time
from pathlib import Path

import veilmq
from veilmq.client.timeouts import AdaptiveTimeout
from veilmq.client.worker import Job, Worker

SHORTEST_SECONDS = 4.0
LONGEST_SECONDS = 12.0
HANDLERS = 8


def main(url: str, directory: Path) -> None:
    file = os.open(directory / f"{os.getpid()}.notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(what: str, job: Job) -> None:
        os.write(file, f"{what} {job.id} {job.receive_count} {time.time()}\n".encode())

    def work(job: Job) -> None:
        note("start", job)
        time.sleep(float(job.body))
        note("end", job)

    plan = AdaptiveTimeout(shortest=SHORTEST_SECONDS, longest=LONGEST_SECONDS)
    with veilmq.connect(url) as queue:
        Worker(queue, work, concurrency=HANDLERS, lease=LONGEST_SECONDS, keeper={"plan": plan}).run(signals=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
