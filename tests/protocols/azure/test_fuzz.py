"""Whatever comes in, an answer in Azure's form goes out: never a 500, never an empty 400.

Requests are right ones with parts replaced, so that they get past the doors and far in.
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

METHODS = ("GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "PATCH")
NAMES = (
    *("comp", "restype", "peekonly", "numofmessages", "visibilitytimeout", "messagettl", "popreceipt", "maxresults"),
    *("marker", "prefix", "include", "timeout", "sv", "ss", "srt", "sp", "st", "se", "sip", "spr", "si", "sig"),
    *("skoid", "sktid", "skt", "ske", "sks", "skv", "sduoid", "skdutid", "api-version"),
)
VALUES = (
    *("list", "properties", "service", "stats", "userdelegationkey", "metadata", "acl", "true", "0", "1", "-1", "32"),
    *("604800", "99999999999999999999", "q", "sco", "raup", "2026-10-06", "2026-11-21T00:00:00Z", "127.0.0.1"),
    *("https", "A" * 43 + "=", "", "\u00e9", "\0", "\ud800", "%", "'\"<>&"),
)
BODIES = (
    "",
    "<QueueMessage><MessageText>x</MessageText></QueueMessage>",
    "<SignedIdentifiers/>",
    "<SignedIdentifiers><SignedIdentifier><Id>1</Id></SignedIdentifier></SignedIdentifiers>",
    "<KeyInfo><Expiry/></KeyInfo>",
    "<StorageServiceProperties><Cors><CorsRule/></Cors></StorageServiceProperties>",
    *("<a", "\0", "\u00e9"),
)

texts = st.one_of(st.sampled_from(VALUES), st.text(max_size=20))
names = st.one_of(st.sampled_from(NAMES), st.text(max_size=10))
segments = st.one_of(
    st.sampled_from(["orders", "messages", "11111111-2222-3333-4444-555555555555", "", "..", "A", "a--b", "x" * 70]),
    st.text(max_size=10),
)
header_names = st.one_of(
    st.sampled_from(
        ["x-ms-version", "x-ms-date", "date", "origin", "x-ms-meta-a", "x-ms-meta-", "x-ms-client-request-id",
         "authorization", "host", "content-length", "access-control-request-method", "access-control-request-headers"]
    ),
    st.from_regex(r"x-ms-[a-z_-]{0,8}", fullmatch=True),
)  # fmt: skip
header_values = st.one_of(
    st.sampled_from(
        ["", "2026-10-06", "Bearer x", "Bearer token", "SharedKey a:b", "SharedKey", "https://a.example", "GET"]
    ),
    st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=30),
)


def escaped(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


@pytest.fixture(scope="module")
def place() -> Any:
    """One store for all examples: what the earlier ones left behind is part of the fun."""
    with TemporaryDirectory() as directory:
        stage = Stage(SqliteFactory(Path(directory) / "data"))
        yield stage
        stage.store.close()


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_request_breaks_it(place: Any, wire: Any, data: st.DataObject) -> None:
    wire.stage = place
    wire.token("token")
    path = "".join(f"/{escaped(each)}" for each in data.draw(st.lists(segments, max_size=4)))
    pairs = data.draw(st.lists(st.tuples(names, texts), max_size=5))
    query = "&".join(f"{escaped(name)}={escaped(value)}" for name, value in pairs)
    sas = data.draw(st.sampled_from(["", "account", "queue"]))
    if sas == "account":
        query += f"&{wire.account_sas()}"
    elif sas == "queue":
        query += f"&{wire.queue_sas('/orders', **data.draw(st.sampled_from([{}, {'si': 'x'}, {'sip': 'x'}])))}"
    headers = data.draw(st.dictionaries(header_names, header_values, max_size=3))
    request = wire.request(
        data.draw(st.sampled_from(METHODS)),
        f"{path or '/'}?{query}",
        data.draw(st.one_of(st.sampled_from(BODIES), st.binary(max_size=30))),
        {},
        auth=None if sas else data.draw(st.sampled_from(["SharedKey", "SharedKeyLite", None])),
        secure=data.draw(st.booleans()),
    )
    request.headers |= {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    answer = wire.send(request)
    assert answer.status < 500, answer.response.body
    if answer.status >= 400:
        assert answer.code
    for name, value in answer.response.headers:
        assert b"\n" not in name + value
        assert b"\r" not in name + value


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=st.text(max_size=200))
def test_what_is_put_is_read_again(place: Any, wire: Any, text: str) -> None:
    """No stored message breaks a read: a text is refused at the door, or comes back as it was."""
    wire.stage = place
    wire.ask("PUT", "/orders")
    wire.ask("DELETE", "/orders/messages")
    body = "".join(f"&#{ord(each)};" if each in "<&>\r" else each for each in text)
    raw = f"<QueueMessage><MessageText>{body}</MessageText></QueueMessage>".encode("utf-8", "surrogatepass")
    put = wire.ask("POST", "/orders/messages", raw)
    assert put.status in {201, 400}
    got = wire.ask("GET", "/orders/messages?numofmessages=32")
    assert got.status == 200
    assert got.texts("QueueMessage/MessageText") == ([text] if put.status == 201 else [])
