"""Every code of the documents' table (mns.md, sections 2.3 and 3), each with a request that is answered with it.

Strategy: one row a code: its status, and what is done to get it. What a request alone cannot bring about (a server that
is full, a disk that fails) is what the engine says to an ordinary request. Codes that have no occasion here are named
with the reason in docs/mns.md, and nothing in the codec says them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from veilmq.model.errors import (
    DiskLow,
    Overloaded,
    QueueDeletedRecently,
    QueuesFull,
    StoreFailed,
    StoreUnknown,
    VeilError,
)
from veilmq.protocols.mns import errors
from veilmq.testing.for_each import for_each

PAGE = (Path(__file__).parents[3] / "docs" / "mns.md").read_text()
NO_OCCASION = {
    "InvalidContentType",
    "QpsLimitExceeded",
    "TopicDeletedRecently",
    "SubscriberNotExist",
}
LONG = "x" * 256
JOBS, MESSAGES, NEWS = "/queues/jobs", "/queues/jobs/messages", "/topics/news"
SUB = f"{NEWS}/subscriptions/sub"
ENDPOINT = "<Subscription><Endpoint>{}</Endpoint>{}</Subscription>"
ONE = "<Message><MessageBody>x</MessageBody></Message>"


def said(wire: Any, error: VeilError) -> Any:
    """What an ordinary request is answered with if the engine says so."""
    call = wire.codec.decode(wire.request("GET", MESSAGES), wire.wall, wire.wall)
    return wire.read(wire.codec.encode(call, [error]))


def stale(wire: Any) -> Any:
    """A handle that a change of visibility made stale."""
    wire.put()
    handle = wire.get().text("ReceiptHandle")
    wire.ask("PUT", f"{MESSAGES}?ReceiptHandle={handle}&VisibilityTimeout=30")
    return wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={handle}")


def after(*requests: tuple[str, ...]) -> Callable[[Any], Any]:
    """The answer to the last request."""

    def ask(wire: Any) -> Any:
        answers = [wire.ask(*request) for request in requests]
        assert all(answer.status < 300 for answer in answers[:-1]), "a request before it failed"
        return answers[-1]

    return ask


QUEUE, TOPIC = ("PUT", JOBS, "<Queue/>"), ("PUT", NEWS, "<Topic/>")
ROWS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "AccessDenied": (403, lambda wire: wire.ask("PUT", JOBS, key="AKIDREADER")),
    "InvalidAccessKeyId": (403, lambda wire: wire.ask("GET", JOBS, key="AKIDNOBODY")),
    "SignatureDoesNotMatch": (403, lambda wire: wire.ask("GET", JOBS, secret="another")),
    "InvalidAuthorizationHeader": (400, lambda wire: wire.ask("GET", JOBS, headers={"Authorization": "MNS"})),
    "MissingAuthorizationHeader": (400, lambda wire: wire.ask("GET", JOBS, without=("authorization",))),
    "InvalidDateHeader": (400, lambda wire: wire.ask("GET", JOBS, headers={"Date": "yesterday"})),
    "MissingDateHeader": (400, lambda wire: wire.ask("GET", JOBS, without=("date",))),
    "MissingVersionHeader": (400, lambda wire: wire.ask("GET", JOBS, without=("x-mns-version",))),
    "InvalidVersionHeader": (400, lambda wire: wire.ask("GET", JOBS, headers={"x-mns-version": "2014-07-08"})),
    "TimeExpired": (408, lambda wire: wire.ask("GET", JOBS, headers={"Date": wire.date(-901)})),
    "InvalidDegist": (400, lambda wire: wire.ask("PUT", JOBS, "<Queue/>", headers={"Content-MD5": "AAAA"})),
    "InvalidArgument": (400, after(("PUT", JOBS, "<Queue><VisibilityTimeout>0</VisibilityTimeout></Queue>"))),
    "MalformedXML": (400, after(("PUT", JOBS, "<Queue>"))),
    "InvalidRequestURL": (400, after(("GET", "/nothing"))),
    "InvalidQueryString": (400, after(QUEUE, ("GET", f"{MESSAGES}?waitseconds=soon"))),
    "MissingReceiptHandle": (400, after(QUEUE, ("DELETE", MESSAGES))),
    "MissingVisibilityTimeout": (400, after(QUEUE, ("PUT", f"{MESSAGES}?ReceiptHandle=x"))),
    "ReceiptHandleError": (400, after(QUEUE, ("DELETE", f"{MESSAGES}?ReceiptHandle=1-garbage"))),
    "InvalidQueueName": (400, after(("PUT", "/queues/a_b"))),
    "QueueNameLengthError": (400, after(("PUT", f"/queues/{LONG}"))),
    "TopicNameInvalid": (400, after(("PUT", "/topics/a_b"))),
    "TopicNameLengthError": (400, after(("PUT", f"/topics/{LONG}"))),
    "SubscriptionNameInvalid": (400, after(TOPIC, ("GET", f"{NEWS}/subscriptions/a_b"))),
    "SubscriptionNameLengthError": (400, after(TOPIC, ("GET", f"{NEWS}/subscriptions/{LONG}"))),
    "EndpointInvalid": (400, after(TOPIC, ("PUT", SUB, ENDPOINT.format("ftp://host/", "")))),
    "QueueNotExist": (404, after(("POST", "/queues/none/messages", ONE))),
    "TopicNotExist": (404, after(("POST", f"{NEWS}/messages", ONE))),
    "SubscriptionNotExist": (404, after(TOPIC, ("GET", SUB))),
    "MessageNotExist": (404, stale),
    "QueueAlreadyExist": (409, after(QUEUE, ("PUT", JOBS, "<Queue><DelaySeconds>1</DelaySeconds></Queue>"))),
    "TopicAlreadyExist": (
        409,
        after(TOPIC, ("PUT", NEWS, "<Topic><MaximumMessageSize>1024</MaximumMessageSize></Topic>")),
    ),
    "SubscriptionAlreadyExist": (
        409,
        after(
            TOPIC,
            ("PUT", SUB, ENDPOINT.format("http://host/", "")),
            ("PUT", SUB, ENDPOINT.format("http://host/", "<FilterTag>t</FilterTag>")),
        ),
    ),
    "QueueDeletedRecently": (400, lambda wire: said(wire, QueueDeletedRecently(queue="q", wait_us=1))),
    "QueueNumExceededLimit": (400, lambda wire: said(wire, QueuesFull(account="a", limit=1))),
    "TooManyRequests": (429, lambda wire: said(wire, Overloaded(limit=1))),
    "InternalServerError": (500, lambda wire: said(wire, DiskLow(free_bytes=1))),
    "InternalError": (500, lambda wire: said(wire, StoreUnknown(reason="fsync failed"))),
}


_NAME = "should start with alpha or digit and contain only alpha, digit or -."
WORDS = {
    "AccessDenied": "The OwnerId that your Access Key Id associated to is forbidden for this operation.",
    "InvalidAccessKeyId": "The AccessKey Id you provided is not exist.",
    "SignatureDoesNotMatch": "The request signature we calculated does not match the signature you provided. Check "
    "your key and signing method.",
    "InvalidAuthorizationHeader": "The Authorization header format is invalid. "
    "It is neither `MNS id:signature` nor of signature V4.",
    "MissingAuthorizationHeader": "Authorization header is required.",
    "InvalidDateHeader": "The Date header format is invalid. It is not in the form of RFC 1123.",
    "MissingDateHeader": "Date header is required.",
    "TimeExpired": "The http request you sent is expired. Its date is more than 15 minutes off.",
    "InvalidDegist": "The Content-MD5 you specified is invalid. It does not fit the body.",
    "InvalidArgument": "The value of VisibilityTimeout should between 1 and 43200 seconds.",
    "MalformedXML": "The XML you provided was not well-formed.",
    "InvalidRequestURL": "Http request URL format invalid. The URL or its method is not one of this API.",
    "InvalidQueryString": 'Http request URL contains invalid querystring item "waitseconds".',
    "MissingReceiptHandle": "ReceiptHandle is required.",
    "MissingVisibilityTimeout": "VisibilityTimeout is required.",
    "ReceiptHandleError": "The receipt handle you provide is not valid.",
    "InvalidQueueName": f"The queue name you provided is invalid. QueueName {_NAME}",
    "QueueNameLengthError": "Queue name length should between 1 and 120.",
    "TopicNameInvalid": f"The topic name you provided is invalid. TopicName {_NAME}",
    "QueueNotExist": "The queue name you provided is not exist.",
    "MessageNotExist": "Message not exist.",
    "QueueAlreadyExist": "The queue you want to create is already exist.",
    "QueueDeletedRecently": "The queue you want to create is deleted recently.",
}
"""How the message begins: the page "Error codes" (help.aliyun.com/document_detail/27501.html); of a name with what is
allowed today. A last sentence "It ...", "Its ..." or "The URL ..." is ours."""


@for_each("code", ROWS, fresh="wire")
def test_the_code_is_reached(wire: Any, code: str) -> None:
    status, ask = ROWS[code]
    answer = ask(wire)
    assert (answer.code, answer.status) == (code, status)
    assert answer.status == errors.FAULTS[code].status
    assert answer.text("Message").startswith(WORDS.get(code, ""))


def test_no_code_is_without_a_row() -> None:
    assert ROWS.keys() == errors.FAULTS.keys()
    assert not NO_OCCASION & errors.FAULTS.keys()


@for_each("code", sorted(NO_OCCASION))
def test_a_code_without_occasion_is_explained(code: str) -> None:
    assert code in PAGE


def test_what_the_disk_refused_is_not_called_unknown(wire: Any) -> None:
    assert said(wire, StoreFailed(reason="disk full")).code == "InternalServerError"
