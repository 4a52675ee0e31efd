"""The page of a queue as it was: what is typed, what is said, and what a link holds."""

import re
from pathlib import Path

import pytest
from tests.admin import server as admin
from tests.console.conftest import CONSOLE, Api, Visitor
from tests.console.test_pages import plain

from veilmq.console.pages.queue import instant_typed
from veilmq.console.showing import FormWrong
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.testing.for_each import for_each

PAST = f"{CONSOLE}/orders/past"
NOW = 1_700_000_000_000_000


def test_a_queue_as_it_was_and_what_changed(api: Api, visitor: Visitor) -> None:
    api.create("orders", visibility_timeout_us=30_000_000)
    held = api.send("orders", type="<b>")
    api.send("orders", delay_us=3_600_000_000)
    agent = {"user-agent": "veilmq/0.1 (work-1; pid 70)"}
    api.client.post("/api/v1/queues/000000000000/us-east-1/orders/receive", json={}, headers=agent)
    api.later(600)
    assert f'href="{PAST}"' in visitor.get(f"{CONSOLE}/orders").text
    assert "Look back" in visitor.get(PAST).text
    answer = visitor.get(PAST, params={"at": "599 s"})
    target = answer.headers["location"]
    assert re.search(r"at=20\d\d-\d\d-\d\dT\d\d%3A", target), target
    then = plain(visitor.get(target).text)
    assert "visible 0 delayed 1 in flight 1 quarantined 0 oldest " in then
    assert re.search(rf"{held} in flight \S+ work-1 pid 70 admin (?!admin)", then), then
    both = visitor.get(visitor.get(PAST, params={"at": "599 s", "until": "now"}).headers["location"])
    text = plain(both.text)
    assert "lease expired 1" in text
    assert f"{held} in flight visible lease expired" in text
    assert "What became of the messages that were there then and changed: 1 visible." in text
    assert "<b>" not in both.text.partition("<main")[2]
    address = re.findall(r'href="([^"]*form=csv)"', both.text)[0].replace("&amp;", "&")
    file = visitor.get(address)
    assert file.headers["content-disposition"] == 'attachment; filename="orders-past.csv"'
    assert held in file.text
    only = visitor.get(target + "&state=delayed").text
    assert held not in only


def test_what_cannot_be_shown_is_said(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    for typed, words in (
        ("soon", "at: expected an instant such as 20"),
        ("2020-01-01", "There was no queue of that name then."),
        ("2100-01-01", "at: it is not in the past"),
    ):
        answer = visitor.get(PAST, params={"at": typed})
        assert answer.status_code == 400
        assert words in plain(answer.text), typed
        assert f'value="{typed}"' in answer.text
    assert visitor.get(PAST.replace("orders", "none")).status_code == 200


def test_it_needs_the_grant_of_the_events(tmp_path: Path) -> None:
    grants = (Grant(frozenset({Action.LIST_QUEUES, Action.DESCRIBE_QUEUE})),)
    keys = admin.Keys(AccessKey("AKQ", "q-secret", "111111111111", grants=grants))
    with admin.running(tmp_path / "data", keys) as server, Visitor(server) as visitor:
        visitor.sign_in(key="AKQ", secret="q-secret")
        path = "/console/queues/111111111111/us-east-1/orders/past"
        assert visitor.get(path, params={"at": "2023-01-01"}).status_code == 403


@for_each(
    "text, instant, is_one",
    [
        ("now", NOW, False), ("10 min", NOW - 600_000_000, False), ("1.5 h ago", NOW - 5_400_000_000, False),
        ("2023-11-14T22:13:20.000001Z", NOW + 1, True), ("2023-11-14 23:13:20+01:00", NOW, True),
        ("2023-11-14 22:13:20", NOW, True), ("1960-01-01", 1, True),
    ],
)  # fmt: skip
def test_an_instant_is_typed_in_several_ways(text: str, instant: int, is_one: bool) -> None:
    assert instant_typed("at", text, NOW) == (instant, is_one)


@for_each("text", ["", "yesterday", "10 parsecs", "<script>", "2023-13-01", "nan s", "1e400 d"])
def test_what_is_no_instant_is_refused(text: str) -> None:
    with pytest.raises(FormWrong) as refusal:
        instant_typed("at", text, NOW)
    assert refusal.value.field == "at"
