"""Azure Queue Storage on the wire: the REST API, SharedKey, SAS and bearer tokens, limits and errors as data. Here is
the codec, which turns requests into calls, and outcomes into responses.

Strategy: every request takes the same path: parse the address (addresses.py), verify the sender (auth), find the
operation (operations/), check that a SAS covers it. Each step may refuse, and every refusal becomes a response here. A
SAS with a stored policy, and a request of a web page, depend on stored data: the first call reads it, and `encode`
returns the call that follows. No exception leaves `decode` or `encode`. Source: the Queue Storage REST API on
learn.microsoft.com, up to version 2026-10-06.
"""

import re
from collections.abc import Sequence
from typing import Final

from veilmq.model.commands import AnyCommand, DescribeQueue
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Outcome, QueueDescribed
from veilmq.model.settings.access import Action, NamedAccount, NamedAccounts
from veilmq.protocols import Request, Response
from veilmq.protocols.azure import cors, errors, limits, operations
from veilmq.protocols.azure.addresses import Endpoint, check_timeout, read_place, read_query
from veilmq.protocols.azure.auth import Tokens, Verifier
from veilmq.protocols.azure.auth.sas import check_permission, policies_of, with_policy
from veilmq.protocols.azure.call import Asked, Call, Headers, Operation, Way, origin_of, service_queue
from veilmq.protocols.azure.cors import CorsRule
from veilmq.protocols.azure.errors import Refusal, fault_of, unauthenticated
from veilmq.protocols.azure.fields import CONTENT_TYPE, print_iso, write_error
from veilmq.protocols.azure.operations.service import properties_from

__all__ = ["Call", "Codec", "Endpoint"]

_VISIBLE: Final = re.compile(rb"[ -~]*")
_UNCACHED: Final = ((b"cache-control", b"no-cache"),)
"""On each response to a GET: a SAS comes without the Authorization header that forbids a shared cache to store messages
(RFC 9111, 3.5)."""


def _no_plan(asked: Asked) -> "tuple[tuple[AnyCommand, ...], None]":
    raise AssertionError("it is answered from its question")


def _no_answer(call: Call, outcomes: Sequence[Outcome]) -> Response:
    raise AssertionError("it is answered from its question")


_PREFLIGHT: Final = Operation("Preflight Queue Request", _no_plan, _no_answer)
_REFUSAL: Final = Operation("a refusal that a page may read", _no_plan, _no_answer)
"""The memo of its call is the Refusal."""


class Codec:
    """One listener's Azure Queue Storage. Not thread-safe: its caches belong to one loop."""

    def __init__(self, accounts: NamedAccounts, endpoint: Endpoint, tokens: Tokens) -> None:
        self._accounts = accounts
        self._endpoint = endpoint
        self._verifier = Verifier(accounts, endpoint, tokens)
        self._rules: dict[str, tuple[NamedAccount, tuple[CorsRule, ...]]] = {}
        """The last known CORS rules by account name: for headers, never for a decision."""

    def decode(self, request: Request, wall: Instant, arrived: Instant) -> Call | Response:
        """The request as a call; a Response if it is refused or needs no engine.

        `wall` is for signatures; `arrived`, on the lease clock, is when the server began to read the request.
        """
        asked = None
        try:
            place = read_place(request, self._endpoint.base_domain)
            parameters = read_query(request.query)
            version = _version(request, parameters)
            asked = Asked(request, place, parameters, version, wall, arrived, self._endpoint)
            if request.method == "OPTIONS":
                return self._preflight(asked)
            asked.caller = self._verifier.verify(request, place, parameters, version, wall)
            row = operations.find(asked)
            check_timeout(parameters)
            _authorize(asked, row)
            questions = self._questions(asked)
            if questions:
                return Call(asked.caller.account.key, questions, row, asked, question=True)
            return self._planned(asked, row)
        except Refusal as refusal:
            shown = None if asked is None else self._shown_to_page(refusal, asked)
            return self._refused(refusal, request, wall, asked) if shown is None else shown

    def encode(self, call: Call, outcomes: Sequence[Outcome]) -> Response | Call:
        """The response to a call, from the outcomes of its commands in order; or the call that follows it."""
        asked = call.asked
        if call.row is operations.SET_PROPERTIES:
            self._rules.pop(asked.sender.account.name, None)
        try:
            if call.question:
                return self._judged(call, outcomes)
            return _finish(call.row.answer(call, outcomes), asked)
        except Refusal as refusal:
            return self._refused(refusal, asked.request, asked.wall, asked)

    def refuse(self, status: int, reason: str, request: Request | None = None, request_id: str = "") -> Response:
        """A refusal by the listener or the server, in Azure's form."""
        fault = errors.HTTP_CODES.get(status, errors.SERVER_BUSY if status >= 500 else errors.INVALID_INPUT)
        if request is None:
            body = write_error(fault.code, f"{reason}\nRequestId:{request_id}", {})
            headers = ((b"x-ms-request-id", request_id.encode()), (b"x-ms-error-code", fault.code.encode()))
            return Response(status, CONTENT_TYPE, body, headers)
        fault = errors.Fault(fault.code, status, fault.message)
        return self._refused(Refusal(fault, message=reason), request, None, None)

    def failure(self, request: Request) -> Response:
        """The response to a failure of the server: 500, so that an SDK retries."""
        return self._refused(Refusal(errors.INTERNAL_ERROR), request, None, None)

    def denied(self, call: Call, action: Action) -> Response:
        """The response if the bearer of a token was not granted the action."""
        extra = {"AuthenticationErrorDetail": f"{call.key.id} was not granted {action.value}."}
        refusal = Refusal(errors.AUTHORIZATION_PERMISSION_MISMATCH, extra)
        return self._refused(refusal, call.asked.request, call.asked.wall, call.asked)

    def _planned(self, asked: Asked, row: Operation) -> Call | Response:
        commands, memo = row.plan(asked)
        call = Call(asked.sender.key, commands, row, asked, memo)
        return call if commands else _finish(row.answer(call, ()), asked)

    def _preflight(self, asked: Asked) -> Call:
        cors.read_preflight(asked.request)
        account = self._accounts.find_account(asked.place.account)
        if account is None:
            raise Refusal(errors.CORS_PREFLIGHT_FAILURE)
        return self._rules_question(account, _PREFLIGHT, asked)

    def _shown_to_page(self, refusal: Refusal, asked: Asked) -> Call | None:
        """A call that reads the CORS rules, so that an allowed page may read the refusal; None if that is not
        needed."""
        if asked.request.method == "OPTIONS" or b"origin" not in asked.request.headers:
            return None
        account = self._accounts.find_account(asked.place.account)
        return None if account is None else self._rules_question(account, _REFUSAL, asked, refusal)

    def _rules_question(
        self, account: NamedAccount, row: Operation, asked: Asked, refusal: Refusal | None = None
    ) -> Call:
        """A call that reads the account's CORS rules for a request without a verified sender."""
        origin = origin_of(account.name, asked.request.headers.get(b"user-agent", b""))
        question = DescribeQueue(queue=service_queue(account.key), origin=origin)
        return Call(account.key, (question,), row, asked, refusal, question=True)

    def _questions(self, asked: Asked) -> tuple[AnyCommand, ...]:
        """Commands that read what authorization needs; headers of known CORS rules are set at once."""
        caller, method = asked.sender, asked.request.method
        account = caller.account
        questions: list[AnyCommand] = []
        known = self._rules.get(account.name)
        if b"origin" not in asked.request.headers and known is not None and known[0] is account:
            if known[1]:
                asked.cors = cors.headers_for(known[1], None, method)
        elif b"origin" in asked.request.headers or method in cors.CACHED:
            questions.append(DescribeQueue(queue=service_queue(account.key), origin=caller.origin))
        if caller.sas is not None and caller.sas.policy is not None:
            questions.append(DescribeQueue(queue=asked.queue(), origin=caller.origin))
        return tuple(questions)

    def _judged(self, call: Call, outcomes: Sequence[Outcome]) -> Call | Response:
        """Continue a request with the stored CORS rules and policies that were read."""
        asked, row = call.asked, call.row
        for command, outcome in zip(call.commands, outcomes, strict=True):
            assert isinstance(command, DescribeQueue)
            if command.queue.name == service_queue(call.key).name:
                rules = properties_from(outcome, command).cors
                if row is _PREFLIGHT:
                    return _finish(cors.preflight(rules, asked.request), asked)
                if row is _REFUSAL:
                    _let_read(asked, rules)
                    raise call.memo
                self._rules[asked.sender.account.name] = (asked.sender.account, rules)
                if b"origin" in asked.request.headers:
                    self._admit_page(asked, rules)
                else:
                    asked.cors = cors.headers_for(rules, None, asked.request.method)
            else:
                _complete(asked, row, command, outcome)
        return self._planned(asked, row)

    def _admit_page(self, asked: Asked, rules: tuple[CorsRule, ...]) -> None:
        origin, method = asked.request.headers[b"origin"].decode("latin-1"), asked.request.method
        if not self._accounts.checks and not cors.fits(rules, origin, method) and not _is_own(asked.request, origin):
            # The key of development mode is public: a page must not use it unless the rules allow it.
            raise Refusal(errors.AUTHORIZATION_FAILURE, {"Reason": "No CORS rule lets this Origin in."})
        _let_read(asked, rules)

    def _refused(self, refusal: Refusal, request: Request, wall: Instant | None, asked: Asked | None) -> Response:
        message = f"{refusal.message}\nRequestId:{request.request_id}"
        if wall is not None:
            message += f"\nTime:{print_iso(wall)[:-1]}.{wall % SECOND_US * 10:07d}Z"
        fault = refusal.fault
        headers = _headers(request, asked, ((b"x-ms-error-code", fault.code.encode()), *refusal.headers))
        body = write_error(fault.code, message, refusal.extra)
        # Without its body, XML in the Content-Type makes the C++ SDK crash.
        kind = None if request.method == "HEAD" else CONTENT_TYPE
        return Response(fault.status, kind, body, headers, phrase=fault.message.encode())


def _version(request: Request, parameters: dict[str, str]) -> str:
    """The version whose semantics apply. Raises Refusal if it is invalid or missing."""
    header = request.headers.get(b"x-ms-version")
    if header is not None:
        version = header.decode("latin-1")
        if not limits.VERSION.match(version):
            raise errors.bad_header("x-ms-version", version)
        return version
    for name in ("api-version", "sv"):
        given = parameters.get(name)
        if given is not None:
            if not limits.VERSION.match(given):
                raise errors.bad_parameter(name, given, "Not a version of the service.")
            return given
    if request.method == "OPTIONS":
        return limits.VERSION_CORS
    raise errors.missing_header("x-ms-version")


def _authorize(asked: Asked, row: Operation) -> None:
    """Raises Refusal if the caller's kind of authorisation does not cover this operation."""
    caller = asked.sender
    if asked.place.secondary and row.writes:
        raise Refusal(errors.INSUFFICIENT_ACCOUNT_PERMISSIONS)
    if row.only_bearer and caller.way is not Way.BEARER:
        # The service's own text, which people search for.
        raise unauthenticated("Only authentication scheme Bearer is supported")
    if caller.way is Way.BEARER and asked.version < row.bearer_since:
        raise Refusal(errors.FEATURE_VERSION_MISMATCH)
    sas = caller.sas
    if sas is not None and sas.policy is None:
        check_permission(sas, row.account_types, row.account_permissions, row.queue_permissions)


def _complete(asked: Asked, row: Operation, command: AnyCommand, outcome: Outcome) -> None:
    """Merge the stored policy into the SAS that names it. Raises Refusal."""
    if isinstance(outcome, VeilError) and not isinstance(outcome, QueueMissing):
        raise fault_of(outcome, command)
    labels = outcome.info.settings.labels if isinstance(outcome, QueueDescribed) else {}
    sas = asked.sender.sas
    assert sas is not None
    whole = with_policy(sas, policies_of(labels), asked.wall)
    check_permission(whole, row.account_types, row.account_permissions, row.queue_permissions)


def _let_read(asked: Asked, rules: tuple[CorsRule, ...]) -> None:
    """Set the headers that let a page's browser show the response, if the rules allow it."""
    origin = asked.request.headers[b"origin"].decode("latin-1")
    if origin.isascii() and origin.isprintable():
        asked.cors = cors.headers_for(rules, origin, asked.request.method)


def _is_own(request: Request, origin: str) -> bool:
    return origin.partition("://")[2].encode("latin-1") == request.host


def _finish(response: Response, asked: Asked) -> Response:
    response.headers = _headers(asked.request, asked, response.headers)
    return response


def _headers(request: Request, asked: Asked | None, own: Headers) -> Headers:
    """All headers of a response with these own headers."""
    headers: Headers = (*own, (b"x-ms-request-id", request.request_id.encode()))
    version = request.headers.get(b"x-ms-version", b"").decode("latin-1") if asked is None else asked.version
    if asked is not None or limits.VERSION.match(version):
        headers += ((b"x-ms-version", version.encode()),)
    if request.method in cors.CACHED:
        headers += _UNCACHED
    echoed = request.headers.get(b"x-ms-client-request-id")
    if echoed and len(echoed) <= limits.CLIENT_REQUEST_ID_CHARACTERS_MAX and _VISIBLE.fullmatch(echoed):
        headers += ((b"x-ms-client-request-id", echoed),)
    return headers if asked is None else headers + asked.cors.beside(headers)
