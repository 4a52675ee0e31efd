"""A queue URL signed in its query string by botocore, opened as a browser or curl opens it."""

import http.client
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

BODY = "a < b & é"


def presigned(url: str, key: tuple[str, str], action: str) -> str:
    """The URL of a GET, good for a minute."""
    request = AWSRequest("GET", f"{url}?{action}&Version=2012-11-05")
    SigV4QueryAuth(Credentials(*key), "sqs", "us-east-1", expires=60).add_auth(request)
    return str(request.prepare().url)


def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type and body, without a header that signs anything."""
    split = urlsplit(url)
    connection = http.client.HTTPConnection(split.netloc, timeout=30)
    try:
        connection.request("GET", f"{split.path}?{split.query}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def url(start: Any, connect: Any, credentials: Path, key: Any) -> str:
    """Of a queue with one message, on a server that checks signatures."""
    client = connect(start("--credentials", str(credentials)), *key)
    url = str(client.create_queue(QueueName="orders")["QueueUrl"])
    client.send_message(QueueUrl=url, MessageBody=BODY)
    return url


def test_a_presigned_url_is_answered_in_xml_or_json(url: str, key: tuple[str, str]) -> None:
    shown = presigned(url, key, "Action=GetQueueAttributes&AttributeName.1=QueueArn")
    arn = "arn:aws:sqs:us-east-1:111111111111:orders"
    status, kind, body = get(shown)
    assert (status, kind) == (200, "text/xml")
    assert f"<Attribute><Name>QueueArn</Name><Value>{arn}</Value></Attribute>" in body
    # The same URL again: it is good as often as it is opened.
    status, kind, body = get(shown, Accept="application/json")
    assert (status, kind) == (200, "application/json")
    said = json.loads(body)["GetQueueAttributesResponse"]["GetQueueAttributesResult"]
    assert said["Attributes"] == [{"Name": "QueueArn", "Value": arn}]
    received = presigned(url, key, "Action=ReceiveMessage&VisibilityTimeout=0")
    status, _, body = get(received)
    assert (status, "<Body>a &lt; b &amp; é</Body>" in body) == (200, True)
    status, _, body = get(received, Accept="application/json")
    (message,) = json.loads(body)["ReceiveMessageResponse"]["ReceiveMessageResult"]["messages"]
    assert (status, message["Body"]) == (200, BODY)


def test_a_presigned_url_without_an_action_is_an_unknown_operation(url: str, key: tuple[str, str]) -> None:
    for headers in ({}, {"Accept": "application/json"}):
        assert get(presigned(url, key, ""), **headers) == (404, "text/xml", "<UnknownOperationException/>\n")


def test_a_presigned_url_opens_nothing_but_what_was_signed(url: str, key: tuple[str, str]) -> None:
    right = presigned(url, key, "Action=ReceiveMessage&VisibilityTimeout=0")
    found = re.search("X-Amz-Signature=(.)", right)
    assert found is not None
    flipped = right.replace(found[0], found[0][:-1] + ("1" if found[1] == "0" else "0"))
    for wrong in (
        flipped,
        right.replace("VisibilityTimeout=0", "VisibilityTimeout=9"),
        right.replace("/orders?", "/payroll?"),
        right.replace("Action=ReceiveMessage", "Action=PurgeQueue"),
        right.replace("X-Amz-Expires=60", "X-Amz-Expires=61"),
        right.replace(quote(key[0]), "AKIDOTHER00000000001"),
    ):
        assert wrong != right
        status, _, body = get(wrong)
        assert (status, "<Code>SignatureDoesNotMatch</Code>" in body) == (403, True), wrong
        status, kind, body = get(wrong, Accept="application/json")
        assert (status, kind, json.loads(body)["Error"]["Code"]) == (403, "application/json", "SignatureDoesNotMatch")
    assert get(right)[0] == 200
