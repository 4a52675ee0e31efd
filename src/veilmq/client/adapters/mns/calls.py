"""Calls of aliyun-mns-sdk's client, one for each thread: the port's messages as entries, the service's answers as
messages, and our errors.

Strategy: the SDK's objects are not thread-safe, so every thread has its own client and connection. A connection in use
is closed by the thread that uses it; a forked child leaves its parent's alone. The SDK distinguishes a refused
connection from a broken one only by text, so our connections record whether a request went out. A connection whose
answer was not read completely, for whatever reason (Ctrl-C too), is never used again. The SDK writes a carriage return
into its XML unescaped, and every XML reader turns it into a line feed; our client writes the character reference
instead, before the request is signed. Source: aliyun-mns-sdk 1.3.0, mns_client.py and mns_http.py; XML 1.0, section
2.11.

Errors: one total table from code to error; a code that is not in it becomes a ServiceError with the service's text.
InvalidArgument has many meanings; its text decides. Sequence and attempt of a LeaseError are 0, because the service
does not report them. Source: the table of error codes of the MNS API.

Sending: what MNS cannot carry, and what exceeds its limits, is refused here before any I/O. Attributes travel as user
properties under SQS's rules, so that every client can read them; tracing attributes travel as system properties, where
MNS has them. Source: the page of SendMessage.

Reading: user properties become attributes by their types, and so do the tracing system properties. The two that carry
the port's own fields are removed from the mapping. Source: the page of ReceiveMessage.
"""

import re
import select
import threading
import weakref
from collections.abc import Callable, Hashable
from http.client import BadStatusLine
from typing import Any, Final

import msgspec
from mns.account import StaticCredentialsProvider  # type: ignore[import-untyped]
from mns.message_property import (  # type: ignore[import-untyped]
    MessagePropertyValue,
    MessageSystemPropertyValue,
    SystemPropertyName,
)
from mns.mns_client import MNSClient  # type: ignore[import-untyped]
from mns.mns_exception import (  # type: ignore[import-untyped]
    MNSClientException,
    MNSClientParameterException,
    MNSServerException,
)
from mns.mns_http import MNSHTTPConnection, MNSHTTPSConnection  # type: ignore[import-untyped]
from mns.mns_request import SendMessageRequest, SendMessageRequestEntry  # type: ignore[import-untyped]

from veilmq.client.adapters.cloud import EXTEND_SECONDS, check_poll, client_name, encode_base64
from veilmq.client.adapters.foreign import RequestIds, foreign_answer
from veilmq.client.adapters.service_errors import Refusal, error_in, invalid
from veilmq.client.errors import TransportError, advised
from veilmq.client.messages import LEASE_HINT_ATTRIBUTE, AttributeValue, Message, Peeked, Received, hint_of, untyped
from veilmq.client.queue import ById, Capabilities, fingerprint
from veilmq.client.shared import checks
from veilmq.client.shared.checks import sendable
from veilmq.client.shared.lifetimes import OfProcess
from veilmq.model.errors import (
    MessageGone,
    MessageTooLarge,
    ParameterInvalid,
    QueueDeletedRecently,
    QueueExists,
    QueueMissing,
    ReceiptInvalid,
    VeilError,
)
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.model.messages import REPORT_HEADER, Report, write_header

_MINUTE_US: Final = 60_000_000
_LENGTH: Final = re.compile(r"length of message should not be larger than (\d+) bytes")
_NAMED: Final = re.compile(r"\s*(?:The value of )?(\w+)(?: should|: )")
_PORT_NAMES: Final = {
    "MessageBody": "body",
    "DelaySeconds": "delay",
    "Priority": "priority",
    "VisibilityTimeout": "lease",
    "UserProperties": "attributes",
    "SystemProperties": "attributes",
    "waitseconds": "wait",
    "numOfMessages": "count_max",
    "MessageRetentionPeriod": "retention",
    "MaximumMessageSize": "message_bytes_max",
    "PollingWaitSeconds": "wait",
}
"""MNS's name for a parameter -> the port's name."""


def error_of(refusal: Refusal) -> VeilError:
    """The error for a code. Never raises."""
    return error_in(_TABLE, refusal)


def _argument(refusal: Refusal) -> VeilError:
    length = _LENGTH.search(refusal.message)
    if length is not None:
        return MessageTooLarge(size_bytes=refusal.size_bytes, limit_bytes=int(length[1]))
    named = _NAMED.match(refusal.message)
    name = "request" if named is None else _PORT_NAMES.get(named[1], named[1])
    return ParameterInvalid(parameter=name, reason=refusal.message)


_TABLE: Final[dict[str, Callable[[Refusal], VeilError]]] = {
    "QueueNotExist": lambda refusal: QueueMissing(queue=refusal.queue),
    "QueueAlreadyExist": lambda refusal: QueueExists(queue=refusal.queue, setting="attributes"),
    "QueueDeletedRecently": lambda refusal: QueueDeletedRecently(queue=refusal.queue, wait_us=_MINUTE_US),
    # For a handle: deleted, expired, or stale after a later receive or change. The service does not say which.
    "MessageNotExist": lambda refusal: MessageGone(sequence=0, attempt=0),
    "ReceiptHandleError": lambda refusal: ReceiptInvalid(reason=refusal.message),
    "MissingReceiptHandle": lambda refusal: ReceiptInvalid(reason=refusal.message),
    "MissingVisibilityTimeout": invalid("lease"),
    "InvalidArgument": _argument,
    "MalformedXML": invalid("request"),
    "InvalidRequestURL": invalid("request"),
    "InvalidQueryString": invalid("request"),
    "InvalidQueueName": invalid("name"),
    "QueueNameLengthError": invalid("name"),
}


TIMEOUT_SECONDS: Final = 60.0
"""Of every other call; longer than any wait. The SDK itself has none for TLS."""


_EXTEND: Final = "change_message_visibility"
_REDIRECTED: Final = 300
_REQUEST_ID: Final = "x-mns-request-id"
"""Each of the service's answers has it ("Common response headers")."""
_NAMESPACE: Final = "http://mns.aliyuncs.com/doc/"
_WITHOUT_BODY: Final = frozenset({201, 204})
"""Statuses of answers that need no body."""
_REASON_CHARACTERS: Final = 500
"""The SDK quotes the whole answer, which may be a web page."""


class BatchRefused(Exception):
    """Some entries of a batch failed. Never leaves this room."""

    def __init__(self, entries: list[dict[str, str]], status: int, request_id: str) -> None:
        super().__init__()
        self.entries, self.status, self.request_id = entries, status, request_id
        """Fields of each entry, by their names in the service's answer."""


class _Noting:
    """A connection that records whether anything was sent."""

    went_out = False
    repeated = True
    """Whether the SDK may send a request again that got no answer: it does so if it sees a BadStatusLine."""

    def send(self, data: Any) -> None:
        super().send(data)  # type: ignore[misc]
        self.went_out = True

    def getresponse(self) -> Any:
        try:
            return super().getresponse()  # type: ignore[misc]
        except BadStatusLine as error:
            if self.repeated:
                raise
            raise ConnectionResetError(str(error)) from error


class _Plain(_Noting, MNSHTTPConnection):  # type: ignore[misc]
    pass


class _Tls(_Noting, MNSHTTPSConnection):  # type: ignore[misc]
    pass


class _Client(MNSClient):  # type: ignore[misc]
    report: str | None = None
    """The header of the current call; MNS does not sign it."""

    def __init__(self, url: str, credentials: Any, ids: RequestIds) -> None:
        super().__init__(url, credentials_provider=credentials)
        self._ids = ids

    def build_header(self, req: Any, req_inter: Any) -> None:
        if isinstance(req_inter.data, bytes):
            req_inter.data = req_inter.data.replace(b"\r", b"&#13;")
        super().build_header(req, req_inter)
        req_inter.header["user-agent"] += f" {client_name()}"
        if self.report is not None:
            req_inter.header[REPORT_HEADER.decode()] = self.report

    def check_status(self, req_inter: Any, resp_inter: Any, *others: Any) -> None:
        """Called by the SDK for each answer. It takes all below 400 for success, and then reads most of them."""
        status, headers = resp_inter.status, resp_inter.header
        known = self._ids.known(headers, lambda: _is_result(status, resp_inter.data))
        super().check_status(req_inter, resp_inter, *others)
        if not known:
            raise foreign_answer(status, f"//{self.host}", headers, self._ids.lacking(headers))


def _is_result(status: int, content: str) -> bool:
    """Whether the body of an answer can be the service's."""
    return _NAMESPACE in content if content else status in _WITHOUT_BODY


class _ThreadClient(OfProcess):
    """One thread's client. `lock` is held while it is in use."""

    def __init__(self, url: str, credentials: Any, retries: bool, ids: RequestIds) -> None:
        self.client = _Client(url, credentials, ids)
        self.connection: Any = (_Tls if self.client.is_https else _Plain)(self.client.host)
        self.connection.repeated = retries
        self.client.http.conn = self.connection
        self.lock = threading.Lock()
        self._pid = self._this()
        self.closing = False
        weakref.finalize(self, self.connection.close)

    def drop_ended(self) -> None:
        """Drop a connection that the server has closed. If it is readable before a request, it has ended; the SDK would
        still write into it, and nobody could know whether the request arrived."""
        sock = self.connection.sock
        if sock is None:
            return
        look = select.poll()
        look.register(sock, select.POLLIN)
        if look.poll(0):
            self.connection.close()

    def wait_at_most(self, seconds: float) -> None:
        """The timeout of the next call."""
        self.connection.timeout = self.connection.connection_timeout = seconds  # of TLS, and of a plain connection
        if self.connection.sock is not None:
            self.connection.sock.settimeout(seconds)

    def close(self) -> None:
        """Close at once, or when the call in progress ends."""
        self.closing = True
        if self.lock.acquire(blocking=False):
            self.connection.close()
            self.lock.release()


class ThreadClients:
    """The clients of one account. Any thread."""

    def __init__(self, account: Any, retries: bool) -> None:
        """account: an `mns.account.Account`; only its host and credentials are used. retries: the SDK's own. Raises
        CapabilityMissing."""
        check_poll()
        client = account.mns_client
        self.host = str(client.host)
        """Including the port, if one was given."""
        self._url = f"{'https' if client.is_https else 'http'}://{client.host}"
        self._credentials = client.credentials_provider
        self._retries = retries
        self._ids = RequestIds(_REQUEST_ID)
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[_ThreadClient] = weakref.WeakSet()

    @property
    def identity(self) -> Hashable:
        """The endpoint, and a fingerprint of fixed credentials; credentials that may change are identified by their
        object."""
        provider = self._credentials
        if type(provider) is not StaticCredentialsProvider:
            return self._url, ById(provider)
        fixed = provider.get_credentials()
        return self._url, fingerprint(*map(str, vars(fixed).values()))

    def call(
        self,
        method: str,
        request: Any,
        response: Any,
        queue: str,
        size_bytes: int = 0,
        report: Report | None = None,
    ) -> Any:
        """`response`, filled by the SDK's client. `queue` and `size_bytes` are for errors.

        Raises QueueMissing, TransportError, ServiceError, what `error_of` makes of a code, and BatchRefused.
        """
        mine = self._taken()
        whole = False
        try:
            with mine.lock:
                mine.drop_ended()
                mine.wait_at_most(EXTEND_SECONDS if method == _EXTEND else TIMEOUT_SECONDS)
                mine.connection.went_out = False
                mine.client.report = None if report is None else write_header(report.reported, report.failure)
                getattr(mine.client, method)(request, response)
            whole = True
        except MNSServerException as error:
            whole = True
            raise _refused(error, response.status, queue, size_bytes) from error
        except MNSClientParameterException as error:
            raise ParameterInvalid(parameter="request", reason=str(error.message)) from error
        except (MNSClientException, KeyError, ValueError, TypeError) as error:
            # The connection broke, or the SDK cannot read the answer, which it quotes.
            reason = f"{self.host}: {getattr(error, 'message', None) or error or type(error).__name__}"
            reason = "".join(each if each.isprintable() else " " for each in reason)[:_REASON_CHARACTERS]
            if response.status >= _REDIRECTED:
                raise error_of(Refusal("", response.status, "", reason, queue, size_bytes)) from error
            reason = advised(reason) if response.status < 0 else reason
            raise TransportError(reason=reason, may_have_happened=mine.connection.went_out) from error
        finally:
            if whole:
                self._mine.client = mine
            if mine.closing or not whole:
                mine.connection.close()
        return response

    def close(self) -> None:
        """Close the connections. A later call opens its own."""
        with self._lock:
            clients = list(self._all)
        for mine in clients:
            mine.close()

    def _taken(self) -> _ThreadClient:
        """This thread's client, which counts as missing until its call is over: a call that breaks off leaves no
        half-used client behind."""
        mine: _ThreadClient | None = getattr(self._mine, "client", None)
        self._mine.client = None
        if mine is None or mine.inherited:
            mine = _ThreadClient(self._url, self._credentials, self._retries, self._ids)
            with self._lock:
                self._all.add(mine)
        return mine


def _refused(error: Any, status: int, queue: str, size_bytes: int) -> VeilError | BatchRefused:
    request_id = str(error.req_id or "")
    if error.sub_errors:
        return BatchRefused(error.sub_errors, status, request_id)
    return error_of(Refusal(str(error.type), status, request_id, str(error.message), queue, size_bytes))


MESSAGE_BYTES_MAX: Final = 65_536
LEASE_MAX: Final = 43_200
DELAY_MAX: Final = 604_800
TRACING: Final = frozenset({"traceparent", "tracestate", "baggage"})
"""System properties that become attributes of the same names."""

_TYPES: Final = {"String": "STRING", "Number": "NUMBER", "Binary": "BINARY"}


class Entry(msgspec.Struct, gc=False):
    """A message ready to be sent."""

    body: str
    delay: int
    """-1: the queue's own, as in the SDK."""
    priority: int
    user: dict[str, Any]
    system: dict[str, Any]
    size_bytes: int

    def request(self, queue: str) -> Any:
        """SendMessage."""
        return self._with_properties(SendMessageRequest(queue, self.body, self.delay, self.priority, False))

    def entry(self) -> Any:
        """An entry of BatchSendMessage."""
        return self._with_properties(SendMessageRequestEntry(self.body, self.delay, self.priority))

    def _with_properties(self, message: Any) -> Any:
        message.user_properties, message.system_properties = self.user, self.system
        return message


def entry_of(given: str | Message, capabilities: Capabilities) -> Entry:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge."""
    message, raw, attributes, total_bytes = sendable(given, capabilities)
    for name in attributes:
        if SystemPropertyName.is_valid(name) and name not in TRACING:
            raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="is the service's own")
    return Entry(
        body=encode_base64(raw) if capabilities.base64_body else message.body,
        delay=-1 if message.delay is None else checks.whole_seconds(message.delay, "delay", 0, DELAY_MAX),
        priority=-1 if message.priority is None else message.priority,
        user={name: _user(*each) for name, each in attributes.items() if name not in TRACING},
        system={name: _system(name, *each) for name, each in attributes.items() if name in TRACING},
        size_bytes=total_bytes,
    )


def _user(kind: str, content: str | bytes) -> Any:
    return MessagePropertyValue(_TYPES[kind], content)


def _system(name: str, kind: str, content: str | bytes) -> Any:
    if kind != "String":
        raise ParameterInvalid(parameter=f"attributes[{name!r}]", reason="is of tracing: it must be a str")
    return MessageSystemPropertyValue("STRING", content)


def received_of(entry: Any, lease_end: float) -> tuple[Received, float | None]:
    """The message of an SDK's ReceiveMessageResponseEntry, and the sender's lease hint in seconds."""
    attributes = _values(entry)
    hint = attributes.pop(LEASE_HINT_ATTRIBUTE, None)
    received = Received(
        **_peeked_fields(entry, attributes),
        handle=entry.receipt_handle,
        lease_end=lease_end,
        first_received=entry.first_dequeue_time / 1000,
    )
    return received, hint_of(hint)


def peeked_of(entry: Any) -> Peeked:
    """The message of an SDK's PeekMessageResponseEntry."""
    attributes = _values(entry)
    attributes.pop(LEASE_HINT_ATTRIBUTE, None)
    return Peeked(**_peeked_fields(entry, attributes))


def _peeked_fields(entry: Any, attributes: dict[str, AttributeValue]) -> dict[str, Any]:
    kind = attributes.pop(TYPE_ATTRIBUTE, None)
    return {
        "id": entry.message_id,
        "body": entry.message_body,
        "attributes": attributes,
        "receive_count": entry.dequeue_count,
        "sent": entry.enqueue_time / 1000,
        "group": getattr(entry, "message_group_id", "") or None,
        "priority": entry.priority,
        "type": None if kind is None else str(kind),
    }


def _values(entry: Any) -> dict[str, AttributeValue]:
    attributes = {}
    for name, value in entry.user_properties.items():
        kind, content = value.get_data_type(), value.get_raw_value()
        attributes[name] = untyped("Number", content) if kind == "NUMBER" else content
    for name, value in entry.system_properties.items():
        if name in TRACING:
            attributes[name] = value.get_string_value_by_type()
    return attributes
