"""Declared queues meet a store: many in one commit, and as if they had come one after the other."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.contract.stage import TESTER, Stage, expect
from tests.support.sqlite import SqliteFactory

from veilmq.model.commands import AnyCommand, DescribeQueue, ListQueues
from veilmq.model.outcomes import Outcome, QueueDescribed, QueuesListed
from veilmq.model.settings.queue import QueueKey
from veilmq.server.auth import Account
from veilmq.server.config import FileInvalid
from veilmq.server.config.queues_file import DECLARED_TOGETHER, declare, read

HOME = Account("111111111111")


class Called(Stage):
    """A stage whose batches are counted."""

    calls = 0

    def declare(self, text: str) -> None:
        path = self.path / "queues.toml"
        path.write_text(text)
        self.calls = 0
        asyncio.run(declare(read(path, [HOME]), self))

    def __init__(self, path: Path) -> None:
        super().__init__(SqliteFactory(path / "data"))
        self.path = path

    async def __call__(self, *commands: AnyCommand) -> Sequence[Outcome]:
        self.calls += 1
        return self.batch(commands).outcomes

    def alias(self, name: str) -> str | None:
        key = QueueKey(HOME.id, HOME.home_region, name)
        return expect(self.do(DescribeQueue(queue=key, origin=TESTER)), QueueDescribed).info.settings.alias


@pytest.fixture
def called(tmp_path: Path) -> Iterator[Called]:
    stage = Called(tmp_path)
    yield stage
    stage.store.close()


def test_many_are_created_in_a_few_commits(called: Called) -> None:
    count = 2 * DECLARED_TOGETHER + 1
    text = "\n".join(f'[[queue]]\nname = "queue-{number}"' for number in range(count))
    for _ in range(2):
        called.declare(text)
        assert called.calls == 3
    listed = ListQueues(origin=TESTER, account=HOME.id, region=HOME.home_region)
    assert len(expect(called.do(listed), QueuesListed).queues) == count


def test_what_one_gives_up_the_next_may_take(called: Called) -> None:
    called.declare('[[queue]]\nname = "First_"\nalias = "the-name"')
    called.declare('[[queue]]\nname = "First_"\nalias = "another"\n[[queue]]\nname = "Second_"\nalias = "the-name"')
    assert [called.alias(name) for name in ("First_", "Second_")] == ["another", "the-name"]


def test_a_change_of_one_among_many_is_made(called: Called) -> None:
    plain = '[[queue]]\nname = "orders"\ndelay = "{}s"\n[[queue]]\nname = "mail"'
    called.declare(plain.format(1))
    called.declare(plain.format(2))
    key = QueueKey(HOME.id, HOME.home_region, "orders")
    info = expect(called.do(DescribeQueue(queue=key, origin=TESTER)), QueueDescribed).info
    assert info.settings.delay_us == 2_000_000


def test_one_that_is_refused_is_named(called: Called) -> None:
    called.declare('[[queue]]\nname = "First_"\nalias = "the-name"')
    with pytest.raises(FileInvalid, match="line 3: queue Second_: alias: the-name is another queue's name or alias"):
        called.declare('[[queue]]\nname = "other"\n[[queue]]\nname = "Second_"\nalias = "the-name"')
    called.declare('[[queue]]\nname = "Second_"\nalias = "own"')
    with pytest.raises(FileInvalid, match="line 1: queue Second_: alias: the-name is another queue's name or alias"):
        called.declare('[[queue]]\nname = "Second_"\nalias = "the-name"')


def test_a_name_that_is_an_alias_is_told(called: Called) -> None:
    with pytest.raises(FileInvalid, match="line 4: queue taken: another queue has this name as its alias"):
        called.declare('[[queue]]\nname = "Orders_1"\nalias = "taken"\n[[queue]]\nname = "taken"\n')


def test_content_deduplication_is_switched_off(called: Called) -> None:
    key = QueueKey(HOME.id, HOME.home_region, "orders.fifo")
    for wanted in ("true", "false"):
        called.declare(f'[[queue]]\nname = "orders.fifo"\ncontent_deduplication = {wanted}')
        info = expect(called.do(DescribeQueue(queue=key, origin=TESTER)), QueueDescribed).info
        assert str(info.settings.content_deduplication).lower() == wanted
