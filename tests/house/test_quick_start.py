"""docs/quick-start.md runs: every block, in its language, with its SDK, in order, on one server; docs/concepts.md, too.

Strategy: as tests/house/test_readme.py, with the ports that the server got in the place of the page's. Blocks of
JavaScript and PHP run with the clients under .tools, and `aws` is the one there; Go's does not run. Indented blocks
start a server: those are not run, the README's test does that.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from tests.house.test_protocol_pages import DEVELOPMENT_KEY
from tests.house.test_readme import blocks
from tests.support.commands import bare

from veilmq.testing import LocalServer

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".tools"
BLOCKS = [
    (token.info, (token.map or [0])[0] + 1, token.content)
    for token in MarkdownIt().parse((ROOT / "docs" / "quick-start.md").read_text())
    if token.type == "fence" and token.info != "go"
]
PRINTS = {
    "boto3.client": "order 1",
    "@aws-sdk/client-sqs": "order 2",
    "AsyncAws": "order 4",
    "sqs create-queue": "order 5",
    "call CreateQueue": "parcel 1",
    "azure.storage.queue": "invoice 1",
    "@azure/storage-queue": "letter 1",
    "mns.account": "shipment 1",
    "veilmq.connect": "resize 1.png",
    "veilmq receive": "order 6",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer.temporary() as started:
        yield started


def on_its_ports(text: str, server: LocalServer) -> str:
    connection = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={DEVELOPMENT_KEY}"
    here = {
        "127.0.0.1:9324": server.sqs_url.removeprefix("http://"),
        "127.0.0.1:9326": server.mns_url.removeprefix("http://"),
        "UseDevelopmentStorage=true": f"{connection};QueueEndpoint={server.azure_url}/devstoreaccount1;",
    }
    for shown, address in here.items():
        text = text.replace(shown, address)
    return text


def test_every_block_is_looked_at() -> None:
    assert {language for language, _, _ in BLOCKS} == {"python", "js", "php", "bash"}
    assert len(BLOCKS) == len(PRINTS)
    assert [sum(sign in text for _, _, text in BLOCKS) for sign in PRINTS] == [1] * len(PRINTS)


def test_the_page_runs(server: LocalServer, tmp_path: Path) -> None:
    assert (TOOLS / "clients" / "node_modules").exists(), "JavaScript's clients are missing: run `make setup-clients`"
    (tmp_path / "node_modules").symlink_to(TOOLS / "clients" / "node_modules")
    path = os.pathsep.join([str(Path(sys.executable).parent), str(TOOLS / "aws" / "bin"), os.environ["PATH"]])
    environment = bare(PATH=path, HOME=str(tmp_path), VEILMQ_DATA=str(server.process.data), NODE_NO_WARNINGS="1")
    for language, line, text in BLOCKS:
        file = tmp_path / f"block.{ {'python': 'py', 'js': 'mjs', 'php': 'php', 'bash': 'sh'}[language] }"
        file.write_text(on_its_ports(text, server))
        commands = {
            "python": [sys.executable],
            "js": [str(TOOLS / "node" / "bin" / "node")],
            "php": [str(TOOLS / "symfony" / "php")],
            "bash": ["bash", "-euo", "pipefail"],
        }
        if language == "php" and not Path(*commands[language]).exists():
            continue  # `make setup-clients` found no apt-get, and said so
        done = subprocess.run(
            [*commands[language], str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"docs/quick-start.md:{line}: {done.stdout}{done.stderr}"
        (wanted,) = [prints for sign, prints in PRINTS.items() if sign in text]
        assert wanted in done.stdout, f"docs/quick-start.md:{line}"


def test_the_concepts_are_as_they_are_said_to_be() -> None:
    (block,) = blocks((ROOT / "docs" / "concepts.md").read_text())
    done = subprocess.run([sys.executable, "-c", block.text], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (block.prints, 0), done.stderr


def test_the_comparison_has_a_date_and_only_figures_that_were_measured() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    assert re.search(r"as of \*\*\d{4}-\d{2}-\d{2}\*\*", page)
    measured = "".join((ROOT / "docs" / name).read_text() for name in ("performance.md", "azure.md"))
    table = page.partition("## Measured by us")[2].partition("\n## ")[0]
    figures = set(
        re.findall(r"(?<![\d.])\d[\d,]*(?:\.\d+)?(?= times|(?: one by one| in batches|, and| and 1|\.5;))", table)
    )
    assert len(figures) > 6
    assert sorted(figure for figure in figures if figure not in measured) == []
