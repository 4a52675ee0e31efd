"""The pages of queues and messages: what they show, and what their forms do."""

import base64
import html
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.admin import server as admin
from tests.console.conftest import CONSOLE, QUEUES, Api, Visitor, bodiless, hidden

from veilmq.console import showing
from veilmq.console.showing import SHOWN_CHARACTERS_MAX, FormWrong, shown_body
from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each

ORDERS = f"{CONSOLE}/orders"


def plain(page: str) -> str:
    """The text of a page as a reader sees it."""
    text = html.unescape(re.sub(r"<[^>]*>", " ", page.partition("<main")[2]))
    return re.sub(r"\s+", " ", text)


@pytest.fixture
def orders(api: Api) -> Api:
    api.create("dead")
    api.create("orders", redrive={"target": "dead", "receive_count_max": 2}, visibility_timeout_us=30_000_000)
    return api


def test_the_start_page_lists_queues_by_key(api: Api, visitor: Visitor) -> None:
    assert "There is no queue yet" in visitor.get("/console/").text
    for number in range(53):
        api.create(f"q{number:02}")
    api.send("q00")
    first = visitor.get("/console/").text
    assert re.findall(r'us-east-1/(q\d\d)"', first) == [f"q{number:02}" for number in range(50)]
    following = html.unescape(re.findall(r'href="([^"]+)" rel="next"', first)[0])
    assert re.findall(r'us-east-1/(q\d\d)"', visitor.get(following).text) == ["q50", "q51", "q52"]
    assert re.findall(r'us-east-1/(q\d\d)"', visitor.get("/console/?prefix=q1").text) == [f"q1{n}" for n in range(10)]
    cells = visitor.get("/console/news", headers={"accept": "application/json"}).json()["cells"]
    assert cells["000000000000/us-east-1/q00:visible"] == "1"
    assert cells["000000000000/us-east-1/q01:visible"] == "0"
    assert float(cells["000000000000/us-east-1/q00:sent"]) > 0
    assert cells["000000000000/us-east-1/q01:sent"] == "0"
    assert len(re.findall(r'<svg class="spark"', first)) == 1, "nothing happened to the others"


def test_what_a_person_must_see_comes_first(server: Any, visitor: Visitor) -> None:
    server.push_fault = "until a restart: pushing failed with an error"
    assert "pushes nothing is pushed until a restart" in plain(visitor.get("/console/").text)


def test_the_search_finds_an_id_or_names(orders: Api, visitor: Visitor) -> None:
    message = orders.send("orders")
    for given in (message, message.upper(), message.replace("-", ""), f" {message} "):
        assert visitor.get("/console/find", params={"q": given}).headers["location"].startswith("/console/messages/")
    assert visitor.get("/console/find", params={"q": "ord"}).headers["location"] == "/console/?prefix=ord"
    assert visitor.get("/console/find", params={"q": ""}).headers["location"] == "/console/"
    for nowhere in ("//evil", "foo bar"):
        answer = visitor.get("/console/find", params={"q": nowhere})
        assert (answer.status_code, answer.headers.get("location")) == (404, None)
        assert f"no queue can be called {nowhere}," in plain(answer.text)
        assert 'action="/console/sign-out"' in answer.text, "the page of an error has the head of all pages"
        assert 'href="/console/find">Back' in answer.text


def test_the_search_finds_deduplication_ids(api: Api, visitor: Visitor) -> None:
    api.create("lane.fifo", fifo=True)
    uuid = "7d444840-9dc0-11d1-b245-5ffdce74fad2"
    for identity in ("order-1", "<b>1</b>", uuid):
        sent = api.send("lane.fifo", identity, group="a", deduplication_id=identity)
        page = visitor.get("/console/find", params={"q": identity}, follow_redirects=True)
        assert f'href="/console/messages/{sent}"' in page.text
        assert f"Sent with the deduplication id {identity} " in plain(page.text)
        assert ("/console/?prefix=order-1" in page.text) is (identity == "order-1"), "it may be a queue's name"
    assert visitor.get("/console/find", params={"q": "order-2"}).headers["location"] == "/console/?prefix=order-2"


def test_news_are_sent_once_and_shared_for_two_seconds(orders: Api, visitor: Visitor) -> None:
    answer = visitor.get(f"{ORDERS}/news")
    tag = {"if-none-match": answer.headers["etag"]}
    assert visitor.get(f"{ORDERS}/news", headers=tag).status_code == 304
    orders.send("orders")
    assert visitor.get(f"{ORDERS}/news", headers=tag).status_code == 304
    assert visitor.get(f"{ORDERS}/news").json()["cells"]["visible"] == "0"
    orders.later(2)
    assert visitor.get(f"{ORDERS}/news", headers=tag).json()["cells"]["visible"] == "1"


def test_messages_of_a_queue_by_state_and_filter(orders: Api, visitor: Visitor) -> None:
    sent = [orders.send("orders", f"body {number}", type=f"t{number % 2}") for number in range(60)]
    held = orders.act("orders", "receive")["messages"][0]["id"]
    delayed = orders.send("orders", delay_us=60_000_000)
    ids = re.compile(r'href="/console/messages/([0-9a-f-]{36})"')
    first = visitor.get(ORDERS).text.partition('id="messages"')[2]
    assert ids.findall(first) == sent[1:51]
    following = html.unescape(re.findall(r'href="([^"]+)#messages" rel="next"', first)[0])
    assert ids.findall(visitor.get(following).text.partition('id="messages"')[2]) == sent[51:]
    hidden = visitor.get(f"{ORDERS}?state=hidden").text
    assert set(ids.findall(hidden)) == {held, delayed}
    assert "● in flight" not in hidden, "the sign is the style sheet's"
    page = visitor.get(f"{ORDERS}?type=t1&text=body 7").text
    assert ids.findall(page.partition('id="messages"')[2]) == [sent[7]]
    assert "No visible message matches" in plain(visitor.get(f"{ORDERS}?type=none").text)
    wrong = visitor.get(f"{ORDERS}?receives_min=3x&type=t1")
    assert wrong.status_code == 400
    assert "receives at least: expected a whole number, not '3x'" in plain(wrong.text).partition("Messages")[2]
    assert ('value="3x"' in wrong.text, 'value="t1"' in wrong.text) == (True, True), "what was typed stays"
    assert visitor.get(f"{ORDERS}/messages?receives_min=3x").status_code == 400
    assert visitor.get(f"{CONSOLE}/none").status_code == 404
    assert visitor.get("/console/queues/1/2/3").status_code == 400


def test_a_form_sends(orders: Api, visitor: Visitor) -> None:
    fields = {"body": "a\r\nb", "type": "t", "delay": "1.5 min", "attributes": "n=v"}
    answer = visitor.submit(f"{ORDERS}/send", **fields)
    page = visitor.get(answer.headers["location"])
    assert "Sent to orders." in page.text
    message = re.findall(r"/console/messages/([0-9a-f-]{36})", answer.headers["location"])[0]
    (place,) = orders.client.get(f"/api/v1/messages/{message}?bodies=true").json()["places"]
    assert (place["body"], place["type"], place["state"]) == ("a\nb", "t", "delayed")
    assert place["attributes"] == [{"name": "n", "type": "String", "value": "v"}]
    wrong = visitor.submit(f"{ORDERS}/send", body="kept <b>", delay="soon")
    assert wrong.status_code == 400
    assert "delay: expected a duration such as 30 s" in plain(wrong.text)
    assert "kept &lt;b&gt;" in wrong.text


def test_an_act_sent_twice_acts_once(orders: Api, visitor: Visitor) -> None:
    fields = visitor.fields(f"{ORDERS}/send") | {"body": "once"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: visitor.post(f"{ORDERS}/send", data=fields), range(4)))
    assert {answer.status_code for answer in answers} == {303}
    (location,) = {answer.headers["location"] for answer in answers}
    assert "Sent to orders." in plain(visitor.get(location).text)
    assert orders.kinds().count("sent") == 1
    again = visitor.fields(f"{ORDERS}/send") | {"body": "once"}
    visitor.post(f"{ORDERS}/send", data=again)
    assert orders.kinds().count("sent") == 2


def test_a_form_that_was_sent_with_other_contents_is_shown_again(orders: Api, visitor: Visitor) -> None:
    """In a new tab it sends one message; the old tab still has the form, and another one is typed there."""
    fields = visitor.fields(f"{ORDERS}/send")
    visitor.post(f"{ORDERS}/send", data=fields | {"body": "first"})
    refused = visitor.post(f"{ORDERS}/send", data=fields | {"body": "second"})
    assert refused.status_code == 422
    assert "This form was sent before, with other contents." in plain(refused.text)
    assert "second</textarea>" in refused.text, "what was typed stays"
    visitor.post(f"{ORDERS}/send", data=hidden(refused.text, f"{ORDERS}/send") | {"body": "second"})
    bodies = [each["body"] for each in orders.client.get(f"{QUEUES}/orders/peek?count=9").json()["messages"]]
    assert bodies == ["first", "second"]


def test_a_form_that_outlives_its_session_acts_once(orders: Api, visitor: Visitor) -> None:
    fields = visitor.fields(f"{ORDERS}/send") | {"body": "once"}
    first = visitor.post(f"{ORDERS}/send", data=fields)
    visitor.cookies.clear()
    visitor.sign_in(secret=admin.TOKEN)
    fields["csrf"] = visitor.fields(f"{ORDERS}/send")["csrf"]
    second = visitor.post(f"{ORDERS}/send", data=fields)
    assert first.headers["location"] == second.headers["location"]
    assert orders.kinds().count("sent") == 1


def test_a_purge_says_what_and_how_many(orders: Api, visitor: Visitor) -> None:
    for number, words in ((3, "3 messages"), (1, "1 message")):
        for _ in range(number):
            orders.send("orders")
        page = plain(visitor.get(f"{ORDERS}/purge").text)
        assert (f"This deletes {words} of orders for good" in page, f"Delete {words} Cancel" in page) == (True, True)
        answer = visitor.submit(f"{ORDERS}/purge")
        assert f"Deleted {words} of orders." in visitor.get(answer.headers["location"]).text
    assert orders.kinds().count("purged") == 2


def test_why_twice_in_a_sentence_and_a_picture(orders: Api, visitor: Visitor) -> None:
    message = orders.send("orders")
    handles = []
    for name in ("a-1; pid 7", "b-1; pid 8"):
        agent = {"user-agent": f"veilmq/0.1 ({name})"}
        got = orders.client.post(f"{QUEUES}/orders/receive", json={}, headers=agent).json()["messages"]
        handles.append(got[0]["handle"])
        orders.later(31 if len(handles) == 1 else 5)
    for handle in reversed(handles):
        orders.client.post(f"{QUEUES}/orders/delete", json={"handles": [handle]})
    page = visitor.get(f"/console/messages/{message}").text
    assert "Processed twice: a-1 pid 7&#39;s lease of 30 s ended at " in page
    kinds = re.findall(r'class="mark (\w+)"', page)
    assert {"sent", "expired", "refused", "deleted"} <= set(kinds)
    assert re.findall(r'class="bar (\w+)"', page) == ["waits", "lease", "late", "lease"]
    assert "delete refused" in plain(page).partition("Everything that happened")[2]
    message = orders.send("orders")
    for seconds in (120, 170):
        orders.act("orders", "receive")
        orders.later(seconds)
    page = visitor.get(f"/console/messages/{message}").text
    ends = [0.0]
    for x, anchor, text in re.findall(r'class="tick" x="([\d.]+)" y="12" text-anchor="(\w+)">([^<]+)', page):
        left = float(x) - 6.2 * len(text) * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        assert left >= ends[-1], "no label is over the one before"
        ends.append(left + 6.2 * len(text))
    assert len(ends) > 3


def test_looking_leaves_no_trace_but_a_body_that_is_read(orders: Api, visitor: Visitor) -> None:
    message = orders.send("orders", '{"big": 9007199254740993}')
    before = orders.kinds()
    for path in (f"/console/messages/{message}", ORDERS, "/console/", f"{ORDERS}/purge"):
        assert "9007199254740993" not in visitor.get(path).text
    assert orders.kinds() == before
    page = visitor.submit(f"/console/messages/{message}")
    assert "9007199254740993" in page.text
    assert orders.kinds() == [*before, "peeked"]


def test_a_body_is_downloaded_as_it_is(orders: Api, visitor: Visitor) -> None:
    message = orders.send("orders", "<script>alert(1)</script>\u202e")
    page = visitor.submit(f"/console/messages/{message}").text
    action = f"/console/messages/{message}/download"
    file = visitor.post(action, data=hidden(page, action))
    assert file.content.decode() == "<script>alert(1)</script>\u202e"
    assert file.headers["content-type"] == "application/octet-stream"
    assert file.headers["content-disposition"] == f'attachment; filename="message-{message}.bin"'


def test_bodies_can_be_switched_off(tmp_path: Path) -> None:
    with bodiless(tmp_path, Settings(console_bodies=False)) as (api, visitor, message):
        fields = visitor.fields("/console/", "/console/sign-out")
        assert visitor.post(f"/console/messages/{message}", data=fields).status_code == 403
        assert "shows no bodies" in visitor.get(f"/console/messages/{message}").text
        assert message in visitor.get(f"{ORDERS}?text=other").text, "no way to search in bodies"
        job = visitor.post(f"{ORDERS}/job", data=visitor.fields(f"{ORDERS}/job") | {"act": "delete", "text": "needle"})
        assert (job.status_code, "does not look into bodies" in job.text) == (400, True), "nor to count in them"
        assert "peeked" not in api.kinds()


def test_nothing_is_known_of_a_message(visitor: Visitor) -> None:
    assert visitor.get(f"/console/messages/{'0' * 32}").status_code == 404
    assert visitor.get("/console/messages/<script>").status_code == 400


@for_each(
    "body, kind, shown",
    [
        ('{"a":1.0000000000000000001,"n":9007199254740993,"a":[]}', "JSON",
         '{\n  "a": 1.0000000000000000001,\n  "n": 9007199254740993,\n  "a": []\n}'),
        ('["\\u003cb", {}, [1,2], "},{"]', "JSON", '[\n  "\\u003cb",\n  {},\n  [\n    1,\n    2\n  ],\n  "},{"\n]'),
        ("[" * 20_000, "text", "["),
        ("plain words", "text", "plain words"),
        ("eyJhbGciOiJkaXIiLCJlbmMiOiJBMjU2R0NNIn0..aaaa.bbbb.cccc", "encrypted (JWE); this is its header",
         '{\n  "alg": "dir",\n  "enc": "A256GCM"\n}'),
        ('{"veilmq.pointer": {"key": "k"}}', "a pointer to a large body, not fetched", '{\n  "veilmq.pointer"'),
        ("", "text", ""),
    ],
)  # fmt: skip
def test_a_body_is_shown_as_what_it_is(body: str, kind: str, shown: str) -> None:
    found = shown_body(body, None)
    assert found.kind == kind
    assert found.text.startswith(shown)
    if kind == "JSON":
        assert found.text == shown


def test_a_number_has_as_many_digits_as_a_day_in_microseconds() -> None:
    assert showing.number("age", "86400000000") == 86_400_000_000
    with pytest.raises(FormWrong):
        showing.number("age", "9" * 16)


def test_a_deep_body_is_cut_before_it_is_indented() -> None:
    """Each line of it is as long as it is deep: a body of 1 MB took 1.8 GB."""
    found = shown_body("[" * 900 + "1," * 400_000 + "1" + "]" * 900, None)
    assert (found.kind, found.is_cut, len(found.text)) == ("JSON", True, SHOWN_CHARACTERS_MAX)
    assert showing._indented("[" * 900 + "1," * 400_000 + "1" + "]" * 900).count("1") < 200


def test_of_a_long_body_in_base64_the_beginning_is_said_to_be_one() -> None:
    assert shown_body(base64.b64encode(b"\xff" * 50_000).decode(), None).is_cut
    assert not shown_body(base64.b64encode(b"\xff" * 40_000).decode(), None).is_cut


def test_base64_and_bytes() -> None:
    found = shown_body(base64.b64encode(b'{"id": 9007199254740993}').decode(), None)
    assert (found.kind, found.decoded_kind) == ("base64", "JSON")
    assert "9007199254740993" in found.decoded
    found = shown_body(base64.b64encode(bytes(range(250, 256)) * 6).decode(), None)
    assert found.decoded_kind == "36 bytes"
    assert found.decoded.startswith("00000000  fa fb fc fd fe ff fa fb")
    found = shown_body(None, base64.b64encode(b"\xff\xfeab").decode())
    assert found.kind == "bytes that are no text"
    assert found.text == "00000000  ff fe 61 62                                      ..ab"


def test_long_bodies_are_cut_and_said_to_be(orders: Api, visitor: Visitor) -> None:
    message = orders.send("orders", "x y " * 250_000)
    page = visitor.submit(f"/console/messages/{message}").text
    assert "text, its beginning" in page
    assert len(page) < 300_000


def test_the_worst_queues_come_first(orders: Api, visitor: Visitor) -> None:
    assert 'class="needs"' not in visitor.get("/console/").text
    orders.send("orders")
    for _ in range(3):
        orders.act("orders", "receive")
        orders.later(31)
    page = visitor.get("/console/").text
    needs = plain(page).partition("Queues")[0]
    assert "dead dead letters from orders in this hour and the last: 1" in needs
    assert f'href="{CONSOLE}/dead#messages"' in page, "where the messages are"
    assert "orders leases that ran out in this hour and the last: 2; is its timeout right?" in needs
    assert "old" not in needs
    orders.client.patch(f"{QUEUES}/orders", json={"redrive": None})
    page = visitor.get("/console/").text
    assert "orders dead letters in this hour and the last: 1" in plain(page), "nobody knows where they went"
    orders.later(1_900)
    assert visitor.get("/console/").status_code == 200
    orders.later(1_900)
    assert "dead its oldest message is 1 h" in plain(visitor.get("/console/").text)


def test_a_fifo_queue_that_stands_still_comes_first(api: Api, visitor: Visitor) -> None:
    """And one that moves does not, though others wait in its group."""
    for name in ("still.fifo", "moves.fifo"):
        api.create(name, fifo=True, content_deduplication=True)
        for number in range(4):
            api.send(name, str(number), group="a")
    api.act("still.fifo", "receive", lease_us=3_600_000_000)
    for is_late in (False, True):
        held = api.act("moves.fifo", "receive", lease_us=3_600_000_000)["messages"][0]
        api.later(280)
        assert ("still.fifo" in plain(visitor.get("/console/").text).partition("Queues")[0]) is is_late
        api.act("moves.fifo", "delete", handles=[held["handle"]])
    api.act("moves.fifo", "receive", lease_us=3_600_000_000)
    page = visitor.get("/console/").text
    needs = plain(page).partition("Queues")[0]
    assert "still.fifo 3 messages of 1 group blocked for up to 9 min 20 s: others of their group are held" in needs
    assert f'href="{CONSOLE}/still.fifo#blocked"' in page
    assert "moves.fifo" not in needs


def test_a_queue_says_why_its_messages_failed(orders: Api, visitor: Visitor) -> None:
    assert "Why it failed" not in visitor.get(ORDERS).text
    message = orders.send("orders")
    orders.act("orders", "receive")
    orders.later(31)
    orders.act("orders", "receive")
    causes = plain(visitor.get(ORDERS).text).partition("Why it failed")[2]
    assert re.search(rf"lease expired not reported 1 \S.* {message} ", causes), causes[:300]
