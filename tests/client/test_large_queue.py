"""A large body goes to the store and comes back whole, and no pointer leads where it should not."""

import base64
import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.embedded import EmbeddedClient

from veilmq.client.encrypted import EncryptedQueue, Keys, new_key
from veilmq.client.errors import (
    ObjectDamaged,
    ObjectMissing,
    ObjectStoreFailed,
    PointerRefused,
    ServiceError,
    TransportError,
    Unreadable,
)
from veilmq.client.large import LargeMessageQueue, ObjectStore
from veilmq.client.large.pointer import BEGINNING
from veilmq.client.messages import Extension, Message, Received, Sent, Stats, Template
from veilmq.client.queue import Queue
from veilmq.client.records import is_key
from veilmq.client.routed import RoutedQueue
from veilmq.client.unreadable import PAUSE_SECONDS, DeadLetters, keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import (
    LeaseTaken,
    MessageTooLarge,
    ParameterInvalid,
    QueueMissing,
    ReceiptInvalid,
    StoreUnknown,
    VeilError,
)
from veilmq.testing.client_contract import for_each

LARGE = "žluť" * 20_000
_buckets = itertools.count()


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    store = ObjectStore(f"memory://bucket{next(_buckets)}/large", pause=0.001)
    yield store
    for found in list(store.list("orders")):
        store.remove(found.key)


@pytest.fixture
def plain(embedded: EmbeddedClient) -> Queue:
    embedded.account.create("orders", Template(visibility_timeout=60))
    return embedded.account.queue("orders")


@pytest.fixture
def dead(embedded: EmbeddedClient) -> Queue:
    embedded.account.create("dead")
    return embedded.account.queue("dead")


@pytest.fixture
def queue(embedded: EmbeddedClient, plain: Queue, dead: Queue, store: ObjectStore) -> LargeMessageQueue:
    return LargeMessageQueue(plain, store, unreadable=DeadLetters(dead), clock=embedded.clock)


def keys(store: ObjectStore) -> list[str]:
    return [found.key for found in store.list("orders")]


def key_of(plain: Queue, store: ObjectStore) -> str:
    key = store.key_of(json.loads(plain.peek()[0].body)["url"])
    assert key
    return key


class TestRoundTrip:
    def test_a_large_body(self, plain: Queue, queue: LargeMessageQueue, store: ObjectStore) -> None:
        queue.send(Message(LARGE, {"colour": "red"}, type="order"))
        (raw,) = plain.peek()
        assert len(raw.body) < 400
        (key,) = keys(store)
        value = json.loads(raw.body)
        assert value["bytes"] == len(LARGE.encode())
        assert value["sha256"] == hashlib.sha256(LARGE.encode()).hexdigest()
        assert store.get(key) == LARGE.encode()
        (message,) = queue.receive()
        assert (message.body, message.attributes, message.type) == (LARGE, {"colour": "red"}, "order")
        queue.delete(message.handle)
        assert (keys(store), plain.stats().visible, plain.stats().in_flight) == ([], 0, 0)

    @pytest.mark.parametrize(("characters", "objects"), [(65_536, 0), (65_537, 1)])
    def test_the_threshold(self, queue: LargeMessageQueue, store: ObjectStore, characters: int, objects: int) -> None:
        queue.send("x" * characters)
        assert len(keys(store)) == objects
        assert queue.receive()[0].body == "x" * characters

    @pytest.mark.parametrize(("characters", "objects"), [(49_152, 0), (49_153, 1)])
    def test_the_threshold_counts_what_travels(
        self, plain: Queue, store: ObjectStore, characters: int, objects: int
    ) -> None:
        class Base64(Wrapping):
            @property
            def capabilities(self):  # type: ignore[no-untyped-def]
                return msgspec.structs.replace(self.inner.capabilities, base64_body=True)

        LargeMessageQueue(Base64(plain), store, unreadable=keep).send("x" * characters)
        assert len(keys(store)) == objects

    def test_the_queues_own_limit_if_it_is_smaller(self, embedded: EmbeddedClient, store: ObjectStore) -> None:
        embedded.account.create("orders", Template(message_bytes_max=2048))
        queue = LargeMessageQueue(embedded.account.queue("orders"), store, unreadable=keep)
        queue.send("x" * 2048)
        assert keys(store) == []
        queue.send("x" * 2049)
        assert len(keys(store)) == 1
        assert {len(message.body) for message in queue.receive(10)} == {2048, 2049}

    def test_batches(self, queue: LargeMessageQueue, store: ObjectStore) -> None:
        bodies = [f"{number}" + (LARGE if number % 3 == 0 else "") for number in range(10)]
        answers = queue.send_batch([*bodies, "\x00"])
        assert [type(answer) for answer in answers] == [Sent] * 10 + [ParameterInvalid]
        assert len(keys(store)) == 4
        assert sorted(message.body for message in queue.peek(20)) == sorted(bodies)
        came = queue.receive(20)
        assert sorted(message.body for message in came) == sorted(bodies)
        handles = [message.handle for message in came]
        extended = queue.extend_batch([*(Extension(handle, 30) for handle in handles), Extension("x", 30)])
        assert isinstance(extended[-1], ReceiptInvalid)
        done = queue.delete_batch([*(str(handle) for handle in extended[:-1]), "x"])
        assert done[:-1] == [None] * 10
        assert isinstance(done[-1], ReceiptInvalid)
        assert keys(store) == []

    def test_any_consumer_can_delete_after_any_number_of_extensions(
        self, embedded: EmbeddedClient, queue: LargeMessageQueue, store: ObjectStore
    ) -> None:
        class Rotating(Wrapping):
            """Receipts rotate: a handle of before an extension is void."""

            def receive(self, count_max: int = 1, **options: Any) -> list[Received]:
                return [
                    msgspec.structs.replace(each, handle=f"0.{each.handle}")
                    for each in self.inner.receive(count_max, **options)
                ]

            def extend(self, handle: str, lease: float, **options: Any) -> str:
                number, _, rest = handle.partition(".")
                self.inner.extend(rest, lease)
                return f"{int(number) + 1}.{rest}"

            def delete(self, handle: str) -> None:
                assert handle.startswith("7.")
                self.inner.delete(handle.partition(".")[2])

        queue.send(LARGE)
        inner = Rotating(embedded.account.queue("orders"))
        handle = LargeMessageQueue(inner, store.url, unreadable=keep).receive()[0].handle
        for _ in range(7):
            handle = LargeMessageQueue(inner, store.url, unreadable=keep).extend(handle, 30)
        LargeMessageQueue(inner, store.url, unreadable=keep).delete(handle)
        assert keys(store) == []

    def test_the_handle_of_a_send(self, queue: LargeMessageQueue, store: ObjectStore) -> None:
        sent = queue.send(Message(LARGE, delay=60))
        assert sent.handle
        queue.delete(sent.handle)
        assert keys(store) == []

    def test_objects_may_be_kept(self, plain: Queue, store: ObjectStore) -> None:
        queue = LargeMessageQueue(plain, store, unreadable=keep, delete_object=False)
        queue.send(LARGE)
        queue.delete(queue.receive()[0].handle)
        assert len(keys(store)) == 1

    def test_release_gives_it_back(self, queue: LargeMessageQueue) -> None:
        queue.send(LARGE)
        queue.release(queue.receive()[0].handle)
        assert queue.receive()[0].body == LARGE

    @for_each("first, second", [*itertools.product([LARGE, "small"], repeat=2)])
    def test_a_replaced_body(self, queue: LargeMessageQueue, store: ObjectStore, first: str, second: str) -> None:
        queue.send(first)
        handle = queue.extend(queue.receive()[0].handle, 60, body=second + "!")
        assert len(keys(store)) == (second == LARGE)
        queue.release(handle)
        (message,) = queue.receive()
        assert message.body == second + "!"
        queue.delete(message.handle)
        assert keys(store) == []

    def test_a_small_body_that_looks_like_a_pointer(self, queue: LargeMessageQueue, store: ObjectStore) -> None:
        body = BEGINNING + '1,"url":"memory://elsewhere/x","bytes":1}'
        queue.send(body)
        assert len(keys(store)) == 1
        assert queue.receive()[0].body == body

    def test_encrypted_over_large(self, plain: Queue, queue: LargeMessageQueue, store: ObjectStore) -> None:
        stack = EncryptedQueue(queue, Keys(new_key()), unreadable=keep)
        stack.send(LARGE)
        (key,) = keys(store)
        assert "žluť".encode() not in (store.get(key) or b"")
        (message,) = stack.receive()
        assert message.body == LARGE
        stack.delete(message.handle)
        assert keys(store) == []

    def test_fifo_deduplicates_by_what_was_sent(self, plain: Queue, store: ObjectStore) -> None:
        sent: list[Message] = []

        class Fifo(Wrapping):
            @property
            def capabilities(self):  # type: ignore[no-untyped-def]
                return msgspec.structs.replace(self.inner.capabilities, native_fifo=True)

            def send(self, message: str | Message) -> Sent:
                assert isinstance(message, Message)
                sent.append(message)
                return Sent("id", duplicate=len(sent) > 1)

        queue = LargeMessageQueue(Fifo(plain), store, unreadable=keep)
        for _ in range(2):
            queue.send(Message(LARGE, group="g"))
        assert {message.deduplication_id for message in sent} == {hashlib.sha256(LARGE.encode()).hexdigest()}
        assert len(keys(store)) == 1, "the duplicate's object went again"


class TestUnreadable:
    def check(self, plain: Queue, queue: LargeMessageQueue, dead: Queue, reason: str) -> None:
        """The one bad message goes to the dead letters, and a good one behind it is received."""
        queue.send("good")
        assert [message.body for message in queue.receive(10)] == ["good"]
        (letter,) = dead.receive(10)
        assert reason in letter.attributes["veilmq.unreadable"]
        assert plain.stats().visible == 0

    def test_missing(self, plain: Queue, queue: LargeMessageQueue, dead: Queue, store: ObjectStore) -> None:
        queue.send(LARGE)
        store.remove(key_of(plain, store))
        self.check(plain, queue, dead, "missing")

    @for_each(
        "content, reason",
        [(b"", "bytes"), (LARGE.encode()[:-1], "bytes"), (LARGE.encode() + b"x", "bytes"),
         (LARGE.encode()[:-2] + b"xx", "SHA-256")],
    )  # fmt: skip
    def test_damaged(
        self, plain: Queue, queue: LargeMessageQueue, dead: Queue, store: ObjectStore, content: bytes, reason: str
    ) -> None:
        queue.send(LARGE)
        store.put(key_of(plain, store), content)
        self.check(plain, queue, dead, reason)

    def test_not_text(self, plain: Queue, queue: LargeMessageQueue, dead: Queue, store: ObjectStore) -> None:
        raw = b"\xff" * 10
        store.put("orders/x", raw)
        sha256 = hashlib.sha256(raw).hexdigest()
        plain.send(pointer(store, f"{store.url}/orders/x", bytes=10, sha256=sha256))
        self.check(plain, queue, dead, "UTF-8")

    @for_each(
        "url",
        [
            "memory://elsewhere/large/orders/x",
            "memory://{bucket}/larger/orders/x",
            "memory://{bucket}/large/../secret",
            "memory://{bucket}/large/orders/../../secret",
            "memory://{bucket}/large/./x",
            "memory://{bucket}/large//x",
            "memory://{bucket}/large/",
            "memory://{bucket}/large",
            "memory://{bucket}/large/orders/x?versionId=1",
            "memory://{bucket}/large/orders/%2e%2e/x",
            "memory://{bucket}/large/x\n",
            "file:///etc/passwd",
            "/etc/passwd",
            "http://127.0.0.1/x",
            "simplecache::memory://{bucket}/large/orders/x",
            "memory://{bucket}/large/" + "x" * 1000,
            "",
            None,
            7,
        ],
    )
    def test_a_forged_pointer_leads_nowhere(
        self, plain: Queue, queue: LargeMessageQueue, dead: Queue, store: ObjectStore, url: Any
    ) -> None:
        store._files.pipe_file(f"{store.bucket}/secret", b"secret")
        sha256 = hashlib.sha256(b"secret").hexdigest()
        place = url.replace("{bucket}", store.bucket) if isinstance(url, str) else url
        plain.send(pointer(store, place, bytes=6, sha256=sha256))
        self.check(plain, queue, dead, "out of the configured store")

    @for_each(
        "change",
        [{"bytes": -1}, {"bytes": "6"}, {"bytes": None}, {"bytes": 3 << 30}, {"sha256": None}, {"sha256": "x" * 64},
         {"sha256": ""}, {"reader": "../x"}, {"reader": 7}, {"reader": "r"}, {"veilmq.pointer": 2}],
    )  # fmt: skip
    def test_a_malformed_pointer(
        self, plain: Queue, queue: LargeMessageQueue, dead: Queue, store: ObjectStore, change: dict[str, Any]
    ) -> None:
        store.put("orders/x", b"secret")
        fields = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest(), **change}
        plain.send(pointer(store, f"{store.url}/orders/x", **fields))
        self.check(plain, queue, dead, "its pointer is refused")
        assert store.get("orders/x") == b"secret"

    @for_each("rest", ["", "1", "1}", "1,", "[" * 3000, '1,"x":"' + "x" * 5000 + '"}'])
    def test_what_only_begins_like_one(self, plain: Queue, queue: LargeMessageQueue, dead: Queue, rest: str) -> None:
        plain.send(BEGINNING + rest)
        self.check(plain, queue, dead, "its pointer is refused")

    def test_the_policy_is_told_what_it_was(self, plain: Queue, store: ObjectStore) -> None:
        told: list[Unreadable] = []

        def policy(queue: Queue, message: Received, error: Unreadable) -> None:
            told.append(error)
            queue.delete(message.handle)

        queue = LargeMessageQueue(plain, store, unreadable=policy)
        queue.send_batch([LARGE, LARGE])
        plain.send(BEGINNING)
        first, second = keys(store)
        store.remove(first)
        store.put(second, b"")
        assert queue.receive(10) == []
        assert {type(error) for error in told} == {ObjectMissing, ObjectDamaged, PointerRefused}
        assert plain.stats().in_flight == 0

    def test_peek_leaves_it_out(self, plain: Queue, queue: LargeMessageQueue, store: ObjectStore) -> None:
        queue.send(LARGE)
        store.remove(key_of(plain, store))
        queue.send("good")
        assert [message.body for message in queue.peek(10)] == ["good"]

    @given(st.text(st.characters(codec="utf-8"), max_size=60))
    def test_what_is_a_key(self, text: str) -> None:
        if is_key(text):
            assert ".." not in text.split("/")
            assert "" not in text.split("/")
            assert text.isascii()


def pointer(store: ObjectStore, url: Any, **fields: Any) -> str:
    return json.dumps({"veilmq.pointer": 1, "url": url, **fields}, separators=(",", ":"))


class Faulty(ObjectStore):
    """Fails as often as it is told, under the retries."""

    failures = 0
    calls = 0

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, pause=0.001, **options)
        self._good, self._files = self._files, self

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._good, name)

        def through(*arguments: Any, **options: Any) -> Any:
            Faulty.calls += 1
            if Faulty.failures:
                Faulty.failures -= 1
                raise ConnectionResetError
            return call(*arguments, **options)

        return through


@pytest.fixture
def faulty(store: ObjectStore) -> Iterator[Faulty]:
    Faulty.failures = Faulty.calls = 0
    yield Faulty(store.url)
    Faulty.failures = 0


def test_a_name_that_names_no_directory_is_refused_at_once(plain: Queue, store: ObjectStore) -> None:
    with pytest.raises(ParameterInvalid, match="'all jobs' cannot be a directory"):
        LargeMessageQueue(RoutedQueue({}, plain, name="all jobs"), store, unreadable=keep)


class TestStoreTrouble:
    def test_calls_are_tried_again(self, plain: Queue, faulty: Faulty) -> None:
        queue = LargeMessageQueue(plain, faulty, unreadable=keep)
        Faulty.failures = 3
        queue.send(LARGE)
        Faulty.failures = 3
        (message,) = queue.receive()
        assert message.body == LARGE
        Faulty.failures = 3
        queue.delete(message.handle)
        assert keys(faulty) == []

    def test_only_the_piece_that_failed_is_read_again(
        self, plain: Queue, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("veilmq.client.large.pointer.PIECE_BYTES", 10_000)
        read: list[int] = []

        class Counting(ObjectStore):
            def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
                read.append(start)
                return super().get(key, start, stop)

        queue = LargeMessageQueue(plain, Counting(store.url), unreadable=keep)
        queue.send("x" * 95_000)
        assert queue.receive()[0].body == "x" * 95_000
        assert read == list(range(0, 95_000, 10_000))

    def test_nothing_is_sent_without_its_object(self, plain: Queue, faulty: Faulty) -> None:
        queue = LargeMessageQueue(plain, faulty, unreadable=keep)
        Faulty.failures = 4
        with pytest.raises(ObjectStoreFailed, match="ConnectionResetError after 4 attempts"):
            queue.send(LARGE)
        Faulty.failures = 4
        assert [type(each) for each in queue.send_batch([LARGE, "x"])] == [ObjectStoreFailed, Sent]
        assert [message.body for message in plain.peek(10)] == ["x"]

    def test_a_message_whose_store_is_away_goes_back(
        self, embedded: EmbeddedClient, plain: Queue, faulty: Faulty
    ) -> None:
        queue = LargeMessageQueue(plain, faulty, unreadable=keep, clock=embedded.clock)
        queue.send_batch([LARGE] * 3)
        Faulty.failures = 10_000
        before = Faulty.calls
        with pytest.raises(ObjectStoreFailed):
            queue.receive(10)
        assert Faulty.calls - before == 4, "the others are not tried once it is known to be away"
        assert plain.stats().in_flight == 3
        Faulty.failures = 0
        embedded.pass_time(PAUSE_SECONDS + 1)
        assert [message.body for message in queue.receive(10)] == [LARGE] * 3

    def test_and_the_others_are_given(self, plain: Queue, faulty: Faulty) -> None:
        queue = LargeMessageQueue(plain, faulty, unreadable=keep)
        queue.send_batch([LARGE, "small", LARGE, "small too"])
        Faulty.failures = 10_000
        assert {message.body for message in queue.receive(10)} == {"small", "small too"}

    def test_an_object_that_cannot_be_removed_is_left(
        self, plain: Queue, faulty: Faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        queue = LargeMessageQueue(plain, faulty, unreadable=keep)
        queue.send(LARGE)
        (message,) = queue.receive()
        Faulty.failures = 4
        with caplog.at_level(logging.WARNING):
            queue.delete(message.handle)
        assert "left to a sweep" in caplog.text
        assert plain.stats().in_flight == 0

    def test_leases_are_kept_meanwhile(self, embedded: EmbeddedClient, plain: Queue, store: ObjectStore) -> None:
        class Slow(ObjectStore):
            def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
                embedded.pass_time(20)
                return super().get(key, start, stop)

        queue = LargeMessageQueue(plain, Slow(store.url), unreadable=keep, clock=embedded.clock)
        queue.send_batch([LARGE] * 6 + ["small"])
        came = queue.receive(10, lease=30)
        assert sorted(message.body for message in came) == [*["small"], *[LARGE] * 6]
        assert all(message.lease_end > embedded.clock.monotonic() for message in came)
        assert {message.receive_count for message in came} == {1}
        assert plain.receive(10) == [], "120 s later nobody else got one"
        assert queue.delete_batch([message.handle for message in came]) == [None] * 7

    def test_the_lease_is_kept_while_one_object_is_read(
        self, embedded: EmbeddedClient, plain: Queue, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Slow(ObjectStore):
            def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
                embedded.pass_time(20)
                return super().get(key, start, stop)

        monkeypatch.setattr("veilmq.client.large.pointer.PIECE_BYTES", len(LARGE.encode()) // 4)
        queue = LargeMessageQueue(plain, Slow(store.url), unreadable=keep, clock=embedded.clock)
        queue.send(LARGE)
        (message,) = queue.receive(lease=30)
        assert (message.body, message.receive_count) == (LARGE, 1)
        assert plain.receive() == [], "80 s later nobody else got it"
        queue.delete(message.handle)

    @for_each(("lease", "asked"), [(30, 30), (None, 60)])
    def test_after_a_long_poll_an_extension_is_as_long_as_the_lease(
        self, embedded: EmbeddedClient, plain: Queue, store: ObjectStore, lease: float | None, asked: float
    ) -> None:
        lengths: list[float] = []

        class Polled(Wrapping):
            """Counts a lease from the beginning of the poll, as the adapters of SQS and MNS do."""

            def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
                end = embedded.clock.monotonic() + (60 if lease is None else lease)
                embedded.pass_time(40)
                came = self.inner.receive(count_max, lease=lease)
                return [msgspec.structs.replace(each, lease_end=end) for each in came]

            def extend_batch(self, extensions: Any) -> Any:
                lengths.extend(each.lease for each in extensions)
                return self.inner.extend_batch(extensions)

        class Slow(ObjectStore):
            def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
                embedded.pass_time(20)
                return super().get(key, start, stop)

        queue = LargeMessageQueue(Polled(plain), Slow(store.url), unreadable=keep, clock=embedded.clock)
        queue.send_batch([LARGE] * 4)
        came = queue.receive(10, lease=lease)
        assert [message.body for message in came] == [LARGE] * 4
        assert set(lengths) == {asked}
        assert plain.receive(10) == [], "80 s later nobody else got one"
        queue.delete_batch([message.handle for message in came])

    def test_a_server_that_does_not_tell_its_timeout_holds_up_no_extension(
        self, embedded: EmbeddedClient, plain: Queue, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("veilmq.client.large.pointer.STATS_SECONDS_MAX", 0.01)
        go = threading.Event()

        class Hanging(Wrapping):
            def stats(self) -> Stats:
                assert go.wait(10)
                return self.inner.stats()

        class Slow(ObjectStore):
            def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
                embedded.pass_time(20)
                return super().get(key, start, stop)

        queue = LargeMessageQueue(Hanging(plain), Slow(store.url), unreadable=keep, clock=embedded.clock)
        queue.send_batch([LARGE] * 4)
        came = queue.receive(10)
        assert [message.receive_count for message in came] == [1] * 4
        assert all(message.lease_end > embedded.clock.monotonic() for message in came)
        go.set()

    def test_a_message_lost_meanwhile_is_not_given(
        self, embedded: EmbeddedClient, plain: Queue, store: ObjectStore
    ) -> None:
        class Stuck(ObjectStore):
            def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
                embedded.pass_time(100)
                plain.receive(10, lease=600)
                return super().get(key, start, stop)

        queue = LargeMessageQueue(plain, Stuck(store.url), unreadable=keep, clock=embedded.clock)
        queue.send(LARGE)
        assert queue.receive(lease=30) == []
        assert plain.stats().in_flight == 1


class TestCertainty:
    @for_each(
        "error, left",
        [
            (QueueMissing(queue="orders"), 0),
            (MessageTooLarge(size_bytes=2, limit_bytes=1), 0),
            (TransportError(reason="refused", may_have_happened=False), 0),
            (TransportError(reason="lost", may_have_happened=True), 1),
            (ServiceError(code="AccessDenied", status=403, request_id="", message=""), 0),
            (ServiceError(code="InternalError", status=500, request_id="", message=""), 1),
            (StoreUnknown(reason="the commit broke"), 1),
        ],
    )
    def test_the_object_of_a_message_that_may_be_there_stays(
        self, plain: Queue, store: ObjectStore, error: VeilError, left: int
    ) -> None:
        class Failing(Wrapping):
            def send(self, message: str | Message) -> Sent:
                raise error

            def send_batch(self, messages: Any) -> list[Sent | VeilError]:
                return [error for _ in messages]

        for key in keys(store):
            store.remove(key)
        queue = LargeMessageQueue(Failing(plain), store, unreadable=keep)
        with pytest.raises(type(error)):
            queue.send(LARGE)
        assert len(keys(store)) == left
        assert queue.send_batch([LARGE]) == [error]
        assert len(keys(store)) == 2 * left

    def test_the_object_of_a_message_that_somebody_else_has_stays(
        self, embedded: EmbeddedClient, queue: LargeMessageQueue
    ) -> None:
        queue.send(LARGE)
        (old,) = queue.receive(lease=1)
        embedded.pass_time(2)
        (new,) = queue.receive()
        with pytest.raises(LeaseTaken):
            queue.delete(old.handle)
        assert isinstance(queue.delete_batch([old.handle])[0], LeaseTaken)
        queue.release(new.handle)
        assert queue.receive()[0].body == LARGE


class TestBadInput:
    @for_each(
        "options, parameter",
        [
            ({"threshold_bytes": -1}, "threshold_bytes"),
            ({"body_bytes_max": 1000}, "body_bytes_max"),
            ({"pointers": "java"}, "pointers"),
            ({"pointers": "aws"}, "pointers"),
            ({"unreadable": 7}, "unreadable"),
        ],
    )
    def test_parameters(self, plain: Queue, store: ObjectStore, options: dict[str, Any], parameter: str) -> None:
        with pytest.raises(ParameterInvalid) as caught:
            LargeMessageQueue(plain, store, **{"unreadable": keep, **options})
        assert caught.value.parameter == parameter

    @for_each(
        "url",
        ["", "bucket", "/directory", "s3://", "s3:///", "memory://bucket/../x", "memory://b/x?y=1", "a::memory://b/x",
         "nosuchscheme://bucket/x", None],
    )  # fmt: skip
    def test_urls(self, url: Any) -> None:
        with pytest.raises(ParameterInvalid, match="url"):
            ObjectStore(url)

    def test_too_large(self, plain: Queue, store: ObjectStore) -> None:
        queue = LargeMessageQueue(plain, store, unreadable=keep, body_bytes_max=1 << 20)
        with pytest.raises(MessageTooLarge):
            queue.send("x" * ((1 << 20) + 1))
        assert keys(store) == []

    def test_a_pointer_that_does_not_fit(self, embedded: EmbeddedClient, store: ObjectStore) -> None:
        class Tiny(Wrapping):
            @property
            def capabilities(self):  # type: ignore[no-untyped-def]
                return msgspec.structs.replace(self.inner.capabilities, body_bytes_max=100)

        embedded.account.create("orders")
        with pytest.raises(MessageTooLarge):
            LargeMessageQueue(Tiny(embedded.account.queue("orders")), store, unreadable=keep).send("x" * 101)
        assert keys(store) == []

    @for_each(
        "handle",
        ["", "x", "p", "o", "o.x", "o.!.y", "o.Li4vc2VjcmV0.y", "o.b3JkZXJzL3g6cg==.y", "q.x.y", "é", None, 7],
    )
    def test_handles(self, queue: LargeMessageQueue, handle: Any) -> None:
        calls = [
            lambda: queue.delete(handle),
            lambda: queue.extend(handle, 30),
            lambda: queue.release(handle),
            lambda: queue.extend(handle, 30, body=LARGE),
        ]
        for call in calls:
            with pytest.raises(ReceiptInvalid):
                call()

    def test_a_handle_whose_object_was_changed(
        self, plain: Queue, queue: LargeMessageQueue, store: ObjectStore
    ) -> None:
        queue.send("x")
        inner = queue.receive()[0].handle.removeprefix("p.")
        for key in ("../secret", "/etc/passwd", "orders/x:reader", "a//b", ""):
            with pytest.raises(ReceiptInvalid):
                queue.delete(f"o.{base64.urlsafe_b64encode(key.encode()).decode()}.{inner}")
        assert plain.stats().in_flight == 1

    def test_a_replaced_body_has_what_is_left_of_its_time_to_live(
        self, embedded: EmbeddedClient, queue: LargeMessageQueue, store: ObjectStore
    ) -> None:
        queue.send(Message(LARGE, ttl=10 * 86_400))
        embedded.pass_time(86_400)
        queue.extend(queue.receive()[0].handle, 60, body=LARGE + "!")
        (key,) = keys(store)
        assert int(key.split("/")[1].split("-")[1]) == pytest.approx(9 * 86_400, abs=5)

    def test_a_ttl_that_is_none(self, queue: LargeMessageQueue, store: ObjectStore) -> None:
        for ttl in (float("inf"), float("nan"), -1, "x"):
            with pytest.raises(ParameterInvalid, match="ttl"):
                queue.send(Message(LARGE, ttl=ttl))  # type: ignore[arg-type]
        assert keys(store) == []
