"""The azure adapter passes the client contract against azurite, the service's own emulator, by the real clock.

In base64: azurite makes text of each piece that comes off the wire by itself (readStreamToString in its utils.js), and
so breaks a character that lies in two pieces of a long body.
"""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from socket import create_server

import pytest
from azure.storage.queue import QueueServiceClient

from veilmq.client.azure import AzureAccount
from veilmq.client.clock import SYSTEM
from veilmq.client.connect import DEVELOPMENT_KEYS
from veilmq.model.errors import VeilError
from veilmq.testing import client_contract
from veilmq.testing.client_contract import stage  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

TOOLS = Path(__file__).parents[2] / ".tools"
PROGRAM = TOOLS / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "queue" / "main.js"
((ACCOUNT, KEY),) = DEVELOPMENT_KEYS.items()
START_SECONDS = 60


class AzuriteClient:
    """An account there; time passes by itself."""

    _numbers = count()
    clock = SYSTEM

    def __init__(self, url: str, *, base64: bool = True) -> None:
        client = QueueServiceClient(url, credential={"account_name": ACCOUNT, "account_key": KEY}, retry_total=0)
        self.account = AzureAccount(client, base64=base64, owns_client=True)

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    def name(self, prefix: str) -> str:
        return f"{prefix}-{next(self._numbers)}"


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def azurite() -> Iterator[str]:
    """The account's URL."""
    with tempfile.TemporaryDirectory() as directory:
        port = free_port()
        command = [
            str(TOOLS / "node" / "bin" / "node"), str(PROGRAM), "--queueHost", "127.0.0.1", "--queuePort", str(port),
            "--location", directory, "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        ]  # fmt: skip
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}/{ACCOUNT}"
            wait_for(url, process)
            yield url
        finally:
            process.kill()
            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    client = AzuriteClient(url)
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            client.account.names()
        except VeilError:
            assert process.poll() is None, "azurite ended"
            assert time.monotonic() < end, "azurite does not answer"
            time.sleep(0.1)
        else:
            client.account.close()
            return


@pytest.fixture
def client_account(azurite: str) -> Iterator[AzuriteClient]:
    client = AzuriteClient(azurite)
    yield client
    client.account.close()


for cases in client_contract.SUITE:
    globals()[cases.__name__] = cases


@pytest.mark.parametrize("body", ["x", "žluťoučký 漢字 \U0001f600", "a\r\nb\rc", "<a b='c'>&amp;\"]]></a>"])
def test_plain_bodies(azurite: str, body: str) -> None:
    client = AzuriteClient(azurite, base64=False)
    name = client.name("plain")
    client.account.create(name)
    with client.account.queue(name) as queue:
        queue.send(body)
        (message,) = queue.receive(lease=60)
        assert message.body == body
        queue.delete(message.handle)
    client.account.close()
