"""A worker that is killed amid its work, and the one after it, which goes on where the first one stopped.

Both are processes of their own and have the message's progress from the message itself. The work is charged once, even
though a second message asks for it again: a guard remembers what was done.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from veilmq.client.messages import Message
from veilmq.client.worker import DirectoryGuard, Job, Worker
from veilmq.testing.local import LocalServer

PAGES = 6
LEASE_SECONDS = 2


def convert(job: Job) -> str:
    for page in range(job.state or 0, PAGES):
        job.cancelled.check()
        job.checkpoint(page + 1)
        print(f"{job.body}: page {page + 1} is safe", flush=True)
        if job.receive_count == 1 and page == 2:
            time.sleep(600)  # and here it is killed
    return f"{PAGES} pages"


def work(url: str, done: str) -> None:
    worker = Worker(
        url, convert, lease=LEASE_SECONDS, wait=LEASE_SECONDS + 1,
        guard=DirectoryGuard(done), guard_key=lambda message: str(message.attributes["document"]),
    )  # fmt: skip
    print("worker:", worker.run(until_empty=True).outcomes, flush=True)


if __name__ == "__main__" and len(sys.argv) > 1:
    work(*sys.argv[1:])
elif __name__ == "__main__":
    with (
        LocalServer.temporary() as server,
        tempfile.TemporaryDirectory() as directory,
        server.connect("films") as queue,
    ):
        command = [sys.executable, __file__, server.queue_url("films"), str(Path(directory) / "done")]
        queue.send(Message("report.pdf", attributes={"document": "17"}))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            for line in first.stdout:
                print("first ", line, end="")
                if "page 3" in line:
                    break
            first.kill()
        print("killed")
        queue.send(Message("report.pdf, once more", delay=LEASE_SECONDS + 1, attributes={"document": "17"}))
        second = subprocess.run(command, capture_output=True, text=True, check=True)
        print("".join(f"second {line}\n" for line in second.stdout.splitlines()), end="")
        stats = queue.stats()
        print("left:", stats.visible + (stats.in_flight or 0))
