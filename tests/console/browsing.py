"""Chromium at the console: every error, and every request beyond the server, is kept and fails the test at its end."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

AXE = Path(__file__).parents[2] / ".tools" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
SERIOUS = {"serious", "critical"}
_DEADLINE_MS = 20_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without a screen."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "the console's tests need Chromium: run `make setup-clients`, or `apt-get install chromium`"
    assert AXE.exists(), "the console's tests need axe-core: run `make setup-clients`"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """One page of the browser."""

    def __init__(self, browser: Browser, origin: str, **context: Any) -> None:
        self.origin = origin
        self.faults: list[str] = []
        self.context = browser.new_context(**{"viewport": {"width": 1_280, "height": 800}} | context)
        self.context.set_default_timeout(_DEADLINE_MS)
        self.page: Page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        self.page.on("console", self._told)
        self.page.on("request", self._asked)

    def _told(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.faults.append(f"{message.type}: {message.text}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(f"{self.origin}/"):
            self.faults.append(f"request beyond the server: {request.url}")

    def open(self, path: str) -> None:
        answer = self.page.goto(self.origin + path)
        assert answer is not None
        assert answer.status == 200, f"{path}: {answer.status}"

    def sign_in(self, token: str) -> None:
        self.open("/console/sign-in")
        self.page.fill("input[name=secret]", token)
        self.page.click("button:text('Sign in')")
        assert self.page.url == f"{self.origin}/console/"

    def close(self) -> None:
        self.context.close()
        assert self.faults == []


def barriers(tab: Tab) -> list[str]:
    """What axe-core finds on this page that keeps people from using it. The tab must do without our policy."""
    tab.page.add_script_tag(path=str(AXE))
    found = tab.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{tab.page.url}: {each['id']}: {each['help']}: {[node['html'] for node in each['nodes']][:3]}"
        for each in found["violations"]
        if each["impact"] in SERIOUS
    ]
