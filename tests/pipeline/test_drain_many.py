"""One stream over many queues: shares, queues that come and go, restarts. Without Spark but for the last test."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.pipeline.drain_stage import Stage, left, send
from tests.pipeline.test_drain_driver import START, Play

import veilmq
from veilmq.client.adapters.connect import connect_account
from veilmq.client.messages import Received, Template
from veilmq.pipeline.drain import DirectoryForeign, drain
from veilmq.pipeline.drain.batches import loaded
from veilmq.pipeline.drain.batches.queues import joined, parted, shares
from veilmq.pipeline.drain.driver import Driver
from veilmq.pipeline.drain.manifests import Directory, open_manifest, table_of
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable
from veilmq.pipeline.options import read_options
from veilmq.testing import Random
from veilmq.testing.for_each import for_each

SDKS = ("sqs", "azure", "mns")


class Many(Play):
    """Drains the queues of one test, whose names begin with the stage's."""

    def __init__(self, stage: Stage, scheme: str = "veil", **options: object) -> None:
        given = {"queues": f"{stage.name}-*", "refresh": 0} | options
        super().__init__(stage, scheme, url=stage.url(scheme, name=""), **given)

    def by_queue(self, start: Any, end: Any) -> Counter[str]:
        found: Counter[str] = Counter()
        for path, first, stop in self.driver.pieces(start, end):
            with open_manifest(Path(path)) as reader:
                for at in range(first, stop):
                    found.update(reader.get_batch(at).column("queue").to_pylist())
        return found


def fill(stage: Stage, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        with stage.make(f"{stage.name}-{name}") as queue:
            send(queue, [f"{name} {number}" for number in range(count)])


def gone(stage: Stage, name: str) -> None:
    with connect_account(stage.url(name="")) as account:
        account.delete(f"{stage.name}-{name}")


def kept(stage: Stage, *names: str) -> int:
    total = 0
    for name in names:
        with veilmq.connect(stage.url(name=f"{stage.name}-{name}")) as queue:
            total += left(queue)
    return total


def test_shares_use_the_whole_batch_and_starve_no_queue() -> None:
    seeded = Random(36)
    for _ in range(2_000):
        depths = {f"q{at}": seeded.choice([0, 1, 5, 1_000, 10**6]) for at in range(seeded.randint(1, 40))}
        wanted = seeded.randint(1, 2_000)
        found = shares(depths, wanted)
        there = [name for name in depths if depths[name]]
        assert sum(found.values()) == min(wanted, sum(depths.values()))
        assert all(0 < found[name] <= depths[name] for name in found)
        if there:
            fair = wanted // 2 // len(there)
            assert all(found.get(name, 0) >= min(depths[name], fair) for name in there)
            deepest = max(there, key=lambda name: depths[name])
            assert found.get(deepest, 0) * len(there) >= wanted // 2 - len(there) or found[deepest] == depths[deepest]


@pytest.mark.parametrize("scheme", ["veil", *(pytest.param(each, marks=pytest.mark.slow) for each in SDKS)])
def test_all_queues_of_a_list_and_a_pattern_become_rows_with_their_names(stage: Stage, scheme: str) -> None:
    counts = {"a": 120, "b": 30, "c": 1, "other": 5}
    fill(stage, counts)
    play = Many(stage, scheme, queues=f"{stage.name}-[abc], {stage.name}-a")
    end = play.driver.latest(START, 1_000)
    assert play.by_queue(START, end) == {f"{stage.name}-{name}": counts[name] for name in "abc"}
    play.run(START, end)
    play.to_the_end(end)
    assert sorted(play.rows) == sorted(f"{name} {at}" for name in "abc" for at in range(counts[name]))
    assert (kept(stage, "a", "b", "c"), kept(stage, "other")) == (0, 5)
    play.driver.close()


def test_a_small_queue_gets_its_share_beside_a_deep_one(stage: Stage) -> None:
    fill(stage, {"deep": 500, "middle": 100, "small": 10})
    play = Many(stage)
    end = play.driver.latest(START, 100)
    found = play.by_queue(START, end)
    assert found.total() == 100
    assert found[f"{stage.name}-small"] == 10
    assert 20 <= found[f"{stage.name}-middle"] < found[f"{stage.name}-deep"]
    play.driver.close()


def test_more_queues_than_messages_in_a_batch_take_turns(stage: Stage) -> None:
    fill(stage, {f"{at}": 30 if at < 2 else 2 for at in range(8)})
    play = Many(stage)
    start, seen = START, set[str]()
    for _ in range(8):
        end = play.driver.latest(start, 2)
        seen |= set(play.by_queue(start, end))
        start = end
    assert len(seen) == 8
    play.driver.close()


def test_queues_that_appear_are_taken_up_and_queues_that_vanish_do_not_kill_the_stream(stage: Stage) -> None:
    fill(stage, {"a": 20, "b": 20})
    play = Many(stage, lease=2)
    end = play.driver.latest(START, 1_000)
    play.run(START, end)
    gone(stage, "b")  # with a batch that is not deleted yet
    fill(stage, {"late": 20})
    last = play.to_the_end(end)
    assert Counter(row.split()[0] for row in play.rows) == {"a": 20, "b": 20, "late": 20}
    assert kept(stage, "a", "late") == 0
    with veilmq.connect(stage.url("mns", name=f"{stage.name}-b"), template=Template()) as anew:
        send(anew, ["b anew"] * 3)
    play.to_the_end(last)
    assert len(play.rows) == 63
    assert not list(play.driver.directory.files("arrow"))
    play.driver.close()


def test_a_queue_that_vanishes_ends_the_query_where_that_was_asked_for(stage: Stage) -> None:
    fill(stage, {"a": 2, "b": 2})
    play = Many(stage, failOnDataLoss="true")
    play.driver.latest(START, 1)
    gone(stage, "b")
    with pytest.raises(SourceUnreachable, match=f"There is no queue {stage.name}-b, and failOnDataLoss is on"):
        play.to_the_end(START)
    play.driver.close()


def test_a_pattern_without_a_queue_waits_for_one(stage: Stage) -> None:
    play = Many(stage)
    assert play.driver.latest(START, 10) == START
    fill(stage, {"a": 1})
    play.to_the_end(START)
    assert play.rows == ["a 0"]
    play.driver.close()


def test_leases_and_deletes_find_their_queue_after_a_restart_with_another_list(stage: Stage) -> None:
    fill(stage, {"a": 20, "b": 20})
    play = Many(stage)
    orphan = play.driver.latest(START, 30)
    play.again()
    end = play.driver.latest(START, 1_000)
    assert (end.file != orphan.file, play.by_queue(START, end).total()) == (True, 40)
    play.run(START, end)
    play.driver.close()
    fill(stage, {"c": 4})
    play = Many(stage, queues=f"{stage.name}-c")
    play.to_the_end(end)
    assert sorted(play.rows) == [f"c {at}" for at in range(4)]
    assert kept(stage, "a", "b", "c") == 0
    play.driver.close()
    with pytest.raises(DirectoryForeign, match="drains many queues, not"):
        Driver(read_options({"url": stage.url(name=f"{stage.name}-a"), "directory": play.options.directory}))


def test_a_run_ends_with_what_each_queue_held_at_its_start(stage: Stage) -> None:
    fill(stage, {"a": 10, "b": 10})
    play = Many(stage)
    play.driver.prepare()
    fill(stage, {"a": 30, "new": 30})
    end = play.to_the_end(START, 8)
    assert Counter(row.split()[0] for row in play.rows) == {"a": 10, "b": 10}
    play.driver.prepare()
    play.to_the_end(end)
    assert len(play.rows) == 80
    play.driver.close()


@pytest.mark.parametrize("scheme", ["veil", *(pytest.param(each, marks=pytest.mark.slow) for each in SDKS)])
@for_each("is_pattern", [True, False], ids=["a pattern", "one queue"])
def test_dead_letters_that_would_be_drained_again_are_refused(stage: Stage, scheme: str, is_pattern: bool) -> None:
    """A bad record would come with each batch, for ever."""
    stage.make(f"{stage.name}-bad").close()
    bad = stage.url(scheme, name=f"{stage.name}-bad")
    given = {"url": stage.url(scheme, name=""), "queues": f"{stage.name}-*"} if is_pattern else {"url": bad}
    given |= {"directory": str(stage.directory / "m"), "deadLetters": bad}
    with pytest.raises(OptionInvalid, match=f"deadLetters, {stage.name}-bad, is drained itself"):
        Driver(read_options(given))
    assert not (stage.directory / "m").exists()


def test_dead_letters_of_the_same_account_that_no_pattern_names_are_taken(stage: Stage) -> None:
    fill(stage, {"a": 1})
    stage.make(f"bad-{stage.name}").close()
    Many(stage, deadLetters=stage.url(name=f"bad-{stage.name}")).driver.close()


def test_equal_ids_of_two_queues_are_two_messages(tmp_path: Path) -> None:
    messages = [Received(joined(name, "1"), "b", handle=joined(name, "h"), lease_end=0.0) for name in ("a", "b")]
    directory = Directory(tmp_path, "many queues")
    offset = directory.write(1, table_of(messages, 1, parted))
    assert [each.id for each in loaded(directory.checked(offset))] == ["a:1", "b:1"]
    with open_manifest(tmp_path / offset.file) as reader:
        assert reader.read_all().select(["queue", "id"]).to_pylist() == [
            {"queue": "a", "id": "1"}, {"queue": "b", "id": "1"},
        ]  # fmt: skip
    directory.close()


@for_each(
    ("options", "said"),
    [
        ({"queues": "orders-*"}, "names a queue"),
        ({"failOnDataLoss": "false"}, "a query of one queue ends with it"),
        ({"startingOffsets": "latest"}, "all that it holds is drained"),
        ({"subscribe": "orders"}, "queues lists queues"),
        ({"kafka.bootstrap.servers": "h:9092"}, "url names the server"),
        ({"maxOffsetsPerTrigger": "5", "maxRows": "6"}, "are the same option"),
    ],
)
def test_options_that_mean_something_else_here_are_refused_with_ours(options: dict[str, str], said: str) -> None:
    with pytest.raises(OptionInvalid, match=f"(?i){said}"):
        Driver(read_options({"url": "veil://127.0.0.1:1/orders", "directory": "/d"} | options))


def test_options_of_kafka_s_source_that_mean_the_same_are_taken() -> None:
    given = {
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "70",
        "minPartitions": "3",
        "failOnDataLoss": "true",
    }
    found = read_options({"url": "veil://127.0.0.1:1/orders", "directory": "/d"} | given)
    assert (found.max_rows, found.partitions, found.fail_on_data_loss) == (70, 3, True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_queues_become_a_table(spark: Any, stage: Stage) -> None:
    fill(stage, {"a": 150, "b": 40})
    table = f"{stage.directory}/table"
    given: dict[str, Any] = {"queues": [f"{stage.name}-*"], "max_rows": 100}
    done = drain(spark, stage.url(name=""), f"delta:{table}", stage.directory / "d", **given)
    assert (done.messages, done.batches) == (190, 2)
    rows = DeltaTable(table).to_pyarrow_table(columns=["queue", "body"]).to_pylist()
    assert {(row["queue"], row["body"]) for row in rows} == {
        (f"{stage.name}-{name}", f"{name} {at}") for name, count in (("a", 150), ("b", 40)) for at in range(count)
    }
    assert len(rows) == 190
    assert kept(stage, "a", "b") == 0
