"""The quarantine: pages of it, drops from it, what the log says of it, and the books."""

import logging

import pytest
from tests.support.contract.stage import TESTER, Stage, expect, refused
from tests.support.sqlite import store_of

from veilmq.admin.history.messages import quarantine_page
from veilmq.model.commands import DeleteQueue, DropQuarantined, Receive
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.messages import Extras, id_text
from veilmq.model.outcomes import Deleted, Sent
from veilmq.model.settings.queue import QueueKey
from veilmq.store.reader import DamagedMessage
from veilmq.store.sqlite.batch.quarantine import LINES_MAX
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.tools import check
from veilmq.testing.for_each import for_each
from veilmq.testing.replaying import replay

PAGE_BYTES = 1 << 20


def quarantine(stage: Stage, queue: QueueKey, *sent: Sent) -> None:
    """Damage the bodies, and have a receive meet them."""
    stage.store.close()
    for each in sent:
        stage.factory.damage(each.sequence)
    stage.store = stage.factory.open()
    assert stage.receive(queue, 100) == []


def page(
    stage: Stage, behind: int = 0, limit: int = 100, body_bytes_max: int = PAGE_BYTES, only: QueueKey | None = None
) -> tuple[list[DamagedMessage], bool]:
    with store_of(stage).reader.look() as view:
        return view.quarantined(lambda queue: only in (None, queue), behind, limit, body_bytes_max)


def drop(queue: QueueKey, message: bytes) -> DropQuarantined:
    return DropQuarantined(queue=queue, origin=TESTER, message=message)


def count(stage: Stage) -> int:
    with store_of(stage).reader.look() as view:
        return view.quarantined_count()


def problems(stage: Stage) -> list[str]:
    report = check(store_of(stage).directory.database, is_owner=True)
    assert report.books == "balanced"
    return [problem.kind for problem in report.problems]


def test_a_damaged_message_is_shown_whole(stage: Stage) -> None:
    queue = stage.create()
    sent = stage.send(queue, "body", extras=Extras(type="film"))
    quarantine(stage, queue, sent)
    ((found,), more) = page(stage)
    assert not more
    assert (found.queue, found.sequence, found.id, found.sent) == (queue, sent.sequence, sent.id, sent.sent)
    assert found.body == b"bo\xe4y"
    assert (found.type, found.extras) == ("film", Extras(type="film"))
    assert found.quarantined == stage.now


def test_attributes_that_cannot_be_read_are_exported_as_they_are(stage: Stage) -> None:
    queue = stage.create()
    sent = stage.send(queue, "body", extras=Extras(type="film"))
    stage.store.close()
    connection = connect(stage.factory.path / "veilmq.db")  # type: ignore[attr-defined]
    connection.execute("UPDATE message SET extras = x'c1ff' WHERE sequence = ?", (sent.sequence,))
    connection.close()
    stage.store = stage.factory.open()
    assert stage.receive(queue) == []
    (found,) = quarantine_page(store_of(stage).reader, lambda _: True, "", 10, bodies=True)["messages"]
    assert (found["attributes_readable"], found["attributes_base64"]) == (False, "wf8=")
    assert (found["md5"], found["type"]) == (found["md5_now"], "film")


def test_pages_end_with_their_bounds_and_skip_other_queues(stage: Stage) -> None:
    first, second = stage.create("first"), stage.create("second")
    mine = [stage.send(first, "12345") for _ in range(3)]
    others = [stage.send(second, "12345")]
    quarantine(stage, first, *mine)
    quarantine(stage, second, *others)
    sequences = [each.sequence for each in (*mine, *others)]
    found, more = page(stage, limit=3)
    assert ([each.sequence for each in found], more) == (sequences[:3], True)
    found, more = page(stage, behind=found[-1].sequence)
    assert ([each.sequence for each in found], more) == (sequences[3:], False)
    found, more = page(stage, body_bytes_max=6)
    assert ([each.sequence for each in found], more) == (sequences[:2], True)
    found, more = page(stage, limit=3, only=first)
    assert ([each.sequence for each in found], more) == (sequences[:3], False)
    assert count(stage) == 4
    stage.purge(first)
    assert count(stage) == 1
    assert [each.queue for each in page(stage)[0]] == [second]


@for_each("name", ["jobs", "jobs.fifo"], fresh="stage")
def test_a_drop_takes_one_message_and_the_books_balance(stage: Stage, name: str) -> None:
    queue = stage.create(name)
    extras = Extras(group="a")
    sent = [
        stage.send(queue, text, extras=Extras(group="a", deduplication_id=text) if "." in name else extras)
        for text in "12"
    ]
    quarantine(stage, queue, *sent)
    assert problems(stage) == ["quarantine", "quarantine"]
    start = stage.following()
    expect(stage.do(drop(queue, sent[0].id)), Deleted)
    (event,) = stage.events(start)
    assert (event.kind, event.message, event.sequence) == ("quarantine_dropped", id_text(sent[0].id), sent[0].sequence)
    assert (event.principal, event.body_bytes) == (TESTER.principal, 1)
    assert problems(stage) == ["quarantine"]
    expect(stage.do(drop(queue, sent[1].id)), Deleted)
    stage.reopen(kill=True)
    assert problems(stage) == []
    assert (page(stage), count(stage), stage.factory.rows(stage.store)) == (([], False), 0, 0)
    assert stage.counts(queue) == (0, 0, 0)
    assert replay(stage.events()).messages == {}


def test_a_purge_and_a_deletion_say_how_many_damaged_messages_went_with_them(stage: Stage) -> None:
    queue = stage.create()
    damaged = [stage.send(queue, text) for text in "12"]
    quarantine(stage, queue, *damaged)
    stage.send(queue, "sound")
    start = stage.following()
    stage.purge(queue)
    assert [(event.kind, event.detail["count"], event.detail["quarantined"]) for event in stage.events(start)] == [
        ("purged", 1, 2)
    ]
    assert problems(stage) == []
    quarantine(stage, queue, stage.send(queue, "3"))
    start = stage.following()
    stage.do(DeleteQueue(queue=queue, origin=TESTER))
    assert [event.detail for event in stage.events(start)] == [{"count": 0, "quarantined": 1}]
    assert problems(stage) == []


def test_the_books_tell_of_damaged_messages_that_are_gone_without_an_event(stage: Stage) -> None:
    queue = stage.create()
    quarantine(stage, queue, *[stage.send(queue, text) for text in "12"])
    stage.store.close()
    database = store_of(stage).directory.database
    with connect(database) as connection:
        connection.execute("DELETE FROM message WHERE sequence = (SELECT min(sequence) FROM quarantine)")
        connection.execute("DELETE FROM quarantine WHERE sequence = (SELECT min(sequence) FROM quarantine)")
    connection.close()
    found = [problem.text for problem in check(database, is_owner=False).problems if problem.kind == "books"]
    stage.store = stage.factory.open()
    assert found == [f"queue {queue}: has in quarantine 1 message, by its history 2"]


def test_only_what_is_in_quarantine_is_dropped(stage: Stage) -> None:
    queue, other = stage.create(), stage.create("other")
    sound, damaged = stage.send(queue, "sound"), stage.send(other, "damaged")
    quarantine(stage, other, damaged)
    start = stage.following()
    for command in (drop(queue, sound.id), drop(queue, damaged.id), drop(other, bytes(16))):
        refused(stage.do(command), ParameterInvalid)
    refused(stage.do(drop(QueueKey("0" * 12, "us-east-1", "none"), damaged.id)), QueueMissing)
    assert stage.following() == start
    assert (count(stage), len(stage.peek(queue))) == (1, 1)
    first, second = stage.batch([drop(other, damaged.id)] * 2).outcomes
    expect(first, Deleted)
    refused(second, ParameterInvalid)


def test_each_is_an_error_line_when_it_is_committed(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    queue = stage.create()
    sent = stage.send(queue, "x")
    stage.store.close()
    stage.factory.damage(sent.sequence)
    stage.store = stage.factory.open()
    caplog.clear()
    applied = stage.store.apply([Receive(queue=queue, origin=TESTER)], stage.now)
    assert applied.wrote
    assert caplog.records == []
    stage.store.commit()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    said = record.getMessage()
    assert said.startswith(f"queue {queue}: message {id_text(sent.id)}, sent 20")
    assert said.endswith("see `veilmq quarantine list --all`")


def test_a_batch_that_was_rolled_back_says_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    queue = stage.create()
    sent = stage.send(queue, "x")
    stage.store.close()
    stage.factory.damage(sent.sequence)
    stage.store = stage.factory.open()
    caplog.clear()
    writer = store_of(stage)._writer
    stage.store.apply([Receive(queue=queue, origin=TESTER)], stage.now)
    writer.rollback()
    assert stage.receive(stage.create("other")) == []
    assert caplog.records == []
    assert stage.receive(queue) == []
    assert len(caplog.records) == 1


def test_lines_are_bounded_and_the_rest_is_counted(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    queues = [stage.create(name) for name in ("first", "second", "third")]
    sent = [
        stage.send(queue, "x") for queue, some in zip(queues, (LINES_MAX + 7, 2, 1), strict=True) for _ in range(some)
    ]
    caplog.clear()
    quarantine(stage, queues[0], *sent)
    lines = [record.getMessage() for record in caplog.records]
    assert [text.endswith("only counted") for text in lines] == [False] * (LINES_MAX - 1) + [True]
    caplog.clear()
    stage.later(MINUTE_US - SECOND_US)
    assert stage.receive(queues[1], 10) == []
    assert caplog.records == []
    stage.later(SECOND_US)
    assert stage.receive(queues[2]) == []
    (record,) = caplog.records
    assert record.getMessage().endswith("; 9 more were set apart since the last line")
