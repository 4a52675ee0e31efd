"""Pages of another site in Chromium, and a development server with names: not one of their requests gets in.

Strategy: every name leads to this machine, as it would for the browser of somebody who published the ports, so what
Chromium sends goes to the server as it is. Each request would send a message that names it; at the end the queue has
the one message that was there before, received by nobody, and a proxy before the server saw each request refused.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from azure.storage.queue import AccountSasPermissions, ResourceTypes, generate_account_sas
from playwright.sync_api import Page
from tests.console.browsing import chromium, proxy
from tests.deploy.emulator_clients import AZURITE

from veilmq.testing.local import ServerProcess

pytestmark = pytest.mark.slow
ORDERS = "000000000000/orders"
LOOPBACK = ("localhost", "127.0.0.1")
HOSTS = ("elasticmq", "localhost.localstack.cloud", "sqs.us-east-1.amazonaws.com", *LOOPBACK)
"""Two of --dev-host, one of SQS itself, and loopback names, to which Chromium says Sec-Fetch-Site."""

FROM_THE_PAGE = """async ([way, url]) => {
    const element = (name, members) => document.body.append(Object.assign(document.createElement(name), members));
    const quiet = {mode: 'no-cors', referrerPolicy: 'no-referrer'};
    const ways = {
        image: () => element('img', {src: url}),
        script: () => element('script', {src: url}),
        frame: () => element('iframe', {src: url, referrerPolicy: 'no-referrer'}),
        style: () => element('link', {rel: 'stylesheet', href: url}),
        get: () => fetch(url, {...quiet, headers: {'Accept-Language': '*', 'Accept': 'application/json'}}),
        post: () => fetch(url, {...quiet, method: 'POST', body: new URLSearchParams(url.split('?')[1])}),
        cors: () => fetch(url),
        beacon: () => navigator.sendBeacon(url, 'x'),
    };
    await Promise.resolve(ways[way]()).catch(() => 0);
}"""
AWAY_FROM_THE_PAGE = """([way, url]) => {
    const [action, query] = url.split('?');
    const field = ([name, value]) => `<input name="${name}" value="${value}">`;
    const fields = [...new URLSearchParams(query)].map(field).join('');
    document.body.innerHTML = way == 'link' ? `<a href="${url.replaceAll('&', '&amp;')}" rel=noreferrer>x</a>`
        : `<form action="${action}" method="${way == 'form' ? 'get' : 'post'}">${fields}</form>`;
    way == 'link' ? document.querySelector('a').click() : document.forms[0].submit();
}"""
OF_ITS_OWN = """async ([way, url]) => {
    const headers = {'User-Agent': 'curl/8', 'Accept-Language': '*', 'Authorization': 'MNS a:b'};
    await fetch(url, {method: way, headers}).catch(() => 0);
}"""
WAYS = {
    FROM_THE_PAGE: ("image", "script", "frame", "style", "get", "post", "cors", "beacon"),
    AWAY_FROM_THE_PAGE: ("link", "form", "form by post"),
}


@pytest.fixture
def site() -> Iterator[str]:
    """Another site: a page, and /to?URL, which redirects there."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, target = self.path.partition("?")
            self.send_response(302 if path == "/to" else 200)
            self.send_header("location" if path == "/to" else "content-type", target or "text/html")
            self.end_headers()
            self.wfile.write(b"<!DOCTYPE html><body>")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://evil.example:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def statuses(passed: list[tuple[str, str, int]], member: str) -> dict[str, int]:
    """The statuses of the requests that passed a proxy, by what their query or form says for that member."""
    told = [(parse_qs(f"{urlsplit(target).query}&{body}"), status) for target, body, status in passed]
    return {members[member][0]: status for members, status in told if member in members}


class Attack:
    """Has requests made for a server, each of which names itself, and sees which were answered."""

    def __init__(self, page: Page, site: str, before: Any) -> None:
        """before: the proxy before the server."""
        self.page, self.site, self.port, self._before = page, site, before.server_port, before
        self.made: set[str] = set()

    @property
    def answered(self) -> dict[str, int]:
        """The statuses of the requests that the server answered, by their names."""
        return statuses(self._before.passed, "MessageBody")

    def by(self, script: str, way: str, host: str) -> None:
        """Have one made by the page."""
        self.page.evaluate(script, [way, self._url(way, host)])

    def by_every_way(self, host: str) -> None:
        self.page.goto(self.site)
        for way in WAYS[FROM_THE_PAGE]:
            self.by(FROM_THE_PAGE, way, host)
        self._settle()
        for way in WAYS[AWAY_FROM_THE_PAGE]:
            self.page.goto(self.site)
            with self.page.expect_navigation():
                self.by(AWAY_FROM_THE_PAGE, way, host)
        self.page.goto(f"{self.site}/to?{self._url('redirect', host)}")
        self.page.goto(self._url("typed", host))
        if host not in LOOPBACK:  # where no page of another site can be
            for way in ("GET", "POST"):  # the page is of the same origin now, as after DNS rebinding
                self.by(OF_ITS_OWN, way, host)
        self._settle()

    def _url(self, way: str, host: str) -> str:
        name = f"{way} to {host}"
        self.made.add(name)
        query = urlencode({"Action": "SendMessage", "MessageBody": name})
        return f"http://{host}:{self.port}/{ORDERS}?{query}"

    def _settle(self) -> None:
        """Until the requests under way have their answers."""
        self.wait(lambda: self.made - set(self.answered))

    def wait(self, missing: Callable[[], set[str]]) -> None:
        """Until nothing is missing: a browser drops the requests of a page that it leaves."""
        until = time.monotonic() + 30
        while names := missing():
            assert time.monotonic() < until, f"never answered: {sorted(names)}"
            self.page.wait_for_timeout(20)


def test_no_request_of_a_page_gets_in(tmp_path: Path, site: str) -> None:
    server = ServerProcess(tmp_path, "--dev-host", "elasticmq,localhost.localstack.cloud,azurite").start()
    try:
        for path in ("?Action=CreateQueue&QueueName=orders", f"{ORDERS}?Action=SendMessage&MessageBody=kept"):
            assert httpx.get(f"{server.sqs}/{path}").status_code == 200
        with (
            chromium("--host-resolver-rules=MAP * 127.0.0.1") as browser,
            proxy(server.sqs) as sqs, proxy(server.mns) as mns, proxy(server.azure) as azure,
        ):  # fmt: skip
            attack = Attack(browser.new_page(), site, sqs)
            for host in HOSTS:
                attack.by_every_way(host)
            assert attack.answered == dict.fromkeys(attack.made, 403)
            receiving = [f"http://elasticmq:{mns.server_port}/queues/orders/messages?numOfMessages=1"]
            receiving += [
                f"http://{host}:{azure.server_port}/devstoreaccount1/orders/messages?{sas()}"
                for host in ("azurite", "127.0.0.1")
            ]
            signed = f"{server.azure}/devstoreaccount1/orders?comp=metadata&{sas()}"
            assert httpx.get(signed).status_code == 200  # it is no bad signature that is refused
            attack.page.goto(site)
            ways = ("image", "get", "post", "cors", "typed")
            made = {(way, f"{way}-{at}"): f"{url}&way={way}-{at}" for at, url in enumerate(receiving) for way in ways}
            for (way, _), url in made.items():
                if way != "typed":
                    attack.page.evaluate(FROM_THE_PAGE, [way, url])

            def received() -> dict[str, int]:
                return statuses([*mns.passed, *azure.passed], "way")

            attack.wait(lambda: {name for way, name in made if way != "typed"} - set(received()))
            for (way, _), url in made.items():
                if way == "typed":
                    attack.page.goto(url)
            assert received() == dict.fromkeys((name for _, name in made), 403)
        found = httpx.get(f"{server.sqs}/{ORDERS}?Action=ReceiveMessage&MaxNumberOfMessages=10&AttributeName.1=All")
        assert re.findall("<Body>(.*?)</Body>", found.text) == ["kept"]
        assert "<Name>ApproximateReceiveCount</Name><Value>1</Value>" in found.text
    finally:
        assert server.stop() == 0


def sas() -> str:
    """What any page can make, because everybody knows the key of devstoreaccount1."""
    members = dict(member.partition("=")[::2] for member in AZURITE.split(";") if member)
    return generate_account_sas(
        "devstoreaccount1",
        members["AccountKey"],
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions(read=True, write=True, list=True, add=True, process=True, delete=True),
        datetime.now(UTC) + timedelta(days=1),
    )
