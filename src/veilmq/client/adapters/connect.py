"""`veilmq.connect`: turns a URL, or an SDK's object, into a `Queue`; and the URLs that name a queue or an account.

    veil:///directory?queue=NAME                    a data directory, in this process
    veil://[key:secret@]host[:port][,host...]/name  a VeilMQ server, or the servers of a cluster
    sqs://[key:secret@]host:port/[account/]name     an endpoint that speaks SQS
    sqs:///name?region=R                            Amazon SQS, with boto3's own credential chain
    azure://[:key@][host:port]/account/name         Azure Queue Storage
    mns://[id:secret@]host[:port]/name              Alibaba Cloud MNS

Strategy: a table maps a URL's scheme to the function that opens the account. An adapter is imported when it is needed.
A queue that was opened from a URL closes its account, too; what the caller brought stays open (sdk_objects.py).

URLs: one pure function from text to a frozen `Address`; a table says what each scheme accepts. Everything between the
separators is percent-encoded. An error never quotes the URL, because any part of it may be a secret that was not
encoded. A URL without a queue's name names the account.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

import msgspec

from veilmq.client.adapters.cloud import client_name, is_here
from veilmq.client.adapters.sdk_objects import adopted
from veilmq.client.messages import Template
from veilmq.client.queue import Account, Queue
from veilmq.client.unreadable import Policy, keep
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueMissing
from veilmq.model.settings.access import HOME_REGION_DEFAULT

_ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_PARAMETER: Final = re.compile("[a-z_]{1,20}")
_FLAGS: Final = {"0": False, "1": True}
_FLAG_NAMES: Final = frozenset({"tls", "create", "base64", "retries"})


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a URL. Its repr shows no secret."""

    kind: str
    """`embedded`, `veil`, `sqs`, `azure` or `mns`."""
    queue: str | None = None
    directory: str | None = None
    host: str | None = None
    port: int | None = None
    others: tuple[tuple[str, int | None], ...] = ()
    """Further hosts and ports."""
    key: str | None = None
    secret: str | None = None
    account: str | None = None
    region: str | None = None
    tls: bool | None = None
    """None: the scheme's own default."""
    create: bool = False
    base64: bool | None = None
    """Whether bodies travel in base64. None: the adapter's own default."""
    retries: bool = True
    """False: a call is one request, so that its answer is that request's."""

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name)}
        if self.secret is not None:
            shown["secret"] = "***"
        return f"Address({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class _Form(NamedTuple):
    """What a scheme accepts."""

    parameters: frozenset[str]
    places: tuple[str, ...] = ()
    """The parts of the path, in order; the last ones may be missing."""
    key_first: bool = True
    """key:secret@; False: only :key@."""
    several_hosts: bool = False


_FORMS: Final[Mapping[str, _Form]] = {
    "embedded": _Form(frozenset({"queue", "account", "region", "create"})),
    "veil": _Form(frozenset({"account", "region", "tls", "create", "retries"}), ("queue",), several_hosts=True),
    "sqs": _Form(frozenset({"region", "tls", "create", "retries"}), ("account", "queue")),
    "azure": _Form(frozenset({"tls", "create", "base64", "retries"}), ("account", "queue"), key_first=False),
    "mns": _Form(frozenset({"tls", "create", "base64", "retries"}), ("queue",)),
}
_AUTHORITY: Final = re.compile("[^/?#]*")
SCHEMES: Final = tuple(scheme for scheme in _FORMS if scheme != "embedded")


def parse_url(url: str, also_named: tuple[str, ...] = ()) -> Address:
    """The address that a URL names. also_named: schemes that only the error's text adds. Raises ParameterInvalid."""
    if _ESCAPE.search(url) or not url.isprintable() or " " in url:
        raise _wrong("spaces, control characters and the percent sign itself must be percent-encoded")
    try:
        parts = _split(url)
    except ValueError:
        raise _wrong("an IPv6 address needs brackets, and brackets elsewhere must be percent-encoded") from None
    kind = parts.scheme
    if kind not in SCHEMES:
        raise _wrong(f"must begin with {', '.join(f'{scheme}://' for scheme in (*SCHEMES, *also_named))}")
    if "#" in url or not url[len(kind) :].startswith("://"):
        raise _wrong(f"must look like {kind}://...; a # in it must be written %23")
    if kind == "veil" and not parts.netloc:
        kind = "embedded"
    form = _FORMS[kind]
    parameters = _parameters(parts.query, form)
    found: dict[str, Any] = {"kind": kind, **parameters}
    if kind == "embedded":
        found["directory"] = _directory(parts.path)
    else:
        found |= _authority(parts.netloc, form) | _path(parts.path, form)
    if kind in {"veil", "mns"} and not found.get("host"):
        raise _wrong(f"{kind}:// needs a host")
    return Address(**found)


def _split(url: str) -> SplitResult:
    """As urlsplit, which checks the brackets of one host, here of each. Raises ValueError."""
    scheme, mark, rest = url.partition("://")
    found = _AUTHORITY.match(rest)
    assert found is not None
    authority = found[0]
    user, at, place = authority.rpartition("@")
    host, *others = place.split(",")
    for other in others:
        urlsplit(f"//{other}")
    parts = urlsplit(f"{scheme}{mark}{user}{at}{host}{rest[len(authority) :]}")
    return parts._replace(netloc=authority) if others else parts


def _wrong(reason: str) -> ParameterInvalid:
    return ParameterInvalid(parameter="url", reason=reason)


def _parameters(query: str, form: _Form) -> dict[str, Any]:
    """queue, account, region as text; tls, create and base64 as flags."""
    found: dict[str, Any] = {}
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name not in form.parameters:
            shown = f", not {name}" if _PARAMETER.fullmatch(name) and "@" not in query else ""
            hint = ": a directory has three slashes, veil:///DIR?queue=NAME" if name == "queue" else ""
            raise _wrong(f"after the question mark it takes {', '.join(sorted(form.parameters))}{shown}{hint}")
        if name in found:
            raise _wrong(f"{name} stands in it twice")
        if name in _FLAG_NAMES:
            if value not in _FLAGS:
                raise _wrong(f"{name} must be 0 or 1")
            found[name] = _FLAGS[value]
        else:
            found[name] = _text(value)
            if not found[name]:
                raise _wrong(f"{name} must not be empty")
    return found


def _authority(netloc: str, form: _Form) -> dict[str, Any]:
    """key, secret, host, port."""
    found: dict[str, Any] = {}
    user, at, place = netloc.rpartition("@")
    if "@" in user:
        raise _wrong("an @ in a key or secret must be written %40")
    if at:
        key, colon, secret = user.partition(":")
        if not colon or not secret or bool(key) is not form.key_first or ":" in secret:
            shape = "key:secret@" if form.key_first else ":key@"
            raise _wrong(f"before the host it takes {shape}, with : / ? # and @ inside them percent-encoded")
        found["key"], found["secret"] = _text(key) or None, _text(secret)
    if not place:
        if at and form.key_first:
            raise _wrong("credentials without a host: leave them to the SDK, or name the host")
        return found
    if "," in place and not form.several_hosts:
        raise _wrong("it takes one host; several are for veil://")
    (host, port), *others = map(_host_port, place.split(","))
    return found | {"host": host, "port": port} | ({"others": tuple(others)} if others else {})


def _host_port(place: str) -> tuple[str, int | None]:
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        host, port = place, ""
        if colon and not place.endswith("]"):
            raise _wrong("the port must be a number from 1 to 65535")
    elif not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65_535):
        raise _wrong("the port must be a number from 1 to 65535; : / ? # and @ in a secret must be percent-encoded")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host:
        raise _wrong("the host is missing before the port")
    return host, int(port) if port else None


def _path(path: str, form: _Form) -> dict[str, Any]:
    """account, queue: assigned from the right, the queue first; an account's URL ends with a slash."""
    if "@" in path:
        raise _wrong("an @ after the host; : / ? # and @ in a key or secret must be percent-encoded")
    parts = path.split("/")[1:]
    named = parts.pop() if parts else ""
    found: dict[str, Any] = {}
    if named:
        found["queue"] = _text(named)
    if parts and "account" in form.places:
        found["account"] = _text(parts.pop())
    if parts or not all(found.values()):
        raise _wrong(f"the path is /{'/'.join(form.places)}, with / inside a name written %2F")
    return found


def _directory(path: str) -> str:
    directory = _text(path)
    if not directory.strip("/"):
        raise _wrong("veil:/// needs the absolute path of a data directory")
    if "\0" in directory:
        raise _wrong("a path has no null character")
    return directory


def _text(quoted: str) -> str:
    try:
        return unquote(quoted, errors="strict")
    except UnicodeDecodeError:
        raise _wrong("what is percent-encoded must be UTF-8") from None


DEVELOPMENT_KEYS: Final = {
    "devstoreaccount1": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
}
"""The account of development servers, whose key is public (Microsoft's documentation of its emulator)."""


def connect(source: Any, queue: str | None = None, *, template: Template | None = None) -> Queue:
    """The queue that a URL names (see above), or that an SDK's object reaches.

    source: a URL; an SDK's client (boto3's SQS client, Azure's QueueServiceClient, MNS's Account) with the queue's name
    (for SQS also its URL) in `queue`; an SDK's queue object (boto3's `sqs.Queue`, Azure's QueueClient, MNS's Queue). A
    missing queue is created if the URL says create=1 or a template is given.

    Raises ParameterInvalid (the URL, the object), QueueMissing, QueueExists (with other settings than the template's),
    CapabilityMissing (the adapter or SDK is not installed), TransportError, ServiceError.
    """
    if not isinstance(source, str):
        return _adopt(source, queue, template)
    address = parse_url(source)
    name = _sole_name(address, queue)
    account = open_address(address)
    try:
        if template is not None or address.create:
            account.create(name, template)
        return _Connected(account.queue(name))
    except QueueMissing as error:
        account.close()
        error.add_note(f"Make it with `veilmq queues create {name}`, with create=1 in the URL, or with template=.")
        raise
    except BaseException:
        account.close()
        raise


def connect_account(source: Any) -> Account:
    """The account that an SDK's client, or a URL without a queue's name, reaches. Raises as `connect` does."""
    if not isinstance(source, str):
        account, name = adopted(source, None)
        if name is not None:
            account.close()
            raise ParameterInvalid(parameter="source", reason="is a queue: connect_account takes a client")
        return account
    address = parse_url(source)
    if address.queue is not None:
        reason = "names a queue: connect_account takes it without, and with / at the end"
        if address.kind == "azure" and address.account is None:
            reason = "ends with the account's name: connect_account takes it with / at the end (azure://.../ACCOUNT/)"
        elif address.kind == "embedded":
            reason = "names a queue: connect_account takes it without queue="
        raise ParameterInvalid(parameter="url", reason=reason)
    return open_address(address)


class _Connected(Wrapping):
    """A queue with the account that was opened for it; both are closed together."""

    def close(self) -> None:
        self.inner.close()
        self.inner.account.close()

    def __repr__(self) -> str:
        return repr(self.inner)


def _sole_name(address: Address, queue: str | None) -> str:
    if address.queue is not None and queue is not None:
        raise ParameterInvalid(parameter="queue", reason="the URL names one already")
    name = address.queue or queue
    if name is None:
        reason = "names no queue: queue=NAME is missing" if address.kind == "embedded" else "names no queue at its end"
        raise ParameterInvalid(parameter="url", reason=reason)
    return name


def open_address(address: Address, unreadable: Policy = keep) -> Account:
    """The account of an address, whose queue is neither looked for nor created. unreadable: where bodies may travel in
    base64, the policy for those that do not. Raises as `connect`."""
    given = {"unreadable": unreadable} if "base64" in _FORMS[address.kind].parameters else {}
    try:
        return OPENERS[address.kind](address, **given)
    except ModuleNotFoundError as error:
        raise _sdk_missing(address.kind, error) from error


def _sdk_missing(kind: str, error: ModuleNotFoundError) -> CapabilityMissing:
    return CapabilityMissing(capability=f"{kind} (no module {error.name}: pip install 'veilmq[{kind}]')")


def _embedded(address: Address) -> Account:
    from veilmq.client.adapters.embedded import EmbeddedAccount

    assert address.directory is not None
    given = {name: value for name in ("account", "region") if (value := getattr(address, name)) is not None}
    return EmbeddedAccount(address.directory, create=address.create, **given)


def _veil(address: Address) -> Account:
    from veilmq.client.adapters.veil import VeilAccount

    assert address.host is not None
    given: dict[str, Any] = {} if address.region is None else {"region": address.region}
    return VeilAccount(
        address.host, address.port, address.key, address.secret, tls=bool(address.tls), account=address.account,
        retries=address.retries, others=address.others, **given,
    )  # fmt: skip


def _sqs(address: Address) -> Account:
    from veilmq.client.adapters.sqs import SqsAccount, new_clients

    endpoint = None if address.host is None else _endpoint(address, tls=address.tls is not False)
    # With an endpoint of the caller's own there is no region to look up; a VeilMQ server shows its queues in this one.
    default_region = None if address.host is None else HOME_REGION_DEFAULT
    given = address.key, address.secret, address.region, default_region, address.retries
    client, extending = new_clients(endpoint, *given)
    return SqsAccount(client, owner=address.account, owns_client=True, extending=extending)


def _azure(address: Address, unreadable: Policy) -> Account:
    from azure.storage.queue import QueueServiceClient

    from veilmq.client.adapters.azure import AzureAccount

    if address.account is None:
        raise ParameterInvalid(parameter="url", reason="azure:// needs the account: azure://.../ACCOUNT/NAME")
    if address.host is None:
        url = f"https://{address.account}.queue.core.windows.net"
    else:
        url = f"{_endpoint(address, tls=address.tls is not False)}/{quote(address.account)}"
    credential = address.secret or DEVELOPMENT_KEYS.get(address.account) or _azure_identity()
    key = {"account_name": address.account, "account_key": credential} if isinstance(credential, str) else credential
    try:
        # The SDK's own default waits at least 15 seconds before it retries: longer than many leases.
        client = QueueServiceClient(
            url, credential=key, retry_total=2 if address.retries else 0, initial_backoff=0, increment_base=1,
            random_jitter_range=0, user_agent=client_name(), proxies={"no_proxy": "*"} if is_here(url) else None,
        )  # fmt: skip
    except ValueError as error:
        raise _wrong(f"the SDK refuses it, perhaps for want of a key (azure://:KEY@...): {error}") from error
    return AzureAccount(client, base64=bool(address.base64), unreadable=unreadable, owns_client=True)


def _azure_identity() -> Any:
    try:
        return importlib.import_module("azure.identity").DefaultAzureCredential()
    except ModuleNotFoundError:
        reason = "has no key (azure://:KEY@...), and without one azure:// needs the package azure-identity"
        raise ParameterInvalid(parameter="url", reason=reason) from None


def _mns(address: Address, unreadable: Policy) -> Account:
    from mns.account import Account as SdkAccount  # type: ignore[import-untyped]

    from veilmq.client.adapters.mns import MnsAccount

    if address.key is None:
        reason = "has no credentials (mns://ID:SECRET@...); with others than these, hand over an mns.account.Account"
        raise ParameterInvalid(parameter="url", reason=reason)
    account = SdkAccount(_endpoint(address, tls=bool(address.tls)), address.key, address.secret)
    encodes = address.base64 is not False
    return MnsAccount(account, base64=encodes, unreadable=unreadable, retries=address.retries)


def _endpoint(address: Address, *, tls: bool) -> str:
    assert address.host is not None
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{'https' if tls else 'http'}://{host}" + (f":{address.port}" if address.port else "")


OPENERS: Final[dict[str, Callable[..., Account]]] = {
    "embedded": _embedded,
    "veil": _veil,
    "sqs": _sqs,
    "azure": _azure,
    "mns": _mns,
}
"""By kind of address. A new adapter adds a line here, and one to sdk_objects.py if it accepts its SDK's objects."""


def _adopt(source: Any, queue: str | None, template: Template | None) -> Queue:
    account, name = adopted(source, queue)
    try:
        if name is None:
            raise ParameterInvalid(parameter="queue", reason="which one? Give its name or URL")
        if template is not None:
            account.create(name, template)
        return _Connected(account.queue(name))
    except BaseException:
        account.close()
        raise
