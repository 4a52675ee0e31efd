"""A routed queue passes the client contract: as one queue with a second one beside it."""

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.messages import Message, Template
from veilmq.client.queue import Queue
from veilmq.client.routed import RoutedQueue
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture
from veilmq.testing.client_contract.stage import WrappedClient

pytestmark = pytest.mark.slow


@pytest.fixture
def client_account(embedded: EmbeddedClient) -> WrappedClient:
    def routed(queue: Queue) -> Queue:
        """Bodies that begin with a digit go to another queue."""

        def by(message: Message) -> str | None:
            return "digit" if str(message.body)[:1].isdigit() else None

        is_fifo = queue.capabilities.native_fifo
        name = f"{queue.name.removesuffix('.fifo')}-digits{'.fifo' if is_fifo else ''}"
        embedded.account.create(name, Template(fifo=is_fifo))
        return RoutedQueue({"digit": embedded.account.queue(name)}, queue, by=by, clock=embedded.clock)

    return WrappedClient(embedded, routed)


for cases in client_contract.SUITE_OF_WRAPPERS:
    globals()[cases.__name__] = cases


class TestOptions(client_contract.TestOptions):
    """But for priorities, which are each queue's own."""

    test_the_most_urgent_comes_first = None
