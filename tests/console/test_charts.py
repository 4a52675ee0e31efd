"""Charts and exports: gaps are gaps, no peak is lost, and no text becomes a formula."""

import csv
import io
import json
import re
from typing import Any

from tests.console.conftest import CONSOLE, Api, Visitor

from veilmq.console.pictures import SPANS, Chart, charts
from veilmq.console.visit import flat, in_csv
from veilmq.model.instant import HOUR_US, MINUTE_US
from veilmq.testing.for_each import for_each

ORDERS = f"{CONSOLE}/orders"
COUNTS = (
    "sent",
    "received",
    "deleted",
    "lease_expired",
    "failed",
    "dead_lettered",
    "delete_refused",
    "depth",
    "in_flight",
)


def rollup(at: int, **values: Any) -> dict[str, Any]:
    return {"at": at * MINUTE_US, "wait_us": None, "hold_us": None} | dict.fromkeys(COUNTS, 0) | values


def gap(at: int) -> dict[str, Any]:
    return rollup(at) | dict.fromkeys(COUNTS)


def chart(title: str, rollups: list[dict[str, Any]]) -> Chart:
    return next(each for each in charts(rollups, MINUTE_US, 0) if each.title == title)


def test_a_minute_without_the_server_is_a_gap_and_a_quiet_one_is_zero() -> None:
    found = chart("Messages", [rollup(0, sent=4), rollup(1), gap(2), rollup(3, sent=2), gap(4)])
    sent = found.lines[0]
    assert sent.path == "M0.0 23.0L90.0 91.0M267.0 57.0h6", "a value alone is seen"
    alone = chart("Messages", [rollup(at) if at in (0, 120, 239) else gap(at) for at in range(240)]).lines[0]
    assert alone.path == "M0 91.0h1.5M180.1 91.0h1.5M358.5 91.0h1.5", "and so are the gaps"
    assert (sent.last, found.top) == ("2", "5")
    assert chart("Messages", [gap(0), gap(1)]).lines[0] == ("sent", "", "–")


def test_many_minutes_keep_their_sum_and_their_peaks() -> None:
    day = [rollup(at, sent=1, depth=at % 7) for at in range(1_440)]
    day[700]["depth"] = 90
    day[701]["hold_us"] = {"p50": 1, "p95": 3_000_000}
    assert chart("Messages", day).top == "10", "six minutes are one point"
    assert chart("In the queue", day).top == "100"
    assert chart("Time", day).top == "5 s"
    assert [each.each for each in charts(day, MINUTE_US, 0)] == ["6 min", "6 min", "", ""], "what a number is of"
    assert all(each.lines[0].path.count("L") < 240 for each in charts(day, MINUTE_US, 0))


def test_a_chart_says_when_it_begins() -> None:
    at = 29_606_380  # 2026-04-16 23:40
    begins = [charts([rollup(at)], step_us, (at + later) * MINUTE_US)[0].begin
              for step_us, later in ((MINUTE_US, 9), (MINUTE_US, 40), (HOUR_US, 40))]  # fmt: skip
    assert begins == ["23:40", "2026-04-16 23:40", "2026-04-16"]


def test_a_queue_shows_what_happened_in_each_span(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    for _ in range(3):
        api.send("orders")
    for span, (label, *_) in SPANS.items():
        page = visitor.get(f"{ORDERS}?span={span}").text
        assert f'span={span}" aria-current="true">{label}</a>' in page
        assert len(re.findall(r'<figure class="chart">', page)) == 4
    assert 'span=hour" aria-current="true"' in visitor.get(f"{ORDERS}?span=evil").text
    rows = visitor.get(f"{ORDERS}/rollups?span=day&form=json")
    assert rows.headers["content-disposition"] == 'attachment; filename="orders-day.json"'
    assert sum(row["sent"] or 0 for row in rows.json()) == 3


@for_each("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", '=HYPERLINK("http://evil")'])
def test_a_text_in_csv_is_no_formula(text: str) -> None:
    (names, row) = csv.reader(io.StringIO(in_csv([{text: text}])))
    assert names == row == [f"'{text}"]


def test_csv_and_json_keep_values_as_they_are() -> None:
    row: dict[str, Any] = {
        "id": 'a,"b"',
        "number": 9_007_199_254_740_993,
        "none": None,
        "yes": True,
        "minus": -5,
        "in": {"x": ["=1"]},
    }
    (names, values) = csv.reader(io.StringIO(in_csv([flat(row)])))
    assert names == ["id", "number", "none", "yes", "minus", "in.x"]
    assert values == ['a,"b"', "9007199254740993", "", "true", "-5", '["=1"]']
    assert in_csv([]) == "\r\n"


def test_the_messages_of_a_page_are_exported_as_they_are_filtered(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    api.send("orders", type="=cmd|' /C calc'!A0")
    api.send("orders", type="other")
    answer = visitor.get(f"{ORDERS}/messages?type=%3Dcmd|' /C calc'!A0&form=csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    names, row = csv.reader(io.StringIO(answer.text))
    assert dict(zip(names, row, strict=True))["type"] == "'=cmd|' /C calc'!A0"
    assert len(json.loads(visitor.get(f"{ORDERS}/messages?form=json").text)) == 2
    assert visitor.get(f"{ORDERS}/messages?form=exe").status_code == 400
    assert "body" not in json.loads(visitor.get(f"{ORDERS}/messages").text)[0]
