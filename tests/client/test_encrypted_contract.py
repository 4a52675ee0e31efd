"""An encrypted queue passes the client contract."""

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.encrypted import EncryptedQueue, Keys, new_key
from veilmq.client.queue import Queue
from veilmq.client.unreadable import keep
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture
from veilmq.testing.client_contract.stage import WrappedClient

pytestmark = pytest.mark.slow


@pytest.fixture
def client_account(embedded: EmbeddedClient) -> WrappedClient:
    keys = Keys(new_key())

    def encrypted(queue: Queue) -> Queue:
        # One name for all of them, so that what moves to a dead-letter queue is read there, too.
        return EncryptedQueue(queue, keys, unreadable=keep, bound_to="contract", clock=embedded.clock)

    return WrappedClient(embedded, encrypted)


for cases in client_contract.SUITE_OF_WRAPPERS:
    globals()[cases.__name__] = cases


class TestBodies(client_contract.TestBodies):
    """But for a queue's limit in bytes, which counts what is encrypted (test_encrypted_queue.py)."""

    test_a_message_larger_than_the_queue_takes_is_refused = None


class TestFifo(client_contract.TestFifo):
    """But for deduplication by content: no two encrypted bodies are alike, so an id is asked for."""

    test_the_same_content_is_the_same_message_where_the_queue_says_so = None
