"""Who may send frames: both sides name themselves, then both prove that they know the cluster's secret.

Strategy: without I/O. Each side sends a `Hello` with a nonce. A proof is the HMAC-SHA256 of its role and of both hellos
as they were sent, so that it holds for this connection alone, for these names, and in one direction. The caller proves
itself first. Everything that can be said without the secret (another version, another cluster, oneself) is said before
it. Whoever refuses says why in one sentence, and closes.

Before changing it: the handshake says who is at the other end, but does not protect what follows; where others can
change what is on the wire, use TLS. A hello is short, so that a stranger costs a few hundred bytes and one HMAC.
"""

import hmac
import secrets
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from veilmq.cluster.peer import VERSION, VERSION_OLDEST, Identity
from veilmq.cluster.peer.frames import ENCODER, MALFORMED

HELLO_BYTES_MAX: Final = 1_024
SECRET_BYTES_MIN: Final = 16
_MAGIC: Final = "veilmq-peer"
_NONCE_BYTES: Final = 32
_TEXT_MAX: Final = 300
_REASONS: Final = frozenset(
    {"no peer", "version", "cluster", "itself", "not owner", "other server", "secret", "slow", "full"}
)
CALLS: Final = "calls"


class Role(StrEnum):
    """The two ends of a connection."""

    CALLER = "caller"
    OWNER = "owner"


class Refusal(Exception):
    """The connection is refused. `reason` is a short name for counts, the text says what to do."""

    def __init__(self, reason: str, text: str, *, by_peer: bool = False) -> None:
        """by_peer: the peer refused, so it need not be sent the reason."""
        super().__init__(text)
        self.reason, self.by_peer = reason, by_peer


class _Hello(msgspec.Struct, array_like=True):
    magic: str
    newest: int
    oldest: int
    """Versions of the frames that the server speaks."""
    cluster: str
    server: str
    nonce: bytes
    purpose: str = CALLS
    """With any other purpose no frames follow the handshake, but whatever the port serves for that purpose."""


class _Proof(msgspec.Struct, array_like=True, tag=1):
    digest: bytes


class _Refused(msgspec.Struct, array_like=True, tag=2):
    reason: str
    text: str


_HELLO: Final = msgspec.msgpack.Decoder(_Hello)
_ANYTHING: Final = msgspec.msgpack.Decoder()
_ANSWER: Final = msgspec.msgpack.Decoder(_Proof | _Refused)


def refused(refusal: Refusal) -> bytes:
    """The refusal as the peer gets it."""
    return ENCODER.encode(_Refused(refusal.reason, str(refusal)))


class Handshake:
    """One side of one handshake.

    done: the peer has proved itself. peer, purpose: its name and what it wants. version: of the frames to send it.
    """

    def __init__(
        self,
        role: Role,
        identity: Identity,
        secret: bytes,
        expects: str | None = None,
        wants: str = CALLS,
        serves: Callable[[str], bool] = lambda purpose: True,
    ):
        """expects: the server that the caller means to reach. serves: whether this server accepts connections of that
        purpose. If not, it refuses the peer in the handshake, so the peer knows that nothing was read. Raises
        ValueError for a secret that is too short or a name that is too long."""
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"the peer secret must have at least {SECRET_BYTES_MIN} bytes")
        self._role, self._identity, self._secret, self._expects = role, identity, secret, expects
        self._serves = serves
        names, nonce = (identity.cluster, identity.server), secrets.token_bytes(_NONCE_BYTES)
        self.hello: Final = ENCODER.encode(_Hello(_MAGIC, VERSION, VERSION_OLDEST, *names, nonce, wants))
        if len(self.hello) > HELLO_BYTES_MAX:
            raise ValueError(f"the name of this server is too long: {identity.server}")
        self.done = False
        self.peer, self.purpose, self.version = "", CALLS, 0
        self._peers_hello = b""

    def receive(self, frame: bytes) -> bytes | None:
        """Take the peer's next frame; returns the frame to send, if there is one. Raises Refusal."""
        if not self._peers_hello:
            self._take_hello(frame)
            return self._proof(self._role) if self._role is Role.CALLER else None
        other = Role.OWNER if self._role is Role.CALLER else Role.CALLER
        self._take_answer(frame, other)
        return self._proof(self._role) if self._role is Role.OWNER else None

    def _take_hello(self, frame: bytes) -> None:
        try:
            answer = _ANSWER.decode(frame)
        except MALFORMED:
            pass
        else:
            raise _refusal_of(answer)  # the port is closing, or has no room for strangers
        try:
            given = _ANYTHING.decode(frame)
        except MALFORMED:
            given = None
        if not isinstance(given, list) or given[:1] != [_MAGIC]:
            raise Refusal("no peer", "it does not speak the peer protocol: check the address")
        newest, oldest = (*given[1:3], None, None)[:2]
        if not isinstance(newest, int) or not isinstance(oldest, int):
            raise Refusal("no peer", "its hello is malformed: it names no versions")
        if oldest > VERSION or newest < VERSION_OLDEST:
            both = f"its peer protocol has versions {oldest} to {newest}, this server's {VERSION_OLDEST} to {VERSION}"
            raise Refusal("version", f"{both}: upgrade the older one of the two, release by release")
        try:
            hello = _HELLO.decode(frame)
        except MALFORMED as error:
            raise Refusal("no peer", f"its hello is malformed: {error}") from error
        self.peer, self.purpose, self.version = hello.server, hello.purpose, min(newest, VERSION)
        self._peers_hello = frame
        mine = self._identity
        if hello.cluster != mine.cluster:
            both = f"it is of cluster {hello.cluster!r}, this server of {mine.cluster!r}"
            raise Refusal("cluster", f"two clusters: {both}; check --cluster and --advertise of both")
        if hello.server == mine.server:
            text = f"the address leads to this server itself, or two servers are called {mine.server}"
            raise Refusal("itself", f"{text}; check --advertise of both")
        if self._expects is not None and hello.server != self._expects:
            text = f"the address of server {self._expects} leads to {hello.server!r}"
            raise Refusal("other server", f"{text}; check --advertise of both")

    def _take_answer(self, frame: bytes, other: Role) -> None:
        try:
            answer = _ANSWER.decode(frame)
        except MALFORMED as error:
            raise Refusal("no peer", f"its proof is malformed: {error}") from error
        if not isinstance(answer, _Proof):
            raise _refusal_of(answer)
        if not hmac.compare_digest(answer.digest, self._digest(other)):
            text = "it has another secret: start both again, so that they read that of their cluster"
            raise Refusal("secret", text)
        if not self._serves(self.purpose):
            raise Refusal("not owner", "this server does not own the queues")
        self.done = True

    def _proof(self, role: Role) -> bytes:
        return ENCODER.encode(_Proof(self._digest(role)))

    def _digest(self, role: Role) -> bytes:
        hellos = [self.hello, self._peers_hello]
        if self._role is Role.OWNER:
            hellos.reverse()
        return hmac.digest(self._secret, ENCODER.encode([role.value, *hellos]), "sha256")


def _refusal_of(answer: _Proof | _Refused) -> Refusal:
    """What the peer says of this server."""
    if isinstance(answer, _Refused):
        # It has not proved itself: its text is cut, and a reason that is none of ours is counted as "other".
        reason = answer.reason if answer.reason in _REASONS else "other"
        return Refusal(reason, f"it refused this server and said: {answer.text[:_TEXT_MAX]!r}", by_peer=True)
    return Refusal("no peer", "it sent a proof before its hello")
