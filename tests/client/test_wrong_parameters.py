"""What somebody writes at first: numbers out of an environment variable, still texts. Each is told by its name."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.client.worker_stage import Stage

from veilmq.client import documents
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.adapters.sqs import SqsAccount
from veilmq.client.adapters.veil import VeilAccount
from veilmq.client.encrypted import EncryptedQueue, KeyFile, Keys, new_key
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.large import LargeMessageQueue, SharedBodies
from veilmq.client.ordered import (
    LocalFile,
    ObjectStorage,
    OrderedQueue,
    OrderedReceiver,
    OrderedSender,
    TableStorage,
    run,
)
from veilmq.client.outbox import Outbox, Relay
from veilmq.client.receiver import Receiver
from veilmq.client.records import ObjectStore
from veilmq.client.routed import Route, RoutedQueue
from veilmq.client.timeouts import AdaptiveTimeout, Costs, PublishedPlan, ThresholdTimeout
from veilmq.client.topics import PullTopic, create_pull_topic, delete_pull_topic, open_pull_topic
from veilmq.client.transaction import Times, TransactionQueue, Verdict
from veilmq.client.unreadable import DeadLetters, keep
from veilmq.client.worker import Backoff, DirectoryGuard, ObjectCheckpoints, TableGuard, Worker, worker
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import ParameterInvalid
from veilmq.testing.client_contract import for_each


class Checker:
    def checkTransactionStatus(self, _: Any) -> bool:
        return True


Make = Callable[[Stage, Path, dict[str, Any]], object]


def _worker(stage: Stage, _: Path, given: dict[str, Any]) -> object:
    return Worker(stage.queue, stage.note, **given)


def _keeper(stage: Stage, _: Path, given: dict[str, Any]) -> object:
    return LeaseKeeper(stage.queue, **given)


def _receiver(stage: Stage, _: Path, given: dict[str, Any]) -> object:
    return Receiver(stage.queue, **given)


def _ordered(stage: Stage, home: Path, given: dict[str, Any]) -> object:
    return OrderedReceiver(stage.queue, LocalFile(home / "state"), **given)


def _sender(stage: Stage, home: Path, given: dict[str, Any]) -> object:
    return OrderedSender(stage.queue, LocalFile(home / "state"), **given)


def _relay(stage: Stage, home: Path, given: dict[str, Any]) -> Relay:
    return Relay(Outbox(), lambda: sqlite3.connect(home / "rows.db"), stage.queue, **given)


def _run(stage: Stage, home: Path, given: dict[str, Any]) -> None:
    with OrderedReceiver(stage.queue, LocalFile(home / "state")) as receiver:
        run(**{"receiver": receiver, "handler": print, "idle": 0.01, **given})


def _topic(stage: Stage, home: Path, given: dict[str, Any]) -> PullTopic:
    there = {"account": stage.queue.account, "queue_names": ["a"], "definitions": f"file://{home}"}
    return create_pull_topic(**{**there, "topic": "t", **given})


def _large(stage: Stage, home: Path, given: dict[str, Any]) -> LargeMessageQueue:
    return LargeMessageQueue(stage.queue, f"file://{home}/large", unreadable=keep, **given)


def _unknown(_: object) -> Verdict:
    return Verdict.UNKNOWN


def _transaction(stage: Stage, _: Path, given: dict[str, Any]) -> object:
    return TransactionQueue(stage.queue, stage.make("log"), lambda _: None, times=Times(**given))  # type: ignore[arg-type,return-value]


PARAMETERS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "Worker": (_worker, (
        "concurrency", "prefetch", "batch", "lease", "stop_before_expiry", "poison_after", "wait", "pollers", "drain",
        "kill_after", "give_up_after",
    )),
    "LeaseKeeper": (_keeper, (
        "minimal_life", "interval", "visibility_timeout", "max_hold", "senders", "plan", "on_lost",
    )),
    "Receiver": (_receiver, ("polls", "fetches", "wait", "lease", "grace", "backoff_max")),
    "OrderedReceiver": (_ordered, ("lease", "gap_timeout", "in_hand_max", "buffer_max", "tell_gap", "keeper")),
    "OrderedSender": (_sender, ("check_every",)),
    "Relay": (_relay, ("batch", "hold", "check_every")),
    "prune": (lambda stage, home, given: _relay(stage, home, {}).prune(**given), ("older_than",)),
    "steady": (lambda stage, _, given: LeaseKeeper.steady(stage.queue, **given), ("extend", "every")),
    "sweep of a guard": (lambda _, home, given: DirectoryGuard(home / "guard").sweep(**given), ("before",)),
    "Outbox": (lambda _, __, given: Outbox(**given), ("table", "paramstyle")),
    "LargeMessageQueue": (_large, ("threshold_bytes", "body_bytes_max", "retention", "pointers")),
    "sweep": (
        lambda stage, home, given: _large(stage, home, {}).sweep(**{"older_than": 1e9, **given}),
        ("older_than", "dead_letters"),
    ),
    "Times": (_transaction, ("timeout", "check_every", "ask_every", "half_life")),
    "PublishedPlan": (
        lambda stage, _, given: PublishedPlan(stage.queue, **given), ("default", "margin", "every"),
    ),
    "SharedBodies": (
        lambda _, home, given: SharedBodies(f"file://{home}/large", "news", **given), ("threshold_bytes",),
    ),
    "ObjectStore": (
        lambda _, home, given: ObjectStore(f"file://{home}/large", **given), ("attempts", "pause", "options"),
    ),
    "RoutedQueue": (lambda stage, _, given: RoutedQueue(default=stage.queue, **given), ("routes",)),
    "Route": (lambda stage, _, given: RoutedQueue({}, Route(stage.queue, **given)), ("lease",)),
    "ThresholdTimeout": (
        lambda _, __, given: ThresholdTimeout(**given),
        ("timeout", "failures", "window", "factor", "longest", "margin"),
    ),
    "AdaptiveTimeout": (lambda _, __, given: AdaptiveTimeout(**given), ("costs", "shortest", "longest", "half_life")),
    "Costs": (
        lambda _, __, given: Costs(**given),
        ("recovery", "duplicate", "extend", "crashes_per_second", "late_share", "late_mean"),
    ),
    "Backoff": (lambda _, __, given: Backoff(**given), ("first", "factor", "longest", "jitter")),
    # Instead of an object: a URL or a path, say.
    "Wrapping": (lambda _, __, given: Wrapping(**given), ("inner",)),
    "TransactionQueue": (
        lambda stage, _, given: TransactionQueue(
            **{"queue": stage.queue, "log": stage.make("log"), "check_transaction": print, **given}
        ),
        ("queue", "log", "parked", "times", "on_lost", "compensate"),
    ),
    **{
        name: (lambda _, __, given, make=make: make(**given), ("queue",))  # type: ignore[misc]
        for name, make in {
            "LeaseKeeper of": LeaseKeeper, "steady": LeaseKeeper.steady, "passive": LeaseKeeper.passive,
            "Receiver of": Receiver, "PublishedPlan of": PublishedPlan, "DeadLetters": DeadLetters,
        }.items()
    },
    "OrderedQueue of": (lambda _, __, given: OrderedQueue(**given), ("queue",)),
    "OrderedSender of": (
        lambda _, home, given: OrderedSender(storage=LocalFile(home / "state"), **given), ("queue",),
    ),
    "OrderedReceiver of": (
        lambda _, home, given: OrderedReceiver(storage=LocalFile(home / "state"), **given), ("queue",),
    ),
    "a topic": (_topic, ("account", "queue_names", "tags", "encodings", "bodies", "form")),
    "a split": (
        lambda stage, _, given: RoutedQueue.create(
            **{"account": stage.queue.account, "base_name": "media", "split": [], **given}
        ),
        ("account",),
    ),
    "settle_parked": (
        lambda stage, _, given: TransactionQueue(stage.queue, stage.make("log"), _unknown).settle_parked(**given),
        ("decide",),
    ),
    "run": (_run, ("receiver", "handler", "dead_letters", "retry_delay", "stop", "idle")),
    "EncryptedQueue": (
        lambda stage, _, given: EncryptedQueue(stage.queue, **{"keys": Keys(new_key()), "unreadable": keep, **given}),
        ("keys", "algorithms", "accepts"),
    ),
    "Relay of": (
        lambda stage, _, given: Relay(**{"outbox": Outbox(), "connect": print, "queue": stage.queue, **given}),
        ("outbox", "connect", "queue"),
    ),
    "TableGuard": (lambda _, __, given: TableGuard(**{"connect": print, **given}), ("connect", "table")),
    "TableStorage": (
        lambda _, __, given: TableStorage(**{"connect": print, "name": "numbers", **given}),
        ("connect", "table", "paramstyle"),
    ),
    "documents": (
        lambda stage, _, given: documents.TransactionQueue(
            stage.queue.account, **{"queue": stage.queue, "log": stage.make("log"), "checker": Checker(), **given}
        ),
        ("queue", "log", "checker", "parked"),
    ),
    "VeilAccount": (lambda _, __, given: VeilAccount("127.0.0.1", **given), ("timeout", "connect_timeout")),
}  # fmt: skip


@for_each(
    "of, name, wrong",
    [
        (of, name, wrong)
        for of, (_, names) in PARAMETERS.items()
        for name in names
        for wrong in ("5", True, float("nan"), [1], b"5")
    ],
)
def test_a_parameter_of_another_type_is_told_by_its_name(
    stage: Stage, tmp_path: Path, of: str, name: str, wrong: Any
) -> None:
    make, _ = PARAMETERS[of]
    with pytest.raises(ParameterInvalid) as refused:
        make(stage, tmp_path, {name: wrong})
    assert refused.value.parameter == name


def test_a_duration_that_may_be_endless_takes_infinity(stage: Stage, tmp_path: Path) -> None:
    endless = float("inf")
    ThresholdTimeout(30, longest=endless, window=endless, factor=endless)
    AdaptiveTimeout(longest=endless, half_life=endless)
    PublishedPlan(stage.queue, every=endless)
    OrderedSender(stage.queue, LocalFile(tmp_path / "state"), check_every=endless).close()
    _relay(stage, tmp_path, {"check_every": endless})
    with Receiver(stage.queue) as receiver, LeaseKeeper(stage.queue) as keeper:
        for close in (receiver.close, keeper.close):
            close(deadline=-0.001)  # a deadline that is over


@for_each("wrong", ["5", float("nan")])
def test_so_is_one_of_a_call(stage: Stage, tmp_path: Path, wrong: Any) -> None:
    stage.send("a")
    told: list[ParameterInvalid] = []

    def handler(job: Any) -> None:
        for call in (job.extend, lambda seconds: job.checkpoint({}, lease=seconds)):
            try:
                call(wrong)
            except ParameterInvalid as error:
                told.append(error)

    assert stage.work(handler).outcomes == {"done": 1}
    assert len(told) == 2
    with Receiver(stage.queue) as receiver:
        for ask in (receiver.receive, receiver.close):
            with pytest.raises(ParameterInvalid):
                ask(wrong)
    with LeaseKeeper(stage.queue) as keeper, pytest.raises(ParameterInvalid):
        keeper.close(deadline=wrong)
    with OrderedReceiver(stage.queue, LocalFile(tmp_path / "state")) as ordered:
        for given in ({"count_max": wrong}, {"wait": wrong}, {"lease": wrong}):
            with pytest.raises(ParameterInvalid):
                ordered.receive(**given)
    with pytest.raises(ParameterInvalid):
        stage.worker(stage.note).run(messages_max=wrong)
    with pytest.raises(ParameterInvalid, match="bogus"):
        stage.worker(stage.note, keeper={"bogus": wrong})
    with Relay(Outbox(), print, stage.queue) as relay, pytest.raises(ParameterInvalid, match="count_max"):
        relay.failures(wrong)


def test_a_name_that_is_no_text_is_refused(stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The number of an order, say; or the None of a variable of the environment that is not set."""
    absent: Any = None
    place = f"file://{tmp_path}/topics"
    topic = _topic(stage, tmp_path, {"queue_names": ["work"], "definitions": place})
    relay = Relay(Outbox(), print, stage.queue)
    for parameter, call in (
        ("deduplication_id", lambda: Outbox().add(None, "a", deduplication_id=0)),  # type: ignore[arg-type]
        ("identity", lambda: relay.retry(7)),  # type: ignore[arg-type]
        ("name", lambda: TableStorage(print, 7)),  # type: ignore[arg-type]
        ("marking", lambda: OrderedSender(stage.queue, LocalFile("state"), marking=7)),  # type: ignore[arg-type]
        ("bound_to", lambda: EncryptedQueue(stage.queue, Keys(new_key()), unreadable=keep, bound_to=7)),  # type: ignore[arg-type]
        ("name", lambda: RoutedQueue({}, stage.queue, name=7)),  # type: ignore[arg-type]
        ("topic", lambda: SharedBodies(f"file://{tmp_path}/large", 7)),  # type: ignore[arg-type]
        ("tags['a']", lambda: _topic(stage, tmp_path, {"tags": {"a": 7}})),
        ("to", lambda: topic.publish("a", to=7)),  # type: ignore[arg-type]
        ("account", lambda: open_pull_topic(absent, "t", definitions=place)),
        ("account", lambda: delete_pull_topic(stage.queue, "t", definitions=place)),  # type: ignore[arg-type]
        ("split", lambda: RoutedQueue.create(stage.queue.account, "media", absent)),
        ("queue", lambda: worker(print)),  # type: ignore[arg-type]
        ("receiver", lambda: run(stage.queue, print, idle=0.01)),  # type: ignore[arg-type]
        ("url", lambda: ObjectStorage(absent)),
        ("url", lambda: ObjectCheckpoints(absent)),
        ("name", lambda: VeilAccount("127.0.0.1").arn(absent)),
        ("name", lambda: SqsAccount(boto3.client("sqs", region_name="us-east-1")).arn(absent)),
        ("path", lambda: LocalFile(absent)),
        ("path", lambda: KeyFile(absent)),
        ("directory", lambda: DirectoryGuard(absent)),
        ("directory", lambda: EmbeddedAccount(absent)),
        ("accessKeySecret", lambda: documents.CloudAccount("id", absent, "http://127.0.0.1:1")),
        ("ossClient", lambda: documents.BigMessageSizeQueue(stage.queue, absent, "films")),
        ("localFileName", lambda: documents.LocalDiskStorage({"file": "numbers"})),
        ("waitSeconds", lambda: documents.CloudQueue(stage.queue).popMessage("5")),  # type: ignore[arg-type]
    ):
        with pytest.raises(ParameterInvalid) as refused:
            call()
        assert refused.value.parameter == parameter
    stage.send("a")
    guard = DirectoryGuard(tmp_path)
    counts = stage.work(stage.note, guard=guard, guard_key=lambda shown: 7 if shown.receive_count == 1 else "7")
    assert counts.outcomes == {"failed": 1, "done": 1}
    assert "guard_key: must be a str, not int" in caplog.text
