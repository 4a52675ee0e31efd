"""The mns adapter through aliyun-mns-sdk: a client a thread, what MNS has no place for, and a way that breaks."""

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import boto3
import pytest
from mns.account import Account
from mns.queue import Message as SdkMessage
from tests.support.broken_server import HANG_UP, BrokenServer, answer

from veilmq.client.adapters.connect import connect, connect_account
from veilmq.client.adapters.mns import MnsAccount, MnsQueue
from veilmq.client.adapters.mns.calls import Refusal, error_of
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import ServiceError, TransportError, may_have_happened
from veilmq.client.messages import LEASE_HINT_ATTRIBUTE, Extension, Message, Sent, Template
from veilmq.client.unreadable import DeadLetters
from veilmq.model.errors import (
    CapabilityMissing,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueDeletedRecently,
    QueueExists,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.protocols.mns.errors import FAULTS
from veilmq.testing.client_contract import for_each, unrefused
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow

_numbers = count()


@pytest.fixture
def sdk(server: LocalServer) -> Iterator[Account]:
    account = Account(server.process.mns, "id", "secret")
    yield account
    account.get_client().close_connection()


@pytest.fixture
def account(sdk: Account) -> Iterator[MnsAccount]:
    account = MnsAccount(sdk)
    yield account
    account.close()


def made(account: MnsAccount, **settings: Any) -> MnsQueue:
    name = f"made-{next(_numbers)}"
    assert account.create(name, Template(**settings))
    return account.queue(name)


def place(server: LocalServer) -> str:
    return server.process.mns.removeprefix("http://")


class TestMessages:
    """What travels."""

    def test_attributes_are_properties_that_others_can_read(
        self, server: LocalServer, sdk: Account, account: MnsAccount
    ) -> None:
        queue = made(account)
        given = {"mine": 1, "raw": b"\0\xff", "text": "ž\r\n", "traceparent": "00-1-2-01"}
        queue.send(Message("x", given, type="resize", lease_hint=7.5))
        message = sdk.get_queue(queue.name).peek_message()
        told = {name: (value.get_data_type(), value.get_raw_value()) for name, value in message.user_properties.items()}
        assert told == {
            "mine": ("NUMBER", "1"),
            "raw": ("BINARY", b"\0\xff"),
            "text": ("STRING", "ž\r\n"),
            TYPE_ATTRIBUTE: ("STRING", "resize"),
            LEASE_HINT_ATTRIBUTE: ("NUMBER", "7.5"),
        }
        assert message.system_properties["traceparent"].get_string_value_by_type() == "00-1-2-01"
        (peeked,) = queue.peek()
        assert (peeked.attributes, peeked.type) == (given, "resize")
        sqs = boto3.client(
            "sqs", endpoint_url=server.sqs_url, region_name="us-east-1", aws_access_key_id="x",
            aws_secret_access_key="x",
        )  # fmt: skip
        url = sqs.get_queue_url(QueueName=queue.name)["QueueUrl"]
        (raw,) = sqs.receive_message(QueueUrl=url, MessageAttributeNames=["All"])["Messages"]
        assert set(raw["MessageAttributes"]) == {*given, TYPE_ATTRIBUTE, LEASE_HINT_ATTRIBUTE}

    def test_what_cannot_be_sent(self, account: MnsAccount) -> None:
        refused: list[tuple[Message, type[VeilError]]] = [
            (Message("x", ttl=60), CapabilityMissing),
            (Message("x", group="g"), CapabilityMissing),
            (Message("x", tag="t"), CapabilityMissing),
            (Message("x", deduplication_id="d"), CapabilityMissing),
            (Message("x", priority=True + 16), ParameterInvalid),
            (Message("x", delay=604_801), ParameterInvalid),
            (Message("x", lease_hint=0), ParameterInvalid),
            (Message("x", {"a": ""}), ParameterInvalid),
            (Message("x", {"a": "\0"}), ParameterInvalid),
            (Message("x", {"aws.a": "b"}), ParameterInvalid),
            (Message("x", {"DLQSourceArn": "b"}), ParameterInvalid),
            (Message("x", {"traceparent": 1}), ParameterInvalid),
            (Message("x", {TYPE_ATTRIBUTE: "a"}, type="b"), ParameterInvalid),
            (Message(""), ParameterInvalid),
            (Message("\ud800"), ParameterInvalid),
            (Message("x" * 49_153), MessageTooLarge),
            (Message("x" * 49_152, {"a": "b"}), MessageTooLarge),
        ]
        queue = made(account)
        for error in {error for _, error in refused}:
            assert unrefused(queue.send, [message for message, expected in refused if expected is error], error) == []
        results = queue.send_batch(["a", *[message for message, _ in refused], "b"])
        assert [type(result) for result in results] == [Sent, *[error for _, error in refused], Sent]
        assert queue.stats().visible == 2

    def test_what_only_the_queue_refuses_is_told_entry_by_entry(self, account: MnsAccount) -> None:
        queue = made(account, message_bytes_max=1_024)
        large, larger = "x" * 1_000, "x" * 2_000
        results = queue.send_batch(["a", large, "b", larger])
        assert [type(result) for result in results] == [Sent, MessageTooLarge, Sent, MessageTooLarge]
        # All of one request: the service has one error for all.
        results = queue.send_batch([large, larger])
        assert [type(result) for result in results] == [MessageTooLarge, MessageTooLarge]
        assert [result.limit_bytes for result in results] == [1_024, 1_024]  # type: ignore[union-attr]
        assert queue.stats().visible == 2

    def test_a_batch_is_cut_at_sixteen_and_at_64_kib(self, account: MnsAccount) -> None:
        queue = made(account)
        bodies = ["x"] * 20 + ["y" * 30_000] * 3
        assert all(isinstance(result, Sent) for result in queue.send_batch(bodies))
        assert queue.stats().visible == 23

    def test_a_batch_of_deletes_that_all_fail(self, account: MnsAccount) -> None:
        queue = made(account)
        queue.send_batch(["a", "b"])
        handles = [message.handle for message in queue.receive(2, lease=60)]
        assert queue.delete_batch([*handles, "no handle"])[2:] == [
            ReceiptInvalid(reason="it is not one of MNS's"),
        ]
        assert [type(result) for result in queue.delete_batch(handles)] == [MessageGone, MessageGone]

    def test_a_handle_cannot_carry_parameters(self, account: MnsAccount) -> None:
        queue = made(account)
        queue.send("x")
        (message,) = queue.receive(lease=600)
        for handle in (f"{message.handle}&VisibilityTimeout=1", f"{message.handle}#", "a%20b", "a\r\nb"):
            with pytest.raises(ReceiptInvalid):
                queue.extend(handle, 60)


class TestLeases:
    """Leases that MNS's receive cannot name."""

    def test_a_named_lease_takes_the_queues_place(self, server: LocalServer, account: MnsAccount) -> None:
        queue = made(account, visibility_timeout=5)
        queue.send_batch([str(number) for number in range(16)])
        before = SYSTEM.monotonic()
        held = queue.receive(16, lease=600)
        assert len(held) == 16
        assert all(before + 600 <= message.lease_end <= SYSTEM.monotonic() + 600 for message in held)
        server.advance(seconds=10)
        assert queue.receive(16) == []
        assert queue.delete_batch([message.handle for message in held]) == [None] * 16

    def test_the_queues_own_needs_no_change(self, sdk: Account, account: MnsAccount) -> None:
        queue = made(account, visibility_timeout=60)
        queue.send("x")
        (message,) = queue.receive(lease=59.5)
        sdk.get_queue(queue.name).delete_message(message.handle)
        asked: list[str] = []
        call = account.clients.call

        def noting(method: str, *given: Any) -> Any:
            asked.append(method)
            return call(method, *given)

        account.clients.call = noting  # type: ignore[method-assign]
        queue.send("y")
        queue.receive(lease=60)
        assert asked == ["send_message", "batch_receive_message"]

    @pytest.mark.parametrize(
        ("problem", "handed_out"),
        [
            (TransportError(reason="unreachable", may_have_happened=False), True),
            (TransportError(reason="silence", may_have_happened=True), False),
            (MessageGone(sequence=0, attempt=0), False),
        ],
    )
    def test_a_message_whose_lease_could_not_be_changed(
        self, account: MnsAccount, problem: VeilError, handed_out: bool
    ) -> None:
        """Handed out as it came if the change was certainly not made, and not at all if its handle may be stale."""
        queue = made(account, visibility_timeout=60)
        for body in ("well", "ill"):
            queue.send(body)
        call, changes = account.clients.call, count()

        def breaking(method: str, *given: Any) -> Any:
            if method == "change_message_visibility" and next(changes) == 1:
                raise problem
            return call(method, *given)

        account.clients.call = breaking  # type: ignore[method-assign]
        received = {message.body: message for message in queue.receive(16, lease=600)}
        account.clients.call = call  # type: ignore[method-assign]
        assert received["well"].lease_end > SYSTEM.monotonic() + 500
        assert ("ill" in received) is handed_out
        if handed_out:
            assert received["ill"].lease_end <= SYSTEM.monotonic() + 60
            queue.delete(received["ill"].handle)

    def test_a_release_takes_a_second(self, server: LocalServer, account: MnsAccount) -> None:
        queue = made(account, visibility_timeout=60)
        assert queue.capabilities.release_min == 1
        queue.send("x")
        (message,) = queue.receive()
        queue.release(message.handle)
        with pytest.raises(MessageGone):
            queue.release(message.handle)
        server.advance(seconds=1)
        assert queue.receive()[0].receive_count == 2

    def test_what_a_closed_poll_brings_is_released(self, account: MnsAccount) -> None:
        queue = made(account, visibility_timeout=600)
        with ThreadPoolExecutor(1) as pool:
            before = set(threading.enumerate())
            waited = pool.submit(queue.receive, 16, wait=20)
            while f"veilmq-poll-{queue.name} 1" not in {each.name for each in set(threading.enumerate()) - before}:
                time.sleep(0.001)
            queue.close()
            assert waited.result(10) == []
        other = account.queue(queue.name)
        other.send("x")
        (message,) = other.receive(wait=20)
        assert message.receive_count in {1, 2}  # 1 if the poll was given up before it was parked


class TestThreads:
    """A client a thread."""

    def test_each_thread_has_its_own_and_all_end(self, account: MnsAccount) -> None:
        queue = made(account)
        barrier = threading.Barrier(4)

        def send(number: int) -> int:
            barrier.wait(10)
            queue.send(str(number))
            return id(account.clients._mine.client)

        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(send, range(4)))) == 4
        assert queue.stats().visible == 4
        mine = account.clients._mine.client
        gc.collect()
        assert set(account.clients._all) == {mine}
        account.close()
        assert mine.connection.sock is None
        account.close()


class Interruption(BaseException):
    """As Ctrl-C, or a timeout's signal."""


class TestInterruptions:
    """What ends a call in its midst."""

    @pytest.mark.parametrize("where", ["putheader", "endheaders", "getresponse"])
    def test_half_a_call_is_not_in_the_way_of_the_next(self, account: MnsAccount, where: str) -> None:
        queue = made(account)
        line = account.clients._mine.client
        going = getattr(line.connection, where)

        def interrupted(*given: Any, **named: Any) -> Any:
            if where != "getresponse":
                going(*given, **named)
            raise Interruption

        setattr(line.connection, where, interrupted)
        with pytest.raises(Interruption):
            queue.send("perhaps")
        assert line.connection.sock is None
        for number in range(3):
            queue.send(str(number))
        assert {message.body for message in queue.receive(10, lease=60)} >= {"0", "1", "2"}
        assert account.clients._mine.client is not line


class TestBase64:
    """Bodies in base64, and as they are."""

    def test_each_is_what_the_sdk_means(self, sdk: Account) -> None:
        for base64 in (True, False):
            account = MnsAccount(sdk, base64=base64)
            queue = made(account)
            theirs = sdk.get_queue(queue.name)
            theirs.set_encoding(base64)
            theirs.send_message(SdkMessage("žluť"))
            (message,) = queue.receive(lease=60)
            assert message.body == "žluť"
            queue.delete(message.handle)
            queue.send("koně\r\n")
            assert theirs.receive_message_with_str_body(0).message_body == "koně\r\n"
            account.close()

    def test_what_is_none_harms_nobody(self, sdk: Account) -> None:
        with MnsAccount(sdk, base64=False) as plain:
            bad, name = made(plain), made(plain).name
            with MnsAccount(sdk, unreadable=DeadLetters(bad)) as account:
                queue = account.queue(name)
                plain.queue(name).send_batch(["aGk*=", "/w==", "AAAA"])
                queue.send("good")
                assert [message.body for message in queue.peek(10)] == ["good"]
                assert [message.body for message in queue.receive(10, lease=60)] == ["good"]
                assert {message.body for message in bad.receive(10, lease=60)} == {"aGk*=", "/w==", "AAAA"}


ERROR = (
    b'<Error xmlns="http://mns.aliyuncs.com/doc/v1/"><Code>%s</Code><Message>m</Message><RequestId>r</RequestId>'
    b"<HostId>h</HostId></Error>"
)
BUSY = answer(503, ERROR % b"InternalServerError", "x-mns-request-id: r")
THROTTLED = answer(429, ERROR % b"QpsLimitExceeded", "x-mns-request-id: r")
GONE = answer(404, ERROR % b"MessageNotExist", "x-mns-request-id: r")


class TestTheWay:
    """What became of a call whose way broke."""

    @for_each(
        "steps, error, doubt",
        [
            ([], TransportError, False),
            # The SDK tries again by itself if a connection ends without an answer.
            ([HANG_UP], TransportError, True),
            ([HANG_UP, HANG_UP], TransportError, True),
            ([answer(200, b"<html>")], TransportError, True),
            ([answer(502, b"<html>")], ServiceError, None),
            ([BUSY], ServiceError, None),
            ([THROTTLED], ServiceError, None),
            ([GONE], MessageGone, None),
        ],
    )
    def test_what_may_have_happened(self, steps: list[bytes], error: type[VeilError], doubt: bool | None) -> None:
        broken = BrokenServer(steps)
        with MnsAccount(Account(broken.url, "id", "secret")) as account:
            with pytest.raises(error) as failed:
                MnsQueue(account, "jobs").extend("handle", 60)
        broken.close()
        assert broken.requests == len(steps)
        if isinstance(failed.value, TransportError):
            assert failed.value.may_have_happened is doubt
            assert failed.value.reason.startswith(broken.url.partition("//")[2])
        if isinstance(failed.value, ServiceError):
            assert failed.value.retryable
            assert failed.value.status in {502, 503, 429}

    def test_an_entry_whose_end_is_unknown_may_have_been_done(self) -> None:
        entry = b"<ErrorCode>InternalError</ErrorCode><ErrorMessage>m</ErrorMessage><ReceiptHandle>1-a</ReceiptHandle>"
        errors = b'<Errors xmlns="http://mns.aliyuncs.com/doc/v1/"><Error>%s</Error></Errors>' % entry
        broken = BrokenServer([answer(404, errors, "x-mns-request-id: r")])
        with MnsAccount(Account(broken.url, "id", "secret")) as account:
            (failed,) = MnsQueue(account, "jobs").delete_batch(["1-a"])
        broken.close()
        assert isinstance(failed, ServiceError)
        assert may_have_happened(failed)


class TestErrors:
    """Codes."""

    @for_each(
        "code, text, error",
        [
            ("QueueNotExist", "", QueueMissing(queue="q")),
            ("QueueAlreadyExist", "", QueueExists(queue="q", setting="attributes")),
            ("QueueDeletedRecently", "", QueueDeletedRecently(queue="q", wait_us=60_000_000)),
            ("MessageNotExist", "", MessageGone(sequence=0, attempt=0)),
            ("ReceiptHandleError", "bad", ReceiptInvalid(reason="bad")),
            (
                "InvalidArgument",
                "The length of message should not be larger than 1024 bytes.",
                MessageTooLarge(size_bytes=7, limit_bytes=1_024),
            ),
            (
                "InvalidArgument",
                "The value of DelaySeconds should between 0 and 604800 seconds.",
                ParameterInvalid(
                    parameter="delay", reason="The value of DelaySeconds should between 0 and 604800 seconds."
                ),
            ),
            ("InvalidArgument", "What?", ParameterInvalid(parameter="request", reason="What?")),
            ("InvalidQueueName", "bad", ParameterInvalid(parameter="name", reason="bad")),
            ("Unheard", "said", ServiceError(code="Unheard", status=400, request_id="r", message="said")),
        ],
    )
    def test_what_a_code_means(self, code: str, text: str, error: VeilError) -> None:
        assert error_of(Refusal(code, 400, "r", text, "q", 7)) == error

    def test_every_code_of_our_own_server_means_something(self) -> None:
        assert len(FAULTS) > 20
        for code in FAULTS:
            assert isinstance(error_of(Refusal(code, 400, "r", "said", "q")), VeilError)


class TestAccount:
    """Queues made, found and connected to."""

    @for_each(
        "template, error",
        [
            (Template(visibility_timeout=0), ParameterInvalid),
            (Template(visibility_timeout=1.5), ParameterInvalid),
            (Template(retention=float("inf")), ParameterInvalid),
            (Template(retention=59), ParameterInvalid),
            (Template(message_bytes_max=-1), ParameterInvalid),
            (Template(fifo=True), CapabilityMissing),
            (Template(dead_letter_queue="d", receive_count_max=1), CapabilityMissing),
            (Template(tags={"a": "b"}), CapabilityMissing),
        ],
    )
    def test_settings_that_cannot_be(self, account: MnsAccount, template: Template, error: type[Exception]) -> None:
        with pytest.raises(error):
            account.create("never-made", template)
        assert account.names("never-made") == []

    def test_more_queues_than_a_page(self, account: MnsAccount, monkeypatch: pytest.MonkeyPatch) -> None:
        for number in range(5):
            account.create(f"page-{number}")
        monkeypatch.setattr("veilmq.client.adapters.mns._PAGE_MAX", 2)
        assert account.names("page-") == [f"page-{number}" for number in range(5)]
        assert account.names("page é") == []

    def used(self, queue: Any) -> None:
        with queue:
            queue.send("x")
            (message,) = queue.receive(lease=60)
            assert message.body == "x"
            assert queue.extend_batch([Extension("x" * 66, 60)])[0] != message.handle
            queue.delete(message.handle)

    def test_a_url(self, server: LocalServer) -> None:
        url = f"mns://id:se%2Fcret@{place(server)}"
        self.used(connect(f"{url}/by-url?create=1"))
        with connect_account(f"{url}/") as account:  # type: ignore[attr-defined]
            assert "by-url" in account.names("by")
        with pytest.raises(QueueMissing):
            connect(f"{url}/missing")
        with connect(f"{url}/by-url") as encoded, connect(f"{url}/by-url?base64=0") as plain:
            assert (encoded.capabilities.base64_body, plain.capabilities.base64_body) == (True, False)
        with pytest.raises(ParameterInvalid) as lacking:
            connect(f"mns://{place(server)}/by-url")
        assert lacking.value.parameter == "url"
        with pytest.raises(TransportError) as nobody:
            connect("mns://id:secret@127.0.0.1:1/jobs?tls=1")
        assert not nobody.value.may_have_happened

    def test_the_sdks_objects(self, sdk: Account) -> None:
        with MnsAccount(sdk) as account:
            account.create("by-sdk")
        self.used(connect(sdk, "by-sdk"))
        queue = sdk.get_queue("by-sdk")
        self.used(connect(queue))
        queue.set_encoding(False)
        with connect(queue) as plain:
            assert not plain.capabilities.base64_body
        with pytest.raises(ParameterInvalid):
            connect(queue, "by-sdk")
