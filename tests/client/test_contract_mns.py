"""The mns adapter passes the client contract, against a real server whose clock moves; in base64, and plain."""

from collections.abc import Iterator
from itertools import count

import pytest
from mns.account import Account

from veilmq.client.adapters.mns import MnsAccount
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture
from veilmq.testing.client_contract.stage import MovableClock
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow


class MnsClient:
    """An account on the server, with its clock."""

    _numbers = count()
    brief = 60

    def __init__(self, server: LocalServer, base64: bool) -> None:
        self._server = server
        self.clock = MovableClock()
        self.account = MnsAccount(Account(server.process.mns, "id", "secret"), base64=base64, clock=self.clock)

    def pass_time(self, seconds: float) -> None:
        self._server.advance(seconds=seconds)
        self.clock.advance(seconds)

    def name(self, prefix: str) -> str:
        return f"{prefix}-mns-{next(self._numbers)}"


@pytest.fixture
def client_account(server: LocalServer, request: pytest.FixtureRequest) -> Iterator[MnsClient]:
    client = MnsClient(server, base64=request.param == "base64")
    yield client
    client.account.close()


globals().update(
    client_contract.in_forms(
        {"base64": client_contract.SUITE_WITHOUT_FIFO, "plain": client_contract.SUITE_OF_ENCODINGS}
    )
)
