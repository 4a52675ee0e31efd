"""A queue of large messages passes the client contract, whether bodies go to the store or not."""

import itertools

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.client.large import LargeMessageQueue, ObjectStore
from veilmq.client.unreadable import keep
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture
from veilmq.testing.client_contract.stage import WrappedClient

pytestmark = pytest.mark.slow

_buckets = itertools.count()


THRESHOLDS = {"all-stored": 0, "large-stored": 65_536}


@pytest.fixture
def client_account(embedded: EmbeddedClient, request: pytest.FixtureRequest) -> WrappedClient:
    store = ObjectStore(f"memory://contract{next(_buckets)}/large")
    return WrappedClient(
        embedded,
        lambda queue: LargeMessageQueue(
            queue,
            store,
            unreadable=keep,
            threshold_bytes=THRESHOLDS[request.param],
            body_bytes_max=2 << 20,
            clock=embedded.clock,
        ),
    )


class TestBodies(client_contract.TestBodies):
    """But for a queue's limit in bytes: to take what is larger is what this is for (test_large_queue.py)."""

    test_a_message_larger_than_the_queue_takes_is_refused = None


class TestFifo(client_contract.TestFifo):
    """But for a message without an identity: its body's SHA-256 is one, since no two pointers are alike."""

    refused = tuple(message for message in client_contract.TestFifo.refused if message.deduplication_id is not None)
    test_of_a_batch_each_message_is_judged_for_itself = None


OWN = {client_contract.TestBodies: TestBodies, client_contract.TestFifo: TestFifo}
globals().update(
    client_contract.in_forms(
        {
            "all-stored": [OWN.get(cases, cases) for cases in client_contract.SUITE_OF_WRAPPERS],
            "large-stored": [OWN.get(cases, cases) for cases in client_contract.SUITE_OF_ENCODINGS],
        }
    )
)
