"""The programs of the scenario: each as one `call(operation, **members)`; see sqs_scenario.py.

Strategy: boto3 runs in this process; botocore 1.31 and the JavaScript SDK in processes of their own that read a call a
line and write its answer; the `aws` command is started for every call. All sign with the key that they are given. Bytes
travel as {"bytes": base64}.
"""

import base64
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from sqs_scenario import Refused

HERE: Final = Path(__file__).parent
TOOLS: Final = HERE.parents[1] / ".tools"
NODE: Final = TOOLS / "node/bin/node"
REGION: Final = "us-east-1"
CALL_SECONDS: Final = 60


def needed(path: Path, inside: str = "") -> Path:
    """`path`, or a failure that says how to get it. inside: what must be in it."""
    if not (path / inside).exists():
        pytest.fail(f"{path / inside} is missing: run `make setup-clients`", pytrace=False)
    return path


def signing(key: tuple[str, str]) -> dict[str, str]:
    """An environment in which every AWS client finds the key, and nothing of the user's own: no profile, no proxy."""
    kept = {name: value for name, value in os.environ.items() if "AWS_" not in name and "proxy" not in name.lower()}
    return kept | {
        "AWS_ACCESS_KEY_ID": key[0],
        "AWS_SECRET_ACCESS_KEY": key[1],
        "AWS_DEFAULT_REGION": REGION,
        "AWS_REGION": REGION,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


class Boto3:
    """boto3 of today."""

    def __init__(self, endpoint: str, key: tuple[str, str]) -> None:
        self._client: Any = boto3.client(
            "sqs",
            endpoint_url=endpoint,
            region_name=REGION,
            aws_access_key_id=key[0],
            aws_secret_access_key=key[1],
            config=Config(retries={"total_max_attempts": 1}),
        )

    def call(self, operation: str, **members: Any) -> dict[str, Any]:
        method = getattr(self._client, re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower())
        try:
            answer: dict[str, Any] = method(**members)
        except ClientError as error:
            raise Refused(error.response["Error"]["Code"], error.response["Error"]["Message"]) from error
        answer.pop("ResponseMetadata")
        return answer

    def close(self) -> None:
        self._client.close()


class Piped:
    """A process that takes `[operation, members]` a line and answers `{"answer"}` or `{"code", "message"}` a line."""

    def __init__(self, command: list[str], key: tuple[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=signing(key), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, operation: str, **members: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([operation, members], default=_wrapped) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline(), object_hook=_unwrapped)
        if "code" in said:
            raise Refused(said["code"], said["message"])
        answer: dict[str, Any] = said["answer"]
        return answer

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(CALL_SECONDS)


class Botocore131(Piped):
    """botocore 1.31.80, the last release that speaks the Query protocol."""

    def __init__(self, endpoint: str, key: tuple[str, str]) -> None:
        python = needed(TOOLS / "botocore-1.31", ".installed") / "bin/python"
        super().__init__([str(python), str(HERE / "botocore_program.py"), endpoint], key)


class JavaScript(Piped):
    """npm's @aws-sdk/client-sqs."""

    def __init__(self, endpoint: str, key: tuple[str, str]) -> None:
        clients = needed(TOOLS / "clients", "node_modules/@aws-sdk/client-sqs")
        super().__init__([str(needed(NODE)), str(HERE / "js/sqs_program.mjs"), str(clients), endpoint], key)


class Command:
    """The `aws` command."""

    directory = "aws"

    def __init__(self, endpoint: str, key: tuple[str, str]) -> None:
        tools = needed(TOOLS / self.directory, ".installed")
        self._command = [
            str(tools / "bin/python"),
            str(tools / "bin/aws"),
            "--endpoint-url",
            endpoint,
            "--output",
            "json",
        ]
        self._environment = signing(key) | {"AWS_PAGER": "", "PYTHONWARNINGS": "ignore"}

    def call(self, operation: str, **members: Any) -> dict[str, Any]:
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", operation).lower()
        given = json.dumps(members, default=bytes.decode)
        done = subprocess.run(
            [*self._command, "sqs", name, "--cli-input-json", given],
            env=self._environment, capture_output=True, text=True, timeout=CALL_SECONDS,
        )  # fmt: skip
        if done.returncode:
            said = re.search(r"An error occurred \((\S+)\) when calling the \w+ operation: (.*)", done.stderr)
            assert said, done.stderr
            raise Refused(said[1], said[2])
        answer: dict[str, Any] = json.loads(done.stdout or "{}", object_hook=_decoded)
        return answer

    def close(self) -> None:
        """Nothing is open."""


class OldCommand(Command):
    """The `aws` command of 2023, on botocore 1.31.80: Query."""

    directory = "botocore-1.31"


def _wrapped(value: bytes) -> dict[str, str]:
    return {"bytes": base64.b64encode(value).decode()}


def _unwrapped(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["bytes"]) if value.keys() == {"bytes"} else value


def _decoded(value: dict[str, Any]) -> dict[str, Any]:
    """The command prints bytes in base64."""
    if isinstance(value.get("BinaryValue"), str):
        value["BinaryValue"] = base64.b64decode(value["BinaryValue"])
    return value
