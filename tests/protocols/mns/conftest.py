"""The codec under test, with a client that signs as the documentation says and a store that answers.

Strategy: requests are signed here from the raw parts, so that the codec's signature code is checked by the words of the
documentation and not by itself (tests/clients has the SDKs). What the codec asks goes to a real SQLite store through
the contract's stage, and the answer is read back as XML.
"""

import base64
import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4
from xml.etree import ElementTree

import pytest
from tests.support.wires import StoreWire

from veilmq.model.settings.access import EVERYTHING, AccessKey, Action, Grant
from veilmq.protocols import Request, Response
from veilmq.protocols.mns import Codec, Endpoint

KEY_ID, SECRET = "AKIDTESTS", "a secret of the tests"
ACCOUNT, REGION = "000000000000", "us-east-1"
NAMESPACE = "{http://mns.aliyuncs.com/doc/v1/}"
ERROR_NAMESPACE = "{http://mns.aliyuncs.com/doc/v1}"
"""Of `Error` alone: see test_golden.py."""
QUEUE = "/queues/jobs"
MESSAGES = f"{QUEUE}/messages"


@dataclass
class Ring:
    """Keys by id."""

    keys: dict[str, AccessKey]
    checks: bool = True

    def find(self, key_id: str) -> AccessKey | None:
        return self.keys.get(key_id)


@dataclass
class Answer:
    """A response, read."""

    response: Response

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.response.headers}

    @property
    def xml(self) -> ElementTree.Element:
        assert self.response.content_type == b"text/xml;charset=utf-8"
        return ElementTree.fromstring(self.response.body)

    @property
    def code(self) -> str | None:
        """The error's code; a whole error document has four children."""
        if self.status < 400:
            return None
        assert self.xml.tag == f"{ERROR_NAMESPACE}Error", self.response.body
        assert [child.tag for child in self.xml] == [
            f"{ERROR_NAMESPACE}{name}" for name in ("Code", "Message", "RequestId", "HostId")
        ]
        code, _, request_id, _ = (child.text for child in self.xml)
        assert all(child.text for child in self.xml)
        assert request_id == self.headers["x-mns-request-id"]
        return code

    def text(self, path: str) -> str | None:
        space = ERROR_NAMESPACE if self.xml.tag.startswith(ERROR_NAMESPACE) else NAMESPACE
        return self.xml.findtext("/".join(f"{space}{part}" for part in path.split("/")))

    def texts(self, path: str) -> list[str]:
        nodes = self.xml.iterfind("/".join(f"{NAMESPACE}{part}" for part in path.split("/")))
        return [node.text or "" for node in nodes]

    def fields(self, path: str = "") -> dict[str, str]:
        """The children of an element, by name."""
        node = self.xml.find("/".join(f"{NAMESPACE}{part}" for part in path.split("/"))) if path else self.xml
        assert node is not None
        return {child.tag.partition("}")[2]: child.text or "" for child in node}


class Wire(StoreWire):
    """A client: `ask` makes a request, signs it, and returns the answer."""

    def _begin(self) -> None:
        super()._begin()
        reader = (Grant(frozenset({Action.RECEIVE})),)
        self.ring = Ring(
            {
                KEY_ID: AccessKey(KEY_ID, SECRET, ACCOUNT, grants=EVERYTHING),
                "AKIDOTHER": AccessKey("AKIDOTHER", SECRET, "111111111111", grants=EVERYTHING),
                "AKIDREADER": AccessKey("AKIDREADER", SECRET, ACCOUNT, grants=reader),
                "AKIDTOKEN": AccessKey("AKIDTOKEN", SECRET, ACCOUNT, grants=EVERYTHING, session_token="sts"),
            }
        )
        self.codec = Codec(self.ring, Endpoint())
        self.queue()

    def configure(self, **endpoint: Any) -> None:
        """Another endpoint's settings."""
        self.codec = Codec(self.ring, Endpoint(**endpoint))

    def request(
        self,
        method: str,
        target: str,
        body: bytes | str = b"",
        headers: dict[str, str] | None = None,
        *,
        key: str = KEY_ID,
        secret: str = SECRET,
        without: tuple[str, ...] = (),
        authority: str | None = None,
    ) -> Request:
        """A signed request as the listener hands it over; the signature knows the headers that are left out."""
        raw = body.encode() if isinstance(body, str) else body
        given = {"host": "127.0.0.1:9326", "date": self.date(), "x-mns-version": "2015-06-06"}
        if raw:
            given |= {"content-length": str(len(raw)), "content-type": "text/xml;charset=UTF-8"}
        given |= {name.lower(): value for name, value in (headers or {}).items()}
        for name in without:
            given.pop(name, None)
        if "authorization" not in given and "authorization" not in without:
            given["authorization"] = f"MNS {key}:{sign(secret, self.text(method, target, given))}"
        return Request(
            method=method,
            target=target.encode(),
            headers={name.encode(): value.encode() for name, value in given.items()},
            body=raw,
            peer="127.0.0.1",
            secure=False,
            request_id=str(uuid4()),
            authority=None if authority is None else authority.encode(),
        )

    @staticmethod
    def text(method: str, target: str, headers: dict[str, str]) -> str:
        """What V2 signs, by the documentation."""
        get = headers.get
        mns = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers) if name.startswith("x-mns-"))
        date = get("x-mns-date", get("date", ""))
        return f"{method}\n{get('content-md5', '')}\n{get('content-type', '')}\n{date}\n{mns}{target}"

    def send(self, request: Request) -> Answer:
        """Hand a request over, and let the store answer what is asked of it."""
        return Answer(self.carried_out(request))

    def read(self, response: Response) -> Answer:
        """A response, as `ask` gives it."""
        return Answer(response)

    def ask(self, method: str, target: str, body: bytes | str = b"", headers: Any = None, **how: Any) -> Answer:
        """`request` and `send`."""
        return self.send(self.request(method, target, body, headers, **how))

    def queue(self, name: str = "jobs", **fields: object) -> str:
        """A new queue's path."""
        inside = "".join(f"<{field}>{value}</{field}>" for field, value in fields.items())
        assert self.ask("PUT", f"/queues/{name}", f"<Queue>{inside}</Queue>").status == 201
        return f"/queues/{name}"

    def put(self, text: str = "hello", queue: str = QUEUE, **fields: object) -> Answer:
        """SendMessage."""
        inside = "".join(f"<{field}>{value}</{field}>" for field, value in fields.items())
        body = f"<Message><MessageBody>{text}</MessageBody>{inside}</Message>"
        return self.ask("POST", f"{queue}/messages", body)

    def get(self, query: str = "", queue: str = QUEUE) -> Answer:
        """ReceiveMessage."""
        return self.ask("GET", f"{queue}/messages{query}")

    def take(self, queue: str = QUEUE) -> str:
        """The handle of one message that must be there."""
        handle = self.get(queue=queue).text("ReceiptHandle")
        assert handle
        return handle


def sign(secret: str, text: str) -> str:
    """HMAC-SHA1 in base64."""
    return base64.b64encode(hmac.new(secret.encode(), text.encode(), hashlib.sha1).digest()).decode()


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    """A client of a fresh store, which has the queue `jobs`."""
    made = Wire(tmp_path)
    yield made
    made.close()
