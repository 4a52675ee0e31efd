"""The URLs that name a queue or an account.

    veil:///directory?queue=NAME                    a data directory, in this process
    veil://[key:secret@]host[:port]/name            a VeilMQ server
    sqs://[key:secret@]host:port/[account/]name     an endpoint that speaks SQS
    sqs:///name?region=R                            Amazon SQS, with boto3's own credential chain
    azure://[:key@][host:port]/account/name         Azure Queue Storage
    mns://[id:secret@]host[:port]/name              Alibaba Cloud MNS

Strategy: one pure function from text to a frozen `Address`; a table says what each scheme accepts. Everything between
the separators is percent-encoded. An error never quotes the URL, because any part of it may be a secret that was not
encoded. A URL without a queue's name names the account.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from veilmq.model.errors import ParameterInvalid

_ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_PARAMETER: Final = re.compile("[a-z_]{1,20}")
_FLAGS: Final = {"0": False, "1": True}
_FLAG_NAMES: Final = frozenset({"tls", "create", "base64"})


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a URL. Its repr shows no secret."""

    kind: str
    """`embedded`, `veil`, `sqs`, `azure` or `mns`."""
    queue: str | None = None
    directory: str | None = None
    host: str | None = None
    port: int | None = None
    key: str | None = None
    secret: str | None = None
    account: str | None = None
    region: str | None = None
    tls: bool | None = None
    """None: the scheme's own default."""
    create: bool = False
    base64: bool | None = None
    """Whether bodies travel in base64. None: the adapter's own default."""

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


_FORMS: Final[Mapping[str, _Form]] = {
    "embedded": _Form(frozenset({"queue", "account", "region", "create"})),
    "veil": _Form(frozenset({"account", "region", "tls", "create"}), ("queue",)),
    "sqs": _Form(frozenset({"region", "tls", "create"}), ("account", "queue")),
    "azure": _Form(frozenset({"tls", "create", "base64"}), ("account", "queue"), key_first=False),
    "mns": _Form(frozenset({"tls", "create", "base64"}), ("queue",)),
}
SCHEMES: Final = tuple(scheme for scheme in _FORMS if scheme != "embedded")


def parse(url: str) -> Address:
    """The address that a URL names. Raises ParameterInvalid("url")."""
    if _ESCAPE.search(url) or not url.isprintable() or " " in url:
        raise _wrong("spaces, control characters and the percent sign itself must be percent-encoded")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _wrong("an IPv6 address needs brackets, and brackets elsewhere must be percent-encoded") from None
    kind = parts.scheme
    if kind not in SCHEMES:
        raise _wrong(f"must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
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
    host, port = _host_port(place)
    return found | {"host": host, "port": port}


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
