"""Workers: who holds what, how fast each is, and what failed."""

import csv
import html
import io
import re
from typing import Any

from tests.admin.test_failures import fail
from tests.console.conftest import CONSOLE, QUEUES, Api, Visitor
from tests.console.hostile import SOME, tags
from tests.console.test_pages import plain

A, B = "veilmq/0.1 (host-a; pid 17)", "veilmq/0.1 (mailer of eu)"
WORKERS = "/console/workers"


def receive(api: Api, who: str, queue: str = "orders") -> str:
    got = api.client.post(f"{QUEUES}/{queue}/receive", json={}, headers={"user-agent": who}).json()["messages"]
    return str(got[0]["id"])


def test_each_worker_with_what_it_holds(api: Api, visitor: Visitor) -> None:
    assert "No worker was seen." in plain(visitor.get(WORKERS).text)
    for name in ("orders", "mails"):
        api.create(name)
        api.send(name)
    held = receive(api, A)
    page = visitor.get(WORKERS).text
    assert re.search(r"host-a pid 17 admin admin now 1 .* of orders", plain(page)), plain(page)
    assert f'href="/console/messages/{held}"' in page
    mailed = receive(api, B, "mails")
    only = visitor.get(f"{WORKERS}?client=mailer").text
    assert mailed in only
    assert held not in only
    assert held in visitor.get(f"{WORKERS}?queue=orders").text
    assert mailed not in visitor.get(f"{WORKERS}?queue=orders").text
    sorted_by = {by: plain(visitor.get(f"{WORKERS}?sort={by}").text) for by in ("oldest", "seen")}
    assert sorted_by["oldest"].index("host-a") < sorted_by["oldest"].index("mailer of eu")
    assert sorted_by["seen"].index("host-a") > sorted_by["seen"].index("mailer of eu")
    missing = visitor.get(f"{WORKERS}?queue=none&client=host")
    assert (missing.status_code, 'role="alert"' in missing.text, 'value="host"' in missing.text) == (404, True, True)
    wrong = visitor.get(f"{WORKERS}?queue=a/b")
    assert (wrong.status_code, 'role="alert">queue: ' in wrong.text, "data-news" in wrong.text) == (400, True, False)
    assert f"{WORKERS}?queue=000000000000/us-east-1/orders" in visitor.get(f"{CONSOLE}/orders").text


def test_the_figures_of_workers_are_news_once(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    api.send("orders")
    api.send("orders")
    receive(api, A)
    answer = visitor.get(f"{WORKERS}/news")
    cells = answer.json()["cells"]
    assert cells[f"admin/admin/{A}:holds"] == "1"
    page = html.unescape(visitor.get(WORKERS).text)
    names = set(re.findall(r'data-live="([^"]+)"', page))
    assert names == cells.keys(), "each cell of the page is news, and nothing else"
    assert visitor.get(f"{WORKERS}/news", headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    receive(api, A)
    api.later(2)
    (path,) = re.findall(r'data-news="([^"]+)"', page)
    later = visitor.get(path)
    assert (later.json()["cells"][f"admin/admin/{A}:holds"], later.json()["cells"]["others"]) == ("2", "")
    assert later.headers["as-of"] > answer.headers["as-of"]
    same = visitor.get(path, headers={"if-none-match": later.headers["etag"]})
    assert (same.status_code, same.headers["as-of"]) == (304, later.headers["as-of"])
    api.send("orders")
    receive(api, B)
    api.later(31)
    news = visitor.get(path).json()["cells"]
    assert news["others"] == "Others are here now: load the page again.", "the table lacks one"
    assert (news[f"admin/admin/{A}:holds"], news[f"admin/admin/{A}:oldest"]) == ("0", "")


def test_workers_are_exported_as_they_are_shown(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    api.send("orders")
    api.send("orders")
    receive(api, "=cmd|' /C calc'!A0")
    receive(api, B)
    answer = visitor.get(f"{WORKERS}/export?client=cmd&form=csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="workers.csv"'
    names, row = csv.reader(io.StringIO(answer.text))
    shown = dict(zip(names, row, strict=True))
    assert (shown["client"], shown["holds"], "cell" in shown) == ("'=cmd|' /C calc'!A0", "1", False)
    assert len(visitor.get(f"{WORKERS}/export?form=json").json()) == 2


def test_the_name_of_a_worker_is_text(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    for text in SOME:
        api.send("orders", "x")
        receive(api, re.sub(r"[^ -~]", "?", text).strip())
    page = tags(visitor.get(WORKERS).text)
    known = {tag for tag, _ in page.found}
    assert known.isdisjoint({"img", "svg", "object", "iframe"}), known
    assert sum(tag == "script" for tag, _ in page.found) == 1
    shown = "".join(page.text)
    assert all(re.sub(r"[^ -~]", "?", text).strip() in shown for text in SOME)


def test_failures_of_all_queues_by_cause(api: Api, visitor: Visitor) -> None:
    assert "Nothing failed." in plain(visitor.get("/console/failures").text)
    for name in ("orders", "mails"):
        api.create(name, visibility_timeout_us=30_000_000)
        message = api.send(name)
        receive(api, A, name)
    api.later(31)
    page = visitor.get("/console/failures").text
    assert re.search(r"lease expired not reported 2 (mails 1 , orders 1|orders 1 , mails 1) ", plain(page)), plain(page)
    assert f'href="{CONSOLE}/mails"' in page
    assert re.search(r'href="/console/messages/[0-9a-f-]{36}"', page)
    only = visitor.get("/console/failures?prefix=ma&minutes=1440").text
    assert "in the last day, of 1 queue " in plain(only)
    assert message in only
    (cause,) = visitor.get("/console/failures/export?prefix=ma").json()
    assert (cause["kind"], cause["count"], "mails" in cause["queues"]) == ("lease_expired", 1, True)
    assert visitor.get("/console/failures?minutes=evil").status_code == 200
    assert "/console/failures" in visitor.get(f"{CONSOLE}/orders").text


def test_a_queue_that_stands_still_says_behind_what(api: Api, visitor: Visitor) -> None:
    page = f"{CONSOLE}/orders.fifo"
    api.create("orders.fifo", fifo=True, content_deduplication=True)
    sent = [api.send("orders.fifo", str(number), group=group) for number, group in enumerate("aaab")]
    assert "What is blocked" not in visitor.get(page).text
    assert visitor.get(f"{page}/news").json()["cells"]["blocked"] == "0"
    assert receive(api, B, "orders.fifo") == sent[0]
    api.later(20)
    shown = visitor.get(page).text
    what = plain(shown).partition("What is blocked")[2]
    assert "2 visible messages of 1 group wait behind messages that are in flight or delayed" in what
    assert re.search(rf"a 2 2\d s {sent[0]} mailer of eu admin 2\d s ago in \S+ s 1 ", what), what[:500]
    assert f'href="/console/messages/{sent[0]}"' in shown.partition("What is blocked")[2]
    assert visitor.get(f"{page}/news").json()["cells"]["blocked"] == "2"
    listed = plain(shown).partition("Last failure")[2]
    assert f"{sent[1]} blocked behind {sent[0]}" in listed
    assert f"{sent[3]} visible" in listed
    assert f"blocked by {sent[0]} of its group, in flight at mailer of eu until" in plain(
        visitor.get(f"/console/messages/{sent[2]}").text
    )


def test_what_waits_for_its_retry_is_held_by_nobody(server: Any, api: Api, visitor: Visitor) -> None:
    api.create("orders")
    message = fail(server, api.client, "wrong", "orders")
    listed = plain(visitor.get(f"{CONSOLE}/orders").text).partition("Who holds it, who waits")[2]
    assert f" {message} nobody: it waits for its retry " in listed, listed[:300]
    page = plain(visitor.get(f"/console/messages/{message}").text)
    assert ": nobody works on it, it waits for its retry " in page
    assert " last held by " in page


def test_a_holder_is_named_without_its_platform(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    api.send("orders")
    held = receive(api, "Boto3/1.44.8 ua/2.1 os/linux")
    page = plain(visitor.get(f"/console/messages/{held}").text)
    assert " held by Boto3/1.44.8 admin " in page, page[:600]
