"""Answers that no service gives, but a proxy or a captive portal may: a typed error, whatever the SDK makes of them."""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain, product
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from azure.storage.queue import QueueServiceClient
from botocore.config import Config
from mns.account import Account
from tests.support.broken_server import HANG_UP, BrokenServer, answer

from veilmq.client.adapters.azure import AzureAccount, AzureQueue
from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.client.adapters.mns import MnsAccount, MnsQueue
from veilmq.client.adapters.sqs import SqsAccount, SqsQueue
from veilmq.client.adapters.veil import VeilAccount, VeilQueue
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import ServiceError, TransportError, may_have_happened
from veilmq.client.messages import Extension
from veilmq.client.queue import Queue
from veilmq.model.errors import MessageTooLarge, VeilError
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


IDS = ("x-amzn-RequestId: 1", "x-ms-request-id: 1", "x-mns-request-id: 1")
OPENED = {
    sqs: answer(200, b'{"QueueUrls": []}', JSON, *IDS),
    azure: answer(200, b"", *IDS),
    mns: answer(204, b"", *IDS),
}
"""The answer to a first call, which has an id; of Azure, the queue's settings."""
PAGE = b"<html><body><p>Log in</p></body></html>"
PLACE = "Location: http://user:s3cret@portal.example:1/login?token=s3cret"
FOREIGN = {
    **{name: STRANGE[name] for name in ("nothing", "a page", "a page that calls itself text", "a list", "other XML")},
    "a page that is XML": answer(200, PAGE, "Content-Type: text/html"),
    "JSON of a portal": answer(200, b'{"error": "log in"}', "Content-Type: application/json"),
    "201": answer(201, PAGE, "Content-Type: text/html"),
    "204": answer(204),
    **{str(status): answer(status, PAGE, "Content-Type: text/html", PLACE) for status in (301, 302, 307, 308)},
    "cut off": answer(200, b'{"Messages": [' + b" " * 500, *IDS)[:-200],
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "closed": HANG_UP,
}
STATUSES = (400, 401, 403, 404, 405, 407, 413, 429, 500, 502, 503, 504)
EACH: dict[str, Callable[[Queue, str], Any]] = {
    "send": lambda queue, _: queue.send("x"),
    "receive": lambda queue, _: queue.receive(2, lease=5),
    "extend": lambda queue, handle: queue.extend(handle, 5),
    "delete": lambda queue, handle: queue.delete(handle),
}


def error_after(adapter: Callable[[str], Iterator[Queue]], call: str, strange: bytes) -> VeilError:
    opened = [OPENED[adapter]] if adapter in OPENED else []
    broken = BrokenServer([*opened, strange])
    for queue in adapter(broken.url):
        if adapter is sqs:
            queue.account.names()
        elif adapter is mns:
            queue.delete("id-receipt")
        elif opened:
            queue.stats()
        with pytest.raises(VeilError) as caught:
            EACH[call](queue, "id:receipt" if adapter is azure else "id-receipt")
    broken.close()
    return caught.value


@pytest.mark.parametrize("adapter", [sqs, azure, mns, veil])
def test_the_answer_of_something_between_is_the_same_error_on_each(adapter: Callable[[str], Iterator[Queue]]) -> None:
    """boto3 and the SDK of MNS take a log-in page for success, that of Azure one of well-formed XML for an empty list,
    and boto3 an answer that was cut off for one without members."""

    @for_each("call, name", product(EACH, FOREIGN))
    def is_no_success(call: str, name: str) -> None:
        error = error_after(adapter, call, FOREIGN[name])
        assert isinstance(error, TransportError)
        assert error.may_have_happened
        assert "NO_PROXY" not in str(error)
        place = "" if adapter is veil else " to portal.example:1"
        assert (f"redirection{place} (HTTP 30" in str(error)) == name.startswith("30")
        assert "s3cret" not in str(error)

    @for_each("call, status", product(EACH, STATUSES))
    def is_a_refusal(call: str, status: int) -> None:
        error = error_after(adapter, call, answer(status, PAGE, "Content-Type: text/html", "Retry-After: 1"))
        if status == 413 and call == "send":
            assert isinstance(error, MessageTooLarge)
        else:
            assert isinstance(error, ServiceError)
            assert (error.code, error.status, may_have_happened(error)) == (f"HTTP {status}", status, status >= 500)

    is_no_success()
    is_a_refusal()


def test_the_hook_of_a_users_client_is_still_called() -> None:
    broken = BrokenServer([OPENED[azure]])
    came: list[int] = []
    client = QueueServiceClient(
        f"{broken.url}/{ACCOUNT}", credential={"account_name": ACCOUNT, "account_key": KEY}, retry_total=0,
        raw_response_hook=lambda response: came.append(response.http_response.status_code),
    )  # fmt: skip
    with client, AzureAccount(client) as account:
        account.queue("jobs")
    broken.close()
    assert came == [200]


DELETED = {
    # Flask calls every answer text/html that names no type: moto's, up to 5.1.
    sqs: (200, b"{}", "Content-Type: text/html; charset=utf-8"),
    azure: (204, b""),
    mns: (204, b""),
}
TITLED = ("X-Amzn-Requestid: 1", "X-Ms-Request-Id: 1", "X-Mns-Request-Id: 1")
"""As a proxy written in Go writes them."""


@pytest.mark.parametrize("adapter", [sqs, azure, mns])
def test_an_id_is_demanded_in_any_case_once_an_answer_had_one(adapter: Callable[[str], Iterator[Queue]]) -> None:
    """An emulator may give none, and a gateway may remove them."""
    deleted, handle = DELETED[adapter], "id:receipt" if adapter is azure else "id-receipt"
    opened = [answer(200)] if adapter is azure else []
    strange = [FOREIGN[name] for name in ("a page that is XML", "JSON of a portal", "302")]
    broken = BrokenServer([answer(*deleted), *opened, *strange, *strange, answer(*deleted, *TITLED), answer(*deleted)])
    for queue in adapter(broken.url):
        queue.delete(handle)
        if opened:
            queue.stats()
        for call, each in product(("delete", "receive"), strange):
            with pytest.raises(TransportError, match="redirection" if each is strange[-1] else "web page or the like"):
                EACH[call](queue, handle)
        queue.delete(handle)
        missing = r"^127\.0\.0\.1:\d+: HTTP 20\d without x-\w+-request-?id: "
        with pytest.raises(TransportError, match=missing):
            queue.delete(handle)
    broken.close()


def test_an_answer_of_sqs_without_members_and_id_has_the_type_of_the_results_before_it() -> None:
    """ElasticMQ's results are application/json, and its answer to a delete is empty and has no type."""
    none, page = b'{"Messages": []}', "Content-Type: text/html"
    untyped = [(answer(200), answer(200, none, each)) for each in (page, "Content-Type: application/json")]
    typed = [(answer(200, body, kind), answer(200, none, kind)) for body, kind in ((b"", JSON), (b"{}", JSON.upper()))]
    foreign = [
        ("delete", "content-type", answer(200)),
        ("delete", "content-type", answer(200, b"{ }")),
        ("delete", "SQS's content type", answer(200, b"", page)),
        ("receive", "SQS's content type", answer(200, b"{}", page)),
    ]
    broken = BrokenServer([*chain(*untyped, *typed), answer(200, none), *(each for *_, each in foreign)])
    for queue in sqs(broken.url):
        for _ in range(4):
            queue.delete("id-receipt")
            assert queue.receive(lease=5) == []
        assert queue.receive(lease=5) == [], "it has a member"
        for call, lacking, _ in foreign:
            with pytest.raises(TransportError, match=f"HTTP 200 without {lacking}: something between"):
                EACH[call](queue, "id-receipt")
    broken.close()


@pytest.mark.parametrize("adapter", [sqs, azure, veil])
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


def test_a_body_that_boto3_reads_is_a_result_of_sqs() -> None:
    """msgspec refuses a lone surrogate."""
    body = rb'{"Messages": [{"MessageId": "1", "ReceiptHandle": "h", "Body": "\ud800"}]}'
    broken = BrokenServer([answer(200, body, JSON, *IDS)])
    for queue in sqs(broken.url):
        assert [message.body for message in queue.receive(lease=5)] == ["\ud800"]
    broken.close()
