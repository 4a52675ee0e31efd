"""Answers that no service gives, but a proxy or a captive portal may: a typed error, whatever the SDK makes of them."""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from azure.storage.queue import QueueServiceClient
from botocore.config import Config
from mns.account import Account
from tests.support.broken_server import BrokenServer, answer

from veilmq.client.adapters.azure import AzureAccount, AzureQueue
from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.client.adapters.mns import MnsAccount, MnsQueue
from veilmq.client.adapters.sqs import SqsAccount, SqsQueue
from veilmq.client.adapters.veil import VeilAccount, VeilQueue
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Extension
from veilmq.client.queue import Queue
from veilmq.testing.client_contract import for_each

pytestmark = pytest.mark.slow

((ACCOUNT, KEY),) = DEVELOPMENT_KEYS.items()
JSON = "Content-Type: application/x-amz-json-1.0"
XML = "Content-Type: application/xml"
STRANGE = {
    "nothing": answer(200),
    "a page": answer(200, b"<html><p>Log in", "Content-Type: text/html"),
    "a page that calls itself text": answer(200, b"<!DOCTYPE html><p>Log in at the proxy", "Content-Type: text/plain"),
    "null": answer(200, b"null", JSON),
    "a list": answer(200, b"[1]", JSON),
    "brackets without end": answer(200, b'{"X":' + b"[" * 5_000, JSON),
    "a number of messages": answer(200, b'{"Messages": 5, "Successful": 7}', JSON),
    "a refusal with a number for its type": answer(400, b'{"__type": 5, "message": []}', JSON),
    "other XML": answer(200, b"<?xml version='1.0'?><a><b/></a>", XML),
    "half of an XML": answer(200, b"<?xml version='1.0'?><QueueMessagesList><Queue", XML),
    "a refusal without a message": answer(503, b"<Error><Code>ServerBusy</Code></Error>", XML),
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\nabc",
}
CALLS: dict[str, Callable[[Queue], Any]] = {
    "send": lambda queue: queue.send("x"),
    "receive": lambda queue: queue.receive(2, lease=5),
    "extend_batch": lambda queue: queue.extend_batch([Extension("id:receipt", 5)]),
    "stats": lambda queue: queue.stats(),
}


def sqs(url: str) -> Iterator[Queue]:
    client = boto3.client(
        "sqs", endpoint_url=url, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s",
        config=Config(retries={"total_max_attempts": 1}),
    )  # fmt: skip
    with closing(client), SqsAccount(client) as account:
        yield SqsQueue(account, account._calls, "jobs", f"{url}/000000000000/jobs")


def azure(url: str) -> Iterator[Queue]:
    credential = {"account_name": ACCOUNT, "account_key": KEY}
    client = QueueServiceClient(f"{url}/{ACCOUNT}", credential=credential, retry_total=0)
    with client, AzureAccount(client) as account:
        yield AzureQueue(account, client.get_queue_client("jobs"))


def veil(url: str) -> Iterator[Queue]:
    place = urlsplit(url)
    with VeilAccount(str(place.hostname), place.port) as account:
        yield VeilQueue(account, account._new_calls("jobs"), "jobs", "jobs", SYSTEM)


def mns(url: str) -> Iterator[Queue]:
    with MnsAccount(Account(url, "id", "secret"), base64=False) as account:
        yield MnsQueue(account, "jobs")


PAGE_ERRORS = {
    sqs: "web page",
    azure: "no answer of Queue Storage|cannot be read",
    mns: "web page|<p>Log in",  # its SDK quotes what it cannot parse
    veil: "does not fit|web page",
}


@pytest.mark.parametrize("adapter", PAGE_ERRORS)
def test_a_web_page_does_nothing_and_is_no_empty_queue(adapter: Callable[[str], Iterator[Queue]]) -> None:
    """boto3 and the SDK of MNS take a log-in page for success. The SDK of Azure takes one that is well-formed XML for
    an empty list; our adapter cannot see it, so a receive there is left out."""
    calls: dict[str, Callable[[Queue], Any]] = {
        "send": lambda queue: queue.send("x"),
        "delete": lambda queue: queue.delete("id:receipt" if adapter is azure else "id-receipt"),
    }
    if adapter is not azure:
        calls["receive"] = lambda queue: queue.receive(2, wait=0)

    @for_each("call, page", product(calls, ["a page", "a page that calls itself text"]))
    def is_an_error(call: str, page: str) -> None:
        first = [answer(200)] if adapter is azure and call == "send" else []  # of its settings
        broken = BrokenServer([*first, STRANGE[page]])
        for queue in adapter(broken.url):
            with pytest.raises(TransportError, match=PAGE_ERRORS[adapter]) as caught:
                calls[call](queue)
            assert caught.value.may_have_happened
            assert "NO_PROXY" not in str(caught.value)
        broken.close()

    is_an_error()


def test_json_of_a_portal_deletes_nothing_on_veil() -> None:
    broken = BrokenServer([answer(200, b'{"error": "log in"}', "Content-Type: application/json")])
    for queue in veil(broken.url):
        with pytest.raises(TransportError, match="not a VeilMQ server's"):
            queue.delete("id-receipt")
    broken.close()


def test_sqs_takes_json_whatever_its_header_says() -> None:
    """Flask calls every answer text/html that names no type: moto's, up to 5.1."""
    broken = BrokenServer([answer(200, b"{}", "Content-Type: text/html; charset=utf-8")])
    for queue in sqs(broken.url):
        queue.delete("id-receipt")
    broken.close()


def test_a_redirection_does_nothing_on_mns() -> None:
    @for_each("call", {"send": 0, "receive": 0, "delete": 0})
    def is_an_error(call: str) -> None:
        broken = BrokenServer([answer(302, b"", "Location: http://127.0.0.1:1/")])
        for queue in mns(broken.url):
            with pytest.raises(TransportError, match="redirects"):
                queue.delete("1-x") if call == "delete" else CALLS[call](queue)
        broken.close()

    is_an_error()


@for_each("adapter", [sqs, azure, veil])
def test_is_a_typed_error_or_no_message(adapter: Callable[[str], Iterator[Queue]]) -> None:
    @for_each("call, strange", product(CALLS, ["brackets without end"] if adapter is veil else STRANGE))
    def gets(call: str, strange: str) -> None:
        broken = BrokenServer([STRANGE[strange]])
        for queue in adapter(broken.url):
            try:
                told = CALLS[call](queue)
            except (TransportError, ServiceError):
                continue
            if call == "extend_batch":
                assert all(isinstance(each, TransportError | ServiceError) for each in told)
            else:
                assert told == [] or call == "stats"
        broken.close()
        assert broken.requests == 1

    gets()
