"""Chromium at the console: every error, and every request beyond the server, is kept and fails the test at its end."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

AXE = Path(__file__).parents[2] / ".tools" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
SERIOUS = {"serious", "critical"}
_DEADLINE_MS = 20_000


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """Debian's Chromium, without a screen. flags: further ones."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "the console's tests need Chromium: run `make setup-clients`, or `apt-get install chromium`"
    assert AXE.exists(), "the console's tests need axe-core: run `make setup-clients`"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[*FLAGS, *flags])
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
        self.page.on("dialog", self._asks)

    def _told(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.faults.append(f"{message.type}: {message.text}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(f"{self.origin}/"):
            self.faults.append(f"request beyond the server: {request.url}")

    def _asks(self, dialog: Any) -> None:
        self.faults.append(f"a script of somebody else's ran: {dialog.message}")
        dialog.dismiss()

    def open(self, path: str) -> None:
        answer = self.page.goto(self.origin + path)
        assert answer is not None
        assert answer.status == 200, f"{path}: {answer.status}"

    def sign_in(self, token: str) -> None:
        self.open("/console/sign-in")
        self.page.fill("input[name=secret]", token)
        self.page.click("button:text('Sign in')")
        assert self.page.url == f"{self.origin}/console/"

    def look_for_news(self) -> None:
        """At once, and not when it is time; call `page.clock.install()` before the page is opened."""
        self.page.clock.fast_forward(3_000)

    def close(self, *expected: str) -> None:
        """expected: parts of faults that the test has made itself."""
        self.context.close()
        assert [fault for fault in self.faults if not any(part in fault for part in expected)] == []


@contextmanager
def proxy(target: str) -> Iterator[Any]:
    """A reverse proxy that hands an answer on when it has all of it. While `is_down` is set it answers 502 itself.
    `passed` has the target and body of each request, and the status of its answer."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, headers, content = 502, [("content-type", "text/html")], b"<h1>Bad gateway</h1>"
            if not server.is_down:
                headers_in = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
                upstream = HTTPConnection(urlsplit(target).netloc, timeout=30)
                upstream.request(self.command, self.path, body, headers_in)
                answer = upstream.getresponse()
                status, headers, content = answer.status, answer.getheaders(), answer.read()
                upstream.close()
                server.passed.append((self.path, body.decode("latin-1"), status))
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                    self.send_header(name, value)
            if status != HTTPStatus.NOT_MODIFIED:
                self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.is_down, server.passed = False, []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def barriers(tab: Tab) -> list[str]:
    """What axe-core finds on this page that keeps people from using it. The tab must do without our policy."""
    tab.page.add_script_tag(path=str(AXE))
    found = tab.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{tab.page.url}: {each['id']}: {each['help']}: {[node['html'] for node in each['nodes']][:3]}"
        for each in found["violations"]
        if each["impact"] in SERIOUS
    ]
