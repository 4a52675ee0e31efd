"""Clients that ask for many large messages and do not read the answers: they fill neither the memory of a server nor
the time of the others."""

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from tests.cli.conftest import WAIT_S, Serve, Server

MIB = 1024 * 1024
CONNECTIONS = 150
MESSAGES = 20
BOUND_BYTES = 64 * MIB
SLACK_BYTES = 160 * MIB
"""What the loop, the store and one batch with its answers may take beyond the bound."""


def rss_bytes(server: Server) -> int:
    """The most memory that the process has had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.admin}/metrics", timeout=WAIT_S) as answer:
        found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def ask(server: Server, queue_url: str) -> socket.socket:
    """Ask for ten messages, which come back at once, and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    asked = {"QueueUrl": queue_url, "MaxNumberOfMessages": 10, "VisibilityTimeout": 0}
    body = json.dumps(asked).encode()
    connection = socket.socket()
    connection.settimeout(WAIT_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.sendall(
        b"POST / HTTP/1.1\r\nHost: %b:%d\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
        b"Authorization: AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/sqs/aws4_request,"
        b" SignedHeaders=host, Signature=0\r\nX-Amz-Date: 20260101T000000Z\r\n"
        b"Content-Type: application/x-amz-json-1.0\r\nContent-Length: %d\r\n\r\n%b"
        % (host.encode(), int(port), len(body), body)
    )
    return connection


def rest(connection: socket.socket, begin: bytes) -> bytes:
    """The whole answer's body."""
    received = bytearray(begin)
    while b"\r\n\r\n" not in received:
        received += connection.recv(65_536)
    head, _, _ = bytes(received).partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    missing = int(length[1]) + len(head) + 4 - len(received)
    while missing > 0:
        data = connection.recv(min(MIB, missing))
        assert data
        received += data
        missing -= len(data)
    return bytes(received[len(head) + 4 :])


@pytest.mark.parametrize("fifo", [False, True])
def test_their_memory_is_bounded_and_others_are_served(serve: Serve, fifo: bool) -> None:
    server = serve("--held-bytes-max", str(BOUND_BYTES)).ready()
    sqs = server.sqs()
    attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true"} if fifo else {}
    queue_url = sqs.create_queue(QueueName="large.fifo" if fifo else "large", Attributes=attributes)["QueueUrl"]
    other_url = sqs.create_queue(QueueName="small")["QueueUrl"]
    bodies = {f"{number:04}" + "x" * (MIB - 100) for number in range(MESSAGES)}
    for body in bodies:
        sqs.send_message(QueueUrl=queue_url, MessageBody=body, **({"MessageGroupId": body[:4]} if fifo else {}))
    sqs.send_message(QueueUrl=other_url, MessageBody="before")
    handle = sqs.receive_message(QueueUrl=other_url)["Messages"][0]["ReceiptHandle"]
    before_bytes = rss_bytes(server)

    connections = [ask(server, queue_url) for _ in range(CONNECTIONS)]
    begins = [connection.recv(12) for connection in connections]

    assert rss_bytes(server) - before_bytes < BOUND_BYTES + SLACK_BYTES
    served = begins.count(b"HTTP/1.1 200")
    refused = begins.count(b"HTTP/1.1 503")
    assert served >= 2
    assert served + refused == CONNECTIONS
    assert BOUND_BYTES / 2 < metric(server, "veilmq_unread_bytes") < BOUND_BYTES
    assert metric(server, "veilmq_unread_refusals_total") == refused
    assert "clients have not read" in server.wait_for("refused ")
    with pytest.raises(ClientError, match="ServiceUnavailable"):
        sqs.receive_message(QueueUrl=queue_url)
    sqs.send_message(QueueUrl=other_url, MessageBody="meanwhile")
    sqs.change_message_visibility(QueueUrl=other_url, ReceiptHandle=handle, VisibilityTimeout=60)
    sqs.delete_message(QueueUrl=other_url, ReceiptHandle=handle)

    gone = begins.index(b"HTTP/1.1 200")
    connections[gone].close()
    for place, (connection, begin) in enumerate(zip(connections, begins, strict=True)):
        if place == gone:
            continue
        answer: dict[str, Any] = json.loads(rest(connection, begin))
        assert ("Messages" in answer) == (begin == b"HTTP/1.1 200")
        connection.close()
    found = set()
    while len(found) < MESSAGES:
        for message in sqs.receive_message(QueueUrl=queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=5)["Messages"]:
            assert message["Body"] in bodies
            found.add(message["Body"])
            sqs.delete_message(QueueUrl=queue_url, ReceiptHandle=message["ReceiptHandle"])
    assert metric(server, "veilmq_unread_bytes") == 0
    assert [each["Body"] for each in sqs.receive_message(QueueUrl=other_url)["Messages"]] == ["meanwhile"]
    assert server.stop() == 0
