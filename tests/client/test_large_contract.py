"""A queue of large messages passes the client contract, whether bodies go to the store or not."""

import itertools

import pytest

from veilmq.client.large import LargeMessageQueue, ObjectStore
from veilmq.client.messages import Message
from veilmq.client.unreadable import keep
from veilmq.testing import client_contract
from veilmq.testing.client_contract import Stage, stage  # noqa: F401 - a fixture
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
    """But for a message without an identity: its body's SHA-256 is one, since no two pointers are alike."""

    @pytest.mark.parametrize(
        "message", [Message("x", deduplication_id="d"), Message("x", group="g", deduplication_id="d", delay=1)]
    )
    def test_what_a_message_must_have(self, stage: Stage, message: Message) -> None:  # noqa: F811
        super().test_what_a_message_must_have(stage, message)

    test_of_a_batch_each_message_is_judged_for_itself = None
