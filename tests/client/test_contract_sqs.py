"""The sqs adapter passes the client contract, against a real server whose clock moves."""

from collections.abc import Iterator
from itertools import count

import boto3
import pytest
from botocore.config import Config

from veilmq.client.adapters.sqs import SqsAccount
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture
from veilmq.testing.client_contract.stage import MovableClock
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow


class SqsClient:
    """An account on the server, with its clock."""

    _numbers = count()
    brief = 60

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self.clock = MovableClock()
        client = boto3.client(
            "sqs",
            endpoint_url=server.sqs_url,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            config=Config(retries={"total_max_attempts": 1}, max_pool_connections=20),
        )
        self.account = SqsAccount(client, owns_client=True, clock=self.clock)

    def pass_time(self, seconds: float) -> None:
        self._server.advance(seconds=seconds)
        self.clock.advance(seconds)

    def name(self, prefix: str) -> str:
        return f"{prefix}-sqs-{next(self._numbers)}"


@pytest.fixture
def client_account(server: LocalServer) -> Iterator[SqsClient]:
    client = SqsClient(server)
    yield client
    client.account.close()


for cases in client_contract.SUITE:
    globals()[cases.__name__] = cases
