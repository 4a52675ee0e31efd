"""Who is signed in: sessions, links that sign in once, and the delay of those who guess.

Strategy: no I/O and no clock; everything has a bound. A secret (of a session or a link) is 32 random bytes that the
browser alone has: here is its hash. A session is void when it was not used for `IDLE_US`, at `AGE_US`, when its key was
taken away or when the server has another token. A browser's own session id is never taken over (fixation).

Before changing it: sessions live in memory, so a restart ends them. `Sessions` is the one place that would have to keep
them in the store.
"""

import asyncio
import secrets
from collections import OrderedDict
from hashlib import blake2b
from typing import Final, NamedTuple

from veilmq.admin.access import Caller
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US, Instant

IDLE_US: Final = HOUR_US
AGE_US: Final = 12 * HOUR_US
SESSIONS_MAX: Final = 1_000
LINK_US: Final = 2 * MINUTE_US
LINKS_MAX: Final = 100
ACTS_MAX: Final = 200
"""Acts that a session remembers."""
FREE_FAILURES: Final = 3
"""So many wrong attempts of an address cost nothing."""
FREE_FAILURES_OF_ALL: Final = 50
DELAY_US_MAX: Final = MINUTE_US
ADDRESSES_MAX: Final = 1_000
_FORGIVEN_US: Final = 15 * MINUTE_US
"""An address without an attempt for so long begins anew."""
_EVERYBODY: Final = "*"


def hashed(secret: str) -> bytes:
    """What is kept of a secret of full entropy."""
    return blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=32, person=b"veilmq console").digest()


class Done(NamedTuple):
    """What an act of a session did: the text to show, and the page to show it on."""

    text: str
    location: str


class Session:
    """One browser that is signed in."""

    def __init__(self, caller: Caller, token_hash: bytes, now: Instant) -> None:
        self.caller = caller
        self.csrf = secrets.token_urlsafe(24)
        self.token_hash = token_hash
        self.opened = self.used = now
        self.acts: OrderedDict[str, Done] = OrderedDict()
        self.turn = asyncio.Lock()
        """Acts of one session follow each other, so that a second click meets what the first one did."""

    def remember(self, once: str, done: Done) -> None:
        """Keep what the act with that key did, so that it is not done again."""
        self.acts[once] = done
        while len(self.acts) > ACTS_MAX:
            self.acts.popitem(last=False)

    def is_over(self, now: Instant) -> bool:
        """Whether it was unused for too long, or is too old."""
        return now - self.used >= IDLE_US or now - self.opened >= AGE_US


class Sessions:
    """All sessions, by the hash of their secrets."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def open(self, caller: Caller, token_hash: bytes, now: Instant) -> tuple[str, Session]:
        """A new session and its secret. Beyond `SESSIONS_MAX` the one that was unused for longest ends."""
        secret = secrets.token_urlsafe(32)
        session = Session(caller, token_hash, now)
        self._sessions[hashed(secret)] = session
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return secret, session

    def find(self, secret: str, token_hash: bytes, now: Instant, *, is_used: bool) -> Session | None:
        """The session of a secret; None if there is none any more. is_used: by a person, and not by a page that looks
        for news."""
        name = hashed(secret)
        session = self._sessions.get(name)
        if session is None:
            return None
        if session.is_over(now) or session.token_hash != token_hash:
            del self._sessions[name]
            return None
        if is_used:
            session.used = now
            self._sessions.move_to_end(name)
        return session

    def close(self, secret: str) -> None:
        """End a session."""
        self._sessions.pop(hashed(secret), None)

    def __len__(self) -> int:
        return len(self._sessions)


class Links:
    """Codes that sign in once, soon."""

    def __init__(self) -> None:
        self._links: OrderedDict[bytes, tuple[Caller, Instant]] = OrderedDict()

    def make(self, caller: Caller, now: Instant) -> str:
        """A code for the caller. Of more than `LINKS_MAX` the oldest is void."""
        code = secrets.token_urlsafe(32)
        self._links[hashed(code)] = (caller, now)
        while len(self._links) > LINKS_MAX:
            self._links.popitem(last=False)
        return code

    def take(self, code: str, now: Instant) -> Caller | None:
        """The caller of a code, which is void from now on."""
        caller, made = self._links.pop(hashed(code), (None, now))
        return caller if now - made < LINK_US else None


class Attempts:
    """Wrong attempts, by address and of all: each beyond the free ones doubles the wait until the next is looked at."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[int, Instant]] = OrderedDict()

    def wait_us(self, address: str, now: Instant) -> int:
        """How long this address must wait; 0: its attempt is looked at."""
        return max(
            self._left_us(address, FREE_FAILURES, DELAY_US_MAX, now),
            self._left_us(_EVERYBODY, FREE_FAILURES_OF_ALL, SECOND_US, now),
        )

    def _left_us(self, name: str, free: int, delay_us_max: int, now: Instant) -> int:
        count, last = self._failures.get(name, (0, now))
        if count < free or now - last >= _FORGIVEN_US:
            return 0
        delay_us = min(SECOND_US << min(count - free, 16), delay_us_max)
        return max(0, last + delay_us - now)

    def failed(self, address: str, now: Instant) -> None:
        """Count a wrong attempt."""
        for name in (address, _EVERYBODY):
            count, last = self._failures.pop(name, (0, now))
            self._failures[name] = (1 if now - last >= _FORGIVEN_US else count + 1, now)
        while len(self._failures) > ADDRESSES_MAX:
            oldest = next(each for each in self._failures if each != _EVERYBODY)
            del self._failures[oldest]

    def succeeded(self, address: str) -> None:
        """Forget the wrong attempts of an address."""
        self._failures.pop(address, None)
