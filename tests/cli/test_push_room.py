"""What is looked at twice a second, however many push subscriptions there are: nothing, as long as none has changed."""

import asyncio
import json
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast
from urllib.request import Request, urlopen

import msgspec
import pytest
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage
from tests.support.sqlite import SqliteFactory

from veilmq.cli.serve import _push, push_room
from veilmq.cli.serve.push_room import _Subscriptions
from veilmq.model.commands import ChangeSubscription, CreateTopic, DeleteTopic, Subscribe, Unsubscribe
from veilmq.model.settings.topic import RetryStrategy, SubscriptionSettings, TopicKey
from veilmq.push.endpoints import EndpointStates
from veilmq.push.requests import KEY_FILE
from veilmq.push.room import PushRoom
from veilmq.server.auth import DevelopmentKeyring
from veilmq.server.clock import LeaseClock
from veilmq.server.config.settings import Settings
from veilmq.server.service import Service
from veilmq.store.sqlite.store import SqliteStore

NEWS, SPORTS = TopicKey(ACCOUNT, REGION, "news"), TopicKey(ACCOUNT, REGION, "sports")

WAIT_S = 30.0

Serve = Callable[..., Any]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    playing = Stage(SqliteFactory(tmp_path / "data"))
    yield playing
    playing.store.close()


def subscribe(stage: Stage, topic: TopicKey, name: str, **settings: Any) -> None:
    stage.do(CreateTopic(topic=topic, origin=TESTER))
    given = SubscriptionSettings(endpoint="there", **settings)
    stage.do(Subscribe(topic=topic, origin=TESTER, name=name, settings=given))


def test_a_change_gives_a_new_object_and_nothing_else_does(stage: Stage) -> None:
    subscriptions = _Subscriptions(cast(SqliteStore, stage.store).reader.topics)
    seen = [subscriptions()]
    assert seen == [{}]

    def changed() -> list[tuple[TopicKey, str]]:
        now = subscriptions()
        assert all(now is not each for each in seen)
        assert subscriptions() is now
        seen.append(now)
        return sorted(now, key=str)

    url = "http://there.example/"
    subscribe(stage, NEWS, "pushed", url=url)
    assert changed() == [(NEWS, "pushed")]
    subscribe(stage, SPORTS, "queued", queue=stage.create())
    assert changed() == [(NEWS, "pushed")]
    subscribe(stage, SPORTS, "pushed", url=url)
    assert changed() == [(NEWS, "pushed"), (SPORTS, "pushed")]
    stage.send(stage.create("another"))
    assert subscriptions() is seen[-1]

    strategy = RetryStrategy.EXPONENTIAL_DECAY
    stage.do(ChangeSubscription(topic=NEWS, origin=TESTER, name="pushed", change={"strategy": strategy}))
    assert changed() == [(NEWS, "pushed"), (SPORTS, "pushed")]
    assert seen[-1][NEWS, "pushed"].strategy is strategy
    stage.do(Unsubscribe(topic=SPORTS, origin=TESTER, name="pushed"))
    assert changed() == [(NEWS, "pushed")]
    stage.do(DeleteTopic(topic=NEWS, origin=TESTER))
    assert changed() == []


def test_the_endpoints_whose_pauses_are_shared_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_room, "_SHARE_S", 0.0)
    shares: list[dict[str, float]] = []

    class Sharing(Service):
        async def share(self, name: str, value: bytes, *, replaces: bool = False) -> bytes:
            shares.append(msgspec.msgpack.decode(value))
            raise asyncio.CancelledError

    class Room:
        endpoints = EndpointStates(verify=False)

    async def share() -> None:
        pauses = {f"http://{number}.example:80": 1.0 for number in range(push_room.PAUSES_MAX + 2)}
        Room.endpoints.resume(pauses)
        with suppress(asyncio.CancelledError):
            await push_room._share_pauses(Sharing(Settings(), DevelopmentKeyring(), LeaseClock()), cast(PushRoom, Room))

    asyncio.run(share())
    assert [len(pauses) for pauses in shares] == [push_room.PAUSES_MAX]


def test_pushes_that_end_by_a_bug_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """The task is waited for at the shutdown alone."""

    service = Service(Settings(), DevelopmentKeyring(), LeaseClock())

    async def end_by(error: BaseException) -> None:
        async def pushing(*_: object) -> None:
            raise error

        await asyncio.wait([asyncio.create_task(_push(service, pushing))])

    asyncio.run(end_by(asyncio.CancelledError()))
    assert not caplog.records
    assert service.push_fault is None
    bug = ZeroDivisionError("a bug")
    asyncio.run(end_by(bug))
    (told,) = caplog.records
    assert "no pushes any more" in told.getMessage()
    assert told.exc_info is not None
    assert told.exc_info[1] is bug
    assert service.push_fault == "until a restart: pushing failed with an error"


@pytest.mark.slow
def test_a_server_without_files_pushes_as_soon_as_it_has_them(serve: Serve) -> None:
    """Once as the first subscription comes, which opens the room, and once as the room calls."""
    server = serve("--push-allow", "127.0.0.0/8", "--push-allow", "::1/128")
    admin = server.wait_for("admin listens on ").split()[-1]
    mns = HTTPConnection(server.wait_for("mns listens on ").split("//")[-1])
    got: SimpleQueue[bytes] = SimpleQueue()

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(204)
            self.end_headers()

    def ask(method: str, path: str, body: str) -> None:
        mns.request(method, path, body)  # over the connection that is there already
        answer = mns.getresponse()
        answer.read()
        assert answer.status < 300

    def publish(text: str) -> None:
        ask("POST", "/topics/news/messages", f"<Message><MessageBody>{text}</MessageBody></Message>")

    with HTTPServer(("127.0.0.1", 0), Endpoint) as endpoint, closing(mns):
        threading.Thread(target=endpoint.serve_forever).start()
        try:
            ask("PUT", "/topics/news", "<Topic/>")
            limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
            url = f"http://localhost:{endpoint.server_port}/"
            settings = f"<Endpoint>{url}</Endpoint><NotifyContentFormat>SIMPLIFIED</NotifyContentFormat>"
            ask("PUT", "/topics/news/subscriptions/s", f"<Subscription>{settings}</Subscription>")
            publish("first")
            assert "Too many open files" in server.wait_for("no pushes at present")
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
            assert got.get(timeout=WAIT_S) == b"first"
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
            publish("second")
            assert "Too many open files" in server.wait_for("pushes wait")
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
            assert got.get(timeout=WAIT_S) == b"second"
        finally:
            endpoint.shutdown()
    with urlopen(f"{admin}/metrics", timeout=WAIT_S) as answer:
        found = answer.read().decode()
    assert 'veilmq_pushes_total{result="failed"} 0.0' in found
    assert 'veilmq_pushes_total{result="delivered"} 2.0' in found
    assert server.stop() == 0


def test_a_damaged_key_is_told_and_shown(serve: Serve, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / KEY_FILE).write_bytes(b"")  # what a power cut may leave
    server = serve()
    admin = server.wait_for("admin listens on ").split()[-1]
    mns = server.wait_for("mns listens on ").split()[-1]

    def asked(url: str, method: str = "GET", body: str = "") -> bytes:
        with urlopen(Request(url, body.encode(), method=method), timeout=WAIT_S) as answer:
            return bytes(answer.read())

    def warnings() -> dict[str, str]:
        return dict(json.loads(asked(admin + "/health/ready"))["warnings"])

    assert warnings() == {}, "nothing is to be pushed"
    asked(mns + "/topics/news", "PUT", "<Topic/>")
    endpoint = "<Subscription><Endpoint>http://there.example/</Endpoint></Subscription>"
    asked(mns + "/topics/news/subscriptions/s", "PUT", endpoint)
    assert f"{KEY_FILE} holds no RSA key: restore it, or remove it" in server.wait_for("no pushes")
    assert "the key cannot be had" in warnings()["pushes"]
    assert server.stop() == 0
