"""The azure adapter passes the client contract against azurite, the service's own emulator, by the real clock.

In base64: azurite makes text of each piece that comes off the wire by itself (readStreamToString in its utils.js), and
so breaks a character that lies in two pieces of a long body.
"""

import time
from collections.abc import Iterator
from itertools import count

import pytest
from azure.storage.queue import QueueServiceClient
from tests.support.azurite import azurite as emulator

from veilmq.client.adapters.azure import AzureAccount
from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.client.clock import SYSTEM
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

((ACCOUNT, KEY),) = DEVELOPMENT_KEYS.items()


class AzuriteClient:
    """An account there; time passes by itself."""

    _numbers = count()
    clock = SYSTEM
    brief = 3

    def __init__(self, url: str, *, base64: bool = True) -> None:
        client = QueueServiceClient(url, credential={"account_name": ACCOUNT, "account_key": KEY}, retry_total=0)
        self.account = AzureAccount(client, base64=base64, owns_client=True)

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    def name(self, prefix: str) -> str:
        return f"{prefix}-{next(self._numbers)}"


@pytest.fixture(scope="module")
def azurite() -> Iterator[str]:
    """The account's URL."""
    with emulator("queue") as url:
        yield f"{url}/{ACCOUNT}"


@pytest.fixture
def client_account(azurite: str) -> Iterator[AzuriteClient]:
    client = AzuriteClient(azurite)
    yield client
    client.account.close()


for cases in client_contract.SUITE_OF_SERVERS:
    globals()[cases.__name__] = cases


def test_plain_bodies(azurite: str) -> None:
    client = AzuriteClient(azurite, base64=False)
    name = client.name("plain")
    client.account.create(name)
    bodies = ["x", "žluťoučký 漢字 \U0001f600", "a\r\nb\rc", "<a b='c'>&amp;\"]]></a>"]
    received = []
    with client.account.queue(name) as queue:
        for body in bodies:
            queue.send(body)
            (message,) = queue.receive(lease=60)
            received.append(message.body)
            queue.delete(message.handle)
    client.account.close()
    assert received == bodies
