"""All pages and acts. Each file has those of one noun."""

from typing import Final

from veilmq.console.pages.acts import JOB_PAGES, QUEUE_ACTS
from veilmq.console.pages.message import MESSAGE_PAGES
from veilmq.console.pages.queue import PAST_PAGES, QUEUE_PAGES
from veilmq.console.pages.server import SERVER_PAGES
from veilmq.console.pages.start import START_PAGES
from veilmq.console.pages.workers import WORKER_PAGES
from veilmq.console.visit import Page

PAGES: Final[tuple[Page, ...]] = (
    *START_PAGES,
    *QUEUE_PAGES,
    *QUEUE_ACTS,
    *PAST_PAGES,
    *JOB_PAGES,
    *MESSAGE_PAGES,
    *WORKER_PAGES,
    *SERVER_PAGES,
)
