"""A taskiq application over taskiq-aio-sqs.

    python taskiq_program.py SETTINGS worker
    python taskiq_program.py SETTINGS send JOB...

SETTINGS and each JOB are JSON; tests/clients/test_sqs_workers.py says what is in them.
"""

import asyncio
import json
import signal
import sys

from job import Job, work
from taskiq.api import run_receiver_task
from taskiq_aio_sqs import SQSBroker

settings = json.loads(sys.argv[1])
broker = SQSBroker(
    settings["queue"],
    endpoint_url=settings["endpoint"],
    region_name="us-east-1",
    visibility_timeout=settings["visibility_seconds"],
    wait_time_seconds=1,  # a worker that stops waits for its last poll
    enable_heartbeat=True,
)


@broker.task(task_name="job")
async def job(given: Job) -> None:
    await asyncio.to_thread(work, settings["record"], given)


async def send() -> None:
    await broker.startup()
    for text in sys.argv[3:]:
        await job.kiq(json.loads(text))
    await broker.shutdown()


async def receive() -> None:
    receiver = asyncio.create_task(run_receiver_task(broker, run_startup=True))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, receiver.cancel)
    await asyncio.wait([receiver])
    await broker.shutdown()


asyncio.run(send() if sys.argv[2] == "send" else receive())
