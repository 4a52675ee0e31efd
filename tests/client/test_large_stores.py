"""Large messages over real stores: 50 MB through S3's protocol and through files, AWS's form, a kill at each step."""

import errno
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.support.embedded import EmbeddedClient

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.adapters.sqs import SqsAccount
from veilmq.client.encrypted import EncryptedQueue, Keys, new_key
from veilmq.client.errors import ObjectStoreFailed
from veilmq.client.large import MARGIN, LargeMessageQueue, ObjectStore, PointerFormat
from veilmq.client.messages import Message, Received, Sent, Template
from veilmq.client.queue import Queue
from veilmq.client.unreadable import DeadLetters, keep
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, ReceiptInvalid
from veilmq.store import files
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import MovableClock
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow

MEGABYTE = 1_000_000
LARGE = "žluť" * 20_000
DAY = 86_400.0
JAVA_CLASS = "software.amazon.payloadoffloading.PayloadS3Pointer"


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of an S3 server with the bucket `big`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        aws_access_key_id="any",
        aws_secret_access_key="any",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="big")
    yield client
    client.close()
    server.stop()


def on_s3(s3: Any, url: str) -> ObjectStore:
    options = {"key": "any", "secret": "any", "endpoint_url": s3.meta.endpoint_url}
    return ObjectStore(url, options=options, pause=0.01)


@pytest.fixture(params=["s3", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return ObjectStore(f"file://{tmp_path}/objects")
    return on_s3(request.getfixturevalue("s3"), f"s3://big/{tmp_path.name.replace('[', '-').replace(']', '-')}")


@pytest.fixture
def plain(embedded: EmbeddedClient) -> Queue:
    embedded.account.create("orders", Template(retention=DAY))
    return embedded.account.queue("orders")


def keys(store: ObjectStore) -> list[str]:
    return [found.key for found in store.list("orders")]


class TestFiftyMegabytes:
    def test_there_and_back(self, plain: Queue, store: ObjectStore) -> None:
        body = "".join(f"{number:09d}\n" for number in range(5 * MEGABYTE))
        assert len(body) == 50 * MEGABYTE
        queue = LargeMessageQueue(plain, store, unreadable=keep)
        queue.send_batch([body, "small"])
        came = {len(message.body): message for message in queue.receive(10)}
        assert came[5].body == "small"
        assert came[len(body)].body == body
        assert queue.delete_batch([message.handle for message in came.values()]) == [None, None]
        assert keys(store) == []

    def test_sweeping(self, embedded: EmbeddedClient, plain: Queue, store: ObjectStore) -> None:
        queue = LargeMessageQueue(plain, store, unreadable=keep, clock=embedded.clock)
        queue.send(LARGE)
        assert queue.sweep(DAY + MARGIN).left == 1
        embedded.pass_time(DAY + MARGIN + 10)
        assert queue.sweep(DAY + MARGIN).objects == 1
        assert keys(store) == []


def test_a_bucket_that_is_missing(s3: Any, plain: Queue) -> None:
    with pytest.raises(ObjectStoreFailed, match="bucket is missing"):
        LargeMessageQueue(plain, on_s3(s3, "s3://nowhere/x"), unreadable=keep).send(LARGE)
    assert plain.stats().visible == 0


def test_an_object_is_made_once(store: ObjectStore) -> None:
    assert store.create("orders/x", b"first")
    assert not store.create("orders/x", b"second")
    assert store.get("orders/x") == b"first"


def test_what_an_earlier_attempt_wrote_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = itertools.count()

    def failing(directory: Path) -> None:
        if (tmp_path / "objects/orders/x").exists() and not next(syncs):
            raise OSError(errno.EIO, "Input/output error")

    store = ObjectStore(f"file://{tmp_path}/objects", pause=0.01)
    monkeypatch.setattr(files, "sync_directory", failing)
    assert store.create("orders/x", b"ours")
    assert next(syncs), "the first attempt failed when the object was there"
    assert not store.create("orders/x", b"ours"), "another call: it was there before"


def test_files_are_private_and_leave_nothing_aside(plain: Queue, tmp_path: Path) -> None:
    queue = LargeMessageQueue(plain, f"file://{tmp_path}/objects", unreadable=keep)
    queue.send(LARGE)
    (file,) = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes() == LARGE.encode()


class TestAws:
    """The form of amazon-sqs-java-extended-client-lib and of its Python sibling."""

    @pytest.fixture
    def store(self, s3: Any, tmp_path: Path) -> ObjectStore:
        return on_s3(s3, f"s3://big/{tmp_path.name}")

    @pytest.fixture
    def dead(self, embedded: EmbeddedClient) -> Queue:
        embedded.account.create("dead")
        return embedded.account.queue("dead")

    @pytest.fixture
    def queue(self, plain: Queue, dead: Queue, store: ObjectStore) -> LargeMessageQueue:
        return LargeMessageQueue(plain, store, unreadable=DeadLetters(dead), pointers="aws")

    def test_what_we_write_they_read(self, s3: Any, plain: Queue, queue: LargeMessageQueue) -> None:
        queue.send(Message(LARGE, {"colour": "red"}))
        (raw,) = plain.peek()
        kind, place = json.loads(raw.body)
        assert kind == JAVA_CLASS
        assert set(place) == {"s3BucketName", "s3Key"}
        assert raw.attributes == {"colour": "red", "ExtendedPayloadSize": len(LARGE.encode())}
        assert plain.capabilities.attributes_max - queue.capabilities.attributes_max == 1
        found = s3.get_object(Bucket=place["s3BucketName"], Key=place["s3Key"])["Body"].read()
        assert found == LARGE.encode()

    @pytest.mark.parametrize(
        ("kind", "attribute"),
        [
            (JAVA_CLASS, "ExtendedPayloadSize"),
            ("com.amazon.sqs.javamessaging.MessageS3Pointer", "SQSLargePayloadSize"),
        ],
    )
    def test_what_they_write_we_read(
        self, s3: Any, plain: Queue, queue: LargeMessageQueue, store: ObjectStore, kind: str, attribute: str
    ) -> None:
        key = f"{store.prefix}c71eb2ae-37e0-4265-8909-32f4153faddf"
        s3.put_object(Bucket="big", Key=key, Body=LARGE.encode())
        body = json.dumps([kind, {"s3BucketName": "big", "s3Key": key}])
        plain.send(Message(body, {attribute: len(LARGE.encode()), "colour": "red"}))
        (message,) = queue.receive()
        assert (message.body, message.attributes) == (LARGE, {"colour": "red"})
        assert message.handle.startswith(f"-..s3BucketName..-big-..s3BucketName..--..s3Key..-{key}-..s3Key..-"), (
            "as they have it, so that either can delete with it"
        )
        queue.delete(queue.extend(message.handle, 30))
        assert "Contents" not in s3.list_objects_v2(Bucket="big", Prefix=key)

    def test_small_messages_and_their_handles_are_plain(self, plain: Queue, queue: LargeMessageQueue) -> None:
        queue.send("small")
        assert plain.peek()[0].body == "small"
        plain.delete(queue.receive()[0].handle)

    @for_each(
        "body, size",
        [
            (LARGE, 7),
            ("[]", 7),
            (json.dumps([JAVA_CLASS]), 7),
            (json.dumps([JAVA_CLASS, {"s3BucketName": "other", "s3Key": "{prefix}x"}]), 6),
            (json.dumps([JAVA_CLASS, {"s3BucketName": "big", "s3Key": "secret"}]), 6),
            (json.dumps([JAVA_CLASS, {"s3BucketName": "big", "s3Key": "{prefix}../secret"}]), 6),
            (json.dumps([JAVA_CLASS, {"s3BucketName": "big", "s3Key": None}]), 6),
            (json.dumps(["java.lang.Runtime", {"s3BucketName": "big", "s3Key": "{prefix}x"}]), 6),
            (json.dumps([JAVA_CLASS, {"s3BucketName": "big", "s3Key": "{prefix}missing"}]), 6),
            (json.dumps([JAVA_CLASS, {"s3BucketName": "big", "s3Key": "{prefix}x"}]), 7),
        ],
    )
    def test_what_is_forged_or_gone_never_reaches_the_handler(
        self, s3: Any, plain: Queue, dead: Queue, queue: LargeMessageQueue, store: ObjectStore, body: str, size: int
    ) -> None:
        s3.put_object(Bucket="big", Key="secret", Body=b"secret")
        store.put("x", b"secret")
        plain.send(Message(body.replace("{prefix}", store.prefix), {"ExtendedPayloadSize": size}))
        queue.send("good")
        assert [message.body for message in queue.receive(10)] == ["good"]
        assert len(dead.receive(10)) == 1
        assert plain.stats().visible == 0

    def test_a_pointer_that_tells_no_size_leads_to_nothing_too_large(
        self, plain: Queue, dead: Queue, store: ObjectStore
    ) -> None:
        most = plain.capabilities.body_bytes_max
        queue = LargeMessageQueue(plain, store, unreadable=DeadLetters(dead), pointers="aws", body_bytes_max=most)
        for name, size_bytes in (("fits", most), ("huge", most + 1)):
            store.put(name, b"x" * size_bytes)
            place = {"s3BucketName": "big", "s3Key": store.prefix + name}
            plain.send(Message(json.dumps([JAVA_CLASS, place]), {"ExtendedPayloadSize": -1}))
        assert [len(message.body) for message in queue.receive(10)] == [most]
        assert dead.stats().visible == 1

    def test_reserved_names(self, queue: LargeMessageQueue) -> None:
        with pytest.raises(ParameterInvalid, match="ExtendedPayloadSize"):
            queue.send(Message("x", {"ExtendedPayloadSize": 1}))

    def test_a_body_cannot_be_replaced(self, queue: LargeMessageQueue) -> None:
        queue.send("x")
        assert not queue.capabilities.body_replaceable
        with pytest.raises(CapabilityMissing):
            queue.extend(queue.receive()[0].handle, 30, body="y")

    @for_each(
        "handle",
        [
            "-..s3BucketName..-big",
            "-..s3BucketName..-big-..s3BucketName..-x-..s3Key..-y-..s3Key..-z",
            "-..s3BucketName..-other-..s3BucketName..--..s3Key..-x-..s3Key..-z",
            "-..s3BucketName..-big-..s3BucketName..--..s3Key..-secret-..s3Key..-z",
        ],
    )
    def test_handles_are_checked(self, queue: LargeMessageQueue, handle: str) -> None:
        with pytest.raises(ReceiptInvalid):
            queue.delete(handle)

    def test_it_needs_s3(self, plain: Queue) -> None:
        with pytest.raises(ParameterInvalid, match="s3://"):
            LargeMessageQueue(plain, "memory://x/y", unreadable=keep, pointers=PointerFormat.AWS)


SCRIPT = """
import os, signal, stat, sys
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.large import LargeMessageQueue, ObjectStore, SharedBodies
from veilmq.client.unreadable import keep
from veilmq.client.wrapping import Wrapping

directory, url, moment = sys.argv[1:]

def die(name):
    if name == moment:
        os.kill(os.getpid(), signal.SIGKILL)

class Store(ObjectStore):
    def put(self, key, content):
        die("before upload")
        if moment == "within upload":
            os.fsync = lambda file: stat.S_ISREG(os.fstat(file).st_mode) and die("within upload")
        super().put(key, content)
        die("after upload")

    def remove(self, key):
        gone = super().remove(key)
        die("after removal")
        return gone

class Inner(Wrapping):
    def send(self, message):
        sent = super().send(message)
        die("after send")
        return sent

    def receive(self, count_max=1, *, lease=None, wait=0):
        came = super().receive(count_max, lease=lease, wait=wait)
        die("after receive")
        return came

    def extend(self, handle, lease, *, body=None):
        extended = super().extend(handle, lease, body=body)
        if body is not None:
            die("after replacement")
        return extended

    def delete(self, handle):
        super().delete(handle)
        die("after delete")

with EmbeddedAccount(directory) as account:
    store = Store(url)
    queue = LargeMessageQueue(Inner(account.queue("orders")), store, unreadable=keep)
    queue.send("L" * 100_000)
    (message,) = queue.receive(lease=20)
    handle = queue.extend(message.handle, 20, body="M" * 100_000)
    queue.delete(handle)
"""

MOMENTS = {
    # moment of the kill: (messages that are left, objects too many that are left)
    "before upload": (0, 0),
    "within upload": (0, 1),
    "after upload": (0, 1),
    "after send": (1, 0),
    "after receive": (1, 0),
    "after replacement": (1, 1),
    "after removal": (1, 0),
    "after delete": (0, 1),
    "never": (0, 0),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_leaves_no_dangling_pointer_and_orphans_are_swept(tmp_path: Path, moment: str) -> None:
    messages, orphans = MOMENTS[moment]
    directory, url = tmp_path / "data", f"file://{tmp_path}/objects"
    with EmbeddedAccount(directory) as account:
        account.create("orders", Template(retention=DAY))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), url, moment], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (0 if moment == "never" else -signal.SIGKILL), done.stderr
    clock = MovableClock()
    clock.advance(30)
    with EmbeddedAccount(directory, clock=clock) as account:
        queue = LargeMessageQueue(account.queue("orders"), url, unreadable=refused, clock=clock)
        came = queue.receive(10)
        assert len(came) == messages
        assert {len(message.body) for message in came} <= {100_000}
        assert len(keys(queue.store)) == messages + orphans
        assert queue.sweep(DAY + MARGIN).objects == 0
        for message in came:
            queue.release(message.handle)
        clock.advance(DAY - 60)
        account.apply_due()
        if messages:
            assert queue.sweep(DAY + MARGIN).objects == 0
            assert len(queue.peek(10)) == messages
        clock.advance(2 * MARGIN)
        account.apply_due()
        assert queue.sweep(DAY + MARGIN).objects == messages + orphans
        assert keys(queue.store) == []


def refused(*_: object) -> None:
    raise AssertionError("a pointer dangles")


@pytest.fixture(scope="module")
def sqs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqsAccount]:
    """A real server, with the queues `stack` and `dead`."""
    server = LocalServer(tmp_path_factory.mktemp("sqs"))
    client = boto3.client(
        "sqs",
        endpoint_url=server.sqs_url,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )
    account = SqsAccount(client, owns_client=True)
    for name in ("stack", "dead"):
        account.create(name)
    yield account
    account.close()
    server.stop()


class TestOverSqs:
    """The whole stack over a real server's SQS port: encrypted over large over sqs."""

    @pytest.mark.parametrize("form", PointerFormat)
    def test_a_stack(self, s3: Any, sqs: SqsAccount, tmp_path: Path, form: PointerFormat) -> None:
        plain, dead = sqs.queue("stack"), DeadLetters(sqs.queue("dead"))
        store = on_s3(s3, f"s3://big/stack-{form}")
        large = LargeMessageQueue(plain, store, unreadable=dead, pointers=form)
        queue = EncryptedQueue(large, Keys(new_key()), unreadable=dead)
        bodies = [LARGE, "small", LARGE + "!", "x" * 300_000]
        assert [type(answer) for answer in queue.send_batch(bodies)] == [Sent] * 4
        came: list[Received] = []
        while len(came) < 4:
            came += queue.receive(10, lease=60, wait=10)
        assert sorted(message.body for message in came) == sorted(bodies)
        assert len(list(store.list("stack"))) == 3
        handles = [queue.extend(message.handle, 120) for message in came]
        assert queue.delete_batch(handles) == [None] * 4
        assert list(store.list("stack")) == []
        assert dead.queue.stats().visible == 0
