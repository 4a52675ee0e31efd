"""Receivers over different objects of one queue: one parked poll for all, and what happens when one of them closes,
fails, is forgotten or is forked away.
"""

import asyncio
import gc
import threading
import urllib.request
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.client.test_forked import code_of, in_child
from tests.client.test_receiver import UNREACHABLE, Counting, eventually, until

import veilmq
from veilmq.client import receiver as module
from veilmq.client.adapters.connect import connect_account
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.documents import MessageReceiver
from veilmq.client.encrypted import EncryptedQueue, Key, Keys, new_key
from veilmq.client.errors import TransportError
from veilmq.client.large import LargeMessageQueue
from veilmq.client.messages import Received
from veilmq.client.queue import Queue, identity_of
from veilmq.client.receiver import AsyncReceiver, Receiver
from veilmq.client.routed import Route, RoutedQueue
from veilmq.client.unreadable import DeadLetters, keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import VeilError
from veilmq.testing.client_contract import for_each
from veilmq.testing.local import LocalServer

SOON_SECONDS = 15
"""Below a poll's wait, far above what a busy machine needs."""


class Watched(Counting):
    """Counts its receives, and stands for the queue that it is around."""

    @property
    def identity(self) -> Hashable:
        return "watched", identity_of(self.inner)


class Waiting:
    """A thread that waits at a receiver for one message."""

    def __init__(self, receiver: Receiver, timeout: float | None = None) -> None:
        self.outcome: Received | VeilError | None = None
        waiting = receiver.waiting
        self.thread = threading.Thread(target=self._wait, args=(receiver, timeout), daemon=True)
        self.thread.start()
        eventually(lambda: receiver.waiting == waiting + 1 or not self.thread.is_alive())

    def _wait(self, receiver: Receiver, timeout: float | None) -> None:
        try:
            self.outcome = receiver.receive(timeout)
        except VeilError as error:
            self.outcome = error

    def result(self) -> Received | VeilError | None:
        self.thread.join(SOON_SECONDS)
        assert not self.thread.is_alive(), "it waits still"
        return self.outcome

    def message(self) -> Received:
        outcome = self.result()
        assert isinstance(outcome, Received), outcome
        return outcome


@pytest.fixture
def account(tmp_path: Path) -> Iterator[EmbeddedAccount]:
    with EmbeddedAccount(tmp_path / "data") as account:
        account.create("jobs")
        yield account


@pytest.fixture
def two(account: EmbeddedAccount) -> tuple[Watched, Watched]:
    """Two objects of one queue."""
    return Watched(account.queue("jobs")), Watched(account.queue("jobs"))


def pollings(queue: Queue) -> list[Any]:
    """What the receivers of this queue share. The table may have queues of other tests, whose runners end soon."""
    return [each for key, each in module._shared.pollings.items() if key[0] == identity_of(queue)]


def parked(server: LocalServer) -> int:
    """Receives that wait at the server now."""
    with urllib.request.urlopen(f"{server.admin_url}/metrics") as answer:
        (line,) = [line for line in answer.read().decode().splitlines() if line.startswith("veilmq_waiters ")]
    return int(float(line.split()[1]))


class Crowd:
    """Threads that each make a queue object and a receiver of their own, and receive until they are told to stop."""

    def __init__(self, connect: Callable[[], Queue], count: int) -> None:
        self.got: list[tuple[str, int]] = []
        self.errors: list[BaseException] = []
        self.receivers: list[Receiver] = []
        self.stopping = False
        self.threads = [threading.Thread(target=self._work, args=(connect,), daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def _work(self, connect: Callable[[], Queue]) -> None:
        try:
            with connect() as queue:
                receiver = MessageReceiver(queue)
                self.receivers.append(receiver.receiver)
                while not self.stopping:
                    message = receiver.receiveMessage(20)
                    if message is not None:
                        assert message.received is not None
                        self.got.append((message.getMessageBody(), message.received.receive_count))
                        queue.delete(message.getReceiptHandle())
        except BaseException as error:
            self.errors.append(error)
            raise

    @property
    def waiting(self) -> int:
        return sum(receiver.waiting for receiver in self.receivers)

    def stop(self) -> None:
        self.stopping = True
        for receiver in self.receivers:
            receiver.close()
        for thread in self.threads:
            thread.join(SOON_SECONDS)
            assert not thread.is_alive()


URLS: dict[str, tuple[Callable[[LocalServer], str], int]] = {
    "veil": (lambda server: f"veil://{server.sqs_url.partition('//')[2]}/jobs", 100),
    "sqs": (lambda server: f"sqs://any:any@{server.sqs_url.partition('//')[2]}/jobs?tls=0&region=us-east-1", 10),
    "mns": (lambda server: f"mns://any:any@{server.mns_url.partition('//')[2]}/jobs?tls=0", 30),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(URLS))
def test_threads_with_objects_of_their_own_hold_one_poll_at_the_server(kind: str, veilmq_server: LocalServer) -> None:
    url, count = URLS[kind]
    veilmq_server.account().create("jobs")
    crowd = Crowd(lambda: veilmq.connect(url(veilmq_server)), count)
    try:
        eventually(lambda: crowd.waiting == count and parked(veilmq_server) == 1)
        for _ in range(20):
            assert parked(veilmq_server) == 1
        sender = veilmq_server.connect("jobs")
        encoded = kind == "mns"  # whose adapter sends and reads base64
        bodies = [str(number) for number in range(1_000, 1_000 + 3 * count)]
        with veilmq.connect(url(veilmq_server)) as own:
            (own if encoded else sender).send_batch(bodies)
        eventually(lambda: len(crowd.got) >= len(bodies))
        assert sorted(crowd.got) == [(body, 1) for body in bodies]
        eventually(lambda: crowd.waiting == count and parked(veilmq_server) == 1)
        stats = sender.stats()
        assert (stats.visible, stats.in_flight) == (0, 0)
    finally:
        crowd.stop()
    assert crowd.errors == []
    eventually(lambda: parked(veilmq_server) == 0 or kind != "veil")


def test_threads_on_a_directory_share_a_poll(tmp_path: Path) -> None:
    url = f"veil://{tmp_path}/data?queue=jobs&create=1"
    with veilmq.connect(url) as sender:
        crowd = Crowd(lambda: veilmq.connect(url), 100)
        eventually(lambda: crowd.waiting == 100)
        (shared,) = pollings(sender)
        assert len(shared._exchange.calls) == 1
        sender.send_batch([str(number) for number in range(1_000, 1_200)])
        eventually(lambda: len(crowd.got) >= 200)
        crowd.stop()
    assert sorted(crowd.got) == [(str(number), 1) for number in range(1_000, 1_200)]
    assert crowd.errors == []


def test_who_waits_longest_is_served_first_whoever_made_the_receiver(two: tuple[Watched, Watched]) -> None:
    with Receiver(two[0]) as one, Receiver(two[1]) as other:
        waiting = [Waiting(receiver) for receiver in (one, other, one, other)]
        for number, each in enumerate(waiting):
            two[0].send(str(number))
            assert each.message().body == str(number)
        assert (two[0].parked_max, two[1].parked_max) <= (1, 1)


def test_a_receiver_for_threads_and_one_for_coroutines_share(two: tuple[Watched, Watched]) -> None:
    async def main() -> None:
        async with AsyncReceiver(two[1]) as receiver:
            asked = asyncio.create_task(receiver.receive())
            await until(lambda: receiver.waiting == 1)
            assert two[1].receives == 0, "the other's poll is enough"
            two[0].send_batch(["1", "2"])
            message = await asked
            assert message is not None
            assert {message.body, waiting.message().body} == {"1", "2"}

    with Receiver(two[0]) as other:
        waiting = Waiting(other)
        eventually(lambda: two[0].parked == 1)
        asyncio.run(main())


class TestClosing:
    """One leaves, the others go on."""

    def test_a_receiver_that_closes_leaves_its_poll_to_the_others(self, two: tuple[Watched, Watched]) -> None:
        first, second = Receiver(two[0]), Receiver(two[1])
        leaving, staying = Waiting(first), Waiting(second)
        eventually(lambda: two[0].parked == 1)
        first.close(deadline=SOON_SECONDS)
        assert leaving.result() is None
        assert first.receive(5) is None
        two[1].send("there")
        message = staying.message()
        assert (message.body, message.receive_count) == ("there", 1)
        assert (two[0].receives, two[1].receives) == (1, 0), "it went on"
        two[1].delete(message.handle)
        second.close(deadline=SOON_SECONDS)

    def test_the_last_receiver_ends_the_poll_that_an_earlier_one_left(self, two: tuple[Watched, Watched]) -> None:
        first, second = Receiver(two[0]), Receiver(two[1])
        waiting = [Waiting(first), Waiting(second)]
        eventually(lambda: two[0].parked == 1)
        first.close()
        second.close(deadline=SOON_SECONDS)
        assert (two[0].parked, two[1].parked) == (0, 0)
        assert [each.result() for each in waiting] == [None, None]
        two[0].send("for another")
        with Receiver(two[0]) as another:
            message = another.receive(SOON_SECONDS)
            assert message is not None
            assert message.receive_count == 1

    def test_a_queue_object_that_is_closed_hands_the_poll_over(self, two: tuple[Watched, Watched]) -> None:
        with Receiver(two[0]) as first, Receiver(two[1]) as second:
            broken, staying = Waiting(first), Waiting(second)
            eventually(lambda: two[0].parked == 1)
            two[0].close()
            error = broken.result()
            assert isinstance(error, TransportError)
            assert "closed" in error.reason
            eventually(lambda: two[1].parked == 1)
            two[1].send("there")
            assert staying.message().receive_count == 1
            with pytest.raises(TransportError, match="closed"):
                first.receive(0)

    def test_an_interruption_ends_nobodys_wait(self, two: tuple[Watched, Watched]) -> None:
        with Receiver(two[0]) as first, Receiver(two[1]) as second:
            waiting = [Waiting(first), Waiting(second)]
            eventually(lambda: two[0].parked == 1)
            two[0].interrupt()
            eventually(lambda: two[0].receives + two[1].receives == 2)
            two[1].send_batch(["1", "2"])
            assert {each.message().body for each in waiting} == {"1", "2"}

    def test_what_is_kept_is_given_back_over_another_object(self, two: tuple[Watched, Watched]) -> None:
        with Receiver(two[0], lease=600) as first, Receiver(two[1], lease=600):
            leaving = Waiting(first, 0.5)
            eventually(lambda: two[0].parked == 1)
            shared = first._polling
            with shared._changed:
                # The caller leaves while the poll is parked.
                (wish,) = shared._exchange._waiting
                shared._exchange.withdraw(wish)
            two[1].send("for nobody")
            eventually(lambda: two[1].stats().in_flight == 1)
            two[0].close()
            leaving.result()
            eventually(lambda: two[1].stats().visible == 1)


class TestErrors:
    """An error is about the object that met it, until another object meets one."""

    def test_an_object_that_cannot_reach_the_queue_stops_nobody(self, two: tuple[Watched, Watched]) -> None:
        two[0].answer = UNREACHABLE
        with Receiver(two[0]) as first, Receiver(two[1]) as second:
            theirs = Waiting(first)
            eventually(lambda: two[0].receives == 1)
            assert second.receive(1) is None, "its own object found nothing"
            ours = Waiting(second)
            eventually(lambda: two[1].parked == 1)
            two[1].send_batch(["1", "2"])
            assert {theirs.message().body, ours.message().body} == {"1", "2"}

    def test_an_object_that_is_refused_tells_its_own_callers(self, two: tuple[Watched, Watched]) -> None:
        two[0].answer = refusal = veilmq.client.errors.ServiceError(
            code="AccessDenied", status=403, request_id="", message="no"
        )
        with Receiver(two[0]) as first, Receiver(two[1]) as second:
            theirs, ours = Waiting(first), Waiting(second)
            assert theirs.result() == refusal
            eventually(lambda: two[1].parked == 1)
            two[1].send("there")
            assert ours.message().body == "there"

    def test_a_queue_that_is_gone_is_raised_to_all(
        self, account: EmbeddedAccount, two: tuple[Watched, Watched]
    ) -> None:
        with Receiver(two[0]) as first, Receiver(two[1]) as second:
            waiting = [Waiting(first), Waiting(second), Waiting(second)]
            account.delete("jobs")
            assert {type(each.result()).__name__ for each in waiting} == {"QueueMissing"}


class TestParameters:
    """Receivers that do not ask for the same."""

    def test_each_lease_has_a_poll_of_its_own(self, two: tuple[Watched, Watched]) -> None:
        with Receiver(two[0], lease=30) as short, Receiver(two[1], lease=600) as long:
            waiting = [Waiting(short), Waiting(long)]
            eventually(lambda: (two[0].parked, two[1].parked) == (1, 1))
            two[0].send_batch(["1", "2"])
            left = [each.message().lease_end - short._clock.monotonic() for each in waiting]
            assert 0 < left[0] <= 30
            assert 500 < left[1] <= 600

    def test_the_one_with_more_polls_decides_how_many_while_it_is_there(self, two: tuple[Watched, Watched]) -> None:
        with Receiver(two[0]) as first:
            waiting = [Waiting(first)]
            eventually(lambda: two[0].parked == 1)  # else one poll may be for all three
            waiting.append(Waiting(first))
            second = Receiver(two[1], polls=2, wait=5)
            waiting.append(Waiting(second))
            eventually(lambda: two[0].parked + two[1].parked == 2)
            limits = first._polling._limits
            assert (limits.polls, limits.wait) == (2, 5)
            second.close()
            assert first._polling._limits.polls == 1
            two[0].send_batch(["1", "2"])
            for each in waiting[:2]:
                each.message()


class TestForgetting:
    """With the last receiver all is gone: no table keeps a queue object, a secret or a thread."""

    @pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
    def test_the_last_one_leaves_nothing(
        self, account: EmbeddedAccount, monkeypatch: pytest.MonkeyPatch, closed: bool
    ) -> None:
        monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)
        account.queue("jobs").send_batch([str(number) for number in range(20)])
        queues = [Watched(account.queue("jobs")) for _ in range(20)]
        receivers = [Receiver(queue) for queue in queues]
        assert len(pollings(queues[0])) == 1
        for receiver in receivers:
            assert receiver.receive(5) is not None
        gone = [weakref.ref(queue) for queue in queues]
        if closed:
            for receiver in receivers:
                receiver.close(deadline=SOON_SECONDS)
            assert pollings(queues[0]) == []
        identity = queues[0].identity
        del queues, receivers, receiver

        def all_gone() -> bool:
            gc.collect()
            return not any(key[0] == identity for key in module._shared.pollings) and not any(each() for each in gone)

        eventually(all_gone)

    def test_one_that_was_dropped_counts_no_more(self, two: tuple[Watched, Watched]) -> None:
        with Receiver(two[0]) as first:
            second = Receiver(two[1], polls=3)
            del second
            gc.collect()
            waiting = [Waiting(first) for _ in range(3)]
            two[0].send_batch(["1", "2", "3"])
            for each in waiting:
                each.message()
            assert two[0].parked_max == 1
            waiting = [Waiting(first)]
            eventually(lambda: two[0].parked == 1)
            first.close(deadline=SOON_SECONDS)
            assert two[0].parked == 0, "it was the last"

    def test_who_comes_after_the_last_one_begins_anew(self, two: tuple[Watched, Watched]) -> None:
        Receiver(two[0]).close()
        with Receiver(two[1]) as receiver:
            two[0].send("there")
            assert receiver.receive(SOON_SECONDS) is not None


@pytest.mark.slow
def test_a_child_shares_nothing_with_its_parent(veilmq_server: LocalServer) -> None:
    """The fork comes while another thread changes the table: that lock is never free in the child."""
    url = URLS["veil"][0](veilmq_server)
    veilmq_server.account().create("jobs")
    with veilmq.connect(url) as queue, Receiver(queue) as receiver:
        waiting = Waiting(receiver)
        held, may = threading.Event(), threading.Event()

        def hold() -> None:
            with module._shared.lock:
                held.set()
                may.wait(SOON_SECONDS)

        holding = threading.Thread(target=hold)
        holding.start()
        assert held.wait(SOON_SECONDS)

        def work() -> bool:
            with veilmq.connect(url) as own, Receiver(own) as another:
                if another._polling is receiver._polling:
                    return False
                # The parent's caller waits longer: it gets the first one.
                own.send_batch(["1", "2"])
                message = another.receive(SOON_SECONDS)
                if message is None:
                    return False
                own.delete(message.handle)
            return True

        pid = in_child(work)
        may.set()
        holding.join()
        assert code_of(pid) == 0
        assert waiting.message().receive_count == 1


class TestPatterns:
    """A pattern around the queue belongs to what a receiver gets."""

    def test_each_gets_what_its_own_pattern_delivers(self, account: EmbeddedAccount) -> None:
        key = new_key()

        def encrypted() -> Queue:
            return EncryptedQueue(account.queue("jobs"), Keys(key), unreadable=keep)

        plain, secret, other = account.queue("jobs"), encrypted(), encrypted()
        with Receiver(plain) as raw, Receiver(secret) as first, Receiver(other) as second:
            assert first._polling is second._polling
            assert raw._polling is not first._polling
            secret.send("readable")
            message = second.receive(SOON_SECONDS)
            assert message is not None
            assert message.body == "readable"
            other.release(message.handle)
            message = raw.receive(SOON_SECONDS)
            assert message is not None
            assert message.body.startswith("ey")

    def test_a_wrapper_that_receives_by_itself_stands_for_itself(self, account: EmbeddedAccount) -> None:
        class Shouting(Wrapping):
            def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
                return self.inner.receive(count_max, lease=lease, wait=wait)

        class Passing(Wrapping):
            pass

        queue = account.queue("jobs")
        assert identity_of(Passing(queue)) == identity_of(queue) == identity_of(account.queue("jobs"))
        one, other = Shouting(queue), Shouting(queue)
        assert len({identity_of(each) for each in (queue, one, other)}) == 3
        assert identity_of(one) == identity_of(one)


KEY, SAME_KEY, OTHER_KEY = Key("a", bytes(32)), Key("a", bytes(32)), Key("a", bytes(31) + b"\1")

Make = Callable[[EmbeddedAccount, Path], Queue]


def _encrypted(keys: Any, policy: Any = keep, **given: Any) -> Make:
    return lambda account, _: EncryptedQueue(account.queue("jobs"), keys, unreadable=policy, **given)


def _dead_lettered(name: str) -> Make:
    def make(account: EmbeddedAccount, _: Path) -> Queue:
        account.create(name)
        return EncryptedQueue(account.queue("jobs"), Keys(KEY), unreadable=DeadLetters(account.queue(name)))

    return make


def _large(bucket: str = "bucket", **options: Any) -> Make:
    def make(account: EmbeddedAccount, home: Path) -> Queue:
        store = veilmq.client.records.ObjectStore(f"file://{home}/{bucket}", options=options)
        return LargeMessageQueue(account.queue("jobs"), store, unreadable=keep)

    return make


def _routed(lease: float) -> Make:
    def make(account: EmbeddedAccount, _: Path) -> Queue:
        route = Route(account.queue("jobs"), lease)
        return RoutedQueue({"a": route}, route)

    return make


@for_each(
    "one, other, same",
    [
        (_encrypted(Keys(KEY)), _encrypted(Keys(SAME_KEY)), True),
        (_encrypted(Keys(KEY)), _encrypted(Keys(OTHER_KEY)), False),
        (_encrypted(Keys(KEY)), _encrypted(Keys(KEY), accepts=["old"]), False),
        (_encrypted(Keys(KEY)), _encrypted(Keys(KEY), lambda queue, message, error: None), False),
        (_dead_lettered("dead"), _dead_lettered("dead"), True),
        (_dead_lettered("dead"), _dead_lettered("dead2"), False),
        (_large(), _large(), True),
        (_large(), _large("bucket2"), False),
        (_large(auto_mkdir=True), _large(auto_mkdir=False), False),
        (_large(token=object()), _large(token=object()), False),
        (_routed(30), _routed(30), True),
        (_routed(30), _routed(60), False),
    ],
    ids=[
        "keys", "other keys", "other names", "other policy", "dead letters", "other dead letters", "store",
        "other store", "other options", "options with an object", "routes", "other leases",
    ],
)  # fmt: skip
def test_patterns_are_the_same_if_they_deliver_the_same(
    account: EmbeddedAccount, tmp_path: Path, one: Make, other: Make, same: bool
) -> None:
    assert (identity_of(one(account, tmp_path)) == identity_of(other(account, tmp_path))) is same


PLACES: dict[str, tuple[str, list[str]]] = {
    "veil": (
        "veil://key:secret@{sqs}/jobs",
        [
            "veil://key:terces@{sqs}/jobs",
            "veil://yek:secret@{sqs}/jobs",
            "veil://key:secret@{sqs}/jobs?region=eu-west-1",
            "veil://key:secret@{sqs}/jobs2",
            "veil://key:secret@{sqs_by_name}/jobs",
        ],
    ),
    "sqs": (
        "sqs://key:secret@{sqs}/jobs?tls=0&region=us-east-1",
        [
            "sqs://key:terces@{sqs}/jobs?tls=0&region=us-east-1",
            "sqs://key:secret@{sqs}/jobs?tls=0&region=eu-west-1",
            "sqs://key:secret@{sqs}/jobs2?tls=0&region=us-east-1",
            "sqs://key:secret@{sqs_by_name}/jobs?tls=0&region=us-east-1",
        ],
    ),
    "azure": (
        "azure://{azure}/devstoreaccount1/jobs?tls=0",
        [
            "azure://{azure}/devstoreaccount1/jobs2?tls=0",
            "azure://{azure}/devstoreaccount1/jobs?tls=0&base64=1",
            "azure://{azure_by_name}/devstoreaccount1/jobs?tls=0",
        ],
    ),
    "mns": (
        "mns://key:secret@{mns}/jobs?tls=0",
        [
            "mns://key:terces@{mns}/jobs?tls=0",
            "mns://yek:secret@{mns}/jobs?tls=0",
            "mns://key:secret@{mns}/jobs2?tls=0",
            "mns://key:secret@{mns}/jobs?tls=0&base64=0",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PLACES))
def test_two_places_or_two_accounts_never_share(kind: str, veilmq_server: LocalServer) -> None:
    places = {}
    for name in ("sqs", "azure", "mns"):
        places[name] = urlsplit(getattr(veilmq_server, f"{name}_url")).netloc
        places[f"{name}_by_name"] = places[name].replace("127.0.0.1", "localhost")
    url, others = (PLACES[kind][0].format(**places), [other.format(**places) for other in PLACES[kind][1]])

    def made(url: str) -> Queue:
        return veilmq.connect(url + ("&" if "?" in url else "?") + "create=1")

    queues = [made(each) for each in [url, url, *others]]
    try:
        one, same, *different = [identity_of(queue) for queue in queues]
        assert one == same
        assert len({one, *different}) == 1 + len(different)
        for each in (one, *different):
            assert not any(secret in repr(each) for secret in ("secret", "terces", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDX"))
    finally:
        for queue in queues:
            queue.close()


def test_directories_accounts_and_regions_never_share(tmp_path: Path) -> None:
    given: list[dict[str, str]] = [{}, {}, {"account": "111111111111"}, {"region": "eu-west-1"}]
    accounts = [EmbeddedAccount(tmp_path / "data", **each) for each in given] + [EmbeddedAccount(tmp_path / "data2")]
    for account in accounts:
        account.create("jobs")
        account.create("jobs2")
    counts = Counter(identity_of(account.queue(name)) for account in accounts for name in ("jobs", "jobs2"))
    assert sorted(counts.values()) == [1] * 6 + [2] * 2
    for account in accounts:
        account.close()


def test_a_url_reaches_the_same_queue_as_its_account(tmp_path: Path) -> None:
    with (
        veilmq.connect(f"veil://{tmp_path}/data?queue=jobs&create=1") as queue,
        connect_account(f"veil://{tmp_path}/data") as account,
    ):
        assert identity_of(queue) == identity_of(account.queue("jobs"))
