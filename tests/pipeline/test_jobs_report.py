"""The report: one file that needs nothing else, for light and dark, with everything from the history escaped."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from tests.console.browsing import Tab, chromium
from tests.pipeline.histories_stage import frame
from tests.pipeline.test_plan_changes import verdict
from tests.support.histories import Workload, bimodal, history, lognormal, pareto

from veilmq.cli.pipeline import Asked
from veilmq.cli.pipeline.session import show
from veilmq.pipeline import report
from veilmq.pipeline.report import Analysis, figures, page
from veilmq.pipeline.report.drawing import ROLES, Drawing, span
from veilmq.testing.for_each import for_each

STRANGE = "<script>alert(1)</script>"


class Seen(HTMLParser):
    """What a page refers to, and whether its tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.figures = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br"}:
            self.open.append(tag)
        self.figures += tag == "svg"
        self.links += [str(value) for name, value in attrs if name in {"src", "href", "xlink:href"}]
        self.ids += [str(value) for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


@pytest.fixture(scope="module")
def found(spark: Any) -> SimpleNamespace:
    """All results, as plain frames."""
    how: dict[str, Any] = {"messages": 600, "lease": 120.0, "crashes_per_second": 1 / 2_000}
    workloads = [
        Workload("media", lognormal(2, 0.5), "icon", **how),
        Workload("media", lognormal(250, 0.5), "video", **how),
        Workload(STRANGE, pareto(1.5, 1.4), "mail & $\\more$", 600, gives_up=20.0),
        Workload("billing", bimodal(2, 60, 0.2), None, 600, lease=60, extend=30, crashes_per_second=1 / 800),
        Workload("rare", lognormal(5, 1), None, 10),
    ]
    analysis = Analysis(frame(spark, history(workloads, seed=1)))
    names = ("timeouts", "quantiles", "curve", "redelivery", "split", "health", "helped")
    return SimpleNamespace(**{name: getattr(analysis, name) for name in names})


def test_a_plan_that_changed_is_judged_on_the_page(spark: Any, found: Any) -> None:
    """Before and since, with the interval; of a history without plans nothing is said."""
    row = verdict(1, lambda hour: 0.1, lambda hour: 0.02)
    strange = row | {"queue": STRANGE, "verdict": "too few", "cost_before": None, "cost_after": None}
    text = page(
        SimpleNamespace(**vars(found) | {"helped": pd.DataFrame([row, strange])}), source="s", offsets=(0, 1), now=0
    )
    seen = Seen(text)
    assert seen.titles[0] == "Did it help?"
    assert f"a message cost {row['cost_before']:.3g}; " in text
    assert f'<span class="new">{row["cost_after"]:.3g} since: better</span>' in text
    assert f"95 % sure: {row['change_low']:+.3g} to {row['change_high']:+.3g}; 24 matched hours" in text
    assert STRANGE not in text
    assert found.helped.empty


@pytest.fixture(scope="module")
def text(found: Any) -> str:
    return page(found, source="http://127.0.0.1:9325/?a=1&b=2", offsets=(0, 12_345), now=1_767_225_600.0)


def test_it_answers_six_questions(text: str) -> None:
    seen = Seen(text)
    assert seen.open == []
    assert seen.titles == [
        "How long does work take?",
        "How often does work outlive its lease?",
        "What does a faster recovery cost?",
        "What would another timeout do?",
        "Which types belong in queues of their own?",
        "What happened when?",
    ]
    assert seen.figures == 5
    assert "12,345 events of http://127.0.0.1:9325/?a=1&amp;b=2. 2026-01-01 00:00 UTC" in text


def test_it_needs_nothing_else(text: str) -> None:
    seen = Seen(text)
    assert [link for link in seen.links if not link.startswith("#")] == []
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert {link.removeprefix("#") for link in seen.links} <= set(seen.ids)
    assert len(seen.ids) == len(set(seen.ids))


def test_colours_are_the_pages(text: str) -> None:
    for role, stand_in in ROLES.items():
        assert stand_in not in text
        assert text.count(f"--{role}:") == 2, "once for light and once for dark"
        assert f"var(--{role})" in text or role.startswith("series")


def test_names_are_escaped(text: str) -> None:
    assert STRANGE not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; · mail &amp; $\\more$" in text, "and no formula is read"


def test_today_and_the_recommended_lease_are_marked(text: str, found: Any) -> None:
    row = found.timeouts[found.timeouts["type"].eq("video")].iloc[0]
    assert f"today {span(120)}" in text
    assert f"best {span(row.timeout_s)}" in text
    strange = found.timeouts[found.timeouts.queue.eq(STRANGE)].iloc[0]
    assert f"at least {span(strange.timeout_at_least_s)}" in text
    split = found.split[found.split.parts > 1].iloc[0]
    assert f"one for all {span(split.together_timeout_s)}" in text
    saved = [figures.percent(split[name]) for name in ("gain", "gain_low", "gain_high")]
    assert "saves {} of the cost, 95 % sure: {} to {}".format(*saved) in text
    spans = [span(split[f"{name}{end}_s"]) for name in ("median", "timeout") for end in ("", "_low", "_high")]
    told = ["icon", f"{split.attempts:.3g}", *spans, *(f"{100 * split[name]:.1f} %" for name in ("gain", "gain_low"))]
    assert "".join(f"<td>{each}</td>" for each in told) in text, "a table has what the figure has no room for"


def test_a_card_begins_with_what_needs_no_change_of_code(text: str, found: Any) -> None:
    """With the interval, and of how many messages it is."""
    rows = found.timeouts
    video, billing = rows[rows["type"].eq("video")].iloc[0], rows[rows.queue.eq("billing")].iloc[0]
    assert f'<span class="from">today {span(120)}</span>; <span class="new">set {span(video.timeout_s)}</span>' in text
    assert f"95 % sure: {span(video.timeout_low_s)} to {span(video.timeout_high_s)}; from 600 messages" in text
    assert f'today {span(60)}, extended</span>; <span class="new">extend every {span(billing.renew_after_s)}' in text
    for row, told in ((billing, "95 % sure: {}; "), (video, f"extend, every {span(video.renew_after_s)} ({{}}): ")):
        assert told.format(f"{span(row.renew_after_low_s)} to {span(row.renew_after_high_s)}") in text


def test_at_least_and_keep_have_their_interval_too(found: Any) -> None:
    rows = found.timeouts
    strange, video = rows[rows.queue.eq(STRANGE)].iloc[0].copy(), rows[rows["type"].eq("video")].iloc[0].copy()
    assert 1 < strange.timeout_low_s < strange.timeout_at_least_s
    strange["today_lease_s"] = 1.0
    video["today_cost"] = video.timeout_cost
    for row, told in (
        (strange, f"set at least {span(strange.timeout_at_least_s)}"),
        (strange, f"95 % sure: at least {span(strange.timeout_low_s)}; longer work was not seen; from 600 messages"),
        (video, f"keep {span(120)}"),
        (video, f"the best, 95 % sure: {span(video.timeout_low_s)} to {span(video.timeout_high_s)}; from 600 messages"),
    ):
        frame = pd.DataFrame([row])
        assert told in page(SimpleNamespace(**vars(found) | {"timeouts": frame}), source="s", offsets=(0, 1), now=0)


def test_a_pointer_is_told_values(text: str, found: Any) -> None:
    point = found.redelivery[found.redelivery["type"].eq("video")].iloc[20]
    assert f"<title>timeout {span(point.timeout_s)}: {figures.percent(point.redelivered)} are started twice (" in text
    for figure in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', figure).groups())  # type: ignore[union-attr]
        for x, y, wide, high in re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)" fill', figure):
            assert 0 <= float(x) <= float(x) + float(wide) <= width
            assert 0 <= float(y) <= float(y) + float(high) <= height


def test_a_filter_finds_cards_panels_and_rows(text: str) -> None:
    assert '<input type="search" id="filter"' in text
    for element in ('<div class="card"', '<g id="redelivery-panel-', '<g id="survival-panel-', "<tr"):
        assert re.search(re.escape(element) + r'[^>]* data-name="media · video"', text), element


def test_a_slider_begins_at_what_is_recommended_and_says_so_without_a_script(text: str, found: Any) -> None:
    rows = found.timeouts
    video = rows[rows["type"].eq("video")].iloc[0]
    slider = re.search(r'<div class="slider" data-name="media · video">.*?</div>', text)
    assert slider is not None
    assert f"<output>{span(video.timeout_s)} (recommended)</output>" in slider[0]
    places = json.loads(html.unescape(re.search('data-places="(.*?)"', slider[0])[1]))  # type: ignore[index]
    start = int(re.search('value="(.*?)"', slider[0])[1])  # type: ignore[index]
    assert places[start][0] == f"{span(video.timeout_s)} (recommended)"
    assert "From 600 messages." in slider[0]
    assert sum("today" in place[0] for place in places) == 1
    twice = [float(place[1].partition(" ")[0]) for place in places]
    assert twice == sorted(twice, reverse=True), "a longer timeout starts less work twice"
    assert 'data-name="billing"' not in "".join(re.findall(r'<div class="slider".*?>', text)), "its workers extend"


def test_a_timeout_beyond_the_grid_gives_no_place_its_name(found: Any) -> None:
    """Today's may be longer than all that was seen."""
    rows = found.redelivery[found.redelivery["type"].eq("video")]
    longest = float(rows.timeout_s.max())
    places, start = report._places(rows, {"today": 10 * longest})
    assert start == len(places) - 1
    assert not any("today" in place[0] for place in places)


@pytest.mark.slow
def test_sliders_move_in_a_browser_without_a_network(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(text)
    with chromium() as browser:
        tab = Tab(browser, "file://")
        tab.page.goto(f"file://{tmp_path}/report.html")
        slider = tab.page.locator('.slider[data-name="media · video"]')
        bar, told = slider.locator("input"), slider.locator("output")
        assert "(recommended)" in told.first.inner_text()
        before = told.nth(1).inner_text()
        bar.fill("0")
        places = json.loads(bar.get_attribute("data-places") or "")
        assert told.all_inner_texts() == places[0]
        assert bar.get_attribute("aria-valuetext") == places[0][0]
        assert told.nth(1).inner_text() != before
        tab.page.fill("#filter", "icon")
        assert not slider.is_visible()
        tab.close()


def test_panels_of_a_row_have_one_scale() -> None:
    panels = Drawing("x", 2, 3).panels
    figures._on_one_scale([(panel, 1.0 + at, 10.0 * (at + 1)) for at, panel in enumerate(panels)])
    assert [panel.get_xlim() for panel in panels] == [(1, 30)] * 3 + [(4, 60)] * 3


def test_a_history_that_says_nothing_says_so(found: Any) -> None:
    nothing = SimpleNamespace(**{name: rows.iloc[:0] for name, rows in vars(found).items()})
    assert "Too few leases" in page(nothing, source="x", offsets=(0, 0), now=0.0)
    few = SimpleNamespace(**(vars(found) | {"timeouts": found.timeouts[found.timeouts.queue.eq("rare")]}))
    assert "Too few leases" in page(few, source="x", offsets=(0, 0), now=0.0)


@for_each(
    ("seconds", "said"),
    [
        (0.0123, "12.3 ms"),
        (1, "1 s"),
        (119, "119 s"),
        (600, "10 min"),
        (7_200, "2 h"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_times_are_said_as_people_say_them(seconds: float | None, said: str) -> None:
    assert span(seconds) == said


def test_the_split_of_a_queue_is_drawn_from_that_queues_times() -> None:
    """Not from those of one of the same name in another region; and a median beyond what was seen has its bar."""
    named = {"account": "0", "queue": "q"}
    times = {"a": (2.0, 4.0, None), "b": (60.0, 90.0, None), "c": (None, None, 700.0)}
    quantiles = pd.DataFrame(
        named | {"region": region, "type": kind, "p50_s": p50, "p99_s": p99, "at_least_s": at_least, "reach_s": 900.0}
        for region, factor in (("far", 0.1), ("near", 1.0))
        for kind, (p50, p99, at_least) in (
            (kind, [None if each is None else each * factor for each in row]) for kind, row in times.items()
        )
    )
    part = named | {"region": "near", "parts": 3, "timeout_s": 800.0, "together_timeout_s": 900.0}
    part |= {"gain": 0.3, "gain_low": 0.2, "gain_high": 0.4}
    parts = pd.DataFrame([part | {"part": number, "types": [kind]} for number, kind in enumerate(times)])
    drawn = figures.split(parts, quantiles)
    assert drawn == figures.split(parts, quantiles[quantiles.region == "near"])
    assert drawn != figures.split(parts, quantiles[quantiles.region == "far"].assign(region="near"))
    moved = quantiles.assign(at_least_s=quantiles.at_least_s * 0.5)
    assert drawn != figures.split(parts, moved)


def test_of_nothing_it_says_that_it_is_too_little() -> None:
    """And not that today's leases cost what the best would."""
    rows = pd.DataFrame(columns=["account", "region", "queue", "type", "attempts", "basis", "today_cost"])
    found: Any = SimpleNamespace(timeouts=rows, quantiles=rows, helped=rows)
    text = page(found, source="x", offsets=(0, 1), now=0.0)
    assert Seen(text).titles == ["Too few leases"]


def test_queues_of_one_name_are_told_apart() -> None:
    """By what differs, and nobody else is."""
    here, there = "000000000000", "111111111111"
    rows = pd.DataFrame(
        {"account": account, "region": region, "queue": queue, "type": kind, "basis": "curve", "attempts": 50.0,
         "today_cost": 1.0, "reach_s": 9.0, "today_lease_s": 30.0, "timeout_s": 10.0, "timeout_at_least_s": None}
        for account, region, queue, kind in (
            (here, "eu-west-1", "orders", "t"), (here, "us-east-1", "orders", "t"), (here, "eu-west-1", "mail", None),
            (there, "eu-west-1", "mail", None), (here, "eu-west-1", "alone", "t"),
        )
    )  # fmt: skip
    labels = [figures.label_of(row) for _, row in figures.with_places(rows, rows).iterrows()]
    assert labels == [
        "orders · t (eu-west-1)", "orders · t (us-east-1)", f"mail ({here})", f"mail ({there})", "alone · t",
    ]  # fmt: skip
    points = rows.assign(timeout_s=5.0, redelivered=0.1, low=0.05, high=0.2, recovery_s=9.0, within_reach=True)
    drawn = figures.redelivery(points, rows)
    assert all(drawn.count(each) == 1 for each in (">us-east-1<", f">{there}<"))


@pytest.mark.parametrize(("other", "head"), [("eu-west-1", ["region", "queue"]), ("us-east-1", ["queue"])])
def test_a_table_says_the_region_where_there_are_several(
    capsys: pytest.CaptureFixture[str], other: str, head: list[str]
) -> None:
    asked = Asked(None, None, None, None, None, None, None, "parquet", False, None, None)
    shared = {"account": "000000000000", "queue": "orders", "count": 1}
    show(asked, [shared | {"region": region} for region in ("us-east-1", other)], ("queue", "count"))
    assert re.findall("account|region|queue", capsys.readouterr().out) == head


def test_a_long_name_does_not_push_panels_apart() -> None:
    """A queue's name may have 80 characters."""
    rows = pd.DataFrame(
        {"account": "0", "region": "r", "queue": name, "type": "t", "basis": "curve", "attempts": 50.0,
         "today_cost": 1.0, "reach_s": 9.0, "today_lease_s": 30.0, "timeout_s": 10.0, "timeout_at_least_s": None}
        for name in ("short", "n" * 80)
    )  # fmt: skip
    points = rows.assign(timeout_s=5.0, redelivered=0.1, low=0.05, high=0.2, recovery_s=9.0, within_reach=True)
    drawn = figures.redelivery(points, rows)
    width = float(re.search(r'viewBox="0 0 (\S+)', drawn)[1])  # type: ignore[index]
    short = figures.redelivery(points.replace("n" * 80, "n"), rows.replace("n" * 80, "n"))
    assert width == float(re.search(r'viewBox="0 0 (\S+)', short)[1])  # type: ignore[index]
    assert "n" * 80 not in re.sub("<[^>]*>", "", drawn), "the filter knows the whole name, and nobody sees it"
    assert f"{'n' * 13}…{'n' * 9} · t" in drawn
