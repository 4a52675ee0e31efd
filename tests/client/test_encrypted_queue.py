"""What is sent is read by the holders of a key alone, and what they cannot read never reaches a handler."""

import base64
import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.encrypted import ALGORITHMS, Cipher, EncryptedQueue, Key, Keys, header_of, new_key
from veilmq.client.errors import Undecryptable, Unreadable
from veilmq.client.messages import Message, Received, Template
from veilmq.client.queue import Queue
from veilmq.client.unreadable import PAUSE_SECONDS, DeadLetters, keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import MessageTooLarge, ParameterInvalid, VeilError
from veilmq.testing.client_contract import for_each

KEY = Key("k1", bytes(range(32)))
SECRET = "the body that nobody may see"


class Account(EmbeddedAccount):
    """With a queue to test and one for dead letters."""

    def made(self, name: str, template: Template | None = None) -> Queue:
        self.create(name, template)
        return self.queue(name)


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    with Account(tmp_path / "data") as account:
        yield account


@pytest.fixture
def dead(account: Account) -> Queue:
    return account.made("dead")


@pytest.fixture
def plain(account: Account) -> Queue:
    return account.made("orders")


@pytest.fixture
def queue(plain: Queue, dead: Queue) -> EncryptedQueue:
    return EncryptedQueue(plain, Keys(KEY), unreadable=DeadLetters(dead))


def compact(header: dict[str, object], body: bytes = SECRET.encode(), secret: bytes = KEY.secret) -> str:
    """A JWE as somebody else might make it (RFC 7516, section 5.1): AES-GCM, and any header."""

    def encoded(raw: bytes) -> str:
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    protected = encoded(json.dumps(header).encode())
    sealed = AESGCM(secret).encrypt(bytes(12), body, protected.encode())
    return ".".join([protected, "", encoded(bytes(12)), encoded(sealed[:-16]), encoded(sealed[-16:])])


GOOD = {"alg": "dir", "enc": "A256GCM", "kid": "k1", "queue": "orders"}


class TestRoundTrip:
    def test_the_queue_sees_no_body(self, plain: Queue, queue: EncryptedQueue) -> None:
        queue.send(Message(SECRET, {"colour": "red"}, type="order"))
        (raw,) = plain.peek()
        assert SECRET not in raw.body
        assert header_of(raw.body) == GOOD
        (message,) = queue.receive()
        assert (message.body, message.attributes, message.type) == (SECRET, {"colour": "red"}, "order")
        queue.delete(message.handle)
        assert queue.stats().visible == 0

    @for_each("header", [b"[]", b"{", b"[" * 100_000])
    def test_a_header_that_is_none(self, header: bytes) -> None:
        with pytest.raises(ValueError, match=r"."):
            header_of(base64.urlsafe_b64encode(header).decode() + "....")

    def test_it_is_a_plain_jwe(self, plain: Queue, queue: EncryptedQueue) -> None:
        plain.send(compact(GOOD))
        assert queue.receive()[0].body == SECRET

    def test_batches_and_peek(self, queue: EncryptedQueue) -> None:
        bodies = [f"{SECRET} {number}" for number in range(25)]
        assert not [each for each in queue.send_batch(bodies) if isinstance(each, VeilError)]
        assert sorted(message.body for message in queue.peek(25)) == sorted(bodies)
        came = queue.receive(25)
        assert sorted(message.body for message in came) == sorted(bodies)
        assert queue.delete_batch([message.handle for message in came]) == [None] * 25

    def test_no_two_bodies_are_alike(self, plain: Queue, queue: EncryptedQueue) -> None:
        queue.send_batch([SECRET] * 100)
        assert len({message.body for message in plain.peek(100)}) == 100

    def test_a_replaced_body_is_encrypted_too(self, plain: Queue, queue: EncryptedQueue) -> None:
        queue.send("first")
        (message,) = queue.receive()
        queue.release(queue.extend(message.handle, 30, body=SECRET))
        assert SECRET not in plain.peek()[0].body
        assert queue.receive()[0].body == SECRET

    @given(body=st.text(st.characters(codec="utf-8")), algorithm=st.sampled_from(sorted(ALGORITHMS)))
    @settings(max_examples=200)
    def test_any_text_under_any_algorithm(self, body: str, algorithm: str) -> None:
        cipher = Cipher(Keys(new_key(algorithm)), [algorithm], "orders", ())
        encrypted = cipher.encrypt(body.encode())
        assert len(encrypted) == cipher.encrypted_bytes(len(body.encode()))
        assert cipher.decrypt(encrypted, "m") == body

    @given(
        algorithm=st.sampled_from(sorted(ALGORITHMS)),
        limit=st.integers(400, 3000),
        name=st.text(min_size=1, max_size=9),
    )
    def test_the_largest_body_is_the_largest(self, algorithm: str, limit: int, name: str) -> None:
        cipher = Cipher(Keys(new_key(algorithm)), [algorithm], name, ())
        largest = cipher.body_bytes_max(limit)
        assert len(cipher.encrypt(b"x" * largest)) <= limit
        assert len(cipher.encrypt(b"x" * (largest + 1))) > limit

    def test_the_longest_name(self) -> None:
        cipher = Cipher(Keys(KEY), ["A256GCM"], "\U0001f512" * 256, ())
        assert cipher.decrypt(cipher.encrypt(b"x"), "m") == "x"


class TestRotation:
    def test_a_thousand_in_flight(self, plain: Queue, dead: Queue) -> None:
        old, new = new_key(), new_key()
        before = EncryptedQueue(plain, Keys(old), unreadable=DeadLetters(dead))
        before.send_batch([f"old {number}" for number in range(500)])
        held = before.receive(250)
        # From here on producers go over one by one, and consumers have both keys.
        both = EncryptedQueue(plain, Keys(old, new), unreadable=DeadLetters(dead))
        both.send_batch([f"new {number}" for number in range(500)])
        for message in held:
            both.release(message.handle)
        bodies: list[str] = []

        def consume() -> None:
            while came := both.receive(10):
                bodies.extend(message.body for message in came)
                assert both.delete_batch([message.handle for message in came]) == [None] * len(came)

        consumers = [threading.Thread(target=consume) for _ in range(4)]
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join()
        assert sorted(bodies) == sorted(f"{kind} {number}" for kind in ("old", "new") for number in range(500))
        assert (plain.stats().in_flight, dead.stats().visible) == (0, 0)

    def test_the_newest_encrypts(self, plain: Queue) -> None:
        old, new = new_key(), new_key()
        EncryptedQueue(plain, Keys(old, new), unreadable=keep).send("x")
        assert header_of(plain.peek()[0].body)["kid"] == new.id

    def test_a_change_of_algorithm(self, plain: Queue) -> None:
        old, new = new_key("A128CBC-HS256"), new_key()
        EncryptedQueue(plain, Keys(old), unreadable=keep, algorithms=["A128CBC-HS256"]).send("x")
        with pytest.raises(ParameterInvalid, match="newest key"):
            EncryptedQueue(plain, Keys(new, old), unreadable=keep)
        both = EncryptedQueue(plain, Keys(old, new), unreadable=keep, algorithms=["A256GCM", "A128CBC-HS256"])
        assert both.receive()[0].body == "x"

    def test_an_old_key_whose_algorithm_is_no_longer_allowed(self, plain: Queue, dead: Queue) -> None:
        old, new = new_key("A128GCM"), new_key()
        EncryptedQueue(plain, Keys(old), unreadable=keep, algorithms=["A128GCM"]).send("x")
        assert EncryptedQueue(plain, Keys(old, new), unreadable=DeadLetters(dead)).receive() == []
        assert "algorithm" in dead.peek()[0].attributes["veilmq.unreadable"]


def changed(body: str, part: int) -> str:
    """The JWE with one bit of one part changed."""
    parts = body.split(".")
    text = parts[part]
    parts[part] = ("B" if text[0] == "A" else "A") + text[1:]
    return ".".join(parts)


def reworded(body: str) -> str:
    """The JWE with a header of the same content: only the tag covers its text."""
    header = json.dumps(header_of(body), indent=1).encode()
    return ".".join([base64.urlsafe_b64encode(header).rstrip(b"=").decode(), *body.split(".")[1:]])


FOREIGN = {
    "plain text": (SECRET, "not encrypted"),
    "plain JSON": (json.dumps(GOOD), "not encrypted"),
    "empty parts": ("ey....", "changed"),
    "the same header, said otherwise": (reworded(compact(GOOD)), "changed"),
    "changed vector": (changed(compact(GOOD), 2), "changed"),
    "changed text": (changed(compact(GOOD), 3), "changed"),
    "changed tag": (changed(compact(GOOD), 4), "changed"),
    "cut": (compact(GOOD)[:-4], "changed"),
    "another key of that name": (compact(GOOD, secret=bytes(32)), "changed"),
    "an encrypted key though it is direct": (compact(GOOD).replace("..", ".QUJD.", 1), "changed"),
    "unknown key": (compact({**GOOD, "kid": "k2"}), "do not have its key"),
    "no key": (compact({name: GOOD[name] for name in ("alg", "enc", "queue")}), "names no key"),
    "another queue": (compact({**GOOD, "queue": "payments"}), "another queue"),
    "no queue": (compact({name: GOOD[name] for name in ("alg", "enc", "kid")}), "another queue"),
    "a queue that is a list": (compact({**GOOD, "queue": ["orders"]}), "another queue"),
    "algorithm not allowed": (compact({**GOOD, "enc": "A128CBC-HS256"}), "algorithm"),
    "wrapped key": (compact({**GOOD, "alg": "A256KW"}), "algorithm"),
    "compressed": (compact({**GOOD, "zip": "DEF"}, zlib.compress(b"x" * 10_000, wbits=-15)), "changed"),
    "unknown critical header": (compact(GOOD | {"crit": ["exp"], "exp": 1}), "do not know"),
    "critical header that is a number": (compact(GOOD | {"crit": 5}), "do not know"),
    "critical header of lists": (compact(GOOD | {"crit": [[]]}), "do not know"),
    "deep header": (base64.urlsafe_b64encode(b'{"enc":' + b"[" * 5_000).rstrip(b"=").decode() + "....", "changed"),
}


class TestWhatIsNotOurs:
    @for_each("kind", FOREIGN)
    def test_never_reaches_the_handler(self, plain: Queue, dead: Queue, queue: EncryptedQueue, kind: str) -> None:
        body, reason = FOREIGN[kind]
        plain.send(Message(body, {"colour": "red"}))
        queue.send("good")
        assert [message.body for message in queue.receive(10)] == ["good"]
        assert plain.stats().visible == 0
        (letter,) = dead.receive(10)
        assert letter.body == body
        assert letter.attributes["colour"] == "red"
        assert letter.attributes["veilmq.source"] == "orders"
        assert reason in letter.attributes["veilmq.unreadable"]

    @given(
        body=st.text(st.characters(codec="utf-8"), max_size=200)
        | st.binary(max_size=200).map(
            lambda raw: ".".join(["ey" + raw.hex(), raw[:50].hex(), raw[:12].hex(), raw.hex(), raw[:16].hex()])
        )
    )
    def test_any_text_is_a_typed_error(self, body: str) -> None:
        with pytest.raises(Undecryptable):
            Cipher(Keys(KEY), ["A256GCM"], "orders", ()).decrypt(body, "m")

    def test_the_reason_quotes_nothing(self) -> None:
        with pytest.raises(Undecryptable) as caught:
            Cipher(Keys(KEY), ["A256GCM"], "orders", ()).decrypt(SECRET, "m")
        assert SECRET not in str(caught.value)

    def test_a_copy_of_an_empty_body_says_so(self, plain: Queue, dead: Queue) -> None:
        plain.send("x")
        (message,) = plain.receive()
        empty = msgspec.structs.replace(message, body="")  # as Azure's clients may send it
        DeadLetters(dead)(plain, empty, Undecryptable(message=message.id, reason="no", key_id=None))
        assert [letter.body for letter in dead.receive()] == ["(empty)"]
        assert plain.stats().in_flight == 0

    def test_one_at_a_time_past_many(self, plain: Queue, dead: Queue, queue: EncryptedQueue) -> None:
        plain.send_batch(["plain"] * 50)
        queue.send("good")
        assert [message.body for message in queue.receive(1)] == ["good"]
        assert dead.stats().visible == 50

    def test_a_wait_goes_on_after_a_bad_one(self, plain: Queue, dead: Queue) -> None:
        put_away = threading.Event()

        def policy(queue: Queue, message: Received, error: Unreadable) -> None:
            DeadLetters(dead)(queue, message, error)
            put_away.set()

        queue = EncryptedQueue(plain, Keys(KEY), unreadable=policy)
        plain.send("plain")
        came: list[Received] = []
        waiting = threading.Thread(target=lambda: came.extend(queue.receive(wait=60)))
        waiting.start()
        assert put_away.wait(60)
        queue.send("good")
        waiting.join()
        assert [message.body for message in came] == ["good"]

    def test_a_function_decides(self, plain: Queue) -> None:
        told: list[tuple[str, str, str]] = []

        def policy(queue: Queue, message: Received, error: Unreadable) -> None:
            assert isinstance(error, Undecryptable)
            told.append((message.body, error.message, str(error.key_id)))
            queue.release(message.handle)

        queue = EncryptedQueue(plain, Keys(KEY), unreadable=policy)
        plain.send(compact({**GOOD, "kid": "k2"}))
        # It is released at once and would come for ever: the receive notices.
        assert queue.receive() == []
        assert [each[2] for each in told] == ["k2"] * 2
        assert plain.stats().visible == 1

    def test_keep_leaves_it_to_its_lease(self, plain: Queue) -> None:
        plain.send("plain")
        assert EncryptedQueue(plain, Keys(KEY), unreadable=keep).receive() == []
        assert plain.stats().in_flight == 1

    def test_a_dead_letter_queue_that_is_gone(self, account: Account, plain: Queue, queue: EncryptedQueue) -> None:
        account.delete("dead")
        plain.send("plain")
        queue.send("good")
        assert [message.body for message in queue.receive(10)] == ["good"]
        assert plain.stats().in_flight == 2, "the bad one stays, and comes again"

    def test_ten_attributes_leave_no_room_for_the_reason(
        self, plain: Queue, dead: Queue, queue: EncryptedQueue
    ) -> None:
        attributes = {f"a{number}": "x" for number in range(10)}
        plain.send(Message("plain", attributes))
        assert queue.receive() == []
        assert dead.peek()[0].attributes == attributes
        assert plain.stats().in_flight == 0

    def test_a_policy_that_is_broken_releases_the_others(self, plain: Queue) -> None:
        def policy(queue: Queue, message: Received, error: Unreadable) -> None:
            raise ZeroDivisionError

        queue = EncryptedQueue(plain, Keys(KEY), unreadable=policy)
        queue.send_batch(["good"] * 3)
        plain.send("plain")
        queue.send_batch(["good"] * 3)
        with pytest.raises(ZeroDivisionError):
            queue.receive(10)
        assert (plain.stats().visible, plain.stats().in_flight) == (6, 1)

    @pytest.mark.parametrize("error", [ConnectionError, ValueError], ids=["unreachable", "no JSON"])
    def test_keys_that_cannot_be_had_leave_no_message_leased(self, plain: Queue, error: type[Exception]) -> None:
        class Remote(Keys):
            calls = 0

            def find(self, key_id: str) -> Key | None:
                self.calls += 1
                if self.calls == 2:
                    raise error("what the key service says")
                return super().find(key_id)

        released: list[float] = []

        class Watched(Wrapping):
            def release(self, handle: str, delay: float = 0, **options: Any) -> None:
                released.append(delay)
                self.inner.release(handle, delay, **options)

        queue = EncryptedQueue(Watched(plain), Remote(KEY), unreadable=keep)
        queue.send_batch(["good"] * 4)
        with pytest.raises(error):
            queue.receive(10)
        assert released == [PAUSE_SECONDS] * 4

    def test_peek_leaves_it_out(self, plain: Queue, queue: EncryptedQueue) -> None:
        plain.send("plain")
        queue.send("good")
        assert [message.body for message in queue.peek(10)] == ["good"]

    def test_a_body_from_another_queue_only_where_it_is_accepted(self, account: Account, plain: Queue) -> None:
        EncryptedQueue(plain, Keys(KEY), unreadable=keep).send(SECRET)
        moved = account.made("moved")
        moved.send(plain.peek()[0].body)
        assert EncryptedQueue(moved, Keys(KEY), unreadable=keep).peek() == []
        assert EncryptedQueue(moved, Keys(KEY), unreadable=keep, accepts=["orders"]).peek()[0].body == SECRET
        assert EncryptedQueue(moved, Keys(KEY), unreadable=keep, bound_to="orders").peek()[0].body == SECRET


class Silent(Wrapping):
    """Fails the test if anything is sent through it."""

    def send(self, message: str | Message) -> None:  # type: ignore[override]
        raise AssertionError("I/O")

    def send_batch(self, messages: object) -> None:  # type: ignore[override]
        raise AssertionError("I/O")


class TestSizes:
    def test_refused_before_it_is_sent(self, account: Account) -> None:
        small = Silent(account.made("small", Template(message_bytes_max=4096)))
        queue = EncryptedQueue(small, Keys(KEY), unreadable=keep)
        with pytest.raises(MessageTooLarge) as caught:
            queue.send("x" * 4000)
        assert caught.value.limit_bytes == 4096
        assert caught.value.size_bytes > 5300
        assert [type(each) for each in queue.send_batch(["x" * 4000] * 3)] == [MessageTooLarge] * 3

    def test_the_largest_that_the_capabilities_name_fits(self, account: Account) -> None:
        queue = EncryptedQueue(account.made("small", Template(message_bytes_max=4096)), Keys(KEY), unreadable=keep)
        largest = queue.capabilities.body_bytes_max
        queue.send("x" * largest)
        with pytest.raises(MessageTooLarge):
            queue.send("x" * (largest + 1))

    @for_each("limit", range(65_530, 65_540))
    def test_where_bodies_travel_in_base64(self, account: Account, limit: int) -> None:
        class Base64(Wrapping):
            @property
            def capabilities(self):  # type: ignore[no-untyped-def]
                return msgspec.structs.replace(self.inner.capabilities, base64_body=True, body_bytes_max=limit)

        inner = Base64(account.made(f"azure-{limit}"))
        queue = EncryptedQueue(inner, Keys(KEY), unreadable=keep)
        can = queue.capabilities
        body = "x" * (can.body_bytes_max // 4 * 3)
        assert can.transmitted_bytes(body) <= can.body_bytes_max < can.transmitted_bytes(body + "x")
        queue.send(body)
        sent = inner.peek()[0].body
        assert inner.capabilities.transmitted_bytes(sent) <= limit
        with pytest.raises(MessageTooLarge):
            queue.send(body + "xxxx")

    def test_one_too_large_does_not_stop_the_others(self, account: Account) -> None:
        queue = EncryptedQueue(account.made("small", Template(message_bytes_max=4096)), Keys(KEY), unreadable=keep)
        kinds = [type(each).__name__ for each in queue.send_batch(["a", "x" * 5000, "b"])]
        assert kinds == ["Sent", "MessageTooLarge", "Sent"]
        assert {message.body for message in queue.receive(10)} == {"a", "b"}


class TestBadInput:
    @for_each("body", ["\ud800", "a\x00b", b"bytes", None])
    def test_what_is_not_text(self, queue: EncryptedQueue, body: object) -> None:
        with pytest.raises(ParameterInvalid, match="body"):
            queue.send(Message(body))  # type: ignore[arg-type]
        assert queue.stats().visible == 0

    def test_what_is_not_a_message(self, queue: EncryptedQueue) -> None:
        with pytest.raises(ParameterInvalid, match="message"):
            queue.send(b"bytes")  # type: ignore[arg-type]

    @for_each("algorithms", [(), "A256GCM", ["A256GCM", "none"], ["dir"], ["RSA1_5"]])
    def test_algorithms(self, plain: Queue, algorithms: object) -> None:
        with pytest.raises(ParameterInvalid, match="algorithms"):
            EncryptedQueue(plain, Keys(KEY), unreadable=keep, algorithms=algorithms)  # type: ignore[arg-type]

    def test_dead_letters_into_itself(self, account: Account, plain: Queue) -> None:
        with pytest.raises(ParameterInvalid, match="another queue"):
            EncryptedQueue(plain, Keys(KEY), unreadable=DeadLetters(account.queue("orders")))

    def test_a_policy_that_is_none(self, plain: Queue) -> None:
        with pytest.raises(ParameterInvalid, match="unreadable"):
            EncryptedQueue(plain, Keys(KEY), unreadable=plain)  # type: ignore[arg-type]

    def test_a_fifo_queue_needs_a_deduplication_id(self, plain: Queue) -> None:
        class Fifo(Wrapping):
            @property
            def capabilities(self):  # type: ignore[no-untyped-def]
                return msgspec.structs.replace(self.inner.capabilities, native_fifo=True)

        with pytest.raises(ParameterInvalid, match="deduplication_id"):
            EncryptedQueue(Fifo(plain), Keys(KEY), unreadable=keep).send(Message("x", group="g"))
