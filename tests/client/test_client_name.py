"""The history tells which process held a message, and by which protocol, for every way to a queue."""

import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import veilmq
from veilmq.cli.access.direct import open_direct
from veilmq.client.adapters.cloud import client_name, name_client
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.model.errors import ParameterInvalid
from veilmq.testing.client_contract import for_each
from veilmq.testing.local import ServerProcess

ME = f"({socket.gethostname()}; pid {os.getpid()})"


@pytest.fixture(autouse=True)
def _unnamed() -> Iterator[None]:
    yield
    name_client(None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = ServerProcess(tmp_path_factory.mktemp("server")).start()
    yield running
    assert running.stop() == 0


def asked(server: ServerProcess, path: str) -> str:
    token = (server.data / "admin-token").read_text().strip()
    request = urllib.request.Request(server.admin + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


def work(url: str) -> None:
    with veilmq.connect(url) as queue:
        queue.send("hello")
        (message,) = queue.receive()
        queue.delete(message.handle)


@pytest.mark.parametrize("protocol", ["veil", "sqs", "azure", "mns"])
def test_a_server_knows_host_and_process_of_a_client(server: ServerProcess, protocol: str) -> None:
    hosts = {name: getattr(server, name).partition("//")[2].rstrip("/") for name in ("sqs", "azure", "mns")}
    url = {
        "veil": f"veil://{hosts['sqs']}/of-veil?create=1",
        "sqs": f"sqs://any:any@{hosts['sqs']}/of-sqs?create=1&tls=0",
        "azure": f"azure://{hosts['azure']}/devstoreaccount1/of-azure?create=1&tls=0",
        "mns": f"mns://any:any@{hosts['mns']}/of-mns?create=1&tls=0",
    }[protocol]
    work(url)
    name_client("resizer 3")
    work(url)
    name_client("")
    work(url)
    found = [json.loads(line) for line in asked(server, f"/api/v1/events?queue=of-{protocol}").splitlines()]
    assert {event["protocol"] for event in found} == {protocol}
    held = [event["client"] for event in found if event["kind"] in {"received", "deleted"}]
    for clients, said in ((held[:2], ME), (held[2:4], "(resizer 3)"), (held[4:], f"veilmq/{veilmq.__version__}")):
        assert len(clients) == 2
        assert all(said in client and (said == ME or "pid" not in client) for client in clients)
    metrics = asked(server, "/metrics")
    assert f'veilmq_commands_total{{command="Receive",protocol="{protocol}"}} 3.0' in metrics


def test_an_embedded_queue_tells_its_process(tmp_path: Path) -> None:
    with EmbeddedAccount(tmp_path / "data") as account:
        account.create("q")
    with open_direct(tmp_path / "data") as door:
        (line,) = door.events("first", 10, 0.0).lines.splitlines()
    created = json.loads(line)
    assert (created["protocol"], created["client"]) == ("embedded", f"veilmq/{veilmq.__version__} {ME}")


@for_each("name", ["x" * 101, "a\r\nb", "é", 7])
def test_a_name_that_no_header_takes_is_refused(name: Any) -> None:
    with pytest.raises(ParameterInvalid, match="printable ASCII"):
        name_client(name)
    assert ME in client_name()
