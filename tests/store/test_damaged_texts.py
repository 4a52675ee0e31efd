"""Text of a stored message that is not UTF-8 any more: the message is quarantined, and everything else goes on."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.contract.stage import TESTER, Stage, bodies, expect, refused
from tests.support.sqlite import store_of

from veilmq.model.commands import Delete, DropQuarantined, StartMove
from veilmq.model.errors import LeaseTaken, MessageGone
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras, Failure, Report, Reported, id_text
from veilmq.model.outcomes import Deleted, MoveStarted, Sent
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.store.sqlite.disk import connect
from veilmq.store.sqlite.raw.logs import with_checksum
from veilmq.store.sqlite.tools import check
from veilmq.testing.for_each import for_each

COLUMNS = ("sender", "group_id", "type")


def send(stage: Stage, queue: QueueKey, body: str, group: str | None = "north") -> Sent:
    """A message with a type of its own, by which the file shows where it is."""
    return stage.send(queue, body, extras=Extras(group=group, type=f"type-of-{body}", deduplication_id=body))


def flip(stage: Stage, sequence: int, column: str, *, kind: bool = False) -> None:
    """Flip the top bit of that text in the file of the database, and open the store again. kind: flip the bit that says
    whether the value is text or a blob (SQLite, "Database File Format", 2.1: types 2n + 13 and 2n + 12)."""
    stage.store.close()
    path = store_of(stage).directory.database
    connection = connect(path)
    found: Any = connection.execute(
        "SELECT sender, ifnull(group_id, ''), type FROM message WHERE sequence = ?", (sequence,)
    ).fetchall()
    connection.close()
    texts, content = [text.encode() for text in found[0]], bytearray(path.read_bytes())
    row, at = b"".join(texts), COLUMNS.index(column)
    assert row in content
    for start in [each.start() for each in re.finditer(re.escape(row), content)]:  # also in rows that were deleted
        if kind:
            types = bytes(13 + 2 * len(text) for text in texts)
            content[content.rindex(types, start - 100, start) + at] ^= 0x01
        else:
            content[start + sum(map(len, texts[:at]))] ^= 0x80
    write_pages(path, content)
    stage.open()


def write_pages(path: Path, content: bytearray) -> None:
    """Write a database whose pages match their checksums: it was damaged before they were computed."""
    pages = (bytes(content[at : at + 4096]) for at in range(0, len(content), 4096))
    path.write_bytes(b"".join(map(with_checksum, pages)))


def change(stage: Stage, statement: str) -> None:
    """Change one row while the store is closed."""
    stage.store.close()
    connection = connect(store_of(stage).directory.database)
    connection.execute(statement)
    assert connection.changes() == 1
    connection.close()
    stage.open()


def quarantined(stage: Stage) -> list[int | None]:
    return [event.sequence for event in stage.events() if event.kind == "quarantined"]


def problems(stage: Stage) -> list[str]:
    return [problem.text for problem in check(store_of(stage).directory.database, is_owner=True).problems]


@for_each("name, group, column", [
    ("a", None, "sender"), ("b", None, "type"), *((f"fair-{column}", "north", column) for column in COLUMNS),
    *((f"{column}.fifo", "north", column) for column in COLUMNS),
])  # fmt: skip
def test_a_receive_sets_it_apart_and_delivers_the_others(
    stage: Stage, caplog: pytest.LogCaptureFixture, name: str, group: str | None, column: str
) -> None:
    queue = stage.create(name)
    damaged, *_ = (send(stage, queue, body, group) for body in ("damaged", "second", "third"))
    flip(stage, damaged.sequence, column)
    assert f"message {damaged.sequence}: its sender, group or type is not UTF-8" in problems(stage)
    assert bodies(stage.peek(queue)) == ["second", "third"]
    shown = [line["message"]["id"] for line in stage.factory.state(stage.store) if "message" in line]
    assert (shown[0], len(shown)) == (id_text(damaged.id), 3)
    with store_of(stage).reader.look() as view:
        assert len(view.visible(store_of(stage).reader.queues[queue], 0, 10)) == 3
    caplog.clear()
    assert bodies(stage.receive(queue, 10)) == ["second", "third"]
    assert quarantined(stage)[-1] == damaged.sequence
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    with store_of(stage).reader.look() as view:
        ((found,), _) = view.quarantined(lambda _: True, 0, 10, 1 << 20)
    texts = {"sender": "tester", "group_id": group, "type": "type-of-damaged"}
    texts[column] = f"\\x{ord(str(texts[column])[0]) ^ 0x80:x}{str(texts[column])[1:]}"
    assert {"sender": found.sender, "group_id": found.group, "type": found.type} == texts
    stage.sweep_snapshot()
    stage.reopen(kill=True)
    assert problems(stage) == [f"message {damaged.sequence} is in quarantine, damaged: see `veilmq quarantine list`"]
    expect(stage.do(DropQuarantined(queue=queue, origin=TESTER, message=damaged.id)), Deleted)
    assert problems(stage) == []
    stage.drop(queue)


@for_each("name, count", [("few", 1), ("many", 9)])
def test_in_flight_its_handle_counts_and_its_lease_ends(stage: Stage, name: str, count: int) -> None:
    """Few messages are read as rows, and many as one JSON text."""
    queue = stage.create(name)
    sent = [send(stage, queue, f"{name}-{number}", None) for number in range(2 * count)]
    held = stage.receive(queue, 2 * count, lease_us=MINUTE_US)
    flip(stage, sent[0].sequence, "type")
    flip(stage, sent[-1].sequence, "type")
    deletes = [Delete(queue=queue, origin=TESTER, handle=each.handle, arrived=stage.now) for each in held[:count]]
    assert [type(outcome) for outcome in stage.batch(deletes).outcomes] == [Deleted] * count
    stage.later(MINUTE_US)
    stage.sweep()
    assert stage.counts(queue) == (count, 0, 0)
    assert len(stage.receive(queue, 100)) == count - 1
    assert quarantined(stage)[-1] == sent[-1].sequence


def test_it_expires_like_any_other(stage: Stage) -> None:
    queue = stage.create(retention_us=HOUR_US)
    damaged = send(stage, queue, "damaged")
    flip(stage, damaged.sequence, "group_id")
    stage.later(HOUR_US)
    stage.sweep_expired()
    assert stage.kinds()[-1] == "expired"
    assert problems(stage) == []


def test_nothing_carries_it_to_another_queue(stage: Stage) -> None:
    dead = stage.create("dead")
    queue = stage.create(redrive=RedrivePolicy(dead, 1))
    first, second, _ = (send(stage, queue, body, None) for body in ("first", "second", "third"))
    assert len(stage.receive(queue, 10, lease_us=0)) == 3
    flip(stage, first.sequence, "type")
    assert stage.receive(queue, 10) == []
    assert quarantined(stage) == [first.sequence]
    moved = stage.peek(dead)[0]
    assert moved.id == second.id
    flip(stage, moved.sequence, "sender")
    expect(stage.do(StartMove(queue=dead, origin=TESTER)), MoveStarted)
    stage.later(SECOND_US)
    stage.sweep()
    assert quarantined(stage) == [first.sequence, moved.sequence]
    assert bodies(stage.receive(queue, 10)) == ["third"]


def test_a_refused_handle_and_a_repeated_receive_meet_it(stage: Stage) -> None:
    queue = stage.create("jobs.fifo")
    damaged = send(stage, queue, "damaged")
    old = stage.take(queue, lease_us=SECOND_US)
    stage.later(SECOND_US)
    stage.take(queue, attempt_id="x", lease_us=MINUTE_US)
    send(stage, queue, "sound", "south")
    flip(stage, damaged.sequence, "type")
    refused(stage.delete(queue, old.handle), LeaseTaken)
    assert bodies(stage.receive(queue, 10, attempt_id="x")) == ["sound"]


def test_a_value_that_became_a_blob_sets_its_message_apart(stage: Stage) -> None:
    queue = stage.create()
    for column in COLUMNS:
        sent = send(stage, queue, column)
        handles = [each.handle for each in stage.receive(queue, lease_us=SECOND_US)]
        flip(stage, sent.sequence, column, kind=True)
        send(stage, queue, f"after-{column}")
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == [f"after-{column}"]
        assert quarantined(stage)[-1] == sent.sequence
        refused(stage.delete(queue, *handles), MessageGone)


def test_a_damaged_error_of_a_worker_sets_the_message_apart(stage: Stage) -> None:
    queue = stage.create()
    sent = stage.send(queue, "1")
    handle = stage.take(queue).handle
    stage.extend(queue, handle, 0, report=Report(Reported.RETRY, Failure("Error", "text")))
    change(stage, "UPDATE lease SET failure = CAST(substr(failure, 1, 3) || x'ff' AS BLOB)")
    stage.send(queue, "2")
    assert bodies(stage.peek(queue)) == ["2"]
    assert bodies(stage.receive(queue, 10)) == ["2"]
    assert quarantined(stage) == [sent.sequence]


def test_a_damaged_record_of_an_attempt_is_dropped(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    queue = stage.create("jobs.fifo")
    send(stage, queue, "1")
    stage.take(queue, attempt_id="x")
    send(stage, queue, "2", "south")
    change(stage, "UPDATE receive_attempt SET leases = x'91'")
    caplog.clear()
    assert bodies(stage.receive(queue, 10, attempt_id="x")) == ["2"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert bodies(stage.receive(queue, 10, attempt_id="x")) == ["2"]


def test_the_store_starts_with_a_damaged_client_name(stage: Stage) -> None:
    """And the name is shown as far as it can be read."""
    queue = stage.create()
    stage.store.close()
    path = store_of(stage).directory.database
    content, name = bytearray(path.read_bytes()), b"testercontract"
    assert content.count(name) == 1
    content[content.index(name) + len("tester")] ^= 0x80
    write_pages(path, content)
    stage.open()
    stage.send(queue)
    assert [event.client for event in stage.events()] == ["\\xe3ontract", "contract"]
    assert "origin" in problems(stage)[0]
