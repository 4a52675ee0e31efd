"""Alibaba Cloud MNS on the wire: API version 2015-06-06, signatures V2 and V4, limits and errors as data. Here is the
codec, which turns requests into calls, and outcomes into responses.

Strategy: every request takes the same path: verify the sender (signature.py), parse the path (addresses.py), check the
body's MD5, run the operation (operations/). Each step may refuse, and every refusal becomes an error document with its
four children. No exception leaves `decode` or `encode`. docs/mns.md records the decisions about what the documents
leave open and real clients need.
"""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import md5
from typing import Final

from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.access import Action, Keyring
from veilmq.protocols import Request, Response, external_path
from veilmq.protocols.mns import errors, limits, operations
from veilmq.protocols.mns.addresses import Endpoint, read_place, url_start
from veilmq.protocols.mns.call import Asked, Call
from veilmq.protocols.mns.errors import Fault, Refusal
from veilmq.protocols.mns.fields import CONTENT_TYPE, error_body, read_query
from veilmq.protocols.mns.signature import Verifier

__all__ = ["Call", "Codec", "Endpoint"]

_VERSION_HEADER: Final = (b"x-mns-version", limits.VERSION)
_HOST_UNKNOWN: Final = "http://localhost"
_PEM: Final = b"application/x-pem-file"


class Codec:
    """One listener's MNS. Not thread-safe: its caches belong to one loop."""

    def __init__(self, keyring: Keyring, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._verifier = Verifier(keyring, external_path(endpoint.external_url))
        self.documents: dict[bytes, bytes] = {}
        """Public documents by path: the certificate of pushes."""

    def decode(self, request: Request, wall: Instant, arrived: Instant) -> Call | Response:
        """The request as a call; a Response if it is refused or needs no engine.

        `wall` is for signatures; `arrived`, on the lease clock, is when the server began to read the request.
        """
        if request.method == "GET" and request.target in self.documents:
            return Response(200, _PEM, self.documents[request.target])
        try:
            caller = self._verifier.verify(request, wall)
            place = read_place(request.path)
            parameters = read_query(request.query)
            asked = Asked(request, caller, place, parameters, arrived, self._endpoint)
            row = operations.find(asked)
            _check_md5(request)
            commands, memo = row.plan(asked)
            call = Call(caller.key, commands, row, asked, memo)
        except Refusal as refusal:
            return self._refused(refusal, request)
        # Every entry of a batch was refused, or the engine is not needed.
        return call if commands else self.encode(call, ())

    def encode(self, call: Call, outcomes: Sequence[Outcome]) -> Response:
        """The response to a call, from the outcomes of its commands in order."""
        request = call.asked.request
        try:
            response = call.row.answer(call, outcomes)
        except Refusal as refusal:
            return self._refused(refusal, request)
        response.headers = (*response.headers, (b"x-mns-request-id", short_id(request.request_id)), _VERSION_HEADER)
        return response

    def refuse(self, status: int, reason: str, request: Request | None = None, request_id: str = "") -> Response:
        """A refusal by the listener or the server, in MNS's form."""
        fault = errors.HTTP_CODES.get(status)
        if fault is None:
            fault = errors.INTERNAL_SERVER_ERROR if status >= 500 else errors.INVALID_REQUEST_URL
        fault = Fault(fault.code, status, reason)
        if request is None:
            return _error(Refusal(fault), request_id, _HOST_UNKNOWN)
        return self._refused(Refusal(fault), request)

    def failure(self, request: Request) -> Response:
        """The response to a failure of the server: 500, so that an SDK retries."""
        return self._refused(Refusal(errors.INTERNAL_ERROR), request)

    def denied(self, call: Call, action: Action) -> Response:
        """The response if the caller's key was not granted the action."""
        text = f"{call.key.id} was not granted {action.value}, which {call.row.name} needs."
        refusal = Refusal(errors.ACCESS_DENIED, f"{errors.ACCESS_DENIED.message} {text}")
        return self._refused(refusal, call.asked.request)

    def _refused(self, refusal: Refusal, request: Request) -> Response:
        return _error(refusal, request.request_id, url_start(self._endpoint, request))


def _check_md5(request: Request) -> None:
    """Check Content-MD5: it is optional and has three forms in real clients. Raises Refusal: InvalidDegist."""
    given = request.headers.get(b"content-md5")
    if not given:
        return
    digest = md5(request.body, usedforsecurity=False)
    # Python, Go and @alicloud/mns encode the hex digits; ali-mns the bytes, as RFC 1864 says.
    if given == b64encode(digest.hexdigest().encode()) or given == b64encode(digest.digest()):
        return
    if given.lower() != digest.hexdigest().encode():
        raise Refusal(errors.INVALID_DIGEST)


def short_id(request_id: str) -> bytes:
    """A request id of 24 characters, as MNS has them: the end of the server's own."""
    return request_id.replace("-", "")[-24:].upper().encode()


def _error(refusal: Refusal, request_id: str, host: str) -> Response:
    short = short_id(request_id)
    body = error_body(refusal.fault.code, refusal.message, short.decode(), host)
    return Response(refusal.fault.status, CONTENT_TYPE, body, ((b"x-mns-request-id", short), _VERSION_HEADER))
