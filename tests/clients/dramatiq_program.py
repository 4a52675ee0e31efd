"""A dramatiq application over dramatiq-sqs.

    python dramatiq_program.py SETTINGS worker
    python dramatiq_program.py SETTINGS send JOB...

SETTINGS and each JOB are JSON; tests/clients/test_sqs_workers.py says what is in them.
"""

import json
import signal
import sys
import threading

import dramatiq
from dramatiq.middleware import Callbacks, Retries
from dramatiq_sqs import SQSBroker
from job import Job, work

settings = json.loads(sys.argv[1])
broker = SQSBroker(
    endpoint_url=settings["endpoint"],
    region_name="us-east-1",
    visibility_timeout=settings["visibility_seconds"],
    middleware=[Callbacks(), Retries()],
)
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name=settings["queue"])
def job(given: Job) -> None:
    work(settings["record"], given)


if sys.argv[2] == "send":
    for text in sys.argv[3:]:
        job.send(json.loads(text))
else:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    worker = dramatiq.Worker(broker, worker_threads=1)
    worker.start()
    stopped.wait()
    worker.stop()
