"""The console in Chromium: each page and act once; by keyboard, without the script, on a narrow screen."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator
from tests.admin import server as admin
from tests.console.browsing import Tab, barriers, chromium, proxy
from tests.console.conftest import CONSOLE, QUEUES, Api, Clustered
from tests.console.hostile import HOSTILE
from tests.console.test_timeout import live
from tests.support.ports import kept_ports

pytestmark = pytest.mark.slow
ORDERS, LANE = f"{CONSOLE}/orders", f"{CONSOLE}/lane.fifo"
WIDE, NARROW = {"width": 1_280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, server: Any) -> Iterator[Tab]:
    """Signed in; it fails at its end if a script failed or asked another server."""
    tab = Tab(browser, server.url)
    tab.sign_in(admin.TOKEN)
    yield tab
    tab.close()


def receive(api: Api, name: str) -> str:
    agent = {"user-agent": f"veilmq/0.1 ({name})"}
    got = api.client.post(f"{QUEUES}/orders/receive", json={}, headers=agent).json()["messages"]
    return str(got[0]["handle"])


@pytest.fixture
def twice(api: Api) -> str:
    """A message that two workers work on: the first one's lease ran out, and its delete was refused."""
    api.create("dead")
    api.create("orders", redrive={"target": "dead", "receive_count_max": 5}, visibility_timeout_us=30_000_000)
    for number in range(3):
        api.send("dead", f"dead {number}")
    message = api.send("orders", '{"order": 9007199254740993, "note": "<img src=x onerror=alert(1)>"}', type="order")
    first = receive(api, "work-1; pid 70")
    api.create("lane.fifo", fifo=True, content_deduplication=True)
    for number in range(3):
        api.send("lane.fifo", str(number), group="eu", deduplication_id=f"eu-{number}")
    api.act("lane.fifo", "receive", lease_us=3_600_000_000)
    api.later(31)
    receive(api, "work-2; pid 80")
    api.later(9)
    api.client.post(f"{QUEUES}/orders/delete", json={"handles": [first]})
    return message


PAGES = [
    "/console/", "/console/?prefix=ord", ORDERS, f"{ORDERS}?state=hidden", f"{ORDERS}/send", f"{ORDERS}/purge",
    f"{ORDERS}/move", f"{ORDERS}/settings", "/console/messages/TWICE", "/console/topics", "/console/server",
    f"{ORDERS}/job?type=order", "/console/jobs", "/console/workers", "/console/failures", "/console/accounts",
    f"{ORDERS}/past?at=20+s&until=now", LANE,
    "/console/find?q=eu-1", "/console/cluster", "/console/cluster/handover?to=two",
]  # fmt: skip


def test_nothing_on_a_page_keeps_people_from_using_it(
    browser: Browser, server: Any, twice: str, request: pytest.FixtureRequest
) -> None:
    """In the light theme; with --shots in both."""
    server.cluster = Clustered()
    shots = request.config.getoption("--shots", None)
    found = []
    for theme in ("light",) if shots is None else ("light", "dark"):
        tab = Tab(browser, server.url, bypass_csp=True, color_scheme=theme)
        tab.open("/console/sign-in")
        found += barriers(tab)
        tab.sign_in(admin.TOKEN)
        for path in PAGES:
            tab.open(path.replace("TWICE", twice))
            found += barriers(tab)
        tab.close()
    assert found == []


def test_a_hand_over_is_confirmed(tab: Tab, server: Any) -> None:
    server.cluster = cluster = Clustered()
    page = tab.page
    tab.open("/console/")
    page.click("nav >> text=Cluster")
    assert page.inner_text("h1") == "Cluster"
    page.click("text=Hand over to it…")
    assert cluster.asked == []
    page.click("button:text('Hand over to <two>')")
    assert "The owner was asked to hand over to <two>." in page.inner_text("main")
    assert cluster.asked == ["<two>"]


def test_why_twice_is_three_clicks_from_the_start(tab: Tab, twice: str) -> None:
    page = tab.page
    tab.open("/console/")
    page.click("text=orders")
    page.click("text=in flight")
    page.click(f"text={twice}")
    story = page.inner_text(".story")
    assert story.startswith("Being processed again: work-1 pid 70's lease of 30 s ended at ")
    assert "work-2 pid 80 has it until " in story
    assert page.locator("svg .mark.refused").count() == 1
    page.click("text=Show the body")
    assert '"order": 9007199254740993' in page.inner_text("pre")
    assert page.locator("img").count() == 0
    with page.expect_download() as download:
        page.click("text=Download")
    assert download.value.suggested_filename == f"message-{twice}.bin"


def test_figures_refresh_until_paused(tab: Tab, api: Api, twice: str) -> None:
    page = tab.page
    tab.open(ORDERS)
    visible = page.locator("[data-live=visible]")
    assert visible.inner_text() == "0"
    api.send("orders")
    page.wait_for_selector("[data-live=visible]:text-is('1')")
    page.click("text=Pause")
    page.wait_for_selector("text=Go on")


def test_a_worker_works_while_somebody_looks(tab: Tab, api: Api, twice: str) -> None:
    page = tab.page
    tab.open("/console/")
    page.click("nav >> text=Workers")
    page.click("tr:has-text('work-2 pid 80') summary")
    assert page.inner_text("tr:has-text('work-2 pid 80') .held .id") == twice
    seen = page.get_attribute("tr:has-text('work-2 pid 80') time", "datetime")
    api.send("orders")
    receive(api, "work-2; pid 80")
    page.wait_for_selector("tr:has-text('work-2 pid 80') summary:has-text('2')")
    quiet = page.inner_text(".as-of time")
    page.wait_for_function("before => document.querySelector('.as-of time').textContent > before", arg=quiet)
    api.later(31)
    page.wait_for_selector("tr:has-text('work-2 pid 80') td:nth-child(5) time:text-is('–')")
    assert page.get_attribute("tr:has-text('work-2 pid 80') time", "datetime") != seen
    page.fill("input[name=queue]", "dead")
    page.click("button:text('Show')")
    assert page.inner_text(".empty") == "No worker matches."

    # A long user agent, as SDKs have them, the longest name of a queue, group and type leave room for the figures.
    name, agent = "q" * 256, "Boto3/1.43.117" + " Botocore/1.43.117" * 10 + " ua/2.1 md/arch#x86_64"
    api.create(name)
    message = api.send(name)
    api.client.post(f"{QUEUES}/{name}/receive", json={"lease_us": 60_000_000}, headers={"user-agent": agent})
    api.create("long.fifo", fifo=True, content_deduplication=True)
    api.send("long.fifo", group="g" * 128, type="t" * 256)
    counted = {"act": "move", "queue": "orders", "destination": name, "dry_run": True}
    assert api.client.post("/api/v1/jobs", json=counted).status_code == 201
    cases = [("/console/jobs", name), ("/console/workers", "Boto3"), ("/console/", name),
             (f"/console/messages/{message}", "Boto3"),
             (f"{CONSOLE}/long.fifo", "g" * 128), (f"{CONSOLE}/long.fifo/past?at=1+s", "t" * 256)]  # fmt: skip
    api.later(2)  # so that the queue was there a second ago
    for path, text in cases:
        tab.open(path)
        table = page.locator(".scroll:has(table)", has_text=text)
        assert table.evaluate("each => each.scrollWidth <= each.clientWidth"), path
        assert "md/arch" not in table.inner_text(), path
    tab.open(f"{ORDERS}/settings")
    page.fill("textarea[name=tags]", f"name={'v' * 200}")
    page.click("button:text('Show what changes')")
    assert page.eval_on_selector(".scroll", "each => each.scrollWidth <= each.clientWidth"), "it is confirmed in full"


def test_the_start_page_shows_how_fast_queues_are(tab: Tab, api: Api, twice: str) -> None:
    page = tab.page
    tab.open("/console/")
    assert page.get_attribute("tr:has-text('orders') .spark", "aria-label") == (
        "Sent and deleted in each of the last 60 minutes: at most 1"
    )
    cell = page.locator("[data-live='000000000000/us-east-1/orders:sent']")
    before = cell.inner_text()
    for _ in range(30):
        api.send("orders")
    page.wait_for_function(
        "([name, before]) => document.querySelector(name).textContent !== before",
        arg=["[data-live='000000000000/us-east-1/orders:sent']", before],
    )


def test_an_open_page_says_that_its_queue_is_gone_or_the_session_is_over(
    browser: Browser, server: Any, api: Api, twice: str
) -> None:
    tab = Tab(browser, server.url)
    tab.sign_in(admin.TOKEN)
    api.create("gone")
    tab.open(f"{CONSOLE}/gone")
    api.client.delete(f"{QUEUES}/gone")
    tab.page.wait_for_selector("[data-pause]:disabled:text-is('Not there any more')")
    tab.open(ORDERS)
    api.later(3_601)
    tab.page.wait_for_selector("text=Signed out: load the page again")
    tab.page.reload()
    tab.page.fill("input[name=secret]", admin.TOKEN)
    tab.page.click("button:text('Sign in')")
    assert tab.page.url == f"{server.url}{ORDERS}", "the view is kept"
    tab.close("401", "404")


@pytest.fixture
def port() -> Iterator[int]:
    with kept_ports(1) as (port,):
        yield port


def color(place: Locator) -> str:
    return str(place.evaluate("element => getComputedStyle(element).color"))


def test_a_page_outlives_its_server(browser: Browser, port: int, tmp_path: Path) -> None:
    """It says that the server does not answer, and goes on, still signed in, when it is back."""
    with admin.running(tmp_path / "data", port=port) as server:
        api = Api(server)
        api.create("orders")
        tab = Tab(browser, server.url)
        tab.sign_in(admin.TOKEN)
        tab.page.clock.install()
        tab.open(ORDERS)
        api.client.close()
    tab.look_for_news()
    tab.page.wait_for_selector("text=The server does not answer")
    figure = tab.page.locator("[data-live=visible]")
    assert figure.inner_text() == "0"
    assert color(figure) != color(tab.page.locator("h1")), "it is seen that the figure is old"
    with admin.running(tmp_path / "data", port=port) as server:
        api = Api(server)
        api.send("orders")
        tab.look_for_news()
        tab.page.wait_for_selector("[data-live=visible]:text-is('1')")
        assert tab.page.locator("[data-pause]").inner_text() == "Pause"
        assert color(tab.page.locator("[data-live=visible]")) == color(tab.page.locator("h1"))
        tab.page.click("text=Send…")
        assert tab.page.url == f"{server.url}{ORDERS}/send", "the session is still there"
        api.client.close()
        tab.close("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")


def test_behind_a_proxy_that_buffers(browser: Browser, server: Any, api: Api, twice: str) -> None:
    with proxy(server.url) as between:
        tab = Tab(browser, between.url)
        tab.sign_in(admin.TOKEN)
        page = tab.page
        page.clock.install()
        tab.open(ORDERS)
        api.send("orders")
        tab.look_for_news()
        page.wait_for_selector("[data-live=visible]:text-is('1')")
        between.is_down = True
        tab.look_for_news()
        page.wait_for_selector("text=The server answers with error 502")
        between.is_down = False
        tab.look_for_news()
        page.wait_for_selector("[data-pause]:text-is('Pause')")
        page.click("text=Send…")
        page.fill("textarea", "typed")
        page.click("button:text('Send')")
        assert page.inner_text(".said") == "Sent to orders."
        tab.close("502")


def test_what_is_clicked_twice_acts_once(tab: Tab, api: Api, twice: str) -> None:
    page = tab.page
    sent = api.kinds().count("sent")
    tab.open(f"{ORDERS}/send")
    page.fill("textarea", "typed")
    page.dblclick("button:text('Send')")
    page.wait_for_selector("text=Sent to orders.")
    assert api.kinds().count("sent") == sent + 1
    tab.open(f"{CONSOLE}/dead/move")
    page.dblclick("button:text('Count them')")
    page.dblclick("button:text('Redrive 3 messages')")
    page.wait_for_selector("text=The job has begun.")
    tab.open(f"{ORDERS}/purge")
    page.dblclick("button:text('Delete')")
    page.wait_for_selector(".said:has-text('of orders.')")
    acts = [each for each in api.acts() if each in {"start_job", "purge"}]
    assert sorted(acts) == ["purge", "start_job", "start_job"], "one that counts, one that acts"


def test_the_second_of_two_editors_is_told(browser: Browser, server: Any, tab: Tab, api: Api, twice: str) -> None:
    other = Tab(browser, server.url)
    other.sign_in(admin.TOKEN)
    for each, typed in ((tab, "40 s"), (other, "50 s")):
        each.open(f"{ORDERS}/settings")
        each.page.fill("input[name=visibility_timeout_us]", typed)
        each.page.click("button:text('Show what changes')")
    api.later(1)
    tab.page.click("button:text('Change it')")
    assert tab.page.inner_text(".said") == "Changed: visibility timeout 40 s."
    other.page.click("button:text('Change it')")
    assert "someone else changed queue orders meanwhile" in other.page.inner_text("[role=alert]")
    assert api.kinds().count("queue_changed") == 1
    other.close("409")


def test_no_text_of_a_queue_runs(tab: Tab, api: Api) -> None:
    """Some of what test_hostile.py has all of: a browser reads markup in its own way."""
    api.create("orders")
    texts = [each for each in HOSTILE if "alert(1)" in each or "evil" in each][::8]
    ids = [api.send("orders", text, type=text[:256], attributes=[{"name": "a", "type": "String", "value": text}])
           for text in texts]  # fmt: skip
    tab.open(ORDERS)
    assert tab.page.locator("tbody tr").count() == len(texts) > 8
    for text, message in zip(texts, ids, strict=True):
        assert text[:40].strip() in tab.page.inner_text(f"tr:has-text('{message}')")
    tab.open(f"/console/messages/{ids[0]}")
    tab.page.click("text=Show the body")
    assert tab.page.inner_text("pre") == texts[0]
    assert tab.page.locator("main img, main svg image, main iframe, main script").count() == 0


def _acts(tab: Tab, api: Api) -> None:
    page = tab.page
    tab.open(ORDERS)
    page.click("text=Send…")
    page.fill("textarea", "typed")
    page.fill("input[name=type]", "t")
    page.click("button:text('Send')")
    assert page.inner_text(".said") == "Sent to orders."
    tab.open(f"{ORDERS}/send")
    page.click("button:text('Fill in')")
    assert (page.input_value("textarea[name=body]"), page.url.endswith("/send/fill")) == ("typed", True)
    tab.open(ORDERS)
    page.click("text=Change settings…")
    page.fill("input[name=visibility_timeout_us]", "45 s")
    page.click("button:text('Show what changes')")
    page.click("button:text('Change it')")
    assert page.inner_text(".said") == "Changed: visibility timeout 45 s."
    tab.open(f"{CONSOLE}/dead")
    page.click("text=Redrive…")
    page.fill("input[name=destination]", "orders")
    page.click("button:text('Count them')")
    page.click("button:text('Redrive 3 messages')")
    assert page.inner_text(".said") == "The job has begun."
    tab.open(ORDERS)
    page.select_option("select[name=age_us_min]", label="1 h")
    page.click("button:text('Filter')")
    assert "age_us_min=3600000000" in page.url
    page.click("text=Purge…")
    page.click("button:text('Delete')")
    assert "of orders." in page.inner_text(".said")
    page.click("button:text('Sign out')")
    assert page.url.endswith("/console/sign-in")
    assert {"sent", "queue_changed", "purged"} <= set(api.kinds())


def test_every_act_with_the_script(tab: Tab, api: Api, twice: str) -> None:
    _acts(tab, api)


def test_every_act_without_the_script(browser: Browser, server: Any, api: Api, twice: str) -> None:
    tab = Tab(browser, server.url, java_script_enabled=False)
    tab.sign_in(admin.TOKEN)
    _acts(tab, api)
    tab.close()


def test_what_another_timeout_would_do(browser: Browser, server: Any, api: Api) -> None:
    """The start page names the queue, unless somebody is typing there: then a load would take what was typed. With the
    script the slider's words follow at once; without it, the form's button asks for them."""
    api.create("orders", visibility_timeout_us=30_000_000)
    tab = Tab(browser, server.url, bypass_csp=True)
    tab.sign_in(admin.TOKEN)
    page = tab.page
    page.clock.install()
    tab.open("/console/")
    page.keyboard.press("/")
    page.keyboard.type("ord")
    live(api, [5, 10, 15, 20] * 8 + [50] * 8)
    for _ in range(2):
        with page.expect_response(lambda answer: "/console/news" in answer.url and answer.json()["over"]):
            tab.look_for_news()
    assert page.input_value("input[name=q]") == "ord"
    page.fill("input[name=q]", "")
    assert page.evaluate("document.activeElement.name") == "q", "nothing would be lost there"
    tab.look_for_news()
    page.click("text=its timeout of 30 s is too short")
    assert barriers(tab) == []
    assert not page.locator(".slider button").is_visible()
    tried, moves = page.locator(".tried"), page.locator("[data-moves]").first
    assert tried.inner_text().startswith("1 min 30 s: 0 % of the messages")
    before = moves.get_attribute("transform")
    page.focus("#step")
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    assert tried.inner_text().startswith("45 s: 20 % of the messages (")
    assert moves.get_attribute("transform") != before
    assert page.get_attribute("#step", "aria-valuetext") == "45 s"
    page.reload()
    assert tried.inner_text().startswith("45 s: "), "the address holds it"
    page.focus("#step")
    page.keyboard.press("ArrowRight")
    page.click("button:text('Set 1 min…')")
    page.click("button:text('Change it')")
    assert page.inner_text(".said") == "Changed: visibility timeout 1 min."
    tab.close()
    tab = Tab(browser, server.url, java_script_enabled=False)
    tab.sign_in(admin.TOKEN)
    tab.open(ORDERS)
    tab.page.focus("#step")
    tab.page.keyboard.press("Home")
    tab.page.click("button:text('Show')")
    assert tab.page.inner_text(".tried").startswith("1 s: 100 % of the messages")
    assert tab.page.locator(".slider button").is_visible()
    tab.close()


def test_by_keyboard_alone(browser: Browser, server: Any, twice: str) -> None:
    tab = Tab(browser, server.url)
    page = tab.page
    tab.open("/console/sign-in")
    page.keyboard.type(admin.TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("/")
    page.keyboard.type(twice)
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/console/messages/{twice}")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent").strip() == "Show the body":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "it is seen where the keyboard is"
    page.keyboard.press("Enter")
    page.wait_for_selector("pre")
    tab.close()


def test_a_page_in_a_frame_is_not_shown(browser: Browser, server: Any) -> None:
    tab = Tab(browser, server.url)
    tab.page.set_content(f'<iframe src="{server.url}/console/sign-in"></iframe>')
    tab.page.wait_for_timeout(500)
    assert any("frame-ancestors" in fault or "X-Frame-Options" in fault for fault in tab.faults), tab.faults
    tab.context.close()


def test_no_page_is_wider_than_the_screen(
    browser: Browser, server: Any, twice: str, request: pytest.FixtureRequest
) -> None:
    """With --shots at both widths and in both themes, with pictures; else at the narrow one."""
    server.cluster = Clustered()
    shots = request.config.getoption("--shots", None)
    looks = [(NARROW, "light")] if shots is None else [(w, t) for w in (WIDE, NARROW) for t in ("light", "dark")]
    wide = []
    for size, theme in looks:
        tab = Tab(browser, server.url, viewport=size, color_scheme=theme)
        tab.sign_in(admin.TOKEN)
        for path in PAGES:
            tab.open(path.replace("TWICE", twice))
            if tab.page.evaluate("document.documentElement.scrollWidth") > size["width"]:
                wide.append(f"{path} at {size['width']}")
            if shots is not None:
                name = path.replace("TWICE", "message").strip("/").replace("/", "-").replace("?", "-")
                tab.page.screenshot(path=Path(shots) / f"{name}-{size['width']}-{theme}.png", full_page=True)
        tab.close()
    assert wide == []
