"""What `/api/v1` takes and gives, without HTTP: the command line uses it on a directory that no server holds.

Strategy: `operations` turns a request's members (`inputs`) into the same commands that the protocols use, and their
outcomes into plain values (`views`). Here is how an error is shown, and with which status: one total table from error
class to status. The body is always {error, field, message}, with the error's data under `data`. `Refused` is for what
HTTP or access control forbids.
"""

from collections.abc import Mapping
from typing import Any, Final

from veilmq.model import errors
from veilmq.model.errors import ParameterInvalid, VeilError, as_fields

STATUS: Final[Mapping[type[VeilError], int]] = {
    errors.ParameterInvalid: 400,
    errors.QueueMissing: 404,
    errors.QueueExists: 409,
    errors.QueueDeletedRecently: 409,
    errors.PurgeInProgress: 409,
    errors.MessageTooLarge: 413,
    errors.ReceiptInvalid: 400,
    errors.RedriveRefused: 409,
    errors.TopicMissing: 404,
    errors.TopicExists: 409,
    errors.SubscriptionMissing: 404,
    errors.SubscriptionExists: 409,
    errors.SubscriptionsFull: 409,
    errors.AttemptNotRetryable: 409,
    errors.LeaseExpired: 409,
    errors.LeaseTaken: 409,
    errors.MessageGone: 410,
    errors.InFlightFull: 429,
    errors.RateExceeded: 429,
    errors.MovesFull: 429,
    errors.QueuesFull: 429,
    errors.TopicsFull: 429,
    errors.AccountSubscriptionsFull: 429,
    errors.DiskLow: 507,
    errors.Overloaded: 503,
    errors.StoreFailed: 503,
    errors.StoreUnknown: 500,
    errors.CapabilityMissing: 501,
}
"""Status of each error (RFC 9110, 15; 507: RFC 4918, 11.5)."""


class Refused(Exception):
    """What HTTP or access control forbids: a status, a code in snake case, and a sentence."""

    def __init__(self, status: int, error: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.status = status
        self.error = error
        self.message = message
        self.data = data


def described(error: VeilError) -> dict[str, Any]:
    """The error's body: {error, field, message, data}. `field` names the member to change, or is null."""
    field = error.parameter if isinstance(error, ParameterInvalid) else None
    message = error.reason if isinstance(error, ParameterInvalid) else str(error)
    return {"error": type(error).__name__, "field": field, "message": message, "data": as_fields(error)}
