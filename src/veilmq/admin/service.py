"""What the admin port needs of the server that it runs in.

Strategy: the parts are named by what is read of them, so that the application can be put over any shell and store, and
so that it runs without data ports too.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from veilmq.model.access import Keyring
from veilmq.model.instant import Instant
from veilmq.server.clock import LeaseClock
from veilmq.server.listener import Listener
from veilmq.server.parking import ParkingWatch
from veilmq.server.port import Port
from veilmq.server.service import PushRoom
from veilmq.server.shell import Shell
from veilmq.store import Reader


class Account(Protocol):
    """Whose queues there are."""

    @property
    def id(self) -> str:
        """12 digits."""
        ...

    @property
    def home_region(self) -> str:
        """Where its queues are meant to be if no region is named."""
        ...


class Keys(Keyring, Protocol):
    """Whoever may call, and whose queues are meant where none is named."""

    @property
    def home_region(self) -> str:
        """Of an account that is not known."""
        ...

    @property
    def sole_account(self) -> Account | None:
        """The account, if there is one only."""
        ...

    @property
    def accounts(self) -> Sequence[Account]:
        """All that are known."""
        ...


def home_region(keys: Keys, account: str) -> str:
    """The home region of an account; of one that is not known, the keys' own."""
    return next((each.home_region for each in keys.accounts if each.id == account), keys.home_region)


def knows(keys: Keys, account: str) -> bool:
    """Whether somebody can be of that account: without a credentials file, of any."""
    return not keys.checks or any(each.id == account for each in keys.accounts)


class Service(Protocol):
    """A running server."""

    @property
    def shell(self) -> Shell:
        """Runs commands."""
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
    def pushes(self) -> Mapping[str, int]:
        """Attempts to push, by what became of them."""
        ...

    @property
    def push_room(self) -> PushRoom | None:
        """How the endpoints of pushes do; None while there is nothing to push."""
        ...

    @property
    def push_fault(self) -> str | None:
        """Why nothing is pushed until a restart; None as long as that can be done."""
        ...

    @property
    def parking(self) -> ParkingWatch:
        """Counts receives that found no room to wait."""
        ...

    @property
    def certificate_ends(self) -> Instant | None:
        """Until when the TLS certificate is valid that new connections get; None without TLS."""
        ...

    @property
    def keyring(self) -> Keys:
        """The keys of the moment."""
        ...
