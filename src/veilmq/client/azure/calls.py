"""Calls of azure-storage-queue's clients, with the house's errors.

Strategy: one door. What azure.core raises becomes a TransportError, a ServiceError or an error of the model here. The
SDK retries by itself, and the exception that comes out tells of the last attempt only: its retry hook remembers whether
an earlier one may have reached the service, because then "no such message" may be our own doing. Source: azure.core's
exceptions, and the transport's choice between request and response errors.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar
from xml.etree.ElementTree import ParseError

from azure.core.exceptions import AzureError, DecodeError, HttpResponseError, ServiceRequestError

from veilmq.client.azure.errors import Said, error_of
from veilmq.client.errors import STRANGE, TransportError, advised, strange_answer
from veilmq.model.errors import LeaseError

T = TypeVar("T")

_REQUEST_ID: Final = "x-ms-request-id"
_CODE: Final = "x-ms-error-code"
_CLOSED: Final = "HTTP transport has already been closed"
"""How the text begins with which azure.core refuses to send over a client that was closed."""


def call(
    operation: Callable[..., T], queue: str, *, names: Mapping[str, str] | None = None, size_bytes: int = 0,
    creating: bool = False, **given: Any,
) -> T:  # fmt: skip
    """The result of an SDK's method. `queue`, `names`, `size_bytes` and `creating` are for errors: see `Said`.

    Raises QueueMissing, TransportError, ServiceError and what `azure.errors` has.
    """
    reached = False

    def retried(*, error: AzureError | None = None, **_: Any) -> None:
        nonlocal reached
        reached |= not isinstance(error, ServiceRequestError)

    try:
        return operation(retry_hook=retried, **given)
    except (DecodeError, ParseError, *STRANGE) as error:
        if isinstance(error, ValueError) and str(error).startswith(_CLOSED):
            raise TransportError(reason="the client is closed", may_have_happened=reached) from error
        raise strange_answer(error) from error
    except HttpResponseError as error:
        found = error_of(_said(error, queue, names or {}, size_bytes, creating))
        if reached and isinstance(found, LeaseError):
            reason = f"the answer of an earlier attempt was lost, and then: {found}"
            raise TransportError(reason=reason, may_have_happened=True) from error
        raise found from error
    except ServiceRequestError as error:
        raise TransportError(reason=advised(_short(error)), may_have_happened=reached) from error
    except AzureError as error:
        raise TransportError(reason=_short(error), may_have_happened=True) from error


def _said(error: HttpResponseError, queue: str, names: Mapping[str, str], size_bytes: int, creating: bool) -> Said:
    headers: Mapping[str, str] = getattr(error.response, "headers", None) or {}
    code = getattr(error, "error_code", None) or headers.get(_CODE) or type(error).__name__
    extra = getattr(error, "additional_info", None) or {}
    return Said(
        code=str(getattr(code, "value", code)),
        status=error.status_code or 0,
        request_id=headers.get(_REQUEST_ID, ""),
        message=str(error.message).partition("\n")[0],
        extra={name: str(text) for name, text in extra.items()},
        queue=queue,
        names=names,
        size_bytes=size_bytes,
        creating=creating,
    )


def _short(error: AzureError) -> str:
    return f"{type(error).__name__}: {error.message}"
