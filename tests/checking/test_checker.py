"""The checker is silent on histories of a correct queue, and finds each rule that a queue breaks."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checking.script import Script, grant
from tests.checking.simulation import Simulation

from veilmq.checking import check
from veilmq.checking.log import Operation, Outcome
from veilmq.checking.report import Rule
from veilmq.testing.for_each import for_each

FIFO = {"fifo": True}
ROTATES = {"rotates": True}
BUGS: list[tuple[str, dict[str, Any], Rule]] = [
    ("send not stored", {}, Rule.LOST),
    ("send not stored", FIFO, Rule.LOST),
    ("restart loses", {}, Rule.LOST),
    ("same id twice", {}, Rule.LOST),
    ("dead letter lost", {}, Rule.LOST),
    ("dead letter elsewhere", {}, Rule.LOST),
    ("stale delete", {}, Rule.LOST),
    ("invents", {}, Rule.INVENTED),
    ("sent twice", {}, Rule.INVENTED),
    ("sent twice", FIFO, Rule.INVENTED),
    ("body stored wrong", {}, Rule.CHANGED),
    ("body cut", {}, Rule.CHANGED),
    ("body cut", ROTATES, Rule.CHANGED),
    ("group changed", FIFO, Rule.CHANGED),
    ("sequence changes", FIFO, Rule.CHANGED),
    ("lease ignored", {}, Rule.OVERLAP),
    ("lease too short", {}, Rule.OVERLAP),
    ("lease too short", FIFO, Rule.OVERLAP),
    ("extend ignored", {}, Rule.OVERLAP),
    ("release too early", {}, Rule.OVERLAP),
    ("stale delete", {}, Rule.STALE),
    ("stale delete", FIFO, Rule.STALE),
    ("stale extend", {}, Rule.STALE),
    ("stale release", {}, Rule.STALE),
    ("old rotation", ROTATES, Rule.STALE),
    ("use of the deleted", {}, Rule.STALE),
    ("delete ignored", {}, Rule.RESURRECTED),
    ("delete ignored", FIFO, Rule.RESURRECTED),
    ("resurrects", {}, Rule.RESURRECTED),
    ("resurrects", {"quiet": True}, Rule.RESURRECTED),
    ("purge ignored", {}, Rule.RESURRECTED),
    ("count stays", {}, Rule.COUNT),
    ("count restarts", {}, Rule.COUNT),
    ("delay ignored", {}, Rule.EARLY),
    ("expiry ignored", {}, Rule.LATE),
    ("group swapped", FIFO, Rule.GROUP_ORDER),
    ("group not locked", FIFO, Rule.GROUP_ORDER),
    ("sequence falls", FIFO, Rule.SEQUENCE),
    ("duplicate taken", FIFO, Rule.DEDUPLICATION),
    ("window too short", FIFO, Rule.DEDUPLICATION),
    ("window too long", FIFO, Rule.DEDUPLICATION),
]


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    fifo=st.booleans(),
    rotates=st.booleans(),
    quiet=st.booleans(),
    clients=st.integers(1, 8),
    unknown=st.sampled_from((0.0, 0.1, 0.5)),
)
def test_a_correct_queue_raises_no_alarm(
    seed: int, fifo: bool, rotates: bool, quiet: bool, clients: int, unknown: float
) -> None:
    lived = Simulation(seed, fifo=fifo, rotates=rotates, quiet=quiet, clients=clients, unknown=unknown)
    report = check(lived.log, lived.promises)
    assert report.clean, str(report)
    assert report.operations > 100
    assert report.messages > 2  # mostly 30 or so: one life in ten thousand has only 10


@for_each("bug, options, rule", BUGS)
def test_each_broken_rule_is_found(bug: str, options: dict[str, Any], rule: Rule) -> None:
    """In the life of at most 40 queues; with the operations that prove it."""
    for seed in range(40):
        lived = Simulation(seed, bugs=frozenset({bug}), **options)
        report = check(lived.log, lived.promises)
        if rule in report.counts:
            (found, *_) = [each for each in report.violations if each.rule is rule]
            assert found.message in found.what
            assert len(found.operations) >= 1
            return
    pytest.fail(f"{rule.name} was not found")


def test_a_hundred_thousand_operations() -> None:
    log: list[Operation] = []
    for queue in ("jobs", "jobs.fifo"):
        script = Script(queue)
        script.log = log
        for number in range(12_500):
            name, at = f"{queue}-{number}", number / 100
            script.send(name, at, at + 0.005, group=f"g{number % 100}", sequence=number)
            script.receive(at + 0.01, at + 0.5, grant(name, len(log), group=f"g{number % 100}", count=1))
            lease = log[-1].grants[0].lease
            script.extend(lease, at + 0.5, at + 0.6, seconds=30)
            script.delete(lease, at + 0.6, at + 0.7)
        script.drain(10_000, 10_001)
    begun = time.perf_counter()
    report = check(log)
    print(f"{len(log)} operations in {time.perf_counter() - begun:.2f} s")
    assert report.clean, str(report)
    assert report.messages == 25_000


def test_many_sends_of_one_deduplication_id_without_an_answer() -> None:
    """Each acknowledged send may be a duplicate of each of them."""
    script = Script("jobs.fifo")
    for number in range(5_000):
        script.send("", number, number + 0.5, Outcome.INFO, group="a", body="b", deduplication="d")
    for number in range(5_000):
        at = 10_000 + 1_000 * number
        script.send(f"m{number}", at, at + 1, group="a", body="b", deduplication="d", sequence=number)
    assert script.found() == []
