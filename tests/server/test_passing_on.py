"""Requests for the admin port that a server of a cluster passes on to an owner that goes away amid them."""

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from veilmq.admin.access import Access
from veilmq.cli.serve.admin_connection import PassedOn
from veilmq.cli.serve.without_owner import shown_to_browsers
from veilmq.cluster.peer import Identity
from veilmq.cluster.peer.handshake import Handshake, Role
from veilmq.cluster.peer.port import PeerPort
from veilmq.server.auth import DevelopmentKeyring
from veilmq.server.cluster import admin
from veilmq.server.cluster.admin import KEEP_PLACE, Owner, Unreached, connect, passing_on, while_owner
from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each

BODY = (b"first part, ", b"last part")


class Passed:
    """An owner that takes a whole request and goes away, and one that answers the next; and what they were sent."""

    def __init__(self, *, leaves: bool = False, returns: bool = True, refusals: int = 0, own: int = 0) -> None:
        """leaves: the client hangs up behind its request. returns: another owner is found afterwards. refusals: how
        often it says that it is none. own: the server that passes it on is the owner then, and answers with this
        status."""
        self.leaves, self.returns, self.refusals, self.own = leaves, returns, refusals, own
        self.path = "/api/v1/jobs"
        self.bodies: list[bytes] = []
        self.answer: list[Any] = []

    async def play(self, method: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]

            async def connect() -> Owner:
                if self.bodies and not self.returns:
                    raise Unreached("nobody owns the queues")
                return Owner(*await asyncio.open_connection("127.0.0.1", port))

            parts = [{"type": "http.request", "body": part, "more_body": part != BODY[-1]} for part in BODY]
            coming = iter(parts)

            async def receive() -> Any:
                part = next(coming, None)
                if part is None and self.leaves:
                    return {"type": "http.disconnect"}
                return part if part is not None else await asyncio.get_running_loop().create_future()

            async def send(message: Any) -> None:
                self.answer.append(message)

            length = (b"content-length", str(sum(map(len, BODY))).encode())
            scope = {
                "type": "http", "method": method, "path": self.path, "raw_path": self.path.encode(), "scheme": "http",
                "query_string": b"", "headers": [*headers, length], "client": ("127.0.0.1", 1),
            }  # fmt: skip

            async def own(scope: Any, receive: Any, send: Any) -> None:
                self.bodies.append((await receive())["body"] + (await receive())["body"])
                await send({"type": "http.response.start", "status": self.own, "headers": []})
                await send({"type": "http.response.body", "body": b"own"})

            app = passing_on(connect, lambda: own if self.own and self.bodies else None)
            settings = Settings(cluster="postgresql:///", cluster_name="two")
            await shown_to_browsers(app, settings, lambda: True)(scope, receive, send)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            self.bodies.append(await reader.readexactly(sum(map(len, BODY))))
        except asyncio.IncompleteReadError as cut_off:
            # As this task's error it would be logged when the garbage collector finds the task. Amid `ast.parse`, with
            # which pytest shows a failed test, that ends Python 3.11.2's run: a log's traceback calls it again.
            self.bodies.append(cut_off.partial)
            writer.close()
            return
        if len(self.bodies) > 1:
            refused, self.refusals = self.refusals > 0, self.refusals - 1
            body = b'{"error": "NotOwner", "message": "try again"}' if refused else b""
            status = b"503 Service Unavailable" if refused else b"201 Created"
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
            await writer.drain()
        writer.close()


def test_a_server_that_owns_nothing_refuses_a_request_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is sent to the next owner, whatever it changes. Nor does it wait for an owner that says nothing."""

    async def play() -> None:
        port = PeerPort(Identity("cluster", "two"), b"a secret of the tests")
        await port.open("127.0.0.1", 0)
        wants = Handshake(Role.CALLER, Identity("cluster", "one"), b"a secret of the tests", "two", "admin")
        with pytest.raises(Unreached, match="this server does not own the queues"):
            await connect(port.address, wants, None)
        await port.close()
        assert not port.refused, "an operator need not hear of it"
        monkeypatch.setattr(admin, "HANDSHAKE_SECONDS", 0.1)
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            pytest.raises(Unreached, match=r"answered within 0.1 s$"),
        ):
            await connect(silent.getsockname(), wants, None)

    asyncio.run(asyncio.wait_for(play(), 20))


def test_what_was_read_is_answered_only_if_the_lease_still_runs() -> None:
    """The process slept between the two. What was committed is answered all the same, and so is what each server says
    of itself."""

    def play(method: str, path: str = "/api/v1/queues", *, holds: bool) -> list[Any]:
        leases, sent = iter([holds]), []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"old"})

        async def send(message: Any) -> None:
            sent.append(message.get("status") or message["body"])

        asyncio.run(while_owner(lambda: next(leases), app)({"method": method, "path": path}, None, send))  # type: ignore[arg-type]
        return sent

    assert play("GET", holds=True) == play("POST", holds=False) == [200, b"old"]
    assert play("GET", "/metrics", holds=False) == [200, b"old"]
    status, body = play("GET", holds=False)
    assert (status, b"lease" in body) == (503, True)


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        pytest.param("POST", [(b"idempotency-key", b'"mine"')], 201, id="with a key"),
        pytest.param("POST", [], 500, id="without"),
    ],
)
def test_a_change_that_was_under_way_is_sent_again_where_it_has_a_key(
    method: str, headers: list[tuple[bytes, bytes]], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the owner does it once; without one nobody knows whether it was done, and nobody is asked to repeat it."""
    passed = Passed()
    asyncio.run(asyncio.wait_for(passed.play(method, headers), 20))
    assert passed.answer[0]["status"] == status
    of_form = Passed()
    of_form.path = "/console/topics"
    browser = [(b"accept", b"text/html"), (b"host", b"localhost"), (b"origin", b"http://localhost")]
    asyncio.run(asyncio.wait_for(of_form.play(method, [*headers, *browser]), 20))
    assert of_form.answer[0]["status"] == status
    assert (b"The answer was lost" in of_form.answer[-1]["body"]) == (status == 500)
    assert b"retry-after" not in dict(passed.answer[0]["headers"])
    assert passed.bodies == [b"".join(BODY)] * (2 if status == 201 else 1)
    moving = Passed(refusals=1)
    asyncio.run(asyncio.wait_for(moving.play(method, headers), 20))
    assert (moving.answer[0]["status"], len(moving.bodies)) == ((201, 3) if status == 201 else (500, 1))
    monkeypatch.setattr(admin, "OWNER_SECONDS", 0.5)
    for nobody in (Passed(returns=False), Passed(refusals=1_000), Passed(own=503)):
        asyncio.run(asyncio.wait_for(nobody.play(method, headers), 20))
        assert (nobody.answer[0]["status"], b"StoreUnknown" in nobody.answer[-1]["body"]) == (500, True)
    here = Passed(own=201)
    asyncio.run(asyncio.wait_for(here.play(method, headers), 20))
    assert (here.answer[0]["status"], here.answer[-1]["body"] == b"own") == (status, status == 201)


@for_each(("method", "headers"), [("GET", []), ("POST", [(b"idempotency-key", b'"mine"')])], ids=["a look", "a change"])
def test_a_request_whose_client_is_gone_is_not_sent_again(method: str, headers: list[tuple[bytes, bytes]]) -> None:
    passed = Passed(leaves=True)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(passed.play(method, headers), 20))
    assert (len(passed.bodies), passed.answer) == (1, [])


def test_a_browser_is_refused_with_a_page_that_says_why() -> None:
    """Which a name that points at this machine gets no more than any other page; a program gets JSON. Only what no
    owner has answered becomes the page, for only of that it is known that nothing was changed."""
    app = Answering()
    status, headers, body = app.play("/console/queues")
    assert (status, headers[b"content-type"]) == (503, b"text/html; charset=utf-8")
    assert b"frame-ancestors" in headers[b"content-security-policy"]
    assert "Server two says: this server" in body
    assert "lease has ended" in body
    assert '<meta http-equiv="refresh"' in body
    assert "Nothing was changed" not in body
    assert app.play("/console/", host=b"rebound.example")[0] == 403
    assert app.play("/console/queues", accept=b"application/json")[1][b"content-type"] == b"application/json"
    assert app.play("/api/v1/queues")[1][b"content-type"] == b"application/json"
    app.answer = app.refuses("NotOwner")
    status, headers, body = app.play("/console/topics", method="POST")
    assert (status, "Nothing was changed. Go back" in body, "refresh" in body) == (503, True, False)
    app.answer = app.refuses("StoreUnknown", 500)
    status, headers, body = app.play("/console/topics", method="POST")
    assert (status, "Nothing was changed" in body, "The answer was lost" in body) == (500, False, True)
    kinds = (b"application/json", b"text/html; charset=utf-8")
    others = [app.refuses("refused", status) for status in (400, 404, 500, 503)]
    others += [app.refuses("NotOwner", 404), (503, kinds[1], b"<p>full"), (500, kinds[1], b"<p>failed")]
    for other in [*others, (500, kinds[0], b"["), (503, kinds[0], b""), (200, kinds[0], b"{}")]:
        app.answer = other
        for method in ("GET", "POST"):
            status, headers, body = app.play("/console/topics", method=method)
            assert (status, headers[b"content-type"], body.encode()) == other


def test_a_style_sheet_comes_from_the_owner_unless_none_answers() -> None:
    app = Answering()
    css = (200, b"text/css; charset=utf-8")
    for app.reaches in (True, False):
        status, headers, body = app.play("/console/static/console.css")
        assert (status, headers[b"content-type"], ".door" in body) == (*css, True)
        assert app.play("/console/static/none.css")[0] == 404
    app.answer = (*css, b"the owner's")
    for app.reaches in (True, False):
        assert (app.play("/console/static/console.css")[2] == "the owner's") == app.reaches


class Answering:
    """What a browser is answered, in front of a console that gives one answer."""

    def __init__(self) -> None:
        self.reaches = True
        self.answer: tuple[int, bytes, bytes] | None = None
        """Status, type and body; None: the lease ends."""

    def refuses(self, error: str, status: int = 503) -> tuple[int, bytes, bytes]:
        answer = {"error": error, "field": None, "message": "no", "data": {}}
        return status, b"application/json", json.dumps(answer).encode()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        status, kind, body = self.answer or (200, b"text/html", b"late")
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": body[5:], "more_body": False})

    def play(
        self, path: str, accept: bytes = b"text/html,*/*", host: bytes = b"127.0.0.1:9325", method: str = "GET"
    ) -> tuple[int, Any, str]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", host), (b"accept", accept), (b"origin", b"http://127.0.0.1:9325")]
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "scheme": "http", "server": ("127.0.0.1", 9325), "root_path": "",
        }  # fmt: skip
        app = while_owner(lambda: self.answer is not None, self._app)
        settings = Settings(cluster="postgresql:///", cluster_name="two")
        asyncio.run(shown_to_browsers(app, settings, lambda: self.reaches)(scope, None, send))  # type: ignore[arg-type]
        found = dict(sent[0]["headers"])
        return sent[0]["status"], found, b"".join(each.get("body", b"") for each in sent[1:]).decode()


def test_only_a_client_that_the_owner_knows_keeps_its_place_at_a_full_port() -> None:
    """The server that passes a request on checks no token itself."""
    token = "a token of the tests"
    config = uvicorn.Config(Access(Response(), token, DevelopmentKeyring), log_config=None, lifespan="off", ws="none")
    config.load()

    async def play(given: str) -> tuple[list[Any], list[str]]:
        sent, kept = [], []

        async def receive() -> Any:
            return await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {given}".encode())]
        scope = {
            "type": "http", "method": "GET", "path": "/", "raw_path": b"/", "scheme": "http", "query_string": b"",
            "headers": headers, "client": ("127.0.0.1", 1), KEEP_PLACE: lambda: kept.append(given),
        }  # fmt: skip
        made = asyncio.get_running_loop().create_server(lambda: PassedOn(config, ServerState(), {}), "127.0.0.1", 0)
        async with await made as owner:
            port = owner.sockets[0].getsockname()[1]

            async def connect() -> Owner:
                return Owner(*await asyncio.open_connection("127.0.0.1", port))

            await passing_on(connect, lambda: None)(scope, receive, send)
        return sent, kept

    for given, status in ((token, 200), ("another token of theirs", 401)):
        sent, kept = asyncio.run(asyncio.wait_for(play(given), 20))
        assert sent[0]["status"] == status
        assert kept == [given] * (status == 200)
        assert admin.KNOWN_HEADER not in dict(sent[0]["headers"])
