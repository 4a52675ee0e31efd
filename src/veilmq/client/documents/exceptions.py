"""ClientException and ServiceException, as the documents' listings catch them.

Strategy: an error that leaves a method of this room is one of ours and one of theirs at once: `except QueueMissing`
catches it, and so does `except ServiceException`. What the network did is a ClientException, what the queue's service
refused is a ServiceException; an error about this machine (a storage, a key file) stays ours alone.
"""

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar

from veilmq.client import errors as client
from veilmq.model import errors as model
from veilmq.model.errors import VeilError, as_fields

Documented = TypeVar("Documented", bound=type)


class _Theirs(VeilError):
    """What the Java SDK's exceptions can tell."""

    ours: ClassVar[type[VeilError]] = VeilError
    """The class that was raised below this room."""

    def getErrorCode(self) -> str:
        """MNS's code, or what another service said."""
        return str(getattr(self, "code", None) or _code_of(type(self)))

    def getMessage(self) -> str:
        """What happened, in a sentence."""
        return str(self)

    def getRequestId(self) -> str:
        """The service's id of the request, where it told one; else empty."""
        return self.request_id

    def printStackTrace(self) -> None:
        """To standard error."""
        traceback.print_exception(self, file=sys.stderr)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.ours, as_fields(self)), {"request_id": self.request_id} if self.request_id else None


class ClientException(_Theirs):
    """Something is wrong with the network between the client and the service."""


class ServiceException(_Theirs):
    """The service refused; `getErrorCode` says why."""


_OF_NETWORK: Final = (client.TransportError, client.ObjectStoreFailed)
_OF_THIS_MACHINE: Final = (
    client.EncodingMismatch,
    client.GapFound,
    client.KeyFileInvalid,
    client.QueueRecreated,
    client.StateInvalid,
    client.StorageHeld,
    client.StorageLost,
    client.Unreadable,
    model.CapabilityMissing,
)

_CODES: Final[dict[type[VeilError], str]] = {
    model.QueueMissing: "QueueNotExist",
    model.QueueExists: "QueueAlreadyExist",
    model.QueueDeletedRecently: "QueueDeletedRecently",
    model.ReceiptInvalid: "ReceiptHandleError",
    model.LeaseError: "MessageNotExist",
    model.TopicMissing: "TopicNotExist",
    model.TopicExists: "TopicAlreadyExist",
    model.SubscriptionExists: "SubscriptionAlreadyExist",
    model.CapacityError: "TooManyRequests",
    model.StoreError: "InternalError",
    model.UsageError: "InvalidArgument",
    client.TransportError: "NetworkError",
    client.ObjectStoreFailed: "NetworkError",
}
"""Class of error -> code; the nearest class counts."""


def in_their_words(error: VeilError) -> VeilError:
    """The same error, which the documents' names catch, too."""
    if isinstance(error, (_Theirs, *_OF_THIS_MACHINE)):
        return error
    family = ClientException if isinstance(error, _OF_NETWORK) else ServiceException
    theirs = _both(family, type(error))(**as_fields(error))
    theirs.request_id = error.request_id
    return theirs


_made: Final[dict[type[VeilError], type[VeilError]]] = {}


def _both(family: type[_Theirs], ours: type[VeilError]) -> type[VeilError]:
    """The class with both parents, made once."""
    made = _made.get(ours)
    if made is None:
        made = type(ours.__name__, (family, ours), {"ours": ours, "__module__": __name__})
        made.fields = ours.fields
        made = _made.setdefault(ours, made)
    return made


def _again(ours: type[VeilError], values: dict[str, Any]) -> VeilError:
    return in_their_words(ours(**values))


def _code_of(kind: type[VeilError]) -> str:
    return next((_CODES[each] for each in kind.__mro__ if each in _CODES), "InternalError")


def documented(kind: Documented) -> Documented:
    """A class whose public methods, and whose constructor, raise errors that the documents' names catch."""
    for name, each in list(vars(kind).items()):
        if inspect.isfunction(each) and (not name.startswith("_") or name == "__init__"):
            setattr(kind, name, _translating(each))
    return kind


def _translating(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def translated(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except VeilError as error:
            theirs = in_their_words(error)
            if theirs is error:
                raise
            raise theirs.with_traceback(error.__traceback__) from error.__cause__

    return translated
