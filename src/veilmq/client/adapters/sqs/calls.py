"""Calls of a boto3 client: the port's values as arguments, SQS's answers as the port's values, and our errors.

Strategy: all calls go through here; what botocore raises becomes a TransportError, a ServiceError or an error of the
model. botocore retries by itself, and its final exception describes the last attempt only. A listener on its
`needs-retry` event sees every attempt, and records whether one of them may have reached the service. A forked child
closes its copies of its parent's connections before its first call, or each would read the other's answers. Source:
botocore's exceptions.py and endpoint.py.

Sending: what SQS cannot carry is refused here, before any I/O. SQS's limits on size and characters are checked too, so
that an invalid entry never spoils the request of the others. Source: SendMessage in the SQS API Reference.

Reading: the texts of system attributes become numbers; the two attributes that carry the port's own fields are removed
from the mapping. Source: ReceiveMessage in the SQS API Reference.
"""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final

import msgspec
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    DataNotFoundError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    ProxyConnectionError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]
from botocore.session import Session  # type: ignore[import-untyped]

from veilmq.client.adapters.cloud import EXTEND_SECONDS, client_name, is_here
from veilmq.client.adapters.foreign import RequestIds, foreign_answer
from veilmq.client.adapters.service_errors import Refusal, error_of
from veilmq.client.errors import STRANGE, ServiceError, TransportError, advised, strange_answer
from veilmq.client.messages import LEASE_HINT_ATTRIBUTE, Message, Received, hint_of, untyped
from veilmq.client.queue import Capabilities, fingerprint
from veilmq.client.shared.checks import sendable
from veilmq.client.shared.lifetimes import OfProcess
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.model.messages import REPORT_HEADER, Report, write_header

_loading: Final = threading.Lock()
_loaders: Final[list[Any]] = []
"""Process-wide: empty before the first session; then the loader that caches the files which botocore has read."""


def new_clients(
    endpoint: str | None, key: str | None, secret: str | None, region: str | None, region_default: str | None,
    retries: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """A boto3 client, and one for extensions, whose answers must come within EXTEND_SECONDS: botocore has no timeout of
    a call. What is None comes from boto3's own configuration. region_default: where that has no region. retries: as
    boto3 is configured; else none.

    Raises ParameterInvalid("url").
    """
    named = Config(
        user_agent_extra=client_name(),
        retries=None if retries else {"total_max_attempts": 1},
        proxies={} if is_here(endpoint) else None,
    )
    short = named.merge(Config(connect_timeout=EXTEND_SECONDS, read_timeout=EXTEND_SECONDS))
    try:
        session = _botocore_session()
        region = region or session.get_config_variable("region") or region_default
        client, extending = (
            session.create_client(
                "sqs", region_name=region, config=config, endpoint_url=endpoint, aws_access_key_id=key,
                aws_secret_access_key=secret,
            )
            for config in (named, short)
        )  # fmt: skip
        return client, extending
    except NoRegionError as error:
        reason = "names no region, and boto3 found none where it looks for one: add region=NAME"
        raise ParameterInvalid(parameter="url", reason=reason) from error
    except (BotoCoreError, ValueError) as error:
        raise ParameterInvalid(parameter="url", reason=f"boto3 does not take it: {type(error).__name__}") from error


def _botocore_session() -> Any:
    """A new session. Accounts share no credentials, only the models.

    Reading the models is most of the cost of a client; a hundred threads that do it at the same time take half a
    minute.
    """
    import boto3  # type: ignore[import-untyped]

    session = Session()
    session.user_agent_name, session.user_agent_version = "Boto3", boto3.__version__
    with _loading:
        if not _loaders:
            loader = session.get_component("data_loader")
            with suppress(DataNotFoundError):  # a version with other files reads them when it needs them
                for kind in ("service-2", "endpoint-rule-set-1"):
                    loader.load_service_model("sqs", kind)
                for name in ("endpoints", "partitions", "sdk-default-configuration", "_retry"):
                    loader.load_data(name)
            _loaders.append(loader)
    session.register_component("data_loader", _loaders[0])
    return session


_TYPE: Final = "application/x-amz-json-"
"""How the content type of each answer of SQS begins ("Interpreting Amazon SQS JSON API responses")."""
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNSENT = (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError)
_BROKEN = (HTTPClientError, BotoConnectionError, ResponseParserError)


def _is_unsent(error: BaseException) -> bool:
    # a certificate is refused before anything is sent
    refused = isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error)
    return refused or isinstance(error, _UNSENT)


class _Attempts(threading.local):
    """The state of the call that this thread is making."""

    reached = False
    """Whether an attempt may have been carried out."""
    foreign: TransportError | None = None
    """The error of the last answer, if it is no refusal, but not SQS's."""


_NO_CREDENTIALS: Final = (
    "no credentials were found: name them in the URL (sqs://KEY:SECRET@HOST:PORT/), or where boto3 looks for them, such"
    " as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials or the machine's role; a server in development"
    " mode takes any"
)
_REPORTING: Final = ("ChangeMessageVisibility", "ChangeMessageVisibilityBatch")
_report: Final[ContextVar[str | None]] = ContextVar("veilmq_report", default=None)
"""The header of the current call."""


def _add_report(params: dict[str, Any], **_: Any) -> None:
    """Called by botocore before it signs a request."""
    header = _report.get()
    if header is not None:
        params["headers"][REPORT_HEADER.decode()] = header


class Unsent(ServiceError):
    """botocore refused before it sent anything: there is no service's status or request id to name."""

    code: str
    status: int
    request_id: str
    message: str
    summary = "{message} ({code}: nothing was sent)"


class Calls(OfProcess):
    """A boto3 SQS client whose calls raise our errors. Thread-safe, like the client."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._pid = self._this()
        self._attempts = _Attempts()
        self._ids = RequestIds("x-amzn-requestid")
        self._typed = False
        """Whether a result had SQS's content type. An answer without members or a request id must have it then."""
        self._id = f"veilmq-attempts-{id(self)}"
        events = client.meta.events
        events.register("needs-retry.sqs", self._attempted, unique_id=self._id)
        for operation in _REPORTING:
            # Once for each client, whoever uses it: it adds only what the current call set.
            events.register(f"before-call.sqs.{operation}", _add_report, unique_id=f"veilmq-report-{operation}")

    @contextmanager
    def reporting(self, report: Report | None) -> Iterator[None]:
        """Calls within this context report to our server what they are for."""
        header = None if report is None else write_header(report.reported, report.failure)
        token = _report.set(header)
        try:
            yield
        finally:
            _report.reset(token)

    def credentials(self) -> bytes | None:
        """A fingerprint of the client's current credentials; None where they cannot be read."""
        try:
            # The client exposes them nowhere else. It caches credentials that it fetched, so this makes no request.
            found = self.client._request_signer._credentials
            frozen = None if found is None else found.get_frozen_credentials()
        except (AttributeError, BotoCoreError, ClientError):
            return None
        return fingerprint() if frozen is None else fingerprint(frozen.access_key, frozen.secret_key, frozen.token)

    def close(self) -> None:
        """Remove the listener from the client."""
        self.client.meta.events.unregister("needs-retry.sqs", unique_id=self._id)

    def _attempted(self, operation: Any, response: Any = None, caught_exception: Any = None, **_: Any) -> None:
        """Called by botocore after each attempt; does not influence whether it retries."""
        if caught_exception is not None:
            self._attempts.reached |= not _is_unsent(caught_exception)
        elif response is not None:
            answer = response[0]
            self._attempts.reached |= answer.status_code >= 500
            status, headers = answer.status_code, answer.headers
            fits = _is_result(answer.content, operation)
            media = str(headers.get("content-type", ""))
            typed = media.lower().startswith(_TYPE)
            self._typed |= fits and typed
            has_members = bool(answer.content.strip(b"{} \t\r\n"))
            if status >= 400 or (fits and self._ids.known(headers, lambda: has_members or typed or not self._typed)):
                self._attempts.foreign = None
            else:
                missing = "SQS's content type" if media else "content-type"
                lacking = (self._ids.lacking(headers) or missing) if fits else ""
                self._attempts.foreign = foreign_answer(status, answer.url, headers, lacking)

    def call(self, method: str, queue: str, *, size_bytes: int = 0, **given: Any) -> dict[str, Any]:
        """The answer of one operation (snake case). `queue` and `size_bytes` are for errors.

        Raises QueueMissing, TransportError, ServiceError and the errors of `service_errors`.
        """
        self._attempts.reached, self._attempts.foreign = False, None
        if self.inherited:
            self._pid = self._this()
            self.client.close()  # it opens new ones when it needs them
        try:
            answer: dict[str, Any] = getattr(self.client, method)(**given)
        except ClientError as error:
            raise self._refused(error, queue, size_bytes) from error
        except _BROKEN as error:
            unsent = _is_unsent(error) and not self._attempts.reached
            raise TransportError(reason=advised(str(error)), may_have_happened=not unsent) from error
        except ParamValidationError as error:
            raise ParameterInvalid(parameter="request", reason=str(error)) from error
        except BotoCoreError as error:  # no credentials, no region ...
            if self._attempts.reached:  # at a retry
                raise TransportError(reason=advised(str(error)), may_have_happened=True) from error
            message = _NO_CREDENTIALS if isinstance(error, NoCredentialsError) else str(error)
            raise Unsent(code=type(error).__name__, status=0, request_id="", message=message) from error
        except STRANGE as error:
            raise strange_answer(error) from error
        if self._attempts.foreign is not None:
            # boto3 reads a web page as an answer without members: a delete would be done, and a queue empty.
            raise self._attempts.foreign
        return answer

    def _refused(self, error: ClientError, queue: str, size_bytes: int) -> VeilError:
        if self._attempts.foreign is not None:
            return self._attempts.foreign
        refused, about = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        code, status = str(refused.get("Code", "")), int(about.get("HTTPStatusCode", 0))
        return error_of(
            Refusal(
                code="" if code == str(status) else code,  # botocore's, of an answer without one
                status=status,
                request_id=str(about.get("RequestId", "")),
                message=str(refused.get("Message", "")),
                queue=queue,
                size_bytes=size_bytes,
            )
        )


def _is_result(content: bytes, operation: Any) -> bool:
    """Whether the body of an answer can be SQS's result: a JSON object of its members, or none. botocore reads anything
    else as a result without members."""
    shape = operation.output_shape
    if not content.strip():
        return shape is None
    try:
        found: Any = _MEMBERS.decode(content)
    except (ValueError, RecursionError):
        try:
            found = json.loads(content)  # botocore's reader, which takes NaN and lone surrogates
        except (ValueError, RecursionError):
            return False
        if not isinstance(found, dict):
            return False
    return not found or (shape is not None and not found.keys().isdisjoint(shape.members))


def member(answer: dict[str, Any], name: str) -> Any:
    """A member that an answer must have; botocore does not check that. Raises TransportError."""
    value = answer.get(name)
    if value is None:
        raise TransportError(reason=f"the answer has no {name}", may_have_happened=True)
    return value


def entry_error(failed: dict[str, Any], answer: dict[str, Any], queue: str, size_bytes: int = 0) -> VeilError:
    """The error of one entry under `Failed`. SQS gives no status for it: 400 if it blames the sender, else 500."""
    return error_of(
        Refusal(
            code=str(failed.get("Code", "")),
            status=400 if failed.get("SenderFault", True) else 500,
            request_id=str(answer.get("ResponseMetadata", {}).get("RequestId", "")),
            message=str(failed.get("Message", "")),
            queue=queue,
            size_bytes=size_bytes,
        )
    )


class Entry(msgspec.Struct, gc=False):
    """A message ready to be sent."""

    given: dict[str, Any]
    """Members of SendMessage, without QueueUrl."""
    size_bytes: int
    """What counts against the limit."""


def entry_of(given: str | Message, capabilities: Capabilities) -> Entry:
    """Raises CapabilityMissing, ParameterInvalid, MessageTooLarge."""
    message, _, attributes, total_bytes = sendable(given, capabilities)
    members: dict[str, Any] = {"MessageBody": message.body}
    if attributes:
        members["MessageAttributes"] = {name: _value(*each) for name, each in attributes.items()}
    if message.delay is not None and not capabilities.native_fifo:
        members["DelaySeconds"] = math.ceil(message.delay)
    if message.group is not None:
        members["MessageGroupId"] = message.group
    if message.deduplication_id is not None:
        members["MessageDeduplicationId"] = message.deduplication_id
    return Entry(members, total_bytes)


def _value(kind: str, content: str | bytes) -> dict[str, Any]:
    return {"DataType": kind, "StringValue" if isinstance(content, str) else "BinaryValue": content}


def received_of(message: dict[str, Any], asked: float, lease: float) -> tuple[Received, float | None]:
    """The message, and the sender's lease hint in seconds. asked: when the request left; lease: seconds from then."""
    system: dict[str, str] = message.get("Attributes", {})
    attributes = {
        name: untyped(value.get("DataType", ""), value.get("StringValue", value.get("BinaryValue", "")))
        for name, value in message.get("MessageAttributes", {}).items()
    }
    kind = attributes.pop(TYPE_ATTRIBUTE, None)
    hint = attributes.pop(LEASE_HINT_ATTRIBUTE, None)
    sequence = system.get("SequenceNumber")
    received = Received(
        id=member(message, "MessageId"),
        body=member(message, "Body"),
        attributes=attributes,
        receive_count=int(system.get("ApproximateReceiveCount", 0)),
        sent=_seconds(system.get("SentTimestamp")),
        group=system.get("MessageGroupId"),
        sequence_number=None if sequence is None else int(sequence),
        type=None if kind is None else str(kind),
        handle=member(message, "ReceiptHandle"),
        lease_end=asked + lease,
        first_received=_seconds(system.get("ApproximateFirstReceiveTimestamp")),
        deduplication_id=system.get("MessageDeduplicationId"),
        asked=asked,
    )
    return received, hint_of(hint)


def _seconds(milliseconds: str | None) -> float | None:
    return None if milliseconds is None else int(milliseconds) / 1000
