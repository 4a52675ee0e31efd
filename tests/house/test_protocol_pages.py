"""The first program of each protocol's page, and of the client's, runs: one after the other, on one server.

A reader tries them against the server of the README's quick start, so none may meet what another one left behind.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from veilmq.testing import LocalServer

DOCS = Path(__file__).parents[2] / "docs"
DEVELOPMENT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PAGES = ("client.md", "sqs.md", "azure.md", "mns.md", "observability.md")


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer.temporary() as started:
        yield started


def programs(page: str) -> list[str]:
    return [
        token.content for token in MarkdownIt().parse((DOCS / page).read_text())
        if token.type == "fence" and token.info == "python"
    ]  # fmt: skip


def test_the_pages_run(server: LocalServer, tmp_path: Path) -> None:
    development = f"AccountName=devstoreaccount1;AccountKey={DEVELOPMENT_KEY}"
    ports = {
        "http://127.0.0.1:9324": server.sqs_url,
        "veil://127.0.0.1:9324": server.sqs_url.replace("http", "veil"),
        "http://127.0.0.1:9326": server.mns_url,
        "UseDevelopmentStorage=true": (
            f"DefaultEndpointsProtocol=http;{development};QueueEndpoint={server.azure_url}/devstoreaccount1;"
        ),
        "/tmp/": f"{tmp_path}/",
    }
    for page in PAGES:
        (program,) = programs(page)
        for shown, here in ports.items():
            program = program.replace(shown, here)
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"docs/{page}: {done.stderr}"
