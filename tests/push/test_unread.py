"""Endpoints that do not read what they are sent: their connections go, and what they mean to read they may."""

import asyncio
import socket
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from stage import NEWS, TESTER, Endpoint, Stage, until

from veilmq.model.commands import Publish, Unsubscribe
from veilmq.model.settings.topic import RetryStrategy
from veilmq.push.endpoints import connections
from veilmq.testing.for_each import for_each

LARGE = "x" * 1_000_000
"""More than what the system takes for an endpoint that reads nothing, if both buffers are small."""
DIGEST = md5(LARGE.encode(), usedforsecurity=False).digest()
PUBLISH = Publish(topic=NEWS, origin=TESTER, body=LARGE, md5=DIGEST, size_bytes=1)  # past the limit of a topic
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
ESTABLISHED = "01"


class Unread:
    """Takes connections, reads a few bytes of each, and answers, or does not."""

    def __init__(self, answer: bytes = b"", reads_after_s: float | None = None) -> None:
        """reads_after_s: from the answer until it reads the rest; None: never."""
        self.answer, self.reads_after_s = answer, reads_after_s
        self.read: list[bytearray] = []
        self._taken: list[socket.socket] = []

    async def __aenter__(self) -> "Unread":
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1_000)  # the sender's goes by it
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._serving = [asyncio.create_task(self._accept())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for each in [self._listener, *self._taken]:
            each.close()

    async def _accept(self) -> None:
        while True:
            taken, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            taken.setblocking(False)
            self._taken.append(taken)
            self._serving.append(asyncio.create_task(self._serve(taken)))

    async def _serve(self, taken: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        got = bytearray(await loop.sock_recv(taken, 10))
        await loop.sock_sendall(taken, self.answer)
        if self.reads_after_s is None:
            return
        await asyncio.sleep(self.reads_after_s)
        while piece := await loop.sock_recv(taken, 1 << 20):
            got += piece
        self.read.append(got)

    def open(self) -> int:
        """How many connections this process has to it."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[2].endswith(f":{self.port:04X}") and row[3] == ESTABLISHED for row in rows)


@for_each("answer", [b"", ANSWER], ids=["never answers", "answers first"])
def test_who_does_not_read_has_no_connection_left(play: Any, answer: bytes) -> None:
    async def test(stage: Stage) -> None:
        async with Unread(answer) as endpoint, Endpoint() as healthy:
            await stage.subscribe("s", endpoint.url, strategy=RetryStrategy.EXPONENTIAL_DECAY)
            for _ in range(3):
                await stage.do(PUBLISH)
            await until(lambda: len(stage.pushes()) == 3)
            errors = {each.detail.get("error") for each in stage.pushes()}
            assert errors == ({None} if answer else {"no answer within 2 s"})
            await until(lambda: endpoint.open() == 0)
            # Nor does it hold up those who look after the connections.
            await stage.do(Unsubscribe(topic=NEWS, origin=TESTER, name="s"))
            await stage.subscribe("t", healthy.url)
            await stage.publish()
            await until(lambda: len(healthy.got) == 1)
            assert endpoint.open() == 0

    play(test, timeout_s=2)


def test_a_status_that_came_in_time_counts(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_REST_S", 3.0)

    async def test(stage: Stage) -> None:
        async with Unread(ANSWER) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.do(PUBLISH)
            await until(lambda: len(stage.pushes()) == 1)
            assert stage.room.results == {"delivered": 1}

    play(test, timeout_s=2)


def test_who_answers_first_may_read_afterwards(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Unread(ANSWER, reads_after_s=0.1) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.do(PUBLISH)
            await until(lambda: len(endpoint.read) == 1)
            assert endpoint.read[0].endswith(b"</Notification>")
            await stage.drained("s")
            assert stage.room.results == {"delivered": 1}

    play(test)
