"""A handler that raises, on every adapter: the history says that the message was given back, and why."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import msgspec
import pytest
from azure.storage.queue import QueueServiceClient
from mns.account import Account as MnsSdkAccount
from tests.support.sqlite import read_events

from veilmq.client.adapters.azure import AzureAccount
from veilmq.client.adapters.connect import connect_account
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.adapters.mns import MnsAccount
from veilmq.client.adapters.sqs import SqsAccount
from veilmq.client.messages import Template
from veilmq.client.queue import Account, Queue
from veilmq.client.worker import Backoff, Retry, Worker
from veilmq.model.errors import ParameterInvalid
from veilmq.model.messages import Failure
from veilmq.testing.local import ServerProcess

pytestmark = pytest.mark.slow

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
AZURE_SECRET = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CREDENTIALS = f"""
[[account]]
id = "111111111111"
azure_name = "examplename"
azure_keys = ["{AZURE_SECRET}", "{AZURE_SECRET[::-1].lstrip("=")}=="]
[[account.key]]
id = "AKWORKER"
secret = "{SECRET}"
"""
_NUMBERS = count()
PROTOCOLS = ("embedded", "veil", "sqs", "azure", "mns")
ENDS = ("released_for_retry", "retry_due", "lease_expired", "expired_after_change", "released")


class Place:
    """A queue, and the history of what happened to it."""

    def __init__(self, queue: Queue, events: Callable[[], list[dict[str, Any]]]) -> None:
        self.queue = queue
        self._events = events

    def kinds(self, *wanted: str) -> list[dict[str, Any]]:
        return [event for event in self._events() if event["kind"] in wanted and event["queue"] == self.queue.name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It checks every signature."""
    directory = tmp_path_factory.mktemp("signed")
    path = directory / "credentials.toml"
    path.write_text(CREDENTIALS)
    path.chmod(0o600)
    server = ServerProcess(directory, "--credentials", str(path)).start()
    yield server
    assert server.stop() == 0


@pytest.fixture(params=PROTOCOLS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "embedded":
        yield request.getfixturevalue("embedded")
        return
    server = request.getfixturevalue("server")
    with ExitStack() as opened:
        account = opened.enter_context(_account(request.param, server))
        events = _events_of_server(server)
        name = f"jobs-{next(_NUMBERS)}"
        account.create(name, Template(visibility_timeout=30))
        yield Place(account.queue(name), events)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Place]:
    with EmbeddedAccount(tmp_path / "data") as account:
        account.create("jobs", Template(visibility_timeout=30))
        yield Place(account.queue("jobs"), _events_of_directory(account))


def _account(protocol: str, server: ServerProcess) -> Account:
    netloc = server.sqs.partition("//")[2].rstrip("/")
    if protocol == "veil":
        return connect_account(f"veil://AKWORKER:{quote(SECRET, safe='')}@{netloc}/?region=us-east-1")
    if protocol == "sqs":
        keys = {"aws_access_key_id": "AKWORKER", "aws_secret_access_key": SECRET}
        client = boto3.client("sqs", endpoint_url=server.sqs, region_name="us-east-1", **keys)
        return SqsAccount(client, owns_client=True)
    if protocol == "azure":
        credential = {"account_name": "examplename", "account_key": AZURE_SECRET}
        return AzureAccount(QueueServiceClient(f"{server.azure}/examplename", credential=credential), owns_client=True)
    return MnsAccount(MnsSdkAccount(server.mns, "AKWORKER", SECRET))


def _events_of_directory(account: EmbeddedAccount) -> Callable[[], list[dict[str, Any]]]:
    def events() -> list[dict[str, Any]]:
        account.apply_due()
        with account._shell._store.reader.look() as view:
            return [msgspec.to_builtins(event) for event in read_events(view, 0, 10_000)]

    return events


def _events_of_server(server: ServerProcess) -> Callable[[], list[dict[str, Any]]]:
    token = (server.data / "admin-token").read_text().strip()

    def ask(start: str) -> tuple[str, list[dict[str, Any]]]:
        url = f"{server.admin}/api/v1/events?from={start}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.headers["veilmq-next-offset"], [json.loads(line) for line in answer]

    start, _ = ask("next")
    return lambda: ask(start)[1]


def work(place: Place, handler: Callable[[Any], Any], **options: Any) -> None:
    """Until every message is done."""
    Worker(place.queue, handler, retry=Backoff(first=1.0, longest=1.0), wait=3, **options).run(messages_max=2)


def fails_once(error: BaseException) -> Callable[[Any], None]:
    def handler(job: Any) -> None:
        if job.receive_count == 1:
            raise error

    return handler


def test_a_handler_that_raises_is_a_release_for_retry(place: Place) -> None:
    place.queue.send("a body")
    work(place, fails_once(ValueError("žluť, bad zip\nsecond line: a body")))
    ends = place.kinds(*ENDS)
    assert [event["kind"] for event in ends] == ["released_for_retry", "retry_due"]
    assert ends[0]["detail"] == {"reason": "raised", "error_type": "ValueError", "error": "žluť, bad zip"}
    assert 0 < ends[0]["lease_us"] <= 1_000_000
    assert len(place.kinds("deleted")) == 1


def test_a_release_with_a_delay_says_so_itself(place: Place) -> None:
    place.queue.send("a body")
    (message,) = place.queue.receive(lease=30, wait=3)
    handle = place.queue.extend(message.handle, 10)  # shorter than before, but still at work
    place.queue.release(handle, 2, failure=Failure("busy"))
    assert [event["detail"] for event in place.kinds("released_for_retry")] == [{"reason": "busy"}]
    (message,) = place.queue.receive(lease=30, wait=10)
    place.queue.release(message.handle, 1)
    assert place.kinds("released_for_retry")[1]["detail"] == {"reason": "released"}
    assert [event["kind"] for event in place.kinds("retry_due", "lease_expired", "expired_after_change")][:1] == [
        "retry_due"
    ]


@pytest.mark.parametrize(
    ("told", "detail"),
    [
        ("line", {"reason": "raised", "error_type": "KeyError", "error": "'zip 12345'"}),
        ("type", {"reason": "raised", "error_type": "KeyError"}),
        ("none", {"reason": "raised"}),
        (lambda line: line[:4], {"reason": "raised", "error_type": "KeyError", "error": "'zip"}),
        (lambda line: 1 // 0, {"reason": "raised", "error_type": "KeyError"}),
    ],
)  # fmt: skip
def test_what_is_told_of_an_error_is_the_workers_choice(embedded: Place, told: Any, detail: dict[str, str]) -> None:
    embedded.queue.send("a body")
    work(embedded, fails_once(KeyError("zip 12345")), error_report=told)
    assert [event["detail"] for event in embedded.kinds("released_for_retry")] == [detail]


def test_a_retry_that_the_handler_asks_for_is_no_error(embedded: Place) -> None:
    embedded.queue.send("a body")
    work(embedded, fails_once(Retry(0.01, "the other side is down")))
    (event,) = embedded.kinds("released_for_retry")
    assert event["detail"] == {"reason": "asked", "error": "the other side is down"}


def test_an_error_report_that_is_none_of_these_is_refused() -> None:
    with pytest.raises(ParameterInvalid, match="'all' is not one of line, type, none"):
        Worker("veil:///nowhere?queue=jobs", print, error_report="all")
