"""ClientException and ServiceException, as the documents' listings catch them.

Strategy: an error raised by a method of this package has two parents, our class and one of theirs: both `except
QueueMissing` and `except ServiceException` catch it. A network error is a ClientException, a refusal of the service is
a ServiceException. An error about this machine (a storage, a key file) keeps our class only.
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
    """The methods of the Java SDK's exceptions."""

    ours: ClassVar[type[VeilError]] = VeilError
    """Our class of the error."""

    def getErrorCode(self) -> str:
        """MNS's code, or another service's."""
        return str(getattr(self, "code", None) or _code_of(type(self)))

    def getMessage(self) -> str:
        """A sentence that says what happened."""
        return str(self)

    def getRequestId(self) -> str:
        """The service's request id; empty if it gave none."""
        return self.request_id

    def printStackTrace(self) -> None:
        """Print to standard error."""
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
"""Class of error -> code; the nearest base class applies."""


def in_their_words(error: VeilError) -> VeilError:
    """The same error in a class that also has the documents' exception as a base."""
    if isinstance(error, (_Theirs, *_OF_THIS_MACHINE)):
        return error
    family = ClientException if isinstance(error, _OF_NETWORK) else ServiceException
    theirs = _both(family, type(error))(**as_fields(error))
    theirs.request_id = error.request_id
    return theirs


_made: Final[dict[type[VeilError], type[VeilError]]] = {}


def _both(family: type[_Theirs], ours: type[VeilError]) -> type[VeilError]:
    """The class with both bases, created once."""
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
    """Decorates a class: its public methods and its constructor raise errors that the documents' names also catch."""
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
