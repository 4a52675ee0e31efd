"""The codec of SQS: turns requests into calls, and outcomes into responses.

Strategy: every request takes the same path: verify the sender (auth/__init__.py), parse the form (forms/json_form.py,
forms/query_form.py), run the operation (operations/, veil/). Each step may refuse, and every refusal becomes a response
here, in the form of the request. No exception leaves `decode`.

The bound on requests is a token bucket per account, which fills at the rate and holds one second's worth. A request
takes one token or is refused with RequestThrottled. An account without requests for a second has a full bucket, which
is dropped.
"""

from collections.abc import Sequence
from secrets import token_urlsafe
from typing import Final

from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.access import Action, Keyring
from veilmq.protocols import Bounded, Request, Response, external_path
from veilmq.protocols.sqs import errors
from veilmq.protocols.sqs.addresses import Endpoint
from veilmq.protocols.sqs.auth import Verifier
from veilmq.protocols.sqs.auth.authorize import authorized, not_granted
from veilmq.protocols.sqs.call import Asked, Call, Form
from veilmq.protocols.sqs.errors import Fault, Refusal
from veilmq.protocols.sqs.forms import json_form, query_answers, query_form

__all__ = ["Call", "Codec", "Endpoint"]

_ACCOUNTS_MAX: Final = 4_096
_JSON: Final = Form.JSON  # an enum's member costs a search of its class each time
_QUERY: Final = Form.QUERY
_REQUEST_ID: Final = b"x-amzn-RequestId"
"""The header of every response."""
_EXPOSED: Final = b"x-amzn-RequestId,x-amzn-query-error,Date"
_ALLOWED_HEADERS: Final = (
    b"authorization,content-type,x-amz-date,x-amz-target,x-amz-security-token,x-amz-content-sha256,x-amz-user-agent,"
    b"x-amzn-query-mode,x-amzn-trace-id,amz-sdk-invocation-id,amz-sdk-request,x-veilmq-outcome"
)
_PREFLIGHT_SECONDS: Final = b"600"


class Throttle:
    """Counts by the lease clock."""

    def __init__(self, requests_per_second_max: int) -> None:
        self._rate = requests_per_second_max
        self._used: Bounded[str, int] = Bounded(_ACCOUNTS_MAX)

    def takes(self, account: str, now: Instant) -> bool:
        """Whether the account may make one more request now."""
        # In units of one second divided by the rate, to stay in integers: tokens used, and tokens available now.
        there = now * self._rate
        used = max(self._used.get(account, 0), there - SECOND_US * self._rate) + SECOND_US
        if used > there:
            return False
        if account in self._used:
            self._used[account] = used
        else:
            self._used.keep(account, used)
        return True


class Codec:
    """One listener's SQS. Not thread-safe: its caches belong to one loop."""

    def __init__(self, keyring: Keyring, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._verifier = Verifier(
            keyring,
            endpoint.base_domain,
            token_urlsafe(30),
            external_path(endpoint.external_url),
            endpoint.sole_region,
        )
        self._origins = frozenset(endpoint.cors_origins)
        rate = endpoint.requests_per_second_max
        self._throttle = Throttle(rate) if rate else None

    def decode(self, request: Request, wall: Instant, arrived: Instant) -> Call | Response:
        """The request as a call; a Response if it is refused or needs no engine.

        `wall` is for signatures and policies; `arrived`, on the lease clock, is when the server began to read it.
        """
        endpoint, target = self._endpoint, request.headers.get(b"x-amz-target")
        form = _JSON if target in json_form.KNOWN else form_of(request)
        try:
            if request.method == "POST":
                pass
            elif request.method == "OPTIONS":
                return self._preflight(request)
            elif request.method != "GET":
                raise Refusal(errors.METHOD_NOT_SUPPORTED, f"The HTTP method {request.method} is not supported.")
            elif not request.query and (form is not _JSON or target is None):
                raise query_form.nothing_asked()  # before any signature: a browser that opens a queue's URL has none
            caller = self._verifier.verify(request, wall)
            asked = Asked(request, caller, arrived, endpoint)
            if self._throttle is not None and not self._throttle.takes(caller.key.account, arrived):
                raise Refusal(errors.REQUEST_THROTTLED, "The request was denied due to request throttling.")
            if form is _JSON:
                row, given = json_form.read(target or b"", request.body)
            else:
                row, given = query_form.read(request, endpoint)
            commands, memo = row.plan(asked, given)
            call = Call(row.name, caller.key, commands, row, form, memo, request, endpoint)
            if row.before is not None:
                call = row.before(call)
            if asked.foreign is not None or not commands or endpoint.kms_faults or endpoint.guarded:
                call = authorized(asked, call, wall)
        except Refusal as refusal:
            return self._refused(refusal, form, request)
        return call

    def encode(self, call: Call, outcomes: Sequence[Outcome]) -> Response | Call:
        """The response to a call, from the outcomes of its commands in order; or the call that follows it."""
        headers = self._headers(call.request)
        if call.row.json is not None and call.form is _JSON:
            body = call.row.json(call, outcomes)
            if body is not None:
                return Response(200, json_form.CONTENT_TYPE, body, headers)
        elif call.form is _QUERY:
            written = query_answers.write_plain(call, outcomes, headers)
            if written is not None:
                return written
        try:
            result = call.row.answer(call, outcomes)
        except Refusal as refusal:
            return self._refused(refusal, call.form, call.request)
        if isinstance(result, Call):
            # It has no command if every entry of a batch was refused: then the engine is not needed.
            return result if result.commands else self.encode(result, ())
        if call.form is _JSON:
            return json_form.write(result, headers)
        return query_answers.write(call.operation, result, call.form, call.request.request_id, headers)

    def refuse(self, status: int, reason: str, request: Request | None = None, request_id: str = "") -> Response:
        """A refusal by the listener or the server, in SQS's form; that of the request, if it was read that far."""
        fault = errors.HTTP_FAULTS.get(status)
        if fault is None:
            fault = Fault("ServiceUnavailable", errors.SERVICE_UNAVAILABLE.shape, status, sender=status < 500)
        refusal = Refusal(fault, reason)
        if request is None:
            return query_answers.write_refusal(refusal, Form.QUERY, request_id, ((_REQUEST_ID, request_id.encode()),))
        if status == 413 and (target := request.headers.get(b"x-amz-target", b"")) in errors.TOO_LARGE:
            fault, text = errors.TOO_LARGE[target]
            refusal = Refusal(fault, f"{text} {reason}.")
        return self._refused(refusal, form_of(request), request)

    def failure(self, request: Request) -> Response:
        """The response to a failure of the server: 500, so that an SDK retries."""
        text = "We encountered an internal error. Please try again."
        return self._refused(Refusal(errors.INTERNAL_FAILURE, text), form_of(request), request)

    def denied(self, call: Call, action: Action) -> Response:
        """The response if the caller's key was not granted the action."""
        refusal = not_granted(call, getattr(call.commands[0], "queue", None), action)
        return self._refused(refusal, call.form, call.request)

    def _refused(self, refusal: Refusal, form: Form, request: Request) -> Response:
        headers = self._headers(request)
        if refusal.fault is errors.METHOD_NOT_SUPPORTED:
            headers += ((b"allow", b"GET, POST, OPTIONS"),)  # RFC 9110, 15.5.6
        if form is _JSON:
            return json_form.write_refusal(refusal, headers)
        return query_answers.write_refusal(refusal, form, request.request_id, headers)

    def _headers(self, request: Request) -> json_form.Headers:
        headers: json_form.Headers = ((_REQUEST_ID, request.request_id.encode()),)
        if self._origins:
            origin = request.headers.get(b"origin")
            if origin is not None and self._allows(origin):
                headers += (
                    (b"access-control-allow-origin", origin),
                    (b"access-control-expose-headers", _EXPOSED),
                )
            headers += ((b"vary", b"Origin"),)
        return headers

    def _allows(self, origin: bytes) -> bool:
        return "*" in self._origins or origin.decode("latin-1") in self._origins

    def _preflight(self, request: Request) -> Response:
        """Answer a CORS preflight (Fetch standard): what a browser asks before a page may call us."""
        origin = request.headers.get(b"origin")
        if origin is None or not self._allows(origin):
            raise Refusal(errors.ACCESS_DENIED, "This origin may not call this endpoint.")
        return Response(
            204,
            None,
            b"",
            (
                *self._headers(request),
                (b"access-control-allow-methods", b"GET,POST,OPTIONS"),
                (b"access-control-allow-headers", _ALLOWED_HEADERS),
                (b"access-control-max-age", _PREFLIGHT_SECONDS),
            ),
        )


def form_of(request: Request) -> Form:
    """The wire form of the request, and so of its response."""
    headers = request.headers
    target = headers.get(b"x-amz-target")
    # Perl's Amazon::SQS::Simple sends its own target with a Query body.
    if target is not None and (
        target.startswith(json_form.TARGETS)
        or not headers.get(b"content-type", b"").startswith(query_form.CONTENT_TYPE)
    ):
        return _JSON
    if headers.get(b"content-type", b"").startswith(json_form.CONTENT_TYPE):
        return _JSON
    return Form.QUERY_JSON if b"application/json" in headers.get(b"accept", b"") else Form.QUERY
