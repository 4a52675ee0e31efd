"""Real clients on one side of the codec, chosen outcomes on the other.

Strategy: botocore makes, signs and parses as it does for AWS; only its socket is missing: its `before-send` event hands
the finished request to the codec, and the codec's answer back. Today's botocore speaks JSON; the Query form is spoken
by the same botocore with its service model changed back to what it was while SQS was a Query service.
"""

import functools
import gzip
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import botocore
import botocore.session
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import ClientError
from tests.support.clock import ManualClock
from tests.support.sqlite import SMALL

from veilmq.model.commands import AnyCommand, Sweep
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.messages import NO_EXTRAS, Delivery, Extras
from veilmq.model.outcomes import Outcome, Swept
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.protocols import Request, Response
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint
from veilmq.server.port import denied_action
from veilmq.store import Store
from veilmq.store.sqlite.store import SqliteStore

ENDPOINT = "http://127.0.0.1:9324"
ARRIVED = Instant(77)


@dataclass
class Ring:
    """A keyring of these keys; in development mode (`checks` False) every id stands for an account."""

    keys: dict[str, AccessKey]
    checks: bool = True

    def find(self, key_id: str) -> AccessKey | None:
        found = self.keys.get(key_id)
        if found is None and not self.checks:
            account = key_id if len(key_id) == 12 and key_id.isdigit() else "000000000000"
            return AccessKey(key_id, "", account, grants=EVERYTHING)
        return found


KEY = AccessKey("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "111122223333", grants=EVERYTHING)
TEMPORARY = AccessKey(
    "ASIATEMPORARY", "secret/of+a=session", "111122223333", EVERYTHING, session_token="token+/=of" * 9
)


def wall() -> Instant:
    """Now, by which botocore signs."""
    return Instant(int(time.time() * 1e6))


def as_request(prepared: AWSPreparedRequest, secure: bool = False) -> Request:
    """What the listener makes of a request that botocore would send."""
    url = urlsplit(prepared.url)
    headers = {
        name.lower().encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in prepared.headers.items()
    }
    headers[b"host"] = url.netloc.encode()
    body = prepared.body or b""
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return Request(
        method=prepared.method,
        target=target.encode(),
        headers=headers,
        body=body if isinstance(body, bytes) else body.encode(),
        peer="127.0.0.1",
        secure=secure,
        request_id=str(uuid4()),
    )


class _Raw:
    """What botocore reads a body from."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *ignored: Any, **more: Any) -> Iterator[bytes]:
        yield self._body

    def read(self, *ignored: Any) -> bytes:
        return self._body


@dataclass
class Wire:
    """A botocore client whose requests go to `codec`; `outcomes` is what the engine would say."""

    client: Any
    codec: Codec
    outcomes: Sequence[Outcome] = ()
    calls: list[Call] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    more_headers: dict[str, str] = field(default_factory=dict)

    def answers(self, *outcomes: Outcome) -> "Wire":
        """From now on the engine says this."""
        self.outcomes = outcomes
        return self

    @property
    def commands(self) -> tuple[AnyCommand, ...]:
        """Of the last call."""
        return self.calls[-1].commands

    def send(self, request: AWSPreparedRequest, **ignored: Any) -> AWSResponse:
        """The client's socket."""
        wire = as_request(request)
        wire.headers.update((name.lower().encode(), value.encode()) for name, value in self.more_headers.items())
        self.requests.append(wire)
        answer = self.codec.decode(wire, wall(), ARRIVED)
        if isinstance(answer, Call):
            self.calls.append(answer)
            answer = self.codec.encode(answer, self.outcomes)
        self.responses.append(answer)
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return AWSResponse(request.url, answer.status, headers, _Raw(answer.body))


_ITEMS = {
    "AttributeNameList": "AttributeName",
    "MessageAttributeNameList": "MessageAttributeName",
    "MessageSystemAttributeList": "MessageSystemAttributeName",
    "QueueUrlList": "QueueUrl",
    "MessageList": "Message",
    "TagKeyList": "TagKey",
    "ActionNameList": "ActionName",
    "AWSAccountIdList": "AWSAccountId",
    "BatchResultErrorEntryList": "BatchResultErrorEntry",
    "StringList": "StringListValue",
    "BinaryList": "BinaryListValue",
}
_MAPS = {
    "QueueAttributeMap": ("Attribute", "Name"),
    "MessageSystemAttributeMap": ("Attribute", "Name"),
    "MessageBodyAttributeMap": ("MessageAttribute", "Name"),
    "MessageBodySystemAttributeMap": ("MessageSystemAttribute", "Name"),
    "TagMap": ("Tag", "Key"),
}
_CODES = {
    "QueueDoesNotExist": "AWS.SimpleQueueService.NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
    **{
        name: f"AWS.SimpleQueueService.{name}"
        for name in (
            "BatchEntryIdsNotDistinct",
            "BatchRequestTooLong",
            "EmptyBatchRequest",
            "InvalidBatchEntryId",
            "MessageNotInflight",
            "PurgeQueueInProgress",
            "QueueDeletedRecently",
            "TooManyEntriesInBatchRequest",
            "UnsupportedOperation",
        )
    },
    "KmsAccessDenied": "KMS.AccessDeniedException",
    "KmsDisabled": "KMS.DisabledException",
    "KmsInvalidKeyUsage": "KMS.InvalidKeyUsageException",
    "KmsInvalidState": "KMS.InvalidStateException",
    "KmsNotFound": "KMS.NotFoundException",
    "KmsOptInRequired": "KMS.OptInRequired",
    "KmsThrottled": "KMS.ThrottlingException",
}


def service_model() -> dict[str, Any]:
    """SQS as today's botocore describes it."""
    path = Path(botocore.__file__).parent / "data/sqs/2012-11-05/service-2.json.gz"
    model: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return model


def query_model() -> dict[str, Any]:
    """The same as a Query service: wrapped results, names of flattened lists and maps, codes of errors."""
    model = service_model()
    metadata = model["metadata"]
    for name in ("jsonVersion", "targetPrefix", "awsQueryCompatible"):
        metadata.pop(name, None)
    namespace = "http://queue.amazonaws.com/doc/2012-11-05/"
    metadata.update(protocol="query", protocols=["query"], xmlNamespace=namespace)
    for name, operation in model["operations"].items():
        if "output" in operation:
            operation["output"]["resultWrapper"] = f"{name}Result"
    for name, shape in model["shapes"].items():
        if shape.get("exception"):
            shape["error"] = {"code": _CODES.get(name, name), "httpStatusCode": 400, "senderFault": True}
        elif shape["type"] == "list":
            shape["member"]["locationName"] = _ITEMS.get(name) or name.removesuffix("List")
        elif shape["type"] == "map":
            _, key = _MAPS[name]
            shape["key"]["locationName"], shape["value"]["locationName"] = key, "Value"
        elif shape["type"] == "structure":
            for member in shape["members"].values():
                if member["shape"] in _MAPS:
                    member["locationName"] = _MAPS[member["shape"]][0]
    return model


@pytest.fixture(scope="session")
def query_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A botocore data directory whose SQS is a Query service."""
    root = tmp_path_factory.mktemp("botocore")
    directory = root / "sqs/2012-11-05"
    directory.mkdir(parents=True)
    (directory / "service-2.json").write_text(json.dumps(query_model()))
    return root


MakeWire = Callable[..., Wire]


@pytest.fixture(scope="session")
def make_client(query_data: Path) -> Callable[[str, AccessKey, str, str], Any]:
    """Makes botocore clients, the same one for the same arguments: they take long to make."""

    @functools.cache
    def make(form: str, key: AccessKey, url: str, region: str) -> Any:
        session = botocore.session.Session()
        session.set_config_variable("config_file", os.devnull)
        if form == "query":
            session.get_component("data_loader").search_paths.insert(0, str(query_data))
        return session.create_client(
            "sqs",
            region_name=region,
            endpoint_url=url,
            aws_access_key_id=key.id,
            aws_secret_access_key=key.secret,
            aws_session_token=key.session_token,
            config=Config(retries={"max_attempts": 0}, parameter_validation=False),
        )

    return make


@pytest.fixture
def make_wire(make_client: Callable[[str, AccessKey, str, str], Any]) -> Iterator[MakeWire]:
    """Makes a wired client: `make_wire(form="json" | "query", key=..., endpoint=..., ring=..., url=...)`."""
    wired: dict[Any, Wire] = {}

    def make(
        form: str = "json",
        key: AccessKey = KEY,
        endpoint: Endpoint | None = None,
        ring: Ring | None = None,
        url: str = ENDPOINT,
        region: str = "us-east-1",
    ) -> Wire:
        client = make_client(form, key, url, region)
        codec = Codec(ring or Ring({KEY.id: KEY, TEMPORARY.id: TEMPORARY}), endpoint or Endpoint())
        wire = Wire(client, codec)
        # The first handler answers: the wire before this one, on the same client, is disconnected.
        if client in wired:
            client.meta.events.unregister("before-send.sqs.*", wired.pop(client).send)
        client.meta.events.register("before-send.sqs.*", wire.send)
        wired[client] = wire
        return wire

    yield make
    for client, wire in wired.items():
        client.meta.events.unregister("before-send.sqs.*", wire.send)


@pytest.fixture(params=["json", "query"])
def wire(request: pytest.FixtureRequest, make_wire: MakeWire) -> Wire:
    """A client of each form, its key known."""
    return make_wire(request.param)


@pytest.fixture
def deliver() -> Callable[..., Delivery]:
    """Makes a message as a receive hands it out."""

    def make(body: str = "hello", extras: Extras = NO_EXTRAS, **more: Any) -> Delivery:
        values: dict[str, Any] = {
            "id": bytes(range(16)),
            "sequence": 12,
            "body": body,
            "md5": bytes(16),
            "extras": extras,
            "sender": KEY.id,
            "priority": 8,
            "sent": Instant(1_700_000_000_123_456),
            "expires": Instant(1_800_000_000_000_000),
            "receive_count": 3,
            "first_received": Instant(1_700_000_001_999_999),
            "handle": "0a" * 33,
            "due": Instant(1_700_000_031_000_000),
        }
        return Delivery(**{**values, **more})

    return make


OTHER = AccessKey("AKIDSOMEBODY", "another+secret", "444455556666", grants=EVERYTHING)
THIRD = AccessKey("AKIDTHIRD", "a+third+secret", "777788889999", grants=EVERYTHING)


class Served:
    """A codec on a store; `connect` makes clients of it, each with a key.

    As in `Wire` only the socket is missing: codec, commands and SQLite are real, and the clock is the test's.
    """

    key = KEY
    other = OTHER
    third = THIRD

    def __init__(self, directory: Path, make_client: Any, undo: Any) -> None:
        self._directories = (directory / f"data-{number}" for number in itertools.count())
        self._make_client = make_client
        self._undo = undo
        self._begin()

    def _begin(self) -> None:
        self.store: Store = SqliteStore(next(self._directories), SMALL)
        self.clock = ManualClock()
        self.configure()
        self.secure = False
        self.more_headers: dict[str, str] = {}

    def renew(self) -> None:
        """Another store and codec, as at the beginning; clients stay connected."""
        self.store.close()
        self._begin()

    def configure(self, **values: Any) -> None:
        """Another endpoint from now on."""
        self.codec = Codec(Ring({key.id: key for key in (KEY, OTHER, THIRD)}), Endpoint(**values))

    def connect(self, form: str = "json", key: AccessKey = KEY, region: str = "us-east-1") -> Any:
        """A client that speaks that form."""
        client = self._make_client(form, key, "http://127.0.0.1:9324", region)
        client.meta.events.register("before-send.sqs.*", self.send)
        self._undo(lambda: client.meta.events.unregister("before-send.sqs.*", self.send))
        return client

    def send(self, request: AWSPreparedRequest, **ignored: Any) -> AWSResponse:
        """The clients' socket."""
        asked = as_request(request, self.secure)
        asked.headers.update((name.lower().encode(), value.encode()) for name, value in self.more_headers.items())
        answer = self.codec.decode(asked, wall(), self.clock.now)
        while isinstance(answer, Call):
            action = denied_action(answer.key, answer.commands)
            if action is not None:
                answer = self.codec.denied(answer, action)
                break
            applied = self.store.apply(answer.commands, self.clock.now)
            if applied.wrote:
                self.store.commit()
            answer = self.codec.encode(answer, applied.outcomes)
        assert isinstance(answer, Response)
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return AWSResponse(request.url, answer.status, headers, _Raw(answer.body))

    def later(self, seconds: float) -> None:
        """Let time pass, and the sweeper come."""
        self.clock.advance(int(seconds * SECOND_US))
        self.sweep()

    def sweep(self) -> None:
        """Sweep until nothing is left."""
        more = True
        while more:
            applied = self.store.apply([Sweep()], self.clock.now)
            if applied.wrote:
                self.store.commit()
            (outcome,) = applied.outcomes
            assert isinstance(outcome, Swept)
            more = outcome.more

    @staticmethod
    def refused(call: Any, **arguments: Any) -> tuple[str, str]:
        """Code and message of a call that must be refused."""
        with pytest.raises(ClientError) as raised:
            call(**arguments)
        return raised.value.response["Error"]["Code"], raised.value.response["Error"]["Message"]


@pytest.fixture
def served(tmp_path: Path, make_client: Callable[[str, AccessKey, str, str], Any]) -> Iterator[Served]:
    """A codec on a store of its own."""
    undo: list[Callable[[], None]] = []
    made = Served(tmp_path, make_client, undo.append)
    yield made
    made.store.close()
    for action in undo:
        action()


@pytest.fixture(params=["json", "query"])
def client(request: pytest.FixtureRequest, served: Served) -> Any:
    """A client of each form, on that store."""
    return served.connect(request.param)


@pytest.fixture
def url(client: Any) -> str:
    """Of a standard queue `jobs`."""
    return str(client.create_queue(QueueName="jobs")["QueueUrl"])
