"""One queue through several protocols: one lease, one receive count, stale handles fenced everywhere."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from azure.core.exceptions import HttpResponseError
from azure.storage.queue import QueueServiceClient
from botocore.exceptions import ClientError
from mns.account import Account
from mns.message_property import MessagePropertyValue, MessageSystemPropertyValue
from mns.mns_exception import MNSServerException
from mns.queue import Message, QueueMeta

from veilmq.testing.local import ServerProcess

# The SDK of MNS calls its own deprecated setters whenever it reads the attributes of a queue.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")

AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that all three allow."""
    return "".join(each if each.isalnum() else "-" for each in request.node.name)[:60].strip("-").lower()


@pytest.fixture
def mns(shared: ServerProcess, name: str) -> Iterator[Any]:
    """The MNS queue, its bodies not encoded."""
    account = Account(shared.mns, "anybody", "secret")
    queue = account.get_queue(name)
    queue.set_encoding(False)
    queue.create(QueueMeta(vis_timeout=30))
    yield queue
    account.get_client().close_connection()


@pytest.fixture
def url(mns: Any, sqs: Any, name: str) -> str:
    return str(sqs.get_queue_url(QueueName=name)["QueueUrl"])


@pytest.fixture
def azure(shared: ServerProcess, mns: Any, name: str) -> Iterator[Any]:
    service = QueueServiceClient(
        f"{shared.azure}/devstoreaccount1", credential={"account_name": "devstoreaccount1", "account_key": AZURE_KEY}
    )
    with service.get_queue_client(name) as client:
        yield client
    service.close()


def receive_sqs(sqs: Any, url: str, **how: Any) -> Any:
    (message,) = sqs.receive_message(QueueUrl=url, MessageSystemAttributeNames=["All"], **how)["Messages"]
    return message


def stale(call: Any) -> str:
    with pytest.raises((MNSServerException, ClientError, HttpResponseError)) as caught:
        call()
    return type(caught.value).__name__


def test_a_queue_is_seen_by_both_with_one_set_of_settings(sqs: Any, mns: Any, url: str) -> None:
    assert url.split("/")[-2] == "000000000000"
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "77", "DelaySeconds": "3"})
    got = mns.get_attributes()
    assert (got.visibility_timeout, got.delay_seconds) == (77, 3)
    mns.set_attributes(QueueMeta(vis_timeout=88))
    assert sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]["VisibilityTimeout"] == "88"


def test_a_lease_taken_by_one_is_respected_by_the_other(sqs: Any, mns: Any, url: str) -> None:
    mns.send_message(Message("a\u00fc<&>", priority=8))
    message = receive_sqs(sqs, url)
    assert (message["Body"], message["Attributes"]["ApproximateReceiveCount"]) == ("a\u00fc<&>", "1")
    with pytest.raises(MNSServerException, match="MessageNotExist"):
        mns.receive_message(0)
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0)
    got = mns.receive_message(0)
    assert (got.dequeue_count, got.message_body) == (2, "a\u00fc<&>")
    assert got.message_id == message["MessageId"].replace("-", "").upper()
    assert "Messages" not in sqs.receive_message(QueueUrl=url)
    # The handle of the first lease is fenced: SQS takes the delete and deletes nothing.
    stale(
        lambda: sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=9)
    )
    sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    assert mns.get_attributes().inactive_messages == 1
    # One handle is good for every protocol, until it is rotated.
    changed = mns.change_message_visibility(got.receipt_handle, 30)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=got.receipt_handle)
    assert mns.get_attributes().inactive_messages == 1
    sqs.delete_message(QueueUrl=url, ReceiptHandle=changed.receipt_handle)
    assert mns.get_attributes().inactive_messages == 0
    assert stale(lambda: mns.delete_message(changed.receipt_handle)) == "MNSServerException"


def test_priorities_hold_for_all(sqs: Any, mns: Any, url: str) -> None:
    sqs.send_message(QueueUrl=url, MessageBody="usual")
    mns.send_message(Message("late", priority=16))
    mns.send_message(Message("urgent", priority=1))
    got = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    assert [message["Body"] for message in got] == ["urgent", "usual", "late"]


def test_properties_and_attributes_are_one(sqs: Any, mns: Any, url: str) -> None:
    message = Message("x", message_group_id="tenant")
    message.set_user_properties(
        {"n": MessagePropertyValue.create_number(7), "raw": MessagePropertyValue.create_binary(b"\x00\x01")}
    )
    message.add_system_property("traceparent", MessageSystemPropertyValue("STRING", "00-1-2-01"))
    mns.send_message(message)
    got = receive_sqs(sqs, url, MessageAttributeNames=["All"])
    assert got["MessageAttributes"] == {
        "n": {"StringValue": "7", "DataType": "Number"},
        "raw": {"BinaryValue": b"\x00\x01", "DataType": "Binary"},
        "traceparent": {"StringValue": "00-1-2-01", "DataType": "String"},
    }
    assert got["Attributes"]["MessageGroupId"] == "tenant"
    sqs.send_message(
        QueueUrl=url, MessageBody="y", MessageAttributes={"s": {"DataType": "String.own", "StringValue": "v"}}
    )
    assert mns.receive_message(0).user_properties["s"].get_string_value_by_type() == "v"


def test_a_message_walks_through_all_three(sqs: Any, mns: Any, azure: Any, url: str) -> None:
    put = azure.send_message("walk")
    identity = put.id.replace("-", "").upper()
    by_mns = mns.receive_message(0)
    assert (by_mns.message_id, by_mns.message_body, by_mns.dequeue_count) == (identity, "walk", 1)
    # The put's receipt and everybody's older handle are stale from now on.
    stale(lambda: azure.delete_message(put.id, put.pop_receipt))
    released = mns.change_message_visibility(by_mns.receipt_handle, 1)
    by_sqs = receive_sqs(sqs, url, WaitTimeSeconds=5)
    assert by_sqs["Attributes"]["ApproximateReceiveCount"] == "2"
    for handle in (by_mns.receipt_handle, released.receipt_handle):
        assert stale(lambda handle=handle: mns.change_message_visibility(handle, 30)) == "MNSServerException"
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=by_sqs["ReceiptHandle"], VisibilityTimeout=0)
    (by_azure,) = list(azure.receive_messages(max_messages=1))
    assert (by_azure.id, by_azure.dequeue_count, by_azure.content) == (put.id, 3, "walk")
    stale(
        lambda: sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=by_sqs["ReceiptHandle"], VisibilityTimeout=9)
    )
    updated = azure.update_message(by_azure, content="walked", visibility_timeout=1)
    last = mns.receive_message(5)
    assert (last.message_body, last.dequeue_count, last.message_id) == ("walked", 4, identity)
    stale(lambda: azure.delete_message(put.id, updated.pop_receipt))
    mns.delete_message(last.receipt_handle)
    assert azure.get_queue_properties().approximate_message_count == 0
    assert "Messages" not in sqs.receive_message(QueueUrl=url)


def test_base64_of_one_sdk_is_what_the_others_see(sqs: Any, mns: Any, url: str) -> None:
    mns.set_encoding(True)
    mns.send_message(Message("hello"))
    assert receive_sqs(sqs, url)["Body"] == base64.b64encode(b"hello").decode()


def test_a_queue_with_a_name_of_sqs_alone_is_not_there(shared: ServerProcess, sqs: Any) -> None:
    sqs.create_queue(QueueName="Only_for_sqs")
    account = Account(shared.mns, "anybody", "secret")
    assert account.list_queue("Only")[0] == []
    with pytest.raises(MNSServerException, match="InvalidQueueName"):
        account.get_queue("Only_for_sqs").get_attributes()
    account.get_client().close_connection()


def test_an_alias_names_a_queue_in_endpoints_and_policies(shared: ServerProcess, sqs: Any) -> None:
    urls = {name: sqs.create_queue(QueueName=name)["QueueUrl"] for name in ("Copies_of_news", "Dead_news")}
    token = {"Authorization": f"Bearer {(shared.data / 'admin-token').read_text().strip()}"}
    for name, alias in (("Copies_of_news", "alias-copies"), ("Dead_news", "alias-dead")):
        settings = f"{shared.admin}/api/v1/queues/000000000000/us-east-1/{name}"
        assert httpx.patch(settings, json={"alias": alias}, headers=token).status_code == 200
    dead = "<DlqPolicy><DeadLetterTargetQueue>{}</DeadLetterTargetQueue>{}</DlqPolicy>".format
    arn = "acs:mns:us-east-1:000000000000:queues/alias-{}".format
    with httpx.Client(base_url=shared.mns) as mns:
        assert mns.put("/topics/aliased").status_code == 201
        path, inside = "/topics/aliased/subscriptions/s", "<NotifyContentFormat>SIMPLIFIED</NotifyContentFormat>"
        inside += f"<Endpoint>{arn('copies')}</Endpoint>{dead('alias-dead', '')}"
        for status in (201, 204):
            assert mns.put(path, content=f"<Subscription>{inside}</Subscription>").status_code == status
        assert f"<Endpoint>{arn('copies')}</Endpoint>" in mns.get(path).text
        message = "<Message><MessageBody>news</MessageBody></Message>"
        assert mns.post("/topics/aliased/messages", content=message).status_code == 201
        assert receive_sqs(sqs, urls["Copies_of_news"], VisibilityTimeout=0)["Body"] == "news"
        change = f"<Subscription>{dead('alias-dead', '')}</Subscription>"
        assert mns.put(f"{path}?metaoverride=true", content=change).status_code == 204
        policy = dead(arn("dead"), "<MaxReceiveCount>1</MaxReceiveCount>")
        for target in ("/queues/alias-copies?metaoverride=true", "/queues/made-with-an-alias"):
            assert mns.put(target, content=f"<Queue>{policy}</Queue>").status_code in {201, 204}
        assert mns.get("/queues/alias-copies/messages").status_code == 404, "it was received already"
        assert receive_sqs(sqs, urls["Dead_news"])["Body"] == "news"
        assert mns.get("/queues/alias-copies").status_code == 200
        missing = mns.put(f"{path}2", content=f"<Subscription><Endpoint>{arn('none')}</Endpoint></Subscription>")
        assert (missing.status_code, "QueueNotExist" in missing.text) == (404, True)


def test_what_other_protocols_may_send_spoils_no_batch(sqs: Any, mns: Any, url: str, azure: Any) -> None:
    """The SDK takes an empty body, and a boolean that is none, for a damaged answer, and loses all of its messages."""
    azure.send_message("")
    flag = {"flag": {"DataType": "String.Boolean", "StringValue": "yes"}}
    sqs.send_message(QueueUrl=url, MessageBody="flagged", MessageAttributes=flag)
    sqs.send_message(QueueUrl=url, MessageBody="plain")
    assert [message.message_body for message in mns.batch_peek_message(16)] == ["", "flagged", "plain"]
    assert [message.message_body for message in mns.batch_receive_message(16, 0)] == ["", "flagged", "plain"]


def test_sqs_lists_the_queues_that_it_can_name(sqs: Any, shared: ServerProcess, mns: Any, name: str) -> None:
    """MNS allows 120 characters, and SQS 80: a page that ended at such a name was the last one."""
    account = Account(shared.mns, "anybody", "secret")
    account.get_queue(f"{name}-".ljust(100, "n")).create(QueueMeta())
    sqs.create_queue(QueueName=f"{name}-z")
    pages = sqs.get_paginator("list_queues").paginate(QueueNamePrefix=name, PaginationConfig={"PageSize": 1})
    urls = [each for page in pages for each in page.get("QueueUrls", [])]
    assert [each.rpartition("/")[2] for each in urls] == [name, f"{name}-z"]
    account.get_client().close_connection()
