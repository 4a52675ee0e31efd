"""The embedded adapter passes the client contract."""

import pytest
from tests.support.embedded import EmbeddedClient

from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture


@pytest.fixture
def client_account(embedded: EmbeddedClient) -> EmbeddedClient:
    return embedded


for cases in client_contract.SUITE:
    globals()[cases.__name__] = cases
