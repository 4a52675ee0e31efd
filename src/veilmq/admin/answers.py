"""Reads requests and writes responses of the admin port.

Strategy: JSON in and out by msgspec; a body is bounded while it arrives; all errors have one form. A long response is
made in pieces on threads, each piece in its own read transaction, so that a slow reader holds no old state of the
store.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from veilmq.admin.access import CALLER, KEYRING, REFUSALS, Caller, asked
from veilmq.admin.api import STATUS, Refused, described, inputs, operator
from veilmq.admin.history import Scope
from veilmq.model.commands import AnyCommand
from veilmq.model.errors import VeilError
from veilmq.model.events import HistoryTrimmed
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.access import Action
from veilmq.server.auth import Keys, home_region
from veilmq.server.logs import RefusalLog
from veilmq.server.shell import Shell

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
JSON_LINES: Final = "application/x-ndjson"
_JSON: Final = msgspec.json.Encoder()
L = TypeVar("L", bound=inputs.ListInput)

logger = logging.getLogger("veilmq.admin")


def caller_of(request: Request) -> Caller:
    """The authenticated caller (access.py)."""
    caller = request.scope[CALLER]
    assert isinstance(caller, Caller)
    return caller


def caller_now(request: Request) -> Caller:
    """The caller with its key's grants of now. Raises Refused (401) for a removed key."""
    return caller_of(request).after_waiting(request.scope[KEYRING]())


def scope_of(request: Request) -> Scope:
    """What of the history the caller may see. Raises Refused."""
    caller = caller_of(request)
    caller.check(Action.EVENTS)
    return Scope(caller.key, bodies=caller.bodies)


async def body_of(request: Request, check: Callable[[Caller], object] | None = None) -> bytes:
    """The whole body; the caller then has the grants of its end, for a client may take hours to send it.

    check: whether the caller may do it; made before the body is read and again with the new grants. None: the body
    says what is to be checked. Raises what it raises, and Refused: 413 beyond `BODY_BYTES_MAX`, 400 if the client hung
    up (for the log alone), 401 if the caller's key was taken away meanwhile.
    """
    if check is not None:
        check(caller_of(request))
    parts: list[bytes] = []
    left = BODY_BYTES_MAX
    try:
        async for part in request.stream():
            left -= len(part)
            if left < 0:
                raise Refused(413, "body_too_large", f"a body has at most {BODY_BYTES_MAX} bytes", limit=BODY_BYTES_MAX)
            parts.append(part)
    except ClientDisconnect:
        raise Refused(400, "body_incomplete", "the connection ended within the body") from None
    request.scope[CALLER] = caller = caller_now(request)
    if check is not None:
        check(caller)
    return b"".join(parts)


async def gone_of(request: Request) -> None:
    """Wait until the client hangs up. The body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def members_of(request: Request) -> dict[str, str]:
    """The query string. Raises Refused (400) for a repeated member."""
    pairs = request.query_params.multi_items()
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Refused(400, "repeated_member", "each member of the query may be there once")
    return members


def listing_of(request: Request, keys: Keys, action: Action, shape: type[L]) -> tuple[L, str, str | None]:
    """What a listing is asked for: its input, the account (`*`: all), and the region (None: all). Raises Refused if the
    caller may not do the action there."""
    caller = caller_of(request)
    wanted = inputs.convert(members_of(request), shape)
    account = caller.whose(wanted.account)
    caller.check(action, account)
    if wanted.region is not None or account == "*":
        return wanted, account, wanted.region
    return wanted, account, home_region(keys, account)


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The value as JSON."""
    return Response(_JSON.encode(value), status, media_type="application/json", headers=_PRIVATE | (headers or {}))


def command_id_of(request: Request) -> str | None:
    """The client's id of its command. Raises Refused (400)."""
    return operator.command_id(request.headers.getlist(operator.HEADER))


def no_command_id(request: Request) -> None:
    """Raises Refused (400) if the client gives an id to a call that cannot be repeated by it."""
    if operator.HEADER in request.headers:
        words = "this call takes no Idempotency-Key: repeating it would not have the same effect"
        raise Refused(400, "idempotency_key_refused", words)


async def carry_out(
    request: Request, shell: Shell, asked: operator.Asked, commands: Sequence[AnyCommand]
) -> tuple[list[Outcome], dict[str, str]]:
    """Run an operator's commands, or find that they ran before: their outcomes, and headers for the answer.

    Raises Refused and VeilError.
    """
    command = operator.operate(caller_of(request).origin, asked, commands, command_id_of(request))
    (outcome,) = await shell.call(command)
    done = operator.done(command, outcome)
    return done.outcomes, operator.REPLAYED if done.repeated else {}


_PRIVATE: Final = {"cache-control": "no-store"}


def stream(parts: AsyncIterator[bytes], media_type: str, headers: dict[str, str] | None = None) -> Response:
    """A response whose body is made while it is sent."""
    return StreamingResponse(parts, media_type=media_type, headers=_PRIVATE | (headers or {}))


async def in_thread(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same parts, each made on a thread."""
    while (part := await run_in_threadpool(next, parts, None)) is not None:
        yield part


def _error_answer(request: Request, status: int, body: dict[str, Any]) -> Response:
    request_id = request.scope.get("veilmq.request_id")
    message = f"{body['field']}: {body['message']}" if body["field"] else body["message"]
    refusals: RefusalLog = request.scope["state"][REFUSALS]
    if refusals.takes(f"{status} {body['error']}"):
        key = caller_of(request).key
        described = asked(request.scope, None if key is None else key.id)
        logger.info("%s: %d %s: %s", described, status, body["error"], message, extra={"request": request_id})
    return answer(body | {"request_id": request_id}, status)


async def veil_error(request: Request, error: Exception) -> Response:
    """The response to a command's error."""
    assert isinstance(error, VeilError)
    return _error_answer(request, STATUS[type(error)], described(error))


async def refused(request: Request, error: Exception) -> Response:
    """The response to what HTTP or access control forbids."""
    assert isinstance(error, Refused)
    body = {"error": error.error, "field": None, "message": error.message, "data": error.data}
    return _error_answer(request, error.status, body)


async def trimmed(request: Request, error: Exception) -> Response:
    """The events were trimmed: 410 with `first_offset`."""
    assert isinstance(error, HistoryTrimmed)
    first = {"first_offset": error.first_offset}
    body = {"error": "history_trimmed", "field": "from", "message": str(error), "data": first, **first}
    return _error_answer(request, 410, body)


async def http_error(request: Request, error: Exception) -> Response:
    """The response for an unknown path or method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    body: dict[str, Any] = {"error": code, "field": None, "message": error.detail, "data": {}}
    response = _error_answer(request, error.status_code, body)
    response.headers.update(error.headers or {})
    return response


async def failed(request: Request, error: Exception) -> Response:
    """A bug: the log has the error, and the caller gets a request id.

    The response announces that the server closes the connection, so that the client does not reuse it.
    """
    request_id = request.scope.get("veilmq.request_id")
    logger.error("%s: failed", asked(request.scope, None), exc_info=error, extra={"request": request_id})
    body: dict[str, Any] = {
        "error": "internal",
        "field": None,
        "message": "internal error",
        "data": {},
        "request_id": request_id,
    }
    response = answer(body, 500)
    response.headers["connection"] = "close"
    return response
