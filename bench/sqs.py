"""A signed SQS caller that sets up a run and proves that the server really checks signatures.

Standard library only, both wire forms, one request a connection. The load itself comes from lifecycle.lua. For
Signature V4 see
https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html
"""

import hashlib
import hmac
import html
import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

REGION = "us-east-1"
FORGERIES = ("signature", "body", "key")

Proto = Literal["json", "query"]
Parameters = Mapping[str, object]


class CallFailed(Exception):
    """A call of the set-up was refused; `status` is the HTTP status, the text is the answer."""

    def __init__(self, action: str, status: int, text: str) -> None:
        super().__init__(f"{action}: HTTP {status}: {text[:300]}")
        self.status = status


@dataclass(frozen=True)
class Caller:
    port: int
    key: str
    secret: str
    proto: Proto
    host: str = "127.0.0.1"
    timeout_s: float = 30.0

    @property
    def authority(self) -> str:
        return f"{self.host}:{self.port}"

    def request(
        self, action: str, parameters: Parameters, path: str = "/", forge: str = ""
    ) -> tuple[dict[str, str], bytes]:
        """Headers and body of a signed POST. `forge` spoils it: one of FORGERIES."""
        if self.proto == "json":
            content_type, body = "application/x-amz-json-1.0", json.dumps(parameters).encode()
        else:
            content_type = "application/x-www-form-urlencoded; charset=utf-8"
            fields = {"Action": action, "Version": "2012-11-05", **_flat(parameters)}
            body = urllib.parse.urlencode(fields, quote_via=urllib.parse.quote).encode()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        headers = {"content-type": content_type, "host": self.authority, "x-amz-date": stamp}
        if self.proto == "json":
            headers["x-amz-target"] = f"AmazonSQS.{action}"
        names = ";".join(headers)
        canonical = "\n".join(
            ["POST", path, "", *(f"{name}:{value}" for name, value in headers.items()), "", names, _sha256(body)]
        )
        scope = f"{stamp[:8]}/{REGION}/sqs/aws4_request"
        signing = f"AWS4{self.secret}".encode()
        for part in scope.split("/"):
            signing = hmac.digest(signing, part.encode(), "sha256")
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{_sha256(canonical.encode())}"
        signature = hmac.digest(signing, text.encode(), "sha256").hex()
        if forge == "signature":
            signature = signature[:-1] + ("0" if signature[-1] != "0" else "1")
        elif forge == "body":
            body += b" " if self.proto == "json" else b"&Forged=1"
        key = self.key[:-1] + "X" if forge == "key" else self.key
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers, body

    def wire(self, action: str, parameters: Parameters, path: str = "/") -> bytes:
        """The whole request as bytes, for a socket of one's own."""
        headers, body = self.request(action, parameters, path)
        lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items()), f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def status(self, action: str, parameters: Parameters, path: str = "/", forge: str = "") -> tuple[int, str]:
        """HTTP status and text of one call; raises OSError or http.client.HTTPException if nobody answers."""
        headers, body = self.request(action, parameters, path, forge)
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def call(self, action: str, parameters: Parameters, path: str = "/") -> str:
        status, text = self.status(action, parameters, path)
        if status != 200:
            raise CallFailed(action, status, text)
        return text

    def create_queue(self, name: str) -> str:
        """The new queue's URL as the server gives it."""
        text = self.call("CreateQueue", {"QueueName": name})
        match = re.search(r'"QueueUrl":\s*"([^"]+)"|<QueueUrl>([^<]+)<', text)
        if match is None:
            raise CallFailed("CreateQueue", 200, text)
        return html.unescape(match.group(1) or match.group(2))

    def visible(self, queue_url: str, path: str = "/") -> int:
        """ApproximateNumberOfMessages of a queue."""
        wanted = "ApproximateNumberOfMessages"
        text = self.call("GetQueueAttributes", {"QueueUrl": queue_url, "AttributeNames": [wanted]}, path)
        match = re.search(rf'"{wanted}":\s*"(\d+)"|{wanted}</Name>\s*<Value>(\d+)<', text)
        if match is None:
            raise CallFailed("GetQueueAttributes", 200, text)
        return int(match.group(1) or match.group(2))

    def send_ten(self, queue_url: str, body: str, path: str = "/") -> None:
        entries = [{"Id": str(i), "MessageBody": body} for i in range(10)]
        self.call("SendMessageBatch", {"QueueUrl": queue_url, "Entries": entries}, path)


def forgeries_let_in(caller: Caller, queue_url: str, path: str = "/") -> list[str]:
    """Which forged requests did not get 403: an altered signature, a changed body, an unknown key."""
    parameters = {"QueueUrl": queue_url, "MessageBody": "forged"}
    found = []
    for forge in FORGERIES:
        status, _ = caller.status("SendMessage", parameters, path, forge)
        if status != 403:
            found.append(f"forged {forge} got {status}")
    return found


# JSON names of lists, and what the Query form calls each element of them.
_QUERY_LISTS = {"Entries": "SendMessageBatchRequestEntry", "AttributeNames": "AttributeName"}


def _flat(parameters: Parameters) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, value in parameters.items():
        if not isinstance(value, list):
            fields[name] = str(value)
            continue
        for index, element in enumerate(value, 1):
            prefix = f"{_QUERY_LISTS[name]}.{index}"
            if isinstance(element, dict):
                fields.update({f"{prefix}.{key}": str(part) for key, part in element.items()})
            else:
                fields[prefix] = str(element)
    return fields


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
