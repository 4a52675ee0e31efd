"""Sending from the console: what was sent, or is there, can be filled in again; and where that is kept."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from tests.admin import server as admin
from tests.console.conftest import CONSOLE, QUEUES, Api, Visitor, bodiless, hidden
from tests.console.hostile import SOME, tags
from tests.console.test_pages import plain

from veilmq.console import sessions
from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each

SEND = f"{CONSOLE}/orders/send"
FILL = f"{SEND}/fill"


@pytest.fixture
def orders(api: Api) -> Api:
    api.create("orders")
    return api


def form(page: str) -> dict[str, str]:
    """What the form to send has in its fields."""
    found = dict(re.findall(r'<input name="(\w+)" value="([^"]*)"', page))
    return found | dict(re.findall(r'<textarea name="(\w+)"[^>]*>\n(.*?)</textarea>', page, re.DOTALL))


def test_what_was_sent_is_filled_in_again(orders: Api, visitor: Visitor) -> None:
    assert "Sent before" not in visitor.get(SEND).text
    first = {"body": "first", "type": "t", "delay": "1 min", "ttl": "1 h", "priority": "3", "attributes": "a=b=c\nd="}
    assert visitor.submit(SEND, **first, deduplication_id="once").status_code == 303
    visitor.submit(SEND, body="second")
    visitor.submit(SEND, body="second")
    page = visitor.get(SEND).text
    assert len(re.findall(r'name="again"', page)) == 2, "the same once"
    again = visitor.post(FILL, data=hidden(page, FILL) | {"again": "1"})
    assert {name: value for name, value in form(again.text).items() if value} == first
    visitor.post(SEND, data=hidden(again.text, SEND) | form(again.text) | {"body": "changed"})
    bodies = [each["body"] for each in orders.client.get(f"{QUEUES}/orders/peek?count=9").json()["messages"]]
    assert sorted(bodies) == ["second", "second"], "the others are delayed"
    listed = orders.client.get(f"{QUEUES}/orders/messages?state=hidden").json()["messages"]
    assert [each["type"] for each in listed] == ["t", "t"]
    assert visitor.post(FILL, data=hidden(page, FILL) | {"again": "99"}).status_code == 200
    assert 'role="alert">priority: Expected at most 16' in visitor.submit(SEND, priority="99").text
    assert all("second" not in str(answer.url) for answer in (again, visitor.get(SEND)))


def test_another_session_sees_nothing_of_it(orders: Api, server: Any, visitor: Visitor) -> None:
    visitor.submit(SEND, body="mine")
    with Visitor(server) as other:
        other.sign_in(secret=admin.TOKEN)
        assert "Sent before" not in other.get(SEND).text


def test_what_is_kept_has_a_bound(orders: Api, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SENT_CHARACTERS_MAX", 50)
    monkeypatch.setattr(sessions, "SENT_MAX", 4)
    for body in ("a" * 20, "b" * 20, "c" * 51, "d", "e" * 20):
        visitor.submit(SEND, body=body)
    kept = re.findall(r"<td class=\"wide\"><code>(\w+)</code>", visitor.get(SEND).text)
    assert kept == ["e" * 20, "d", "b" * 20]


def test_a_message_is_filled_in_as_it_is(orders: Api, visitor: Visitor) -> None:
    attributes = [
        {"name": "n", "type": "Number", "value": "9007199254740993"},
        {"name": "b", "type": "Binary", "value": base64.b64encode(b"\xff").decode()},
    ]
    message = orders.send("orders", "first line\n<b>", type="t", priority=3, attributes=attributes)
    page = visitor.submit(f"/console/messages/{message}").text
    before = orders.kinds()
    filled = visitor.post(FILL, data=hidden(page, FILL))
    assert orders.kinds() == [*before, "peeked"], "to fill it in is to read it"
    assert "first line\n&lt;b&gt;</textarea>" in filled.text
    listed = re.findall(r"\[\{.*\}\]", "".join(tags(filled.text).text))
    typed = {"body": "first line\n<b>", "type": "t", "priority": form(filled.text)["priority"], "attributes": listed[0]}
    sent = visitor.post(SEND, data=hidden(filled.text, SEND) | typed).headers["location"]
    copy = re.findall(r"/console/messages/([0-9a-f-]{36})", sent)[0]
    places = [orders.client.get(f"/api/v1/messages/{each}?bodies=true").json()["places"][0] for each in (message, copy)]
    same = [{name: place[name] for name in ("body", "type", "priority", "attributes", "md5")} for place in places]
    assert same[0] == same[1]
    gone = visitor.post(FILL, data=hidden(page, FILL) | {"message": "0" * 32})
    assert (gone.status_code, "it is no longer there" in gone.text) == (400, True)
    assert visitor.post(FILL, data=hidden(page, FILL) | {"message": "<b>"}).status_code == 400


def test_a_dead_letter_is_sent_again_to_where_it_came_from(api: Api, visitor: Visitor) -> None:
    api.create("dead")
    api.create("orders", redrive={"target": "dead", "receive_count_max": 1}, visibility_timeout_us=30_000_000)
    message = api.send("orders", "mend me")
    api.act("orders", "receive")
    api.later(31)
    api.act("orders", "receive")
    page = visitor.submit(f"/console/messages/{message}").text
    assert "Send like this to dead…" in plain(page)
    assert "Send like this to orders…" in plain(page)
    assert form(visitor.post(FILL, data=hidden(page, FILL)).text)["body"] == "mend me"


def test_where_bodies_are_not_shown_none_is_filled_in(tmp_path: Path) -> None:
    with bodiless(tmp_path, Settings(console_bodies=False)) as (api, visitor, message):
        kept = api.client.put(f"{QUEUES}/orders/templates", json={"name": "n", "message": {"body": "needle"}})
        assert kept.status_code == 201
        assert "needle" not in visitor.get(SEND).text
        assert "needle" not in visitor.get(f"{SEND}?template=n").text
        answer = visitor.post(FILL, data=visitor.fields(SEND) | {"message": message})
        assert (answer.status_code, "needle" in answer.text) == (400, False)
        assert "peeked" not in api.kinds()


def test_where_the_admin_port_gives_no_bodies_there_is_still_a_form_to_send(tmp_path: Path) -> None:
    with bodiless(tmp_path, Settings(admin_bodies=False)) as (_, visitor, message):
        assert visitor.get(SEND).status_code == 200
        assert visitor.submit(SEND, body="another").status_code == 303
        assert "shows no bodies" in visitor.get(f"/console/messages/{message}").text


KEEP = f"{SEND}/keep"
TYPED = {
    "body": "first\nsecond",
    "type": "t",
    "delay": "1 min",
    "ttl": "1 h",
    "priority": "3",
    "attributes": "a=b=c\nd=",
}


def keep(visitor: Visitor, name: str, **typed: str) -> str:
    """Keep a message as it is typed; returns where that leads."""
    asked = visitor.post(KEEP, data=visitor.fields(SEND) | typed)
    assert (asked.status_code, "Name <input" in asked.text) == (200, True)
    kept = visitor.post(KEEP, data=hidden(asked.text, KEEP) | {"template": name})
    assert kept.status_code == 303, plain(kept.text)
    return str(kept.headers["location"])


def test_a_message_is_kept_under_a_name_and_filled_in_again(orders: Api, server: Any, visitor: Visitor) -> None:
    there = keep(visitor, "paid & <b>", **TYPED, deduplication_id="once")
    assert "Kept as paid & <b>." in plain(visitor.get(there).text)
    keep(visitor, "other", body="x")
    with Visitor(server) as other:
        other.sign_in(secret=admin.TOKEN)
        page = other.get(SEND).text
        (path,) = re.findall(r'href="([^"]*)" title="Fill in the form">paid', page)
        filled = other.get(path).text
        assert {name: value for name, value in form(filled).items() if value} == TYPED
        again = other.post(KEEP, data=hidden(filled, SEND) | form(filled) | {"body": "new"})
        assert 'value="paid &amp; &lt;b&gt;"' in again.text, "the name is there when it is kept again"
        other.post(KEEP, data=hidden(again.text, KEEP) | {"template": "paid & <b>"})
    names = [each["name"] for each in orders.client.get(f"{QUEUES}/orders/templates").json()["templates"]]
    assert names == ["other", "paid & <b>"]
    page = visitor.get(SEND).text
    assert "new" in plain(page)
    asked = visitor.post(f"{SEND}/drop", data=hidden(page, f"{SEND}/drop") | {"name": "other"})
    assert "This deletes the template other for good" in plain(asked.text)
    assert "other" in plain(visitor.get(SEND).text), "it was not deleted yet"
    assert visitor.post(f"{SEND}/drop", data=hidden(asked.text, f"{SEND}/drop")).status_code == 303
    assert "other" not in plain(visitor.get(SEND).text)
    for name in ("nosuch", ""):
        refused = visitor.post(f"{SEND}/drop", data=hidden(page, f"{SEND}/drop") | {"name": name})
        assert (refused.status_code, 'role="alert">template: ' in refused.text) == (400, True), "nothing is asked"
        assert "Delete it" not in refused.text
    assert orders.client.get(f"{QUEUES}/orders").json()["counts"]["total"] == 0
    typed = {"body": "kept", "was": "other", "deduplication_id": "once"}
    asked = visitor.post(KEEP, data=visitor.fields(SEND) | typed)
    back = visitor.post(FILL, data=hidden(asked.text, KEEP) | {"template": "typed", "back": "yes"})
    assert "kept</textarea>" in back.text, "who goes back has what was typed"
    assert 'value="once"' in back.text
    refused = visitor.post(KEEP, data=visitor.fields(SEND) | {"body": "kept", "template": ""})
    assert (refused.status_code, 'role="alert">' in refused.text, 'value="kept"' in refused.text) == (400, True, True)
    assert visitor.get(f"{SEND}?template=none").status_code == 400


def test_a_template_is_text(orders: Api, visitor: Visitor) -> None:
    keep(visitor, "harmless", body="harmless")
    known = {tag for tag, _ in tags(visitor.get(f"{SEND}?template=harmless").text).found}
    for text in SOME:
        there = keep(visitor, text[:64], body=text)
        page = visitor.get(there)
        assert page.status_code == 200
        assert {tag for tag, _ in tags(page.text).found} <= known, text
        visitor.post(f"{SEND}/drop", data=hidden(page.text, f"{SEND}/drop") | {"name": text[:64], "confirmed": "yes"})


@for_each("text", ["ü" * 400_000, "\n" * 1_000_000])
def test_a_long_text_fits_the_form(orders: Api, visitor: Visitor, text: str) -> None:
    assert visitor.submit(SEND, body=text.replace("\n", "\r\n")).status_code == 303


def test_what_was_sent_is_text(orders: Api, visitor: Visitor) -> None:
    visitor.submit(SEND, body="harmless", type="harmless")
    known = {tag for tag, _ in tags(visitor.get(SEND).text).found}
    for text in SOME:
        visitor.submit(SEND, body=text, type=text[:256])
        page = visitor.get(SEND).text
        filled = visitor.post(FILL, data=hidden(page, FILL) | {"again": "0"}).text
        assert {tag for tag, _ in tags(page).found} | {tag for tag, _ in tags(filled).found} <= known, text
