"""What can go wrong between a client and its cloud, beyond the errors of the model.

Strategy: the model's errors are what a queue says; these two are about the way to it. `may_have_happened` is what a
caller needs to know before it tries again.
"""

from veilmq.model.errors import VeilError


class TransportError(VeilError):
    """The queue could not be reached, or the answer did not come."""

    reason: str
    may_have_happened: bool
    """False: certainly nothing was done. True: it may have been done, and the answer was lost."""
    summary = "{reason}"


class ServiceError(VeilError):
    """The cloud refused with a code for which the model has no word (credentials, throttling, its own faults)."""

    code: str
    status: int
    request_id: str
    message: str
    summary = "{code}: {message} (status {status}, request {request_id})"

    @property
    def retryable(self) -> bool:
        """Throttled, or a fault of the service: the same call may succeed later."""
        return self.status >= 500 or self.status == 429 or "Throttl" in self.code or self.code == "SlowDown"
