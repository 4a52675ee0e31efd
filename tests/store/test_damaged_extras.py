"""Damaged extras: the message is quarantined wherever it is met, and everything else goes on."""

from pathlib import Path

import msgspec
import pytest
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, expect, sending

from veilmq.model.commands import CreateTopic, ListMoves, Publish, StartMove, Subscribe
from veilmq.model.instant import DAY_US, SECOND_US
from veilmq.model.messages import Attribute, Extras
from veilmq.model.moves import MoveStatus
from veilmq.model.outcomes import MovesListed, MoveStarted, Published, Subscribed
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.model.settings.topic import SubscriptionSettings, TopicKey
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.disk.rows import pack_extras, read_extras
from veilmq.store.sqlite.tools import check

TYPED = Extras(type="film")


NO_MSGPACK = b"\xc1"
NO_UTF8 = pack_extras(TYPED).replace(b"film", b"fil\xed")


def damage(stage: Stage, sequence: int, extras: bytes = NO_MSGPACK) -> Path:
    """Make the extras of the message unreadable; the database's path."""
    path: Path = stage.factory.path / "veilmq.db"  # type: ignore[attr-defined]
    stage.store.close()
    connection = connect(path)
    connection.execute("UPDATE message SET extras = ? WHERE sequence = ?", (extras, sequence))
    connection.close()
    stage.store = stage.factory.open()
    return path


def test_no_flipped_bit_in_them_goes_unnoticed() -> None:
    extras = Extras(attributes=(Attribute("kind", "String", "value"),), group="a", error="text")
    stored = pack_extras(extras)
    assert read_extras(stored) == extras
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        assert read_extras(bytes(damaged)) in (None, extras), bit


def test_what_was_stored_without_a_checksum_is_read() -> None:
    assert read_extras(msgspec.msgpack.encode(TYPED)) == TYPED


def quarantined(stage: Stage) -> list[int | None]:
    return [event.sequence for event in stage.events() if event.kind == "quarantined"]


@pytest.mark.parametrize("extras", [NO_MSGPACK, NO_UTF8])
@pytest.mark.parametrize("groups", [(None, None), ("a", "b")])
def test_a_peek_passes_it_over_and_a_receive_sets_it_apart(
    stage: Stage, groups: tuple[str | None, ...], extras: bytes
) -> None:
    queue = stage.create()
    first, _ = (stage.send(queue, group or "x", extras=Extras(group=group, type="film")) for group in groups)
    path = damage(stage, first.sequence, extras)
    assert [problem.text for problem in check(path).problems] == [
        f"message {first.sequence}: its attributes cannot be read"
    ]
    assert len(stage.peek(queue)) == 1
    assert len(stage.receive(queue, 10)) == 1
    assert quarantined(stage) == [first.sequence]


def test_a_move_task_goes_on_without_it(stage: Stage) -> None:
    dead = stage.create("dead")
    queue = stage.create(redrive=RedrivePolicy(dead, 1))
    for text in "123":
        stage.send(queue, text, extras=TYPED)
    stage.receive(queue, 10, lease_us=0)
    assert stage.receive(queue, 10) == []
    damaged = stage.peek(dead)[1].sequence
    damage(stage, damaged)
    expect(stage.do(StartMove(queue=dead, origin=TESTER)), MoveStarted)
    stage.later(SECOND_US)
    stage.sweep()
    assert quarantined(stage) == [damaged]
    (task,) = expect(stage.do(ListMoves(queue=dead, origin=TESTER)), MovesListed).tasks
    assert (task.status, task.moved) == (MoveStatus.COMPLETED, 2)
    assert bodies(stage.receive(queue, 10)) == ["1", "3"]


def test_an_attempt_is_no_more(stage: Stage) -> None:
    queue = stage.create("jobs.fifo", content_deduplication=True)
    sent = stage.send(queue, "a", extras=Extras(group="a"))
    stage.take(queue, attempt_id="x")
    stage.send(queue, "b", extras=Extras(group="b"))
    damage(stage, sent.sequence)
    assert bodies(stage.receive(queue, attempt_id="x")) == ["b"]


def test_a_push_that_expires_does_not_stop_the_sweeper(stage: Stage) -> None:
    topic, dead = TopicKey(ACCOUNT, REGION, "news"), stage.create("dead")
    stage.do(CreateTopic(topic=topic, origin=TESTER))
    settings = SubscriptionSettings(endpoint="http://x/", url="http://x/", dead_letter_queue=dead)
    expect(stage.do(Subscribe(topic=topic, origin=TESTER, name="push", settings=settings)), Subscribed)
    for text in ("damaged", "sound"):
        body = sending(dead, text)
        publish = Publish(topic=topic, origin=TESTER, body=text, md5=body.md5, size_bytes=body.size_bytes)
        expect(stage.do(publish), Published)
    (first, _) = stage.peek(QueueKey(ACCOUNT, REGION, "news/push"))
    damage(stage, first.sequence)
    stage.later(DAY_US + SECOND_US)
    stage.sweep()
    assert quarantined(stage) == [first.sequence]
    assert bodies(stage.receive(dead, 10)) == ["sound"]
