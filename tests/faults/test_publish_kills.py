"""Ten thousand publishes to twenty queues, the server killed amid them: a publish is in every queue, or in none.

Strategy: one server process with a credentials file, publishers on many connections that sign every request, SIGKILL at
seeded moments. A publisher repeats what was not acknowledged, and nothing else. The copies are JSON notifications,
which name the publish (`MessageId`) that they are of. So the rule can be read off the store in the end: each
acknowledged publish has exactly one copy in each of the twenty queues; one that was not acknowledged may be there
beside its repetition, under its own id, and then in all twenty, once.
"""

import asyncio
import base64
import hmac
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support.contract.stage import TESTER
from tests.support.sqlite import SMALL

from veilmq.model.commands import Receive
from veilmq.model.instant import DAY_US
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing import chance
from veilmq.testing.local import ServerProcess

QUEUES = [f"q{number:02}" for number in range(20)]
CONNECTIONS = 48
KEY, SECRET = "AKIDFANOUT", "a secret of this test"
CREDENTIALS = f"""[[account]]
id = "000000000000"

[[account.key]]
id = "{KEY}"
secret = "{SECRET}"
"""
SEED = 20_621
_ID = re.compile(rb"<MessageId>([0-9A-F]{32})</MessageId>")


class Publishers:
    """Clients of one server that goes and comes back."""

    def __init__(self, server: ServerProcess, kills: list[int], moments_s: Iterator[float]) -> None:
        self.server = server
        self.acknowledged: dict[str, str] = {}
        """Body -> id of the publish."""
        self.unanswered = 0
        """Publishes that were sent and never answered."""
        self.killed = 0
        self._kills = kills
        self._moments_s = moments_s
        self._up = asyncio.Event()
        self._restarts: set[asyncio.Task[None]] = set()
        self._killing = asyncio.Lock()

    async def run(self, count: int) -> None:
        """Publish so many messages, or more until the server was killed as often as it should be."""
        self._up.set()
        await self._prepare()
        bodies = self._bodies(count)
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(self._publish_all(bodies))
        await asyncio.gather(*self._restarts)

    def _bodies(self, count: int) -> Iterator[str]:
        for number in itertools.count():
            if number >= count and not self._kills and all(restart.done() for restart in self._restarts):
                return
            yield f"news {number}"

    async def _prepare(self) -> None:
        line = await self._connect()
        assert (await ask(line, "PUT", "/topics/news", "<Topic/>"))[0] == 201
        for name in QUEUES:
            assert (await ask(line, "PUT", f"/queues/{name}", "<Queue/>"))[0] == 201
            settings = f"<Endpoint>acs:mns:x:y:queues/{name}</Endpoint><NotifyContentFormat>JSON</NotifyContentFormat>"
            path = f"/topics/news/subscriptions/to-{name}"
            assert (await ask(line, "PUT", path, f"<Subscription>{settings}</Subscription>"))[0] == 201
        line[1].close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            await self._up.wait()
            address = urlsplit(self.server.mns)
            if address.hostname is not None:
                try:
                    return await asyncio.open_connection(address.hostname, address.port)
                except OSError:
                    pass  # killed a moment ago
            await asyncio.sleep(0.01)

    async def _publish_all(self, bodies: Iterator[str]) -> None:
        line = await self._connect()
        for body in bodies:
            document = f"<Message><MessageBody>{body}</MessageBody></Message>"
            while True:
                try:
                    status, answer = await ask(line, "POST", "/topics/news/messages", document)
                    break
                except (OSError, asyncio.IncompleteReadError):
                    self.unanswered += 1
                    line[1].close()
                    line = await self._connect()
            found = _ID.search(answer)
            assert status == 201, answer
            assert found is not None
            self.acknowledged[body] = found[1].decode()
            if self._kills and len(self.acknowledged) >= self._kills[0]:
                self._kills.pop(0)
                self._restarts.add(asyncio.create_task(self._kill()))
        line[1].close()

    async def _kill(self) -> None:
        async with self._killing:  # the next one may be due before the server is up again
            await asyncio.sleep(next(self._moments_s))
            self._up.clear()
            self.killed += 1
            await asyncio.to_thread(self.server.kill)
            await asyncio.to_thread(self.server.start)
            self._up.set()


async def ask(
    line: tuple[asyncio.StreamReader, asyncio.StreamWriter], method: str, target: str, body: str
) -> tuple[int, bytes]:
    """Status and body of a signed request's answer. Raises OSError, IncompleteReadError if none came."""
    reader, writer = line
    date = formatdate(usegmt=True)
    text = f"{method}\n\ntext/xml\n{date}\nx-mns-version:2015-06-06\n{target}"
    signature = base64.b64encode(hmac.digest(SECRET.encode(), text.encode(), "sha1")).decode()
    raw = body.encode()
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: here\r\nDate: {date}\r\nx-mns-version: 2015-06-06\r\n"
        f"Content-Type: text/xml\r\nAuthorization: MNS {KEY}:{signature}\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    writer.write(head.encode() + raw)
    await writer.drain()
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    length = next((int(each[15:]) for each in lines if each.startswith(b"content-length:")), 0)
    return int(lines[0].split(b" ", 2)[1]), await reader.readexactly(length)


def copies(data: Path) -> dict[str, Counter[tuple[str, str]]]:
    """By queue: how many copies of which publish, as (id, body)."""
    store = SqliteStore(data, SMALL)
    now = store.mark
    try:
        found = {}
        for name in QUEUES:
            counter = found[name] = Counter[tuple[str, str]]()
            key = QueueKey("000000000000", "us-east-1", name)
            receive = Receive(queue=key, origin=TESTER, count_max=1_000, lease_us=DAY_US)
            while True:
                applied = store.apply([receive], now)
                (outcome,) = applied.outcomes
                assert isinstance(outcome, Received)
                if not outcome.messages:
                    break
                store.commit()
                told = [json.loads(message.body) for message in outcome.messages]
                counter.update((each["MessageId"], each["Message"]) for each in told)
        return found
    finally:
        store.close()


def play(tmp_path: Path, count: int, kills: list[int]) -> Publishers:
    """Publish and kill; the rule of this module is checked."""
    credentials = tmp_path / "credentials.toml"
    with open(os.open(credentials, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        file.write(CREDENTIALS)
    server = ServerProcess(tmp_path, "--credentials", str(credentials)).start()
    try:
        draw = chance(SEED)
        publishers = Publishers(server, kills, iter([draw.random() * 0.02 for _ in kills]))
        asyncio.run(publishers.run(count))
    finally:
        server.kill()  # the last one: what was acknowledged a moment ago is there, too
    found = copies(tmp_path / "data")
    told = {(identity, body) for body, identity in publishers.acknowledged.items()}
    assert len(told) == len(publishers.acknowledged) >= count
    first = found[QUEUES[0]]
    assert told - first.keys() == set(), "acknowledged and lost"
    # What was never acknowledged but happened was repeated; nobody invents a message.
    extra = first.keys() - told
    assert len(extra) <= publishers.unanswered
    assert {body for _, body in extra} <= publishers.acknowledged.keys()
    for name in QUEUES:
        assert found[name].keys() == first.keys(), f"{name} and {QUEUES[0]} differ: a publish reached some only"
        assert set(found[name].values()) == {1}, f"{name} has a copy twice"
    return publishers


def test_a_killed_server_has_a_publish_in_all_queues_or_in_none(tmp_path: Path) -> None:
    publishers = play(tmp_path, 400, [200])
    assert publishers.killed == 1
    assert publishers.unanswered > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_publishes_to_twenty_queues_amid_kills(tmp_path: Path) -> None:
    kills = sorted(chance(SEED).sample(range(300, 9_700), 8))
    publishers = play(tmp_path, 10_000, kills)
    assert publishers.killed == 8
    assert publishers.unanswered > 0, "no publish was under way at any kill"
