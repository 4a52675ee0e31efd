"""Symmetric keys, and their file.

    {"keys": [{"kty": "oct", "use": "enc", "alg": "dir", "enc": "A256GCM", "kid": "5f0c...", "k": "..."}]}

Strategy: a JWK Set (RFC 7517, section 5); `enc` names the key's one algorithm. The order is the rotation: every key
decrypts, the last one encrypts. The file must be private, is replaced as a whole, and errors never show its content.
This module does not need the cipher.
"""

import base64
import binascii
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from veilmq.client.errors import KeyFileInvalid
from veilmq.client.queue import fingerprint
from veilmq.client.shared import checks
from veilmq.model.errors import ParameterInvalid
from veilmq.store.files import durable_write

ALGORITHMS: Final[Mapping[str, int]] = {
    "A256GCM": 32,
    "A192GCM": 24,
    "A128GCM": 16,
    "A256CBC-HS512": 64,
    "A192CBC-HS384": 48,
    "A128CBC-HS256": 32,
}
"""Content encryption (RFC 7518, section 5.1), with the key's size in bytes."""

FILE_BYTES_MAX: Final = 1 << 20
_KID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_KID_BYTES: Final = 8

log = logging.getLogger("veilmq.client")


class Key(msgspec.Struct, frozen=True):
    """One key. Its repr does not show the secret."""

    id: str
    """`kid`: 1 to 64 of A-Z a-z 0-9 . _ -"""
    secret: bytes
    algorithm: str = "A256GCM"

    def __post_init__(self) -> None:
        """Raises ParameterInvalid."""
        values: tuple[Any, Any] = self.id, self.secret
        key_id, secret = values
        if not isinstance(key_id, str) or not _KID.match(key_id):
            raise ParameterInvalid(parameter="id", reason="must be 1 to 64 of A-Z a-z 0-9 . _ -")
        if self.algorithm not in ALGORITHMS:
            raise ParameterInvalid(parameter="algorithm", reason=f"must be one of {', '.join(ALGORITHMS)}")
        wanted = ALGORITHMS[self.algorithm]
        if not isinstance(secret, bytes) or len(secret) != wanted:
            raise ParameterInvalid(parameter="secret", reason=f"{self.algorithm} takes a key of {wanted} bytes")

    def __repr__(self) -> str:
        return f"Key(id={self.id!r}, algorithm={self.algorithm!r})"


class Keyring(Protocol):
    """The cipher's source of keys. Thread-safe."""

    @property
    def newest(self) -> Key:
        """The key that encrypts."""

    def find(self, key_id: str) -> Key | None:
        """The key with this id; None if there is none, also for an id of another form. An error says that no key can be
        had now: then nothing is received."""

    def __iter__(self) -> Iterator[Key]:
        """All keys, oldest first."""


class Keys:
    """Keys, oldest first: all decrypt, the last encrypts. Its repr shows no secret."""

    def __init__(self, *keys: Key) -> None:
        """Raises ParameterInvalid if there is no key, one is none, or two have the same id."""
        if not keys:
            raise ParameterInvalid(parameter="keys", reason="there must be one at least")
        for key in keys:
            if not isinstance(key, Key):
                raise ParameterInvalid(parameter="keys", reason=f"must be Keys(key, ...), not {type(key).__name__}")
        self._keys = {key.id: key for key in keys}
        if len(self._keys) != len(keys):
            raise ParameterInvalid(parameter="keys", reason="two have the same id")
        self._newest = keys[-1]

    @classmethod
    def read(cls, path: Path | str) -> "Keys":
        """Read a file. Raises KeyFileInvalid: unreadable, accessible to others, or not in this module's format."""
        return _read(Path(path))

    @property
    def newest(self) -> Key:
        """The key that encrypts."""
        return self._newest

    def find(self, key_id: str) -> Key | None:
        """The key with this id."""
        return self._keys.get(key_id)

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`: equal for equal keys."""
        return frozenset((key.id, key.algorithm, fingerprint(key.secret)) for key in self)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def __repr__(self) -> str:
        return f"Keys({', '.join(map(repr, self))})"


class KeyFile:
    """The keys of a file, which is read again when it changes, so that a rotation needs no restart.

    One `stat` for each message. If the file becomes invalid, the old keys stay in use, the error is logged, and each
    message tries again: the repair, for example a `chmod`, may leave time and size unchanged.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises KeyFileInvalid."""
        self.path = checks.path(path, "path")
        self._lock = threading.Lock()
        self._stamp = _stamp(self.path)
        self._keys = _read(self.path)
        self._logged: tuple[tuple[int, int, int], str] | None = None
        """The failure logged last: which file, and why."""

    @property
    def newest(self) -> Key:
        """The key that encrypts."""
        return self._now().newest

    def find(self, key_id: str) -> Key | None:
        """The key with this id."""
        return self._now().find(key_id)

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`: equal for the same file."""
        return "key file", self.path.absolute()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._now())

    def __repr__(self) -> str:
        return f"KeyFile({str(self.path)!r})"

    def _now(self) -> Keys:
        stamp = _stamp(self.path)
        if stamp != self._stamp:
            with self._lock:
                if stamp != self._stamp:
                    self._read_again(stamp)
        return self._keys

    def _read_again(self, stamp: tuple[int, int, int]) -> None:
        try:
            self._keys = _read(self.path)
        except KeyFileInvalid as error:
            failure = stamp, str(error)
            if failure != self._logged:
                log.error("the keys stay as they were: %s", error)
                self._logged = failure
        else:
            self._stamp, self._logged = stamp, None


def new_key(algorithm: str = "A256GCM") -> Key:
    """A random key from the operating system. Raises ParameterInvalid for an algorithm that is not in ALGORITHMS."""
    if algorithm not in ALGORITHMS:
        raise ParameterInvalid(parameter="algorithm", reason=f"must be one of {', '.join(ALGORITHMS)}")
    return Key(secrets.token_hex(_KID_BYTES), secrets.token_bytes(ALGORITHMS[algorithm]), algorithm)


def as_json(keys: Keyring) -> str:
    """The text of a key file with these keys."""
    listed = [
        {"kty": "oct", "use": "enc", "alg": "dir", "enc": key.algorithm, "kid": key.id, "k": _encoded(key.secret)}
        for key in keys
    ]
    return json.dumps({"keys": listed}, indent=2) + "\n"


def add_key(path: Path | str, key: Key, *, encrypts: bool = True) -> Keys:
    """Add a key to a file, or create the file with mode 0600. Readers see either the old file or the new one.

    encrypts=False puts it first: it decrypts, and the last key still encrypts. Returns the file's keys. Raises
    KeyFileInvalid, ParameterInvalid (the id exists already).
    """
    path = Path(path)
    try:
        there = list(_read(path)) if path.exists() else []
        keys = Keys(*there, key) if encrypts else Keys(key, *there)
        durable_write(path, as_json(keys).encode(), keeps_owner=True)
    except OSError as error:
        raise KeyFileInvalid(path=str(path), reason=f"cannot be written: {error.strerror}") from None
    return keys


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes with every replacement of the file; zeros while there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> Keys:
    try:
        # Check the open file, so that nobody can swap it between the check and the read.
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise KeyFileInvalid(path=str(path), reason=f"it is open to other users: chmod 600 {path}")
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeyFileInvalid(path=str(path), reason=f"cannot be read: {error.strerror}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise KeyFileInvalid(path=str(path), reason=f"is longer than {FILE_BYTES_MAX} bytes")
    try:
        listed = json.loads(raw)["keys"]
        if type(listed) is not list:
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        # `from None`: the original message may quote the file.
        raise KeyFileInvalid(path=str(path), reason='is not JSON of the form {"keys": [...]}') from None
    try:
        return Keys(*(_key(path, place, entry) for place, entry in enumerate(listed)))
    except ParameterInvalid as error:
        raise KeyFileInvalid(path=str(path), reason=str(error)) from None


def _key(path: Path, place: int, entry: Any) -> Key:
    at = f"keys[{place}]"
    if not isinstance(entry, dict):
        raise KeyFileInvalid(path=str(path), reason=f"{at} is not an object")
    for field, wanted in (("kty", "oct"), ("alg", "dir"), ("use", "enc")):
        if entry.get(field, wanted) != wanted:
            raise KeyFileInvalid(path=str(path), reason=f"{at}.{field} must be {wanted!r}")
    texts = {field: entry.get(field) for field in ("kid", "enc", "k")}
    for field, text in texts.items():
        if not isinstance(text, str):
            raise KeyFileInvalid(path=str(path), reason=f"{at}.{field} must be a string")
    try:
        return Key(str(texts["kid"]), _decoded(str(texts["k"])), str(texts["enc"]))
    except (binascii.Error, ValueError):
        raise KeyFileInvalid(path=str(path), reason=f"{at}.k is not base64url") from None
    except ParameterInvalid as error:
        raise KeyFileInvalid(path=str(path), reason=f"{at}: {error}") from None


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
