"""The azure adapter through azure-storage-queue: what Queue Storage has no place for, and a way that breaks."""

import math
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import boto3
import pytest
from azure.storage.queue import (
    BinaryBase64DecodePolicy,
    BinaryBase64EncodePolicy,
    QueueClient,
    QueueServiceClient,
    TextBase64DecodePolicy,
    TextBase64EncodePolicy,
    generate_queue_sas,
)
from tests.support.broken_server import HANG_UP, BrokenServer, answer

from veilmq.client.adapters.azure import AzureAccount, AzureQueue
from veilmq.client.adapters.azure.calls import AzureRefusal, error_of
from veilmq.client.adapters.cloud import PacedPolls
from veilmq.client.adapters.connect import DEVELOPMENT_KEYS, connect, connect_account
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Extension, Message, Sent, Template
from veilmq.client.unreadable import DeadLetters
from veilmq.model.errors import (
    CapabilityMissing,
    LeaseTaken,
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueDeletedRecently,
    QueueExists,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.protocols.azure import errors as faults
from veilmq.testing.client_contract import for_each, unrefused
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow

((ACCOUNT, KEY),) = DEVELOPMENT_KEYS.items()
CREDENTIAL = {"account_name": ACCOUNT, "account_key": KEY}
ENCODED = {"message_encode_policy": TextBase64EncodePolicy(), "message_decode_policy": TextBase64DecodePolicy()}
_numbers = count()


@pytest.fixture
def service(server: LocalServer) -> Iterator[QueueServiceClient]:
    url = f"{server.process.azure}/{ACCOUNT}"
    with QueueServiceClient(url, credential=CREDENTIAL, retry_total=0) as client:
        yield client


@pytest.fixture
def account(service: QueueServiceClient) -> Iterator[AzureAccount]:
    account = AzureAccount(service)
    yield account
    account.close()


def made(account: AzureAccount, **settings: Any) -> AzureQueue:
    name = f"made-{next(_numbers)}"
    assert account.create(name, Template(**settings))
    return account.queue(name)


def place(server: LocalServer) -> str:
    return server.process.azure.removeprefix("http://")


class TestMessages:
    """What travels."""

    def test_a_handle_is_all_that_another_process_needs(
        self, account: AzureAccount, service: QueueServiceClient
    ) -> None:
        queue = made(account)
        sent = queue.send("x")
        other = AzureAccount(service).queue(queue.name)
        assert sent.handle is not None
        kept = other.extend(sent.handle, 0)
        (message,) = queue.receive(lease=60)
        with pytest.raises(MessageGone):
            queue.delete(kept)
        newest = other.extend(message.handle, 60, body="y")
        assert newest != message.handle
        other.delete(newest)
        assert queue.stats().visible == 0

    def test_what_never_dies(self, server: LocalServer, account: AzureAccount) -> None:
        queue, lasting = made(account), made(account, retention=math.inf)
        queue.send(Message("mortal"))
        queue.send(Message("never", ttl=math.inf))
        lasting.send("never either")
        lasting.send(Message("an hour", ttl=3_600))
        server.advance(days=8)
        (message,) = queue.receive(10, lease=60)
        assert (message.body, message.expires) == ("never", None)
        assert [message.body for message in lasting.receive(10, lease=60)] == ["never either"]
        assert lasting.stats().retention is None

    def test_what_cannot_be_sent(self, account: AzureAccount) -> None:
        refused: list[tuple[Message, type[VeilError]]] = [
            (Message("x", attributes={"a": "b"}), CapabilityMissing),
            (Message("x", priority=1), CapabilityMissing),
            (Message("x", tag="t"), CapabilityMissing),
            (Message("x", type="t"), CapabilityMissing),
            (Message("x", lease_hint=5), CapabilityMissing),
            (Message("x", deduplication_id="d"), CapabilityMissing),
            (Message("x", delay=60, ttl=60), ParameterInvalid),
            (Message("x", ttl=0), ParameterInvalid),
            (Message("x", ttl=-1), ParameterInvalid),
            (Message("x", ttl=math.nan), ParameterInvalid),
            (Message("x", delay=math.inf), ParameterInvalid),
            (Message(""), ParameterInvalid),
            (Message("\ud800"), ParameterInvalid),
            (Message("x" * 65_537), MessageTooLarge),
        ]
        queue = made(account)
        for error in {error for _, error in refused}:
            assert unrefused(queue.send, [message for message, expected in refused if expected is error], error) == []
        results = queue.send_batch(["a", *[message for message, _ in refused], "b"])
        assert [type(result) for result in results] == [Sent, *[error for _, error in refused], Sent]
        assert queue.stats().visible == 2

    def test_a_lease_that_nobody_names_is_azures(self, server: LocalServer, account: AzureAccount) -> None:
        sqs = boto3.client(
            "sqs", endpoint_url=server.sqs_url, region_name="us-east-1", aws_access_key_id="x",
            aws_secret_access_key="x",
        )  # fmt: skip
        url = sqs.create_queue(QueueName="by-boto3", Attributes={"VisibilityTimeout": "600"})["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="x", DelaySeconds=0)
        queue = account.queue("by-boto3")
        before = SYSTEM.monotonic()
        (message,) = queue.receive()
        assert before + 30 <= message.lease_end <= SYSTEM.monotonic() + 30
        server.advance(seconds=30)
        assert queue.receive(lease=60)[0].id == message.id
        stats = queue.stats()
        assert (stats.visible, stats.visibility_timeout, stats.incarnation) == (1, None, None)

    def test_fractions_of_seconds_are_rounded_up_and_believed_as_asked(
        self, server: LocalServer, account: AzureAccount
    ) -> None:
        queue = made(account)
        queue.send(Message("x", delay=0.5))
        assert queue.receive(lease=60) == []
        server.advance(seconds=1)
        before = SYSTEM.monotonic()
        (message,) = queue.receive(lease=2.5)
        assert before + 2.5 <= message.lease_end <= SYSTEM.monotonic() + 2.5
        queue.extend(message.handle, 1.5)
        server.advance(seconds=1.25)
        assert queue.receive(lease=60) == []
        server.advance(seconds=1)
        assert len(queue.receive(lease=60)) == 1

    def test_a_batch_is_longer_than_the_pool(self, account: AzureAccount) -> None:
        queue = made(account)
        assert all(isinstance(sent, Sent) for sent in queue.send_batch([str(number) for number in range(40)]))
        held = queue.receive(32, lease=60) + queue.receive(32, lease=60)
        assert sorted(int(message.body) for message in held) == list(range(40))
        handles = queue.extend_batch([Extension(message.handle, 60) for message in held])
        assert queue.delete_batch([str(handle) for handle in handles]) == [None] * 40


class TestSettings:
    """A queue's settings, in its metadata."""

    def test_they_are_honoured_by_every_client_of_the_adapter(
        self, account: AzureAccount, service: QueueServiceClient
    ) -> None:
        queue = made(account, visibility_timeout=77, delay=5, message_bytes_max=10, tags={"team": "a b"})
        metadata = service.get_queue_client(queue.name).get_queue_properties().metadata
        incarnation = metadata.pop("veilmq_incarnation")
        assert metadata == {
            "veilmq_visibility_timeout": "77",
            "veilmq_delay": "5",
            "veilmq_message_bytes_max": "10",
            "team": "a b",
        }
        other = AzureAccount(service).queue(queue.name)
        stats = other.stats()
        assert (stats.visibility_timeout, stats.delay, stats.incarnation) == (77, 5, incarnation)
        with pytest.raises(MessageTooLarge):
            other.send("x" * 11)
        other.send(Message("now", delay=0))
        other.send("later")
        before = SYSTEM.monotonic()
        (message,) = other.receive(10)
        assert before + 77 <= message.lease_end <= SYSTEM.monotonic() + 77

    def test_what_the_template_does_not_name_may_be_anything(
        self, account: AzureAccount, service: QueueServiceClient
    ) -> None:
        service.create_queue("foreign", metadata={"owner": "them", "veilmq_delay": "soon", "veilmq_retention": "0"})
        assert account.create("foreign") is False
        queue = account.queue("foreign")
        assert (queue.stats().delay, queue.stats().retention) == (None, None)
        for template in (Template(delay=1), Template(tags={"owner": "us"})):
            with pytest.raises(QueueExists) as refused:
                account.create("foreign", template)
            assert refused.value.setting in {"delay", "owner"}
        assert account.create("foreign", Template(tags={"Owner": "them"})) is False

    @for_each(
        "template, parameter",
        [
            (Template(visibility_timeout=0), "visibility_timeout"),
            (Template(visibility_timeout=604_801), "visibility_timeout"),
            (Template(visibility_timeout=1.5), "visibility_timeout"),
            (Template(delay=math.inf), "delay"),
            (Template(retention=math.nan), "retention"),
            (Template(delay="5"), "delay"),  # type: ignore[arg-type]
            (Template(message_bytes_max=65_537), "message_bytes_max"),
            (Template(tags={"a-b": "c"}), "tags"),
            (Template(tags={"veilmq_delay": "c"}), "tags"),
            (Template(tags={"a": "é"}), "tags"),
            (Template(tags={"a": ""}), "tags"),
            (Template(tags={"a": 1}), "tags"),  # type: ignore[dict-item]
        ],
    )
    def test_settings_that_cannot_be(self, account: AzureAccount, template: Template, parameter: str) -> None:
        with pytest.raises(ParameterInvalid) as refused:
            account.create("never-made", template)
        assert refused.value.parameter == parameter
        for missing in (Template(fifo=True), Template(dead_letter_queue="d", receive_count_max=1)):
            with pytest.raises(CapabilityMissing):
                account.create("never-made", missing)
        assert account.names("never-made") == []

    def test_a_queue_that_is_being_deleted(self, account: AzureAccount) -> None:
        queue = made(account)
        account.delete(queue.name)
        with pytest.raises(QueueDeletedRecently) as refused:
            account.create(queue.name)
        assert refused.value.wait_us == 30_000_000
        with pytest.raises(QueueMissing):
            queue.send("x")


class TestBase64:
    """Bodies in base64."""

    def test_it_is_what_the_sdks_mean(self, service: QueueServiceClient) -> None:
        account = AzureAccount(service, base64=True)
        queue = made(account)
        theirs = service.get_queue_client(queue.name, **ENCODED)
        theirs.send_message("žluť")
        (message,) = queue.receive(lease=60)
        queue.extend(message.handle, 0, body="koně")
        assert theirs.receive_message().content == "koně"
        assert queue.capabilities.transmitted_bytes("x" * 49_152) == 65_536
        queue.send("x" * 49_152)
        with pytest.raises(MessageTooLarge):
            queue.send("x" * 49_153)

    def test_what_is_none_harms_nobody(self, service: QueueServiceClient) -> None:
        plain = AzureAccount(service)
        bad, queue_name = made(plain), made(plain).name
        queue = AzureAccount(service, base64=True, unreadable=DeadLetters(bad)).queue(queue_name)
        raw = service.get_queue_client(queue_name)
        for text in ("aGk*=", "/w==", "AAAA"):
            raw.send_message(text)
        queue.send("good")
        assert [message.body for message in queue.peek(10)] == ["good"]
        assert [message.body for message in queue.receive(10, lease=60)] == ["good"]
        assert {message.body for message in bad.receive(10, lease=60)} == {"aGk*=", "/w==", "AAAA"}
        assert queue.stats().visible == 1


class TestWaiting:
    """Polling in the place of a long poll."""

    def test_what_a_question_brings_after_the_close_is_given_back(self, account: AzureAccount) -> None:
        queue = made(account)
        queue.send("x")
        held = queue.receive(lease=600)
        waiting = PacedPolls(SYSTEM)

        def ask() -> list[Any]:
            waiting.close()
            return held

        given_back: list[Any] = []
        assert waiting.poll(ask, 20, given_back.extend) == []
        assert given_back == held

    def test_it_asks_once_more_when_the_wait_ends(self) -> None:
        class Jumping:
            def __init__(self) -> None:
                self.now = 0.0

            def monotonic(self) -> float:
                return self.now

            wall = monotonic

        clock, asked = Jumping(), count(1)

        def ask() -> list[Any]:
            clock.now += 4
            return []

        def counted() -> list[Any]:
            next(asked)
            return ask()

        assert PacedPolls(clock).poll(counted, 10, list.clear) == []
        assert next(asked) == 4

    def test_an_account_that_is_closed_releases_and_then_lets_its_connections_go(self, server: LocalServer) -> None:
        """The close comes while a Get Messages that takes the message is on its way back."""
        client = QueueServiceClient(f"{server.process.azure}/{ACCOUNT}", credential=CREDENTIAL, retry_total=0)
        account = AzureAccount(client, owns_client=True)
        queue = made(account)
        page, answered, closed = queue._page, threading.Event(), threading.Event()

        def held_page(**given: Any) -> list[Any]:
            found = page(**given)
            answered.set()
            assert closed.wait(10)
            return found

        queue._page = held_page  # type: ignore[method-assign]
        queue.send("x")
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(queue.receive, lease=600)
            assert answered.wait(10)
            account.close()
            closed.set()
            assert received.result(10) == []
        with pytest.raises(TransportError) as refused:
            account.names()
        assert not refused.value.may_have_happened
        with AzureAccount(
            QueueServiceClient(f"{server.process.azure}/{ACCOUNT}", credential=CREDENTIAL), owns_client=True
        ) as other:
            (message,) = other.queue(queue.name).receive(lease=60)
        assert message.receive_count == 2
        with pytest.raises(ValueError, match="already been closed"):
            client.get_service_properties()

    def test_a_client_that_its_owner_closed(self, server: LocalServer) -> None:
        client = QueueServiceClient(f"{server.process.azure}/{ACCOUNT}", credential=CREDENTIAL, retry_total=0)
        queue = made(AzureAccount(client))
        client.close()
        with pytest.raises(TransportError) as refused:
            queue.send("x")
        assert refused.value == TransportError(reason="the client is closed", may_have_happened=False)

    def test_a_queue_that_is_closed_releases(self, server: LocalServer, service: QueueServiceClient) -> None:
        """The close comes while a Get Messages that takes the message is on its way back."""
        account = AzureAccount(service)
        queue = made(account)
        name, page = queue.name, queue._page

        def closing_page(**given: Any) -> list[Any]:
            found = page(**given)
            if found:
                queue.close()
            return found

        queue._page = closing_page  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:
            waited = pool.submit(queue.receive, lease=600, wait=20)
            account.queue(name).send("x")
            assert waited.result(10) == []
        (message,) = account.queue(name).receive(lease=60)
        assert message.receive_count == 2


NOT_FOUND = answer(404, b"", "x-ms-error-code: MessageNotFound")
REFUSED = answer(403, b"", "x-ms-error-code: AuthenticationFailed")
BUSY = answer(503, b"", "x-ms-error-code: ServerBusy")


class TestTheWay:
    """What became of a call whose way broke."""

    @for_each(
        "steps, attempts, error, doubt",
        [
            ([], 1, TransportError, False),
            ([], 2, TransportError, False),
            ([HANG_UP], 1, TransportError, True),
            ([HANG_UP], 2, TransportError, True),
            ([BUSY], 2, TransportError, True),
            ([BUSY], 1, ServiceError, None),
            ([REFUSED], 1, ServiceError, None),
            ([NOT_FOUND], 1, MessageGone, None),
            # The attempt that was lost may have deleted it.
            ([HANG_UP, NOT_FOUND], 2, TransportError, True),
            ([BUSY, NOT_FOUND], 2, TransportError, True),
        ],
    )
    def test_what_may_have_happened(
        self, steps: list[bytes], attempts: int, error: type[VeilError], doubt: bool | None
    ) -> None:
        """After the steps nobody listens: the last of the SDK's attempts does not tell of the first."""
        broken = BrokenServer(steps)
        client = QueueServiceClient(
            f"{broken.url}/{ACCOUNT}", credential=CREDENTIAL, retry_total=attempts - 1, initial_backoff=0,
            increment_base=0, random_jitter_range=0,
        )  # fmt: skip
        with client, AzureAccount(client) as account:
            queue = AzureQueue(account, client.get_queue_client("jobs"))
            with pytest.raises(error) as failed:
                queue.delete("id:receipt")
            broken.close()
            assert broken.requests == len(steps)
            if isinstance(failed.value, TransportError):
                assert failed.value.may_have_happened is doubt

    def test_the_rest_of_a_batch_is_not_tried(self) -> None:
        broken = BrokenServer([HANG_UP])
        client = QueueServiceClient(f"{broken.url}/{ACCOUNT}", credential=CREDENTIAL, retry_total=0)
        with client, AzureAccount(client) as account:
            queue = AzureQueue(account, client.get_queue_client("jobs"))
            results = queue.delete_batch([f"id:{number}" for number in range(20)])
            broken.close()
        assert [getattr(result, "may_have_happened", None) for result in results] == [True] + [False] * 19
        assert all("not tried" in str(result) for result in results[1:])

    def test_an_account_leaves_the_users_client_as_it_was(self, service: QueueServiceClient) -> None:
        account = AzureAccount(service)
        queue = made(account)
        account.close()
        account.close()
        with pytest.raises(TransportError):
            queue.send("x")
        assert [type(each) for each in account.singly.run(["a", "b", "c"], str)] == [
            str,
            TransportError,
            TransportError,
        ]
        assert service.get_queue_client(queue.name).get_queue_properties().approximate_message_count == 0

    def test_its_threads_end_with_it(self, account: AzureAccount) -> None:
        before = set(threading.enumerate())
        queue = made(account)
        queue.send_batch(["a", "b", "c"])
        started = [each for each in set(threading.enumerate()) - before if each.name.startswith("veilmq-azure")]
        assert started
        account.close()
        for thread in started:
            thread.join(10)
            assert not thread.is_alive()


def said(code: str, **fields: Any) -> AzureRefusal:
    known: dict[str, Any] = {
        "status": 400, "request_id": "r", "message": "said", "extra": {}, "queue": "q", "names": {}, "size_bytes": 7,
        "creating": False,
    }  # fmt: skip
    return AzureRefusal(**{"code": code, **known, **fields})


class TestErrors:
    """Codes."""

    @for_each(
        "what, error",
        [
            (said("QueueNotFound"), QueueMissing(queue="q")),
            (said("QueueBeingDeleted"), QueueMissing(queue="q")),
            (said("QueueBeingDeleted", creating=True), QueueDeletedRecently(queue="q", wait_us=30_000_000)),
            (said("QueueAlreadyExists"), QueueExists(queue="q", setting="metadata")),
            (said("MessageNotFound"), MessageGone(sequence=0, attempt=0)),
            (said("PopReceiptMismatch"), LeaseTaken(sequence=0, attempt=0)),
            (said("MessageTooLarge"), MessageTooLarge(size_bytes=7, limit_bytes=65_536)),
            (
                said("RequestBodyTooLarge", extra={"maxlimit": "5"}),
                MessageTooLarge(size_bytes=7, limit_bytes=5),
            ),
            (
                said(
                    "OutOfRangeQueryParameterValue",
                    names={"visibilitytimeout": "delay"},
                    extra={"queryparametername": "visibilitytimeout", "minimumallowed": "0", "maximumallowed": "9"},
                ),
                ParameterInvalid(parameter="delay", reason="must be from 0 to 9"),
            ),
            (
                said("InvalidQueryParameterValue", extra={"queryparametername": "popreceipt", "reason": "bad"}),
                ReceiptInvalid(reason="bad"),
            ),
            (said("InvalidResourceName"), ParameterInvalid(parameter="name", reason="said")),
            (said("InvalidXmlNodeValue"), ParameterInvalid(parameter="body", reason="said")),
            (said("Unheard"), ServiceError(code="Unheard", status=400, request_id="r", message="said")),
        ],
    )
    def test_what_a_code_means(self, what: AzureRefusal, error: VeilError) -> None:
        assert error_of(what) == error

    def test_every_code_of_our_own_server_means_something(self) -> None:
        codes = [value.code for value in vars(faults).values() if isinstance(value, faults.Fault)]
        assert len(codes) > 30
        for code in codes:
            assert isinstance(error_of(said(code)), VeilError)


class TestConnect:
    """URLs and the SDK's objects."""

    def used(self, queue: Any) -> None:
        with queue:
            queue.send("x")
            (message,) = queue.receive(lease=60)
            assert message.body == "x"
            queue.delete(message.handle)

    def test_a_url(self, server: LocalServer) -> None:
        key = KEY.replace("/", "%2F").replace("+", "%2B")
        for credentials in ("", f":{key}@"):
            url = f"azure://{credentials}{place(server)}/{ACCOUNT}"
            self.used(connect(f"{url}/by-url?tls=0&create=1"))
            with connect_account(f"{url}/?tls=0") as account:  # type: ignore[attr-defined]
                assert "by-url" in account.names("by")
        with pytest.raises(QueueMissing):
            connect(f"azure://{place(server)}/{ACCOUNT}/missing?tls=0")
        with connect(f"azure://{place(server)}/{ACCOUNT}/by-url?tls=0&base64=1") as queue:
            assert queue.capabilities.base64_body

    def test_credentials_that_are_wrong_or_missing(self, server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ServiceError) as refused:
            connect(f"azure://:c2VjcmV0@{place(server)}/{ACCOUNT}/jobs?tls=0")
        assert (refused.value.code, refused.value.status) == ("AuthenticationFailed", 403)
        assert "c2VjcmV0" not in str(refused.value)
        with pytest.raises(ServiceError, match="AzureSigningError"):
            connect(f"azure://:x@{place(server)}/{ACCOUNT}/jobs?tls=0")
        with pytest.raises(ParameterInvalid, match=r"for want of a key .*Token credential is only supported"):
            connect(f"azure://{place(server)}/account/jobs?tls=0")
        monkeypatch.setitem(sys.modules, "azure.identity", None)  # as if it were not installed
        for url in (f"azure://{place(server)}/jobs?tls=0", "azure:///account/jobs"):
            with pytest.raises(ParameterInvalid) as lacking:
                connect(url)
            assert lacking.value.parameter == "url"

    def test_the_sdks_objects(self, server: LocalServer, service: QueueServiceClient) -> None:
        service.create_queue("by-sdk")
        self.used(connect(service, "by-sdk"))
        self.used(connect(service.get_queue_client("by-sdk")))
        encoded = service.get_queue_client("by-sdk", **ENCODED)
        with connect(encoded) as queue:
            queue.send("x")
            assert encoded.receive_message().content == "x"
        with pytest.raises(ParameterInvalid):
            connect(encoded, "by-sdk")
        binary = service.get_queue_client(
            "by-sdk", message_encode_policy=BinaryBase64EncodePolicy(), message_decode_policy=BinaryBase64DecodePolicy()
        )
        with pytest.raises(ParameterInvalid, match="BinaryBase64EncodePolicy"):
            connect(binary)

    def test_a_client_with_a_sas(self, server: LocalServer, service: QueueServiceClient) -> None:
        service.create_queue("by-sas")
        sas = generate_queue_sas(ACCOUNT, "by-sas", KEY, permission="raup", expiry="2100-01-01T00:00:00Z")
        client = QueueClient(f"{server.process.azure}/{ACCOUNT}", "by-sas", credential=sas)
        self.used(connect(client))
        client.close()
