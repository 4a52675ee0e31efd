"""The queue page's section on its timeout: the advice, the curves and their table, the slider, and the button."""

import html
import re
from typing import Any

import pytest
from tests.console.conftest import CONSOLE, QUEUES, Api, Visitor, hidden
from tests.console.test_pages import plain

from veilmq.console.pictures import effects
from veilmq.console.showing import duration_typed, span_us
from veilmq.testing.for_each import for_each

ORDERS = f"{CONSOLE}/orders"


def live(api: Api, lengths_s: list[int], **members: Any) -> None:
    """Messages of orders are received at once, and each is deleted after so long, also after its lease's end."""
    api.act("orders", "messages", messages=[{"body": "x"} | members] * len(lengths_s))
    taken = api.act("orders", "receive", count=len(lengths_s))["messages"]
    handles, past = [each["handle"] for each in taken], 0
    for length in sorted(set(lengths_s)):
        api.later(length - past)
        api.act("orders", "delete", handles=[h for h, each in zip(handles, lengths_s, strict=True) if each == length])
        past = length


@pytest.fixture
def orders(api: Api) -> Api:
    """Eight of forty messages take 50 s, under a timeout of 30 s."""
    api.create("orders", visibility_timeout_us=30_000_000)
    live(api, [5, 10, 15, 20] * 8 + [50] * 8)
    return api


def section(page: str) -> str:
    return page.partition('id="timeout"')[2].partition("</section>")[0]


def test_before_anything_is_known(api: Api, visitor: Visitor) -> None:
    api.create("orders", visibility_timeout_us=30_000_000)
    page = section(visitor.get(ORDERS).text)
    assert "Too early to say." in plain(f"<main{page}")
    assert "leases that ran out none had today's timeout" in plain(f"<main{page}")
    assert "<svg" not in page
    assert "type=range" not in page.replace('"', "")


def test_what_is_said_and_what_the_slider_says(orders: Api, visitor: Visitor) -> None:
    page = section(visitor.get(ORDERS).text)
    text = plain(f"<main{page}")
    assert "Raise it. 20 % of the messages are started again while their worker still works under 30 s" in text
    assert "recommended 1 min 30 s" in text
    assert "leases that ran out 8 of 40" in text
    assert page.count("<figure") == 2
    rows = re.findall(r'<tr data-step="(\d+)" data-typed="([^"]+)" data-x="([\d.]+)"><th[^>]*>([^<]+)', page)
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    assert [float(row[2]) for row in rows] == sorted(float(row[2]) for row in rows)
    assert 'value="10"' in re.findall(r"<input type=\"range\"[^>]*>", page)[0], "it begins at the recommended one"
    place = next(row[0] for row in rows if row[3] == "45 s")
    tried = plain(f"<main{section(visitor.get(f'{ORDERS}?step={place}&type=a').text)}")
    assert "45 s : 20 % of the messages" in tried
    assert "Set 45 s …" in tried
    assert 'name="type" value="a"' in section(visitor.get(f"{ORDERS}?step={place}&type=a").text), "filters stay"
    for step in ("99", "-1", "x", "²"):
        assert "1 min 30 s : 0 % of" in plain(f"<main{section(visitor.get(ORDERS, params={'step': step}).text)}")


def test_the_button_leads_to_the_form_that_changes_it(orders: Api, visitor: Visitor) -> None:
    fields = hidden(visitor.get(ORDERS).text, f"{ORDERS}/settings")
    asked = visitor.post(f"{ORDERS}/settings", data=fields)
    assert "visibility timeout 30 s 1 min 30 s" in plain(asked.text)
    changed = visitor.post(f"{ORDERS}/settings", data=hidden(asked.text, f"{ORDERS}/settings"), follow_redirects=True)
    assert "Changed: visibility timeout 1 min 30 s." in plain(changed.text)
    settings = orders.client.get(f"{QUEUES}/orders").json()["settings"]
    assert settings["visibility_timeout_us"] == 90_000_000
    assert "Keep it." in plain(changed.text)
    assert not visitor.get(f"{ORDERS}/timeout?form=xml").is_success


def test_the_start_page_says_which_timeout_is_wrong(orders: Api, visitor: Visitor) -> None:
    def shown() -> tuple[str, str]:
        page = visitor.get("/console/").text
        return plain(page), html.unescape(re.findall(r'data-news="([^"]*)"', page)[0])

    before, news = shown()
    assert "is too short" not in before, "the page waits for no estimate"

    def asked() -> Any:
        orders.later(2)  # until then the last answer is given again
        return visitor.get(news).json()

    over = next(told for _ in range(1_000) if (told := asked())["over"])
    said, news = shown()
    assert "orders its timeout of 30 s is too short, 90 s is recommended: 20 % of the messages are started" in said
    assert "is its timeout right?" not in said, "it is said once"
    assert f'<a href="{ORDERS}#timeout"><b>orders</b>' in visitor.get("/console/").text
    told = visitor.get(news)
    assert (told.json()["over"], over["over"]) == (False, True)
    orders.client.patch(f"{QUEUES}/orders", json={"visibility_timeout_us": 90_000_000})
    orders.later(2)
    gone = visitor.get(news, headers={"if-none-match": told.headers["etag"]})
    assert (gone.status_code, gone.json()["over"]) == (200, True)
    assert "is too short" not in shown()[0]


def test_a_type_is_text(orders: Api, visitor: Visitor) -> None:
    live(orders, [5], type="<img src=x>")
    page = section(visitor.get(ORDERS).text)
    assert "&lt;img src=x&gt;" in page
    assert "<img" not in page


def test_the_curve_as_a_file(orders: Api, visitor: Visitor) -> None:
    rows = visitor.get(f"{ORDERS}/timeout?form=json").json()
    assert [row["timeout_us"] for row in rows][:3] == [1_000_000, 2_000_000, 3_000_000]
    head = visitor.get(f"{ORDERS}/timeout?form=csv").text.splitlines()[0]
    assert head.startswith('"timeout_us","duplicates.value","duplicates.low","duplicates.high","recovery_us"')


def test_a_band_without_a_line_where_nobody_saw_it() -> None:
    def effect(timeout_s: int, seen: bool) -> dict[str, Any]:
        share = {"value": 0.5, "low": 0.0, "high": 0.6}
        return {"timeout_us": timeout_s * 1_000_000, "duplicates": share, "recovery_us": 1_000_000, "seen": seen}

    curve = [effect(1, True), effect(10, True), effect(100, False)]
    found = effects({"curve": curve, "in_force": curve[0], "recommended_us": None, "at_least_us": 100_000_000}, "", str)
    assert found is not None
    again, _ = found.pictures
    assert (again.line.count("L"), again.band.count("L")) == (1, 5)
    assert again.line.startswith("M0.0 ")
    assert again.line.split("L")[1].startswith("180.0 "), "halfway, for the scale is logarithmic"
    assert [(mark.name, mark.x) for mark in found.marks] == [("today", 0.0), ("at least", 360.0)]
    assert [row.again for row in found.rows] == ["50 %", "50 %", "at most 60 %"]
    assert found.tried.step == 2


@for_each("span", [0, 1, 1_500_000, 90_000_000, 300_000_000, 43_200_000_000, 7 * 86_400_000_000])
def test_what_the_form_takes_is_exact(span: int) -> None:
    assert span_us("timeout", duration_typed(span)) == span
