"""One scenario through unmodified SQS clients of four kinds, two protocols and two ages, signatures checked."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqs_clients import Boto3, Botocore131, Command, JavaScript, OldCommand, needed
from sqs_scenario import SCENARIO, Client, refusal

from veilmq.testing.local import ServerProcess

PARTS = {part.__name__: part for part in SCENARIO}
CLIENTS: dict[str, Callable[[str, tuple[str, str]], Any]] = {
    "boto3": Boto3,
    "botocore-query": Botocore131,
    "javascript": JavaScript,
    "aws": Command,
}
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sqs-scenario")]


@pytest.fixture(scope="module", params=CLIENTS)
def client(request: pytest.FixtureRequest, signed: ServerProcess, key: tuple[str, str]) -> Iterator[Client]:
    client = CLIENTS[request.param](signed.sqs, key)
    yield client
    client.close()


@pytest.mark.parametrize("part", PARTS)
def test_a_client_meets_the_queue_that_aws_describes(part: str, client: Client) -> None:
    PARTS[part](client, f"{type(client).__name__}-{part}")


# Its botocore went through all of it above; here is what the command itself makes of members and answers.
def test_the_command_of_2023_speaks_query(signed: ServerProcess, key: tuple[str, str]) -> None:
    PARTS["batches"](OldCommand(signed.sqs, key), "OldCommand-batches")


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_wrong_secret_is_refused(kind: str, signed: ServerProcess, key: tuple[str, str]) -> None:
    client = CLIENTS[kind](signed.sqs, (key[0], "another secret"))
    try:
        assert refusal(client, "ListQueues") == "SignatureDoesNotMatch"
    finally:
        client.close()


def test_a_tool_that_is_missing_is_a_failure_that_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="make setup-clients"):
        needed(tmp_path, "node_modules/none")
