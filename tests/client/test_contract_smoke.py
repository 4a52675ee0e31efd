"""The adapters of three clouds send, receive, extend, release and delete in `make check` too; their suites are slow."""

from collections.abc import Callable, Iterator

import pytest
from tests.client.test_contract_azure import AzureClient
from tests.client.test_contract_mns import MnsClient
from tests.client.test_contract_sqs import SqsClient

from veilmq.testing import client_contract
from veilmq.testing.client_contract import ClientAccount, stage  # noqa: F401 - a fixture
from veilmq.testing.local import LocalServer

CLIENTS: dict[str, Callable[[LocalServer], ClientAccount]] = {
    "sqs": SqsClient,
    "azure": lambda server: AzureClient(server, base64=False),
    "mns": lambda server: MnsClient(server, base64=True),
}


@pytest.fixture
def client_account(server: LocalServer, request: pytest.FixtureRequest) -> Iterator[ClientAccount]:
    client = CLIENTS[request.param](server)
    yield client
    client.account.close()


globals().update(client_contract.in_forms(dict.fromkeys(CLIENTS, (client_contract.TestSmoke,))))
