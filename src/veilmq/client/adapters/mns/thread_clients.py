"""aliyun-mns-sdk's client, one for each thread, with our errors.

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
"""

import re
import select
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Final

from mns.account import StaticCredentialsProvider  # type: ignore[import-untyped]
from mns.mns_client import MNSClient  # type: ignore[import-untyped]
from mns.mns_exception import (  # type: ignore[import-untyped]
    MNSClientException,
    MNSClientParameterException,
    MNSServerException,
)
from mns.mns_http import MNSHTTPConnection, MNSHTTPSConnection  # type: ignore[import-untyped]

from veilmq.client.adapters.cloud import client_name
from veilmq.client.adapters.service_errors import Said, error_in
from veilmq.client.errors import TransportError, advised
from veilmq.client.queue import ById, fingerprint
from veilmq.client.threads import OfProcess
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
from veilmq.model.reports import REPORT_HEADER, Report, write_header

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


def error_of(said: Said) -> VeilError:
    """The error for a code. Never raises."""
    return error_in(_TABLE, said)


def _argument(said: Said) -> VeilError:
    length = _LENGTH.search(said.message)
    if length is not None:
        return MessageTooLarge(size_bytes=said.size_bytes, limit_bytes=int(length[1]))
    named = _NAMED.match(said.message)
    name = "request" if named is None else _PORT_NAMES.get(named[1], named[1])
    return ParameterInvalid(parameter=name, reason=said.message)


def _invalid(parameter: str) -> Callable[[Said], VeilError]:
    return lambda said: ParameterInvalid(parameter=parameter, reason=said.message)


_TABLE: Final[dict[str, Callable[[Said], VeilError]]] = {
    "QueueNotExist": lambda said: QueueMissing(queue=said.queue),
    "QueueAlreadyExist": lambda said: QueueExists(queue=said.queue, setting="attributes"),
    "QueueDeletedRecently": lambda said: QueueDeletedRecently(queue=said.queue, wait_us=_MINUTE_US),
    # For a handle: deleted, expired, or stale after a later receive or change. The service does not say which.
    "MessageNotExist": lambda said: MessageGone(sequence=0, attempt=0),
    "ReceiptHandleError": lambda said: ReceiptInvalid(reason=said.message),
    "MissingReceiptHandle": lambda said: ReceiptInvalid(reason=said.message),
    "MissingVisibilityTimeout": _invalid("lease"),
    "InvalidArgument": _argument,
    "MalformedXML": _invalid("request"),
    "InvalidRequestURL": _invalid("request"),
    "InvalidQueryString": _invalid("request"),
    "InvalidQueueName": _invalid("name"),
    "QueueNameLengthError": _invalid("name"),
}


TIMEOUT_SECONDS: Final = 60
"""Of a connection; longer than any wait. The SDK itself has none for TLS."""


class BatchRefused(Exception):
    """Some entries of a batch failed. Never leaves this room."""

    def __init__(self, entries: list[dict[str, str]], status: int, request_id: str) -> None:
        super().__init__()
        self.entries, self.status, self.request_id = entries, status, request_id
        """Fields of each entry, by their names in the service's answer."""


class _Noting:
    """A connection that records whether anything was sent."""

    went_out = False

    def send(self, data: Any) -> None:
        super().send(data)  # type: ignore[misc]
        self.went_out = True


class _Plain(_Noting, MNSHTTPConnection):  # type: ignore[misc]
    pass


class _Tls(_Noting, MNSHTTPSConnection):  # type: ignore[misc]
    pass


class _Client(MNSClient):  # type: ignore[misc]
    report: str | None = None
    """The header of the current call; MNS does not sign it."""

    def build_header(self, req: Any, req_inter: Any) -> None:
        if isinstance(req_inter.data, bytes):
            req_inter.data = req_inter.data.replace(b"\r", b"&#13;")
        super().build_header(req, req_inter)
        req_inter.header["user-agent"] += f" {client_name()}"
        if self.report is not None:
            req_inter.header[REPORT_HEADER.decode()] = self.report


class _ThreadClient(OfProcess):
    """One thread's client. `lock` is held while it is in use."""

    def __init__(self, url: str, credentials: Any) -> None:
        self.client = _Client(url, credentials_provider=credentials)
        self.connection: Any = (_Tls if self.client.is_https else _Plain)(self.client.host)
        self.connection.timeout = TIMEOUT_SECONDS
        self.client.http.conn = self.connection
        self.lock = threading.Lock()
        self._pid = self._this()
        self.closing = False
        weakref.finalize(self, self.connection.close)

    def drop_ended(self) -> None:
        """Drop a connection that the server has closed. If it is readable before a request, it has ended; the SDK would
        still write into it, and nobody could tell whether the request arrived."""
        sock = self.connection.sock
        if sock is None:
            return
        look = select.poll()
        look.register(sock, select.POLLIN)
        if look.poll(0):
            self.connection.close()

    def close(self) -> None:
        """Close at once, or when the call in progress ends."""
        self.closing = True
        if self.lock.acquire(blocking=False):
            self.connection.close()
            self.lock.release()


class ThreadClients:
    """The clients of one account. Any thread."""

    def __init__(self, account: Any) -> None:
        """account: an `mns.account.Account`; only its host and credentials are used. Raises nothing."""
        client = account.mns_client
        self.host = str(client.host)
        """Including the port, if one was given."""
        self._url = f"{'https' if client.is_https else 'http'}://{client.host}"
        self._credentials = client.credentials_provider
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
            # The connection broke, or the SDK cannot read the answer.
            reason = f"{self.host}: {getattr(error, 'message', None) or error or type(error).__name__}"
            raise TransportError(reason=advised(reason), may_have_happened=mine.connection.went_out) from error
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
            mine = _ThreadClient(self._url, self._credentials)
            with self._lock:
                self._all.add(mine)
        return mine


def _refused(error: Any, status: int, queue: str, size_bytes: int) -> VeilError | BatchRefused:
    request_id = str(error.req_id or "")
    if error.sub_errors:
        return BatchRefused(error.sub_errors, status, request_id)
    return error_of(Said(str(error.type), status, request_id, str(error.message), queue, size_bytes))
