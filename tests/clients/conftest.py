"""A real `veilmq serve` process for official SDKs to talk to; what the tests share is in modules beside them."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from veilmq.testing.local import ServerProcess

sys.path.insert(0, str(Path(__file__).parent))

KEY = ("AKIDTESTS00000000001", "a secret of the tests")
RELOAD_SECONDS = 20
Start = Callable[..., ServerProcess]
Connect = Callable[..., Any]


def _connect(server: ServerProcess, key: str = "test", secret: str = "test", region: str = "us-east-1") -> Any:
    """A boto3 SQS client without retries, so that each answer is seen as it is."""
    return boto3.client(
        "sqs",
        endpoint_url=server.sqs,
        region_name=region,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(retries={"total_max_attempts": 1}, read_timeout=40),
    )


@pytest.fixture(scope="session")
def connect() -> Connect:
    """Makes boto3 clients: connect(server, key, secret, region)."""
    return _connect


@pytest.fixture(scope="session")
def reload() -> Callable[[ServerProcess], None]:
    """`reload(server)`: SIGHUP, and back when the server has read its credentials."""

    def told(server: ServerProcess) -> int:
        text = server.log.read_text()
        return text.count("the credentials stay as they were") + len(re.findall(r"read \d+ accounts? with ", text))

    def reload_one(server: ServerProcess) -> None:
        before, until = told(server), time.monotonic() + RELOAD_SECONDS
        os.kill(server.process.pid, signal.SIGHUP)
        while told(server) == before:
            assert time.monotonic() < until, server.log.read_text()
            time.sleep(0.01)

    return reload_one


@pytest.fixture(scope="session")
def key() -> tuple[str, str]:
    """Id and secret of the key that may do everything in the `credentials` file."""
    return KEY


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers that end with the test."""
    servers: list[ServerProcess] = []

    def start_one(*options: str) -> ServerProcess:
        servers.append(ServerProcess(tmp_path, *options).start())
        return servers[-1]

    yield start_one
    for server in servers:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    """A credentials file with `KEY` for account 111111111111 and a key of another account that may only receive."""
    return _credentials(tmp_path)


def _credentials(directory: Path) -> Path:
    path = directory / "credentials.toml"
    path.write_text(
        f"""
[[account]]
id = "111111111111"
[[account.key]]
id = "{KEY[0]}"
secret = "{KEY[1]}"
[[account.key]]
id = "AKIDREADER0000000001"
secret = "{KEY[1]}"
grants = [{{ actions = ["receive", "describe-queue"], queues = ["orders*"] }}]
[[account.key]]
id = "AKIDLISTER0000000001"
secret = "{KEY[1]}"
grants = [
    {{ actions = ["list-queues"], queues = ["payroll"] }},
    {{ actions = ["describe-queue"], queues = ["orders"] }},
]
[[account]]
id = "222222222222"
[[account.key]]
id = "AKIDOTHER00000000001"
secret = "{KEY[1]}"
"""
    )
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One development server for all tests of a module; each test makes its own queue."""
    server = ServerProcess(tmp_path_factory.mktemp("shared")).start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests of a module that checks every signature; `key` may do everything."""
    directory = tmp_path_factory.mktemp("signed")
    server = ServerProcess(directory, "--credentials", str(_credentials(directory))).start()
    yield server
    assert server.stop() == 0


@pytest.fixture
def sqs(shared: ServerProcess) -> Any:
    """A client of the shared server."""
    return _connect(shared)


@pytest.fixture
def queue(sqs: Any, request: pytest.FixtureRequest) -> str:
    """URL of a queue of the test's own."""
    name = "".join(each if each.isalnum() else "-" for each in request.node.name)[:80]
    return str(sqs.create_queue(QueueName=name)["QueueUrl"])
