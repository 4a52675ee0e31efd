"""The driver's side of a drain, without Spark: what its hooks do at every place where a process may end.

A driver is closed without a word, as a killed one ends: its lock goes, its leases run out.
"""

import resource
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from mns.account import Account
from tests.pipeline.drain_stage import Stage, come_again, left, send

import veilmq
from veilmq.client.large import LargeMessageQueue, PointerFormat
from veilmq.client.large.pointer import stated_bytes
from veilmq.client.messages import Message, Peeked, Template
from veilmq.client.unreadable import keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import InFlightFull
from veilmq.pipeline.drain import (
    DirectoryForeign,
    DirectoryTaken,
    DirectoryUnwritable,
    ManifestDamaged,
    bad_records,
    source_options,
)
from veilmq.pipeline.drain.driver import Driver
from veilmq.pipeline.drain.manifests import BYTES_PER_BATCH, Directory, Offset, open_manifest
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable
from veilmq.pipeline.options import ROWS_DEFAULT, ROWS_DEFAULT_SINGLY, DrainOptions, read_options, rows_default
from veilmq.pipeline.places import place
from veilmq.testing.for_each import for_each

START = Offset()
DEFAULTS = DrainOptions(url="veil://127.0.0.1:1/orders", directory="/d")


class Play:
    """Plays Spark's part: what a table would hold after what was asked."""

    def __init__(self, stage: Stage, scheme: str = "veil", **options: object) -> None:
        given = {"url": stage.url(scheme), "directory": str(stage.directory / "m"), "lease": "30", "wait": "0.05"}
        self.options = read_options(given | {name: str(value) for name, value in options.items()})
        self.driver = Driver(self.options)
        self.rows: list[str] = []

    def again(self) -> None:
        """The process ended, and another one goes on."""
        self.driver.close()
        self.driver = Driver(self.options)

    def run(self, start: Offset, end: Offset) -> None:
        """A batch reaches the sink."""
        self.rows += self.read(start, end)

    def read(self, start: Offset, end: Offset) -> list[str]:
        rows: list[str] = []
        for path, first, stop in self.driver.pieces(start, end):
            with open_manifest(place(path)) as reader:
                for at in range(first, stop):
                    rows += reader.get_batch(at).column("body").to_pylist()
        return rows

    def to_the_end(self, start: Offset, rows: int = 100) -> Offset:
        """Batch after batch until nothing comes."""
        while (end := self.driver.latest(start, rows)) != start:
            self.run(start, end)
            start = end
        return start


@pytest.fixture(params=["veil", *(pytest.param(each, marks=pytest.mark.slow) for each in ("sqs", "azure", "mns"))])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bodies(count: int) -> list[str]:
    return [f"body {number}" for number in range(count)]


def test_every_message_comes_once_and_the_queue_is_empty(stage: Stage, scheme: str) -> None:
    with stage.make() as queue:
        send(queue, bodies(250))
        play = Play(stage, scheme)
        end = play.to_the_end(START, 100)
        assert sorted(play.rows) == sorted(bodies(250))
        assert end.seq == 3
        assert left(queue) == 0
        assert not list(play.driver.directory.files("arrow"))
        play.driver.close()


class Saturated:
    """A queue, of whose messages others hold as many as it gives out."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.asked = 0

    def receive(self, *asked: Any, **how: Any) -> Any:
        self.asked += 1
        raise InFlightFull(queue="q", limit=120_000)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def test_a_queue_that_others_saturate_is_as_good_as_empty(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(5))
        play = Play(stage)
        real = play.driver._queue
        saturated = Saturated(real)
        play.driver._queue = saturated  # type: ignore[assignment]
        assert play.driver.latest(START, 100) == START
        assert saturated.asked
        play.driver._queue = real
        play.to_the_end(START)
        assert sorted(play.rows) == sorted(bodies(5))
        play.driver.close()


def test_nothing_is_deleted_before_the_next_batch_is_asked_for(stage: Stage, scheme: str) -> None:
    with stage.make() as queue:
        send(queue, bodies(5))
        play = Play(stage, scheme)
        end = play.driver.latest(START, 100)
        play.run(START, end)
        assert left(queue) == 5
        assert play.driver.latest(end, 100) == end
        assert left(queue) == 0
        play.driver.close()


def test_a_manifest_that_was_never_logged_is_purged_and_its_messages_go_back(stage: Stage, scheme: str) -> None:
    with stage.make() as queue:
        send(queue, bodies(20))
        play = Play(stage, scheme)
        orphan = play.driver.latest(START, 10)
        play.again()
        end = play.to_the_end(START)
        assert sorted(play.rows) == sorted(bodies(20))
        assert end.file != orphan.file
        assert left(queue) == 0
        play.driver.close()


def test_a_logged_batch_is_read_again_from_its_manifest(stage: Stage, scheme: str) -> None:
    with stage.make() as queue:
        send(queue, bodies(20))
        play = Play(stage, scheme)
        end = play.driver.latest(START, 10)
        first = play.read(START, end)
        play.again()
        assert play.read(START, end) == first
        play.run(START, end)
        play.to_the_end(end)
        assert sorted(play.rows) == sorted(bodies(20))
        assert left(queue) == 0
        play.driver.close()


def test_a_committed_batch_is_deleted_by_the_next_process(stage: Stage, scheme: str) -> None:
    with stage.make() as queue:
        send(queue, bodies(20))
        play = Play(stage, scheme)
        end = play.driver.latest(START, 100)
        play.run(START, end)
        play.again()
        assert play.driver.latest(end, 100) == end
        assert left(queue) == 0
        assert len(play.rows) == 20
        play.driver.close()


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.slow
def test_messages_that_come_again_are_not_emitted_again(stage: Stage, scheme: str, is_committed: bool) -> None:
    """Their leases ended while no process was there, and the next receive finds them."""
    with stage.make() as queue:
        send(queue, bodies(20))
        play = Play(stage, scheme, lease=1)
        end = play.driver.latest(START, 100)
        if is_committed:
            play.run(START, end)
        play.driver.close()
        come_again(queue, 20)
        play.driver = Driver(play.options)
        if not is_committed:
            play.run(START, end)
        assert play.to_the_end(end) == end
        # What another holds comes again when that lease ends; here it was given back at once. On so short a lease a
        # slow machine receives only part of it in one go.
        patience = time.monotonic() + 30
        while left(queue) and time.monotonic() < patience:
            assert play.driver.latest(end, 100) == end
        assert sorted(play.rows) == sorted(bodies(20))
        assert left(queue) == 0
        play.driver.close()


@pytest.mark.slow
def test_leases_are_held_while_a_batch_runs(stage: Stage, scheme: str) -> None:
    """A batch of 9 s on leases of 3 s."""
    with stage.make() as queue:
        send(queue, bodies(30))
        play = Play(stage, scheme, lease=3)
        end = play.driver.latest(START, 100)
        assert queue.receive(10, lease=1, wait=9) == []
        play.run(START, end)
        assert play.driver.latest(end, 100) == end
        assert left(queue) == 0
        play.driver.close()


def test_a_run_ends_with_what_the_queue_held_at_its_start(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(10))
        play = Play(stage)
        play.driver.prepare()
        send(queue, ["late"] * 5)
        end = play.driver.latest(START, 8)
        play.run(START, end)
        last = play.to_the_end(end)
        assert len(play.rows) == 10
        assert left(queue) == 5
        play.driver.prepare()
        play.to_the_end(last)
        assert len(play.rows) == 15
        assert left(queue) == 0
        play.driver.close()


@pytest.mark.parametrize(
    ("body", "count", "bytes_max", "low"),
    [
        ("x" * 10_000, 400, 100_000, 10),
        ("x" * 300_000, 60, 4 << 20, 10),
        ("€" * 100_000, 60, 4 << 20, 10),
        ("x" * 1_000, 5_000, 3 << 20, 2_000),
    ],
    ids=["below the largest body", "large", "bytes are no characters", "small"],
)
def test_a_batch_is_bounded_in_bytes(stage: Stage, body: str, count: int, bytes_max: int, low: int) -> None:
    """However many receives are under way: each takes the room of the largest that it may bring."""
    with stage.make() as queue:
        send(queue, [body] * count)
        play = Play(stage, maxBytes=bytes_max)
        end = play.driver.latest(START, count)
        assert low * len(body.encode()) <= sum(len(each.encode()) for each in play.read(START, end)) <= bytes_max
        play.run(START, end)
        play.to_the_end(end)
        assert len(play.rows) == count
        assert left(queue) == 0
        play.driver.close()


@pytest.mark.parametrize("bytes_max", [350_000, 150_000], ids=["above one", "below one"])
def test_large_bodies_count_as_what_executors_fetch(stage: Stage, bytes_max: int) -> None:
    """Of the first batch, too: if it is too large for an executor, it is so again whenever it is repeated."""
    store = f"file://{stage.directory}/objects"
    with stage.make() as queue:
        large = LargeMessageQueue(queue, store, unreadable=keep, threshold_bytes=1_000)
        failed = [each for each in large.send_batch(["x" * 100_000] * 20) if isinstance(each, Exception)]
        assert not failed
        play = Play(stage, maxBytes=bytes_max, unwrap="large", store=store)
        sizes, end = [], START
        while sum(sizes) < 20:
            start, end = end, play.driver.latest(end, 100)
            sizes.append(len(play.read(start, end)))
        assert max(sizes) * 100_000 <= max(bytes_max, 200_000)
        assert sum(sizes) == 20
        send(queue, bodies(500))
        start, end = end, play.driver.latest(end, 1_000)
        assert len(play.read(start, end)) == 500, "small ones fill a batch again"
        play.driver.close()


@for_each(
    ("message", "form", "size"),
    [
        (Peeked("1", '{"veilmq.pointer":1,"bytes":7}'), "own", 7),
        (Peeked("1", '{"veilmq.pointer":1,"bytes":"7"}'), "own", 0),
        (Peeked("1", '{"veilmq.pointer":1'), "own", 0),
        (Peeked("1", '{"bytes":7}'), "own", 0),
        (Peeked("1", "[]", {"ExtendedPayloadSize": 7}), "aws", 7),
        (Peeked("1", "[]", {"ExtendedPayloadSize": "7"}), "aws", 7),
        (Peeked("1", "[]", {"SQSLargePayloadSize": -7}), "aws", 0),
        (Peeked("1", '{"veilmq.pointer":1,"bytes":7}'), "aws", 0),
    ],
)
def test_a_pointer_states_a_size(message: Peeked, form: str, size: int) -> None:
    assert stated_bytes(message, PointerFormat(form)) == size


class Slow(Wrapping):
    """A queue whose receives take a while, and bring ten messages."""

    def receive(self, count_max: int = 1, **given: Any) -> Any:
        time.sleep(0.1)
        return super().receive(min(10, count_max), **given)


def test_a_slow_queue_gives_smaller_batches_and_not_the_same_messages_for_ever(stage: Stage) -> None:
    """What was received first would be visible again before the batch is complete."""
    with stage.make() as queue:
        send(queue, bodies(150))
        play = Play(stage, lease=1, receivers=1)
        play.driver.close()
        play.driver = Driver(play.options, wrap=Slow)
        play.to_the_end(START, 150)
        assert sorted(play.rows) == sorted(bodies(150))
        assert left(queue) == 0
        play.driver.close()


@pytest.mark.parametrize(("scheme", "rows"), [("veil", ROWS_DEFAULT), ("azure", ROWS_DEFAULT_SINGLY)])
def test_fewer_rows_where_leases_are_extended_singly(stage: Stage, scheme: str, rows: int) -> None:
    with stage.make():
        with veilmq.connect(stage.url(scheme)) as queue:
            assert rows_default(queue.capabilities) == rows


def test_group_and_sequence_are_columns_in_their_order(stage: Stage) -> None:
    stage.name += ".fifo"
    with stage.make(fifo=True) as queue:
        for number in range(30):
            queue.send(Message(f"{number}", group=f"g{number % 3}", deduplication_id=f"{number}"))
        play = Play(stage)
        start, rows = START, []
        while (end := play.driver.latest(start, 100)) != start:
            for path, first, stop in play.driver.pieces(start, end):
                with open_manifest(place(path)) as reader:
                    rows += [row for at in range(first, stop) for row in reader.get_batch(at).to_pylist()]
            start = end
        assert len(rows) == 30
        for group in ("g0", "g1", "g2"):
            numbers = [int(row["body"]) for row in rows if row["group"] == group]
            assert numbers == sorted(numbers)
        sequences = [row["sequence"] for row in rows if row["group"] == "g0"]
        assert sequences == sorted(sequences)
        play.driver.close()


def test_one_directory_takes_one_query(stage: Stage) -> None:
    with stage.make():
        play = Play(stage)
        path = Path(play.options.directory)
        with pytest.raises(DirectoryTaken, match="used by another query"):
            Directory(path, stage.name, lock_seconds=0.1)
        play.driver.close()
        with pytest.raises(DirectoryForeign, match=f"drains {stage.name}, not other"):
            Directory(path, "other")
        (path / "query.json").write_bytes(b'{"queue":"\xff"}')
        with pytest.raises(DirectoryForeign, match="is not ours"):
            Directory(path, stage.name)


def test_a_new_query_is_refused_the_directory_of_one_that_went_on(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(5))
        play = Play(stage)
        play.to_the_end(START)
        with pytest.raises(DirectoryForeign, match="begins anew"):
            play.driver.latest(START, 10)
        play.driver.close()


def test_a_checkpoint_that_went_back_is_refused(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(30))
        play = Play(stage)
        first = play.driver.latest(START, 10)
        second = play.driver.latest(first, 10)
        play.driver.latest(second, 10)
        play.again()
        with pytest.raises(DirectoryForeign, match="newest checkpoint"):
            play.driver.latest(first, 10)
        play.driver.close()


def test_a_checkpoint_from_a_backup_is_refused_when_its_manifests_are_gone(stage: Stage) -> None:
    """Spark would give its next batch a number that the sink has: dropped there, and deleted here."""
    with stage.make() as queue:
        send(queue, bodies(30))
        play = Play(stage)
        first = play.driver.latest(START, 10)
        assert play.to_the_end(first, 10).seq == 3
        assert not list(play.driver.directory.files("arrow"))
        play.again()
        send(queue, ["new"])
        with pytest.raises(DirectoryForeign, match="has come to batch 3, and the checkpoint only to 1"):
            play.driver.latest(first, 10)
        assert left(queue) == 1
        play.driver.close()


def test_a_queue_that_is_made_anew_amid_leaves_nothing_to_wait_for(stage: Stage, scheme: str) -> None:
    with stage.make() as queue:
        send(queue, bodies(5))
        play = Play(stage, scheme)
        end = play.driver.latest(START, 10)
        play.run(START, end)
        account = Account(stage.server.mns, "id", "secret", "")
        account.get_queue(stage.name).delete()
        account.get_client().close_connection()
        with veilmq.connect(stage.url("mns"), template=Template()) as anew:
            send(anew, ["new"])
            play.to_the_end(end)
            assert sorted(play.rows) == [*bodies(5), "new"]
            assert left(anew) == 0
        # What `drain` waits for.
        assert not list(play.driver.directory.files("arrow"))
        play.driver.close()


def test_a_disk_that_is_full_is_told_and_nothing_stays_held(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, ["x" * 100_000] * 3)
        play = Play(stage, lease=1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        try:
            with pytest.raises(DirectoryUnwritable, match="cannot be written: File too large"):
                play.driver.latest(START, 10)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list(play.driver.directory.path.glob(".*.part"))
        again = [each for _ in range(3) for each in queue.receive(1, lease=0, wait=5)]
        assert len(again) == 3
        play.to_the_end(START)
        assert len(play.rows) == 3
        play.driver.close()


def test_large_bodies_are_handed_on_a_few_at_a_time(stage: Stage) -> None:
    with stage.make() as queue:
        for _ in range(4):
            send(queue, ["x" * 1_000_000] * 5)
        play = Play(stage)
        end = play.driver.latest(START, 100)
        with open_manifest(play.driver.directory.path / end.file) as reader:
            sizes = [reader.get_batch(at).nbytes for at in range(reader.num_record_batches)]
        assert sum(sizes) > 20_000_000
        assert max(sizes) < BYTES_PER_BATCH + 1_000_000
        assert len(play.driver.pieces(START, end)) == len(sizes) == 2
        play.run(START, end)
        play.to_the_end(end)
        assert [len(body) for body in play.rows] == [1_000_000] * 20
        play.driver.close()


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_a_damaged_manifest_is_told_with_its_mend(stage: Stage, how: str) -> None:
    with stage.make() as queue:
        send(queue, bodies(5))
        play = Play(stage)
        end = play.driver.latest(START, 10)
        path = play.driver.directory.path / end.file
        play.driver.close()
        if how == "changed":
            path.write_bytes(path.read_bytes().replace(b"body 3", b"body 4"))
        else:
            path.unlink()
        play.driver = Driver(play.options)
        with pytest.raises(ManifestDamaged, match="Restore it"):
            play.driver.pieces(START, end)
        assert left(queue) == 5
        play.driver.close()


def test_bad_records_in_the_folder_of_earlier_drains_are_sent_to_the_dead_letters(stage: Stage) -> None:
    with stage.make() as queue, stage.make("dead-" + stage.name) as dead:
        send(queue, bodies(1))
        play = Play(stage, deadLetters=stage.url(name=dead.name))
        end = play.driver.latest(START, 10)
        manifest = play.driver.directory.path / end.file
        bad_records.write(manifest, 0, [bad_records.BadRecord(id="1", body="no json", reason="no JSON")])
        (manifest.parent / "bad_records").rename(manifest.parent / "quarantine")
        play.again()
        play.driver.pieces(START, end)
        assert play.driver.latest(end, 10) == end
        assert [letter.body for letter in dead.receive(10, wait=1)] == ["no json"]
        play.driver.close()


def test_half_a_manifest_of_a_crash_is_no_manifest(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(5))
        play = Play(stage)
        (play.driver.directory.path / f".{1:020}-0123456789abcdef.arrow.1234.part").write_bytes(b"half")
        play.to_the_end(START)
        assert len(play.rows) == 5
        play.driver.close()


@for_each(
    ("options", "said"),
    [
        ({"lease": "0"}, "lease=0"),
        ({"lease": "1e9"}, "lease=1e"),
        ({"maxRows": "no"}, "maxRows='no'"),
        ({"maxRows": "0"}, "maxRows=0 is below 1"),
        ({"unwrap": "zip"}, "unwrap=zip"),
        ({"unwrap": "encrypted"}, "keys need each other"),
        ({"unwrap": "large"}, "store need each other"),
        ({"format": "xml"}, "format='xml'"),
        ({"directory": "here"}, "is relative"),
        ({"table": "memory://t"}, "only one process sees it"),
        ({"url": ""}, "needs the option url"),
        ({"url": "ftp://x/y"}, "option url cannot be"),
        ({"lesae": "3"}, "no option lesae"),
        ({"storeOptions": "[]"}, "no JSON object"),
    ],
)
def test_bad_options_are_named(stage: Stage, options: dict[str, str], said: str) -> None:
    with stage.make(), pytest.raises(OptionInvalid, match=said):
        Driver(read_options({"url": stage.url(), "directory": str(stage.directory / "m")} | options))
    assert not (stage.directory / "m").exists(), "it would stay locked"


def test_an_option_of_drain_that_is_none_has_its_default() -> None:
    """As text it was the name of a queue, and nothing encrypted for another one can be read."""
    nothing = [name for name in DrainOptions.__struct_fields__ if getattr(DEFAULTS, name) is None]
    assert {"bound_to", "group", "max_rows", "remember"} <= set(nothing)
    given = source_options(dict.fromkeys(nothing)) | {"url": DEFAULTS.url, "directory": DEFAULTS.directory}
    assert read_options(given) == DEFAULTS
    assert source_options({"max_rows": 0, "queues": ["a", "b"]}) == {"maxRows": "0", "queues": "a,b"}


def test_a_queue_that_is_not_there_is_told(stage: Stage) -> None:
    given = {"url": stage.url(), "directory": str(stage.directory / "m")}
    with pytest.raises(SourceUnreachable, match=r"The queue of the option url does not exist: no queue .*\. Create it"):
        Driver(read_options(given))
    assert not (stage.directory / "m").exists()


def test_manifests_are_arrow_that_others_can_read(stage: Stage) -> None:
    with stage.make() as queue:
        queue.send(Message("b", attributes={"a": "x", "n": 3, "raw": b"\x01"}, type="t"))
        play = Play(stage)
        end = play.driver.latest(START, 10)
        with pa.ipc.open_file(str(play.driver.directory.path / end.file)) as reader:
            (row,) = reader.read_all().to_pylist()
        assert row["body"] == "b"
        assert row["type"] == "t"
        assert dict(row["attributes"]) == {"a": "x", "n": "3", "raw": "AQ=="}
        assert row["receive_count"] == 1
        assert row["sent"].year >= 2024
        play.driver.close()
