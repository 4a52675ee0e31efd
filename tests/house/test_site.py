"""The site of the documentation: strictly built, whole, without another host, and its reference is complete.

Strategy: the site is built once, as `make docs` does. What pages of Markdown say is checked on Markdown by other tests
here; these look at what came out: every link and every anchor of every page leads somewhere, and nothing that a browser
loads by itself is elsewhere.
"""

import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from tests.console.browsing import chromium
from tests.house.test_cli_page import COMMANDS
from tests.house.test_docs import anchors, tool

from veilmq.model.errors import leaves
from veilmq.server.config.settings import FIELDS
from veilmq.testing.for_each import for_each

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("site")


class Page(HTMLParser):
    """What a page of HTML has: anchors, links that a reader may follow, and what a browser loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in {"canonical", "next", "prev"}:
            self.loads.append(values.get("href", ""))
        elif "src" in values:
            self.loads.append(values["src"])


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def broken(found: dict[Path, Page]) -> list[tuple[str, str]]:
    """(page, link) of each link or load that leads nowhere in the site, or loads from another host."""
    wrong = []
    for path, page in found.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    wrong.append((path.name, link))
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_there = target.is_file() and (
                not parts.fragment or target not in found or unquote(parts.fragment) in found[target].anchors
            )
            if not is_there and not (parts.path == "" and parts.fragment == ""):
                wrong.append((path.name, link))
    return wrong


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site") / "site"
    tool("build").build(place)
    return place.resolve()


@pytest.fixture(scope="module")
def found(site: Path) -> dict[Path, Page]:
    return pages(site)


def test_every_link_of_the_site_leads_somewhere_and_nothing_is_loaded_from_elsewhere(
    site: Path, found: dict[Path, Page]
) -> None:
    assert len(found) > 80
    assert broken(found) == []
    for name in ("deploy/systemd/veilmq.socket", "deploy/systemd/veilmq.sysusers", "requirements/run.txt"):
        assert "too much to be shown" not in (site / "files" / f"{name}.html").read_text()
        assert (site / "files" / name).read_bytes() == (ROOT / name).read_bytes()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)'\"]*", styles) == []


def test_what_is_broken_on_the_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="here">A</h1><a href="#here">a</a><a href="b.html#there">b</a><a href="https://example.org">c</a>'
        '<a href="b.html#gone">d</a><a href="c.html">e</a>'
        '<script src="https://example.org/x.js"></script><img src="x.png">'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    assert {link for _, link in broken(pages(tmp_path))} == {
        "b.html#gone", "c.html", "https://example.org/x.js", "x.png",
    }  # fmt: skip


def test_every_page_of_markdown_is_there_with_its_anchors(site: Path, found: dict[Path, Page]) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        path = site / page.relative_to(ROOT / "docs").as_posix().replace("README.md", "index.md")
        assert anchors(page) <= found[path.with_suffix(".html")].anchors, page.name


def test_every_page_can_be_searched_and_is_in_the_navigation(site: Path, found: dict[Path, Page]) -> None:
    index = json.loads((site / "search.json").read_text())
    texts = {item["location"].partition("#")[0] for item in index["items"] if item["text"] or item["title"]}
    shown = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    wanted = {page for page in shown if page != "404.html" and not page.startswith("files/")}
    assert wanted <= texts
    linked = {link.removeprefix("./") for link in found[site / "index.html"].links}
    assert wanted - linked == set()


def test_the_reference_lists_all_that_the_code_has() -> None:
    made = tool("reference").pages()
    headings = set(re.findall(r"^## veilmq (.+)$", made["commands"], re.M))
    assert headings == {" ".join(words) for words, command in COMMANDS.items() if not command.hidden}
    shown = {
        name for command in COMMANDS.values() if not command.hidden for each in command.params for name in each.opts
    }
    assert (
        sorted(name for name in shown if not re.search(rf"`(?:[^`]*, )?{re.escape(name)}[ `,]", made["commands"])) == []
    )
    assert set(re.findall(r"^\| `[^`]+` \| `[^`]+` \| `(\w+)` \|", made["settings"], re.M)) == set(FIELDS)
    assert {kind.__name__ for kind in leaves()} <= set(re.findall(r"^\| `(\w+)` \|", made["errors"], re.M))


@for_each(
    ("text", "there"),
    [
        ("# A `b`, and c!\n\n## A `b`, and c!\n", ["# A `b`, and c! {#a-b-and-c}", "## A `b`, and c! {#a-b-and-c-1}"]),
        ("1. one\n\n   | a |\n   |---|\n   | `x\\|y` |\n\n   more\n2. two\n", ["<code>x|y</code></td>", "<p>more</p>"]),
        ("text\n- one\n  - two\n", ["<p>text</p>", "<ul>\n<li>one\n<ul>\n<li>two</li>"]),
        ("[a](cluster.md#x) [b](../README.md) [c](https://example.org)\n", [
            'href="../cluster.html#x"', 'href="../about/readme.html"', 'href="https://example.org"']),
        ("    indented\n", ["```text\nindented\n```"]),
        ("````md\n```\ninner\n```\n````\n", ["````md\n```\ninner\n```\n````"]),
    ],
)  # fmt: skip
def test_a_page_is_rendered_as_code_hosts_show_it(text: str, there: list[str], tmp_path: Path) -> None:
    rendered = tool("build").Site(tmp_path).render(text, "docs/some.md", "below/some.md")
    assert [part for part in there if part not in rendered] == []


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Any]:
    """A tab of Chromium at the simulator's page, from the file; what is not a file is remembered as `elsewhere`."""
    with chromium() as browser:
        tab: Any = browser.new_page()
        tab.elsewhere = []
        tab.on("request", lambda request: request.url.startswith("file:") or tab.elsewhere.append(request.url))
        tab.on("pageerror", lambda error: tab.elsewhere.append(str(error)))
        tab.goto((site / "lease-simulator.html").as_uri())
        yield tab


@pytest.mark.slow
def test_a_page_from_a_file_is_searched_without_another_host(page: Any) -> None:
    page.keyboard.press("Control+k")
    page.keyboard.type("quarantine")
    page.get_by_text("A message is damaged").first.wait_for(timeout=20_000)
    page.keyboard.press("Escape")
    assert page.elsewhere == []


def simulated(page: Any, **parameters: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate("given => leaseSimulator.simulate(given)", parameters)
    return found


@pytest.mark.slow
def test_the_simulators_numbers_are_those_of_closed_forms(page: Any) -> None:
    many = {"messages": 40_000, "receivesMax": 1_000_000}
    work, rate, lease = 20.0, 60 / 3600, 30.0
    found = simulated(page, law="fixed", median=work, crashesPerHour=60, timeout=lease, **many)
    assert found["receives"] == pytest.approx(math.exp(rate * work), rel=0.01)
    crashed = math.exp(-rate * work)
    assert found["recovery"]["mean"] == pytest.approx(lease - (1 / rate - work * crashed / (1 - crashed)), rel=0.01)
    assert (found["duplicates"], found["dead"]) == (0, 0)

    mean = 20.0
    found = simulated(page, law="exponential", median=mean * math.log(2), crashesPerHour=0, anew=True, **many)
    assert found["duplicates"] / 100 == pytest.approx(1 / (math.exp(lease / mean) - 1), rel=0.02)

    found = simulated(page, law="fixed", median=3_000, crashesPerHour=0.5, extend=True, every=15, **many)
    assert found["recovery"]["mean"] == pytest.approx(lease - 15 / 2, rel=0.01)
    assert found["recovery"]["max"] <= lease
    assert found["duplicates"] == 0

    # Work that is longer than its lease each time never ends, and is red once a receive.
    found = simulated(page, law="fixed", median=31, crashesPerHour=0, receivesMax=7, messages=100)
    assert (found["dead"], found["receives"], found["duplicates"]) == (100, 7, 600)


@pytest.mark.slow
def test_the_simulators_page_shows_what_is_set(page: Any) -> None:
    row = page.locator("#simulator tr", has_text="still worked")
    before = row.inner_text()
    assert float(re.findall(r"([\d.]+) in 100", before)[0]) > 100
    page.check("#simulator-extend")
    assert "0.0 in 100 messages" in row.inner_text()
    assert page.locator("#simulator svg").count() == 2
    page.fill("#simulator-timeout", "")
    assert "in 100 messages" in row.inner_text(), "an empty field stands for the least"
    assert page.elsewhere == []
