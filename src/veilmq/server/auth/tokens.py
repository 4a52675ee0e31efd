"""Checks bearer tokens: by an issuer's public keys; in development mode only their form.

Strategy: the codec checks what a token claims (protocols/azure/auth); this module does the cryptography,
which is an optional extra (joserfc). The key file is read again when a token is refused and the file has changed: a new
key of the issuer needs no restart. A thread reads it, for which requests wait `_WAIT_S` once: a disk may never answer,
and anybody can send a bad token. A removed key is refused after SIGHUP. Source: RFC 7515, 7517, 7519.
"""

import asyncio
import base64
import binascii
import json
import logging
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veilmq.protocols.azure.auth import TokenRefused, Tokens
from veilmq.server.config import FileInvalid
from veilmq.server.config.settings import Settings
from veilmq.server.config.thread_reads import DEADLINE_S, read_in_thread

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
"""Signatures with a private key only: with a shared secret, every verifier could also issue tokens."""
_NONE: Final[frozenset[str]] = frozenset()
_WAIT_S: Final = 0.05
"""How long the request that asks for the keys again waits for them, and all others with it."""

log = logging.getLogger("veilmq.tokens")


class NoTokens:
    """No issuer is configured: every token is refused."""

    tenant: Final = None
    audiences: Final = _NONE

    def claims(self, token: str) -> dict[str, Any]:
        """Raises TokenRefused."""
        raise TokenRefused("this server takes no bearer tokens: no issuer is configured")


class UncheckedTokens:
    """Development mode: all claims are believed, as in emulators."""

    tenant: Final = None
    audiences: frozenset[str]

    def __init__(self, audiences: frozenset[str]) -> None:
        self.audiences = audiences

    def claims(self, token: str) -> dict[str, Any]:
        """The token's claims. Raises TokenRefused if it is malformed."""
        parts = token.split(".")
        if len(parts) != 3:
            raise TokenRefused("the token is malformed")
        try:
            payload = parts[1].encode("ascii")
            claims = json.loads(base64.urlsafe_b64decode(payload + b"=" * (-len(payload) % 4)))
        except (binascii.Error, ValueError, RecursionError):
            raise TokenRefused("the token is malformed") from None
        if not isinstance(claims, dict):
            raise TokenRefused("the token is malformed")
        return claims


class IssuerTokens:
    """Tokens of one issuer, checked by the keys of a file."""

    tenant: Final = None

    def __init__(self, issuer: str, keys: Path, audiences: frozenset[str]) -> None:
        """Raises FileInvalid if the file is not a key set, or the extra is missing."""
        self.audiences = audiences
        self._issuer = issuer
        self._path = keys
        self._logged: str | None = None
        """The failure that was logged last: each refused token tries to read again."""
        self._reading = asyncio.Lock()
        self._newer: Future[tuple[KeySet, int] | None] | None = None
        """Newer keys that a thread looks for."""
        self._keys, self._changed = self._read()

    def claims(self, token: str) -> dict[str, Any]:
        """The claims of a token of the issuer. Raises TokenRefused."""
        from joserfc import jwt
        from joserfc.errors import JoseError

        try:
            found = jwt.decode(token, self._keys, algorithms=list(ALGORITHMS))
        except (JoseError, ValueError, TypeError, RecursionError) as error:
            if self._read_newer():
                return self.claims(token)
            raise TokenRefused(f"Signature validation failed: {error}") from None
        if found.claims.get("iss") != self._issuer:
            raise TokenRefused("Issuer or audience validation failed: another issuer")
        return dict(found.claims)

    async def reload(self, deadline_s: float = DEADLINE_S) -> None:
        """Read the keys again. A bad file, or a read that hangs, changes nothing and is logged. No request waits for
        it: a thread reads the file."""
        async with self._reading:  # a concurrent call waits for this one
            while True:
                before = self._keys
                try:
                    found = await read_in_thread(self._read, self._path, deadline_s)
                except (FileInvalid, OSError) as error:
                    log.error("the issuer's keys stay as they were: %s", error)
                    return
                if self._keys is before:  # else `_read_newer` has taken keys meanwhile, perhaps of a newer file
                    break
        self._take(found)

    def _read_newer(self) -> bool:
        """Read the keys again if their file has changed; True if there are new ones. While the disk does not answer,
        False at once."""
        wait_s = 0.0
        if self._newer is None:
            self._newer, wait_s = self._look(), _WAIT_S
        if wait([self._newer], wait_s).not_done:
            return False
        try:
            found = self._newer.result()
        except (OSError, FileInvalid) as error:
            found = None
            if str(error) != self._logged:
                log.error("the issuer's keys stay as they were: %s", error)
                self._logged = str(error)
        self._newer = None
        if found is None:
            return False
        self._take(found)
        return True

    def _look(self) -> "Future[tuple[KeySet, int] | None]":
        """Look for newer keys on a thread that nobody joins; None: the file has not changed."""
        answer: Future[tuple[KeySet, int] | None] = Future()

        def look() -> None:
            try:
                is_same = self._path.stat().st_mtime_ns == self._changed
                answer.set_result(None if is_same else self._read())
            except BaseException as error:  # noqa: BLE001 raised in the caller
                answer.set_exception(error)

        try:
            threading.Thread(target=look, name="veilmq-read", daemon=True).start()
        except RuntimeError as error:
            answer.set_exception(OSError(f"{self._path} cannot be read: {error}"))
        return answer

    def _take(self, found: tuple["KeySet", int]) -> None:
        self._keys, self._changed = found
        self._logged, self._newer = None, None  # what a thread still reads may be older
        log.info("read the issuer's keys again from %s", self._path)

    def _read(self) -> tuple["KeySet", int]:
        """The keys, and their file's modification time. Raises FileInvalid."""
        try:
            from joserfc.errors import JoseError
            from joserfc.jwk import KeySet
        except ImportError:
            raise FileInvalid(self._path, "to read it install joserfc (VeilMQ's extra `encryption`)") from None
        try:
            changed = self._path.stat().st_mtime_ns
            keys = KeySet.import_key_set(json.loads(self._path.read_bytes()))
        except OSError as error:
            raise FileInvalid(self._path, f"cannot be read: {error.strerror}", errno=error.errno) from None
        except (JoseError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FileInvalid(self._path, f"holds no JSON Web Key Set: {error}") from None
        return keys, changed


def tokens_of(settings: Settings) -> Tokens:
    """What the settings say. Raises FileInvalid."""
    audiences = _NONE if settings.azure_audience is None else frozenset({settings.azure_audience.rstrip("/")})
    if settings.azure_issuer is not None and settings.azure_issuer_keys is not None:
        return IssuerTokens(settings.azure_issuer, settings.azure_issuer_keys, audiences)
    return UncheckedTokens(audiences) if settings.credentials is None else NoTokens()
