"""A Celery application over kombu's SQS transport.

    python celery_program.py SETTINGS worker
    python celery_program.py SETTINGS send JOB...

SETTINGS and each JOB are JSON; tests/clients/test_sqs_workers.py says what is in them.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from celery import Celery

settings = json.loads(sys.argv[1])
app = Celery("jobs", broker=f"sqs://{urlsplit(settings['endpoint']).netloc}//")
app.conf.update(
    broker_transport_options={
        "region": "us-east-1",
        "visibility_timeout": settings["visibility_seconds"],
        "wait_time_seconds": 20,
        "polling_interval": 0,
    },
    task_default_queue=settings["queue"],
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    worker_enable_remote_control=False,
    broker_connection_retry_on_startup=True,
)


def record(kind: str, job: str) -> None:
    with open(settings["record"], "a") as file:
        file.write(f"{kind} {job} {os.getpid()}\n")


@app.task
def work(job: dict[str, object]) -> None:
    record("begin", str(job["id"]))
    marker = job.get("crash")
    if marker and not Path(str(marker)).exists():
        Path(str(marker)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(str(job.get("seconds", 0))))
    record("done", str(job["id"]))


if __name__ == "__main__":
    # The task's name is that of its module, which is another one when Celery imports it.
    if sys.argv[2] == "send":
        for given in sys.argv[3:]:
            work.delay(json.loads(given))
    else:
        app.worker_main(
            ["worker", "--pool", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "warning"]
        )
