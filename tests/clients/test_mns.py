"""Alibaba's SDK for Python and its command line, unmodified, against a real server."""

import contextlib
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from mns.account import Account, AccountMeta
from mns.message_property import MessagePropertyValue, MessageSystemPropertyValue
from mns.mns_exception import MNSClientNetworkException, MNSServerException
from mns.queue import Message, QueueMeta
from mns.subscription import SubscriptionMeta
from mns.topic import Base64TopicMessage, TopicMessage, TopicMeta

from veilmq.testing.local import ServerProcess

Open = Callable[..., Any]

# The SDK calls its own deprecated setters whenever it reads the attributes of a queue.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")


@pytest.fixture
def open_account() -> Iterator[Open]:
    """Makes accounts whose connections are closed with the test."""
    accounts: list[Any] = []

    def make(server: ServerProcess, key: str = "id", secret: str = "secret", token: str = "") -> Any:
        accounts.append(Account(server.mns, key, secret, token))
        return accounts[-1]

    yield make
    for account in accounts:
        account.get_client().close_connection()


@pytest.fixture
def account(shared: ServerProcess, open_account: Open) -> Any:
    return open_account(shared)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name of the test's own."""
    return "".join(each if each.isalnum() else "-" for each in request.node.name)[:80].strip("-")


@pytest.fixture
def queue(account: Any, name: str) -> Any:
    made = account.get_queue(name)
    made.create(QueueMeta())
    return made


def code_of(call: Callable[..., Any], *arguments: Any) -> str:
    """The code of the error that must come."""
    with pytest.raises(MNSServerException) as caught:
        call(*arguments)
    assert len(caught.value.request_id) == 24
    return str(caught.value.type)


def test_the_life_of_a_queue(shared: ServerProcess, account: Any, name: str) -> None:
    queue = account.get_queue(name)
    meta = QueueMeta(vis_timeout=40, max_msg_size=2048, msg_ttl=600, delay_sec=0, polling_wait_sec=0)
    meta.set_logging_enabled(True)
    assert queue.create(meta) == f"{shared.mns}/queues/{name}"
    assert queue.create(meta) == f"{shared.mns}/queues/{name}"
    assert code_of(queue.create, QueueMeta()) == "QueueAlreadyExist"
    got = queue.get_attributes()
    assert (got.queue_name, got.visibility_timeout, got.maximum_message_size) == (name, 40, 2048)
    assert (got.message_retention_period, got.logging_enabled) == (600, True)
    change = QueueMeta(vis_timeout=50)
    queue.set_attributes(change)
    got = queue.get_attributes()
    assert (got.visibility_timeout, got.maximum_message_size) == (50, 2048)
    queue.delete()
    queue.delete()
    assert code_of(queue.get_attributes) == "QueueNotExist"


@pytest.mark.parametrize("body", ["hello", "a\r\nb <c> & ü \U0001f600"])
@pytest.mark.parametrize("encoded", [True, False])
def test_the_life_of_a_message(queue: Any, body: str, encoded: bool) -> None:
    queue.set_encoding(encoded)
    # Without base64 the SDK writes a carriage return as it is, which XML reads as a line feed.
    expected = body.encode() if encoded else body.replace("\r\n", "\n")
    sent = queue.send_message(Message(body, priority=3))
    peeked = queue.peek_message()
    assert (peeked.message_body, peeked.dequeue_count, peeked.priority) == (expected, 0, 3)
    got = queue.receive_message(0)
    assert (got.message_id, got.message_body_md5) == (sent.message_id, sent.message_body_md5)
    assert (got.message_body, got.dequeue_count) == (expected, 1)
    assert got.enqueue_time <= got.first_dequeue_time < got.next_visible_time
    changed = queue.change_message_visibility(got.receipt_handle, 60)
    assert code_of(queue.delete_message, got.receipt_handle) == "MessageNotExist"
    queue.delete_message(changed.receipt_handle)
    assert code_of(queue.receive_message, 0) == "MessageNotExist"
    assert code_of(queue.peek_message) == "MessageNotExist"


def test_a_transaction_by_the_handle_of_the_send(queue: Any) -> None:
    half = queue.send_message(Message("half", delay_seconds=600))
    assert half.receipt_handle
    moved = queue.change_message_visibility(half.receipt_handle, 1)
    assert queue.receive_message(5).message_body == b"half"
    assert code_of(queue.delete_message, moved.receipt_handle) == "MessageNotExist"
    half = queue.send_message(Message("other", delay_seconds=600))
    queue.delete_message(half.receipt_handle)
    assert queue.get_attributes().delay_messages == 0


def test_batches(queue: Any) -> None:
    sent = queue.batch_send_message([Message(f"m{number}") for number in range(16)])
    assert len({message.message_id for message in sent}) == 16
    assert len(queue.batch_peek_message(16)) == 16
    got = queue.batch_receive_message(16, 0)
    assert [message.message_body for message in got] == [b"m%d" % number for number in range(16)]
    assert [message.message_id for message in got] == [message.message_id for message in sent]
    queue.batch_delete_message([message.receipt_handle for message in got])
    assert code_of(queue.batch_receive_message, 16, 0) == "MessageNotExist"
    assert code_of(queue.batch_peek_message, 16) == "MessageNotExist"


def test_batches_of_which_some_fail(queue: Any) -> None:
    queue.send_message(Message("one"))
    handle = queue.receive_message(0).receipt_handle
    queue.delete_message(handle)
    queue.send_message(Message("two"))
    live = queue.receive_message(0).receipt_handle
    with pytest.raises(MNSServerException) as caught:
        queue.batch_delete_message([handle, live, "garbage"])
    assert caught.value.type == "MessageNotExist"
    assert [error["ErrorCode"] for error in caught.value.sub_errors] == ["MessageNotExist", "ReceiptHandleError"]
    assert queue.get_attributes().inactive_messages == 0
    with pytest.raises(MNSServerException) as caught:
        queue.batch_send_message([Message("good"), Message("bad", delay_seconds=604_801)])
    assert caught.value.type == "InvalidArgument"
    assert [sorted(entry) for entry in caught.value.sub_errors] == [
        ["MessageBodyMD5", "MessageId"],
        ["ErrorCode", "ErrorMessage"],
    ]
    assert queue.receive_message(0).message_body == b"good"


def test_properties(queue: Any) -> None:
    message = Message("with properties", message_group_id="g")
    message.set_user_properties(
        {
            "text": MessagePropertyValue.create_string("a < b"),
            "number": MessagePropertyValue.create_number(1.5),
            "truth": MessagePropertyValue.create_boolean(True),
            "raw": MessagePropertyValue.create_binary(b"\x00\xff"),
        }
    )
    message.add_system_property("traceparent", MessageSystemPropertyValue("STRING", "00-1-2-01"))
    queue.send_message(message)
    peeked, received = queue.peek_message(), queue.receive_message(0)
    assert received.message_group_id == "g"
    for got in (peeked, received):
        user = got.user_properties
        assert [user[name].get_string_value_by_type() for name in ("text", "number", "truth")] == [
            "a < b",
            "1.5",
            "true",
        ]
        assert user["raw"].get_binary_value() == b"\x00\xff"
        assert got.system_properties["traceparent"].get_string_value_by_type() == "00-1-2-01"
    assert queue.batch_send_message([message])[0].message_group_id == "g"
    (again,) = queue.batch_receive_message(16, 0)
    assert set(again.user_properties) == {"text", "number", "truth", "raw"}


def test_lists(account: Any, shared: ServerProcess) -> None:
    for number in range(5):
        account.get_queue(f"list-{number}").create(QueueMeta())
    urls: list[str] = []
    marker = ""
    while True:
        page, marker = account.list_queue("list-", 2, marker)
        urls += page
        if not marker:
            break
    assert urls == [f"{shared.mns}/queues/list-{number}" for number in range(5)]
    assert account.list_queue("nothing-") == ([], "")


def test_topics(account: Any, queue: Any, name: str, shared: ServerProcess) -> None:
    topic = account.get_topic(name)
    assert topic.create(TopicMeta(65536, True)) == f"{shared.mns}/topics/{name}"
    assert code_of(topic.create, TopicMeta(1024)) == "TopicAlreadyExist"
    topic.set_attributes(TopicMeta(32768))
    got = topic.get_attributes()
    assert (got.topic_name, got.maximum_message_size, got.message_retention_period) == (name, 32768, 86400)
    endpoint = f"acs:mns:cn-hangzhou:127:queues/{name}"
    plain = topic.get_subscription("plain")
    assert plain.subscribe(SubscriptionMeta(endpoint, notify_content_format="SIMPLIFIED")).endswith(
        "/subscriptions/plain"
    )
    tagged = topic.get_subscription("tagged")
    tagged.subscribe(SubscriptionMeta(endpoint, "EXPONENTIAL_DECAY_RETRY", "SIMPLIFIED", "red"))
    http = topic.get_subscription("http")
    http.subscribe(SubscriptionMeta("http://127.0.0.1:1/notifications"))
    assert (
        code_of(topic.get_subscription("bad").subscribe, SubscriptionMeta("mail:directmail:a@b.example"))
        == "EndpointInvalid"
    )
    assert len(topic.list_subscription()[0]) == 3
    shown = tagged.get_attributes()
    assert (shown.endpoint, shown.filter_tag, shown.notify_strategy) == (endpoint, "red", "EXPONENTIAL_DECAY_RETRY")
    assert shown.topic_owner == "000000000000"
    assert plain.get_attributes().filter_tag == ""
    tagged.set_attributes(SubscriptionMeta(notify_strategy="BACKOFF_RETRY"))
    assert tagged.get_attributes().notify_strategy == "BACKOFF_RETRY"
    queue.set_encoding(False)
    assert topic.publish_message(TopicMessage("untagged")).message_id
    topic.publish_message(TopicMessage("tagged", "red"))
    bodies = [message.message_body for message in queue.batch_receive_message(16, 0)]
    assert bodies == ["untagged", "tagged", "tagged"]
    topic.publish_message(Base64TopicMessage("encoded", "blue"))
    queue.set_encoding(True)
    assert queue.receive_message(0).message_body == b"encoded"
    assert topic.get_attributes().message_count == 3
    tagged.unsubscribe()
    assert code_of(tagged.get_attributes) == "SubscriptionNotExist"
    assert len(account.list_topic(name)[0]) == 1
    topic.delete()
    assert code_of(topic.get_attributes) == "TopicNotExist"
    assert code_of(topic.publish_message, TopicMessage("x")) == "TopicNotExist"


def test_account_attributes(account: Any) -> None:
    account.set_attributes(AccountMeta("bucket"))
    assert account.get_attributes().logging_bucket == "bucket"
    account.set_attributes(AccountMeta(""))
    assert account.get_attributes().logging_bucket == ""
    account.open_service()


def test_dead_letter_policies_do_not_confuse_the_sdk(
    shared: ServerProcess, account: Any, queue: Any, name: str
) -> None:
    account.get_queue(f"{name}-dead").create(QueueMeta())
    connection = HTTPConnection(shared.mns.removeprefix("http://"))
    policy = f"<DeadLetterTargetQueue>{name}-dead</DeadLetterTargetQueue><MaxReceiveCount>2</MaxReceiveCount>"
    connection.request("PUT", f"/queues/{name}?metaoverride=true", f"<Queue><DlqPolicy>{policy}</DlqPolicy></Queue>")
    assert connection.getresponse().status == 204
    connection.close()
    assert queue.get_attributes().queue_name == name
    assert account.list_queue(name)[0]


def test_keys_are_checked(start: Any, credentials: Path, key: tuple[str, str], open_account: Open) -> None:
    server = start("--credentials", str(credentials))
    account = open_account(server, *key)
    queue = account.get_queue("orders")
    queue.create(QueueMeta())
    queue.send_message(Message("secret"))
    topic = account.get_topic("news")
    topic.create(TopicMeta())
    topic.get_subscription("s").subscribe(SubscriptionMeta("acs:mns:r:1:queues/orders"))
    assert topic.get_subscription("s").get_attributes().topic_owner == "111111111111"
    refused = {
        "InvalidAccessKeyId": ("AKIDNOBODY", key[1]),
        "SignatureDoesNotMatch": (key[0], "another secret"),
        "QueueNotExist": ("AKIDOTHER00000000001", key[1]),
    }
    for code, (key_id, secret) in refused.items():
        assert code_of(open_account(server, key_id, secret).get_queue("orders").get_attributes) == code
    reader = open_account(server, "AKIDREADER0000000001", key[1]).get_queue("orders")
    assert reader.receive_message(0).message_body == b"secret"
    assert code_of(reader.send_message, Message("x")) == "AccessDenied"
    # Unescaped in the target, but signed: the SDK sends what it signs.
    assert code_of(queue.delete_message, "1-ODU4OTkzNDU5My0xNTI0MTIzMzQ4LTEtOA==") == "ReceiptHandleError"
    assert code_of(queue.change_message_visibility, "a+b/c=", 30) == "ReceiptHandleError"


@pytest.mark.slow
def test_a_full_house_answers_at_once(start: Any, open_account: Open) -> None:
    server = start("--parked-per-account-max", "1")
    queue = open_account(server).get_queue("q")
    queue.create(QueueMeta())
    waiter = open_account(server).get_queue("q")
    got: list[Any] = []

    def wait() -> None:
        # Until it is the one that is parked.
        while not got:
            with contextlib.suppress(MNSServerException):
                got.append(waiter.receive_message(30))

    parked = threading.Thread(target=wait)
    parked.start()
    # As soon as somebody else is parked, a wait of two seconds is cut short.
    for _ in range(10):
        began = time.monotonic()
        assert code_of(queue.receive_message, 2) == "MessageNotExist"
        if time.monotonic() - began < 1.5:
            break
    else:
        pytest.fail("no receive was cut short")
    queue.send_message(Message("wake"))
    parked.join(40)
    assert got[0].message_body == b"wake"


def test_a_queues_own_wait_counts_unless_the_receive_names_one(shared: ServerProcess, account: Any, name: str) -> None:
    queue = account.get_queue(name)
    queue.create(QueueMeta(polling_wait_sec=30))
    assert code_of(queue.receive_message, 0) == "MessageNotExist"
    sender = Account(shared.mns, "id", "secret")
    timer = threading.Timer(0.2, lambda: sender.get_queue(name).send_message(Message("late")))
    timer.start()
    assert queue.receive_message().message_body == b"late"
    timer.join()
    sender.get_client().close_connection()


def test_a_server_that_is_gone_is_a_network_error(start: Any, open_account: Open) -> None:
    server = start()
    queue = open_account(server).get_queue("q")
    queue.create(QueueMeta())
    server.kill()
    with pytest.raises(MNSClientNetworkException):
        queue.send_message(Message("x"))


MNSCMD = Path(sysconfig.get_path("scripts")) / "mnscmd"


@pytest.mark.slow
def test_mnscmd(shared: ServerProcess, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(MNSCMD), *arguments],
            env=os.environ | {"HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Exception" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done.stdout

    run("config", f"--mnsendpoint={shared.mns}", "--accesskeyid=id", "--accesskeysecret=secret")
    run("createqueue", "--queuename=cmd", "--vistimeout=40")
    assert "40" in run("getqueueattr", "--queuename=cmd")
    run("setqueueattr", "--queuename=cmd", "--vistimeout=50")
    assert f"{shared.mns}/queues/cmd" in run("listqueue", "--prefix=cmd")
    run("sendmessage", "--queuename=cmd", "--body=hello", "--priority=2")
    assert "hello" in run("peekmessage", "--queuename=cmd")
    told = run("receivemessage", "--queuename=cmd")
    assert "hello" in told
    handle = next(line.split(":")[1].strip() for line in told.splitlines() if "ReceiptHandle" in line)
    told = run("changevisibility", "--queuename=cmd", f"--handle={handle}", "--vistimeout=60")
    handle = next(line.split(":")[1].strip() for line in told.splitlines() if "ReceiptHandle" in line)
    run("deletemessage", "--queuename=cmd", f"--handle={handle}")
    run("createtopic", "--topicname=cmd")
    run("subscribe", "--topicname=cmd", "--subname=s", "--endpoint=acs:mns:r:1:queues/cmd",
        "--notifycontentformat=SIMPLIFIED")  # fmt: skip
    assert "acs:mns:r:1:queues/cmd" in run("getsubattr", "--topicname=cmd", "--subname=s")
    run("publishmessage", "--topicname=cmd", "--body=news", "--base64=False")
    assert "news" in run("receivemessage", "--queuename=cmd", "--base64=False")
    assert "cmd" in run("listtopic")
    assert "subscriptions/s" in run("listsub", "--topicname=cmd")
    run("unsubscribe", "--topicname=cmd", "--subname=s")
    run("deletetopic", "--topicname=cmd")
    run("setaccountattr", "--loggingbucket=logs")
    assert "logs" in run("getaccountattr")
    run("deletequeue", "--queuename=cmd")
