"""Records change only for those who have seen the newest content, in a directory and in a table."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from veilmq.client.records import FileRecords, Records, Seen
from veilmq.client.records.tables import TableRecords
from veilmq.client.worker.guard import Begun, Busy, Claim, Done, RecordGuard


@pytest.fixture(params=["directory", "table"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Records]:
    if request.param == "directory":
        yield FileRecords(tmp_path / "records")
        return

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "records.db", timeout=30, check_same_thread=False)

    with TableRecords(connect, "kept", None, owner="records") as table:
        yield table


def test_a_change_of_what_is_no_longer_there_writes_nothing(records: Records) -> None:
    assert records.look("k").content is None
    assert not records.replace("k", b"1", b"2", 1), "there is none"
    assert records.replace("k", None, b"1", 1)
    assert not records.replace("k", None, b"2", 1), "there is one"
    assert records.replace("k", b"1", b"2", 2)
    assert not records.replace("k", b"1", b"3", 2), "it is another"
    assert records.look("k").content == b"2"
    assert records.look("K").content is None


def test_of_many_that_want_one_key_one_gets_it(records: Records) -> None:
    guard = RecordGuard(records)
    answers: list[object] = []
    start = threading.Barrier(8)

    def claim(number: int) -> None:
        start.wait()
        answers.append(guard.begin("k", Claim(str(number), 1, now=4e9, until=4e9 + 30)))

    work = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for each in work:
        each.start()
    for each in work:
        each.join()
    assert sorted(type(answer).__name__ for answer in answers) == ["Begun", *["Busy"] * 7]


class Between:
    """The records, with something that happens once between a look and the change."""

    def __init__(self, inner: Records) -> None:
        self.inner = inner
        self.happens = lambda: None

    def look(self, key: str) -> Seen:
        return self.inner.look(key)

    def replace(self, key: str, before: bytes | None, after: bytes, fence: int) -> bool:
        happens, self.happens = self.happens, lambda: None
        happens()
        return self.inner.replace(key, before, after, fence)


def test_a_result_is_stored_though_its_claim_was_prolonged_meanwhile(records: Records) -> None:
    between, other = Between(records), RecordGuard(records)
    guard = RecordGuard(between)
    assert guard.begin("k", Claim("a", 1, now=1_000, until=1_030)) == Begun(1)
    between.happens = lambda: other.prolong("k", 1, 1_000, 1_060)
    guard.finish("k", 1, "result")
    assert other.begin("k", Claim("b", 1, now=1_000, until=1_030)) == Done("result")


def test_a_claim_that_another_takes_meanwhile_is_refused(records: Records) -> None:
    between, other = Between(records), RecordGuard(records)
    between.happens = lambda: other.begin("k", Claim("b", 1, now=1_000, until=1_030))  # type: ignore[assignment, return-value]
    assert isinstance(RecordGuard(between).begin("k", Claim("a", 1, now=1_000, until=1_030)), Busy)
