"""Whatever comes in, an answer in MNS's form goes out: never a 500 (but of a batch in part), never half an error.

Requests are right ones with parts replaced, signed as they are, so that they get past the doors and far in.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.contract.stage import Stage
from tests.support.sqlite import SqliteFactory

from veilmq.server.http.intake.plain import is_host

METHODS = ("GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "PATCH")
SEGMENTS = (
    "queues",
    "topics",
    "messages",
    "subscriptions",
    "jobs",
    "news",
    "s",
    "",
    "..",
    "a_b",
    "x" * 130,
    "commonbuy",
)
NAMES = (
    "ReceiptHandle",
    "VisibilityTimeout",
    "waitseconds",
    "numOfMessages",
    "peekonly",
    "metaoverride",
    "accountmeta",
)
VALUES = (
    "0",
    "1",
    "16",
    "30",
    "-1",
    "43200",
    "9" * 30,
    "true",
    "false",
    "",
    "\u00e9",
    "\0",
    "\ud800",
    "%",
    "'\"<>&",
    "+",
)
ELEMENTS = (
    "Queue", "Topic", "Subscription", "Message", "Messages", "ReceiptHandles", "ReceiptHandle", "Account",
    "MessageBody", "Priority", "DelaySeconds", "MessageTag", "MessageGroupId", "UserProperties", "PropertyValue",
    "SystemProperties",
    "SystemPropertyValue", "Name", "Value", "Type", "Endpoint", "FilterTag", "NotifyStrategy", "NotifyContentFormat",
    "MaximumMessageSize", "LoggingEnabled", "DlqPolicy", "Enabled", "DeadLetterTargetQueue", "MaxReceiveCount",
    "LoggingBucket", "TenantRateLimitPolicy",
)  # fmt: skip
TEXTS = (
    "x",
    "1",
    "8",
    "true",
    "STRING",
    "BINARY",
    "jobs",
    "acs:mns:r:1:queues/jobs",
    "http://h/",
    "",
    "traceparent",
    "\r\n",
)

texts = st.one_of(st.sampled_from(VALUES), st.text(max_size=20))
written = st.one_of(st.sampled_from(TEXTS), st.text(st.characters(exclude_characters="\0"), max_size=20))


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


documents = st.recursive(
    written.map(escape),
    lambda inside: st.lists(
        st.tuples(st.sampled_from(ELEMENTS), inside).map(lambda pair: f"<{pair[0]}>{pair[1]}</{pair[0]}>"), max_size=5
    ).map("".join),
    max_leaves=12,
)
bodies = st.one_of(
    st.just(""),
    st.tuples(st.sampled_from(ELEMENTS), documents).map(lambda pair: f"<{pair[0]}>{pair[1]}</{pair[0]}>"),
    st.builds(
        lambda name, inside: f"<{name}><MessageBody>x</MessageBody>{inside}</{name}>", st.just("Message"), documents
    ),
    st.text(max_size=30),
)
header_names = st.sampled_from(
    ["x-mns-date", "x-mns-prefix", "x-mns-marker", "x-mns-ret-number", "x-mns-with-meta", "x-mns-version", "date",
     "content-md5", "content-type", "authorization", "host", "x-mns-"]
)  # fmt: skip
header_values = st.one_of(
    st.sampled_from(["", "2015-06-06", "MNS x", "MNS a:b", "MNS4-HMAC-SHA256 Credential=a", "1", "true", "am9icw=="]),
    st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=30),
)


def escaped(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="+=")


@pytest.fixture(scope="module")
def place() -> Any:
    """One store for all examples: what the earlier ones left behind is part of the fun."""
    with TemporaryDirectory() as directory:
        stage = Stage(SqliteFactory(Path(directory) / "data"))
        yield stage
        stage.store.close()


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_request_breaks_it(place: Any, wire: Any, data: st.DataObject) -> None:
    wire.stage = place
    usual = st.sampled_from(
        ["/queues/jobs", "/queues/jobs/messages", "/topics/news", "/topics/news/messages",
         "/topics/news/subscriptions/s", "/queues", "/topics", "/"]
    )  # fmt: skip
    free = st.lists(st.one_of(st.sampled_from(SEGMENTS), st.text(max_size=10)), max_size=5)
    path = data.draw(st.one_of(usual, free.map(lambda parts: "".join(f"/{escaped(part)}" for part in parts) or "/")))
    pairs = data.draw(st.lists(st.tuples(st.one_of(st.sampled_from(NAMES), st.text(max_size=8)), texts), max_size=4))
    query = "&".join(f"{escaped(name)}={escaped(value)}" for name, value in pairs)
    headers = data.draw(st.dictionaries(header_names, header_values, max_size=2))
    body = data.draw(bodies).encode("utf-8", "surrogatepass")
    wire.ring.checks = data.draw(st.booleans())
    headers = {name: value for name, value in headers.items() if name != "host" or is_host(value.encode("latin-1"))}
    target = f"{path}?{query}" if pairs else path
    answer = wire.ask(data.draw(st.sampled_from(METHODS)), target, body, headers)
    if answer.status == 500 or (answer.status == 404 and b"<Errors" in answer.response.body):
        assert answer.xml.tag.rpartition("}")[2] in {"Messages", "Errors"}
    elif answer.status >= 400:
        assert answer.code
    elif answer.status != 204 and answer.response.body:
        assert len(answer.xml) >= 0
    assert len(answer.headers["x-mns-request-id"]) == 24


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200))
def test_every_body_that_is_taken_comes_back(place: Any, wire: Any, body: str) -> None:
    wire.stage = place
    wire.ask("PUT", "/queues/echo")
    sent = wire.put(escape(body).replace(">", "&gt;").replace("\r", "&#13;"), queue="/queues/echo")
    if sent.status == 201:
        got = wire.get(queue="/queues/echo").fields()
        assert (got["MessageBody"], got["MessageBodyMD5"]) == (body, sent.text("MessageBodyMD5"))
        assert wire.ask("DELETE", f"/queues/echo/messages?ReceiptHandle={got['ReceiptHandle']}").status == 204
    else:
        assert sent.code == "MalformedXML"
