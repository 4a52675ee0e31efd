"""The server around the queues: keys, kills, shut-down, hang-ups, seen through boto3 and raw sockets."""

import http.client
import json
import socket
import threading
import time
import urllib.request
from base64 import b64encode
from hashlib import md5
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess


def test_signatures_are_checked(start: Any, connect: Any, credentials: Path, key: Any) -> None:
    server = start("--credentials", str(credentials))
    url = connect(server, *key).create_queue(QueueName="orders")["QueueUrl"]
    assert "/111111111111/orders" in url
    for name, secret, code in (
        (key[0], "another secret", "SignatureDoesNotMatch"),
        ("AKIDNOBODY", key[1], "InvalidClientTokenId"),
    ):
        with pytest.raises(ClientError) as raised:
            connect(server, name, secret).send_message(QueueUrl=url, MessageBody="x")
        assert raised.value.response["Error"]["Code"] == code
        assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_grants_and_accounts_are_kept(start: Any, connect: Any, credentials: Path, key: Any) -> None:
    server = start("--credentials", str(credentials))
    owner = connect(server, *key)
    url = owner.create_queue(QueueName="orders")["QueueUrl"]
    hidden = owner.create_queue(QueueName="payroll")["QueueUrl"]
    reader = connect(server, "AKIDREADER0000000001", key[1])
    assert "Messages" not in reader.receive_message(QueueUrl=url)
    for client, operation, given in (
        (reader, "send_message", {"QueueUrl": url, "MessageBody": "x"}),
        (reader, "receive_message", {"QueueUrl": hidden}),
        (reader, "list_queues", {}),
        (connect(server, "AKIDOTHER00000000001", key[1]), "receive_message", {"QueueUrl": url}),
    ):
        with pytest.raises(ClientError) as raised:
            getattr(client, operation)(**given)
        assert "AccessDenied" in raised.value.response["Error"]["Code"]
    lister = connect(server, "AKIDLISTER0000000001", key[1])
    listed = lister.list_queues(MaxResults=1)
    assert (listed["QueueUrls"], listed.get("NextToken")) == ([hidden], None), "only what the grant names"
    policy = json.dumps({"deadLetterTargetArn": "arn:aws:sqs:us-east-1:111111111111:orders", "maxReceiveCount": 3})
    for source in (hidden, owner.create_queue(QueueName="bonus")["QueueUrl"]):
        owner.set_queue_attributes(QueueUrl=source, Attributes={"RedrivePolicy": policy})
    assert lister.list_dead_letter_source_queues(QueueUrl=url)["queueUrls"] == [hidden]


def test_credentials_are_reloaded_and_a_bad_file_changes_nothing(
    start: Any, connect: Any, credentials: Path, key: Any, reload: Any
) -> None:
    server = start("--credentials", str(credentials))
    text = credentials.read_text()
    credentials.write_text("this is [not TOML")
    reload(server)
    connect(server, *key).list_queues()
    credentials.write_text(text.replace(key[1], "rotated"))
    reload(server)
    connect(server, key[0], "rotated").list_queues()
    with pytest.raises(ClientError, match="signature"):
        connect(server, *key).list_queues()


def test_a_deny_binds_the_owner_after_a_restart_too(start: Any, connect: Any, credentials: Path, key: Any) -> None:
    server = start("--credentials", str(credentials))
    sqs = connect(server, *key)
    url = sqs.create_queue(QueueName="guarded")["QueueUrl"]
    deny = {"Effect": "Deny", "Principal": "*", "Action": "sqs:PurgeQueue", "Resource": "*"}
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps({"Statement": deny})})
    sqs.send_message(QueueUrl=url, MessageBody="kept")
    for _ in range(2):
        with pytest.raises(ClientError, match="with an explicit deny in a resource-based policy"):
            sqs.purge_queue(QueueUrl=url)
        server.kill()
        server.start()
        sqs = connect(server, *key)
        url = sqs.get_queue_url(QueueName="guarded")["QueueUrl"]
    assert [message["Body"] for message in sqs.receive_message(QueueUrl=url)["Messages"]] == ["kept"]
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": ""})
    sqs.purge_queue(QueueUrl=url)


def test_a_kill_loses_nothing_that_was_acknowledged(start: Any, connect: Any) -> None:
    server = start()
    sqs = connect(server)
    url = sqs.create_queue(QueueName="q", Attributes={"VisibilityTimeout": "600"})["QueueUrl"]
    for i in range(20):
        sqs.send_message(QueueUrl=url, MessageBody=str(i))
    held = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    for message in held[:5]:
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    server.kill()
    server.start()
    sqs = connect(server)
    url = sqs.get_queue_url(QueueName="q")["QueueUrl"]
    rest = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    assert sorted(int(each["Body"]) for each in rest) == list(range(10, 20))
    # The leases of before the kill stand, and their handles still delete.
    for message in held[5:]:
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    counts = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert counts["ApproximateNumberOfMessages"] == "0"
    assert counts["ApproximateNumberOfMessagesNotVisible"] == "10"


def test_shut_down_answers_the_parked_receives(start: Any, connect: Any) -> None:
    server = start()
    url = connect(server).create_queue(QueueName="q")["QueueUrl"]
    answers: list[dict[str, Any]] = []
    client = connect(server)
    waiting = threading.Thread(target=lambda: answers.append(client.receive_message(QueueUrl=url, WaitTimeSeconds=20)))
    waiting.start()
    _await_parked(server)
    assert server.stop() == 0
    waiting.join(5)
    assert [each["ResponseMetadata"]["HTTPStatusCode"] for each in answers] == [200]
    assert "Messages" not in answers[0]


def test_a_client_that_hangs_up_takes_its_parked_receive_with_it(start: Any, connect: Any) -> None:
    server = start()
    sqs = connect(server)
    url = sqs.create_queue(QueueName="q", Attributes={"VisibilityTimeout": "600"})["QueueUrl"]
    target = urlsplit(server.sqs)
    body = json.dumps({"QueueUrl": url, "WaitTimeSeconds": 20}).encode()
    with socket.create_connection((target.hostname, target.port)) as raw:
        raw.sendall(
            b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
            b"Content-Type: application/x-amz-json-1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        _await_parked(server)
    _await_parked(server, 0)
    sqs.send_message(QueueUrl=url, MessageBody="for the living")
    (message,) = sqs.receive_message(QueueUrl=url, AttributeNames=["All"])["Messages"]
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"


def test_a_client_that_ends_its_input_gets_its_answer(start: Any, connect: Any) -> None:
    server = start()
    sqs = connect(server)
    url = sqs.create_queue(QueueName="q")["QueueUrl"]
    target = urlsplit(server.sqs)

    def ask(operation: str, parked: bool = False, **given: Any) -> Any:
        body = json.dumps({"QueueUrl": url, **given}).encode()
        with socket.create_connection((target.hostname, target.port), timeout=30) as raw:
            raw.sendall(
                b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.%s\r\n"
                b"Content-Type: application/x-amz-json-1.0\r\nContent-Length: %d\r\n\r\n%s"
                % (operation.encode(), len(body), body)
            )
            if parked:
                _await_parked(server)
            raw.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: raw.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.1 200 ")
        return json.loads(answer.partition(b"\r\n\r\n")[2])

    assert ask("ReceiveMessage", parked=True, WaitTimeSeconds=20) == {}
    assert "MessageId" in ask("SendMessage", MessageBody="x")
    assert [each["Body"] for each in ask("ReceiveMessage", WaitTimeSeconds=20)["Messages"]] == ["x"]
    assert ask("ReceiveMessage", WaitTimeSeconds=20) == {}


def test_declared_queues_are_there_and_a_restart_changes_nothing(start: Any, connect: Any, tmp_path: Path) -> None:
    declared = tmp_path / "queues.toml"
    declared.write_text(
        '[[queue]]\nname = "dead"\n[[queue]]\nname = "orders"\nvisibility_timeout = "45s"\n'
        'dead_letter = { queue = "dead", receive_count_max = 3 }\n'
    )
    server = start("--queues", str(declared))
    for _ in range(2):
        sqs = connect(server)
        url = sqs.get_queue_url(QueueName="orders")["QueueUrl"]
        shown = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert shown["VisibilityTimeout"] == "45"
        assert json.loads(shown["RedrivePolicy"])["deadLetterTargetArn"].endswith(":dead")
        assert server.stop() == 0
        server.start()


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        (b"localhost:1", None, 200),
        (b"queues.localhost", b"http://queues.localhost", 200),
        (b"evil.example", None, 403),
        (b"127.0.0.1.evil.example", None, 403),
        (b"127.0.0.1", b"http://evil.example", 403),
    ],
)
def test_a_web_page_cannot_drive_a_development_server(
    shared: ServerProcess, host: bytes, origin: bytes | None, status: int
) -> None:
    target = urlsplit(shared.sqs)
    with socket.create_connection((target.hostname, target.port or 0), timeout=10) as raw:
        raw.sendall(
            b"POST / HTTP/1.1\r\nHost: %s\r\nX-Amz-Target: AmazonSQS.ListQueues\r\nContent-Length: 2\r\n"
            b"Content-Type: application/x-amz-json-1.0\r\nConnection: close\r\n%s\r\n{}"
            % (host, b"Origin: %s\r\n" % origin if origin else b"")
        )
        assert b"".join(iter(lambda: raw.recv(65_536), b"")).startswith(b"HTTP/1.1 %d" % status)


@pytest.fixture
def with_origin(start: Any) -> ServerProcess:
    """A development server that pages of one origin may ask."""
    server: ServerProcess = start("--cors-origins", "https://app.example")
    return server


@for_each(
    ("origin", "site", "status"),
    [
        ("", "cross-site", 403),  # an image or a link of any page: a browser sends no Origin with its GET
        ("", "same-site", 403),
        ("", "same-origin", 200),
        ("", "none", 403),  # a URL that somebody typed, or where a redirect of the typed one leads
        ("https://app.example", "cross-site", 200),
    ],
)
def test_an_image_or_link_of_a_web_page_asks_nothing_of_a_development_server(
    with_origin: ServerProcess, origin: str, site: str, status: int
) -> None:
    headers = {"Sec-Fetch-Site": site} | ({"Origin": origin} if origin else {})
    for url in (f"{with_origin.sqs}/?Action=ListQueues", f"{with_origin.mns}/queues"):
        if origin and url.startswith(with_origin.mns):
            continue  # the setting is one of SQS
        address = urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
        connection.request("GET", url.removeprefix(f"{address.scheme}://{address.netloc}"), headers=headers)
        assert connection.getresponse().status == status
        connection.close()


def _await_parked(server: ServerProcess, count: int = 1) -> None:
    """Until so many receives wait, by the server's own metrics."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with urllib.request.urlopen(f"{server.admin}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith("veilmq_waiters ")]
        if float(value) == count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{count} parked receives were never seen")


@pytest.mark.parametrize(
    ("there", "instead", "got"),
    [
        ("AKIDREADER0000000001", "AKIDREADER0000000002", "AccessDenied"),
        ('["receive", "describe-queue"]', '["describe-queue"]', "AccessDenied"),
        ('["receive", "describe-queue"]', '["receive"]', "the message"),
    ],
)
def test_a_receive_that_waits_goes_by_the_credentials_of_its_end(
    start: Any, connect: Any, credentials: Path, key: Any, reload: Any, there: str, instead: str, got: str
) -> None:
    server = start("--credentials", str(credentials))
    owner, reader = connect(server, *key), connect(server, "AKIDREADER0000000001", key[1])
    url = owner.create_queue(QueueName="orders", Attributes={"VisibilityTimeout": "0"})["QueueUrl"]
    owner.create_queue(QueueName="orders-2")
    seen: list[str] = []

    def receive() -> None:
        try:
            (message,) = reader.receive_message(QueueUrl=url, WaitTimeSeconds=20)["Messages"]
            seen.append(message["Body"])
        except ClientError as error:
            seen.append(error.response["Error"]["Code"])

    waiting = threading.Thread(target=receive)
    waiting.start()
    given = b64encode(f"AKIDREADER0000000001:{key[1]}".encode()).decode()
    admin = http.client.HTTPConnection(urlsplit(server.admin).netloc, timeout=10)
    path = "/api/v1/queues/111111111111/us-east-1/orders-2/receive"
    admin.request("POST", path, b'{"wait_us": 20000000}', {"Authorization": f"Basic {given}"})
    _await_parked(server, 2)
    credentials.write_text(credentials.read_text().replace(there, instead))
    reload(server)
    if got == "AccessDenied":
        assert admin.getresponse().status in (401, 403), "it waits for a message that it cannot have"
        waiting.join(timeout=10)
        assert seen == [got], "it waits for a message that it cannot have"
    admin.close()
    owner.send_message(QueueUrl=url, MessageBody="the message")
    waiting.join(timeout=30)
    assert seen == [got]
    (message,) = owner.receive_message(QueueUrl=url, WaitTimeSeconds=10, AttributeNames=["All"])["Messages"]
    assert message["Body"] == "the message"
    assert message["Attributes"]["ApproximateReceiveCount"] == ("1" if got == "AccessDenied" else "2")


def test_what_the_server_does_not_even_read_is_refused_by_its_name(start: Any, connect: Any) -> None:
    """ "BatchRequestTooLong: The length of all the messages put together is more than the limit." """
    client = connect(start())
    url = client.create_queue(QueueName="orders")["QueueUrl"]
    entries = [{"Id": str(number), "MessageBody": "x" * 1_048_576} for number in range(10)]
    with pytest.raises(client.exceptions.BatchRequestTooLong) as raised:
        client.send_message_batch(QueueUrl=url, Entries=entries)
    words = "The request is longer than this server reads: body exceeds 7340032 bytes."
    assert raised.value.response["Error"]["Message"] == words
    with pytest.raises(ClientError, match=words) as too_long:
        client.send_message(QueueUrl=url, MessageBody="x" * 8_000_000)
    assert too_long.value.response["Error"]["Code"] == "InvalidParameterValue"
    with pytest.raises(ClientError, match="Message must be shorter than 1048576 bytes"):
        client.send_message(QueueUrl=url, MessageBody="x" * 1_048_577)


@for_each("line", ["Host: other", "X-Amz-Date: 20260101T000000Z", "Authorization: other"])
def test_a_header_that_is_there_twice_is_refused_in_the_form_of_the_request(shared: ServerProcess, line: str) -> None:
    once = "Host: h\r\nX-Amz-Date: 20260101T000000Z\r\nAuthorization: a\r\n"
    name = line.partition(":")[0].lower()
    words = f"more than one {name} header"
    json_type = "Content-Type: application/x-amz-json-1.0\r\n"
    for url, target, form, expected in (
        (shared.sqs, "/", f"X-Amz-Target: AmazonSQS.ListQueues\r\n{json_type}", '{"__type":"com.amazon'),
        (shared.sqs, "/", "Content-Type: application/x-www-form-urlencoded\r\n", '<?xml version="1.0"?><ErrorResponse'),
        (shared.azure, "/devstoreaccount1?comp=list", "", '<?xml version="1.0" encoding="utf-8"?><Error>'),
        (shared.mns, "/queues", "", '<?xml version="1.0"'),
    ):
        address = urlsplit(url)
        with socket.create_connection((str(address.hostname), address.port), timeout=10) as raw:
            raw.sendall(f"POST {target} HTTP/1.1\r\n{once}{form}{line}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            answer = http.client.HTTPResponse(raw)
            answer.begin()
            body = answer.read().decode("utf-8-sig")
        assert answer.status == 400
        assert body.startswith(expected)
        assert words in body


def test_the_largest_message_is_read_however_its_json_is_escaped(start: Any, connect: Any) -> None:
    """As JSON encoders that are safe for HTML write `<`: six bytes each."""
    server = start()
    url = connect(server).create_queue(QueueName="orders")["QueueUrl"]
    body = b'{"QueueUrl":"%b","MessageBody":"%b"}' % (url.encode(), rb"\u003c" * 1_048_576)
    authorization = (
        "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/sqs/aws4_request, SignedHeaders=host, Signature=0"
    )
    headers = {
        "Content-Type": "application/x-amz-json-1.0",
        "X-Amz-Target": "AmazonSQS.SendMessage",
        "X-Amz-Date": "20260101T000000Z",
        "Authorization": authorization,
    }
    with urllib.request.urlopen(urllib.request.Request(server.sqs, body, headers), timeout=30) as answer:
        assert json.load(answer)["MD5OfMessageBody"] == md5(b"<" * 1_048_576).hexdigest()
