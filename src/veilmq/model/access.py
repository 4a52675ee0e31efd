"""Who may do what: accounts, their keys, and what a key was granted.

Strategy: the codecs need a key's secret to check a signature, the server its grants to let a command pass; both see
these values and neither reads the file. A grant is a set of actions and of queue-name patterns.
"""

from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, Protocol

import msgspec

DEVELOPMENT_ACCOUNT: Final = "000000000000"
HOME_REGION_DEFAULT: Final = "us-east-1"


class Action(StrEnum):
    """What a grant can allow, in the house's words; `*` in a file means all of its own account."""

    SEND = "send"
    RECEIVE = "receive"
    EXTEND = "extend"
    DELETE = "delete"
    PEEK = "peek"
    MOVE = "move"
    PURGE = "purge"
    CREATE_QUEUE = "create-queue"
    CHANGE_QUEUE = "change-queue"
    DELETE_QUEUE = "delete-queue"
    DESCRIBE_QUEUE = "describe-queue"
    LIST_QUEUES = "list-queues"
    PUBLISH = "publish"
    MANAGE_TOPICS = "manage-topics"
    DESCRIBE_TOPICS = "describe-topics"
    EVENTS = "events"
    BACKUP = "backup"
    SETTINGS = "settings"


class Grant(msgspec.Struct, frozen=True):
    """These actions on queues whose names match one of these shell patterns."""

    actions: frozenset[Action]
    queues: tuple[str, ...] = ("*",)


class AccessKey(msgspec.Struct, frozen=True):
    """A verified or verifiable key of an account. Its repr shows no secret."""

    id: str
    secret: str
    account: str
    home_region: str = HOME_REGION_DEFAULT
    grants: tuple[Grant, ...] = ()
    session_token: str | None = None

    def __repr__(self) -> str:
        return f"AccessKey(id={self.id!r}, account={self.account!r})"

    def allows(self, action: Action, queue: str | None) -> bool:
        """Whether a grant covers the action on the queue of that name (None: on no queue in particular)."""
        for grant in self.grants:
            if action in grant.actions:
                if queue is None:
                    return True
                for pattern in grant.queues:
                    if pattern == "*" or fnmatchcase(queue, pattern):
                        return True
        return False


OF_ALL_ACCOUNTS: Final = frozenset({Action.BACKUP, Action.SETTINGS})
"""What shows something of every account: a key has it only where a grant names it, and `*` does not."""
EVERYTHING: Final = (Grant(frozenset(Action) - OF_ALL_ACCOUNTS),)
"""The grants of a key for which none are written."""


class Keyring(Protocol):
    """Where codecs look keys up. In development mode (`checks` False) any credentials are taken."""

    @property
    def checks(self) -> bool:
        """Whether signatures are checked."""
        ...

    def find(self, key_id: str) -> AccessKey | None:
        """The key of that id; in development mode one that stands for it; None if unknown."""
        ...


class NamedAccount(msgspec.Struct, frozen=True, eq=False):
    """An account under the name and with the keys by which Azure clients know it. Its repr shows no secret."""

    name: str
    key: AccessKey
    """Who somebody is that has one of the account's keys: it may do everything."""
    secrets: tuple[bytes, ...]
    """The account's keys, decoded."""
    identities: dict[str, AccessKey] = {}
    """Who may come with a bearer token, by object id."""
    any_identity: bool = False
    """Whoever bears a token may do everything (development mode)."""

    def __repr__(self) -> str:
        return f"NamedAccount(name={self.name!r}, account={self.key.account!r})"

    def identity(self, object_id: str) -> AccessKey | None:
        """Who the bearer of a token with that object id is; None if nobody was named so."""
        if self.any_identity:
            return AccessKey(object_id, "", self.key.account, self.key.home_region, EVERYTHING)
        return self.identities.get(object_id)


class NamedAccounts(Protocol):
    """Where codecs look up accounts that are known by a name."""

    @property
    def checks(self) -> bool:
        """False in development mode."""
        ...

    def find_account(self, name: str) -> NamedAccount | None:
        """The account of that name, the same object until the keys change; None if unknown."""
        ...
