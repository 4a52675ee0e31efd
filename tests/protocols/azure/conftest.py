"""The codec in front of a real store, on clocks that tests move.

Strategy: a request is bytes as a listener would hand them over; its signature is made here, by the text of the
documentation and not by the code under test (tests/clients has the SDK's). What the codec asks goes to a real SQLite
store through the contract's stage, and the answer is read back as XML.
"""

import base64
import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit
from uuid import uuid4
from xml.etree import ElementTree

import pytest
from tests.support.wires import StoreWire

from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.access import EVERYTHING, AccessKey, NamedAccount
from veilmq.protocols import Request, Response
from veilmq.protocols.azure import Codec, Endpoint
from veilmq.protocols.azure.auth import TokenRefused

ACCOUNT = "examplename"
SECRET, SECOND_SECRET = b"the first key of the account", b"the second key of the account"
READER = AccessKey("reader", "", "000000000000", grants=())
VERSION = "2026-10-06"
MESSAGE = "<QueueMessage><MessageText>{}</MessageText></QueueMessage>"


def sign(secret: bytes, text: str) -> str:
    """HMAC-SHA256 in base64."""
    return base64.b64encode(hmac.new(secret, text.encode(), hashlib.sha256).digest()).decode()


@dataclass
class Ring:
    """Accounts by name."""

    named: dict[str, NamedAccount]
    checks: bool = True

    def find_account(self, name: str) -> NamedAccount | None:
        return self.named.get(name)


@dataclass
class Claimed:
    """Tokens are names of claims that a test has set down; everything else is no token."""

    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    tenant: str | None = None
    audiences: frozenset[str] = frozenset()

    def claims(self, token: str) -> dict[str, Any]:
        if token not in self.known:
            raise TokenRefused("Signature validation failed")
        return self.known[token]


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
    def code(self) -> str | None:
        """The error's code; header and body must agree."""
        if self.status < 400:
            return None
        code = self.headers["x-ms-error-code"]
        assert self.xml.tag == "Error"
        assert self.xml.findtext("Code") == code
        assert self.xml.findtext("Message")
        return code

    @property
    def xml(self) -> ElementTree.Element:
        return ElementTree.fromstring(self.response.body)

    def text(self, path: str) -> str | None:
        return self.xml.findtext(path)

    def texts(self, path: str) -> list[str]:
        return [node.text or "" for node in self.xml.iterfind(path)]


class Wire(StoreWire):
    """A client: `ask` makes a request, signs it, and returns the answer."""

    def _begin(self) -> None:
        super()._begin()
        self.key = AccessKey(ACCOUNT, "", "000000000000", grants=EVERYTHING)
        person = AccessKey("person", "", "000000000000", grants=EVERYTHING)
        self.account = NamedAccount(ACCOUNT, self.key, (SECRET, SECOND_SECRET), {"person": person, "reader": READER})
        self.ring = Ring({ACCOUNT: self.account})
        self.tokens = Claimed()
        self.codec = Codec(self.ring, Endpoint(cooldowns=False), self.tokens)

    def configure(self, **endpoint: Any) -> None:
        """Another endpoint's settings."""
        self.codec = Codec(self.ring, Endpoint(**{"cooldowns": False} | endpoint), self.tokens)

    def iso(self, shift_s: float = 0) -> str:
        """ISO 8601, so many seconds from now."""
        from veilmq.protocols.azure.fields import print_iso

        return print_iso(Instant(int(self.wall + shift_s * SECOND_US)))

    def request(
        self,
        method: str,
        target: str,
        body: bytes | str = b"",
        headers: dict[str, str] | None = None,
        *,
        auth: str | None = "SharedKey",
        secret: bytes = SECRET,
        version: str | None = VERSION,
        path_style: bool = True,
        secure: bool = False,
        peer: str = "127.0.0.1",
        host: str | None = None,
    ) -> Request:
        """A request as the listener hands it over. auth: SharedKey, SharedKeyLite, or None for what `headers` hold."""
        raw = body.encode() if isinstance(body, str) else body
        if path_style and target.startswith("/") and not target.startswith(f"/{ACCOUNT}"):
            target = f"/{ACCOUNT}{target}"
        given = {"host": host or ("127.0.0.1:10001" if path_style else f"{ACCOUNT}.queue.core.windows.net")}
        if auth is not None:
            given["x-ms-date"] = self.date()
        if version is not None:
            given["x-ms-version"] = version
        if raw:
            given["content-length"] = str(len(raw))
            given["content-type"] = "application/xml"
        given |= {name.lower(): value for name, value in (headers or {}).items()}
        if auth is not None and "authorization" not in given:
            given["authorization"] = f"{auth} {ACCOUNT}:{sign(secret, self.text(auth, method, target, given))}"
        return Request(
            method=method,
            target=target.encode(),
            headers={name.encode(): value.encode() for name, value in given.items()},
            body=raw,
            peer=peer,
            secure=secure,
            request_id=str(uuid4()),
        )

    @staticmethod
    def text(auth: str, method: str, target: str, headers: dict[str, str]) -> str:
        """What is signed, by the documentation."""
        url = urlsplit(target)
        query = sorted((name.lower(), value) for name, value in parse_qsl(url.query.replace("+", "%2B"), True))
        ms = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers) if name.startswith("x-ms-"))
        get = headers.get
        if auth == "SharedKeyLite":
            comp = "".join(f"?comp={value}" for name, value in query if name == "comp")
            return f"{method}\n{get('content-md5', '')}\n{get('content-type', '')}\n\n{ms}/{ACCOUNT}{url.path}{comp}"
        names = (
            "content-encoding", "content-language", "content-length", "content-md5", "content-type", "",
            "if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range",
        )  # fmt: skip
        lines = "\n".join(get(name, "") for name in names)
        resource = f"/{ACCOUNT}{url.path}" + "".join(f"\n{name}:{value}" for name, value in query)
        return f"{method}\n{lines}\n{ms}{resource}"

    def send(self, request: Request) -> Answer:
        """Hand a request over, and let the store answer what is asked of it."""
        return Answer(self.carried_out(request))

    def read(self, response: Response) -> Answer:
        """A response, as `ask` gives it."""
        return Answer(response)

    def ask(self, method: str, target: str, body: bytes | str = b"", headers: Any = None, **how: Any) -> Answer:
        """`request` and `send`."""
        return self.send(self.request(method, target, body, headers, **how))

    def queue(self, name: str = "orders") -> str:
        """A new queue's path."""
        assert self.ask("PUT", f"/{name}").status == 201
        return f"/{name}"

    def put(self, queue: str, text: str = "hello", query: str = "", **how: Any) -> Answer:
        """Put Message."""
        return self.ask("POST", f"{queue}/messages{query}", MESSAGE.format(text), **how)

    def get(self, queue: str, query: str = "", **how: Any) -> Answer:
        """Get Messages."""
        return self.ask("GET", f"{queue}/messages{query}", **how)

    def take(self, queue: str, query: str = "") -> tuple[str, str]:
        """Id and receipt of one message that must be there."""
        answer = self.get(queue, query)
        (message,) = answer.texts("QueueMessage/MessageId")
        (receipt,) = answer.texts("QueueMessage/PopReceipt")
        return message, receipt

    def account_sas(self, secret: bytes = SECRET, **fields: str) -> str:
        """An account SAS for everything, but for the fields given; an empty one is left out."""
        given = {"sv": VERSION, "ss": "q", "srt": "sco", "sp": "rwdlacup", "se": self.iso(3600)} | fields
        given = {name: value for name, value in given.items() if value}
        names = ("sp", "ss", "srt", "st", "se", "sip", "spr", "sv", "ses")
        text = "".join(f"{each}\n" for each in (ACCOUNT, *(given.get(name, "") for name in names)))
        return self._query(given, sign(secret, text))

    def queue_sas(self, queue: str, secret: bytes = SECRET, **fields: str) -> str:
        """A service SAS for the queue."""
        given = {"sv": VERSION, "sp": "raup", "se": self.iso(3600)} | fields
        given = {name: value for name, value in given.items() if value}
        get = given.get
        lines = (
            get("sp", ""), get("st", ""), get("se", ""), f"/queue/{ACCOUNT}{queue}", get("si", ""), get("sip", ""),
            get("spr", ""), given["sv"],
        )  # fmt: skip
        return self._query(given, sign(secret, "\n".join(lines)))

    def delegation_sas(self, queue: str, key: Answer, **fields: str) -> str:
        """A user delegation SAS by the key that the answer holds."""
        said = {name: key.text(name) or "" for name in _KEY.values()}
        given = {"sv": VERSION, "sp": "raup", "se": self.iso(3600)} | {
            field: said[name] for field, name in _KEY.items() if said[name]
        }
        given = {name: value for name, value in (given | fields).items() if value}
        get = given.get
        lines = [get("sp", ""), get("st", ""), get("se", ""), f"/queue/{ACCOUNT}{queue}"]
        lines += [get(name, "") for name in (*_KEY, "sduoid", "sip", "spr", "sv")]
        return self._query(given, sign(base64.b64decode(key.text("Value") or ""), "\n".join(lines)))

    def _query(self, fields: dict[str, str], signature: str) -> str:
        return "&".join(f"{name}={quote(value, safe='')}" for name, value in (fields | {"sig": signature}).items())

    def token(self, name: str = "token", **claims: Any) -> dict[str, str]:
        """The headers of a request that bears a token with these claims."""
        now = self.wall // SECOND_US
        self.tokens.known[name] = {
            "aud": "https://storage.azure.com",
            "oid": "person",
            "tid": "tenant",
            "nbf": now - 60,
            "exp": now + 3600,
        } | claims
        return {"Authorization": f"Bearer {name}"}


_KEY = {
    "skoid": "SignedOid", "sktid": "SignedTid", "skt": "SignedStart", "ske": "SignedExpiry", "sks": "SignedService",
    "skv": "SignedVersion", "skdutid": "SignedDelegatedUserTid",
}  # fmt: skip


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    """A client of a fresh store."""
    made = Wire(tmp_path)
    yield made
    made.close()
