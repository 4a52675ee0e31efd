"""Who is let in, with what, and to what."""

import asyncio
import json
import logging
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from tests.admin.server import TOKEN, Keys

from veilmq.admin.access import REFUSALS, Access
from veilmq.admin.history.copies import Copies
from veilmq.model.settings.access import EVERYTHING, OF_ALL_ACCOUNTS, AccessKey, Action, Grant
from veilmq.server.auth import DevelopmentKeyring
from veilmq.server.config.settings import Settings
from veilmq.server.logs import RefusalLog
from veilmq.testing.for_each import for_each

# One for all: to make a client takes longer than to ask.
HTTP = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
QUEUES = "/api/v1/queues"
ORDERS = f"{QUEUES}/111111111111/us-east-1/orders"
OTHERS = f"{QUEUES}/222222222222/us-east-1/orders"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
KEYS = Keys(
    AccessKey("all", "secret of all", "111111111111", grants=EVERYTHING),
    AccessKey("other", "secret of other", "222222222222", grants=EVERYTHING),
    AccessKey("sender", "secret of sender", "111111111111", grants=(Grant(frozenset({Action.SEND}), ("orders*",)),)),
    AccessKey(
        "owner",
        "secret of owner",
        "111111111111",
        grants=(
            Grant(frozenset({Action.CREATE_QUEUE, Action.CHANGE_QUEUE}), ("mine-*",)),
            Grant(frozenset({Action.SEND}), ("orders-2",)),
        ),
    ),
    AccessKey(
        "mover",
        "secret of mover",
        "111111111111",
        grants=(Grant(frozenset({Action.MOVE})), Grant(frozenset({Action.SEND}), ("orders-2",))),
    ),
    AccessKey("reader", "secret of reader", "111111111111", grants=(Grant(frozenset({Action.EVENTS}), ("orders",)),)),
    AccessKey("operator", "secret of operator", "111111111111", grants=(Grant(OF_ALL_ACCOUNTS),)),
    AccessKey("temporary", "secret", "111111111111", grants=EVERYTHING, session_token="session"),
)


@pytest.fixture(scope="module")
def checked(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that checks keys; each of the two accounts has a queue `orders`, the first `orders-2` too."""
    with running(
        tmp_path_factory.mktemp("checked") / "data", KEYS, Settings(cors_origins=("https://console.example",))
    ) as server:
        for queue in (ORDERS, OTHERS, ORDERS + "-2"):
            assert HTTP.put(server.url + queue, headers=BEARER).status_code == 201
        yield server.url


@pytest.fixture(scope="module")
def development(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server without keys."""
    settings = Settings(base_domain="queues.example")
    with running(tmp_path_factory.mktemp("development") / "data", settings=settings) as server:
        yield server.url


def basic(key_id: str, secret: str | None = None) -> dict[str, str]:
    text = f"{key_id}:{f'secret of {key_id}' if secret is None else secret}"
    return {"Authorization": f"Basic {b64encode(text.encode()).decode()}"}


@for_each(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Digest {TOKEN}"},
        {"Authorization": "Basic ???"},
        {"Authorization": "Basic " + "A" * 10_000},
        basic("all", "secret of other"),
        basic("all", ""),
        basic("nobody"),
        basic("nobody", "\0"),
        basic("temporary", "secret"),
    ],
    ids=str,
)
@for_each("path", [QUEUES, "/api/v1/settings", "/api/v1/events", "/nowhere", ORDERS])
def test_without_credentials_nothing_is_told(checked: str, path: str, headers: dict[str, str]) -> None:
    answer = HTTP.get(checked + path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["error"] == "not_authenticated"


def test_health_needs_no_credentials(checked: str) -> None:
    assert HTTP.get(checked + "/health/live").json() == {"live": True}
    assert HTTP.get(checked + "/health/ready").json() == {"ready": True, "reasons": {}, "warnings": {}}


@for_each(("peer", "status"), [(("127.0.0.1", 9), 200), (("::1", 9), 200), (("192.0.2.1", 9), 401), (None, 401)])
def test_metrics_need_a_token_from_any_other_peer_whatever_its_host(peer: tuple[str, int] | None, status: int) -> None:
    answers: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answers.append(200)

    async def send(message: Any) -> None:
        answers.extend(message["status"] for _ in range("status" in message))

    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [(b"host", b"127.0.0.1")], "client": peer}
    scope["state"] = {REFUSALS: RefusalLog("admin", logging.getLogger("veilmq.admin"))}
    asyncio.run(Access(app, TOKEN, lambda: KEYS)(scope, app, send))
    assert answers == [status]


def test_metrics_need_none_on_loopback_but_behind_a_proxy(checked: str) -> None:
    assert HTTP.get(checked + "/metrics").status_code == 200
    for header in ("X-Forwarded-For", "Forwarded"):
        assert HTTP.get(checked + "/metrics", headers={header: "192.0.2.1"}).status_code == 401
    assert HTTP.get(checked + "/metrics", headers=BEARER | {"Forwarded": "for=192.0.2.1"}).status_code == 200
    rebound = {"Host": "evil.example:9325"}
    assert HTTP.get(checked + "/metrics", headers=rebound).status_code == 401
    assert HTTP.get(checked + "/metrics", headers=BEARER | rebound).status_code == 200


def test_a_key_does_what_it_was_granted(checked: str) -> None:
    message = {"messages": [{"body": "a"}]}
    post = HTTP.post(checked + ORDERS + "/messages", json=message, headers=basic("sender"))
    assert post.status_code == 200
    refused = HTTP.post(checked + ORDERS + "/receive", headers=basic("sender"))
    assert (refused.status_code, refused.json()["error"]) == (403, "not_granted")
    elsewhere = f"{QUEUES}/111111111111/us-east-1/invoices/messages"
    assert HTTP.post(checked + elsewhere, json=message, headers=basic("sender")).status_code == 403


@for_each(
    ("method", "path"),
    [
        ("GET", OTHERS),
        ("PATCH", OTHERS),
        ("DELETE", OTHERS),
        ("POST", OTHERS + "/purge"),
        ("POST", OTHERS + "/messages"),
        ("GET", OTHERS + "/messages"),
        ("POST", OTHERS + "/receive"),
        ("POST", OTHERS + "/delete"),
        ("POST", OTHERS + "/extend"),
        ("GET", OTHERS + "/peek"),
        ("GET", QUEUES + "?account=222222222222"),
        ("GET", QUEUES + "?account=*"),
    ],
)
def test_a_key_of_one_account_never_meets_anothers_queues(checked: str, method: str, path: str) -> None:
    assert HTTP.request(method, checked + path, headers=basic("all")).status_code == 403


def test_a_list_has_the_keys_own_queues(checked: str) -> None:
    shown = HTTP.get(checked + QUEUES, headers=basic("all")).json()["queues"]
    assert [(queue["account"], queue["name"]) for queue in shown] == [
        ("111111111111", "orders"),
        ("111111111111", "orders-2"),
    ]
    everything = HTTP.get(checked + QUEUES + "?account=*", headers=BEARER).json()["queues"]
    assert len(everything) == 3


@pytest.mark.parametrize("path", ["/api/v1/events", "/api/v1/snapshot"])
def test_the_feed_shows_a_key_its_own_queues_alone(checked: str, path: str) -> None:
    for queue in (ORDERS, OTHERS, ORDERS + "-2"):
        HTTP.post(checked + queue + "/messages", json={"messages": [{"body": "a"}]}, headers=BEARER)
    whole = HTTP.get(checked + path, headers=BEARER)
    assert "222222222222" in whole.text
    assert "orders-2" in whole.text
    cut = HTTP.get(checked + path, headers=basic("reader"))
    assert '"queue":"orders"' in cut.text or '"name":"orders"' in cut.text
    assert "222222222222" not in cut.text
    assert "orders-2" not in cut.text
    assert cut.headers.get("veilmq-next-offset") == whole.headers.get("veilmq-next-offset")


def test_the_arrow_feed_is_cut_too(checked: str) -> None:
    import pyarrow as pa

    headers = basic("reader") | {"Accept": "application/vnd.apache.arrow.stream"}
    table = pa.ipc.open_stream(HTTP.get(checked + "/api/v1/events", headers=headers).content).read_all()
    assert {(row["account"], row["queue"]) for row in table.to_pylist()} == {("111111111111", "orders")}


def test_a_message_of_another_account_has_no_trace(checked: str) -> None:
    sent = HTTP.post(checked + OTHERS + "/messages", json={"messages": [{"body": "a"}]}, headers=BEARER)
    path = "/api/v1/trace/" + sent.json()["messages"][0]["id"]
    assert len(HTTP.get(checked + path, headers=BEARER).json()["events"]) == 1
    assert HTTP.get(checked + path, headers=basic("reader")).json()["events"] == []


def test_dead_letters_go_where_a_key_may_send_or_to_its_own(checked: str) -> None:
    mine, headers = ORDERS.removesuffix("orders") + "mine-1", basic("owner")
    assert HTTP.put(checked + mine + "-dead", headers=headers).status_code == 201

    def redrive(target: str) -> dict[str, object]:
        return {"redrive": {"target": target, "receive_count_max": 1}}

    refused = HTTP.put(checked + mine, headers=headers, json=redrive("orders"))
    assert (refused.status_code, refused.json()["error"]) == (403, "not_granted")
    assert HTTP.put(checked + mine, headers=headers).status_code == 201
    assert HTTP.patch(checked + mine, headers=headers, json=redrive("orders")).status_code == 403
    for target in ("orders-2", "mine-1-dead"):
        assert HTTP.patch(checked + mine, headers=headers, json=redrive(target)).status_code == 200
    for name in (mine, mine + "-dead"):
        assert HTTP.delete(checked + name, headers=BEARER).status_code == 200


def test_moves_go_where_a_key_may_send(checked: str) -> None:
    mine, headers = ORDERS.removesuffix("orders") + "mine-2", basic("owner")
    for name, settings in (("-dead", {}), ("", {"redrive": {"target": "mine-2-dead", "receive_count_max": 1}})):
        assert HTTP.put(checked + mine + name, headers=headers, json=settings).status_code == 201
    for destination, status in (("orders", 403), ("mine-2", 403), ("orders-2", 200)):
        body = {"destination": destination}
        assert HTTP.post(checked + mine + "-dead/move", headers=headers, json=body).status_code == 403
        answer = HTTP.post(checked + mine + "-dead/move", headers=basic("mover"), json=body)
        assert answer.status_code == status, answer.text
    for name in (mine, mine + "-dead"):
        assert HTTP.delete(checked + name, headers=BEARER).status_code == 200


def test_what_is_of_no_queue_needs_its_own_grant(checked: str) -> None:
    assert HTTP.get(checked + "/api/v1/events", headers=basic("sender")).status_code == 403
    assert HTTP.get(checked + "/api/v1/events", headers=basic("all")).status_code == 200


@for_each(
    ("method", "path"),
    [
        ("POST", "/api/v1/backup"),
        ("POST", "/api/v1/check"),
        ("GET", "/api/v1/settings"),
        ("GET", "/api/v1/clock"),
        ("POST", "/api/v1/clock/accept"),
        ("GET", "/metrics"),
    ],
)
def test_what_shows_every_account_needs_a_grant_that_names_it(checked: str, method: str, path: str) -> None:
    proxied = {"Forwarded": "for=192.0.2.1"}  # on loopback the metrics are everybody's
    for key in ("sender", "all"):
        refused = HTTP.request(method, checked + path, headers=basic(key) | proxied)
        assert (refused.status_code, refused.json()["error"]) == (403, "not_granted")
    assert HTTP.request(method, checked + path, headers=basic("operator") | proxied).status_code == 200


@for_each(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:9325", 200),
        ("127.9.9.9", 200),
        ("[::1]:9325", 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("sqs.localhost", 200),
        ("queues.example", 200),
        ("a.queues.example:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("notqueues.example", 403),
        ("192.0.2.1", 403),
        ("[::2]", 403),
    ],
)
def test_development_mode_takes_hosts_that_are_this_machine(development: str, host: str, status: int) -> None:
    for path in ("/health/live", "/metrics", QUEUES):
        assert HTTP.get(development + path, headers=BEARER | {"Host": host}).status_code == status


def test_with_credentials_any_host_is_taken(checked: str) -> None:
    assert HTTP.get(checked + ORDERS, headers=BEARER | {"Host": "queues.example"}).status_code == 200


@for_each(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("https://console.example", 200),
        ("https://console.example.evil.example", 403),
        ("http://localhost:1", 200),
    ],
)
def test_pages_of_a_foreign_origin_are_refused(checked: str, origin: str, status: int) -> None:
    for path in (ORDERS, "/health/live"):
        answer = HTTP.get(checked + path, headers=BEARER | {"Origin": origin, "Host": "localhost:1"})
        assert answer.status_code == status
        assert not [name for name in answer.headers if name.startswith("access-control")]


ASKED = (Grant(OF_ALL_ACCOUNTS), Grant(frozenset({Action.RECEIVE, Action.DELETE, Action.PURGE, Action.EVENTS})))
WIDER = (Grant(OF_ALL_ACCOUNTS), *EVERYTHING)


def some(grants: tuple[Grant, ...], secret: str = "secret of all", home: str = "us-east-1") -> tuple[AccessKey, ...]:
    return (AccessKey("all", secret, "111111111111", home, grants),)


@for_each(
    ("after", "status", "of_snapshot"),
    [
        ((), 401, 401),
        (some(ASKED, secret="another secret"), 401, 401),
        (some((Grant(frozenset({Action.SEND})),)), 403, 403),
        (some(WIDER), 200, 403),
        (some(ASKED, home="eu-west-1"), 200, 200),
    ],
)
def test_who_waits_goes_by_the_credentials_of_the_end(
    running: Any, tmp_path_factory: Any, after: tuple[AccessKey, ...], status: int, of_snapshot: int
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    making: list[Copies] = []
    write = Copies._snapshot_file

    def slow_copy(one: Copies, scope: Any) -> Any:
        making.append(one)
        begun.set()
        go_on.wait(30)
        return write(one, scope)

    data = tmp_path_factory.mktemp("waits") / "data"
    with pytest.MonkeyPatch.context() as patch, running(data, Keys(*some(ASKED))) as server, ExitStack() as at_end:
        at_end.callback(go_on.set)
        patch.setattr(Copies, "_snapshot_file", slow_copy)
        assert HTTP.put(server.url + ORDERS, headers=BEARER).status_code == 201
        answers: dict[str, int] = {}
        begun_to_answer = set[str]()

        def ask(method: str, path: str, **how: Any) -> threading.Thread:
            def run() -> None:
                with HTTP.stream(method, server.url + path, headers=basic("all"), **how) as answer:
                    begun_to_answer.add(path)
                    answer.read()
                answers[path] = answer.status_code
                if path == check:
                    last = json.loads(answer.text.splitlines()[-1])
                    answers[path] = {"not_authenticated": 401, "not_granted": 403}.get(last.get("error"), 200)
                    assert ("result" in last) == (answers[path] == 200)

            asking = threading.Thread(target=run)
            asking.start()
            return asking

        def until(holds: Callable[[], bool]) -> None:
            end = time.monotonic() + 20
            while not holds():
                assert time.monotonic() < end
                time.sleep(0.01)

        receive, events = ORDERS + "/receive", "/api/v1/events?from=next&follow=25"
        snapshot, backup, check = "/api/v1/snapshot", "/api/v1/backup", "/api/v1/check"
        receiving = ask("POST", receive, json={"wait_us": 25_000_000})
        others = [ask("GET", events), ask("GET", snapshot)]
        assert begun.wait(20)
        others.append(ask("POST", backup))
        until(lambda: making[0].count == 2)
        others.append(ask("POST", check))
        until(lambda: check in begun_to_answer)
        until(lambda: bool(len(server.shell.engine.waiting) and server.shell.stats.followers))
        purge = f"{ORDERS}/purge", b"?"
        job = "/api/v1/jobs", b'{"act":"delete","queue":"none"}'
        slow = [(upload(server.port, path, len(body)), body) for path, body in (purge, job)]
        server.keyring = Keys(*after)
        server.loop.call_soon_threadsafe(lambda: [end() for end in list(server.on_reload)])
        for client, body in slow:
            client.sendall(body)
            answer = client.recv(1_000)
            client.close()
            assert int(answer.split()[1]) in ((400, 404) if status == 200 else (status,)), answer
        if status != 200:
            receiving.join(10)
            assert answers == {receive: status}, "it waits for a message that it cannot have"
        sent = {"messages": [{"body": "a"}]}
        assert HTTP.post(server.url + ORDERS + "/messages", headers=BEARER, json=sent).status_code == 200
        go_on.set()
        for each in (receiving, *others):
            each.join(30)
        assert answers == {receive: status, events: status, snapshot: of_snapshot, backup: status, check: status}
        left = HTTP.post(server.url + receive, headers=BEARER, json={"wait_us": 1_000_000}).json()["messages"]
        assert [message["receive_count"] for message in left] == ([] if status == 200 else [1])


def upload(port: int, path: str, size: int) -> socket.socket:
    """A connection that has sent the head of a request of the key `all`, which was accepted."""
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {basic('all')['Authorization']}"
    client.sendall(f"{head}\r\nExpect: 100-continue\r\nContent-Length: {size}\r\n\r\n".encode())
    assert client.recv(1_000).startswith(b"HTTP/1.1 100 "), "the key is checked"
    return client


def test_development_mode_has_no_keys(server: Any) -> None:
    assert HTTP.get(server.url + QUEUES, headers=basic("000000000000", "")).status_code == 401
    assert HTTP.get(server.url + QUEUES, headers=BEARER).status_code == 200


def test_a_token_that_can_be_guessed_is_refused() -> None:
    async def nothing(*_: Any) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="16 characters"):
        Access(nothing, "", DevelopmentKeyring)


def test_the_log_tells_who_was_refused(checked: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "veilmq.admin"):
        HTTP.get(checked + QUEUES)
        HTTP.get(checked + QUEUES, headers=basic("sender", "hush"))
        HTTP.get(checked + QUEUES, headers=basic("secret of sender", "sender"))
        HTTP.put(checked + ORDERS, headers=basic("sender"))
        HTTP.get(checked + ORDERS + "-9", headers=BEARER)
    told = [record.getMessage() for record in caplog.records]
    unknown = "refused with 401: the access key is unknown, or its secret is another"
    assert [line.partition("send `")[0] for line in told] == [
        f"GET {QUEUES} from 127.0.0.1: refused with 401: this is the admin port: ",
        f"GET {QUEUES} from 127.0.0.1 by sender: {unknown}",
        f"GET {QUEUES} from 127.0.0.1: {unknown}",
        f"PUT {ORDERS} from 127.0.0.1 by sender: 403 not_granted: the key was not granted create-queue on "
        "111111111111/orders",
        f"GET {ORDERS}-9 from 127.0.0.1: 404 QueueMissing: no queue 111111111111/us-east-1/orders-9",
    ]
