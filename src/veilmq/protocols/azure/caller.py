"""The verified sender of a request, and how it was authorised.

Strategy: one value for every kind of authorisation. Permissions are checked in two places: a SAS carries its own, which
the rows in `operations/` name; the server checks a key's grants.
"""

from enum import StrEnum
from functools import lru_cache

import msgspec

from veilmq.model.access import AccessKey, NamedAccount
from veilmq.model.commands import CLIENT_NAME_CHARACTERS_MAX, Origin
from veilmq.model.instant import Instant


class Way(StrEnum):
    """How a request was authorised."""

    SHARED_KEY = "shared key"
    ACCOUNT_SAS = "account SAS"
    QUEUE_SAS = "queue SAS"
    DELEGATION_SAS = "user delegation SAS"
    BEARER = "bearer token"


class Sas(msgspec.Struct, frozen=True):
    """A shared access signature with a correct signature; times and the rest are not checked yet."""

    way: Way
    key: AccessKey
    permissions: str | None
    """`sp`; None: the stored policy's."""
    start: Instant | None
    expiry: Instant | None
    policy: str | None
    """`si`: the stored access policy that completes it."""
    address: tuple[int, int] | None
    """First and last IPv4 address of `sip`."""
    https_only: bool
    resource_types: str = ""
    services: str = "q"
    delegated_to: str | None = None
    """`sduoid`: a bearer token of this user is required, too."""
    delegated_tenant: str | None = None
    """`skdutid`: and of this tenant."""


class Identity(msgspec.Struct, frozen=True):
    """The bearer of a verified token."""

    key: AccessKey
    object_id: str
    tenant: str
    expiry: Instant


class Caller(msgspec.Struct, gc=False):
    """The sender of a request."""

    account: NamedAccount
    key: AccessKey
    way: Way
    origin: Origin
    sas: Sas | None = None
    identity: Identity | None = None


def origin_of(principal: str, agent: bytes) -> Origin:
    """One object for all requests of a principal and client."""
    return _origin(principal, agent[:CLIENT_NAME_CHARACTERS_MAX])


@lru_cache(4_096)
def _origin(principal: str, client: bytes) -> Origin:
    return Origin("azure", principal, client.decode("utf-8", "replace"))
