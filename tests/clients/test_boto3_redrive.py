"""Move tasks, shared queues and what an operator can configure, through boto3 and a real server."""

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from veilmq.testing.local import LocalServer

OWNER = "111111111111"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalServer]:
    """A development server whose clock moves."""
    server = LocalServer(tmp_path)
    yield server
    server.stop()


def _arn(name: str, account: str = "000000000000") -> str:
    return f"arn:aws:sqs:us-east-1:{account}:{name}"


def _code(call: Any, **given: Any) -> str:
    with pytest.raises(ClientError) as raised:
        call(**given)
    return str(raised.value.response["Error"]["Code"])


def _try(call: Any) -> str | None:
    try:
        call()
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return None


def test_dead_letters_go_back_over_a_kill_of_the_server(local: LocalServer, connect: Any) -> None:
    sqs = connect(local.process)
    dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
    redrive = json.dumps({"deadLetterTargetArn": _arn("dead"), "maxReceiveCount": 1})
    jobs = sqs.create_queue(QueueName="jobs", Attributes={"RedrivePolicy": redrive})["QueueUrl"]
    for number in range(5):
        sqs.send_message(QueueUrl=jobs, MessageBody=str(number))
        sqs.receive_message(QueueUrl=jobs, VisibilityTimeout=0)
    sqs.receive_message(QueueUrl=jobs)
    sources = sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"]
    assert sources == [jobs]
    sqs.start_message_move_task(SourceArn=_arn("dead"), MaxNumberOfMessagesPerSecond=1)

    def task() -> Any:
        return sqs.list_message_move_tasks(SourceArn=_arn("dead"))["Results"][0]

    while task()["ApproximateNumberOfMessagesMoved"] < 2:
        local.advance(seconds=1)
    assert task()["Status"] == "RUNNING"
    local.process.kill()
    local.process.start()
    sqs = connect(local.process)
    moved = task()["ApproximateNumberOfMessagesMoved"]
    assert moved >= 2
    while task()["Status"] == "RUNNING":
        local.advance(seconds=1)
    assert (task()["Status"], task()["ApproximateNumberOfMessagesMoved"]) == ("COMPLETED", 5)
    jobs = sqs.get_queue_url(QueueName="jobs")["QueueUrl"]
    messages = sqs.receive_message(QueueUrl=jobs, MaxNumberOfMessages=10)["Messages"]
    assert [each["Body"] for each in messages] == ["0", "1", "2", "3", "4"]


def test_a_task_that_takes_longer_than_36_hours_fails(local: LocalServer, connect: Any) -> None:
    sqs = connect(local.process)
    dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
    redrive = json.dumps({"deadLetterTargetArn": _arn("dead"), "maxReceiveCount": 1})
    sqs.create_queue(QueueName="jobs", Attributes={"RedrivePolicy": redrive})
    for number in range(3):
        sqs.send_message(QueueUrl=dead, MessageBody=str(number))
    sqs.create_queue(QueueName="third")
    given = {"SourceArn": _arn("dead"), "DestinationArn": _arn("third"), "MaxNumberOfMessagesPerSecond": 1}
    sqs.start_message_move_task(**given)
    local.advance(seconds=36 * 3_600)
    (task,) = sqs.list_message_move_tasks(SourceArn=_arn("dead"))["Results"]
    assert (task["Status"], task["FailureReason"]) == ("FAILED", "TaskDurationExceeded")
    assert "TaskHandle" not in task
    assert task["ApproximateNumberOfMessagesMoved"] < 3
    sqs.start_message_move_task(**given)


def test_a_waiting_receiver_gets_what_is_moved(local: LocalServer, connect: Any) -> None:
    sqs = connect(local.process)
    dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
    redrive = json.dumps({"deadLetterTargetArn": _arn("dead"), "maxReceiveCount": 1})
    sqs.create_queue(QueueName="jobs", Attributes={"RedrivePolicy": redrive})
    target = sqs.create_queue(QueueName="target")["QueueUrl"]
    sqs.send_message(QueueUrl=dead, MessageBody="x")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(connect(local.process).receive_message, QueueUrl=target, WaitTimeSeconds=20)
        sqs.start_message_move_task(SourceArn=_arn("dead"), DestinationArn=_arn("target"))
        local.advance(seconds=1)
        assert waiting.result(timeout=15)["Messages"][0]["Body"] == "x"


def test_a_queue_is_shared_with_another_account(start: Any, connect: Any, credentials: Path, key: Any) -> None:
    server = start("--credentials", str(credentials))
    owner, friend = connect(server, *key), connect(server, "AKIDOTHER00000000001", key[1])
    reader = connect(server, "AKIDREADER0000000001", key[1])
    url = owner.create_queue(QueueName="orders")["QueueUrl"]
    assert _code(friend.send_message, QueueUrl=url, MessageBody="x").startswith("AccessDenied")
    owner.add_permission(
        QueueUrl=url, Label="friend", AWSAccountIds=["222222222222"], Actions=["SendMessage", "GetQueueUrl"]
    )
    assert friend.get_queue_url(QueueName="orders", QueueOwnerAWSAccountId=OWNER)["QueueUrl"] == url
    friend.send_message(QueueUrl=url, MessageBody="x")
    assert _code(friend.receive_message, QueueUrl=url).startswith("AccessDenied")
    assert owner.receive_message(QueueUrl=url)["Messages"][0]["Body"] == "x"
    # A key of the owner's account needs its grant as ever.
    assert _code(reader.tag_queue, QueueUrl=url, Tags={"a": "b"}).startswith("AccessDenied")
    assert "AccessDenied" in _code(reader.start_message_move_task, SourceArn=_arn("orders", OWNER))


def test_throttling_and_kms_faults_are_configured(start: Any, connect: Any) -> None:
    server = start("--simulate", "kms-fault=alias/old=disabled,kms-fault=alias/gone=not-found")
    sqs = connect(server)
    for name, code in (("old", "KMS.DisabledException"), ("gone", "KMS.NotFoundException")):
        url = sqs.create_queue(QueueName=name, Attributes={"KmsMasterKeyId": f"alias/{name}"})["QueueUrl"]
        assert _code(sqs.send_message, QueueUrl=url, MessageBody="x") == code
        assert _code(sqs.receive_message, QueueUrl=url) == code
    url = sqs.create_queue(QueueName="fine", Attributes={"KmsMasterKeyId": "alias/fine"})["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="x")
    assert server.stop() == 0
    throttled = start("--requests-per-second-max", "1")
    sqs = connect(throttled)
    # One a second: whoever asks without a pause is refused sooner or later, however slow the machine.
    codes = {_try(sqs.list_queues) for _ in range(100)}
    assert codes == {None, "RequestThrottled"}


def test_queue_urls_by_external_url_and_by_region_in_the_host(start: Any, connect: Any) -> None:
    server = start("--external-url", "https://queues.example/sqs")
    sqs = connect(server)
    url = sqs.create_queue(QueueName="jobs")["QueueUrl"]
    assert url == "https://queues.example/sqs/000000000000/jobs"
    assert server.stop() == 0
    server = start("--base-domain", "queues.example")
    address = urlsplit(server.sqs)
    for region in ("us-east-1", "eu-west-1"):
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        headers = {
            "Host": f"sqs.{region}.queues.example",
            "X-Amz-Target": "AmazonSQS.CreateQueue",
            "Content-Type": "application/x-amz-json-1.0",
        }
        connection.request("POST", "/", json.dumps({"QueueName": f"in-{region}"}), headers)
        answer = json.loads(connection.getresponse().read())
        assert answer == {"QueueUrl": f"http://sqs.{region}.queues.example/000000000000/in-{region}"}
        connection.close()
        (found,) = connect(server, region=region).list_queues(QueueNamePrefix="in-")["QueueUrls"]
        assert found.endswith(f"/in-{region}")


@pytest.mark.parametrize(
    ("options", "start_of_url"),
    [
        (("--sqs-endpoint-strategy", "standard"), "http://sqs.{region}.localhost:{port}"),
        (("--sqs-endpoint-strategy", "path"), "http://127.0.0.1:{port}/queue/{region}"),
    ],
)
def test_queue_urls_carry_the_region(start: Any, connect: Any, options: tuple[str, ...], start_of_url: str) -> None:
    server = start(*options)
    port = urlsplit(server.sqs).port
    clients = {region: connect(server, region=region) for region in ("us-east-1", "eu-west-1")}
    urls = {}
    for region, client in clients.items():
        urls[region] = client.create_queue(QueueName="jobs")["QueueUrl"]
        assert urls[region] == start_of_url.format(region=region, port=port) + "/000000000000/jobs"
        client.send_message(QueueUrl=urls[region], MessageBody=region)
    clients["eu-west-1"].send_message(QueueUrl=urls["us-east-1"], MessageBody="us-east-1")
    for region, client in clients.items():
        received = client.receive_message(QueueUrl=urls[region], MaxNumberOfMessages=10).get("Messages", [])
        assert {message["Body"] for message in received} == {region}
    # The Query form is sent to the queue's own URL.
    address = urlsplit(urls["eu-west-1"])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    form = "Action=GetQueueAttributes&AttributeName.1=QueueArn"
    headers = {"Host": address.netloc, "Content-Type": "application/x-www-form-urlencoded"}
    connection.request("POST", address.path, form, headers)
    assert b"arn:aws:sqs:eu-west-1:000000000000:jobs" in connection.getresponse().read()
    connection.close()


def test_a_listed_web_page_may_ask_and_another_may_not(start: Any) -> None:
    server = start("--cors-origins", "https://app.example")
    address = urlsplit(server.sqs)
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-amz-target,authorization"}
    for origin, status in (("https://app.example", 204), ("https://evil.example", 403)):
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        connection.request("OPTIONS", "/", headers={"Origin": origin, **asked})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
        if status == 204:
            assert answer.headers["Access-Control-Allow-Origin"] == origin
            assert "POST" in answer.headers["Access-Control-Allow-Methods"]
            assert "x-amz-target" in answer.headers["Access-Control-Allow-Headers"]
        headers = {"Origin": origin, "X-Amz-Target": "AmazonSQS.ListQueues"}
        connection.request("POST", "/", "{}", headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == (200 if status == 204 else 403)
        if status == 204:
            assert answer.headers["Access-Control-Allow-Origin"] == origin
            assert "x-amzn-RequestId" in answer.headers["Access-Control-Expose-Headers"]
        connection.close()
