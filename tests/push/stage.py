"""A stage for pushes: a real engine and store, the room, and endpoints that are real servers on loopback."""

import asyncio
import base64
import datetime
import functools
import ssl
import tempfile
from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from veilmq.engine.directory import open_directory
from veilmq.model.commands import CreateQueue, CreateTopic, DescribeQueue, Origin, Publish, Receive, Subscribe
from veilmq.model.errors import VeilError
from veilmq.model.messages import Extras
from veilmq.model.outcomes import QueueDescribed, Received
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import SubscriptionSettings, TopicKey, hidden_queue
from veilmq.push.network import networks
from veilmq.push.requests import CERTIFICATE_FILE, KEY_FILE, Signer, string_to_sign
from veilmq.push.room import PushRoom, Subscription
from veilmq.server.clock import LeaseClock, wall
from veilmq.server.shell import Shell
from veilmq.store import Options

TESTER = Origin("mns", "tester")
NEWS = TopicKey("000000000000", "us-east-1", "news")
OPTIONS = Options(reserve_bytes=4096, floor_bytes=0)
WAIT_S = 90
CERTIFICATE_URL = "http://127.0.0.1:9326/veilmq-push.pem"


class Request:
    """What an endpoint got."""

    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode().split("\r\n")
        self.method, self.target, _ = first.split(" ")
        self.headers = dict(line.split(": ", 1) for line in lines)
        self.body = body

    def verify(self, certificate: bytes) -> None:
        """Check the signature as a receiver does. Raises InvalidSignature."""
        lower = {name.lower(): value for name, value in self.headers.items()}
        text = string_to_sign(self.method, self.target, lower)
        key = x509.load_pem_x509_certificate(certificate).public_key()
        assert isinstance(key, rsa.RSAPublicKey)
        key.verify(base64.b64decode(lower["authorization"]), text.encode(), padding.PKCS1v15(), hashes.SHA1())
        digest = md5(self.body, usedforsecurity=False).hexdigest()
        assert base64.b64decode(lower["content-md5"]).decode() == digest


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection. Raises IncompleteReadError at its end."""
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    if not head:
        return None
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-len"))
    return Request(head, await reader.readexactly(length))


class Endpoint:
    """An HTTP server that answers what it is told, and keeps what it got."""

    def __init__(
        self, answer: bytes = b"HTTP/1.1 204 No Content\r\n\r\n", delay_s: float = 0,
        tls: tuple[Path, Path] | None = None,
    ) -> None:  # fmt: skip
        """tls: files of a certificate and its key."""
        self.answer = answer
        self.delay_s = delay_s
        self._tls: ssl.SSLContext | None = None
        if tls is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(*tls)
        self.got: list[Request] = []
        self.now = self.most = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Endpoint":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}/hook?x=1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if not self._server.is_serving():  # accepted just before the end
                return
            while request := await read_request(reader):
                self.now += 1
                self.most = max(self.most, self.now)
                await asyncio.sleep(self.delay_s)
                self.now -= 1
                self.got.append(request)
                writer.write(self.answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@functools.cache
def signer() -> Signer:
    """One for all tests: a key takes long to make."""
    with tempfile.TemporaryDirectory() as directory:
        return Signer.of_directory(Path(directory), datetime.datetime.now(datetime.UTC))


class Stage:
    """Engine, store and room; `play` runs a test on its loop."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.engine: Any = None
        """What runs the commands of a room that is opened from now on, instead of the shell."""
        self.options: dict[str, Any] = {"allowed": networks(["127.0.0.0/8"]), "look_s": 0.02} | options

    async def __aenter__(self) -> "Stage":
        self.clock = LeaseClock()
        engine, self.store = open_directory(self.directory, None, OPTIONS)
        self.clock.start(self.store.mark)
        self.shell = Shell(engine, self.store, self.clock)
        self.shell.start()
        self.signer = signer()
        await self.open()
        return self

    async def open(self) -> None:
        engine = self.shell if self.engine is None else self.engine
        self.room = PushRoom(engine, self.subscriptions, self.signer, CERTIFICATE_URL, wall=wall, **self.options)
        await self.room.start()

    async def __aexit__(self, *_: object) -> None:
        await self.room.stop()
        await self.shell.stop(5)
        self.store.close()

    def subscriptions(self) -> dict[Subscription, SubscriptionSettings]:
        return {
            (key, name): each.settings
            for key, topic in self.store.reader.topics.items()
            for name, each in topic.subscriptions.items()
            if each.settings.url is not None
        }

    async def subscribe(self, name: str, url: str, **settings: Any) -> None:
        await self.do(CreateTopic(topic=NEWS, origin=TESTER))
        given = SubscriptionSettings(endpoint=url, url=url, **settings)
        await self.do(Subscribe(topic=NEWS, origin=TESTER, name=name, settings=given))

    async def publish(self, body: str = "hello", tag: str | None = None) -> Any:
        digest = md5(body.encode(), usedforsecurity=False).digest()
        extras = Extras(tag=tag)
        return await self.do(
            Publish(topic=NEWS, origin=TESTER, body=body, md5=digest, size_bytes=len(body), extras=extras)
        )

    async def queue(self, name: str) -> QueueKey:
        key = QueueKey(NEWS.account, NEWS.region, name)
        await self.do(CreateQueue(queue=key, origin=TESTER))
        return key

    async def receive(self, queue: QueueKey) -> list[Any]:
        outcome = await self.do(Receive(queue=queue, origin=TESTER, count_max=10, wait_us=0))
        assert isinstance(outcome, Received)
        return outcome.messages

    async def waiting(self, name: str) -> int:
        outcome = await self.do(DescribeQueue(queue=hidden_queue(NEWS, name), origin=TESTER))
        assert isinstance(outcome, QueueDescribed)
        return outcome.info.counts.total

    async def drained(self, name: str) -> None:
        """Return when nothing waits to be pushed."""
        async with asyncio.timeout(WAIT_S):
            while await self.waiting(name):  # noqa: ASYNC110 as in `until`
                await asyncio.sleep(0.01)

    async def exhausted(self, name: str) -> None:
        """Let the four tries of BACKOFF_RETRY fail, and return when nothing waits any more."""
        for attempt in range(1, 5):
            await until(lambda n=attempt: len(self.pushes()) >= n)  # type: ignore[misc]
            await self.advance(21)
        await self.drained(name)

    async def do(self, command: Any) -> Any:
        (outcome,) = await self.shell.call(command)
        assert not isinstance(outcome, VeilError), outcome
        return outcome

    async def advance(self, seconds: float) -> None:
        await self.shell.advance(self.clock, int(seconds * 1e6))

    def pushes(self) -> list[Any]:
        return [each for each in self.events() if each.kind == "pushed"]

    def events(self) -> list[Any]:
        with self.store.reader.look() as view:
            assert view.bounds()[0] == 0
            names = view.names()
            return [names.record(offset, event) for offset, event in view.events_from(0)]

    @staticmethod
    def self_signed(directory: Path) -> tuple[Path, Path]:
        """Files of a key and of a certificate for 127.0.0.1 that no authority signed."""
        Signer.of_directory(directory, datetime.datetime.now(datetime.UTC))
        return directory / KEY_FILE, directory / CERTIFICATE_FILE


async def until(true: Callable[[], bool]) -> None:
    """Return when it is true. Fails in vain before the test's own limit, which would end the whole process."""
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110 it is true by the doing of sockets, which set no event
            await asyncio.sleep(0.005)
