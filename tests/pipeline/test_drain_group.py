"""Several drains of one queue, each with a directory and a checkpoint of its own: no message is in two tables.

Without Spark but for the last test: a driver is closed without a word, as a killed one ends.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.pipeline.drain_stage import Stage, come_again, left, send
from tests.pipeline.test_drain_driver import START, Play, bodies

from veilmq.client.clock import SYSTEM
from veilmq.client.errors import TransportError
from veilmq.client.messages import Received
from veilmq.pipeline.drain import drain
from veilmq.pipeline.drain.batches import siblings
from veilmq.pipeline.drain.batches.siblings import Siblings
from veilmq.pipeline.drain.driver import Driver
from veilmq.pipeline.drain.manifests import Directory, Offset, table_of
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.options import GROUP_DEPTH_MAX, read_options
from veilmq.testing.for_each import for_each

LEASE = 1.0


class Member(Play):
    """One drain of the group."""

    def __init__(self, stage: Stage, name: str, **options: object) -> None:
        group = stage.directory / "group"
        super().__init__(
            stage, directory=group / name / "manifests", group=group, **({"lease": LEASE, "partitions": 1} | options)
        )

    def first(self, rows: int) -> Offset:
        """A first batch of so many messages. On so short a lease a slow machine receives only part of them, or has lost
        some before the manifest is there: then again, as the next process would."""
        end = time.monotonic() + 30
        while (found := self.driver.latest(START, rows)) == START or len(self.read(START, found)) < rows:
            assert time.monotonic() < end
            self.again()
        return found

    def until_empty(self, start: Any, queue: Any) -> Any:
        """Goes on for as long as the queue holds something."""
        end = time.monotonic() + 30
        while left(queue):
            assert time.monotonic() < end
            start = self.to_the_end(start)
        return start


def test_two_drains_share_a_queue(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(200))
        one, two = Member(stage, "one", lease=30), Member(stage, "two", lease=30)
        ends = [START, START]
        for _ in range(4):
            for at, member in enumerate((one, two)):
                end = member.driver.latest(ends[at], 30)
                member.run(ends[at], end)
                ends[at] = end
        for at, member in enumerate((one, two)):
            assert member.driver.latest(ends[at], 30) == ends[at]
        assert (len(one.rows), len(two.rows)) == (110, 90)
        assert sorted(one.rows + two.rows) == sorted(bodies(200))
        assert left(queue) == 0
        one.driver.close()
        two.driver.close()


def test_what_a_killed_drain_may_have_written_is_left_to_it(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(20))
        one, two = Member(stage, "one"), Member(stage, "two")
        end = one.first(10)
        one.run(START, end)
        one.driver.close()
        come_again(queue, 20)
        last = two.to_the_end(START)
        assert sorted(one.rows + two.rows) == sorted(bodies(20))
        assert left(queue) == 10
        one.driver = Driver(one.options)
        one.to_the_end(end)
        two.until_empty(last, queue)
        assert sorted(one.rows + two.rows) == sorted(bodies(20))
        for member in (one, two):
            member.driver.close()


def test_what_a_killed_drain_has_committed_is_deleted_by_whoever_receives_it(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(10))
        one, two = Member(stage, "one"), Member(stage, "two")
        end = one.first(10)
        one.run(START, end)
        one.driver.directory.begin(end)  # and killed before its deletes
        one.driver.close()
        come_again(queue, 10)
        two.until_empty(START, queue)
        assert (len(one.rows), two.rows) == (10, [])
        # Its own deletes are refused, and say nothing.
        one.driver = Driver(one.options)
        assert one.driver.latest(end, 10) == end
        assert not list(one.driver.directory.files("arrow"))
        for member in (one, two):
            member.driver.close()


def test_what_a_drain_was_told_to_have_deleted_by_a_stale_handle_is_known_to_the_others(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(10))
        one, two = Member(stage, "one"), Member(stage, "two")
        end = one.first(10)
        one.run(START, end)
        one.driver.close()
        come_again(queue, 10)
        held = queue.receive(10, lease=60)
        one.driver = Driver(one.options)
        assert one.driver.latest(end, 10) == end
        assert list(one.driver.directory.files("ids"))
        one.driver.close()
        for each in held:
            queue.release(each.handle)
        two.until_empty(START, queue)
        assert two.rows == []
        two.driver.close()


def test_a_batch_that_was_never_logged_is_anyone_s(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(10))
        one, two = Member(stage, "one"), Member(stage, "two")
        one.first(10)
        one.driver.close()
        come_again(queue, 10)
        start = two.to_the_end(START)
        assert two.rows == []
        one.driver = Driver(one.options)
        end = one.driver.latest(START, 4)
        one.run(START, end)
        one.to_the_end(end)
        two.until_empty(start, queue)
        assert sorted(one.rows + two.rows) == sorted(bodies(10))
        for member in (one, two):
            member.driver.close()


class Leaping:
    """A clock that can leap, as a process finds it that was stopped for a while."""

    def __init__(self) -> None:
        self.leapt = 0.0

    def monotonic(self) -> float:
        return SYSTEM.monotonic() + self.leapt

    def wall(self) -> float:
        return SYSTEM.wall() + self.leapt


def unreached(extensions: Any) -> Any:
    """What holds the leases is stopped with the rest of the process."""
    raise TransportError(reason="stopped", may_have_happened=False)


def test_a_drain_that_was_stopped_before_its_manifest_was_there_takes_it_back(stage: Stage) -> None:
    """Another one may have looked for the messages before."""
    with stage.make() as queue:
        send(queue, bodies(10))
        one, two = Member(stage, "one", lease=LEASE), Member(stage, "two", lease=30)
        one.driver.close()
        clock = Leaping()
        one.driver = Driver(one.options, clock)
        write = one.driver.directory.write

        def stopped(*given: Any) -> Any:
            # Its leases end, another one receives, and looks in vain.
            come_again(queue, 10)
            start = two.driver.latest(START, 10)
            two.run(START, start)
            clock.leapt += 60
            return write(*given)

        one.driver.directory.write = stopped  # type: ignore[method-assign]
        one.driver._queue.extend_batch = unreached  # type: ignore[method-assign]
        assert one.driver.latest(START, 10) == START
        assert not list(one.driver.directory.files("arrow"))
        assert sorted(two.rows) == sorted(bodies(10))
        for member in (one, two):
            member.driver.close()


def test_one_drain_of_a_queue_and_one_of_many_know_each_other_s_messages(stage: Stage) -> None:
    with stage.make() as queue:
        send(queue, bodies(10))
        one = Member(stage, "one")
        two = Member(stage, "two", url=stage.url(name=""), queues=f"{stage.name}*", refresh=0)
        end = one.first(10)
        one.run(START, end)
        one.driver.close()
        come_again(queue, 10)
        two.to_the_end(START)
        assert two.rows == []
        two.driver.close()


@for_each(
    ("group", "said"),
    [
        ("/b", "directory=/a/c/d/one is not in group=/b, nor in a directory there"),
        ("/a", "directory=/a/c/d/one is not in group=/a, nor in a directory there"),  # nobody looks so far down
        ("s3://b/g", "group=s3://b/g is a URL"),
    ],
)
def test_a_group_that_cannot_be_is_refused(group: str, said: str) -> None:
    with pytest.raises(OptionInvalid, match=said):
        read_options({"url": "veil://127.0.0.1:1/q", "directory": "/a/c/d/one", "group": group})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_queries_drain_one_queue_into_one_table(spark: Any, stage: Stage) -> None:
    """From threads, in which Spark knows no session by itself. One may have drained all when the other starts."""
    group, table = stage.directory / "group", stage.directory / "table"
    done: dict[str, int] = {}

    def run(name: str) -> None:
        given: dict[str, Any] = {"group": group, "max_rows": 200}
        done[name] = drain(spark, stage.url(), f"delta:{table}", group / name, **given).messages

    with stage.make() as queue:
        send(queue, ["the first makes the table"])
        run("one")
        send(queue, bodies(2_000))
        threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
        for each in threads:
            each.start()
        for each in threads:
            each.join(200)
        assert left(queue) == 0
    found = DeltaTable(table).to_pyarrow_table(columns=["body"]).column("body").to_pylist()
    assert sorted(found) == sorted([*bodies(2_000), "the first makes the table"])
    assert sum(done.values()) == 2_000


def manifest(directory: Directory, seq: int, *ids: str) -> Offset:
    return directory.write(seq, table_of([Received(each, "", handle="h", lease_end=0.0) for each in ids], seq))


def test_drains_see_each_other_as_deep_as_their_options_allow(tmp_path: Path) -> None:
    found = {}
    for depth in range(1, GROUP_DEPTH_MAX + 1):
        place = tmp_path.joinpath(*(f"{depth}-{level}" for level in range(depth)))
        place.parent.mkdir(parents=True, exist_ok=True)
        directory = Directory(place, "q")
        manifest(directory, 1, f"{depth}")
        directory.close()
        found[f"{depth}"] = False
    assert Siblings(tmp_path, tmp_path / "own", "q").claims(["0", *found]) == found


def test_what_a_drain_took_back_is_not_taken_for_the_batch_that_got_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It purges a manifest that Spark never logged, and commits another one of its number, just after it was listed."""
    directory = Directory(tmp_path / "other", "q")
    first = manifest(directory, 1, "taken back")
    real, looks = siblings.numbered, []

    def numbered(place: Path, kind: str) -> Any:
        found = real(place, kind)
        looks.append(kind)
        if looks == ["arrow", "ids", "arrow", "ids"]:
            (directory.path / first.file).rename(tmp_path / "kept")
            directory.begin(manifest(directory, 1, "committed"))
            (tmp_path / "kept").rename(directory.path / first.file)
        return found

    monkeypatch.setattr(siblings, "numbered", numbered)
    assert Siblings(tmp_path, tmp_path / "own", "q").claims(["taken back"]) == {"taken back": False}
    assert len(looks) == 4
    directory.close()
