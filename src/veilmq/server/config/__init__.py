"""What an operator gives a server: settings, and files of queues to declare. Here is how any file of an operator is
read: with a bound on size, and TOML with the line of each value; and the value of one setting, from a flag, a variable
or a TOML file.

Strategy: everything is checked when it is read, and an error names the file and the line or the setting. tomllib gives
values without positions, so a scan of the lines finds the table headers and the keys below them; that is good enough
for error messages. No message repeats a value: it may be a secret.
"""

import os
import re
import tomllib
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec

from veilmq.model.message_type import POINTER
from veilmq.server.config.settings import ALLOWED, FIELDS, Address, SettingInvalid, Settings, is_known

FILE_BYTES_MAX: Final = 4 * 1024 * 1024

_HEADER: Final = re.compile(r"\s*\[\[?([A-Za-z0-9_.\s-]+)\]\]?\s*(?:#.*)?$")
_DEPTH_MAX: Final = 4
"""Parts of a table header: nothing that is looked up is deeper."""
_KEY: Final = re.compile(r"\s*\"?([A-Za-z0-9_-]+)\"?\s*=")
_AT: Final = re.compile(r"\(at (?:line (\d+), column (\d+)|end of document)\)")
PORT_MAX: Final = 65_535
_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+)):(\d{1,9})")
_DOMAIN: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}))*")
_NETWORK_NAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")
"""A host name or an IPv4 address; container engines also allow underscores."""
_URL: Final = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::(?P<port>\d{1,9}))?"
    r"(?!/(?:.*/)?queue/[^/]+/?$)(?:/(?:(?![?#@])[!-~])*)?"
)
"""After `/queue/` a queue URL names its region."""
_ORIGIN: Final = re.compile(r"\*|https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::\d{1,5})?")
_DSN: Final = re.compile(r"postgres(?:ql)?://\S{1,4000}|(?:[a-z_]+ ?= ?\S+ ?){1,40}")
_PLACE: Final = re.compile(r"[^\s\x00-\x1f]{1,1024}")
_SERVER_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ATTRIBUTE: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_TOKEN_NAME: Final = re.compile(r"[!-~]{1,512}")

_HINTS: Final = get_type_hints(Settings, include_extras=True)


class FileInvalid(Exception):
    """A file that cannot be used: its path, the line, and the reason; `str` shows all three.

    errno: the system's, if the file could not be read; None if its contents are wrong.
    """

    def __init__(self, path: Path, reason: str, line: int | None = None, errno: int | None = None) -> None:
        super().__init__(f"{path}: {reason}" if line is None else f"{path}: line {line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason
        self.errno = errno


def read_text(path: Path, *, private: bool = False) -> str:
    """The text of a file, without a byte order mark. Raises FileInvalid.

    private: refuse it if anybody but its owner may read or write it.
    """
    try:
        # Check the open file, so that nobody can swap it between the check and the read.
        with open(path, "rb") as file:
            if private and os.fstat(file.fileno()).st_mode & 0o077:
                raise FileInvalid(path, f"it holds secrets and is open to other users: chmod 600 {path}")
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise FileInvalid(path, f"cannot be read: {error.strerror}", errno=error.errno) from None
    if len(raw) > FILE_BYTES_MAX:
        raise FileInvalid(path, f"is longer than {FILE_BYTES_MAX} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileInvalid(path, "is not UTF-8", error.object[: error.start].count(b"\n") + 1) from None


def read_toml(path: Path, *, private: bool = False) -> tuple[dict[str, Any], "LineNumbers"]:
    """The contents of a TOML file, and their line numbers. Raises FileInvalid."""
    return parse_toml(path, read_text(path, private=private))


def parse_toml(path: Path, text: str) -> tuple[dict[str, Any], "LineNumbers"]:
    """The same for the file's text. Raises FileInvalid."""
    try:
        return tomllib.loads(text), LineNumbers(text)
    except (ValueError, RecursionError) as error:  # ValueError: an integer beyond Python's own bound of digits, too
        # The rest of tomllib's message may quote the file.
        found = _AT.search(str(error))
        if found is None:
            raise FileInvalid(path, "is not TOML") from None
        line = int(found[1]) if found[1] else text.rstrip("\n").count("\n") + 1
        reason = f"is not TOML at column {found[2]}" if found[1] else "is not TOML: it ends too early"
        raise FileInvalid(path, reason, line) from None


class LineNumbers:
    """The line numbers of tables and keys: ("account", 1, "key", 0) is the first `[[account.key]]` of the second
    account."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[Any, ...], int] = {}
        counts: dict[tuple[Any, ...], int] = {}
        here: tuple[Any, ...] = ()
        for number, line in enumerate(text.splitlines(), 1):
            header = _HEADER.match(line)
            if header is not None:
                *around, last = (part.strip() for part in header[1].split(".", _DEPTH_MAX)[:_DEPTH_MAX])
                here = ()
                for part in around:
                    here = (*here, part, counts.get((*here, part), 0))
                here = (*here, last)
                counts[here] = counts.get(here, -1) + 1
                here = (*here, counts[here])
                self._lines[here] = number
                self._lines.setdefault(here[:-1], number)
                continue
            key = _KEY.match(line)
            if key is not None:
                self._lines.setdefault((*here, key[1]), number)

    def of(self, *where: Any) -> int | None:
        """The line of `where`, for example ("account", 0, "key", 2, "secret"), or of the closest enclosing table."""
        for length in range(len(where), 0, -1):
            if where[:length] in self._lines:
                return self._lines[where[:length]]
        return None


def parse(name: str, given: object, *, from_text: bool) -> Any:
    """The value of the setting of that name. Raises SettingInvalid; the name must be one of `FIELDS`.

    given: a value of a TOML file, or (from_text) the text of a flag or environment variable.
    """
    kind = FIELDS[name].type
    if kind is Address:
        return _address(name, given)
    if kind is Path:
        text = _text(name, given, "a path")
        if text.startswith("~"):  # files do not expand it, nor do most shells after `--data=`
            raise SettingInvalid(name, f"expected a path without ~, not {given!r}: only a shell expands ~")
        return Path(text)
    if FIELDS[name].listed:
        return _listed(name, given)
    if get_origin(kind) is Literal:
        if given not in get_args(kind):
            raise SettingInvalid(name, f"expected one of {', '.join(get_args(kind))}, not {given!r}")
        return given
    if kind is str:
        return _patterned(name, given)
    try:
        return msgspec.convert(given, _HINTS[name], strict=not from_text)
    except msgspec.ValidationError as error:
        bound = _BOUND.search(str(error))
        allowed = f"{_PLAIN[kind]} {bound[0].removesuffix('.0')}" if bound else _PLAIN[kind]
        raise SettingInvalid(name, f"expected {allowed}, not {given!r}") from None


_PLAIN: Final[dict[Any, str]] = {int: "a whole number", float: "a number of seconds", bool: "true or false"}
_BOUND: Final = re.compile(r"[<>]=? [\d.]+")
"""The bound in msgspec's message about a number out of range."""


_TEXTS: Final = {
    "external_url": (
        _URL,
        "http://HOST[:PORT][/PATH] or https://..., in ASCII, without user, query or fragment, and not .../queue/NAME",
    ),
    "base_domain": (_DOMAIN, "a domain name such as queues.example"),
    "type_attribute": (_ATTRIBUTE, "a name of 1 to 256 of A-Z a-z 0-9 _ - and periods"),
    "type_pointer": (POINTER, "a JSON pointer (RFC 6901) such as /type or /detail/kind"),
    "azure_issuer": (_TOKEN_NAME, "what the claim says, such as https://login.example/tenant/v2.0"),
    "cluster": (_DSN, "a connection string of PostgreSQL such as postgresql://veilmq@db1,db2/veilmq"),
    "cluster_name": (_SERVER_NAME, "a name of 1 to 64 of A-Z a-z 0-9 . _ and -"),
    "archive": (_PLACE, "a folder, or a URL such as s3://bucket/veilmq"),
    "azure_audience": (_TOKEN_NAME, "what the claim says, such as api://queues"),
}


def _text(name: str, given: object, allowed: str) -> str:
    if not isinstance(given, str) or not given or "\0" in given:
        raise SettingInvalid(name, f"expected {allowed}, not {given!r}")
    return given


def _patterned(name: str, given: object) -> str:
    pattern, allowed = _TEXTS[name]
    text = _text(name, given, allowed)
    found = pattern.fullmatch(text)
    if not found:
        raise SettingInvalid(name, f"expected {allowed}")  # the given value may contain a password
    if pattern is _URL:
        try:
            urlsplit(text)
        except ValueError:
            raise SettingInvalid(name, "expected an IPv6 address in the brackets") from None
    port = found.groupdict().get("port")
    if port is not None and int(port) > PORT_MAX:
        raise SettingInvalid(name, f"a port is a number up to {PORT_MAX}, not {port}")
    return text


def _address(name: str, given: object) -> Address:
    found = _ADDRESS.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise SettingInvalid(name, f"expected HOST:PORT such as 127.0.0.1:9324 or [::1]:9324, not {given!r}")
    if int(found[3]) > PORT_MAX:
        raise SettingInvalid(name, f"{given}: a port is a number up to {PORT_MAX}, not {found[3]}")
    host = found[1] or found[2]
    if found[1]:
        try:
            ip_address(host)
        except ValueError:
            raise SettingInvalid(name, f"expected an IPv6 address in the brackets of {given!r}") from None
    try:
        host.encode("idna")
    except UnicodeError:
        raise SettingInvalid(name, f"{given}: no machine can have that name") from None
    return Address(host, int(found[3]))


def _is_network(text: str) -> bool:
    """Whether it has the form ADDRESS/BITS without host bits."""
    try:
        ip_network(text)
    except ValueError:
        return False
    return "/" in text and text.rpartition("/")[2].isdecimal()


_LISTS: Final[dict[str, tuple[Callable[[str], object], str]]] = {
    "push_allow": (_is_network, "networks such as 10.0.0.0/8 or fd00::/8, without bits of a host"),
    "dev_host": (_NETWORK_NAME.fullmatch, "host names without a port, such as elasticmq"),
    "console_hosts": (_DOMAIN.fullmatch, "host names without a port, such as queues.example"),
    "cors_origins": (_ORIGIN.fullmatch, "origins such as https://app.example, or *"),
    "simulate": (is_known, ALLOWED),
}


def _listed(name: str, given: object) -> tuple[str, ...]:
    fits, allowed = _LISTS[name]
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SettingInvalid(name, f"expected {allowed}, not {given!r}")
    listed = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    for part in listed:
        if not fits(part):
            raise SettingInvalid(name, f"expected {allowed}, not {part!r}")
    return tuple(listed)
