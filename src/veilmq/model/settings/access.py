"""Who may do what: accounts, their keys, what a key was granted, and who is signed in at the console.

Strategy: the codecs need a key's secret to check a signature, and the server needs its grants to authorize a command;
both see these values, and neither reads the file. A grant is a set of actions and of queue-name patterns.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from fnmatch import translate
from functools import cached_property, lru_cache
from typing import Final, Protocol

import msgspec

from veilmq.model.instant import Instant

DEVELOPMENT_ACCOUNT: Final = "000000000000"
HOME_REGION_DEFAULT: Final = "us-east-1"


class Action(StrEnum):
    """What a grant can allow. `*` in a file means every action on the key's own account."""

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


class AccessKey(msgspec.Struct, frozen=True, dict=True):
    """A verified or verifiable key of an account. Its repr shows no secret."""

    id: str
    secret: str
    account: str
    home_region: str = HOME_REGION_DEFAULT
    grants: tuple[Grant, ...] = ()
    session_token: str | None = None

    def __repr__(self) -> str:
        return f"AccessKey(id={self.id!r}, account={self.account!r})"

    @cached_property
    def _names(self) -> Mapping[Action, "Names"]:
        return _names_of(self.grants)

    def is_still(self, found: "AccessKey") -> bool:
        """Whether `found`, the keyring's current key of this id, is this key. Its grants may have changed."""
        return (found.secret, found.session_token, found.account) == (self.secret, self.session_token, self.account)

    def allows(self, action: Action, queue: str | None) -> bool:
        """Whether a grant covers the action on the queue of that name (None: on no queue in particular)."""
        names = self._names.get(action)
        return names is not None and (queue is None or names.cover(queue))

    def patterns(self, action: Action) -> tuple[str, ...] | None:
        """The patterns of the names for which it has the action; None: of all names."""
        names = self._names.get(action)
        return () if names is None else None if names.everything else names.patterns


class Names:
    """The names that some patterns match. The cost of a look-up does not grow with the number of patterns that are
    plain names or prefixes."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self.everything = "*" in patterns
        beginnings = {pattern[:-1] for pattern in patterns if pattern[-1:] == "*" and not _SPECIAL.search(pattern[:-1])}
        others = [pattern for pattern in patterns if _SPECIAL.search(pattern[:-1]) or pattern[-1:] in ("?", "[")]
        self._exact = frozenset(pattern for pattern in patterns if not _SPECIAL.search(pattern))
        self._beginnings = frozenset(beginnings)
        self._lengths = sorted({len(beginning) for beginning in beginnings})
        self._others = re.compile("|".join(translate(pattern) for pattern in others)) if others else None

    def cover(self, name: str) -> bool:
        """Whether one of the patterns matches the name."""
        if self.everything or name in self._exact:
            return True
        for length in self._lengths:
            if name[:length] in self._beginnings:
                return True
        return self._others is not None and self._others.match(name) is not None

    @cached_property
    def beginnings(self) -> list[str]:
        """Each name begins with one of these, sorted, of which none begins with another."""
        found: list[str] = []
        for beginning in sorted({_SPECIAL.split(pattern, maxsplit=1)[0] for pattern in self.patterns}):
            if not found or not beginning.startswith(found[-1]):
                found.append(beginning)
        return found


_SPECIAL: Final = re.compile(r"[*?\[]")


@lru_cache(maxsize=1_024)
def _names_of(grants: tuple[Grant, ...]) -> Mapping[Action, Names]:
    """What the grants cover, by action. Keys with the same grants share it."""
    patterns: dict[Action, list[str]] = {}
    for grant in grants:
        for action in grant.actions:
            patterns.setdefault(action, []).extend(grant.queues)
    return {action: Names(each) for action, each in patterns.items()}


@lru_cache(maxsize=1_024)
def names_of(patterns: tuple[str, ...]) -> Names:
    """The names that the patterns match."""
    return Names(patterns)


OF_ALL_ACCOUNTS: Final = frozenset({Action.BACKUP, Action.SETTINGS})
"""Actions that show data of every account: a key has one only if a grant names it; `*` does not include them."""
EVERYTHING: Final = (Grant(frozenset(Action) - OF_ALL_ACCOUNTS),)
"""The grants of a key that lists none."""


class Keyring(Protocol):
    """Where codecs look keys up. In development mode (`checks` False) any credentials are accepted."""

    @property
    def checks(self) -> bool:
        """Whether signatures are checked."""

    def find(self, key_id: str) -> AccessKey | None:
        """The key of that id, made up in development mode; None if unknown."""


class NamedAccount(msgspec.Struct, frozen=True, eq=False):
    """An account with the name and keys that Azure clients use. Its repr shows no secret."""

    name: str
    key: AccessKey
    """The principal of a caller with one of the account's keys: it may do everything."""
    secrets: tuple[bytes, ...]
    """The account's keys, decoded."""
    identities: dict[str, AccessKey] = {}
    """The principals of bearer tokens, by object id."""
    any_identity: bool = False
    """Any bearer of a token may do everything (development mode)."""

    def __repr__(self) -> str:
        return f"NamedAccount(name={self.name!r}, account={self.key.account!r})"

    def identity(self, object_id: str) -> AccessKey | None:
        """The principal of that object id; None if unknown."""
        if self.any_identity:
            return AccessKey(object_id, "", self.key.account, self.key.home_region, EVERYTHING)
        return self.identities.get(object_id)


class NamedAccounts(Protocol):
    """Where codecs look up accounts that are known by a name."""

    @property
    def checks(self) -> bool:
        """False in development mode."""

    def find_account(self, name: str) -> NamedAccount | None:
        """The account of that name, the same object until the keys change; None if unknown."""


SESSIONS_MAX: Final = 1_000
"""Sessions of the console. One more ends the one that was unused for longest."""


class StoredSession(msgspec.Struct, frozen=True, gc=False):
    """A browser that is signed in at the console. The secret in its cookie is nowhere else, and not here."""

    digest: bytes
    """Of that secret."""
    proof: bytes
    """Digest, keyed with that secret, of what signed in: the admin token, or the access key with its secret."""
    key: str | None
    """The access key; None: the admin token."""
    client: str
    reads_only: bool
    opened: Instant
    used: Instant
    """When a person last used it; up to a minute late."""
    ends: Instant
    """Without a further use it is over then, and the sweeper deletes it."""


class OpenSession(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Keep a new session, within `SESSIONS_MAX`. Outcome `Recorded`."""

    session: StoredSession


class UseSession(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Keep when a session was used, unless it is over. Outcome `Recorded`."""

    digest: bytes
    used: Instant
    ends: Instant


class CloseSession(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Delete a session, if there is one. Outcome `Recorded`."""

    digest: bytes


SessionCommand = OpenSession | UseSession | CloseSession


class Share(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Keep a value that every server of a cluster shall have, unless there is one of that name. Outcome `Shared`."""

    name: str
    value: bytes
    """May be a secret."""
    replaces: bool = False
    """Keep it whether or not there is one."""

    def __repr__(self) -> str:
        return f"Share(name={self.name!r})"
