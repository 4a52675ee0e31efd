"""Official SDKs through a proxy that strips a path prefix, which they have signed: the server knows it by its URL."""

import http.client
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from azure.storage.queue import QueueServiceClient
from botocore.config import Config
from botocore.exceptions import ClientError

PREFIX = "/veil"
AZURE_KEY, SECOND_KEY = (b64encode(bytes(range(start, start + 64))).decode() for start in (0, 64))


class Proxy(BaseHTTPRequestHandler):
    """Takes the prefix off the path; headers and body go on as they came."""

    protocol_version = "HTTP/1.1"
    upstream = ""

    def pass_on(self) -> None:
        """Any method."""
        assert self.path.startswith(PREFIX)
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        connection.putrequest(
            self.command, self.path.removeprefix(PREFIX) or "/", skip_host=True, skip_accept_encoding=True
        )
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = pass_on


@contextmanager
def proxy() -> Iterator[tuple[type[Proxy], str]]:
    """A proxy, whose `upstream` is set once it is known; and the URL below which it strips."""
    handler = type("ProxyOfOne", (Proxy,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield handler, f"http://127.0.0.1:{server.server_port}{PREFIX}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def accounts(credentials: Path) -> Path:
    """The credentials file, its first account with a name and a key for Azure."""
    text = credentials.read_text().replace(
        'id = "111111111111"\n',
        f'id = "111111111111"\nazure_name = "veil"\nazure_keys = ["{AZURE_KEY}", "{SECOND_KEY}"]\n',
    )
    credentials.write_text(text)
    return credentials


def test_boto3(start: Any, accounts: Path, key: tuple[str, str]) -> None:
    with proxy() as (handler, outside):
        server = start("--credentials", str(accounts), "--external-url", outside)
        handler.upstream = urlsplit(server.sqs).netloc
        for endpoint in (outside, outside + "/"):
            client = boto3.client(
                "sqs",
                endpoint_url=endpoint,
                region_name="us-east-1",
                aws_access_key_id=key[0],
                aws_secret_access_key=key[1],
                config=Config(retries={"total_max_attempts": 1}),
            )
            url = client.create_queue(QueueName="orders")["QueueUrl"]
            assert url == f"{outside}/111111111111/orders"
            client.send_message(QueueUrl=url, MessageBody="order 1")
            (message,) = client.receive_message(QueueUrl=url)["Messages"]
            client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
            stranger = client._request_signer._credentials
            stranger.secret_key = "another"
            with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
                client.list_queues()
        words = f"--external-url has the path {PREFIX}: the proxy must take exactly {PREFIX} off the path"
        assert words in server.log.read_text()


def test_the_azure_sdk(start: Any, accounts: Path) -> None:
    with proxy() as (handler, outside):
        server = start("--credentials", str(accounts), "--external-url", outside)
        handler.upstream = urlsplit(server.azure).netloc
        credential = {"account_name": "veil", "account_key": AZURE_KEY}
        with QueueServiceClient(f"{outside}/veil", credential=credential, retry_total=0) as service:
            queue = service.create_queue("orders")
            queue.send_message("order 1")
            (message,) = queue.receive_messages()
            queue.delete_message(message)
            assert [each.name for each in service.list_queues()] == ["orders"]
