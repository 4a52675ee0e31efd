"""A browser without a screen: an HTTP client that keeps cookies, sends an Origin, and fills in forms as they are."""

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from tests.admin import server as admin

from veilmq.cluster.registry import Registered, Standby, Status
from veilmq.server.cluster import ClusterReport
from veilmq.server.config.settings import Settings
from veilmq.server.shell import Latencies

QUEUES = "/api/v1/queues/000000000000/us-east-1"
CONSOLE = "/console/queues/000000000000/us-east-1"


class Visitor(httpx.Client):
    """One browser at a server's console."""

    def __init__(self, server: Any, **values: Any) -> None:
        super().__init__(base_url=server.url, headers={"origin": server.url}, timeout=30, **values)

    def sign_in(self, **fields: str) -> httpx.Response:
        return self.post("/console/sign-in", data=fields)

    def fields(self, path: str, action: str | None = None) -> dict[str, str]:
        """The hidden fields of the form on that page which goes to `action` (the page itself)."""
        page = self.get(path)
        assert page.status_code == 200, page.text
        return hidden(page.text, action or path.partition("?")[0])

    def submit(self, path: str, action: str | None = None, **fields: str) -> httpx.Response:
        """Fill in the form of that page, and send it."""
        return self.post(action or path, data=self.fields(path, action) | fields)


def hidden(page: str, action: str) -> dict[str, str]:
    """The hidden fields of the POST form with that action."""
    for attributes, content in re.findall(r"<form([^>]*)>(.*?)</form>", page, re.DOTALL):
        if f'action="{action}"' in attributes and 'method="post"' in attributes:
            found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', content)
            return {name: html.unescape(value) for name, value in found}
    raise AssertionError(f"no form goes to {action}")


class Api:
    """The API with the token, to prepare what a page shows."""

    def __init__(self, server: Any) -> None:
        self.client = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {admin.TOKEN}"}, timeout=30)

    def create(self, name: str, **settings: Any) -> None:
        assert self.client.put(f"{QUEUES}/{name}", json=settings).status_code in (200, 201)

    def send(self, queue: str, body: str = "hello", **members: Any) -> str:
        answer = self.client.post(f"{QUEUES}/{queue}/messages", json={"messages": [{"body": body} | members]})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["messages"][0]["id"])

    def act(self, queue: str, what: str, **members: Any) -> Any:
        answer = self.client.post(f"{QUEUES}/{queue}/{what}", json=members)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def kinds(self) -> list[str]:
        lines = self.client.get("/api/v1/events", params={"from": "first"}).text.splitlines()
        return [re.findall(r'"kind":"(\w+)"', line)[0] for line in lines]

    def acts(self) -> list[str]:
        """What operators had done, in order."""
        members = {"from": "first", "kind": "operator_command"}
        lines = self.client.get("/api/v1/events", params=members).text.splitlines()
        return [re.findall(r'"act":"(\w+)"', line)[0] for line in lines]

    def later(self, seconds: float) -> None:
        answer = self.client.post("/api/v1/clock", json={"advance_us": round(seconds * 1e6)})
        assert answer.status_code == 200, answer.text


@contextmanager
def bodiless(directory: Path, settings: Settings) -> Iterator[tuple[Api, Visitor, str]]:
    """A server whose console shows no bodies, somebody signed in there, and a message with the body `needle`."""
    with admin.running(directory / "data", settings=settings) as server, Visitor(server) as visitor:
        api = Api(server)
        api.create("orders")
        message = api.send("orders", "needle")
        visitor.sign_in(secret=admin.TOKEN)
        yield api, visitor, message
        api.client.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """A server in development mode."""
    with admin.running(tmp_path / "data") as started:
        yield started


@pytest.fixture
def api(server: Any) -> Iterator[Api]:
    api = Api(server)
    yield api
    api.client.close()


@pytest.fixture
def visitor(server: Any) -> Iterator[Visitor]:
    """Signed in as admin."""
    with Visitor(server) as visitor:
        assert visitor.sign_in(secret=admin.TOKEN).status_code == 303
        yield visitor


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Any]:
    """A server with credentials and names of its own."""
    settings = Settings(
        console_hosts=("queues.example",), external_url="https://mq.out.example", base_domain="sqs.example"
    )
    with admin.running(tmp_path / "outside", admin.Keys(), settings) as started:
        yield started


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make console` gives it; then every page is looked at in two widths and both themes."""
    parser.addoption("--shots", metavar="DIR", help="Put pictures of the console's pages there.")


class Clustered:
    """A cluster of three servers, one of which is drained, as the server's own part of it would report."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """To whom somebody wanted a hand-over."""
        self.answers = True
        """Whether PostgreSQL does."""
        self.missing = ""
        """The standbys that commits wait for."""
        self.single_copy = False
        """Whether they wait for none."""
        self.standbys = [Standby("db2", "sync", "streaming", 0.001)]
        self.alone = False
        """Whether the other servers have gone."""
        self.role = "follower"
        """Of the second server."""

    async def report(self) -> ClusterReport:
        others_s = 3_600.0 if self.alone else 0.2
        servers = [
            Registered(name, f"{name}:9327", "0.1.0", 10, 10, 10, record, role, role == "drained", seen_s)
            for name, record, role, seen_s in (
                ("one", 100, "owner", 0.2),
                ("<two>", 98, self.role, others_s),
                ("three", 100, "drained", others_s),
            )
        ]
        if self.alone:
            servers.append(Registered("four", "four:9327", "0.1.0", 10, 10, 10, 100, "stopped", False, others_s))
        status = Status(
            incarnation=UUID(int=1), format=10, owner="one", address="one:9327", epoch=7, lease_s=3.0, renewed_s=0.4,
            owned=True, records=100, segments=1, log_bytes=3_145_728, snapshot=90, snapshot_age_s=7_200.0,
            standbys=self.standbys, missing=self.missing, single_copy=self.single_copy, servers=servers,
        )  # fmt: skip
        return ClusterReport(
            server="one", owner="one", leads=True, epoch=7, ready=True, held=0, lag_s=0.0, lag_records=0,
            appends=Latencies(), takeovers=1, handovers=0, peers=["<two>"], single_copy=False,
            status=status if self.answers else None,
        )  # fmt: skip

    async def hand_over(self, to: str) -> None:
        self.asked.append(to)
