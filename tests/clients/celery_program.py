"""A Celery application over kombu's SQS transport, or over its one for Azure if SETTINGS have an `azure_key`.

    python celery_program.py SETTINGS worker
    python celery_program.py SETTINGS send JOB...

SETTINGS and each JOB are JSON; tests/clients/test_sqs_workers.py says what is in them.
"""

import json
import sys
from urllib.parse import urlsplit

from celery import Celery
from job import Job, work

settings = json.loads(sys.argv[1])
if "azure_key" in settings:
    broker = f"azurestoragequeues://{settings['azure_key']}@{settings['endpoint']}"
    options = {"polling_interval": 0.1}
else:
    broker = f"sqs://{urlsplit(settings['endpoint']).netloc}//"
    options = {
        "region": "us-east-1",
        "visibility_timeout": settings["visibility_seconds"],
        "wait_time_seconds": 20,
        "polling_interval": 0,
    }
app = Celery("jobs", broker=broker)
app.conf.update(
    broker_transport_options=options,
    task_default_queue=settings["queue"],
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    worker_enable_remote_control=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="job")
def job(given: Job) -> None:
    work(settings["record"], given)


if __name__ == "__main__":
    if sys.argv[2] == "send":
        for given in sys.argv[3:]:
            job.delay(json.loads(given))
    else:
        app.worker_main(
            ["worker", "--pool", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "warning"]
        )
