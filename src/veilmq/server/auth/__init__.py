"""Whom a server lets in: accounts, keys and grants from a file; in development mode, a key for every id.

    [[account]]
    id = "111111111111"
    home_region = "us-east-1"          # where Azure and MNS see queues; the default
    azure_name = "examplename"         # with one or two keys, base64
    azure_keys = ["...", "..."]

    [[account.key]]
    id = "AKEXAMPLE"
    secret = "..."
    session_token = "..."              # only for temporary credentials
    grants = [{ actions = ["send", "receive"], queues = ["orders-*"] }]   # default: everything

    [[account.identity]]
    object_id = "..."                  # `oid` (or `sub`) of a bearer token for Azure
    grants = [{ actions = ["receive"] }]                                  # default: everything

Strategy: the whole file is read and checked and then replaces the old one in one step; a bad file changes nothing.
Until then the same `AccessKey` object is returned for an id, so a codec that caches data derived from a key notices a
change by identity. Errors name line, account and field, never a value. Bearer tokens for Azure are in tokens.py.

Development mode accepts any credentials, so a web page that a developer visits must not reach the queues (`Hosts`):

- DNS rebinding: if the page's own name points at this machine, the Host header has that name. Names of `--dev-host` are
  accepted, but none below them: the owner of a domain of that name could point `any.NAME` at this machine.
- Every POST of a page (a form, a beacon, fetch without CORS) and every call with CORS has its Origin. The server's own
  Origin is accepted at a loopback name only: the owner of another name could serve a page there, then point it here.
- A GET of a page (image, script, frame, link, redirect, fetch without CORS) has no Origin, and a page can switch off
  its Referer. Browsers add Sec-Fetch-Site, but only to trustworthy URLs: https, and http to loopback names. `none` is
  no proof that somebody typed the URL: it stays when the typed one redirects here.
- What is left is a GET to a name such as `http://elasticmq`. A User-Agent of a browser is refused: a page cannot change
  it in a request to another site. So is an Accept-Language without an Authorization header, for browsers with other
  User-Agents: no SDK sends that, and no page can add an Authorization header without an Origin.

Chromium shows it in tests/deploy/test_pages.py, the SDKs in tests/deploy/test_compose.py and tests/clients. Accepted
names are cached, so a request costs a few look-ups. Source: W3C, "Fetch Metadata Request Headers", section 2; WHATWG,
Fetch, "Origin header".
"""

import asyncio
import base64
import logging
import re
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from veilmq.model.settings.access import (
    DEVELOPMENT_ACCOUNT,
    EVERYTHING,
    HOME_REGION_DEFAULT,
    OF_ALL_ACCOUNTS,
    AccessKey,
    Action,
    Grant,
    NamedAccount,
)
from veilmq.model.wording import counted
from veilmq.server.config import FileInvalid, LineNumbers, parse_toml, read_toml
from veilmq.server.config.thread_reads import DEADLINE_S, read_in_thread

DEVELOPMENT_KEYS_MAX: Final = 4_096
"""Ids that development mode remembers; the oldest are dropped."""

DEVELOPMENT_NAME: Final = "devstoreaccount1"
_DEVELOPMENT_SECRET: Final = base64.b64decode(
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Public: the key that `UseDevelopmentStorage=true` stands for ("Use the Azurite emulator", learn.microsoft.com)."""

ACCOUNT_ID: Final = re.compile(r"[0-9]{12}")

log = logging.getLogger("veilmq.credentials")


class Account(msgspec.Struct, frozen=True):
    """One account of the file. Its repr shows no secret."""

    id: str
    home_region: str = HOME_REGION_DEFAULT
    azure_name: str | None = None
    azure_keys: tuple[bytes, ...] = ()
    keys: tuple[AccessKey, ...] = ()
    identities: tuple[AccessKey, ...] = ()

    def __repr__(self) -> str:
        return f"Account(id={self.id!r}, azure_name={self.azure_name!r}, keys={self.keys!r})"


class _Found(NamedTuple):
    """The contents of a file."""

    accounts: tuple[Account, ...]
    keys: dict[str, AccessKey]
    named: dict[str, NamedAccount]


class Credentials:
    """The keys of a file, checked (model.access.Keyring)."""

    checks: Final = True
    home_region: Final = HOME_REGION_DEFAULT
    """The region of an account that is not in the file."""

    def __init__(self, path: Path) -> None:
        """Raises FileInvalid: unreadable, open to others, or not as this module describes."""
        self._path = path
        self._accounts, self._keys, self._named = _read(path)
        self._reading = asyncio.Lock()

    @property
    def accounts(self) -> tuple[Account, ...]:
        """All accounts, in the file's order."""
        return self._accounts

    @property
    def sole_account(self) -> Account | None:
        """The only account, or None: the owner of declared queues that name no account."""
        return self._accounts[0] if len(self._accounts) == 1 else None

    def find(self, key_id: str) -> AccessKey | None:
        """The key of that id, the same object until a reload; None if unknown."""
        return self._keys.get(key_id)

    def find_account(self, name: str) -> NamedAccount | None:
        """The account of that Azure name, the same object until a reload; None if unknown."""
        return self._named.get(name)

    async def reload(self, deadline_s: float = DEADLINE_S) -> bool:
        """Read the file again. A bad file, or a read that hangs, changes nothing and is logged. Returns whether the new
        file is in use.

        No request waits for it: a thread reads the file, and the loop swaps it in.
        """
        async with self._reading:  # a concurrent call waits for this one
            try:
                found = await read_in_thread(self._look, self._path, deadline_s)
            except (FileInvalid, OSError) as error:
                log.error("the credentials stay as they were: %s", error)
                return False
        self._accounts, self._keys, self._named = found
        accounts, keys = counted(len(self._accounts), "account"), counted(len(self._keys), "key")
        log.info("read %s with %s from %s", accounts, keys, self._path)
        return True

    def _look(self) -> _Found:
        return _read(self._path)


class DevelopmentKeyring:
    """Accepts any credentials: an id of 12 digits is its own account, every other id is the default account."""

    checks: Final = False

    def __init__(self) -> None:
        self._keys: dict[str, AccessKey] = {}
        self.live_in(HOME_REGION_DEFAULT)

    def live_in(self, region: str, account: str = DEVELOPMENT_ACCOUNT) -> None:
        """Set the home region of every account, where Azure, MNS and the command line see queues, and the default
        account."""
        self._region, self._account = region, account
        self._keys.clear()
        key = AccessKey(DEVELOPMENT_NAME, "", account, region, EVERYTHING)
        self._named = NamedAccount(DEVELOPMENT_NAME, key, (_DEVELOPMENT_SECRET,), any_identity=True)

    @property
    def home_region(self) -> str:
        """The home region of every account."""
        return self._region

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The default account."""
        return (Account(self._account, self._region),)

    @property
    def sole_account(self) -> Account:
        """The default account."""
        return self.accounts[0]

    def find(self, key_id: str) -> AccessKey:
        """A key for that id, the same object while it is remembered."""
        found = self._keys.get(key_id)
        if found is None:
            account = key_id if ACCOUNT_ID.fullmatch(key_id) else self._account
            if len(self._keys) >= DEVELOPMENT_KEYS_MAX:
                del self._keys[next(iter(self._keys))]
            found = self._keys[key_id] = AccessKey(key_id, "", account, self._region, EVERYTHING)
        return found

    def find_account(self, name: str) -> NamedAccount | None:
        """`devstoreaccount1`, with the emulators' well-known key; its signatures are checked in this mode too."""
        return self._named if name == DEVELOPMENT_NAME else None

    async def reload(self) -> bool:
        """Nothing to read."""
        return True


Keys = Credentials | DevelopmentKeyring
"""The keys that a server uses."""


def home_region(keys: Keys, account: str) -> str:
    """The home region of an account; for an unknown one, the keys' default."""
    return next((each.home_region for each in keys.accounts if each.id == account), keys.home_region)


def knows(keys: Keys, account: str) -> bool:
    """Whether the account exists; without a credentials file, every account does."""
    return not keys.checks or any(each.id == account for each in keys.accounts)


class _GrantTable(msgspec.Struct, forbid_unknown_fields=True):
    actions: list[str]
    queues: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["*"]
    )


_KeyId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+=@-]{1,128}\Z")]
_Secret = Annotated[str, Meta(min_length=1, max_length=1_024)]


class _KeyTable(msgspec.Struct, forbid_unknown_fields=True):
    id: _KeyId
    secret: _Secret
    session_token: Annotated[str, Meta(min_length=1, max_length=8_192)] | None = None
    grants: list[_GrantTable] | None = None


class _AccountTable(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(pattern=r"^[0-9]{12}\Z")]
    home_region: Annotated[str, Meta(pattern=r"^[a-z]{2,4}(-[a-z0-9]{1,16}){1,4}\Z")] = HOME_REGION_DEFAULT
    azure_name: Annotated[str, Meta(pattern=r"^[a-z0-9]{3,24}\Z")] | None = None
    azure_keys: Annotated[list[str], Meta(min_length=1, max_length=2)] | None = None
    key: list[Any] = []
    identity: list[Any] = []


class _IdentityTable(msgspec.Struct, forbid_unknown_fields=True):
    object_id: _KeyId
    grants: list[_GrantTable] | None = None


_WORDS: Final[dict[tuple[Any, str], str]] = {
    (_AccountTable, "id"): "expected 12 digits",
    (_AccountTable, "home_region"): "expected a region such as us-east-1",
    (_AccountTable, "azure_name"): "expected 3 to 24 of a-z 0-9",
    (_KeyTable, "id"): "expected 1 to 128 of A-Z a-z 0-9 _ . + = @ -",
    (_IdentityTable, "object_id"): "expected 1 to 128 of A-Z a-z 0-9 _ . + = @ -",
}
"""What each pattern allows."""
_FIELD: Final = re.compile(r" - at `\$\.?([^`]*)`")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")


class _Reader:
    """Checks one file, and that values are unique where they must be."""

    def __init__(self, path: Path, lines: LineNumbers) -> None:
        self._path = path
        self._lines = lines
        self._seen: dict[tuple[str, str], str] = {}
        self.keys: dict[str, AccessKey] = {}

    def account(self, place: int, table: object) -> Account:
        where = ("account", place)
        who = f"account {place + 1}"
        read = self._convert(table, _AccountTable, who, where)
        who = f"account {read.id}"
        self._unique("account id", read.id, who, (*where, "id"))
        if (read.azure_name is None) != (read.azure_keys is None):
            raise self._error(f"{who}: azure_name and azure_keys belong together", where)
        if read.azure_name is not None:
            self._unique("azure_name", read.azure_name, who, (*where, "azure_name"))
        azure_keys = tuple(self._azure_key(text, who, (*where, "azure_keys")) for text in read.azure_keys or ())
        keys = tuple(self._key(read, index, each, who, (*where, "key", index)) for index, each in enumerate(read.key))
        identities = tuple(
            self._identity(read, index, each, who, (*where, "identity", index))
            for index, each in enumerate(read.identity)
        )
        return Account(read.id, read.home_region, read.azure_name, azure_keys, keys, identities)

    def _key(self, account: _AccountTable, place: int, table: object, who: str, where: tuple[Any, ...]) -> AccessKey:
        who = f"{who}, key {place + 1}"
        read = self._convert(table, _KeyTable, who, where)
        self._unique("key id", read.id, who, (*where, "id"))
        grants = self._grants(read.grants, who, where)
        key = AccessKey(read.id, read.secret, account.id, account.home_region, grants, read.session_token)
        self.keys[key.id] = key
        return key

    def _identity(
        self, account: _AccountTable, place: int, table: object, who: str, where: tuple[Any, ...]
    ) -> AccessKey:
        who = f"{who}, identity {place + 1}"
        read = self._convert(table, _IdentityTable, who, where)
        self._unique(f"object_id in account {account.id}", read.object_id, who, (*where, "object_id"))
        if account.azure_name is None:
            raise self._error(f"{who}: an identity needs an account with azure_name and azure_keys", where)
        return AccessKey(read.object_id, "", account.id, account.home_region, self._grants(read.grants, who, where))

    def _grants(self, read: list[_GrantTable] | None, who: str, where: tuple[Any, ...]) -> tuple[Grant, ...]:
        if read is None:
            return EVERYTHING
        grants = tuple(self._grant(grant, who, (*where, "grants")) for grant in read)
        return EVERYTHING if grants == EVERYTHING else grants

    def _grant(self, read: _GrantTable, who: str, where: tuple[Any, ...]) -> Grant:
        known = {action.value for action in Action}
        if not read.actions or not set(read.actions) <= known | {"*"}:
            raise self._error(f"{who}: field grants: actions are * or some of {', '.join(sorted(known))}", where)
        actions = frozenset(Action(action) for action in read.actions if action != "*")
        if "*" in read.actions:
            actions |= frozenset(Action) - OF_ALL_ACCOUNTS
        return Grant(actions, tuple(read.queues))

    def _azure_key(self, text: str, who: str, where: tuple[Any, ...]) -> bytes:
        try:
            raw = base64.b64decode(text, validate=True)
        except ValueError:  # binascii.Error is one; a character beyond ASCII is another
            raw = b""
        if not raw:
            raise self._error(f"{who}: field azure_keys: expected one or two keys in base64", where)
        return raw

    def _unique(self, what: str, value: str, who: str, where: tuple[Any, ...]) -> None:
        if (what, value) in self._seen:
            raise self._error(f"{who}: this {what} is given twice, first to {self._seen[what, value]}", where)
        self._seen[what, value] = who

    def _convert(self, table: object, kind: type[Any], who: str, where: tuple[Any, ...]) -> Any:
        try:
            return msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            reason, field = _explain(str(error), kind)
            raise self._error(f"{who}: {reason}", (*where, *([field] if field else []))) from None

    def _error(self, reason: str, where: tuple[Any, ...]) -> FileInvalid:
        return FileInvalid(self._path, reason, self._lines.of(*where))


def _by_azure_name(accounts: tuple[Account, ...]) -> dict[str, NamedAccount]:
    """The accounts that Azure clients can name."""
    named = {}
    for account in accounts:
        if account.azure_name is not None:
            key = AccessKey(account.azure_name, "", account.id, account.home_region, EVERYTHING)
            identities = {identity.id: identity for identity in account.identities}
            named[account.azure_name] = NamedAccount(account.azure_name, key, account.azure_keys, identities)
    return named


def _explain(text: str, kind: type[Any]) -> tuple[str, str | None]:
    """msgspec's message in our words, and its field. It contains no value of the file."""
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        return f"unknown field {unknown[1]}", unknown[1]
    at = _FIELD.search(text)
    plain = _FIELD.sub("", text).replace("`", "")
    plain = plain[0].lower() + plain[1:]
    if at is None:
        return plain, None
    if "regex" in plain:
        plain = _WORDS[kind, at[1]]
    return f"field {at[1]}: {plain}", re.split(r"[.\[]", at[1])[0]


def _read(path: Path) -> _Found:
    """Raises FileInvalid."""
    return _found(path, *read_toml(path, private=True))


def check_text(path: Path, text: str) -> None:
    """Raises FileInvalid if a server would refuse a file with that text."""
    _found(path, *parse_toml(path, text))


def _found(path: Path, tables: dict[str, Any], lines: LineNumbers) -> _Found:
    for name in tables:
        if name != "account":
            raise FileInvalid(
                path, f"unknown table {name}: a credentials file holds [[account]] tables", lines.of(name)
            )
    listed = tables.get("account")
    if not isinstance(listed, list) or not listed:
        raise FileInvalid(path, "holds no [[account]] table, so nobody could sign in")
    reader = _Reader(path, lines)
    accounts = tuple(reader.account(place, table) for place, table in enumerate(listed))
    return _Found(accounts, reader.keys, _by_azure_name(accounts))


_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+))(?::\d{1,5})?")
_REMEMBERED_MAX: Final = 256
_NO_BROWSER: Final = re.compile(rb"PowerShell/|CFNetwork/|\(compatible; (?:pycurl|urllib3)\)|^(?:node|undici|Deno)\b")
"""User-Agents of programs that look like browsers: those of PowerShell and of Celery's workers (pycurl; urllib3 in
kombu 5.5) begin like theirs, the others send Accept-Language."""


class Hosts:
    """Accepts Hosts: loopback addresses, `localhost`, `names`, names below `domains`; and Origins: those listed (None:
    the protocol judges those of other sites), and at loopback names the server's own."""

    def __init__(
        self, domains: Collection[str], origins: Collection[str] | None = (), names: Collection[str] = ()
    ) -> None:
        self._names = frozenset(name.lower() for name in names)
        self._suffixes = tuple(f".{domain.lower()}" for domain in domains)
        self._origins = None if origins is None else frozenset(origin.encode("latin-1") for origin in origins)
        self._known: dict[bytes, bool] = {}
        """Accepted hosts, and whether they are loopback names."""

    def takes(self, host: bytes, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request to that Host, with these headers by their names in lower case, may come in."""
        loopback = self._known.get(host)
        if loopback is None:
            loopback = is_loopback_name(host.decode("latin-1"))
            if not loopback and not is_loopback_name(host.decode("latin-1"), self._suffixes, self._names):
                return False
            if len(self._known) < _REMEMBERED_MAX:
                self._known[host] = loopback
        origin = headers.get(b"origin")
        if origin is None:
            site = headers.get(b"sec-fetch-site")
            return not _is_browser(headers) if site is None else loopback and site == b"same-origin"
        own = origin.partition(b"://")[2] == host
        if self._origins is None:
            return loopback or not own
        return (own and loopback) or origin in self._origins or b"*" in self._origins


def _is_browser(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser sent a request without Origin and Sec-Fetch-Site."""
    agent = headers.get(b"user-agent", b"")
    marked = agent.startswith(b"Mozilla/") or (b"accept-language" in headers and b"authorization" not in headers)
    return marked and _NO_BROWSER.search(agent) is None


def is_loopback_name(host: str, suffixes: tuple[str, ...] = (), names: Collection[str] = ()) -> bool:
    """Whether a Host header (with or without a port) names this machine, one of `names` (lower case), or a name with
    one of the suffixes."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = (found[1] or found[2]).lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost") or name in names or f".{name}".endswith(suffixes):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
