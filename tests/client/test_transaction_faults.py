"""An operation and its message: producer, checker and network, killed and cut at every step."""

import logging
from itertools import product
from typing import Any

import pytest
from tests.client.transaction_stage import FAILURES, HOUR, KINDS, Network, Place, left_behind, run, suffix
from tests.support.embedded import EmbeddedClient

from veilmq.client.messages import Message, Received, Template
from veilmq.client.transaction import ATTRIBUTE, Times, TransactionQueue
from veilmq.testing.client_contract import for_each

# How many calls to its two queues a process makes if nothing fails: a fault can fire at each of them, and at no later.
PRODUCER_STEPS = {
    ("hidden", "do"): 4, ("hidden", "refuse"): 4,
    ("sqs", "do"): 4, ("sqs", "refuse"): 3,
    ("azure", "do"): 3, ("azure", "refuse"): 2,
}  # fmt: skip
CHECKER_STEPS = {
    ("hidden", True): 4, ("hidden", False): 4,
    ("sqs", True): 4, ("sqs", False): 3,
    ("azure", True): 4, ("azure", False): 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "veilmq.transaction")


def settled_in_the_end(place: Place, once: bool) -> None:
    """Whatever happened: operation done if and only if consumed; nothing is left, and nothing appears later."""
    came = []
    for _ in range(4):
        place.embedded.pass_time(601)
        place.opened().checker.run_once()
        came += place.consumed()
    place.embedded.pass_time(49 * HOUR)
    came += place.consumed()
    assert {message.body for message in came} == ({"order 7"} if place.ledger.done else set())
    if once:
        assert len(came) == len(place.ledger.done)
    elif place.kind == "sqs":
        assert {message.attributes[ATTRIBUTE] for message in came} == set(place.ledger.done)
    assert place.left() == 0


def produced(place: Place, network: Network, do: str = "do", **options: Any) -> None:
    queue = place.opened(network.over(place.queue), network.over(place.log), **options)
    run(lambda: queue.send_transaction("order 7", getattr(place.ledger, do)))


def checked(place: Place, network: Network) -> None:
    run(place.opened(network.over(place.queue), network.over(place.log)).checker.run_once)


@pytest.mark.parametrize("kind", KINDS)
def test_the_faults_of_the_next_tests_are_those_that_can_fire(embedded: EmbeddedClient, kind: str) -> None:
    """A process that nothing befalls makes as many calls as there are steps, so that no step is left out."""
    producers, checkers = {}, {}
    for number, do in enumerate(("do", "refuse")):
        produced(Place(embedded, kind, f"-{number}"), network := Network(), do)
        producers[kind, do] = network.calls
        left_behind(place := Place(embedded, kind, f"-{number}-checked"), do == "do")
        embedded.pass_time(601)
        checked(place, network := Network())
        checkers[kind, do == "do"] = network.calls
    assert producers == {scenario: steps for scenario, steps in PRODUCER_STEPS.items() if scenario[0] == kind}
    assert checkers == {scenario: steps for scenario, steps in CHECKER_STEPS.items() if scenario[0] == kind}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "do"), PRODUCER_STEPS)
def test_the_producer_and_its_network_fail_at_every_step(embedded: EmbeddedClient, kind: str, do: str) -> None:
    commit = {"sqs": 3, "azure": 2, "hidden": 4}[kind]

    @for_each("how, step", product(FAILURES, range(1, PRODUCER_STEPS[kind, do] + 1)))
    def fails_at(how: str, step: int) -> None:
        # Logged: what was sent and not confirmed is sent again, with the transaction's id.
        certain = how in {"unreachable", "killed before", "cut from here"}
        place, network = Place(embedded, kind, suffix(how, step)), Network(step, how)
        produced(place, network, do, times=Times(claim_for=0.001))
        assert network.fired
        settled_in_the_end(place, once=kind == "hidden" or (certain and step <= commit) or step > commit + 1)

    fails_at()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "done"), CHECKER_STEPS)
def test_the_checker_and_its_network_fail_at_every_step(embedded: EmbeddedClient, kind: str, done: bool) -> None:
    @for_each("how, step", product(FAILURES, range(1, CHECKER_STEPS[kind, done] + 1)))
    def fails_at(how: str, step: int) -> None:
        place, network = Place(embedded, kind, suffix(how, step)), Network(step, how)
        left_behind(place, done)
        embedded.pass_time(601)
        checked(place, network)
        assert network.fired
        settled_in_the_end(place, kind == "hidden")

    fails_at()


LEFT_TO_THE_CHECKER = {
    (3, "killed before"), (3, "killed after"), (3, "cut from here"),
    (4, "killed before"), (4, "request lost, perhaps"), (4, "unreachable"), (4, "cut from here"),
}  # fmt: skip
"""Where a producer of the hidden form leaves its entry: at its other faults it tries again by itself, or was done."""


def test_what_a_producer_leaves_to_the_checker(embedded: EmbeddedClient) -> None:
    left = set()
    for step in (3, 4):
        for how in FAILURES:
            place = Place(embedded, "hidden", f"-{step}-{FAILURES.index(how)}")
            produced(place, Network(step, how))
            if place.left():
                left.add((step, how))
    assert left == LEFT_TO_THE_CHECKER


@pytest.mark.slow
@pytest.mark.parametrize(("step", "first"), sorted(LEFT_TO_THE_CHECKER))
def test_producer_and_checker_both_fail(embedded: EmbeddedClient, step: int, first: str) -> None:
    @for_each("later, second", [(later, second) for later in (2, 3) for second in FAILURES])
    def then(later: int, second: str) -> None:
        place = Place(embedded, "hidden", f"-{later}-{FAILURES.index(second)}")
        produced(place, network := Network(step, first))
        assert network.fired
        embedded.pass_time(601)
        checked(place, network := Network(later, second))
        assert network.fired
        settled_in_the_end(place, once=True)

    then()


# FIFO queues: no message has a delay of its own, and a commit's second copy is dropped for five minutes.


class Fifo(Place):
    """A native FIFO queue as the target; its log is a standard queue, whose sends return handles or do not."""

    def __init__(self, embedded: EmbeddedClient, kind: str, number: str = "") -> None:
        super().__init__(embedded, kind, number)
        embedded.account.create(f"orders{number}.fifo", Template(fifo=True))
        self.queue = embedded.account.queue(f"orders{number}.fifo")

    def live(self, network: Network | None = None) -> TransactionQueue:
        """A process of its own, with the default times."""
        network = network or Network()
        return self.opened(network.over(self.queue), network.over(self.log))

    def produce(self, network: Network) -> None:
        queue = self.live(network)
        run(lambda: queue.send_transaction(Message("order 7", group="g"), self.ledger.do))

    def check(self, network: Network | None = None) -> None:
        run(self.live(network).checker.run_once)

    def one_copy_in_the_end(self, came: list[Received]) -> None:
        for _ in range(4):
            self.embedded.pass_time(61)
            self.check()
            came += self.consumed()
        self.embedded.pass_time(1_000)
        self.check()
        came += self.consumed()
        assert [message.attributes[ATTRIBUTE] for message in came] == self.ledger.done
        assert self.left() == 0


@pytest.fixture(params=["azure", "sqs"], ids=["handles", "no-handles"])
def fifo(request: pytest.FixtureRequest, embedded: EmbeddedClient) -> Fifo:
    return Fifo(embedded, request.param)


FIFO_KINDS = {"azure": "handles", "sqs": "no-handles"}
FIFO_STEPS = {"azure": 3, "sqs": 4}
FIFO_COMMITS = {"azure": 2, "sqs": 3}
"""The step at which a producer sends the message itself."""
FIFO_CHECKER_STEPS = 4

kinds = pytest.mark.parametrize("kind", FIFO_KINDS, ids=FIFO_KINDS.get)


@kinds
def test_the_faults_of_the_next_fifo_tests_are_those_that_can_fire(embedded: EmbeddedClient, kind: str) -> None:
    Fifo(embedded, kind).produce(network := Network())
    assert network.calls == FIFO_STEPS[kind]
    for number, producer in enumerate(("killed before", "killed after")):
        fifo = Fifo(embedded, kind, f"-{number}")
        fifo.produce(network := Network(FIFO_COMMITS[kind], producer))
        assert network.fired
        embedded.pass_time(181)
        fifo.check(network := Network())
        assert network.calls == FIFO_CHECKER_STEPS


@pytest.mark.slow
@kinds
def test_a_fifo_producer_fails_at_every_step_and_leaves_one_copy(embedded: EmbeddedClient, kind: str) -> None:
    @for_each("how, step", product(FAILURES, range(1, FIFO_STEPS[kind] + 1)))
    def fails_at(how: str, step: int) -> None:
        fifo, network = Fifo(embedded, kind, suffix(how, step)), Network(step, how)
        fifo.produce(network)
        assert network.fired
        came = fifo.consumed()
        embedded.pass_time(181)
        fifo.check()
        fifo.one_copy_in_the_end(came + fifo.consumed())

    fails_at()


@pytest.mark.slow
@pytest.mark.parametrize("producer", ["killed before", "killed after"])
@kinds
def test_a_fifo_checker_fails_at_every_step_after_its_producer(
    embedded: EmbeddedClient, kind: str, producer: str
) -> None:
    """The producer died at its commit, the first checker at each of its own steps."""

    @for_each("how, step", product(FAILURES, range(1, FIFO_CHECKER_STEPS + 1)))
    def fails_at(how: str, step: int) -> None:
        fifo, network = Fifo(embedded, kind, suffix(how, step)), Network(step, how)
        fifo.produce(Network(FIFO_COMMITS[kind], producer))
        came = fifo.consumed()
        embedded.pass_time(181)
        fifo.check(network)
        assert network.fired
        fifo.one_copy_in_the_end(came + fifo.consumed())

    fails_at()


def test_times_that_outlast_the_deduplication_are_told(fifo: Fifo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "veilmq.transaction"):
        assert fifo.opened().times.timeout == 180
        assert caplog.messages == []
        fifo.opened(times=Times(timeout=600))
    (told,) = caplog.messages
    assert "idempotency guard" in told
