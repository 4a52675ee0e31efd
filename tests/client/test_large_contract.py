"""A queue of large messages passes the client contract, whether bodies go to the store or not."""

import itertools

import pytest

from veilmq.client.large import LargeMessageQueue, ObjectStore
from veilmq.client.unreadable import keep
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture
from veilmq.testing.client_contract.embedded import EmbeddedClient
from veilmq.testing.client_contract.wrapped import WrappedClient

pytestmark = pytest.mark.slow

_buckets = itertools.count()


@pytest.fixture(params=[0, 65_536], ids=["all-stored", "large-stored"])
def client_account(embedded: EmbeddedClient, request: pytest.FixtureRequest) -> WrappedClient:
    store = ObjectStore(f"memory://contract{next(_buckets)}/large")
    return WrappedClient(
        embedded,
        lambda queue: LargeMessageQueue(
            queue, store, unreadable=keep, threshold_bytes=request.param, body_bytes_max=2 << 20, clock=embedded.clock
        ),
    )


for cases in client_contract.SUITE:
    globals()[cases.__name__] = cases


class TestBodies(client_contract.TestBodies):
    """But for a queue's limit in bytes: to take what is larger is what this is for (test_large_queue.py)."""

    test_a_message_larger_than_the_queue_takes_is_refused = None


class TestFifo(client_contract.TestFifo):
    """But for a message without an identity: what is stored gets its body's SHA-256, since no two pointers are alike."""

    test_what_a_message_must_have = None
