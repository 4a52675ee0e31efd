"""A Django project whose tasks go over django-tasks-sqs.

    python django_program.py SETTINGS worker
    python django_program.py SETTINGS send JOB...

SETTINGS and each JOB are JSON; tests/clients/test_sqs_workers.py says what is in them. It runs in .tools/django, for
Django has had tasks since 6.0, which needs Python 3.12.
"""

import json
import sys

import django
from django.conf import settings as project
from django.core.management import call_command
from job import Job, work

settings = json.loads(sys.argv[1])
project.configure(
    INSTALLED_APPS=["django_tasks_sqs"],
    TASKS={
        "default": {
            "BACKEND": "django_tasks_sqs.SQSBackend",
            "QUEUES": [settings["queue"]],
            "OPTIONS": {"endpoint_url": settings["endpoint"], "region_name": "us-east-1"},
        }
    },
)
django.setup()
from django.tasks import task  # noqa: E402  (it reads the settings)


@task(queue_name=settings["queue"])
def job(given: Job) -> None:
    work(settings["record"], given)


if sys.argv[2] == "send":
    for text in sys.argv[3:]:
        job.enqueue(json.loads(text))
else:
    # A worker that stops waits for its last poll.
    call_command("sqs_worker", wait_time=1, visibility_timeout=settings["visibility_seconds"])
