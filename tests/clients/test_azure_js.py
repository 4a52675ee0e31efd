"""npm's @azure/storage-queue, unmodified, against a real server.

Strategy: the program asserts what it gets and says `done`; it runs once against a development server and once against
one with a credentials file.
"""

import base64
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sqs_clients import HERE, NODE, TOOLS, needed

pytestmark = pytest.mark.slow

DEVELOPMENT = (
    "devstoreaccount1",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
)
NAMED = ("examplename", base64.b64encode(bytes(range(64))).decode())
PROGRAM_SECONDS = 60


@pytest.mark.parametrize("account", [DEVELOPMENT, NAMED], ids=["development", "checked"])
def test_all_that_a_queue_does(account: tuple[str, str], start: Any, tmp_path: Path) -> None:
    name, key = account
    options: list[str] = []
    if account is NAMED:
        credentials = tmp_path / "azure.toml"
        named = f'azure_name = "{name}"\nazure_keys = ["{key}", "{key}"]\n'
        credentials.write_text(f'[[account]]\nid = "111111111111"\n{named}')
        credentials.chmod(0o600)
        options = ["--credentials", str(credentials)]
    server = start(*options)
    clients = needed(TOOLS / "clients", "node_modules/@azure/storage-queue")
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={name};AccountKey={key};QueueEndpoint={server.azure}/{name};"
    )
    # No proxy of this machine, and no answer but the server's.
    environment = {each: value for each, value in os.environ.items() if "proxy" not in each.lower()}
    done = subprocess.run(
        [needed(NODE), HERE / "js/azure_program.mjs", clients, connection],
        env=environment, capture_output=True, text=True, timeout=PROGRAM_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
