"""The interface of the server that the admin port runs in.

Strategy: protocols name only what is read, so that the application runs over any shell and store, also without data
ports.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from veilmq.model.instant import Instant
from veilmq.model.settings.access import AccessKey, Keyring
from veilmq.server.clock import LeaseClock
from veilmq.server.cluster import Cluster
from veilmq.server.http.listener import Listener
from veilmq.server.logs import RefusedWaits
from veilmq.server.port import Port
from veilmq.server.service import PushRoom
from veilmq.server.shell import Shell
from veilmq.store import Reader
from veilmq.store.archive.shipping import Archive


class Account(Protocol):
    """An account."""

    @property
    def id(self) -> str:
        """12 digits."""
        ...

    @property
    def home_region(self) -> str:
        """The default region of its queues."""
        ...

    @property
    def azure_name(self) -> str | None:
        """The name by which Azure clients know it."""
        ...

    @property
    def azure_keys(self) -> Sequence[bytes]:
        """Secrets."""
        ...

    @property
    def keys(self) -> Sequence[AccessKey]:
        """Its access keys."""
        ...

    @property
    def identities(self) -> Sequence[AccessKey]:
        """Those whom a bearer token for Azure names; the ids are object ids."""
        ...


class Keys(Keyring, Protocol):
    """The keys of all callers, and the default account."""

    @property
    def home_region(self) -> str:
        """The home region of an unknown account."""
        ...

    @property
    def sole_account(self) -> Account | None:
        """The only account; None if there are several."""
        ...

    @property
    def accounts(self) -> Sequence[Account]:
        """All known accounts."""
        ...


def home_region(keys: Keys, account: str) -> str:
    """The home region of an account; for an unknown one, the keys' default."""
    return next((each.home_region for each in keys.accounts if each.id == account), keys.home_region)


def knows(keys: Keys, account: str) -> bool:
    """Whether the account exists; without a credentials file, every account does."""
    return not keys.checks or any(each.id == account for each in keys.accounts)


class Service(Protocol):
    """A running server."""

    @property
    def shell(self) -> Shell:
        """Runs commands."""
        ...

    @property
    def leads(self) -> bool:
        """Whether it has a shell: in a cluster, while it owns the queues or may again."""
        ...

    @property
    def reader(self) -> Reader:
        """Reads the shell's store."""
        ...

    @property
    def clock(self) -> LeaseClock:
        """The shell's clock."""
        ...

    @property
    def listeners(self) -> Mapping[str, Listener]:
        """The data ports' sockets, by protocol."""
        ...

    @property
    def ports(self) -> Mapping[str, Port]:
        """The data ports' codecs, by protocol."""
        ...

    @property
    def archive(self) -> Archive | None:
        """Where the data is shipped to; None without one."""
        ...

    @property
    def pushes(self) -> Mapping[str, int]:
        """Attempts to push, by result."""
        ...

    @property
    def push_room(self) -> PushRoom | None:
        """The health of push endpoints; None while there is nothing to push."""
        ...

    @property
    def push_fault(self) -> str | None:
        """Why nothing is pushed until a restart; None while pushes work."""
        ...

    @property
    def refused_waits(self) -> RefusedWaits:
        """Counts receives that found no room to wait."""
        ...

    @property
    def cluster(self) -> Cluster | None:
        """Its part in a cluster; None: it is alone."""
        ...

    @property
    def certificate_ends(self) -> Instant | None:
        """Until when the current TLS certificate is valid; None without TLS."""
        ...

    @property
    def keyring(self) -> Keys:
        """The current keys."""
        ...

    @property
    def on_reload(self) -> set[Callable[[], None]]:
        """Called when the keys have been read again."""
        ...
