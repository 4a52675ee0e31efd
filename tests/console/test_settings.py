"""Settings of a queue: shown before they change, all that the API can set, and two people at once."""

import html
import re

import pytest
from tests.console.conftest import CONSOLE, QUEUES, Api, Visitor, hidden
from tests.console.hostile import HOSTILE, tags
from tests.console.test_pages import plain

from veilmq.admin.api.inputs import SettingsInput
from veilmq.console.pages.queue.settings import SETTINGS
from veilmq.console.showing import FormWrong, pairs_read, pairs_typed

ORDERS = f"{CONSOLE}/orders"


@pytest.fixture
def orders(api: Api) -> Api:
    api.create("dead")
    api.create("orders", redrive={"target": "dead", "receive_count_max": 2}, visibility_timeout_us=30_000_000)
    return api


def test_settings_change_after_they_were_shown(orders: Api, visitor: Visitor) -> None:
    path = f"{ORDERS}/settings"
    typed = {"visibility_timeout_us": "1 min", "delay_us": "0 s", "retention_us": "4 d", "wait_us": "0 s",
             "target": "dead", "receive_count_max": "2"}  # fmt: skip
    shown = visitor.submit(path, **typed)
    assert "visibility timeout 30 s 1 min" in plain(shown.text)
    assert "retention" not in plain(shown.text)
    fewer = plain(visitor.submit(path, **(typed | {"receive_count_max": "1"})).text)
    assert re.search(r"to dead after 2 receives to dead after 1 receive\b", fewer)
    assert orders.kinds().count("queue_changed") == 0
    confirmed = dict(
        re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', shown.text.partition("<main")[2])
    )
    back = visitor.post(path, data=confirmed | {"back": "yes"})
    assert 'name="visibility_timeout_us" value="1 min"' in back.text, "who goes back has what was typed"
    assert orders.kinds().count("queue_changed") == 0
    orders.client.patch(f"{QUEUES}/orders", json={"delay_us": 5_000_000})
    late = visitor.post(path, data=confirmed)
    assert late.status_code == 409
    assert "someone else changed queue orders meanwhile" in plain(late.text)
    assert ('value="5 s"' in late.text, 'value="1 min"' in late.text) == (True, False), "the settings as they are now"
    fresh = visitor.submit(path, **(typed | {"delay_us": "5 s", "target": "", "receive_count_max": ""}))
    confirmed = dict(
        re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', fresh.text.partition("<main")[2])
    )
    answer = visitor.post(path, data=confirmed)
    assert "visibility timeout 1 min; dead letters nowhere" in visitor.get(answer.headers["location"]).text
    settings = orders.client.get(f"{QUEUES}/orders").json()["settings"]
    assert (settings["visibility_timeout_us"], settings["redrive"], settings["delay_us"]) == (
        60_000_000,
        None,
        5_000_000,
    )
    assert "Nothing would change" in visitor.submit(path).text
    assert visitor.submit(path, **(typed | {"wait_us": "long"})).status_code == 400


def test_the_form_has_all_that_the_api_can_set() -> None:
    assert {each.name for each in SETTINGS} == set(SettingsInput.__struct_fields__)


def changed(visitor: Visitor, path: str, **fields: str) -> str:
    """Change what is typed; returns what the page says."""
    shown = visitor.submit(path, **fields)
    assert shown.status_code == 200, plain(shown.text)
    answer = visitor.post(path, data=hidden(shown.text, path))
    assert answer.status_code == 303, plain(answer.text)
    return plain(visitor.get(answer.headers["location"]).text)


def test_every_setting_is_typed_shown_and_set(orders: Api, visitor: Visitor) -> None:
    orders.create("orders.fifo", fifo=True)
    fifo = {
        "message_bytes_max": "2048",
        "receives_per_second_max": "70",
        "adaptive": "apply",
        "first_lease_min_us": "2 min",
        "xml_body": "base64",
        "alias": "other-name",
        "content_deduplication": "yes",
        "deduplication_scope": "messageGroup",
        "throughput_per_group": "yes",
        "permission": "byQueue",
        "sources": "a.fifo, b.fifo",
        "tags": "team=a = b\nenv=prod",
        "target": "",
        "receive_count_max": "",
    }
    said = changed(visitor, f"{CONSOLE}/orders.fifo/settings", **fifo)
    assert "dead letters from a.fifo, b.fifo; message size 2 KiB; messages a second 70" in said
    assert "tags env=prod, team=a = b" in said
    settings = orders.client.get(f"{QUEUES}/orders.fifo").json()["settings"]
    assert [each["name"] for each in settings["redrive_allow"]["sources"]] == ["a.fifo", "b.fifo"]
    expected = {
        "message_bytes_max": 2_048,
        "receives_per_second_max": 70,
        "adaptive": "apply",
        "first_lease_min_us": 120_000_000,
        "xml_body": "base64",
        "alias": "other-name",
        "content_deduplication": True,
        "deduplication_scope": "messageGroup",
        "throughput_per_group": True,
        "tags": {"team": "a = b", "env": "prod"},
    }
    assert {name: settings[name] for name in expected} == expected
    shown = plain(visitor.get(f"{CONSOLE}/orders.fifo").text)
    assert "message size 2 KiB messages a second 70 timeout plans apply first lease, at least 2 min" in shown
    assert "bodies of Azure and MNS decoded from base64 alias other-name deduplication by body yes" in shown
    assert "dead letters from a.fifo, b.fifo" in shown
    assert "message size" not in plain(visitor.get(ORDERS).text)
    page = visitor.get(f"{CONSOLE}/orders.fifo/settings").text
    assert "team=a = b\nenv=prod" in page, "as it was typed"
    none = {"alias": "", "receives_per_second_max": "", "first_lease_min_us": "", "permission": "", "tags": ""}
    said = changed(visitor, f"{CONSOLE}/orders.fifo/settings", **none)
    assert "alias none" in said
    settings = orders.client.get(f"{QUEUES}/orders.fifo").json()["settings"]
    assert [settings[name] for name in ("alias", "receives_per_second_max", "first_lease_min_us", "redrive_allow")] == [
        None
    ] * 4
    assert settings["tags"] == {}
    assert 'name="content_deduplication"' not in visitor.get(f"{ORDERS}/settings").text, "of FIFO queues alone"


def test_what_the_api_refuses_is_said_and_what_was_typed_stays(orders: Api, visitor: Visitor) -> None:
    shown = visitor.submit(f"{ORDERS}/settings", alias="Not An Alias", tags="a=<b>")
    refused = visitor.post(f"{ORDERS}/settings", data=hidden(shown.text, f"{ORDERS}/settings"))
    assert refused.status_code == 400
    assert 'role="alert">alias: ' in refused.text
    assert 'value="Not An Alias"' in refused.text
    assert "a=&lt;b&gt;" in refused.text
    shown = visitor.submit(f"{ORDERS}/settings", visibility_timeout_us="20 d")
    refused = visitor.post(f"{ORDERS}/settings", data=hidden(shown.text, f"{ORDERS}/settings"))
    assert 'role="alert">visibility timeout: Expected at most 7d' in refused.text, "as the form calls it"
    assert "Bodies of Azure and MNS" in plain(refused.text)
    orders.create("orders.fifo", fifo=True)
    for label, wrong in (
        ("timeout plans", {"adaptive": "evil"}),
        ("dead letters from", {"permission": "evil"}),
        ("tags", {"tags": "no value"}),
        ("message size", {"message_bytes_max": "much"}),
        ("deduplication by body", {"content_deduplication": "evil"}),
        ("throughput for each group", {"throughput_per_group": "evil"}),
        ("After so many receives", {"target": "dead", "receive_count_max": "99999", "confirmed": "yes"}),
        ("After so many receives", {"target": "dead", "receive_count_max": "many"}),
        ("Dead letters to", {"target": "no queue", "receive_count_max": "2", "confirmed": "yes"}),
    ):
        answer = visitor.submit(f"{CONSOLE}/orders.fifo/settings", **wrong)
        assert (answer.status_code, f'role="alert">{label}: ' in answer.text) == (400, True), plain(answer.text)
    assert orders.kinds().count("queue_changed") == 0


def test_tags_are_text_and_come_back_as_they_were(orders: Api, visitor: Visitor) -> None:
    for text in [*HOSTILE, "a\nb", " a ", "{", "a=b"]:
        for given in ({text: "value"}, {"name": text}):
            typed = pairs_typed(given)
            kept = html.unescape(html.escape(typed)).replace("\n", "\r\n")
            assert pairs_read("tags", kept) == given, typed
    for wrong in ('{"a": 1}', "{", "[1]", "=a", "a=1\na=2", '{"a": "1", "a": "2"}', '{"a": "\\ud800"}'):
        with pytest.raises(FormWrong):
            pairs_read("tags", wrong)
    known = {tag for tag, _ in tags(visitor.get(f"{ORDERS}/settings").text).found}
    hostile = "<script>alert(1)</script>"
    assert orders.client.patch(f"{QUEUES}/orders", json={"tags": {hostile: hostile}}).status_code == 200
    page = tags(visitor.get(f"{ORDERS}/settings").text)
    assert {tag for tag, _ in page.found} == known
    assert f"{hostile}={hostile}" in "".join(page.text)
