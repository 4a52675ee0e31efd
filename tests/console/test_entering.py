"""Who gets into the console, for how long, with which rights; and what other sites, hosts and forms cannot do."""

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from tests.admin import server as admin
from tests.console.conftest import CONSOLE, Api, Visitor, hidden

from veilmq.admin.access import Caller
from veilmq.cli.access.http import HttpAccess
from veilmq.console import sessions
from veilmq.console.app import HEADERS
from veilmq.console.sessions import (
    ADDRESSES_MAX,
    DELAY_US_MAX,
    FREE_FAILURES,
    LINK_US,
    LINKS_MAX,
    SIGN_IN_BYTES_MAX,
    Attempts,
    Links,
)
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.server.config.settings import Settings
from veilmq.store.sqlite.tools.backup import backup_directory
from veilmq.testing.for_each import for_each

LOOKER = AccessKey(
    "AKLOOK", "look-secret", "111111111111", grants=(Grant(frozenset({Action.LIST_QUEUES, Action.EVENTS})),)
)
KEYS = admin.Keys(LOOKER, AccessKey("AKALL", "all-secret", "222222222222", grants=(Grant(frozenset(Action)),)))


def cookie_of(answer: httpx.Response) -> str:
    return answer.headers["set-cookie"]


def test_every_answer_has_the_headers_and_no_page_is_shown_without_a_session(server: Any) -> None:
    with Visitor(server) as visitor:
        for path in ("/console", "/console/", f"{CONSOLE}/a", "/console/messages/x", "/console/static/console.js",
                     "/console/static/../app.py", "/console/none", "/console/sign-in"):  # fmt: skip
            answer = visitor.get(path)
            assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path
        answer = visitor.get(f"{CONSOLE}/orders?state=hidden")
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/console/sign-in?next=%2Fconsole%2Fqueues%2F")
        assert visitor.get("/console/news", headers={"accept": "application/json"}).status_code == 401
        assert visitor.get("/", headers={"accept": "text/html,*/*"}).headers["location"] == "/console/"
        assert visitor.get("/").status_code == 401


def test_a_sign_in_is_small_and_comes_soon(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers may send it: a thousand slow ones took all connections of the port, and megabytes each."""
    monkeypatch.setattr(sessions, "SIGN_IN_S", 0.2)
    with Visitor(server) as visitor:
        answer = visitor.sign_in(secret="x" * SIGN_IN_BYTES_MAX)
        assert (answer.status_code, "16384 bytes" in answer.text) == (413, True)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        head = f"POST /console/sign-in HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nOrigin: {server.url}\r\n"
        kind = "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 1000\r\n\r\ns"
        slow.sendall(f"{head}{kind}".encode())
        assert slow.recv(65_536).startswith(b"HTTP/1.1 408 ")


def test_the_session_is_a_cookie_that_scripts_and_other_sites_do_not_see(server: Any) -> None:
    with Visitor(server) as visitor:
        answer = visitor.sign_in(secret=admin.TOKEN, next="/console/queues/0/x?state=hidden")
        assert answer.headers["location"] == "/console/queues/0/x?state=hidden"
        name, _, rest = cookie_of(answer).partition("=")
        assert name.startswith("veilmq-")
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(rest.split("; "))
        assert admin.TOKEN not in str(answer.headers)
        assert "Queues" in visitor.get("/console/").text
        for target in ("https://evil.example", "//evil.example", "/console/\\evil", "/metrics", "/console//evil"):
            assert visitor.sign_in(secret=admin.TOKEN, next=target).headers["location"] == "/console/", target


def test_behind_tls_the_cookie_is_secure_and_bound_to_the_host(tmp_path: Path) -> None:
    with admin.running(tmp_path / "data", settings=Settings(trusted_proxy=True)) as server, Visitor(server) as visitor:
        answer = visitor.post("/console/sign-in", data={"secret": admin.TOKEN}, headers={"x-forwarded-proto": "https"})
        assert cookie_of(answer).startswith("__Host-veilmq-")
        assert "; Secure" in cookie_of(answer)
        two = {"x-forwarded-proto": "https, http"}
        answer = visitor.post("/console/sign-in", data={"secret": admin.TOKEN}, headers=two)
        assert "; Secure" in cookie_of(answer), "the proxy that the browser reached says it first"


def test_another_server_on_this_host_has_another_cookie(server: Any, tmp_path: Path) -> None:
    with admin.running(tmp_path / "other") as other, Visitor(server) as visitor:
        mine = cookie_of(visitor.sign_in(secret=admin.TOKEN)).partition("=")
        assert visitor.get(f"{other.url}/console/").status_code == 303
        theirs = cookie_of(visitor.post(f"{other.url}/console/sign-in", data={"secret": admin.TOKEN},
                                        headers={"origin": other.url})).partition("=")  # fmt: skip
        assert mine[0] != theirs[0]
        assert visitor.get("/console/").status_code == 200
        visitor.cookies.clear()
        visitor.cookies.set(mine[0], theirs[2].partition(";")[0])
        assert visitor.get("/console/").status_code == 303, "its session is none of this server, whatever its name"


def test_a_session_id_that_the_browser_brings_is_never_taken_over(server: Any) -> None:
    with Visitor(server) as visitor:
        name = cookie_of(visitor.sign_in(secret=admin.TOKEN)).partition("=")[0]
    with Visitor(server) as visitor:
        visitor.cookies.set(name, "chosen-by-somebody-else")
        assert visitor.get("/console/").status_code == 303
        answer = visitor.sign_in(secret=admin.TOKEN)
        assert "chosen-by-somebody-else" not in cookie_of(answer)
    with Visitor(server) as other:
        other.cookies.set(name, "chosen-by-somebody-else")
        assert other.get("/console/").status_code == 303


def test_signing_in_again_ends_the_session_before(server: Any) -> None:
    with Visitor(server) as visitor:
        name, _, rest = cookie_of(visitor.sign_in(secret=admin.TOKEN)).partition("=")
        old = rest.partition(";")[0]
        visitor.sign_in(secret=admin.TOKEN)
        assert visitor.get("/console/").status_code == 200
    with Visitor(server) as thief:
        thief.cookies.set(name, old)
        assert thief.get("/console/").status_code == 303


def test_signing_out_ends_the_session(visitor: Visitor) -> None:
    kept = dict(visitor.cookies)
    answer = visitor.submit("/console/", "/console/sign-out")
    assert answer.headers["location"] == "/console/sign-in"
    assert visitor.post("/console/sign-out", data={"csrf": "x"}).headers["location"] == "/console/sign-in", "twice"
    assert visitor.get("/console/").status_code == 303
    visitor.cookies.update(kept)
    assert visitor.get("/console/").status_code == 303


def test_an_unused_session_ends_and_the_view_is_kept(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    for _ in range(3):
        api.later(50 * 60)
        assert visitor.get(f"{CONSOLE}/orders").status_code == 200
    api.later(50 * 60)
    news = {"accept": "application/json"}
    assert visitor.get(f"{CONSOLE}/orders/news", headers=news).status_code == 200
    api.later(11 * 60)
    assert visitor.get(f"{CONSOLE}/orders/news", headers=news).status_code == 401
    target = visitor.get(f"{CONSOLE}/orders?type=a").headers["location"]
    page = visitor.get(target).text
    answer = visitor.post("/console/sign-in", data=hidden(page, "/console/sign-in") | {"secret": admin.TOKEN})
    assert answer.headers["location"] == f"{CONSOLE}/orders?type=a"


def test_a_form_that_outlives_its_session_leads_back_to_its_page(api: Api, server: Any, visitor: Visitor) -> None:
    api.create("orders")
    fields, page = visitor.fields(f"{CONSOLE}/orders/send"), f"{CONSOLE}/orders"
    api.later(61 * 60)

    def back_from(path: str, referer: str = "") -> str:
        answer = visitor.post(path, data=fields | {"body": "x"}, headers={"referer": referer} if referer else {})
        sign_in = visitor.get(answer.headers["location"]).text
        assert "what you sent was not done, and what you typed is lost" in sign_in
        return hidden(sign_in, "/console/sign-in")["next"]

    assert back_from(f"{page}/send", f"{server.url}{page}/send?template=a%26b") == f"{page}/send?template=a%26b"
    assert back_from(f"{page}/send") == f"{page}/send", "a browser that does not say where it was"
    assert back_from(f"{page}/send", f"{server.url}{page}/send/fill") == f"{page}/send", "no page to GET"
    assert back_from(f"{page}/send/drop") == f"{page}/send"
    assert back_from(f"{page}/send", f"http://evil.example{page}/send?x=1") == f"{page}/send"
    assert back_from(f"{page}/send", f"{server.url}//evil.example/") == f"{page}/send"


def test_a_session_ends_after_half_a_day_however_it_is_used(api: Api, visitor: Visitor) -> None:
    for _ in range(12):
        assert visitor.get("/console/").status_code == 200
        api.later(59 * 60)
    api.later(12 * 60)
    answer = visitor.get("/console/")
    assert answer.status_code == 303
    assert "The session is over" in visitor.get(answer.headers["location"]).text


def signed_in(server: Any, **fields: str) -> dict[str, str]:
    """The cookies of a new session."""
    with Visitor(server) as visitor:
        assert visitor.sign_in(**fields).status_code == 303
        assert visitor.get("/console/").status_code == 200
        return dict(visitor.cookies)


def page_of(server: Any, cookies: dict[str, str]) -> httpx.Response:
    with Visitor(server, cookies=cookies) as visitor:
        return visitor.get("/console/")


def test_a_restart_ends_no_session_but_those_whose_secret_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    with admin.running(data, KEYS) as server:
        token = signed_in(server, secret=admin.TOKEN)
        looks = signed_in(server, secret=admin.TOKEN, reads_only="on")
        key, gone = (signed_in(server, key="AKLOOK", secret="look-secret") for _ in range(2))
        with Visitor(server, cookies=gone) as visitor:
            visitor.submit("/console/", "/console/sign-out")
            form = visitor.fields("/console/sign-in", "/console/sign-in")
        assert "csrf" not in form
        with Visitor(server, cookies=token) as visitor:
            before = visitor.fields("/console/", "/console/sign-out")["csrf"]
    written = b"".join(file.read_bytes() for file in data.iterdir())
    for secret in (*token.values(), *looks.values(), *key.values(), admin.TOKEN, "look-secret"):
        assert secret.encode() not in written
    with admin.running(data, KEYS) as server:
        assert page_of(server, token).status_code == 200
        assert "read-only" in page_of(server, looks).text
        assert "AKLOOK" in page_of(server, key).text
        assert page_of(server, gone).status_code == 303
        with Visitor(server, cookies=token) as visitor:
            assert visitor.fields("/console/", "/console/sign-out")["csrf"] == before, "an open form still acts"
    changed = admin.Keys(AccessKey("AKLOOK", "another-secret", LOOKER.account, grants=LOOKER.grants))
    with admin.running(data, changed) as server:
        assert page_of(server, token).status_code == 200
        assert "over" in page_of(server, key).headers["location"]
    with admin.running(data, KEYS) as server:
        assert "over" in page_of(server, key).headers["location"], "it does not come back with the old secret"
        key = signed_in(server, key="AKLOOK", secret="look-secret")
    with admin.running(data) as server:
        assert page_of(server, key).status_code == 303, "development mode makes keys up"
    monkeypatch.setattr(admin, "TOKEN", "another-token-of-the-tests")
    with admin.running(data, KEYS) as server:
        assert "over" in page_of(server, token).headers["location"]
        assert page_of(server, looks).status_code == 303


def pass_by(server: Any, seconds: float) -> None:
    api = Api(server)
    api.later(seconds)
    api.client.close()


def test_after_a_restart_a_session_ends_as_it_would_have(tmp_path: Path) -> None:
    """Of its last use the store knows to the minute."""
    data = tmp_path / "data"
    with admin.running(data) as server:
        used, unused = (signed_in(server, secret=admin.TOKEN) for _ in range(2))
        pass_by(server, 30 * 60)
        assert page_of(server, used).status_code == 200
    with admin.running(data) as server:
        pass_by(server, 31 * 60)
        assert page_of(server, used).status_code == 200
        assert page_of(server, unused).status_code == 303
    with admin.running(data) as server:
        pass_by(server, 61 * 60)
        assert "over" in page_of(server, used).headers["location"]


def test_a_backup_has_no_sessions(tmp_path: Path) -> None:
    data, restored = tmp_path / "data", tmp_path / "restored"
    with admin.running(data) as server:
        cookies = signed_in(server, secret=admin.TOKEN)
    backup_directory(data / "veilmq.db", restored)
    with admin.running(restored) as server:
        (name,) = signed_in(server, secret=admin.TOKEN)
        assert page_of(server, {name: next(iter(cookies.values()))}).status_code == 303


def test_a_key_has_the_rights_that_it_was_granted(tmp_path: Path) -> None:
    with admin.running(tmp_path / "data", admin.Keys(*KEYS._keys.values())) as server, Visitor(server) as visitor:
        refused = visitor.sign_in(key="AKLOOK", secret="wrong", reads_only="on")
        assert refused.status_code == 403
        assert 'name="key" value="AKLOOK"' in refused.text
        assert 'name="reads_only" checked' in refused.text, "the next attempt would open a session that changes things"
        assert visitor.sign_in(key="AKLOOK", secret="look-secret").status_code == 303
        assert "AKLOOK" in visitor.get("/console/").text
        path = "/console/queues/111111111111/us-east-1/orders"
        assert visitor.get(path).status_code == 403
        assert visitor.get(path.replace("111111111111", "222222222222")).status_code == 403
        answer = visitor.submit("/console/", "/console/sign-out")
        assert answer.status_code == 303
        visitor.sign_in(key="AKLOOK", secret="look-secret")
        del server.keyring._keys["AKLOOK"]
        assert "over" in visitor.get("/console/").headers["location"]
        slowly_with_a_removed_key(server, visitor)


def slowly_with_a_removed_key(server: Any, visitor: Visitor) -> None:
    """A form may take hours to arrive."""
    path = "/console/queues/222222222222/us-east-1/orders/purge"
    token = {"authorization": f"Bearer {admin.TOKEN}"}
    api = f"{server.url}/api/v1/queues/222222222222/us-east-1/orders"
    assert httpx.put(api, headers=token).status_code == 201
    assert httpx.post(f"{api}/messages", headers=token, json={"messages": [{"body": "kept"}]}).status_code == 200
    visitor.sign_in(key="AKALL", secret="all-secret")
    form = urlencode(visitor.fields(path) | {"confirmed": "yes"})
    ((name, cookie),) = visitor.cookies.items()
    host = f"Host: 127.0.0.1:{server.port}\r\nOrigin: {server.url}\r\n"
    head = f"POST {path} HTTP/1.1\r\n{host}Cookie: {name}={cookie}\r\n"
    kind = f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {len(form)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        slow.sendall(f"{head}{kind}Expect: 100-continue\r\n\r\n".encode())
        assert slow.recv(1_000).startswith(b"HTTP/1.1 100 "), "the session is found"
        del server.keyring._keys["AKALL"]
        slow.sendall(form.encode())
        assert slow.recv(1_000).startswith(b"HTTP/1.1 401 ")
    assert httpx.get(api, headers=token).json()["counts"]["visible"] == 1


def test_a_session_that_only_looks_changes_nothing(server: Any, api: Api) -> None:
    api.create("orders")
    before = api.kinds()
    with Visitor(server) as visitor:
        visitor.sign_in(secret=admin.TOKEN, reads_only="on")
        page = visitor.get(f"{CONSOLE}/orders").text
        assert "read-only" in page
        assert "Purge" not in page
        for form, act in (("purge", "purge"), ("send", "send"), ("move", "job"), ("settings", "settings")):
            target = f"{CONSOLE}/orders/{act}"
            fields = visitor.fields(f"{CONSOLE}/orders/{form}", target)
            fields |= {"body": "x", "delay_us": "9 s", "confirmed": "yes"}
            answer = visitor.post(target, data=fields)
            assert answer.status_code in (200, 403), act
            assert ("this session only reads" in answer.text) == (answer.status_code == 403), act
        refused = visitor.post(
            f"{CONSOLE}/orders/send/drop", data=visitor.fields(f"{CONSOLE}/orders/send") | {"name": "x"}
        )
        assert refused.status_code == 403, "nothing is asked that would be refused"
    assert api.kinds() == before


def test_a_link_signs_in_once_and_soon(server: Any, api: Api) -> None:
    access = HttpAccess(server.url, admin.TOKEN)
    link, late = access.console_link(), access.console_link()
    access.close()
    with Visitor(server) as visitor:
        page = visitor.get(link)
        assert "set-cookie" not in page.headers, "fetching it is no use of it"
        fields = hidden(page.text, "/console/sign-in")
        assert visitor.sign_in(**fields).status_code == 303
        assert visitor.get("/console/").status_code == 200
    with Visitor(server) as thief:
        assert thief.sign_in(**fields).status_code == 403
        api.later(LINK_US / SECOND_US)
        assert thief.sign_in(**hidden(thief.get(late).text, "/console/sign-in")).status_code == 403
    assert httpx.post(f"{server.url}/console/links").status_code == 403
    wrong = httpx.post(f"{server.url}/console/links", headers={"authorization": "Bearer wrong"})
    assert (wrong.status_code, wrong.json()["error"]) == (401, "not_authenticated")


def test_a_link_is_made_at_a_name_of_a_private_network(tmp_path: Path) -> None:
    """As `veilmq console --admin http://elasticmq:9325` asks for one."""
    asks = {"authorization": f"Bearer {admin.TOKEN}", "host": "elasticmq:9325"}
    with admin.running(tmp_path / "data", settings=Settings(dev_host=("elasticmq",))) as server:
        made = httpx.post(f"{server.url}/console/links", headers=asks)
        assert made.status_code == 200, made.text
        assert httpx.get(server.url + made.json()["path"], headers={"host": "elasticmq:9325"}).status_code == 200


def test_guessing_gets_slower_and_a_link_still_works(server: Any, api: Api) -> None:
    with Visitor(server) as visitor:
        answers = [visitor.sign_in(secret=f"guess {number}").status_code for number in range(FREE_FAILURES + 1)]
        assert answers == [403] * FREE_FAILURES + [429]
        refused = visitor.sign_in(secret=admin.TOKEN)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        api.later(1)
        assert visitor.sign_in(secret="guess").status_code == 403
        assert visitor.sign_in(secret=admin.TOKEN).headers["retry-after"] == "2"
        access = HttpAccess(server.url, admin.TOKEN)
        link = access.console_link()
        access.close()
        assert visitor.sign_in(**hidden(visitor.get(link).text, "/console/sign-in")).status_code == 303
        api.later(2)
        assert visitor.sign_in(secret=admin.TOKEN).status_code == 303


FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": ""},
    {"host": "evil.example", "origin": "http://evil.example"},
    {"host": "localhost.evil.example", "origin": "http://localhost.evil.example"},
]


@for_each("headers", FOREIGN)
def test_other_sites_and_rebound_names_are_refused(visitor: Visitor, headers: dict[str, str]) -> None:
    """DNS rebinding shows in the Host; a form of another site in the Origin."""
    fields = visitor.fields("/console/", "/console/sign-out")
    answer = visitor.post("/console/sign-out", data=fields, headers=headers)
    assert answer.status_code == 403
    if "host" in headers:
        assert visitor.get("/console/", headers=headers).status_code == 403
    assert visitor.get("/console/").status_code == 200


@for_each(
    "host, is_ours",
    [
        ("127.0.0.1:80", True), ("localhost", True), ("[::1]:9325", True), ("10.1.2.3:9325", True),
        ("queues.example", True), ("QUEUES.EXAMPLE:443", True), ("mq.out.example", True), ("x.sqs.example", True),
        ("sqs.example.evil", False), ("evil.example", False), ("queues.example.evil", False), ("a b", False),
    ],
)  # fmt: skip
def test_with_credentials_hosts_are_those_of_a_list(outside: Any, host: str, is_ours: bool) -> None:
    answer = httpx.get(f"{outside.url}/console/sign-in", headers={"host": host})
    assert (answer.status_code == 200) == is_ours


def test_an_act_needs_the_token_of_this_session(server: Any, api: Api, visitor: Visitor) -> None:
    api.create("orders")
    api.send("orders")
    path = f"{CONSOLE}/orders/purge"
    fields = visitor.fields(path)
    with Visitor(server) as other:
        other.sign_in(secret=admin.TOKEN)
        stolen = other.fields(path)
    for wrong in (fields | {"csrf": ""}, fields | {"csrf": stolen["csrf"]}, fields | {"once": "x"}, {}):
        assert visitor.post(path, data=wrong).status_code in (400, 403)
    assert visitor.post(path, content=b"csrf=1", headers={"content-type": "text/plain"}).status_code == 400
    assert "purged" not in api.kinds()
    assert visitor.post(path, data=fields).status_code == 303
    assert "purged" in api.kinds()


def test_a_link_from_another_site_leads_to_the_page(visitor: Visitor) -> None:
    """A browser sends a strict cookie only from our own pages: the first answer sends it there."""
    kept = visitor.cookies.jar
    with httpx.Client(base_url=visitor.base_url) as bare:
        answer = bare.get("/console/?prefix=a", headers={"sec-fetch-site": "cross-site"})
    assert '<meta http-equiv="refresh" content="0;url=/console/?prefix=a">' in answer.text
    assert kept


def test_what_is_kept_has_bounds() -> None:
    now = Instant(1_000 * SECOND_US)
    links, attempts = Links(), Attempts()
    code = links.make(Caller(), now)
    for _ in range(LINKS_MAX):
        links.make(Caller(), now)
    assert links.take(code, now) is None
    for number in range(ADDRESSES_MAX + 10):
        attempts.failed(f"10.0.0.{number}", now)
    assert attempts.wait_us("another", now) == SECOND_US, "all together guess too often"
    assert len(attempts._failures) == ADDRESSES_MAX
    for _ in range(100):
        attempts.failed("a", now)
    assert attempts.wait_us("a", now) == DELAY_US_MAX
